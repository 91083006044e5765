/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Part of retain.h. Cutting the newest tokens off a sequence, so that what comes next is as if they
 * had never been.
 *
 * Knows nothing of who wants it. A block that was sealed and is cut lies in the window again: its
 * tokens come back from the pool to the ring, its digest is gone. Blocks of the pool
 * are only given back, never written, so forks are not touched and nothing can be refused for want
 * of room. A cut within the window changes nothing on the device.
 *
 * A static set that was chosen before the cut stays, with its age. One that dropped queries have
 * chosen is dissolved, which looks at no page: the next step chooses another with all keys, as
 * after a prefill. Blocks are made addressable before anything changes, so a cut that fails has no
 * effect.
 */

#include "retain.h"

#include "addressable.h"
#include "cache.h"
#include "call.h"
#include "prefill_arena.h"
#include "seal.h"

/* Tokens of a layer that stay, at positions below `tokens`: positions ascend. */
static uint32_t length_after(const kvf_layer *layer, uint32_t tokens)
{
    uint32_t length = layer->extent.length;
    while (length && layer->positions[length - 1] >= tokens)
        length--;
    return length;
}

static kvf_status check(kvf_cache *cache, const kvf_sequence *sequence, uint32_t tokens)
{
    uint32_t end = 0;
    for (uint32_t i = 0; i < cache->config.layers; i++) {
        const kvf_layer *layer = &sequence->layers[i];
        const uint32_t length = length_after(&sequence->layers[i], tokens);
        if (layer->extent.length)
            end = kvf_max_u32(end, layer->positions[layer->extent.length - 1] + 1);
        if (length && length < layer->cut.kept)
            KVF_FAIL(cache->context, KVF_UNSUPPORTED,
                     "tokens = %u: layer %u holds what a prune policy chose of the positions below "
                     "%u, per KV head its own tokens; cut after them, cut all, or fork before "
                     "pruning",
                     tokens, i, layer->positions[layer->cut.kept - 1] + 1);
    }
    if (tokens > end)
        KVF_FAIL(cache->context, KVF_INVALID,
                 "tokens = %u: the sequence ends at position %u; give that or less", tokens, end);
    return KVF_OK;
}

/* ---- on the host ---- */

static uint32_t steps_of(const kvf_layer *layer, uint32_t first)
{
    uint32_t steps = 0;
    for (uint32_t i = first; i < layer->extent.length; i++)
        steps += layer->by_step[i];
    return steps;
}

static void cut_layer(kvf_sequence *sequence, uint32_t index, uint32_t length)
{
    kvf_layer *layer = &sequence->layers[index];
    kvf_kv_group *kv_group = layer->kv_group;
    const uint32_t steps = steps_of(layer, length), sealed = kvf_sealed_blocks(kv_group, length);
    for (uint32_t p = sealed; p < layer->extent.sealed; p++)
        kvf_page_pool_release(&kv_group->pool, layer->blocks[p]);
    kvf_queries_cut(&layer->queries, layer->extent.length - length,
                    kvf_kept_queries(kv_group, layer));
    kvf_extent_cut(&layer->extent, length, sealed);
    layer->steps -= kvf_min_u32(steps, layer->steps);
    kvf_refresh_cut(&layer->refresh, length, steps);
    kvf_footprint_cut(sequence->cache, sequence, index);
}

/* ---- on the device ---- */

/* Blocks that are in the window again, from the pool. */
static kvf_status bring_window(kvf_call *call, const kvf_layer *layer)
{
    kvf_kv_group *kv_group = call->kv_group;
    const kvf_paging *p = &kv_group->dims.paging;
    const kvf_row *row = &call->row_host[layer->index];
    const uint32_t before = layer->extent.sealed_before;
    const uint32_t end = kvf_min_u32(before, kvf_row_blocks(p, row));
    if (row->sealed < before)
        KVF_TRY(kvf_arena_shorten(call, layer, row->sealed));
    for (uint32_t b = row->sealed; b < end && !kvf_quantizes_pages(kv_group); b++)
        KVF_TRY(kv_group->device->ops->copy(call->stream, kvf_row_ring_block(p, row, b),
                                            kvf_page_pool_device(&kv_group->pool, layer->blocks[b]),
                                            kvf_block_bytes(p)));
    return KVF_OK;
}

/* The same of quantized pages: the newest block that was sealed comes back as it was, the others
 * dequantized. Rows are on the device. */
static kvf_status dequantize_window(kvf_call *call, kvf_layer *layer)
{
    const kvf_kv_group *kv_group = call->kv_group;
    const kvf_paging *p = &kv_group->dims.paging;
    const kvf_row *row = &call->row_host[layer->index];
    const uint32_t end = kvf_min_u32(layer->extent.sealed_before, kvf_row_blocks(p, row));
    for (uint32_t b = row->sealed; b < end; b++) {
        const kvf_dequantize_args dequantize = {
            .paging = *p,
            .first = b,
            .count = 1,
            .block = kvf_page_pool_device(&kv_group->pool, layer->blocks[b]),
            .row = call->row + layer->index};
        KVF_TRY(b + 1 == layer->cut.spare
                    ? kv_group->device->ops->copy(call->stream, kvf_row_ring_block(p, row, b),
                                                  kvf_row_spare(p, row), kvf_block_bytes(p))
                    : KVF_LAUNCH(call, dequantize, dequantize));
    }
    kvf_cut_to(&layer->cut, row->sealed);
    return KVF_OK;
}

static kvf_status drop(kvf_call *call, uint32_t sets)
{
    const kvf_drop_args args = {
        .paging = call->kv_group->dims.paging, .rows = call->rows, .sets = sets, .row = call->row};
    return KVF_LAUNCH(call, drop, args);
}

