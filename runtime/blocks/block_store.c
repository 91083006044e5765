/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Opening and closing pages under the caller's blocks: settings, sizes, memory, and the constants
 * that kernels read.
 *
 * Knows nothing of calls. A half open store is closed by the same function.
 */

#include "block_store.h"

#include <stdio.h>

#include "cache.h"
#include "reserve.h"
#include "rings.h"
#include "score/codes.h"

#define KVF_BLOCK_TOKENS_MAX (1u << 20)

/* ---- settings ---- */

static kvf_status refuse(kvf_context *context, const char *field, const char *value,
                         const char *why)
{
    KVF_FAIL(context, KVF_UNSUPPORTED, "%s = %s: %s", field, value, why);
}

/* Settings of a sequence have no meaning under blocks that the caller numbers. */
static kvf_status check_homes(kvf_context *context, const kvf_cache_config *c)
{
    char value[32];
    if (c->select != KVF_SELECT_DYNAMIC && c->select != KVF_SELECT_FULL &&
        c->select != KVF_SELECT_STREAMING)
        return refuse(context, "select", kvf_select_name(c->select),
                      "blocks of the caller take dynamic, full and streaming; a static set, lists "
                      "per query head and functions belong to sequences");
    if (c->digest != KVF_DIGEST_CODES)
        return refuse(context, "digest", KVF_NAMES(KVF_DIGEST_LIST)[c->digest],
                      "blocks of the caller have codes only, one per token; leave it codes");
    if (c->transfer != KVF_TRANSFER_AUTO && c->transfer != KVF_TRANSFER_MAPPED &&
        c->transfer != KVF_TRANSFER_DIRECT)
        return refuse(context, "transfer", kvf_transfer_name(c->transfer),
                      "it needs the host in every step; use auto, mapped or direct");
    if (c->disk_path)
        return refuse(context, "disk_path", c->disk_path,
                      "a block of the caller stays in memory; leave it NULL");
    const struct {
        const char *name;
        uint32_t value;
        const char *why;
    } zeros[] = {
        {"verify_interval", c->verify_interval,
         "steps are not counted per row; compare with select = full instead, and leave it 0"},
        {"observe_window", c->observe_window,
         "blocks cannot be pruned, so no queries are kept; leave it 0"},
    };
    for (size_t i = 0; i < sizeof zeros / sizeof *zeros; i++) {
        snprintf(value, sizeof value, "%u", zeros[i].value);
        if (zeros[i].value)
            return refuse(context, zeros[i].name, value, zeros[i].why);
    }
    return KVF_OK;
}

/* Ranges of enumerators are the cache's to check, before their names are asked for. */
static kvf_status check_names(kvf_context *context, const kvf_cache_config *c)
{
    if (!kvf_select_find(c->select) || (uint32_t)c->digest > KVF_NAMES_HIGH(KVF_DIGEST_LIST) ||
        (uint32_t)c->transfer > KVF_NAMES_HIGH(KVF_TRANSFER_LIST))
        return KVF_OK;
    return check_homes(context, c);
}

static kvf_status check(const kvf_runtime *runtime, const kvf_blocks_config *config)
{
    kvf_context *context = runtime->context;
    if (config->block_tokens == 0 || config->block_tokens > KVF_BLOCK_TOKENS_MAX)
        KVF_FAIL(context, KVF_INVALID, "block_tokens = %u: must be 32 to %u", config->block_tokens,
                 KVF_BLOCK_TOKENS_MAX);
    if (config->block_count == 0 || config->block_count > INT32_MAX)
        KVF_FAIL(context, KVF_INVALID, "block_count = %u: must be 1 to %d", config->block_count,
                 INT32_MAX);
    if (config->on_demand > 1)
        KVF_FAIL(context, KVF_INVALID, "on_demand = %u: must be 0 or 1", config->on_demand);
    return check_names(context, &config->cache);
}

/* ---- sizes ---- */

/* The settings of the cache that is inside. */
static kvf_cache_config inner_config(const kvf_runtime *runtime, const kvf_blocks_config *config)
{
    kvf_cache_config c = config->cache;
    c.host_tokens_max = (uint64_t)config->block_count * config->block_tokens;
    c.prefill_chunk_max = 1;
    c.tokens_per_step_max = 1;
    c.phase_times = 0;
    if (c.transfer == KVF_TRANSFER_AUTO && !runtime->properties.shares_host_memory)
        c.transfer = KVF_TRANSFER_MAPPED;
    return c;
}

