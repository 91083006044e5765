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
static kvf_status keep_queries(kvf_step *step, const kvf_prefill_args *args, kvf_layer *layer)
{
    const kvf_kv_group *kv_group = step->kv_group;
    const kvf_paging *p = &kv_group->dims.paging;
    const size_t bytes =
        (size_t)kv_group->config.query_heads * p->shape.head_dim * kvf_dtype_bytes(p->shape.dtype);
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
        KVF_TRY(kv_group->device->ops->copy(step->stream, step->row_host[0].queries + slot * bytes,
                                            (const char *)args->q + i * bytes, run * bytes));
        i += run;
    }
    return KVF_OK;
}

/* Where its blocks go; then the frame may be sent. */
static kvf_status place(kvf_step *step)
{
    kvf_layer *layer = step->states[0];
    KVF_TRY(kvf_step_clear(step, layer));
    if (kvf_chunk_way_of(step->kv_group) != KVF_CHUNK_IN_ARENA)
        return KVF_OK;
    KVF_TRY(kvf_arena_take(step, layer, layer->extent.sealed_before));
    kvf_arena_place(step);
    return KVF_OK;
}

/* Blocks that are sealed go straight to the pool, or to the arena and from there to the pool. */
static kvf_status append_exact(kvf_step *step, const kvf_prefill_args *args, uint32_t base)
{
    const kvf_kv_group *kv_group = step->kv_group;
    const kvf_paging *p = &kv_group->dims.paging;
    const kvf_row *row = &step->row_host[0];
    const bool in_arena = kvf_chunk_way_of(kv_group) == KVF_CHUNK_IN_ARENA;
    void **to = in_arena ? step->arena_host : step->pool_host;
    KVF_TRY(kvf_step_stamp(step, NULL));
    if (in_arena && args->q)
        KVF_TRY(kvf_arena_fill(step));
    /* Blocks that have tokens already move from the ring first. */
    for (uint32_t i = row->sealed_before; i < row->sealed && i * p->block_size < base; i++)
        KVF_TRY(kv_group->device->ops->copy(step->stream, to[i - row->sealed_before],
                                            kvf_row_ring_block(p, row, i), kvf_block_bytes(p)));
    KVF_TRY(kvf_step_point_tables(step));
    KVF_TRY(kvf_chunk_repack(step, args, base, row->blocks));
    KVF_TRY(kvf_step_seal_blocks(step, kv_group->tables.chunk_fault, base));
    KVF_TRY(kvf_step_admit(step));
    return in_arena ? kvf_arena_write_back(step) : KVF_OK;
}

static kvf_status enqueue_pages(kvf_step *step, const kvf_prefill_args *args)
{
    kvf_layer *layer = step->states[0];
    const bool is_quantized = kvf_chunk_way_of(step->kv_group) == KVF_CHUNK_QUANTIZED;
    const uint32_t base = layer->extent.length - args->tokens;
    KVF_TRY(is_quantized ? kvf_prefill_quantized(step, args, base)
                         : append_exact(step, args, base));
    KVF_TRY(keep_queries(step, args, layer));
    KVF_TRY(kvf_step_stamp(step, &kvf_counters_device(step->kv_group, step->index)->append_ns));
    if (is_quantized)
        return KVF_OK; /* it has attended, too */
    return kvf_chunk_attend(step, args, base, step->row_host[0].blocks);
}

/* ---- a chunk ---- */

/* Host bookkeeping, and what the KV group has in the frame; a refusal has changed nothing. */
static kvf_status prepare(kvf_step *step, const kvf_prefill_args *args, kvf_stream *stream)
{
    kvf_layer *layer = &args->sequence->layers[args->layer];
    const uint32_t base = layer->extent.length;
    KVF_TRY(kvf_step_open(step, args->layer, &args->sequence, args->q != NULL, stream));
    const kvf_status status = step->kv_group ? kvf_append_acquire(layer, args->tokens) : KVF_OK;
    if (status != KVF_OK)
        return kvf_step_refuse(step, status);
    kvf_append_note(layer, args->tokens, args->positions);
    kvf_footprint_append(step->cache, args->sequence, args->layer, args->tokens);
    kvf_refresh_needs_exact(&layer->refresh, base);
    if (step->kv_group)
        kvf_step_rows(step);
    return KVF_OK;
}

