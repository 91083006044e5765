/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Decode attention to exact and to quantized pages: processor time of one thread.
 *
 * 8 lists of 4 query heads attend to 512 tokens each, head_dim 128, in pages of 4 tokens that lie
 * anywhere among 64 MiB of exact ones, or what these are quantized. The forms take turns, round
 * after round; each figure is the median over the rounds, with the 10th and 90th percentile.
 */

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "bench_report.h"
#include "bench_team.h"
#include "common/random.h"
#include "kernels.h"
#include "quantized.h"

#define LISTS     8u
#define GROUP     4u
#define HEAD_DIM  128u
#define PAGE_SIZE 4u
#define PAGES     32768u /* of the pool */
#define CHOSEN    128u   /* pages of a list */
#define SPLIT     8u
#define ROUNDS    200u
#define FORMS     3u

typedef struct form {
    kvf_shape shape;
    const char *name;
    char *pool;
    double ns[ROUNDS];
} form;

static void *memory(size_t bytes)
{
    void *p = aligned_alloc(64, kvf_round_up(bytes, 64));
    if (!p) {
        fprintf(stderr, "no memory: %zu bytes\n", bytes);
        exit(1);
    }
    return p;
}

static void quantize(form *f, const char *exact)
{
    const kvf_shape *s = &f->shape;
    float x[KVF_HEAD_DIM_MAX];
    f->pool = memory(PAGES * kvf_stored_page_bytes(s));
    for (uint32_t i = 0; i < PAGES * PAGE_SIZE; i++)
        kvf_quantize_token(s, f->pool + i / PAGE_SIZE * kvf_stored_page_bytes(s), i % PAGE_SIZE,
                           exact + i * kvf_token_bytes(s), x);
}

static double now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

static double attend(const kvf_kernels *kernels, const form *f, const kvf_attend_args *shared,
                     kvf_span *spans, uint64_t seed)
{
    kvf_attend_args a = *shared;
    const size_t page = kvf_stored_page_bytes(&f->shape);
    for (uint32_t i = 0; i < LISTS * CHOSEN; i++)
        spans[i] = (kvf_span){.page = f->pool + kvf_random_next(&seed) % PAGES * page,
                              .count = PAGE_SIZE,
                              .quantized = f->shape.pages != KVF_PAGES_NATIVE};
    a.shape = f->shape;
    a.spans = spans;
    const double start = now_ns();
    for (uint32_t i = 0; i < kvf_attend_tasks(&a); i++)
        kernels->attend(&a, i);
    return now_ns() - start;
}

int main(void)
{
    kvf_kernels kernels;
    form forms[FORMS] = {{{KVF_BF16, HEAD_DIM, PAGE_SIZE, KVF_PAGES_NATIVE, 0}, "bf16", NULL, {0}},
                         {{KVF_BF16, HEAD_DIM, PAGE_SIZE, KVF_PAGES_K8V8, 0}, "k8v8", NULL, {0}},
                         {{KVF_BF16, HEAD_DIM, PAGE_SIZE, KVF_PAGES_K8V4, 0}, "k8v4", NULL, {0}}};
    const size_t rows = (size_t)LISTS * GROUP, parts = rows * CHOSEN / SPLIT;
    if (kvf_kernels_init(&kernels, KVF_ISA_ALL) != KVF_OK)
        return 1;
    char *exact = memory(PAGES * kvf_page_bytes(&forms[0].shape));
    void *q = memory(rows * HEAD_DIM * 2);
    uint32_t *count = memory(LISTS * sizeof *count);
    kvf_span *spans = memory(LISTS * CHOSEN * sizeof *spans);
    bench_fill(exact, PAGES * kvf_page_bytes(&forms[0].shape), 1);
    bench_fill(q, rows * HEAD_DIM * 2, 2);
    forms[0].pool = exact;
    for (uint32_t f = 1; f < FORMS; f++)
        quantize(&forms[f], exact);
    for (uint32_t i = 0; i < LISTS; i++)
        count[i] = CHOSEN;
    const kvf_attend_args shared = {.lists = LISTS,
                                    .group = GROUP,
                                    .spans_max = CHOSEN,
                                    .split = SPLIT,
                                    .scale = 0.0884f,
                                    .q = q,
                                    .span_count = count,
                                    .partial_o = memory(parts * HEAD_DIM * sizeof(float)),
                                    .partial_lse = memory(parts * sizeof(float))};
    for (uint32_t r = 0; r < ROUNDS; r++)
        for (uint32_t f = 0; f < FORMS; f++)
            forms[f].ns[r] = attend(&kernels, &forms[f], &shared, spans, r + 1);
    for (uint32_t f = 0; f < FORMS; f++) {
        double p[3];
        bench_percentiles(forms[f].ns, ROUNDS, p);
        printf("%s  %7.1f us (%.1f to %.1f), %zu bytes a token\n", forms[f].name, p[1] * 1e-3,
               p[0] * 1e-3, p[2] * 1e-3, kvf_stored_page_bytes(&forms[f].shape) / PAGE_SIZE);
    }
    return 0; /* memory goes with the process */
}
