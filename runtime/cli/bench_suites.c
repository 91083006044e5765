/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The suites of `kvferry bench link`, and its command line; see the header. Invariant: every axis
 * is swept, given or normal, so a case has a value for each.
 */

#include "bench_suites.h"

#include "bench_options.h"
#include "options.h"

#include <getopt.h>
#include <stdlib.h>
#include <string.h>

/* ---- suites ---- */

static const cli_axis_name what_names[] = {
    {"both", KVF_LINK_BOTH}, {"gather", KVF_LINK_GATHER}, {"copy", KVF_LINK_COPY},
    {"peak", KVF_LINK_PEAK}, {"pin", KVF_LINK_PIN},       {"cadence", KVF_LINK_CADENCE},
    {"tax", KVF_LINK_TAX},   {"memcpy", KVF_LINK_MEMCPY}, {NULL, 0},
};
static const cli_axis_name method_names[] = {
    {"gather", KVF_TRANSFER_GATHER},
    {"mapped", KVF_TRANSFER_MAPPED},
    {"batch", KVF_TRANSFER_BATCH},
    {"each", KVF_TRANSFER_EACH},
    {NULL, 0},
};
static const cli_axis_name pattern_names[] = {
    {"uniform", KVF_LINK_UNIFORM},
    {"zipf", KVF_LINK_ZIPF},
    {"runs", KVF_LINK_RUNS},
    {NULL, 0},
};
static const cli_axis_name switch_names[] = {{"off", 0}, {"on", 1}, {NULL, 0}};
static const cli_axis_name huge_names[] = {
    {"auto", KVF_HUGE_PAGES_AUTO},
    {"off", KVF_HUGE_PAGES_OFF},
    {"required", KVF_HUGE_PAGES_REQUIRED},
    {NULL, 0},
};

/* Order of the walk: the last turns fastest; what needs a new pool is in front. */
enum axis_id {
    AXIS_NODE,
    AXIS_HUGE,
    AXIS_WHAT,
    AXIS_PATTERN,
    AXIS_METHOD,
    AXIS_SLOTS,
    AXIS_WRITEBACK,
    AXIS_CHUNK,
    AXIS_DEPTH,
    AXIS_WORKERS,
    AXIS_BLOCKS,
    AXIS_PAGE_BYTES,
    AXIS_PAGES,
    AXIS_COUNT
};

_Static_assert(AXIS_COUNT == LINK_AXIS_COUNT, "every axis has its place in the options");

typedef struct axis_row {
    const char *option;
    const char *help;
    const cli_axis_name *names;
    int64_t least, most;
    cli_axis normal; /* where a suite does not sweep it */
} axis_row;

static const axis_row axis_rows[AXIS_COUNT] = {
    [AXIS_NODE] =
        {"node", "NUMA nodes of the pool; -1 = the library's choice", NULL, -1, 1023, {1, {-1}}},
    [AXIS_HUGE] = {"huge-pages",
                   "of the pool: auto, off, required",
                   huge_names,
                   0,
                   0,
                   {1, {KVF_HUGE_PAGES_AUTO}}},
    [AXIS_WHAT] = {"what",
                   "both, gather, copy, peak, pin, cadence, tax, memcpy",
                   what_names,
                   0,
                   0,
                   {1, {KVF_LINK_BOTH}}},
    [AXIS_PATTERN] = {"pattern",
                      "which pages: uniform, zipf, runs",
                      pattern_names,
                      0,
                      0,
                      {1, {KVF_LINK_UNIFORM}}},
    [AXIS_METHOD] =
        {"method", "gather, mapped, batch, each", method_names, 0, 0, {1, {KVF_TRANSFER_GATHER}}},
    [AXIS_SLOTS] = {"slots-in-order",
                    "on, off: slots follow each other, or lie scattered, as a cache has them",
                    switch_names,
                    0,
                    0,
                    {1, {0}}},
    [AXIS_WRITEBACK] =
        {"writeback", "bytes to the host at the same time, in per cent", NULL, 0, 400, {1, {0}}},
    [AXIS_CHUNK] = {"chunk",
                    "bytes of a staging chunk; 0 = the library's choice",
                    NULL,
                    0,
                    64 << 20,
                    {1, {0}}},
    [AXIS_DEPTH] =
        {"depth", "chunks of the staging ring; 0 = the library's choice", NULL, 0, 16, {1, {0}}},
    [AXIS_WORKERS] = {"workers", "threads that gather; 0 = the runtime's", NULL, 0, 256, {1, {0}}},
    [AXIS_BLOCKS] =
        {"blocks", "blocks of the device that read mapped memory", NULL, 0, 64, {1, {0}}},
    [AXIS_PAGE_BYTES] = {"page-bytes", "bytes of a page", NULL, 64, 1 << 20, {1, {16384}}},
    [AXIS_PAGES] = {"pages", "pages of one fetch", NULL, 1, 65536, {1, {256}}},
};