/* Every layer of the KV group is cut on the host as its rows are made. */
static kvf_status enqueue_cut(kvf_call *call, kvf_sequence *sequence, uint32_t tokens)
{
    kvf_kv_group *kv_group = call->kv_group;
    call->rows = kv_group->config.layers;
    kvf_fork_take(call);
    for (uint32_t i = 0; i < call->cache->config.layers; i++) {
        kvf_layer *layer = &sequence->layers[i];
        const uint32_t length = length_after(layer, tokens);
        if (layer->kv_group != kv_group)
            continue;
        kvf_extent_begin(&layer->extent);
        if (length && length < layer->extent.length)
            cut_layer(sequence, i, length);
        call->row_host[layer->index] = kvf_call_row(kv_group, layer);
        KVF_TRY(bring_window(call, layer));
    }
    KVF_TRY(kvf_call_send(call));
    for (uint32_t i = 0; kvf_quantizes_pages(kv_group) && i < call->cache->config.layers; i++)
        if (sequence->layers[i].kv_group == kv_group)
            KVF_TRY(dequantize_window(call, &sequence->layers[i]));
    /* Tokens that are not sealed lie in the ring: sealed_before == sealed. */
    KVF_TRY(kvf_call_point_tables(call));
    return drop(call, 0);
}

/* Blocks that come back to the window, of all layers, into memory. */
static kvf_status bring_blocks(const kvf_kv_group *kv_group, const kvf_sequence *sequence,
                               uint32_t tokens)
{
    for (uint32_t i = 0; i < sequence->cache->config.layers; i++) {
        const kvf_layer *layer = &sequence->layers[i];
        if (layer->kv_group != kv_group)
            continue;
        const uint32_t length = length_after(&sequence->layers[i], tokens);
        const uint32_t first = kvf_sealed_blocks(kv_group, length);
        const uint32_t end = kvf_min_u32(
            layer->extent.sealed, kvf_div_ceil_u32(length, kv_group->dims.paging.block_size));
        if (length && first < end)
            KVF_TRY(kvf_addressable_blocks(layer->kv_group, layer->blocks + first, end - first));
    }
    return KVF_OK;
}

static kvf_status cut_on_device(kvf_kv_group *kv_group, kvf_sequence *sequence, uint32_t tokens,
                                kvf_stream *stream)
{
    kvf_call call;
    KVF_TRY(kvf_call_begin(sequence->cache, stream, &call));
    call.kv_group = kv_group;
    return kvf_call_end(&call, enqueue_cut(&call, sequence, tokens));
}

static kvf_status enqueue_dissolve(kvf_call *call)
{
    kvf_fork_take(call);
    call->row_host[0] = kvf_call_row(call->kv_group, call->states[0]);
    KVF_TRY(kvf_call_send(call));
    return drop(call, 1);
}

static kvf_status dissolve(kvf_sequence *sequence, uint32_t index, kvf_stream *stream)
{
    kvf_layer *layer = &sequence->layers[index];
    kvf_call call;
    KVF_TRY(kvf_call_begin(sequence->cache, stream, &call));
    kvf_call_at(&call, index, &sequence, 1);
    KVF_TRY(kvf_call_end(&call, enqueue_dissolve(&call)));
    kvf_refresh_dissolve(&layer->refresh);
    return KVF_OK;
}

/* Some layer of the KV group has blocks that are in the window again. */
static bool unseals(const kvf_kv_group *kv_group, const kvf_sequence *sequence, uint32_t tokens)
{
    for (uint32_t i = 0; i < sequence->cache->config.layers; i++) {
        const kvf_layer *layer = &sequence->layers[i];
        const uint32_t length = length_after(&sequence->layers[i], tokens);
        if (layer->kv_group == kv_group && length &&
            kvf_sealed_blocks(kv_group, length) < layer->extent.sealed)
            return true;
    }
    return false;
}

/* Tokens of the layers that stay; static sets that have to be dissolved were. */
static kvf_status cut_all(kvf_cache *cache, kvf_sequence *sequence, uint32_t tokens,
                          kvf_stream *stream)
{
    for (uint32_t i = 0; i < cache->kv_group_count; i++)
        if (unseals(&cache->kv_groups[i], sequence, tokens))
            KVF_TRY(cut_on_device(&cache->kv_groups[i], sequence, tokens, stream));
    for (uint32_t i = 0; i < cache->config.layers; i++) {
        kvf_layer *layer = &sequence->layers[i];
        const uint32_t length = length_after(&sequence->layers[i], tokens);
        if (length == 0 && layer->extent.length) {
            kvf_layer_clear(layer);
            kvf_footprint_cut(cache, sequence, i);
        } else if (length < layer->extent.length) {
            cut_layer(sequence, i, length);
        }
    }
    return KVF_OK;
}

kvf_status kvf_truncate(kvf_cache *cache, kvf_sequence *sequence, uint32_t tokens,
                        kvf_stream *stream)
{
    KVF_TRY(check(cache, sequence, tokens));
    /* First what may fail: if it cannot be read, nothing was cut. */
    for (uint32_t i = 0; i < cache->kv_group_count; i++)
        KVF_TRY(bring_blocks(&cache->kv_groups[i], sequence, tokens));
    for (uint32_t i = 0; i < cache->config.layers; i++) {
        const kvf_layer *layer = &sequence->layers[i];
        const uint32_t length = length_after(layer, tokens);
        if (length && layer->refresh.static_from > length)
            KVF_TRY(dissolve(sequence, i, stream));
    }
    return cut_all(cache, sequence, tokens, stream);
}
