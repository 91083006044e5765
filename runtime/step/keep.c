/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Part of retain.h. Keeping some tokens of a layer and dropping the others.
 *
 * Knows no policy. Pages of the front that stay as they are stay where they are; of the rest,
 * tokens are taken by index and appended again, chunk by chunk. That may run in place: ids ascend,
 * so token i comes from token i or a later one, and when page p is written everything that is still
 * to be taken lies after it. Only the ring is written before its pages are taken, so it is copied
 * first. Blocks of the pool are used again; a block that a fork shares is replaced by one of this
 * sequence's own, and that is the only thing that can be refused.
 *
 * A layer whose tokens are in a static set, or were, is built anew from its first page: bits and
 * digests of its pages say what left them.
 *
 * Where pages are quantized, tokens are taken from the layer in full precision
 * (kvf_dequantized_row), in which the block that was sealed last is as it came. They go to the sink
 * and to the window. A token that is sealed again moves as it was quantized, in place likewise, so
 * no token is quantized twice but those that come back to the window.
 */

#include "addressable.h"
#include "cache.h"
#include "call.h"
#include "prefill.h"
#include "prefill_arena.h"
#include "retain.h"

#define CHUNK_TOKENS 512u

/* Arrays that the caller's memory is carved into. */
typedef struct keep_work {
    char *k, *v;      /* of one chunk */
    char *queries;    /* that stay */
    char *ring;       /* copy of the ring */
    void **blocks;    /* [blocks_max] where blocks were, in full precision */
    void **quantized; /* [blocks_max] and quantized ones, where pages are quantized */
    uint32_t *ids;    /* [kv_heads, count] */
} keep_work;

typedef struct keeping {
    kvf_cache *cache;
    kvf_kv_group *kv_group;
    kvf_sequence *sequence;
    kvf_stream *stream;
    kvf_layer *layer;
    uint32_t index; /* of the layer */
    const uint32_t *ids;
    uint32_t count;
    uint32_t length; /* before */
    uint32_t sealed; /* before */
    uint32_t blocks; /* sealed ones that stay */
    keep_work work;
} keeping;

static uint32_t chunk_tokens(const kvf_kv_group *kv_group)
{
    return kvf_min_u32(kv_group->config.prefill_chunk_max, CHUNK_TOKENS);
}

static keep_work carve_work(const kvf_kv_group *kv_group, kvf_carver *k)
{
    const kvf_cache_config *c = &kv_group->config;
    const kvf_paging *p = &kv_group->dims.paging;
    const uint64_t key = kvf_key_bytes(&p->shape), value = kvf_value_bytes(&p->shape);
    keep_work w;
    KVF_CARVE(k, w.k, chunk_tokens(kv_group), c->kv_heads, key);
    KVF_CARVE(k, w.v, chunk_tokens(kv_group), c->kv_heads, value);
    KVF_CARVE(k, w.queries, p->query_window, c->query_heads, key);
    KVF_CARVE(k, w.ring, p->ring_blocks, kvf_block_bytes(p));
    KVF_CARVE(k, w.blocks, p->blocks_max);
    KVF_CARVE(k, w.quantized, kvf_quantizes_pages(kv_group) ? p->blocks_max : 0);
    KVF_CARVE(k, w.ids, c->kv_heads, c->tokens_max);
    return w;
}

size_t kvf_keep_work_bytes(const kvf_cache *cache)
{
    kvf_carver carver = {0};
    (void)carve_work(&cache->kv_groups[0], &carver);
    return carver.bytes;
}

/* ---- checks ---- */

static kvf_status check_ids(const keeping *k)
{
    for (uint32_t h = 0; h < k->kv_group->config.kv_heads; h++) {
        const uint32_t *ids = k->ids + (size_t)h * k->count;
        for (uint32_t i = 0; i < k->count; i++) {
            if (ids[i] >= k->length)
                KVF_FAIL(k->kv_group->context, KVF_INVALID,
                         "ids[%u] = %u of KV head %u: layer %u holds tokens 0 to %u", i, ids[i], h,
                         k->index, k->length - 1);
            if (i && ids[i] <= ids[i - 1])
                KVF_FAIL(k->kv_group->context, KVF_INVALID,
                         "ids[%u] = %u of KV head %u: must be above ids[%u] = %u; sort them, each "
                         "once",
                         i, ids[i], h, i - 1, ids[i - 1]);
        }
    }
    return KVF_OK;
}

