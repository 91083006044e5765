/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_KERNELS_SELECT_ARGS_H
#define KVF_KERNELS_SELECT_ARGS_H

/*
 * Contracts, arguments and tasks: pages chosen by score, and the slots that they get.
 * See kernels.h for what holds for every kernel.
 */

#include "attend/attend_args.h"
#include "score/score_args.h"
#include "slots.h"

/* ---- caller_scores: what the caller selects as scores of pages, for topk ----
 * For every list l and sealed page p: out[l, p] = scores[l, p]; or, with ids, caller_stride - i for
 * the first i with ids[l, i] == p. A page that ids do not name, and a page whose tokens are all in
 * the static store, gets -INFINITY. One task per list.
 */
#define KVF_CALLER_STRIDE_MAX (1u << 24) /* places that differ as floats */
typedef struct kvf_caller_scores_args {
    kvf_paging paging; /* lists == kv_heads */
    uint32_t rows;
    uint32_t stride; /* stride of out, >= every number of sealed pages */
    uint32_t caller_stride;
    uint32_t caller_heads; /* lists of a row that the caller has */
    const uint32_t *heads; /* [lists] which of these each is; NULL = the same */
    const kvf_row *row;    /* [rows] */
    const float *scores;   /* [rows, caller_heads, caller_stride] or NULL */
    const int32_t *ids;    /* the same shape; used if scores is NULL */
    float *out;            /* [rows * lists, stride] */
} kvf_caller_scores_args;
KVF_TASKS(caller_scores, kvf_caller_scores_args, a->rows * a->paging.lists)

/* Where the caller's numbers for a list begin, in scores or ids. */
KVF_INLINE size_t kvf_caller_scores_first(const kvf_caller_scores_args *a, uint32_t list)
{
    const uint32_t lists = a->paging.lists, of_row = list % lists;
    const uint32_t head = a->heads ? a->heads[of_row] : of_row;
    return ((size_t)(list / lists) * a->caller_heads + head) * a->caller_stride;
}

/* A sealed page that the step does not attend to anyway. */
KVF_INLINE uint32_t kvf_caller_page_counts(const kvf_paging *p, const kvf_row *row, uint32_t head,
                                           uint32_t page)
{
    return page < kvf_row_sealed_pages(p, row) &&
           kvf_row_skip(p, row, head, page) != kvf_live_bits(p->shape.page_size, 0);
}

/* ---- topk: exact, ties to the lower index ----
 * The k[l] largest of scores[l, first[l] .. first[l]+count[l]-1]; -INFINITY and NaN are never
 * taken. ids are indices into scores[l] (first included), ascending. id_count[l] <= k[l]. One
 * task per list. `work` is [lists, work_stride] uint32, work_stride >= the largest count. `arrived`
 * lets several blocks of a GPU share a long list; each of its words is zero before and after.
 */
typedef struct kvf_topk_args {
    uint32_t lists;
    uint32_t stride;  /* stride of scores */
    uint32_t ids_max; /* stride of ids, >= every k */
    uint32_t work_stride;
    const float *scores;   /* [lists, stride] */
    const uint32_t *first; /* [lists]; NULL = 0 */
    const uint32_t *count; /* [lists] */
    const uint32_t *k;     /* [lists] */
    int32_t *ids;          /* [lists, ids_max] */
    uint32_t *id_count;    /* [lists] */
    uint32_t *work;
    uint32_t *arrived; /* [lists], or NULL: one block per list */
} kvf_topk_args;
KVF_TASKS(topk, kvf_topk_args, a->lists)

/* ---- trim: of chosen pages, as many as there is room for by their tokens ----
 * The ids [l, 0 .. id_count[l]), which ascend, that are left come first by score, ties by the lower
 * id, and together have no more tokens outside the static store than kvf_row_room full pages have;
 * all are left where a row attends to all. Scores are not NaN. One task per list. */
typedef struct kvf_trim_args {
    kvf_paging paging; /* lists == kv_heads */
    uint32_t rows;
    uint32_t stride;     /* stride of scores */
    uint32_t ids_max;    /* stride of ids */
    const kvf_row *row;  /* [rows] */
    const float *scores; /* [rows * lists, stride] */
    int32_t *ids;        /* [rows * lists, ids_max] in and out */
    uint32_t *id_count;  /* [rows * lists] in and out */
} kvf_trim_args;
KVF_TASKS(trim, kvf_trim_args, a->rows * a->paging.lists)

