# SPDX-License-Identifier: Apache-2.0
#
# Draws what `kvferry bench decode -o csv >decode.csv` measured: gnuplot -c decode.gnuplot decode.csv writes
# decode.svg, every case beside its floor.
csv = ARG1
set terminal svg size 900,560 dynamic background rgb 'white' font 'sans,14' noenhanced
set output csv[:strlen(csv) - 4] . ".svg"
set datafile separator comma
set datafile columnheaders
set title "One layer of a decode step"
set ylabel "us"
set style data histogram
set style histogram clustered gap 1
set style fill solid 0.9
set grid y
set logscale y
set xtics rotate by -35
set bmargin 7
also(format, text) = text eq "" ? "" : sprintf(format, text)
plot csv using "floor_us":xtic(strcol("select") . also(", %s", strcol("method")) \
    . "\n" . sprintf("%dK x ", column("context_tokens") / 1024) \
    . strcol("batch") . also(", budget %s", strcol("budget_tokens"))) title "floor" lc rgb "grey", \
    csv using "layer_us" title "median", csv using "layer_p95_us" title "p95"
