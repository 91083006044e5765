/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_KERNELS_OBSERVE_ARGS_H
#define KVF_KERNELS_OBSERVE_ARGS_H

/*
 * Contracts, arguments and tasks: scores of tokens, and static sets made of them.
 * See kernels.h for what holds for every kernel.
 */

#include <math.h>

#include "cap.h"
#include "paging.h"
#include "score/score_args.h"

/* ---- observe: attention of the last queries over many keys, streamed ----
 * Queries: W tokens x group, per KV head; a[w,g,j] = softmax over attended j of scale q.k_j,
 * capped (cap.h), where query w sees tokens with index <= limit[w]. Tokens are given as spans in
 * order (skip bits are honoured); the index of token t of span s is span_index[s] + t. Step 1
 * writes running maximum and sum per (head, chunk of KVF_OBSERVE_SPANS spans, query); step 2 merges
 * them over chunks, in order, and writes score[h, s * page_size + t] = reduce_g reduce_w a[w,g,j],
 * 0 for skipped or absent tokens or adds that to what is there. window_mean: divide by W, else sum.
 * is_weighted: query w counts (w + 1) / W first. group kind: MEAN_SOFTMAX = mean of a over g; MAX;
 * SUM. Only heads group_first
 * .. group_first + group_count - 1 of each group take part. The launch may be part of a longer
 * window: its queries are window_first .. of window_total, which is W above.
 * is_raw: a = q.k_j, neither scaled nor capped; step 1 is not needed.
 * Nothing of size W x tokens is stored. A task is one (KV head, chunk) in both steps.
 */
#define KVF_OBSERVE_SPANS       64u
#define KVF_OBSERVE_WINDOW_MAX  128u
#define KVF_OBSERVE_QUERIES_MAX (KVF_SUBGROUP_HEADS * KVF_OBSERVE_WINDOW_MAX)

typedef struct kvf_observe_args {
    kvf_shape shape;
    uint32_t kv_heads;
    uint32_t group;
    uint32_t window;    /* queries of this launch, 1 .. kvf_observe_window_max(group) */
    uint32_t spans_max; /* stride of spans */
    uint32_t window_mean;
    kvf_group_reduce group_reduce;
    float scale;
    float cap;
    uint32_t group_first;
    uint32_t group_count;  /* 0 = all of the group */
    uint32_t ring_slots;   /* query w is at (ring_first + w) % ring_slots of q; 0 = at w */
    uint32_t ring_first;   /* < ring_slots */
    uint32_t limit_first;  /* without limit: query w sees tokens with index <= limit_first + w */
    uint32_t window_first; /* of the whole window, of query 0 */
    uint32_t window_total; /* 0 = window */
    uint32_t is_weighted;
    uint32_t is_raw;
    uint32_t accumulates;       /* 1: add to score */
    uint32_t token_first;       /* tokens with a lower index are as if they were not there */
    const void *q;              /* [window, kv_heads, group, head_dim] dtype */
    const uint32_t *limit;      /* [window] highest token index seen; NULL: limit_first */
    const kvf_span *spans;      /* [kv_heads, spans_max] */
    const uint32_t *span_index; /* [kv_heads, spans_max] token index of token 0 of the span */
    const uint32_t *span_count; /* [kv_heads] */
    const float *sinks; /* [kv_heads, group] logits that join the sum; NULL = none; step 2 */
    float *query_max;   /* [kv_heads, chunks_max = ceil(spans_max/64), group, window] */
    float *query_sum;   /* likewise */
    float *score;       /* [kv_heads, spans_max * page_size]; step 2 */
} kvf_observe_args;
KVF_TASKS(observe_stats, kvf_observe_args,
          kvf_div_ceil_u32(a->spans_max, KVF_OBSERVE_SPANS) * a->kv_heads)
KVF_TASKS(observe_score, kvf_observe_args, kvf_observe_stats_tasks(a))

/* Queries that a launch takes of groups of so many heads. */
KVF_INLINE uint32_t kvf_observe_window_max(uint32_t group)
{
    return kvf_min_u32(KVF_OBSERVE_WINDOW_MAX, KVF_OBSERVE_QUERIES_MAX / group);
}

/* Queries first .. first + count - 1 of the window of a launch, as a launch of its own: the part
 * that they have in its scores. */
KVF_INLINE kvf_observe_args kvf_observe_piece(const kvf_observe_args *whole, uint32_t first,
                                              uint32_t count)
{
    const size_t query = (size_t)whole->kv_heads * whole->group * kvf_key_bytes(&whole->shape);
    kvf_observe_args a = *whole;
    a.window = count;
    a.window_first += first;
    a.window_total = whole->window_total ? whole->window_total : whole->window;
    a.limit_first += first;
    a.limit = whole->limit ? whole->limit + first : NULL;
    if (a.ring_slots)
        a.ring_first = (whole->ring_first + first) % a.ring_slots;
    else
        a.q = kvf_offset(whole->q, first * query);
    return a;
}

