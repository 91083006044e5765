/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Times of kernels that a step at the default settings does not launch, on one core or on a GPU,
 * variant against reference on one core; check_bench_layer.c has those that it does.
 *
 * Knows nothing of threads or targets; bench/kernels measures those. Each figure is the best of a
 * few repetitions over data that is larger than the caches where the kernel reads pages. On a GPU
 * the data lies in its memory, and events take the time of one launch.
 */

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "check_support.h"
#include "common/clock.h"

#define HEAD_DIM  128u
#define PAGE_SIZE 32u
#define GROUP     4u
#define PAGES     1024u

static const kvf_shape shape = {KVF_BF16, HEAD_DIM, PAGE_SIZE};

typedef struct work {
    const char *op;
    const char *unit;
    double amount; /* bytes or operations of the whole launch */
    kvf_task_fn ref;
    kvf_task_fn var; /* of c->var */
    check_args args;
    uint32_t tasks;
    uint32_t ref_tasks; /* the reference runs this many and is scaled */
} work;

#define TIMES 20u

static double best_time(check *c, const kvf_kernels *table, kvf_task_fn fn, const work *w,
                        uint32_t tasks)
{
    double best = INFINITY;
    const double start = kvf_now_seconds();
    if (c->cuda && table == c->var) {
        double ns[TIMES];
        const char *error = check_cuda_put(c->cuda);
        if (!error)
            error = check_cuda_time(c->cuda, fn, &w->args, tasks, 1, TIMES, ns);
        if (error)
            check_fail(c, "%s: launch: %s", w->op, error);
        for (uint32_t i = 0; i < TIMES && !error; i++)
            best = fmin(best, ns[i] * 1e-9);
        return best;
    }
    for (uint32_t i = 0; i < TIMES && kvf_now_seconds() - start < 0.5; i++) {
        const double t = kvf_now_seconds();
        check_run(c, table, fn, w->args, tasks, false);
        best = fmin(best, kvf_now_seconds() - t);
    }
    return best;
}

static void report(check *c, const work *w)
{
    if (w->var == w->ref && c->var->isa != KVF_ISA_REFERENCE)
        return;
    /* The reference first: it would bring the data back from a GPU. */
    const double ref = best_time(c, c->ref, w->ref, w, w->ref_tasks) * w->tasks / w->ref_tasks;
    const double var = best_time(c, c->var, w->var, w, w->tasks);
    printf("%-12s %-14s %10.1f us  %8.2f %s  %8.1fx reference\n", c->isa, w->op, var * 1e6,
           w->amount / var * 1e-9, w->unit, ref / var);
}

static void *pool_of_pages(check *c)
{
    uint8_t *pool = check_in(c, PAGES * kvf_page_bytes(&shape));
    check_fill(c, pool, KVF_BF16, PAGES * kvf_page_bytes(&shape) / 2, DATA_NORMAL);
    return pool;
}

static void bench_digest_score(check *c)
{
    const uint32_t pages = 16384;
    const uint32_t *count = check_put(c, &pages, sizeof pages);
    void *q = check_in(c, GROUP * kvf_row_bytes(&shape));
    uint8_t *pool = pool_of_pages(c);
    uint8_t *digests = check_in(c, pages * kvf_digest_bytes(HEAD_DIM, 1));
    kvf_digest_job *jobs = check_in(c, pages * sizeof *jobs);
    const void *const *rows = check_put(c, &digests, sizeof digests);
    check_fill(c, q, KVF_BF16, (size_t)GROUP * HEAD_DIM, DATA_NORMAL);
    for (uint32_t i = 0; i < pages; i++)
        jobs[i] = (kvf_digest_job){.page = pool + i % PAGES * kvf_page_bytes(&shape),
                                   .digest = digests + i * kvf_digest_bytes(HEAD_DIM, 1),
                                   .count = PAGE_SIZE};
    kvf_digest_args d = {.shape = shape, .subs = 1, .job_count = pages, .jobs = jobs};
    report(c, &(work){"digest", "GB/s", (double)(PAGES * kvf_page_bytes(&shape) / 2),
                      c->ref->digest, c->var->digest, CHECK_ARGS(&d), PAGES, 64});
    CHECK_RUN(c, c->var, digest, &d, false);
    kvf_score_args a = {.shape = shape,
                        .subs = 1,
                        .lists = 1,
                        .group = GROUP,
                        .pages_max = pages,
                        .q = q,
                        .digests = rows,
                        .pages = count};
    a.scores = check_out(c, (size_t)GROUP * pages * sizeof(float));
    report(c, &(work){"score", "GB/s", (double)(pages * kvf_digest_bytes(HEAD_DIM, 1)),
                      c->ref->score, c->var->score, CHECK_ARGS(&a), kvf_score_tasks(&a), 1});
}