/* The cache inside has pages of all heads: a streaming head is one that is idle there. `inner` gets
 * such a mask, which it reads while the cache is created. */
static kvf_status own_kinds(kvf_blocks *blocks, kvf_cache_config *inner)
{
    const size_t heads = (size_t)inner->layers * inner->kv_heads;
    uint8_t *mask;
    if (!inner->head_mask)
        return KVF_OK;
    blocks->kinds = kvf_alloc(blocks->context, 2 * heads, sizeof *blocks->kinds);
    if (!blocks->kinds)
        KVF_FAIL(blocks->context, KVF_OUT_OF_MEMORY, "no memory for a head mask");
    mask = blocks->kinds + heads;
    for (size_t i = 0; i < heads; i++) {
        blocks->kinds[i] = inner->head_mask[i];
        mask[i] = inner->head_mask[i] == KVF_HEAD_STREAMING ? KVF_HEAD_HOT : inner->head_mask[i];
    }
    inner->head_mask = mask;
    inner->layer_windows = NULL;
    return KVF_OK;
}

/* Kinds of heads: a mean is of one block of the caller. */
static kvf_status check_heads(const kvf_blocks *blocks)
{
    const kvf_cache *cache = blocks->cache;
    if (cache->kv_groups[0].dims.paging.segments_max &&
        blocks->config.block_tokens % KVF_CENTROID_TOKENS)
        KVF_FAIL(cache->context, KVF_INVALID,
                 "block_tokens = %u: coarse heads score centroids of %u tokens of a block; set a "
                 "multiple of that, or write 1 instead of 2 in head_mask",
                 blocks->config.block_tokens, KVF_CENTROID_TOKENS);
    return KVF_OK;
}

/* Memory that rows of a sequence have and regions lack is not reserved. */
static kvf_status set_dims(kvf_blocks *blocks)
{
    kvf_dims *d = &blocks->cache->kv_groups[0].dims;
    kvf_paging *p = &d->paging;
    if (blocks->config.block_tokens % p->block_size)
        KVF_FAIL(blocks->cache->context, KVF_INVALID,
                 "block_tokens = %u: must be a multiple of %u%s", blocks->config.block_tokens,
                 p->block_size, p->block_size > KVF_CODE_TOKENS ? ", the page_size" : "");
    d->by_block = 1;
    d->on_demand = blocks->config.on_demand && blocks->cache->device->ops->memory_on_demand;
    d->scratch_blocks = kvf_max_u32(d->scratch_blocks, d->arena_blocks);
    d->arena_blocks = 0;
    d->jobs_max = 0;
    p->digest_bytes = 0;
    d->digest_blocks = 0;
    p->query_window = 0;
    p->spare_blocks = 0;
    return KVF_OK;
}

/* Coarse heads of all layers; `number`, if it is not NULL, gets theirs. */
static uint32_t number_coarse(const kvf_blocks *blocks, uint32_t *number)
{
    const kvf_paging *p = &blocks->physical.paging;
    uint32_t count = 0;
    for (uint32_t i = 0; p->segments_max && i < blocks->physical.layers * p->kv_heads; i++) {
        const bool is_coarse = kvf_is_coarse(blocks->cache, i / p->kv_heads, i % p->kv_heads);
        if (number)
            number[i] = is_coarse ? count : UINT32_MAX;
        count += is_coarse;
    }
    return count;
}

/* Likewise streaming heads of a layer; 0 is none, so they count from 1. */
static uint32_t number_streaming(const kvf_blocks *blocks, uint32_t layer, uint32_t *number)
{
    const uint32_t heads = blocks->physical.paging.kv_heads;
    const uint8_t *kinds = blocks->kinds + (size_t)layer * heads;
    uint32_t count = 0;
    for (uint32_t h = 0; h < heads; h++) {
        const bool streams = kinds[h] == KVF_HEAD_STREAMING;
        count += streams;
        if (number)
            number[(size_t)layer * heads + h] = streams ? count : 0;
    }
    return count;
}

