/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_KERNELS_BLOCKS_ARGS_H
#define KVF_KERNELS_BLOCKS_ARGS_H

/*
 * Contracts, arguments and tasks: tokens under block tables of the caller.
 * See kernels.h for what holds for every kernel.
 *
 * A *physical block* is a block that the caller's table names: id_blocks of them, side by side,
 * are what the caller calls a block. Physical block c of a layer always lies at the same
 * place of the pool, has the same codes and scales, and counts of writes: writes[c][t] rises
 * whenever token t is written.
 *
 * A *region* is room on the device for one row: a ring for the window, a store for the sink. A
 * token there has a tag: the physical block that it came from, and how often its tokens had been
 * written. It counts iff the row's table names that physical block there and the counts are what
 * they were. So nobody has to tell a region that its row, a block, or what a block holds has
 * changed. The same holds for copies of pages in the device cache, which belong to physical blocks
 * and not to rows.
 *
 * With coarse heads a segment is whole within a block of the caller: of KVF_CENTROID_TOKENS /
 * block_size physical blocks, the first of which is a multiple of that. So its centroid belongs to
 * these physical blocks, too, and is made again when a step ranks it and a token of it was written
 * since.
 *
 * A streaming head has its tokens in the physical blocks as others have, and a *tail* in every
 * region: first and newest tokens, with tags. Its list is idle: it scores, chooses and keeps
 * nothing.
 *
 * A physical block has the storage format of pages. Where that is quantized, tokens are quantized
 * when they are written, and what a region has of sink, window and tails is what comes back of
 * them, in full precision.
 */

#include "move/move_args.h"
#include "score/score_args.h"
#include "select/select_args.h"

#include <string.h>

typedef struct kvf_physical_tag {
    uint32_t block;  /* + 1; 0 = nothing */
    uint32_t writes; /* of all tokens that it covers, added up */
} kvf_physical_tag;

/* Coarse heads: centroids, and the segments that they rank. */
typedef struct kvf_physical_coarse {
    uint32_t segments;      /* of all physical blocks */
    const uint32_t *number; /* [layers, kv_heads] of a coarse head, or UINT32_MAX */
    int8_t *centroids;      /* [coarse heads, segments, head_dim] */
    uint16_t *scales;       /* [coarse heads, segments] */
    uint32_t *is_centroid;  /* [layers, segments] 1: centroids are of what the tokens are now */
    uint32_t *count;        /* of one call, down to filtered: [regions * lists]; see kvf_call */
    uint32_t *take;
    uint32_t *blocks;
    const uint64_t **unfiltered;
    uint64_t *filtered; /* [regions * lists, blocks_max] */
} kvf_physical_coarse;

/* Streaming heads: their tails. */
typedef struct kvf_physical_streaming {
    const uint32_t *number; /* [layers, kv_heads] 1 + number of the layer's streaming head, or 0 */
    uint64_t blocks;        /* of all tails of a region, layer by layer */
    char *tails;            /* [regions, blocks, run bytes]; NULL = they are attended in the
                               physical blocks */
    kvf_physical_tag *tags; /* [regions, blocks, block_size] */
} kvf_physical_streaming;

/* One description of all of it, in device memory; its arrays are, too. rows of a call <= regions.
 * blocks = ids * id_blocks; lists == kv_heads. */
