/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Recorded steps with a head mask: the recordings of all caches, one behind the other, in one
 * graph.
 *
 * Knows nothing of what an inner cache records. While recording nothing runs; a replay asks all of
 * them before it changes any.
 */

#include "masked_record.h"

#include "masked_step.h"
#include "sequence.h"

struct kvf_masked_recording {
    kvf_decode_args *calls; /* [layers of the cache] as they were recorded */
    kvf_recording *inner[]; /* [parts of the cache]; NULL = not opened yet */
};

static uint32_t parts_of(const kvf_recording *r)
{
    return r->cache->masked->sizes.parts;
}

void kvf_masked_record_close(kvf_recording *r)
{
    kvf_context *context = r->cache->context;
    kvf_masked_recording *m = r->masked;
    const uint32_t parts = parts_of(r);
    kvf_recording_close(r); /* the graph goes before what it reads */
    for (uint32_t i = 0; m && i < parts; i++)
        if (m->inner[i])
            kvf_recording_close(m->inner[i]);
    if (m)
        kvf_free(context, m->calls);
    kvf_free(context, m);
}

/* ---- recording ---- */

static void take_step(kvf_step *step)
{
    kvf_masked_step_fill(step, NULL);
}

static kvf_status open_inner(kvf_recording *r)
{
    kvf_cache *cache = r->cache;
    kvf_masked *m = cache->masked;
    const uint32_t parts = parts_of(r);
    r->masked = kvf_alloc(cache->context, 1, sizeof *r->masked + parts * sizeof(kvf_recording *));
    if (r->masked)
        r->masked->calls = kvf_alloc(cache->context, cache->config.layers, sizeof(kvf_decode_args));
    if (!r->masked || !r->masked->calls)
        KVF_FAIL(cache->context, KVF_OUT_OF_MEMORY, "no memory for a recording of %u layers",
                 cache->config.layers);
    for (uint32_t i = 0; i < parts; i++) {
        for (uint32_t b = 0; b < r->batch; b++)
            m->batch[b] = kvf_masked_inner(r->sequences[b])[i];
        KVF_TRY(kvf_recording_open(m->parts[i].cache, m->batch, r->batch, kvf_decode_take_dry,
                                   &r->masked->inner[i]));
    }
    return KVF_OK;
}

kvf_status kvf_masked_record_begin(kvf_cache *cache, kvf_sequence *const *sequences, uint32_t batch,
                                   kvf_stream *stream)
{
    kvf_recording *r = NULL;
    KVF_TRY(kvf_recording_open(cache, sequences, batch, take_step, &r));
    kvf_status status = open_inner(r);
    if (status == KVF_OK)
        status = cache->device->ops->capture_begin(stream);
    if (status != KVF_OK) {
        kvf_masked_record_close(r);
        return status;
    }
    kvf_recording_start(r, stream);
    for (uint32_t i = 0; i < parts_of(r); i++)
        kvf_recording_start(r->masked->inner[i], stream);
    return KVF_OK;
}

static kvf_status record_call(kvf_recording *r, const kvf_decode_args *args, kvf_stream *stream)
{
    kvf_frame frame;
    kvf_step step;
    KVF_TRY(kvf_recording_call(r, args, stream, &frame, &step));
    kvf_decode_args *call = &r->masked->calls[r->parts - 1];
    *call = *args;
    call->sequences = r->sequences;
    return kvf_masked_step_record(&step, call);
}

kvf_status kvf_masked_record_decode(kvf_recording *r, const kvf_decode_args *args,
                                    kvf_stream *stream)
{
    return kvf_recording_keep(r, record_call(r, args, stream));
}

kvf_status kvf_masked_record_end(kvf_recording *r, kvf_recording **out)
{
    for (uint32_t i = 0; i < parts_of(r); i++)
        (void)kvf_recording_keep(r, kvf_recording_finish(r->masked->inner[i]));
    const kvf_status status = kvf_recording_capture_end(r);
    if (status != KVF_OK) {
        kvf_masked_record_close(r);
        return status;
    }
    *out = r;
    return KVF_OK;
}

/* ---- running it again ---- */

bool kvf_masked_can_replay(const kvf_recording *r)
{
    if (!kvf_recording_is_alive(r) || !kvf_recording_has_room(r))
        return false;
    for (uint32_t i = 0; i < parts_of(r); i++)
        if (!kvf_recording_can_replay(r->masked->inner[i]))
            return false;
    return true;
}

static kvf_status check(kvf_recording *r)
{
    kvf_cache *cache = r->cache;
    KVF_TRY(kvf_recording_check_sequences(r));
    for (uint32_t b = 0; b < r->batch; b++)
        KVF_TRY(kvf_masked_usable(cache, r->sequences[b]));
    for (uint32_t i = 0; i < parts_of(r); i++)
        KVF_TRY(kvf_recording_check(r->masked->inner[i]));
    return KVF_OK;
}

static void note(kvf_recording *r)
{
    for (uint32_t i = 0; i < r->parts; i++) {
        kvf_frame frame;
        kvf_step step = kvf_recording_step(r, i, &frame);
        kvf_masked_step_fill(&step, &r->masked->calls[i]);
        kvf_masked_step_note(r->cache, &r->masked->calls[i]);
    }
    for (uint32_t i = 0; i < parts_of(r); i++)
        kvf_recording_note(r->masked->inner[i]);
}

/* Everything of a replay, the graph included. */
static kvf_status enqueue(kvf_recording *r, kvf_stream *stream)
{
    kvf_status status = kvf_recording_follow(r, stream);
    for (uint32_t i = 0; status == KVF_OK && i < parts_of(r); i++)
        status = kvf_recording_lead(r->masked->inner[i], stream);
    return status == KVF_OK ? r->cache->device->ops->graph_launch(r->graph, stream) : status;
}

kvf_status kvf_masked_replay(kvf_recording *r, kvf_stream *stream)
{
    KVF_TRY(check(r));
    KVF_TRY(kvf_recording_await(r)); /* theirs is recorded before it */
    note(r);
    kvf_status status = enqueue(r, stream);
    for (uint32_t i = 0; i < parts_of(r); i++)
        status = kvf_recording_mark(r->masked->inner[i], stream, status);
    return kvf_recording_mark(r, stream, status);
}
