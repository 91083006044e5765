/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Part of saving.h. Saving: what the call takes at once, and the thread that writes it.
 *
 * Knows nothing of decoding. Everything that the thread reads is its own: blocks that are held,
 * memory that the stream filled before `taken`. A save that failed has left no file and no change.
 */

#include "saving.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "cache.h"
#include "host_team.h"
#include "plain_file.h"
#include "prefill_arena.h"
#include "streaming_heads.h"

/* ---- memory ---- */

kvf_seen kvf_granule(const kvf_host_memory *memory, size_t granule, uint32_t index)
{
    const uint32_t per = (uint32_t)(memory->arenas[0].bytes / granule);
    const kvf_arena *arena = &memory->arenas[index / per];
    const size_t at = index % per * granule;
    return (kvf_seen){arena->host + at, arena->device + at};
}

kvf_status kvf_granules_create(kvf_cache *cache, size_t granule, uint32_t count,
                               kvf_host_memory *out)
{
    kvf_host_memory_config config = kvf_runtime_memory(cache->runtime);
    if (granule > KVF_ARENA_BYTES_MAX)
        KVF_FAIL(cache->context, KVF_UNSUPPORTED,
                 "a layer has %zu bytes besides its sealed pages; at most %zu can be saved or "
                 "restored: lower slots or budget_tokens",
                 granule, KVF_ARENA_BYTES_MAX);
    config.granule = granule;
    config.bytes = (uint64_t)granule * count;
    return kvf_host_memory_create(cache->context, cache->device, &config, out);
}

static kvf_seen layer_memory(const kvf_save *save, uint32_t layer)
{
    return kvf_granule(&save->memory, save->granule, layer);
}

/* The snapshot of a layer; *tail is where its open blocks begin. */
static kvf_snapshot snapshot_of(const kvf_save *save, uint32_t layer, char **tail)
{
    kvf_carver carver = {.base = layer_memory(save, layer).host};
    kvf_snapshot snapshot;
    kvf_snapshot_carve(save->header.head, &save->header.layers[layer], &carver, &snapshot);
    *tail = carver.base + carver.bytes;
    return snapshot;
}

static uint32_t open_blocks(const kvf_save *save, uint32_t layer)
{
    const kvf_saved_layer *l = &save->header.layers[layer];
    return kvf_saved_blocks(save->header.head, l) - l->sealed;
}

/* ---- the header ---- */

static void describe_layer(const kvf_save *save, const kvf_sequence *sequence, uint32_t layer,
                           kvf_saved_layer *out)
{
    const kvf_cache *cache = save->cache;
    const kvf_layer *state = &sequence->layers[layer];
    *out = (kvf_saved_layer){.length = state->extent.length};
    if (state->kv_group)
        kvf_snapshot_describe(state, out);
    if (state->ring) {
        out->streaming = kvf_streaming_count(cache, layer);
        out->ring_pages = kvf_ring_total(&cache->rings->layers[layer].ring);
    }
}

static void put_attention(const kvf_cache *cache, uint32_t layer, float *to)
{
    const kvf_layer_attention *attention = &cache->attention[layer];
    to[0] = attention->scale;
    to[1] = attention->cap;
    for (uint32_t h = 0; h < cache->config.query_heads; h++)
        to[2 + h] = attention->sinks_host ? attention->sinks_host[h] : -INFINITY;
}

static kvf_saved_head head_of(const kvf_cache *cache, const kvf_save_args *args,
                              uint32_t extent_bytes)
{
    const kvf_cache_config *c = &cache->config;
    kvf_saved_head head = {
        .version = KVF_SAVED_VERSION,
        .note_bytes = args->note_bytes,
        .settings_bytes = (uint32_t)kvf_saved_settings_write(c, NULL, 0),
        .extent_bytes = extent_bytes,
        .has_mask = c->head_mask != NULL,
        .has_windows = c->layer_windows != NULL,
        .layers = c->layers,
        .kv_heads = c->kv_heads,
        .query_heads = c->query_heads,
        .head_dim = (uint16_t)c->head_dim,
        .value_dim = c->value_dim == c->head_dim ? 0 : (uint16_t)c->value_dim,
        .dtype = c->dtype,
        .page_size = c->page_size,
        .pages = c->pages,
        .block_size = cache->plan.block_size,
    };
    snprintf(head.model, sizeof head.model, "%s", args->model ? args->model : "");
    snprintf(head.library, sizeof head.library, "%s", kvf_version());
    return head;
}