/* Tails of a region lie layer by layer; each is as long as its layer's window needs. */
static kvf_status measure_tails(kvf_blocks *blocks, const kvf_cache_config *config)
{
    kvf_block_tails *t = &blocks->tails;
    if (!kvf_config_has_heads(config, KVF_HEAD_STREAMING))
        return KVF_OK;
    t->of = kvf_alloc(blocks->context, config->layers, sizeof *t->of);
    if (!t->of)
        KVF_FAIL(blocks->context, KVF_OUT_OF_MEMORY, "no memory for a head mask");
    for (uint32_t i = 0; i < config->layers; i++) {
        const uint32_t heads = number_streaming(blocks, i, NULL);
        if (heads == 0)
            continue;
        const kvf_ring ring = kvf_ring_of(config, &blocks->physical.paging, i);
        t->of[i] = (kvf_block_tail){ring, blocks->physical.streaming.blocks};
        t->blocks = kvf_max_u32(t->blocks, kvf_ring_total(&ring));
        t->splits_max = kvf_max_u32(t->splits_max, kvf_ring_splits(&ring));
        blocks->physical.streaming.blocks += (uint64_t)heads * kvf_ring_total(&ring);
    }
    return KVF_OK;
}

static void describe(kvf_blocks *blocks)
{
    const kvf_cache *cache = blocks->cache;
    const kvf_dims *d = &cache->kv_groups[0].dims;
    const kvf_cache_config *c = &cache->kv_groups[0].config;
    blocks->physical =
        (kvf_physical_blocks){.paging = d->paging,
                              .regions = c->sequences_max,
                              .layers = c->layers,
                              .ids = blocks->config.block_count,
                              .id_blocks = blocks->config.block_tokens / d->paging.block_size,
                              .tokens_max = c->tokens_max,
                              .budget_tokens = c->budget_tokens,
                              .budget_share = c->budget_share,
                              .coarse_share = c->coarse_share,
                              .local_tokens = c->local_tokens,
                              .dynamic_pages = d->dynamic_pages,
                              .all_pages = cache->kv_groups[0].policy->all_pages,
                              .ignores_writes = cache->runtime->test_hooks.ignores_writes};
    if (d->paging.segments_max)
        blocks->physical.coarse.segments =
            (uint32_t)kvf_physical_count(&blocks->physical) / kvf_segment_blocks(&blocks->physical);
}

static void carve_constants(const kvf_blocks *blocks, kvf_carver *k, kvf_block_constants *c)
{
    const kvf_physical_blocks *physical = &blocks->physical;
    const uint64_t lists = (uint64_t)physical->regions * physical->paging.lists;
    const uint64_t pool = (uint64_t)kvf_physical_count(physical) * physical->layers;
    /* At most one arena per block of the pool, and few bytes each. */
    const size_t bytes = kvf_stored_block_bytes(&physical->paging);
    const uint64_t arenas = pool * bytes / (KVF_ARENA_BYTES_MAX / 2) + 1;
    KVF_CARVE(k, c->physical, 1);
    KVF_CARVE(k, c->arenas, arenas);
    KVF_CARVE(k, c->list_bits, lists);
    KVF_CARVE(k, c->bits, physical->paging.kv_heads, physical->paging.blocks_max);
    KVF_CARVE(k, c->coarse, physical->paging.segments_max ? physical->layers : 0,
              physical->paging.kv_heads);
    KVF_CARVE(k, c->streaming, physical->streaming.blocks ? physical->layers : 0,
              physical->paging.kv_heads);
    KVF_CARVE(k, c->scratch, blocks->cache->kv_groups[0].dims.scratch_blocks);
}

