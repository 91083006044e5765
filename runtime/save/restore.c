/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Part of saving.h. A sequence from a file: whether its cache can have it, its bytes, and its
 * tables.
 *
 * Knows nothing of decoding. Sealed blocks are read straight into the pool, or through a buffer
 * where they have no address. Nothing is enqueued before every byte was read and checked, so a file
 * that is damaged leaves no trace.
 */

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <kvferry/setting.h>

#include "append.h"
#include "cache.h"
#include "prefill_arena.h"
#include "saving.h"
#include "streaming_heads.h"

typedef struct restoring {
    kvf_cache *cache;
    kvf_saved_file file;
    kvf_sequence *sequence;
    kvf_stream *stream;
    bool is_exact;
    kvf_host_memory memory;
    size_t granule;
    kvf_pieces pieces;
    kvf_event *done;
} restoring;

/* ---- settings ---- */

/* Settings that a sequence does not depend on, and one that check_window looks at. */
static bool is_free(const restoring *r, const char *name)
{
    const kvf_cache *cache = r->cache;
    static const char *const free_ones[] = {
        "sequences_max", "tokens_max",   "host_tokens_max",   "prefill_chunk_max",
        "transfer",      "phase_times",  "verify_interval",   "tokens_per_step_max",
        "host_bytes",    "disk_bytes",   "disk_bundle_bytes", "device_bytes",
        "tensors",       "softmax_scale"}; /* part of the attention parameters */
    static const char *const by_mask[] = {"streaming_sink", "streaming_recent"};
    for (size_t i = 0; i < sizeof free_ones / sizeof *free_ones; i++)
        if (strcmp(name, free_ones[i]) == 0)
            return true;
    for (size_t i = 0; !kvf_has_streaming_heads(cache) && i < sizeof by_mask / sizeof *by_mask; i++)
        if (strcmp(name, by_mask[i]) == 0)
            return true;
    if ((r->file.header.windows || cache->config.layer_windows) &&
        strcmp(name, "streaming_recent") == 0)
        return true;
    if (!kvf_config_has_heads(&cache->config, KVF_HEAD_COARSE) && strcmp(name, "coarse_share") == 0)
        return true;
    return false;
}

/* Settings that must be equal whatever `exact` says. */
static bool is_fixed(const kvf_cache *cache, const char *name)
{
    static const char *const fixed[] = {"layers",   "query_heads", "kv_heads",
                                        "head_dim", "value_dim",   "dtype"};
    for (size_t i = 0; i < sizeof fixed / sizeof *fixed; i++)
        if (strcmp(name, fixed[i]) == 0)
            return true;
    if (strcmp(name, "pages") == 0 ||
        (strcmp(name, "page_size") == 0 && cache->config.pages != KVF_PAGES_NATIVE))
        return true;
    return kvf_has_streaming_heads(cache) && strncmp(name, "streaming_", 10) == 0;
}

/* *is_exact: no setting differs that a sequence depends on. */
static kvf_status compare_settings(const restoring *r, bool wants_exact, bool *is_exact)
{
    const kvf_cache *cache = r->cache;
    const char *settings = r->file.header.settings;
    const kvf_setting *s;
    for (uint32_t i = 0; (s = kvf_cache_setting(i)) != NULL; i++) {
        char mine[128], theirs[128] = "nothing";
        if (is_free(r, s->name) || s->kind == KVF_SETTING_TEXT)
            continue;
        (void)kvf_saved_setting(settings, s->name, theirs, sizeof theirs);
        kvf_setting_show(s, &cache->config, mine, sizeof mine);
        if (strcmp(mine, theirs) == 0)
            continue;
        if (is_fixed(cache, s->name))
            KVF_FAIL(cache->context, KVF_INVALID,
                     "%s was saved with %s = %s, this cache has %s; open a cache with that",
                     r->file.path, s->name, theirs, mine);
        if (wants_exact)
            KVF_FAIL(cache->context, KVF_INVALID,
                     "%s was saved with %s = %s, this cache has %s: the sequence would continue "
                     "differently; open a cache with that, or restore with exact = 0",
                     r->file.path, s->name, theirs, mine);
        *is_exact = false;
    }
    return KVF_OK;
}

