/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_RUNTIME_BLOCK_STORE_H
#define KVF_RUNTIME_BLOCK_STORE_H

/*
 * Pages under block tables of the caller: what kvf_blocks is made of, and its calls.
 *
 * It stands on one KV group of a cache that has no sequences: the pool, whose blocks (physical
 * blocks) lie where the caller's ids say; slots, rings and stores of its rows, which are regions
 * here; and the tables of a step. Rows are made on the device (kernel `rows`), from tables and
 * lengths that the host never sees, and what regions have is proven there (kernel `validate`).
 *
 * Invariant: a tag of a region that agrees with its physical block's count of writes stands for
 * what the physical block has of its tokens.
 */

#include <kvferry/blocks.h>

#include "blocks/blocks_args.h"
#include "cache.h"

/* Where the codes of a layer are. */
typedef struct kvf_block_binding {
    char *codes; /* NULL = not bound */
    size_t stride;
} kvf_block_binding;

/* Arguments that are the same in all calls: written once, on the host, and copied. With coarse
 * heads rows say list_bits anew. */
typedef struct kvf_block_constants {
    kvf_physical_blocks *physical;
    char **arenas;
    const uint64_t **list_bits; /* [sequences_max * kv_heads] */
    uint64_t *bits;             /* [kv_heads, blocks_max] */
    uint32_t *coarse;           /* [layers, kv_heads], see kvf_physical_blocks */
    uint32_t *streaming;        /* likewise */
    void **scratch;             /* [scratch_blocks] what chunks attend to; see kvf_block_prefill */
} kvf_block_constants;

/* Tails of a layer; ring.heads is 0 where no head streams. See kvf_gather_window_args. */
typedef struct kvf_block_tail {
    kvf_ring ring;
    uint64_t first;
} kvf_block_tail;

/* To attend with streaming heads: room of one call. Pieces of a chunk have so many tokens. */
#define KVF_BLOCK_PIECE 256u
typedef struct kvf_block_tails {
    kvf_block_tail *of;   /* [layers], on the host, or NULL */
    uint32_t blocks;      /* of the longest */
    uint32_t splits_max;  /* of a list */
    kvf_span *spans;      /* [regions * kv_heads, blocks] */
    uint32_t *span_count; /* [regions * kv_heads] */
    float *partial_o;     /* [splits, group, value_dim] */
    float *partial_lse;   /* [splits, group] */
    char *out;            /* [regions or a piece, query_heads, value_dim] */
    float *lse;           /* [as out, query_heads] */
} kvf_block_tails;

struct kvf_blocks {
    kvf_context *context;
    kvf_cache *cache; /* its settings, its order of calls, its one KV group */
    kvf_blocks_config config;
    kvf_blocks_plan plan;
    kvf_physical_blocks physical;  /* as the device has them */
    kvf_block_constants constants; /* of the device */
    kvf_block_tails tails;         /* likewise; without streaming heads all 0 */
    uint8_t *kinds;                /* [layers, kv_heads] head_mask as it was given, or NULL */
    uint64_t bytes;                /* of what follows */
    char *memory;                  /* of the device */
    kvf_block_binding *bindings;   /* [layers] */
    uint64_t *nonfinite;           /* [physical blocks of a layer] of a get, on the host */
};

/* Settings and sizes; *out is to be destroyed even on failure. */
KVF_CHECKED kvf_status kvf_block_store_create(kvf_runtime *runtime, const kvf_blocks_config *config,
                                              kvf_reservation *r, kvf_blocks **out);
/* Then every reservation it will ever make. */
KVF_CHECKED kvf_status kvf_block_store_reserve(kvf_blocks *blocks, kvf_reservation *r);
void kvf_block_store_destroy(kvf_blocks *blocks); /* NULL is fine, and half of it */

/* Arguments were checked. They enqueue. */
KVF_CHECKED kvf_status kvf_block_write(kvf_blocks *blocks, const kvf_blocks_put_args *args,
                                       kvf_stream *stream);
/* This one waits. */
KVF_CHECKED kvf_status kvf_block_read(kvf_blocks *blocks, const kvf_blocks_get_args *args,
                                      kvf_stream *stream);
KVF_CHECKED kvf_status kvf_block_step(kvf_blocks *blocks, const kvf_blocks_decode_args *args,
                                      kvf_stream *stream);
/* Chunks of the rows `row` and after it of a call. */
KVF_CHECKED kvf_status kvf_block_prefill(kvf_blocks *blocks, const kvf_blocks_extend_args *args,
                                         uint32_t row, const kvf_query_chunks *chunks,
                                         kvf_stream *stream);
KVF_CHECKED kvf_status kvf_block_clone(kvf_blocks *blocks, uint32_t from, uint32_t to,
                                       kvf_stream *stream);

#endif
