/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_KERNELS_ATTEND_ARGS_H
#define KVF_KERNELS_ATTEND_ARGS_H

/*
 * Contracts, arguments and tasks: what each list attends to, and attention over it.
 * See kernels.h for what holds for every kernel.
 */

#include <math.h>

#include "cap.h"
#include "slots.h"

/* A page that is missed, and the slot that it comes to. */
typedef struct kvf_miss {
    int32_t page; /* of the row */
    int32_t slot;
} kvf_miss;

/* Pages that the lists of rows chose, the slots that resolve gave them, and misses. */
typedef struct kvf_choices {
    kvf_paging paging;
    uint32_t rows;
    uint32_t ids_max;             /* stride of ids, of slot_of_id and of misses */
    const kvf_row *row;           /* [rows] */
    int32_t *ids;                 /* [rows * lists, ids_max] ascending */
    uint32_t *id_count;           /* [rows * lists] */
    int32_t *slot_of_id;          /* [rows * lists, ids_max] of resolve */
    uint32_t *missed;             /* [rows * lists, ids_max] of resolve */
    kvf_miss *misses;             /* [rows * lists, ids_max] of resolve */
    uint32_t *miss_count;         /* [rows * lists] of resolve */
    kvf_layer_counters *counters; /* added to, atomically */
} kvf_choices;

/* ---- assemble: what each list attends: static pages, window pages, then chosen pages by ascending
 * id. A chosen page lies in its slot; without slots it lies where it lives. How much of it a span
 * of a missed page says depends on how missed pages come. An idle list has no spans. A task is
 * KVF_ASSEMBLE_LISTS lists. */
#define KVF_ASSEMBLE_LISTS 8u

#define KVF_MISSED_LATE 2u /* of missed: another list of the call brings the page */

typedef enum kvf_arrival {
    KVF_ARRIVES_BY_FETCH,  /* by a transfer: the span has a home until then */
    KVF_ARRIVES_BY_ATTEND, /* by attend_step: likewise, and what another list brings is attended to
                              where it lives, which is a transfer more and counts as a miss */
    KVF_ARRIVES_FIRST      /* before attention begins */
} kvf_arrival;

typedef struct kvf_assemble_args {
    kvf_choices choices; /* but misses */
    uint32_t spans_max;
    kvf_arrival arrival;
    const uint64_t *masks; /* [rows * lists, ids_max] more to skip; may be NULL */
    kvf_span *spans;       /* [rows * lists, spans_max] out */
    uint32_t *span_count;  /* [rows * lists] out */
} kvf_assemble_args;
KVF_TASKS(assemble, kvf_assemble_args,
          kvf_div_ceil_u32(a->choices.rows * a->choices.paging.lists, KVF_ASSEMBLE_LISTS))

/* Chosen page `page` of list `list` of a row as a span, where it lives. */
KVF_INLINE void kvf_assemble_home(const kvf_paging *p, const kvf_row *row, uint32_t list,
                                  uint32_t page, uint64_t mask, kvf_span *span)
{
    const uint32_t head = kvf_list_head(p, list);
    span->page = kvf_row_home(p, row, page, head);
    span->home = NULL;
    span->skip = kvf_row_skip(p, row, head, page) | mask;
    span->count = p->shape.page_size;
    span->quantized = p->shape.pages != KVF_PAGES_NATIVE;
}

/* Where it is attended, from what resolve says of it. Returns 1 if it is a miss. */
KVF_INLINE uint32_t kvf_assemble_slot(const kvf_assemble_args *a, const kvf_row *row, uint32_t list,
                                      uint32_t slot, uint32_t missed, kvf_span *span)
{
    const uint32_t head = kvf_list_head(&a->choices.paging, list);
    const uint32_t stays = missed == KVF_MISSED_LATE && a->arrival == KVF_ARRIVES_BY_ATTEND;
    if (!row->slots)
        return missed == 1;
    if (stays)
        return 1;
    span->home = missed && a->arrival != KVF_ARRIVES_FIRST ? span->page : NULL;
    span->page = kvf_row_slot(&a->choices.paging, row, head, slot);
    return missed == 1;
}

