/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_KERNELS_SCORE_ARGS_H
#define KVF_KERNELS_SCORE_ARGS_H

/*
 * Contracts, arguments and tasks: digests of pages, their scores, and scores reduced over a group;
 * codes of keys, and how queries score the tokens.
 * See kernels.h for what holds for every kernel.
 */

#include <stdbool.h>

#include "cap.h"
#include "paging.h"

/* ---- digest: bounding boxes of the keys of pages ----
 * digest of a page = [subs][2][head_dim] bf16: lo, then hi, of `page_size / subs` consecutive
 * tokens each, over tokens t < count whose skip bit is clear. minmax rounds lo down and hi up,
 * so the box contains every key. A sub-box without tokens has lo = +inf, hi = -inf in every
 * channel. cuboid-mean: c = (max+min)/2, r = mean_t |c - k_t|, lo = c - r, hi = c + r (nearest).
 * mean: lo = hi = mean (nearest). One task per job; a job whose page is NULL is skipped.
 */
typedef struct kvf_digest_job {
    const void *page;
    void *digest; /* [subs, 2, head_dim] bf16 */
    uint64_t skip;
    uint32_t count;
    uint32_t padding; /* 0 */
} kvf_digest_job;

typedef struct kvf_digest_args {
    kvf_shape shape;
    kvf_digest_kind kind;
    uint32_t subs;
    uint32_t job_count;
    const kvf_digest_job *jobs; /* [job_count] */
} kvf_digest_args;
KVF_TASKS(digest, kvf_digest_args, a->job_count)

/* ---- score: queries against digests ----
 * scores[l, g, p] = max over sub-boxes of sum_d max(q_d lo_d, q_d hi_d), fp32, for p < pages[l];
 * -INFINITY if every sub-box of the page is empty, or bits of the list say that each of its tokens
 * is attended elsewhere. Boxes hold these tokens: a page that lost some to a static set would rank
 * below whole ones, however well the rest fits. Scores beyond pages[l] are not written.
 * A task is KVF_SCORE_PAGES consecutive pages of one list.
 */
#define KVF_SCORE_PAGES 256u

typedef struct kvf_score_args {
    kvf_shape shape;
    uint32_t subs;
    uint32_t lists;
    uint32_t group;                  /* query heads per list, 1 .. KVF_GROUP_MAX_HEADS */
    kvf_subgroup sub;                /* heads that take part */
    uint32_t pages_max;              /* stride of scores, >= every pages[l] */
    uint32_t block_size;             /* tokens of an entry of block_of and bits */
    const void *q;                   /* [lists, group, head_dim] dtype */
    const void *const *digests;      /* [lists] -> [blocks, pages, subs, 2, head_dim] bf16 */
    const uint32_t *const *block_of; /* [lists] -> [blocks] of these; NULL: in order */
    const uint64_t *const *bits;     /* [lists] -> [blocks]; NULL: only boxes tell */
    const uint32_t *pages;           /* [lists] */
    float *scores;                   /* [lists, group, pages_max] */
} kvf_score_args;

/* Whether bits of a list, or NULL, leave a token of a page. */
KVF_INLINE bool kvf_score_counts(const kvf_score_args *a, const uint64_t *bits, uint32_t page)
{
    const uint32_t page_size = a->shape.page_size, pages = a->block_size / page_size;
    return !bits || kvf_live_bits(page_size, bits[page / pages] >> page % pages * page_size);
}

/* Boxes of page `page` of a list. */
KVF_INLINE const void *kvf_score_digest(const kvf_score_args *a, uint32_t list, uint32_t page)
{
    size_t at = page;
    if (a->block_of) {
        const uint32_t pages = a->block_size / a->shape.page_size;
        at = (size_t)a->block_of[list][page / pages] * pages + page % pages;
    }
    return kvf_offset(a->digests[list], at * kvf_digest_bytes(a->shape.head_dim, a->subs));
}
KVF_TASKS(score, kvf_score_args, kvf_div_ceil_u32(a->pages_max, KVF_SCORE_PAGES) * a->lists)

/* ---- reduce: scores of query heads into scores of lists ----
 * out[o, p] over the scores of `heads` consecutive heads, o*heads .. o*heads+heads-1, for p <
 * pages[o]: MEAN_SOFTMAX: mean over heads of softmax_p(scale * score, capped) (a -inf
 * score stays 0 weight; the result of a page whose score is -inf for every head is -INFINITY); MAX:
 * maximum; SUM: sum, with a cap of scale * score, capped. One task per output.
 */
