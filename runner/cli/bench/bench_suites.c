/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The suites of `kvferry bench link`, and its command line; see the header. Invariant: what neither
 * a suite sweeps nor an option says is the library's default.
 */

#include "bench.h"

#include <string.h>

/* ---- suites ---- */

#define SWEPT_MAX 3u

typedef struct swept {
    const char *option;
    const char *values;
} swept;

typedef struct suite {
    const char *name;
    const char *help;
    bool is_default;
    swept axes[SWEPT_MAX];
} suite;

#define METHODS                                                                                    \
    {                                                                                              \
        "method", "gather,mapped,batch,each"                                                       \
    }
#define NODES "" /* those of the machine */

static const suite suites[] = {
    {"peak",
     "large contiguous copies: what the link can do",
     true,
     {{"what", "peak"}, {"page-bytes", "64K"}, {"pages", "16,64,1K"}}},
    {"back",
     "the same to the host, and nothing to the device",
     true,
     {{"what", "back"}, {"page-bytes", "64K"}, {"pages", "16,64,1K"}}},
    {"methods",
     "every method over page bytes and pages, with a fitted line",
     true,
     {METHODS, {"page-bytes", "256,512,1K,4K,8K,16K,32K,64K,128K"}, {"pages", "1,16,64,256,1K"}}},
    {"parts",
     "gathering alone, beside plain memcpy; copying alone; both",
     true,
     {{"what", "memcpy,gather,copy,both"}, {"page-bytes", "512,16K"}, {"pages", "64,256,1K,2K"}}},
    {"patterns",
     "uniform, zipf and runs, by method",
     false,
     {{"pattern", "uniform,zipf,runs"}, METHODS}},
    {"staging",
     "chunk bytes by depth of the ring",
     false,
     {{"chunk", "64K,128K,256K,512K,1M,4M"}, {"depth", "1,2,3,4,6"}, {"pages", "1K"}}},
    {"workers",
     "threads that gather",
     false,
     {{"what", "gather,both"}, {"workers", "1,2,4,8,16"}, {"pages", "1K"}}},
    {"blocks",
     "blocks of the device that read mapped memory",
     false,
     {{"method", "mapped"}, {"blocks", "1,2,4,8,16,32,64"}, {"pages", "32,256"}}},
    {"numa", "every NUMA node by part and method", false, {{"node", NODES}, METHODS}},
    {"huge-pages",
     "memory pages of the pool",
     false,
     {{"huge-pages", "auto,off,required"}, {"method", "gather,mapped"}}},
    {"writeback",
     "with traffic to the host at the same time",
     false,
     {METHODS, {"writeback", "0,10,50,100"}}},
    {"cadence",
     "layer after layer with compute between: latency percentiles",
     true,
     {{"what", "cadence"}, METHODS, {"pages", "8,32,128"}}},
    {"pin",
     "what it costs to touch, register and unregister the pool",
     false,
     {{"huge-pages", "auto,off"}, {"what", "pin"}}},
    {"tax", "how much compute slows down beside each method", false, {{"what", "tax"}, METHODS}},
};

_Static_assert(sizeof suites / sizeof *suites == LINK_SUITE_COUNT, "every suite can be chosen");

/* ---- options ---- */

#define FIELD(field) CLI_FIELD(link_options, field)

/* In the order of the walk, which is the library's: the last turns fastest. */
static const cli_spelling of_case[] = {
    {"numa_node", "node", CLI_LIST, NULL},
    {"huge_pages", NULL, CLI_LIST, NULL},
    {"what", NULL, CLI_LIST, NULL},
    {"pattern", NULL, CLI_LIST, NULL},
    {"method", NULL, CLI_LIST, NULL},
    {"slots_in_order", NULL, CLI_LIST, NULL},
    {"writeback_percent", "writeback", CLI_LIST, NULL},
    {"chunk_bytes", "chunk", CLI_LIST, NULL},
    {"depth", NULL, CLI_LIST, NULL},
    {"workers", NULL, CLI_LIST, NULL},
    {"blocks", NULL, CLI_LIST, NULL},
    {"page_bytes", NULL, CLI_LIST, NULL},
    {"pages", NULL, CLI_LIST, NULL},
    {"pool_bytes", "pool", CLI_PLAIN, NULL},
    {"gap_ns", NULL, CLI_HIDDEN, NULL},
    {0},
};