typedef struct kvf_physical_blocks {
    kvf_paging paging; /* of a row */
    uint32_t regions;
    uint32_t layers;
    uint32_t ids;          /* blocks of the caller */
    uint32_t id_blocks;    /* physical blocks of each */
    uint32_t arena_blocks; /* of the pool: physical block c of layer l is number l * blocks + c */
    uint32_t tokens_max;
    uint32_t budget_tokens;
    float budget_share; /* of a row's tokens, if that is more */
    float coarse_share; /* of the segments that a coarse head ranks */
    uint32_t local_tokens;
    uint32_t dynamic_pages; /* 0, or the policy takes all pages: what every row chooses, at most */
    uint32_t all_pages;
    uint32_t ignores_writes; /* 1: counts no writes, 2: centroids stay; for tests alone */
    char *const *arenas;
    uint16_t *scales;    /* [layers, blocks, kv_heads, block_size] */
    uint32_t *writes;    /* [layers, blocks, block_size] */
    uint64_t *nonfinite; /* [layers, blocks] bit t: token t is not finite */

    kvf_physical_coarse coarse;       /* where paging.segments_max is not 0 */
    const uint64_t **list_bits;       /* [regions * lists] */
    kvf_physical_streaming streaming; /* where its `number` is not NULL */

    /* of a region */
    char *rings;     /* [regions, layers, ring_blocks, block bytes]; NULL = attended in the physical
                        blocks */
    char *static_kv; /* [regions, layers, kv_heads, static_pages, page bytes] */
    kvf_physical_tag *token_tags; /* [regions, layers, kv_heads, kvf_region_tokens()] */

    /* of all rows: the device cache of pages, see slots.h. Physical block c of layer l is block l *
     * blocks + c of the pool. */
    char *slots; /* NULL = no bytes */
    int32_t *slot_of_page;
    uint64_t *slot_words;
    uint32_t *slot_tags;
    uint32_t *clock; /* [1] number of the next call */

    /* of one call */
    kvf_row *row;                 /* [regions] */
    void **blocks;                /* [regions, blocks_max] */
    uint32_t *physical;           /* [regions, blocks_max] of what is sealed */
    uint32_t *static_count;       /* [regions, kv_heads] */
    uint64_t *bits;               /* [kv_heads, blocks_max] of the sink, the same for all rows */
    uint32_t *pages;              /* [regions * lists] that may be chosen */
    uint32_t *choose;             /* [regions * lists] of which so many are */
    uint32_t *region;             /* [regions] that the row has */
    uint32_t *is_bad;             /* [regions] 0, or 1 + the first token without an answer */
    kvf_layer_counters *counters; /* [layers] added to, atomically */
} kvf_physical_blocks;

/* Where physical blocks live, for who is given it beside the description: nobody waits for that
 * then. */
typedef struct kvf_physical_pool {
    char *const *arenas;
    size_t block_bytes;    /* in storage format */
    uint32_t arena_blocks; /* layer by layer, of all arenas */
    uint32_t blocks;       /* of a layer */
    uint32_t block_size;
} kvf_physical_pool;

/* Tokens of a region that are kept one by one: the sink, then the ring. */
KVF_INLINE uint32_t kvf_region_tokens(const kvf_paging *p)
{
    return p->sink + p->ring_blocks * p->block_size;
}

/* ---- write: new tokens of a layer, into their physical blocks ----
 * The call is counted. Key and value to the physical block, in storage format, the code of what the
 * physical block has of the key to its group; the token's count of writes rises, and the centroid
 * of its segment counts no more. If any of the token's keys and values is not finite, its nonfinite
 * bit is set and it is all zeros, so that tokens before it, which do not see it, keep their
 * answers. A slot below 0 is left out, one after the last physical block is left out and counted.
 * No slot is given twice. A task is KVF_WRITE_TOKENS tokens. */
#define KVF_WRITE_TOKENS 16u
typedef struct kvf_write_args {
    const kvf_physical_blocks *blocks;
    kvf_physical_pool pool; /* theirs */
    kvf_physical_codes codes;
    kvf_shape shape; /* of the physical blocks */
    uint32_t layer;
    uint32_t tokens;
    uint32_t is_wide; /* 1: k and v are fp32, rounded to the element type as they are read */
    const void *k;    /* [tokens] of [kv_heads, head_dim], k_stride elements apart */
    const void *v;    /* [tokens] of [kv_heads, value_dim] */
    size_t k_stride;
    size_t v_stride;
    const int64_t *slots; /* [tokens] physical block * block_size + token */
} kvf_write_args;
KVF_TASKS(write, kvf_write_args, kvf_div_ceil_u32(a->tokens, KVF_WRITE_TOKENS))

/* ---- admit_written: exact pages that a call of write has written, into slots, after it ----
 * Only pages all of whose tokens the call had, consecutive ones: prompts. They were used by the
 * call before the next one, so whatever comes may have their slots. Heads that are idle have none.
 * One task per KV head. */
KVF_TASKS(admit_written, kvf_write_args, a->codes.kv_heads)

