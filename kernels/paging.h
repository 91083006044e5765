/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_KERNELS_PAGING_H
#define KVF_KERNELS_PAGING_H

/*
 * Pages, and rows of pages: what most kernels are about.
 *
 * A page is [page_size, head_dim + value_dim] in `dtype`, contiguous: key and value of a token lie
 * side by side, so pages that follow each other are one longer run of tokens. That is its full
 * precision.
 * Where pages are quantized, sealed pages have the form of quantized.h in the pool and in slots,
 * their *storage format*; else it is the exact one.
 *
 * A page is what is selected, moved and kept in a slot. A *block* is what is allocated, sealed and
 * written back: `block_size` tokens of all KV heads, [kv_heads, block_size, head_dim + value_dim],
 * so that a KV head's part of it, a *run*, is block_pages pages.
 *
 * A *row* is one layer of one sequence as of one of its tokens, described by a kvf_row whose
 * pointers are device memory. A step has a row per token, and rows of one sequence share its
 * tables; under block tables of the caller a request is a row. Calls without tokens, as a cut,
 * have a row per layer. A *list* is a row's pages for one KV head (lists == kv_heads) or one query
 * head (lists == query heads). Block b of a row holds tokens b * block_size ... and lies at
 * blocks[b]. Blocks below `sealed` are complete; their pages have digests and may be selected. The
 * others are the window.
 *
 * A *slot* is room on the device for one page of a KV head, whichever row has the page (slots.h).
 * A *span* is a page as attention reads it: where it lies, and which of its tokens count.
 *
 * A *call* is one call of the public API: a step, a chunk of a prompt, a cut. A kvf_row holds for
 * one call: what the call seals lies between sealed_before and `sealed`, and `use` is its number.
 */

#include <kvferry/kvferry.h>

#include "common/convert.h"

/* How many tasks a launch of `op` has, from its arguments `a`. */
#define KVF_TASKS(op, args, count)                                                                 \
    KVF_INLINE uint32_t kvf_##op##_tasks(const args *a)                                            \
    {                                                                                              \
        (void)a;                                                                                   \
        return (count);                                                                            \
    }

#define KVF_GROUP_MAX_HEADS 128u /* query heads per KV head */
#define KVF_SUBGROUP_HEADS  16u  /* of them that a kernel takes at once */
#define KVF_PAGE_SIZE_MAX   64u
#define KVF_HEAD_DIM_MAX    512u

/* Sizes of heads X(d) that the matrix products of a GPU are compiled for, each for every type and
 * target, and the size of their values: of 192 channels they have 128. Other multiples of 16, and
 * other values, are the host device's. */
#define KVF_GPU_HEAD_DIMS(X) X(32) X(64) X(80) X(96) X(128) X(192) X(256)
#define KVF_GPU_HEAD_DIM_MAX 256u
#define KVF_GPU_VALUE_DIM(d) ((d) == 192u ? 128u : (d))

/* A *sub-group*: heads first .. first + count - 1 of every group; count 0: all of the group. */
typedef struct kvf_subgroup {
    uint32_t first;
    uint32_t count;
} kvf_subgroup;

KVF_INLINE kvf_subgroup kvf_subgroup_whole(kvf_subgroup sub, uint32_t group)
{
    if (sub.count == 0) {
        sub.first = 0;
        sub.count = group;
    }
    return sub;
}

/* The heads of `whole` from its `at`-th on that a kernel takes at once. */
KVF_INLINE kvf_subgroup kvf_subgroup_at(kvf_subgroup whole, uint32_t at)
{
    kvf_subgroup sub;
    sub.first = whole.first + at;
    sub.count = kvf_min_u32(KVF_SUBGROUP_HEADS, whole.count - at);
    return sub;
}

