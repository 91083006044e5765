/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Part of pruner.h. Pruning a layer of a prompt: measure, let the policy decide, check what it
 * said, keep.
 *
 * Knows no policy by name, no model and no kernel. The host waits only where numbers are to be
 * looked at or tokens change. A policy's answer is checked before anything is done with it, so that
 * an embedder's mistake is an error with its name and not a broken cache.
 */

#include <float.h>
#include <math.h>
#include <string.h>

#include "cache.h"
#include "common/clock.h"
#include "policies.h"
#include "pruner.h"

/* ---- slots ---- */

static kvf_prune_slot *slot_of(kvf_prune *prune, const kvf_sequence *sequence)
{
    return &prune->slots[sequence->slot];
}

static kvf_status check_empty(kvf_prune *prune, const kvf_sequence *sequence)
{
    for (uint32_t i = 0; i < prune->shape.layers; i++)
        if (sequence->layers[i].extent.length > 0)
            KVF_FAIL(prune->context, KVF_INVALID,
                     "the sequence is not empty: layer %u holds %u tokens; a pruned prompt begins "
                     "in a new sequence",
                     i, sequence->layers[i].extent.length);
    return KVF_OK;
}

kvf_status kvf_pruner_begin(kvf_prune *prune, kvf_sequence *sequence, uint32_t tokens)
{
    const kvf_prune_shape *shape = &prune->shape;
    KVF_TRY(kvf_sequence_check(prune->cache, sequence));
    KVF_TRY(check_empty(prune, sequence));
    if (tokens == 0 || tokens > shape->tokens_max)
        KVF_FAIL(prune->context, KVF_INVALID, "tokens = %u: a prompt has 1 to tokens_max = %u",
                 tokens, shape->tokens_max);
    char text[sizeof(kvf_error)];
    const char *problem =
        kvf_prune_prompt_problem(&prune->config.settings, tokens, text, sizeof text);
    if (problem)
        KVF_FAIL(prune->context, KVF_INVALID, "%s", problem);
    kvf_prune_slot *slot = slot_of(prune, sequence);
    *slot = (kvf_prune_slot){.sequence = sequence,
                             .generation = sequence->generation,
                             .prompt = tokens,
                             .tokens = tokens,
                             .chosen_layer = KVF_PRUNE_LAYER_AUTO,
                             .state = slot->state,
                             .sums = slot->sums};
    if (slot->state)
        memset(slot->state, 0, prune->state_bytes);
    return KVF_OK;
}

kvf_status kvf_prune_slot_find(kvf_prune *prune, kvf_sequence *sequence, uint32_t layer,
                               kvf_prune_slot **out)
{
    KVF_TRY(kvf_sequence_check(prune->cache, sequence));
    kvf_prune_slot *slot = slot_of(prune, sequence);
    if (slot->sequence != sequence || slot->generation != sequence->generation)
        KVF_FAIL(prune->context, KVF_INVALID,
                 "no prompt is under way in this sequence; call kvf_prune_begin first, and after "
                 "an error destroy the sequence");
    if (layer != slot->layer)
        KVF_FAIL(prune->context, KVF_INVALID,
                 "layer = %u: the next layer of this prompt is %u (pass %u)", layer, slot->layer,
                 slot->pass);
    *out = slot;
    return KVF_OK;
}

void kvf_prune_advance(kvf_prune *prune, kvf_prune_slot *slot, uint32_t kept)
{
    kvf_prune_stats *stats = &prune->stats;
    slot->kept += kept;
    slot->appended = 0;
    if (++slot->layer < prune->shape.layers)
        return;
    stats->prompts++;
    stats->tokens_computed += slot->computed;
    stats->tokens_full += (uint64_t)slot->prompt * prune->shape.layers;
    stats->kept += slot->kept;
    stats->chosen_layer = slot->chosen_layer;
    slot->sequence = NULL;
}

/* ---- what the device does ---- */

/* Where the device sees a word of the clock. */
static uint64_t *clock_word(const kvf_prune *prune, const uint64_t *word)
{
    return (uint64_t *)(void *)(prune->pinned_device + ((const char *)word - prune->pinned));
}

kvf_status kvf_prune_mark(kvf_prune *prune, uint64_t *sum, kvf_stream *stream)
{
    const kvf_stamp_args args = {.last = clock_word(prune, &prune->clock->last),
                                 .sum = sum ? clock_word(prune, sum) : NULL};
    return KVF_ENQUEUE(stream, stamp, args);
}