typedef struct kvf_reduce_args {
    kvf_group_reduce kind;
    uint32_t outputs;
    uint32_t heads;
    uint32_t pages_max; /* stride of scores and of out */
    float scale;
    float cap;
    const float *scores;   /* [outputs, heads, pages_max] */
    const uint32_t *pages; /* lengths */
    float *out;            /* [outputs, pages_max] */
} kvf_reduce_args;
KVF_TASKS(reduce, kvf_reduce_args, a->outputs)

/* ---- encode: codes of the keys of a block ----
 * Tokens 0 .. count-1 of a job, `count` a multiple of KVF_CODE_TOKENS and at most 64, become
 * count / KVF_CODE_TOKENS code groups at `digest`, as codes.h says; `skip` is not looked at. One
 * task per job; a job whose page is NULL is skipped. Same bits from every implementation.
 */
typedef struct kvf_encode_args {
    kvf_shape shape;
    uint32_t job_count;
    const kvf_digest_job *jobs; /* [job_count] */
} kvf_encode_args;
KVF_TASKS(encode, kvf_encode_args, a->job_count)

/* ---- codes under a block table of the caller ----
 * A *physical block* is a block that a table names (blocks/blocks_args.h). Its code groups are in
 * two places: words in memory of the caller, who numbers larger blocks of id_blocks physical blocks
 * each, and scales of ours. [ids][id_blocks, kv_heads, block_size / 32][2, head_dim / 16, 16]
 * words, `stride` bytes from id to id. */
typedef struct kvf_physical_codes {
    char *words;
    uint16_t *scales; /* [blocks, kv_heads, block_size] of the layer */
    size_t stride;
    uint32_t id_blocks;
    uint32_t kv_heads;
} kvf_physical_codes;

/* Words of the group that token `token` of a physical block is in. */
KVF_INLINE char *kvf_physical_words(const kvf_physical_codes *c, uint32_t head_dim,
                                    uint32_t block_size, uint32_t block, uint32_t head,
                                    uint32_t token)
{
    const size_t run = (size_t)(block % c->id_blocks) * c->kv_heads + head;
    return c->words + block / c->id_blocks * c->stride + run * block_size * (head_dim / 4) +
           (size_t)(token / 32) * 8 * head_dim;
}

KVF_INLINE uint16_t *kvf_physical_scales(const kvf_physical_codes *c, uint32_t block_size,
                                         uint32_t block, uint32_t head)
{
    return c->scales + ((size_t)block * c->kv_heads + head) * block_size;
}

/* Words and scales of a code group. */
typedef struct kvf_code_group {
    const char *words;
    const char *scales;
} kvf_code_group;

/* That of token `token`, whose block has the codes of block `block` at `codes`; a block
 * has 32 or 64 tokens. */
KVF_INLINE kvf_code_group kvf_group_of_block(const char *codes, uint32_t block, uint32_t head_dim,
                                             uint32_t block_size, uint32_t token)
{
    const uint32_t words = head_dim * 8, bytes = words + 64, is_two = block_size == 64;
    kvf_code_group group;
    group.words = codes + (((size_t)block << is_two) + (token / 32 & is_two)) * bytes;
    group.scales = group.words + words;
    return group;
}

/* The same, of a row whose block b has the codes of block block_of[b]. */
KVF_INLINE kvf_code_group kvf_block_group(const char *codes, const uint32_t *block_of,
                                          uint32_t head_dim, uint32_t block_size, uint32_t token)
{
    return kvf_group_of_block(codes, block_of[token / block_size], head_dim, block_size, token);
}

KVF_INLINE kvf_code_group kvf_row_group(const kvf_paging *p, const kvf_row *row, uint32_t head,
                                        uint32_t token)
{
    return kvf_block_group(kvf_row_digests(p, row, 0, head), row->block_of, p->shape.head_dim,
                           p->block_size, token);
}

/* ---- rotate: queries in int8, rotated as keys are ----
 * As codes.h says. A task is KVF_ROTATE_QUERIES consecutive queries. Same bits from every
 * implementation.
 */
#define KVF_ROTATE_QUERIES 16u

