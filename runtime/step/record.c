/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Recording a decode step, and running it again.
 *
 * Knows the order of one step on the host, and nothing of what its launches do. While recording no
 * call runs and no bookkeeping changes; a replay does the bookkeeping of every recorded call,
 * writes their pieces of one frame, seals what the step seals, and launches the graph.
 */

#include "record.h"

#include <string.h>

#include "append.h"
#include "attend.h"
#include "decode.h"
#include "prefill_arena.h"
#include "seal.h"
#include "static_set.h"

/* ---- making and unmaking ---- */

void kvf_recording_close(kvf_recording *recording)
{
    kvf_cache *cache = recording->cache;
    const kvf_device_ops *ops = cache->device->ops;
    /* No replay is under way, so nothing has to wait for the last one. */
    for (uint32_t i = 0; i < KVF_REPLAYS; i++)
        if (recording->done[i] && cache->order.last_done == recording->done[i])
            cache->order.last_done = NULL;
    if (recording->graph)
        ops->graph_destroy(recording->graph);
    for (uint32_t i = 0; i < KVF_REPLAYS; i++)
        ops->event_destroy(recording->done[i]);
    if (recording->ring.arenas)
        kvf_host_memory_destroy(cache->context, &recording->ring);
    if (recording->device)
        ops->memory_free(cache->device, recording->device);
    kvf_free(cache->context, recording->uses);
    kvf_free(cache->context, recording->sealing);
    kvf_free(cache->context, recording->has_layer);
    kvf_free(cache->context, recording->calls);
    kvf_free(cache->context, recording->generations);
    kvf_free(cache->context, recording->sequences);
    kvf_free(cache->context, recording);
    kvf_cache_release(cache);
}

/* A frame of its own for one index; dry if `host` is NULL. */
static kvf_call call_at(kvf_recording *r, uint32_t index, kvf_frame *frame, char *host)
{
    *frame = (kvf_frame){.host.base = host,
                         .device = r->device ? r->device + index * r->call_bytes : NULL};
    return (kvf_call){.cache = r->cache,
                      .stream = r->stream,
                      .frame = frame,
                      .rows = r->batch,
                      .is_recorded = 1,
                      .is_fused = 1};
}

/* As much of a frame as a recorded call on a layer of this KV group uses; NULL: where all heads
 * stream.
 */
static size_t measure(kvf_recording *r, kvf_kv_group *kv_group)
{
    kvf_frame frame;
    kvf_call call = call_at(r, 0, &frame, NULL);
    call.kv_group = kv_group;
    kvf_pages_take(&call);
    return frame.host.bytes + kvf_streaming_frame_bytes(r->cache, r->batch, false);
}

/* The generation of a handle, which may have gone on as another sequence. */
static uint64_t generation_of(const kvf_sequence *sequence)
{
    return (uint64_t)sequence->slot << 32 | sequence->generation;
}

static kvf_status take_lists(kvf_recording *r, kvf_sequence *const *sequences)
{
    kvf_context *context = r->cache->context;
    const uint32_t layers = r->cache->config.layers, kv_groups = r->cache->kv_group_count;
    r->sequences = kvf_alloc(context, r->batch, sizeof(kvf_sequence *));
    r->generations = kvf_alloc(context, r->batch, sizeof *r->generations);
    r->calls = kvf_alloc(context, layers, sizeof *r->calls);
    r->has_layer = kvf_alloc(context, layers, sizeof *r->has_layer);
    r->sealing = kvf_alloc(context, kv_groups + 1, sizeof *r->sealing);
    r->uses = kvf_alloc(context, kv_groups + 1, sizeof *r->uses);
    if (!r->sequences || !r->generations || !r->calls || !r->has_layer || !r->sealing || !r->uses)
        KVF_FAIL(context, KVF_OUT_OF_MEMORY, "no memory for a recording of %u layers", layers);
    for (uint32_t b = 0; b < r->batch; b++) {
        r->sequences[b] = sequences[b];
        r->generations[b] = generation_of(sequences[b]);
    }
    return KVF_OK;
}