/* Orders like the scores: a larger key is a larger score. -0 equals +0. */
KVF_INLINE uint32_t kvf_trim_key(const kvf_trim_args *a, uint32_t list, int32_t id)
{
    const uint32_t u = kvf_float_bits(a->scores[(size_t)list * a->stride + (uint32_t)id] + 0.0f);
    return u >> 31 ? ~u : u | 0x80000000u;
}

/* Bits of the page's tokens that are attended with it. */
KVF_INLINE uint64_t kvf_trim_live(const kvf_trim_args *a, uint32_t list, int32_t id)
{
    const kvf_paging *p = &a->paging;
    const kvf_row *row = &a->row[list / p->lists];
    return kvf_live_bits(p->shape.page_size, kvf_row_skip(p, row, list % p->lists, (uint32_t)id));
}

KVF_INLINE uint32_t kvf_trim_room(const kvf_trim_args *a, uint32_t list)
{
    const kvf_row *row = &a->row[list / a->paging.lists];
    return row->attend_all ? UINT32_MAX : kvf_row_room(row) * a->paging.shape.page_size;
}

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
KVF_TASKS(newest, kvf_newest_args, a->rows * a->paging.lists)

/* ---- spread: the ids of source list l / lists, for every list l of a row. One task per list.
 */
typedef struct kvf_spread_args {
    uint32_t rows;
    uint32_t lists;
    uint32_t ids_max;
    const int32_t *from;        /* [rows, ids_max] */
    const uint32_t *from_count; /* [rows] */
    int32_t *ids;               /* [rows * lists, ids_max] out */
    uint32_t *id_count;         /* [rows * lists] out */
} kvf_spread_args;
KVF_TASKS(spread, kvf_spread_args, a->rows * a->lists)

/* ---- mask: chosen tokens into pages and what to skip of them (oracle). One task per list; one
 * row. */
typedef struct kvf_mask_args {
    kvf_paging paging;
    uint32_t ids_max;
    uint32_t tokens_max;         /* stride of tokens */
    const int32_t *tokens;       /* [lists, tokens_max] ascending */
    const uint32_t *token_count; /* [lists] */
    int32_t *ids;                /* [lists, ids_max] out */
    uint32_t *id_count;          /* [lists] out */
    uint64_t *masks;             /* [lists, ids_max] out: bit set = not chosen */
} kvf_mask_args;
KVF_TASKS(mask, kvf_mask_args, a->paging.lists)

/* ---- resolve: chosen pages to slots ----
 * Pages ids[0..count) of every list get slots of their KV head (slots.h), or have them: missed is 0
 * where the page was there before the call, 1 where this list is the one to bring it, and
 * KVF_MISSED_LATE where another list of the call is. {page, slot} of the second kind are the list's
 * misses. No page that a list of the call has been given goes for another; with slots for all that
 * may be chosen in a call there is always one. Copies of pages that were written again are voided,
 * and counted.
 *
 * The reference is exact where no two lists want slots of a bucket; else a GPU, whose lists do this
 * at once, may give others away, and each may bring what two want. Both keep this: a page has
 * one slot, a slot one page, every chosen page is in its slot or comes into it, hits and misses are
 * what was chosen. A task is a KV head. */
KVF_TASKS(resolve, kvf_choices, a->rows ? a->paging.kv_heads : 0)

/* ---- admit: pages of blocks that are sealed by this call into slots ----
 * A page takes a free slot of its bucket, or that of the page that was used longest ago, but not of
 * one that is admitted with it; if there is none it has no slot. Its bytes come from where the row
 * has them, in storage format. A task is a KV head. */
typedef struct kvf_admit_args {
    kvf_paging paging;
    uint32_t rows;
    uint32_t count;     /* most blocks that a row seals */
    const kvf_row *row; /* [rows] of one call */
} kvf_admit_args;
KVF_TASKS(admit, kvf_admit_args, a->rows ? a->paging.kv_heads : 0)

/* Quantized pages are in the pool already, where the table may not name it yet; others are where
 * the window or a prompt's chunk has them. */
