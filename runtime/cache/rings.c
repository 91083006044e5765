/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Rings of streaming heads: sizes from settings, and arrays carved.
 *
 * Knows nothing of calls.
 */

#include "rings.h"

#include "cache.h"

/* ---- sizes ---- */

kvf_ring kvf_ring_of(const kvf_cache_config *c, const kvf_paging *paging, uint32_t layer)
{
    const uint32_t block_size = paging->block_size, blocks = paging->blocks_max;
    const uint32_t recent = kvf_streaming_recent(c, layer);
    const uint32_t pages = kvf_div_ceil_u32(recent - 1, block_size) + 1;
    kvf_ring ring = {
        .shape = kvf_run_shape(paging), .heads = 1, .sink = c->streaming_sink, .recent = recent};
    ring.sink_blocks = kvf_min_u32(kvf_div_ceil_u32(c->streaming_sink, block_size), blocks);
    ring.ring_blocks = kvf_max_u32(1, kvf_min_u32(pages, blocks - ring.sink_blocks));
    return ring;
}

uint32_t kvf_ring_splits(const kvf_ring *ring)
{
    const uint32_t spans = kvf_ring_total(ring);
    return kvf_div_ceil_u32(spans, kvf_split(spans, ring->shape.page_size));
}

/* Room that all layers share, by their rings. */
static void measure(const kvf_cache_config *c, const kvf_paging *paging, kvf_rings *z)
{
    const uint32_t block_size = paging->block_size;
    z->shape = kvf_run_shape(paging);
    for (uint32_t i = 0; i < c->layers; i++) {
        const kvf_ring *ring = &z->layers[i].ring;
        if (ring->heads == 0)
            continue;
        z->blocks = kvf_max_u32(z->blocks, kvf_ring_total(ring));
        z->splits_max = kvf_max_u32(z->splits_max, kvf_ring_splits(ring));
    }
    z->chunk_blocks = kvf_div_ceil_u32(c->prefill_chunk_max, block_size) + 1;
    z->tile_blocks = KVF_PREFILL_TILE / block_size;
    z->window_blocks = z->blocks + z->chunk_blocks + 1 + 2 * (z->tile_blocks - 1);
    z->group = c->query_heads / c->kv_heads;
}

/* Which heads of a layer have pages, which stream. */
static void list_heads(const kvf_cache_config *c, const kvf_paging *paging, kvf_rings *z,
                       uint32_t layer)
{
    const uint8_t *mask = c->head_mask + (size_t)layer * c->kv_heads;
    uint32_t *heads = z->heads + (size_t)layer * c->kv_heads;
    uint32_t retrieval = 0, n = 0;
    for (uint32_t kind = 2; kind-- > 0;) {
        for (uint32_t h = 0; h < c->kv_heads; h++)
            if ((mask[h] != KVF_HEAD_STREAMING) == kind)
                heads[n++] = h;
        if (kind)
            retrieval = n;
    }
    const uint32_t streaming = c->kv_heads - retrieval;
    if (streaming)
        z->layers[layer].ring = kvf_ring_of(c, paging, layer);
    z->layers[layer].ring.heads = streaming;
    z->streaming_max = kvf_max_u32(z->streaming_max, streaming);
    z->packed[0] = kvf_max_u32(z->packed[0], streaming ? retrieval : 0);
    z->packed[1] = kvf_max_u32(z->packed[1], retrieval ? streaming : 0);
}

kvf_status kvf_rings_create(kvf_cache *cache, const kvf_paging *paging)
{
    const kvf_cache_config *c = &cache->config;
    const size_t cells = (size_t)c->layers * c->kv_heads;
    if (!kvf_config_has_heads(c, KVF_HEAD_STREAMING))
        return KVF_OK;
    kvf_rings *z = cache->rings = kvf_alloc(cache->context, 1, sizeof *z);
    if (z) {
        z->heads = kvf_alloc(cache->context, cells, sizeof *z->heads);
        z->layers = kvf_alloc(cache->context, c->layers, sizeof *z->layers);
    }
    if (!z || !z->heads || !z->layers)
        KVF_FAIL(cache->context, KVF_OUT_OF_MEMORY, "no memory for a head mask");
    for (uint32_t i = 0; i < c->layers; i++)
        list_heads(c, paging, z, i);
    measure(c, paging, z);
    return KVF_OK;
}

