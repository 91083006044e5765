/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TESTS_RUNTIME_RETAIN_WORLD_H
#define KVF_TESTS_RUNTIME_RETAIN_WORLD_H

/*
 * What the tests of scores, keeping and seeding share beside the harness: memory, and a cache with
 * or without a prefill arena. Looks inside.
 */

#include "harness.h"

#include "cache.h"
#include "retain.h"
#include "step.h"

static inline void *must(size_t bytes)
{
    return test_alloc(bytes + 64);
}

/* `arena`: 0 = the device's choice, 1 = with a prefill arena, 2 = without. */
static inline void open_world(test_world *w, const kvf_cache_config *cc, uint32_t arena)
{
    const kvf_runtime_config rc = test_runtime_config();
    *w = (test_world){.config = *cc};
    test_expect(NULL, test_runtime_open(&rc, &w->runtime, NULL), KVF_OK);
    w->runtime->seams.prefill_arena = arena;
    test_ok(w, kvf_stream_create(w->runtime, &w->stream));
    test_ok(w, kvf_cache_open(w->runtime, cc, &w->cache, NULL));
}

#endif
