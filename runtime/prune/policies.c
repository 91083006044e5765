/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The library's policies by name, defaults common to all of them, and what settings may be.
 *
 * Knows no cache and no prompt; every refusal names the field, its value and what to do. After a
 * check that passed, a policy may use its settings without looking at their ranges again.
 */

#include "policies.h"

#include <float.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "common/text.h"
#include "kernels.h"
#include "settings.h"

/* The baseline of the others, which leaves pruning to streaming heads or retrieval. */
static void keep_all(const kvf_prune_view *view, kvf_prune_answer *answer)
{
    (void)view;
    (void)answer; /* preset: keep all, propagate all */
}

static const kvf_prune_policy full = {.size = sizeof(kvf_prune_policy),
                                      .name = "full",
                                      .source = "nothing is pruned",
                                      .settings = "",
                                      .decide = keep_all};

/* kvf_prune_<name> of prune_<name>.c, in the order of help; the build knows which there are. */
#define DECLARE(name) extern const kvf_prune_policy kvf_prune_##name;
#define ADDRESS(name) &kvf_prune_##name,
KVF_PRUNE_POLICIES(DECLARE)
static const kvf_prune_policy *const policies[] = {&full, KVF_PRUNE_POLICIES(ADDRESS)};

#define POLICIES (sizeof policies / sizeof *policies)

const kvf_prune_policy *kvf_prune_policy_at(uint32_t index)
{
    return index < POLICIES ? policies[index] : NULL;
}

const kvf_prune_policy *kvf_prune_policy_find(const char *name)
{
    for (size_t i = 0; name && i < POLICIES; i++)
        if (strcmp(policies[i]->name, name) == 0)
            return policies[i];
    return NULL;
}

_Static_assert(sizeof(kvf_pool_kind) == sizeof(uint32_t), "enums are read as 32 bits");

#define SETTING(field)                                                                             \
    .name = #field, .offset = offsetof(kvf_prune_config, settings.field),                          \
    .bytes = sizeof(((kvf_prune_settings *)0)->field)
#define CONFIG(field)      KVF_FIELD(kvf_prune_config, field)
#define COUNT(least, most) .kind = KVF_SETTING_WHOLE, .low = (least), .high = (most)
#define LAYER              COUNT(0, 1023), .special = "auto", .special_value = KVF_PRUNE_LAYER_AUTO
#define SHARE              .kind = KVF_SETTING_SHARE, .high = 1
#define REAL(least, most)  .kind = KVF_SETTING_REAL, .low = (least), .high = (most)
#define SWITCH             .kind = KVF_SETTING_SWITCH

