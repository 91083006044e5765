/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Draws a disk bench with gnuplot: the rate by depth, and by extent.
 *
 * It knows columns, not what they were measured with. Invariant: a picture is drawn only if it has
 * at least two points.
 */

#include "bench_disk.h"

#include "gnuplot.h"

#include <string.h>

#define LINES_MAX   16u
#define LABEL_BYTES 128u

/* A picture of random reads: a line for each value of `line`, over `across`. */
typedef struct picture {
    const char *name, *title, *x;
    enum disk_column across;
    double scale; /* of `across` */
    bool (*is_of)(const cli_cell *row, const cli_cell *first);
    void (*label)(const cli_cell *row, char text[LABEL_BYTES]);
} picture;

static const cli_cell *row_of(const cli_table *table, uint32_t row)
{
    return cli_table_at(table, row, 0);
}

static bool is_random(const cli_cell *row)
{
    return strcmp(row[DISK_WHAT].text, "random") == 0 && row[DISK_RATE].is_set;
}

/* By depth: io_uring past the cache, a line for every extent. */
static bool is_same_extent(const cli_cell *row, const cli_cell *first)
{
    return strcmp(row[DISK_ENGINE].text, "io_uring") == 0 &&
           strcmp(row[DISK_MODE].text, "direct") == 0 &&
           row[DISK_EXTENT_BYTES].integer == first[DISK_EXTENT_BYTES].integer;
}

static void label_extent(const cli_cell *row, char text[LABEL_BYTES])
{
    snprintf(text, LABEL_BYTES, "%llu KiB",
             (unsigned long long)(row[DISK_EXTENT_BYTES].integer >> 10));
}

/* By extent: a line for every engine, mode and depth. */
static bool is_same_way(const cli_cell *row, const cli_cell *first)
{
    return strcmp(row[DISK_ENGINE].text, first[DISK_ENGINE].text) == 0 &&
           strcmp(row[DISK_MODE].text, first[DISK_MODE].text) == 0 &&
           row[DISK_DEPTH].integer == first[DISK_DEPTH].integer;
}

static void label_way(const cli_cell *row, char text[LABEL_BYTES])
{
    snprintf(text, LABEL_BYTES, "%s, %s, depth %llu", row[DISK_ENGINE].text, row[DISK_MODE].text,
             (unsigned long long)row[DISK_DEPTH].integer);
}

static const picture pictures[] = {
    {"depth", "Random extents by io_uring, past the page cache", "requests at a time", DISK_DEPTH,
     1, is_same_extent, label_extent},
    {"extent", "Random extents, by engine and depth", "extent, KiB", DISK_EXTENT_BYTES, 1.0 / 1024,
     is_same_way, label_way},
};

/* Points of the line that begins with row `first`, which no earlier row is on. @return how many */
static uint32_t put_line(const cli_table *t, FILE *script, const picture *p, uint32_t first,
                         uint32_t number)
{
    uint32_t points = 0;
    fprintf(script, "$line%u << EOD\n", number);
    for (uint32_t i = first; i < t->row_count; i++) {
        const cli_cell *row = row_of(t, i);
        if (!is_random(row) || !p->is_of(row, row_of(t, first)))
            continue;
        fprintf(script, "%g %g\n", (double)row[p->across].integer * p->scale, row[DISK_RATE].real);
        points++;
    }
    fputs("EOD\n", script);
    return points;
}

static bool begins_line(const cli_table *t, const picture *p, uint32_t row)
{
    const cli_cell *at = row_of(t, row);
    if (!is_random(at) || !p->is_of(at, at))
        return false;
    for (uint32_t i = 0; i < row; i++)
        if (is_random(row_of(t, i)) && p->is_of(row_of(t, i), at))
            return false;
    return true;
}

static void draw(cli_gnuplot *gnuplot, const cli_table *t, const picture *p)
{
    char settings[640], body[4096] = "plot ", label[LABEL_BYTES];
    uint32_t lines = 0, points = 0;
    for (uint32_t i = 0; i < t->row_count && lines < LINES_MAX; i++) {
        if (!begins_line(t, p, i))
            continue;
        points += put_line(t, gnuplot->script, p, i, lines);
        const cli_cell *row = row_of(t, i);
        p->label(row, label);
        const size_t used = strlen(body);
        snprintf(body + used, sizeof body - used,
                 "$line%u using 1:2 with linespoints lw %u dt %u pt %u title '%s', ", lines,
                 strcmp(row[DISK_ENGINE].text, "preadv") == 0 ? 4 : 2,
                 strcmp(row[DISK_MODE].text, "buffered") == 0 ? 2 : 1, 4 + lines, label);
        lines++;
    }
    double peak = 0.0;
    for (uint32_t i = 0; i < t->row_count; i++)
        if (strcmp(row_of(t, i)[DISK_WHAT].text, "sequential") == 0 &&
            row_of(t, i)[DISK_RATE].real > peak)
            peak = row_of(t, i)[DISK_RATE].real;
    const size_t used = strlen(body);
    snprintf(body + used, sizeof body - used,
             "%g with lines lw 2 dt 2 lc rgb 'black' title 'in order'", peak);
    snprintf(settings, sizeof settings,
             "set termoption noenhanced\nset title '%s'\nset xlabel '%s'\nset ylabel 'GB/s'\n"
             "set logscale x 2\nset yrange [0:*]\nset grid\nset key outside right\n",
             p->title, p->x);
    if (points >= 2)
        cli_gnuplot_draw(gnuplot, p->name, settings, body);
}

bool disk_plot(const cli_table *table, const char *folder)
{
    cli_gnuplot gnuplot;
    if (!cli_gnuplot_open(&gnuplot, folder))
        return false;
    for (size_t i = 0; i < sizeof pictures / sizeof *pictures; i++)
        draw(&gnuplot, table, &pictures[i]);
    return cli_gnuplot_close(&gnuplot, "measure random extents of several sizes or depths");
}