/* Device memory to where the host reads it: nothing where it reads it anyway. */
static kvf_status bring(kvf_prune *prune, void *host, const void *from, size_t bytes,
                        kvf_stream *stream)
{
    if (!prune->cache->kv_groups[0].dims.needs_mirror && host != prune->profile_host)
        return KVF_OK;
    char *to = prune->pinned_device + ((char *)host - prune->pinned);
    return prune->cache->device->ops->copy(stream, to, from, bytes);
}

static const float *readable(const kvf_prune *prune, const float *from)
{
    return prune->cache->kv_groups[0].dims.needs_mirror ? prune->scores_host : from;
}

static kvf_status wait_for(kvf_prune *prune, kvf_sequence *sequence, kvf_stream *stream)
{
    KVF_TRY(prune->cache->device->ops->stream_wait(stream));
    return kvf_sequence_check(prune->cache, sequence);
}

kvf_status kvf_prune_read(kvf_prune *prune, kvf_sequence *sequence, const float *from, size_t count,
                          kvf_stream *stream, const float **host)
{
    KVF_TRY(bring(prune, prune->scores_host, from, count * sizeof *from, stream));
    KVF_TRY(wait_for(prune, sequence, stream));
    *host = readable(prune, from);
    return KVF_OK;
}

/* ---- measuring ---- */

/* Policies are asked with fresh state at open; what they ask for later must have been reserved. */
static kvf_status check_needs(kvf_prune *prune, uint32_t layer, uint32_t needs)
{
    const uint32_t kinds = needs & (KVF_PRUNE_SCORES | KVF_PRUNE_LOGITS | KVF_PRUNE_SUMS);
    const char *name = prune->policy->name;
    if (needs & ~prune->needs)
        KVF_FAIL(prune->context, KVF_INVALID,
                 "policy '%s' needs %#x at layer %u, which needs_at returned for no layer with "
                 "fresh state",
                 name, needs & ~prune->needs, layer);
    if (kinds & (kinds - 1))
        KVF_FAIL(prune->context, KVF_INVALID,
                 "policy '%s' needs %#x at layer %u: scores, logits and sums exclude each other",
                 name, kinds, layer);
    return KVF_OK;
}

kvf_prune_view kvf_prune_view_of(const kvf_prune *prune, const kvf_prune_slot *slot)
{
    return (kvf_prune_view){.settings = &prune->config.settings,
                            .user = prune->policy->user,
                            .state = slot->state,
                            .layer = slot->layer,
                            .layers = prune->shape.layers,
                            .kv_heads = prune->shape.kv_heads,
                            .query_heads = prune->shape.query_heads,
                            .tokens = slot->tokens,
                            .prompt = slot->prompt,
                            .pass = slot->pass,
                            .window = kvf_min_u32(prune->config.settings.window, slot->tokens),
                            .positions = slot->sequence->layers[slot->layer].positions};
}

kvf_scores_args kvf_prune_scores_args(const kvf_prune *prune, const kvf_prune_view *view,
                                      uint32_t needs, uint32_t window)
{
    const kvf_prune_settings *settings = view->settings;
    return (kvf_scores_args){.layer = view->layer,
                             .window = window,
                             .first = view->tokens - window,
                             .window_mean = settings->window_mean,
                             .is_weighted = (needs & KVF_PRUNE_WEIGHTED) != 0,
                             .pool = settings->pool,
                             .pool_width = settings->pool_width,
                             .group_reduce = settings->group_reduce,
                             .out = prune->scores};
}

/* The newest queries over the tokens before them. */
static kvf_status enqueue_scores(kvf_prune *prune, const kvf_prune_slot *slot, uint32_t needs,
                                 const kvf_prune_view *view, kvf_stream *stream)
{
    kvf_scores_args args = kvf_prune_scores_args(prune, view, needs, prune->config.settings.window);
    args.candidates = slot->tokens - args.window;
    args.heads = needs & KVF_PRUNE_PROFILE ? prune->heads : NULL;
    return kvf_sequence_scores(prune->cache, slot->sequence, &args, prune->work, stream);
}

