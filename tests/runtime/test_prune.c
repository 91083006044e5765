/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The pruner with policies of the test's own: what they are shown, that they are obeyed, and that
 * nonsense is refused by name. Scores are compared with a restatement in double; what a step
 * attends to after pruning with dense attention over the tokens that are said to be there.
 *
 * Looks inside for memory: what is reserved, and that nothing is left where a reservation fails.
 */

#include "harness.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "pruner.h"

#define SEED     20251121u
#define LAYERS   3u
#define KV_HEADS 2u
#define GROUP    2u
#define HEADS    (KV_HEADS * GROUP)
#define DIM      64u
#define PROMPT   160u
#define STEPS    3u
#define TOKENS   (PROMPT + STEPS)
#define WINDOW   6u
#define CHUNK    48u

/* ---- a policy that does as it is told ---- */

/* What it was shown of a layer. */
typedef struct sight {
    kvf_prune_view view; /* pointers are not valid any more */
    float scores[KV_HEADS * PROMPT];
    kvf_prune_profile profile[HEADS];
    uint32_t has_profile;
    uint32_t positions[PROMPT];
    uint32_t count; /* what its state was */
} sight;

typedef struct told {
    uint32_t keep[LAYERS];      /* keeps tokens i % keep == 0 and the window; 0 = all */
    uint32_t propagate[LAYERS]; /* likewise */
    uint32_t restart_at;        /* layer + 1; 0 = never */
    uint32_t restarts;          /* most of them */
    void (*nonsense)(const kvf_prune_view *view, kvf_prune_answer *answer);
    uint32_t calls;
    sight sights[2 * LAYERS];
} told;

static uint32_t stride_ids(const kvf_prune_view *view, uint32_t stride, uint32_t *ids)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < view->tokens; i++)
        if (i % stride == 0 || i >= view->tokens - view->window)
            ids[count++] = i;
    return count;
}

static void told_decide(const kvf_prune_view *view, kvf_prune_answer *answer)
{
    told *t = view->user;
    uint32_t *count = view->state;
    assert_int_equal(answer->keep_count, view->tokens); /* preset: keep and propagate all */
    assert_int_equal(answer->propagate_count, view->tokens);
    assert_int_equal(answer->restart, 0);
    if (t->calls < 2 * LAYERS) {
        sight *s = &t->sights[t->calls];
        s->view = *view;
        s->count = *count;
        memcpy(s->positions, view->positions, view->tokens * sizeof *s->positions);
        s->has_profile = view->profile != NULL;
        if (view->scores)
            memcpy(s->scores, view->scores,
                   (size_t)view->kv_heads * view->candidates * sizeof *s->scores);
        if (view->profile)
            memcpy(s->profile, view->profile, view->query_heads * sizeof *s->profile);
    }
    t->calls++;
    ++*count;
    const uint32_t keep = t->keep[view->layer], propagate = t->propagate[view->layer];
    for (uint32_t h = 0; keep && h < view->kv_heads; h++) {
        uint32_t kept = stride_ids(view, keep, answer->keep);
        answer->keep_count = kept;
        memmove(answer->keep + (size_t)h * kept, answer->keep, kept * sizeof *answer->keep);
    }
    if (propagate)
        answer->propagate_count = stride_ids(view, propagate, answer->propagate);
    answer->restart = t->restart_at == view->layer + 1 && view->pass < t->restarts;
    answer->is_chosen = answer->restart;
    if (t->nonsense)
        t->nonsense(view, answer);
}

/* `beta` means nothing to this policy, so it carries what to measure. */
static uint32_t told_needs(const kvf_prune_view *view)
{
    return view->settings->beta & 0xffu;
}

static size_t told_state_bytes(const kvf_prune_settings *settings, const kvf_prune_shape *shape)
{
    (void)settings;
    (void)shape;
    return sizeof(uint32_t);
}

static kvf_prune_policy told_policy(told *t)
{
    return (kvf_prune_policy){.size = sizeof(kvf_prune_policy),
                              .name = "told",
                              .source = "test",
                              .state_bytes = told_state_bytes,
                              .needs_at = told_needs,
                              .decide = told_decide,
                              .user = t};
}

/* ---- a world with a pruner ---- */

typedef struct rig {
    test_world w;
    test_tokens t;
    told told;
    kvf_prune_policy policy;
    kvf_prune_config config;
    kvf_prune *prune;
    char *q, *k, *v, *out; /* of one chunk */
} rig;

static kvf_cache_config cache_config(void)
{
    kvf_cache_config c = test_config_small();
    c.layers = LAYERS;
    c.tokens_max = TOKENS;
    c.prefill_chunk_max = CHUNK;
    c.sequences_max = 2;
    c.observe_window = WINDOW;
    return c;
}

static void rig_open(rig *r, const kvf_cache_config *cc, uint32_t needs)
{
    const test_tokens_spec spec = {.count = TOKENS, .seed = SEED, .sharpness = 2.0f};
    memset(r, 0, sizeof *r);
    test_world_open(&r->w, NULL, cc);
    test_tokens_make(&r->t, cc, &spec);
    r->policy = told_policy(&r->told);
    kvf_prune_config_init(&r->config, &r->policy);
    r->config.settings.window = WINDOW;
    r->config.settings.beta = needs | 0x100u;
    const size_t row = HEADS * DIM * sizeof(float);
    r->q = malloc(CHUNK * row);
    r->k = malloc(CHUNK * row);
    r->v = malloc(CHUNK * row);
    r->out = malloc(CHUNK * row);
    assert_true(r->q && r->k && r->v && r->out);
}

