/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_KERNELS_PAGING_H
#define KVF_KERNELS_PAGING_H

/*
 * Kernels that keep page tables, page lists and static sets: bookkeeping, no arithmetic on keys
 * except where a digest is widened by a key.
 *
 * A *row* is one layer of one sequence, described by a kvf_row whose pointers are device memory. A
 * *list* is a row's pages for one KV head (lists == kv_heads) or one query head (lists == query
 * heads). Page p of a row holds tokens p * page_size ... and lies, for KV head h, at blocks[p] + h
 * * page bytes. Pages below `sealed` are complete, have a digest and may be selected; the others
 * are the window.
 *
 * Each of these kernels has one form on the host device, the one in <op>_ref.c.
 */

#include "kernels.h"
#include "page_rows.h"

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
    uint32_t *order; /* [kv_heads, pages_max * page_size] token at each position; NULL = as is */
    char *queries;   /* [query_window, kv_heads * group, head_dim] */
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

/* ---- stamp: the time in stream order. sum += now - *last; *last = now. One task. ---- */
typedef struct kvf_stamp_args {
    uint64_t *last;
    uint64_t *sum; /* NULL = only set *last */
} kvf_stamp_args;

/* ---- table: page tables of rows. Entries sealed_before .. pages(length)-1: a sealed page gets its
 * address of `pool`, the others that of their ring block. One task per row. */
typedef struct kvf_table_args {
    kvf_paging paging;
    uint32_t rows;
    const kvf_row *row; /* [rows] */
} kvf_table_args;

/* ---- append: one token per row into the window. A token that begins a page takes the page's ring
 * block. Keeps the query, notes what is not finite, and writes how many pages each list chooses.
 * One task per row. */
typedef struct kvf_append_args {
    kvf_paging paging;
    uint32_t rows;
    const kvf_row *row; /* [rows] */
    const void *q;      /* [rows, kv_heads, group, head_dim] */
    const void *k;      /* [rows, kv_heads, head_dim]; NULL = nothing is appended */
    const void *v;
    uint32_t *choose; /* [rows * choose_lists] out */
    uint32_t choose_lists;
} kvf_append_args;

/* ---- seal: pages sealed_before .. sealed-1 of each row: clear static bits, move sink tokens to
 * the front of the store, write digest jobs (row's first job at job_first * kv_heads). Folds
 * chunk_fault (relative to chunk_first) into the row's fault word. One task per (row, KV head). */
typedef struct kvf_seal_args {
    kvf_paging paging;
    uint32_t rows;
    const kvf_row *row; /* [rows] */
    kvf_digest_job *jobs;
    const uint32_t *chunk_fault; /* [1] of a prefill chunk, one row; may be NULL */
    uint32_t chunk_first;
} kvf_seal_args;

/* ---- newest: the last min(choose, sealed) pages of each list. One task per list. ---- */
typedef struct kvf_newest_args {
    kvf_paging paging;
    uint32_t rows;
    uint32_t ids_max;
    const kvf_row *row;     /* [rows] */
    const uint32_t *choose; /* [rows * lists] */
    int32_t *ids;           /* [rows * lists, ids_max] out */
    uint32_t *id_count;     /* [rows * lists] out */
} kvf_newest_args;

/* ---- spread: the ids of source list l / lists, for every list l of a row. One task per list. ---- */
typedef struct kvf_spread_args {
    uint32_t rows;
    uint32_t lists;
    uint32_t ids_max;
    const int32_t *from;        /* [rows, ids_max] */
    const uint32_t *from_count; /* [rows] */
    int32_t *ids;               /* [rows * lists, ids_max] out */
    uint32_t *id_count;         /* [rows * lists] out */
} kvf_spread_args;

/* ---- mask: chosen tokens into pages and what to skip of them (oracle). One task per list; one
 * row. */
typedef struct kvf_mask_args {
    kvf_paging paging;
    uint32_t ids_max;
    uint32_t tokens_max;         /* row stride of tokens */
    const int32_t *tokens;       /* [lists, tokens_max] ascending */
    const uint32_t *token_count; /* [lists] */
    int32_t *ids;                /* [lists, ids_max] out */
    uint32_t *id_count;          /* [lists] out */
    uint64_t *masks;             /* [lists, ids_max] out: bit set = not chosen */
} kvf_mask_args;

/* ---- assemble: what each list attends: store pages, window pages, then chosen pages by ascending
 * id. A chosen page lies in its slot and is `fetched` if it missed; without slots it lies where it
 * lives. A task is KVF_ASSEMBLE_LISTS lists. */
