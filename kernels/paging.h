/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_KERNELS_PAGING_H
#define KVF_KERNELS_PAGING_H

/*
 * Pages, and rows of pages: what most kernels are about.
 *
 * A page is [page_size, 2, head_dim] in `dtype`, contiguous: key and value of a token lie side by
 * side, so pages that follow each other are one longer run of tokens.
 *
 * A *row* is one layer of one sequence, described by a kvf_row whose pointers are device memory. A
 * *list* is a row's pages for one KV head (lists == kv_heads) or one query head (lists == query
 * heads). Page p of a row holds tokens p * page_size ... and lies, for KV head h, at blocks[p] + h
 * * page bytes. Pages below `sealed` are complete, have a digest and may be selected; the others
 * are the window.
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

#define KVF_GROUP_MAX_HEADS 16u
#define KVF_PAGE_SIZE_MAX   64u
#define KVF_HEAD_DIM_MAX    256u

/* Shapes that every kernel on pages needs. */
typedef struct kvf_shape {
    kvf_dtype dtype;
    uint32_t head_dim;  /* 64, 80, 96, 128 or 256 */
    uint32_t page_size; /* 8, 16, 32 or 64 tokens */
} kvf_shape;

/* Bytes of a key, or of a value. */
KVF_INLINE size_t kvf_row_bytes(const kvf_shape *s)
{
    return (size_t)s->head_dim * kvf_dtype_bytes(s->dtype);
}

/* Bytes of a token: its key, then its value. */
KVF_INLINE size_t kvf_token_bytes(const kvf_shape *s)
{
    return 2 * kvf_row_bytes(s);
}

KVF_INLINE size_t kvf_page_bytes(const kvf_shape *s)
{
    return s->page_size * kvf_token_bytes(s);
}

/* What attention reads of one page: token t counts iff t < count and bit t of skip is clear. */
typedef struct kvf_span {
    const void *page;
    uint64_t skip;
    uint32_t count;   /* tokens that exist in the page, 0 .. page_size */
    uint32_t fetched; /* 1: the bytes arrive with this step's fetch; attended in the second pass */
} kvf_span;

KVF_INLINE size_t kvf_digest_bytes(uint32_t head_dim, uint32_t subs)
{
    return (size_t)subs * 2 * head_dim * 2;
}

/* ---- where rows of a page are ---- */

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
    return kvf_offset(page, token * kvf_token_bytes(s) + kvf_row_bytes(s));
}

/* Bit t is set iff token t exists and is not skipped. */
KVF_INLINE uint64_t kvf_live_bits(uint32_t count, uint64_t skip)
{
    return count >= 64 ? ~skip : ~skip & ((UINT64_C(1) << count) - 1);
}

/* ---- rows of pages ---- */

/* What all rows of a cache share. */
typedef struct kvf_paging {
    kvf_shape shape;
    uint32_t kv_heads;
    uint32_t group;       /* query heads per KV head */
    uint32_t lists;       /* per row: kv_heads or kv_heads * group */
    uint32_t pages_max;   /* stride of blocks, digests, bits, slot_of_page */
    uint32_t store_pages; /* pages of the static store per KV head */
    uint32_t slots;       /* per list */
    uint32_t subs;        /* boxes per digest */
    uint32_t sink;        /* tokens */
    uint32_t ring_blocks;
    uint32_t query_window; /* queries kept */
} kvf_paging;

/* One row during one call. Invariants: sealed_before <= sealed; sealed * page_size <= length. */
typedef struct kvf_row {
    void **blocks;  /* [pages_max] */
    char *ring;     /* [ring_blocks, kv_heads, page bytes]; page p is in block p % ring_blocks */
    char *digests;  /* [kv_heads, pages_max, digest bytes] */
    uint64_t *bits; /* [kv_heads, pages_max]: bit t set = token t is in the static store */
    char *store;    /* [kv_heads, store_pages, page bytes]: sink, then the static set */
    uint32_t *store_index; /* [kv_heads, store_pages * page_size] token of each entry, ascending */
    uint32_t *store_count; /* [kv_heads] */
    char *queries;         /* [query_window, kv_heads * group, head_dim] */
    int32_t *slot_of_page; /* [lists, pages_max] */
    char *slots;     /* [lists, slots, page bytes]; NULL = pages are attended where they live */
    uint32_t *share; /* [2] static tokens and chosen pages, data dependent; NULL = as below */
    uint64_t *fault; /* [1] lowest fault_key << 32 | token that was not finite, or all ones */
    void *const
        *pool; /* [sealed - sealed_before] pool addresses of the pages sealed by this call */
    uint32_t fault_key;     /* generation << 12 | layer; a lower one is newer */
    uint32_t static_tokens; /* unless share says otherwise */
    uint32_t chosen_pages;  /* likewise */
    uint32_t length;        /* tokens, those of this call included */
    uint32_t sealed;        /* pages, those of this call included */
    uint32_t sealed_before;
    uint32_t job_first;   /* of the row's digest jobs, in pages */
    uint32_t query_slot;  /* where the newest query goes */
    uint32_t query_count; /* queries that are valid, slots 0 .. query_count - 1 */
    uint32_t attend_all;  /* 1: every sealed page is chosen */
} kvf_row;