/* ---- attention parameters of layers, under which tokens were made, whatever `exact` says ---- */

static kvf_status differs(const restoring *r, uint32_t layer, const char *what, float theirs,
                          float mine)
{
    KVF_FAIL(r->cache->context, KVF_INVALID,
             "%s was saved with %s = %.7g in layer %u, this cache has %.7g; set it "
             "for the layer before, or prefill again",
             r->file.path, what, (double)theirs, layer, (double)mine);
}

static kvf_status check_attention(const restoring *r, uint32_t layer)
{
    const kvf_layer_attention *mine = &r->cache->attention[layer];
    const float *theirs = kvf_saved_attention(&r->file.header, layer);
    if (theirs[0] != mine->scale)
        return differs(r, layer, "scale", theirs[0], mine->scale);
    if (theirs[1] != mine->cap)
        return differs(r, layer, "soft_cap", theirs[1], mine->cap);
    for (uint32_t h = 0; h < r->cache->config.query_heads; h++) {
        const float own = mine->sinks_host ? mine->sinks_host[h] : -INFINITY;
        char name[32];
        snprintf(name, sizeof name, "sinks[%u]", h);
        if (theirs[2 + h] != own)
            return differs(r, layer, name, theirs[2 + h], own);
    }
    return KVF_OK;
}

static kvf_status check_model(const restoring *r, const char *model)
{
    if (model && strcmp(model, r->file.header.head->model) != 0)
        KVF_FAIL(r->cache->context, KVF_INVALID,
                 "%s is of model '%s', not of '%.63s'; load that model, or prefill again",
                 r->file.path, r->file.header.head->model, model);
    return KVF_OK;
}

static kvf_status check_mask(const restoring *r)
{
    const kvf_cache *cache = r->cache;
    const kvf_saved_header *h = &r->file.header;
    const size_t cells = (size_t)cache->config.layers * cache->config.kv_heads;
    if ((h->mask != NULL) == (cache->config.head_mask != NULL) &&
        (!h->mask || memcmp(h->mask, cache->config.head_mask, cells) == 0))
        return KVF_OK;
    KVF_FAIL(cache->context, KVF_INVALID, "%s was saved %s head_mask%s; open a cache with the same",
             r->file.path, h->mask ? "with a" : "without a",
             h->mask && cache->config.head_mask ? " that is another than this cache's" : "");
}

/* Where windows of the file or of the cache have several lengths. */
static kvf_status check_window(const restoring *r, uint32_t index)
{
    const kvf_cache_config *c = &r->cache->config;
    const kvf_saved_header *h = &r->file.header;
    const uint32_t mine = kvf_streaming_recent(c, index);
    char one[32] = "";
    (void)kvf_saved_setting(h->settings, "streaming_recent", one, sizeof one);
    const uint32_t theirs = h->windows ? h->windows[index] : (uint32_t)strtoul(one, NULL, 10);
    if ((!h->windows && !c->layer_windows) || theirs == mine ||
        kvf_streaming_count(r->cache, index) == 0)
        return KVF_OK;
    KVF_FAIL(r->cache->context, KVF_INVALID,
             "%s was saved with layer_windows[%u] = %u, this cache has %u; open a cache with that",
             r->file.path, index, theirs, mine);
}