static kvf_status check(const keeping *k)
{
    kvf_context *context = k->kv_group->context;
    if (k->count == 0 || k->count > k->length)
        KVF_FAIL(context, KVF_INVALID,
                 "count = %u: layer %u holds %u tokens; keep 1 to all of them", k->count, k->index,
                 k->length);
    if (!k->ids || !k->work.k)
        KVF_FAIL(context, KVF_INVALID, "ids or work is NULL; pass both");
    KVF_ASSERT((uintptr_t)k->work.k % 16 == 0);
    return check_ids(k);
}

/* Blocks with other references by fresh ones, which are in memory before anything changes. */
static kvf_status replace_blocks(const keeping *k, uint32_t end, uint32_t shared)
{
    kvf_page_pool *pool = &k->kv_group->pool;
    kvf_block *blocks = k->layer->blocks;
    kvf_block *fresh = kvf_alloc(k->kv_group->context, shared, sizeof *fresh);
    uint32_t n = 0;
    kvf_status status = KVF_OK;
    if (!fresh)
        KVF_FAIL(k->kv_group->context, KVF_OUT_OF_MEMORY, "no memory to list %u blocks", shared);
    for (; n < shared && status == KVF_OK; n += status == KVF_OK)
        status = kvf_page_pool_acquire_near(pool, n ? fresh[n - 1] : KVF_BLOCK_NONE, &fresh[n]);
    if (status == KVF_OK)
        status = kvf_addressable_fresh(k->kv_group, fresh, shared);
    while (status != KVF_OK && n > 0)
        kvf_page_pool_release(pool, fresh[--n]);
    n = 0;
    for (uint32_t p = k->blocks; status == KVF_OK && p < end; p++) {
        if (kvf_page_pool_references(pool, blocks[p]) == 1)
            continue;
        kvf_page_pool_release(pool, blocks[p]);
        blocks[p] = fresh[n++];
    }
    kvf_free(k->kv_group->context, fresh);
    return status;
}

/* Blocks of pages that are written again and that another sequence has too get replaced. */
static kvf_status own_blocks(const keeping *k)
{
    kvf_kv_group *kv_group = k->kv_group;
    const uint32_t end = kvf_sealed_blocks(kv_group, k->count);
    kvf_block *blocks = k->layer->blocks;
    uint32_t shared = 0;
    for (uint32_t p = k->blocks; p < end; p++)
        shared += kvf_page_pool_references(&kv_group->pool, blocks[p]) > 1;
    if (shared > kv_group->pool.free_count)
        KVF_FAIL(
            kv_group->context, KVF_FULL,
            "host_tokens_max = %llu: %u blocks are shared with a fork and %u are free; destroy "
            "a sequence, or open the cache with more",
            (unsigned long long)kv_group->config.host_tokens_max, shared,
            kv_group->pool.free_count);
    return shared ? replace_blocks(k, end, shared) : KVF_OK;
}

/* ---- what stays ---- */

/* Tokens of the front that no KV head loses or moves. */
static uint32_t common_front(const keeping *k)
{
    uint32_t front = k->count;
    for (uint32_t h = 0; h < k->kv_group->config.kv_heads; h++) {
        const uint32_t *ids = k->ids + (size_t)h * k->count;
        uint32_t i = 0;
        while (i < front && ids[i] == i)
            i++;
        front = i;
    }
    return front;
}

/* Tokens of the end that every KV head keeps, up to `most`. */
static uint32_t common_end(const keeping *k, uint32_t most)
{
    uint32_t end = kvf_min_u32(most, k->count);
    for (uint32_t h = 0; h < k->kv_group->config.kv_heads; h++) {
        const uint32_t *last = k->ids + (size_t)(h + 1) * k->count - 1;
        uint32_t i = 0;
        while (i < end && *(last - i) == k->length - 1 - i)
            i++;
        end = i;
    }
    return end;
}

/* Ids are at least their index, so positions that are still needed are behind those written. */
static void note_positions(const keeping *k)
{
    uint32_t *positions = k->layer->positions;
    for (uint32_t i = k->blocks * k->kv_group->dims.paging.block_size; i < k->count; i++) {
        uint32_t id = i;
        for (uint32_t h = 0; h < k->kv_group->config.kv_heads; h++)
            id = kvf_max_u32(id, k->ids[(size_t)h * k->count + i]);
        positions[i] = positions[id];
    }
}

/* ---- work of the device ---- */

/* The newest kept query belongs to the last token, and so on back: those of tokens that are gone go
 * too, and the others move to the first slots. */
