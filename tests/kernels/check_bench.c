/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Times of kernels on one core or on a GPU, variant against reference on one core, on shapes of an
 * 8B model.
 *
 * Knows nothing of threads or targets; bench/kernels measures those. Each figure is the best of a
 * few repetitions over data that is larger than the caches where the kernel reads pages. On a GPU
 * the data lies in its memory, events take the time of one launch, and check_bench_layer.c has what
 * a layer of a step launches.
 */

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "check_support.h"
#include "common/clock.h"
#include "score/codes.h"

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
    const void *args;
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
        const char *error = check_cuda_time(c->cuda, fn, &w->args, tasks, 1, TIMES, ns);
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

static void bench_attend(check *c)
{
    uint8_t *pool = pool_of_pages(c);
    void *q = check_in(c, GROUP * kvf_row_bytes(&shape));
    kvf_span *spans = check_in(c, PAGES * sizeof *spans);
    const uint32_t split = 32, splits = PAGES / split;
    const uint32_t *count = check_put(c, &(uint32_t){PAGES}, sizeof *count);
    check_fill(c, q, KVF_BF16, (size_t)GROUP * HEAD_DIM, DATA_NORMAL);
    for (uint32_t i = 0; i < PAGES; i++)
        spans[i] = (kvf_span){.page = pool + i * kvf_page_bytes(&shape), .count = PAGE_SIZE};
    kvf_attend_args a = {.shape = shape,
                         .lists = 1,
                         .group = GROUP,
                         .spans_max = PAGES,
                         .split = split,
                         .scale = 0.09f,
                         .q = q,
                         .spans = spans,
                         .span_count = count};
    a.partial_o = check_out(c, (size_t)splits * GROUP * HEAD_DIM * sizeof(float));
    a.partial_lse = check_out(c, (size_t)splits * GROUP * sizeof(float));
    report(c, &(work){"attend", "GB/s", (double)(PAGES * kvf_page_bytes(&shape)), c->ref->attend,
                      c->var->attend, &a, splits, 1});
    kvf_merge_args m = {.shape = shape,
                        .lists = 1,
                        .group = GROUP,
                        .splits_max = splits,
                        .split = split,
                        .span_count = count,
                        .partial_o = a.partial_o,
                        .partial_lse = a.partial_lse,
                        .out = check_out(c, GROUP * kvf_row_bytes(&shape))};
    CHECK_RUN(c, c->ref, attend, &a, false);
    report(c, &(work){"merge", "GB/s", splits * GROUP * HEAD_DIM * 4.0, c->ref->merge,
                      c->var->merge, &m, 1, 1});
}

static void bench_prefill(check *c, uint32_t head_dim)
{
    const kvf_shape s = {KVF_BF16, head_dim, PAGE_SIZE};
    const uint32_t tokens = 96, base = 4000, pages = kvf_div_ceil_u32(base + tokens, PAGE_SIZE);
    const void **blocks = check_in(c, pages * sizeof *blocks);
    void *q = check_in(c, tokens * GROUP * kvf_row_bytes(&s));
    check_fill(c, q, KVF_BF16, (size_t)tokens * GROUP * head_dim, DATA_NORMAL);
    for (uint32_t i = 0; i < pages; i++) {
        void *page = check_in(c, kvf_page_bytes(&s));
        check_fill(c, page, KVF_BF16, kvf_page_bytes(&s) / 2, DATA_NORMAL);
        blocks[i] = page;
    }
    kvf_prefill_kernel_args a = {.shape = s,
                                 .kv_heads = 1,
                                 .group = GROUP,
                                 .tokens = tokens,
                                 .base = base,
                                 .scale = 0.09f,
                                 .q = q,
                                 .blocks = blocks};
    a.out = check_out(c, tokens * GROUP * kvf_row_bytes(&s));
    char name[32];
    snprintf(name, sizeof name, "prefill d=%u", head_dim);
    report(c, &(work){name, "GF/s", 4.0 * tokens * GROUP * (base + tokens / 2.0) * head_dim,
                      c->ref->prefill, c->var->prefill, &a, kvf_prefill_tasks(&a), 1});
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
                      c->ref->digest, c->var->digest, &d, PAGES, 64});
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
                      c->ref->score, c->var->score, &a, kvf_score_tasks(&a), 1});
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
                      c->var->reduce, &r, lists, 1});
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
    report(c, &(work){name, "Gel/s", (double)lists * n, c->ref->topk, c->var->topk, &a, lists, 1});
}

#define STEP_LISTS 8u
#define STEP_PAGES 32768u /* of 4 tokens: 128K */
#define STEP_SPANS 128u   /* a budget of 512 */