/* A region's tails of streaming heads, and room to attend with them. */
static void carve_tails(kvf_blocks *blocks, kvf_carver *k)
{
    kvf_physical_blocks *c = &blocks->physical;
    const kvf_paging *p = &c->paging;
    kvf_block_tails *t = &blocks->tails;
    const uint64_t used = c->streaming.blocks ? 1 : 0;
    const uint64_t lists = used * c->regions * p->lists, splits = lists * t->splits_max;
    const kvf_dtype dtype = kvf_query_dtype(&blocks->cache->config);
    const uint64_t heads = (uint64_t)p->kv_heads * p->group;
    const uint64_t value = kvf_value_dim(&p->shape) * kvf_dtype_bytes(dtype);
    const uint64_t kept = kvf_brings_tokens(&blocks->cache->kv_groups[0]) ? c->regions : 0;
    KVF_CARVE(k, c->streaming.tails, kept, c->streaming.blocks, kvf_run_bytes(p));
    KVF_CARVE(k, c->streaming.tags, kept, c->streaming.blocks, p->block_size);
    KVF_CARVE(k, t->spans, lists, t->blocks);
    KVF_CARVE(k, t->span_count, lists);
    KVF_CARVE(k, t->partial_o, splits, p->group, kvf_value_dim(&p->shape));
    KVF_CARVE(k, t->partial_lse, splits, p->group);
    KVF_CARVE(k, t->out, used * kvf_max_u32(c->regions, KVF_BLOCK_PIECE), heads, value);
    KVF_CARVE(k, t->lse, used * kvf_max_u32(c->regions, KVF_BLOCK_PIECE), heads);
}

/* A step's tables of coarse heads. */
static void carve_segments(kvf_physical_blocks *c, kvf_carver *k)
{
    const uint64_t lists = c->paging.segments_max ? (uint64_t)c->regions * c->paging.lists : 0;
    KVF_CARVE(k, c->coarse.count, lists);
    KVF_CARVE(k, c->coarse.take, lists);
    KVF_CARVE(k, c->coarse.blocks, lists);
    KVF_CARVE(k, c->coarse.unfiltered, lists);
}

/* Returns the bytes of the caller's blocks among them. */
static uint64_t carve(kvf_blocks *blocks, kvf_carver *k)
{
    kvf_physical_blocks *c = &blocks->physical;
    const kvf_paging *p = &c->paging;
    const uint64_t pool = (uint64_t)kvf_physical_count(c) * c->layers;
    const uint64_t lists = (uint64_t)c->regions * p->lists;
    KVF_CARVE(k, c->scales, pool, p->kv_heads, p->block_size);
    KVF_CARVE(k, c->writes, pool, p->block_size);
    KVF_CARVE(k, c->nonfinite, pool);
    KVF_CARVE(k, c->coarse.centroids, number_coarse(blocks, NULL), c->coarse.segments,
              p->shape.head_dim);
    KVF_CARVE(k, c->coarse.scales, number_coarse(blocks, NULL), c->coarse.segments);
    KVF_CARVE(k, c->coarse.is_centroid, c->layers, c->coarse.segments);
    const uint64_t blocks_bytes = k->bytes;
    carve_constants(blocks, k, &blocks->constants);
    KVF_CARVE(k, c->clock, 1);
    KVF_CARVE(k, c->token_tags, lists, c->layers, kvf_region_tokens(p));
    KVF_CARVE(k, c->row, c->regions);
    KVF_CARVE(k, c->blocks, c->regions, p->blocks_max);
    KVF_CARVE(k, c->physical, c->regions, p->blocks_max);
    KVF_CARVE(k, c->static_count, lists);
    KVF_CARVE(k, c->pages, lists);
    KVF_CARVE(k, c->region, c->regions);
    KVF_CARVE(k, c->is_bad, c->regions);
    carve_segments(c, k);
    carve_tails(blocks, k);
    return blocks_bytes;
}

