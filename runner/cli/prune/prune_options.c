/* SPDX-License-Identifier: Apache-2.0 */

/* Options of pruning; see the header. */

#include "prune_settings.h"

#include "prune_file.h"

#include <string.h>

/* ---- values ---- */

/* The library's row of a field. */
static const kvf_setting *row_of(const char *field)
{
    uint32_t i = 0;
    for (uint32_t bit = cli_setting_bit(field); bit > 1; bit >>= 1)
        i++;
    return kvf_prune_setting(i);
}

static bool take_setting(const cli_option *option, const char *text, void *at)
{
    return cli_setting_parse(row_of(option->field), text, at) || cli_refuse(option, text, NULL);
}

/* "0.2" or "2048tok"; a share takes back a number of tokens. */
static bool take_amount(const cli_option *option, const char *text, void *at)
{
    char number[32], tokens[32];
    const size_t digits = strspn(text, "0123456789");
    snprintf(tokens, sizeof tokens, "%s_tokens", option->field);
    if (digits > 0 && digits < sizeof number && strcmp(text + digits, "tok") == 0) {
        snprintf(number, sizeof number, "%.*s", (int)digits, text);
        if (strspn(number, "0") < digits && cli_setting_parse(row_of(tokens), number, at))
            return true;
    } else if (cli_setting_parse(row_of(option->field), text, at)) {
        return cli_setting_parse(row_of(tokens), "0", at);
    }
    return cli_refuse(option, text,
                      "a share above 0, at most 1, or a number of tokens such as 2048tok");
}

static bool take_pool(const cli_option *option, const char *text, void *at)
{
    char kind[8];
    const char *colon = strchr(text, ':');
    const size_t size = colon ? (size_t)(colon - text) : strlen(text);
    snprintf(kind, sizeof kind, "%.*s", (int)(size < sizeof kind ? size : sizeof kind), text);
    return (cli_setting_parse(row_of("pool"), kind, at) &&
            (!colon || cli_setting_parse(row_of("pool_width"), colon + 1, at))) ||
           cli_refuse(option, text, "max or avg, with an odd width: avg:7");
}

static bool take_policy(const cli_option *option, const char *text, void *at)
{
    cli_prune_options *o = at;
    o->wants_list = strcmp(text, "help") == 0;
    o->policy = o->wants_list ? NULL : cli_policy_find(option, text);
    return o->wants_list || o->policy;
}

static bool take_sparsity(const cli_option *option, const char *text, void *at)
{
    const cli_prune_options *o = at;
    if (!kvf_setting_parse(&option->is, text, at))
        return cli_refuse(option, text, NULL);
    return o->mask_sparsity < 1.0 ||
           cli_refuse(option, text, "less: with no retrieval head at all use --select streaming");
}

/* ---- rows ---- */

#define FIELD(field) CLI_FIELD(cli_prune_options, field)
#define OWN          "the policy's"

static const cli_option rows[] = {
    {.is = {"prune", KVF_SETTING_TEXT,
            .meaning = "prune the prompt; help lists the policies and their settings"},
     .argument = "NAME",
     .take = take_policy},
    {.is = {"prune-config", KVF_SETTING_TEXT, FIELD(config_file),
            .meaning = "layer and settings that kvferry tune found"}},
    {.is = {"chunk", KVF_SETTING_WHOLE, FIELD(chunk_tokens), .low = 1, .high = 1 << 24,
            .meaning = "prompt tokens that go through all layers at once"},
     .absent = ""},
};

/* These write to the values. */
enum { KEEP, PROPAGATE, POOL, SET };
static const cli_option of_values[] = {
    [KEEP] = {.is = {"keep", KVF_SETTING_TEXT,
                     .meaning = "share of the prompt that each KV head keeps, or tokens: 2048tok"},
              .argument = "R",
              .absent = OWN,
              .take = take_amount,
              .field = "keep"},
    [PROPAGATE] = {.is = {"propagate", KVF_SETTING_TEXT,
                          .meaning = "share that deeper layers get, or tokens: 2048tok"},
                   .argument = "R",
                   .absent = OWN,
                   .take = take_amount,
                   .field = "propagate"},
    [POOL] = {.is = {"pool", KVF_SETTING_TEXT,
                     .meaning =
                         "how scores of neighbours are smoothed: max or avg, with a width: avg:7"},
              .argument = "KIND",
              .absent = OWN,
              .take = take_pool,
              .field = "pool"},
    [SET] = {.is = {"prune-set", KVF_SETTING_TEXT,
                    .meaning = "any other setting of the policy; may be repeated"},
             .argument = "NAME=VALUE",
             .absent = "",
             .take = cli_setting_assign},
};