/* Shapes that every kernel on pages needs. */
typedef struct kvf_shape {
    kvf_dtype dtype;
    uint32_t head_dim;       /* a multiple of 16, at most KVF_HEAD_DIM_MAX */
    uint32_t page_size;      /* 1, 2, 4 ... 64 tokens */
    kvf_pages pages : 16;    /* storage format of sealed pages */
    uint32_t value_dim : 16; /* as head_dim, at most that; 0 = head_dim */
} kvf_shape;

/* Channels of a value, and of an output. */
KVF_INLINE uint32_t kvf_value_dim(const kvf_shape *s)
{
#ifdef __CUDA_ARCH__
    return KVF_GPU_VALUE_DIM(s->head_dim);
#else
    return s->value_dim ? s->value_dim : s->head_dim;
#endif
}

/* Bytes of a key, or of a query. */
KVF_INLINE size_t kvf_key_bytes(const kvf_shape *s)
{
    return (size_t)s->head_dim * kvf_dtype_bytes(s->dtype);
}

/* Bytes of a value, or of an output. */
KVF_INLINE size_t kvf_value_bytes(const kvf_shape *s)
{
    return (size_t)kvf_value_dim(s) * kvf_dtype_bytes(s->dtype);
}

/* Bytes of a token: its key, then its value. */
KVF_INLINE size_t kvf_token_bytes(const kvf_shape *s)
{
    return kvf_key_bytes(s) + kvf_value_bytes(s);
}

KVF_INLINE size_t kvf_page_bytes(const kvf_shape *s)
{
    return s->page_size * kvf_token_bytes(s);
}

/* ---- quantized pages ----
 * [page_size] keys of head_dim bytes, then as many values, then scales of keys, then scales of
 * values; quantized.h says what they mean. Padded to KVF_QUANTIZED_ALIGN. */
#define KVF_QUANTIZED_ALIGN 64u
#define KVF_QUANTIZED_GROUP                                                                        \
    32u /* channels of a value that share a scale and a minimum, in int4                           \
         */

KVF_INLINE uint32_t kvf_quantized_groups(uint32_t value_dim)
{
    return kvf_div_ceil_u32(value_dim, KVF_QUANTIZED_GROUP);
}

/* Bytes of a value without its scales, and of these. */
KVF_INLINE uint32_t kvf_quantized_value_bytes(const kvf_shape *s)
{
    const uint32_t value_dim = kvf_value_dim(s);
    return s->pages == KVF_PAGES_K8V4 ? value_dim / 2 : value_dim;
}

KVF_INLINE uint32_t kvf_quantized_scale_bytes(const kvf_shape *s)
{
    return s->pages == KVF_PAGES_K8V4 ? 4 * kvf_quantized_groups(kvf_value_dim(s)) : 2;
}

/* Bytes of a page in its storage format. */
KVF_INLINE size_t kvf_stored_page_bytes(const kvf_shape *s)
{
    const size_t token =
        s->head_dim + kvf_quantized_value_bytes(s) + 2 + kvf_quantized_scale_bytes(s);
    return s->pages == KVF_PAGES_NATIVE ? kvf_page_bytes(s)
                                        : kvf_round_up(s->page_size * token, KVF_QUANTIZED_ALIGN);
}

/* The tokens of one page that attention reads: token t counts iff t < count and bit t of skip is
 * clear. */
typedef struct kvf_span {
    const void *page;
    const void *home; /* where its bytes are until this step's fetch has them here; NULL: here */
    uint64_t skip;
    uint32_t count;     /* tokens that exist in the page, 0 .. page_size */
    uint32_t quantized; /* 1: the page is quantized */
} kvf_span;

KVF_INLINE size_t kvf_digest_bytes(uint32_t head_dim, uint32_t subs)
{
    return (size_t)subs * 2 * head_dim * 2;
}

/* ---- where tokens of a page are ---- */

KVF_INLINE const void *kvf_offset(const void *base, size_t bytes)
{
    return (const uint8_t *)base + bytes;
}

KVF_INLINE void *kvf_offset_mut(void *base, size_t bytes)
{
    return (uint8_t *)base + bytes;
}

