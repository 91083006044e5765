/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_OFFLOAD_PAGE_POOL_H
#define KVF_OFFLOAD_PAGE_POOL_H

/*
 * The host page pool: fixed-size blocks over host memory, counted references, constant time.
 *
 * A block is the pages of all KV heads of one token range; here it is opaque bytes. A block id
 * stays valid from acquire to the last release. Not thread-safe: the cache that owns it serialises.
 *
 * Invariant: free_count + (blocks with references > 0) == block_count, and every free block is on
 * the free list exactly once. The free list hands out the lowest ids first in a fresh pool, so that
 * a sequence that is written once lies contiguously.
 */

#include "host_memory.h"

typedef struct kvf_block {
    uint32_t index;
} kvf_block;

#define KVF_BLOCK_NONE ((kvf_block){UINT32_MAX})

typedef struct kvf_page_pool {
    kvf_context *context;
    kvf_host_memory memory;
    size_t block_bytes;
    uint32_t blocks_per_arena;
    uint32_t block_count;
    uint32_t free_count;
    uint32_t free_head; /* UINT32_MAX = none */
    char *tables;
    uint32_t *next;       /* [block_count] free list */
    uint32_t *references; /* [block_count] */
} kvf_page_pool;

KVF_CHECKED kvf_status kvf_page_pool_create(kvf_context *context, kvf_device *device,
                                            const kvf_host_memory_config *memory,
                                            size_t block_bytes, uint32_t block_count,
                                            kvf_page_pool *out);
void kvf_page_pool_destroy(kvf_page_pool *pool);
/* What its tables take, besides the blocks. */
uint64_t kvf_page_pool_table_bytes(uint32_t block_count);

/* KVF_FULL when none is free (without a message: the caller knows the field). References = 1. */
KVF_CHECKED kvf_status kvf_page_pool_acquire(kvf_page_pool *pool, kvf_block *out);
void kvf_page_pool_share(kvf_page_pool *pool, kvf_block block);   /* references + 1 */
void kvf_page_pool_release(kvf_page_pool *pool, kvf_block block); /* references - 1, free at 0 */
uint32_t kvf_page_pool_references(const kvf_page_pool *pool, kvf_block block);

void *kvf_page_pool_host(const kvf_page_pool *pool, kvf_block block);   /* CPU address */
void *kvf_page_pool_device(const kvf_page_pool *pool, kvf_block block); /* device alias */

/* Walks everything; 1 if the invariant holds. */
int kvf_page_pool_is_valid(const kvf_page_pool *pool);

#endif
