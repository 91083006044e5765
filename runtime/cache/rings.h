/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_RUNTIME_RINGS_H
#define KVF_RUNTIME_RINGS_H

/*
 * Streaming heads of a cache with a head mask: which heads of a layer they are, the rings that hold
 * their first and newest tokens, and room to pack heads of both kinds.
 *
 * Knows sizes and places, and nothing of what a call does with them. A ring has the pages of the
 * sink and the newest pages; it does not grow.
 */

#include "cache.h"

typedef struct kvf_rings_layer {
    kvf_ring ring; /* of its streaming heads; the others are in the layer's KV group */
    char *blocks;  /* [sequences_max, kvf_ring_total, heads, page bytes] */
} kvf_rings_layer;

struct kvf_rings {
    kvf_shape shape;        /* of a page, which is a run */
    uint32_t group;         /* query heads per KV head */
    uint32_t blocks;        /* of the longest ring, those of the sink included */
    uint32_t chunk_blocks;  /* pages that a chunk touches at most */
    uint32_t tile_blocks;   /* pages whose keys a chunk sums together */
    uint32_t window_blocks; /* pages that a chunk attends to at most */
    uint32_t splits_max;    /* of a list of a decode step */
    uint32_t streaming_max; /* most of a layer */
    uint32_t packed[2];     /* most retrieval and streaming heads of a layer that has both kinds */
    /* in host memory, of their own */
    uint32_t *heads;         /* [layers, kv_heads], see kvf_layer_group */
    kvf_rings_layer *layers; /* [layers] */
    /* in device memory; tokens of the longest chunk, or of a step of all sequences */
    char *chunk;   /* [chunk_blocks, streaming_max, page bytes] */
    char *hidden;  /* [streaming_max, page bytes] zeros, as it came: pages that no query sees */
    char *q[2];    /* [tokens, packed, group, head_dim]: of retrieval heads, of streaming heads */
    char *k[2];    /* [tokens, packed, head_dim] */
    char *v[2];    /* [tokens, packed, value_dim] */
    char *out[2];  /* [tokens, packed, group, value_dim] */
    float *lse[2]; /* [sequences_max, packed, group] */
    kvf_span *spans;
    uint32_t *span_count;
    float *partial_o, *partial_lse;
    uint32_t *chunk_fault; /* [1] */
};

/* cache->rings, if the resolved mask has a streaming head. `paging` is of all
 * heads. */
KVF_CHECKED kvf_status kvf_rings_create(kvf_cache *cache, const kvf_paging *paging);
/* KVF_INVALID: more than any memory. */
KVF_CHECKED kvf_status kvf_rings_check(kvf_cache *cache);
/* The ring of a layer whose window is not 0, of one head; `paging` as above. */
kvf_ring kvf_ring_of(const kvf_cache_config *config, const kvf_paging *paging, uint32_t layer);
/* Splits of a step over a ring. */
uint32_t kvf_ring_splits(const kvf_ring *ring);
/* Every array to its place; nothing where there are no rings. */
void kvf_rings_carve(kvf_cache *cache, kvf_reservation *r);
void kvf_rings_destroy(kvf_cache *cache);

/* Bytes of the ring of one sequence. */
size_t kvf_ring_bytes(const kvf_cache *cache, uint32_t layer);
/* Heads of a layer that stream. */
uint32_t kvf_streaming_count(const kvf_cache *cache, uint32_t layer);

#endif