KVF_INLINE const void *kvf_page_key(const kvf_shape *s, const void *page, uint32_t token)
{
    return kvf_offset(page, token * kvf_token_bytes(s));
}

KVF_INLINE const void *kvf_page_value(const kvf_shape *s, const void *page, uint32_t token)
{
    return kvf_offset(page, token * kvf_token_bytes(s) + kvf_key_bytes(s));
}

/* Bit t is set iff token t exists and is not skipped. */
KVF_INLINE uint64_t kvf_live_bits(uint32_t count, uint64_t skip)
{
    return count >= 64 ? ~skip : ~skip & ((UINT64_C(1) << count) - 1);
}

/* ---- rows ---- */

/* The geometry that all rows of a cache share. */
typedef struct kvf_paging {
    kvf_shape shape;
    uint32_t kv_heads;
    uint32_t group;        /* query heads per KV head */
    uint32_t lists;        /* per row: kv_heads or kv_heads * group */
    uint32_t block_size;   /* tokens of a block, a multiple of the page size, at most 64 */
    uint32_t block_pages;  /* pages of a run: block_size / page_size */
    uint32_t block_jobs;   /* digest jobs of a run: block_pages, or 1 if a digest is of a run */
    uint32_t digest_bytes; /* of a run */
    uint32_t blocks_max;   /* stride of blocks, bits */
    uint32_t pages_max;    /* of a row: blocks_max * block_pages */
    uint32_t static_pages; /* pages of the static store per KV head */
    uint32_t slots;        /* per KV head of a KV group, a multiple of KVF_SLOT_WAYS; see slots.h */
    uint32_t pool_pages;   /* stride of slot_of_page: pages of the pool per KV head */
    uint32_t subs;         /* boxes per digest */
    uint32_t sink;         /* tokens */
    uint32_t ring_blocks;
    uint32_t spare_blocks; /* after those of a ring: 1 if pages are quantized; see quantize */
    uint32_t query_window; /* queries kept */
    uint32_t segments_max; /* stride of centroids; 0 = there are none */
    uint32_t extra_pages;  /* beyond what has room: as many as other tokens leave holes; see trim */
} kvf_paging;

/* One row during one call. Invariants: sealed_before <= sealed; sealed * block_size <= length. */
typedef struct kvf_row {
    void **blocks; /* [blocks_max] */
    char *ring;    /* [ring_blocks] blocks; block b of the row is in b % ring_blocks */
    char *digests; /* [kv_heads] of digest_stride bytes -> [blocks of the pool, digest_bytes], of
                      all rows: boxes of pages, or codes of tokens */
    size_t digest_stride;
    uint32_t *block_of; /* [blocks_max] which of the pool a sealed block is, from block_first */
    uint32_t block_first;
    int8_t *centroids;         /* [kv_heads, segments_max, head_dim]; see score_args.h */
    uint16_t *centroid_scales; /* [kv_heads, segments_max] */
    uint64_t *bits;       /* [kv_heads, blocks_max]: bit t set = token t is in the static store */
    char *static_kv;      /* the static store: [kv_heads, static_pages, page bytes]: sink, then the
                             static set */
    uint32_t *static_ids; /* [kv_heads, static_pages * page_size] token of each entry, ascending */
    uint32_t *static_count; /* [kv_heads] */
    char *queries;          /* [query_window, kv_heads * group, head_dim] */
    int32_t *slot_of_page;  /* [kv_heads, pool_pages] of all rows, with all down to slots.h */
    uint64_t *slot_words;   /* [kv_heads, slots] */
    uint32_t *slot_tags;    /* [kv_heads, slots] with writes */
    const uint32_t *writes; /* [blocks of the pool, block_size] counts of writes; NULL = pages stay
                               what they are */
    char *slots;   /* [kv_heads, slots, page bytes]; NULL = pages are attended where they live */
    uint32_t use;  /* number of the call */
    uint32_t step; /* of the row; see chosen_at */
    uint32_t
        *chosen_at;  /* [kv_heads, pages_max] 1 + step that chose a page last; NULL = nobody asks */
    uint32_t *share; /* [2] static tokens and chosen pages, data dependent; NULL = as below */
    uint64_t *fault; /* [1] lowest fault_key << 32 | token that was not finite, or all ones */
    void *const *pool; /* [sealed - sealed_before] where the blocks go that this call seals */
    const uint32_t *new_block_of; /* likewise, for block_of; NULL = it has them */
    uint32_t fault_key;           /* generation << 12 | layer; a lower one is newer */
    uint32_t static_tokens;       /* unless share says otherwise */
    uint32_t chosen_pages;        /* likewise */
    uint32_t length;              /* tokens, those of this call included */
    uint32_t sealed;              /* blocks, those of this call included */
    uint32_t sealed_before;
    uint32_t job_first;  /* of the row's digest jobs, in blocks */
    uint32_t query_slot; /* where the newest query goes */
    uint32_t
        query_count; /* queries that are valid: the newest and those before it, around the ring */
    uint32_t attend_all;  /* 1: every page of a sealed block is chosen */
    const uint32_t *idle; /* [lists] not 0: the list attends to nothing; NULL = all attend */
} kvf_row;

