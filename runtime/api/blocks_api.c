/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Part of kvferry/blocks.h: every function of it; see api.c. The content of tables, lengths and
 * slots is not known here: kernels look at it.
 */

#include "api.h"
#include "block_store.h"
#include "cache.h"
#include "settings.h"

#define INNER offsetof(kvf_blocks_config, cache)

static kvf_blocks_config defaults(void)
{
    kvf_blocks_config c = {.block_tokens = 32};
    kvf_cache_config_init(&c.cache);
    return c;
}

void kvf_blocks_config_init_sized(kvf_blocks_config *config, size_t size)
{
    const kvf_blocks_config own = defaults();
    kvf_sized_init(config, size, &own, sizeof own);
    if (config)
        config->cache.size = size - INNER;
}

/* ---- open and close ---- */

static kvf_status make(kvf_runtime *runtime, const kvf_blocks_config *config, kvf_reservation *r,
                       kvf_blocks **out)
{
    kvf_blocks_config own = defaults();
    KVF_CHECK_HANDLE(runtime, runtime);
    KVF_TRY(KVF_SIZED_READ(runtime->context, kvf_blocks_config, config, &own));
    KVF_TRY(kvf_sized_last(runtime->context, "cache", config, INNER));
    KVF_TRY(KVF_SIZED_RESERVED(runtime->context, own.reserved));
    own.cache.size = sizeof own.cache;
    return kvf_block_store_create(runtime, &own, r, out);
}

kvf_status kvf_blocks_plan_make_sized(kvf_runtime *runtime, const kvf_blocks_config *config,
                                      kvf_blocks_plan *plan, size_t size, kvf_error *error)
{
    kvf_blocks *blocks = NULL;
    kvf_reservation unused;
    kvf_status status = make(runtime, config, &unused, &blocks);
    if (status == KVF_OK)
        status = kvf_pointer_check(runtime->context, "plan", plan);
    if (status == KVF_OK)
        KVF_SIZED_GIVE(plan, size, &blocks->plan);
    kvf_block_store_destroy(blocks);
    return kvf_runtime_report(runtime, status, error);
}

kvf_status kvf_blocks_open(kvf_runtime *runtime, const kvf_blocks_config *config, kvf_blocks **out,
                           kvf_error *error)
{
    kvf_blocks *blocks = NULL;
    kvf_reservation r;
    if (out)
        *out = NULL;
    kvf_status status = make(runtime, config, &r, &blocks);
    if (status == KVF_OK)
        status = kvf_pointer_check(runtime->context, "out", out);
    if (status == KVF_OK)
        status = kvf_block_store_reserve(blocks, &r);
    (void)kvf_runtime_report(runtime, status, error);
    if (status != KVF_OK) {
        kvf_block_store_destroy(blocks);
        return status;
    }
    *out = blocks;
    return KVF_OK;
}

void kvf_blocks_close(kvf_blocks *blocks)
{
    if (blocks && kvf_handle_is_alive(blocks->context))
        kvf_block_store_destroy(blocks);
}

const kvf_blocks_plan *kvf_blocks_memory(const kvf_blocks *blocks)
{
    return blocks ? &blocks->plan : NULL;
}

/* ---- what calls are given ---- */

static kvf_status check_layer(const kvf_blocks *blocks, uint32_t layer)
{
    kvf_context *context = blocks->cache->context;
    if (layer >= blocks->cache->config.layers)
        KVF_FAIL(context, KVF_INVALID, "layer = %u: the blocks have %u layers", layer,
                 blocks->cache->config.layers);
    return KVF_OK;
}

static kvf_status check_bound(const kvf_blocks *blocks, uint32_t layer)
{
    KVF_TRY(check_layer(blocks, layer));
    if (!blocks->bindings[layer].codes)
        KVF_FAIL(blocks->cache->context, KVF_INVALID,
                 "layer = %u has no memory for codes; call kvf_blocks_bind first", layer);
    return KVF_OK;
}

static kvf_status bind(kvf_blocks *blocks, uint32_t layer, void *codes, size_t block_stride)
{
    kvf_context *context = blocks->cache->context;
    KVF_TRY(check_layer(blocks, layer));
    if (!codes || (uintptr_t)codes % 16)
        KVF_FAIL(context, KVF_INVALID,
                 "codes = %p: must be device memory at a multiple of 16 bytes", codes);
    if (block_stride < blocks->plan.code_bytes || block_stride % 16)
        KVF_FAIL(context, KVF_INVALID,
                 "block_stride = %zu: must be a multiple of 16, and at least the %llu bytes of "
                 "codes that a block of a layer has",
                 block_stride, (unsigned long long)blocks->plan.code_bytes);
    blocks->bindings[layer] = (kvf_block_binding){.codes = codes, .stride = block_stride};
    return KVF_OK;
}