/* ---- rows: the caller's tables and lengths as rows, and what is asked of every list ----
 * A row of length 0 attends to nothing. So does one that is bad: a length below 0, above tokens_max
 * or not that of its chunk; a table that is shorter than the length; an id that there is not; a
 * region that there is not, or that an earlier row with a length has; a token that is not finite.
 * It is counted, and is_bad says so. With chunks, a row that is bad because of a token after the
 * first is as any row; the blocks of others are all the layer's first physical block. A task is a
 * row. */
typedef struct kvf_rows_args {
    const kvf_physical_blocks *blocks;
    uint32_t layer;
    uint32_t rows;
    uint32_t table_stride;
    const int32_t *table;    /* [rows, table_stride] */
    const int32_t *lengths;  /* [rows] */
    const int32_t *regions;  /* [rows]; NULL = 0, 1, ... */
    kvf_query_chunks chunks; /* of rows; count = 0: any length, and rows have regions */
} kvf_rows_args;
KVF_TASKS(rows, kvf_rows_args, a->rows)

/* Length that a row must have; 0 = any. */
KVF_INLINE uint32_t kvf_rows_expected(const kvf_rows_args *a, uint32_t row)
{
    return a->chunks.count ? a->chunks.at[row].base + a->chunks.at[row].tokens : 0;
}

/* ---- validate: what regions have of rows becomes true ----
 * Tokens of the sink (of what is sealed) and, where there are rings, of the window, whose tag is
 * not right, are brought from their physical block, in full precision. The call is counted. One
 * task per (row, KV head). */
typedef struct kvf_validate_args {
    const kvf_physical_blocks *blocks;
    const kvf_row *row; /* theirs, as the next two */
    const uint32_t *region;
    const uint32_t *static_count;
    kvf_pages pages; /* of the physical blocks */
    uint32_t layer;
    uint32_t rows;
    uint32_t kv_heads;
} kvf_validate_args;
KVF_TASKS(validate, kvf_validate_args, a->rows * a->kv_heads)

/* ---- average: centroids of the segments that coarse heads of rows rank, where tokens were
 * written since. A segment that several rows have is made once, by whichever comes first; all have
 * the same codes. A task is KVF_AVERAGE_SEGMENTS segments of a row. */
#define KVF_AVERAGE_SEGMENTS 32u
typedef struct kvf_average_args {
    const kvf_physical_blocks *blocks;
    kvf_physical_codes codes;
    uint32_t layer;
    uint32_t rows;
    uint32_t segments_max; /* of the paging of physical blocks, as head_dim */
    uint32_t head_dim;
} kvf_average_args;
KVF_TASKS(average, kvf_average_args,
          kvf_div_ceil_u32(a->segments_max, KVF_AVERAGE_SEGMENTS) * a->rows)

/* ---- gather_window: tails of streaming heads become true, and what they attend to: tokens below
 * ring.sink and the newest ring.recent, in full precision. Without tails, which quantized physical
 * blocks have, spans lie in the physical blocks. A list that is not idle has no spans. One task per
 * (row, KV head).
 * */
typedef struct kvf_gather_window_args {
    const kvf_physical_blocks *blocks;
    kvf_pages pages; /* of the physical blocks */
    uint32_t layer;
    uint32_t rows;
    uint32_t kv_heads;
    kvf_ring ring;        /* of a tail, which has one head; its pages are runs */
    uint64_t first;       /* block of the layer's first tail among those of a region */
    uint32_t spans_max;   /* kvf_ring_total */
    kvf_span *spans;      /* [rows * kv_heads, spans_max] out */
    uint32_t *span_count; /* [rows * kv_heads] out */
} kvf_gather_window_args;
KVF_TASKS(gather_window, kvf_gather_window_args, a->rows * a->kv_heads)

/* ---- scatter_heads: outputs of streaming heads among the others. A task is an output row. ---- */
typedef struct kvf_scatter_heads_args {
    const uint32_t *streaming; /* [kv_heads] not 0: the head streams */
    uint32_t rows;
    uint32_t kv_heads;
    uint32_t group;
    uint32_t value_bytes;  /* of an output of a head, a multiple of 4 */
    const void *from;      /* [rows, kv_heads, group, value_dim] */
    const float *from_lse; /* [rows, kv_heads, group] */
    void *out;             /* as `from` */
    float *lse;            /* as from_lse; may be NULL */
} kvf_scatter_heads_args;
KVF_TASKS(scatter_heads, kvf_scatter_heads_args, a->rows)