static void rig_prune(rig *r)
{
    kvf_error error;
    if (kvf_prune_open(r->w.cache, &r->config, &r->prune, &error) != KVF_OK)
        fail_msg("kvf_prune_open: %s", error.text);
}

static void rig_close(rig *r)
{
    test_wait(&r->w);
    kvf_prune_close(r->prune);
    test_tokens_free(&r->t);
    test_world_close(&r->w);
    free(r->q);
    free(r->k);
    free(r->v);
    free(r->out);
}

/* The prompt on its way: which tokens go on, at which positions. */
typedef struct progress {
    kvf_sequence *sequence;
    uint32_t tokens[PROMPT], positions[PROMPT];
    uint32_t count;
    uint32_t layer;
} progress;

static progress begin(rig *r, uint32_t count)
{
    progress p = {.sequence = test_sequence(&r->w), .count = count};
    for (uint32_t i = 0; i < count; i++)
        p.tokens[i] = p.positions[i] = i;
    test_ok(&r->w, kvf_prune_begin(r->prune, p.sequence, count));
    return p;
}

static kvf_prefill_args chunk_args(rig *r, const progress *p, uint32_t first, uint32_t count)
{
    const size_t q_row = HEADS * DIM * sizeof(float), kv_row = KV_HEADS * DIM * sizeof(float);
    for (uint32_t i = 0; i < count; i++) {
        const uint32_t token = p->tokens[first + i];
        memcpy(r->q + i * q_row, test_q(&r->t, p->layer, token), q_row);
        memcpy(r->k + i * kv_row, test_k(&r->t, p->layer, token), kv_row);
        memcpy(r->v + i * kv_row, test_v(&r->t, p->layer, token), kv_row);
    }
    return (kvf_prefill_args){.sequence = p->sequence,
                              .layer = p->layer,
                              .tokens = count,
                              .q = r->q,
                              .k = r->k,
                              .v = r->v,
                              .positions = p->positions + first,
                              .out = r->out};
}

static void fill_chunk(rig *r, const progress *p, uint32_t first, uint32_t chunk, bool appends)
{
    const uint32_t rest = p->count - first, n = rest < chunk ? rest : chunk;
    const kvf_prefill_args args = chunk_args(r, p, first, n);
    test_ok(&r->w, kvf_prefill(r->w.cache, &args, r->w.stream));
    if (appends)
        test_ok(&r->w, kvf_prune_append(r->prune, &args, r->w.stream));
    test_wait(&r->w); /* the chunk's buffers are used again */
}

static void fill_layer(rig *r, const progress *p)
{
    for (uint32_t first = 0; first < p->count; first += CHUNK)
        fill_chunk(r, p, first, CHUNK, true);
}

/* What follows from a result. */
static void go_on(progress *p, const kvf_prune_result *result)
{
    for (uint32_t i = 0; result->propagate && i < result->propagate_count; i++) {
        p->tokens[i] = p->tokens[result->propagate[i]];
        p->positions[i] = p->positions[result->propagate[i]];
    }
    p->count = result->propagate_count;
    p->layer++;
    for (uint32_t i = 0; result->restart && i < p->count; i++)
        p->positions[i] = i;
    if (result->restart)
        p->layer = 0;
}

static kvf_status prune_layer(rig *r, progress *p)
{
    kvf_prune_result result;
    const kvf_status status =
        kvf_prune_layer(r->prune, p->sequence, p->layer, r->w.stream, &result);
    if (status == KVF_OK)
        go_on(p, &result);
    return status;
}

static progress run(rig *r, uint32_t count)
{
    progress p = begin(r, count);
    while (p.layer < LAYERS) {
        fill_layer(r, &p);
        test_ok(&r->w, prune_layer(r, &p));
    }
    return p;
}

/* ---- attention restated ---- */

static double product(const rig *r, uint32_t layer, uint32_t query, uint32_t head, uint32_t key)
{
    const float *q = (const float *)test_q(&r->t, layer, query) + head * DIM;
    const float *k = (const float *)test_k(&r->t, layer, key) + head / GROUP * DIM;
    double sum = 0.0;
    for (uint32_t i = 0; i < DIM; i++)
        sum += (double)q[i] * (double)k[i];
    return sum;
}

/* Adds the attention of a query over tokens[0 .. seen) to s[0 .. seen). */
static void add_attention(const rig *r, uint32_t layer, uint32_t head, const uint32_t *tokens,
                          uint32_t seen, double *s)
{
    double x[TOKENS], top = -INFINITY, sum = 0.0;
    for (uint32_t j = 0; j < seen; j++) {
        x[j] = product(r, layer, tokens[seen - 1], head, tokens[j]) / sqrt((double)DIM);
        top = fmax(top, x[j]);
    }
    for (uint32_t j = 0; j < seen; j++)
        sum += x[j] = exp(x[j] - top);
    for (uint32_t j = 0; j < seen; j++)
        s[j] += x[j] / sum;
}

