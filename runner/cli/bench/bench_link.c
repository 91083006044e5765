/* SPDX-License-Identifier: Apache-2.0 */

/*
 * `kvferry bench link`: what link, NUMA layout and host memory do for scattered pages.
 *
 * It runs the cases of the chosen suites and tells; the measuring is the library's
 * (kvferry/link.h). Invariant: a case that the device cannot do is a row that says so, and a case
 * whose bytes were wrong fails the command.
 */

#include "bench.h"
#include "commands.h"
#include "common/clock.h"
#include "common/percentile.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common/text.h"

#define PEAK_BYTES    ((uint64_t)16 << 20)
#define PEAK_EVERY_MS 200.0 /* or more, as long as a case takes */

/* ---- output ---- */

#define COLUMNS(X)                                                                                 \
    X(LINK_SUITE, "suite", "suite", TEXT, 0)                                                       \
    X(LINK_WHAT, "what", "what", TEXT, 0)                                                          \
    X(LINK_METHOD, "method", "method", TEXT, 0)                                                    \
    X(LINK_PATTERN, "pattern", "pattern", TEXT, 0)                                                 \
    X(LINK_SLOTS, "slots", "slots", TEXT, 0)                                                       \
    X(LINK_PAGE_BYTES, "page_bytes", "page B", INTEGER, 0)                                         \
    X(LINK_PAGES, "pages", "pages", INTEGER, 0)                                                    \
    X(LINK_BYTES, "bytes", NULL, INTEGER, 0)                                                       \
    X(LINK_NODE, "numa_node", "node", TEXT, 0)                                                     \
    X(LINK_TIER, "tier", "tier", TEXT, 0)                                                          \
    X(LINK_CHUNK, "chunk_bytes", "chunk B", INTEGER, 0)                                            \
    X(LINK_DEPTH, "depth", "depth", INTEGER, 0)                                                    \
    X(LINK_WORKERS, "workers", "workers", INTEGER, 0)                                              \
    X(LINK_BLOCKS, "blocks", "blocks", INTEGER, 0)                                                 \
    X(LINK_WRITEBACK, "writeback_percent", "wb %", INTEGER, 0)                                     \
    X(LINK_MEDIAN, "median_us", "median us", REAL, 1)                                              \
    X(LINK_P95, "p95_us", "p95", REAL, 1)                                                          \
    X(LINK_P99, "p99_us", "p99", REAL, 1)                                                          \
    X(LINK_MIN, "min_us", NULL, REAL, 1)                                                           \
    X(LINK_MAX, "max_us", NULL, REAL, 1)                                                           \
    X(LINK_SD, "stddev_us", "sd", REAL, 1)                                                         \
    X(LINK_PEAK_RATE, "peak_gb_per_s", NULL, REAL, 2)                                              \
    X(LINK_FLOOR, "floor_us", "floor us", REAL, 1)                                                 \
    X(LINK_RATE, "gb_per_s", "GB/s", REAL, 2)                                                      \
    X(LINK_STREAM_RATE, "on_stream_gb_per_s", "on stream", REAL, 2)                                \
    X(LINK_OF_PEAK, "of_peak", "of peak", REAL, 2)                                                 \
    X(LINK_TIMES_BASE, "times_base", "x base", REAL, 2)                                            \
    X(LINK_GATHER_US, "gather_us", "gather us", REAL, 1)                                           \
    X(LINK_COPIES, "copies", NULL, INTEGER, 0)                                                     \
    X(LINK_FETCH_P50, "fetch_p50_us", "fetch p50", REAL, 1)                                        \
    X(LINK_FETCH_P95, "fetch_p95_us", "fetch p95", REAL, 1)                                        \
    X(LINK_FETCH_P99, "fetch_p99_us", "fetch p99", REAL, 1)                                        \
    X(LINK_SLOWDOWN, "slowdown", "slow-down", REAL, 3)                                             \
    X(LINK_TOUCH, "touch_s_per_gib", "touch s/GiB", REAL, 4)                                       \
    X(LINK_REGISTER, "register_s_per_gib", "register", REAL, 4)                                    \
    X(LINK_UNREGISTER, "unregister_s_per_gib", "unregister", REAL, 4)                              \
    X(LINK_PREDICTED, "predicted_us", "fit us", REAL, 1)                                           \
    X(LINK_INTERCEPT, "fit_intercept_us", "fit a us", REAL, 1)                                     \
    X(LINK_SLOPE_RATE, "fit_gb_per_s", "fit GB/s", REAL, 2)                                        \
    X(LINK_R2, "fit_r_squared", "R2", REAL, 3)                                                     \
    X(LINK_VERIFIED, "verified_bytes", NULL, INTEGER, 0)                                           \
    X(LINK_STATUS, "status", "", TEXT, 0)

