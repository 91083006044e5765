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

static void carve(kvf_page_pool *pool, kvf_carver *carver)
{
    KVF_CARVE(carver, pool->next, pool->block_count);
    KVF_CARVE(carver, pool->references, pool->block_count);
}

uint64_t kvf_page_pool_table_bytes(uint32_t block_count)
{
    kvf_page_pool pool = {.block_count = block_count};
    kvf_carver carver = {0};
    carve(&pool, &carver);
    return carver.bytes;
}

static kvf_status take_tables(kvf_page_pool *pool)
{
    pool->tables = kvf_alloc(pool->context, 1, kvf_page_pool_table_bytes(pool->block_count));
    if (!pool->tables)
        KVF_FAIL(pool->context, KVF_OUT_OF_MEMORY, "no memory for the tables of %u host blocks",
                 pool->block_count);
    carve(pool, &(kvf_carver){.base = pool->tables});
    for (uint32_t i = 0; i < pool->block_count; i++)
        pool->next[i] = i + 1 < pool->block_count ? i + 1 : NONE;
    pool->free_head = 0;
    pool->free_count = pool->block_count;
    return KVF_OK;
}

kvf_status kvf_page_pool_create(kvf_context *context, kvf_device *device,
                                const kvf_host_memory_config *memory, size_t block_bytes,
                                uint32_t block_count, kvf_page_pool *out)
{
    memset(out, 0, sizeof *out);
    if (block_bytes == 0 || block_bytes > KVF_ARENA_BYTES_MAX || block_bytes % 64 != 0)
        KVF_FAIL(context, KVF_INVALID,
                 "a host block of %zu bytes: it must be a multiple of 64 and at most 1 GiB; "
                 "lower page_size or kv_heads",
                 block_bytes);
    if (block_count == 0 || block_count == NONE)
        KVF_FAIL(context, KVF_INVALID, "a pool of %u blocks; it must be 1 to %u", block_count,
                 NONE - 1);
    kvf_page_pool pool = {.context = context,
                          .block_bytes = block_bytes,
                          .block_count = block_count,
                          .free_head = NONE};
    kvf_host_memory_config config = *memory;
    config.bytes = (uint64_t)block_bytes * block_count;
    config.granule = block_bytes;
    pool.blocks_per_arena = (uint32_t)(kvf_arena_bytes(&config) / block_bytes);
    kvf_status status = take_tables(&pool);
    if (status == KVF_OK)
        status = kvf_host_memory_create(context, device, &config, &pool.memory);
    if (status != KVF_OK) {
        kvf_page_pool_destroy(&pool);
        return status;
    }
    *out = pool;
    KVF_ASSERT_WALK(kvf_page_pool_is_valid(out));
    return KVF_OK;
}

void kvf_page_pool_destroy(kvf_page_pool *pool)
{
    if (!pool || !pool->context)
        return;
    kvf_host_memory_destroy(pool->context, &pool->memory);
    kvf_free(pool->context, pool->tables);
    memset(pool, 0, sizeof *pool);
}

kvf_status kvf_page_pool_acquire(kvf_page_pool *pool, kvf_block *out)
{
    *out = KVF_BLOCK_NONE;
    if (pool->free_count == 0)
        return KVF_FULL;
    uint32_t index = pool->free_head;
    KVF_ASSERT(index < pool->block_count && pool->references[index] == 0);
    pool->free_head = pool->next[index];
    pool->next[index] = NONE;
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
    pool->next[block.index] = pool->free_head;
    pool->free_head = block.index;
    pool->free_count++;
    KVF_ASSERT_WALK(kvf_page_pool_is_valid(pool));
}

uint32_t kvf_page_pool_references(const kvf_page_pool *pool, kvf_block block)
{
    KVF_ASSERT(block.index < pool->block_count);
    return pool->references[block.index];
}

void *kvf_page_pool_host(const kvf_page_pool *pool, kvf_block block)
{
    KVF_ASSERT_DEBUG(block.index < pool->block_count);
    const kvf_arena *arena = &pool->memory.arenas[block.index / pool->blocks_per_arena];
    return arena->host + (size_t)(block.index % pool->blocks_per_arena) * pool->block_bytes;
}

void *kvf_page_pool_device(const kvf_page_pool *pool, kvf_block block)
{
    KVF_ASSERT_DEBUG(block.index < pool->block_count);
    const kvf_arena *arena = &pool->memory.arenas[block.index / pool->blocks_per_arena];
    return arena->device + (size_t)(block.index % pool->blocks_per_arena) * pool->block_bytes;
}

int kvf_page_pool_is_valid(const kvf_page_pool *pool)
{
    uint32_t used = 0;
    for (uint32_t i = 0; i < pool->block_count; i++)
        used += pool->references[i] > 0;
    if (used + pool->free_count != pool->block_count)
        return 0;
    /* free_count steps that each find a free block, then the end: with no way back, each is there
     * once. */
    uint32_t at = pool->free_head;
    for (uint32_t i = 0; i < pool->free_count; i++) {
        if (at >= pool->block_count || pool->references[at] != 0)
            return 0;
        at = pool->next[at];
    }
    return at == NONE;
}
