# SPDX-License-Identifier: Apache-2.0
#
# Draws what `kvferry bench disk -o csv >disk.csv` measured: gnuplot -c disk.gnuplot disk.csv writes
# disk-depth.svg, a line per extent where io_uring was measured, and disk-extent.svg, a line per engine,
# mode and depth.
csv = ARG1
out(name) = csv[:strlen(csv) - 4] . "-" . name . ".svg"
set terminal svg size 900,560 dynamic background rgb 'white' font 'sans,14' noenhanced
set datafile separator comma
set datafile columnheaders
set datafile missing NaN

# Lines in the order of the file, as lists of words, and the better rate in order. A row without a rate is
# of an engine that was not there.
extents = ""
ways = ""
peak = 0
add(list, w) = strstrt(list . " ", " " . w . " ") ? list : list . " " . w
way(what) = what eq "random" ? strcol("engine") . "," . strcol("mode") . "," . strcol("depth") : ""
is_past(way) = strstrt(way, "io_uring,direct,") == 1
look(what, rate) = !(rate > 0) ? 0 : what eq "random" ? (ways = add(ways, way(what)), \
        extents = is_past(way(what)) ? add(extents, strcol("extent_bytes")) : extents, 0) : \
    what eq "sequential" && rate > peak ? (peak = rate) : 0
stats csv using (look(strcol("what"), column("gb_per_s"))) nooutput
if (words(ways) == 0) { exit error "no random extents in " . csv }

set ylabel "GB/s"
set logscale x 2
set yrange [0:*]
set grid
set key outside right
if (words(extents)) {
    set output out("depth")
    set title "Random extents by io_uring, past the page cache"
    set xlabel "requests at a time"
    plot for [e in extents] csv \
        using (is_past(way(strcol("what"))) && strcol("extent_bytes") eq e ? column("depth") : NaN):"gb_per_s" \
        with linespoints lw 2 pt 7 title sprintf("%d KiB", e / 1024), peak with lines lw 2 dt 2 lc rgb "black" title "in order"
}
set output out("extent")
set key title "engine,mode,depth"
set title "Random extents, by engine and depth"
set xlabel "extent, KiB"
plot for [i = 1:words(ways)] csv \
    using (way(strcol("what")) eq word(ways, i) ? column("extent_bytes") / 1024 : NaN):"gb_per_s" \
    with linespoints lw (strstrt(word(ways, i), "preadv") ? 4 : 2) dt 1 + (strstrt(word(ways, i), "buffered") > 0) \
    pt (3 + i) title word(ways, i), peak with lines lw 2 dt 2 lc rgb "black" title "in order"