#define SWEPT_MAX 3u

typedef struct swept {
    enum axis_id axis;
    cli_axis values;
} swept;

typedef struct suite {
    const char *name;
    const char *help;
    bool is_default;
    swept axes[SWEPT_MAX]; /* those with count > 0 */
} suite;

#define ALL_METHODS                                                                                \
    {                                                                                              \
        4,                                                                                         \
        {                                                                                          \
            KVF_TRANSFER_GATHER, KVF_TRANSFER_MAPPED, KVF_TRANSFER_BATCH, KVF_TRANSFER_EACH        \
        }                                                                                          \
    }

static const suite suites[] = {
    {"peak",
     "large contiguous copies: what the link can do",
     true,
     {{AXIS_WHAT, {1, {KVF_LINK_PEAK}}},
      {AXIS_PAGE_BYTES, {1, {65536}}},
      {AXIS_PAGES, {3, {16, 64, 1024}}}}},
    {"methods",
     "every method over page bytes and pages, with a fitted line",
     true,
     {{AXIS_METHOD, ALL_METHODS},
      {AXIS_PAGE_BYTES, {6, {4096, 8192, 16384, 32768, 65536, 131072}}},
      {AXIS_PAGES, {5, {1, 16, 64, 256, 1024}}}}},
    {"parts",
     "gathering alone, beside plain memcpy; copying alone; both",
     true,
     {{AXIS_WHAT, {4, {KVF_LINK_MEMCPY, KVF_LINK_GATHER, KVF_LINK_COPY, KVF_LINK_BOTH}}},
      {AXIS_PAGES, {3, {64, 256, 1024}}}}},
    {"patterns",
     "uniform, zipf and runs, by method",
     false,
     {{AXIS_PATTERN, {3, {KVF_LINK_UNIFORM, KVF_LINK_ZIPF, KVF_LINK_RUNS}}},
      {AXIS_METHOD, ALL_METHODS}}},
    {"staging",
     "chunk bytes by depth of the ring",
     false,
     {{AXIS_CHUNK, {6, {65536, 131072, 262144, 524288, 1048576, 4194304}}},
      {AXIS_DEPTH, {5, {1, 2, 3, 4, 6}}},
      {AXIS_PAGES, {1, {1024}}}}},
    {"workers",
     "threads that gather",
     false,
     {{AXIS_WHAT, {2, {KVF_LINK_GATHER, KVF_LINK_BOTH}}},
      {AXIS_WORKERS, {5, {1, 2, 4, 8, 16}}},
      {AXIS_PAGES, {1, {1024}}}}},
    {"blocks",
     "blocks of the device that read mapped memory",
     false,
     {{AXIS_METHOD, {1, {KVF_TRANSFER_MAPPED}}},
      {AXIS_BLOCKS, {7, {1, 2, 4, 8, 16, 32, 64}}},
      {AXIS_PAGES, {2, {32, 256}}}}},
    {"numa",
     "every NUMA node by part and method",
     false,
     {{AXIS_NODE, {0, {0}}}, {AXIS_METHOD, ALL_METHODS}}},
    {"huge-pages",
     "memory pages of the pool",
     false,
     {{AXIS_HUGE, {3, {KVF_HUGE_PAGES_AUTO, KVF_HUGE_PAGES_OFF, KVF_HUGE_PAGES_REQUIRED}}},
      {AXIS_METHOD, {2, {KVF_TRANSFER_GATHER, KVF_TRANSFER_MAPPED}}}}},
    {"writeback",
     "with traffic to the host at the same time",
     false,
     {{AXIS_METHOD, ALL_METHODS}, {AXIS_WRITEBACK, {4, {0, 10, 50, 100}}}}},
    {"cadence",
     "layer after layer with compute between: latency percentiles",
     true,
     {{AXIS_WHAT, {1, {KVF_LINK_CADENCE}}},
      {AXIS_METHOD, ALL_METHODS},
      {AXIS_PAGES, {3, {8, 32, 128}}}}},
    {"pin",
     "what it costs to touch, register and unregister the pool",
     false,
     {{AXIS_HUGE, {2, {KVF_HUGE_PAGES_AUTO, KVF_HUGE_PAGES_OFF}}},
      {AXIS_WHAT, {1, {KVF_LINK_PIN}}}}},
    {"tax",
     "how much compute slows down beside each method",
     false,
     {{AXIS_WHAT, {1, {KVF_LINK_TAX}}}, {AXIS_METHOD, ALL_METHODS}}},
};

