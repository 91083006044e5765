/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Draws a decode bench with gnuplot: every case beside its floor, so that methods stand side by
 * side.
 *
 * It knows columns, not what they were measured with. Invariant: a picture is drawn only if it has
 * at least two cases.
 */

#include "bench_decode.h"

#include "gnuplot.h"

#include <string.h>

static void put_case(FILE *script, const cli_cell *row)
{
    fprintf(script, "\"%s%s%s", row[DECODE_SELECT].text, row[DECODE_METHOD].is_set ? ", " : "",
            row[DECODE_METHOD].is_set ? row[DECODE_METHOD].text : "");
    fprintf(script, "%s\\n%lluK x %llu", row[DECODE_SPECULATE].is_set ? ", ahead" : "",
            (unsigned long long)row[DECODE_CONTEXT].integer >> 10,
            (unsigned long long)row[DECODE_BATCH].integer);
    if (row[DECODE_BUDGET].is_set)
        fprintf(script, ", budget %llu", (unsigned long long)row[DECODE_BUDGET].integer);
    fprintf(script, "\" %g %g %g\n", row[DECODE_FLOOR].real, row[DECODE_MEDIAN].real,
            row[DECODE_P95].real);
}

bool decode_plot(const cli_table *table, const char *folder)
{
    cli_gnuplot gnuplot;
    uint32_t cases = 0;
    if (!cli_gnuplot_open(&gnuplot, folder))
        return false;
    fputs("$cases << EOD\n", gnuplot.script);
    for (uint32_t i = 0; i < table->row_count; i++) {
        const cli_cell *row = cli_table_at(table, i, 0);
        if (!row[DECODE_MEDIAN].is_set)
            continue;
        put_case(gnuplot.script, row);
        cases++;
    }
    fputs("EOD\n", gnuplot.script);
    if (cases >= 2)
        cli_gnuplot_draw(
            &gnuplot, "layer",
            "set title 'One layer of a decode step'\nset ylabel 'us'\nset style data histogram\n"
            "set style histogram clustered gap 1\nset style fill solid 0.9\nset grid y\n"
            "set logscale y\nset xtics rotate by -35\nset bmargin 7\nset key top right\n",
            "plot $cases using 2:xtic(1) title 'floor' lc rgb 'grey', '' using 3 title 'median', "
            "'' using 4 title 'p95'");
    return cli_gnuplot_close(&gnuplot, "measure two cases, such as --method mapped,gather");
}
