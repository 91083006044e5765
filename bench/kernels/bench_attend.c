/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Decode attention at 128K tokens and gathering of pages, against what the memory gives in the same
 * run.
 *
 * 8 KV heads, 4 query heads each, head_dim 128, bf16, pages of 32 tokens, 1024 tokens attended. The
 * contenders take turns, round after round, so that what else the machine does meets all of them;
 * each figure is the median over the rounds, with the 10th and 90th percentile. `busy` is the
 * processor time of the slowest thread, `wall` what the clock says. Layers are visited in turn:
 * nothing is found in a cache that a model would not find there.
 */

#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#include "bench_report.h"
#include "bench_team.h"
#include "common/random.h"
#include "kernels.h"

#define HEADS         8u
#define GROUP         4u
#define HEAD_DIM      128u
#define PAGE_SIZE     32u
#define BUDGET_PAGES  32u /* 1024 tokens */
#define NEAR_PAGES    8u  /* of them static set, sink and window: contiguous */
#define LAYERS        2u  /* pools of K and V */
#define DIGEST_LAYERS 8u
#define DENSE_SPLIT   32u
#define SPARSE_SPLIT  8u
#define GATHER_PAGES  512u
#define RING_PAGES    192u /* 3 MiB */
#define ROUNDS_MAX    200u

static const kvf_shape shape = {KVF_BF16, HEAD_DIM, PAGE_SIZE, KVF_PAGES_NATIVE, 0};

typedef struct state {
    kvf_kernels kernels;
    uint32_t pages; /* per head */
    uint32_t round;
    uint8_t *pool; /* [LAYERS, HEADS, pages] */
    size_t pool_bytes;
    uint8_t *digests; /* [DIGEST_LAYERS, HEADS, pages] */
    uint8_t *near;    /* [HEADS, NEAR_PAGES] */
    uint8_t *slots;   /* [GATHER_PAGES] */
    uint16_t *q;      /* [HEADS, GROUP, HEAD_DIM] */
    uint16_t *out;
    kvf_span *dense;  /* [LAYERS, HEADS, pages] */
    kvf_span *sparse; /* [HEADS, BUDGET_PAGES] */
    uint32_t *dense_count;
    uint32_t *sparse_count;
    uint32_t *page_count;
    uint32_t *wanted;
    const void **digest_rows; /* [DIGEST_LAYERS, HEADS] */
    float *scores;            /* [HEADS, GROUP, pages] */
    float *reduced;           /* [HEADS, pages] */
    int32_t *ids;             /* [HEADS, BUDGET_PAGES] */
    uint32_t *id_count;
    uint32_t *work;
    float *partial_o;
    float *partial_lse;
    const void **from; /* [GATHER_PAGES] */
    void **to;
    uint64_t sink[TEAM_MAX]; /* keeps the reading of memory alive */
} state;

static void *memory(size_t bytes)
{
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) {
        fprintf(stderr, "no memory: %zu bytes\n", bytes);
        exit(1);
    }
    madvise(p, bytes, MADV_HUGEPAGE);
    return p;
}

/* ---- the contenders: each is called by every member of the team ---- */

static void read_memory(void *arg, uint32_t member, uint32_t members)
{
    state *s = arg;
    const size_t part = s->pool_bytes / members / 64 * 64;
    const uint64_t *p = (const uint64_t *)(const void *)(s->pool + member * part);
    uint64_t x0 = 0, x1 = 0, x2 = 0, x3 = 0;
    for (size_t i = 0; i < part / 8; i += 8) { /* one word a line would do; four keep it honest */
        x0 ^= p[i];
        x1 ^= p[i + 2];
        x2 ^= p[i + 4];
        x3 ^= p[i + 6];
    }
    s->sink[member] ^= x0 ^ x1 ^ x2 ^ x3;
}

typedef struct attention {
    const kvf_span *spans;
    const uint32_t *count;
    uint32_t spans_max;
    uint32_t split;
} attention;