static const cli_option of_mask[] = {
    {.is = {"head-mask", KVF_SETTING_TEXT, FIELD(mask_file),
            .meaning = "per layer and KV head, separated by tabs: 1 is hot, 2 coarse, 0 streams"}},
    {.is = {"head-sparsity", KVF_SETTING_REAL, FIELD(mask_sparsity), .high = 1,
            .meaning = "share of streaming heads: the lowest of the mask"},
     .argument = "R",
     .absent = "",
     .take = take_sparsity},
};

static const cli_spelling of_policies[] = {
    {"layer", "prune-layer", CLI_PLAIN, NULL}, {"window", "prune-window", CLI_PLAIN, NULL},
    {"pivot", "pivot", CLI_PLAIN, NULL},       {"block_tokens", "prune-block", CLI_PLAIN, NULL},
    {"two_pass", "two-pass", CLI_FLAG, ""},    {0},
};
static const cli_spelling found_with[] = {{"window", "prune-window", CLI_PLAIN, NULL}, {0}};
static const cli_spelling of_config[] = {
    {"retention", "retention", CLI_PLAIN, NULL},
    {"eviction", "evict", CLI_PLAIN, NULL},
    {"chunk_queries", "chunk-queries", CLI_PLAIN, NULL},
    {0},
};
static const cli_spelling of_streaming[] = {{"streaming_sink", NULL, CLI_PLAIN, NULL},
                                            {"streaming_recent", NULL, CLI_PLAIN, NULL},
                                            {"coarse_share", NULL, CLI_PLAIN, NULL},
                                            {0}};

static void add_values(cli_command *c, size_t base, const cli_spelling *spellings,
                       const char *absent)
{
    cli_add_settings(c, &(cli_settings){.at = kvf_prune_setting,
                                        .base = base + offsetof(cli_prune_options, values),
                                        .spellings = spellings,
                                        .only = true,
                                        .absent = absent,
                                        .take = take_setting});
}

void cli_prune_add_found_with(cli_command *c, size_t base)
{
    const size_t values = base + offsetof(cli_prune_options, values);
    cli_add(c, &of_values[PROPAGATE], 2, values);
    add_values(c, base, found_with, OWN);
    cli_add(c, &of_values[SET], 1, values);
}

void cli_prune_add(cli_command *c, size_t base)
{
    const size_t values = base + offsetof(cli_prune_options, values);
    cli_add(c, &rows[0], 1, base);
    cli_add(c, of_values, SET, values);
    add_values(c, base, of_policies, OWN);
    cli_add(c, &of_values[SET], 1, values);
    cli_add(c, &rows[1], sizeof rows / sizeof *rows - 1, base);
    add_values(c, base, of_config, NULL);
}

void cli_prune_add_mask(cli_command *c, size_t base, size_t cache)
{
    cli_add(c, of_mask, sizeof of_mask / sizeof *of_mask, base);
    cli_add_settings(
        c, &(cli_settings){
               .at = kvf_cache_setting, .base = cache, .spellings = of_streaming, .only = true});
}

void cli_prune_options_init(cli_prune_options *options)
{
    *options = (cli_prune_options){.mask_sparsity = -1.0};
    kvf_prune_config_init(&options->values.config, NULL);
}

/* ---- all together ---- */

/* The option that sets a setting, for messages. */
static const char *option_of(const cli_command *c, const char *field)
{
    if (strcmp(field, "pool_width") == 0)
        field = "pool";
    for (uint32_t i = 0; i < c->count; i++) {
        const char *sets = c->options[i].field;
        const size_t size = sets ? strlen(sets) : 0;
        if (sets && (strcmp(sets, field) == 0 ||
                     (strncmp(sets, field, size) == 0 && strcmp(field + size, "_tokens") == 0)))
            return c->options[i].is.name;
    }
    return "prune-set";
}

static bool check_settings(const cli_prune_options *o, const cli_command *c)
{
    const kvf_setting *stray = cli_settings_stray(&o->values, cli_settings_of(o->policy->name));
    const kvf_prune_policy *policy;
    const char *between = "";
    if (!stray)
        return true;
    fprintf(stderr, "kvferry: --%s (%s) means nothing to --prune %s; leave it out, or use one of ",
            option_of(c, stray->name), stray->name, o->policy->name);
    for (uint32_t i = 0; (policy = kvf_prune_policy_at(i)) != NULL; i++)
        if (kvf_prune_policy_takes(policy, stray->name)) {
            fprintf(stderr, "%s%s", between, policy->name);
            between = ", ";
        }
    fputs("\n", stderr);
    return false;
}