static kvf_status plan(kvf_blocks *blocks, const kvf_cache_config *config)
{
    const kvf_cache *cache = blocks->cache;
    const kvf_cache_plan *inner = &cache->plan;
    const kvf_physical_blocks *c = &blocks->physical;
    kvf_carver k = {0};
    const uint64_t per_block = carve(blocks, &k);
    const uint64_t lists = (uint64_t)c->regions * c->paging.lists;
    if (lists * blocks->tails.blocks > UINT32_MAX)
        KVF_FAIL(cache->context, KVF_INVALID,
                 "%s = %u with sequences_max = %u is more than any memory; lower it or "
                 "sequences_max",
                 kvf_streaming_name(config), config->streaming_recent, c->regions);
    if (k.bytes > KVF_CARVE_MAX)
        KVF_FAIL(cache->context, KVF_INVALID,
                 "block_count = %u: tables of so many blocks are more than any memory; lower it, "
                 "sequences_max or tokens_max",
                 c->ids);
    blocks->bytes = k.bytes;
    const uint64_t device =
        inner->device_kv_bytes + inner->device_digest_bytes + inner->device_table_bytes;
    const kvf_residency shape = kvf_kv_group_residency(&cache->kv_groups[0]);
    kvf_carver tables = {0}, slots = {0};
    kvf_residency_needs(&shape, &tables, &slots);
    blocks->plan = (kvf_blocks_plan){
        .code_bytes = (uint64_t)blocks->config.block_tokens * c->paging.kv_heads *
                      (c->paging.shape.head_dim / 4),
        .host_bytes = inner->host_kv_bytes + inner->host_staging_bytes + inner->host_table_bytes,
        .device_block_bytes = per_block / c->ids,
        .device_region_bytes =
            (device + k.bytes - per_block - tables.bytes - slots.bytes) / c->regions,
        .device_bytes = device + k.bytes,
        .slots = inner->slots,
        .resident_tokens = inner->resident_tokens,
        .prompt_bytes = inner->prompt_bytes,
        .transfer = inner->transfer};
    return KVF_OK;
}

kvf_status kvf_block_store_create(kvf_runtime *runtime, const kvf_blocks_config *config,
                                  kvf_reservation *r, kvf_blocks **out)
{
    KVF_TRY(check(runtime, config));
    kvf_blocks *blocks = *out = kvf_alloc(runtime->context, 1, sizeof *blocks);
    if (!blocks)
        KVF_FAIL(runtime->context, KVF_OUT_OF_MEMORY, "no memory for blocks of %zu bytes",
                 sizeof *blocks);
    kvf_cache_config inner = inner_config(runtime, config), resolved;
    kvf_dims dims;
    blocks->context = runtime->context;
    kvf_context_hold(blocks->context);
    blocks->config = *config;
    KVF_TRY(kvf_config_resolve(runtime, &inner, &resolved, &dims)); /* before a mask is read */
    KVF_TRY(own_kinds(blocks, &inner));
    KVF_TRY(kvf_cache_create(runtime, &inner, &blocks->cache));
    KVF_TRY(check_heads(blocks));
    KVF_TRY(set_dims(blocks));
    describe(blocks);
    KVF_TRY(measure_tails(blocks, &resolved));
    kvf_carver beside = {0};
    (void)carve(blocks, &beside);
    blocks->cache->device_beside = beside.bytes;
    KVF_TRY(kvf_calls_plan(blocks->cache, r));
    blocks->physical.paging = blocks->cache->kv_groups[0].dims.paging; /* with its slots */
    return plan(blocks, &resolved);
}

/* ---- memory ---- */

/* Where the KV group has what regions need. */
static void point_regions(kvf_blocks *blocks)
{
    const kvf_kv_group *kv_group = &blocks->cache->kv_groups[0];
    kvf_physical_blocks *c = &blocks->physical;
    c->rings = kv_group->tables.rows.rings;
    c->static_kv = kv_group->tables.rows.static_kv;
    c->slots = kv_group->residency.slot_memory;
    c->slot_of_page = kv_group->residency.slot_of_page;
    c->slot_words = kv_group->residency.words;
    c->slot_tags = kv_group->residency.tags;
    c->choose = kv_group->tables.choose;
    c->counters = kvf_counters_device(kv_group, 0);
    c->arena_blocks = kv_group->pool.blocks_per_arena;
    c->arenas = blocks->constants.arenas;
    c->bits = blocks->constants.bits;
    c->coarse.number = blocks->constants.coarse;
    c->streaming.number = blocks->constants.streaming;
    c->list_bits = blocks->constants.list_bits;
    c->coarse.filtered = kv_group->tables.coarse.bits;
}

