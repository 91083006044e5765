/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Recording a decode step, and running it again.
 *
 * Knows the order of one step on the host, and nothing of what its launches do. While recording no
 * call runs and no bookkeeping changes; a replay does the bookkeeping of every recorded call,
 * writes their parts of one frame, seals what the step seals, and launches the graph.
 */

#include "record.h"

#include <string.h>

#include "ahead.h"
#include "append.h"
#include "prefill_arena.h"
#include "sequence.h"
#include "speculate.h"

/* ---- making and unmaking ---- */

void kvf_recording_close(kvf_recording *recording)
{
    kvf_cache *cache = recording->cache;
    const kvf_device_ops *ops = cache->device->ops;
    /* No replay is under way, so nothing has to wait for the last one. */
    for (uint32_t i = 0; i < KVF_REPLAYS; i++)
        if (recording->done[i] && cache->last_done == recording->done[i])
            cache->last_done = NULL;
    if (recording->graph)
        ops->graph_destroy(recording->graph);
    for (uint32_t i = 0; i < KVF_REPLAYS; i++)
        ops->event_destroy(recording->done[i]);
    if (recording->ring.arenas)
        kvf_host_memory_destroy(cache->context, &recording->ring);
    if (recording->device)
        ops->memory_free(cache->device, recording->device);
    kvf_free(cache->context, recording->has_layer);
    kvf_free(cache->context, recording->layers);
    kvf_free(cache->context, recording->generations);
    kvf_free(cache->context, recording->sequences);
    kvf_free(cache->context, recording);
}

/* A frame of its own for one call; dry if `host` is NULL. */
static kvf_step part_step(kvf_recording *r, uint32_t part, kvf_frame *frame, char *host)
{
    *frame = (kvf_frame){.host.base = host,
                         .device = r->device ? r->device + part * r->part_bytes : NULL};
    return (kvf_step){.cache = r->cache,
                      .stream = r->stream,
                      .frame = frame,
                      .rows = r->batch,
                      .sequences = host ? r->sequences : NULL,
                      .ahead = &r->ahead,
                      .is_recorded = 1};
}

/* As much of a frame as a recorded call uses; the same for every layer. */
static size_t measure(kvf_recording *r, void (*take)(kvf_step *step))
{
    kvf_frame frame;
    kvf_step step = part_step(r, 0, &frame, NULL);
    take(&step);
    return frame.host.bytes;
}

static kvf_status reserve(kvf_recording *r, kvf_sequence *const *sequences,
                          void (*take)(kvf_step *step))
{
    kvf_cache *cache = r->cache;
    const kvf_device_ops *ops = cache->device->ops;
    const uint32_t layers = cache->config.layers;
    r->sequences = kvf_alloc(cache->context, r->batch, sizeof(kvf_sequence *));
    r->generations = kvf_alloc(cache->context, r->batch, sizeof *r->generations);
    r->layers = kvf_alloc(cache->context, layers, sizeof *r->layers);
    r->has_layer = kvf_alloc(cache->context, layers, sizeof *r->has_layer);
    if (!r->sequences || !r->generations || !r->layers || !r->has_layer)
        KVF_FAIL(cache->context, KVF_OUT_OF_MEMORY, "no memory for a recording of %u layers",
                 layers);
    for (uint32_t b = 0; b < r->batch; b++) {
        r->sequences[b] = sequences[b];
        r->generations[b] = sequences[b]->generation;
    }
    r->part_bytes = measure(r, take);
    r->rows_max = layers * r->batch;
    r->seal_bytes = kvf_round_up(r->rows_max * (sizeof(kvf_row) + sizeof(void *)), 64);
    const size_t graph_bytes = layers * (r->part_bytes + sizeof(uint32_t));
    kvf_host_memory_config memory = kvf_runtime_memory(cache->runtime);
    memory.huge_pages = KVF_HUGE_PAGES_OFF;
    memory.bytes = kvf_round_up(KVF_REPLAYS * (layers * r->part_bytes + r->seal_bytes), 4096);
    if (memory.bytes > KVF_ARENA_BYTES_MAX)
        KVF_FAIL(cache->context, KVF_INVALID,
                 "batch = %u: %u frames of %u layers take %llu bytes; record fewer sequences",
                 r->batch, KVF_REPLAYS, layers, (unsigned long long)memory.bytes);
    memory.granule = memory.bytes;
    KVF_TRY(kvf_host_memory_create(cache->context, cache->device, &memory, &r->ring));
    void *device = NULL;
    KVF_TRY(
        ops->memory_alloc(cache->device, kvf_round_up(graph_bytes, 64) + r->seal_bytes, &device));
    r->device = device;
    r->seal_device = r->device + kvf_round_up(graph_bytes, 64);
    for (uint32_t i = 0; i < KVF_REPLAYS; i++)
        KVF_TRY(ops->event_create(cache->device, &r->done[i]));
    return KVF_OK;
}