/* The last query over all. */
static kvf_status enqueue_logits(kvf_prune *prune, const kvf_prune_slot *slot,
                                 const kvf_prune_view *view, kvf_stream *stream)
{
    kvf_scores_args args = kvf_prune_scores_args(prune, view, KVF_PRUNE_LOGITS, 1);
    args.candidates = slot->tokens;
    args.is_raw = 1;
    args.pool_width = 1;
    return kvf_sequence_scores(prune->cache, slot->sequence, &args, prune->work, stream);
}

/* The kernel writes three floats per head. */
_Static_assert(sizeof(kvf_prune_profile) == KVF_PROFILE_VALUES * sizeof(float), "no padding");
_Static_assert(offsetof(kvf_prune_profile, entropy) == 0, "first");
_Static_assert(offsetof(kvf_prune_profile, mass) == sizeof(float), "second");
_Static_assert(offsetof(kvf_prune_profile, variance) == 2 * sizeof(float), "third");

/* The shape of each query head's attention, from the vectors that scoring left in heads. */
static kvf_status enqueue_profile(kvf_prune *prune, uint32_t candidates, kvf_stream *stream)
{
    const kvf_prune_settings *settings = &prune->config.settings;
    const kvf_profile_args args = {.vectors = prune->shape.query_heads,
                                   .stride = candidates,
                                   .count = candidates,
                                   .top = kvf_share_count(candidates + settings->window,
                                                          kvf_share_value(settings->mass_share)),
                                   .scores = prune->heads,
                                   .out = (void *)prune->profile};
    KVF_TRY(KVF_ENQUEUE(stream, profile, args));
    return bring(prune, prune->profile_host, prune->profile,
                 prune->shape.query_heads * sizeof *prune->profile, stream);
}

/* Fills what the view says of scores and profile, and waits if there is any. */
static kvf_status measure(kvf_prune *prune, kvf_prune_slot *slot, uint32_t needs,
                          kvf_prune_view *view, kvf_stream *stream)
{
    const uint32_t before = slot->tokens - view->window;
    const bool looks_back = needs & (KVF_PRUNE_SCORES | KVF_PRUNE_PROFILE) && before > 0;
    const bool is_raw = needs & KVF_PRUNE_LOGITS, is_sum = needs & KVF_PRUNE_SUMS;
    const float *from = is_sum ? slot->sums : prune->scores;
    if (is_raw || is_sum)
        view->candidates = slot->tokens;
    else if (needs & KVF_PRUNE_SCORES)
        view->candidates = before;
    if (is_sum && slot->appended != slot->tokens)
        KVF_FAIL(prune->context, KVF_INVALID,
                 "layer %u: kvf_prune_append saw the queries of %u of %u tokens; call it after "
                 "every kvf_prefill",
                 slot->layer, slot->appended, slot->tokens);
    if (!looks_back && !is_raw && !is_sum)
        return KVF_OK;
    KVF_TRY(kvf_prune_mark(prune, NULL, stream));
    if (looks_back)
        KVF_TRY(enqueue_scores(prune, slot, needs, view, stream));
    if (looks_back && needs & KVF_PRUNE_PROFILE)
        KVF_TRY(enqueue_profile(prune, before, stream));
    if (is_raw)
        KVF_TRY(enqueue_logits(prune, slot, view, stream));
    KVF_TRY(bring(prune, prune->scores_host, from,
                  (size_t)prune->shape.kv_heads * view->candidates * sizeof *from, stream));
    KVF_TRY(kvf_prune_mark(prune, &prune->clock->observe_ns, stream));
    KVF_TRY(wait_for(prune, slot->sequence, stream));
    view->scores = view->candidates ? readable(prune, from) : NULL;
    view->profile = looks_back && needs & KVF_PRUNE_PROFILE ? prune->profile_host : NULL;
    return KVF_OK;
}

/* The queries of a chunk over all tokens so far, added up; the sums have a vector per KV head of as
 * many tokens as the layer gets. */