static void bench_lists(check *c)
{
    const uint32_t pages = 4096, lists = 8;
    uint32_t *counts = check_in(c, lists * sizeof *counts), *ks = check_in(c, lists * sizeof *ks);
    float *scores = check_in(c, (size_t)lists * GROUP * pages * sizeof *scores);
    for (size_t i = 0; i < (size_t)lists * GROUP * pages; i++)
        scores[i] = (float)check_normal(c) * 10.0f;
    for (uint32_t i = 0; i < lists; i++) {
        counts[i] = pages;
        ks[i] = 24;
    }
    kvf_reduce_args r = {.kind = KVF_GROUP_MEAN_SOFTMAX,
                         .outputs = lists,
                         .rows = GROUP,
                         .pages_max = pages,
                         .scale = 0.09f,
                         .scores = scores,
                         .pages = counts};
    r.out = check_out(c, (size_t)lists * pages * sizeof(float));
    report(c, &(work){"reduce", "Gel/s", (double)lists * GROUP * pages, c->ref->reduce,
                      c->var->reduce, CHECK_ARGS(&r), lists, 1});
}

/* k of n masses, of which the least are zero. */
static void bench_top(check *c, const char *name, uint32_t n, uint32_t k)
{
    const uint32_t lists = 8;
    if (!check_begin(c))
        return;
    uint32_t *counts = check_in(c, lists * sizeof *counts), *ks = check_in(c, lists * sizeof *ks);
    float *scores = check_in(c, (size_t)lists * n * sizeof *scores);
    for (uint32_t l = 0; l < lists; l++) {
        counts[l] = n;
        ks[l] = k;
    }
    for (size_t i = 0; i < (size_t)lists * n; i++)
        scores[i] = (float)exp(30.0 * check_normal(c) - 60.0);
    kvf_topk_args a = {.lists = lists,
                       .stride = n,
                       .ids_max = k,
                       .work_stride = n,
                       .scores = scores,
                       .count = counts,
                       .k = ks};
    a.ids = check_out(c, (size_t)lists * k * sizeof(int32_t));
    a.id_count = check_out(c, lists * sizeof(uint32_t));
    a.work = check_out(c, (size_t)lists * n * sizeof(uint32_t));
    a.arrived = check_out(c, lists * sizeof(uint32_t));
    memset(a.arrived, 0, lists * sizeof(uint32_t));
    report(c, &(work){name, "Gel/s", (double)lists * n, c->ref->topk, c->var->topk, CHECK_ARGS(&a),
                      lists, 1});
}

static void bench_tops(check *c)
{
    bench_top(c, "topk 24/4K", 4096, 24);
    bench_top(c, "topk 256/128K", 131072, 256);
    bench_top(c, "topk 512/128K", 131072, 512);
    bench_top(c, "topk 2K/1M", 1048576, 2048);
}

static void bench_profile(check *c)
{
    const uint32_t heads = 32, tokens = 16384;
    float *scores = check_in(c, (size_t)heads * tokens * sizeof *scores);
    for (size_t i = 0; i < (size_t)heads * tokens; i++)
        scores[i] = (float)exp(2.0 * check_normal(c) - 9.0);
    kvf_profile_args a = {
        .rows = heads, .stride = tokens, .count = tokens, .top = tokens / 10, .scores = scores};
    a.out = check_out(c, (size_t)heads * KVF_PROFILE_VALUES * sizeof(float));
    report(c, &(work){"profile", "Gel/s", (double)heads * tokens, c->ref->profile, c->var->profile,
                      CHECK_ARGS(&a), heads, 4});
}

