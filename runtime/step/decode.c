/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Decode steps of a layer: the host's bookkeeping, then the KV group has the retrieval heads, and
 * rings have the streaming ones. Where a layer has both, heads are packed apart and outputs are put
 * together.
 *
 * Knows nothing of what a KV group does with its pages (pages.h), or of rings (streaming_heads.h).
 * A call that is refused has changed nothing; one whose pages could not be brought is undone
 * (undo.h). Rings are written after the KV group, so that a step that is undone has not touched
 * them.
 */

#include "decode.h"

#include "addressable.h"
#include "append.h"
#include "attend.h"
#include "prefill_arena.h"
#include "several.h"
#include "static_set.h"
#include "undo.h"

/* ---- bookkeeping on the host ---- */

static kvf_status acquire(kvf_call *call)
{
    for (uint32_t b = 0; call->kv_group && b < call->rows; b++) {
        /* Tokens after the first one of a sequence seal nothing. */
        const kvf_status status =
            kvf_call_is_first(call, b) ? kvf_append_acquire(call->states[b], 1) : KVF_OK;
        if (status == KVF_OK)
            continue;
        while (b-- > 0) {
            kvf_layer *layer = call->states[b];
            if (kvf_call_is_first(call, b))
                kvf_append_release(layer,
                                   kvf_sealed_blocks(call->kv_group, layer->extent.length + 1));
        }
        return status;
    }
    return KVF_OK;
}

/* The part of the step that pages have. */
static void note_due(const kvf_kv_group *kv_group, kvf_layer *layer, kvf_due *due)
{
    kvf_queries_add(&layer->queries, 1);
    kvf_refresh_step(&layer->refresh, kvf_refresh_is_due(kv_group, layer, layer->extent.sealed));
    layer->is_verified = kvf_verify_is_due(kv_group, layer);
    due->refreshes += layer->refresh.is_due;
    due->verifies += layer->is_verified;
}

static uint32_t streaming_tokens(const kvf_cache_config *c, uint32_t layer, uint32_t length)
{
    return kvf_min_u32(length, c->streaming_sink + kvf_streaming_recent(c, layer));
}

/* A row attends, to all that its layer has by now; heads that stream, to what they see of it. */
static void count_row(kvf_call *call, const kvf_layer *layer)
{
    const kvf_cache *cache = call->cache;
    kvf_layer_host_counters *counters = &cache->counters[call->layer];
    const uint64_t streaming = kvf_streaming_count(cache, call->layer);
    counters->held += (uint64_t)layer->extent.length * cache->config.kv_heads;
    counters->streamed +=
        streaming * streaming_tokens(&cache->config, call->layer, layer->extent.length);
    counters->steps++;
}

void kvf_decode_note(kvf_call *call, const kvf_decode_args *args, kvf_due *due)
{
    *due = (kvf_due){0};
    for (uint32_t b = 0; b < call->rows; b++) {
        kvf_layer *layer = call->states[b];
        const uint32_t sealed = layer->extent.sealed;
        kvf_append_note(layer, 1, args->positions ? args->positions + b : NULL);
        KVF_ASSERT(kvf_call_is_first(call, b) || layer->extent.sealed == sealed);
        layer->by_step[layer->extent.length - 1] = 1;
        if (call->kv_group)
            note_due(call->kv_group, layer, due);
        layer->steps++;
        count_row(call, layer);
        kvf_footprint_append(call->cache, args->sequences[b], call->layer, 1);
    }
}

/* ---- rows that are read whole ---- */

/* The choice, or the check, looks at every key of the row. */
static bool looks_at_all(const kvf_kv_group *kv_group, const kvf_layer *layer)
{
    return kv_group->policy->all_pages || kv_group->policy->by_token ||
           kvf_verify_is_due(kv_group, layer);
}

/* A refresh does too: which pages of recent choices have no slot the host does not know. */
static bool reads(const kvf_kv_group *kv_group, const kvf_layer *layer)
{
    return looks_at_all(kv_group, layer) ||
           kvf_refresh_is_due(kv_group, layer,
                              kvf_sealed_blocks(kv_group, layer->extent.length + 1));
}

/* A row that is looked at after the refresh does not lie in the prefill arena then. */
static kvf_status leave_arena(kvf_call *call)
{
    for (uint32_t b = 0; call->kv_group && b < call->rows; b++)
        if (looks_at_all(call->kv_group, call->states[b]))
            return kvf_arena_leave_rows(call);
    return KVF_OK;
}