enum link_column { COLUMNS(CLI_COLUMN_NUMBER) LINK_COLUMN_COUNT };

static const cli_column columns[] = {COLUMNS(CLI_COLUMN_ROW)};

static const bench_lines lines = {
    LINK_BYTES,
    LINK_MEDIAN,
    LINK_PREDICTED,
    {LINK_SUITE, LINK_METHOD, LINK_PATTERN, LINK_SLOTS, LINK_PAGE_BYTES}};

static double micro(uint64_t ns)
{
    return (double)ns * 1e-3;
}

static void set_names(cli_cell *row, const char *suite, const kvf_link_case *c)
{
    char node[16], text[32];
    snprintf(node, sizeof node, "%d", c->numa_node);
    cli_cell_text(&row[LINK_SUITE], suite);
    cli_cell_text(&row[LINK_WHAT], cli_show(kvf_link_setting, "what", c, text));
    const bool has_method =
        c->what == KVF_LINK_BOTH || c->what == KVF_LINK_CADENCE || c->what == KVF_LINK_TAX;
    if (has_method) {
        cli_cell_text(&row[LINK_METHOD], cli_show(kvf_link_setting, "method", c, text));
        cli_cell_text(&row[LINK_PATTERN], cli_show(kvf_link_setting, "pattern", c, text));
    }
    if (has_method && c->slots_in_order)
        cli_cell_text(&row[LINK_SLOTS], "in order");
    if (c->numa_node >= 0)
        cli_cell_text(&row[LINK_NODE], node);
    if (c->what == KVF_LINK_PIN)
        return;
    cli_cell_integer(&row[LINK_PAGE_BYTES], c->page_bytes);
    cli_cell_integer(&row[LINK_PAGES], c->pages);
    if (c->writeback_percent)
        cli_cell_integer(&row[LINK_WRITEBACK], c->writeback_percent);
}

static void set_times(cli_cell *row, const kvf_link_case *c, const kvf_link_result *r)
{
    cli_cell_real(&row[LINK_MEDIAN], micro(r->total.median_ns));
    cli_cell_real(&row[LINK_P95], micro(r->total.p95_ns));
    cli_cell_real(&row[LINK_P99], micro(r->total.p99_ns));
    cli_cell_real(&row[LINK_MIN], micro(r->total.min_ns));
    cli_cell_real(&row[LINK_MAX], micro(r->total.max_ns));
    if (c->what != KVF_LINK_TAX && c->what != KVF_LINK_CADENCE && c->what != KVF_LINK_PIN)
        cli_cell_real(&row[LINK_RATE], (double)r->bytes / (double)r->total.median_ns);
    if (r->copying.median_ns)
        cli_cell_real(&row[LINK_STREAM_RATE], (double)r->bytes / (double)r->copying.median_ns);
    if (r->gather.median_ns)
        cli_cell_real(&row[LINK_GATHER_US], micro(r->gather.median_ns));
    if (r->fetch.median_ns) {
        cli_cell_real(&row[LINK_FETCH_P50], micro(r->fetch.median_ns));
        cli_cell_real(&row[LINK_FETCH_P95], micro(r->fetch.p95_ns));
        cli_cell_real(&row[LINK_FETCH_P99], micro(r->fetch.p99_ns));
    }
    if (r->alone.median_ns)
        cli_cell_real(&row[LINK_SLOWDOWN], (double)r->total.median_ns / (double)r->alone.median_ns);
    if (c->what == KVF_LINK_PIN) {
        cli_cell_real(&row[LINK_TOUCH], r->touch_s_per_gib);
        cli_cell_real(&row[LINK_REGISTER], r->register_s_per_gib);
        cli_cell_real(&row[LINK_UNREGISTER], r->unregister_s_per_gib);
    }
}