static void attend_lists(state *s, const attention *x, uint32_t first, uint32_t end)
{
    const uint32_t splits = kvf_div_ceil_u32(x->spans_max, x->split);
    kvf_attend_args a = {.shape = shape,
                         .lists = HEADS,
                         .group = GROUP,
                         .spans_max = x->spans_max,
                         .split = x->split,
                         .scale = 0.0884f,
                         .q = s->q,
                         .spans = x->spans,
                         .span_count = x->count,
                         .partial_o = s->partial_o,
                         .partial_lse = s->partial_lse};
    kvf_merge_args m = {.shape = shape,
                        .lists = HEADS,
                        .group = GROUP,
                        .splits_max = splits,
                        .split = x->split,
                        .span_count = x->count,
                        .partial_o = s->partial_o,
                        .partial_lse = s->partial_lse,
                        .out = s->out};
    for (uint32_t list = first; list < end; list++) {
        for (uint32_t i = 0; i < splits; i++)
            s->kernels.attend(&a, list * splits + i);
        s->kernels.merge(&m, list);
    }
}

static void attend_dense(void *arg, uint32_t member, uint32_t members)
{
    state *s = arg;
    const attention x = {s->dense + (size_t)(s->round % LAYERS) * HEADS * s->pages, s->dense_count,
                         s->pages, DENSE_SPLIT};
    attend_lists(s, &x, HEADS * member / members, HEADS * (member + 1) / members);
}

static void attend_sparse(void *arg, uint32_t member, uint32_t members)
{
    state *s = arg;
    const attention x = {s->sparse, s->sparse_count, BUDGET_PAGES, SPARSE_SPLIT};
    attend_lists(s, &x, HEADS * member / members, HEADS * (member + 1) / members);
}

static void score_digests(void *arg, uint32_t member, uint32_t members)
{
    state *s = arg;
    kvf_score_args a = {.shape = shape,
                        .subs = 1,
                        .lists = HEADS,
                        .group = GROUP,
                        .pages_max = s->pages,
                        .q = s->q,
                        .digests = s->digest_rows + s->round % DIGEST_LAYERS * HEADS,
                        .pages = s->page_count,
                        .scores = s->scores};
    const uint32_t tasks = kvf_score_tasks(&a);
    for (uint32_t i = tasks * member / members; i < tasks * (member + 1) / members; i++)
        s->kernels.score(&a, i);
}

static void select_pages(state *s, uint32_t list)
{
    kvf_reduce_args r = {.kind = KVF_GROUP_MEAN_SOFTMAX,
                         .outputs = HEADS,
                         .rows = GROUP,
                         .pages_max = s->pages,
                         .pages_step = 1,
                         .scale = 0.0884f,
                         .scores = s->scores,
                         .pages = s->page_count,
                         .out = s->reduced};
    kvf_topk_args t = {.lists = HEADS,
                       .stride = s->pages,
                       .ids_max = BUDGET_PAGES,
                       .work_stride = s->pages,
                       .scores = s->reduced,
                       .count = s->page_count,
                       .k = s->wanted,
                       .ids = s->ids,
                       .id_count = s->id_count,
                       .work = s->work};
    s->kernels.reduce(&r, list);
    s->kernels.topk(&t, list);
}

static void select_only(void *arg, uint32_t member, uint32_t members)
{
    state *s = arg;
    for (uint32_t list = HEADS * member / members; list < HEADS * (member + 1) / members; list++)
        select_pages(s, list);
}

