/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_OFFLOAD_PAGE_POOL_H
#define KVF_OFFLOAD_PAGE_POOL_H

/*
 * The host page pool: fixed-size blocks over host memory, counted references, constant time; and
 * the device's cache of its pages.
 *
 * A block is the pages of all KV heads of one token range; here it is opaque bytes. A block id
 * stays valid from acquire to the last release. Not thread-safe: the cache that owns it serialises.
 *
 * Blocks are handed out from bundles: block_count / bundle_blocks groups of neighbours, one block
 * each unless there is a disk tier. With a tier the blocks lie in bundles of it, and only those in
 * memory have an address; see disk_tier.h.
 *
 * Invariant: free_count + (blocks with references > 0) == block_count, and a bundle is on the free
 * list, once, iff none of its blocks has references. The list hands out the lowest ids first in a
 * fresh pool, so that a sequence that is written once lies contiguously.
 */

#include "common/carve.h"
#include "device.h"
#include "disk_tier.h"

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
    uint32_t bundle_blocks; /* 1 without a tier */
    uint32_t free_count;
    uint32_t free_head; /* a bundle; UINT32_MAX = none */
    uint32_t free_look; /* a block: where to look for single ones */
    char *tables;
    uint32_t *next;       /* [bundles] free list */
    uint32_t *live;       /* [bundles] blocks with references */
    uint32_t *references; /* [block_count] */
    kvf_disk_tier *tier;  /* NULL = every block has an address */
} kvf_page_pool;

/*
 * The disk tier, which makes a pool larger than its memory; the sizes follow from those of a block.
 */
typedef struct kvf_page_pool_disk {
    const char *folder;
    const kvf_io_ops *engine;
    uint32_t bundle_blocks;
    uint32_t page_frames;
    uint32_t groups; /* of the tier */
    kvf_status (*drain)(void *user);
    void *user;
} kvf_page_pool_disk;

/* `disk` NULL: all blocks lie in memory. Else block_count is a multiple of disk->bundle_blocks. The
 * pool stays at `out`: a tier knows its memory by that address. */
KVF_CHECKED kvf_status kvf_page_pool_create(kvf_context *context, kvf_device *device,
                                            const kvf_host_memory_config *memory,
                                            const kvf_page_pool_disk *disk, size_t block_bytes,
                                            uint32_t block_count, kvf_page_pool *out);
void kvf_page_pool_destroy(kvf_page_pool *pool);
/* Bytes of its tables, besides the blocks. Without a disk: bundles of 1 block, and 0 page frames.
 */
uint64_t kvf_page_pool_table_bytes(uint32_t block_count, uint32_t bundle_blocks,
                                   uint32_t page_frames, uint32_t groups);
/* Bytes of a bundle, in memory and in the file. */
size_t kvf_page_pool_bundle_bytes(size_t block_bytes, uint32_t bundle_blocks);

/* The block after `near` (which may be KVF_BLOCK_NONE) if it is free and of the same bundle, else
 * one of a bundle that nobody has blocks of, while there is any. References = 1. KVF_FULL when none
 * is free, without a message: the caller knows the field. */
KVF_CHECKED kvf_status kvf_page_pool_acquire_near(kvf_page_pool *pool, kvf_block near,
                                                  kvf_block *out);
void kvf_page_pool_share(kvf_page_pool *pool, kvf_block block);   /* references + 1 */
void kvf_page_pool_release(kvf_page_pool *pool, kvf_block block); /* references - 1, free at 0 */
uint32_t kvf_page_pool_references(const kvf_page_pool *pool, kvf_block block);

/* Addresses for the CPU and for the device; NULL if the block is not in memory. */
void *kvf_page_pool_host(const kvf_page_pool *pool, kvf_block block);
void *kvf_page_pool_device(const kvf_page_pool *pool, kvf_block block);
/* For the CPU, as long as the block is held; NULL if it has no address that lasts. Its bytes can be
 * copied then. */
void *kvf_page_pool_lasting(const kvf_page_pool *pool, kvf_block block);

/* ---- the door: blocks of a pool that is larger than its memory ----
 * Such a block is addressable from the bring after it was wanted until the next call; disk_tier.h
 * says more of each function. Where all blocks lie in memory, these do nothing and succeed. */