/* ---- recording ---- */

/* The first node: every part of the next frame to its place. */
static kvf_status bring_frame(kvf_recording *r)
{
    kvf_cache *cache = r->cache;
    const uint32_t layers = cache->config.layers;
    const kvf_frame_args args = {.frames = KVF_REPLAYS,
                                 .parts = layers,
                                 .bytes = r->part_bytes,
                                 .from = r->ring.arenas[0].device,
                                 .to = r->device,
                                 .turns = (uint32_t *)(void *)(r->device + layers * r->part_bytes)};
    return KVF_ENQUEUE(r->stream, frame, args);
}

kvf_status kvf_recording_open(kvf_cache *cache, kvf_sequence *const *sequences, uint32_t batch,
                              void (*take)(kvf_step *step), kvf_recording **out)
{
    kvf_recording *r = kvf_alloc(cache->context, 1, sizeof *r);
    if (!r)
        KVF_FAIL(cache->context, KVF_OUT_OF_MEMORY, "no memory for a recording");
    r->cache = cache;
    r->batch = batch;
    const kvf_status status = reserve(r, sequences, take);
    if (status != KVF_OK) {
        kvf_recording_close(r);
        return status;
    }
    *out = r;
    return KVF_OK;
}

void kvf_recording_start(kvf_recording *r, kvf_stream *stream)
{
    r->stream = stream;
    r->failure = bring_frame(r);
    r->cache->recording = r;
}

kvf_status kvf_recording_begin(kvf_cache *cache, kvf_sequence *const *sequences, uint32_t batch,
                               kvf_stream *stream)
{
    kvf_recording *r = NULL;
    KVF_TRY(kvf_recording_open(cache, sequences, batch, kvf_decode_take_dry, &r));
    const kvf_status status = cache->device->ops->capture_begin(stream);
    if (status != KVF_OK) {
        kvf_recording_close(r);
        return status;
    }
    kvf_recording_start(r, stream);
    return KVF_OK; /* a failure from here on is reported by the end */
}

static kvf_status check_call(kvf_recording *r, const kvf_decode_args *args, kvf_stream *stream)
{
    kvf_context *context = r->cache->context;
    if (stream != r->stream)
        KVF_FAIL(context, KVF_INVALID, "another stream is being recorded; pass that one");
    if (args->batch != r->batch ||
        memcmp(args->sequences, r->sequences, r->batch * sizeof(kvf_sequence *)) != 0)
        KVF_FAIL(context, KVF_INVALID,
                 "batch or sequences differ from those of kvf_record_begin; pass the same");
    if (!args->k || !args->v)
        KVF_FAIL(context, KVF_INVALID, "k or v is NULL; pass the new keys and values");
    if (args->positions)
        KVF_FAIL(context, KVF_INVALID,
                 "positions are set: a recorded step appends the next one; pass NULL");
    if (r->has_layer[args->layer])
        KVF_FAIL(context, KVF_INVALID,
                 "layer = %u is recorded already; a recording has each layer once", args->layer);
    for (uint32_t b = 0; b < r->batch; b++)
        if (r->sequences[b]->layers[args->layer].length == 0)
            KVF_FAIL(context, KVF_INVALID,
                     "sequences[%u] has no tokens in layer %u; record after its prompt", b,
                     args->layer);
    return KVF_OK;
}

kvf_status kvf_recording_call(kvf_recording *r, const kvf_decode_args *args, kvf_stream *stream,
                              kvf_frame *frame, kvf_step *step)
{
    KVF_TRY(check_call(r, args, stream));
    *step = kvf_recording_step(r, r->parts, frame);
    step->layer = args->layer;
    step->q = args->q;
    r->has_layer[args->layer] = 1;
    r->layers[r->parts++] = args->layer;
    return KVF_OK;
}