static kvf_status reserve(kvf_recording *r, kvf_sequence *const *sequences)
{
    kvf_cache *cache = r->cache;
    const kvf_device_ops *ops = cache->device->ops;
    const uint32_t layers = cache->config.layers;
    KVF_TRY(take_lists(r, sequences));
    r->call_bytes = measure(r, NULL);
    for (uint32_t i = 0; i < cache->kv_group_count; i++) {
        const size_t bytes = measure(r, &cache->kv_groups[i]);
        r->call_bytes = bytes > r->call_bytes ? bytes : r->call_bytes;
    }
    r->rows_max = layers * r->batch;
    const size_t sealed_bytes = sizeof(kvf_row) + sizeof(void *) + sizeof(uint32_t);
    r->seal_bytes = kvf_round_up(r->rows_max * sealed_bytes, 64);
    const size_t graph_bytes = layers * (r->call_bytes + sizeof(uint32_t));
    kvf_host_memory_config memory = kvf_runtime_memory(cache->runtime);
    memory.huge_pages = KVF_HUGE_PAGES_OFF;
    memory.bytes = kvf_round_up(KVF_REPLAYS * (layers * r->call_bytes + r->seal_bytes), 4096);
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
        KVF_TRY(ops->event_create(cache->device, false, &r->done[i]));
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
                                 .bytes = r->call_bytes,
                                 .from = r->ring.arenas[0].device,
                                 .to = r->device,
                                 .turns = (uint32_t *)(void *)(r->device + layers * r->call_bytes)};
    return KVF_ENQUEUE(r->stream, frame, args);
}

kvf_status kvf_recording_begin(kvf_cache *cache, kvf_sequence *const *sequences, uint32_t batch,
                               kvf_stream *stream)
{
    kvf_recording *r = kvf_alloc(cache->context, 1, sizeof *r);
    if (!r)
        KVF_FAIL(cache->context, KVF_OUT_OF_MEMORY, "no memory for a recording");
    r->cache = cache;
    r->attention_changes = cache->attention_changes;
    kvf_cache_hold(cache);
    r->batch = batch;
    kvf_status status = reserve(r, sequences);
    if (status == KVF_OK)
        status = cache->device->ops->capture_begin(stream);
    if (status != KVF_OK) {
        kvf_recording_close(r);
        return status;
    }
    r->stream = stream;
    r->failure = bring_frame(r);
    cache->recording = r;
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
        if (r->sequences[b]->layers[args->layer].extent.length == 0)
            KVF_FAIL(context, KVF_INVALID,
                     "sequences[%u] has no tokens in layer %u; record after its prompt", b,
                     args->layer);
    return KVF_OK;
}

static uint32_t turn_of(const kvf_recording *r)
{
    return (uint32_t)(r->replays % KVF_REPLAYS);
}

/* The step of a index of the next replay, with its piece of the next frame. */
static kvf_call next_call(kvf_recording *r, uint32_t index, kvf_frame *frame)
{
    const size_t calls = (size_t)turn_of(r) * r->cache->config.layers + index;
    kvf_call call = call_at(r, index, frame, r->ring.arenas[0].host + calls * r->call_bytes);
    kvf_call_at(&call, r->calls[index].layer, r->sequences, r->batch);
    return call;
}

static kvf_status record_call(kvf_recording *r, const kvf_decode_args *args, kvf_stream *stream)
{
    const kvf_due none = {0};
    KVF_TRY(check_call(r, args, stream));
    r->has_layer[args->layer] = 1;
    r->calls[r->count] = *args;
    r->calls[r->count].sequences = r->sequences;
    kvf_frame frame;
    kvf_call call = next_call(r, r->count++, &frame);
    kvf_pages_take(&call);
    const kvf_heads_work work = kvf_heads_take_step(&call, args);
    KVF_ASSERT(frame.host.bytes <= r->call_bytes);
    return kvf_decode_enqueue(&work, args, &none);
}

kvf_status kvf_recording_decode(kvf_recording *r, const kvf_decode_args *args, kvf_stream *stream)
{
    const kvf_status status = record_call(r, args, stream);
    if (r->failure == KVF_OK)
        r->failure = status;
    return status;
}