static void set_result(cli_cell *row, const kvf_link_case *c, const kvf_link_result *r)
{
    set_times(row, c, r);
    cli_cell_integer(&row[LINK_BYTES], r->bytes);
    cli_cell_text(&row[LINK_TIER], r->tier);
    if (r->chunk_bytes)
        cli_cell_integer(&row[LINK_CHUNK], r->chunk_bytes);
    if (r->depth)
        cli_cell_integer(&row[LINK_DEPTH], r->depth);
    if (r->workers)
        cli_cell_integer(&row[LINK_WORKERS], r->workers);
    if (r->blocks)
        cli_cell_integer(&row[LINK_BLOCKS], r->blocks);
    if (r->copies)
        cli_cell_integer(&row[LINK_COPIES], r->copies);
    cli_cell_integer(&row[LINK_VERIFIED], r->verified_bytes);
}

/* Standard deviation of the total. */
static void set_spread(cli_cell *row, const uint64_t *ns, uint32_t count)
{
    double mean = 0.0, squares = 0.0;
    for (uint32_t i = 0; i < count; i++)
        mean += (double)ns[i] / count;
    for (uint32_t i = 0; i < count; i++)
        squares += ((double)ns[i] - mean) * ((double)ns[i] - mean);
    if (count > 1)
        cli_cell_real(&row[LINK_SD], sqrt(squares / (count - 1)) * 1e-3);
}

/* Against the peak of the time. */
static void set_ratio_to_peak(cli_cell *row, double peak)
{
    cli_cell_real(&row[LINK_PEAK_RATE], peak);
    cli_cell_real(&row[LINK_FLOOR], (double)row[LINK_PAGE_BYTES].integer *
                                        (double)row[LINK_PAGES].integer / peak * 1e-3);
    if (row[LINK_RATE].is_set)
        cli_cell_real(&row[LINK_OF_PEAK], row[LINK_RATE].real / peak);
}

/* ---- running ---- */

typedef struct link_run {
    bench_sweep sweep;
    link_options options;
    kvf_link *link;
    cli_output samples;
    char nodes[LINK_NODES_BYTES];
    uint32_t suite; /* that is run, its axes and its first row */
    cli_axis axes[CLI_AXES_MAX];
    uint32_t axis_count, first;
    uint64_t *samples_ns; /* [repetitions] */
    double *peaks;        /* [cases + 1] GB/s, by turns with the cases */
    uint32_t *turns; /* [cases] peaks that were there before a row; 0 = it is no share of one */
    uint32_t peak_count;
    double peaked_ms; /* when the last peak was measured */
} link_run;

static void write_samples(link_run *run, const kvf_link_case *c, uint64_t number)
{
    const char *suite = link_suite_name(run->suite);
    char line[160];
    for (uint32_t i = 0; i < c->repetitions; i++) {
        const int n =
            snprintf(line, sizeof line, "%s,%llu,%u,%llu\n", suite, (unsigned long long)number, i,
                     (unsigned long long)run->samples_ns[i]);
        cli_output_write(&run->samples, line, (size_t)n);
    }
}

/* The reference of `of_peak`: the best of a few contiguous copies of 16 MiB, because others
 * interrupt some. */
static bool measure_peak(link_run *run)
{
    kvf_link_case c = run->options.base;
    kvf_link_result result = {0};
    c.what = KVF_LINK_PEAK;
    c.page_bytes = c.pool_bytes < 65536 ? 64 : 65536;
    c.pages = c.pool_bytes < c.page_bytes ? 1
              : c.pool_bytes < PEAK_BYTES ? (uint32_t)(c.pool_bytes / c.page_bytes)
                                          : (uint32_t)(PEAK_BYTES / c.page_bytes);
    c.repetitions = 8;
    c.warmup = 1;
    if (kvf_link_measure(run->link, &c, NULL, &result) != KVF_OK) {
        cli_complain(&run->sweep.command, kvf_runtime_error(run->sweep.runtime)->text);
        run->sweep.failed = true;
        return false;
    }
    const uint64_t ns = result.copying.min_ns ? result.copying.min_ns : result.total.min_ns;
    run->peaks[run->peak_count++] = (double)result.bytes / (double)ns;
    run->peaked_ms = kvf_now_ms();
    return true;
}