KVF_INLINE float kvf_observe_sink(const kvf_observe_args *a, uint32_t head, uint32_t g)
{
    return a->sinks ? a->sinks[head * a->group + g] : -INFINITY;
}

/* Heads of the group that take part. */
KVF_INLINE uint32_t kvf_observe_heads(const kvf_observe_args *a)
{
    return a->group_count ? a->group_count : a->group;
}

/* Where in q query w of the launch is. */
KVF_INLINE uint32_t kvf_observe_place(const kvf_observe_args *a, uint32_t w)
{
    if (a->ring_slots == 0)
        return w;
    const uint32_t place = a->ring_first + w;
    return place < a->ring_slots ? place : place - a->ring_slots;
}

/* The weight of query w of the launch. */
KVF_INLINE float kvf_observe_weight(const kvf_observe_args *a, uint32_t w)
{
    const float total = (float)(a->window_total ? a->window_total : a->window);
    const float weight = a->is_weighted ? (float)(a->window_first + w + 1) / total : 1.0f;
    return a->window_mean ? weight / total : weight;
}

/* ---- pool: smooth scores along tokens ----
 * x[r, j] = max or average (zeros padded, always divided by `width`) of in[r, j-width/2 ..
 * j+width/2], times `scale` unless that is 0; out[r, j] = x, or out + x, or the larger of the two.
 * One task per vector r.
 */
typedef enum kvf_pool_combine {
    KVF_COMBINE_SET,
    KVF_COMBINE_ADD,
    KVF_COMBINE_MAX
} kvf_pool_combine;

typedef struct kvf_pool_args {
    uint32_t vectors;
    uint32_t stride; /* of in */
    uint32_t count;
    uint32_t width; /* odd */
    uint32_t average;
    uint32_t out_stride; /* 0 = stride */
    kvf_pool_combine combine;
    float scale; /* 0 = none */
    const float *in;
    float *out; /* not in, unless width is 1 */
} kvf_pool_args;
KVF_TASKS(pool, kvf_pool_args, a->vectors)

/* ---- profile: the shape of attention over tokens ----
 * With a = scores[r, 0 .. count) divided by its sum, where what is not a positive number counts as
 * 0: out[r] = - sum a ln a; the sum of the `top` largest a (all if there are fewer); the mean of
 * (a - 1/count)^2. Sum 0: three zeros. The sum is at most FLT_MAX. One task per vector
 * r.
 */
#define KVF_PROFILE_VALUES 3u

typedef struct kvf_profile_args {
    uint32_t vectors;
    uint32_t stride; /* stride of scores, >= count */
    uint32_t count;
    uint32_t top;
    const float *scores; /* [vectors, stride] */
    float *out;          /* [vectors, KVF_PROFILE_VALUES] */
} kvf_profile_args;
KVF_TASKS(profile, kvf_profile_args, a->vectors)

/* ---- cover: the tokens of one row as spans, for observe and for dense attention. resident == 0:
 * every run in order, so that position i of the result is token i. resident == 1: static pages,
 * chosen pages that have a slot, by ascending id and without static tokens, then the window page by
 * page. Also the candidates for the static set (first, count, both in tokens from the first span)
 * and how many to take. One task per KV head. */
typedef struct kvf_cover_args {
    kvf_paging paging;
    uint32_t resident;
    uint32_t spans_max;
    const kvf_row *row;   /* [1] */
    kvf_span *spans;      /* [kv_heads, spans_max] out */
    uint32_t *span_index; /* [kv_heads, spans_max] out */
    uint32_t *span_count; /* [kv_heads] out */
    uint32_t *first;      /* [kv_heads] out; the rest may be NULL together */
    uint32_t *count;      /* [kv_heads] out */
    uint32_t *take;  /* [kv_heads] out: the row's static tokens, or take_tokens if that is not 0 */
    uint32_t *limit; /* [query_window] out: token of each kept query */
    uint32_t take_tokens;
} kvf_cover_args;
KVF_TASKS(cover, kvf_cover_args, a->paging.kv_heads)

/* Tokens of a span of a cover: those of a page, or of a run. */
KVF_INLINE uint32_t kvf_cover_tokens(const kvf_paging *p, uint32_t resident)
{
    return resident ? p->shape.page_size : p->block_size;
}

/* ---- pack: a new static store out of the old one and of pages. Ids are positions in the spans of
 * `cover`. Updates bits; digests do not depend on them. One task per KV head. */
typedef struct kvf_pack_args {
    kvf_paging paging;
    uint32_t resident;
    uint32_t spans_max;
    uint32_t ids_max;
    const kvf_row *row; /* [1]; its store is the old one */
    const kvf_span *spans;
    const uint32_t *span_index;
    const int32_t *ids;       /* [kv_heads, ids_max] ascending */
    const uint32_t *id_count; /* [kv_heads] */
    char *static_kv;          /* new ones, as in kvf_row */
    uint32_t *static_ids;
    uint32_t *static_count;
    kvf_layer_counters *counters;
} kvf_pack_args;
KVF_TASKS(pack, kvf_pack_args, a->paging.kv_heads)

#endif