/* Heads, rings and lengths of a layer. */
static kvf_status check_layer(const restoring *r, uint32_t index)
{
    kvf_cache *cache = r->cache;
    const kvf_saved_layer *l = &r->file.header.layers[index];
    const kvf_kv_group *kv_group = cache->layer_groups[index].kv_group;
    const uint32_t heads = kv_group ? kv_group->config.kv_heads : 0;
    if (l->heads != heads)
        KVF_FAIL(cache->context, KVF_CORRUPT,
                 "%s: layer %u has pages of %u heads, by its head_mask of %u; save it again",
                 r->file.path, index, l->heads, heads);
    const uint32_t ring = l->streaming ? kvf_ring_total(&cache->rings->layers[index].ring) : 0;
    if (l->streaming && l->length && l->ring_pages != ring)
        KVF_FAIL(cache->context, KVF_INVALID,
                 "%s: streaming heads hold %u pages there and %u here, because tokens_max is less "
                 "than they could hold; open a cache with the same tokens_max",
                 r->file.path, l->ring_pages, ring);
    if (l->length > cache->config.tokens_max)
        KVF_FAIL(cache->context, KVF_FULL,
                 "tokens_max = %u: %s has %u tokens in layer %u; open the cache with more",
                 cache->config.tokens_max, r->file.path, l->length, index);
    if (kv_group && l->length && kvf_quantizes_pages(kv_group) &&
        l->sealed != kvf_sealed_blocks(kv_group, l->length))
        KVF_FAIL(
            cache->context, KVF_INVALID,
            "local_tokens = %u: %s has %u quantized blocks in layer %u, this cache would have %u; "
            "open a cache with the local_tokens that it was saved with",
            cache->config.local_tokens, r->file.path, l->sealed, index,
            kvf_sealed_blocks(kv_group, l->length));
    return KVF_OK;
}

static kvf_status compare(restoring *r, const kvf_restore_args *args)
{
    kvf_cache *cache = r->cache;
    const kvf_saved_header *h = &r->file.header;
    const kvf_shape shape = kvf_saved_shape(h->head);
    KVF_TRY(check_model(r, args->model));
    r->is_exact = true;
    KVF_TRY(compare_settings(r, args->exact, &r->is_exact));
    if (h->head->block_size != cache->plan.block_size)
        KVF_FAIL(cache->context, KVF_INVALID,
                 "page_size = %u: %s was saved with blocks of %u tokens, this cache has %u; open "
                 "a cache with page_size = %u",
                 cache->config.page_size, r->file.path, h->head->block_size, cache->plan.block_size,
                 h->head->page_size);
    if (h->head->layers != cache->config.layers || h->head->kv_heads != cache->config.kv_heads ||
        h->head->query_heads != cache->config.query_heads ||
        h->head->head_dim != cache->config.head_dim ||
        kvf_value_dim(&shape) != cache->config.value_dim || h->head->dtype != cache->config.dtype ||
        h->head->pages != cache->config.pages)
        KVF_FAIL(cache->context, KVF_CORRUPT, "%s: its header contradicts its settings",
                 r->file.path);
    KVF_TRY(check_mask(r)); /* of as many heads */
    for (uint32_t i = 0; i < h->head->layers; i++) {
        KVF_TRY(check_attention(r, i));
        KVF_TRY(check_window(r, i));
        KVF_TRY(check_layer(r, i));
    }
    for (uint32_t i = 0; r->is_exact && i < h->head->layers; i++) {
        const kvf_saved_layer *l = &h->layers[i];
        const kvf_kv_group *kv_group = cache->layer_groups[i].kv_group;
        const bool is_fresh = l->flags & KVF_SAVED_FRESH;
        if (!kv_group || is_fresh)
            continue;
        r->is_exact = h->head->page_size == cache->config.page_size &&
                      kvf_snapshot_is_same(kv_group, l) &&
                      l->sealed == kvf_sealed_blocks(kv_group, l->length);
    }
    if (args->exact && !r->is_exact)
        KVF_FAIL(cache->context, KVF_INVALID,
                 "%s: its tables are of another size than those of this cache, because "
                 "tokens_max differs; open a cache with the same, or restore with exact = 0",
                 r->file.path);
    return KVF_OK;
}

/* ---- memory, and where bytes go ---- */

static uint32_t sealed_of(const restoring *r, uint32_t index)
{
    const kvf_kv_group *kv_group = r->cache->layer_groups[index].kv_group;
    return kv_group ? kvf_sealed_blocks(kv_group, r->file.header.layers[index].length) : 0;
}

static size_t tail_bytes(const restoring *r, uint32_t index)
{
    const kvf_saved_header *h = &r->file.header;
    const kvf_saved_layer *l = &h->layers[index];
    return (kvf_saved_blocks(h->head, l) - sealed_of(r, index)) * kvf_saved_block_bytes(h->head, l);
}