/* False: every block has an address for as long as it is held. */
static inline bool kvf_page_pool_spills(const kvf_page_pool *pool)
{
    return pool->tier != NULL;
}
static inline uint32_t kvf_page_pool_bundle(const kvf_page_pool *pool, kvf_block block)
{
    return block.index / pool->bundle_blocks;
}
/* A call begins: blocks that the one before wanted are free again. */
void kvf_page_pool_call(kvf_page_pool *pool);
/* It ends: what may soon have to go begins to be written. */
void kvf_page_pool_start_writes(kvf_page_pool *pool);
void kvf_page_pool_want(kvf_page_pool *pool, kvf_block block, uint32_t group);
bool kvf_page_pool_ask(kvf_page_pool *pool); /* true: some are still being read */
KVF_CHECKED kvf_status kvf_page_pool_bring(kvf_page_pool *pool);
/* The block was brought, and what the call enqueues writes it. */
void kvf_page_pool_write(kvf_page_pool *pool, kvf_block block);
/* In a pool that spills: a block's address on the device also while the block is still being read,
 * whether it is, and the number of its latest arrival in memory; then that of all blocks. */
void *kvf_page_pool_place(const kvf_page_pool *pool, kvf_block block);
bool kvf_page_pool_is_coming(const kvf_page_pool *pool, kvf_block block);
uint64_t kvf_page_pool_arrival(const kvf_page_pool *pool, kvf_block block);
uint64_t kvf_page_pool_arrivals(const kvf_page_pool *pool);
void kvf_page_pool_stats(const kvf_page_pool *pool, kvf_disk_stats *out); /* zeros if it does not */
void kvf_page_pool_stats_reset(kvf_page_pool *pool);

/* Bytes of a block, wherever they are. Thread: any, while it is held. */
KVF_CHECKED kvf_status kvf_page_pool_copy_out(const kvf_page_pool *pool, kvf_context *context,
                                              kvf_block block, size_t offset, size_t bytes,
                                              char *to);
KVF_CHECKED kvf_status kvf_page_pool_copy_in(kvf_page_pool *pool, kvf_block block, size_t offset,
                                             size_t bytes, const char *from);

/* Walks everything: whether the invariant holds. */
bool kvf_page_pool_is_valid(const kvf_page_pool *pool);

/*
 * The device cache of pages of a pool: per KV head, which pages have a copy in which slots.
 *
 * All of it lives on the device and is changed there, by the kernels resolve and admit (slots.h
 * says how); this file only reserves and clears it. Slots without bytes (`slot_bytes` 0, for
 * `direct`) still keep the tables, so that hits and misses mean the same with every transfer
 * method.
 *
 * Invariant between calls, per head: words[s] is of page p  <=>  slot_of_page[p] == s.
 */

typedef struct kvf_residency {
    kvf_device *device;
    uint32_t heads;
    uint32_t pages;     /* of the pool, per head */
    uint32_t slots;     /* per head, a multiple of KVF_SLOT_WAYS */
    uint32_t is_tagged; /* 1: tokens may be written again */
    size_t slot_bytes;
    uint32_t clock; /* number of the latest call */
    char *tables;
    int32_t *slot_of_page; /* device [heads, pages] */
    uint64_t *words;       /* device [heads, slots] */
    uint32_t *tags;        /* device [heads, slots]; NULL unless tagged */
    char *slot_memory;     /* device [heads, slots, slot_bytes]; NULL if slot_bytes == 0 */
} kvf_residency;

/* Reserves what `shape` says; its addresses are not looked at. */
KVF_CHECKED kvf_status kvf_residency_create(const kvf_residency *shape, kvf_residency *out);
void kvf_residency_destroy(kvf_residency *residency);
/* Added to what it will take in device memory. */
void kvf_residency_needs(const kvf_residency *shape, kvf_carver *tables, kvf_carver *slot_memory);

/* Forget everything, in stream order. */
KVF_CHECKED kvf_status kvf_residency_clear(const kvf_residency *residency, kvf_stream *stream);

/* Walks the tables of one head, copied to where the caller can read them: whether the invariant
 * holds. */
bool kvf_residency_is_valid(const kvf_residency *residency, const int32_t *slot_of_page,
                            const uint64_t *words);

#endif