/* Queries first .. count-1 of these tokens over the first `candidates`, maximum over `width`, mean
 * over the group. */
static void expect_scores(const rig *r, const sight *s, const progress *p, uint32_t first,
                          uint32_t width)
{
    const uint32_t n = s->view.candidates, half = width / 2;
    for (uint32_t h = 0; h < KV_HEADS; h++) {
        double want[TOKENS] = {0.0};
        for (uint32_t g = 0; g < GROUP; g++) {
            double own[TOKENS] = {0.0};
            for (uint32_t i = first; i < p->count; i++)
                add_attention(r, s->view.layer, h * GROUP + g, p->tokens, i + 1, own);
            for (uint32_t j = 0; j < n; j++) {
                double best = 0.0;
                for (uint32_t i = j > half ? j - half : 0; i <= j + half && i < n; i++)
                    best = fmax(best, own[i]);
                want[j] += best / GROUP;
            }
        }
        for (uint32_t j = 0; j < n; j++) {
            const double got = (double)s->scores[h * n + j];
            /* A sum of up to 160 probabilities in fp32. */
            if (!(fabs(got - want[j]) <= 2e-5 * (want[j] + 1.0)))
                fail_msg("layer %u, KV head %u, token %u: score %g, should be %g", s->view.layer, h,
                         j, got, want[j]);
        }
    }
}

/* A step attends to `tokens` and to itself, densely. */
static void expect_attends(rig *r, kvf_sequence *s, uint32_t layer, const uint32_t *tokens,
                           uint32_t count, uint32_t step)
{
    float got[HEADS * DIM];
    uint32_t all[TOKENS];
    memcpy(all, tokens, count * sizeof *all);
    all[count] = PROMPT + step;
    test_decode(&r->w, s, &r->t, layer, PROMPT + step, got, NULL);
    test_wait(&r->w);
    for (uint32_t head = 0; head < HEADS; head++) {
        double a[TOKENS] = {0.0};
        add_attention(r, layer, head, all, count + 1, a);
        for (uint32_t d = 0; d < DIM; d++) {
            double want = 0.0;
            for (uint32_t j = 0; j <= count; j++)
                want += a[j] * (double)((const float *)test_v(&r->t, layer,
                                                              all[j]))[head / GROUP * DIM + d];
            const double off = fabs(want - (double)got[head * DIM + d]);
            if (!(off <= test_tolerance(KVF_FP32)))
                fail_msg("layer %u, head %u, channel %u: off by %g", layer, head, d, off);
        }
    }
}

/* ---- what a policy is shown ---- */

static void expect_view(const sight *s, uint32_t layer, const progress *p, uint32_t candidates)
{
    assert_int_equal(s->view.layer, layer);
    assert_int_equal(s->view.layers, LAYERS);
    assert_int_equal(s->view.kv_heads, KV_HEADS);
    assert_int_equal(s->view.query_heads, HEADS);
    assert_int_equal(s->view.tokens, p->count);
    assert_int_equal(s->view.prompt, PROMPT);
    assert_int_equal(s->view.window, WINDOW);
    assert_int_equal(s->view.candidates, candidates);
    assert_int_equal(s->view.scores != NULL, candidates > 0);
    assert_memory_equal(s->positions, p->positions, p->count * sizeof *p->positions);
}

/* Layer by layer, with what went on at layer 1; twice, for state is zeroed. */
static void policies_see_what_the_header_says(void **state)
{
    (void)state;
    static rig r;
    const kvf_cache_config cc = cache_config();
    rig_open(&r, &cc, KVF_PRUNE_SCORES);
    r.told.keep[0] = 5;
    r.told.propagate[1] = 2;
    r.config.settings.pool = KVF_POOL_MAX;
    r.config.settings.pool_width = 3;
    rig_prune(&r);
    for (uint32_t again = 0; again < 2; again++) {
        r.told.calls = 0;
        progress p = begin(&r, PROMPT);
        while (p.layer < LAYERS) {
            const uint32_t layer = p.layer;
            const progress before = p;
            fill_layer(&r, &p);
            test_ok(&r.w, prune_layer(&r, &p));
            const sight *s = &r.told.sights[layer];
            expect_view(s, layer, &before, before.count - WINDOW);
            assert_int_equal(s->count, layer);
            assert_int_equal(s->has_profile, 0);
            expect_scores(&r, s, &before, before.count - WINDOW, 3);
        }
        assert_int_equal(r.told.calls, LAYERS);
        assert_in_range(p.count, PROMPT / 2, PROMPT / 2 + WINDOW);
        kvf_sequence_destroy(p.sequence);
    }
    rig_close(&r);
}