/* Each row against what the link could do before and after it; last a peak was measured. */
static void set_peaks(link_run *run)
{
    cli_table *t = &run->sweep.table;
    for (uint32_t i = 0; i < t->row_count; i++) {
        const uint32_t before = run->turns[i];
        if (before > 0 && before < run->peak_count)
            set_ratio_to_peak(cli_table_at(t, i, 0),
                              (run->peaks[before - 1] + run->peaks[before]) / 2);
    }
}

static bool is_share_of_peak(kvf_link_what what)
{
    return what == KVF_LINK_BOTH || what == KVF_LINK_COPY || what == KVF_LINK_PEAK ||
           what == KVF_LINK_CADENCE;
}

/* A lack of the machine is an answer; anything else is a failure. */
static void set_failure(link_run *run, cli_cell *row, const kvf_link_case *c, kvf_status status)
{
    const bool is_lack = status == KVF_UNSUPPORTED ||
                         (c->huge_pages == KVF_HUGE_PAGES_REQUIRED && status == KVF_OUT_OF_MEMORY);
    cli_cell_text(&row[LINK_STATUS], is_lack ? "not here" : kvf_status_name(status));
    fprintf(stderr, "\nof suite %s: ", link_suite_name(run->suite));
    cli_complain(&run->sweep.command, kvf_runtime_error(run->sweep.runtime)->text);
    run->sweep.failed = run->sweep.failed || !is_lack;
}

static bool measure_case(link_run *run, const kvf_link_case *c)
{
    kvf_link_result result = {0};
    if (kvf_now_ms() - run->peaked_ms > PEAK_EVERY_MS && !measure_peak(run))
        return false;
    const kvf_status status = kvf_link_measure(run->link, c, run->samples_ns, &result);
    cli_cell *row = bench_row(&run->sweep);
    const uint32_t number = run->sweep.table.row_count - 1;
    if (!row)
        return false;
    set_names(row, link_suite_name(run->suite), c);
    if (status != KVF_OK) {
        set_failure(run, row, c, status);
        return true;
    }
    set_result(row, c, &result);
    write_samples(run, c, number);
    set_spread(row, run->samples_ns, c->repetitions);
    run->turns[number] = is_share_of_peak(c->what) ? run->peak_count : 0;
    run->sweep.measured++;
    return true;
}

/* Rows of the suite: each against its baseline, where both were measured. */
static void set_ratios(const link_run *run)
{
    const cli_table *t = &run->sweep.table;
    for (uint32_t row = run->first; row < t->row_count; row++) {
        const uint64_t base = link_baseline(run->axes, run->axis_count, row - run->first);
        if (base >= t->row_count - run->first)
            continue;
        const cli_cell *over = cli_table_at(t, row, LINK_RATE);
        const cli_cell *under = cli_table_at(t, run->first + (uint32_t)base, LINK_RATE);
        if (over->is_set && under->is_set)
            cli_cell_real(cli_table_at(t, row, LINK_TIMES_BASE), over->real / under->real);
    }
}

/* The axes of a suite. @return its cases; 0 = it is not chosen */
static uint64_t choose_suite(link_run *run, uint32_t suite)
{
    if (!run->options.chosen[suite])
        return 0;
    run->suite = suite;
    run->axis_count =
        link_suite_axes(suite, &run->sweep.command, run->sweep.runtime, run->nodes, run->axes);
    return cli_axes_product(run->axes, run->axis_count);
}

static uint64_t count_cases(link_run *run)
{
    uint64_t total = 0;
    for (uint32_t i = 0; i < LINK_SUITE_COUNT; i++)
        total += choose_suite(run, i);
    return total;
}

