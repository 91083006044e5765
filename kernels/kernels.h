/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_KERNELS_KERNELS_H
#define KVF_KERNELS_KERNELS_H

/*
 * The table of kernels of one device, and the arguments of every kernel.
 *
 * A kernel is a pure function of its arguments and a task number: it allocates nothing, starts no
 * thread, knows no policy. The tasks of a launch are independent and write disjoint memory, so
 * their order and the threads that run them do not change a bit of the result. `kvf_<op>_tasks`
 * says how many tasks a launch has; it depends on the arguments only, never on the machine.
 *
 * Every pointer in the arguments is device memory (or host memory at its device alias).
 * `<family>/<op>_ref.c` is the specification in plain C, sums in double; `<op>_simd.c` is built
 * once per instruction set and must agree with it as `tests/kernels/check_kernels.c` states.
 *
 * A page is K [page_size, head_dim] followed by V [page_size, head_dim], contiguous, in `dtype`.
 */

#include <kvferry/kvferry.h>

#include "common/base.h"

#define KVF_GROUP_MAX_HEADS 16u
#define KVF_PAGE_SIZE_MAX   64u
#define KVF_HEAD_DIM_MAX    256u

/* Shapes that every kernel on pages needs. */
typedef struct kvf_shape {
    kvf_dtype dtype;
    uint32_t head_dim;  /* 64, 80, 96, 128 or 256 */
    uint32_t page_size; /* 8, 16, 32 or 64 tokens */
} kvf_shape;

KVF_INLINE size_t kvf_dtype_bytes(kvf_dtype dtype)
{
    return dtype == KVF_FP32 ? 4 : 2;
}

/* Bytes of K (or V) of one page; V begins there. */
KVF_INLINE size_t kvf_half_page_bytes(const kvf_shape *s)
{
    return (size_t)s->page_size * s->head_dim * kvf_dtype_bytes(s->dtype);
}

KVF_INLINE size_t kvf_page_bytes(const kvf_shape *s)
{
    return 2 * kvf_half_page_bytes(s);
}

/* What attention reads of one page: token t counts iff t < count and bit t of skip is clear. */
typedef struct kvf_span {
    const void *page;
    uint64_t skip;
    uint32_t count;   /* tokens that exist in the page, 0 .. page_size */
    uint32_t fetched; /* 1: the bytes arrive with this step's fetch; attended in the second pass */
} kvf_span;

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

KVF_INLINE size_t kvf_digest_bytes(uint32_t head_dim, uint32_t subs)
{
    return (size_t)subs * 2 * head_dim * 2;
}

/* ---- score: queries against digests ----
 * scores[l, g, p] = max over sub-boxes of sum_d max(q_d lo_d, q_d hi_d), fp32, for p < pages[l];
 * -INFINITY if every sub-box of the page is empty. Rows beyond pages[l] are not written.
 * A task is KVF_SCORE_PAGES consecutive pages of one list.
 */
#define KVF_SCORE_PAGES 256u

typedef struct kvf_score_args {
    kvf_shape shape;
    uint32_t subs;
    uint32_t lists;
    uint32_t group;             /* query heads per list, 1 .. 16 */
    uint32_t pages_max;         /* row stride of scores, >= every pages[l] */
    const void *q;              /* [lists, group, head_dim] dtype */
    const void *const *digests; /* [lists] -> [pages, subs, 2, head_dim] bf16 */
    const uint32_t *pages;      /* [lists] */
    float *scores;              /* [lists, group, pages_max] */
} kvf_score_args;

/* ---- reduce: scores of query heads into scores of lists ----
 * out[o, p] over the `rows` consecutive score rows o*rows .. o*rows+rows-1, for p <
 * pages[o*pages_step]: MEAN_SOFTMAX: mean over rows of softmax_p(scale * score) (a -inf score
 * stays 0 weight; the result of a page whose score is -inf in every row is -INFINITY); MAX:
 * maximum; SUM: sum. One task per output.
 */