static const kvf_setting prune_settings[] = {
    {SETTING(keep), SHARE, .meaning = "share of the prompt that a KV head keeps"},
    {SETTING(keep_tokens), COUNT(0, UINT32_MAX),
     .meaning = "tokens that a KV head keeps; 0 = the share counts"},
    {SETTING(propagate), SHARE, .meaning = "share of the prompt that deeper layers get"},
    {SETTING(propagate_tokens), COUNT(0, UINT32_MAX),
     .meaning = "tokens that deeper layers get; 0 = the share counts"},
    {SETTING(layer), LAYER, .meaning = "layer that propagates, filters or is the pivot, from 0"},
    {SETTING(window), COUNT(1, KVF_OBSERVE_WINDOW_MAX), .special = "none",
     .meaning = "newest queries, which score the others and whose tokens are kept"},
    {SETTING(pool), KVF_NAMED(KVF_POOL_LIST), .meaning = "how scores of neighbours are smoothed"},
    {SETTING(pool_width), COUNT(1, 1023),
     .meaning = "an odd number of neighbours; 1 = no smoothing"},
    {SETTING(group_reduce), KVF_NAMED(KVF_GROUP_LIST),
     .meaning = "one score from those of a group of query heads"},
    {SETTING(window_mean), SWITCH, .meaning = "mean over the window's queries; off = their sum"},
    {SETTING(sink_tokens), COUNT(0, UINT32_MAX), .meaning = "first tokens, always kept"},
    {SETTING(recent_share), REAL(0, 1), .meaning = "h2o: of what is kept, the part that is newest"},
    {SETTING(beta), COUNT(1, UINT32_MAX),
     .meaning = "pyramidkv: the last layer gets a beta-th of the mean; published: 20"},
    {SETTING(decay), REAL(0, 1),
     .meaning = "structkv: what centrality keeps from layer to layer; published: 0.9"},
    {SETTING(weights), REAL(0, FLT_MAX), .count = 3,
     .meaning = "structkv: of entropy, sparsity and variance; published: 0.2, 0.3, 0.5"},
    {SETTING(mass_share), SHARE,
     .meaning = "structkv: share of tokens whose mass is the sparsity; published: 0.1"},
    {SETTING(pivot), KVF_NAMED(KVF_PIVOT_LIST), .meaning = "structkv: where the pivot comes from"},
    {SETTING(block_tokens), COUNT(0, UINT32_MAX),
     .meaning = "structkv: keep and propagate whole blocks of so many tokens; 0 = tokens"},
    {SETTING(layer_min), LAYER, .meaning = "first layer that may be chosen"},
    {SETTING(layer_max), LAYER, .meaning = "last layer that may be chosen"},
    {SETTING(layers_observed), COUNT(0, UINT32_MAX),
     .meaning = "asl: layers whose ranks are compared; 0 = a third of all, 2 to 8; published: 8"},
    {SETTING(threshold), REAL(0, 1e9),
     .meaning = "asl: ratio of variances to fall below; published: 0.3"},
    {SETTING(two_pass), SWITCH, .meaning = "asl: run again from layer 0 on the chosen tokens"},
    {CONFIG(retention), KVF_NAMED(KVF_RETENTION_LIST), .meaning = "what becomes of the rest"},
    {CONFIG(eviction), KVF_NAMED(KVF_EVICTION_LIST),
     .meaning = "what is dropped after each chunk of the prompt"},
    {CONFIG(chunk_queries), COUNT(1, KVF_OBSERVE_WINDOW_MAX),
     .meaning = "newest queries, which score a chunk"},
};

#define SETTINGS (sizeof prune_settings / sizeof *prune_settings)

const kvf_setting *kvf_prune_setting(uint32_t index)
{
    return index < SETTINGS ? &prune_settings[index] : NULL;
}

/* ---- the settings of a policy ---- */

/* A word of kvf_prune_policy.settings: a name, and what stands after '='. */
typedef struct word {
    char name[32], value[32];
} word;

/* @return where the next one begins; NULL after the last */
static const char *next_word(const char *at, word *w)
{
    int size = 0;
    *w = (word){0};
    if (!at || sscanf(at, " %31[^= ]%n=%31[^ ]%n", w->name, &size, w->value, &size) < 1)
        return NULL;
    return at + size;
}

/* Defaults over those of @p config. @return the first word that is no setting, or NULL */
static const char *apply(const kvf_prune_policy *policy, kvf_prune_config *config)
{
    word w;
    for (const char *at = policy->settings, *next; (next = next_word(at, &w)); at = next) {
        size_t i = 0;
        while (i < SETTINGS && strcmp(prune_settings[i].name, w.name) != 0)
            i++;
        if (i == SETTINGS ||
            (w.value[0] && !kvf_setting_parse(&prune_settings[i], w.value, config)))
            return at + (*at == ' ');
    }
    return NULL;
}

int kvf_prune_policy_takes(const kvf_prune_policy *policy, const char *setting)
{
    word w;
    if (!policy || !setting)
        return 0;
    for (const char *at = policy->settings; (at = next_word(at, &w));)
        if (strcmp(w.name, setting) == 0)
            return 1;
    return !policy->settings;
}

#define INNER offsetof(kvf_prune_config, settings)