typedef struct kvf_rotate_args {
    kvf_dtype dtype;
    uint32_t head_dim;
    uint32_t queries;
    float scale;    /* of softmax */
    const void *q;  /* [queries, head_dim] dtype */
    int8_t *y;      /* [queries, head_dim] */
    float *y_scale; /* [queries] */
} kvf_rotate_args;
KVF_TASKS(rotate, kvf_rotate_args, kvf_div_ceil_u32(a->queries, KVF_ROTATE_QUERIES))

/* ---- score_codes: queries against codes ----
 * The logit of token t for a query head is s = (dot * key scale) * query scale, dot the exact
 * integer product of levels and query, capped (cap.h). A token counts iff its page is below
 * pages[l] and its skip bit is clear. A tile is KVF_SCORE_CODES_TOKENS consecutive tokens of a
 * list; per query head
 *     tile_max = largest s of the tile's tokens that count; -INFINITY without any. Exact
 *                if not capped.
 *     mass     = per page: sum of exp(s - tile_max) over its tokens that count, in bf16; -1
 *                without any.
 *     tile_sum = sum of the masses before they were rounded.
 * A task is some consecutive tiles of one list, so that what is fetched ahead is mostly what the
 * same thread reads next. A block none of whose tokens counts (kvf_block_counts) need not have its
 * codes read nor masses written. mass is not written beyond pages[l], nor tile_max and tile_sum of
 * tiles without pages.
 *
 * Rows may have codes in common, as forks have those of their prompt. Where `order` is set, the
 * lists of row r are r * row_lists .. + row_lists - 1, and order names each row once: common[i]
 * tiles from the front of the row at place i are whole, and have the codes of the row at place i -
 * 1; common[0] is 0. Rows that share a tile are adjacent there. The first row's task scores the
 * tile for all of them, by one look at its codes; the other rows' tasks return. Skipped tokens are
 * each row's own. The bits are the same as without an order.
 *
 * Softmax over the whole context needs no second look at the codes. It costs two bytes per page and
 * query head, which leave this kernel and come back in reduce_mass, and eight per tile and head;
 * one exponential per token and head here, one per tile and head there, and no logarithm. At pages
 * of one token, a group of 4 and head_dim 128 that is 8 bytes written and read in addition to 34 of
 * codes; at pages of 8, one byte.
 */
#define KVF_SCORE_CODES_TOKENS 1024u
#define KVF_SCORE_CODES_TILES  2u  /* of a task, at least: more in long lists, */
#define KVF_SCORE_CODES_TASKS  32u /* as long as these are left of a list, */
#define KVF_SCORE_CODES_MOST   8u  /* and at most */

typedef struct kvf_score_codes_args {
    uint32_t head_dim;
    uint32_t page_size;  /* 1, 2, 4 .. 64 tokens */
    uint32_t block_size; /* 32 or 64 tokens, >= page_size */
    uint32_t lists;
    uint32_t group;     /* query heads per list, 1 .. KVF_GROUP_MAX_HEADS */
    kvf_subgroup sub;   /* heads that take part */
    uint32_t pages_max; /* stride of mass, >= every pages[l] */
    uint32_t tiles_max; /* stride of tile_max and tile_sum, >= the tiles of pages_max */
    float cap;
    const int8_t *q;                 /* [lists, group, head_dim], -127 .. 127, 16-byte aligned */
    const float *q_scale;            /* [lists, group], 0 .. KVF_QUERY_SCALE_MAX */
    const void *const *codes;        /* [lists] -> code groups of blocks, whole, 64-byte aligned: */
    const uint32_t *const *block_of; /* [lists] -> [blocks] those of block b lie block_of[l][b]
                                        blocks after codes[l]; or */
    const uint32_t *physical; /* [rows, physical_stride]: block b of list l has the codes of */
    uint32_t physical_stride; /* physical[l / kv_heads][b], head l % kv_heads; NULL = as above */
    kvf_physical_codes physical_codes;
    uint32_t row_lists;          /* with an order */
    const uint32_t *order;       /* [lists / row_lists]; NULL = no codes in common */
    const uint32_t *common;      /* likewise */
    const uint64_t *const *bits; /* [lists] -> [blocks]: bit t set = token t of it is skipped */
    const uint32_t *pages;       /* [lists] */
    uint16_t *mass;              /* [lists, group, pages_max] bf16 */
    float *tile_max;             /* [lists, group, tiles_max] */
    float *tile_sum;             /* [lists, group, tiles_max] */
} kvf_score_codes_args;

