/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A chunk of a prompt: blocks and positions, its way, and the queries that are kept.
 *
 * Knows the ways of a chunk (chunk.h), which one a KV group takes, and that streaming heads go
 * beside it, packed apart. Rings are written after the KV group.
 */

#include "prefill.h"

#include "addressable.h"
#include "append.h"
#include "chunk.h"
#include "prefill_arena.h"
#include "seal.h"
#include "streaming_heads.h"

/* ---- pages ---- */

/* The last queries of a chunk go to the ring of queries; query number n is in slot n % window. */
static kvf_status keep_queries(kvf_call *call, const kvf_prefill_args *args, kvf_layer *layer)
{
    const kvf_kv_group *kv_group = call->kv_group;
    const kvf_paging *p = &kv_group->dims.paging;
    const size_t bytes = kvf_queries_bytes(p);
    if (!args->q) {
        kvf_queries_forget(&layer->queries);
        return KVF_OK;
    }
    const uint32_t first = layer->queries.count;
    kvf_queries_add(&layer->queries, args->tokens);
    uint32_t i = args->tokens - kvf_min_u32(args->tokens, p->query_window);
    while (i < args->tokens) {
        const uint32_t slot = (first + i) % p->query_window;
        const uint32_t run = kvf_min_u32(args->tokens - i, p->query_window - slot);
        KVF_TRY(kv_group->device->ops->copy(call->stream, call->row_host[0].queries + slot * bytes,
                                            (const char *)args->q + i * bytes, run * bytes));
        i += run;
    }
    return KVF_OK;
}

/* Where its blocks go; then the frame may be sent. */
static kvf_status place(kvf_call *call)
{
    kvf_layer *layer = call->states[0];
    KVF_TRY(kvf_call_clear(call, layer));
    if (kvf_chunk_way_of(call->kv_group) != KVF_CHUNK_IN_ARENA)
        return KVF_OK;
    KVF_TRY(kvf_arena_take(call, layer, layer->extent.sealed_before));
    kvf_arena_place(call);
    return KVF_OK;
}

/* Blocks that are sealed go straight to the pool, or to the arena and from there to the pool. */
static kvf_status append_exact(kvf_call *call, const kvf_prefill_args *args, uint32_t base)
{
    const kvf_kv_group *kv_group = call->kv_group;
    const kvf_paging *p = &kv_group->dims.paging;
    const kvf_row *row = &call->row_host[0];
    const bool in_arena = kvf_chunk_way_of(kv_group) == KVF_CHUNK_IN_ARENA;
    void **to = in_arena ? call->arena_host : call->pool_host;
    KVF_TRY(kvf_call_stamp(call, NULL));
    if (in_arena && args->q)
        KVF_TRY(kvf_arena_fill(call));
    /* Blocks that have tokens already move from the ring first. */
    for (uint32_t i = row->sealed_before; i < row->sealed && i * p->block_size < base; i++)
        KVF_TRY(kv_group->device->ops->copy(call->stream, to[i - row->sealed_before],
                                            kvf_row_ring_block(p, row, i), kvf_block_bytes(p)));
    KVF_TRY(kvf_call_point_tables(call));
    KVF_TRY(kvf_chunk_repack(call, args, base, row->blocks));
    KVF_TRY(kvf_call_seal_blocks(call, kv_group->tables.chunk_fault, base));
    KVF_TRY(kvf_call_admit(call));
    return in_arena ? kvf_arena_write_back(call) : KVF_OK;
}

static kvf_status enqueue_pages(kvf_call *call, const kvf_prefill_args *args)
{
    kvf_layer *layer = call->states[0];
    const bool is_quantized = kvf_chunk_way_of(call->kv_group) == KVF_CHUNK_QUANTIZED;
    const uint32_t base = layer->extent.length - args->tokens;
    KVF_TRY(is_quantized ? kvf_prefill_quantized(call, args, base)
                         : append_exact(call, args, base));
    KVF_TRY(keep_queries(call, args, layer));
    KVF_TRY(kvf_call_stamp(call, &kvf_counters_device(call->kv_group, call->index)->append_ns));
    if (is_quantized)
        return KVF_OK; /* it has attended, too */
    return kvf_chunk_attend(call, args, base, call->row_host[0].blocks);
}

/* ---- a chunk ---- */