#define KVF_ASSEMBLE_LISTS 8u

typedef struct kvf_assemble_args {
    kvf_paging paging;
    uint32_t rows;
    uint32_t ids_max;
    uint32_t spans_max;
    const kvf_row *row;           /* [rows] */
    const int32_t *ids;           /* [rows * lists, ids_max] */
    const uint32_t *id_count;     /* [rows * lists] */
    const int32_t *slot_of_id;    /* [rows * lists, ids_max] */
    const uint32_t *missed;       /* [rows * lists, ids_max] */
    const uint64_t *masks;        /* [rows * lists, ids_max] more to skip; may be NULL */
    kvf_span *spans;              /* [rows * lists, spans_max] out */
    uint32_t *span_count;         /* [rows * lists] out */
    kvf_layer_counters *counters; /* added to, atomically */
} kvf_assemble_args;

/* ---- fetch: the misses of all lists as addresses, in list order. One task. ---- */
typedef struct kvf_fetch_args {
    kvf_paging paging;
    uint32_t rows;
    uint32_t ids_max;
    const kvf_row *row;         /* [rows] */
    const kvf_miss *misses;     /* [rows * lists, ids_max] */
    const uint32_t *miss_count; /* [rows * lists] */
    const void **from;          /* out */
    void **to;                  /* out */
    uint32_t *count;            /* [1] out */
} kvf_fetch_args;

/* ---- cover: the tokens of one row as spans, for observe and for dense attention. resident == 0:
 * every page in order, so that position i of the result is token i. resident == 1: store pages,
 * chosen pages that have a slot, by ascending id and without static tokens, then the window. Also
 * the candidates for the static set (first, count, both in tokens from the first span) and how many
 * to take. One task per KV head. */
typedef struct kvf_cover_args {
    kvf_paging paging;
    uint32_t resident;
    uint32_t spans_max;
    const kvf_row *row;   /* [1] */
    kvf_span *spans;      /* [kv_heads, spans_max] out */
    uint32_t *span_index; /* [kv_heads, spans_max] out */
    uint32_t *span_count; /* [kv_heads] out */
    uint32_t *first;      /* [kv_heads] out; the rest may be NULL together */
    uint32_t *count;      /* [kv_heads] out */
    uint32_t *take;  /* [kv_heads] out: the row's static tokens, or take_tokens if that is not 0 */
    uint32_t *limit; /* [query_window] out: token of each kept query */
    uint32_t take_tokens;
} kvf_cover_args;

/* ---- overlap: how static the attention of a layer is. S tokens = page_size * floor(mean_h |a_h
 * and b_h| / page_size) of the `rest` of the budget; pages get what is left. Writes row->share and
 * choose. One task. */
typedef struct kvf_overlap_args {
    kvf_paging paging;
    const kvf_row *row; /* [1] */
    uint32_t rest;      /* tokens of the budget to divide */
    uint32_t ids_max;   /* row stride of a and b */
    const int32_t *a;   /* [kv_heads, ids_max] ascending */
    const uint32_t *a_count;
    const int32_t *b;
    const uint32_t *b_count;
    uint32_t *choose; /* [choose_lists] of this row, out */
    uint32_t choose_lists;
    kvf_layer_counters *counters;
} kvf_overlap_args;

/* ---- pack: a new static store out of the old one and of pages. Ids are positions in the spans of
 * `cover`. Updates bits; pages whose bits changed get a digest job if they can be read (resident ==
 * 0, or in a slot), else their digest is widened by the returning keys. Unused jobs have page NULL.
 * One task per KV head. */
typedef struct kvf_pack_args {
    kvf_paging paging;
    uint32_t resident;
    uint32_t spans_max;
    uint32_t ids_max;
    uint32_t jobs_max;  /* per KV head, >= 2 * static tokens or pages_max */
    const kvf_row *row; /* [1]; its store is the old one */
    const kvf_span *spans;
    const uint32_t *span_index;
    const int32_t *ids;       /* [kv_heads, ids_max] ascending */
    const uint32_t *id_count; /* [kv_heads] */
    char *store;              /* new ones, as in kvf_row */
    uint32_t *store_index;
    uint32_t *store_count;
    kvf_digest_job *jobs; /* [kv_heads, jobs_max] out */
    kvf_layer_counters *counters;
} kvf_pack_args;