static kvf_seen layer_memory(const restoring *r, uint32_t index)
{
    return kvf_granule(&r->memory, r->granule, index);
}

static kvf_snapshot snapshot_of(const restoring *r, uint32_t index, char **tail)
{
    const kvf_saved_header *h = &r->file.header;
    kvf_carver carver = {.base = layer_memory(r, index).host};
    kvf_snapshot snapshot;
    kvf_snapshot_carve(h->head, &h->layers[index], &carver, &snapshot);
    *tail = carver.base + carver.bytes;
    return snapshot;
}

static kvf_status take_memory(restoring *r)
{
    const kvf_saved_header *h = &r->file.header;
    size_t most = 64, pieces = 1;
    for (uint32_t i = 0; i < h->head->layers; i++) {
        const kvf_kv_group *kv_group = r->cache->layer_groups[i].kv_group;
        const size_t bytes = kvf_snapshot_bytes(h->head, &h->layers[i]) + tail_bytes(r, i) +
                             (kv_group ? kvf_snapshot_work_bytes(kv_group, &h->layers[i]) : 0);
        most = bytes > most ? bytes : most;
        pieces += 2 + sealed_of(r, i);
    }
    r->granule = kvf_round_up(most, 64);
    r->pieces.of = kvf_alloc(r->cache->context, pieces, sizeof *r->pieces.of);
    r->pieces.blocks = kvf_alloc(r->cache->context, pieces, sizeof *r->pieces.blocks);
    if (!r->pieces.of || !r->pieces.blocks)
        KVF_FAIL(r->cache->context, KVF_OUT_OF_MEMORY, "no memory to list %zu pieces of %s", pieces,
                 r->file.path);
    KVF_TRY(r->cache->device->ops->event_create(r->cache->device, false, &r->done));
    return kvf_granules_create(r->cache, r->granule, h->head->layers, &r->memory);
}

/* Blocks of the pool for a layer, as if so many tokens were appended. */
static kvf_status take_blocks(restoring *r, uint32_t index)
{
    const kvf_saved_header *h = &r->file.header;
    kvf_layer *layer = &r->sequence->layers[index];
    char *const state = layer_memory(r, index).host;
    const size_t state_bytes = kvf_snapshot_bytes(h->head, &h->layers[index]);
    kvf_pieces_add(&r->pieces, state, state_bytes);
    if (!layer->kv_group)
        return KVF_OK;
    KVF_TRY(kvf_append_reserve(layer, h->layers[index].length));
    layer->extent =
        (kvf_layer_extent){.length = h->layers[index].length, .sealed = sealed_of(r, index)};
    for (uint32_t b = 0; b < layer->extent.sealed; b++)
        kvf_pieces_add_block(&r->pieces, &layer->kv_group->pool, layer->blocks[b],
                             kvf_saved_sealed_bytes(h->head, &h->layers[index]));
    kvf_pieces_add(&r->pieces, state + state_bytes, tail_bytes(r, index));
    return KVF_OK;
}

/* Blocks that are free may still be read by what is enqueued, or written back. */
static kvf_status wait_pools(restoring *r)
{
    kvf_cache *cache = r->cache;
    kvf_call call;
    kvf_status status = KVF_OK;
    KVF_TRY(kvf_call_begin(cache, r->stream, &call));
    for (uint32_t i = 0; status == KVF_OK && i < cache->kv_group_count; i++)
        status = kvf_arena_settle(&call, &cache->kv_groups[i]);
    KVF_TRY(kvf_call_end(&call, status));
    KVF_TRY(cache->device->ops->event_record(r->done, r->stream));
    return cache->device->ops->event_wait(r->done);
}