/* ---- fill_nan: NaN for rows that are bad. A task is a row; tokens of a chunk before the one that
 * is not finite keep their outputs. */
typedef struct kvf_fill_nan_args {
    const uint32_t *is_bad; /* [rows] */
    uint32_t rows;
    uint32_t heads;
    uint32_t value_dim;
    kvf_dtype dtype;
    void *out;               /* [rows, or tokens of chunks, heads, value_dim] */
    float *lse;              /* [likewise, heads]; may be NULL */
    kvf_query_chunks chunks; /* of rows; count = 0: a token each */
} kvf_fill_nan_args;
KVF_TASKS(fill_nan, kvf_fill_nan_args, a->rows)

/* ---- clone: one block of the caller's onto another, in all layers, but for the words of codes.
 * Its tokens count as written. A task is a physical block of a layer. */
typedef struct kvf_clone_args {
    const kvf_physical_blocks *blocks;
    uint32_t from; /* ids */
    uint32_t to;
    uint32_t tasks; /* layers * id_blocks */
} kvf_clone_args;
KVF_TASKS(clone, kvf_clone_args, a->tasks)

/* ---- dequantize_chunks: blocks of chunks in full precision, where pages are quantized ----
 * Block b of row i to block i * blocks_each + b of `scratch`, but for tokens after the end of the
 * chunk. One task per (row, block, KV head). */
typedef struct kvf_dequantize_chunks_args {
    kvf_paging paging;
    kvf_query_chunks chunks;
    uint32_t blocks_each; /* at least those of the longest */
    void *const *blocks;  /* [chunks.count, blocks_max] in storage format, as `rows` names them */
    char *scratch;        /* [chunks.count, blocks_each] blocks */
} kvf_dequantize_chunks_args;
KVF_TASKS(dequantize_chunks, kvf_dequantize_chunks_args,
          a->chunks.count * a->blocks_each * a->paging.kv_heads)

/* Tokens of block `block` of row `row` that its chunk has or follows; 0: there is no such block. */
KVF_INLINE uint32_t kvf_dequantize_chunks_tokens(const kvf_dequantize_chunks_args *a, uint32_t row,
                                                 uint32_t block)
{
    const kvf_query_chunk *chunk = &a->chunks.at[row];
    const uint32_t end = chunk->base + chunk->tokens, first = block * a->paging.block_size;
    return end > first ? kvf_min_u32(a->paging.block_size, end - first) : 0;
}

/* ---- where things are ---- */

KVF_INLINE size_t kvf_physical_count(const kvf_physical_blocks *c)
{
    return (size_t)c->ids * c->id_blocks;
}

KVF_INLINE kvf_physical_pool kvf_physical_pool_of(const kvf_physical_blocks *c)
{
    kvf_physical_pool pool;
    pool.arenas = c->arenas;
    pool.block_bytes = kvf_stored_block_bytes(&c->paging);
    pool.arena_blocks = c->arena_blocks;
    pool.blocks = c->ids * c->id_blocks;
    pool.block_size = c->paging.block_size;
    return pool;
}

/* Block `n` of all arenas. Physical blocks of all layers have numbers of 32 bits, as pages of slots
 * have. */
KVF_INLINE char *kvf_arena_block(char *const *arenas, uint32_t arena_blocks, size_t block_bytes,
                                 uint32_t n)
{
    const uint32_t arena = n / arena_blocks;
    return arenas[arena] + (n - arena * arena_blocks) * block_bytes;
}

KVF_INLINE char *kvf_pool_home(const kvf_physical_pool *pool, uint32_t layer, uint32_t block)
{
    return kvf_arena_block(pool->arenas, pool->arena_blocks, pool->block_bytes,
                           layer * pool->blocks + block);
}

