/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Runs a transformer: enqueues the operations of every layer in order.
 *
 * It knows the order of operations; what they are on a device is transformer_host.c and
 * transformer_cuda.c, and shapes were checked at open. A prompt that fits the hidden states goes
 * layer by layer: all of it through one layer, in chunks, before the next. Where the device can
 * record, the second step of the same batch is recorded and later ones are replayed.
 */

#include "transformer_ops.h"

#include <assert.h>
#include <string.h>

#include "common/base.h"

static kvf_status attend(const transformer_step *s, uint32_t layer, const uint32_t *positions)
{
    const transformer_buffers *b = &s->t->buffers;
    if (s->decode) {
        kvf_decode_args args = {
            .layer = layer,
            .batch = s->rows,
            .sequences = s->sequences,
            .q = b->q,
            .k = b->k,
            .v = b->v,
            .positions = positions,
            .out = b->attended,
        };
        return kvf_decode(s->cache, &args, s->stream);
    }
    kvf_prefill_args args = {
        .sequence = s->sequences[0],
        .layer = layer,
        .tokens = s->rows,
        .q = b->q,
        .k = b->k,
        .v = b->v,
        .positions = positions,
        .out = b->attended,
    };
    return kvf_prefill(s->cache, &args, s->stream);
}

kvf_status transformer_project(const transformer_step *s, uint32_t layer)
{
    const transformer_layer *l = &s->t->layers[layer];
    KVF_TRY(s->t->ops->norm(s, l->attention_norm));
    return s->t->ops->project(s, l);
}

kvf_status transformer_mlp(const transformer_step *s, uint32_t layer)
{
    const transformer_layer *l = &s->t->layers[layer];
    KVF_TRY(s->t->ops->norm(s, l->mlp_norm));
    return s->t->ops->mlp(s, l);
}

static kvf_status run_attention(const transformer_step *s, uint32_t layer,
                                const uint32_t *positions)
{
    KVF_TRY(transformer_project(s, layer));
    return attend(s, layer, positions);
}

static kvf_status run_rest(const transformer_step *s, uint32_t layer)
{
    KVF_TRY(s->t->ops->output(s, &s->t->layers[layer]));
    return transformer_mlp(s, layer);
}

/* Position of the next token of a sequence. */
static uint32_t next_position(const kvf_sequence *sequence)
{
    uint32_t length = kvf_sequence_length(sequence, 0);
    return length == 0 ? 0 : kvf_sequence_position(sequence, 0, length - 1) + 1;
}

bool transformer_ids_valid(const kvf_transformer *t, const uint32_t *ids, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        if (ids[i] >= t->model.vocab_size)
            return false;
    return true;
}

/* ---- prefill ---- */

/* One layer of the prompt, chunk by chunk. The last one stops at its attention: nobody reads more.
 */
static kvf_status prefill_layer(transformer_step s, uint32_t layer, uint32_t count,
                                const uint32_t *positions)
{
    const uint32_t chunk = s.t->options.chunk_max;
    const bool is_last = layer + 1 == s.t->model.layers;
    for (s.first = 0; s.first < count; s.first += s.rows) {
        s.rows = count - s.first < chunk ? count - s.first : chunk;
        KVF_TRY(run_attention(&s, layer, positions + s.first));
        if (!is_last)
            KVF_TRY(run_rest(&s, layer));
    }
    return KVF_OK;
}

kvf_status kvf_transformer_prefill(kvf_transformer *t, kvf_cache *cache, kvf_sequence *sequence,
                                   const uint32_t *ids, uint32_t count, kvf_stream *stream)
{
    if (count == 0 || count > kvf_transformer_prompt_max(t) ||
        !transformer_ids_valid(t, ids, count))
        return KVF_INVALID;
    uint32_t first = next_position(sequence);
    for (uint32_t i = 0; i < count; i++)
        t->positions[i] = first + i;
    transformer_step s = {
        .t = t, .cache = cache, .sequences = &sequence, .stream = stream, .rows = count};
    KVF_TRY(t->ops->start(&s, ids, t->positions));
    for (uint32_t layer = 0; layer < t->model.layers; layer++)
        KVF_TRY(prefill_layer(s, layer, count, t->positions));
    return KVF_OK;
}