static bool run_case(void *user, uint64_t n)
{
    link_run *run = user;
    link_options o = run->options;
    cli_axes_set(run->axes, run->axis_count, n, &o);
    return measure_case(run, &o.base);
}

static void run_suites(link_run *run, uint64_t total)
{
    bench_begin(&run->sweep, total, "cases");
    for (uint32_t i = 0; i < LINK_SUITE_COUNT; i++) {
        const uint64_t count = choose_suite(run, i);
        run->first = run->sweep.table.row_count;
        bench_walk(&run->sweep, count, run_case, run);
        set_ratios(run);
    }
    bench_end(&run->sweep);
}

/* ---- all ---- */

static bool open_run(link_run *run)
{
    const link_options *o = &run->options;
    bench_sweep *s = &run->sweep;
    char header[] = "suite,row,repetition,ns\n";
    if (!bench_open(s, &o->results, &o->runtime) ||
        !bench_opened(s, kvf_link_open(s->runtime, &run->link), ""))
        return false;
    const uint64_t cases = count_cases(run);
    run->samples_ns = calloc(o->base.repetitions, sizeof *run->samples_ns);
    run->turns = calloc(cases + 1, sizeof *run->turns);
    run->peaks = calloc(cases + 2, sizeof *run->peaks);
    if (!run->samples_ns || !run->turns || !run->peaks) {
        fputs("kvferry: no memory for the samples\n", stderr);
        return false;
    }
    if (o->samples && !cli_output_open(&run->samples, o->samples))
        return false;
    cli_output_write(&run->samples, header, sizeof header - 1);
    return true;
}

static bool write_results(link_run *run)
{
    const kvf_runtime *runtime = run->sweep.runtime;
    kvf_sort(run->peaks, run->peak_count);
    const double peak = kvf_percentile(run->peaks, run->peak_count, 50);
    const double low = kvf_percentile(run->peaks, run->peak_count, 10);
    const double high = kvf_percentile(run->peaks, run->peak_count, 90);
    const cli_fact facts[] = {{"threads", NULL, kvf_runtime_threads(runtime)},
                              {"peak_gb_per_s", NULL, peak},
                              {"peak_gb_per_s_p10", NULL, low},
                              {"peak_gb_per_s_p90", NULL, high},
                              {"peaks", NULL, run->peak_count},
                              {"repetitions", NULL, run->options.base.repetitions},
                              {"seed", NULL, (double)run->options.base.seed},
                              {"pool_bytes", NULL, (double)run->options.base.pool_bytes},
                              {NULL, NULL, 0.0}};
    kvf_print(stderr,
              "%s: peak %.2f GB/s (%.2f to %.2f), one contiguous copy, measured %u times by "
              "turns\n",
              bench_device(&run->sweep), peak, low, high, run->peak_count);
    return bench_write(&run->sweep, facts);
}

static bool run_all(link_run *run)
{
    if (!measure_peak(run))
        return false;
    run_suites(run, count_cases(run));
    (void)measure_peak(run);
    set_peaks(run);
    bench_fit(&run->sweep.table, &lines, 0, "methods");
    run->sweep.failed = !write_results(run) || run->sweep.failed;
    run->sweep.failed = !cli_output_commit(&run->samples) || run->sweep.failed;
    return true;
}

int cli_bench_link_main(int argc, char **argv)
{
    link_run run = {.sweep.table = {.columns = columns, .column_count = LINK_COLUMN_COUNT}};
    char calibration[CLI_CALIBRATION_BYTES];
    const int parsed = link_options_parse(argc, argv, &run.sweep.command, &run.options);
    if (parsed >= 0)
        return parsed;
    if (run.options.list) {
        link_print_list(&run.sweep.command, &run.options);
        return 0;
    }
    cli_calibration_choose(&run.options.runtime, calibration);
    const bool is_done = open_run(&run) && run_all(&run);
    cli_output_discard(&run.samples);
    free(run.samples_ns);
    free(run.turns);
    free(run.peaks);
    kvf_link_close(run.link);
    return bench_close(&run.sweep, is_done);
}