KVF_INLINE char *kvf_physical_home(const kvf_physical_blocks *c, uint32_t layer, uint32_t block)
{
    return kvf_arena_block(c->arenas, c->arena_blocks, kvf_stored_block_bytes(&c->paging),
                           layer * (uint32_t)kvf_physical_count(c) + block);
}

/* The page of a physical block that token `token` of a KV head is in, in storage format. */
KVF_INLINE char *kvf_physical_page(const kvf_physical_blocks *c, uint32_t layer, uint32_t block,
                                   uint32_t head, uint32_t token)
{
    const kvf_paging *p = &c->paging;
    return kvf_physical_home(c, layer, block) + head * kvf_stored_run_bytes(p) +
           token / p->shape.page_size * kvf_stored_page_bytes(&p->shape);
}

KVF_INLINE uint32_t *kvf_physical_writes(const kvf_physical_blocks *c, uint32_t layer,
                                         uint32_t block)
{
    return c->writes + (layer * kvf_physical_count(c) + block) * c->paging.block_size;
}

KVF_INLINE uint64_t *kvf_physical_nonfinite(const kvf_physical_blocks *c, uint32_t layer,
                                            uint32_t block)
{
    return c->nonfinite + layer * kvf_physical_count(c) + block;
}

/* Physical blocks of a segment. */
KVF_INLINE uint32_t kvf_segment_blocks(const kvf_physical_blocks *c)
{
    return KVF_CENTROID_TOKENS / c->paging.block_size;
}

/* The centroid of the segment that a physical block is in. */
KVF_INLINE uint32_t *kvf_physical_is_centroid(const kvf_physical_blocks *c, uint32_t layer,
                                              uint32_t block)
{
    return c->coarse.is_centroid + (size_t)layer * c->coarse.segments +
           block / kvf_segment_blocks(c);
}

/* Segments that coarse heads of row `number` of the call rank: 1, 2, ... of the row. */
KVF_INLINE uint32_t kvf_physical_ranked(const kvf_physical_blocks *c, uint32_t number)
{
    uint32_t count = 0;
    for (uint32_t l = 0; l < c->paging.lists; l++)
        count = kvf_max_u32(count, c->coarse.count[(size_t)number * c->paging.lists + l]);
    return count;
}

/* Code group `g` of head `head` of the segment that begins in a physical block. */
KVF_INLINE kvf_code_group kvf_segment_group(const kvf_average_args *a, uint32_t block,
                                            uint32_t head, uint32_t g)
{
    const kvf_paging *p = &a->blocks->paging;
    const uint32_t token = g * (KVF_CENTROID_TOKENS / KVF_CENTROID_GROUPS);
    const uint32_t of = block + token / p->block_size, t = token % p->block_size;
    kvf_code_group group;
    group.words = kvf_physical_words(&a->codes, p->shape.head_dim, p->block_size, of, head, t);
    group.scales = (const char *)(kvf_physical_scales(&a->codes, p->block_size, of, head) + t);
    return group;
}

/* The tag that tokens first .. first + count - 1 of a physical block have today. */
KVF_INLINE kvf_physical_tag kvf_physical_tag_of(const kvf_physical_blocks *c, uint32_t layer,
                                                uint32_t block, uint32_t first, uint32_t count)
{
    const uint32_t *writes = kvf_physical_writes(c, layer, block) + first;
    kvf_physical_tag tag;
    tag.block = block + 1;
    tag.writes = 0;
    for (uint32_t i = 0; i < count; i++)
        tag.writes += writes[i];
    return tag;
}

KVF_INLINE uint32_t kvf_physical_tag_is(const kvf_physical_tag *a, kvf_physical_tag b)
{
    return a->block == b.block && a->writes == b.writes;
}

/* Number of a region's (layer, KV head). */
KVF_INLINE size_t kvf_region_head(const kvf_physical_blocks *c, uint32_t region, uint32_t layer,
                                  uint32_t head)
{
    return ((size_t)region * c->layers + layer) * c->paging.kv_heads + head;
}

/* The first block of a tail among those of all regions; `one` is the head's streaming.number. */
KVF_INLINE size_t kvf_tail_block(const kvf_gather_window_args *a, uint32_t region, uint32_t one)
{
    return region * a->blocks->streaming.blocks + a->first +
           (one ? one - 1 : 0) * kvf_ring_total(&a->ring);
}