/* Newest tokens of a row, and their queries. */
typedef struct kvf_query_chunk {
    uint32_t first;  /* of q, out and lse */
    uint32_t tokens; /* 1 or more */
    uint32_t base;   /* tokens of the row before them */
} kvf_query_chunk;

/* Those of a launch, by value: a row each. count = 0: what the launch says without them. */
#define KVF_CHUNKS_MAX 8u
typedef struct kvf_query_chunks {
    uint32_t count;
    kvf_query_chunk at[KVF_CHUNKS_MAX];
} kvf_query_chunks;

/* Sums of one layer since the last reset; written by kernels, read by the host after a wait. */
typedef struct kvf_layer_counters {
    uint64_t tokens_attended; /* over lists */
    uint64_t pages_selected;
    uint64_t hits;
    uint64_t misses;
    uint64_t bytes_refresh;
    uint64_t bytes_prompt;
    uint64_t append_ns, score_ns, select_ns, attend_ns, refresh_ns;
    uint64_t verified;
    double recall_sum;
    double error_max;
    uint32_t static_min, static_max;
    uint64_t tokens_put, tokens_brought, pages_voided, bad_rows, bad_slots; /* see blocks_args.h */
} kvf_layer_counters;

/* ---- where things of a row are ---- */

/* The shape whose pages are runs. */
KVF_INLINE kvf_shape kvf_run_shape(const kvf_paging *p)
{
    kvf_shape s = p->shape;
    s.page_size = p->block_size;
    return s;
}

KVF_INLINE size_t kvf_run_bytes(const kvf_paging *p)
{
    return p->block_size * kvf_token_bytes(&p->shape);
}

KVF_INLINE size_t kvf_block_bytes(const kvf_paging *p)
{
    return p->kv_heads * kvf_run_bytes(p);
}

/* The same in storage format. */
KVF_INLINE size_t kvf_stored_run_bytes(const kvf_paging *p)
{
    return p->block_pages * kvf_stored_page_bytes(&p->shape);
}

KVF_INLINE size_t kvf_stored_block_bytes(const kvf_paging *p)
{
    return p->kv_heads * kvf_stored_run_bytes(p);
}

/* Bytes of a row's ring. */
KVF_INLINE size_t kvf_ring_size(const kvf_paging *p)
{
    return (p->ring_blocks + p->spare_blocks) * kvf_block_bytes(p);
}

/* Blocks, and pages, that hold at least one token. */
KVF_INLINE uint32_t kvf_row_blocks(const kvf_paging *p, const kvf_row *row)
{
    return kvf_div_ceil_u32(row->length, p->block_size);
}