/* Tiles of a task. */
KVF_INLINE uint32_t kvf_score_codes_tiles(const kvf_score_codes_args *a)
{
    return kvf_min_u32(KVF_SCORE_CODES_MOST,
                       kvf_max_u32(KVF_SCORE_CODES_TILES, a->tiles_max / KVF_SCORE_CODES_TASKS));
}

KVF_TASKS(score_codes, kvf_score_codes_args,
          kvf_div_ceil_u32(a->tiles_max, kvf_score_codes_tiles(a)) * a->lists)

/* Whether a token of a block counts, by its skip bits. */
KVF_INLINE bool kvf_block_counts(uint64_t bits, uint32_t block_size)
{
    return (~bits & UINT64_MAX >> (64 - block_size)) != 0;
}

/* Bit b: a token of block b counts, of the up to 32 blocks of a tile. */
KVF_INLINE uint32_t kvf_left_blocks(const uint64_t *bits, uint32_t blocks, uint32_t block_size)
{
    uint32_t left = 0;
    if (block_size == 32)
        for (uint32_t b = 0; b < blocks; b++)
            left |= (uint32_t)((uint32_t)bits[b] != UINT32_MAX) << b;
    else
        for (uint32_t b = 0; b < blocks; b++)
            left |= (uint32_t)kvf_block_counts(bits[b], block_size) << b;
    return left;
}

/* [blocks]: the block, or physical block, that has the codes of each block of a list. */
KVF_INLINE const uint32_t *kvf_score_codes_blocks(const kvf_score_codes_args *a, uint32_t list)
{
    return a->physical
               ? a->physical + (size_t)(list / a->physical_codes.kv_heads) * a->physical_stride
               : a->block_of[list];
}

/* The code group of a token under a block table of the caller, whose block is `block`. */
KVF_INLINE kvf_code_group kvf_score_codes_physical_group(const kvf_score_codes_args *a,
                                                         uint32_t list, uint32_t block,
                                                         uint32_t token)
{
    const uint32_t head = list % a->physical_codes.kv_heads, t = token & (a->block_size - 32);
    kvf_code_group group;
    group.words =
        kvf_physical_words(&a->physical_codes, a->head_dim, a->block_size, block, head, t);
    group.scales =
        (const char *)(kvf_physical_scales(&a->physical_codes, a->block_size, block, head) + t);
    return group;
}

KVF_INLINE kvf_code_group kvf_score_codes_group(const kvf_score_codes_args *a, uint32_t list,
                                                uint32_t token)
{
    const uint32_t block = kvf_score_codes_blocks(a, list)[token / a->block_size];
    if (a->physical)
        return kvf_score_codes_physical_group(a, list, block, token);
    return kvf_group_of_block((const char *)a->codes[list], block, a->head_dim, a->block_size,
                              token);
}

/* The list that task l / its tiles is of: the head of it, in the row at that place. */
KVF_INLINE uint32_t kvf_score_codes_list(const kvf_score_codes_args *a, uint32_t l)
{
    return a->order ? a->order[l / a->row_lists] * a->row_lists + l % a->row_lists : l;
}

/* How many lists, at l, l + row_lists and so on, have the tile in common; 0 if one before has. */
KVF_INLINE uint32_t kvf_score_codes_sharers(const kvf_score_codes_args *a, uint32_t l,
                                            uint32_t tile)
{
    if (!a->order)
        return 1;
    const uint32_t first = l / a->row_lists, rows = a->lists / a->row_lists;
    uint32_t end = first + 1;
    if (a->common[first] > tile)
        return 0;
    while (end < rows && a->common[end] > tile)
        end++;
    return end - first;
}

/* ---- centroids: one key for a segment ----
 * A *segment* is KVF_CENTROID_TOKENS consecutive tokens of a KV head. Its centroid, of the rotated
 * keys as their codes have them, is head_dim levels and a scale: per channel the sum of scale *
 * level over the tokens, in order, in fp32; x = that sum / 64; then levels as those of a query, x_i
 * * (127 / largest |x|), to nearest, ties to even, and the scale (largest |x| / 127) in fp16, at
 * most 65504. All zero if the largest is 0, or so small that 127 / largest is not finite.
 *
 * Because a centroid follows from codes alone, it is the same whatever the chunks, and after a
 * fork, a cut or a restore. A task is one segment of one KV head of a row, of those whose last
 * block this call seals; tasks beyond them do nothing. Same bits from every implementation.
 */