/* Page of a row that span i of a tail is. */
KVF_INLINE uint32_t kvf_tail_page(const kvf_ring *r, uint32_t length, uint32_t i)
{
    return i < r->sink_blocks ? i : kvf_ring_first(r, length) + (i - r->sink_blocks);
}

/* A row that knows where slots are, and nothing else. */
KVF_INLINE kvf_row kvf_physical_slots(const kvf_physical_blocks *c)
{
    kvf_row row;
    memset(&row, 0, sizeof row); /* in C and in C++ */
    row.slot_of_page = c->slot_of_page;
    row.slot_words = c->slot_words;
    row.slot_tags = c->slot_tags;
    row.writes = c->writes;
    row.slots = c->slots;
    row.use = *c->clock;
    return row;
}

/* The page of the pool that the tokens from `first` on of a call of write make, or UINT32_MAX. */
KVF_INLINE uint32_t kvf_admit_written_page(const kvf_write_args *a, uint32_t first)
{
    const uint64_t blocks = kvf_physical_count(a->blocks), block = a->blocks->paging.block_size;
    const uint32_t size = a->shape.page_size;
    const int64_t slot = a->slots[first];
    if (first + size > a->tokens || slot < 0 || (uint64_t)slot >= blocks * block || slot % size)
        return UINT32_MAX;
    for (uint32_t t = 1; t < size; t++)
        if (a->slots[first + t] != slot + (int64_t)t)
            return UINT32_MAX;
    return (uint32_t)((a->layer * blocks * block + (uint64_t)slot) / size);
}

/* Whether token `index` of the call is not finite, so that it is zeros. It was written. */
KVF_INLINE uint32_t kvf_admit_written_is_nonfinite(const kvf_write_args *a, uint32_t index)
{
    const uint32_t block = a->blocks->paging.block_size;
    const uint64_t slot = (uint64_t)a->slots[index];
    return *kvf_physical_nonfinite(a->blocks, a->layer, (uint32_t)(slot / block)) >> slot % block &
           1;
}

/* The row that a table and a length make, with room of `region`; `number` is that of the call. */
KVF_INLINE kvf_row kvf_physical_row(const kvf_physical_blocks *c, uint32_t layer, uint32_t number,
                                    uint32_t region, uint32_t length)
{
    const kvf_paging *p = &c->paging;
    const size_t n = (size_t)region * c->layers + layer;
    const size_t static_bytes = p->static_pages * kvf_page_bytes(&p->shape);
    const uint32_t sealed =
        length < c->local_tokens ? 0 : (length - c->local_tokens) / p->block_size;
    const uint32_t fixed = p->sink + length - sealed * p->block_size;
    const double share = (double)c->budget_share * (double)length;
    const uint32_t budget = kvf_max_u32(c->budget_tokens, (uint32_t)(share + 0.5));
    const uint32_t rest = budget > fixed ? budget - fixed : 0;
    kvf_row row = kvf_physical_slots(c);
    row.blocks = c->blocks + (size_t)number * p->blocks_max;
    row.ring = c->rings ? c->rings + n * p->ring_blocks * kvf_block_bytes(p) : NULL;
    row.bits = c->bits;
    row.static_kv = c->static_kv + n * p->kv_heads * static_bytes;
    row.static_count = c->static_count + (size_t)number * p->kv_heads;
    row.block_of = c->physical + (size_t)number * p->blocks_max;
    row.block_first = layer * (uint32_t)kvf_physical_count(c);
    row.chosen_pages =
        c->all_pages || c->dynamic_pages == 0 ? c->dynamic_pages : rest / p->shape.page_size;
    row.length = length;
    row.sealed = row.sealed_before = sealed;
    row.attend_all = c->all_pages || length <= budget;
    row.idle = c->streaming.number ? c->streaming.number + (size_t)layer * p->kv_heads : NULL;
    return row;
}

/* An earlier row with a length has the region of this one. No load waits for another. */
KVF_INLINE uint32_t kvf_rows_is_taken(const kvf_rows_args *a, uint32_t row, uint32_t earlier)
{
    if (!a->regions || a->chunks.count)
        return 0;
    return (uint32_t)(a->lengths[row] != 0) & (uint32_t)(a->lengths[earlier] != 0) &
           (uint32_t)(a->regions[earlier] == a->regions[row]);
}

