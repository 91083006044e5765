/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_KERNELS_SELECT_ARGS_H
#define KVF_KERNELS_SELECT_ARGS_H

/*
 * Contracts, arguments and tasks: pages chosen by score, and the slots that they get.
 * See kernels.h for what holds for every kernel.
 */

#include "attend/attend_args.h"

/* ---- topk: exact, ties to the lower index ----
 * Of scores[l, first[l] .. first[l]+count[l]-1], the k[l] largest; -INFINITY and NaN are never
 * taken. ids are indices into the row (first included), ascending. id_count[l] <= k[l]. One
 * task per list. `work` is [lists, work_stride] uint32, work_stride >= the largest count. `arrived`
 * lets several blocks of a GPU share a long list; each of its words is zero before and after.
 */
typedef struct kvf_topk_args {
    uint32_t lists;
    uint32_t stride;  /* row stride of scores */
    uint32_t ids_max; /* row stride of ids, >= every k */
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
    uint32_t tokens_max;         /* row stride of tokens */
    const int32_t *tokens;       /* [lists, tokens_max] ascending */
    const uint32_t *token_count; /* [lists] */
    int32_t *ids;                /* [lists, ids_max] out */
    uint32_t *id_count;          /* [lists] out */
    uint64_t *masks;             /* [lists, ids_max] out: bit set = not chosen */
} kvf_mask_args;
KVF_TASKS(mask, kvf_mask_args, a->paging.lists)

/* ---- lend: slots that rows lend each other, of pages that they have in common ----
 * Row order[i] has its first common[i] pages in common with row order[i-1]; 0: none, and a chain of
 * rows begins. Rows further apart have the least between them in common, so those that have a page
 * are neighbours. Lists of the same number of a chain lend each other slots: a page that a list
 * chooses and has no slot for is lent to it by the first of those neighbours that has it in a slot
 * and keeps it there; if there is none, by the first that chooses it, which brings it. lender is
 * that row, or -1: the list has the page, or is the one to bring it. missed is 0 or 2 where there
 * is a lender: 2 if that one brings it.
 *
 * A list keeps what it chooses itself and what is asked of it. Each page that is missed is asked of
 * the first neighbour that has it in a slot. Of slots asked for, and not chosen by the list itself,
 * it keeps the lowest ones, as many as leave room for all that it chooses. A task is one list
 * number.
 */
typedef struct kvf_lend_args {
    uint32_t rows;
    uint32_t lists; /* of a row */
    uint32_t ids_max;
    uint32_t slots;
    const uint32_t *order;        /* [rows] */
    const uint32_t *common;       /* [rows] pages */
    const int32_t *ids;           /* [rows * lists, ids_max] ascending */
    const uint32_t *id_count;     /* [rows * lists] */
    int32_t *const *slot_of_page; /* [rows * lists] -> [pages_max] */
    int32_t *const *page_of_slot; /* [rows * lists] -> [slots] */
    int32_t *lender;              /* [rows * lists, ids_max] out */
    uint32_t *missed;             /* [rows * lists, ids_max] out, where there is a lender */
    uint32_t *kept;               /* [rows * lists, ceil(slots / 32)] out: a bit per slot */
    uint32_t *asked;              /* the same: for work */
    uint32_t pages_max;           /* row stride of seen */
    uint32_t *seen;               /* [lists, 2, pages_max] for work: zero before and after */
} kvf_lend_args;
KVF_TASKS(lend, kvf_lend_args, a->lists)

#define KVF_LENT_LATE 2u /* of missed: another row brings the page */

/* 1 if a list of the step chooses the page. */
KVF_INLINE uint32_t kvf_lend_chooses(const kvf_lend_args *a, size_t list, int32_t page)
{
    const int32_t *ids = a->ids + list * a->ids_max;
    const uint32_t count = a->id_count[list];
    uint32_t low = 0, high = count;
    while (low < high) {
        const uint32_t middle = (low + high) / 2;
        if (ids[middle] < page)
            low = middle + 1;
        else
            high = middle;
    }
    return low < count && ids[low] == page;
}

/* ---- resolve: selected pages to slots ----
 * Per list: pages ids[0..count) that have a slot are hits. Each other one, in id order, gets a
 * free slot or the slot of the page with the lowest score that is not selected (ties: the lower
 * page id); the tables are updated, and {page, slot} is appended to the list's misses. slots >=
 * count always. A resident page beyond `pages` scored pages (cannot happen) or with NaN score
 * counts as lowest. Pages that have a lender are passed over, and slots that are kept hold what
 * they hold; so says lend, or both are NULL. A task is as many lists as have KVF_RESOLVE_SLOTS
 * slots, a few microseconds: less would not be worth waking a thread.
 */
#define KVF_RESOLVE_SLOTS 1024u

typedef struct kvf_miss {
    int32_t page;
    int32_t slot;
} kvf_miss;

typedef struct kvf_resolve_args {
    uint32_t lists;
    uint32_t ids_max; /* row stride of ids, of slot_of_id and of misses */
    uint32_t slots;
    uint32_t stride;              /* row stride of scores */
    const int32_t *ids;           /* [lists, ids_max] ascending */
    const uint32_t *id_count;     /* [lists] */
    const float *const *scores;   /* [lists] -> [pages]; NULL row: victims by lowest page id */
    int32_t *const *slot_of_page; /* [lists] -> [pages_max], -1 = none */
    int32_t *const *page_of_slot; /* [lists] -> [slots], -1 = free */
    const int32_t *lender;        /* [lists, ids_max], of lend; or NULL */
    const uint32_t *kept;         /* [lists, ceil(slots / 32)], with lender */
    int32_t *slot_of_id;          /* [lists, ids_max] out, -1 = lent */
    uint32_t *missed;             /* [lists, ids_max] out: 1 if the page was not resident; not of
                                     those that are lent */
    kvf_miss *misses;             /* [lists, ids_max] out */
    uint32_t *miss_count;         /* [lists] out */
} kvf_resolve_args;