/* A whole step: a KV head after the other, so that no thread waits for another. */
static void step_sparse(void *arg, uint32_t member, uint32_t members)
{
    state *s = arg;
    const uint32_t first = HEADS * member / members, end = HEADS * (member + 1) / members;
    const kvf_span *layer = s->dense + (size_t)(s->round % LAYERS) * HEADS * s->pages;
    score_digests(arg, member, members);
    for (uint32_t list = first; list < end; list++) {
        select_pages(s, list);
        for (uint32_t i = 0; i < s->id_count[list]; i++)
            s->sparse[list * BUDGET_PAGES + NEAR_PAGES + i] =
                layer[(size_t)list * s->pages + (uint32_t)s->ids[list * BUDGET_PAGES + i]];
    }
    attend_sparse(arg, member, members);
}

static void gather_copy(void *arg, uint32_t member, uint32_t members)
{
    state *s = arg;
    (void)member;
    (void)members;
    kvf_copy_args a = {.bytes = kvf_page_bytes(&shape),
                       .count = GATHER_PAGES,
                       .per_task = 32,
                       .stream = 1,
                       .from = s->from,
                       .to = s->to};
    for (uint32_t i = 0; i < kvf_copy_tasks(&a); i++)
        s->kernels.copy(&a, i);
}

static void gather_memcpy(void *arg, uint32_t member, uint32_t members)
{
    state *s = arg;
    (void)member;
    (void)members;
    for (uint32_t i = 0; i < GATHER_PAGES; i++)
        memcpy(s->to[i], s->from[i], kvf_page_bytes(&shape));
}

/* ---- rounds and figures
 * -------------------------------------------------------------------------- */

enum {
    READ,
    DENSE,
    STEP,
    SPARSE,
    SELECT,
    SCORE,
    RING_COPY,
    RING_MEMCPY,
    SLOT_COPY,
    SLOT_MEMCPY,
    CONTENDERS
};

static const struct {
    const char *name;
    team_fn fn;
    bool alone;
} contenders[CONTENDERS] = {
    [READ] = {"read memory", read_memory, false},
    [DENSE] = {"dense attention", attend_dense, false},
    [STEP] = {"sparse step", step_sparse, false},
    [SPARSE] = {"sparse attention only", attend_sparse, false},
    [SELECT] = {"reduce + topk only", select_only, false},
    [SCORE] = {"digest scoring", score_digests, false},
    [RING_COPY] = {"gather to ring, copy kernel", gather_copy, true},
    [RING_MEMCPY] = {"gather to ring, memcpy", gather_memcpy, true},
    [SLOT_COPY] = {"gather to slots, copy kernel", gather_copy, true},
    [SLOT_MEMCPY] = {"gather to slots, memcpy", gather_memcpy, true},
};

typedef struct figure {
    double p[3]; /* 10th percentile, median, 90th */
} figure;

static figure figure_of(const double *values, uint32_t count)
{
    double sorted[ROUNDS_MAX];
    figure f;
    memcpy(sorted, values, count * sizeof *values);
    bench_percentiles(sorted, count, f.p);
    return f;
}

/* Random pages of the pool; into the ring, over and over, or each into a place of its own. */
static void aim_gather(state *s, uint64_t *seed, bool ring)
{
    const size_t page = kvf_page_bytes(&shape), pages = s->pool_bytes / page;
    for (uint32_t i = 0; i < GATHER_PAGES; i++) {
        s->from[i] = s->pool + kvf_random_next(seed) % pages * page;
        s->to[i] = s->slots + (ring ? i % RING_PAGES : i) * page;
    }
    if (!ring) /* slots that were not written lately */
        for (uint32_t i = 0; i < GATHER_PAGES; i++)
            s->to[i] = s->slots + (RING_PAGES + kvf_random_below(seed, 16 * GATHER_PAGES)) * page;
}