static kvf_status add_queries(kvf_prune *prune, kvf_prune_slot *slot, const kvf_prefill_args *args,
                              kvf_stream *stream)
{
    const kvf_cache_config *c = &prune->cache->config;
    if (slot->appended == 0)
        KVF_TRY(prune->cache->device->ops->fill(
            stream, slot->sums, 0, (size_t)c->kv_heads * slot->tokens * sizeof *slot->sums));
    const kvf_scores_args scores = {.layer = args->layer,
                                    .q = args->q,
                                    .window = args->tokens,
                                    .first = slot->appended,
                                    .candidates = slot->tokens,
                                    .pool = KVF_POOL_MAX,
                                    .pool_width = 1,
                                    .group_reduce = prune->config.settings.group_reduce,
                                    .accumulates = 1,
                                    .out = slot->sums};
    KVF_TRY(kvf_sequence_scores(prune->cache, args->sequence, &scores, prune->work, stream));
    slot->appended += args->tokens;
    return KVF_OK;
}

kvf_status kvf_pruner_append(kvf_prune *prune, const kvf_prefill_args *args, kvf_stream *stream)
{
    kvf_prune_slot *slot = NULL;
    KVF_TRY(kvf_prune_slot_find(prune, args->sequence, args->layer, &slot));
    const kvf_prune_view view = kvf_prune_view_of(prune, slot);
    const uint32_t needs = kvf_prune_needs_at(prune->policy, &view);
    const uint32_t length = args->sequence->layers[slot->layer].extent.length;
    if (!(needs & KVF_PRUNE_SUMS))
        return KVF_OK;
    KVF_TRY(check_needs(prune, slot->layer, needs));
    if (!args->q)
        KVF_FAIL(prune->context, KVF_INVALID,
                 "q is NULL: policy '%s' needs all queries of the prompt", prune->policy->name);
    if (slot->appended + args->tokens != length || length > slot->tokens)
        KVF_FAIL(prune->context, KVF_INVALID,
                 "tokens = %u: layer %u holds %u of %u tokens and the queries of %u were seen; "
                 "call kvf_prune_append once after every kvf_prefill, with its arguments",
                 args->tokens, slot->layer, length, slot->tokens, slot->appended);
    KVF_TRY(kvf_prune_mark(prune, NULL, stream));
    KVF_TRY(add_queries(prune, slot, args, stream));
    return kvf_prune_mark(prune, &prune->clock->observe_ns, stream);
}

/* ---- what the policy said ---- */

typedef struct checked_ids {
    const char *name;
    const uint32_t *ids;
    uint32_t count;
    uint32_t window; /* newest tokens that must be there */
} checked_ids;

static kvf_status check_ids(kvf_prune *prune, const kvf_prune_view *view,
                            const checked_ids *checked)
{
    const char *policy = prune->policy->name;
    for (uint32_t i = 0; i < checked->count; i++) {
        if (checked->ids[i] >= view->tokens)
            KVF_FAIL(prune->context, KVF_INVALID,
                     "policy '%s' at layer %u: %s[%u] = %u: the layer has %u tokens", policy,
                     view->layer, checked->name, i, checked->ids[i], view->tokens);
        if (i > 0 && checked->ids[i] <= checked->ids[i - 1])
            KVF_FAIL(prune->context, KVF_INVALID,
                     "policy '%s' at layer %u: %s[%u] = %u follows %u; indexes must ascend", policy,
                     view->layer, checked->name, i, checked->ids[i], checked->ids[i - 1]);
    }
    for (uint32_t i = 1; i <= checked->window; i++) /* from the end, so that the first is missing */
        if (checked->ids[checked->count - i] != view->tokens - i)
            KVF_FAIL(prune->context, KVF_INVALID,
                     "policy '%s' at layer %u: %s lacks token %u; the newest %u (the window) are "
                     "always kept",
                     policy, view->layer, checked->name, view->tokens - i, checked->window);
    return KVF_OK;
}