/* Rows that are read whole are addressable, before anything has changed. */
static kvf_status begin(kvf_call *call, const kvf_decode_args *args, kvf_stream *stream)
{
    KVF_TRY(kvf_call_begin(call->cache, stream, call));
    kvf_call_at(call, args->layer, args->sequences, args->batch);
    kvf_status status = leave_arena(call);
    if (status == KVF_OK)
        status = kvf_addressable_rows(call, reads);
    return status == KVF_OK ? KVF_OK : kvf_call_refuse(call, status);
}

kvf_status kvf_decode_prepare(kvf_call *call, const kvf_decode_args *args, kvf_stream *stream,
                              kvf_due *due)
{
    KVF_TRY(begin(call, args, stream));
    const kvf_status status = acquire(call);
    if (status != KVF_OK)
        return kvf_call_refuse(call, status);
    kvf_decode_note(call, args, due);
    kvf_pages_take(call);
    if (due->refreshes)
        kvf_call_rows_after(call);
    return KVF_OK;
}

/* The same for queries alone: rows of what the layers have. */
static kvf_status prepare_queries(kvf_call *call, const kvf_decode_args *args, kvf_stream *stream)
{
    KVF_TRY(begin(call, args, stream));
    for (uint32_t b = 0; b < call->rows; b++)
        count_row(call, call->states[b]);
    kvf_pages_take(call);
    for (uint32_t b = 0; b < call->rows; b++)
        call->row_host[b].chosen_at = NULL; /* the layer's own steps go on as if nobody had asked */
    return KVF_OK;
}

kvf_status kvf_decode_send(kvf_call *call)
{
    for (uint32_t b = 0; call->kv_group && b < call->rows; b++)
        KVF_TRY(kvf_call_clear(call, call->states[b]));
    return kvf_call_send(call);
}

/* ---- launches ---- */

kvf_status kvf_decode_enqueue(const kvf_heads_work *work, const kvf_decode_args *args,
                              const kvf_due *due)
{
    kvf_call *call = work->call;
    const kvf_packed_heads heads = kvf_heads_packed(work, false);
    kvf_decode_args own = *args;
    own.q = heads.q;
    own.k = heads.k;
    own.v = heads.v;
    own.out = heads.out;
    own.lse = heads.lse;
    if (call->is_fused && !work->streaming)
        call->caller = args;
    else
        KVF_TRY(kvf_inputs_round(call, args->q, args->k, args->v, call->rows));
    KVF_TRY(kvf_heads_pack(work));
    call->heads = work->heads;
    if (call->kv_group)
        KVF_TRY(kvf_pages_decode(call, &own, due));
    if (work->streaming)
        KVF_TRY(kvf_streaming_decode(work));
    return kvf_heads_unpack(work);
}

static kvf_status send_and_enqueue(kvf_call *call, const kvf_decode_args *args, const kvf_due *due)
{
    const kvf_heads_work work = kvf_heads_take_step(call, args);
    KVF_TRY(kvf_decode_send(call));
    return kvf_decode_enqueue(&work, args, due);
}

/* ---- steps ---- */

/* One token each of different sequences, or several of a sequence that make one step. */
static kvf_status step_tokens(kvf_cache *cache, const kvf_decode_args *args, kvf_stream *stream)
{
    kvf_call call = {.cache = cache};
    kvf_due due;
    KVF_TRY(kvf_decode_prepare(&call, args, stream, &due));
    return kvf_call_close(&call, send_and_enqueue(&call, args, &due));
}

/* As many steps as args->tokens takes. */
static kvf_status step_all(kvf_cache *cache, const kvf_decode_args *args, kvf_stream *stream)
{
    uint32_t rows = 0;
    if (!args->tokens)
        return step_tokens(cache, args, stream);
    KVF_TRY(kvf_several_begin(cache, args, &rows));
    for (uint32_t first = 0; first < rows;) {
        const kvf_decode_args next = kvf_several_next(cache, args, rows, &first);
        KVF_TRY(step_tokens(cache, &next, stream));
    }
    return KVF_OK;
}

kvf_status kvf_layer_decode(kvf_cache *cache, const kvf_decode_args *args, kvf_stream *stream)
{
    KVF_TRY(kvf_undo_keep(cache, args, stream));
    return kvf_undo_unless_ok(cache, args, stream, step_all(cache, args, stream));
}

static kvf_status step_queries(kvf_cache *cache, const kvf_decode_args *args, kvf_stream *stream)
{
    kvf_call call = {.cache = cache};
    const kvf_due nothing = {0};
    KVF_TRY(prepare_queries(&call, args, stream));
    return kvf_call_close(&call, send_and_enqueue(&call, args, &nothing));
}

kvf_status kvf_layer_decode_queries(kvf_cache *cache, const kvf_decode_args *args,
                                    kvf_stream *stream)
{
    KVF_TRY(kvf_undo_keep(cache, args, stream));
    return kvf_undo_unless_ok(cache, args, stream, step_queries(cache, args, stream));
}