static void profile_comes_with_scores_and_alone(void **state)
{
    (void)state;
    static rig r;
    const kvf_cache_config cc = cache_config();
    for (uint32_t with = 0; with < 2; with++) {
        rig_open(&r, &cc, KVF_PRUNE_PROFILE | (with ? KVF_PRUNE_SCORES : 0));
        rig_prune(&r);
        const progress p = run(&r, PROMPT);
        const sight *s = &r.told.sights[1];
        assert_int_equal(s->view.candidates, with ? PROMPT - WINDOW : 0);
        assert_int_equal(s->has_profile, 1);
        for (uint32_t head = 0; head < HEADS; head++) {
            double a[TOKENS] = {0.0}, sum = 0.0, entropy = 0.0;
            for (uint32_t i = PROMPT - WINDOW; i < PROMPT; i++)
                add_attention(&r, 1, head, p.tokens, i + 1, a);
            for (uint32_t j = 0; j < PROMPT - WINDOW; j++)
                sum += a[j];
            for (uint32_t j = 0; j < PROMPT - WINDOW; j++)
                entropy -= a[j] > 0.0 ? a[j] / sum * log(a[j] / sum) : 0.0;
            assert_true(fabs(entropy - (double)s->profile[head].entropy) < 1e-3);
        }
        kvf_sequence_destroy(p.sequence);
        rig_close(&r);
    }
}

static void logits_are_products_of_the_last_query(void **state)
{
    (void)state;
    static rig r;
    const kvf_cache_config cc = cache_config();
    rig_open(&r, &cc, KVF_PRUNE_LOGITS);
    r.config.settings.group_reduce = KVF_GROUP_SUM;
    r.config.settings.pool_width = 5; /* not pooled, whatever this says */
    rig_prune(&r);
    const progress p = run(&r, PROMPT);
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        const sight *s = &r.told.sights[layer];
        expect_view(s, layer, &p, PROMPT);
        for (uint32_t h = 0; h < KV_HEADS; h++)
            for (uint32_t j = 0; j < PROMPT; j++) {
                const double want = product(&r, layer, PROMPT - 1, h * GROUP, j) +
                                    product(&r, layer, PROMPT - 1, h * GROUP + 1, j);
                assert_true(fabs(want - (double)s->scores[h * PROMPT + j]) < 1e-3);
            }
    }
    kvf_sequence_destroy(p.sequence);
    rig_close(&r);
}

/* Two prompts whose chunks and layers alternate; each has sums of its own. */
static void sums_are_of_all_queries(void **state)
{
    (void)state;
    static rig r;
    const kvf_cache_config cc = cache_config();
    rig_open(&r, &cc, KVF_PRUNE_SUMS);
    r.told.propagate[0] = 3;
    rig_prune(&r);
    progress a = begin(&r, PROMPT), b = begin(&r, PROMPT);
    while (a.layer < LAYERS) {
        const progress before = a;
        const uint32_t layer = a.layer;
        for (uint32_t first = 0; first < a.count; first += CHUNK) {
            fill_chunk(&r, &a, first, CHUNK, true);
            fill_chunk(&r, &b, first, CHUNK, true);
        }
        r.told.calls = 0;
        test_ok(&r.w, prune_layer(&r, &a));
        test_ok(&r.w, prune_layer(&r, &b));
        for (uint32_t i = 0; i < 2; i++) {
            expect_view(&r.told.sights[i], layer, &before, before.count);
            expect_scores(&r, &r.told.sights[i], &before, 0, 1);
        }
        assert_memory_equal(r.told.sights[0].scores, r.told.sights[1].scores,
                            KV_HEADS * before.count * sizeof(float));
    }
    kvf_prune_stats stats;
    kvf_prune_stats_get(r.prune, &stats);
    assert_int_equal(stats.prompts, 2);
    assert_int_equal(stats.tokens_full, 2 * LAYERS * PROMPT);
    assert_int_equal(stats.tokens_computed, 2 * (PROMPT + (LAYERS - 1) * a.count));
    assert_true(stats.observe_ns > 0);
    kvf_sequence_destroy(a.sequence);
    kvf_sequence_destroy(b.sequence);
    rig_close(&r);
}

/* A window as long as what goes on leaves nothing to look at, and nothing to drop. */
static void nothing_before_the_window_is_no_score(void **state)
{
    (void)state;
    static rig r;
    const kvf_cache_config cc = cache_config();
    rig_open(&r, &cc, KVF_PRUNE_SCORES | KVF_PRUNE_PROFILE);
    r.told.propagate[0] = PROMPT; /* token 0 and the window */
    rig_prune(&r);
    const progress p = run(&r, WINDOW + 1);
    assert_int_equal(p.count, WINDOW + 1);
    const progress q = run(&r, WINDOW);
    assert_int_equal(r.told.calls, 2 * LAYERS);
    assert_int_equal(r.told.sights[LAYERS].view.candidates, 0);
    assert_null(r.told.sights[LAYERS].view.scores);
    assert_int_equal(r.told.sights[LAYERS].has_profile, 0);
    kvf_sequence_destroy(p.sequence);
    kvf_sequence_destroy(q.sequence);
    rig_close(&r);
}

/* ---- that it is obeyed ---- */

/* Tokens of a layer that `stride` keeps, out of those that it got. */
static uint32_t kept_tokens(const progress *p, uint32_t stride, uint32_t *tokens)
{
    const kvf_prune_view view = {.tokens = p->count, .window = WINDOW};
    const uint32_t count = stride_ids(&view, stride, tokens);
    for (uint32_t i = 0; i < count; i++)
        tokens[i] = p->tokens[tokens[i]];
    return count;
}

/* Every other token is kept, and goes on from layer 1: lengths, positions and what steps attend to.
 */