#define SUITE_COUNT LINK_SUITE_COUNT

/* ---- options ---- */

enum option_id {
    OPT_FIRST_AXIS = 256,
    OPT_LIST = 512,
    OPT_ALL,
    OPT_FORMAT,
    OPT_PLOT,
    OPT_SAMPLES,
    OPT_JSON,
    OPT_REPETITIONS,
    OPT_WARMUP,
    OPT_SEED,
    OPT_POOL,
    OPT_LAYERS,
    OPT_GAP,
    OPT_RUN,
    OPT_ZIPF,
    OPT_DEVICE,
    OPT_ORDINAL,
    OPT_UNPINNED,
    OPT_HELP
};

static const struct {
    const char *name;
    int id;
    const char *argument;
    const char *help;
} other_rows[] = {
    {"all", OPT_ALL, NULL, "every suite"},
    {"list", OPT_LIST, NULL, "print the suites with their cases and stop"},
    {"format", OPT_FORMAT, "NAME", "also -o: table, csv, json, jsonl or md; table"},
    {"json", OPT_JSON, "FILE", "write every figure there as well"},
    {"plot", OPT_PLOT, "DIR", "draw bandwidth, a heat map and latencies as SVG and PNG (gnuplot)"},
    {"samples", OPT_SAMPLES, "FILE", "write the time of every repetition, one line each"},
    {"repetitions", OPT_REPETITIONS, "N", "measured, per case; 20"},
    {"warmup", OPT_WARMUP, "N", "not measured, per case; 3"},
    {"seed", OPT_SEED, "N", "of the pages chosen; 1"},
    {"pool", OPT_POOL, "BYTES", "host memory that pages are taken from; 256M"},
    {"layers", OPT_LAYERS, "N", "fetches of a step (cadence); 32"},
    {"gap-us", OPT_GAP, "N", "compute after each fetch (cadence, tax); 100"},
    {"run-pages", OPT_RUN, "N", "neighbours of a run (pattern runs); 8"},
    {"zipf", OPT_ZIPF, "X", "exponent (pattern zipf); 1"},
    {"device", OPT_DEVICE, "NAME", "auto, host or cuda; auto"},
    {"device-ordinal", OPT_ORDINAL, "N", "which GPU; 0"},
    {"allow-unpinned", OPT_UNPINNED, NULL, "go on with pageable memory where pinning fails"},
    {"help", OPT_HELP, NULL, "this text"},
};

#define OTHER_COUNT (sizeof other_rows / sizeof *other_rows)

static void print_option(FILE *file, const char *name, const char *argument, const char *help)
{
    char left[48];
    snprintf(left, sizeof left, "--%s %s", name, argument ? argument : "");
    fprintf(file, "  %-24s %s\n", left, help);
}

static void print_help(FILE *file)
{
    fputs("usage: kvferry bench link [SUITE...] [OPTION...]\n\n"
          "Measure how fast scattered pages of pinned host memory reach the device. Suites:\n\n",
          file);
    for (size_t i = 0; i < SUITE_COUNT; i++)
        fprintf(file, "  %-12s %s%s\n", suites[i].name, suites[i].help,
                suites[i].is_default ? " (default)" : "");
    fputs("\nAn axis takes a list, apart by commas, and replaces what a suite sweeps:\n\n", file);
    for (size_t i = 0; i < AXIS_COUNT; i++)
        print_option(file, axis_rows[i].option, "LIST", axis_rows[i].help);
    fputs("\nOther options:\n\n", file);
    for (size_t i = 0; i < OTHER_COUNT; i++)
        print_option(file, other_rows[i].name, other_rows[i].argument, other_rows[i].help);
    fputs("\nBandwidth is bytes over the median time from submission until the bytes are there; "
          "on_stream\nis the same on the clock of the stream that copies; x base sets gathering "
          "against memcpy, and\nboth against copy, of the same pages. Exit status: 0 done, 1 "
          "something "
          "failed, 2 wrong usage,\n130 interrupted.\n",
          file);
}

static bool take_zipf(const char *text, double *out)
{
    char *end = NULL;
    *out = strtod(text, &end);
    if (end != text && *end == '\0' && *out >= 0.1 && *out <= 4.0)
        return true;
    fprintf(stderr, "kvferry: --zipf is '%s'; give a number from 0.1 to 4\n", text);
    return false;
}