static kvf_status check_answer(kvf_prune *prune, const kvf_prune_view *view,
                               const kvf_prune_answer *answer)
{
    const char *name = prune->policy->name;
    const uint32_t window = answer->restart ? 0 : view->window;
    if (answer->restart && prune->config.retention == KVF_RETENTION_COMPLETE)
        KVF_FAIL(prune->context, KVF_INVALID,
                 "policy '%s' at layer %u: restart: retention = COMPLETE continues from the layers "
                 "that hold all tokens; take OFFLOAD, or another policy",
                 name, view->layer);
    if (answer->restart && view->pass > 0)
        KVF_FAIL(prune->context, KVF_INVALID,
                 "policy '%s' at layer %u: restart in pass %u: a restart loop; a prompt starts "
                 "over once",
                 name, view->layer, view->pass);
    if (answer->propagate_count > view->tokens || answer->propagate_count < kvf_max_u32(window, 1))
        KVF_FAIL(prune->context, KVF_INVALID,
                 "policy '%s' at layer %u: propagate_count = %u: must be %u to %u", name,
                 view->layer, answer->propagate_count, kvf_max_u32(window, 1), view->tokens);
    if (answer->propagate_count < view->tokens) {
        const checked_ids checked = {"propagate", answer->propagate, answer->propagate_count,
                                     window};
        KVF_TRY(check_ids(prune, view, &checked));
    }
    if (answer->restart)
        return KVF_OK; /* what it would keep is not read */
    if (answer->keep_count > view->tokens || answer->keep_count < kvf_max_u32(window, 1))
        KVF_FAIL(prune->context, KVF_INVALID,
                 "policy '%s' at layer %u: keep_count = %u: must be %u (the window) to %u", name,
                 view->layer, answer->keep_count, kvf_max_u32(window, 1), view->tokens);
    for (uint32_t h = 0; h < view->kv_heads && answer->keep_count < view->tokens; h++) {
        const checked_ids checked = {"keep", answer->keep + (size_t)h * answer->keep_count,
                                     answer->keep_count, window};
        KVF_TRY(check_ids(prune, view, &checked));
    }
    return KVF_OK;
}

/* A policy may point the ids elsewhere only by writing them: the arrays are the pruner's. */
kvf_status kvf_prune_decide(kvf_prune *prune, const kvf_prune_view *view, kvf_prune_answer *answer)
{
    const uint64_t start = kvf_now_ns();
    *answer = (kvf_prune_answer){.keep = prune->keep,
                                 .keep_count = view->tokens,
                                 .propagate = prune->propagate,
                                 .propagate_count = view->tokens,
                                 .measure = NAN};
    prune->policy->decide(view, answer);
    answer->keep = prune->keep;
    answer->propagate = prune->propagate;
    if (view->pass == 0)
        prune->measures[view->layer] = answer->measure;
    const kvf_status status = check_answer(prune, view, answer);
    prune->stats.decide_ns += kvf_now_ns() - start;
    return status;
}

/* ---- keeping ---- */

/* The host may write scores_host. */
static kvf_status take_scores(kvf_prune *prune)
{
    if (prune->is_retaining)
        KVF_TRY(prune->cache->device->ops->event_wait(prune->retained));
    prune->is_retaining = 0;
    return KVF_OK;
}

/* scores_host [kv_heads, candidates], if measured, becomes [kv_heads, tokens] in place, from the
 * end: what is not kept is -INFINITY; the window was not measured and comes first. */
static void mask_scores(const kvf_prune *prune, const kvf_prune_view *view,
                        const kvf_prune_answer *answer)
{
    const uint32_t n = view->tokens, measured = view->candidates;
    for (uint32_t h = view->kv_heads; h-- > 0;) {
        const uint32_t *keep = answer->keep + (size_t)h * answer->keep_count;
        float *to = prune->scores_host + (size_t)h * n;
        if (measured)
            memmove(to, view->scores + (size_t)h * measured, measured * sizeof *to);
        for (uint32_t i = 0, next = 0; i < n; i++) {
            const bool is_kept = next < answer->keep_count && keep[next] == i;
            next += is_kept;
            if (!is_kept)
                to[i] = -INFINITY;
            else if (i >= measured)
                to[i] = measured ? FLT_MAX : 0.0f;
        }
    }
}

/* Tokens that a policy keeps seed the static set; the rest stays in host pages. */
static kvf_status seed(kvf_prune *prune, const kvf_prune_slot *slot, const kvf_prune_view *view,
                       const kvf_prune_answer *answer, kvf_stream *stream)
{
    const kvf_device_ops *ops = prune->cache->device->ops;
    const size_t count = (size_t)view->kv_heads * view->tokens;
    if (prune->cache->kv_groups[0].dims.static_tokens == 0)
        return KVF_OK;
    KVF_TRY(take_scores(prune));
    mask_scores(prune, view, answer);
    KVF_TRY(kvf_prune_mark(prune, NULL, stream));
    if (prune->cache->kv_groups[0].dims.needs_mirror) {
        const char *from = prune->pinned_device + ((char *)prune->scores_host - prune->pinned);
        KVF_TRY(ops->copy(stream, prune->scores, from, count * sizeof(float)));
    }
    KVF_TRY(kvf_sequence_seed(prune->cache, slot->sequence, slot->layer, prune->scores, stream));
    KVF_TRY(kvf_prune_mark(prune, &prune->clock->retain_ns, stream));
    KVF_TRY(ops->event_record(prune->retained, stream));
    prune->is_retaining = 1;
    return KVF_OK;
}