typedef struct kvf_reduce_args {
    kvf_group_reduce kind;
    uint32_t outputs;
    uint32_t rows;
    uint32_t pages_max;  /* row stride of scores and of out */
    uint32_t pages_step; /* pages[] is indexed by output * pages_step */
    float scale;
    const float *scores;   /* [outputs, rows, pages_max] */
    const uint32_t *pages; /* lengths */
    float *out;            /* [outputs, pages_max] */
} kvf_reduce_args;

/* ---- topk: exact, ties to the lower index ----
 * Of scores[l, first[l] .. first[l]+count[l]-1], the k[l] largest; -INFINITY and NaN are never
 * taken. ids are indices into the row (first included), ascending. id_count[l] <= k[l]. One
 * task per list. `work` is [lists, work_stride] uint32, work_stride >= the largest count.
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
} kvf_topk_args;

/* ---- attend: sparse paged attention, split over spans ----
 * Partial results over fixed groups of `split` consecutive spans: for list l, split s, query row g:
 *   partial_o[l, s, g, :] = sum_t softmax_t(scale q.k_t) v_t   (normalised within the split), fp32
 *   partial_lse[l, s, g]  = ln sum_t exp(scale q.k_t), -INFINITY if no token is attended
 * pass ALL computes every split; RESIDENT only splits without a fetched span; FETCHED the others.
 * A task is one (list, split). The value of a split does not depend on the pass that computed it.
 */
typedef enum kvf_pass { KVF_PASS_ALL, KVF_PASS_RESIDENT, KVF_PASS_FETCHED } kvf_pass;

typedef struct kvf_attend_args {
    kvf_shape shape;
    kvf_pass pass;
    uint32_t lists;
    uint32_t group;
    uint32_t spans_max; /* row stride of spans */
    uint32_t split;     /* spans per split */
    float scale;
    const void *q;              /* [lists, group, head_dim] dtype */
    const kvf_span *spans;      /* [lists, spans_max] */
    const uint32_t *span_count; /* [lists] */
    float *partial_o;           /* [lists, splits_max = ceil(spans_max/split), group, head_dim] */
    float *partial_lse;         /* [lists, splits_max, group] */
} kvf_attend_args;

/* ---- merge: partial results by log-sum-exp, in split order ----
 * out[l, g, :] = sum_s e^(lse_s - lse) o_s; lse[l, g] = ln sum_s e^lse_s. Splits used:
 * ceil(span_count/split). No attended token: out = 0, lse = -INFINITY. One task per list.
 */
typedef struct kvf_merge_args {
    kvf_shape shape;
    uint32_t lists;
    uint32_t group;
    uint32_t splits_max;
    uint32_t split;
    const uint32_t *span_count; /* [lists] */
    const float *partial_o;     /* [lists, splits_max, group, head_dim] */
    const float *partial_lse;   /* [lists, splits_max, group] */
    void *out;                  /* [lists, group, head_dim] dtype */
    float *lse;                 /* [lists, group]; may be NULL */
} kvf_merge_args;

/* ---- prefill: causal attention of a chunk ----
 * Queries of tokens base .. base+tokens-1 of one sequence attend to tokens j <= their own
 * index, which lie in pages in order: token j is row j % page_size of pages[kv_head][j /
 * page_size]. With a window, query i attends only to tokens j < sink and j > i - window; time is
 * that of sink + window + chunk keys: runs of KVF_PREFILL_KEYS keys, from a multiple of it, that no
 * query of the launch attends to are not read, nor are their blocks. Keys and values of other
 * tokens below base + tokens are finite, attended or not. A task is one KV head x KVF_PREFILL_ROWS
 * consecutive query tokens (all query heads of the group).
 */
#define KVF_PREFILL_ROWS 48u
#define KVF_PREFILL_KEYS 64u