static const cli_spelling of_runtime[] = {
    {"device", NULL, CLI_PLAIN, NULL},
    {"device_ordinal", NULL, CLI_PLAIN, NULL},
    {"allow_unpinned", NULL, CLI_FLAG, NULL},
    {"threads", NULL, CLI_PLAIN, NULL},
    {0},
};

static const cli_option rows[] = {
    {.is = {"gap-us", KVF_SETTING_WHOLE, FIELD(gap_us), .high = 1000000,
            .meaning = "microseconds of compute after each fetch, for cadence and tax"}},
    {.is = {"all", KVF_SETTING_SWITCH, FIELD(all), .meaning = "run every suite"}},
    {.is = {"list", KVF_SETTING_SWITCH, FIELD(list),
            .meaning = "print the suites with their cases and stop"}},
    {.is = {"samples", KVF_SETTING_TEXT, FIELD(samples),
            .meaning = "write the time of every repetition, one line each"}},
};

static bool choose_suite(const char *name, void *options)
{
    link_options *o = options;
    const char *names[LINK_SUITE_COUNT + 1] = {NULL};
    for (size_t i = 0; i < LINK_SUITE_COUNT; i++) {
        names[i] = suites[i].name;
        if (strcmp(name, suites[i].name) == 0)
            return o->chosen[i] = true;
    }
    const char *near = cli_suggest(name, names);
    fprintf(stderr, "kvferry: there is no suite '%s'", name);
    fprintf(stderr, near ? "; did you mean %s?\n" : "; see kvferry bench link --list\n", near);
    return false;
}

static void set_defaults(void *options)
{
    link_options *o = options;
    *o = (link_options){.list = false};
    kvf_link_case_init(&o->base);
    kvf_runtime_config_init(&o->runtime);
    o->gap_us = o->base.gap_ns / 1000;
}

/* The help begins with the suites. */
static void write_usage(char *text, size_t capacity)
{
    size_t used = (size_t)snprintf(
        text, capacity,
        "usage: kvferry bench link [SUITE...] [OPTION...]\n\n"
        "Measure how fast scattered pages of pinned host memory reach the device. Suites:\n\n");
    for (size_t i = 0; i < LINK_SUITE_COUNT && used < capacity; i++)
        used += (size_t)snprintf(text + used, capacity - used, "  %-12s %s%s\n", suites[i].name,
                                 suites[i].help, suites[i].is_default ? " (default)" : "");
    if (used < capacity)
        snprintf(text + used, capacity - used,
                 "\nOptions with ,... take several values and replace what a suite sweeps.");
}

int link_options_parse(int argc, char **argv, cli_command *c, link_options *o)
{
    char usage[2048];
    write_usage(usage, sizeof usage);
    c->name = "bench link";
    c->usage = usage;
    c->notes =
        "Bandwidth is bytes over the median time from submission until the bytes are there; "
        "on_stream\nis the same on the clock of the stream that copies; x base sets gathering "
        "against memcpy, and\nboth against copy, of the same pages. The peak, one contiguous copy, "
        "takes turns with the cases:\nof peak and floor are of what was measured before and after "
        "a "
        "case.\n";
    c->defaults = set_defaults;
    c->word = choose_suite;
    cli_heading(c, "Cases:");
    cli_add_settings(c, &(cli_settings){.at = kvf_link_setting,
                                        .base = offsetof(link_options, base),
                                        .spellings = of_case});
    cli_add(c, rows, 1, 0);
    cli_heading(c, "Results:");
    cli_add(c, rows + 1, sizeof rows / sizeof *rows - 1, 0);
    bench_add_results(c, offsetof(link_options, results));
    cli_heading(c, "Machine:");
    cli_add_settings(c, &(cli_settings){.at = kvf_runtime_setting,
                                        .base = offsetof(link_options, runtime),
                                        .spellings = of_runtime,
                                        .only = true});
    const int parsed = cli_parse(c, argc, argv, o);
    bool any = false;
    c->usage = ""; /* that was for --help */
    o->base.gap_ns = o->gap_us * 1000;
    for (size_t i = 0; i < LINK_SUITE_COUNT; i++)
        any = any || o->chosen[i];
    for (size_t i = 0; i < LINK_SUITE_COUNT; i++)
        o->chosen[i] = o->chosen[i] || o->all || (!any && suites[i].is_default);
    return parsed;
}

