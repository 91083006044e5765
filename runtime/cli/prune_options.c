/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Options of pruning; see the header.
 *
 * It knows the table. Invariant: every row of the table has its case in cli_prune_take.
 */

#include "prune_options.h"

#include "prune_file.h"

#include <string.h>

enum option_id {
    OPT_PRUNE = CLI_PRUNE_FIRST,
    OPT_KEEP,
    OPT_PROPAGATE,
    OPT_LAYER,
    OPT_WINDOW,
    OPT_POOL,
    OPT_RETENTION,
    OPT_CHUNK,
    OPT_EVICT,
    OPT_CHUNK_QUERIES,
    OPT_PIVOT,
    OPT_BLOCK,
    OPT_TWO_PASS,
    OPT_SET,
    OPT_CONFIG,
    OPT_MASK,
    OPT_SPARSITY,
    OPT_STREAMING_SINK,
    OPT_STREAMING_RECENT,
};

static const cli_option rows[] = {
    {"prune", OPT_PRUNE, "NAME", "prune the prompt; help lists the policies and their settings"},
    {"keep", OPT_KEEP, "R", "share of the prompt that each KV head keeps, or tokens: 2048tok"},
    {"propagate", OPT_PROPAGATE, "R", "share that deeper layers get, or tokens: 2048tok"},
    {"prune-layer", OPT_LAYER, "L", "where to propagate, filter or pivot, from 0; or auto"},
    {"prune-window", OPT_WINDOW, "W", "newest tokens, which score the others and are kept"},
    {"pool", OPT_POOL, "KIND", "pooling of scores: max or avg, with a width: avg:7"},
    {"retention", OPT_RETENTION, "NAME", "offload: the rest can be retrieved; evict: it is gone"},
    {"chunk", OPT_CHUNK, "N", "prompt tokens that go through all layers at once"},
    {"evict", OPT_EVICT, "NAME", "after each chunk keep the best: none, naive or patched; none"},
    {"chunk-queries", OPT_CHUNK_QUERIES, "N", "newest tokens, which score a chunk of --evict; 64"},
    {"pivot", OPT_PIVOT, "NAME", "of structkv: online, calibrated or fixed"},
    {"prune-block", OPT_BLOCK, "N", "structkv: whole blocks of so many tokens; 0 = tokens"},
    {"two-pass", OPT_TWO_PASS, NULL, "asl: run again from layer 0 on the chosen tokens"},
    {"prune-set", OPT_SET, "NAME=VALUE", "any other setting of the policy; may be repeated"},
    {"prune-config", OPT_CONFIG, "FILE", "layer and settings that kvferry tune found"},
    {"head-mask", OPT_MASK, "FILE", "per layer and KV head, apart by tabs: 1 retrieves, 0 streams"},
    {"head-sparsity", OPT_SPARSITY, "R", "share of streaming heads: the lowest of the mask"},
    {"streaming-sink", OPT_STREAMING_SINK, "N", "first tokens of a streaming head; 128"},
    {"streaming-recent", OPT_STREAMING_RECENT, "N", "newest tokens of a streaming head; 1024"},
};

const cli_option *cli_prune_rows(size_t *count)
{
    *count = sizeof rows / sizeof *rows;
    return rows;
}

void cli_prune_options_init(cli_prune_options *options)
{
    kvf_cache_config cache;
    kvf_cache_config_init(&cache);
    *options = (cli_prune_options){
        .mask_sparsity = -1.0,
        .streaming_sink = cache.streaming_sink,
        .streaming_recent = cache.streaming_recent,
    };
}

/* ---- single values ---- */

static bool take_setting(const cli_option *row, const char *text, cli_setting setting,
                         cli_prune_options *o)
{
    char range[96];
    if (cli_setting_parse(setting, text, &o->values))
        return true;
    fprintf(stderr, "kvferry: --%s is '%s'; give %s\n", row->name, text,
            cli_setting_range(setting, range));
    return false;
}

/* "0.2" or "2048tok"; a share takes back a number of tokens. */
static bool take_amount(const cli_option *row, const char *text, cli_setting share,
                        cli_setting tokens, cli_prune_options *o)
{
    char number[32];
    const size_t digits = strspn(text, "0123456789");
    if (digits > 0 && digits < sizeof number && strcmp(text + digits, "tok") == 0) {
        memcpy(number, text, digits);
        number[digits] = '\0';
        if (strspn(number, "0") < digits && cli_setting_parse(tokens, number, &o->values))
            return true;
    } else if (cli_setting_parse(share, text, &o->values)) {
        return cli_setting_parse(tokens, "0", &o->values);
    }
    fprintf(stderr,
            "kvferry: --%s is '%s'; give a share above 0, at most 1, or a number of tokens such as "
            "2048tok\n",
            row->name, text);
    return false;
}

