/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Draws a link bench with gnuplot.
 *
 * It knows columns, not what they were measured with. Invariant: a picture is drawn only if it has
 * at least two points.
 */

#include "bench_plot.h"

#include "bench_link.h"
#include "gnuplot.h"

#include <stdlib.h>
#include <string.h>

#define METHODS_MAX 8u

typedef struct plot {
    const cli_table *table;
    cli_gnuplot gnuplot;
} plot;

static const char *text_at(const plot *p, uint32_t row, enum link_column column)
{
    return cli_table_at(p->table, row, column)->text;
}

static const cli_cell *cell_at(const plot *p, uint32_t row, enum link_column column)
{
    return cli_table_at(p->table, row, column);
}

static bool is_of(const plot *p, uint32_t row, const char *suite)
{
    return strcmp(text_at(p, row, LINK_SUITE), suite) == 0 && cell_at(p, row, LINK_MEDIAN)->is_set;
}

/* Methods of a suite, in the order of the table. */
static uint32_t methods_of(const plot *p, const char *suite, const char *names[METHODS_MAX])
{
    uint32_t count = 0;
    for (uint32_t row = 0; row < p->table->row_count; row++) {
        if (!is_of(p, row, suite))
            continue;
        uint32_t i = 0;
        while (i < count && strcmp(names[i], text_at(p, row, LINK_METHOD)) != 0)
            i++;
        if (i == count && count < METHODS_MAX)
            names[count++] = text_at(p, row, LINK_METHOD);
    }
    return count;
}

/* The largest number of a column that any row of a suite has, and the least from `from` on. */
static uint64_t most_of(const plot *p, const char *suite, enum link_column column)
{
    uint64_t most = 0;
    for (uint32_t row = 0; row < p->table->row_count; row++)
        if (is_of(p, row, suite) && cell_at(p, row, column)->integer > most)
            most = cell_at(p, row, column)->integer;
    return most;
}

static uint64_t least_of(const plot *p, const char *suite, enum link_column column, uint64_t from)
{
    uint64_t least = most_of(p, suite, column);
    for (uint32_t row = 0; row < p->table->row_count; row++) {
        const uint64_t at = cell_at(p, row, column)->integer;
        if (is_of(p, row, suite) && at >= from && at < least)
            least = at;
    }
    return least;
}

/* ---- methods beside each other, and the floor ---- */

/* Rows of the suite `methods` with one value of `fixed`: a line per method. */
typedef struct curves {
    const char *name, *settings;
    enum link_column fixed, x, y;
    uint64_t at;
    double x_scale;
} curves;

/* What one contiguous copy makes of the row. */
static double floor_at(const plot *p, uint32_t row, enum link_column y)
{
    const double us = cell_at(p, row, LINK_FLOOR)->real;
    return y == LINK_RATE ? (double)cell_at(p, row, LINK_BYTES)->integer / us * 1e-3 : us;
}

static uint32_t put_curve(plot *p, const curves *c, const char *method, bool is_floor)
{
    uint32_t points = 0;
    for (uint32_t row = 0; row < p->table->row_count; row++)
        if (is_of(p, row, "methods") && strcmp(text_at(p, row, LINK_METHOD), method) == 0 &&
            cell_at(p, row, c->fixed)->integer == c->at) {
            fprintf(p->gnuplot.script, "%g %g\n",
                    (double)cell_at(p, row, c->x)->integer * c->x_scale,
                    is_floor ? floor_at(p, row, c->y) : cell_at(p, row, c->y)->real);
            points++;
        }
    fputs("EOD\n", p->gnuplot.script);
    return points;
}

static void plot_curves(plot *p, const curves *c)
{
    const char *names[METHODS_MAX];
    const uint32_t methods = methods_of(p, "methods", names);
    char body[1024] = "plot ";
    uint32_t points = 0;
    if (methods == 0)
        return;
    for (uint32_t i = 0; i < methods; i++) {
        fprintf(p->gnuplot.script, "$%s%u << EOD\n", c->name, i);
        points += put_curve(p, c, names[i], false);
        const size_t used = strlen(body);
        snprintf(body + used, sizeof body - used,
                 "$%s%u using 1:2 with linespoints lw 2 pt 7 title '%s', ", c->name, i, names[i]);
    }
    fprintf(p->gnuplot.script, "$%sfloor << EOD\n", c->name);
    put_curve(p, c, names[0], true);
    const size_t used = strlen(body);
    snprintf(body + used, sizeof body - used,
             "$%sfloor using 1:2 with lines lw 2 dt 2 lc rgb 'black' title 'one contiguous copy'",
             c->name);
    if (points >= 2)
        cli_gnuplot_draw(&p->gnuplot, c->name, c->settings, body);
}