/* What a short step does behind its scores, at the default settings: 8 lists, everything a hit. */
static void bench_select(check *c)
{
    const kvf_paging p = {.shape = {KVF_BF16, HEAD_DIM, 4},
                          .kv_heads = STEP_LISTS,
                          .group = GROUP,
                          .lists = STEP_LISTS,
                          .block_size = 32,
                          .block_pages = 8,
                          .blocks_max = STEP_PAGES / 8,
                          .pages_max = STEP_PAGES,
                          .slots = 2 * STEP_SPANS,
                          .store_pages = 1,
                          .ring_blocks = 3};
    const size_t all = (size_t)STEP_LISTS * STEP_SPANS;
    kvf_select_args a = {.paging = p,
                         .rows = 1,
                         .ids_max = STEP_SPANS,
                         .spans_max = STEP_SPANS + 1,
                         .stride = STEP_PAGES,
                         .work_stride = STEP_PAGES};
    float *scores = check_in(c, (size_t)STEP_LISTS * STEP_PAGES * sizeof *scores);
    const float **rows = check_in(c, STEP_LISTS * sizeof *rows);
    int32_t **of_page = check_in(c, STEP_LISTS * sizeof *of_page);
    int32_t **of_slot = check_in(c, STEP_LISTS * sizeof *of_slot);
    uint32_t *counts = check_in(c, STEP_LISTS * sizeof *counts);
    uint32_t *ks = check_in(c, STEP_LISTS * sizeof *ks);
    kvf_row *row = check_in(c, sizeof *row);
    *row = (kvf_row){.length = STEP_PAGES * 4, .sealed = STEP_PAGES / 8};
    row->blocks = check_out(c, p.blocks_max * sizeof *row->blocks);
    row->bits = check_out(c, (size_t)STEP_LISTS * p.blocks_max * sizeof *row->bits);
    row->store_count = check_out(c, STEP_LISTS * sizeof *row->store_count);
    row->slots = check_out(c, (size_t)STEP_LISTS * p.slots * kvf_page_bytes(&p.shape));
    memset(row->bits, 0, (size_t)STEP_LISTS * p.blocks_max * sizeof *row->bits);
    memset(row->store_count, 0, STEP_LISTS * sizeof *row->store_count);
    for (uint32_t b = 0; b < p.blocks_max; b++)
        row->blocks[b] = row->slots;
    for (uint32_t l = 0; l < STEP_LISTS; l++) {
        rows[l] = scores + (size_t)l * STEP_PAGES;
        of_page[l] = check_out(c, STEP_PAGES * sizeof **of_page);
        of_slot[l] = check_out(c, p.slots * sizeof **of_slot);
        memset(of_page[l], 0xff, STEP_PAGES * sizeof **of_page);
        memset(of_slot[l], 0xff, p.slots * sizeof **of_slot);
        counts[l] = STEP_PAGES;
        ks[l] = STEP_SPANS;
    }
    for (size_t i = 0; i < (size_t)STEP_LISTS * STEP_PAGES; i++)
        scores[i] = (float)exp(30.0 * check_normal(c) - 60.0);
    a.row = row;
    a.scores = scores;
    a.count = counts;
    a.k = ks;
    a.list_scores = rows;
    a.slot_of_page = of_page;
    a.page_of_slot = of_slot;
    a.work = check_out(c, (size_t)STEP_LISTS * STEP_PAGES * sizeof *a.work);
    a.arrived = check_out(c, STEP_LISTS * sizeof *a.arrived);
    memset(a.arrived, 0, STEP_LISTS * sizeof *a.arrived);
    a.ids = check_out(c, all * sizeof *a.ids);
    a.id_count = check_out(c, STEP_LISTS * sizeof *a.id_count);
    a.slot_of_id = check_out(c, all * sizeof *a.slot_of_id);
    a.missed = check_out(c, all * sizeof *a.missed);
    a.misses = check_out(c, all * sizeof *a.misses);
    a.miss_count = check_out(c, STEP_LISTS * sizeof *a.miss_count);
    a.spans = check_out(c, (size_t)STEP_LISTS * a.spans_max * sizeof *a.spans);
    a.span_count = check_out(c, STEP_LISTS * sizeof *a.span_count);
    a.counters = check_out(c, sizeof *a.counters);
    report(c, &(work){"select 128/32K", "Gel/s", (double)STEP_LISTS * STEP_PAGES, c->ref->select,
                      c->var->select, &a, kvf_select_tasks(&a), kvf_select_tasks(&a)});
}