static void open_state(state *s, uint32_t pages, uint32_t isa)
{
    const size_t page = kvf_page_bytes(&shape), digest = kvf_digest_bytes(HEAD_DIM, 1);
    if (kvf_kernels_init(&s->kernels, isa) != KVF_OK)
        exit(1);
    s->pages = pages;
    const size_t lists = (size_t)HEADS * s->pages, rows = (size_t)HEADS * GROUP;
    s->pool_bytes = LAYERS * lists * page;
    s->pool = memory(s->pool_bytes);
    s->digests = memory(DIGEST_LAYERS * lists * digest);
    s->near = memory(HEADS * NEAR_PAGES * page);
    s->slots = memory((RING_PAGES + 16 * GATHER_PAGES) * page);
    s->q = memory(rows * HEAD_DIM * 2);
    s->out = memory(rows * HEAD_DIM * 2);
    s->dense = memory(LAYERS * lists * sizeof *s->dense);
    s->sparse = memory((size_t)HEADS * BUDGET_PAGES * sizeof *s->sparse);
    s->dense_count = memory(HEADS * sizeof(uint32_t));
    s->sparse_count = memory(HEADS * sizeof(uint32_t));
    s->page_count = memory(HEADS * sizeof(uint32_t));
    s->wanted = memory(HEADS * sizeof(uint32_t));
    s->digest_rows = memory((size_t)DIGEST_LAYERS * HEADS * sizeof(void *));
    s->scores = memory(rows * s->pages * sizeof(float));
    s->reduced = memory(lists * sizeof(float));
    s->ids = memory((size_t)HEADS * BUDGET_PAGES * sizeof(int32_t));
    s->id_count = memory(HEADS * sizeof(uint32_t));
    s->work = memory(lists * sizeof(uint32_t));
    const size_t parts = rows * kvf_div_ceil_u32(s->pages, SPARSE_SPLIT);
    s->partial_o = memory(parts * HEAD_DIM * sizeof(float));
    s->partial_lse = memory(parts * sizeof(float));
    s->from = memory(GATHER_PAGES * sizeof(void *));
    s->to = memory(GATHER_PAGES * sizeof(void *));
}

static void fill_state(state *s)
{
    const size_t page = kvf_page_bytes(&shape), digest = kvf_digest_bytes(HEAD_DIM, 1);
    const size_t lists = (size_t)HEADS * s->pages;
    bench_fill(s->pool, s->pool_bytes, 1);
    bench_fill(s->near, HEADS * NEAR_PAGES * page, 2);
    bench_fill(s->q, (size_t)HEADS * GROUP * HEAD_DIM * 2, 3);
    memset(s->slots, 1, (RING_PAGES + 16 * GATHER_PAGES) * page);
    for (size_t i = 0; i < LAYERS * lists; i++) {
        s->dense[i] = (kvf_span){.page = s->pool + i * page, .count = PAGE_SIZE};
        kvf_digest_job job = {s->dense[i].page, s->digests + i * digest, 0, PAGE_SIZE, 0};
        s->kernels.digest(
            &(kvf_digest_args){.shape = shape, .subs = 1, .job_count = 1, .jobs = &job}, 0);
    }
    for (uint32_t i = LAYERS; i < DIGEST_LAYERS; i++)
        memcpy(s->digests + i * lists * digest, s->digests + i % LAYERS * lists * digest,
               lists * digest);
    for (uint32_t i = 0; i < DIGEST_LAYERS * HEADS; i++)
        s->digest_rows[i] = s->digests + (size_t)i * s->pages * digest;
    for (uint32_t h = 0; h < HEADS; h++) {
        s->dense_count[h] = s->page_count[h] = s->pages;
        s->sparse_count[h] = BUDGET_PAGES;
        s->wanted[h] = BUDGET_PAGES - NEAR_PAGES;
        for (uint32_t i = 0; i < BUDGET_PAGES; i++)
            s->sparse[h * BUDGET_PAGES + i] =
                i < NEAR_PAGES
                    ? (kvf_span){.page = s->near + (h * NEAR_PAGES + i) * page, .count = PAGE_SIZE}
                    : s->dense[(size_t)h * s->pages + i * 7];
    }
}