kvf_status kvf_prune_evict(kvf_prune *prune, kvf_sequence *sequence, uint32_t layer,
                           const uint32_t *ids, uint32_t count, kvf_stream *stream)
{
    KVF_TRY(kvf_prune_mark(prune, NULL, stream));
    KVF_TRY(kvf_sequence_keep(prune->cache, sequence, layer, ids, count, prune->keep_work, stream));
    return kvf_prune_mark(prune, &prune->clock->retain_ns, stream);
}

static kvf_status retain(kvf_prune *prune, const kvf_prune_slot *slot, const kvf_prune_view *view,
                         const kvf_prune_answer *answer, kvf_stream *stream)
{
    if (answer->keep_count == view->tokens)
        return KVF_OK;
    if (prune->config.retention != KVF_RETENTION_EVICT)
        return seed(prune, slot, view, answer, stream);
    return kvf_prune_evict(prune, slot->sequence, slot->layer, answer->keep, answer->keep_count,
                           stream);
}

static kvf_status start_over(kvf_prune *prune, kvf_prune_slot *slot)
{
    kvf_footprint_restart(prune->cache, slot->sequence, slot->tokens);
    KVF_TRY(kvf_sequence_clear(prune->cache, slot->sequence));
    slot->generation = slot->sequence->generation;
    slot->pass++;
    slot->layer = 0;
    slot->appended = 0;
    slot->kept = 0;
    return KVF_OK;
}

/* ---- a layer ---- */

static kvf_status apply(kvf_prune *prune, kvf_prune_slot *slot, const kvf_prune_view *view,
                        const kvf_prune_answer *answer, kvf_stream *stream)
{
    const bool shortens = answer->restart || answer->propagate_count < view->tokens;
    if (answer->is_chosen)
        slot->chosen_layer = slot->layer;
    slot->computed += view->tokens;
    slot->tokens = answer->propagate_count;
    if (shortens && !view->scores && !view->profile) /* else it was waited for */
        KVF_TRY(wait_for(prune, slot->sequence, stream));
    if (answer->restart)
        return start_over(prune, slot);
    KVF_TRY(retain(prune, slot, view, answer, stream));
    kvf_prune_advance(prune, slot, answer->keep_count);
    return KVF_OK;
}

static kvf_status prune_layer(kvf_prune *prune, kvf_prune_slot *slot, kvf_stream *stream,
                              kvf_prune_result *result)
{
    kvf_prune_view view = kvf_prune_view_of(prune, slot);
    const uint32_t needs = kvf_prune_needs_at(prune->policy, &view);
    kvf_prune_answer answer;
    KVF_TRY(check_needs(prune, slot->layer, needs));
    KVF_TRY(measure(prune, slot, needs, &view, stream));
    KVF_TRY(kvf_prune_decide(prune, &view, &answer));
    KVF_TRY(apply(prune, slot, &view, &answer, stream));
    const bool is_short = answer.propagate_count < view.tokens;
    *result = (kvf_prune_result){.keep_count = answer.restart ? 0 : answer.keep_count,
                                 .propagate = is_short ? answer.propagate : NULL,
                                 .propagate_count = answer.propagate_count,
                                 .restart = answer.restart};
    return KVF_OK;
}

kvf_status kvf_pruner_layer(kvf_prune *prune, kvf_sequence *sequence, uint32_t layer,
                            kvf_stream *stream, kvf_prune_result *result)
{
    kvf_prune_slot *slot = NULL;
    KVF_TRY(kvf_prune_slot_find(prune, sequence, layer, &slot));
    if (sequence->layers[layer].extent.length != slot->tokens)
        KVF_FAIL(prune->context, KVF_INVALID,
                 "layer %u holds %u of %u tokens; prefill the rest before it is pruned", layer,
                 sequence->layers[layer].extent.length, slot->tokens);
    const kvf_status status = prune_layer(prune, slot, stream, result);
    if (status != KVF_OK)
        slot->sequence = NULL;
    return status;
}