static kvf_status record_call(kvf_recording *r, const kvf_decode_args *args, kvf_stream *stream)
{
    kvf_cache *cache = r->cache;
    const kvf_due none = {0};
    kvf_frame frame;
    kvf_step step;
    KVF_TRY(kvf_recording_call(r, args, stream, &frame, &step));
    for (uint32_t b = 0; b < r->batch; b++)
        cache->sealed_before[b] = r->sequences[b]->layers[args->layer].sealed;
    kvf_decode_take(&step, cache->sealed_before);
    KVF_ASSERT(frame.host.bytes == r->part_bytes);
    if (r->parts > 1)
        KVF_TRY(kvf_ahead_await_end(&step));
    KVF_TRY(kvf_decode_enqueue(&step, args, &none));
    return kvf_ahead_mark_end(&step);
}

kvf_status kvf_recording_decode(kvf_recording *r, const kvf_decode_args *args, kvf_stream *stream)
{
    return kvf_recording_keep(r, record_call(r, args, stream));
}

kvf_status kvf_recording_keep(kvf_recording *r, kvf_status status)
{
    if (r->failure == KVF_OK)
        r->failure = status;
    return status;
}

kvf_status kvf_recording_finish(kvf_recording *r)
{
    kvf_frame frame;
    kvf_step step = kvf_recording_step(r, 0, &frame);
    kvf_status status = r->failure;
    if (status == KVF_OK && r->parts > 0)
        status = kvf_ahead_await_end(&step);
    if (status == KVF_OK)
        status = kvf_ahead_join_one(&step, &r->ahead);
    r->stream = NULL;
    r->cache->recording = NULL;
    return status;
}

kvf_status kvf_recording_capture_end(kvf_recording *r)
{
    kvf_cache *cache = r->cache;
    kvf_stream *stream = r->stream;
    kvf_status status = kvf_recording_finish(r);
    if (status == KVF_OK && r->parts == 0)
        status = kvf_fail(cache->context, KVF_INVALID, 0,
                          "nothing was recorded; call kvf_decode between begin and end");
    const kvf_status ended = cache->device->ops->capture_end(stream, &r->graph);
    return status == KVF_OK ? ended : status;
}

kvf_status kvf_recording_end(kvf_recording *r, kvf_recording **out)
{
    const kvf_status status = kvf_recording_capture_end(r);
    if (status != KVF_OK) {
        kvf_recording_close(r);
        return status;
    }
    *out = r;
    return KVF_OK;
}

/* ---- running it again ---- */

static kvf_layer *layer_of(const kvf_recording *r, uint32_t part, uint32_t row)
{
    return &r->sequences[row]->layers[r->layers[part]];
}

/* Blocks that the next step seals, over all layers and rows. */
static uint32_t blocks_to_seal(const kvf_recording *r)
{
    uint32_t blocks = 0;
    for (uint32_t i = 0; i < r->parts; i++)
        for (uint32_t b = 0; b < r->batch; b++) {
            const kvf_layer *layer = layer_of(r, i, b);
            blocks += kvf_sealed_blocks(r->cache, layer->length + 1) - layer->sealed;
        }
    return blocks;
}

static bool has_blocks(const kvf_recording *r)
{
    return blocks_to_seal(r) <= r->cache->pool.free_count;
}

bool kvf_recording_has_room(const kvf_recording *r)
{
    for (uint32_t i = 0; i < r->parts; i++)
        for (uint32_t b = 0; b < r->batch; b++)
            if (layer_of(r, i, b)->length >= r->cache->config.tokens_max)
                return false;
    return true;
}

bool kvf_recording_is_alive(const kvf_recording *r)
{
    for (uint32_t b = 0; b < r->batch; b++)
        if (!r->sequences[b]->is_alive || r->sequences[b]->generation != r->generations[b])
            return false;
    return true;
}

static bool is_plain(const kvf_recording *r)
{
    for (uint32_t i = 0; i < r->parts; i++)
        for (uint32_t b = 0; b < r->batch; b++) {
            const kvf_layer *layer = layer_of(r, i, b);
            const uint32_t sealed = kvf_sealed_blocks(r->cache, layer->length + 1);
            if (layer->is_fresh || kvf_verify_is_due(r->cache, layer) ||
                kvf_refresh_is_due(r->cache, layer, sealed))
                return false;
        }
    return true;
}

