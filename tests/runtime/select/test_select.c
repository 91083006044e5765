/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Which tokens are attended: every policy, step by step, against the naive model.
 *
 * The LSE is the witness: it is fp32 in every dtype, and a token that is missing or counted twice
 * changes it by its weight. Statistics (tokens, pages, hits, misses, recall) must agree exactly or
 * to rounding. Where the naive model says that two scores at a border are too close to call, the
 * comparison ends for that run, and the test demands that most steps were compared.
 */

#include "harness.h"

#include <math.h>

#include "naive.h"

/* A run: settings beside those of its table; 0 = blocks of 8 tokens, a prompt of 230, 60 steps. */
typedef struct row {
    const char *settings;
    uint32_t block, prompt, steps;
} row;

#define NONE UINT32_MAX /* a prompt of no tokens */

/* A run that is compared, and steps of all so far. */
typedef struct follow {
    const char *what;
    test_scenario scenario;
    uint32_t compared, steps;
} follow;

static double relative(double a, double b)
{
    return fabs(a - b) / fmax(1.0, fmax(fabs(a), fabs(b)));
}

static void compare_step(const follow *f, const naive *n, const naive_result *r, const void *out,
                         const float *lse, uint32_t step)
{
    const kvf_cache_config *c = &n->c;
    for (uint32_t h = 0; h < c->query_heads; h++)
        if (!(fabs(r->lse[h] - (double)lse[h]) <= TEST_LSE_TOLERANCE))
            fail_msg("%s: step %u head %u: LSE %.7g, the naive model has %.7g", f->what, step, h,
                     (double)lse[h], r->lse[h]);
    for (size_t i = 0; i < (size_t)c->query_heads * c->head_dim; i++)
        if (!(fabs(r->out[i] - (double)kvf_element_get(out, c->dtype, i)) <=
              test_tolerance(c->dtype)))
            fail_msg("%s: step %u: output %zu is %g, the naive model has %g", f->what, step, i,
                     (double)kvf_element_get(out, c->dtype, i), r->out[i]);
}

static void compare_stats(const follow *f, const kvf_stats *stats, const naive_result *r,
                          const naive *n, uint32_t step)
{
    if (stats->tokens_attended != r->attended)
        fail_msg("%s: step %u attends %llu tokens, the naive model %llu", f->what, step,
                 (unsigned long long)stats->tokens_attended, (unsigned long long)r->attended);
    if (n->c.select != KVF_SELECT_ORACLE && stats->pages_selected != r->pages)
        fail_msg("%s: step %u: %llu pages; the naive model has %llu", f->what, step,
                 (unsigned long long)stats->pages_selected, (unsigned long long)r->pages);
    if (stats->hits + stats->misses != stats->pages_selected)
        fail_msg("%s: step %u: %llu hits and %llu misses of %llu pages", f->what, step,
                 (unsigned long long)stats->hits, (unsigned long long)stats->misses,
                 (unsigned long long)stats->pages_selected);
    if (n->c.verify_interval != 1)
        return;
    double recall = 0.0;
    for (uint32_t h = 0; h < n->c.query_heads; h++)
        recall += r->recall[h];
    assert_int_equal(stats->verified, n->c.query_heads);
    if (relative(stats->recall_sum, recall) > 1e-3)
        fail_msg("%s: step %u: attention recall %g, the naive model has %g", f->what, step,
                 stats->recall_sum, recall);
    double far = 0.0;
    for (size_t i = 0; i < (size_t)n->c.query_heads * n->c.head_dim; i++)
        far = fmax(far, fabs(r->out[i] - r->dense[i]));
    if (fabs(stats->error_max - far) > 2.0 * test_tolerance(n->c.dtype))
        fail_msg("%s: step %u: error %g, the naive model has %g", f->what, step, stats->error_max,
                 far);
}