#define LIKE_A_STEP 2048u /* bytes of a page of 4 tokens, 128 channels, 16 bits */

static void plot_methods(plot *p)
{
    char settings[2][512];
    const uint64_t pages = most_of(p, "methods", LINK_PAGES);
    const uint64_t bytes = least_of(p, "methods", LINK_PAGE_BYTES, LIKE_A_STEP);
    snprintf(settings[0], sizeof settings[0],
             "set title 'Scattered pages to the device, %llu pages per fetch'\n"
             "set xlabel 'page, KiB'\nset ylabel 'GB/s'\nset logscale x 2\nset yrange [0:*]\n"
             "set grid\nset key top left\n",
             (unsigned long long)pages);
    snprintf(settings[1], sizeof settings[1],
             "set title 'Scattered pages to the device, %llu bytes each'\n"
             "set xlabel 'pages'\nset ylabel 'us'\nset logscale xy\nset grid\nset key top left\n",
             (unsigned long long)bytes);
    plot_curves(p, &(curves){"bandwidth", settings[0], LINK_PAGES, LINK_PAGE_BYTES, LINK_RATE,
                             pages, 1.0 / 1024});
    plot_curves(
        p, &(curves){"time", settings[1], LINK_PAGE_BYTES, LINK_PAGES, LINK_MEDIAN, bytes, 1.0});
}

/* ---- heat map ---- */

/* One cell of the map: which column and row it is in. */
typedef struct map_axes {
    const char *suite;
    const char *title, *x, *y;
    enum link_column across, down;
} map_axes;

static void axis_label(const plot *p, uint32_t row, enum link_column column, char text[40])
{
    const cli_cell *cell = cell_at(p, row, column);
    if (p->table->columns[column].kind == CLI_CELL_TEXT)
        snprintf(text, 40, "%s", cell->text);
    else if (column == LINK_PAGE_BYTES || column == LINK_CHUNK)
        snprintf(text, 40, cell->integer < 1024 ? "%llu B" : "%llu KiB",
                 (unsigned long long)(cell->integer < 1024 ? cell->integer : cell->integer >> 10));
    else
        snprintf(text, 40, "%llu", (unsigned long long)cell->integer);
}

#define LABELS_MAX 32u

static uint32_t label_index(char labels[LABELS_MAX][40], uint32_t *count, const char *text)
{
    for (uint32_t i = 0; i < *count; i++)
        if (strcmp(labels[i], text) == 0)
            return i;
    if (*count == LABELS_MAX)
        return LABELS_MAX - 1;
    snprintf(labels[*count], 40, "%s", text);
    return (*count)++;
}

static void put_tics(char *to, size_t size, char axis, char labels[LABELS_MAX][40], uint32_t count)
{
    size_t used = strlen(to);
    used += (size_t)snprintf(to + used, size - used, "set %ctics (", axis);
    for (uint32_t i = 0; i < count && used < size; i++)
        used += (size_t)snprintf(to + used, size - used, "%s'%s' %u", i ? ", " : "", labels[i], i);
    if (used < size)
        snprintf(to + used, size - used, ")\n");
}

/* Rows of one method; where several rows fall into a cell the last one is shown. */
static void plot_map(plot *p, const map_axes *m, const char *method, const char *name)
{
    char across[LABELS_MAX][40], down[LABELS_MAX][40], text[40], settings[4096];
    double cells[LABELS_MAX][LABELS_MAX] = {{0.0}}; /* [y][x]; 0 = no row */
    uint32_t columns = 0, lines = 0;
    for (uint32_t row = 0; row < p->table->row_count; row++) {
        if (!is_of(p, row, m->suite) || !cell_at(p, row, LINK_RATE)->is_set)
            continue;
        if (method && strcmp(text_at(p, row, LINK_METHOD), method) != 0)
            continue;
        axis_label(p, row, m->across, text);
        const uint32_t x = label_index(across, &columns, text);
        axis_label(p, row, m->down, text);
        const uint32_t y = label_index(down, &lines, text);
        cells[y][x] = cell_at(p, row, LINK_RATE)->real;
    }
    fputs("$map << EOD\n", p->gnuplot.script);
    for (uint32_t y = 0; y < lines; y++)
        for (uint32_t x = 0; x < columns; x++)
            if (cells[y][x] > 0.0)
                fprintf(p->gnuplot.script, "%u %u %g\n", x, y, cells[y][x]);
    fputs("EOD\n", p->gnuplot.script);
    if (columns * lines < 2)
        return;
    snprintf(settings, sizeof settings,
             "set title '%s%s%s, GB/s'\nset xlabel '%s'\nset ylabel '%s'\nset cbrange [0:*]\n"
             "set palette defined (0 '#f7fbff', 1 '#9ecae1', 2 '#4292c6')\nunset key\n"
             "set xrange [-0.5:%u.5]\nset yrange [-0.5:%u.5]\n",
             m->title, method ? ", " : "", method ? method : "", m->x, m->y, columns - 1,
             lines - 1);
    put_tics(settings, sizeof settings, 'x', across, columns);
    put_tics(settings, sizeof settings, 'y', down, lines);
    cli_gnuplot_draw(
        &p->gnuplot, name, settings,
        "set style fill solid 1.0 noborder\n"
        "plot $map using 1:2:(0.48):(0.48):3 with boxxyerror linecolor palette, $map using "
        "1:2:(sprintf('%.1f', $3)) with labels");
}

