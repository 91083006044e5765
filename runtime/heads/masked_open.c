/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Opening and closing a cache with a head mask: which inner cache a layer belongs to, and what the
 * outer one holds.
 *
 * Knows nothing of calls.
 */

#include <string.h>

#include "calls.h"
#include "config.h"
#include "masked.h"
#include "masked_step.h"
#include "streaming_heads.h"

/* ---- sizes ---- */

static uint32_t retrieval_heads(const kvf_cache_config *c, uint32_t layer)
{
    uint32_t count = 0;
    for (uint32_t h = 0; h < c->kv_heads; h++)
        count += c->head_mask[(size_t)layer * c->kv_heads + h];
    return count;
}

/* Layers with r retrieval heads; at most r = kv_heads. */
static uint32_t layers_with(const kvf_cache_config *c, uint32_t r)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < c->layers; i++)
        count += retrieval_heads(c, i) == r;
    return count;
}

/* The inner cache of layers with r retrieval heads. */
static kvf_cache_config part_config(const kvf_cache_config *config, uint32_t r, uint32_t layers)
{
    kvf_cache_config c = *config;
    c.head_mask = NULL;
    c.layers = layers;
    c.query_heads = config->query_heads / config->kv_heads * r;
    c.kv_heads = r;
    c.observe_window = 0; /* pruning is refused */
    c.disk_bytes = 0;     /* of all files: check_file */
    return c;
}

static void count_blocks(const kvf_cache_config *c, const kvf_dims *d, kvf_masked_sizes *z)
{
    const uint32_t block_size = d->paging.block_size, blocks = d->paging.blocks_max;
    const uint32_t recent = kvf_div_ceil_u32(c->streaming_recent - 1, block_size) + 1;
    kvf_ring *ring = &z->ring;
    *ring = (kvf_ring){.shape = kvf_run_shape(&d->paging),
                       .sink = c->streaming_sink,
                       .recent = c->streaming_recent};
    ring->sink_blocks = kvf_min_u32(kvf_div_ceil_u32(c->streaming_sink, block_size), blocks);
    ring->ring_blocks = kvf_max_u32(1, kvf_min_u32(recent, blocks - ring->sink_blocks));
    z->blocks = ring->sink_blocks + ring->ring_blocks;
    z->chunk_blocks = kvf_div_ceil_u32(c->prefill_chunk_max, block_size) + 1;
    z->window_blocks = z->blocks + z->chunk_blocks + 1;
    z->split = kvf_split(z->blocks, block_size);
    z->group = c->query_heads / c->kv_heads;
}

static void count_heads(const kvf_cache_config *c, kvf_masked_sizes *z)
{
    for (uint32_t i = 0; i < c->layers; i++) {
        const uint32_t r = retrieval_heads(c, i), s = c->kv_heads - r;
        z->streaming_max = kvf_max_u32(z->streaming_max, s);
        z->packed[0] = kvf_max_u32(z->packed[0], s ? r : 0);
        z->packed[1] = kvf_max_u32(z->packed[1], r ? s : 0);
    }
    for (uint32_t r = 1; r <= c->kv_heads; r++)
        z->parts += layers_with(c, r) != 0;
}

/* What of the outer cache does not exist takes no room. */
static void shape_outer(kvf_cache *cache)
{
    kvf_dims *d = &cache->dims;
    d->paging.pages_max = 0;
    d->needs_mirror = d->arena_blocks = d->ahead_max = d->shadow_slots = d->block_count = 0;
    d->frame_bytes = kvf_masked_frame_bytes(cache);
}