/* ---- attend: sparse paged attention, split over spans ----
 * Partial results over fixed groups of `split` consecutive spans: for list l, split s, query g:
 *   partial_o[l, s, g, :] = sum_t softmax_t(s_t) v_t   (normalised within the split), fp32
 *   partial_lse[l, s, g]  = ln sum_t exp(s_t), -INFINITY if no token is attended
 * with logits s_t = scale q.k_t, capped (cap.h).
 * pass ALL computes every split; RESIDENT only splits without a span that has a home; FETCHED the
 * others.
 * Heads that are not in the sub-group are neither read nor written.
 * A task is one (list, split). The value of a split does not depend on the pass that computed it.
 * Quantized spans of a list come after its exact ones: they are met with the rotated query, and
 * their values are those of quantized.h. The CUDA device takes them in bf16, in
 * KVF_GPU_QUANTIZED_DIMS.
 */
typedef enum kvf_pass { KVF_PASS_ALL, KVF_PASS_RESIDENT, KVF_PASS_FETCHED } kvf_pass;

typedef struct kvf_attend_args {
    kvf_shape shape;
    kvf_pass pass;
    uint32_t lists;
    uint32_t group;
    kvf_subgroup sub;
    uint32_t spans_max; /* stride of spans */
    uint32_t split;     /* spans per split */
    float scale;
    float cap;
    const void *q;              /* [lists, group, head_dim] dtype */
    const kvf_span *spans;      /* [lists, spans_max] */
    const uint32_t *span_count; /* [lists] */
    float *partial_o;           /* [lists, splits_max = ceil(spans_max/split), group, value_dim] */
    float *partial_lse;         /* [lists, splits_max, group] */
} kvf_attend_args;
KVF_TASKS(attend, kvf_attend_args, kvf_div_ceil_u32(a->spans_max, a->split) * a->lists)

/* Attention sinks: a logit per query head that joins the denominator, -INFINITY = none, as if there
 * were a token with that logit and a value of 0. */

/* ---- merge: partial results by log-sum-exp, in split order ----
 * out[l, g, :] = sum_s e^(lse_s - lse) o_s; lse[l, g] = ln (e^sink + sum_s e^lse_s). Splits used:
 * ceil(span_count/split). No attended token: out = 0, lse = sink. One task per list.
 */
typedef struct kvf_merge_args {
    kvf_shape shape;
    uint32_t lists;
    uint32_t group;
    uint32_t splits_max;
    uint32_t split;
    const uint32_t *span_count; /* [lists] */
    const float *partial_o;     /* [lists, splits_max, group, value_dim] */
    const float *partial_lse;   /* [lists, splits_max, group] */
    void *out;                  /* [lists, group, value_dim] dtype, which may be fp32 for any */
    float *lse;                 /* [lists, group]; may be NULL */
    const float *sinks; /* [heads]: query i of lists x group is of head i % heads; NULL = none */
    uint32_t heads;
} kvf_merge_args;
KVF_TASKS(merge, kvf_merge_args, a->lists)

KVF_INLINE float kvf_merge_sink(const kvf_merge_args *a, size_t query)
{
    return a->sinks ? a->sinks[query % a->heads] : -INFINITY;
}

/* ---- attend_step: all of it in one launch, for a fused step ----
 * Pages of spans that have a home are brought from there, then attend (pass ALL), then merge.
 * Partial results and pages hold afterwards what the three leave. Where pages are quantized, only
 * spans that are quantized have a home. All heads of a group take part; more than
 * KVF_SUBGROUP_HEADS may bring a page more than once. A task is one list. */
typedef struct kvf_attend_step_args {
    kvf_attend_args attend; /* pass ALL */
    void *out;              /* of merge */
    float *lse;             /* of merge; may be NULL */
    uint32_t *arrived;      /* [lists] zero before and after */
    const float *sinks;     /* of merge */
    uint32_t heads;         /* of merge */
    kvf_dtype out_dtype;    /* of out; of all others see attend.shape */
} kvf_attend_step_args;
KVF_TASKS(attend_step, kvf_attend_step_args, a->attend.lists)