/* Over host memory, with addresses of the device. */
static void fill_constants(const kvf_blocks *blocks, const kvf_block_constants *to)
{
    const kvf_kv_group *kv_group = &blocks->cache->kv_groups[0];
    const kvf_paging *p = &kv_group->dims.paging;
    const uint32_t lists = blocks->physical.regions * p->lists;
    *to->physical = blocks->physical;
    for (uint32_t i = 0; i < kv_group->pool.memory.arena_count; i++)
        to->arenas[i] = kv_group->pool.memory.arenas[i].device;
    for (uint32_t b = 0; b < kv_group->dims.scratch_blocks; b++)
        to->scratch[b] = kv_group->tables.scratch.blocks + b * kvf_block_bytes(p);
    for (uint32_t l = 0; l < lists; l++)
        to->list_bits[l] = blocks->constants.bits;
    if (to->coarse)
        (void)number_coarse(blocks, to->coarse);
    for (uint32_t i = 0; to->streaming && i < blocks->physical.layers; i++)
        (void)number_streaming(blocks, i, to->streaming);
    for (uint32_t h = 0; h < p->kv_heads; h++)
        for (uint32_t b = 0; b < p->blocks_max; b++)
            to->bits[(size_t)h * p->blocks_max + b] = kvf_sink_bits(p, b);
}

/* Slots are empty, and the constants come from pinned memory that is given back. The stream is gone
 * before that memory: its end waits for the copy even where a wait was refused. */
static kvf_status initialise(kvf_blocks *blocks, const kvf_host_memory *stage)
{
    kvf_cache *cache = blocks->cache;
    const kvf_device_ops *ops = cache->device->ops;
    kvf_block_constants constants;
    kvf_stream *stream = NULL;
    kvf_carver k = {.base = stage->arenas[0].host};
    carve_constants(blocks, &k, &constants);
    fill_constants(blocks, &constants);
    KVF_TRY(ops->stream_create(cache->device, KVF_PRIORITY_LOW, &stream));
    kvf_status status =
        ops->copy(stream, blocks->constants.physical, stage->arenas[0].device, k.bytes);
    if (status == KVF_OK)
        status = ops->stream_wait(stream);
    ops->stream_destroy(stream);
    return status;
}

static kvf_status initialise_through_stage(kvf_blocks *blocks)
{
    kvf_cache *cache = blocks->cache;
    kvf_host_memory_config memory = kvf_runtime_memory(cache->runtime);
    kvf_block_constants unused;
    kvf_host_memory stage = {0};
    kvf_carver k = {0};
    carve_constants(blocks, &k, &unused);
    memory.huge_pages = KVF_HUGE_PAGES_OFF;
    memory.bytes = memory.granule = kvf_round_up(k.bytes, 4096);
    KVF_TRY(kvf_host_memory_create(cache->context, cache->device, &memory, &stage));
    const kvf_status status = initialise(blocks, &stage);
    kvf_host_memory_destroy(cache->context, &stage);
    return status;
}

kvf_status kvf_block_store_reserve(kvf_blocks *blocks, kvf_reservation *r)
{
    kvf_cache *cache = blocks->cache;
    void *memory = NULL;
    KVF_TRY(kvf_cache_reserve(cache, r));
    blocks->bindings = kvf_alloc(cache->context, cache->config.layers, sizeof *blocks->bindings);
    blocks->nonfinite =
        kvf_alloc(cache->context, kvf_physical_count(&blocks->physical), sizeof(uint64_t));
    if (!blocks->bindings || !blocks->nonfinite)
        KVF_FAIL(cache->context, KVF_OUT_OF_MEMORY, "no memory for blocks of %u layers",
                 cache->config.layers);
    KVF_TRY(kvf_cache_take_memory(cache, blocks->bytes, &memory));
    blocks->memory = memory;
    (void)carve(blocks, &(kvf_carver){.base = blocks->memory});
    point_regions(blocks);
    return initialise_through_stage(blocks);
}

void kvf_block_store_destroy(kvf_blocks *blocks)
{
    if (!blocks)
        return;
    kvf_device *device = blocks->cache ? blocks->cache->device : NULL;
    kvf_cache_destroy(blocks->cache); /* ends its streams first: they may use what follows */
    if (blocks->memory)
        device->ops->memory_free(device, blocks->memory);
    kvf_free(blocks->context, blocks->bindings);
    kvf_free(blocks->context, blocks->nonfinite);
    kvf_context *context = blocks->context;
    kvf_free(context, blocks->tails.of);
    kvf_free(context, blocks->kinds);
    kvf_free(context, blocks);
    kvf_context_release(context);
}