typedef struct kvf_prefill_kernel_args {
    kvf_shape shape;
    uint32_t kv_heads;
    uint32_t group;
    uint32_t tokens;
    uint32_t base;
    uint32_t sink;   /* unused without a window */
    uint32_t window; /* newest tokens, a query's own included; 0 = all */
    float scale;
    const void *q;             /* [tokens, kv_heads, group, head_dim] dtype */
    const void *const *blocks; /* [pages] by token range; head h's page is at h * page bytes */
    void *out;                 /* as q */
    float *lse;                /* [tokens, kv_heads, group]; may be NULL */
} kvf_prefill_kernel_args;

/* ---- repack: a chunk in token order into pages ----
 * Token i of the chunk becomes row (first + i) % page_size of block (first + i) / page_size,
 * whose page of KV head h starts at blocks[b] + h * page bytes. If a key or value is not
 * finite, the lowest index i seen is kept in *fault by an atomic minimum (fault starts at
 * UINT32_MAX). One task per (block, KV head).
 */
typedef struct kvf_repack_args {
    kvf_shape shape;
    uint32_t kv_heads;
    uint32_t tokens;
    uint32_t first;      /* row in blocks[0] of the first token, < page_size */
    const void *k;       /* [tokens, kv_heads, head_dim] dtype */
    const void *v;       /* [tokens, kv_heads, head_dim] dtype */
    void *const *blocks; /* [ceil((first + tokens) / page_size)] */
    uint32_t *fault;     /* [1] */
} kvf_repack_args;

/* ---- observe: attention of the last queries over many keys, streamed ----
 * Rows: W query tokens x group, per KV head; a[w,g,j] = softmax over attended j of scale q.k_j,
 * where query w sees tokens with index <= limit[w]. Tokens are given as spans in order (skip
 * bits are honoured); the index of a token is span_index[s] + row. Step 1 writes running
 * maximum and sum per (head, chunk of KVF_OBSERVE_SPANS spans, row); step 2 merges them over
 * chunks, in order, and writes
 *   score[h, s * page_size + row] = reduce_g reduce_w a[w,g,j], 0 for skipped or absent tokens
 * or adds that to what is there. window_mean: divide by W, else sum. is_weighted: query w counts
 * (w + 1) / W first. group kind: MEAN_SOFTMAX = mean of a over g; MAX; SUM. Only heads group_first
 * .. group_first + group_count - 1 of each group take part. The launch may be part of a longer
 * window: its queries are window_first .. of window_total, which is W above.
 * is_raw: a = q.k_j, unscaled; step 1 is not needed. rounds_bf16: q.k, then the logit, a, and the
 * sum over w are rounded to bf16.
 * Nothing of size W x tokens is stored. A task is one (KV head, chunk) in both steps.
 */
#define KVF_OBSERVE_SPANS      64u
#define KVF_OBSERVE_WINDOW_MAX 128u

typedef struct kvf_observe_args {
    kvf_shape shape;
    uint32_t kv_heads;
    uint32_t group;
    uint32_t window;    /* queries of this launch, 1 .. KVF_OBSERVE_WINDOW_MAX */
    uint32_t spans_max; /* row stride of spans */
    uint32_t window_mean;
    kvf_group_reduce group_reduce;
    float scale;
    uint32_t group_first;
    uint32_t group_count;  /* 0 = all of the group */
    uint32_t ring_slots;   /* query w is row (ring_first + w) % ring_slots of q; 0 = row w */
    uint32_t ring_first;   /* < ring_slots */
    uint32_t limit_first;  /* without limit: query w sees tokens with index <= limit_first + w */
    uint32_t window_first; /* of the whole window, of query 0 */
    uint32_t window_total; /* 0 = window */
    uint32_t is_weighted;
    uint32_t is_raw;
    uint32_t rounds_bf16;
    uint32_t accumulates;       /* 1: add to score */
    uint32_t token_first;       /* tokens with a lower index are as if they were not there */
    const void *q;              /* [window, kv_heads, group, head_dim] dtype */
    const uint32_t *limit;      /* [window] highest token index seen; NULL: limit_first */
    const kvf_span *spans;      /* [kv_heads, spans_max] */
    const uint32_t *span_index; /* [kv_heads, spans_max] token index of row 0 of the span */
    const uint32_t *span_count; /* [kv_heads] */
    float *row_max;             /* [kv_heads, chunks_max = ceil(spans_max/64), group, window] */
    float *row_sum;             /* likewise */
    float *score;               /* [kv_heads, spans_max * page_size]; step 2 */
} kvf_observe_args;

