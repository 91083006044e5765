/* SPDX-License-Identifier: Apache-2.0 */

/*
 * See the header. Both halves of the memory have the same layout: what a feed writes on the host is
 * copied to where the steps look for it. An event after every step says that its tokens are in the
 * ring.
 */

#include "draw_queue.h"

#include "common/carve.h"
#include "draw_ops.h"

#include <stdlib.h>
#include <string.h>

typedef struct draw_memory {
    kvf_draw_settings *settings; /* [rows_max] */
    uint32_t *ids;               /* [rows_max] as the next two */
    uint32_t *positions;
    uint32_t *turns;
    size_t head_bytes; /* of all those */
    uint64_t *seen;    /* [rows_max, words] */
} draw_memory;

struct kvf_draw_queue {
    kvf_runtime *runtime;
    uint32_t rows_max, vocab_size;
    size_t words;                /* of a row's seen tokens */
    draw_memory host, device;    /* host: pinned */
    void *pinned, *pinned_alias; /* host and, as the device sees it, what host consists of */
    void *memory;                /* device */
    uint32_t *drawn;             /* [KVF_DRAWS_MAX, rows_max] pinned */
    uint32_t *drawn_alias;
    void *events[KVF_DRAWS_MAX];
    uint32_t rows;          /* of the feed */
    uint32_t marked, taken; /* since the feed */
};

static size_t lay_out(uint32_t rows_max, size_t words, void *base, draw_memory *m)
{
    kvf_carver k = {.base = base};
    KVF_CARVE(&k, m->settings, rows_max);
    KVF_CARVE(&k, m->ids, rows_max);
    KVF_CARVE(&k, m->positions, rows_max);
    KVF_CARVE(&k, m->turns, rows_max);
    m->head_bytes = k.bytes;
    KVF_CARVE(&k, m->seen, rows_max, words);
    return k.bytes;
}

static size_t words_of(uint32_t vocab_size)
{
    return ((size_t)vocab_size + 63) / 64;
}

static size_t ring_bytes(uint32_t rows_max)
{
    return (size_t)KVF_DRAWS_MAX * rows_max * sizeof(uint32_t);
}

uint64_t kvf_draw_queue_bytes(uint32_t rows_max, uint32_t vocab_size)
{
    draw_memory unused;
    return 2 * lay_out(rows_max, words_of(vocab_size), NULL, &unused) + ring_bytes(rows_max);
}

static kvf_status reserve(kvf_draw_queue *q, kvf_error *error)
{
    kvf_runtime *runtime = q->runtime;
    const size_t bytes = lay_out(q->rows_max, q->words, NULL, &q->host);
    void *ring, *alias;
    if (kvf_memory_alloc(runtime, bytes, &q->memory) != KVF_OK ||
        kvf_pinned_alloc(runtime, bytes, &q->pinned, &q->pinned_alias) != KVF_OK ||
        kvf_pinned_alloc(runtime, ring_bytes(q->rows_max), &ring, &alias) != KVF_OK)
        return model_fail(error, KVF_OUT_OF_DEVICE_MEMORY, "%zu bytes for drawing tokens: %s",
                          bytes, kvf_runtime_error(runtime)->text);
    q->drawn = ring;
    q->drawn_alias = alias;
    lay_out(q->rows_max, q->words, q->pinned, &q->host);
    lay_out(q->rows_max, q->words, q->memory, &q->device);
    for (uint32_t i = 0; i < KVF_DRAWS_MAX; i++)
        if (kvf_draw_event_create(&q->events[i]) != 0)
            return model_fail(error, KVF_DEVICE_FAILED, "no event for drawing tokens");
    return KVF_OK;
}