static void carve_tables(kvf_cache *cache, kvf_carver *k)
{
    const kvf_cache_config *c = &cache->config;
    kvf_masked *m = cache->masked;
    const kvf_masked_sizes *z = &m->sizes;
    const uint64_t rows = kvf_max_u32(c->prefill_chunk_max, c->sequences_max);
    const uint64_t row = kvf_row_bytes(&z->ring.shape);
    const uint64_t lists = (uint64_t)c->sequences_max * z->streaming_max;
    const uint64_t splits = lists * kvf_div_ceil_u32(z->blocks, z->split);
    for (uint32_t kind = 0; kind < 2; kind++) {
        KVF_CARVE(k, m->q[kind], rows, z->packed[kind], z->group, row);
        KVF_CARVE(k, m->k[kind], rows, z->packed[kind], row);
        KVF_CARVE(k, m->v[kind], rows, z->packed[kind], row);
        KVF_CARVE(k, m->out[kind], rows, z->packed[kind], z->group, row);
        KVF_CARVE(k, m->lse[kind], c->sequences_max, z->packed[kind], z->group);
    }
    KVF_CARVE(k, cache->tables.spans, lists, z->blocks);
    KVF_CARVE(k, cache->tables.span_count, lists);
    KVF_CARVE(k, cache->tables.partial_o, splits, z->group, c->head_dim);
    KVF_CARVE(k, cache->tables.partial_lse, splits, z->group);
    KVF_CARVE(k, cache->tables.chunk_fault, 1);
    KVF_CARVE(k, cache->tables.frames, KVF_FRAMES, cache->dims.frame_bytes);
}

static void carve_host(kvf_cache *cache, kvf_carver *k)
{
    const kvf_cache_config *c = &cache->config;
    kvf_masked *m = cache->masked;
    KVF_CARVE(k, m->mask, c->layers, c->kv_heads);
    KVF_CARVE(k, m->heads, c->layers, c->kv_heads);
    KVF_CARVE(k, m->layer_of, c->layers);
    KVF_CARVE(k, m->layers, c->layers);
    KVF_CARVE(k, m->parts, m->sizes.parts);
    KVF_CARVE(k, m->inner, c->sequences_max, m->sizes.parts);
    KVF_CARVE(k, m->batch, c->sequences_max);
    kvf_layout_carve_host(cache, k);
}

static void carve_outer(kvf_cache *cache, kvf_reservation *r)
{
    const kvf_cache_config *c = &cache->config;
    kvf_masked *m = cache->masked;
    const uint64_t page = kvf_page_bytes(&m->sizes.ring.shape);
    carve_host(cache, &r->host);
    for (uint32_t i = 0; i < c->layers; i++) {
        char *rings;
        KVF_CARVE(&r->kv, rings, c->sequences_max, m->sizes.blocks,
                  c->kv_heads - retrieval_heads(c, i), page);
        if (m->layers)
            m->layers[i].rings = rings;
    }
    KVF_CARVE(&r->kv, m->chunk, m->sizes.chunk_blocks, m->sizes.streaming_max, page);
    carve_tables(cache, &r->table);
    kvf_layout_carve_control(cache, &r->control, &cache->control);
    kvf_layout_carve_control(cache, &r->control_device, &cache->control_device);
}

/* ---- plan ---- */

static kvf_status plan_outer(kvf_cache *cache, kvf_reservation *r)
{
    const kvf_cache_config *c = &cache->config;
    kvf_masked_sizes *z = &cache->masked->sizes;
    count_blocks(c, &cache->dims, z);
    count_heads(c, z);
    shape_outer(cache);
    *r = (kvf_reservation){0};
    carve_outer(cache, r);
    if (kvf_reservation_bytes(r) > KVF_CARVE_MAX || r->control.bytes > KVF_ARENA_BYTES_MAX ||
        (uint64_t)c->sequences_max * z->streaming_max * z->blocks > UINT32_MAX)
        KVF_FAIL(cache->context, KVF_INVALID,
                 "streaming_recent = %u with %u layers and sequences_max = %u is more than any "
                 "memory; lower streaming_recent, sequences_max or prefill_chunk_max",
                 c->streaming_recent, c->layers, c->sequences_max);
    cache->plan = (kvf_cache_plan){.device_kv_bytes = r->kv.bytes,
                                   .device_table_bytes = r->table.bytes,
                                   .host_table_bytes = r->host.bytes + r->control.bytes,
                                   .transfer = c->transfer};
    return KVF_OK;
}

