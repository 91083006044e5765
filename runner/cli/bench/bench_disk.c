/* SPDX-License-Identifier: Apache-2.0 */

/*
 * `kvferry bench disk`: random extents of a file by engine, size and depth, against the sequential
 * peak of the same file and against one thread that reads one after the other.
 *
 * It runs passes and tells; the measuring is the library's (kvferry/disk.h). Invariant: every ratio
 * is of two passes of the same round, so that a disk that others use too changes both.
 */

#include "bench.h"

#include "common/percentile.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "common/text.h"

/* ---- output ---- */

#define COLUMNS(X)                                                                                 \
    X(DISK_WHAT, "what", "what", TEXT, 0)                                                          \
    X(DISK_ENGINE, "engine", "engine", TEXT, 0)                                                    \
    X(DISK_MODE, "mode", "mode", TEXT, 0)                                                          \
    X(DISK_EXTENT_BYTES, "extent_bytes", "extent B", INTEGER, 0)                                   \
    X(DISK_DEPTH, "depth", "depth", INTEGER, 0)                                                    \
    X(DISK_EXTENTS, "extents", NULL, INTEGER, 0)                                                   \
    X(DISK_RATE, "gb_per_s", "GB/s", REAL, 3)                                                      \
    X(DISK_RATE_P10, "gb_per_s_p10", "p10", REAL, 3)                                               \
    X(DISK_RATE_P90, "gb_per_s_p90", "p90", REAL, 3)                                               \
    X(DISK_OF_PEAK, "of_peak", "of peak", REAL, 2)                                                 \
    X(DISK_OF_PEAK_P10, "of_peak_p10", "p10", REAL, 2)                                             \
    X(DISK_OF_PEAK_P90, "of_peak_p90", "p90", REAL, 2)                                             \
    X(DISK_TIMES_PLAIN, "times_preadv", "x preadv", REAL, 2)                                       \
    X(DISK_TIMES_PLAIN_P10, "times_preadv_p10", "p10", REAL, 2)                                    \
    X(DISK_TIMES_PLAIN_P90, "times_preadv_p90", "p90", REAL, 2)                                    \
    X(DISK_US, "us_per_extent", "us/extent", REAL, 1)                                              \
    X(DISK_REQUEST_P50, "request_p50_us", "request p50", REAL, 1)                                  \
    X(DISK_REQUEST_P95, "request_p95_us", "p95", REAL, 1)                                          \
    X(DISK_REQUEST_P99, "request_p99_us", "p99", REAL, 1)                                          \
    X(DISK_PREDICTED, "predicted_us", NULL, REAL, 1)                                               \
    X(DISK_INTERCEPT, "fit_intercept_us", "fit a us", REAL, 1)                                     \
    X(DISK_SLOPE_RATE, "fit_gb_per_s", "fit GB/s", REAL, 2)                                        \
    X(DISK_R2, "fit_r_squared", "R2", REAL, 3)                                                     \
    X(DISK_KEPT, "registered", NULL, TEXT, 0)                                                      \
    X(DISK_VERIFIED, "verified_bytes", NULL, INTEGER, 0)                                           \
    X(DISK_STATUS, "status", "", TEXT, 0)

enum disk_column { COLUMNS(CLI_COLUMN_NUMBER) DISK_COLUMN_COUNT };

static const cli_column columns[] = {COLUMNS(CLI_COLUMN_ROW)};

/* Peaks are rows of their own. */
static const bench_lines lines = {DISK_EXTENT_BYTES,
                                  DISK_US,
                                  DISK_PREDICTED,
                                  {DISK_WHAT, DISK_ENGINE, DISK_MODE, DISK_DEPTH, DISK_DEPTH}};

/* ---- cases ---- */

#define NONE  UINT32_MAX
#define PEAKS 2u