/* Lists of one task. */
KVF_INLINE uint32_t kvf_resolve_lists(const kvf_resolve_args *a)
{
    return a->slots < KVF_RESOLVE_SLOTS ? KVF_RESOLVE_SLOTS / kvf_max_u32(a->slots, 1) : 1;
}
KVF_TASKS(resolve, kvf_resolve_args, kvf_div_ceil_u32(a->lists, kvf_resolve_lists(a)))

/* ---- select: topk, resolve and assemble of every list, one behind the other ----
 * What the three write, with these arguments, for a short step, where a launch is what costs. k
 * NULL: there is no topk, ids and id_count are given. A task is KVF_ASSEMBLE_LISTS lists, and the
 * host device runs the three by themselves.
 */
typedef struct kvf_select_args {
    kvf_paging paging;
    uint32_t rows;
    uint32_t ids_max;
    uint32_t spans_max;
    uint32_t stride;                 /* row stride of scores */
    uint32_t work_stride;            /* of topk */
    const kvf_row *row;              /* [rows] */
    const float *scores;             /* [rows * lists, stride], of topk */
    const uint32_t *count;           /* [rows * lists], of topk */
    const uint32_t *k;               /* [rows * lists], of topk; NULL = no topk */
    uint32_t *work;                  /* of topk */
    uint32_t *arrived;               /* of topk */
    int32_t *ids;                    /* [rows * lists, ids_max] */
    uint32_t *id_count;              /* [rows * lists] */
    const float *const *list_scores; /* [rows * lists], of resolve */
    int32_t *const *slot_of_page;
    int32_t *const *page_of_slot;
    int32_t *slot_of_id;   /* [rows * lists, ids_max] out */
    uint32_t *missed;      /* [rows * lists, ids_max] out */
    kvf_miss *misses;      /* [rows * lists, ids_max] out */
    uint32_t *miss_count;  /* [rows * lists] out */
    const uint64_t *masks; /* of assemble; may be NULL */
    kvf_span *spans;       /* [rows * lists, spans_max] out */
    uint32_t *span_count;  /* [rows * lists] out */
    kvf_layer_counters *counters;
} kvf_select_args;
KVF_TASKS(select, kvf_select_args, kvf_div_ceil_u32(a->rows * a->paging.lists, KVF_ASSEMBLE_LISTS))

/* The arguments of its parts. */
KVF_INLINE kvf_topk_args kvf_select_topk(const kvf_select_args *a)
{
    kvf_topk_args top;
    top.lists = a->rows * a->paging.lists;
    top.stride = a->stride;
    top.ids_max = a->ids_max;
    top.work_stride = a->work_stride;
    top.scores = a->scores;
    top.first = NULL;
    top.count = a->count;
    top.k = a->k;
    top.ids = a->ids;
    top.id_count = a->id_count;
    top.work = a->work;
    top.arrived = a->arrived;
    return top;
}

KVF_INLINE kvf_resolve_args kvf_select_resolve(const kvf_select_args *a)
{
    kvf_resolve_args resolve;
    resolve.lists = a->rows * a->paging.lists;
    resolve.ids_max = a->ids_max;
    resolve.slots = a->paging.slots;
    resolve.stride = a->stride;
    resolve.ids = a->ids;
    resolve.id_count = a->id_count;
    resolve.scores = a->list_scores;
    resolve.slot_of_page = a->slot_of_page;
    resolve.page_of_slot = a->page_of_slot;
    resolve.lender = NULL;
    resolve.kept = NULL;
    resolve.slot_of_id = a->slot_of_id;
    resolve.missed = a->missed;
    resolve.misses = a->misses;
    resolve.miss_count = a->miss_count;
    return resolve;
}

KVF_INLINE kvf_assemble_args kvf_select_assemble(const kvf_select_args *a)
{
    kvf_assemble_args assemble;
    assemble.paging = a->paging;
    assemble.rows = a->rows;
    assemble.ids_max = a->ids_max;
    assemble.spans_max = a->spans_max;
    assemble.row = a->row;
    assemble.ids = a->ids;
    assemble.id_count = a->id_count;
    assemble.slot_of_id = a->slot_of_id;
    assemble.lender = NULL;
    assemble.missed = a->missed;
    assemble.masks = a->masks;
    assemble.spans = a->spans;
    assemble.span_count = a->span_count;
    assemble.counters = a->counters;
    return assemble;
}

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
KVF_TASKS(fetch, kvf_fetch_args, 1)

/* ---- drop: pages that a row does not have any more. Slots that hold a page behind the sealed
 * blocks of their row become free, and the store has as much of the sink as is sealed. One task per
 * list. */
typedef struct kvf_drop_args {
    kvf_paging paging;
    uint32_t rows;
    uint32_t slots;        /* per list */
    const kvf_row *row;    /* [rows] sealed, store_count; all else is not looked at */
    int32_t *slot_of_page; /* [rows * lists, pages_max] */
    int32_t *page_of_slot; /* [rows * lists, slots] */
} kvf_drop_args;
KVF_TASKS(drop, kvf_drop_args, a->rows * a->paging.lists)

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
KVF_TASKS(overlap, kvf_overlap_args, 1)

#endif
