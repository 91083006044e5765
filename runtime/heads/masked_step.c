/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Chunks and decode steps with a head mask: heads of each kind are packed, the inner cache has one
 * kind, rings the other, and outputs are put together.
 *
 * Knows nothing of rings (streaming_heads.c) or of what inner caches do. A call that an inner cache
 * refuses has changed nothing: packing writes scratch memory only.
 */

#include "masked_step.h"

#include "append.h"
#include "decode.h"
#include "record.h"
#include "sequence.h"
#include "streaming_heads.h"

/* One call: of a chunk, or of a batch. */
typedef struct work {
    kvf_masked_call call;
    const kvf_prefill_args *chunk;
    const kvf_decode_args *batch;
    kvf_streaming_chunk pages; /* of a chunk */
    const kvf_row *row;        /* of a batch, on the device */
} work;

/* ---- the frame ---- */

static void take_chunk(kvf_step *step)
{
    kvf_masked_call call = {.step = step};
    kvf_masked_take_jobs(&call);
    kvf_streaming_take_most(&call);
}

static void take_batch(kvf_step *step)
{
    kvf_masked_step_fill(step, NULL);
}

size_t kvf_masked_frame_bytes(kvf_cache *cache)
{
    const size_t chunk = kvf_step_measure(cache, 1, 0, take_chunk);
    const size_t batch = kvf_step_measure(cache, cache->config.sequences_max, 0, take_batch);
    return chunk > batch ? chunk : batch;
}

/* A call without its buffers. */
static kvf_masked_call call_of(kvf_step *step, uint32_t layer, uint32_t rows)
{
    const kvf_masked_layer *l = &step->cache->masked->layers[layer];
    step->layer = layer;
    return (kvf_masked_call){
        .step = step, .layer = l, .rows = rows, .is_mixed = l->retrieval && l->streaming};
}

static void fill_chunk(kvf_step *step, const kvf_prefill_args *args, work *w)
{
    *w = (work){.call = call_of(step, args->layer, args->tokens), .chunk = args};
    kvf_masked_call *call = &w->call;
    call->is_chunk = true;
    call->q = args->q;
    call->k = args->k;
    call->v = args->v;
    call->out = args->out;
    kvf_masked_take_jobs(call);
    if (call->layer->streaming)
        w->pages = kvf_streaming_take_chunk(call, args->sequence);
}

static void fill_batch(kvf_step *step, const kvf_decode_args *args, work *w)
{
    *w = (work){.call = call_of(step, args->layer, args->batch), .batch = args};
    kvf_masked_call *call = &w->call;
    call->q = args->q;
    call->k = args->k;
    call->v = args->v;
    call->out = args->out;
    call->lse = args->lse;
    kvf_masked_take_jobs(call);
    if (call->layer->streaming)
        w->row = kvf_streaming_take_rows(call, args->sequences);
}

void kvf_masked_step_fill(kvf_step *step, const kvf_decode_args *args)
{
    work w = {.call = {.step = step, .rows = step->rows}};
    if (args) {
        fill_batch(step, args, &w);
        return;
    }
    kvf_masked_take_jobs(&w.call);
    (void)kvf_streaming_take_rows(&w.call, NULL);
}

/* ---- what is enqueued ---- */

static kvf_cache *inner_cache(const work *w)
{
    return w->call.step->cache->masked->parts[w->call.layer->part].cache;
}

static kvf_status prefill_inner(const work *w)
{
    const kvf_masked_heads heads = kvf_masked_heads_of(&w->call, false);
    const kvf_prefill_args *args = w->chunk;
    const kvf_prefill_args inner = {.sequence =
                                        kvf_masked_inner(args->sequence)[w->call.layer->part],
                                    .layer = w->call.layer->inner,
                                    .tokens = args->tokens,
                                    .q = heads.q,
                                    .k = heads.k,
                                    .v = heads.v,
                                    .positions = args->positions,
                                    .out = heads.out};
    return kvf_prefill_chunk(inner_cache(w), &inner, w->call.step->stream);
}

