/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The calls of a cache, and how much each puts into its frame.
 *
 * Knows nothing of what a call does with it: the functions that take room from a frame are run once
 * over a dry one, with as many rows and pages as there may be. So a frame and what is put into it
 * cannot disagree.
 */

#include "calls.h"

#include "decode.h"
#include "fork.h"
#include "layout.h"
#include "prefill_arena.h"
#include "retain.h"
#include "static_set.h"

/* A step that renews the static set of every row; page lists, scores and seeds take less of it. */
static void take_decode(kvf_step *step)
{
    kvf_decode_take_dry(step);
    kvf_step_rows_after(step);
}

static void take_chunk(kvf_step *step)
{
    kvf_step_rows(step, NULL);
    if (step->cache->dims.arena_blocks)
        kvf_arena_place(step);
}

kvf_status kvf_calls_plan(kvf_cache *cache, kvf_reservation *r)
{
    const kvf_dims *d = &cache->dims;
    const uint32_t sequences = cache->config.sequences_max;
    const struct {
        void (*take)(kvf_step *step);
        uint32_t rows, sealed_blocks;
    } calls[] = {
        {take_decode, sequences, sequences},
        {take_chunk, 1, d->chunk_blocks},
        {kvf_keep_take, 1, 0},
        {kvf_fork_take, cache->config.layers, 0},
    };
    cache->dims.frame_bytes = 0;
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        const size_t bytes =
            kvf_step_measure(cache, calls[i].rows, calls[i].sealed_blocks, calls[i].take);
        if (bytes > cache->dims.frame_bytes)
            cache->dims.frame_bytes = bytes;
    }
    return kvf_layout_plan(cache, r);
}