static void every_other_token_is_evicted(void **state)
{
    (void)state;
    static rig r;
    const kvf_cache_config cc = cache_config();
    uint32_t tokens[LAYERS][PROMPT], count[LAYERS];
    rig_open(&r, &cc, KVF_PRUNE_NOTHING);
    r.config.retention = KVF_RETENTION_EVICT;
    for (uint32_t layer = 0; layer < LAYERS; layer++)
        r.told.keep[layer] = 2;
    r.told.propagate[1] = 2;
    rig_prune(&r);
    progress p = begin(&r, PROMPT);
    while (p.layer < LAYERS) {
        const uint32_t layer = p.layer;
        count[layer] = kept_tokens(&p, 2, tokens[layer]);
        fill_layer(&r, &p);
        test_ok(&r.w, prune_layer(&r, &p));
        assert_int_equal(kvf_sequence_length(p.sequence, layer), count[layer]);
        for (uint32_t i = 0; i < count[layer]; i++)
            assert_int_equal(kvf_sequence_position(p.sequence, layer, i), tokens[layer][i]);
    }
    assert_int_equal(count[0], 80 + 3); /* half, and the odd ones of the window */
    assert_int_equal(count[2], 42 + 3);
    for (uint32_t step = 0; step < STEPS; step++)
        for (uint32_t layer = 0; layer < LAYERS; layer++) {
            expect_attends(&r, p.sequence, layer, tokens[layer], count[layer], step);
            tokens[layer][count[layer]++] = PROMPT + step;
        }
    kvf_prune_stats stats;
    kvf_prune_stats_get(r.prune, &stats);
    assert_int_equal(stats.kept, count[0] + count[1] + count[2] - 3 * STEPS);
    assert_true(stats.retain_ns > 0);
    kvf_sequence_destroy(p.sequence);
    rig_close(&r);
}

/* With a static set alone, a step attends to what the policy kept, the sink, and what is not sealed
 * yet. Measured or not: a policy may choose by place. */
static void what_is_kept_seeds_the_static_set(void **state)
{
    (void)state;
    static rig r;
    kvf_cache_config cc = cache_config();
    cc.select = KVF_SELECT_STATIC;
    cc.static_ratio = 1.0f;
    static const uint32_t needs[] = {KVF_PRUNE_NOTHING, KVF_PRUNE_SCORES, KVF_PRUNE_SUMS,
                                     KVF_PRUNE_LOGITS};
    for (size_t n = 0; n < sizeof needs / sizeof *needs; n++) {
        rig_open(&r, &cc, needs[n]);
        for (uint32_t layer = 0; layer < LAYERS; layer++)
            r.told.keep[layer] = 4;
        rig_prune(&r);
        const progress p = run(&r, PROMPT);
        for (uint32_t layer = 0; layer < LAYERS; layer++) {
            uint32_t tokens[PROMPT], count = 0;
            /* Sealed before the step's own token joins: it may seal one page more. */
            const uint32_t sealed = (PROMPT + 1 - cc.local_tokens) / cc.page_size * cc.page_size;
            assert_int_equal(kvf_sequence_length(p.sequence, layer), PROMPT);
            for (uint32_t i = 0; i < PROMPT; i++)
                if (i < cc.sink_tokens || i % 4 == 0 || i >= sealed)
                    tokens[count++] = i;
            expect_attends(&r, p.sequence, layer, tokens, count, 0);
        }
        kvf_sequence_destroy(p.sequence);
        rig_close(&r);
    }
}

static void restart_empties_the_sequence(void **state)
{
    (void)state;
    static rig r;
    const kvf_cache_config cc = cache_config();
    rig_open(&r, &cc, KVF_PRUNE_SCORES);
    r.config.retention = KVF_RETENTION_EVICT;
    r.told.keep[0] = 2;
    r.told.propagate[1] = 3;
    r.told.restart_at = 2;
    r.told.restarts = 1;
    rig_prune(&r);
    progress p = begin(&r, PROMPT);
    for (uint32_t layer = 0; layer < 2; layer++) {
        fill_layer(&r, &p);
        test_ok(&r.w, prune_layer(&r, &p));
    }
    const uint32_t first = p.count;
    assert_int_equal(p.layer, 0);
    for (uint32_t layer = 0; layer < LAYERS; layer++)
        assert_int_equal(kvf_sequence_length(p.sequence, layer), 0);
    r.told.propagate[1] = 0;
    while (p.layer < LAYERS) {
        fill_layer(&r, &p);
        test_ok(&r.w, prune_layer(&r, &p));
    }
    assert_int_equal(r.told.sights[2].view.pass, 1);
    assert_int_equal(r.told.sights[2].view.prompt, PROMPT);
    assert_int_equal(r.told.sights[2].count, 2); /* state goes on */
    kvf_prune_stats stats;
    kvf_prune_stats_get(r.prune, &stats);
    assert_int_equal(stats.tokens_computed, 2 * PROMPT + LAYERS * first);
    assert_int_equal(stats.chosen_layer, 1);
    assert_int_equal(kvf_sequence_position(p.sequence, 2, first - 1), first - 1);
    kvf_sequence_destroy(p.sequence);
    rig_close(&r);
}

/* ---- nonsense ---- */