static kvf_status decode_inner(const work *w)
{
    const kvf_masked *m = w->call.step->cache->masked;
    const kvf_masked_heads heads = kvf_masked_heads_of(&w->call, false);
    const kvf_decode_args *args = w->batch;
    kvf_cache *cache = inner_cache(w);
    const kvf_decode_args inner = {.layer = w->call.layer->inner,
                                   .batch = args->batch,
                                   .sequences = m->batch,
                                   .q = heads.q,
                                   .k = heads.k,
                                   .v = heads.v,
                                   .positions = args->positions,
                                   .out = heads.out,
                                   .lse = heads.lse};
    for (uint32_t b = 0; b < args->batch; b++)
        m->batch[b] = kvf_masked_inner(args->sequences[b])[w->call.layer->part];
    return cache->recording ? kvf_recording_decode(cache->recording, &inner, w->call.step->stream)
                            : kvf_decode_step(cache, &inner, w->call.step->stream);
}

/* Until the inner cache has taken the call: from then on it is no longer refused. */
static kvf_status enqueue_inner(const work *w, bool *is_refused)
{
    KVF_TRY(KVF_LAUNCH(w->call.step, heads, w->call.pack));
    if (!w->call.layer->retrieval)
        return KVF_OK;
    const kvf_status status = w->chunk ? prefill_inner(w) : decode_inner(w);
    *is_refused = status != KVF_OK;
    return status;
}

static kvf_status enqueue_streaming(const work *w)
{
    if (w->call.layer->streaming)
        KVF_TRY(w->chunk ? kvf_streaming_prefill(&w->call, &w->pages)
                         : kvf_streaming_decode(&w->call, w->row));
    return KVF_LAUNCH(w->call.step, heads, w->call.unpack);
}

/* ---- bookkeeping on the host ---- */

static void note(kvf_cache *cache, kvf_sequence *sequence, uint32_t layer, uint32_t tokens,
                 const uint32_t *positions)
{
    kvf_layer *state = &sequence->layers[layer];
    kvf_append_note(cache, state, tokens, positions);
    state->sealed = 0;
    kvf_footprint_append(cache, sequence, layer, tokens);
}

/* Tokens that one streaming head holds of `length`: what the newest of them attends to. */
static uint32_t streaming_tokens(const kvf_cache_config *c, uint32_t length)
{
    return kvf_min_u32(length, c->streaming_sink + c->streaming_recent);
}

void kvf_masked_step_note(kvf_cache *cache, const kvf_decode_args *args)
{
    kvf_masked_layer *layer = &cache->masked->layers[args->layer];
    for (uint32_t b = 0; b < args->batch; b++) {
        kvf_layer *state = &args->sequences[b]->layers[args->layer];
        state->steps++;
        note(cache, args->sequences[b], args->layer, 1,
             args->positions ? args->positions + b : NULL);
        layer->attended +=
            (uint64_t)layer->streaming * streaming_tokens(&cache->config, state->length);
    }
    layer->steps += args->batch;
}

/* ---- calls ---- */

static void note_call(kvf_cache *cache, const work *w)
{
    if (w->chunk)
        note(cache, w->chunk->sequence, w->chunk->layer, w->chunk->tokens, w->chunk->positions);
    else
        kvf_masked_step_note(cache, w->batch);
}

kvf_status kvf_masked_end_refused(kvf_step *step, const kvf_cache *inner, kvf_status status)
{
    const kvf_status ended = kvf_step_end(step, inner->broken);
    return status != KVF_OK ? status : ended;
}

static kvf_status run(kvf_step *step, const work *w)
{
    bool is_refused = false;
    kvf_status status = kvf_step_send(step);
    if (status == KVF_OK)
        status = enqueue_inner(w, &is_refused);
    if (is_refused)
        return kvf_masked_end_refused(step, inner_cache(w), status);
    note_call(step->cache, w);
    if (status == KVF_OK)
        status = enqueue_streaming(w);
    return kvf_step_end(step, status);
}

kvf_status kvf_masked_prefill(kvf_cache *cache, const kvf_prefill_args *args, kvf_stream *stream)
{
    kvf_step step;
    work w;
    KVF_TRY(kvf_step_begin(cache, stream, &step));
    fill_chunk(&step, args, &w);
    return run(&step, &w);
}

kvf_status kvf_masked_decode(kvf_cache *cache, const kvf_decode_args *args, kvf_stream *stream)
{
    kvf_step step;
    work w;
    KVF_TRY(kvf_step_begin(cache, stream, &step));
    fill_batch(&step, args, &w);
    return run(&step, &w);
}

kvf_status kvf_masked_step_record(kvf_step *step, const kvf_decode_args *args)
{
    bool is_refused;
    work w;
    fill_batch(step, args, &w);
    KVF_TRY(enqueue_inner(&w, &is_refused));
    return enqueue_streaming(&w);
}