kvf_status kvf_blocks_bind(kvf_blocks *blocks, uint32_t layer, void *codes, size_t block_stride)
{
    KVF_CHECK_HANDLE(blocks, blocks);
    KVF_TRY(kvf_enter(blocks->cache));
    return kvf_leave(blocks->cache, bind(blocks, layer, codes, block_stride));
}

static kvf_status set_attention(kvf_blocks *blocks, uint32_t layer,
                                const kvf_attention_params *params)
{
    KVF_TRY(check_layer(blocks, layer));
    return kvf_attention_params_set(blocks->cache, layer, params);
}

kvf_status kvf_blocks_attention_params(kvf_blocks *blocks, uint32_t layer,
                                       const kvf_attention_params *params)
{
    KVF_CHECK_HANDLE(blocks, blocks);
    KVF_TRY(kvf_enter(blocks->cache));
    return kvf_leave(blocks->cache, set_attention(blocks, layer, params));
}

/* Strides from token to token of keys and values. */
static kvf_status check_strides(const kvf_blocks *blocks, size_t k_stride, size_t v_stride)
{
    const kvf_cache_config *c = &blocks->cache->config;
    const struct {
        const char *name, *dim;
        size_t stride, numbers;
    } strides[] = {{"k_stride", "head_dim", k_stride, (size_t)c->kv_heads * c->head_dim},
                   {"v_stride", "value_dim", v_stride, (size_t)c->kv_heads * c->value_dim}};
    for (size_t i = 0; i < 2; i++)
        if (strides[i].stride && strides[i].stride < strides[i].numbers)
            KVF_FAIL(blocks->cache->context, KVF_INVALID,
                     "%s = %zu: a token has kv_heads * %s = %zu elements; 0 means just those",
                     strides[i].name, strides[i].stride, strides[i].dim, strides[i].numbers);
    return KVF_OK;
}

static kvf_status put(kvf_blocks *blocks, const kvf_blocks_put_args *args, kvf_stream *stream)
{
    kvf_context *context = blocks->cache->context;
    if (!args->k || !args->v || !args->slots)
        KVF_FAIL(context, KVF_INVALID, "k, v or slots is NULL; pass the new tokens");
    KVF_TRY(check_bound(blocks, args->layer));
    KVF_TRY(check_strides(blocks, args->k_stride, args->v_stride));
    return kvf_block_write(blocks, args, stream);
}

kvf_status kvf_blocks_put_sized(kvf_blocks *blocks, const kvf_blocks_put_args *args, size_t size,
                                kvf_stream *stream)
{
    kvf_blocks_put_args own;
    KVF_CHECK_HANDLE(blocks, blocks);
    KVF_TRY(kvf_enter_enqueueing(blocks->cache, stream));
    kvf_status status =
        KVF_SIZED_TAKE(blocks->cache->context, kvf_blocks_put_args, args, size, &own);
    if (status == KVF_OK)
        status = put(blocks, &own, stream);
    return kvf_leave(blocks->cache, status);
}

/* Slots that the host reads. */
static kvf_status check_slots(const kvf_blocks *blocks, const kvf_blocks_get_args *args)
{
    const kvf_blocks_config *c = &blocks->config;
    const int64_t slots = (int64_t)c->block_count * c->block_tokens;
    for (uint32_t i = 0; i < args->tokens; i++)
        if (args->slots[i] >= slots)
            KVF_FAIL(blocks->cache->context, KVF_INVALID,
                     "slots[%u] = %lld: must be below block_count * block_tokens = %lld; use a "
                     "number below 0 for a token to leave out",
                     i, (long long)args->slots[i], (long long)slots);
    return KVF_OK;
}

/* Tokens are read when the stream is done, which a stream that is being captured never is. */
static kvf_status check_waits(const kvf_blocks *blocks, kvf_stream *stream)
{
    const int answer = stream->device->ops->is_capturing(stream);
    if (answer < 0)
        KVF_FAIL(blocks->cache->context, KVF_DEVICE_FAILED,
                 "the device could not report whether a stream is being captured");
    if (answer)
        KVF_FAIL(blocks->cache->context, KVF_INVALID,
                 "the stream is being captured, and tokens are read back by the host; call "
                 "kvf_blocks_get after the capture has ended");
    return KVF_OK;
}