static bool take(int id, const char *text, link_options *o)
{
    int64_t value = 0;
    bool fine = true;
    switch (id) {
    case OPT_ALL:
        memset(o->chosen, true, sizeof o->chosen);
        return true;
    case OPT_LIST:
        return o->list = true;
    case OPT_FORMAT:
        return cli_bench_format(text, &o->format);
    case OPT_PLOT:
        o->plot = text;
        return true;
    case OPT_SAMPLES:
        o->samples = text;
        return true;
    case OPT_JSON:
        o->json = text;
        return true;
    case OPT_REPETITIONS:
        return cli_bench_u32("--repetitions", text, 1, 65536, &o->base.repetitions);
    case OPT_WARMUP:
        return cli_bench_u32("--warmup", text, 0, 65536, &o->base.warmup);
    case OPT_SEED:
        fine = cli_bench_number("--seed", text, 0, INT64_MAX, &value);
        o->base.seed = (uint64_t)value;
        return fine;
    case OPT_POOL:
        fine = cli_bench_number("--pool", text, 1 << 20, INT64_C(1) << 45, &value);
        o->base.pool_bytes = (uint64_t)value;
        return fine;
    case OPT_LAYERS:
        return cli_bench_u32("--layers", text, 1, 1024, &o->base.layers);
    case OPT_GAP:
        fine = cli_bench_u32("--gap-us", text, 0, 1000000, &o->base.gap_ns);
        o->base.gap_ns *= 1000;
        return fine;
    case OPT_RUN:
        return cli_bench_u32("--run-pages", text, 1, 65536, &o->base.run_pages);
    case OPT_ZIPF:
        return take_zipf(text, &o->base.zipf);
    case OPT_DEVICE:
        return cli_bench_device(text, &o->runtime.device);
    case OPT_ORDINAL:
        return cli_bench_u32("--device-ordinal", text, 0, 1024, &o->runtime.device_ordinal);
    case OPT_UNPINNED:
        o->runtime.allow_unpinned = 1;
        return true;
    default:
        return false;
    }
}

static bool choose_suite(const char *name, link_options *o)
{
    const char *names[SUITE_COUNT + 1];
    for (size_t i = 0; i < SUITE_COUNT; i++) {
        names[i] = suites[i].name;
        if (strcmp(name, suites[i].name) == 0)
            return o->chosen[i] = true;
    }
    names[SUITE_COUNT] = NULL;
    const char *near = cli_suggest(name, names);
    fprintf(stderr, "kvferry: there is no suite '%s'", name);
    fprintf(stderr, near ? "; did you mean %s?\n" : "; see kvferry bench link --list\n", near);
    return false;
}

static void fill_table(struct option *table)
{
    for (size_t i = 0; i < AXIS_COUNT; i++)
        table[i] = (struct option){.name = axis_rows[i].option,
                                   .has_arg = required_argument,
                                   .val = OPT_FIRST_AXIS + (int)i};
    for (size_t i = 0; i < OTHER_COUNT; i++)
        table[AXIS_COUNT + i] =
            (struct option){.name = other_rows[i].name,
                            .has_arg = other_rows[i].argument ? required_argument : no_argument,
                            .val = other_rows[i].id};
}

/* @return -1 to go on, else the exit status */
int link_options_parse(int argc, char **argv, link_options *o)
{
    struct option table[AXIS_COUNT + OTHER_COUNT + 1] = {{0}};
    fill_table(table);
    opterr = 0;
    optind = 1;
    for (int id; (id = getopt_long(argc, argv, ":o:h", table, NULL)) != -1;) {
        if (id == '?' || id == ':') {
            fprintf(stderr, "kvferry: '%s' %s; see kvferry bench link --help\n", argv[optind - 1],
                    id == '?' ? "is no option" : "needs a value");
            return 2;
        }
        if (id == OPT_HELP || id == 'h') {
            print_help(stdout);
            return 0;
        }
        const unsigned axis = (unsigned)id - OPT_FIRST_AXIS;
        if (axis < AXIS_COUNT) {
            const axis_row *row = &axis_rows[axis];
            char option[32];
            snprintf(option, sizeof option, "--%s", row->option);
            if (!cli_axis_parse(option, optarg, row->names, row->least, row->most, &o->axes[axis]))
                return 2;
        } else if (!take(id == 'o' ? OPT_FORMAT : id, optarg, o)) {
            return 2;
        }
    }
    bool any = false;
    for (; optind < argc; optind++)
        if (!choose_suite(argv[optind], o))
            return 2;
    for (size_t i = 0; i < SUITE_COUNT; i++)
        any = any || o->chosen[i];
    for (size_t i = 0; i < SUITE_COUNT && !any; i++)
        o->chosen[i] = suites[i].is_default;
    return -1;
}

