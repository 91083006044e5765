/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_RUNTIME_CHUNK_H
#define KVF_RUNTIME_CHUNK_H

/*
 * The five ways of a chunk of a prompt. All of them put its keys and values into blocks that a
 * table names, seal what is complete, and attend by the kernel `prefill` over such a table; they
 * differ in where these blocks are:
 *
 *   in the pool       pages are attended where they live            prefill.c
 *   in the arena      pages are moved to be attended                prefill.c, prefill_arena.h
 *   quantized         room for one row in full precision            prefill_quantized.h
 *   streaming heads   pages beside the ring                         streaming_heads.h
 *   caller's blocks   under block tables, rows in one launch        block_store.h
 *
 * A KV group takes one of the first three (kvf_chunk_way), streaming heads of the same layer go
 * beside it, and a cache under block tables knows the last one alone.
 */

#include "call.h"

typedef enum kvf_chunk_way {
    KVF_CHUNK_IN_POOL,
    KVF_CHUNK_IN_ARENA,
    KVF_CHUNK_QUANTIZED,
} kvf_chunk_way;

static inline kvf_chunk_way kvf_chunk_way_of(const kvf_kv_group *kv_group)
{
    return kvf_quantizes_pages(kv_group) ? KVF_CHUNK_QUANTIZED
           : kv_group->dims.arena_blocks ? KVF_CHUNK_IN_ARENA
                                         : KVF_CHUNK_IN_POOL;
}

/* A chunk that begins at token `base` into blocks of a table on the device, noting what is not
 * finite; and its attention over them, if it has queries. */
KVF_CHECKED kvf_status kvf_chunk_repack(kvf_call *call, const kvf_prefill_args *args, uint32_t base,
                                        void *const *blocks);
KVF_CHECKED kvf_status kvf_chunk_attend(kvf_call *call, const kvf_prefill_args *args, uint32_t base,
                                        void *const *blocks);

#endif