KVF_INLINE uint32_t kvf_row_pages(const kvf_paging *p, const kvf_row *row)
{
    return kvf_div_ceil_u32(row->length, p->shape.page_size);
}

KVF_INLINE uint32_t kvf_row_is_idle(const kvf_row *row, uint32_t list)
{
    return row->idle && row->idle[list];
}

/* Pages of sealed blocks: what may be selected. */
KVF_INLINE uint32_t kvf_row_sealed_pages(const kvf_paging *p, const kvf_row *row)
{
    return row->sealed * p->block_pages;
}

/* Tokens of page `page`. */
KVF_INLINE uint32_t kvf_row_tokens(const kvf_paging *p, const kvf_row *row, uint32_t page)
{
    return kvf_min_u32(p->shape.page_size, row->length - page * p->shape.page_size);
}

KVF_INLINE char *kvf_row_run(const kvf_paging *p, const kvf_row *row, uint32_t block, uint32_t head)
{
    return (char *)row->blocks[block] + head * kvf_run_bytes(p);
}

KVF_INLINE char *kvf_row_page(const kvf_paging *p, const kvf_row *row, uint32_t page, uint32_t head)
{
    return kvf_row_run(p, row, page / p->block_pages, head) +
           page % p->block_pages * kvf_page_bytes(&p->shape);
}

/* A page of a sealed block, in storage format: once its table names the pool. */
KVF_INLINE char *kvf_row_home(const kvf_paging *p, const kvf_row *row, uint32_t page, uint32_t head)
{
    return (char *)row->blocks[page / p->block_pages] + head * kvf_stored_run_bytes(p) +
           page % p->block_pages * kvf_stored_page_bytes(&p->shape);
}

/* Page `page` is in storage format, which is another than that of the window. */
KVF_INLINE uint32_t kvf_row_is_quantized(const kvf_paging *p, const kvf_row *row, uint32_t page)
{
    return p->shape.pages != KVF_PAGES_NATIVE && page < kvf_row_sealed_pages(p, row);
}

/* The tokens of the sink among its `tokens` first ones: where it is quantized they are in the
 * store, token i in entry i. */
KVF_INLINE uint32_t kvf_page_sink(const kvf_paging *p, uint32_t page, uint32_t tokens)
{
    const uint32_t first = page * p->shape.page_size;
    return first >= p->sink ? 0 : kvf_min_u32(tokens, p->sink - first);
}

/* Pages of a list that are in two spans: of a quantized one in which the sink ends. */
KVF_INLINE uint32_t kvf_parted_pages(const kvf_paging *p)
{
    return p->shape.pages != KVF_PAGES_NATIVE && p->sink % p->shape.page_size != 0;
}

/* The block that was sealed last, as it was before it was quantized. */
KVF_INLINE char *kvf_row_spare(const kvf_paging *p, const kvf_row *row)
{
    return row->ring + p->ring_blocks * kvf_block_bytes(p);
}

KVF_INLINE char *kvf_row_ring_block(const kvf_paging *p, const kvf_row *row, uint32_t block)
{
    return row->ring + block % p->ring_blocks * kvf_block_bytes(p);
}

/* Page `page` was chosen in one of the row's last KVF_RECENT_STEPS steps. */
#define KVF_RECENT_STEPS 8u
KVF_INLINE uint32_t kvf_row_is_recent(const kvf_paging *p, const kvf_row *row, uint32_t head,
                                      uint32_t page)
{
    const uint32_t at = row->chosen_at[(size_t)head * p->pages_max + page];
    return at && at + KVF_RECENT_STEPS > row->step;
}

KVF_INLINE uint64_t *kvf_row_bits(const kvf_paging *p, const kvf_row *row, uint32_t head)
{
    return row->bits + (size_t)head * p->blocks_max;
}

/* The bits of one page, of its block's. */
KVF_INLINE uint64_t kvf_page_skip(const kvf_paging *p, uint64_t bits, uint32_t page)
{
    return bits >> page % p->block_pages * p->shape.page_size &
           kvf_live_bits(p->shape.page_size, 0);
}