/* Heads of the group that take part. */
KVF_INLINE uint32_t kvf_observe_heads(const kvf_observe_args *a)
{
    return a->group_count ? a->group_count : a->group;
}

/* Row of q that query w of the launch is in. */
KVF_INLINE uint32_t kvf_observe_row(const kvf_observe_args *a, uint32_t w)
{
    if (a->ring_slots == 0)
        return w;
    const uint32_t row = a->ring_first + w;
    return row < a->ring_slots ? row : row - a->ring_slots;
}

/* What query w of the launch counts. */
KVF_INLINE float kvf_observe_weight(const kvf_observe_args *a, uint32_t w)
{
    const float total = (float)(a->window_total ? a->window_total : a->window);
    const float weight = a->is_weighted ? (float)(a->window_first + w + 1) / total : 1.0f;
    return a->window_mean ? weight / total : weight;
}

/* ---- pool: smooth scores along tokens ----
 * x[r, j] = max or average (zeros padded, always divided by `width`) of in[r, j-width/2 ..
 * j+width/2], times `scale` unless that is 0; out[r, j] = x, or out + x, or the larger of the two.
 * rounds_bf16: KVF_POOL_ROUNDS_X: the pooled value is rounded to bf16 before scale; ROUNDS_OUT:
 * what is written is. One task per row.
 */
typedef enum kvf_pool_fold { KVF_FOLD_SET, KVF_FOLD_ADD, KVF_FOLD_MAX } kvf_pool_fold;

#define KVF_POOL_ROUNDS_X   1u
#define KVF_POOL_ROUNDS_OUT 2u

typedef struct kvf_pool_args {
    uint32_t rows;
    uint32_t stride; /* of in */
    uint32_t count;
    uint32_t width; /* odd */
    uint32_t average;
    uint32_t out_stride; /* 0 = stride */
    kvf_pool_fold fold;
    uint32_t rounds_bf16; /* OR of KVF_POOL_ROUNDS_* */
    float scale;          /* 0 = none */
    const float *in;
    float *out; /* not in, unless width is 1 */
} kvf_pool_args;

/* ---- take: tokens of pages by index ----
 * k[i, h] and v[i, h] <- key and value of token ids[h * stride + i] of KV head h, which is row
 * id % page_size of the head's page in blocks[id / page_size]. A task is KVF_TAKE_TOKENS tokens of
 * one KV head.
 */
#define KVF_TAKE_TOKENS 64u

typedef struct kvf_take_args {
    kvf_shape shape;
    uint32_t kv_heads;
    uint32_t count;            /* tokens per KV head */
    uint32_t stride;           /* row stride of ids */
    const void *const *blocks; /* [pages] by token range; head h's page is at h * page bytes */
    const uint32_t *ids;       /* [kv_heads, stride] */
    void *k;                   /* [count, kv_heads, head_dim] dtype */
    void *v;
} kvf_take_args;

/* ---- profile: the shape of attention over tokens ----
 * With a = scores[r, 0 .. count) divided by its sum, where what is not a positive number counts as
 * 0: out[r] = - sum a ln a; the sum of the `top` largest a (all if there are fewer); the mean of
 * (a - 1/count)^2. Sum 0: three zeros. The sum is at most FLT_MAX. One task per row.
 */