static void keeps_too_few(const kvf_prune_view *view, kvf_prune_answer *answer)
{
    (void)view;
    answer->keep_count = WINDOW - 1;
}

static void keeps_too_many(const kvf_prune_view *view, kvf_prune_answer *answer)
{
    answer->keep_count = view->tokens + 1;
}

static void all_but_one(const kvf_prune_view *view, kvf_prune_answer *answer, uint32_t missing)
{
    answer->keep_count = view->tokens - 1;
    for (uint32_t h = 0; h < view->kv_heads; h++)
        for (uint32_t i = 0; i < view->tokens - 1; i++)
            answer->keep[h * (view->tokens - 1) + i] = i < missing ? i : i + 1;
}

static void drops_the_window(const kvf_prune_view *view, kvf_prune_answer *answer)
{
    all_but_one(view, answer, view->tokens - 2);
}

static void keeps_one_twice(const kvf_prune_view *view, kvf_prune_answer *answer)
{
    all_but_one(view, answer, 5);
    answer->keep[answer->keep_count + 7] = answer->keep[answer->keep_count + 6];
}

static void keeps_what_is_not_there(const kvf_prune_view *view, kvf_prune_answer *answer)
{
    all_but_one(view, answer, 5);
    answer->keep[3] = UINT32_MAX;
}

static void propagates_nothing(const kvf_prune_view *view, kvf_prune_answer *answer)
{
    (void)view;
    answer->propagate_count = 0;
}

static void propagates_too_many(const kvf_prune_view *view, kvf_prune_answer *answer)
{
    answer->propagate_count = view->tokens + 1;
}

static void propagates_backwards(const kvf_prune_view *view, kvf_prune_answer *answer)
{
    answer->propagate_count = view->tokens - 1;
    for (uint32_t i = 0; i < view->tokens - 1; i++)
        answer->propagate[i] = view->tokens - 1 - i;
}

static void starts_over_again(const kvf_prune_view *view, kvf_prune_answer *answer)
{
    (void)view;
    answer->restart = 1;
}

static const char *last_error(const rig *r)
{
    return kvf_runtime_error(r->w.runtime)->text;
}

static void expect_text(const rig *r, const char *part)
{
    if (!strstr(last_error(r), part))
        fail_msg("the error does not say \"%s\": %s", part, last_error(r));
}

static void nonsense_is_refused_by_name(void **state)
{
    (void)state;
    static rig r;
    static const struct {
        void (*nonsense)(const kvf_prune_view *view, kvf_prune_answer *answer);
        const char *text;
    } cases[] = {
        {keeps_too_few, "keep_count = 5"},
        {keeps_too_many, "keep_count = 161"},
        {drops_the_window, "keep lacks token 158"},
        {keeps_one_twice, "keep[7] = 7 follows 7"},
        {keeps_what_is_not_there, "keep[3] = 4294967295"},
        {propagates_nothing, "propagate_count = 0"},
        {propagates_too_many, "propagate_count = 161"},
        {propagates_backwards, "propagate[1] = 158 follows 159"},
        {starts_over_again, "restart loop"},
    };
    const kvf_cache_config cc = cache_config();
    rig_open(&r, &cc, KVF_PRUNE_SCORES);
    rig_prune(&r);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        r.told.nonsense = cases[i].nonsense;
        progress p = begin(&r, PROMPT);
        fill_layer(&r, &p);
        kvf_status status = prune_layer(&r, &p);
        if (cases[i].nonsense == starts_over_again) { /* once is no loop */
            assert_int_equal(status, KVF_OK);
            fill_layer(&r, &p);
            status = prune_layer(&r, &p);
        }
        assert_int_equal(status, KVF_INVALID);
        expect_text(&r, "'told'");
        expect_text(&r, cases[i].text);
        r.told.nonsense = NULL;
        assert_int_equal(prune_layer(&r, &p), KVF_INVALID); /* it can only be destroyed */
        expect_text(&r, "destroy the sequence");
        kvf_sequence_destroy(p.sequence);
        const progress good = run(&r, PROMPT);
        kvf_sequence_destroy(good.sequence);
    }
    rig_close(&r);
}

/* ---- bad input ---- */

static void expect_refused(rig *r, kvf_status got, const char *part)
{
    assert_int_equal(got, KVF_INVALID);
    expect_text(r, part);
}

static void wrong_calls_are_refused(void **state)
{
    (void)state;
    static rig r;
    const kvf_cache_config cc = cache_config();
    kvf_prune_result result;
    rig_open(&r, &cc, KVF_PRUNE_SUMS);
    rig_prune(&r);
    kvf_sequence *s = test_sequence(&r.w);
    expect_refused(&r, kvf_prune_layer(r.prune, s, 0, r.w.stream, &result), "kvf_prune_begin");
    expect_refused(&r, kvf_prune_begin(r.prune, s, 0), "0");
    expect_refused(&r, kvf_prune_begin(r.prune, s, TOKENS + 1), "tokens_max = 163");
    expect_refused(&r, kvf_prune_begin(r.prune, s, WINDOW - 1), "window = 6");
    expect_refused(&r, kvf_prune_begin(r.prune, NULL, PROMPT), "sequence is NULL");
    kvf_sequence_destroy(s);

    progress p = begin(&r, PROMPT);
    expect_refused(&r, kvf_prune_layer(r.prune, p.sequence, 1, r.w.stream, &result),
                   "next layer of this prompt is 0");
    fill_chunk(&r, &p, 0, CHUNK, true);
    expect_refused(&r, kvf_prune_layer(r.prune, p.sequence, 0, r.w.stream, &result),
                   "48 of 160 tokens");
    expect_refused(&r, kvf_prune_begin(r.prune, p.sequence, PROMPT), "not empty");
    const kvf_prefill_args again = chunk_args(&r, &p, 0, CHUNK);
    expect_refused(&r, kvf_prune_append(r.prune, &again, r.w.stream),
                   "once after every kvf_prefill");
    kvf_sequence_destroy(p.sequence);
    rig_close(&r);
}