bool kvf_recording_can_replay(const kvf_recording *r)
{
    return kvf_recording_is_alive(r) && is_plain(r) && kvf_recording_has_room(r) && has_blocks(r);
}

kvf_status kvf_recording_check_sequences(kvf_recording *r)
{
    kvf_cache *cache = r->cache;
    if (!kvf_recording_is_alive(r))
        KVF_FAIL(cache->context, KVF_INVALID,
                 "a sequence of this recording was destroyed; destroy the recording too");
    for (uint32_t b = 0; b < r->batch; b++)
        KVF_TRY(kvf_sequence_check(cache, r->sequences[b]));
    for (uint32_t i = 0; i < r->parts; i++)
        for (uint32_t b = 0; b < r->batch; b++)
            KVF_TRY(kvf_append_check(cache, layer_of(r, i, b), 1, NULL));
    return KVF_OK;
}

kvf_status kvf_recording_check(kvf_recording *r)
{
    KVF_TRY(kvf_recording_check_sequences(r));
    if (!has_blocks(r))
        return kvf_append_full(r->cache);
    if (!is_plain(r))
        KVF_FAIL(r->cache->context, KVF_INVALID,
                 "this step renews a static set or is verified; enqueue it with kvf_decode "
                 "(kvf_replay_is_possible says so)");
    return KVF_OK;
}

static uint32_t turn_of(const kvf_recording *r)
{
    return (uint32_t)(r->replays % KVF_REPLAYS);
}

/* The rows that a replay seals a block of, of all layers, and where those blocks go. */
typedef struct seal_frame {
    kvf_row *rows; /* [rows_max] */
    void **pool;   /* [rows_max] one per row */
    uint32_t most; /* rows of one launch: as many as there are digest jobs for */
} seal_frame;

static seal_frame seal_frame_of(const kvf_recording *r)
{
    const kvf_cache *cache = r->cache;
    const kvf_paging *p = &cache->dims.paging;
    char *first = r->ring.arenas[0].host +
                  (size_t)KVF_REPLAYS * cache->config.layers * r->part_bytes +
                  turn_of(r) * r->seal_bytes;
    return (seal_frame){.rows = (kvf_row *)(void *)first,
                        .pool = (void **)(void *)(first + r->rows_max * sizeof(kvf_row)),
                        .most = (uint32_t)cache->dims.jobs_max / (p->block_jobs * p->kv_heads)};
}

static void note_sealed(kvf_recording *r, uint32_t part, uint32_t b)
{
    kvf_cache *cache = r->cache;
    const kvf_layer *layer = layer_of(r, part, b);
    const uint32_t sealed_before = cache->sealed_before[b], n = r->sealing;
    if (layer->sealed == sealed_before)
        return;
    KVF_ASSERT(layer->sealed == sealed_before + 1); /* a step is one token */
    const seal_frame seal = seal_frame_of(r);
    seal.rows[n] = kvf_step_row(cache, r->sequences[b], r->layers[part]);
    seal.rows[n].sealed_before = sealed_before;
    seal.rows[n].job_first = n % seal.most;
    seal.rows[n].pool =
        (void *const *)(void *)(r->seal_device + ((char *)&seal.pool[n] - (char *)seal.rows));
    seal.pool[n] = kvf_page_pool_device(&cache->pool, layer->blocks[sealed_before]);
    r->sealing++;
    cache->host_counters[r->layers[part]].bytes_to_host += kvf_block_bytes(&cache->dims.paging);
    cache->sealed_before[b] = layer->sealed;
}

kvf_step kvf_recording_step(kvf_recording *r, uint32_t part, kvf_frame *frame)
{
    const size_t parts = (size_t)turn_of(r) * r->cache->config.layers + part;
    return part_step(r, part, frame, r->ring.arenas[0].host + parts * r->part_bytes);
}