static kvf_status get(kvf_blocks *blocks, const kvf_blocks_get_args *args, kvf_stream *stream)
{
    kvf_context *context = blocks->cache->context;
    if (!args->slots || (!args->k && !args->v))
        KVF_FAIL(context, KVF_INVALID,
                 "slots, or both k and v, are NULL; pass tokens, and room for what is wanted");
    if (args->fp32 > 1)
        KVF_FAIL(context, KVF_INVALID, "fp32 = %u: 1 for rows in fp32, 0 for dtype", args->fp32);
    KVF_TRY(check_bound(blocks, args->layer));
    KVF_TRY(check_strides(blocks, args->k_stride, args->v_stride));
    KVF_TRY(check_slots(blocks, args));
    KVF_TRY(check_waits(blocks, stream));
    return kvf_block_read(blocks, args, stream);
}

kvf_status kvf_blocks_get_sized(kvf_blocks *blocks, const kvf_blocks_get_args *args, size_t size,
                                kvf_stream *stream)
{
    kvf_blocks_get_args own;
    KVF_CHECK_HANDLE(blocks, blocks);
    KVF_TRY(kvf_enter_enqueueing(blocks->cache, stream));
    kvf_status status =
        KVF_SIZED_TAKE(blocks->cache->context, kvf_blocks_get_args, args, size, &own);
    if (status == KVF_OK)
        status = get(blocks, &own, stream);
    return kvf_leave(blocks->cache, status);
}

static kvf_status take_rows(const kvf_blocks *blocks, const kvf_blocks_rows *rows, size_t size,
                            kvf_blocks_rows *own)
{
    return KVF_SIZED_TAKE(blocks->cache->context, kvf_blocks_rows, rows, size, own);
}

static kvf_status check_rows(const kvf_blocks *blocks, uint32_t layer, const kvf_blocks_rows *rows,
                             const void *q, const void *out)
{
    kvf_context *context = blocks->cache->context;
    if (!rows->table || !rows->lengths)
        KVF_FAIL(context, KVF_INVALID, "table or lengths is NULL; pass the rows");
    if (!q || !out)
        KVF_FAIL(context, KVF_INVALID, "q or out is NULL; pass queries and room for the outputs");
    if (rows->rows == 0 || rows->rows > blocks->physical.regions)
        KVF_FAIL(context, KVF_INVALID, "rows = %u: 1 to sequences_max = %u", rows->rows,
                 blocks->physical.regions);
    KVF_TRY(check_bound(blocks, layer));
    return kvf_buffers_check(blocks->cache, q, NULL, NULL, out);
}

static kvf_status decode(kvf_blocks *blocks, const kvf_blocks_decode_args *args, size_t args_size,
                         size_t rows_size, kvf_stream *stream)
{
    kvf_blocks_decode_args own;
    kvf_blocks_rows rows;
    KVF_TRY(KVF_SIZED_TAKE(blocks->cache->context, kvf_blocks_decode_args, args, args_size, &own));
    KVF_TRY(take_rows(blocks, own.rows, rows_size, &rows));
    own.rows = &rows;
    KVF_TRY(check_rows(blocks, own.layer, &rows, own.q, own.out));
    KVF_TRY(
        kvf_caller_selection_check(blocks->cache, own.page_scores, own.page_ids, own.page_stride));
    return kvf_block_step(blocks, &own, stream);
}

kvf_status kvf_blocks_decode_sized(kvf_blocks *blocks, const kvf_blocks_decode_args *args,
                                   size_t args_size, size_t rows_size, kvf_stream *stream)
{
    KVF_CHECK_HANDLE(blocks, blocks);
    KVF_TRY(kvf_enter_enqueueing(blocks->cache, stream));
    return kvf_leave(blocks->cache, decode(blocks, args, args_size, rows_size, stream));
}

static kvf_status check_chunks(const kvf_blocks *blocks, const kvf_blocks_extend_args *args)
{
    kvf_context *context = blocks->cache->context;
    const uint32_t most = blocks->physical.tokens_max;
    const uint32_t *starts = args->starts, *contexts = args->contexts;
    if (!starts || !contexts)
        KVF_FAIL(context, KVF_INVALID, "starts or contexts is NULL; pass them in host memory");
    for (uint32_t i = 0; i < args->rows->rows; i++) {
        if (starts[i + 1] < starts[i])
            KVF_FAIL(context, KVF_INVALID, "starts[%u] = %u: must not be below starts[%u] = %u",
                     i + 1, starts[i + 1], i, starts[i]);
        if (contexts[i] > most || starts[i + 1] - starts[i] > most - contexts[i])
            KVF_FAIL(context, KVF_INVALID,
                     "contexts[%u] = %u: with %u queries the row is longer than tokens_max = %u", i,
                     contexts[i], starts[i + 1] - starts[i], most);
    }
    return KVF_OK;
}

