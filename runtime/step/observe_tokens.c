/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Part of retain.h. How much queries look at the tokens of a layer: attention per query head,
 * pooled, then reduced over the group.
 *
 * Knows no policy. Statistics of queries are taken for all heads of the group at once; scores head
 * by head, each into the same [kv_heads, tokens] buffer, because pooling comes before the
 * reduction. Where nothing is pooled and nobody wants single heads, the kernel reduces by itself.
 * Memory is that buffer and what the caller gives, whatever the number of queries.
 */

#include "addressable.h"
#include "cache.h"
#include "call.h"
#include "retain.h"
#include "select.h"

/* One call: `observe` is common to all its launches, for its whole window. */
typedef struct scoring {
    kvf_call *call;
    const kvf_scores_args *args;
    kvf_observe_args observe;
    float *work;
    uint32_t members; /* launches of scores per piece of the window */
    uint32_t most;    /* queries of a piece */
    uint32_t pieces;
} scoring;

size_t kvf_scores_work_floats(const kvf_cache *cache)
{
    return (size_t)cache->config.kv_heads * cache->config.tokens_max;
}

/* ---- checks ---- */

static kvf_status check_queries(kvf_cache *cache, const kvf_layer *layer,
                                const kvf_scores_args *args)
{
    const uint32_t kept = kvf_kept_queries(layer->kv_group, layer);
    if (args->window == 0)
        KVF_FAIL(cache->context, KVF_INVALID, "window = 0: at least one query scores tokens");
    if (args->q) {
        if (args->first > layer->extent.length || args->window > layer->extent.length - args->first)
            KVF_FAIL(cache->context, KVF_INVALID,
                     "first = %u, window = %u: layer %u holds %u tokens; score queries of tokens "
                     "that were appended",
                     args->first, args->window, args->layer, layer->extent.length);
        return KVF_OK;
    }
    if (args->window > cache->config.observe_window)
        KVF_FAIL(cache->context, KVF_INVALID,
                 "window = %u: observe_window = %u queries are kept; open the cache with more",
                 args->window, cache->config.observe_window);
    if (args->window > kept)
        KVF_FAIL(cache->context, KVF_INVALID,
                 "window = %u: layer %u has %u kept queries; append tokens with their queries, or "
                 "lower window",
                 args->window, args->layer, kept);
    return KVF_OK;
}

static kvf_status check(kvf_cache *cache, const kvf_sequence *sequence, const kvf_scores_args *args)
{
    const kvf_cache_config *c = &cache->config;
    if (!args || !args->out)
        KVF_FAIL(cache->context, KVF_INVALID, "out is NULL; pass room for the scores");
    if (c->observe_window == 0)
        KVF_FAIL(cache->context, KVF_INVALID,
                 "observe_window = 0: nothing was reserved; open the cache with the window's "
                 "number of queries");
    KVF_TRY(kvf_layer_check(cache, args->layer));
    KVF_TRY(kvf_sequence_check(cache, sequence));
    if (args->pool_width % 2 == 0)
        KVF_FAIL(cache->context, KVF_INVALID, "pool_width = %u: must be odd; 1 = none",
                 args->pool_width);
    if (args->candidates > c->tokens_max || args->begin > args->candidates)
        KVF_FAIL(cache->context, KVF_INVALID,
                 "begin = %u, candidates = %u: must ascend, to tokens_max = %u at most",
                 args->begin, args->candidates, c->tokens_max);
    const kvf_layer *layer = &sequence->layers[args->layer];
    return check_queries(cache, layer, args);
}

/* ---- launches ---- */

/* Arguments that all launches share. */
static kvf_observe_args observe_args(const kvf_call *call, const kvf_scores_args *args)
{
    const kvf_paging *p = &call->kv_group->dims.paging;
    const kvf_row *row = call->row_host;
    kvf_observe_args a = kvf_call_observe_args(call, 0);
    a.window_mean = args->window_mean;
    a.group_reduce = args->group_reduce;
    a.limit_first = args->first;
    a.window = args->window;
    a.is_weighted = args->is_weighted;
    a.is_raw = args->is_raw;
    a.accumulates = 1;
    a.token_first = args->begin;
    a.q = args->q;
    if (!args->q) { /* the newest of the ring, whose newest belongs to the last token */
        a.q = row->queries;
        a.ring_slots = p->query_window;
        a.ring_first = (row->query_slot + 1 + p->query_window - args->window) % p->query_window;
        a.limit_first = row->length - args->window;
    }
    return a;
}

/* Queries of the caller as the element type has them. */
static kvf_status round_piece(const scoring *s, uint32_t first, kvf_observe_args *piece)
{
    const kvf_cache *cache = s->call->cache;
    const kvf_cache_config *c = &cache->config;
    if (!s->args->q || !kvf_has_wide_queries(c))
        return KVF_OK;
    const float *q = (const float *)s->args->q + (size_t)first * c->query_heads * c->head_dim;
    piece->q = kvf_inputs_seen(cache, q, NULL, NULL).q;
    return kvf_inputs_round(s->call, q, NULL, NULL, piece->window);
}