/* The header without checksums. Layers are described twice: their sizes say how many there are. */
static kvf_status make_header(kvf_save *save, const kvf_save_args *args)
{
    kvf_cache *cache = save->cache;
    kvf_saved_head head = head_of(cache, args, save->extent_bytes);
    uint64_t data = 0;
    for (uint32_t i = 0; i < head.layers; i++) {
        kvf_saved_layer l;
        describe_layer(save, args->sequence, i, &l);
        data += kvf_snapshot_bytes(&head, &l);
        data += kvf_saved_blocks_bytes(&head, &l);
    }
    const uint64_t extents = kvf_extent_count(data, head.extent_bytes);
    kvf_saved_carve_header(&head, extents, NULL, NULL);
    head.data_bytes = data;
    save->buffer = kvf_alloc(save->cache->context, 1, head.header_bytes);
    if (!save->buffer)
        KVF_FAIL(cache->context, KVF_OUT_OF_MEMORY, "no memory for a header of %llu bytes",
                 (unsigned long long)head.header_bytes);
    kvf_saved_carve_header(&head, extents, save->buffer, &save->header);
    *save->header.head = head;
    for (uint32_t i = 0; i < head.layers; i++)
        describe_layer(save, args->sequence, i, &save->header.layers[i]);
    for (uint32_t i = 0; i < head.layers; i++)
        put_attention(cache, i, kvf_saved_attention(&save->header, i));
    if (save->header.windows)
        memcpy(save->header.windows, cache->config.layer_windows,
               head.layers * sizeof *save->header.windows);
    if (save->header.mask)
        memcpy(save->header.mask, cache->config.head_mask, (size_t)head.layers * head.kv_heads);
    (void)kvf_saved_settings_write(&cache->config, save->header.settings, head.settings_bytes);
    if (head.note_bytes)
        memcpy(save->header.note, args->note, head.note_bytes);
    return KVF_OK;
}

/* ---- what the call takes ---- */

static kvf_status take_memory(kvf_save *save)
{
    const kvf_saved_header *h = &save->header;
    const uint32_t layers = h->head->layers;
    size_t most = 64;
    for (uint32_t i = 0; i < layers; i++) {
        const size_t bytes = kvf_snapshot_bytes(h->head, &h->layers[i]) +
                             open_blocks(save, i) * kvf_saved_block_bytes(h->head, &h->layers[i]);
        most = bytes > most ? bytes : most;
    }
    save->granule = kvf_round_up(most, 64);
    return kvf_granules_create(save->cache, save->granule, layers + 1, &save->memory);
}

/* Sealed blocks, with a reference each; what is held is what `blocks` names. */
static kvf_status hold_blocks(kvf_save *save, kvf_sequence *sequence)
{
    const kvf_saved_header *h = &save->header;
    for (uint32_t i = 0; i < h->head->layers; i++) {
        const kvf_layer *state = &sequence->layers[i];
        const uint32_t sealed = h->layers[i].sealed;
        if (sealed == 0)
            continue;
        save->blocks[i] = kvf_alloc(save->cache->context, sealed, sizeof(kvf_block));
        if (!save->blocks[i])
            KVF_FAIL(save->cache->context, KVF_OUT_OF_MEMORY,
                     "no memory to hold %u blocks of layer %u", sealed, i);
        memcpy(save->blocks[i], state->blocks, sealed * sizeof(kvf_block));
        for (uint32_t b = 0; b < sealed; b++)
            kvf_page_pool_share(&state->kv_group->pool, save->blocks[i][b]);
    }
    return KVF_OK;
}

/* The fault word as of this call, then layer by layer state, open blocks and rings. */
static kvf_status enqueue_take(kvf_save *save, kvf_call *call, kvf_sequence *sequence)
{
    const kvf_cache *cache = save->cache;
    const kvf_device_ops *ops = cache->device->ops;
    KVF_TRY(ops->copy(call->stream, save->fault, cache->words_device.faults + sequence->slot,
                      sizeof *save->fault));
    for (uint32_t i = 0; i < cache->config.layers; i++) {
        const kvf_layer *state = &sequence->layers[i];
        char *tail;
        const kvf_snapshot snapshot = snapshot_of(save, i, &tail);
        if (snapshot.positions)
            memcpy(snapshot.positions, state->positions,
                   state->extent.length * sizeof *snapshot.positions);
        if (snapshot.ring)
            KVF_TRY(ops->copy(call->stream, snapshot.ring, state->ring, kvf_ring_bytes(cache, i)));
        if (state->kv_group)
            KVF_TRY(kvf_snapshot_take(call, state, &save->header.layers[i], &snapshot, tail));
    }
    return KVF_OK;
}

