# SPDX-License-Identifier: Apache-2.0
#
# Draws what long_answer measured: gnuplot -c long_answer.gnuplot OUT.svg NAME CSV [NAME CSV ...] writes processor
# time per token, against that of the second part, and the share of chosen pages that were missed.
set terminal svg size 900,620 dynamic background rgb 'white' font 'sans,14' noenhanced
set output ARG1
set datafile separator comma
set datafile columnheaders
array args[8] = [ARG2, ARG3, ARG4, ARG5, ARG6, ARG7, ARG8, ARG9]
runs = (ARGC - 1) / 2
name(i) = args[2 * i - 1]
csv(i) = args[2 * i]
array second[4]
do for [i = 1:runs] {
    stats csv(i) index 1 using (column("cpu_ms")) every ::1::1 nooutput
    second[i] = STATS_mean
}
set grid
set key outside right
set xrange [0:*]
set lmargin 10
set multiplot layout 2, 1
set ylabel "of the second part"
set title "Processor time of a token"
set yrange [0:*]
plot for [i = 1:runs] csv(i) index 1 using "token":(column("cpu_ms") / second[i]) with linespoints lw 2 pt 7 ps 0.5 \
    title name(i), 1 with lines dt 2 lc rgb "black" notitle
set title "Pages that were chosen and had to be brought"
set xlabel "tokens generated"
set ylabel "%"
plot for [i = 1:runs] csv(i) index 0 using "token":(100 * column("misses") / (column("hits") + column("misses"))) \
    with linespoints lw 2 pt 7 ps 0.5 title name(i)
unset multiplot