#define KVF_PROFILE_VALUES 3u

typedef struct kvf_profile_args {
    uint32_t rows;
    uint32_t stride; /* row stride of scores, >= count */
    uint32_t count;
    uint32_t top;
    const float *scores; /* [rows, stride] */
    float *out;          /* [rows, KVF_PROFILE_VALUES] */
} kvf_profile_args;

/* ---- copy: scattered equal blocks of bytes ----
 * to[i] <- from[i], `bytes` each. The SIMD variants stream past the cache (non-temporal stores over
 * four interleaved streams) when `stream` is set. A task is `per_task` consecutive blocks.
 */
typedef struct kvf_copy_args {
    size_t bytes; /* a multiple of 16 */
    uint32_t count;
    uint32_t per_task;
    uint32_t stream;
    const void *const *from; /* [count] */
    void *const *to;         /* [count] */
} kvf_copy_args;

/* ---- publish: a miss list of the device for a thread of the host ----
 * n = *count. low <= n < high, or n == 0: others move it, *done <- ticket and out_count <- 0. Else
 * out_count <- n, and the lists are copied unless n > list_max. Then *request <- ticket. A host
 * thread that has seen the ticket in *request sees the rest; out and words are registered host
 * memory. One task.
 */
typedef struct kvf_publish_args {
    uint32_t low, high;
    uint32_t list_max;
    uint32_t ticket;
    const uint32_t *count;   /* [1] */
    const void *const *from; /* [n] */
    void *const *to;         /* [n] */
    const void **out_from;   /* [list_max] */
    void **out_to;           /* [list_max] */
    uint32_t *out_count;     /* [1] */
    uint32_t *request;       /* [1] */
    uint32_t *done;          /* [1] */
} kvf_publish_args;

/* ---- move: pages of registered host memory into slots, as the device finds their list ----
 * n = *count. If low <= n < high: to[i] <- from[i] for i < n, `bytes` each; then, if done is not
 * NULL, *done <- value, seen by a host thread or another stream only after every byte. Else nothing
 * is moved or written. `blocks` bounds what the launch takes of the device; one task per block.
 * stages == 0: loads and stores; 1 .. KVF_MOVE_STAGES_MAX: bulk copies through as many buffers of
 * KVF_MOVE_STAGE_BYTES per block, which compute capability 9.0 has (others load and store). All
 * give the same bytes.
 */
#define KVF_MOVE_BLOCKS_MAX  64u
#define KVF_MOVE_STAGES_MAX  8u
#define KVF_MOVE_STAGE_BYTES 16384u

typedef struct kvf_move_args {
    size_t bytes;            /* a multiple of 64 */
    const void *const *from; /* [n] device aliases of pages, 16-byte aligned */
    void *const *to;         /* [n] */
    const uint32_t *count;   /* [1] */
    uint32_t low, high;
    uint32_t blocks; /* 1 .. KVF_MOVE_BLOCKS_MAX */
    uint32_t stages;
    uint32_t value;
    uint32_t *arrived; /* [1] of the device, 0 before and after; unused if done is NULL */
    uint32_t *done;    /* [1] of registered host memory, or NULL */
} kvf_move_args;

/* ---- resolve: selected pages to slots ----
 * Per list: pages ids[0..count) that have a slot are hits. Each other one, in id order, gets a
 * free slot or the slot of the page with the lowest score that is not selected (ties: the lower
 * page id); the tables are updated, and {page, slot} is appended to the list's misses. slots >=
 * count always. A resident page beyond `pages` scored pages (cannot happen) or with NaN score
 * counts as lowest. A task is KVF_RESOLVE_LISTS lists: one list takes a microsecond or two, less
 * than to wake a thread.
 */
