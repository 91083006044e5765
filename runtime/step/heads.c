/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Decode steps: the KV group has the retrieval heads, rings have the streaming ones.
 * Where a layer has both, heads are packed apart and outputs are put together.
 *
 * Knows nothing of rings (streaming_heads.c) or of what a KV group does. A call that is refused has
 * changed nothing. Rings are written after the KV group, so that a step that is undone, because its
 * pages could not be read, has not touched them.
 */

#include "heads.h"

#include "undo.h"

kvf_heads_call kvf_heads_take_step(kvf_step *step, const kvf_decode_args *args)
{
    kvf_heads_call call = kvf_heads_call_of(step, step->rows);
    call.q = args->q;
    call.k = args->k;
    call.v = args->v;
    call.out = args->out;
    call.lse = args->lse;
    if (call.streaming) {
        kvf_heads_take_jobs(&call);
        kvf_streaming_take_rows(&call);
    }
    return call;
}

kvf_status kvf_heads_enqueue_step(kvf_heads_call *call, const kvf_decode_args *args,
                                  const kvf_due *due)
{
    kvf_step *step = call->step;
    const kvf_packed_heads heads = kvf_heads_packed(call, false);
    kvf_decode_args own = *args;
    own.q = heads.q;
    own.k = heads.k;
    own.v = heads.v;
    own.out = heads.out;
    own.lse = heads.lse;
    KVF_TRY(kvf_heads_pack(call));
    step->heads = call->heads;
    if (step->kv_group)
        KVF_TRY(kvf_decode_enqueue(step, &own, due));
    if (call->streaming)
        KVF_TRY(kvf_streaming_decode(call));
    return kvf_heads_unpack(call);
}

static uint32_t streaming_tokens(const kvf_cache_config *c, uint32_t layer, uint32_t length)
{
    return kvf_min_u32(length, c->streaming_sink + kvf_streaming_recent(c, layer));
}

/* Tokens that the newest one attends to, by every head that streams. */
void kvf_heads_note_step(kvf_step *step)
{
    kvf_cache *cache = step->cache;
    const uint64_t heads = kvf_streaming_count(cache, step->layer);
    for (uint32_t b = 0; heads && b < step->rows; b++)
        cache->counters[step->layer].streamed +=
            heads * streaming_tokens(&cache->config, step->layer, step->states[b]->length);
}

static kvf_status enqueue_step(kvf_step *step, const kvf_decode_args *args, const kvf_due *due)
{
    kvf_heads_call call = kvf_heads_take_step(step, args);
    KVF_TRY(kvf_decode_send(step));
    KVF_TRY(kvf_heads_enqueue_step(&call, args, due));
    kvf_heads_note_step(step);
    return KVF_OK;
}

kvf_status kvf_layer_step(kvf_cache *cache, const kvf_decode_args *args, kvf_stream *stream)
{
    kvf_step step = {.cache = cache};
    kvf_due due;
    KVF_TRY(kvf_decode_prepare(&step, args, stream, &due));
    return kvf_decode_end(&step, enqueue_step(&step, args, &due));
}

kvf_status kvf_layer_decode(kvf_cache *cache, const kvf_decode_args *args, kvf_stream *stream)
{
    KVF_TRY(kvf_undo_keep(cache, args, stream));
    const kvf_status status =
        args->tokens ? kvf_layer_steps(cache, args, stream) : kvf_layer_step(cache, args, stream);
    return kvf_undo_unless_ok(cache, args, stream, status);
}

static kvf_status step_queries(kvf_cache *cache, const kvf_decode_args *args, kvf_stream *stream)
{
    kvf_step step = {.cache = cache};
    const kvf_due nothing = {0};
    KVF_TRY(kvf_decode_prepare_queries(&step, args, stream));
    return kvf_decode_end(&step, enqueue_step(&step, args, &nothing));
}

kvf_status kvf_layer_decode_queries(kvf_cache *cache, const kvf_decode_args *args,
                                    kvf_stream *stream)
{
    KVF_TRY(kvf_undo_keep(cache, args, stream));
    return kvf_undo_unless_ok(cache, args, stream, step_queries(cache, args, stream));
}