#define KVF_CENTROID_TOKENS 64u
#define KVF_CENTROID_GROUPS 2u /* code groups of a segment */

typedef struct kvf_centroids_args {
    kvf_paging paging;
    uint32_t rows;
    uint32_t segments; /* most that a row completes in this call */
    const kvf_row *row;
} kvf_centroids_args;
KVF_TASKS(centroids, kvf_centroids_args, a->rows * a->paging.kv_heads * a->segments)

/* Whole segments of so many blocks. */
KVF_INLINE uint32_t kvf_segments(uint32_t block_size, uint32_t blocks)
{
    return blocks / (KVF_CENTROID_TOKENS / block_size);
}

/* Segments that a coarse head ranks: whole ones but the first; 0 if all are taken anyway. *take of
 * them are scored by codes: `share`, and never fewer than twice the tokens of `pages`. */
KVF_INLINE uint32_t kvf_segments_ranked(const kvf_paging *p, const kvf_row *row, float share,
                                        uint32_t pages, uint32_t *take)
{
    const uint32_t whole = kvf_segments(p->block_size, row->sealed);
    const uint32_t count = whole ? whole - 1 : 0;
    const uint64_t tokens = 2 * (uint64_t)pages * p->shape.page_size;
    const uint64_t twice = (tokens + KVF_CENTROID_TOKENS - 1) / KVF_CENTROID_TOKENS;
    const uint32_t part = (uint32_t)((double)share * (double)count + 0.5);
    *take = kvf_max_u32(1, part > twice ? part : (uint32_t)(twice < count ? twice : count));
    return row->attend_all || *take >= count ? 0 : count;
}

KVF_INLINE int8_t *kvf_row_centroid(const kvf_paging *p, const kvf_row *row, uint32_t head,
                                    uint32_t i)
{
    return row->centroids + ((size_t)head * p->segments_max + i) * p->shape.head_dim;
}

KVF_INLINE uint16_t *kvf_row_centroid_scale(const kvf_paging *p, const kvf_row *row, uint32_t head,
                                            uint32_t i)
{
    return row->centroid_scales + (size_t)head * p->segments_max + i;
}

/* ---- score_centroids: queries against centroids ----
 * scores[l, g, i] = (dot * centroid scale) * query scale for i < count[l], dot the exact integer
 * product; the rest is not written. A task is KVF_CENTROIDS_PER_TASK consecutive centroids
 * of one list. Same bits from every implementation.
 */
#define KVF_CENTROIDS_PER_TASK 512u

/* Centroids under a block table of the caller: those of each coarse head of a layer lie together,
 * by the physical block that their segment begins in. */
typedef struct kvf_physical_centroids {
    const int8_t *centroids; /* [coarse heads, segments, head_dim] */
    const uint16_t *scales;  /* [coarse heads, segments] */
    const uint32_t *number;  /* [kv_heads] which of the coarse heads it is */
    uint32_t kv_heads;
    uint32_t segments; /* of all physical blocks */
    uint32_t blocks;   /* of a segment */
} kvf_physical_centroids;

typedef struct kvf_score_centroids_args {
    uint32_t head_dim;
    uint32_t lists;
    uint32_t group;                 /* query heads per list, 1 .. KVF_GROUP_MAX_HEADS */
    uint32_t stride;                /* of scores, >= every count[l] */
    const int8_t *q;                /* [lists, group, head_dim] */
    const float *q_scale;           /* [lists, group] */
    const int8_t *const *centroids; /* [lists] -> [count, head_dim], 16-byte aligned; or */
    const uint16_t *const *scale;   /* [lists] -> [count] fp16; or */
    const uint32_t *physical; /* [rows, physical_stride]: centroid i of list l is that of segment i
                             + 1, head l % kv_heads, of row l / kv_heads; NULL = as above */
    uint32_t physical_stride;
    kvf_physical_centroids physical_centroids;
    const uint32_t *count; /* [lists] */
    float *scores;         /* [lists, group, stride] */
} kvf_score_centroids_args;
KVF_TASKS(score_centroids, kvf_score_centroids_args,
          kvf_div_ceil_u32(a->stride, KVF_CENTROIDS_PER_TASK) * a->lists)

/* A centroid and where its scale is. */
typedef struct kvf_centroid {
    const int8_t *centroid;
    const uint16_t *scale;
} kvf_centroid;