static kvf_status check_recorded(const kvf_recording *r)
{
    KVF_TRY(r->failure);
    if (r->count == 0)
        KVF_FAIL(r->cache->context, KVF_INVALID,
                 "nothing was recorded; call kvf_decode between begin and end");
    return KVF_OK;
}

kvf_status kvf_recording_end(kvf_recording *r, kvf_recording **out)
{
    kvf_status status = check_recorded(r);
    const kvf_status ended = r->cache->device->ops->capture_end(r->stream, &r->graph);
    r->stream = NULL;
    r->cache->recording = NULL;
    if (status == KVF_OK)
        status = ended;
    if (status != KVF_OK) {
        kvf_recording_close(r);
        return status;
    }
    *out = r;
    return KVF_OK;
}

/* ---- running it again ---- */

static kvf_layer *layer_of(const kvf_recording *r, uint32_t call, uint32_t row)
{
    return &r->sequences[row]->layers[r->calls[call].layer];
}

/* Blocks that the next step seals in a KV group, over all layers and rows. */
static uint32_t blocks_to_seal(const kvf_recording *r, const kvf_kv_group *kv_group)
{
    uint32_t blocks = 0;
    for (uint32_t i = 0; i < r->count; i++)
        for (uint32_t b = 0; b < r->batch; b++) {
            const kvf_layer *layer = layer_of(r, i, b);
            if (layer->kv_group == kv_group)
                blocks +=
                    kvf_sealed_blocks(kv_group, layer->extent.length + 1) - layer->extent.sealed;
        }
    return blocks;
}

/* A KV group whose pool lacks them, or NULL. */
static const kvf_kv_group *full_kv_group(const kvf_recording *r)
{
    for (uint32_t i = 0; i < r->cache->kv_group_count; i++) {
        const kvf_kv_group *kv_group = &r->cache->kv_groups[i];
        if (blocks_to_seal(r, kv_group) > kv_group->pool.free_count)
            return kv_group;
    }
    return NULL;
}

static bool is_alive(const kvf_recording *r)
{
    for (uint32_t b = 0; b < r->batch; b++)
        if (!r->sequences[b]->is_alive || generation_of(r->sequences[b]) != r->generations[b])
            return false;
    return true;
}

/* Scales and caps are in the graph, and sinks where they were. */
static bool has_its_attention(const kvf_recording *r)
{
    return r->attention_changes == r->cache->attention_changes;
}

static bool has_room(const kvf_recording *r)
{
    for (uint32_t i = 0; i < r->count; i++)
        for (uint32_t b = 0; b < r->batch; b++)
            if (layer_of(r, i, b)->extent.length >= r->cache->config.tokens_max)
                return false;
    return true;
}

static bool is_plain(const kvf_recording *r)
{
    for (uint32_t i = 0; i < r->count; i++)
        for (uint32_t b = 0; b < r->batch; b++) {
            const kvf_layer *layer = layer_of(r, i, b);
            const kvf_kv_group *kv_group = layer->kv_group;
            if (kv_group &&
                (layer->is_fresh || kvf_verify_is_due(kv_group, layer) ||
                 kvf_refresh_is_due(kv_group, layer,
                                    kvf_sealed_blocks(kv_group, layer->extent.length + 1))))
                return false;
        }
    return true;
}

bool kvf_recording_can_replay(const kvf_recording *r)
{
    return is_alive(r) && has_its_attention(r) && is_plain(r) && has_room(r) && !full_kv_group(r);
}

static kvf_status check(kvf_recording *r)
{
    kvf_cache *cache = r->cache;
    if (!is_alive(r))
        KVF_FAIL(cache->context, KVF_INVALID,
                 "a sequence of this recording was destroyed; destroy the recording too");
    if (!has_its_attention(r))
        KVF_FAIL(
            cache->context, KVF_INVALID,
            "a layer of the cache got other attention parameters since this step was recorded; "
            "destroy the recording, and record it again");
    for (uint32_t b = 0; b < r->batch; b++)
        KVF_TRY(kvf_sequence_check(cache, r->sequences[b]));
    for (uint32_t i = 0; i < r->count; i++)
        for (uint32_t b = 0; b < r->batch; b++)
            KVF_TRY(kvf_append_check(cache, layer_of(r, i, b), 1, NULL));
    if (full_kv_group(r))
        return kvf_append_full(full_kv_group(r));
    if (!is_plain(r))
        KVF_FAIL(cache->context, KVF_INVALID,
                 "this step refreshes a static set or is verified; enqueue it with kvf_decode "
                 "(kvf_replay_is_possible returns 0)");
    return KVF_OK;
}