/* Bookkeeping of one recorded call, and its part of the frame. */
static void note_part(kvf_recording *r, uint32_t part)
{
    kvf_cache *cache = r->cache;
    kvf_frame frame;
    kvf_due due;
    kvf_step step = kvf_recording_step(r, part, &frame);
    const kvf_decode_args args = {
        .layer = r->layers[part], .batch = r->batch, .sequences = r->sequences};
    step.layer = args.layer;
    for (uint32_t b = 0; b < r->batch; b++) {
        const kvf_status status = kvf_append_acquire(cache, layer_of(r, part, b), 1);
        KVF_ASSERT(status == KVF_OK); /* has_blocks */
    }
    kvf_decode_note(cache, &args, cache->sealed_before, &due);
    KVF_ASSERT(due.refreshes == 0 && due.verifies == 0); /* is_plain */
    for (uint32_t b = 0; b < r->batch; b++)
        note_sealed(r, part, b);
    kvf_decode_take(&step, cache->sealed_before);
}

kvf_status kvf_recording_await(kvf_recording *r)
{
    const uint32_t turn = turn_of(r);
    return r->is_busy[turn] ? r->cache->device->ops->event_wait(r->done[turn]) : KVF_OK;
}

void kvf_recording_note(kvf_recording *r)
{
    r->sealing = 0;
    for (uint32_t i = 0; i < r->parts; i++)
        note_part(r, i);
}

kvf_status kvf_recording_follow(kvf_recording *r, kvf_stream *stream)
{
    const kvf_cache *cache = r->cache;
    return cache->last_done && cache->last_stream != stream
               ? cache->device->ops->stream_wait_event(stream, cache->last_done)
               : KVF_OK;
}

/* What the cache's order asks of this stream before a graph that reads and writes everything. */
static kvf_status prepare_stream(kvf_recording *r, kvf_stream *stream)
{
    kvf_frame none = {0};
    kvf_step step = part_step(r, 0, &none, NULL);
    step.stream = stream;
    KVF_TRY(kvf_recording_follow(r, stream));
    KVF_TRY(kvf_ahead_settle(&step));
    for (uint32_t b = 0; b < r->batch; b++)
        KVF_TRY(kvf_arena_leave_sequence(&step, r->sequences[b]));
    return KVF_OK;
}

/* Blocks that leave the window with this step. All their tokens are of earlier steps, because the
 * window has one token at least, so they go before the graph, those of all layers together. */
static kvf_status seal_blocks(kvf_recording *r, kvf_stream *stream)
{
    kvf_cache *cache = r->cache;
    const seal_frame seal = seal_frame_of(r);
    kvf_row *rows = (kvf_row *)(void *)r->seal_device;
    if (r->sealing == 0)
        return KVF_OK;
    KVF_TRY(cache->device->ops->copy(stream, r->seal_device, seal.rows, r->seal_bytes));
    for (uint32_t first = 0; first < r->sealing; first += seal.most) {
        const uint32_t count = kvf_min_u32(seal.most, r->sealing - first);
        kvf_step step = {.cache = cache,
                         .stream = stream,
                         .rows = count,
                         .row = rows + first,
                         .sealed_blocks = count,
                         .is_recorded = 1};
        KVF_TRY(kvf_step_seal(&step));
        KVF_TRY(kvf_step_flip(&step));
    }
    return KVF_OK;
}

kvf_status kvf_recording_lead(kvf_recording *r, kvf_stream *stream)
{
    KVF_TRY(prepare_stream(r, stream));
    return seal_blocks(r, stream);
}

kvf_status kvf_recording_mark(kvf_recording *r, kvf_stream *stream, kvf_status status)
{
    kvf_cache *cache = r->cache;
    const uint32_t turn = turn_of(r);
    const kvf_status recorded = cache->device->ops->event_record(r->done[turn], stream);
    if (status == KVF_OK)
        status = recorded;
    r->is_busy[turn] = recorded == KVF_OK;
    r->replays++;
    cache->last_stream = stream;
    cache->last_done = r->done[turn];
    if (status != KVF_OK)
        cache->broken = status;
    return status;
}

kvf_status kvf_recording_replay(kvf_recording *r, kvf_stream *stream)
{
    KVF_TRY(kvf_recording_check(r));
    KVF_TRY(kvf_recording_await(r));
    kvf_recording_note(r);
    kvf_status status = kvf_recording_lead(r, stream);
    if (status == KVF_OK)
        status = r->cache->device->ops->graph_launch(r->graph, stream);
    return kvf_recording_mark(r, stream, status);
}