static void add_plan(kvf_cache_plan *sum, const kvf_cache_plan *p)
{
    sum->host_kv_bytes += p->host_kv_bytes;
    sum->host_staging_bytes += p->host_staging_bytes;
    sum->host_table_bytes += p->host_table_bytes;
    sum->device_kv_bytes += p->device_kv_bytes;
    sum->device_digest_bytes += p->device_digest_bytes;
    sum->device_table_bytes += p->device_table_bytes;
    sum->static_tokens = p->static_tokens; /* the same for all */
    sum->dynamic_pages = p->dynamic_pages;
    sum->slots = p->slots;
    sum->transfer = p->transfer;
    sum->disk_bundle_bytes = kvf_max_u32(sum->disk_bundle_bytes, p->disk_bundle_bytes);
    sum->disk_bytes += p->disk_bytes;
}

/* ---- a disk tier: memory for each ---- */

static kvf_status measure_pages(kvf_cache *cache, kvf_cache_config config, kvf_part_pages *out)
{
    kvf_cache *part = NULL;
    config.disk_path = NULL;
    config.host_bytes = 0;
    const kvf_status status = kvf_cache_create(cache->runtime, &config, &part);
    if (status == KVF_OK) {
        const uint64_t least = kvf_config_memory_least(&config, &part->dims);
        out->bytes = (uint64_t)part->dims.block_count * kvf_block_bytes(&part->dims.paging);
        out->least = least < out->bytes ? least : out->bytes;
    }
    kvf_cache_destroy(part);
    return status;
}

/* Of each number of heads, and at 0 of all. */
static kvf_status measure_parts(kvf_cache *cache, const kvf_cache_config *config)
{
    kvf_part_pages *pages = cache->masked->pages;
    for (uint32_t heads = 1; config->disk_path && heads <= cache->config.kv_heads; heads++) {
        const uint32_t layers = layers_with(&cache->config, heads);
        if (layers)
            KVF_TRY(measure_pages(cache, part_config(config, heads, layers), &pages[heads]));
        pages->bytes += pages[heads].bytes;
        pages->least += pages[heads].least;
    }
    if (config->disk_path && config->host_bytes < pages->least)
        KVF_FAIL(cache->context, KVF_INVALID,
                 "host_bytes = %llu: layers with different numbers of retrieval heads each need "
                 "pages in memory; give at least %llu, or lower tokens_max",
                 (unsigned long long)config->host_bytes, (unsigned long long)pages->least);
    return KVF_OK;
}

/* What it needs, and of the rest its part. */
static void share_memory(const kvf_masked *m, kvf_cache_config *config)
{
    const kvf_part_pages *all = m->pages, *part = &m->pages[config->kv_heads];
    if (!config->disk_path)
        return;
    const double rest = (double)(config->host_bytes - all->least);
    const uint64_t more = (uint64_t)(rest * ((double)part->bytes / (double)all->bytes));
    config->host_bytes = all->bytes <= config->host_bytes ? part->bytes : part->least + more;
}

static kvf_status check_file(const kvf_cache *cache)
{
    const kvf_cache_config *c = &cache->config;
    if (!c->disk_bytes || cache->plan.disk_bytes <= c->disk_bytes)
        return KVF_OK;
    KVF_FAIL(cache->context, KVF_INVALID,
             "disk_bytes = %llu: host_tokens_max = %llu tokens take %llu bytes; raise it, or "
             "lower host_tokens_max",
             (unsigned long long)c->disk_bytes, (unsigned long long)c->host_tokens_max,
             (unsigned long long)cache->plan.disk_bytes);
}

static kvf_status plan_part(kvf_cache *cache, kvf_cache_config config)
{
    kvf_cache *part = NULL;
    share_memory(cache->masked, &config);
    kvf_reservation unused;
    kvf_status status = kvf_cache_create(cache->runtime, &config, &part);
    if (status == KVF_OK)
        status = kvf_calls_plan(part, &unused);
    if (status == KVF_OK)
        add_plan(&cache->plan, &part->plan);
    kvf_cache_destroy(part);
    return status;
}

kvf_status kvf_masked_plan(kvf_cache *cache, const kvf_cache_config *config, kvf_reservation *r)
{
    const size_t pages_bytes = (cache->config.kv_heads + 1) * sizeof *cache->masked->pages;
    cache->masked = kvf_alloc(cache->context, 1, sizeof *cache->masked + pages_bytes);
    if (!cache->masked)
        KVF_FAIL(cache->context, KVF_OUT_OF_MEMORY, "no memory for a head mask");
    KVF_TRY(plan_outer(cache, r));
    KVF_TRY(measure_parts(cache, config));
    for (uint32_t heads = 1; heads <= cache->config.kv_heads; heads++) {
        const uint32_t layers = layers_with(&cache->config, heads);
        if (layers)
            KVF_TRY(plan_part(cache, part_config(config, heads, layers)));
    }
    return check_file(cache);
}