/* ---- permute: as pack, but pages are re-formed in the order sink, static set, rest, in the blocks
 * after->pool. Clears nothing of residency. Jobs: every sealed page, [kv_heads, sealed]. One task
 * per KV head. */
typedef struct kvf_permute_args {
    kvf_paging paging;
    uint32_t resident;
    uint32_t spans_max;
    uint32_t ids_max;
    const kvf_row *row;   /* [1] as it was */
    const kvf_row *after; /* [1] with the other store and order, and new blocks in pool */
    const kvf_span *spans;
    const uint32_t *span_index;
    const int32_t *ids;       /* [kv_heads, ids_max] ascending */
    const uint32_t *id_count; /* [kv_heads] */
    kvf_digest_job *jobs;     /* [kv_heads, sealed] out */
    kvf_layer_counters *counters;
} kvf_permute_args;

/* ---- csr_out: chosen pages, sink pages and window pages of rows as CSR lists; lists == kv_heads.
 * One task. */
/* ---- csr_in: CSR lists as spans. One task per list. ---- */
typedef struct kvf_csr_args {
    kvf_paging paging;
    uint32_t rows;
    uint32_t ids_max;
    uint32_t spans_max;
    const kvf_row *row;       /* [rows] */
    const int32_t *ids;       /* csr_out: [rows * lists, ids_max] */
    const uint32_t *id_count; /* csr_out */
    int32_t *indptr;          /* [rows * lists + 1] */
    int32_t *indices;
    int32_t *last_page_len; /* [rows * lists] */
    kvf_span *spans;        /* csr_in: out */
    uint32_t *span_count;   /* csr_in: out */
} kvf_csr_args;

/* ---- compare: sparse against dense results of one row. verified += heads, recall_sum +=
 * e^(lse_sparse - lse_dense), error_max = max |out - dense|. One task, sums in order. */
typedef struct kvf_compare_args {
    kvf_shape shape;
    uint32_t heads;
    const void *out; /* [heads, head_dim] dtype */
    const void *dense;
    const float *lse; /* [heads] */
    const float *dense_lse;
    kvf_layer_counters *counters;
} kvf_compare_args;

/* ---- ahead: slots that were filled ahead of need, one bit per slot. After such a resolve (is_use
 * == 0): the bits of its misses are set and counted. After that of a step (is_use == 1): a set bit
 * of a chosen page that was resident is counted as used and cleared; that of a miss is cleared. One
 * task per list. */
typedef struct kvf_ahead_args {
    uint32_t lists;
    uint32_t ids_max;
    uint32_t is_use;
    const uint32_t *id_count;     /* [lists] */
    const int32_t *slot_of_id;    /* [lists, ids_max] */
    const uint32_t *missed;       /* [lists, ids_max] */
    uint32_t *const *marks;       /* [lists] -> [ceil(slots / 32)] */
    kvf_layer_counters *counters; /* added to, atomically */
} kvf_ahead_args;

/* ---- frame: arguments of a recorded step. The host writes them into a ring of frames; every part
 * goes to its fixed place, and the part's turn moves on, so that the next run of the same recording
 * finds the next frame. Turns wrap at 2^32: `frames` is a power of two. One task per part. */
typedef struct kvf_frame_args {
    uint32_t frames;
    uint32_t parts;
    size_t bytes;     /* of a part, a multiple of 16 */
    const char *from; /* [frames, parts, bytes], host memory at its device alias */
    char *to;         /* [parts, bytes] */
    uint32_t *turns;  /* [parts] runs so far */
} kvf_frame_args;

/* ---- writeback: the blocks that a decode step sealed, from the ring to the pool: pages
 * sealed_before .. sealed-1 of each row. The same copies as the host enqueues one by one, for a
 * recorded step, whose pages the host does not know. One task per row. */
typedef struct kvf_writeback_args {
    kvf_paging paging;
    uint32_t rows;
    const kvf_row *row; /* [rows] */
} kvf_writeback_args;

/* ---- heads: chosen heads of rows. Per job, head from_head[i] of every row of `from` becomes head
 * to_head[i] of that row of `to`, i < count; a NULL list is 0, 1, ... Heads of `to` that are not
 * named keep what they have. A task is KVF_HEADS_ROWS rows of one job. */
#define KVF_HEADS_ROWS 8u

typedef struct kvf_heads_job {
    const void *from; /* [rows, from_heads, bytes] */
    void *to;         /* [rows, to_heads, bytes] */
    const uint32_t *from_head;
    const uint32_t *to_head;
    uint32_t from_heads;
    uint32_t to_heads;
    uint32_t count;
    uint32_t bytes; /* a multiple of 4 */
} kvf_heads_job;