void kvf_rings_destroy(kvf_cache *cache)
{
    kvf_rings *z = cache->rings;
    if (!z)
        return;
    kvf_free(cache->context, z->layers);
    kvf_free(cache->context, z->heads);
    kvf_free(cache->context, z);
}

uint32_t kvf_streaming_count(const kvf_cache *cache, uint32_t layer)
{
    return cache->rings ? cache->rings->layers[layer].ring.heads : 0;
}

size_t kvf_ring_bytes(const kvf_cache *cache, uint32_t layer)
{
    const kvf_ring *ring = cache->rings ? &cache->rings->layers[layer].ring : NULL;
    return ring && ring->heads
               ? (size_t)kvf_ring_total(ring) * ring->heads * kvf_page_bytes(&ring->shape)
               : 0;
}

/* ---- memory ---- */

static void carve_call(kvf_cache *cache, kvf_carver *k)
{
    const kvf_cache_config *c = &cache->config;
    kvf_rings *z = cache->rings;
    const uint64_t tokens = kvf_max_u32(c->prefill_chunk_max, c->sequences_max);
    const uint64_t key = kvf_key_bytes(&z->shape);
    const uint64_t value = kvf_value_bytes(&z->shape);
    const uint64_t out = c->value_dim * kvf_dtype_bytes(kvf_query_dtype(c));
    const uint64_t lists = (uint64_t)c->sequences_max * z->streaming_max;
    const uint64_t splits = lists * z->splits_max;
    for (uint32_t kind = 0; kind < 2; kind++) {
        KVF_CARVE(k, z->q[kind], tokens, z->packed[kind], z->group, key);
        KVF_CARVE(k, z->k[kind], tokens, z->packed[kind], key);
        KVF_CARVE(k, z->v[kind], tokens, z->packed[kind], value);
        KVF_CARVE(k, z->out[kind], tokens, z->packed[kind], z->group, out);
        KVF_CARVE(k, z->lse[kind], c->sequences_max, z->packed[kind], z->group);
    }
    KVF_CARVE(k, z->spans, lists, z->blocks);
    KVF_CARVE(k, z->span_count, lists);
    KVF_CARVE(k, z->partial_o, splits, z->group, c->value_dim);
    KVF_CARVE(k, z->partial_lse, splits, z->group);
    KVF_CARVE(k, z->chunk_fault, 1);
}

void kvf_rings_carve(kvf_cache *cache, kvf_reservation *r)
{
    kvf_rings *z = cache->rings;
    if (!z)
        return;
    const uint64_t page = kvf_page_bytes(&z->shape);
    for (uint32_t i = 0; i < cache->config.layers; i++)
        KVF_CARVE(&r->kv, z->layers[i].blocks, cache->config.sequences_max,
                  kvf_ring_total(&z->layers[i].ring), z->layers[i].ring.heads, page);
    KVF_CARVE(&r->kv, z->chunk, z->chunk_blocks, z->streaming_max, page);
    KVF_CARVE(&r->kv, z->hidden, z->streaming_max, page);
    carve_call(cache, &r->table);
}

kvf_status kvf_rings_check(kvf_cache *cache)
{
    const kvf_cache_config *c = &cache->config;
    const kvf_rings *z = cache->rings;
    const char *recent = kvf_streaming_name(c);
    kvf_reservation r = {0};
    kvf_rings_carve(cache, &r);
    if (z && (kvf_reservation_bytes(&r) > KVF_CARVE_MAX ||
              (uint64_t)c->sequences_max * z->streaming_max * z->blocks > UINT32_MAX))
        KVF_FAIL(cache->context, KVF_INVALID,
                 "%s = %u with %u layers and sequences_max = %u is more than any memory; lower "
                 "%s, sequences_max or prefill_chunk_max",
                 recent, c->streaming_recent, c->layers, c->sequences_max, recent);
    return KVF_OK;
}