/* One run, compared after every step of every layer. */
static void follow_run(follow *f)
{
    const test_scenario *sc = &f->scenario;
    test_world w;
    test_tokens t;
    naive n;
    naive_result r;
    test_tokens_spec spec = sc->tokens;
    spec.count = sc->prompt + sc->steps;
    test_tokens_make(&t, &sc->cc, &spec);
    test_world_open(&w, sc->rc, &sc->cc);
    naive_open(&n, kvf_cache_settings(w.cache), kvf_cache_memory(w.cache));
    naive_result_open(&r, &sc->cc);
    kvf_sequence *s = test_sequence(&w);
    for (uint32_t layer = 0; layer < sc->cc.layers && sc->prompt; layer++) {
        test_prefill(&w, s, &t,
                     &(test_range){.layer = layer, .count = sc->prompt, .chunk = sc->chunk}, NULL);
        for (uint32_t i = 0; i < sc->prompt; i++)
            naive_append(&n, layer, test_q(&t, layer, i), test_k(&t, layer, i),
                         test_v(&t, layer, i));
    }
    float *lse = test_alloc(sc->cc.query_heads * sizeof *lse);
    void *out = test_alloc((size_t)sc->cc.query_heads * sc->cc.head_dim * 4);
    f->steps += sc->steps;
    for (uint32_t step = 0; step < sc->steps && n.border >= NAIVE_BORDER; step++)
        for (uint32_t layer = 0; layer < sc->cc.layers && n.border >= NAIVE_BORDER; layer++) {
            const uint32_t token = sc->prompt + step;
            kvf_cache_stats_reset(w.cache);
            test_decode(&w, s, &t, layer, token, out, lse);
            test_wait(&w);
            naive_decode(&n, layer, test_q(&t, layer, token), test_k(&t, layer, token),
                         test_v(&t, layer, token), &r);
            if (n.border < NAIVE_BORDER)
                break;
            kvf_stats stats;
            kvf_cache_stats(w.cache, &stats);
            compare_step(f, &n, &r, out, lse, step);
            compare_stats(f, &stats, &r, &n, step);
            f->compared += layer == 0;
        }
    test_release(lse);
    test_release(out);
    kvf_sequence_destroy(s);
    naive_result_close(&r);
    naive_close(&n);
    test_close(&w, &t);
}

/* Every row, with settings that all have; at least this share of all steps is compared. */
static void follow_rows(uint64_t seed, double share, const char *settings, const row *rows,
                        size_t count)
{
    follow f = {0};
    for (size_t i = 0; i < count; i++) {
        const row *x = &rows[i];
        const kvf_runtime_config rc = test_runtime_config();
        f.what = x->settings;
        f.scenario = (test_scenario){.rc = &rc,
                                     .cc = test_config_small(),
                                     .tokens = {.seed = seed + i, .sharpness = 2.0f, .topics = 6},
                                     .prompt = x->prompt == NONE ? 0
                                               : x->prompt       ? x->prompt
                                                                 : 230,
                                     .steps = x->steps         ? x->steps
                                              : TEST_SANITIZED ? 24
                                                               : 60,
                                     .chunk = 128};
        if (x->block)
            test_hooks.block_size = x->block;
        test_set(&f.scenario.cc, settings);
        test_set(&f.scenario.cc, x->settings);
        follow_run(&f);
    }
    print_message("# seed %llu: %u of %u steps compared\n", (unsigned long long)seed, f.compared,
                  f.steps);
    assert_true(f.compared >= share * f.steps);
}

#define FOLLOW(seed, share, settings, rows)                                                        \
    follow_rows((seed), (share), (settings), (rows), sizeof(rows) / sizeof *(rows))

TEST(policies_agree_with_the_naive_model)
{
    static const row rows[] = {
        {"select=hybrid", .block = 8},  {"select=static", .block = 8},
        {"select=dynamic", .block = 8}, {"select=streaming", .block = 8},
        {"select=oracle", .block = 8},  {"select=full", .block = 8},
        {"select=quest", .block = 8},   {"select=arkvale", .block = 8},
    };
    row exact[sizeof rows / sizeof *rows];
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        exact[i] = (row){rows[i].settings, .block = 32}; /* pages are of 8 */
    FOLLOW(211, 0.75, "verify_interval=1", rows);
    FOLLOW(211, 0.75, "verify_interval=1 refresh=exact", exact);
}

/* The prompt is shorter than the budget: everything at first, a selection later. */
TEST(growing_past_the_budget)
{
    static const row rows[] = {
        {"", .prompt = 20, .steps = 130},
        {"", .prompt = 50, .steps = 130},
        {"", .prompt = 80, .steps = 130},
    };
    FOLLOW(223, 0.75, "select=hybrid verify_interval=1", rows);
}

/* A share of the context above budget_tokens: for every policy that has a budget, from short to
 * long: 78 of 130 tokens, where budget_tokens has more, to 114 of 190. */