uint32_t kvf_transformer_prompt_max(const kvf_transformer *t)
{
    return transformer_hidden_rows(&t->options);
}

/* ---- decode ---- */

static kvf_status decode_layers(const transformer_step *s, bool wants_logits,
                                const uint32_t *positions)
{
    const kvf_transformer *t = s->t;
    for (uint32_t layer = 0; layer < t->model.layers; layer++) {
        KVF_TRY(run_attention(s, layer, positions));
        if (wants_logits || layer + 1 < t->model.layers)
            KVF_TRY(run_rest(s, layer));
    }
    if (!wants_logits)
        return KVF_OK;
    KVF_TRY(t->ops->norm(s, t->final_norm));
    return t->ops->logits(s);
}

/* Whether the last steps were of this batch; a step of another one forgets the recording. */
static bool is_same_batch(transformer_recording *r, const transformer_step *s, bool wants_logits)
{
    const bool same = r->cache == s->cache && r->stream == s->stream && r->batch == s->rows &&
                      r->wants_logits == wants_logits &&
                      memcmp(r->sequences, s->sequences, s->rows * sizeof(kvf_sequence *)) == 0;
    if (same)
        return true;
    kvf_recording_destroy(r->recording);
    r->recording = NULL;
    r->cache = s->cache;
    r->stream = s->stream;
    r->batch = s->rows;
    r->wants_logits = wants_logits;
    r->seen = 0;
    memcpy(r->sequences, s->sequences, s->rows * sizeof(kvf_sequence *));
    return false;
}

/* A failure to record is no failure of the step: it is enqueued instead. */
static void record(const transformer_step *s, bool wants_logits)
{
    transformer_recording *r = &s->t->recording;
    kvf_status status = kvf_record_begin(s->cache, s->sequences, s->rows, s->stream);
    if (status == KVF_OK) {
        status = decode_layers(s, wants_logits, NULL);
        const kvf_status ended = kvf_record_end(s->cache, &r->recording);
        status = status == KVF_OK ? ended : status;
    }
    if (status == KVF_OK)
        return;
    kvf_recording_destroy(r->recording);
    r->recording = NULL;
    r->is_refused = true;
}

static kvf_status decode_step(const transformer_step *s, bool wants_logits)
{
    transformer_recording *r = &s->t->recording;
    if (!s->t->ops->can_record || r->is_refused)
        return decode_layers(s, wants_logits, s->t->positions);
    if (is_same_batch(r, s, wants_logits) && !r->recording && r->seen >= 1)
        record(s, wants_logits);
    if (r->recording && kvf_replay_is_possible(r->recording))
        return kvf_replay(r->recording, s->stream);
    r->seen++;
    return decode_layers(s, wants_logits, s->t->positions);
}

kvf_status kvf_transformer_decode(kvf_transformer *t, kvf_cache *cache,
                                  kvf_sequence *const *sequences, const uint32_t *ids,
                                  uint32_t batch, bool want_logits, kvf_stream *stream)
{
    if (batch == 0 || batch > t->options.batch_max || !transformer_ids_valid(t, ids, batch))
        return KVF_INVALID;
    for (uint32_t i = 0; i < batch; i++)
        t->positions[i] = next_position(sequences[i]);
    transformer_step s = {.t = t,
                          .cache = cache,
                          .sequences = sequences,
                          .stream = stream,
                          .rows = batch,
                          .decode = true};
    KVF_TRY(t->ops->start(&s, ids, t->positions));
    return decode_step(&s, want_logits);
}

void kvf_transformer_forget(kvf_transformer *t)
{
    kvf_recording_destroy(t->recording.recording);
    t->recording.recording = NULL;
    t->recording.cache = NULL;
}

const float *kvf_transformer_logits(const kvf_transformer *t, uint32_t row)
{
    assert(row < t->options.batch_max);
    return t->ops->logits_row(t, row);
}

kvf_status kvf_transformer_check(const kvf_transformer *t, kvf_error *error)
{
    return t->ops->check(t, error);
}