/* Whether the call says that a row is bad, before its table and earlier rows are looked at. No load
 * waits for another here, either. */
KVF_INLINE uint32_t kvf_rows_is_bad(const kvf_rows_args *a, uint32_t row)
{
    const kvf_physical_blocks *c = a->blocks;
    const int32_t length = a->lengths[row];
    const int32_t region = a->regions ? a->regions[row] : (int32_t)row;
    const uint32_t tokens = (uint32_t)length, id_tokens = c->id_blocks * c->paging.block_size;
    const uint32_t regions = c->regions;
    const uint32_t is_long = (uint32_t)(length < 0) | (uint32_t)(tokens > c->tokens_max) |
                             (uint32_t)(kvf_div_ceil_u32(tokens, id_tokens) > a->table_stride);
    if (a->chunks.count)
        return is_long | (uint32_t)(tokens != kvf_rows_expected(a, row));
    return is_long | ((uint32_t)(length != 0) & (uint32_t)((uint32_t)region >= regions));
}

/* Physical block of block `block` of a row, or UINT32_MAX if its id is none; `c` is a->blocks, or a
 * copy. Later loads wait for no id. */
KVF_INLINE uint32_t kvf_rows_physical(const kvf_rows_args *a, const kvf_physical_blocks *c,
                                      uint32_t row, uint32_t block)
{
    const uint32_t at = block / c->id_blocks, part = block - at * c->id_blocks;
    const int32_t id = a->table[(size_t)row * a->table_stride + at];
    const uint32_t is_none = (uint32_t)(id < 0) | (uint32_t)((uint32_t)id >= c->ids);
    return is_none ? UINT32_MAX : (uint32_t)id * c->id_blocks + part;
}

/* The outputs of row `task` that are no answers. */
KVF_INLINE kvf_query_chunk kvf_rows_to_fill(const kvf_fill_nan_args *a, uint32_t task)
{
    const uint32_t from = a->is_bad[task]; /* 1 + the token that is not finite */
    kvf_query_chunk one = {task, 1, 0};
    if (a->chunks.count)
        one = a->chunks.at[task];
    uint32_t sound = from ? 0 : one.tokens;
    if (a->chunks.count && from > one.base + 1)
        sound = kvf_min_u32(from - 1 - one.base, one.tokens);
    one.first += sound;
    one.tokens -= sound;
    return one;
}

/* Which segments a list ranks, and the bits that it scores tokens by: what filtering leaves. */
KVF_INLINE void kvf_rows_segments(const kvf_physical_blocks *c, uint32_t layer, size_t at,
                                  const kvf_row *row, uint32_t list)
{
    const kvf_paging *p = &c->paging;
    const uint64_t *bits = c->bits + (size_t)list * p->blocks_max;
    uint32_t take = 0, count = 0;
    if (c->coarse.number[layer * p->kv_heads + list] != UINT32_MAX)
        count = kvf_segments_ranked(p, row, c->coarse_share, row->chosen_pages, &take);
    c->coarse.count[at] = count;
    c->coarse.take[at] = take;
    c->coarse.blocks[at] = row->sealed;
    c->coarse.unfiltered[at] = count ? bits : NULL;
    c->list_bits[at] = count ? c->coarse.filtered + at * p->blocks_max : bits;
}

/* The pages that its lists are asked for. */
KVF_INLINE void kvf_rows_list(const kvf_physical_blocks *c, uint32_t layer, uint32_t number,
                              const kvf_row *row, uint32_t list)
{
    const kvf_paging *p = &c->paging;
    const size_t at = (size_t)number * p->lists + list;
    const uint32_t attends = !kvf_row_is_idle(row, list);
    c->pages[at] = attends ? kvf_row_sealed_pages(p, row) : 0;
    c->choose[at] = attends ? kvf_row_choose(p, row) : 0;
    c->static_count[at] = attends ? kvf_min_u32(p->sink, row->sealed * p->block_size) : 0;
    if (p->segments_max)
        kvf_rows_segments(c, layer, at, row, list);
}

#endif