KVF_INLINE kvf_centroid kvf_centroid_at(const kvf_score_centroids_args *a, uint32_t list,
                                        uint32_t i)
{
    kvf_centroid place;
    if (!a->physical) {
        place.centroid = a->centroids[list] + (size_t)i * a->head_dim;
        place.scale = a->scale[list] + i;
        return place;
    }
    const kvf_physical_centroids *c = &a->physical_centroids;
    const uint32_t row = list / c->kv_heads;
    const uint32_t block =
        a->physical[(size_t)row * a->physical_stride + (size_t)(i + 1) * c->blocks];
    const size_t at = (size_t)c->number[list % c->kv_heads] * c->segments + block / c->blocks;
    place.centroid = c->centroids + at * a->head_dim;
    place.scale = c->scales + at;
    return place;
}

/* ---- filter: what is left to score ----
 * For a list l with from[l]: bits[l, b] = from[l][b] if block b < blocks[l] stays, else all ones,
 * so that none of its tokens counts. Blocks of segment 0 stay, those after the last whole segment,
 * and those of the segments ids[l, i] + 1. A list whose from[l] is NULL is skipped. A task is one
 * list.
 */
typedef struct kvf_filter_args {
    uint32_t lists;
    uint32_t block_size; /* 32 or 64 tokens */
    uint32_t blocks_max; /* stride of bits */
    uint32_t ids_max;
    const uint64_t *const *from; /* [lists] -> [blocks] */
    const uint32_t *blocks;      /* [lists] */
    const int32_t *ids;          /* [lists, ids_max] ascending */
    const uint32_t *id_count;    /* [lists] */
    uint64_t *bits;              /* [lists, blocks_max] out */
} kvf_filter_args;
KVF_TASKS(filter, kvf_filter_args, a->lists)

/* ---- reduce_mass: masses of query heads into scores of pages ----
 * With M the largest tile_max of a head and S = sum over its tiles, in order, of tile_sum *
 * exp(tile_max - M), a page of tile i weighs mass * exp(tile_max_i - M) / S, and its score for one
 * head is tile_max_i + ln mass.
 * out[l, p] for p < pages[l] is, over the group's heads in order: MEAN_SOFTMAX: the mean of the
 * weights; MAX: the largest score; SUM: their sum. -INFINITY where no head has a mass >= 0, and in
 * blocks none of whose tokens counts, whose masses are not looked at. A mass of 0 was too small for
 * bf16; its logarithm counts as that of 2^-126.
 *
 * Damage does not spread: a tile_max is taken within +-KVF_REDUCE_TOP_MAX, a sum or mass within 0
 * .. KVF_REDUCE_MASS_MAX, NaN as the least; a head whose S is below 1/2, which no sound one is,
 * weighs nothing. A task is KVF_REDUCE_PAGES consecutive pages of one list.
 */
#define KVF_REDUCE_TOP_MAX  0x1p120f
#define KVF_REDUCE_MASS_MAX 0x1p100f
#define KVF_REDUCE_PAGES    8192u

typedef struct kvf_reduce_mass_args {
    kvf_group_reduce kind;
    uint32_t page_size;
    uint32_t block_size; /* 32 or 64 tokens, >= page_size */
    uint32_t lists;
    uint32_t group;
    uint32_t pages_max; /* stride of mass and out */
    uint32_t tiles_max; /* stride of tile_max and tile_sum */
    const uint16_t *mass;
    const float *tile_max;
    const float *tile_sum;
    const uint64_t *const *bits; /* [lists] -> [blocks], those that `score_codes` had */
    const uint32_t *pages;       /* [lists] */
    float *out;                  /* [lists, pages_max] */
} kvf_reduce_mass_args;
KVF_TASKS(reduce_mass, kvf_reduce_mass_args,
          kvf_div_ceil_u32(a->pages_max, KVF_REDUCE_PAGES) * a->lists)

/* Pages of a tile. */
KVF_INLINE uint32_t kvf_tile_pages(uint32_t page_size)
{
    return KVF_SCORE_CODES_TOKENS / page_size;
}

/* Tiles that have a page. */
KVF_INLINE uint32_t kvf_tiles(uint32_t pages, uint32_t page_size)
{
    return kvf_div_ceil_u32(pages, kvf_tile_pages(page_size));
}

#endif