TEST(a_budget_that_grows)
{
    static const row rows[] = {
        {"select=hybrid", .prompt = 130},    {"select=dynamic", .prompt = 130},
        {"select=streaming", .prompt = 130}, {"select=oracle", .prompt = 130},
        {"select=quest", .prompt = 130},     {"select=arkvale", .prompt = 130},
    };
    FOLLOW(239, 0.75, "budget_share=0.6", rows);
}

TEST(static_ratios)
{
    static const row rows[] = {
        {"static_ratio=0", .block = 8},    {"static_ratio=0.1", .block = 8},
        {"static_ratio=0.25", .block = 8}, {"static_ratio=0.5", .block = 8},
        {"static_ratio=0.75", .block = 8}, {"static_ratio=1", .block = 8},
    };
    FOLLOW(227, 0.75, "select=hybrid", rows);
}

TEST(the_automatic_ratio)
{
    static const row rows[] = {
        {"", 8, 230, 40}, {"", 32, 60, 150}, {"", 8, NONE, 150}, {"", 32, 400, 40}};
    FOLLOW(241, 0.75, "select=hybrid static_ratio=auto layers=2", rows);
}

TEST(digests_and_reductions)
{
    static const row rows[] = {
        {"digest=minmax group_reduce=mean-softmax sub_digests=1", .steps = 30},
        {"digest=cuboid-mean group_reduce=mean-softmax sub_digests=2", .steps = 30},
        {"digest=mean group_reduce=mean-softmax sub_digests=4", .steps = 30},
        {"digest=minmax group_reduce=max sub_digests=2", .steps = 30},
        {"digest=cuboid-mean group_reduce=max sub_digests=4", .steps = 30},
        {"digest=mean group_reduce=max sub_digests=1", .steps = 30},
        {"digest=minmax group_reduce=sum sub_digests=4", .steps = 30},
        {"digest=cuboid-mean group_reduce=sum sub_digests=1", .steps = 30},
        {"digest=mean group_reduce=sum sub_digests=2", .steps = 30},
    };
    FOLLOW(229, 0.75, "select=hybrid", rows);
}

/* Codes score tokens: pages of any size, static sets that come and go, dtypes and dimensions.
 * Masses have eight bits, so some tokens tie. */
TEST(codes)
{
    static const row rows[] = {
        {"select=dynamic dtype=bf16 page_size=1 query_heads=6", 0, 300, 36},
        {"page_size=4 head_dim=80", 0, 300, 36},
        {"dtype=fp16 group_reduce=max query_heads=8 head_dim=96", 0, 300, 36},
        {"select=dynamic dtype=bf16 group_reduce=sum page_size=16 head_dim=128", 0, 300, 36},
        {"dtype=bf16 page_size=1 query_heads=2", 0, 300, 36},
        {"dtype=bf16 page_size=64 budget_tokens=224", 0, 300, 36},
        {"dtype=bf16 page_size=4 query_heads=40", 0, 300, 36},
        {"select=dynamic group_reduce=max query_heads=66", 0, 300, 36},
    };
    FOLLOW(241, 2.0 / 3.0, "select=hybrid digest=codes budget_tokens=120 refresh_interval=10",
           rows);
}

/* Pages counted by their tokens: digests, sinks longer than a page, every share of the static set,
 * pages of one token, which have no holes. */
TEST(budgets_filled_with_tokens)
{
    static const row rows[] = {
        {"static_ratio=0.25 budget_tokens=120", 8, 300, 40},
        {"static_ratio=0.75 page_size=16 sink_tokens=20 budget_tokens=200", 32, 300, 40},
        {"digest=codes static_ratio=0.5 sink_tokens=0 budget_tokens=150", 64, 300, 40},
        {"digest=codes static_ratio=0.25 page_size=1 budget_tokens=130", 64, 300, 40},
        {"static_ratio=auto budget_tokens=160", 8, 300, 40},
        {"static_ratio=0 sink_tokens=11 budget_tokens=120", 8, 300, 40},
        {"static_ratio=1 budget_tokens=120", 8, 300, 40},
    };
    FOLLOW(251, 0.75,
           "select=hybrid fill=tokens digest=minmax refresh_interval=10 verify_interval=1", rows);
}