static void bench_observe(check *c)
{
    uint8_t *pool = pool_of_pages(c);
    const uint32_t window = 32, spans_max = 256;
    const uint32_t *count = check_put(c, &spans_max, sizeof spans_max);
    void *q = check_in(c, window * GROUP * kvf_row_bytes(&shape));
    kvf_span *spans = check_in(c, spans_max * sizeof *spans);
    uint32_t *index = check_in(c, spans_max * sizeof *index), *limit = check_in(c, window * 4);
    check_fill(c, q, KVF_BF16, (size_t)window * GROUP * HEAD_DIM, DATA_NORMAL);
    for (uint32_t i = 0; i < spans_max; i++) {
        spans[i] = (kvf_span){.page = pool + i * kvf_page_bytes(&shape), .count = PAGE_SIZE};
        index[i] = i * PAGE_SIZE;
    }
    for (uint32_t w = 0; w < window; w++)
        limit[w] = spans_max * PAGE_SIZE;
    kvf_observe_args a = {.shape = shape,
                          .kv_heads = 1,
                          .group = GROUP,
                          .window = window,
                          .spans_max = spans_max,
                          .scale = 0.09f,
                          .q = q,
                          .limit = limit,
                          .spans = spans,
                          .span_index = index,
                          .span_count = count};
    a.row_max = check_out(c, (size_t)4 * GROUP * window * sizeof(float));
    a.row_sum = check_out(c, (size_t)4 * GROUP * window * sizeof(float));
    a.score = check_out(c, (size_t)spans_max * PAGE_SIZE * sizeof(float));
    const double work_done = 2.0 * window * GROUP * spans_max * PAGE_SIZE * HEAD_DIM;
    report(c, &(work){"observe_stats", "GF/s", work_done, c->ref->observe_stats,
                      c->var->observe_stats, CHECK_ARGS(&a), 4, 1});
    CHECK_RUN(c, c->var, observe_stats, &a, false);
    report(c, &(work){"observe_score", "GF/s", work_done, c->ref->observe_score,
                      c->var->observe_score, CHECK_ARGS(&a), 4, 1});
}

/* Random blocks of a pool that no cache holds, to targets in order. */
static void bench_copy(check *c, const char *name, size_t bytes, uint32_t count)
{
    const size_t pool_bytes = (size_t)512 << 20;
    uint8_t *pool = check_in(c, pool_bytes), *to = check_in(c, count * bytes);
    const void **from = check_in(c, count * sizeof *from);
    void **targets = check_in(c, count * sizeof *targets);
    memset(pool, 1, pool_bytes);
    memset(to, 1, count * bytes);
    for (uint32_t i = 0; i < count; i++) {
        from[i] = pool + check_below(c, (uint32_t)(pool_bytes / bytes)) * bytes;
        targets[i] = to + i * bytes;
    }
    kvf_copy_args a = {.bytes = bytes,
                       .count = count,
                       .per_task = (uint32_t)(65536 / bytes),
                       .stream = 1,
                       .from = from,
                       .to = targets};
    report(c, &(work){name, "GB/s", (double)count * (double)bytes, c->ref->copy, c->var->copy,
                      CHECK_ARGS(&a), kvf_copy_tasks(&a), kvf_copy_tasks(&a)});
}

static void bench_moves(check *c)
{
    bench_copy(c, "copy 16K", 16384, 4096);
    if (check_begin(c))
        bench_copy(c, "copy 512", 512, 131072);
}

void bench_kernels(check *c, const char *op)
{
    static const struct {
        const char *op;
        void (*run)(check *);
    } all[] = {{"score", bench_digest_score}, {"reduce", bench_lists},    {"topk", bench_tops},
               {"profile", bench_profile},    {"observe", bench_observe}, {"copy", bench_moves}};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if ((!op || strcmp(op, all[i].op) == 0) && check_begin(c))
            all[i].run(c);
    check_end(c);
}