static kvf_status extend(kvf_blocks *blocks, const kvf_blocks_extend_args *args, kvf_stream *stream)
{
    kvf_query_chunks chunks = {0};
    KVF_TRY(check_rows(blocks, args->layer, args->rows, args->q, args->out));
    KVF_TRY(check_chunks(blocks, args));
    const uint32_t *starts = args->starts, rows = args->rows->rows;
    for (uint32_t i = 0, row = 0; i < rows; i++) { /* rows of a launch lie side by side */
        const kvf_query_chunk chunk = {starts[i], starts[i + 1] - starts[i], args->contexts[i]};
        row = chunks.count ? row : i;
        if (chunk.tokens)
            chunks.at[chunks.count++] = chunk;
        if (chunks.count == 0 || (chunk.tokens && chunks.count < KVF_CHUNKS_MAX && i + 1 < rows))
            continue;
        KVF_TRY(kvf_block_prefill(blocks, args, row, &chunks, stream));
        chunks.count = 0;
    }
    return KVF_OK;
}

static kvf_status extend_given(kvf_blocks *blocks, const kvf_blocks_extend_args *args,
                               size_t args_size, size_t rows_size, kvf_stream *stream)
{
    kvf_blocks_extend_args own;
    kvf_blocks_rows rows;
    KVF_TRY(KVF_SIZED_TAKE(blocks->cache->context, kvf_blocks_extend_args, args, args_size, &own));
    KVF_TRY(take_rows(blocks, own.rows, rows_size, &rows));
    own.rows = &rows;
    return extend(blocks, &own, stream);
}

kvf_status kvf_blocks_extend_sized(kvf_blocks *blocks, const kvf_blocks_extend_args *args,
                                   size_t args_size, size_t rows_size, kvf_stream *stream)
{
    KVF_CHECK_HANDLE(blocks, blocks);
    KVF_TRY(kvf_enter_enqueueing(blocks->cache, stream));
    return kvf_leave(blocks->cache, extend_given(blocks, args, args_size, rows_size, stream));
}

static kvf_status copy(kvf_blocks *blocks, const uint32_t *from, const uint32_t *to, uint32_t count,
                       kvf_stream *stream)
{
    kvf_context *context = blocks->cache->context;
    const uint32_t ids = blocks->physical.ids;
    if (count && (!from || !to))
        KVF_FAIL(context, KVF_INVALID, "from or to is NULL; pass ids in host memory");
    for (uint32_t i = 0; i < count; i++)
        if (from[i] >= ids || to[i] >= ids || from[i] == to[i])
            KVF_FAIL(context, KVF_INVALID,
                     "from[%u] = %u, to[%u] = %u: must be two ids below block_count = %u", i,
                     from[i], i, to[i], ids);
    for (uint32_t i = 0; i < count; i++)
        KVF_TRY(kvf_block_clone(blocks, from[i], to[i], stream));
    return KVF_OK;
}

kvf_status kvf_blocks_copy(kvf_blocks *blocks, const uint32_t *from, const uint32_t *to,
                           uint32_t count, kvf_stream *stream)
{
    KVF_CHECK_HANDLE(blocks, blocks);
    KVF_TRY(kvf_enter_enqueueing(blocks->cache, stream));
    return kvf_leave(blocks->cache, copy(blocks, from, to, count, stream));
}

/* ---- statistics ---- */

static void read_stats(const kvf_blocks *blocks, kvf_blocks_stats *stats)
{
    const kvf_kv_group *kv_group = &blocks->cache->kv_groups[0];
    kvf_stats s;
    kvf_stats_read(blocks->cache, &s);
    *stats = (kvf_blocks_stats){.tokens_attended = s.tokens_attended,
                                .pages_selected = s.pages_selected,
                                .hits = s.hits,
                                .misses = s.misses,
                                .bytes_to_device = s.bytes_to_device,
                                .bytes_prompt = s.bytes_prompt};
    for (uint32_t i = 0; i < kv_group->config.layers; i++) {
        const kvf_layer_counters *c = &kv_group->control.counters[i];
        stats->tokens_put += c->tokens_put;
        stats->pages_voided += c->pages_voided;
        stats->tokens_brought += c->tokens_brought;
        stats->bad_rows += c->bad_rows;
        stats->bad_slots += c->bad_slots;
    }
}

void kvf_blocks_stats_get_sized(const kvf_blocks *blocks, kvf_blocks_stats *stats, size_t size)
{
    kvf_blocks_stats own = {0};
    if (KVF_IS_ALIVE(blocks))
        read_stats(blocks, &own);
    KVF_SIZED_GIVE(stats, size, &own);
}

void kvf_blocks_stats_reset(kvf_blocks *blocks)
{
    if (!KVF_IS_ALIVE(blocks))
        return;
    kvf_stats_reset(blocks->cache);
}