static kvf_status take(kvf_save *save, kvf_sequence *sequence, kvf_stream *stream)
{
    kvf_call call;
    save->fault = (uint64_t *)(void *)layer_memory(save, save->header.head->layers).host;
    save->generation = sequence->generation;
    KVF_TRY(kvf_call_begin(save->cache, stream, &call));
    kvf_status status = kvf_arena_leave_sequence(&call, sequence);
    if (status == KVF_OK)
        status = enqueue_take(save, &call, sequence);
    KVF_TRY(kvf_call_end(&call, status));
    return save->cache->device->ops->event_record(save->taken, stream);
}

/* ---- the thread ---- */

static kvf_status get_block(void *user, size_t piece, size_t offset, size_t bytes, char *buffer)
{
    const kvf_save *save = user;
    const kvf_piece_block *b = &save->pieces.blocks[piece];
    return kvf_page_pool_copy_out(b->pool, save->cache->context, b->block, offset, bytes, buffer);
}

static void list_pieces(kvf_save *save, kvf_sequence *sequence)
{
    const kvf_saved_header *h = &save->header;
    for (uint32_t i = 0; i < h->head->layers; i++) {
        const size_t block = kvf_saved_block_bytes(h->head, &h->layers[i]);
        const size_t sealed = kvf_saved_sealed_bytes(h->head, &h->layers[i]);
        char *const memory = layer_memory(save, i).host;
        const size_t bytes = kvf_snapshot_bytes(h->head, &h->layers[i]);
        kvf_pieces_add(&save->pieces, memory, bytes);
        for (uint32_t b = 0; b < h->layers[i].sealed; b++)
            kvf_pieces_add_block(&save->pieces, &sequence->layers[i].kv_group->pool,
                                 save->blocks[i][b], sealed);
        kvf_pieces_add(&save->pieces, memory + bytes, open_blocks(save, i) * block);
    }
}

/* Bytes that the stream filled: nothing of another sequence, and only numbers. */
static kvf_status finish_snapshots(kvf_save *save)
{
    const kvf_saved_header *h = &save->header;
    if (*save->fault >> 44 == save->generation)
        KVF_FAIL(save->cache->context, KVF_NOT_FINITE,
                 "a key or value of the sequence is NaN or infinite; it was not saved");
    for (uint32_t i = 0; i < h->head->layers; i++) {
        char *tail;
        const kvf_snapshot snapshot = snapshot_of(save, i, &tail);
        if (snapshot.ring)
            kvf_streaming_scrub(save->cache, i, h->layers[i].length, snapshot.ring);
        if (h->layers[i].heads && !(h->layers[i].flags & KVF_SAVED_FRESH))
            kvf_snapshot_scrub(h->head, &h->layers[i], &snapshot, tail);
    }
    return KVF_OK;
}

static kvf_status write_header(const kvf_save *save, kvf_io *io, int file)
{
    const struct iovec piece = {save->buffer, save->header.head->header_bytes};
    uint64_t unused;
    const kvf_extents e = {.context = save->cache->context,
                           .io = io,
                           .path = save->path,
                           .file = file,
                           .extent_bytes = (uint32_t)piece.iov_len,
                           .checksums = &unused};
    return kvf_extents_write(&e, &piece, 1);
}

static kvf_status write_file(kvf_save *save, kvf_io *io, kvf_new_file *file)
{
    kvf_saved_header *h = &save->header;
    const kvf_extents e = {.context = save->cache->context,
                           .io = io,
                           .path = save->path,
                           .file = file->file,
                           .extent_bytes = save->extent_bytes,
                           .offset = h->head->header_bytes,
                           .checksums = h->checksums,
                           .move = save->pieces.has_blocks ? get_block : NULL,
                           .user = save};
    KVF_TRY(kvf_file_reserve(save->cache->context, save->path, file->file,
                             h->head->header_bytes + h->head->data_bytes));
    KVF_TRY(kvf_extents_write(&e, save->pieces.of, save->pieces.count));
    kvf_saved_seal_header(h);
    KVF_TRY(write_header(save, io, file->file));
    return kvf_new_file_commit(file);
}