/* The arguments of its merge. */
KVF_INLINE kvf_merge_args kvf_attend_step_merge(const kvf_attend_step_args *a)
{
    kvf_merge_args merge;
    merge.shape = a->attend.shape;
    merge.shape.dtype = a->out_dtype;
    merge.lists = a->attend.lists;
    merge.group = a->attend.group;
    merge.splits_max = kvf_div_ceil_u32(a->attend.spans_max, a->attend.split);
    merge.split = a->attend.split;
    merge.span_count = a->attend.span_count;
    merge.partial_o = a->attend.partial_o;
    merge.partial_lse = a->attend.partial_lse;
    merge.out = a->out;
    merge.lse = a->lse;
    merge.sinks = a->sinks;
    merge.heads = a->heads;
    return merge;
}

/* ---- prefill: causal attention of a chunk, or of several rows' ----
 * Queries of tokens base .. base+tokens-1 of one sequence attend to tokens j <= their own
 * index, which lie in pages in order: token j is token j % page_size of pages[kv_head][j /
 * page_size]. With a window, query i attends only to tokens j < sink and j > i - window; time is
 * that of sink + window + chunk keys: runs of KVF_PREFILL_KEYS keys, from a multiple of it, that no
 * query of the launch attends to are not read, nor are their blocks. Keys and values of other
 * tokens below base + tokens are finite, attended or not. Keys are summed in runs of
 * KVF_PREFILL_TILE or less, from a multiple of it, one after the other; so a query has the same
 * bits whatever the chunk, also where whole such runs between sink and window are left out. A task
 * is one KV head x KVF_PREFILL_QUERIES consecutive query tokens (all query heads of the group).
 * With chunks the same of each; tasks after the end of a chunk do nothing.
 */
#define KVF_PREFILL_QUERIES 48u
#define KVF_PREFILL_KEYS    64u
#define KVF_PREFILL_TILE    128u

typedef struct kvf_prefill_kernel_args {
    kvf_shape shape;
    uint32_t kv_heads;
    uint32_t group;
    uint32_t tokens; /* with chunks: of the longest */
    uint32_t base;   /* unused with chunks */
    uint32_t sink;   /* unused without a window */
    uint32_t window; /* newest tokens, a query's own included; 0 = all */
    float scale;
    float cap;
    kvf_dtype q_dtype;         /* fp32: q is rounded to the element type as it is read */
    kvf_dtype out_dtype;       /* as the element type, or fp32 */
    const void *q;             /* [tokens, kv_heads, group, head_dim] */
    const void *const *blocks; /* [pages] by token range; head h's page is at h * page bytes */
    void *out;                 /* [tokens, kv_heads, group, value_dim] */
    float *lse;                /* [tokens, kv_heads, group]; may be NULL */
    uint32_t blocks_stride;    /* pages from the blocks of a chunk to those of the next */
    kvf_query_chunks chunks;   /* count = 0: one, of `tokens` after `base` */
    const float *sinks;        /* [kv_heads, group] as of merge; NULL = none */
} kvf_prefill_kernel_args;
KVF_TASKS(prefill, kvf_prefill_kernel_args,
          kvf_max_u32(a->chunks.count, 1) * a->kv_heads *
              kvf_div_ceil_u32(a->tokens, KVF_PREFILL_QUERIES))

/* Chunk `i` of a launch, and its blocks. */
KVF_INLINE kvf_query_chunk kvf_prefill_chunk(const kvf_prefill_kernel_args *a, uint32_t i)
{
    kvf_query_chunk one = {0, a->tokens, a->base};
    return a->chunks.count ? a->chunks.at[i] : one;
}

KVF_INLINE const void *const *kvf_prefill_blocks(const kvf_prefill_kernel_args *a, uint32_t i)
{
    return a->blocks + (size_t)i * a->blocks_stride;
}

