/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The page pool over host memory.
 *
 * Knows nothing of tokens or heads: a block is bytes. A block never crosses an arena, so its
 * address is one division away from its id, and both tables are allocated once.
 */

#include "page_pool.h"

#include <string.h>

#include "common/carve.h"

#define NONE UINT32_MAX

static uint32_t bundle_count(const kvf_page_pool *pool)
{
    return pool->block_count / pool->bundle_blocks;
}

static void carve(kvf_page_pool *pool, kvf_carver *carver)
{
    KVF_CARVE(carver, pool->next, bundle_count(pool));
    KVF_CARVE(carver, pool->live, bundle_count(pool));
    KVF_CARVE(carver, pool->references, pool->block_count);
}

uint64_t kvf_page_pool_table_bytes(uint32_t block_count, uint32_t bundle_blocks,
                                   uint32_t page_frames, uint32_t groups)
{
    kvf_page_pool pool = {.block_count = block_count, .bundle_blocks = bundle_blocks};
    kvf_carver carver = {0};
    carve(&pool, &carver);
    return carver.bytes +
           (page_frames ? kvf_disk_tier_table_bytes(bundle_count(&pool), page_frames, groups) : 0);
}

size_t kvf_page_pool_bundle_bytes(size_t block_bytes, uint32_t bundle_blocks)
{
    return kvf_round_up(block_bytes * bundle_blocks, KVF_DISK_ALIGNMENT);
}

static kvf_status take_tables(kvf_page_pool *pool)
{
    const uint32_t bundles = bundle_count(pool);
    pool->tables = kvf_alloc(
        pool->context, 1, kvf_page_pool_table_bytes(pool->block_count, pool->bundle_blocks, 0, 0));
    if (!pool->tables)
        KVF_FAIL(pool->context, KVF_OUT_OF_MEMORY, "no memory for the tables of %u host blocks",
                 pool->block_count);
    carve(pool, &(kvf_carver){.base = pool->tables});
    for (uint32_t i = 0; i < bundles; i++)
        pool->next[i] = i + 1 < bundles ? i + 1 : NONE;
    pool->free_head = 0;
    pool->free_count = pool->block_count;
    return KVF_OK;
}

static kvf_status open_tier(kvf_page_pool *pool, const kvf_page_pool_disk *disk)
{
    const kvf_disk_tier_config config = {
        .folder = disk->folder,
        .memory = &pool->memory,
        .engine = disk->engine,
        .bundle_bytes = kvf_page_pool_bundle_bytes(pool->block_bytes, disk->bundle_blocks),
        .bundles = bundle_count(pool),
        .page_frames = disk->page_frames,
        .groups = disk->groups,
        .drain = disk->drain,
        .user = disk->user};
    return kvf_disk_tier_open(pool->context, &config, &pool->tier);
}

kvf_status kvf_page_pool_create(kvf_context *context, kvf_device *device,
                                const kvf_host_memory_config *memory,
                                const kvf_page_pool_disk *disk, size_t block_bytes,
                                uint32_t block_count, kvf_page_pool *out)
{
    kvf_host_memory_config config = *memory;
    memset(out, 0, sizeof *out);
    KVF_ASSERT(block_bytes > 0 && block_bytes % 64 == 0);
    KVF_ASSERT(block_count > 0 && block_count != NONE);
    KVF_ASSERT(!disk || (disk->bundle_blocks > 0 && block_count % disk->bundle_blocks == 0));
    *out = (kvf_page_pool){.context = context,
                           .block_bytes = block_bytes,
                           .block_count = block_count,
                           .bundle_blocks = disk ? disk->bundle_blocks : 1,
                           .free_head = NONE};
    config.granule =
        disk ? kvf_page_pool_bundle_bytes(block_bytes, disk->bundle_blocks) : block_bytes;
    config.bytes = (uint64_t)config.granule * (disk ? disk->page_frames : block_count);
    out->blocks_per_arena = (uint32_t)(kvf_arena_bytes(&config) / block_bytes);
    kvf_status status = take_tables(out);
    if (status == KVF_OK)
        status = kvf_host_memory_create(context, device, &config, &out->memory);
    if (status == KVF_OK && disk)
        status = open_tier(out, disk);
    if (status != KVF_OK)
        kvf_page_pool_destroy(out);
    KVF_ASSERT_WALK(status != KVF_OK || kvf_page_pool_is_valid(out));
    return status;
}

