/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_PRUNE_PRUNER_H
#define KVF_PRUNE_PRUNER_H

/*
 * A pruner: the buffers that measuring and deciding need, and how far each prompt has come. And the
 * completed sequence of a pruned one.
 *
 * Knows no policy by name and no model. Everything is reserved at open. `scores` holds what was
 * measured last, in device memory; the host reads it at `scores_host`, which is the same memory
 * on the host device, else a pinned copy. Invariants: a slot with a sequence is a
 * prompt under way, whose layers below `layer` are done in pass `pass`, and whose layer `layer`
 * gets `tokens` tokens; the host writes scores_host only after `retained`.
 */

#include "retain.h"

/* How far the prompt of one sequence has come. */
typedef struct kvf_prune_slot {
    kvf_sequence *sequence; /* NULL = none under way */
    uint32_t generation;    /* of the sequence: another one may have taken its place */
    uint32_t prompt;        /* tokens before anything was propagated */
    uint32_t tokens;        /* that layer `layer` gets */
    uint32_t layer;         /* the next one */
    uint32_t pass;
    uint32_t appended;     /* tokens of `layer` whose queries were summed */
    uint32_t chosen_layer; /* KVF_PRUNE_LAYER_AUTO = none so far */
    uint64_t computed;     /* tokens, over layers and passes */
    uint64_t kept;         /* tokens per KV head, over layers of this pass */
    void *state;           /* of the policy; NULL = it has none */
    float *sums;           /* [kv_heads, tokens_max] device; NULL = no layer needs them */
} kvf_prune_slot;

/* Sums that the device writes in stream order. */
typedef struct kvf_prune_clock {
    uint64_t last, observe_ns, retain_ns;
} kvf_prune_clock;

struct kvf_prune {
    kvf_cache *cache;
    kvf_context *context; /* of the cache */
    kvf_prune_config config;
    kvf_prune_policy own_policy;
    const kvf_prune_policy *policy; /* that one */
    kvf_prune_shape shape;
    uint32_t needs; /* OR over layers and passes, with fresh state */

    /* in device memory */
    float *scores;              /* [kv_heads, tokens_max] */
    float *heads;               /* [query_heads, tokens_max]; NULL = no layer needs a profile */
    kvf_prune_profile *profile; /* [query_heads]; likewise */
    float *work;                /* of kvf_sequence_scores */
    char *keep_work;            /* of kvf_sequence_keep; NULL = nothing is evicted */

    /* pinned */
    float *scores_host;              /* [kv_heads, tokens_max] */
    kvf_prune_profile *profile_host; /* [query_heads]; NULL = no layer needs one */
    kvf_prune_clock *clock;

    /* in host memory */
    uint32_t *keep;        /* [kv_heads, tokens_max] */
    uint32_t *propagate;   /* [tokens_max] */
    double *measures;      /* [layers] of kvf_prune_answer, in the first pass */
    kvf_prune_slot *slots; /* [sequences_max] */
    size_t state_bytes;    /* of the policy, per slot */

    char *device_memory, *host_memory;
    char *pinned, *pinned_device; /* the same, as host and device see it */
    kvf_event *retained;          /* after the last reader of `scores` and its copy */
    uint32_t is_retaining;        /* 1: `retained` was recorded, and not waited for */
    kvf_prune_stats stats;        /* but for the sums in `clock` */
};

/* See kvf_prune_open and so on in kvferry/prune.h. *out is to be closed even on failure;
 * close takes NULL. */
KVF_CHECKED kvf_status kvf_pruner_open(kvf_cache *cache, const kvf_prune_config *config,
                                       kvf_prune **out);
void kvf_pruner_close(kvf_prune *prune);
KVF_CHECKED kvf_status kvf_pruner_begin(kvf_prune *prune, kvf_sequence *sequence, uint32_t tokens);
KVF_CHECKED kvf_status kvf_pruner_append(kvf_prune *prune, const kvf_prefill_args *args,
                                         kvf_stream *stream);