/* ---- the sweep ---- */

/* Nodes that can be asked for; only -1 where there is one or none known. */
static cli_axis known_nodes(const kvf_runtime *runtime)
{
    cli_axis nodes = {1, {-1}};
    uint32_t count = runtime ? kvf_runtime_numa_nodes(runtime, NULL, 0) : 0;
    int32_t ids[CLI_AXIS_VALUES_MAX];
    if (count < 2)
        return nodes;
    count = kvf_runtime_numa_nodes(runtime, ids, CLI_AXIS_VALUES_MAX);
    nodes.count = count < CLI_AXIS_VALUES_MAX ? count : CLI_AXIS_VALUES_MAX;
    for (uint32_t i = 0; i < nodes.count; i++)
        nodes.values[i] = ids[i];
    return nodes;
}

void link_suite_axes(uint32_t index, const link_options *o, const kvf_runtime *runtime,
                     cli_axis axes[LINK_AXIS_COUNT])
{
    const suite *s = &suites[index];
    for (uint32_t i = 0; i < AXIS_COUNT; i++)
        axes[i] = axis_rows[i].normal;
    for (uint32_t i = 0; i < SWEPT_MAX; i++) {
        if (s->axes[i].values.count > 0)
            axes[s->axes[i].axis] = s->axes[i].values;
        else if (i == 0 && strcmp(s->name, "numa") == 0)
            axes[AXIS_NODE] = known_nodes(runtime);
    }
    for (uint32_t i = 0; i < AXIS_COUNT; i++)
        if (o->axes[i].count > 0)
            axes[i] = o->axes[i];
}

kvf_link_case link_case_of(const link_options *o, const int64_t *v)
{
    kvf_link_case c = o->base;
    c.numa_node = (int32_t)v[AXIS_NODE];
    c.huge_pages = (kvf_huge_pages)v[AXIS_HUGE];
    c.what = (kvf_link_what)v[AXIS_WHAT];
    c.pattern = (kvf_link_pattern)v[AXIS_PATTERN];
    c.method = (kvf_transfer)v[AXIS_METHOD];
    c.slots_in_order = (uint32_t)v[AXIS_SLOTS];
    c.writeback_percent = (uint32_t)v[AXIS_WRITEBACK];
    c.chunk_bytes = (size_t)v[AXIS_CHUNK];
    c.depth = (uint32_t)v[AXIS_DEPTH];
    c.workers = (uint32_t)v[AXIS_WORKERS];
    c.blocks = (uint32_t)v[AXIS_BLOCKS];
    c.page_bytes = (size_t)v[AXIS_PAGE_BYTES];
    c.pages = (uint32_t)v[AXIS_PAGES];
    return c;
}

uint64_t link_baseline(const cli_axis axes[LINK_AXIS_COUNT], uint64_t n)
{
    int64_t wanted[AXIS_COUNT], values[AXIS_COUNT];
    cli_axes_at(axes, AXIS_COUNT, n, wanted);
    if (wanted[AXIS_WHAT] != KVF_LINK_GATHER && wanted[AXIS_WHAT] != KVF_LINK_BOTH)
        return UINT64_MAX;
    wanted[AXIS_WHAT] = wanted[AXIS_WHAT] == KVF_LINK_GATHER ? KVF_LINK_MEMCPY : KVF_LINK_COPY;
    for (uint64_t i = 0; i < cli_axes_product(axes, AXIS_COUNT); i++) {
        cli_axes_at(axes, AXIS_COUNT, i, values);
        if (memcmp(values, wanted, sizeof values) == 0)
            return i;
    }
    return UINT64_MAX;
}

void link_print_list(const link_options *o)
{
    for (uint32_t i = 0; i < SUITE_COUNT; i++) {
        cli_axis axes[AXIS_COUNT];
        link_suite_axes(i, o, NULL, axes);
        printf("%-12s %4llu cases  %s%s\n", suites[i].name,
               (unsigned long long)cli_axes_product(axes, AXIS_COUNT), suites[i].help,
               o->chosen[i] ? " *" : "");
    }
    puts("\n* chosen; the numa suite has one case per node and method on the machine at hand");
}

/* ---- names ---- */

const char *link_suite_name(uint32_t index)
{
    return suites[index].name;
}

const char *link_what_name(kvf_link_what what)
{
    return cli_axis_value_name(what_names, what);
}

const char *link_method_name(kvf_transfer method)
{
    return cli_axis_value_name(method_names, method);
}

const char *link_pattern_name(kvf_link_pattern pattern)
{
    return cli_axis_value_name(pattern_names, pattern);
}