static kvf_status keep_queries(const keeping *k, const kvf_row *row)
{
    const kvf_device_ops *ops = k->kv_group->device->ops;
    const kvf_paging *p = &k->kv_group->dims.paging;
    const size_t bytes = kvf_queries_bytes(p);
    const uint32_t all = kvf_kept_queries(k->kv_group, k->layer);
    const uint32_t stay = common_end(k, all);
    if (stay == all)
        return KVF_OK;
    for (uint32_t i = 0; i < stay; i++) {
        const uint32_t slot = (k->layer->queries.count - stay + i) % p->query_window;
        KVF_TRY(
            ops->copy(k->stream, k->work.queries + i * bytes, row->queries + slot * bytes, bytes));
    }
    kvf_queries_keep(&k->layer->queries, stay);
    return stay ? ops->copy(k->stream, row->queries, k->work.queries, stay * bytes) : KVF_OK;
}

/* Sealed blocks in full precision, and where they are; `quantized` gets where they are quantized.
 * The row is the step's. */
static kvf_status dequantize_blocks(kvf_call *call, const keeping *k, const kvf_row *row)
{
    const kvf_paging *p = &call->kv_group->dims.paging;
    const kvf_device_ops *ops = call->kv_group->device->ops;
    char *scratch = call->kv_group->tables.scratch.blocks;
    const kvf_dequantize_args dequantize = {.paging = *p,
                                            .count = k->sealed,
                                            .scratch = scratch,
                                            .table = k->work.blocks,
                                            .row = call->row};
    KVF_TRY(ops->copy(k->stream, k->work.quantized, row->blocks, k->sealed * sizeof *row->blocks));
    KVF_TRY(KVF_LAUNCH(call, dequantize, dequantize));
    if (k->layer->cut.spare == 0)
        return KVF_OK;
    return ops->copy(k->stream, scratch + (k->layer->cut.spare - 1) * kvf_block_bytes(p),
                     kvf_row_spare(p, row), kvf_block_bytes(p));
}

/* Where pages lie now, with those of the ring in its copy. */
static kvf_status copy_blocks(kvf_call *call, const keeping *k, const kvf_row *row,
                              const void *tail)
{
    const kvf_device_ops *ops = call->kv_group->device->ops;
    const kvf_paging *p = &call->kv_group->dims.paging;
    const uint32_t end = kvf_row_blocks(p, row);
    void **blocks = k->work.blocks;
    KVF_TRY(ops->copy(k->stream, k->work.ring, row->ring, p->ring_blocks * kvf_block_bytes(p)));
    if (k->sealed && kvf_quantizes_pages(k->kv_group))
        KVF_TRY(dequantize_blocks(call, k, row));
    else if (k->sealed)
        KVF_TRY(ops->copy(k->stream, blocks, row->blocks, k->sealed * sizeof *blocks));
    return end > k->sealed
               ? ops->copy(k->stream, blocks + k->sealed, tail, (end - k->sealed) * sizeof *blocks)
               : KVF_OK;
}

/* The sink of pages that stay. */
static kvf_status reset_tables(kvf_call *call, const keeping *k, const kvf_row *row,
                               const void *counts)
{
    const kvf_kv_group *kv_group = call->kv_group;
    return kv_group->device->ops->copy(k->stream, row->static_count, counts,
                                       kv_group->config.kv_heads * sizeof *row->static_count);
}

/* Arrays in the frame: pages of the ring in their copy, and tokens of the sink that stay. */
typedef struct keep_tables {
    void **tail;
    uint32_t *count;
    void *const *tail_device;
    const uint32_t *count_device;
} keep_tables;

static keep_tables take_tables(kvf_call *call, uint32_t tail_blocks)
{
    keep_tables t;
    KVF_TAKE(call, t.tail, t.tail_device, tail_blocks);
    KVF_TAKE(call, t.count, t.count_device, call->kv_group->config.kv_heads);
    KVF_TAKE(call, call->row_host, call->row, kvf_quantizes_pages(call->kv_group) ? 1 : 0);
    return t;
}

void kvf_keep_take(kvf_call *call)
{
    (void)take_tables(call, call->kv_group->dims.paging.ring_blocks);
}

static kvf_status enqueue_start(kvf_call *call, const keeping *k)
{
    kvf_kv_group *kv_group = k->kv_group;
    const kvf_device_ops *ops = kv_group->device->ops;
    const kvf_paging *p = &kv_group->dims.paging;
    const kvf_row row = kvf_call_row(kv_group, k->layer);
    const uint32_t end = kvf_row_blocks(p, &row);
    const keep_tables t = take_tables(call, end - k->sealed);
    for (uint32_t i = k->sealed; i < end; i++)
        t.tail[i - k->sealed] = k->work.ring + i % p->ring_blocks * kvf_block_bytes(p);
    for (uint32_t h = 0; h < p->kv_heads; h++)
        t.count[h] = kvf_min_u32(p->sink, k->blocks * p->block_size);
    if (kvf_quantizes_pages(kv_group))
        call->row_host[0] = row;
    KVF_TRY(kvf_call_send(call));
    KVF_TRY(
        ops->copy(k->stream, k->work.ids, k->ids, (size_t)p->kv_heads * k->count * sizeof *k->ids));
    KVF_TRY(ops->event_record(call->frame->done, k->stream));
    KVF_TRY(copy_blocks(call, k, &row, t.tail_device));
    KVF_TRY(keep_queries(k, &row));
    KVF_TRY(reset_tables(call, k, &row, t.count_device));
    KVF_TRY(kvf_arena_shorten(call, k->layer, k->blocks));
    return ops->event_wait(call->frame->done); /* the ids are the caller's */
}