/* ---- open and close ---- */

static void list_heads(const kvf_cache_config *c, kvf_masked *m, uint32_t layer)
{
    const uint8_t *mask = m->mask + (size_t)layer * c->kv_heads;
    uint32_t *heads = m->heads + (size_t)layer * c->kv_heads;
    kvf_masked_layer *l = &m->layers[layer];
    uint32_t streaming = l->retrieval = retrieval_heads(c, layer), retrieval = 0;
    l->streaming = c->kv_heads - l->retrieval;
    l->heads = heads;
    for (uint32_t h = 0; h < c->kv_heads; h++)
        heads[mask[h] ? retrieval++ : streaming++] = h;
}

/* A custom policy sees layers and heads of the outer cache. */
static uint32_t select_outer(void *user, const kvf_select_view *view, int32_t *ids)
{
    const kvf_masked_part *part = user;
    const kvf_cache_config *c = &part->outer->config;
    kvf_select_view outer = *view;
    outer.layer = part->layer_of[view->layer];
    outer.kv_head = part->outer->masked->layers[outer.layer].heads[view->kv_head];
    return c->select_fn(c->select_user, &outer, ids);
}

static kvf_status open_part(kvf_cache *cache, const kvf_cache_config *config, kvf_masked_part *part)
{
    kvf_reservation r;
    kvf_cache_config c = part_config(config, part->heads, part->layers);
    share_memory(cache->masked, &c);
    if (kvf_select_find(c.select)->calls_function) {
        c.select_fn = select_outer;
        c.select_user = part;
    }
    KVF_TRY(kvf_cache_create(cache->runtime, &c, &part->cache));
    KVF_TRY(kvf_calls_plan(part->cache, &r));
    return kvf_cache_reserve(part->cache, &r);
}

static kvf_status open_parts(kvf_cache *cache, const kvf_cache_config *config, kvf_masked *m)
{
    uint32_t n = 0, done = 0;
    for (uint32_t r = 1; r <= cache->config.kv_heads; r++) {
        const uint32_t layers = layers_with(&cache->config, r);
        if (layers == 0)
            continue;
        kvf_masked_part *part = &m->parts[n];
        *part = (kvf_masked_part){
            .outer = cache, .heads = r, .layers = layers, .layer_of = m->layer_of + done};
        for (uint32_t i = 0, inner = 0; i < cache->config.layers; i++)
            if (m->layers[i].retrieval == r) {
                m->layers[i].part = n;
                m->layers[i].inner = inner;
                part->layer_of[inner++] = i;
            }
        KVF_TRY(open_part(cache, config, part));
        done += layers;
        n++;
    }
    return KVF_OK;
}

kvf_status kvf_masked_reserve(kvf_cache *cache, const kvf_cache_config *config, kvf_reservation *r)
{
    kvf_masked *m = cache->masked;
    const kvf_cache_config *c = &cache->config;
    KVF_TRY(kvf_cache_take_memory(cache, r));
    carve_outer(cache, r);
    memcpy(m->mask, c->head_mask, (size_t)c->layers * c->kv_heads);
    cache->config.head_mask = m->mask;
    for (uint32_t i = 0; i < c->layers; i++)
        list_heads(c, m, i);
    KVF_TRY(open_parts(cache, config, m));
    for (uint32_t i = 0; i < c->layers; i++)
        kvf_footprint_shape(cache, i, m->layers[i].retrieval,
                            m->layers[i].retrieval ? m->parts[m->layers[i].part].cache : cache);
    return kvf_cache_take_frames(cache);
}

void kvf_masked_close(kvf_cache *cache)
{
    kvf_masked *m = cache->masked;
    kvf_cache_wait(cache);
    for (uint32_t i = m->parts ? m->sizes.parts : 0; i-- > 0;)
        kvf_cache_destroy(m->parts[i].cache);
    kvf_free(cache->context, m);
    cache->masked = NULL;
}
