/* SPDX-License-Identifier: Apache-2.0 */

/* The command line of `kvferry bench decode`; see the header. */

#include "bench_decode_options.h"

#include "bench_options.h"

#include <getopt.h>
#include <string.h>

static const cli_axis_name select_names[] = {
    {"hybrid", KVF_SELECT_HYBRID},       {"full", KVF_SELECT_FULL},
    {"static", KVF_SELECT_STATIC},       {"dynamic", KVF_SELECT_DYNAMIC},
    {"streaming", KVF_SELECT_STREAMING}, {"quest", KVF_SELECT_QUEST},
    {"arkvale", KVF_SELECT_ARKVALE},     {NULL, 0},
};
static const cli_axis_name method_names[] = {
    {"auto", KVF_TRANSFER_AUTO},
    {"direct", KVF_TRANSFER_DIRECT},
    {"gather", KVF_TRANSFER_GATHER},
    {"mapped", KVF_TRANSFER_MAPPED},
    {"batch", KVF_TRANSFER_BATCH},
    {"each", KVF_TRANSFER_EACH},
    {NULL, 0},
};
static const cli_axis_name switch_names[] = {{"off", 0}, {"on", 1}, {NULL, 0}};

static const struct {
    const char *option;
    const char *help;
    const cli_axis_name *names;
    int64_t least, most;
    cli_axis normal;
} axis_rows[DECODE_AXIS_COUNT] = {
    [DECODE_CONTEXT] =
        {"context", "tokens of every sequence; 16K", NULL, 1024, 1 << 24, {1, {16384}}},
    [DECODE_BUDGET] =
        {"budget", "tokens attended per KV head and step; 1024", NULL, 128, 1 << 20, {1, {1024}}},
    [DECODE_BATCH] = {"batch", "sequences of a step; 1", NULL, 1, 64, {1, {1}}},
    [DECODE_SELECT] = {"select",
                       "hybrid, full, static, dynamic, streaming, quest, arkvale; hybrid",
                       select_names,
                       0,
                       0,
                       {1, {KVF_SELECT_HYBRID}}},
    [DECODE_METHOD] = {"method",
                       "auto, direct, gather, mapped, batch, each; auto",
                       method_names,
                       0,
                       0,
                       {1, {KVF_TRANSFER_AUTO}}},
    [DECODE_SPECULATE] = {"speculate", "on, off; off", switch_names, 0, 0, {1, {0}}},
};

enum option_id {
    OPT_FIRST_AXIS = 256,
    OPT_LAYERS = 512,
    OPT_KV_HEADS,
    OPT_GROUP,
    OPT_HEAD_DIM,
    OPT_PAGE_SIZE,
    OPT_SLOTS,
    OPT_STEPS,
    OPT_DENSE,
    OPT_WARMUP,
    OPT_SEED,
    OPT_THREADS,
    OPT_RECORD,
    OPT_FORMAT,
    OPT_JSON,
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
    {"layers", OPT_LAYERS, "N", "of a step; 4"},
    {"kv-heads", OPT_KV_HEADS, "N", "8"},
    {"group", OPT_GROUP, "N", "query heads per KV head; 4"},
    {"head-dim", OPT_HEAD_DIM, "N", "128"},
    {"page-size", OPT_PAGE_SIZE, "N", "tokens; 32"},
    {"slots", OPT_SLOTS, "N", "pages per KV head on the device; twice the selected ones"},
    {"steps", OPT_STEPS, "N", "measured; 100"},
    {"dense-steps", OPT_DENSE, "N", "of full attention, batch 1, to compare with; 0 = none; 0"},
    {"warmup", OPT_WARMUP, "N", "not measured; 8"},
    {"seed", OPT_SEED, "N", "of keys, values and queries; 1"},
    {"threads", OPT_THREADS, "N", "compute threads of the host device; one per usable core"},
    {"record", OPT_RECORD, NULL, "replay a recorded step (CUDA)"},
    {"format", OPT_FORMAT, "NAME", "also -o: table, csv, json, jsonl or md; table"},
    {"json", OPT_JSON, "FILE", "write every figure there as well"},
    {"device", OPT_DEVICE, "NAME", "auto, host or cuda; auto"},
    {"device-ordinal", OPT_ORDINAL, "N", "which GPU; 0"},
    {"allow-unpinned", OPT_UNPINNED, NULL, "go on with pageable memory where pinning fails"},
    {"help", OPT_HELP, NULL, "this text"},
};

#define OTHER_COUNT (sizeof other_rows / sizeof *other_rows)

