/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_KERNELS_SCORE_ARGS_H
#define KVF_KERNELS_SCORE_ARGS_H

/*
 * Contracts, arguments and tasks: digests of pages, their scores, and scores reduced over a group.
 * See kernels.h for what holds for every kernel.
 */

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
KVF_TASKS(score, kvf_score_args, kvf_div_ceil_u32(a->pages_max, KVF_SCORE_PAGES) * a->lists)

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
KVF_TASKS(reduce, kvf_reduce_args, a->outputs)

#endif