void kvf_page_pool_destroy(kvf_page_pool *pool)
{
    if (!pool || !pool->context)
        return;
    kvf_disk_tier_close(pool->tier);
    kvf_host_memory_destroy(pool->context, &pool->memory);
    kvf_free(pool->context, pool->tables);
    memset(pool, 0, sizeof *pool);
}

/* A block of a bundle that others have blocks of too; there is one. */
static uint32_t find_single(kvf_page_pool *pool)
{
    while (pool->references[pool->free_look] > 0)
        pool->free_look = pool->free_look + 1 == pool->block_count ? 0 : pool->free_look + 1;
    return pool->free_look;
}

kvf_status kvf_page_pool_acquire_near(kvf_page_pool *pool, kvf_block near, kvf_block *out)
{
    uint32_t index = near.index + 1; /* 0 after none */
    *out = KVF_BLOCK_NONE;
    if (pool->free_count == 0)
        return KVF_FULL;
    if (index % pool->bundle_blocks == 0 || pool->references[index] > 0)
        index = pool->free_head == NONE ? find_single(pool) : pool->free_head * pool->bundle_blocks;
    const uint32_t bundle = index / pool->bundle_blocks;
    KVF_ASSERT(index < pool->block_count && pool->references[index] == 0);
    if (pool->live[bundle]++ == 0) {
        KVF_ASSERT(bundle == pool->free_head);
        pool->free_head = pool->next[bundle];
        pool->next[bundle] = NONE;
    }
    pool->free_count--;
    pool->references[index] = 1;
    out->index = index;
    KVF_ASSERT_WALK(kvf_page_pool_is_valid(pool));
    return KVF_OK;
}

void kvf_page_pool_share(kvf_page_pool *pool, kvf_block block)
{
    KVF_ASSERT(block.index < pool->block_count && pool->references[block.index] > 0);
    KVF_ASSERT(pool->references[block.index] < UINT32_MAX);
    pool->references[block.index]++;
}

void kvf_page_pool_release(kvf_page_pool *pool, kvf_block block)
{
    KVF_ASSERT(block.index < pool->block_count && pool->references[block.index] > 0);
    if (--pool->references[block.index] > 0)
        return;
    const uint32_t bundle = block.index / pool->bundle_blocks;
    pool->free_count++;
    if (--pool->live[bundle] == 0) {
        pool->next[bundle] = pool->free_head;
        pool->free_head = bundle;
        if (pool->tier)
            kvf_disk_tier_empty(pool->tier, bundle);
    }
    KVF_ASSERT_WALK(kvf_page_pool_is_valid(pool));
}

uint32_t kvf_page_pool_references(const kvf_page_pool *pool, kvf_block block)
{
    KVF_ASSERT(block.index < pool->block_count);
    return pool->references[block.index];
}

static void *of_tier(const kvf_page_pool *pool, kvf_block block, char *bundle)
{
    return bundle ? bundle + block.index % pool->bundle_blocks * pool->block_bytes : NULL;
}

void *kvf_page_pool_host(const kvf_page_pool *pool, kvf_block block)
{
    KVF_ASSERT_DEBUG(block.index < pool->block_count);
    if (pool->tier)
        return of_tier(pool, block,
                       kvf_disk_tier_host(pool->tier, kvf_page_pool_bundle(pool, block)));
    const kvf_arena *arena = &pool->memory.arenas[block.index / pool->blocks_per_arena];
    return arena->host + (size_t)(block.index % pool->blocks_per_arena) * pool->block_bytes;
}

void *kvf_page_pool_device(const kvf_page_pool *pool, kvf_block block)
{
    KVF_ASSERT_DEBUG(block.index < pool->block_count);
    if (pool->tier)
        return of_tier(pool, block,
                       kvf_disk_tier_device(pool->tier, kvf_page_pool_bundle(pool, block)));
    const kvf_arena *arena = &pool->memory.arenas[block.index / pool->blocks_per_arena];
    return arena->device + (size_t)(block.index % pool->blocks_per_arena) * pool->block_bytes;
}

void *kvf_page_pool_lasting(const kvf_page_pool *pool, kvf_block block)
{
    return pool->tier ? NULL : kvf_page_pool_host(pool, block);
}