static const kvf_prune_config defaults = {
    .policy = &full,
    .retention = KVF_RETENTION_OFFLOAD,
    .eviction = KVF_EVICTION_NONE,
    .chunk_queries = 64,
    .settings = {.size = sizeof(kvf_prune_settings),
                 .keep = 1.0f,
                 .propagate = 1.0f,
                 .layer = KVF_PRUNE_LAYER_AUTO,
                 .pool = KVF_POOL_MAX,
                 .pool_width = 1,
                 .group_reduce = KVF_GROUP_MEAN_SOFTMAX,
                 .recent_share = 0.5f,
                 .beta = 20,
                 .decay = 0.9f,
                 .weights = {0.2f, 0.3f, 0.5f},
                 .mass_share = 0.1f,
                 .pivot = KVF_PIVOT_ONLINE,
                 .layer_min = KVF_PRUNE_LAYER_AUTO,
                 .layer_max = KVF_PRUNE_LAYER_AUTO,
                 .threshold = 0.3f},
};

void kvf_prune_config_init_sized(kvf_prune_config *config, const kvf_prune_policy *policy,
                                 size_t size)
{
    kvf_prune_config own = defaults;
    own.policy = policy ? policy : &full;
    (void)apply(own.policy, &own);
    kvf_sized_init(config, size, &own, sizeof own);
    if (config)
        config->settings.size = size - INNER;
}

kvf_status kvf_prune_config_read(kvf_context *context, const kvf_prune_config *config,
                                 kvf_prune_given *own)
{
    *own = (kvf_prune_given){.config = defaults};
    KVF_TRY(KVF_SIZED_READ(context, kvf_prune_config, config, &own->config));
    KVF_TRY(kvf_sized_last(context, "settings", config, INNER));
    KVF_TRY(KVF_SIZED_RESERVED(context, own->config.reserved));
    own->config.settings.size = sizeof own->config.settings;
    if (!config->policy)
        KVF_FAIL(context, KVF_INVALID,
                 "policy = NULL: take one of kvf_prune_policy_find, or your own");
    own->config.policy = &own->policy;
    return kvf_sized_read(context, "kvf_prune_policy", "policy", config->policy, &own->policy,
                          sizeof own->policy);
}

/* ---- check ---- */

/* Where a complaint goes; the first one counts. */
typedef struct complaint {
    char *text;
    size_t capacity;
    int is_made;
} complaint;

static void complain(complaint *c, const char *format, ...) KVF_PRINTF(2, 3);

static void complain(complaint *c, const char *format, ...)
{
    if (c->is_made)
        return;
    c->is_made = 1;
    va_list args;
    va_start(args, format);
    kvf_vformat(c->text, c->capacity, format, args);
    va_end(args);
}

static void check_layers(complaint *c, const kvf_prune_settings *s, const kvf_prune_shape *shape)
{
    const struct {
        const char *name;
        uint32_t value;
    } layers[] = {{"layer", s->layer}, {"layer_min", s->layer_min}, {"layer_max", s->layer_max}};
    for (size_t i = 0; i < 3; i++)
        if (layers[i].value != KVF_PRUNE_LAYER_AUTO && layers[i].value >= shape->layers)
            complain(c, "%s = %u: the model has layers 0 to %u; take one of them, or AUTO",
                     layers[i].name, layers[i].value, shape->layers - 1);
    if (s->layer_min != KVF_PRUNE_LAYER_AUTO && s->layer_max != KVF_PRUNE_LAYER_AUTO &&
        s->layer_min > s->layer_max)
        complain(c, "layer_min = %u: is above layer_max = %u; lower it, or raise layer_max",
                 s->layer_min, s->layer_max);
}

/* A budget, as a share or a count, against what is always kept. */
typedef struct budget {
    const char *share_name, *count_name;
    float share;
    uint32_t count;
} budget;