/* Scores of one head of every group, or of whole groups, into token_score. */
static kvf_status score_member(scoring *s, uint32_t member)
{
    kvf_call *call = s->call;
    kvf_kv_group *kv_group = call->kv_group;
    const size_t bytes =
        (size_t)kv_group->config.kv_heads * kvf_token_stride(kv_group, 0) * sizeof(float);
    KVF_TRY(kv_group->device->ops->fill(call->stream, s->observe.score, 0, bytes));
    for (uint32_t piece = 0; piece < s->pieces; piece++) {
        const uint32_t first = piece * s->most;
        kvf_observe_args a =
            kvf_observe_piece(&s->observe, first, kvf_min_u32(s->most, s->args->window - first));
        KVF_TRY(round_piece(s, first, &a));
        /* One piece keeps the statistics of all heads; of several only the last would. */
        a.group_first = s->members > 1 && s->pieces > 1 ? member : 0;
        a.group_count = s->members > 1 && s->pieces > 1 ? 1 : 0;
        if (!a.is_raw && (s->pieces > 1 || member == 0))
            KVF_TRY(KVF_LAUNCH(call, observe_stats, a));
        a.group_first = s->members > 1 ? member : 0;
        a.group_count = s->members > 1 ? 1 : 0;
        KVF_TRY(KVF_LAUNCH(call, observe_score, a));
    }
    return KVF_OK;
}

/* token_score of the candidates, head by head, to `out`, `stride` apart. */
static kvf_pool_args pool_args(const scoring *s, float *out, size_t stride)
{
    const kvf_kv_group *kv_group = s->call->kv_group;
    return (kvf_pool_args){.vectors = kv_group->config.kv_heads,
                           .stride = kvf_token_stride(kv_group, 0),
                           .count = s->args->candidates - s->args->begin,
                           .width = 1,
                           .out_stride = (uint32_t)stride,
                           .in = s->observe.score + s->args->begin,
                           .out = out};
}

/* The unpooled scores of one head of every group. */
static kvf_status put_heads(const scoring *s, uint32_t member)
{
    const uint32_t group = s->call->kv_group->dims.paging.group;
    const size_t count = s->args->candidates - s->args->begin;
    kvf_pool_args a = pool_args(s, s->args->heads + member * count, group * count);
    a.combine = s->args->accumulates ? KVF_COMBINE_ADD : KVF_COMBINE_SET;
    return KVF_LAUNCH(s->call, pool, a);
}

/* Pool, and reduce into `out`, which has something already if `is_there`. */
static kvf_status combine_member(const scoring *s, float *out, bool is_there)
{
    const kvf_scores_args *args = s->args;
    kvf_pool_args a = pool_args(s, out, args->candidates - args->begin);
    a.width = args->pool_width;
    a.average = args->pool == KVF_POOL_AVERAGE;
    if (is_there)
        a.combine = args->group_reduce == KVF_GROUP_MAX && s->members > 1 ? KVF_COMBINE_MAX
                                                                          : KVF_COMBINE_ADD;
    if (s->members > 1 && args->group_reduce == KVF_GROUP_MEAN_SOFTMAX)
        a.scale = 1.0f / (float)s->members;
    return KVF_LAUNCH(s->call, pool, a);
}

/* A maximum is complete before it is added to what is there. */
static kvf_status add_work(const scoring *s)
{
    kvf_pool_args a = pool_args(s, s->args->out, 0);
    a.stride = a.count;
    a.in = s->work;
    a.combine = KVF_COMBINE_ADD;
    return KVF_LAUNCH(s->call, pool, a);
}

static kvf_status enqueue(scoring *s)
{
    const kvf_scores_args *args = s->args;
    const bool by_max = args->group_reduce == KVF_GROUP_MAX;
    const uint32_t group = s->call->kv_group->dims.paging.group;
    s->most = kvf_observe_window_max(group);
    s->pieces = kvf_div_ceil_u32(args->window, s->most);
    s->members = group;
    if (args->pool_width == 1 && !args->heads && (s->pieces == 1 || !by_max))
        s->members = 1;
    const bool is_apart = by_max && args->accumulates && s->members > 1;
    float *out = is_apart ? s->work : args->out;
    KVF_TRY(kvf_call_send(s->call));
    KVF_TRY(kvf_call_cover(s->call, &(kvf_observation){0}));
    for (uint32_t m = 0; m < s->members; m++) {
        KVF_TRY(score_member(s, m));
        if (args->heads)
            KVF_TRY(put_heads(s, m));
        KVF_TRY(combine_member(s, out, m > 0 || (args->accumulates && !is_apart)));
    }
    return is_apart ? add_work(s) : KVF_OK;
}

kvf_status kvf_sequence_scores(kvf_cache *cache, kvf_sequence *sequence,
                               const kvf_scores_args *args, float *work, kvf_stream *stream)
{
    kvf_call call = {.cache = cache};
    KVF_TRY(check(cache, sequence, args));
    if (args->candidates == args->begin)
        return KVF_OK;
    KVF_TRY(kvf_call_open(&call, args->layer, &sequence, true, stream));
    kvf_call_rows(&call);
    scoring s = {.call = &call, .args = args, .work = work};
    s.observe = observe_args(&call, args);
    return kvf_call_end(&call, enqueue(&s));
}