/* ---- the sweep ---- */

/* Where values of a suite come from. */
typedef struct suite_values {
    const suite *suite;
    const kvf_runtime *runtime;
    char *nodes; /* [LINK_NODES_BYTES] */
} suite_values;

/* Nodes that can be asked for, as a list; NULL where there is one or none known. */
static const char *known_nodes(const suite_values *v)
{
    int32_t ids[16];
    const uint32_t count = v->runtime ? kvf_runtime_numa_nodes(v->runtime, ids, 16) : 0;
    size_t used = 0;
    for (uint32_t i = 0; i < count && i < 16; i++)
        used +=
            (size_t)snprintf(v->nodes + used, LINK_NODES_BYTES - used, i ? ",%d" : "%d", ids[i]);
    return count < 2 ? NULL : v->nodes;
}

static const char *values_of(void *user, const char *option)
{
    const suite_values *v = user;
    for (uint32_t k = 0; k < SWEPT_MAX; k++) {
        const swept *axis = &v->suite->axes[k];
        if (axis->option && strcmp(axis->option, option) == 0)
            return axis->values[0] ? axis->values : known_nodes(v);
    }
    return NULL;
}

uint32_t link_suite_axes(uint32_t index, const cli_command *command, const kvf_runtime *runtime,
                         char nodes[LINK_NODES_BYTES], cli_axis axes[CLI_AXES_MAX])
{
    return bench_axes(command, values_of, &(suite_values){&suites[index], runtime, nodes}, axes);
}

uint64_t link_baseline(const cli_axis *axes, uint32_t count, uint64_t n)
{
    char word[CLI_WORD_BYTES], base[CLI_WORD_BYTES];
    uint32_t i = 0;
    while (i < count && strcmp(axes[i].option->is.name, "what") != 0)
        i++;
    if (i == count)
        return UINT64_MAX;
    const uint64_t stride = cli_axes_product(axes + i + 1, count - i - 1);
    const uint32_t values = cli_axis_count(axes[i].values);
    const uint32_t at = (uint32_t)(n / stride % values);
    cli_axis_at(axes[i].values, at, word);
    for (uint32_t k = 0; k < values; k++) {
        cli_axis_at(axes[i].values, k, base);
        if ((strcmp(word, "gather") == 0 && strcmp(base, "memcpy") == 0) ||
            (strcmp(word, "both") == 0 && strcmp(base, "copy") == 0))
            return n - at * stride + k * stride;
    }
    return UINT64_MAX;
}

void link_print_list(const cli_command *command, const link_options *o)
{
    char nodes[LINK_NODES_BYTES];
    for (uint32_t i = 0; i < LINK_SUITE_COUNT; i++) {
        cli_axis axes[CLI_AXES_MAX];
        const uint32_t count = link_suite_axes(i, command, NULL, nodes, axes);
        printf("%-12s %4llu cases  %s%s\n", suites[i].name,
               (unsigned long long)cli_axes_product(axes, count), suites[i].help,
               o->chosen[i] ? " *" : "");
    }
    puts("\n* chosen; the numa suite has one case per node and method on the machine at hand");
}

const char *link_suite_name(uint32_t index)
{
    return suites[index].name;
}