typedef struct disk_row {
    kvf_disk_case c;
    uint32_t plain; /* the row of one thread that this one is compared with; NONE */
    uint32_t rounds;
    uint32_t kept;
    uint64_t verified_bytes;
    double rate[DISK_ROUNDS_MAX]; /* GB/s */
    double p50[DISK_ROUNDS_MAX], p95[DISK_ROUNDS_MAX], p99[DISK_ROUNDS_MAX];
    const char *status; /* NULL = fine */
} disk_row;

typedef struct disk_run {
    bench_sweep sweep;
    disk_options options;
    kvf_disk *disk;
    disk_row *rows; /* [row_count], the first PEAKS in order: what the disk can do */
    uint32_t row_count;
    uint32_t lacks; /* a bit per engine and mode that this machine has not */
} disk_run;

static void set_extents(const disk_run *run, kvf_disk_case *c)
{
    const uint64_t bytes = run->options.pass_bytes < run->options.file_bytes
                               ? run->options.pass_bytes
                               : run->options.file_bytes;
    const uint64_t extents = bytes / c->extent_bytes;
    c->extents = extents == 0 ? 1 : extents > 1 << 20 ? 1 << 20 : (uint32_t)extents;
}

/* Extents in order, several at a time, past the cache: the best of a round is its peak. */
static void add_peaks(disk_run *run)
{
    static const struct {
        size_t extent_bytes;
        uint32_t depth;
    } peaks[PEAKS] = {{1 << 20, 16}, {1 << 17, 64}};
    for (uint32_t i = 0; i < PEAKS; i++) {
        disk_row *row = &run->rows[run->row_count++];
        *row = (disk_row){.c = run->options.base, .plain = NONE};
        row->c.what = KVF_DISK_SEQUENTIAL;
        row->c.engine = KVF_DISK_URING;
        row->c.direct = 1;
        row->c.extent_bytes = peaks[i].extent_bytes;
        row->c.depth = peaks[i].depth;
        set_extents(run, &row->c);
    }
}

static void add_case(disk_run *run, const kvf_disk_case *c)
{
    disk_row *row = &run->rows[run->row_count];
    *row = (disk_row){.c = *c, .plain = NONE};
    if (c->engine == KVF_DISK_PREADV)
        row->c.depth = 1;
    set_extents(run, &row->c);
    if (row->c.depth > row->c.extents)
        return; /* a pass has too few for it */
    for (uint32_t i = PEAKS; i < run->row_count; i++) {
        const kvf_disk_case *o = &run->rows[i].c;
        if (o->engine == row->c.engine && o->what == row->c.what && o->direct == row->c.direct &&
            o->extent_bytes == row->c.extent_bytes && o->depth == row->c.depth)
            return; /* one thread has one depth */
    }
    run->row_count++;
}

static bool list_cases(disk_run *run)
{
    cli_axis axes[CLI_AXES_MAX];
    const uint32_t count = bench_axes(&run->sweep.command, disk_swept, NULL, axes);
    const uint64_t cases = cli_axes_product(axes, count);
    run->rows = calloc(cases + PEAKS, sizeof *run->rows);
    if (!run->rows) {
        fputs("kvferry: no memory for the results\n", stderr);
        return false;
    }
    add_peaks(run);
    for (uint64_t n = 0; n < cases; n++) {
        disk_options o = run->options;
        cli_axes_set(axes, count, n, &o);
        add_case(run, &o.base);
    }
    for (uint32_t i = PEAKS; i < run->row_count; i++) {
        disk_row *row = &run->rows[i];
        for (uint32_t k = PEAKS; k < run->row_count; k++) {
            const kvf_disk_case *o = &run->rows[k].c;
            if (o->engine == KVF_DISK_PREADV && row->c.engine != o->engine &&
                o->what == row->c.what && o->direct == row->c.direct &&
                o->extent_bytes == row->c.extent_bytes)
                row->plain = k;
        }
    }
    return true;
}

/* ---- passes ---- */