/* A chunk whose queries were not seen. */
static void missing_sums_are_refused(void **state)
{
    (void)state;
    static rig r;
    const kvf_cache_config cc = cache_config();
    rig_open(&r, &cc, KVF_PRUNE_SUMS);
    rig_prune(&r);
    progress p = begin(&r, PROMPT);
    for (uint32_t first = 0; first < PROMPT; first += CHUNK)
        fill_chunk(&r, &p, first, CHUNK, first + CHUNK < PROMPT);
    assert_int_equal(prune_layer(&r, &p), KVF_INVALID);
    expect_text(&r, "144 of 160");
    kvf_sequence_destroy(p.sequence);
    rig_close(&r);
}

static void other_caches_and_small_windows_are_refused(void **state)
{
    (void)state;
    static rig r, other;
    kvf_cache_config cc = cache_config();
    kvf_error error;
    rig_open(&r, &cc, KVF_PRUNE_SCORES);
    rig_prune(&r);
    rig_open(&other, &cc, KVF_PRUNE_SCORES);
    kvf_sequence *s = test_sequence(&other.w);
    expect_refused(&r, kvf_prune_begin(r.prune, s, PROMPT), "another cache");
    kvf_sequence_destroy(s);
    rig_close(&other);
    rig_close(&r);

    cc.observe_window = WINDOW - 1;
    rig_open(&r, &cc, KVF_PRUNE_SCORES);
    assert_int_equal(kvf_prune_open(r.w.cache, &r.config, &r.prune, &error), KVF_INVALID);
    assert_non_null(strstr(error.text, "observe_window = 5"));
    assert_null(r.prune);
    r.config.settings.keep = 0.0f;
    assert_int_equal(kvf_prune_open(r.w.cache, &r.config, &r.prune, &error), KVF_INVALID);
    assert_non_null(strstr(error.text, "keep = 0"));
    assert_int_equal(kvf_prune_open(r.w.cache, NULL, &r.prune, NULL), KVF_INVALID);
    kvf_prune_close(NULL);
    rig_close(&r);
}

/* Asks for what it did not say at open. */
static uint32_t moody_needs(const kvf_prune_view *view)
{
    return *(const uint32_t *)view->state > 1 ? KVF_PRUNE_PROFILE : KVF_PRUNE_SCORES;
}

static void needs_that_cannot_be_met_are_refused(void **state)
{
    (void)state;
    static rig r;
    const kvf_cache_config cc = cache_config();
    rig_open(&r, &cc, KVF_PRUNE_SCORES);
    r.policy.needs_at = moody_needs;
    rig_prune(&r);
    progress p = begin(&r, PROMPT);
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        fill_layer(&r, &p);
        assert_int_equal(prune_layer(&r, &p), layer < 2 ? KVF_OK : KVF_INVALID);
    }
    expect_text(&r, "'told'");
    kvf_sequence_destroy(p.sequence);
    rig_close(&r);

    rig_open(&r, &cc, KVF_PRUNE_SCORES);
    r.policy.needs_at = NULL;
    r.policy.needs = KVF_PRUNE_SCORES | KVF_PRUNE_LOGITS;
    rig_prune(&r);
    p = begin(&r, PROMPT);
    fill_layer(&r, &p);
    assert_int_equal(prune_layer(&r, &p), KVF_INVALID);
    expect_text(&r, "exclude each other");
    kvf_sequence_destroy(p.sequence);
    rig_close(&r);
}

/* No policy sees NaN; another prompt goes on. */
static void keys_that_are_not_finite_stop_the_prompt(void **state)
{
    (void)state;
    static rig r;
    const kvf_cache_config cc = cache_config();
    rig_open(&r, &cc, KVF_PRUNE_SCORES);
    rig_prune(&r);
    progress p = begin(&r, PROMPT);
    float *key = test_k(&r.t, 0, 70);
    const float before = *key;
    *key = NAN;
    for (uint32_t first = 0; first < PROMPT; first += CHUNK) {
        const uint32_t n = PROMPT - first < CHUNK ? PROMPT - first : CHUNK;
        const kvf_prefill_args args = chunk_args(&r, &p, first, n);
        const kvf_status status = kvf_prefill(r.w.cache, &args, r.w.stream);
        if (first <= CHUNK)
            test_expect(r.w.runtime, status, KVF_OK);
        test_wait(&r.w);
    }
    kvf_prune_result result;
    assert_int_equal(kvf_prune_layer(r.prune, p.sequence, 0, r.w.stream, &result), KVF_NOT_FINITE);
    assert_int_equal(r.told.calls, 0);
    kvf_sequence_destroy(p.sequence);
    *key = before;
    const progress good = run(&r, PROMPT);
    kvf_sequence_destroy(good.sequence);
    rig_close(&r);
}