KVF_INLINE uint64_t kvf_row_skip(const kvf_paging *p, const kvf_row *row, uint32_t head,
                                 uint32_t page)
{
    return kvf_page_skip(p, kvf_row_bits(p, row, head)[page / p->block_pages], page);
}

/* Digests of a run belong to its block of the pool, so rows that share a block share them. They are
 * written once, when the block is sealed. */
KVF_INLINE char *kvf_row_digests(const kvf_paging *p, const kvf_row *row, uint32_t pool_block,
                                 uint32_t head)
{
    return row->digests + head * row->digest_stride + (size_t)pool_block * p->digest_bytes;
}

/* Which block of the pool a block is that this call seals. */
KVF_INLINE uint32_t kvf_row_sealing(const kvf_row *row, uint32_t block)
{
    return row->new_block_of ? row->new_block_of[block - row->sealed_before] : row->block_of[block];
}

/* Where job `job` of a block that this call seals writes its digest. */
KVF_INLINE char *kvf_row_job_digest(const kvf_paging *p, const kvf_row *row, uint32_t block,
                                    uint32_t job, uint32_t head)
{
    return kvf_row_digests(p, row, kvf_row_sealing(row, block), head) +
           (size_t)job * (p->digest_bytes / p->block_jobs);
}

/* Tokens that a static store has room for, per KV head. */
KVF_INLINE size_t kvf_static_room(const kvf_paging *p)
{
    return (size_t)p->static_pages * p->shape.page_size;
}

KVF_INLINE char *kvf_static_page(const kvf_paging *p, char *kv, uint32_t head, uint32_t page)
{
    return kv + ((size_t)head * p->static_pages + page) * kvf_page_bytes(&p->shape);
}

/* Entry `entry` of it: a key, then its value. */
KVF_INLINE char *kvf_static_token(const kvf_paging *p, char *kv, uint32_t head, uint32_t entry)
{
    return kvf_static_page(p, kv, head, 0) + entry * kvf_token_bytes(&p->shape);
}

/* KV head of list l of a row. */
KVF_INLINE uint32_t kvf_list_head(const kvf_paging *p, uint32_t list)
{
    return list / (p->lists / p->kv_heads);
}

/* Tokens that the static set of a KV head may have. */
KVF_INLINE uint32_t kvf_row_static(const kvf_row *row)
{
    return row->share ? row->share[0] : row->static_tokens;
}

/* Full pages that a list of the row has room for. */
KVF_INLINE uint32_t kvf_row_room(const kvf_row *row)
{
    return row->share ? row->share[1] : row->chosen_pages;
}

/* Pages that a list of the row chooses. */
KVF_INLINE uint32_t kvf_row_choose(const kvf_paging *p, const kvf_row *row)
{
    const uint32_t sealed = kvf_row_sealed_pages(p, row);
    return row->attend_all ? sealed : kvf_min_u32(kvf_row_room(row) + p->extra_pages, sealed);
}

/* Bits of the tokens of block `block` that belong to the sink. */
KVF_INLINE uint64_t kvf_sink_bits(const kvf_paging *p, uint32_t block)
{
    const uint32_t first = block * p->block_size;
    return first >= p->sink ? 0 : kvf_live_bits(kvf_min_u32(p->block_size, p->sink - first), 0);
}

#ifndef __cplusplus
/* Keep the lowest (key, token) that was not finite, whatever the order of tasks. */
static inline void kvf_row_fault(const kvf_row *row, uint32_t token)
{
    const uint64_t value = (uint64_t)row->fault_key << 32 | token;
    uint64_t seen = __atomic_load_n(row->fault, __ATOMIC_RELAXED);
    while (value < seen && !__atomic_compare_exchange_n(row->fault, &seen, value, 1,
                                                        __ATOMIC_RELAXED, __ATOMIC_RELAXED))
        ;
}
#endif

#endif