static bool take_pool(const cli_option *row, const char *text, cli_prune_options *o)
{
    char kind[8];
    const char *colon = strchr(text, ':');
    const size_t size = colon ? (size_t)(colon - text) : strlen(text);
    bool fine = size < sizeof kind;
    if (fine) {
        memcpy(kind, text, size);
        kind[size] = '\0';
        fine = cli_setting_parse(SETTING_POOL, kind, &o->values) &&
               (!colon || cli_setting_parse(SETTING_POOL_WIDTH, colon + 1, &o->values));
    }
    if (!fine)
        fprintf(stderr, "kvferry: --%s is '%s'; give max or avg, with an odd width: avg:7\n",
                row->name, text);
    return fine;
}

static bool take_policy(const cli_option *row, const char *text, cli_prune_options *o)
{
    if (strcmp(text, "help") == 0) {
        o->wants_list = true;
        return true;
    }
    o->policy = cli_policy_find(row, text);
    return o->policy != NULL;
}

static bool take_mask(const cli_option *row, const char *text, cli_prune_options *o)
{
    if (row->id == OPT_MASK) {
        o->mask_file = text;
        return true;
    }
    if (row->id == OPT_SPARSITY) {
        if (!cli_option_real(row, text, 0.0, 1.0, &o->mask_sparsity))
            return false;
        if (o->mask_sparsity < 1.0)
            return true;
        fputs("kvferry: --head-sparsity is 1; give less: with no retrieval head at all use "
              "--select streaming\n",
              stderr);
        return false;
    }
    o->is_streaming_given = true;
    return row->id == OPT_STREAMING_SINK
               ? cli_option_u32(row, text, 0, 1u << 24, &o->streaming_sink)
               : cli_option_u32(row, text, 1, 1u << 24, &o->streaming_recent);
}

bool cli_prune_take(const cli_option *row, const char *text, cli_prune_options *o)
{
    int value = 0;
    switch (row->id) {
    case OPT_PRUNE:
        return take_policy(row, text, o);
    case OPT_KEEP:
        return take_amount(row, text, SETTING_KEEP, SETTING_KEEP_TOKENS, o);
    case OPT_PROPAGATE:
        return take_amount(row, text, SETTING_PROPAGATE, SETTING_PROPAGATE_TOKENS, o);
    case OPT_LAYER:
        return take_setting(row, text, SETTING_LAYER, o);
    case OPT_WINDOW:
        return take_setting(row, text, SETTING_WINDOW, o);
    case OPT_POOL:
        return take_pool(row, text, o);
    case OPT_PIVOT:
        return take_setting(row, text, SETTING_PIVOT, o);
    case OPT_BLOCK:
        return take_setting(row, text, SETTING_BLOCK_TOKENS, o);
    case OPT_TWO_PASS:
        return take_setting(row, "1", SETTING_TWO_PASS, o);
    case OPT_SET:
        return cli_setting_assign(row, text, &o->values);
    case OPT_RETENTION:
        if (!cli_option_name(row, text, cli_retention_names, &value))
            return false;
        o->retention = (kvf_retention)value;
        o->is_retention_given = true;
        return true;
    case OPT_EVICT:
        if (!cli_option_name(row, text, cli_eviction_names, &value))
            return false;
        o->eviction = (kvf_eviction)value;
        return true;
    case OPT_CHUNK:
        return cli_option_u32(row, text, 1, 1u << 24, &o->chunk_tokens);
    case OPT_CHUNK_QUERIES:
        return cli_option_u32(row, text, 1, 128, &o->chunk_queries);
    case OPT_CONFIG:
        o->config_file = text;
        return true;
    default:
        return take_mask(row, text, o);
    }
}

/* ---- all together ---- */

/* The option that sets a setting, for messages. */
static const char *option_of(cli_setting setting)
{
    switch (setting) {
    case SETTING_KEEP:
    case SETTING_KEEP_TOKENS:
        return "--keep";
    case SETTING_PROPAGATE:
    case SETTING_PROPAGATE_TOKENS:
        return "--propagate";
    case SETTING_LAYER:
        return "--prune-layer";
    case SETTING_WINDOW:
        return "--prune-window";
    case SETTING_POOL:
        return "--pool";
    case SETTING_PIVOT:
        return "--pivot";
    case SETTING_BLOCK_TOKENS:
        return "--prune-block";
    case SETTING_TWO_PASS:
        return "--two-pass";
    default:
        return "--prune-set";
    }
}