/* Host bookkeeping, and what the KV group has in the frame; a refusal has changed nothing. */
static kvf_status prepare(kvf_call *call, const kvf_prefill_args *args, kvf_stream *stream)
{
    kvf_layer *layer = &args->sequence->layers[args->layer];
    const uint32_t base = layer->extent.length;
    KVF_TRY(kvf_call_open(call, args->layer, &args->sequence, args->q != NULL, stream));
    const kvf_status status = call->kv_group ? kvf_append_acquire(layer, args->tokens) : KVF_OK;
    if (status != KVF_OK)
        return kvf_call_refuse(call, status);
    kvf_append_note(layer, args->tokens, args->positions);
    kvf_footprint_append(call->cache, args->sequence, args->layer, args->tokens);
    kvf_refresh_needs_exact(&layer->refresh, base);
    if (call->kv_group)
        kvf_call_rows(call);
    return KVF_OK;
}

/* Pages of the KV group, streaming heads, or both. */
static kvf_status enqueue(kvf_call *call, const kvf_prefill_args *args)
{
    const kvf_inputs in = kvf_inputs_seen(call->cache, args->q, args->k, args->v);
    kvf_prefill_args own = *args;
    kvf_streaming_chunk pages = {0};
    kvf_heads_work work = kvf_heads_work_of(call, args->tokens);
    work.is_chunk = true;
    work.q = own.q = in.q;
    work.k = own.k = in.k;
    work.v = own.v = in.v;
    work.out = args->out;
    if (call->kv_group)
        KVF_TRY(place(call));
    if (work.streaming) {
        kvf_heads_take_jobs(&work);
        pages = kvf_streaming_take_chunk(&work);
        const kvf_packed_heads heads = kvf_heads_packed(&work, false);
        own.q = heads.q;
        own.k = heads.k;
        own.v = heads.v;
        own.out = heads.out;
    }
    KVF_TRY(kvf_call_send(call));
    KVF_TRY(kvf_inputs_round(call, args->q, args->k, args->v, args->tokens));
    KVF_TRY(kvf_heads_pack(&work));
    if (call->kv_group)
        KVF_TRY(enqueue_pages(call, &own));
    if (work.streaming)
        KVF_TRY(kvf_streaming_prefill(&work, &pages));
    return kvf_heads_unpack(&work);
}

kvf_status kvf_layer_prefill(kvf_cache *cache, const kvf_prefill_args *args, kvf_stream *stream)
{
    kvf_call call = {.cache = cache};
    KVF_TRY(prepare(&call, args, stream));
    return kvf_call_end(&call, enqueue(&call, args));
}

/* ---- queries alone, and tokens once more ---- */

/* Blocks of the layer where a chunk of it finds them, and no new ones. */
static kvf_status enqueue_queries(kvf_call *call, const kvf_prefill_args *args)
{
    const uint32_t base = call->states[0]->extent.length - args->tokens;
    kvf_prefill_args own = *args;
    own.q = kvf_inputs_seen(call->cache, args->q, NULL, NULL).q;
    KVF_TRY(place(call));
    KVF_TRY(kvf_call_send(call));
    KVF_TRY(kvf_inputs_round(call, args->q, NULL, NULL, args->tokens));
    if (kvf_chunk_way_of(call->kv_group) == KVF_CHUNK_IN_ARENA)
        KVF_TRY(kvf_arena_fill(call));
    return kvf_chunk_attend(call, &own, base, call->row_host[0].blocks);
}

kvf_status kvf_layer_prefill_queries(kvf_cache *cache, const kvf_prefill_args *args,
                                     kvf_stream *stream)
{
    kvf_call call = {.cache = cache};
    KVF_TRY(kvf_call_open(&call, args->layer, &args->sequence, true, stream));
    kvf_call_rows(&call);
    return kvf_call_end(&call, enqueue_queries(&call, args));
}

static kvf_status enqueue_again(kvf_call *call, const kvf_prefill_args *args,
                                const kvf_carried *carried, uint32_t base)
{
    KVF_TRY(place(call));
    KVF_TRY(kvf_call_send(call));
    return kvf_chunk_way_of(call->kv_group) == KVF_CHUNK_QUANTIZED
               ? kvf_carry_quantized(call, args, base, carried)
               : append_exact(call, args, base);
}

kvf_status kvf_layer_append_again(kvf_cache *cache, const kvf_prefill_args *args,
                                  const kvf_carried *carried, kvf_stream *stream)
{
    kvf_layer *layer = &args->sequence->layers[args->layer];
    const uint32_t base = layer->extent.length;
    kvf_call call = {.cache = cache};
    KVF_TRY(kvf_call_open(&call, args->layer, &args->sequence, false, stream));
    KVF_TRY(kvf_append_acquire(layer, args->tokens));
    kvf_append_note(layer, args->tokens, args->positions);
    kvf_refresh_needs_exact(&layer->refresh, base);
    kvf_call_rows(&call);
    return kvf_call_end(&call, enqueue_again(&call, args, carried, base));
}