static bool is_given(const cli_prune_options *o, const char *field)
{
    return (o->values.given & cli_setting_bit(field)) != 0;
}

/* A command that knows no head masks has no such options. */
static bool is_option_given(const cli_command *command, const char *name)
{
    for (uint32_t i = 0; i < command->count; i++)
        if (strcmp(command->options[i].is.name, name) == 0)
            return command->options[i].given;
    return false;
}

bool cli_prune_check(const cli_prune_options *o, const cli_command *command)
{
    const kvf_prune_config *c = &o->values.config;
    const bool has_pivot = is_given(o, "pivot"), evicts = c->eviction != KVF_EVICTION_NONE;
    const bool has_layer = is_given(o, "layer") && c->settings.layer != KVF_PRUNE_LAYER_AUTO;
    const bool is_streaming_given =
        is_option_given(command, "streaming-sink") || is_option_given(command, "streaming-recent");
    const char *problem = NULL;
    if (!o->policy && ((o->values.given & ~cli_setting_bit("eviction")) || o->config_file))
        problem = "options of pruning need --prune NAME; --prune help lists the policies";
    else if (evicts && (!o->policy || !o->chunk_tokens))
        problem = "--evict needs --chunk N and --prune NAME";
    else if (evicts && is_given(o, "retention") && c->retention == KVF_RETENTION_OFFLOAD)
        problem = "--evict drops what is not kept; leave --retention offload out";
    else if (is_given(o, "chunk_queries") && !evicts)
        problem = "--chunk-queries needs --evict naive or patched";
    else if (o->mask_sparsity >= 0.0 && !o->mask_file)
        problem = "--head-sparsity needs --head-mask FILE";
    else if (is_option_given(command, "coarse-share") && !o->mask_file)
        problem = "--coarse-share needs --head-mask FILE";
    else if (is_streaming_given && !o->mask_file)
        problem = "--streaming-sink and --streaming-recent need --head-mask FILE";
    else if (has_pivot && c->settings.pivot == KVF_PIVOT_ONLINE && has_layer)
        problem = "--pivot online finds the layer itself; leave --prune-layer out";
    else if (has_pivot && c->settings.pivot == KVF_PIVOT_FIXED && !has_layer)
        problem = "--pivot fixed needs --prune-layer L";
    else if (has_pivot && c->settings.pivot == KVF_PIVOT_CALIBRATED && !o->config_file &&
             !has_layer)
        problem = "--pivot calibrated needs --prune-config FILE, which kvferry tune writes, or "
                  "--prune-layer L";
    if (problem)
        fprintf(stderr, "kvferry: %s; see kvferry %s --help\n", problem, command->name);
    return !problem && (!o->policy || check_settings(o, command));
}

kvf_prune_shape cli_prune_shape(const kvf_model_config *model, uint32_t tokens)
{
    return (kvf_prune_shape){.layers = model->layers,
                             .kv_heads = model->kv_heads,
                             .query_heads = model->query_heads,
                             .tokens_max = tokens};
}

kvf_status cli_prune_make(const cli_prune_options *o, const kvf_model_config *model,
                          const kvf_weights *weights, kvf_prune_config *out, kvf_error *error)
{
    kvf_prune_config_init(out, o->policy);
    if (o->config_file) {
        cli_prune_values tuned = {0};
        kvf_status status =
            cli_prune_file_read(o->config_file, model, weights, o->policy->name, &tuned, error);
        if (status != KVF_OK)
            return status;
        cli_settings_apply(&tuned, out);
    }
    cli_settings_apply(&o->values, out);
    /* A share that was given is not meant to lose against the policy's own number of tokens. */
    if (is_given(o, "keep") && !is_given(o, "keep_tokens"))
        out->settings.keep_tokens = 0;
    if (is_given(o, "propagate") && !is_given(o, "propagate_tokens"))
        out->settings.propagate_tokens = 0;
    /* A layer counts for structkv whatever its pivot says: online, there must be none. */
    const bool has_pivot = is_given(o, "pivot"), has_layer = is_given(o, "layer");
    if (has_pivot && out->settings.pivot == KVF_PIVOT_ONLINE)
        out->settings.layer = KVF_PRUNE_LAYER_AUTO;
    if (has_layer && !has_pivot)
        out->settings.pivot =
            out->settings.layer == KVF_PRUNE_LAYER_AUTO ? KVF_PIVOT_ONLINE : KVF_PIVOT_FIXED;
    if (out->eviction != KVF_EVICTION_NONE)
        out->retention = KVF_RETENTION_EVICT;
    return KVF_OK;
}