static bool run_pass(disk_run *run, disk_row *row, uint32_t round)
{
    kvf_disk_result r;
    kvf_disk_case c = row->c;
    c.seed += round;
    if (row->status)
        return true;
    (void)nanosleep(&(struct timespec){.tv_sec = run->options.rest_ms / 1000,
                                       .tv_nsec = run->options.rest_ms % 1000 * 1000000L},
                    NULL);
    const kvf_status status = kvf_disk_measure(run->disk, &c, &r);
    if (status == KVF_OK) {
        row->rate[round] = (double)r.bytes / (double)r.ns;
        row->p50[round] = 1e-3 * (double)r.request.median_ns;
        row->p95[round] = 1e-3 * (double)r.request.p95_ns;
        row->p99[round] = 1e-3 * (double)r.request.p99_ns;
        row->kept = r.kept;
        row->verified_bytes += r.verified_bytes;
        row->rounds = round + 1;
        return true;
    }
    /* A lack of the machine is said once. */
    const uint32_t kind = 1u << (2 * (uint32_t)c.engine + (c.direct != 0));
    if (status != KVF_UNSUPPORTED || !(run->lacks & kind))
        fprintf(stderr, "\nkvferry: %s\n", kvf_runtime_error(run->sweep.runtime)->text);
    run->lacks |= status == KVF_UNSUPPORTED ? kind : 0;
    /* A lack of the machine is an answer, also of the peak, which then does without. */
    if (status == KVF_UNSUPPORTED && row < run->rows + PEAKS) {
        if (row->c.engine == KVF_DISK_URING &&
            !strstr(kvf_runtime_error(run->sweep.runtime)->text, "direct"))
            row->c.engine = KVF_DISK_PREADV;
        else
            row->c.direct = 0;
        return run_pass(run, row, round);
    }
    row->status = status == KVF_UNSUPPORTED ? "not here" : kvf_status_name(status);
    run->sweep.failed = run->sweep.failed || status != KVF_UNSUPPORTED;
    return status == KVF_UNSUPPORTED;
}

static bool run_case(void *user, uint64_t n)
{
    disk_run *run = user;
    return run_pass(run, &run->rows[n % run->row_count], (uint32_t)(n / run->row_count));
}

/* @return rounds that have begun */
static uint32_t run_rounds(disk_run *run)
{
    const uint64_t passes = (uint64_t)run->row_count * run->options.rounds;
    bench_begin(&run->sweep, passes, "passes");
    bench_walk(&run->sweep, passes, run_case, run);
    bench_end(&run->sweep);
    return (uint32_t)((run->sweep.done + run->row_count - 1) / run->row_count);
}

/* ---- figures ---- */

static void set_median(cli_cell *cell, const double *values, uint32_t count)
{
    double sorted[DISK_ROUNDS_MAX];
    memcpy(sorted, values, count * sizeof *sorted);
    kvf_sort(sorted, count);
    cli_cell_real(cell, kvf_percentile(sorted, count, 50));
}

static double peak_of(const disk_run *run, uint32_t round)
{
    double best = 0.0;
    for (uint32_t i = 0; i < PEAKS; i++)
        best = run->rows[i].rate[round] > best ? run->rows[i].rate[round] : best;
    return best;
}

/* To the row of one thread, or else the peak, in the rounds that both have. */
static void set_ratio(const disk_run *run, cli_cell *row, enum disk_column first,
                      const disk_row *over, const disk_row *plain)
{
    double ratios[DISK_ROUNDS_MAX];
    uint32_t count = 0;
    for (uint32_t i = 0; i < over->rounds; i++) {
        const double under = plain ? plain->rate[i] : peak_of(run, i);
        if (under > 0.0)
            ratios[count++] = over->rate[i] / under;
    }
    if (count)
        cli_cells_spread(&row[first], ratios, count);
}

static void set_names(cli_cell *row, const kvf_disk_case *c)
{
    char text[32];
    cli_cell_text(&row[DISK_WHAT], cli_show(kvf_disk_setting, "what", c, text));
    cli_cell_text(&row[DISK_ENGINE], cli_show(kvf_disk_setting, "engine", c, text));
    cli_cell_text(&row[DISK_MODE], c->direct ? "direct" : "buffered");
    cli_cell_integer(&row[DISK_EXTENT_BYTES], c->extent_bytes);
    cli_cell_integer(&row[DISK_DEPTH], c->depth);
    cli_cell_integer(&row[DISK_EXTENTS], c->extents);
}