/* Then its attention, with every tenth page a miss. */
static void bench_attend_step(check *c)
{
    const kvf_shape small = {KVF_BF16, HEAD_DIM, 4};
    const size_t page = kvf_page_bytes(&small), all = (size_t)STEP_LISTS * STEP_SPANS;
    kvf_attend_step_args a = {.attend = {.shape = small,
                                         .lists = STEP_LISTS,
                                         .group = GROUP,
                                         .spans_max = STEP_SPANS,
                                         .split = 8,
                                         .scale = 0.09f}};
    const size_t rows = (size_t)STEP_LISTS * GROUP, parts = rows * STEP_SPANS / a.attend.split;
    if (!check_begin(c))
        return;
    uint8_t *home = check_in(c, all * page), *place = check_out(c, all * page);
    void *q = check_in(c, rows * kvf_row_bytes(&small));
    kvf_span *spans = check_in(c, all * sizeof *spans);
    uint32_t *counts = check_in(c, STEP_LISTS * sizeof *counts);
    check_fill(c, home, KVF_BF16, all * page / 2, DATA_NORMAL);
    check_fill(c, place, KVF_BF16, all * page / 2, DATA_NORMAL);
    check_fill(c, q, KVF_BF16, rows * HEAD_DIM, DATA_NORMAL);
    for (size_t i = 0; i < all; i++)
        spans[i] = (kvf_span){
            .page = place + i * page, .home = i % 10 ? NULL : home + i * page, .count = 4};
    for (uint32_t l = 0; l < STEP_LISTS; l++)
        counts[l] = STEP_SPANS;
    a.attend.q = q;
    a.attend.spans = spans;
    a.attend.span_count = counts;
    a.attend.partial_o = check_out(c, parts * HEAD_DIM * sizeof(float));
    a.attend.partial_lse = check_out(c, parts * sizeof(float));
    a.out = check_out(c, rows * kvf_row_bytes(&small));
    a.arrived = check_out(c, STEP_LISTS * sizeof *a.arrived);
    memset(a.arrived, 0, STEP_LISTS * sizeof *a.arrived);
    report(c, &(work){"attend_step", "GB/s", (double)(all * page), c->ref->attend_step,
                      c->var->attend_step, &a, STEP_LISTS, STEP_LISTS});
}

static void bench_step(check *c)
{
    bench_select(c);
    bench_attend_step(c);
}

static void bench_tops(check *c)
{
    bench_top(c, "topk 24/4K", 4096, 24);
    bench_top(c, "topk 256/128K", 131072, 256);
    bench_top(c, "topk 512/128K", 131072, 512);
    bench_top(c, "topk 2K/1M", 1048576, 2048);
}

/* A plain read of the same bytes in the same order, on one core; what the kernels on codes are
 * measured against. */
static void report_read(const char *op, const void *const *rows, uint32_t lists, size_t bytes)
{
    typedef uint64_t line __attribute__((vector_size(64)));
    line sum[2] = {{0}};
    double best = INFINITY;
    for (uint32_t i = 0; i < 5; i++) {
        const double t = kvf_now_seconds();
        for (uint32_t l = 0; l < lists; l++)
            for (size_t at = 0; at < bytes; at += sizeof sum) {
                line x[2];
                memcpy(x, (const char *)rows[l] + at, sizeof x);
                __builtin_prefetch((const char *)rows[l] + at + 4096);
                __builtin_prefetch((const char *)rows[l] + at + 4160);
                sum[0] ^= x[0];
                sum[1] ^= x[1];
            }
        best = fmin(best, kvf_now_seconds() - t);
    }
    volatile line sink = sum[0] ^ sum[1];
    (void)sink;
    printf("%-12s %-14s %10.1f us  %8.2f GB/s\n", "plain C", op, best * 1e6,
           lists * (double)bytes / best * 1e-9);
}

static void bench_weigh(check *c, kvf_weigh_args *a, uint32_t page_size)
{
    const uint32_t tokens = 65536, pages = tokens / page_size;
    char name[32];
    uint32_t *count = check_in(c, a->lists * sizeof *count);
    for (uint32_t l = 0; l < a->lists; l++)
        count[l] = pages;
    a->page_size = page_size;
    a->block_size = 32;
    a->pages_max = pages;
    a->tiles_max = kvf_tiles(pages, page_size);
    a->pages = count;
    a->mass = check_out(c, (size_t)a->lists * GROUP * pages * sizeof(uint16_t));
    a->top = check_out(c, (size_t)a->lists * GROUP * a->tiles_max * sizeof(float));
    a->sum = check_out(c, (size_t)a->lists * GROUP * a->tiles_max * sizeof(float));
    snprintf(name, sizeof name, "weigh P=%u", page_size);
    report(c, &(work){name, "GB/s", a->lists * tokens / 32.0 * (double)kvf_code_bytes(HEAD_DIM),
                      c->ref->weigh, c->var->weigh, a, kvf_weigh_tasks(a), 1});
    kvf_fold_args f = {.page_size = page_size,
                       .lists = a->lists,
                       .group = GROUP,
                       .pages_max = pages,
                       .tiles_max = a->tiles_max,
                       .mass = a->mass,
                       .top = a->top,
                       .sum = a->sum,
                       .pages = count};
    f.out = check_out(c, (size_t)a->lists * pages * sizeof(float));
    snprintf(name, sizeof name, "fold P=%u", page_size);
    report(c, &(work){name, "Gel/s", (double)a->lists * GROUP * pages, c->ref->fold, c->var->fold,
                      &f, kvf_fold_tasks(&f), 1});
}

