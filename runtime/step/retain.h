/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_RUNTIME_RETAIN_H
#define KVF_RUNTIME_RETAIN_H

/*
 * Tokens that a sequence has: look at those of a layer, keep some of them, seed the static set, cut
 * the newest off, begin a second sequence with them.
 *
 * Knows no policy. All functions enqueue on the stream and follow the cache's order like any other
 * call; arrays said to be of the host are copied before they return. Invariants of cache.h hold
 * after every call. The cache has no streaming heads, but in a fork, and is not
 * being recorded.
 */

#include "call.h"
#include "kvferry/prune.h"

/* How much queries look at the tokens of a layer (observe, then pool, then reduce the group). */
typedef struct kvf_scores_args {
    uint32_t layer;
    const void *q;       /* [window, query_heads, head_dim] in device memory; NULL = the newest of
                            the kept queries */
    uint32_t window;     /* W queries; NULL q: at most observe_window */
    uint32_t first;      /* token index of query 0; queries are of consecutive tokens */
    uint32_t begin;      /* tokens below it are as if they were not there; 0 = all are */
    uint32_t candidates; /* tokens begin .. candidates-1 are scored and pooled; may be more than
                            the layer holds: tokens that are not there yet score 0 (chunk by chunk
                            into the same sums) */
    uint32_t window_mean;
    uint32_t is_weighted; /* query w counts (w + 1) / W */
    uint32_t is_raw;      /* q.k without scale and softmax; tokens after a query count 0 for it */
    kvf_pool_kind pool;
    uint32_t pool_width; /* 1 = none */
    kvf_group_reduce group_reduce;
    uint32_t accumulates; /* add to out instead of writing it */
    float *out;           /* [kv_heads, candidates - begin] in device memory */
    float *heads; /* [query_heads, candidates - begin] not pooled, in device memory; NULL = not
                     wanted */
} kvf_scores_args;

/* Device memory that the caller gives for scores, of floats: kvf_scores_work_floats(). */
size_t kvf_scores_work_floats(const kvf_cache *cache);
KVF_CHECKED kvf_status kvf_sequence_scores(kvf_cache *cache, kvf_sequence *sequence,
                                           const kvf_scores_args *args, float *work,
                                           kvf_stream *stream);

/* Refresh the static set of a layer now: per KV head the tokens of highest score, as many as fit.
 * scores is device memory [kv_heads, length of the layer]; -INFINITY is never chosen. The next
 * refresh comes after refresh_interval decode steps. Does nothing where the cache has no static
 * set. */
KVF_CHECKED kvf_status kvf_sequence_seed(kvf_cache *cache, kvf_sequence *sequence, uint32_t layer,
                                         const float *scores, kvf_stream *stream);

/* Keep tokens ids [kv_heads, count] (host, ascending per KV head, the same count for all) of a
 * layer, in that order, and drop the others: pages that do not change stay, the rest is gathered
 * into `work` (device memory, kvf_keep_work_bytes()) and appended again. Kept queries stay valid.
 * The position of an index is the highest over KV heads. Waits for the stream until the ids are
 * read. KVF_FULL, which changes nothing, only where pages are shared with a fork. */
size_t kvf_keep_work_bytes(const kvf_cache *cache);
void kvf_keep_take(kvf_call *call); /* what it has in its frame */
KVF_CHECKED kvf_status kvf_sequence_keep(kvf_cache *cache, kvf_sequence *sequence, uint32_t layer,
                                         const uint32_t *ids, uint32_t count, void *work,
                                         kvf_stream *stream);

/*
 * A second sequence from the same tokens.
 */

/* The parent was checked. A failure after the first copy breaks the cache. */
KVF_CHECKED kvf_status kvf_fork(kvf_cache *cache, kvf_sequence *parent, kvf_stream *stream,
                                kvf_sequence **out);

/* Arrays of a fork in its frame: a row per layer. */
void kvf_fork_take(kvf_call *call);

/*
 * Cutting the newest tokens off a sequence of a cache without streaming heads.
 */

/* Tokens at positions below `tokens` stay in every layer; arguments but `tokens` were checked. */
KVF_CHECKED kvf_status kvf_truncate(kvf_cache *cache, kvf_sequence *sequence, uint32_t tokens,
                                    kvf_stream *stream);

#endif