kvf_status kvf_draw_queue_open(kvf_runtime *runtime, uint32_t rows_max, uint32_t vocab_size,
                               kvf_draw_queue **out, kvf_error *error)
{
    *out = NULL;
    kvf_draw_queue *q = calloc(1, sizeof *q);
    if (!q)
        return model_out_of_memory(error, sizeof *q, "drawing tokens");
    q->runtime = runtime;
    q->rows_max = rows_max;
    q->vocab_size = vocab_size;
    q->words = words_of(vocab_size);
    const kvf_status status = reserve(q, error);
    if (status != KVF_OK) {
        kvf_draw_queue_close(q);
        return status;
    }
    *out = q;
    return KVF_OK;
}

void kvf_draw_queue_close(kvf_draw_queue *q)
{
    if (!q)
        return;
    for (uint32_t i = 0; i < KVF_DRAWS_MAX; i++)
        kvf_draw_event_destroy(q->events[i]);
    kvf_pinned_free(q->runtime, q->drawn);
    kvf_pinned_free(q->runtime, q->pinned);
    kvf_memory_free(q->runtime, q->memory);
    free(q);
}

kvf_status kvf_draw_queue_feed(kvf_draw_queue *q, const kvf_draw_step *step,
                               const uint32_t *positions, kvf_stream *stream)
{
    const uint32_t rows = step->batch;
    const draw_memory *h = &q->host;
    const size_t row_bytes = q->words * sizeof *h->seen;
    q->rows = rows;
    q->marked = q->taken = 0;
    memcpy(h->ids, step->ids, rows * sizeof *h->ids);
    memcpy(h->positions, positions, rows * sizeof *positions);
    memset(h->turns, 0, rows * sizeof *h->turns);
    for (uint32_t i = 0; i < rows; i++) {
        const uint32_t row = step->sampler_rows[i];
        h->settings[i] = *kvf_sampler_settings(step->sampler, row);
        memcpy(h->seen + i * q->words, kvf_sampler_seen(step->sampler, row), row_bytes);
    }
    const char *from = q->pinned_alias;
    const size_t seen_at = (size_t)((const char *)h->seen - (const char *)q->pinned);
    KVF_TRY(kvf_memory_copy(stream, q->memory, from, h->head_bytes));
    return kvf_memory_copy(stream, q->device.seen, from + seen_at, rows * row_bytes);
}

const uint32_t *kvf_draw_queue_ids(const kvf_draw_queue *q)
{
    return q->device.ids;
}

const uint32_t *kvf_draw_queue_positions(const kvf_draw_queue *q)
{
    return q->device.positions;
}

kvf_status kvf_draw_queue_draw(kvf_draw_queue *q, uint32_t rows, const float *logits,
                               kvf_stream *stream)
{
    const draw_memory *d = &q->device;
    const kvf_draw_args args = {.rows = rows,
                                .vocab_size = q->vocab_size,
                                .seen_words = 2 * (uint32_t)q->words,
                                .places = KVF_DRAWS_MAX,
                                .rows_max = q->rows_max,
                                .logits = logits,
                                .settings = d->settings,
                                .seen = (uint32_t *)(void *)d->seen, /* little endian */
                                .turns = d->turns,
                                .positions = d->positions,
                                .ids = d->ids,
                                .drawn = q->drawn_alias};
    return kvf_draw_cuda(&args, kvf_stream_native(stream)) == 0 ? KVF_OK : KVF_DEVICE_FAILED;
}

kvf_status kvf_draw_queue_mark(kvf_draw_queue *q, kvf_stream *stream)
{
    void *event = q->events[q->marked % KVF_DRAWS_MAX];
    if (kvf_draw_event_record(event, kvf_stream_native(stream)) != 0)
        return KVF_DEVICE_FAILED;
    q->marked++;
    return KVF_OK;
}

kvf_status kvf_draw_queue_take(kvf_draw_queue *q, uint32_t *ids)
{
    const uint32_t place = q->taken % KVF_DRAWS_MAX;
    if (kvf_draw_event_wait(q->events[place]) != 0)
        return KVF_DEVICE_FAILED;
    memcpy(ids, q->drawn + (size_t)place * q->rows_max, q->rows * sizeof *ids);
    q->taken++;
    return KVF_OK;
}
