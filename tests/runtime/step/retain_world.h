/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TESTS_RUNTIME_RETAIN_WORLD_H
#define KVF_TESTS_RUNTIME_RETAIN_WORLD_H

/*
 * Helpers of the tests of scores, keeping and seeding beside the harness: a cache with or without a
 * prefill arena, tokens to keep, a static set. Looks inside.
 */

#include "attention_params.h"
#include "harness.h"

#include "cache.h"
#include "call.h"
#include "retain.h"

/* `arena`: 0 = the device's choice, 1 = with a prefill arena, 2 = without. */
static inline void open_world(test_world *w, const kvf_cache_config *cc, uint32_t arena)
{
    const kvf_runtime_config rc = test_runtime_config();
    test_hooks.prefill_arena = arena;
    test_world_open(w, &rc, cc);
}

/* ids [kv_heads, count], ascending; the last `window` tokens and, if asked, the first `front` are
 * among them. */
typedef struct subset {
    uint32_t length, count, window, front;
} subset;

static inline uint32_t *retain_choose(test_random *r, uint32_t kv_heads, const subset *x)
{
    uint32_t *ids = test_scratch((size_t)kv_heads * x->count * sizeof *ids);
    for (uint32_t h = 0; h < kv_heads; h++) {
        uint32_t *to = ids + h * x->count, n = 0;
        for (uint32_t j = 0; j < x->length; j++) {
            const uint32_t left = x->length - j, needed = x->count - n;
            const uint32_t sure = x->window < needed ? x->window : needed;
            const bool is_sure = j < x->front || left <= sure;
            const uint32_t free_left = left - sure, free_needed = needed - sure;
            if (needed && (is_sure || test_random_below(r, free_left) < free_needed))
                to[n++] = j;
        }
        assert_int_equal(n, x->count);
    }
    return ids;
}

/* The same static set for two sequences of equal tokens, where there is one. */
static inline void retain_seed_both(test_world *w, kvf_sequence *a, kvf_sequence *b, test_random *r)
{
    const uint32_t count = w->config.kv_heads * kvf_sequence_length(a, 0);
    float *scores = test_scratch(count * sizeof *scores);
    for (uint32_t i = 0; i < count; i++)
        scores[i] = (float)test_random_below(r, 50);
    test_ok(w, kvf_sequence_seed(w->cache, a, 0, scores, w->stream));
    test_ok(w, kvf_sequence_seed(w->cache, b, 0, scores, w->stream));
    test_wait(w);
}

#endif