void *kvf_page_pool_place(const kvf_page_pool *pool, kvf_block block)
{
    return of_tier(pool, block, kvf_disk_tier_place(pool->tier, kvf_page_pool_bundle(pool, block)));
}

kvf_status kvf_page_pool_copy_out(const kvf_page_pool *pool, kvf_context *context, kvf_block block,
                                  size_t offset, size_t bytes, char *to)
{
    if (pool->tier)
        return kvf_disk_tier_copy_out(
            pool->tier, context, kvf_page_pool_bundle(pool, block),
            block.index % pool->bundle_blocks * pool->block_bytes + offset, bytes, to);
    memcpy(to, (const char *)kvf_page_pool_host(pool, block) + offset, bytes);
    return KVF_OK;
}

kvf_status kvf_page_pool_copy_in(kvf_page_pool *pool, kvf_block block, size_t offset, size_t bytes,
                                 const char *from)
{
    if (pool->tier)
        return kvf_disk_tier_copy_in(pool->tier, kvf_page_pool_bundle(pool, block),
                                     block.index % pool->bundle_blocks * pool->block_bytes + offset,
                                     bytes, from);
    memcpy((char *)kvf_page_pool_host(pool, block) + offset, from, bytes);
    return KVF_OK;
}

/* ---- the door ---- */

void kvf_page_pool_call(kvf_page_pool *pool)
{
    if (pool->tier)
        kvf_disk_tier_call(pool->tier);
}

void kvf_page_pool_start_writes(kvf_page_pool *pool)
{
    if (pool->tier)
        kvf_disk_tier_start_writes(pool->tier);
}

void kvf_page_pool_want(kvf_page_pool *pool, kvf_block block, uint32_t group)
{
    if (pool->tier)
        kvf_disk_tier_want(pool->tier, kvf_page_pool_bundle(pool, block), group);
}

bool kvf_page_pool_ask(kvf_page_pool *pool)
{
    return pool->tier && kvf_disk_tier_ask(pool->tier);
}

kvf_status kvf_page_pool_bring(kvf_page_pool *pool)
{
    return pool->tier ? kvf_disk_tier_bring(pool->tier) : KVF_OK;
}

void kvf_page_pool_write(kvf_page_pool *pool, kvf_block block)
{
    if (pool->tier)
        kvf_disk_tier_write(pool->tier, kvf_page_pool_bundle(pool, block));
}

bool kvf_page_pool_is_coming(const kvf_page_pool *pool, kvf_block block)
{
    return kvf_disk_tier_is_coming(pool->tier, kvf_page_pool_bundle(pool, block));
}

uint64_t kvf_page_pool_arrival(const kvf_page_pool *pool, kvf_block block)
{
    return kvf_disk_tier_arrival(pool->tier, kvf_page_pool_bundle(pool, block));
}

uint64_t kvf_page_pool_arrivals(const kvf_page_pool *pool)
{
    return kvf_disk_tier_arrivals(pool->tier);
}

void kvf_page_pool_stats(const kvf_page_pool *pool, kvf_disk_stats *out)
{
    *out = (kvf_disk_stats){0};
    if (pool->tier)
        kvf_disk_tier_stats(pool->tier, out);
}

void kvf_page_pool_stats_reset(kvf_page_pool *pool)
{
    if (pool->tier)
        kvf_disk_tier_stats_reset(pool->tier);
}

bool kvf_page_pool_is_valid(const kvf_page_pool *pool)
{
    uint32_t used = 0, empty = 0;
    for (uint32_t b = 0; b < bundle_count(pool); b++) {
        uint32_t live = 0;
        for (uint32_t i = 0; i < pool->bundle_blocks; i++)
            live += pool->references[b * pool->bundle_blocks + i] > 0;
        if (live != pool->live[b])
            return false;
        used += live;
        empty += live == 0;
    }
    if (used + pool->free_count != pool->block_count)
        return false;
    /* As many steps as bundles are free that each find one, then the end: with no way back, each is
     * there once. */
    uint32_t at = pool->free_head;
    for (uint32_t i = 0; i < empty; i++) {
        if (at >= bundle_count(pool) || pool->live[at] != 0)
            return false;
        at = pool->next[at];
    }
    return at == NONE;
}