/* ---- memory ---- */

/* In numbers of fp32 per token and KV head of one layer. */
static double share(const kvf_cache_config *c, size_t bytes)
{
    return (double)bytes / ((double)c->tokens_max * c->kv_heads * sizeof(float));
}

/* Whatever is measured: a few numbers per token of the layer that is looked at, however many
 * queries look. */
static void memory_does_not_grow_with_the_window(void **state)
{
    (void)state;
    static rig r;
    kvf_cache_config cc = cache_config();
    cc.tokens_max = 4096;
    cc.observe_window = 64;
    rig_open(&r, &cc, KVF_PRUNE_SCORES);
    static const uint32_t needs[] = {KVF_PRUNE_NOTHING, KVF_PRUNE_SCORES,
                                     KVF_PRUNE_SCORES | KVF_PRUNE_PROFILE, KVF_PRUNE_LOGITS,
                                     KVF_PRUNE_SUMS};
    for (size_t i = 0; i < sizeof needs / sizeof *needs; i++) {
        r.config.settings.window = 8;
        const kvf_prune_plan b = kvf_prune_measure(r.w.cache, &r.config, needs[i]);
        r.config.settings.window = 64;
        const kvf_prune_plan wide = kvf_prune_measure(r.w.cache, &r.config, needs[i]);
        assert_memory_equal(&b, &wide, sizeof b);
        const size_t heads = cc.tokens_max * cc.query_heads * sizeof(float);
        const size_t row = cc.tokens_max * cc.kv_heads * sizeof(float);
        const size_t sums = needs[i] & KVF_PRUNE_SUMS ? cc.sequences_max * row : 0;
        /* scores, work and sums, one profile per head where a layer needs one, and no pages */
        size_t device = row + (needs[i] ? row : 0) + sums;
        if (needs[i] & KVF_PRUNE_PROFILE)
            device += heads + kvf_round_up(cc.query_heads * sizeof(kvf_prune_profile), 64);
        assert_int_equal(b.device_bytes, device);
        assert_true(share(&cc, b.device_bytes - sums + sums / cc.sequences_max) <= 8.0);
        assert_true(share(&cc, b.device_bytes - sums + sums / cc.sequences_max + b.host_bytes) <=
                    8.0);
    }
    rig_close(&r);
}

typedef struct refusal {
    uint32_t countdown, calls;
} refusal;

static int refuse_one(void *user, const char *what)
{
    refusal *f = user;
    (void)what;
    return ++f->calls == f->countdown;
}

static void failed_opens_leave_nothing(void **state)
{
    (void)state;
    static rig r;
    const kvf_cache_config cc = cache_config();
    rig_open(&r, &cc, KVF_PRUNE_SCORES | KVF_PRUNE_PROFILE);
    r.config.retention = KVF_RETENTION_EVICT;
    const kvf_context *context = r.w.runtime->context;
    const uint64_t bytes = context->live_bytes, blocks = context->live_blocks;
    uint32_t failed = 0;
    for (uint32_t n = 1;; n++) {
        refusal f = {.countdown = n};
        kvf_error error;
        kvf_device_set_fault(r.w.runtime->device, refuse_one, &f);
        const kvf_status status = kvf_prune_open(r.w.cache, &r.config, &r.prune, &error);
        kvf_device_set_fault(r.w.runtime->device, NULL, NULL);
        if (status == KVF_OK && f.calls < n)
            break;
        if (status == KVF_OK) { /* it did without */
            kvf_prune_close(r.prune);
            r.prune = NULL;
        } else {
            assert_true(error.text[0] != 0);
            assert_null(r.prune);
            failed++;
        }
        assert_int_equal(context->live_bytes, bytes);
        assert_int_equal(context->live_blocks, blocks);
    }
    assert_true(failed >= 4);
    const progress p = run(&r, PROMPT);
    kvf_sequence_destroy(p.sequence);
    rig_close(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(policies_see_what_the_header_says),
        cmocka_unit_test(profile_comes_with_scores_and_alone),
        cmocka_unit_test(logits_are_products_of_the_last_query),
        cmocka_unit_test(sums_are_of_all_queries),
        cmocka_unit_test(nothing_before_the_window_is_no_score),
        cmocka_unit_test(every_other_token_is_evicted),
        cmocka_unit_test(what_is_kept_seeds_the_static_set),
        cmocka_unit_test(restart_empties_the_sequence),
        cmocka_unit_test(nonsense_is_refused_by_name),
        cmocka_unit_test(wrong_calls_are_refused),
        cmocka_unit_test(missing_sums_are_refused),
        cmocka_unit_test(other_caches_and_small_windows_are_refused),
        cmocka_unit_test(needs_that_cannot_be_met_are_refused),
        cmocka_unit_test(keys_that_are_not_finite_stop_the_prompt),
        cmocka_unit_test(memory_does_not_grow_with_the_window),
        cmocka_unit_test(failed_opens_leave_nothing),
    };
    test_seed_print("prune", SEED);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
