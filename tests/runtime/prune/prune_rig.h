/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TESTS_RUNTIME_PRUNE_RIG_H
#define KVF_TESTS_RUNTIME_PRUNE_RIG_H

/*
 * Helpers of the tests of the pruner: a policy that does as it is told and notes what it was shown,
 * a cache with a prompt on its way through the layers.
 *
 * Knows nothing of what a test wants to prove.
 */

#include "harness.h"
#include "pruner.h"

#define PRUNE_SEED 20251121u
#define LAYERS     3u
#define KV_HEADS   2u
#define GROUP      2u
#define HEADS      (KV_HEADS * GROUP)
#define DIM        64u
#define PROMPT     160u
#define STEPS      3u
#define TOKENS     (PROMPT + STEPS)
#define WINDOW     6u
#define CHUNK      48u

/* ---- a policy that does as it is told ---- */

/* The view of a layer that it was shown. */
typedef struct sight {
    kvf_prune_view view; /* pointers are not valid any more */
    float scores[KV_HEADS * PROMPT];
    kvf_prune_profile profile[HEADS];
    uint32_t has_profile;
    uint32_t positions[PROMPT];
    uint32_t count; /* what its state was */
} sight;

typedef struct told {
    uint32_t keep[LAYERS];      /* keeps tokens i % keep == 0 and the window; 0 = all */
    uint32_t propagate[LAYERS]; /* likewise */
    uint32_t restart_at;        /* layer + 1; 0 = never */
    uint32_t restarts;          /* most of them */
    void (*nonsense)(const kvf_prune_view *view, kvf_prune_answer *answer);
    uint32_t calls;
    sight sights[2 * LAYERS];
} told;

/* Tokens i % stride == 0 and the window. */
uint32_t told_stride_ids(const kvf_prune_view *view, uint32_t stride, uint32_t *ids);

/* ---- a world with a pruner ---- */

typedef struct rig {
    test_world w;
    test_tokens t;
    told told;
    kvf_prune_policy policy;
    kvf_prune_config config;
    kvf_prune *prune;
    test_rows chunk;
} rig;

kvf_cache_config rig_cache_config(void);

void rig_open(rig *r, const kvf_cache_config *cc, uint32_t needs);
void rig_prune(rig *r);
void rig_close(rig *r);

/* The prompt on its way: which tokens go on, at which positions. */
typedef struct progress {
    kvf_sequence *sequence;
    uint32_t tokens[PROMPT], positions[PROMPT];
    uint32_t count;
    uint32_t layer;
} progress;

progress rig_begin(rig *r, uint32_t count);
kvf_prefill_args rig_chunk_args(rig *r, const progress *p, uint32_t first, uint32_t count);
void rig_fill_chunk(rig *r, const progress *p, uint32_t first, uint32_t chunk, bool appends);
void rig_fill_layer(rig *r, const progress *p);
kvf_status rig_prune_layer(rig *r, progress *p);
progress rig_run(rig *r, uint32_t count);

/* A step attends to `tokens` and to itself, densely. */
void rig_expect_attends(rig *r, kvf_sequence *s, uint32_t layer, const uint32_t *tokens,
                        uint32_t count, uint32_t step);

#endif