KVF_CHECKED kvf_status kvf_pruner_layer(kvf_prune *prune, kvf_sequence *sequence, uint32_t layer,
                                        kvf_stream *stream, kvf_prune_result *result);
KVF_CHECKED kvf_status kvf_pruner_chunk(kvf_prune *prune, kvf_sequence *sequence, uint32_t layer,
                                        uint32_t tokens, uint32_t patch, kvf_stream *stream);
/* The cache need not have memory. */
KVF_CHECKED kvf_status kvf_pruner_plan(kvf_cache *cache, const kvf_prune_config *config,
                                       kvf_prune_plan *plan);

/* Memory of an object for this cache; `needs` as in the object. None depends on the window. */
kvf_prune_plan kvf_prune_measure(kvf_cache *cache, const kvf_prune_config *config, uint32_t needs);

/* Needs of the policy in the layer of a view, before anything is measured. */
static inline uint32_t kvf_prune_needs_at(const kvf_prune_policy *policy,
                                          const kvf_prune_view *view)
{
    return policy->needs_at ? policy->needs_at(view) : policy->needs;
}

/* The policy's view of the layer that a slot is at, before anything is measured. */
kvf_prune_view kvf_prune_view_of(const kvf_prune *prune, const kvf_prune_slot *slot);

/* How the newest `window` queries of a layer score what is before them, by these settings: to
 * prune->scores. */
kvf_scores_args kvf_prune_scores_args(const kvf_prune *prune, const kvf_prune_view *view,
                                      uint32_t needs, uint32_t window);

/* The slot of a prompt that is under way and at this layer. */
KVF_CHECKED kvf_status kvf_prune_slot_find(kvf_prune *prune, kvf_sequence *sequence, uint32_t layer,
                                           kvf_prune_slot **out);

/* The first `count` floats of `from` (scores, or a slot's sums) as the host reads them. Waits for
 * the stream, and asks the sequence for what went wrong there. */
KVF_CHECKED kvf_status kvf_prune_read(kvf_prune *prune, kvf_sequence *sequence, const float *from,
                                      size_t count, kvf_stream *stream, const float **host);

/* Ask the policy, and check what it says: ids are in prune->keep and prune->propagate. */
KVF_CHECKED kvf_status kvf_prune_decide(kvf_prune *prune, const kvf_prune_view *view,
                                        kvf_prune_answer *answer);

/* The time since the last mark of this kind goes to *sum, in stream order; NULL starts it. */
KVF_CHECKED kvf_status kvf_prune_mark(kvf_prune *prune, uint64_t *sum, kvf_stream *stream);

/* Keep ids [kv_heads, count] of a layer and drop the rest (EVICT), timed. */
KVF_CHECKED kvf_status kvf_prune_evict(kvf_prune *prune, kvf_sequence *sequence, uint32_t layer,
                                       const uint32_t *ids, uint32_t count, kvf_stream *stream);

/* A layer of a prompt is done: `kept` tokens per KV head of it; after the last one the prompt
 * counts in the statistics and the slot is free. */
void kvf_prune_advance(kvf_prune *prune, kvf_prune_slot *slot, uint32_t kept);

/*
 * A pruned sequence and its completed sequence: made from the layers that lost nothing, filled by
 * the caller, and then in the place of the pruned one.
 *
 * Knows no policy, no pruner and no model. Invariant: until the end the pruned sequence is not
 * touched, and the end cannot fail half-way.
 */

/* kvf_complete_begin and kvf_complete_end of kvferry/prune.h. */
KVF_CHECKED kvf_status kvf_whole_begin(kvf_cache *cache, kvf_sequence *sequence,
                                       uint32_t first_layer, uint32_t tokens, kvf_stream *stream,
                                       kvf_sequence **whole);
KVF_CHECKED kvf_status kvf_whole_end(kvf_cache *cache, kvf_sequence *sequence, kvf_sequence *whole,
                                     kvf_stream *stream);

#endif