static void print_help(FILE *file)
{
    fputs("usage: kvferry bench decode [OPTION...]\n\n"
          "Time decode steps on random keys, per layer, beside what the bytes alone would take.\n"
          "These take lists, apart by commas; every combination is measured:\n\n",
          file);
    for (size_t i = 0; i < DECODE_AXIS_COUNT; i++)
        fprintf(file, "  --%-22s %s\n", axis_rows[i].option, axis_rows[i].help);
    fputs("\nOther options:\n\n", file);
    for (size_t i = 0; i < OTHER_COUNT; i++) {
        char left[48];
        snprintf(left, sizeof left, "%s %s", other_rows[i].name,
                 other_rows[i].argument ? other_rows[i].argument : "");
        fprintf(file, "  --%-22s %s\n", left, other_rows[i].help);
    }
    fputs("\nExit status: 0 done, 1 something failed, 2 wrong usage, 130 interrupted.\n", file);
}

static bool take(int id, const char *text, decode_options *o)
{
    uint32_t value = 0;
    switch (id) {
    case OPT_LAYERS:
        return cli_bench_u32("--layers", text, 1, 256, &o->cache.layers);
    case OPT_KV_HEADS:
        return cli_bench_u32("--kv-heads", text, 1, 128, &o->cache.kv_heads);
    case OPT_GROUP:
        return cli_bench_u32("--group", text, 1, 16, &o->group);
    case OPT_HEAD_DIM:
        return cli_bench_u32("--head-dim", text, 64, 256, &o->cache.head_dim);
    case OPT_PAGE_SIZE:
        return cli_bench_u32("--page-size", text, 8, 64, &o->cache.page_size);
    case OPT_SLOTS:
        return cli_bench_u32("--slots", text, 1, 1u << 24, &o->cache.slots);
    case OPT_STEPS:
        return cli_bench_u32("--steps", text, 1, 1u << 20, &o->steps);
    case OPT_DENSE:
        return cli_bench_u32("--dense-steps", text, 0, 1u << 20, &o->dense_steps);
    case OPT_WARMUP:
        return cli_bench_u32("--warmup", text, 0, 1u << 20, &o->warmup);
    case OPT_SEED:
        if (!cli_bench_u32("--seed", text, 0, UINT32_MAX, &value))
            return false;
        o->seed = value;
        return true;
    case OPT_THREADS:
        return cli_bench_u32("--threads", text, 1, 1024, &o->runtime.threads);
    case OPT_RECORD:
        return o->record = true;
    case OPT_FORMAT:
        return cli_bench_format(text, &o->format);
    case OPT_JSON:
        o->json = text;
        return true;
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

static void set_defaults(decode_options *o)
{
    *o = (decode_options){.group = 4, .steps = 100, .warmup = 8, .seed = 1};
    kvf_runtime_config_init(&o->runtime);
    kvf_cache_config_init(&o->cache);
    o->cache.layers = 4;
    o->cache.kv_heads = 8;
    o->cache.head_dim = 128;
    for (size_t i = 0; i < DECODE_AXIS_COUNT; i++)
        o->axes[i] = axis_rows[i].normal;
}

/* @return -1 to go on, else the exit status */
int decode_options_parse(int argc, char **argv, decode_options *o)
{
    struct option table[DECODE_AXIS_COUNT + OTHER_COUNT + 1] = {{0}};
    for (size_t i = 0; i < DECODE_AXIS_COUNT; i++)
        table[i] = (struct option){.name = axis_rows[i].option,
                                   .has_arg = required_argument,
                                   .val = OPT_FIRST_AXIS + (int)i};
    for (size_t i = 0; i < OTHER_COUNT; i++)
        table[DECODE_AXIS_COUNT + i] =
            (struct option){.name = other_rows[i].name,
                            .has_arg = other_rows[i].argument ? required_argument : no_argument,
                            .val = other_rows[i].id};
    set_defaults(o);
    opterr = 0;
    optind = 1;
    for (int id; (id = getopt_long(argc, argv, ":o:h", table, NULL)) != -1;) {
        const unsigned axis = (unsigned)id - OPT_FIRST_AXIS;
        char option[32];
        if (id == '?' || id == ':') {
            fprintf(stderr, "kvferry: '%s' %s; see kvferry bench decode --help\n", argv[optind - 1],
                    id == '?' ? "is no option" : "needs a value");
            return 2;
        }
        if (id == OPT_HELP || id == 'h') {
            print_help(stdout);
            return 0;
        }
        if (axis < DECODE_AXIS_COUNT) {
            snprintf(option, sizeof option, "--%s", axis_rows[axis].option);
            if (!cli_axis_parse(option, optarg, axis_rows[axis].names, axis_rows[axis].least,
                                axis_rows[axis].most, &o->axes[axis]))
                return 2;
        } else if (!take(id == 'o' ? OPT_FORMAT : id, optarg, o)) {
            return 2;
        }
    }
    if (optind < argc) {
        fprintf(stderr, "kvferry: '%s' belongs to no option\n", argv[optind]);
        return 2;
    }
    return -1;
}

const char *decode_select_name(kvf_select select)
{
    return cli_axis_value_name(select_names, select);
}

const char *decode_method_name(kvf_transfer method)
{
    return cli_axis_value_name(method_names, method);
}