/* The rows that a replay seals a block of, of all layers of a KV group, and where those blocks go.
 */
typedef struct seal_frame {
    uint32_t first;     /* of the KV group, among all rows */
    kvf_row *rows;      /* [rows_max] */
    void **pool;        /* [rows_max] one per row */
    uint32_t *block_of; /* [rows_max] likewise */
    uint32_t most;      /* rows of one launch: as many as there are digest jobs for */
} seal_frame;

static seal_frame seal_frame_of(const kvf_recording *r, const kvf_kv_group *kv_group)
{
    const kvf_paging *p = &kv_group->dims.paging;
    char *rows = r->ring.arenas[0].host +
                 (size_t)KVF_REPLAYS * r->cache->config.layers * r->call_bytes +
                 turn_of(r) * r->seal_bytes;
    uint32_t first = 0;
    for (const kvf_kv_group *before = r->cache->kv_groups; before < kv_group; before++)
        first += before->config.layers * r->batch;
    char *const pool = rows + r->rows_max * sizeof(kvf_row);
    return (seal_frame){.first = first,
                        .rows = (kvf_row *)(void *)rows,
                        .pool = (void **)(void *)pool,
                        .block_of = (uint32_t *)(void *)(pool + r->rows_max * sizeof(void *)),
                        .most = (uint32_t)kv_group->dims.jobs_max / (p->block_jobs * p->kv_heads)};
}

/* Where the device sees a place of it. */
static const void *seal_seen(const kvf_recording *r, const seal_frame *seal, const void *at)
{
    return r->seal_device + ((const char *)at - (const char *)seal->rows);
}

static void note_sealed(kvf_recording *r, const kvf_call *call, kvf_layer *layer)
{
    kvf_kv_group *kv_group = call->kv_group;
    uint32_t *const sealing = &r->sealing[kv_group - r->cache->kv_groups];
    if (layer->extent.sealed == layer->extent.sealed_before)
        return;
    KVF_ASSERT(layer->extent.sealed == layer->extent.sealed_before + 1); /* a step is one token */
    const seal_frame seal = seal_frame_of(r, kv_group);
    const uint32_t n = seal.first + *sealing;
    const kvf_block block = layer->blocks[layer->extent.sealed_before];
    seal.rows[n] = kvf_call_row(kv_group, layer);
    seal.rows[n].sealed_before = layer->extent.sealed_before;
    seal.rows[n].job_first = *sealing % seal.most;
    seal.rows[n].pool = (void *const *)seal_seen(r, &seal, &seal.pool[n]);
    seal.rows[n].new_block_of = seal_seen(r, &seal, &seal.block_of[n]);
    seal.rows[n].use = r->uses[kv_group - r->cache->kv_groups];
    seal.pool[n] = kvf_page_pool_device(&kv_group->pool, block);
    seal.block_of[n] = block.index;
    ++*sealing;
    r->cache->counters[call->layer].bytes_to_host += kvf_stored_block_bytes(&kv_group->dims.paging);
    kvf_extent_begin(&layer->extent);
    if (kvf_quantizes_pages(kv_group))
        kvf_cut_spare(&layer->cut, layer->extent.sealed);
}

/* Bookkeeping of one recorded index, and its piece of the frame. */
static void note_call(kvf_recording *r, uint32_t index)
{
    kvf_frame frame;
    kvf_due due;
    kvf_call call = next_call(r, index, &frame);
    for (uint32_t b = 0; call.kv_group && b < r->batch; b++) {
        const kvf_status status = kvf_append_acquire(call.states[b], 1);
        KVF_ASSERT(status == KVF_OK); /* full_kv_group */
    }
    kvf_decode_note(&call, &r->calls[index], &due);
    KVF_ASSERT(due.refreshes == 0 && due.verifies == 0); /* is_plain */
    for (uint32_t b = 0; call.kv_group && b < r->batch; b++)
        note_sealed(r, &call, call.states[b]);
    kvf_pages_take(&call);
    (void)kvf_heads_take_step(&call, &r->calls[index]);
}