/* Dtypes, page sizes, no sink, a sink longer than a page, odd windows, layers, scales. */
TEST(geometries)
{
    static const row rows[] = {
        {"dtype=bf16 sink_tokens=0 query_heads=8 layers=2", 8, 300, 40},
        {"dtype=fp16 page_size=16 local_tokens=32 budget_tokens=128 query_heads=2 head_dim=80 "
         "softmax_scale=0.1",
         8, 300, 40},
        {"dtype=bf16 page_size=32 local_tokens=64 budget_tokens=192", 8, 300, 40},
        {"sink_tokens=19 local_tokens=13 budget_tokens=100 query_heads=6 head_dim=96 "
         "softmax_scale=0.1",
         8, 300, 40},
        {"dtype=bf16 page_size=16 sink_tokens=16 local_tokens=1 budget_tokens=101 layers=2 "
         "head_dim=128",
         8, 300, 40},
        {"dtype=fp16 page_size=64 sink_tokens=1 local_tokens=10 budget_tokens=150 "
         "softmax_scale=0.1",
         8, 300, 40},
        /* pages smaller than blocks */
        {"dtype=bf16 page_size=1 budget_tokens=90 layers=2", 8, 300, 40},
        {"page_size=2 sink_tokens=7 local_tokens=20 budget_tokens=100 query_heads=6 head_dim=80 "
         "softmax_scale=0.1",
         32, 300, 40},
        {"dtype=fp16 page_size=4 local_tokens=30 budget_tokens=128", 32, 300, 40},
        {"dtype=bf16 sink_tokens=3 local_tokens=5 query_heads=8 head_dim=128 softmax_scale=0.1", 64,
         300, 40},
        {"page_size=16 sink_tokens=20 budget_tokens=160 query_heads=2", 32, 300, 40},
        /* several sub-groups, and kept queries that are scored in pieces */
        {"dtype=bf16 local_tokens=64 budget_tokens=160 query_heads=96 softmax_scale=0.1", 8, 300,
         40},
        {"page_size=4 local_tokens=40 budget_tokens=120 query_heads=130", 32, 300, 40},
    };
    FOLLOW(233, 0.75, "select=hybrid", rows);
}

/* Few slots: victims by lowest score, and what a resident refresh can see, as defined. */
TEST(slots_and_victims)
{
    static const row rows[] = {
        {"device_bytes=1073741824 transfer=direct", .steps = 70},
        {"device_bytes=0 transfer=gather", .steps = 70},
        {"device_bytes=1073741824 transfer=direct", .steps = 70},
        {"device_bytes=0 transfer=gather", .steps = 70},
    };
    FOLLOW(239, 0.75, "select=hybrid", rows);
}

/* k = 1024 tokens beside a window of 64 to 95, as published: at most a page less. */
TEST(the_prkv_preset_attends_to_k_tokens)
{
    enum { PROMPT = 2000, STEPS = 8, K = 1024, LOCAL = 64 };
    test_world w;
    test_tokens t;
    kvf_cache_config cc = test_config_small();
    kvf_cache_config_preset(&cc, KVF_PRESET_PRKV);
    cc.tokens_max = PROMPT + STEPS;
    test_tokens_make(
        &t, &cc,
        &(test_tokens_spec){
            .seed = test_seed(257), .sharpness = 2.0f, .topics = 6, .count = PROMPT + STEPS});
    test_world_open(&w, NULL, &cc);
    assert_int_equal(kvf_cache_memory(w.cache)->static_tokens, K / 4);
    kvf_sequence *s = test_sequence(&w);
    test_prefill(&w, s, &t, &(test_range){.count = PROMPT, .chunk = 128}, NULL);
    float *out = test_scratch(cc.query_heads * cc.head_dim * sizeof *out);
    for (uint32_t step = 0; step < STEPS; step++) {
        kvf_cache_stats_reset(w.cache);
        test_decode(&w, s, &t, 0, PROMPT + step, out, NULL);
        test_wait(&w);
        kvf_stats stats;
        kvf_cache_stats(w.cache, &stats);
        const uint64_t window = LOCAL + (PROMPT + step + 1 - LOCAL) % cc.page_size;
        const uint64_t most = cc.kv_heads * (K + window);
        assert_in_range(stats.tokens_attended, most - cc.kv_heads * (cc.page_size - 1), most);
    }
    kvf_sequence_destroy(s);
    test_close(&w, &t);
}