static void check_budget(complaint *c, const kvf_prune_settings *s, const budget *b,
                         uint32_t tokens, const char *of)
{
    const uint32_t least = s->window ? s->window : 1;
    if (b->count && b->count < least)
        complain(c,
                 "%s = %u: is below window = %u, whose tokens are always kept; raise it to %u, "
                 "or lower window",
                 b->count_name, b->count, s->window, least);
    if (b->count)
        return;
    const uint32_t count = kvf_share_count(tokens, kvf_share_value(b->share));
    const double enough = tokens ? fmin(1.0, ceil(1000.0 * least / tokens) / 1000.0) : 1.0;
    if (count == 0 && least == 1)
        complain(c, "%s = %g: of %s %u tokens that is none; raise it to %.3g or more",
                 b->share_name, (double)b->share, of, tokens, enough);
    if (count < least)
        complain(c,
                 "%s = %g: of %s %u tokens that is %u, below window = %u, whose tokens are always "
                 "kept; raise it to %.3g or more, or lower window",
                 b->share_name, (double)b->share, of, tokens, count, s->window, enough);
}

static void check_budgets(complaint *c, const kvf_prune_settings *s, uint32_t tokens,
                          const char *of)
{
    const budget keep = {"keep", "keep_tokens", s->keep, s->keep_tokens};
    const budget propagate = {"propagate", "propagate_tokens", s->propagate, s->propagate_tokens};
    check_budget(c, s, &keep, tokens, of);
    check_budget(c, s, &propagate, tokens, of);
    const uint32_t kept = kvf_keep_count(s, tokens);
    if (s->sink_tokens && kept < tokens && s->sink_tokens >= kept)
        complain(c,
                 "sink_tokens = %u: only %u of %s %u tokens are kept; lower it below that, or "
                 "raise keep",
                 s->sink_tokens, kept, of, tokens);
}

static void check_settings(complaint *c, const kvf_prune_settings *s, const kvf_prune_shape *shape)
{
    if (s->pool_width % 2 == 0)
        complain(c, "pool_width = %u: must be odd; take %u or %u", s->pool_width, s->pool_width - 1,
                 s->pool_width + 1);
    check_layers(c, s, shape);
    if (s->window > shape->tokens_max)
        complain(c, "window = %u: the longest prompt has %u tokens; lower window", s->window,
                 shape->tokens_max);
    check_budgets(c, s, shape->tokens_max, "the longest prompt's");
}

static void check_policy(complaint *c, const kvf_prune_policy *policy)
{
    kvf_prune_config scratch;
    const char *wrong;
    if (!policy->name)
        complain(c, "policy->name = NULL: give the policy a name");
    else if (policy->needs & ~(uint32_t)KVF_PRUNE_ALL)
        complain(c, "policy->needs = %#x: policy %s may need %#x (kvf_prune_needs); clear the rest",
                 policy->needs, policy->name, KVF_PRUNE_ALL);
    else if (!policy->decide)
        complain(c, "policy->decide = NULL: policy %s must decide what a layer keeps",
                 policy->name);
    else if ((wrong = apply(policy, &scratch)))
        complain(c,
                 "policy->settings of policy %s: '%.*s' is no setting with a value in its range; "
                 "write NAME or NAME=VALUE with names of kvf_prune_settings",
                 policy->name, (int)strcspn(wrong, " "), wrong);
}

static void check_eviction(complaint *c, const kvf_prune_config *config)
{
    static const char *const names[] = {"NONE", "NAIVE", "PATCHED"};
    if (c->is_made || config->eviction == KVF_EVICTION_NONE)
        return;
    const char *eviction = names[config->eviction];
    const kvf_prune_settings *s = &config->settings;
    if (config->retention != KVF_RETENTION_EVICT)
        complain(c,
                 "eviction = %s: drops tokens between chunks, but retention = %s keeps "
                 "them; set retention = EVICT, or eviction = NONE",
                 eviction, config->retention == KVF_RETENTION_OFFLOAD ? "OFFLOAD" : "COMPLETE");
    if (s->two_pass || config->policy->reach == KVF_PRUNE_REACH_RESTART)
        complain(c,
                 "eviction = %s: policy %s%s starts over with other tokens, which a prompt in "
                 "chunks cannot; take another policy, or eviction = NONE",
                 eviction, config->policy->name, s->two_pass ? " with two_pass = 1" : "");
    if (config->policy->reach == KVF_PRUNE_REACH_PROPAGATE &&
        (s->propagate < 1.0f || s->propagate_tokens))
        complain(c,
                 "eviction = %s: policy %s hands fewer tokens to deeper layers, which a prompt "
                 "in chunks cannot; set propagate = 1, take another policy, or eviction = NONE",
                 eviction, config->policy->name);
}