/* Sums of one layer since the last reset; written by kernels, read by the host after a wait. */
typedef struct kvf_layer_counters {
    uint64_t tokens_attended; /* over lists */
    uint64_t pages_selected;
    uint64_t hits;
    uint64_t misses;
    uint64_t bytes_refresh;
    uint64_t append_ns, score_ns, select_ns, attend_ns, refresh_ns;
    uint64_t verified;
    double recall_sum;
    double error_max;
    uint32_t static_min, static_max;
    uint64_t pages_ahead, pages_ahead_used;
} kvf_layer_counters;

/* ---- where things of a row are ---- */

KVF_INLINE size_t kvf_block_bytes(const kvf_paging *p)
{
    return p->kv_heads * kvf_page_bytes(&p->shape);
}

/* Pages that hold at least one token. */
KVF_INLINE uint32_t kvf_row_pages(const kvf_paging *p, const kvf_row *row)
{
    return kvf_div_ceil_u32(row->length, p->shape.page_size);
}

/* Tokens of page `page`. */
KVF_INLINE uint32_t kvf_row_tokens(const kvf_paging *p, const kvf_row *row, uint32_t page)
{
    return kvf_min_u32(p->shape.page_size, row->length - page * p->shape.page_size);
}

KVF_INLINE char *kvf_row_page(const kvf_paging *p, const kvf_row *row, uint32_t page, uint32_t head)
{
    return (char *)row->blocks[page] + head * kvf_page_bytes(&p->shape);
}

KVF_INLINE char *kvf_row_ring_block(const kvf_paging *p, const kvf_row *row, uint32_t page)
{
    return row->ring + page % p->ring_blocks * kvf_block_bytes(p);
}

KVF_INLINE char *kvf_row_slot(const kvf_paging *p, const kvf_row *row, uint32_t list, int32_t slot)
{
    return row->slots + ((size_t)list * p->slots + (size_t)slot) * kvf_page_bytes(&p->shape);
}

KVF_INLINE uint64_t *kvf_row_bits(const kvf_paging *p, const kvf_row *row, uint32_t head)
{
    return row->bits + (size_t)head * p->pages_max;
}

KVF_INLINE char *kvf_row_digest(const kvf_paging *p, const kvf_row *row, uint32_t page,
                                uint32_t head)
{
    return row->digests +
           ((size_t)head * p->pages_max + page) * kvf_digest_bytes(p->shape.head_dim, p->subs);
}

/* Tokens that a static store has room for, per KV head. */
KVF_INLINE size_t kvf_store_tokens(const kvf_paging *p)
{
    return (size_t)p->store_pages * p->shape.page_size;
}

KVF_INLINE char *kvf_store_page(const kvf_paging *p, char *store, uint32_t head, uint32_t page)
{
    return store + ((size_t)head * p->store_pages + page) * kvf_page_bytes(&p->shape);
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

/* Pages that a list of the row chooses. */
KVF_INLINE uint32_t kvf_row_choose(const kvf_row *row)
{
    const uint32_t pages = row->share ? row->share[1] : row->chosen_pages;
    return row->attend_all ? row->sealed : kvf_min_u32(pages, row->sealed);
}

/* Bits of the tokens of `page` that belong to the sink. */
KVF_INLINE uint64_t kvf_sink_bits(const kvf_paging *p, uint32_t page)
{
    const uint32_t first = page * p->shape.page_size;
    if (first >= p->sink)
        return 0;
    const uint32_t tokens = kvf_min_u32(p->shape.page_size, p->sink - first);
    return tokens == 64 ? ~UINT64_C(0) : (UINT64_C(1) << tokens) - 1;
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
