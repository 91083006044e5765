/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_RUNTIME_MASKED_H
#define KVF_RUNTIME_MASKED_H

/*
 * A cache with a head mask: some KV heads of a layer retrieve, the others only stream.
 *
 * It is a cache around caches. For every number r > 0 of retrieval heads that a layer may have
 * there is an inner cache with r KV heads, whose layers are the layers with that r: it knows
 * nothing of masks. Streaming heads live in rings on the device (streaming_heads.c). A call on the
 * outer cache packs the heads of each kind, lets both attend, and puts the outputs together; a
 * layer of one kind is passed on as it is.
 *
 * The outer kvf_cache has sequences, lengths, positions, frames and fault words of its own; its
 * pool, residency and transfer do not exist. With a disk tier every inner cache has a share of
 * host_bytes and a file. Invariants: inner sequences hold as many tokens as
 * the outer one in every layer that they have; `sealed` of the outer cache's layers is 0.
 */

#include "cache.h"
#include "paging.h"

typedef struct kvf_masked_part {
    kvf_cache *cache; /* kv_heads = heads */
    kvf_cache *outer;
    uint32_t heads;
    uint32_t layers;
    uint32_t *layer_of; /* [layers] layer of the outer cache */
} kvf_masked_part;

typedef struct kvf_masked_layer {
    uint32_t retrieval; /* heads; retrieval + streaming == kv_heads */
    uint32_t streaming;
    uint32_t part; /* its inner cache, and the layer there; unused if retrieval is 0 */
    uint32_t inner;
    const uint32_t *heads; /* [kv_heads] retrieval heads, then streaming heads, each ascending */
    char *rings;           /* [sequences_max, blocks, streaming, page bytes] */
    uint64_t steps;        /* decode steps since the last reset, all heads */
    uint64_t attended;     /* tokens, by streaming heads in them */
} kvf_masked_layer;

typedef struct kvf_masked_sizes {
    kvf_ring ring;          /* heads is that of each layer */
    uint32_t group;         /* query heads per KV head */
    uint32_t blocks;        /* of a ring, those of the sink included */
    uint32_t chunk_blocks;  /* pages that a chunk touches at most */
    uint32_t window_blocks; /* pages that a chunk attends to at most */
    uint32_t split;         /* spans per split of a decode step */
    uint32_t parts;
    uint32_t streaming_max; /* most of a layer */
    uint32_t packed[2];     /* most retrieval and streaming heads of a layer that has both kinds */
} kvf_masked_sizes;

/* With a disk tier: all pages, and what of them must be in memory at least. */
typedef struct kvf_part_pages {
    uint64_t bytes, least;
} kvf_part_pages;

struct kvf_masked {
    kvf_masked_sizes sizes;
    /* in host memory */
    uint8_t *mask;            /* [layers, kv_heads], a copy */
    uint32_t *heads;          /* [layers, kv_heads], see kvf_masked_layer */
    uint32_t *layer_of;       /* [layers], of all parts */
    kvf_masked_layer *layers; /* [layers] */
    kvf_masked_part *parts;   /* [sizes.parts] */
    kvf_sequence **inner;     /* [sequences_max, parts] */
    kvf_sequence **batch;     /* [sequences_max], of a call */
    /* in device memory, besides those tables of the outer cache that are not NULL; rows = tokens of
     * the longest chunk, or sequences_max */
    char *chunk;   /* [chunk_blocks, streaming_max, page bytes] */
    char *q[2];    /* [rows, packed, group, head_dim]: of retrieval heads, of streaming heads */
    char *k[2];    /* [rows, packed, head_dim] */
    char *v[2];    /* [rows, packed, head_dim] */
    char *out[2];  /* [rows, packed, group, head_dim] */
    float *lse[2]; /* [sequences_max, packed, group] */

    kvf_part_pages pages[]; /* [kv_heads + 1]: of the part with so many heads; at 0 of all */
};

/* cache->masked, plan and dims of the outer cache, and the bytes of its reservations. The resolved
 * mask has at least one streaming head; `config` is as the user gave it. */
KVF_CHECKED kvf_status kvf_masked_plan(kvf_cache *cache, const kvf_cache_config *config,
                                       kvf_reservation *r);
/* Every reservation, and the inner caches. A copy of the mask goes into the outer config. */
KVF_CHECKED kvf_status kvf_masked_reserve(kvf_cache *cache, const kvf_cache_config *config,
                                          kvf_reservation *r);
/* What is around the outer cache; half of it is fine. Waits for calls. */
void kvf_masked_close(kvf_cache *cache);

/* Sequences with their inner ones. */
KVF_CHECKED kvf_status kvf_masked_begin(kvf_cache *cache, kvf_sequence **out);
KVF_CHECKED kvf_status kvf_masked_fork(kvf_cache *cache, kvf_sequence *parent, kvf_stream *stream,
                                       kvf_sequence **out);
void kvf_masked_end(kvf_sequence *sequence);
/* KVF_OK, or the refusal of what comes after a key or value that is not finite. */
KVF_CHECKED kvf_status kvf_masked_usable(kvf_cache *cache, const kvf_sequence *sequence);
/* [parts] of the inner caches. */
kvf_sequence **kvf_masked_inner(const kvf_sequence *sequence);

/* Who has the pages of a layer: a cache without a mask itself, else an inner one; cache NULL:
 * nobody, the layer has streaming heads only. */
typedef struct kvf_masked_row {
    kvf_cache *cache;
    kvf_sequence *sequence;
    uint32_t layer;
} kvf_masked_row;
kvf_masked_row kvf_masked_row_of(kvf_cache *cache, kvf_sequence *sequence, uint32_t layer);
kvf_cache *kvf_masked_pages_of(kvf_cache *cache, uint32_t layer); /* likewise, of any sequence */
/* Caches that have pages, by number; NULL behind the last. */
kvf_cache *kvf_masked_pages(kvf_cache *cache, uint32_t index);
/* Some of these have pages on disk. */
bool kvf_masked_has_tier(kvf_cache *cache);

/* Pages of a retrieval head; NULL for a streaming head. */
const void *kvf_masked_page_address(const kvf_sequence *sequence, uint32_t layer, uint32_t kv_head,
                                    uint32_t page);

void kvf_masked_stats(const kvf_cache *cache, kvf_stats *stats);
void kvf_masked_layer_stats(const kvf_cache *cache, uint32_t layer, kvf_stats *stats);
void kvf_masked_stats_reset(kvf_cache *cache);

#endif