static void plot_maps(plot *p)
{
    static const map_axes numa = {.suite = "numa",
                                  .title = "NUMA node of the pool by method",
                                  .x = "method",
                                  .y = "node",
                                  .across = LINK_METHOD,
                                  .down = LINK_NODE};
    static const map_axes staging = {.suite = "staging",
                                     .title = "staging ring",
                                     .x = "chunk",
                                     .y = "depth",
                                     .across = LINK_CHUNK,
                                     .down = LINK_DEPTH};
    static const map_axes sizes = {.suite = "methods",
                                   .title = "page size by pages of a fetch",
                                   .x = "page",
                                   .y = "pages",
                                   .across = LINK_PAGE_BYTES,
                                   .down = LINK_PAGES};
    const char *names[METHODS_MAX];
    const uint32_t methods = methods_of(p, "methods", names);
    for (uint32_t i = 0; i < methods; i++) {
        char name[48];
        snprintf(name, sizeof name, "map-%s", names[i]);
        plot_map(p, &sizes, names[i], name);
    }
    plot_map(p, &numa, NULL, "map-numa");
    plot_map(p, &staging, NULL, "map-staging");
}

/* ---- latency percentiles ---- */

static bool is_same_fetch(const plot *p, uint32_t a, uint32_t b)
{
    return is_of(p, a, "cadence") && is_of(p, b, "cadence") &&
           cell_at(p, a, LINK_PAGES)->integer == cell_at(p, b, LINK_PAGES)->integer &&
           cell_at(p, a, LINK_PAGE_BYTES)->integer == cell_at(p, b, LINK_PAGE_BYTES)->integer;
}

/* Fetches like that of `first`, so that methods stand side by side; none if an earlier row is. */
static uint32_t put_fetches(plot *p, uint32_t first)
{
    static const enum link_column parts[] = {LINK_FLOOR, LINK_FETCH_P50, LINK_FETCH_P95,
                                             LINK_FETCH_P99};
    char bytes[40];
    uint32_t bars = 0;
    for (uint32_t row = 0; row < first; row++)
        if (is_same_fetch(p, row, first))
            return 0;
    axis_label(p, first, LINK_PAGE_BYTES, bytes);
    for (uint32_t row = first; row < p->table->row_count; row++) {
        if (!is_same_fetch(p, row, first))
            continue;
        fprintf(p->gnuplot.script, "\"%s %llu x %s\"", text_at(p, row, LINK_METHOD),
                (unsigned long long)cell_at(p, row, LINK_PAGES)->integer, bytes);
        for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
            fprintf(p->gnuplot.script, " %g", cell_at(p, row, parts[i])->real);
        fputs("\n", p->gnuplot.script);
        bars++;
    }
    return bars;
}

static void plot_latency(plot *p)
{
    uint32_t bars = 0;
    fputs("$latency << EOD\n", p->gnuplot.script);
    for (uint32_t row = 0; row < p->table->row_count; row++)
        bars += put_fetches(p, row);
    fputs("EOD\n", p->gnuplot.script);
    if (bars < 2)
        return;
    cli_gnuplot_draw(
        &p->gnuplot, "latency",
        "set title 'One fetch of a decode step, by method and pages'\nset ylabel 'us'\n"
        "set style data histogram\nset style histogram clustered gap 1\n"
        "set style fill solid 0.9\nset grid y\nset yrange [0:*]\nset xtics rotate by -35\n"
        "set bmargin 7\nset key top left\n",
        "plot $latency using 2:xtic(1) title 'one contiguous copy' lc rgb 'grey', '' using 3 title "
        "'p50', '' using 4 title 'p95', '' using 5 title 'p99'");
}

/* ---- all ---- */

bool cli_bench_plot(const cli_table *table, const char *folder)
{
    plot p = {.table = table};
    if (!cli_gnuplot_open(&p.gnuplot, folder))
        return false;
    plot_methods(&p);
    plot_maps(&p);
    plot_latency(&p);
    return cli_gnuplot_close(&p.gnuplot, "choose the suites methods, cadence, numa or staging");
}
