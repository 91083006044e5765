# SPDX-License-Identifier: Apache-2.0
#
# Draws what `kvferry bench link -o csv >link.csv` measured: gnuplot -c link.gnuplot link.csv writes
# link-bandwidth.svg, link-time.svg and link-map-METHOD.svg of the suite methods, and link-latency.svg of the
# suite cadence.
csv = ARG1
out(name) = csv[:strlen(csv) - 4] . "-" . name . ".svg"
bytes_text(n) = n < 1024 ? sprintf("%d B", n) : sprintf("%d KiB", n / 1024)
set terminal svg size 900,560 dynamic background rgb 'white' font 'sans,14' noenhanced
set datafile separator comma
set datafile columnheaders
set datafile missing NaN

# The methods in order, the most pages of a fetch, and the least page like those of a decode step.
methods = ""
pages = 0
page_bytes = 1e18
bars = 0
note(m, p, b) = (methods = strstrt(methods . " ", " " . m . " ") ? methods : methods . " " . m, \
    pages = p > pages ? p : pages, page_bytes = b >= 2048 && b < page_bytes ? b : page_bytes, 0)
look(suite) = suite eq "methods" ? note(strcol("method"), column("pages"), column("page_bytes")) : \
    suite eq "cadence" ? (bars = bars + 1) : 0
stats csv using (look(strcol("suite"))) nooutput
if (words(methods) + bars == 0) { exit error "no rows of the suites methods or cadence in " . csv }

is_of(m) = strcol("suite") eq "methods" && strcol("method") eq m
first = word(methods, 1)
set grid
set key top left
if (words(methods)) {
    set output out("bandwidth")
    set title sprintf("Scattered pages to the device, %d pages per fetch", pages)
    set xlabel "page, KiB"
    set ylabel "GB/s"
    set logscale x 2
    set yrange [0:*]
    x(m) = is_of(m) && column("pages") == pages ? column("page_bytes") / 1024 : NaN
    plot for [m in methods] csv using (x(m)):(column("gb_per_s")) with linespoints lw 2 pt 7 title m, \
        csv using (x(first)):(column("bytes") / column("floor_us") / 1e3) with lines lw 2 dt 2 lc rgb "black" \
        title "one contiguous copy"

    set output out("time")
    set title sprintf("Scattered pages to the device, %d bytes each", page_bytes)
    set xlabel "pages"
    set ylabel "us"
    set logscale xy 10
    set yrange [*:*]
    x(m) = is_of(m) && column("page_bytes") == page_bytes ? column("pages") : NaN
    plot for [m in methods] csv using (x(m)):(column("median_us")) with linespoints lw 2 pt 7 title m, \
        csv using (x(first)):(column("floor_us")) with lines lw 2 dt 2 lc rgb "black" title "one contiguous copy"
}

# A box for every page size and number of pages; a factor of two is one box.
unset logscale
unset key
unset grid
set style fill solid 1.0 noborder
set offsets 0.5, 0.5, 0.5, 0.5
set cbrange [0:*]
set palette defined (0 "#f7fbff", 1 "#9ecae1", 2 "#4292c6")
set xlabel "page"
set ylabel "pages"
do for [m in methods] {
    set table $map separator comma
    plot csv using (log(column("page_bytes")) / log(2)):(log(column("pages")) / log(2)):(column("gb_per_s")) \
        :(bytes_text(column("page_bytes"))):(strcol("pages")) with table if (is_of(m))
    unset table
    set datafile nocolumnheaders
    set output out("map-" . m)
    set title m . ", GB/s"
    plot $map using 1:2:(0.48):(0.48):3:xtic(4):ytic(5) with boxxyerror lc palette, \
        $map using 1:2:(sprintf("%.1f", $3)) with labels
    set datafile columnheaders
}

if (bars) {
    set table $fetches separator comma
    plot csv using (strcol("method") . " " . strcol("pages") . " x " . bytes_text(column("page_bytes"))) \
        :(column("floor_us")):(column("fetch_p50_us")):(column("fetch_p95_us")):(column("fetch_p99_us")) \
        with table if (strcol("suite") eq "cadence")
    unset table
    set datafile nocolumnheaders
    set output out("latency")
    set title "One fetch of a decode step, by method and pages"
    unset xlabel
    set ylabel "us"
    set offsets
    set style data histogram
    set style histogram clustered gap 1
    set style fill solid 0.9
    set grid y
    set yrange [0:*]
    set xtics rotate by -35
    set bmargin 7
    set key top left
    plot $fetches using 2:xtic(1) title "one contiguous copy" lc rgb "grey", '' using 3 title "p50", \
        '' using 4 title "p95", '' using 5 title "p99"
}