static kvf_status save_now(kvf_save *save)
{
    kvf_io *io = NULL;
    kvf_new_file file = {.file = -1};
    KVF_TRY(save->cache->device->ops->event_wait(save->taken));
    KVF_TRY(finish_snapshots(save));
    KVF_TRY(kvf_saved_engine(save->cache->runtime, save->cache->context, &io));
    kvf_status status = kvf_new_file_open(save->cache->context, save->path, &file);
    if (status == KVF_OK)
        status = write_file(save, io, &file);
    kvf_new_file_close(&file);
    kvf_io_close(io);
    return status;
}

static void *run(void *argument)
{
    kvf_save *save = argument;
    const kvf_status status = save_now(save);
    if (status != KVF_OK)
        save->error = kvf_context_told(save->cache->context, status);
    __atomic_store_n(&save->is_done, 1, __ATOMIC_RELEASE);
    return NULL;
}

/* ---- begin and end ---- */

static kvf_status create(kvf_save *save, const kvf_save_args *args)
{
    kvf_context *own = save->cache->context;
    const size_t length = strlen(args->path) + 1;
    const uint32_t layers = save->cache->config.layers;
    KVF_TRY(make_header(save, args));
    size_t pieces = 0;
    for (uint32_t i = 0; i < layers; i++)
        pieces += 2 + save->header.layers[i].sealed;
    save->path = kvf_alloc(save->cache->context, length, 1);
    save->blocks = kvf_alloc(save->cache->context, layers, sizeof *save->blocks);
    save->pieces.of = kvf_alloc(save->cache->context, pieces, sizeof *save->pieces.of);
    save->pieces.blocks = kvf_alloc(save->cache->context, pieces, sizeof *save->pieces.blocks);
    if (!save->path || !save->blocks || !save->pieces.of || !save->pieces.blocks)
        KVF_FAIL(own, KVF_OUT_OF_MEMORY, "no memory to list %zu pieces of a sequence", pieces);
    memcpy(save->path, args->path, length);
    KVF_TRY(save->cache->device->ops->event_create(save->cache->device, false, &save->taken));
    KVF_TRY(take_memory(save));
    return hold_blocks(save, args->sequence);
}

static void release(kvf_save *save)
{
    kvf_cache *cache = save->cache;
    for (uint32_t i = 0; save->blocks && i < cache->config.layers; i++) {
        if (!save->blocks[i])
            continue;
        kvf_page_pool *pool = &cache->layer_groups[i].kv_group->pool;
        for (uint32_t b = 0; b < save->header.layers[i].sealed; b++)
            kvf_page_pool_release(pool, save->blocks[i][b]);
        kvf_free(save->cache->context, save->blocks[i]);
    }
    if (save->memory.arenas)
        kvf_host_memory_destroy(cache->context, &save->memory);
    cache->device->ops->event_destroy(save->taken);
    kvf_free(save->cache->context, save->pieces.blocks);
    kvf_free(save->cache->context, save->pieces.of);
    kvf_free(save->cache->context, save->blocks);
    kvf_free(save->cache->context, save->path);
    kvf_free(save->cache->context, save->buffer);
    kvf_free(cache->context, save);
    kvf_cache_release(cache);
}

kvf_status kvf_save_begin(kvf_cache *cache, const kvf_save_args *args, kvf_stream *stream,
                          kvf_save **out)
{
    kvf_save *save = kvf_alloc(cache->context, 1, sizeof *save);
    *out = NULL;
    if (!save)
        KVF_FAIL(cache->context, KVF_OUT_OF_MEMORY, "no memory for a save of %zu bytes",
                 sizeof *save);
    save->cache = cache;
    kvf_cache_hold(cache);
    const uint32_t extent = cache->runtime->test_hooks.extent_bytes;
    save->extent_bytes = extent ? extent : KVF_EXTENT_BYTES;
    kvf_status status = create(save, args);
    if (status == KVF_OK) {
        list_pieces(save, args->sequence);
        status = take(save, args->sequence, stream);
        if (status == KVF_OK)
            status = kvf_thread_start(cache->context, &save->thread, "kvf-save", -1, run, save);
        if (status != KVF_OK) /* what is enqueued may still write to the save's memory */
            (void)cache->device->ops->stream_wait(stream);
    }
    if (status != KVF_OK) {
        release(save);
        return status;
    }
    *out = save;
    return KVF_OK;
}

kvf_status kvf_save_end(kvf_save *save)
{
    kvf_context *context = save->cache->context;
    (void)pthread_join(save->thread, NULL);
    const kvf_error error = save->error;
    release(save);
    return kvf_fail_again(context, error.status, &error);
}