/* The policies that look at a setting. */
static void print_policies_with(cli_setting setting)
{
    const kvf_prune_policy *policy;
    const char *between = "";
    for (uint32_t i = 0; (policy = kvf_prune_policy_at(i)) != NULL; i++)
        if (cli_settings_of(policy->name) & SETTING_BIT(setting)) {
            fprintf(stderr, "%s%s", between, policy->name);
            between = ", ";
        }
    fputs("\n", stderr);
}

static bool check_settings(const cli_prune_options *o)
{
    const uint32_t stray = o->values.given & ~cli_settings_of(o->policy->name);
    for (unsigned i = 0; i < SETTING_COUNT; i++) {
        if (!(stray & SETTING_BIT(i)))
            continue;
        fprintf(stderr,
                "kvferry: %s (%s) means nothing to --prune %s; leave it out, or use one of ",
                option_of((cli_setting)i), cli_setting_name((cli_setting)i), o->policy->name);
        print_policies_with((cli_setting)i);
        return false;
    }
    return true;
}

bool cli_prune_check(const cli_prune_options *o)
{
    const bool is_calibrated = (o->values.given & SETTING_BIT(SETTING_PIVOT)) &&
                               o->values.settings.pivot == KVF_PIVOT_CALIBRATED;
    const bool has_layer = (o->values.given & SETTING_BIT(SETTING_LAYER)) != 0 &&
                           o->values.settings.layer != KVF_PRUNE_LAYER_AUTO;
    const bool is_online = (o->values.given & SETTING_BIT(SETTING_PIVOT)) != 0 &&
                           o->values.settings.pivot == KVF_PIVOT_ONLINE;
    const bool is_fixed = (o->values.given & SETTING_BIT(SETTING_PIVOT)) != 0 &&
                          o->values.settings.pivot == KVF_PIVOT_FIXED;
    const char *problem = NULL;
    if (!o->policy && (o->values.given || o->config_file || o->is_retention_given))
        problem = "options of pruning need --prune NAME; --prune help lists the policies";
    else if (o->eviction != KVF_EVICTION_NONE && (!o->policy || !o->chunk_tokens))
        problem = "--evict needs --chunk N and --prune NAME";
    else if (o->eviction != KVF_EVICTION_NONE && o->is_retention_given &&
             o->retention == KVF_RETENTION_OFFLOAD)
        problem = "--evict drops what is not kept; leave --retention offload out";
    else if (o->chunk_queries && o->eviction == KVF_EVICTION_NONE)
        problem = "--chunk-queries needs --evict naive or patched";
    else if (o->mask_sparsity >= 0.0 && !o->mask_file)
        problem = "--head-sparsity needs --head-mask FILE";
    else if (o->is_streaming_given && !o->mask_file)
        problem = "--streaming-sink and --streaming-recent need --head-mask FILE";
    else if (is_online && has_layer)
        problem = "--pivot online finds the layer itself; leave --prune-layer out";
    else if (is_fixed && !has_layer)
        problem = "--pivot fixed needs --prune-layer L";
    else if (is_calibrated && !o->config_file && !has_layer)
        problem = "--pivot calibrated needs --prune-config FILE, which kvferry tune writes, or "
                  "--prune-layer L";
    if (problem)
        fprintf(stderr, "kvferry: %s; see kvferry run --help\n", problem);
    return !problem && (!o->policy || check_settings(o));
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
        cli_settings_apply(&tuned, &out->settings);
    }
    cli_settings_apply(&o->values, &out->settings);
    /* A layer counts for structkv whatever its pivot says: online, there must be none. */
    const bool has_pivot = (o->values.given & SETTING_BIT(SETTING_PIVOT)) != 0;
    const bool has_layer = (o->values.given & SETTING_BIT(SETTING_LAYER)) != 0;
    if (has_pivot && out->settings.pivot == KVF_PIVOT_ONLINE)
        out->settings.layer = KVF_PRUNE_LAYER_AUTO;
    if (has_layer && !has_pivot)
        out->settings.pivot =
            out->settings.layer == KVF_PRUNE_LAYER_AUTO ? KVF_PIVOT_ONLINE : KVF_PIVOT_FIXED;
    out->retention = o->eviction == KVF_EVICTION_NONE ? o->retention : KVF_RETENTION_EVICT;
    out->eviction = o->eviction;
    if (o->chunk_queries)
        out->chunk_queries = o->chunk_queries;
    return KVF_OK;
}