static void check_completing(complaint *c, const kvf_prune_config *config)
{
    const kvf_prune_policy *policy = config->policy;
    if (c->is_made || config->retention != KVF_RETENTION_COMPLETE)
        return;
    if (config->settings.two_pass || policy->reach == KVF_PRUNE_REACH_RESTART)
        complain(c,
                 "retention = COMPLETE: policy %s%s starts over, so that no layer has all tokens; "
                 "take another policy, or OFFLOAD",
                 policy->name, config->settings.two_pass ? " with two_pass = 1" : "");
    else if (policy->reach == KVF_PRUNE_REACH_LAYER)
        complain(c,
                 "retention = COMPLETE: policy %s hands all tokens to all layers, so nothing is "
                 "left to compute; take OFFLOAD",
                 policy->name);
}

static kvf_status report(const complaint *c, kvf_error *error)
{
    if (!c->is_made)
        return KVF_OK;
    if (error) {
        *error = (kvf_error){.status = KVF_INVALID};
        snprintf(error->text, sizeof error->text, "%s", c->text);
    }
    return KVF_INVALID;
}

kvf_status kvf_prune_config_check_sized(const kvf_prune_config *config,
                                        const kvf_prune_shape *shape, size_t size, kvf_error *error)
{
    kvf_prune_given own;
    kvf_prune_shape own_shape;
    kvf_status status = kvf_prune_config_read(NULL, config, &own);
    if (status == KVF_OK)
        status = KVF_SIZED_TAKE(NULL, kvf_prune_shape, shape, size, &own_shape);
    if (status == KVF_OK)
        return kvf_prune_config_valid(&own.config, &own_shape, error);
    if (error)
        kvf_context_error(NULL, error);
    return status;
}

kvf_status kvf_prune_config_valid(const kvf_prune_config *config, const kvf_prune_shape *shape,
                                  kvf_error *error)
{
    char text[sizeof error->text];
    complaint c = {.text = text, .capacity = sizeof text};
    if (!shape->layers || !shape->kv_heads || !shape->tokens_max || !shape->query_heads ||
        shape->query_heads % shape->kv_heads)
        complain(&c, "shape: layers, kv_heads, query_heads (a multiple of kv_heads) and tokens_max "
                     "must be those of a cache");
    if (c.is_made)
        return report(&c, error);
    check_policy(&c, config->policy);
    char range[384];
    if (kvf_settings_wrong(prune_settings, SETTINGS, config, range, sizeof range))
        complain(&c, "%s", range);
    check_settings(&c, &config->settings, shape);
    check_eviction(&c, config);
    check_completing(&c, config);
    if (!config->settings.window && config->policy->settings &&
        kvf_prune_policy_takes(config->policy, "window"))
        complain(&c,
                 "window = 0: the policy looks at attention of the newest queries; set at least "
                 "1");
    if (c.is_made || !config->policy->check)
        return report(&c, error);
    char own[sizeof error->text] = "";
    const char *wrong = config->policy->check(&config->settings, shape, own, sizeof own);
    if (wrong)
        complain(&c, "%s", wrong);
    return report(&c, error);
}

const char *kvf_prune_prompt_problem(const kvf_prune_settings *settings, uint32_t tokens,
                                     char *text, size_t capacity)
{
    complaint c = {.text = text, .capacity = capacity};
    if (tokens < settings->window)
        complain(&c, "window = %u: the prompt has only %u tokens; lower window, or do not prune it",
                 settings->window, tokens);
    check_budgets(&c, settings, tokens, "the prompt's");
    return c.is_made ? text : NULL;
}