#define KVF_RESOLVE_LISTS 8u

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
    int32_t *slot_of_id;          /* [lists, ids_max] out */
    uint32_t *missed;             /* [lists, ids_max] out: 1 if the page was not resident */
    kvf_miss *misses;             /* [lists, ids_max] out */
    uint32_t *miss_count;         /* [lists] out */
} kvf_resolve_args;

/* ---- the table ---- */

/* Page tables, lists and static sets; their arguments are in paging.h. */
#define KVF_PAGING_KERNEL_LIST(X)                                                                  \
    X(stamp)                                                                                       \
    X(table)                                                                                       \
    X(append)                                                                                      \
    X(seal)                                                                                        \
    X(newest)                                                                                      \
    X(spread)                                                                                      \
    X(mask)                                                                                        \
    X(assemble)                                                                                    \
    X(fetch)                                                                                       \
    X(cover)                                                                                       \
    X(overlap)                                                                                     \
    X(pack)                                                                                        \
    X(permute)                                                                                     \
    X(csr_out)                                                                                     \
    X(csr_in)                                                                                      \
    X(compare)                                                                                     \
    X(writeback)                                                                                   \
    X(ahead)                                                                                       \
    X(frame)                                                                                       \
    X(heads)                                                                                       \
    X(ring)

#define KVF_KERNEL_LIST(X)                                                                         \
    X(digest)                                                                                      \
    X(score)                                                                                       \
    X(reduce)                                                                                      \
    X(topk)                                                                                        \
    X(attend)                                                                                      \
    X(merge)                                                                                       \
    X(prefill)                                                                                     \
    X(repack)                                                                                      \
    X(observe_stats)                                                                               \
    X(observe_score)                                                                               \
    X(pool)                                                                                        \
    X(take)                                                                                        \
    X(profile)                                                                                     \
    X(copy)                                                                                        \
    X(publish)                                                                                     \
    X(move)                                                                                        \
    X(resolve)                                                                                     \
    KVF_PAGING_KERNEL_LIST(X)

typedef struct kvf_kernels {
#define KVF_KERNEL_FIELD(op) kvf_task_fn op;
    KVF_KERNEL_LIST(KVF_KERNEL_FIELD)
#undef KVF_KERNEL_FIELD
    uint32_t isa; /* OR of kvf_isa that supplied at least one kernel */
} kvf_kernels;

/* Tasks of one launch; the same for every implementation. */
uint32_t kvf_digest_tasks(const kvf_digest_args *a);
uint32_t kvf_score_tasks(const kvf_score_args *a);
uint32_t kvf_reduce_tasks(const kvf_reduce_args *a);
uint32_t kvf_topk_tasks(const kvf_topk_args *a);
uint32_t kvf_attend_tasks(const kvf_attend_args *a);
uint32_t kvf_merge_tasks(const kvf_merge_args *a);
uint32_t kvf_prefill_tasks(const kvf_prefill_kernel_args *a);
uint32_t kvf_repack_tasks(const kvf_repack_args *a);
uint32_t kvf_observe_tasks(const kvf_observe_args *a);
uint32_t kvf_pool_tasks(const kvf_pool_args *a);
uint32_t kvf_take_tasks(const kvf_take_args *a);
uint32_t kvf_profile_tasks(const kvf_profile_args *a);
uint32_t kvf_copy_tasks(const kvf_copy_args *a);
uint32_t kvf_move_tasks(const kvf_move_args *a);
uint32_t kvf_resolve_tasks(const kvf_resolve_args *a);

/* What this CPU has, as OR of kvf_isa. */
uint32_t kvf_cpu_isa(void);

/*
 * Fill the whole table for the host device: references first, overridden by the variants that
 * the CPU and the mask allow, in ascending order. KVF_UNSUPPORTED if an entry stays empty.
 */
KVF_CHECKED kvf_status kvf_kernels_init(kvf_kernels *table, uint32_t isa_mask);

#endif
