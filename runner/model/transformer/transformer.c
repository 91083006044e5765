/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Decode steps. A norm belongs to the product before it, which may end with it.
 *
 * It knows the order of operations; what they are on a device is in transformer_host.c and
 * transformer_cuda.c, and shapes were checked at open. Where the device can record, the second step
 * of the same batch is recorded and later ones are replayed.
 */

#include "transformer_ops.h"

#include <assert.h>
#include <string.h>

kvf_status kvf_library_told(const kvf_runtime *runtime, kvf_status status, kvf_error *error)
{
    const kvf_error *last = kvf_runtime_error(runtime);
    if (status == KVF_OK)
        return KVF_OK;
    return model_fail(error, status, "%s",
                      last->status == status ? last->text : kvf_status_text(status));
}

uint32_t transformer_next_position(const kvf_sequence *sequence)
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

uint32_t kvf_transformer_prompt_max(const kvf_transformer *t)
{
    return transformer_hidden_rows(&t->options);
}

/* ---- decode ---- */

typedef struct decode_run {
    transformer_step step;
    kvf_cache *cache;
    kvf_sequence *const *sequences;
    const uint32_t *tokens; /* [batch] of each sequence: rows are tokens; NULL = one of each */
    uint32_t batch;
    bool wants_logits;
} decode_run;

static kvf_status attend(const decode_run *r, uint32_t layer, const uint32_t *positions)
{
    const transformer_buffers *b = &r->step.t->buffers;
    const kvf_decode_args args = {.layer = layer,
                                  .batch = r->batch,
                                  .sequences = r->sequences,
                                  .q = b->q,
                                  .k = b->k,
                                  .v = b->v,
                                  .positions = positions,
                                  .out = b->attended,
                                  .tokens = r->tokens};
    return kvf_decode(r->cache, &args, r->step.stream);
}

static kvf_status show(const decode_run *r, uint32_t layer)
{
    const transformer_step *s = &r->step;
    const transformer_observer *o = &s->t->observer;
    const kvf_attention_view view = {.layer = layer,
                                     .batch = s->rows,
                                     .sequences = r->sequences,
                                     .q = s->t->buffers.q,
                                     .attended = s->t->buffers.attended,
                                     .hidden = transformer_hidden_at(s),
                                     .output = &s->t->layers[layer].output};
    if (!o->see)
        return KVF_OK;
    KVF_TRY(kvf_stream_wait(s->stream));
    return o->see(o->user, &view);
}

kvf_status kvf_transformer_observe(kvf_transformer *t, kvf_attention_fn see, void *user)
{
    if (see && !t->ops->is_host)
        return KVF_UNSUPPORTED;
    t->observer = (transformer_observer){see, user};
    return KVF_OK;
}

static kvf_status decode_layers(const decode_run *r, const uint32_t *positions)
{
    const transformer_step *s = &r->step;
    const kvf_transformer *t = s->t;
    KVF_TRY(t->ops->norm(s, t->layers[0].attention_norm));
    for (uint32_t layer = 0; layer < t->model.layers; layer++) {
        const transformer_layer *l = &t->layers[layer];
        const bool is_last = layer + 1 == t->model.layers;
        KVF_TRY(t->ops->project(s, l));
        KVF_TRY(attend(r, layer, positions));
        KVF_TRY(show(r, layer));
        if (!r->wants_logits && is_last)
            return KVF_OK;
        KVF_TRY(t->ops->output(s, l, l->mlp_norm));
        KVF_TRY(t->ops->mlp(s, l, is_last ? t->final_norm : l[1].attention_norm));
    }
    return t->ops->logits(s);
}

static void drop_recording(transformer_recording *r)
{
    kvf_recording_destroy(r->recording);
    r->recording = NULL;
}

/* Whether the last steps were of this batch; a step of another one forgets the recording. */
static bool is_same_batch(transformer_recording *r, const decode_run *run)
{
    const transformer_step *s = &run->step;
    const size_t bytes = s->rows * sizeof(kvf_sequence *);
    if (r->cache == run->cache && r->stream == s->stream && r->batch == s->rows &&
        r->wants_logits == run->wants_logits && memcmp(r->sequences, run->sequences, bytes) == 0)
        return true;
    drop_recording(r);
    r->cache = run->cache;
    r->stream = s->stream;
    r->batch = s->rows;
    r->wants_logits = run->wants_logits;
    r->seen = 0;
    memcpy(r->sequences, run->sequences, bytes);
    return false;
}

/* A failure to record is no failure of the step: it is enqueued instead. */
static void record(transformer_recording *r, const decode_run *run)
{
    kvf_status status =
        kvf_record_begin(run->cache, run->sequences, run->step.rows, run->step.stream);
    if (status == KVF_OK) {
        status = decode_layers(run, NULL);
        const kvf_status ended = kvf_record_end(run->cache, &r->recording);
        status = status == KVF_OK ? ended : status;
    }
    if (status == KVF_OK)
        return;
    drop_recording(r);
    r->is_refused = true;
}

static kvf_status decode_step(const decode_run *run)
{
    const kvf_transformer *t = run->step.t;
    transformer_recording *r = &run->step.t->recording;
    if (!t->ops->can_record || r->is_refused)
        return decode_layers(run, t->positions);
    if (is_same_batch(r, run) && !r->recording && r->seen >= 1)
        record(r, run);
    if (r->recording && kvf_replay_is_possible(r->recording))
        return kvf_replay(r->recording, run->step.stream);
    r->seen++;
    return decode_layers(run, t->positions);
}

kvf_status kvf_transformer_decode_several(kvf_transformer *t, kvf_cache *cache,
                                          const kvf_several *several, bool want_logits,
                                          kvf_stream *stream)
{
    uint32_t rows = 0;
    for (uint32_t i = 0; i < several->batch; i++) {
        const uint32_t first = transformer_next_position(several->sequences[i]);
        const uint32_t tokens = several->tokens ? several->tokens[i] : 1;
        if (tokens == 0 || tokens > t->options.batch_max - rows)
            return KVF_INVALID;
        for (uint32_t j = 0; j < tokens; j++)
            t->positions[rows++] = first + j;
    }
    const bool is_single = rows == several->batch;
    const decode_run run = {.step = {.t = t, .stream = stream, .rows = rows, .separate = true},
                            .cache = cache,
                            .sequences = several->sequences,
                            .tokens = is_single ? NULL : several->tokens,
                            .batch = several->batch,
                            .wants_logits = want_logits};
    if (rows == 0 || !transformer_ids_valid(t, several->ids, rows))
        return KVF_INVALID;
    KVF_TRY(t->ops->start(&run.step, several->ids, t->positions));
    return is_single ? decode_step(&run) : decode_layers(&run, t->positions);
}

kvf_status kvf_transformer_decode(kvf_transformer *t, kvf_cache *cache,
                                  kvf_sequence *const *sequences, const uint32_t *ids,
                                  uint32_t batch, bool want_logits, kvf_stream *stream)
{
    const kvf_several each = {.sequences = sequences, .ids = ids, .batch = batch};
    return kvf_transformer_decode_several(t, cache, &each, want_logits, stream);
}

void kvf_transformer_forget(kvf_transformer *t)
{
    drop_recording(&t->recording);
    t->recording.cache = NULL;
}

const float *kvf_transformer_logits(const kvf_transformer *t, uint32_t row)
{
    assert(row < t->options.batch_max);
    return t->ops->logits_row(t, row);
}

kvf_status kvf_transformer_check(const kvf_transformer *t, kvf_error *error)
{
    return t->ops->check ? t->ops->check(t, error) : KVF_OK;
}