KVF_INLINE float kvf_prefill_sink(const kvf_prefill_kernel_args *a, uint32_t kv_head, uint32_t g)
{
    return a->sinks ? a->sinks[kv_head * a->group + g] : -INFINITY;
}

/* The chunk of a task as a launch of its own. The task becomes one of its, or its number of tasks:
 * nothing to do. */
KVF_INLINE kvf_prefill_kernel_args kvf_prefill_one(const kvf_prefill_kernel_args *a, uint32_t *task)
{
    const uint32_t tiles = kvf_div_ceil_u32(a->tokens, KVF_PREFILL_QUERIES), tile = *task % tiles;
    const uint32_t head = *task / tiles % a->kv_heads, i = *task / tiles / a->kv_heads;
    const kvf_query_chunk chunk = kvf_prefill_chunk(a, i);
    const uint32_t own = kvf_div_ceil_u32(chunk.tokens, KVF_PREFILL_QUERIES);
    const size_t first = (size_t)chunk.first * a->kv_heads * a->group;
    kvf_prefill_kernel_args one = *a;
    one.tokens = chunk.tokens;
    one.base = chunk.base;
    one.q = (const char *)a->q + first * a->shape.head_dim * kvf_dtype_bytes(a->q_dtype);
    one.out = (char *)a->out + first * kvf_value_dim(&a->shape) * kvf_dtype_bytes(a->out_dtype);
    one.lse = a->lse ? a->lse + first : NULL;
    one.blocks = kvf_prefill_blocks(a, i);
    one.chunks.count = 0;
    *task = tile < own ? head * own + tile : own * a->kv_heads;
    return one;
}

/* ---- compare: sparse against dense results of one row. verified += heads, recall_sum +=
 * e^(lse_sparse - lse_dense), error_max = max |out - dense|. One task, sums in order. */
typedef struct kvf_compare_args {
    kvf_shape shape;
    uint32_t heads;
    const void *out; /* [heads, value_dim] dtype */
    const void *dense;
    const float *lse; /* [heads] */
    const float *dense_lse;
    kvf_layer_counters *counters;
} kvf_compare_args;
KVF_TASKS(compare, kvf_compare_args, 1)

/* ---- csr_out: chosen pages, sink pages and window pages of rows as CSR lists; lists == kv_heads.
 * One task. */
/* ---- csr_in: CSR lists, which ascend, as spans, exact ones before quantized ones. Tokens of the
 * sink that a quantized page has are attended in the static store, so the page that they end within
 * has two spans. One task per list. ---- */
typedef struct kvf_csr_args {
    kvf_paging paging;
    uint32_t rows;
    uint32_t ids_max;
    uint32_t spans_max;       /* pages of a list at most, and kvf_parted_pages() */
    const kvf_row *row;       /* [rows] */
    const int32_t *ids;       /* csr_out: [rows * lists, ids_max] */
    const uint32_t *id_count; /* csr_out */
    int32_t *indptr;          /* [rows * lists + 1] */
    int32_t *indices;
    int32_t *last_page_len; /* [rows * lists] */
    kvf_span *spans;        /* csr_in: out */
    uint32_t *span_count;   /* csr_in: out */
} kvf_csr_args;

/* Where pages of a row end: those that are quantized, of them those that have tokens of the sink,
 * and of these those that have no others. */
typedef struct kvf_list_ends {
    uint32_t quantized, sink, whole;
} kvf_list_ends;

KVF_INLINE kvf_list_ends kvf_list_ends_of(const kvf_paging *p, const kvf_row *row)
{
    const uint32_t quantized =
        p->shape.pages == KVF_PAGES_NATIVE ? 0 : kvf_row_sealed_pages(p, row);
    kvf_list_ends e;
    e.quantized = quantized;
    e.sink = kvf_min_u32(quantized, kvf_div_ceil_u32(p->sink, p->shape.page_size));
    e.whole = kvf_min_u32(quantized, p->sink / p->shape.page_size);
    return e;
}

KVF_TASKS(csr_out, kvf_csr_args, 1)
KVF_TASKS(csr_in, kvf_csr_args, a->rows * a->paging.kv_heads)

#endif
