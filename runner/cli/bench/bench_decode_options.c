/* SPDX-License-Identifier: Apache-2.0 */

/* The command line of `kvferry bench decode`; see the header. */

#include "bench_decode.h"

#define FIELD(field) CLI_FIELD(decode_options, field)
#define COUNT        .kind = KVF_SETTING_WHOLE

static const cli_option sweeps[] = {
    {.is = {"context", COUNT, FIELD(context), .low = 1024, .high = 1 << 24,
            .meaning = "tokens of every sequence"},
     .is_list = true},
    {.is = {"batch", COUNT, FIELD(batch), .low = 1, .high = DECODE_BATCH_MAX,
            .meaning = "sequences of a step"},
     .is_list = true},
    {.is = {"hot-heads", KVF_SETTING_REAL, FIELD(hot_heads), .high = 1,
            .meaning = "share of the KV heads that are hot; the others are coarse"},
     .is_list = true},
};

static const cli_option rows[] = {
    {.is = {"group", COUNT, FIELD(group), .low = 1, .high = 128,
            .meaning = "query heads per KV head"}},
    {.is = {"steps", COUNT, FIELD(steps), .low = 1, .high = 1 << 20, .meaning = "measured steps"}},
    {.is = {"dense-steps", COUNT, FIELD(dense_steps), .high = 1 << 20,
            .meaning = "steps of full attention, batch 1, to compare with; 0 = none"}},
    {.is = {"warmup", COUNT, FIELD(warmup), .high = 1 << 20,
            .meaning = "steps that are not measured"}},
    {.is = {"passage", COUNT, FIELD(passage), .high = 1 << 16,
            .meaning = "neighbouring tokens whose keys are alike, and that queries look at "
                       "together; 0 = keys are random"}},
    {.is = {"topics", COUNT, FIELD(topics), .low = 1, .high = 1 << 20,
            .meaning = "passages among which queries turn"}},
    {.is = {"drift", KVF_SETTING_REAL, FIELD(drift), .high = 1,
            .meaning = "share of the topics that become other passages in a step"}},
    {.is = {"forks", KVF_SETTING_SWITCH, FIELD(forks),
            .meaning = "sequences of a batch are forks of one, by turns with as many of their "
                       "own"}},
    {.is = {"afresh", KVF_SETTING_SWITCH, FIELD(afresh),
            .meaning = "queries have nothing of the step before, so that little of what they want "
                       "is resident"}},
    {.is = {"seed", COUNT, FIELD(seed), .high = 0x1p64,
            .meaning = "seed of keys, values and queries"}},
    {.is = {"record", KVF_SETTING_SWITCH, FIELD(record),
            .meaning = "replay a recorded step; refuse what cannot be recorded (CUDA)"}},
    {.is = {"eager", KVF_SETTING_SWITCH, FIELD(eager),
            .meaning = "enqueue every step, where CUDA would replay a recorded one"}},
};

/* Settings of the library, but for those that follow from other options. */
static const cli_spelling of_cache[] = {
    {"layers", NULL, CLI_PLAIN, NULL},
    {"kv_heads", NULL, CLI_PLAIN, NULL},
    {"head_dim", NULL, CLI_PLAIN, NULL},
    {"value_dim", NULL, CLI_PLAIN, NULL},
    {"budget_tokens", "budget", CLI_LIST, NULL},
    {"budget_share", NULL, CLI_PLAIN, NULL},
    {"select", NULL, CLI_LIST, NULL},
    {"pages", NULL, CLI_LIST, NULL},
    {"page_size", NULL, CLI_LIST, NULL},
    {"digest", NULL, CLI_LIST, NULL},
    {"transfer", "method", CLI_LIST, NULL},
    {0},
};

static void set_defaults(void *options)
{
    decode_options *o = options;
    *o = (decode_options){.context = 16384,
                          .batch = 1,
                          .group = 4,
                          .hot_heads = 1.0,
                          .steps = 100,
                          .warmup = 8,
                          .topics = 256,
                          .drift = 0.01,
                          .seed = 1};
    kvf_runtime_config_init(&o->runtime);
    kvf_cache_config_init(&o->cache);
    o->cache.layers = 4;
    o->cache.kv_heads = 8;
    o->cache.head_dim = 128;
}

int decode_options_parse(int argc, char **argv, cli_command *c, decode_options *out)
{
    c->name = "bench decode";
    c->usage = "usage: kvferry bench decode [OPTION...]\n\n"
               "Time decode steps on random keys, per layer, beside what the bytes alone would "
               "take.\nOptions with ,... take several values; every combination is measured.";
    c->stray = "see kvferry bench decode --help";
    c->defaults = set_defaults;
    cli_heading(c, "Case:");
    cli_add(c, sweeps, sizeof sweeps / sizeof *sweeps, 0);
    cli_add_cache(c, offsetof(decode_options, cache), of_cache);
    cli_heading(c, "Measurement:");
    cli_add(c, rows, sizeof rows / sizeof *rows, 0);
    bench_add_results(c, offsetof(decode_options, results));
    cli_add_runtime(c, offsetof(decode_options, runtime));
    const int parsed = cli_parse(c, argc, argv, out);
    if (parsed < 0 && out->forks && out->cache.disk_path) {
        cli_complain(c, "--forks and --disk each take turns with a case of their own; give one");
        return 2;
    }
    return parsed;
}