static void note(kvf_recording *r)
{
    for (uint32_t i = 0; i < r->cache->kv_group_count; i++) {
        r->sealing[i] = 0;
        r->uses[i] = ++r->cache->kv_groups[i].residency.clock; /* a call before all others */
    }
    for (uint32_t i = 0; i < r->count; i++)
        note_call(r, i);
}

/*
 * Waits that the cache's order asks of this stream before a graph that reads and writes everything.
 */
static kvf_status prepare_stream(kvf_recording *r, kvf_stream *stream)
{
    kvf_cache *cache = r->cache;
    kvf_frame none = {0};
    kvf_call call = call_at(r, 0, &none, NULL);
    call.stream = stream;
    if (cache->order.last_done && cache->order.last_stream != stream)
        KVF_TRY(cache->device->ops->stream_wait_event(stream, cache->order.last_done));
    for (uint32_t b = 0; b < r->batch; b++)
        KVF_TRY(kvf_arena_leave_sequence(&call, r->sequences[b]));
    return KVF_OK;
}

static kvf_status seal_kv_group(kvf_recording *r, kvf_kv_group *kv_group, kvf_stream *stream)
{
    const seal_frame seal = seal_frame_of(r, kv_group);
    const uint32_t sealing = r->sealing[kv_group - r->cache->kv_groups];
    for (uint32_t done = 0; done < sealing; done += seal.most) {
        const uint32_t count = kvf_min_u32(seal.most, sealing - done);
        kvf_call call = {.cache = r->cache,
                         .kv_group = kv_group,
                         .stream = stream,
                         .rows = count,
                         .row = (kvf_row *)(void *)r->seal_device + seal.first + done,
                         .sealed_blocks = count,
                         .is_recorded = 1};
        KVF_TRY(kvf_call_seal(&call));
        KVF_TRY(kvf_call_publish(&call));
    }
    return KVF_OK;
}

/* Blocks that leave the window with this step. All their tokens are of earlier steps, because the
 * window has one token at least, so they go before the graph, those of all layers together. */
static kvf_status seal_blocks(kvf_recording *r, kvf_stream *stream)
{
    kvf_cache *cache = r->cache;
    uint32_t sealing = 0;
    for (uint32_t i = 0; i < cache->kv_group_count; i++)
        sealing += r->sealing[i];
    if (sealing == 0)
        return KVF_OK;
    KVF_TRY(cache->device->ops->copy(stream, r->seal_device,
                                     seal_frame_of(r, &cache->kv_groups[0]).rows, r->seal_bytes));
    for (uint32_t i = 0; i < cache->kv_group_count; i++)
        KVF_TRY(seal_kv_group(r, &cache->kv_groups[i], stream));
    return KVF_OK;
}

/* Everything of a replay. */
static kvf_status enqueue(kvf_recording *r, kvf_stream *stream)
{
    KVF_TRY(prepare_stream(r, stream));
    KVF_TRY(seal_blocks(r, stream));
    return r->cache->device->ops->graph_launch(r->graph, stream);
}

kvf_status kvf_recording_replay(kvf_recording *r, kvf_stream *stream)
{
    kvf_cache *cache = r->cache;
    const kvf_device_ops *ops = cache->device->ops;
    const uint32_t turn = turn_of(r);
    KVF_TRY(check(r));
    if (r->is_busy[turn])
        KVF_TRY(ops->event_wait(r->done[turn]));
    note(r);
    kvf_status status = enqueue(r, stream);
    const kvf_status recorded = ops->event_record(r->done[turn], stream);
    if (status == KVF_OK)
        status = recorded;
    r->is_busy[turn] = recorded == KVF_OK;
    r->replays++;
    cache->order.last_stream = stream;
    cache->order.last_done = r->done[turn];
    if (status != KVF_OK)
        cache->broken = status;
    return status;
}