static kvf_status read_layers(restoring *r)
{
    const kvf_saved_header *h = &r->file.header;
    KVF_TRY(wait_pools(r));
    for (uint32_t i = 0; i < h->head->layers; i++)
        KVF_TRY(take_blocks(r, i));
    KVF_TRY(kvf_saved_fill(&r->file, &r->pieces));
    for (uint32_t i = 0; i < h->head->layers; i++) {
        char *tail;
        const kvf_snapshot snapshot = snapshot_of(r, i, &tail);
        const kvf_kv_group *kv_group = r->cache->layer_groups[i].kv_group;
        KVF_TRY(
            kvf_snapshot_check(r->cache->context, r->file.path, h->head, &h->layers[i], &snapshot));
        if (kv_group && r->is_exact && !(h->layers[i].flags & KVF_SAVED_FRESH) &&
            !kvf_snapshot_fits(kv_group, &h->layers[i], &snapshot))
            KVF_FAIL(
                r->cache->context, KVF_CORRUPT,
                "%s: layer %u holds static tokens that its settings do not allow; save it again",
                r->file.path, i);
    }
    return KVF_OK;
}

/* ---- into the cache ---- */

static void put_positions(kvf_layer *layer, const kvf_saved_layer *saved,
                          const kvf_snapshot *snapshot)
{
    layer->extent.length = saved->length;
    layer->steps = saved->steps;
    if (snapshot->positions)
        memcpy(layer->positions, snapshot->positions, saved->length * sizeof *snapshot->positions);
}

static kvf_status put_layer(restoring *r, kvf_call *call, uint32_t index)
{
    kvf_layer *state = &r->sequence->layers[index];
    const kvf_saved_layer *saved = &r->file.header.layers[index];
    char *tail;
    const kvf_snapshot snapshot = snapshot_of(r, index, &tail);
    const kvf_seen memory = layer_memory(r, index);
    const kvf_snapshot_layer layer = {.state = state,
                                      .is_exact = r->is_exact,
                                      .saved = saved,
                                      .snapshot = &snapshot,
                                      .tail = tail,
                                      .work = memory,
                                      .used =
                                          (uint64_t)(tail - memory.host) + tail_bytes(r, index)};
    put_positions(state, saved, &snapshot);
    if (snapshot.ring)
        KVF_TRY(r->cache->device->ops->copy(r->stream, state->ring, snapshot.ring,
                                            kvf_ring_bytes(r->cache, index)));
    return state->kv_group ? kvf_snapshot_put(call, &layer, r->done) : KVF_OK;
}

static kvf_status put_layers(restoring *r)
{
    kvf_call call;
    kvf_status status = KVF_OK;
    KVF_TRY(kvf_call_begin(r->cache, r->stream, &call));
    for (uint32_t i = 0; status == KVF_OK && i < r->cache->config.layers; i++)
        status = put_layer(r, &call, i);
    return call.is_undone ? kvf_call_refuse(&call, status) : kvf_call_end(&call, status);
}

/* Everything was read. The memory of the restore is free when this returns. */
static kvf_status put(restoring *r)
{
    const kvf_device_ops *ops = r->cache->device->ops;
    kvf_status status = put_layers(r);
    if (status == KVF_OK)
        status = ops->event_record(r->done, r->stream);
    if (status == KVF_OK)
        return ops->event_wait(r->done);
    (void)ops->stream_wait(r->stream);
    return status;
}

static kvf_status restore(restoring *r, const kvf_restore_args *args)
{
    kvf_cache *cache = r->cache;
    KVF_TRY(kvf_saved_open(cache->runtime, args->path, &r->file));
    KVF_TRY(compare(r, args));
    KVF_TRY(take_memory(r));
    KVF_TRY(kvf_sequence_begin(cache, &r->sequence));
    KVF_TRY(read_layers(r));
    KVF_TRY(put(r));
    kvf_footprint_restore(cache, r->sequence);
    return KVF_OK;
}

kvf_status kvf_restore(kvf_cache *cache, const kvf_restore_args *args, kvf_stream *stream,
                       kvf_sequence **out)
{
    restoring r = {.cache = cache, .stream = stream, .file.file = -1};
    const kvf_status status = restore(&r, args);
    if (status != KVF_OK && r.sequence)
        kvf_sequence_end(r.sequence);
    if (r.memory.arenas)
        kvf_host_memory_destroy(cache->context, &r.memory);
    cache->device->ops->event_destroy(r.done);
    kvf_free(cache->context, r.pieces.blocks);
    kvf_free(cache->context, r.pieces.of);
    kvf_saved_close(&r.file);
    if (status == KVF_OK)
        *out = r.sequence;
    return status;
}