/* Pages that no step has touched lately, for attention alone. */
static void aim_sparse(state *s, uint64_t *seed)
{
    for (uint32_t h = 0; h < HEADS; h++)
        for (uint32_t i = NEAR_PAGES; i < BUDGET_PAGES; i++)
            s->sparse[h * BUDGET_PAGES + i] =
                s->dense[kvf_random_below(seed, LAYERS * HEADS * s->pages)];
}

static double bytes_of(const state *s, int contender)
{
    const double page = (double)kvf_page_bytes(&shape), lists = (double)HEADS * s->pages;
    const double digests = lists * (double)kvf_digest_bytes(HEAD_DIM, 1);
    switch (contender) {
    case READ:
        return (double)s->pool_bytes;
    case DENSE:
        return lists * page;
    case STEP:
        return digests + HEADS * BUDGET_PAGES * page;
    case SPARSE:
        return HEADS * BUDGET_PAGES * page;
    case SELECT:
        return lists * GROUP * 4.0;
    case SCORE:
        return digests;
    default:
        return GATHER_PAGES * page;
    }
}

typedef struct results {
    double wall[CONTENDERS][ROUNDS_MAX];
    double busy[CONTENDERS][ROUNDS_MAX];
    uint32_t rounds;
} results;

static void run_rounds(state *s, team *t, results *r)
{
    uint64_t seed = 12345;
    for (uint32_t round = 0; round < r->rounds + 1; round++)
        for (int i = 0; i < CONTENDERS; i++) {
            s->round = round;
            if (i == SPARSE)
                aim_sparse(s, &seed);
            if (i >= RING_COPY)
                aim_gather(s, &seed, i < SLOT_COPY);
            s->q[kvf_random_below(&seed, HEADS * GROUP * HEAD_DIM)] ^= 0x8000;
            const team_times x = contenders[i].alone ? team_alone(contenders[i].fn, s)
                                                     : team_run(t, contenders[i].fn, s);
            if (round == 0) /* warms up */
                continue;
            r->wall[i][round - 1] = x.wall;
            r->busy[i][round - 1] = x.busy;
        }
}

/* Ratios are taken round by round, then their median: what disturbed a round disturbed both sides.
 */
static figure ratio(const results *r, bool busy, int over, double over_scale, int under)
{
    double x[ROUNDS_MAX];
    for (uint32_t i = 0; i < r->rounds; i++)
        x[i] = over_scale *
               (busy ? r->busy[over][i] / r->busy[under][i] : r->wall[over][i] / r->wall[under][i]);
    return figure_of(x, r->rounds);
}

typedef struct target {
    const char *name;
    int over;
    int under;
    bool bandwidth; /* scale by bytes */
    double at_least;
} target;

static const target targets[] = {
    {"dense time / sparse step time", DENSE, STEP, false, 20.0},
    {"dense time / sparse attention time", DENSE, SPARSE, false, 0.0},
    {"dense attention GB/s / read GB/s", READ, DENSE, true, 0.70},
    {"digest scoring GB/s / read GB/s", READ, SCORE, true, 0.75},
    {"gather to ring: memcpy time / copy time", RING_MEMCPY, RING_COPY, false, 1.2},
    {"gather to slots: memcpy time / copy time", SLOT_MEMCPY, SLOT_COPY, false, 1.2},
};

static figure target_ratio(const state *s, const results *r, const target *t, bool busy)
{
    const double scale = t->bandwidth ? bytes_of(s, t->under) / bytes_of(s, t->over) : 1.0;
    return ratio(r, busy, t->over, scale, t->under);
}