static bool add_figures(disk_run *run, const disk_row *r)
{
    static const char *const kept[] = {"", "memory", "file", "memory, file"};
    double rates[DISK_ROUNDS_MAX];
    cli_cell *row = bench_row(&run->sweep);
    if (!row)
        return false;
    set_names(row, &r->c);
    if (r->status)
        cli_cell_text(&row[DISK_STATUS], r->status);
    if (r->rounds == 0)
        return true;
    run->sweep.measured += r >= run->rows + PEAKS;
    memcpy(rates, r->rate, r->rounds * sizeof *rates);
    cli_cells_spread(&row[DISK_RATE], rates, r->rounds);
    cli_cell_real(&row[DISK_US], 1e-3 * (double)r->c.extent_bytes / row[DISK_RATE].real);
    if (r->c.what != KVF_DISK_WRITE)
        set_ratio(run, row, DISK_OF_PEAK, r, NULL);
    if (r->plain != NONE)
        set_ratio(run, row, DISK_TIMES_PLAIN, r, &run->rows[r->plain]);
    set_median(&row[DISK_REQUEST_P50], r->p50, r->rounds);
    set_median(&row[DISK_REQUEST_P95], r->p95, r->rounds);
    set_median(&row[DISK_REQUEST_P99], r->p99, r->rounds);
    cli_cell_text(&row[DISK_KEPT], kept[r->kept % 4]);
    cli_cell_integer(&row[DISK_VERIFIED], r->verified_bytes);
    return true;
}

/* ---- all ---- */

static bool open_run(disk_run *run)
{
    const disk_options *o = &run->options;
    bench_sweep *s = &run->sweep;
    return bench_open(s, &o->results, &o->runtime) &&
           bench_opened(s, kvf_disk_open(s->runtime, o->folder, o->file_bytes, &run->disk),
                        "--disk: ") &&
           list_cases(run);
}

static bool write_results(disk_run *run, uint32_t rounds)
{
    double peaks[DISK_ROUNDS_MAX], peak = 0.0;
    for (uint32_t i = 0; i < rounds; i++)
        peaks[i] = peak_of(run, i);
    kvf_sort(peaks, rounds);
    peak = rounds ? kvf_percentile(peaks, rounds, 50) : 0.0;
    const cli_fact facts[] = {{"file_bytes", NULL, (double)run->options.file_bytes},
                              {"pass_bytes", NULL, (double)run->options.pass_bytes},
                              {"rounds", NULL, rounds},
                              {"rest_ms", NULL, run->options.rest_ms},
                              {"seed", NULL, (double)run->options.base.seed},
                              {"peak_gb_per_s", NULL, peak},
                              {NULL, NULL, 0.0}};
    kvf_print(stderr, "file of %llu MiB, %u rounds: peak %.3f GB/s, the best of a round in order\n",
              (unsigned long long)(run->options.file_bytes >> 20), rounds, peak);
    return bench_write(&run->sweep, facts);
}

static bool run_all(disk_run *run)
{
    const uint32_t rounds = run_rounds(run);
    for (uint32_t i = 0; i < run->row_count; i++)
        if (!add_figures(run, &run->rows[i]))
            return false;
    bench_fit(&run->sweep.table, &lines, PEAKS, NULL);
    run->sweep.failed = !write_results(run, rounds) || run->sweep.failed;
    return true;
}

int cli_bench_disk_main(int argc, char **argv)
{
    disk_run run = {.sweep.table = {.columns = columns, .column_count = DISK_COLUMN_COUNT}};
    const int parsed = disk_options_parse(argc, argv, &run.sweep.command, &run.options);
    if (parsed >= 0)
        return parsed;
    const bool is_done = open_run(&run) && run_all(&run);
    free(run.rows);
    kvf_disk_close(run.disk);
    return bench_close(&run.sweep, is_done);
}