/* All blocks are brought, until the call ends: tokens are taken from any of them. */
static kvf_status start(const keeping *k)
{
    kvf_call call = {.cache = k->cache};
    KVF_TRY(kvf_call_open(&call, k->index, &k->sequence, true, k->stream));
    const kvf_status status = own_blocks(k);
    return status == KVF_OK ? kvf_call_end(&call, enqueue_start(&call, k))
                            : kvf_call_refuse(&call, status);
}

static kvf_status take_chunk(const keeping *k, uint32_t first, uint32_t tokens)
{
    const kvf_kv_group *kv_group = k->kv_group;
    const kvf_take_args args = {.shape = kvf_run_shape(&kv_group->dims.paging),
                                .kv_heads = kv_group->config.kv_heads,
                                .count = tokens,
                                .stride = k->count,
                                .blocks = (const void *const *)k->work.blocks,
                                .ids = k->work.ids + first,
                                .k = k->work.k,
                                .v = k->work.v};
    kvf_call call;
    KVF_TRY(kvf_call_begin(k->cache, k->stream, &call));
    return kvf_call_end(&call, KVF_LAUNCH(&call, take, args));
}

static kvf_status append_rest(const keeping *k)
{
    kvf_layer *layer = k->layer;
    const kvf_carried carried = {.from = (const void *const *)k->work.quantized,
                                 .ids = k->work.ids,
                                 .blocks = k->sealed,
                                 .stride = k->count};
    while (layer->extent.length < k->count) {
        const uint32_t first = layer->extent.length;
        const uint32_t tokens = kvf_min_u32(chunk_tokens(k->kv_group), k->count - first);
        KVF_TRY(take_chunk(k, first, tokens));
        KVF_TRY(kvf_layer_append_again(k->cache,
                                       &(kvf_prefill_args){.sequence = k->sequence,
                                                           .layer = k->index,
                                                           .tokens = tokens,
                                                           .k = k->work.k,
                                                           .v = k->work.v,
                                                           .positions = layer->positions + first},
                                       &carried, k->stream));
    }
    return KVF_OK;
}

static kvf_status shorten(keeping *k)
{
    kvf_kv_group *kv_group = k->kv_group;
    kvf_layer *layer = k->layer;
    const uint32_t block_size = kv_group->dims.paging.block_size;
    const uint32_t front = common_front(k) / block_size;
    k->blocks = kvf_min_u32(kvf_min_u32(front, k->sealed), kvf_sealed_blocks(kv_group, k->count));
    if (layer->refresh.static_from)
        k->blocks = 0;
    KVF_TRY(start(k));
    note_positions(k);
    kvf_refresh_drop_set(&layer->refresh);
    kvf_cut_evict(&layer->cut, k->count, k->sealed);
    kvf_extent_cut(&layer->extent, k->blocks * block_size, k->blocks);
    KVF_TRY(append_rest(k));
    kvf_cut_evicted(&layer->cut);
    for (uint32_t p = layer->extent.sealed; p < k->sealed; p++)
        kvf_page_pool_release(&kv_group->pool, layer->blocks[p]);
    return KVF_OK;
}

kvf_status kvf_sequence_keep(kvf_cache *cache, kvf_sequence *sequence, uint32_t layer,
                             const uint32_t *ids, uint32_t count, void *work, kvf_stream *stream)
{
    KVF_TRY(kvf_layer_check(cache, layer));
    KVF_TRY(kvf_sequence_check(cache, sequence));
    kvf_kv_group *kv_group = sequence->layers[layer].kv_group;
    keeping k = {.cache = cache,
                 .kv_group = kv_group,
                 .sequence = sequence,
                 .stream = stream,
                 .layer = &sequence->layers[layer],
                 .index = layer,
                 .ids = ids,
                 .count = count,
                 .length = sequence->layers[layer].extent.length,
                 .sealed = sequence->layers[layer].extent.sealed,
                 .work = carve_work(kv_group, &(kvf_carver){.base = work})};
    KVF_TRY(check(&k));
    return count == k.length ? KVF_OK : shorten(&k); /* all, in order, is what there is */
}
