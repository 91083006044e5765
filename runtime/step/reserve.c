/* SPDX-License-Identifier: Apache-2.0 */

/*
 * How much memory the calls of a cache take: what each puts into its frame.
 *
 * Knows nothing of what a call does with it: the functions that take room from a frame are run once
 * over a dry one, with as many rows and pages as there may be. So a frame and what is put into it
 * cannot disagree. The arrays of streaming heads are few, and added up.
 */

#include "reserve.h"

#include "layout.h"
#include "pages.h"
#include "prefill_arena.h"
#include "retain.h"
#include "static_set.h"
#include "streaming_heads.h"

/* A step that refreshes the static set of every row; page lists, scores and seeds take less of it.
 * */
static void take_decode(kvf_call *call)
{
    kvf_pages_take(call);
    if (call->kv_group)
        kvf_call_rows_after(call);
    call->frame->host.bytes += kvf_streaming_frame_bytes(call->cache, call->rows, false);
}

static void take_chunk(kvf_call *call)
{
    if (call->kv_group)
        kvf_call_rows(call);
    if (call->kv_group && call->kv_group->dims.arena_blocks)
        kvf_arena_place(call);
    call->frame->host.bytes += kvf_streaming_frame_bytes(call->cache, 1, true);
}

static void take_keep(kvf_call *call)
{
    if (call->kv_group)
        kvf_keep_take(call);
}

/* Rows of all layers, KV group by KV group. */
static void take_fork(kvf_call *call)
{
    const kvf_cache *cache = call->cache;
    for (uint32_t i = 0; i < cache->kv_group_count; i++) {
        call->rows = cache->kv_groups[i].config.layers;
        kvf_fork_take(call);
    }
}

/* Calls on a layer of this KV group; NULL: of one whose heads all stream. */
static size_t measure(kvf_cache *cache, kvf_kv_group *kv_group)
{
    const uint32_t sequences = cache->config.sequences_max;
    const struct {
        void (*take)(kvf_call *call);
        uint32_t rows, sealed_blocks;
    } calls[] = {
        {take_decode, kvf_rows_max(&cache->config), sequences},
        {take_chunk, 1, kv_group ? kv_group->dims.chunk_blocks : 0},
        {take_keep, 1, 0},
        {take_fork, 0, 0},
    };
    size_t most = 0;
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        kvf_frame frame = {0};
        kvf_call call = {.cache = cache,
                         .kv_group = kv_group,
                         .frame = &frame,
                         .rows = calls[i].rows,
                         .sealed_blocks = calls[i].sealed_blocks};
        calls[i].take(&call);
        most = frame.host.bytes > most ? frame.host.bytes : most;
    }
    return most;
}

kvf_status kvf_calls_plan(kvf_cache *cache, kvf_reservation *r)
{
    cache->frame_bytes = measure(cache, NULL);
    for (uint32_t i = 0; i < cache->kv_group_count; i++) {
        const size_t bytes = measure(cache, &cache->kv_groups[i]);
        cache->frame_bytes = bytes > cache->frame_bytes ? bytes : cache->frame_bytes;
    }
    return kvf_layout_plan(cache, r);
}