/* Pages of the KV group, streaming heads, or both. */
static kvf_status enqueue(kvf_step *step, const kvf_prefill_args *args)
{
    const kvf_inputs in = kvf_inputs_seen(step->cache, args->q, args->k, args->v);
    kvf_prefill_args own = *args;
    kvf_streaming_chunk pages = {0};
    kvf_heads_call call = kvf_heads_call_of(step, args->tokens);
    call.is_chunk = true;
    call.q = own.q = in.q;
    call.k = own.k = in.k;
    call.v = own.v = in.v;
    call.out = args->out;
    if (step->kv_group)
        KVF_TRY(place(step));
    if (call.streaming) {
        kvf_heads_take_jobs(&call);
        pages = kvf_streaming_take_chunk(&call);
        const kvf_packed_heads heads = kvf_heads_packed(&call, false);
        own.q = heads.q;
        own.k = heads.k;
        own.v = heads.v;
        own.out = heads.out;
    }
    KVF_TRY(kvf_step_send(step));
    KVF_TRY(kvf_inputs_round(step, args->q, args->k, args->v, args->tokens));
    KVF_TRY(kvf_heads_pack(&call));
    if (step->kv_group)
        KVF_TRY(enqueue_pages(step, &own));
    if (call.streaming)
        KVF_TRY(kvf_streaming_prefill(&call, &pages));
    return kvf_heads_unpack(&call);
}

kvf_status kvf_layer_prefill(kvf_cache *cache, const kvf_prefill_args *args, kvf_stream *stream)
{
    kvf_step step = {.cache = cache};
    KVF_TRY(prepare(&step, args, stream));
    return kvf_step_end(&step, enqueue(&step, args));
}

/* ---- queries alone, and tokens once more ---- */

/* Blocks of the layer where a chunk of it finds them, and no new ones. */
static kvf_status enqueue_queries(kvf_step *step, const kvf_prefill_args *args)
{
    const uint32_t base = step->states[0]->extent.length - args->tokens;
    kvf_prefill_args own = *args;
    own.q = kvf_inputs_seen(step->cache, args->q, NULL, NULL).q;
    KVF_TRY(place(step));
    KVF_TRY(kvf_step_send(step));
    KVF_TRY(kvf_inputs_round(step, args->q, NULL, NULL, args->tokens));
    if (kvf_chunk_way_of(step->kv_group) == KVF_CHUNK_IN_ARENA)
        KVF_TRY(kvf_arena_fill(step));
    return kvf_chunk_attend(step, &own, base, step->row_host[0].blocks);
}

kvf_status kvf_layer_prefill_queries(kvf_cache *cache, const kvf_prefill_args *args,
                                     kvf_stream *stream)
{
    kvf_step step = {.cache = cache};
    KVF_TRY(kvf_step_open(&step, args->layer, &args->sequence, true, stream));
    kvf_step_rows(&step);
    return kvf_step_end(&step, enqueue_queries(&step, args));
}

static kvf_status enqueue_again(kvf_step *step, const kvf_prefill_args *args,
                                const kvf_carried *carried, uint32_t base)
{
    KVF_TRY(place(step));
    KVF_TRY(kvf_step_send(step));
    return kvf_chunk_way_of(step->kv_group) == KVF_CHUNK_QUANTIZED
               ? kvf_carry_quantized(step, args, base, carried)
               : append_exact(step, args, base);
}

kvf_status kvf_layer_append_again(kvf_cache *cache, const kvf_prefill_args *args,
                                  const kvf_carried *carried, kvf_stream *stream)
{
    kvf_layer *layer = &args->sequence->layers[args->layer];
    const uint32_t base = layer->extent.length;
    kvf_step step = {.cache = cache};
    KVF_TRY(kvf_step_open(&step, args->layer, &args->sequence, false, stream));
    KVF_TRY(kvf_append_acquire(layer, args->tokens));
    kvf_append_note(layer, args->tokens, args->positions);
    kvf_refresh_needs_exact(&layer->refresh, base);
    kvf_step_rows(&step);
    return kvf_step_end(&step, enqueue_again(&step, args, carried, base));
}