static void print_table(const state *s, const results *r)
{
    printf("%-30s %10s %12s %12s %25s\n", "", "MiB", "busy ms", "wall ms", "GB/s busy (p10 - p90)");
    for (int i = 0; i < CONTENDERS; i++) {
        const figure busy = figure_of(r->busy[i], r->rounds),
                     wall = figure_of(r->wall[i], r->rounds);
        const double bytes = bytes_of(s, i);
        printf("%-30s %10.1f %12.3f %12.3f %9.2f (%.2f - %.2f)\n", contenders[i].name,
               bytes / 1048576.0, busy.p[1] * 1e3, wall.p[1] * 1e3, bytes / busy.p[1] * 1e-9,
               bytes / busy.p[2] * 1e-9, bytes / busy.p[0] * 1e-9);
    }
    printf("\n%-42s %8s %18s %8s %18s %8s\n", "ratio", "busy", "(p10 - p90)", "wall", "(p10 - p90)",
           "target");
    for (size_t i = 0; i < sizeof targets / sizeof *targets; i++) {
        const target *t = &targets[i];
        const figure b = target_ratio(s, r, t, true), w = target_ratio(s, r, t, false);
        printf("%-42s %8.2f (%7.2f - %6.2f) %8.2f (%7.2f - %6.2f) %8.2f %s\n", t->name, b.p[1],
               b.p[0], b.p[2], w.p[1], w.p[0], w.p[2], t->at_least,
               t->at_least == 0.0      ? ""
               : w.p[1] >= t->at_least ? "met"
                                       : "missed");
    }
}

static void write_json(FILE *f, const state *s, const results *r, uint32_t threads)
{
    fprintf(f, "  \"threads\": %u, \"isa\": %u, \"tokens\": %u, \"rounds\": %u,\n", threads,
            s->kernels.isa, s->pages * PAGE_SIZE, r->rounds);
    fprintf(f, "  \"contenders\": [\n");
    for (int i = 0; i < CONTENDERS; i++) {
        fprintf(f, "    {\"name\": \"%s\", \"bytes\": %.0f, ", contenders[i].name, bytes_of(s, i));
        bench_json_three(f, "busy_seconds", figure_of(r->busy[i], r->rounds).p, ", ");
        bench_json_three(f, "wall_seconds", figure_of(r->wall[i], r->rounds).p,
                         i + 1 < CONTENDERS ? "},\n" : "}],\n");
    }
    fprintf(f, "  \"ratios\": [\n");
    for (size_t i = 0; i < sizeof targets / sizeof *targets; i++) {
        const target *t = &targets[i];
        fprintf(f, "    {\"name\": \"%s\", \"target\": %.2f, ", t->name, t->at_least);
        bench_json_three(f, "busy", target_ratio(s, r, t, true).p, ", ");
        bench_json_three(f, "wall", target_ratio(s, r, t, false).p,
                         i + 1 < sizeof targets / sizeof *targets ? "},\n" : "}]\n");
    }
    bench_json_close(f);
}

int main(int argc, char **argv)
{
    static state s;
    static results r = {.rounds = 15};
    static team t;
    uint32_t tokens = 131072, threads = 2, isa = KVF_ISA_ALL;
    const bench_option options[] = {{"--tokens", &tokens, 8192, 1u << 25, NULL},
                                    {"--rounds", &r.rounds, 1, ROUNDS_MAX, NULL},
                                    {"--threads", &threads, 1, HEADS, NULL},
                                    {"--isa", &isa, 0, UINT32_MAX, NULL},
                                    {0}};
    const bench_args args = bench_args_read(argc, argv, options);
    open_state(&s, tokens / PAGE_SIZE, isa);
    fill_state(&s);
    if (!team_open(&t, threads))
        return 1;
    printf("%u tokens, %u KV heads x %u, d = %u, bf16, %u tokens attended, %u threads, isa %u\n\n",
           s.pages * PAGE_SIZE, HEADS, GROUP, HEAD_DIM, BUDGET_PAGES * PAGE_SIZE, threads,
           s.kernels.isa);
    run_rounds(&s, &t, &r);
    team_close(&t);
    print_table(&s, &r);
    FILE *json = bench_json_open(&args);
    if (json)
        write_json(json, &s, &r, threads);
    return 0;
}