typedef struct kvf_heads_args {
    uint32_t rows;
    uint32_t job_count;
    const kvf_heads_job *jobs; /* [job_count] */
} kvf_heads_args;

KVF_INLINE uint32_t kvf_heads_tasks(const kvf_heads_args *a)
{
    return a->job_count * kvf_div_ceil_u32(a->rows, KVF_HEADS_ROWS);
}

/* ---- ring: one token per row into the rings of its streaming heads, and the spans that it attends
 * to: tokens below sink and the newest `recent`. kvf_row.ring is [sink_blocks + ring_blocks, heads,
 * page bytes]: the pages of the sink, then page p in block (p - sink_blocks) % ring_blocks of the
 * others. Notes what is not finite. One task per (row, head). Invariant: ring_blocks pages hold
 * `recent` consecutive tokens wherever they begin, or sink and ring hold every token there may be.
 */
typedef struct kvf_ring {
    kvf_shape shape;
    uint32_t heads;
    uint32_t sink;
    uint32_t recent;
    uint32_t sink_blocks;
    uint32_t ring_blocks; /* at least 1 */
} kvf_ring;

typedef struct kvf_ring_args {
    kvf_ring ring;
    uint32_t rows;
    uint32_t kv_heads;    /* of k and v */
    uint32_t spans_max;   /* >= sink_blocks + ring_blocks */
    const uint32_t *head; /* [ring.heads] of kv_heads; NULL = 0, 1, ... */
    const kvf_row *row;   /* [rows]: ring, fault, fault_key, length; nothing else is looked at */
    const void *k;        /* [rows, kv_heads, head_dim] */
    const void *v;
    kvf_span *spans;      /* [rows * ring.heads, spans_max] out */
    uint32_t *span_count; /* [rows * ring.heads] out */
} kvf_ring_args;

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

/* ---- rings of streaming heads ---- */

/* Block of page p among those of a row. */
KVF_INLINE uint32_t kvf_ring_block(const kvf_ring *r, uint32_t page)
{
    return page < r->sink_blocks ? page : r->sink_blocks + (page - r->sink_blocks) % r->ring_blocks;
}

KVF_INLINE char *kvf_ring_page(const kvf_ring *r, char *blocks, uint32_t page, uint32_t head)
{
    return blocks + ((size_t)kvf_ring_block(r, page) * r->heads + head) * kvf_page_bytes(&r->shape);
}

/* Tokens below `sink`, and those from the result on, are what the newest of `length` sees. */
KVF_INLINE uint32_t kvf_ring_recent(const kvf_ring *r, uint32_t length)
{
    return length > r->recent ? length - r->recent : 0;
}

/* The first page behind those of the sink that the newest of `length` tokens sees. */
KVF_INLINE uint32_t kvf_ring_first(const kvf_ring *r, uint32_t length)
{
    return kvf_max_u32(r->sink_blocks, kvf_ring_recent(r, length) / r->shape.page_size);
}

KVF_INLINE uint32_t kvf_ring_spans(const kvf_ring *r, uint32_t length)
{
    const uint32_t pages = kvf_div_ceil_u32(length, r->shape.page_size);
    const uint32_t first = kvf_ring_first(r, length);
    return kvf_min_u32(r->sink_blocks, pages) + (pages > first ? pages - first : 0);
}

/* Span i of what the newest of `length` tokens attends to. */
KVF_INLINE kvf_span kvf_ring_span(const kvf_ring *r, char *blocks, uint32_t length, uint32_t head,
                                  uint32_t i)
{
    const uint32_t page_size = r->shape.page_size, recent = kvf_ring_recent(r, length);
    const uint32_t page = i < r->sink_blocks ? i : kvf_ring_first(r, length) + (i - r->sink_blocks);
    const uint32_t first = page * page_size;
    const uint32_t from = r->sink > first ? kvf_min_u32(r->sink - first, page_size) : 0;
    const uint32_t end = recent > first ? kvf_min_u32(recent - first, page_size) : 0;
    kvf_span span;
    span.page = kvf_ring_page(r, blocks, page, head);
    span.skip = from < end ? kvf_live_bits(end, 0) & ~kvf_live_bits(from, 0) : 0;
    span.count = kvf_min_u32(page_size, length - first);
    span.fetched = 0;
    return span;
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