/* 128 lists of 64K tokens: 285 MB of codes. */
static void bench_codes(check *c)
{
    const uint32_t lists = 128, tokens = 65536, rows = lists * GROUP, jobs = tokens / 32;
    const size_t bytes = tokens / 32 * kvf_code_bytes(HEAD_DIM);
    uint8_t *pool = pool_of_pages(c), *codes = check_in(c, lists * bytes);
    const void **list = check_in(c, lists * sizeof *list);
    const uint64_t **bits = check_in(c, lists * sizeof *bits);
    uint64_t *none = check_in(c, jobs * sizeof *none);
    kvf_digest_job *job = check_in(c, jobs * sizeof *job);
    void *q = check_in(c, rows * kvf_row_bytes(&shape));
    check_fill(c, q, KVF_BF16, (size_t)rows * HEAD_DIM, DATA_NORMAL);
    memset(none, 0, jobs * sizeof *none);
    for (uint32_t i = 0; i < jobs; i++)
        job[i] = (kvf_digest_job){.page = pool + i % PAGES * kvf_page_bytes(&shape),
                                  .digest = codes + i * kvf_code_bytes(HEAD_DIM),
                                  .count = 32};
    const kvf_encode_args e = {.shape = shape, .job_count = jobs, .jobs = job};
    report(c, &(work){"encode", "Mtoken/s", tokens * 1e3, c->ref->encode, c->var->encode, &e, jobs,
                      64});
    CHECK_RUN(c, c->ref, encode, &e, false);
    kvf_rotate_args r = {.dtype = KVF_BF16, .head_dim = HEAD_DIM, .rows = rows, .scale = 0.09f};
    r.q = q;
    r.y = check_out(c, (size_t)rows * HEAD_DIM);
    r.y_scale = check_out(c, rows * sizeof(float));
    report(c, &(work){"rotate", "Mrow/s", rows * 1e3, c->ref->rotate, c->var->rotate, &r,
                      kvf_rotate_tasks(&r), 1});
    CHECK_RUN(c, c->ref, rotate, &r, false);
    for (uint32_t l = 0; l < lists; l++) {
        if (l)
            memcpy(codes + l * bytes, codes, bytes);
        list[l] = codes + l * bytes;
        bits[l] = none;
    }
    kvf_weigh_args a = {.head_dim = HEAD_DIM, .lists = lists, .group = GROUP};
    a.q = r.y;
    a.q_scale = r.y_scale;
    a.codes = list;
    a.bits = bits;
    report_read("read codes", list, lists, bytes);
    bench_weigh(c, &a, 8);
    bench_weigh(c, &a, 1);
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
                      &a, heads, 4});
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
                      c->var->observe_stats, &a, 4, 1});
    CHECK_RUN(c, c->var, observe_stats, &a, false);
    report(c, &(work){"observe_score", "GF/s", work_done, c->ref->observe_score,
                      c->var->observe_score, &a, 4, 1});
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
    report(c, &(work){name, "GB/s", (double)count * (double)bytes, c->ref->copy, c->var->copy, &a,
                      kvf_copy_tasks(&a), kvf_copy_tasks(&a)});
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
        bool is_of_layer; /* of a step; on a GPU bench_layers has it */
    } all[] = {{"attend", bench_attend, true},    {"score", bench_digest_score, false},
               {"reduce", bench_lists, false},    {"codes", bench_codes, true},
               {"topk", bench_tops, false},       {"step", bench_step, true},
               {"profile", bench_profile, false}, {"observe", bench_observe, false},
               {"copy", bench_moves, false}};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if ((!op || strcmp(op, all[i].op) == 0) && !(c->cuda && all[i].is_of_layer) &&
            check_begin(c))
            all[i].run(c);
    for (uint32_t i = 0; i < CHECK_HEAD_DIMS && (!op || strcmp(op, "prefill") == 0); i++) {
        if (check_begin(c))
            bench_prefill(c, check_head_dims[i]);
    }
    check_end(c);
}