KVF_INLINE const char *kvf_admit_from(const kvf_paging *p, const kvf_row *row, uint32_t head,
                                      uint32_t block, uint32_t number)
{
    const void *home = p->shape.pages != KVF_PAGES_NATIVE && row->pool
                           ? row->pool[block - row->sealed_before]
                           : row->blocks[block];
    const char *from = (const char *)home + head * kvf_stored_run_bytes(p);
    return from + number * kvf_stored_page_bytes(&p->shape);
}

/* ---- select: topk, resolve and assemble of every list, one after the other ----
 * The results of the three, with these arguments, for a fused step, where a launch is the cost. k
 * NULL: there is no topk, ids and id_count are given. masses.mass: scores are those that
 * reduce_mass makes of it; masses.out is `scores`, and may stay unwritten. One task; the host
 * device runs them by themselves.
 */
typedef struct kvf_select_args {
    kvf_assemble_args assemble;  /* of assemble, and with its choices of resolve and topk */
    uint32_t stride;             /* stride of scores */
    uint32_t work_stride;        /* of topk */
    const float *scores;         /* [rows * lists, stride], of topk */
    kvf_reduce_mass_args masses; /* mass NULL: scores are given. Else with topk; its lists, lengths
                                    and stride are those of topk */
    const uint32_t *count;       /* [rows * lists], of topk */
    const uint32_t *k;           /* [rows * lists], of topk; NULL = no topk */
    uint32_t *work;              /* of topk */
    uint32_t *arrived;           /* of topk */
} kvf_select_args;
KVF_TASKS(select, kvf_select_args, a->assemble.choices.rows != 0)

/* The arguments of its topk. */
KVF_INLINE kvf_topk_args kvf_select_topk(const kvf_select_args *a)
{
    const kvf_choices *c = &a->assemble.choices;
    kvf_topk_args top;
    top.lists = c->rows * c->paging.lists;
    top.stride = a->stride;
    top.ids_max = c->ids_max;
    top.work_stride = a->work_stride;
    top.scores = a->scores;
    top.first = NULL;
    top.count = a->count;
    top.k = a->k;
    top.ids = c->ids;
    top.id_count = c->id_count;
    top.work = a->work;
    top.arrived = a->arrived;
    return top;
}

/* ---- collect: the misses of all lists into their slots, where a step has no transfer engine ----
 * A task is a list. */
KVF_TASKS(collect, kvf_choices, a->rows * a->paging.lists)

/* ---- fetch: the misses of all lists as addresses, in list order. One task. ---- */
typedef struct kvf_fetch_args {
    kvf_choices choices;
    const void **from; /* out */
    void **to;         /* out */
    uint32_t *count;   /* [1] out */
} kvf_fetch_args;
KVF_TASKS(fetch, kvf_fetch_args, 1)

/* ---- drop: the store of rows that lost blocks has as much of the sink as is sealed; with `sets`
 * the static set of the rows goes, too: bits are those of the sink, and no page was chosen lately.
 * A task is a KV head of a row. */
typedef struct kvf_drop_args {
    kvf_paging paging;
    uint32_t rows;
    uint32_t sets;
    const kvf_row *row; /* [rows] sealed, static_count, bits, chosen_at */
} kvf_drop_args;
KVF_TASKS(drop, kvf_drop_args, a->rows * a->paging.kv_heads)

/* ---- overlap: how static the attention of a layer is. S tokens = page_size * floor(mean_h |a_h
 * and b_h| / page_size) of the `rest` of the budget; pages get what is left. Writes row->share and
 * choose. One task. */
typedef struct kvf_overlap_args {
    kvf_paging paging;
    const kvf_row *row; /* [1] */
    uint32_t rest;      /* tokens of the budget to divide */
    uint32_t ids_max;   /* stride of a and b */
    const int32_t *a;   /* [kv_heads, ids_max] ascending */
    const uint32_t *a_count;
    const int32_t *b;
    const uint32_t *b_count;
    uint32_t *choose; /* [choose_lists] of this row, out */
    uint32_t choose_lists;
    kvf_layer_counters *counters;
} kvf_overlap_args;
KVF_TASKS(overlap, kvf_overlap_args, 1)

#endif
