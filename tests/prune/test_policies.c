/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The registry, what settings may be, and how tokens are chosen.
 *
 * What the policies choose from scores is checked against other definitions by check_prune.py; here
 * are texts of refusals, numbers worked out by hand, and choosing at its extremes against a sort.
 */

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "choose.h"
#include "common/random.h"
#include "policies.h"

static const kvf_prune_shape shape_llama = {
    .layers = 32, .kv_heads = 8, .query_heads = 32, .tokens_max = 16384};

static kvf_prune_config config_of(const char *name)
{
    const kvf_prune_policy *policy = kvf_prune_policy_find(name);
    assert_non_null(policy);
    kvf_prune_config config;
    kvf_prune_config_init(&config, policy);
    assert_ptr_equal(config.policy, policy);
    return config;
}

/* ---- registry and defaults ---- */

static void finds_all_by_name(void **state)
{
    (void)state;
    static const char *const names[] = {"full",      "streaming",    "h2o",       "snapkv",
                                        "pyramidkv", "pyramidinfer", "gemfilter", "fastkv",
                                        "asl",       "structkv"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const kvf_prune_policy *policy = kvf_prune_policy_find(names[i]);
        assert_non_null(policy);
        assert_string_equal(policy->name, names[i]);
        assert_true(policy->source && *policy->source);
        assert_ptr_equal(kvf_prune_policy_at((uint32_t)i), policy);
    }
    assert_null(kvf_prune_policy_at(sizeof names / sizeof *names));
    assert_null(kvf_prune_policy_at(UINT32_MAX));
    assert_null(kvf_prune_policy_find(NULL));
    assert_null(kvf_prune_policy_find(""));
    assert_null(kvf_prune_policy_find("snapkv2"));
}

static void has_sound_defaults(void **state)
{
    (void)state;
    kvf_error error = {0};
    for (uint32_t i = 0; kvf_prune_policy_at(i); i++) {
        kvf_prune_config config;
        kvf_prune_config_init(&config, kvf_prune_policy_at(i));
        if (kvf_prune_config_check(&config, &shape_llama, &error) != KVF_OK)
            fail_msg("%s: %s", kvf_prune_policy_at(i)->name, error.text);
        assert_int_equal(config.retention, KVF_RETENTION_OFFLOAD);
        assert_int_equal(config.eviction, KVF_EVICTION_NONE);
    }
    kvf_prune_config config;
    kvf_prune_config_init(&config, NULL);
    assert_string_equal(config.policy->name, "full");
    assert_int_equal(kvf_prune_config_check(&config, &shape_llama, NULL), KVF_OK);

    const kvf_prune_settings fastkv = config_of("fastkv").settings;
    assert_int_equal(fastkv.window, 8);
    assert_int_equal(fastkv.pool, KVF_POOL_MAX);
    assert_int_equal(fastkv.pool_width, 7);
    assert_int_equal(kvf_fastkv_layer(&fastkv, 32), 15);
    assert_int_equal(kvf_fastkv_layer(&fastkv, 1), 0);
    assert_int_equal(kvf_fastkv_layer(&fastkv, 2), 0);
    const kvf_prune_settings gemfilter = config_of("gemfilter").settings;
    assert_int_equal(kvf_gemfilter_layer(&gemfilter, 32), 13);
    assert_int_equal(kvf_gemfilter_layer(&gemfilter, 1), 0);
}

/* ---- refusals ---- */

typedef enum value_kind { VALUE_U32, VALUE_F32 } value_kind;

typedef struct refusal {
    const char *policy;
    size_t offset; /* into kvf_prune_config */
    value_kind kind;
    uint32_t whole;
    float real;
    const char *says[3]; /* field and value, what is wrong, the fix */
} refusal;

#define AT(name)       offsetof(kvf_prune_config, settings) + offsetof(kvf_prune_settings, name)
#define U(name, value) AT(name), VALUE_U32, (value), 0.0f
#define F(name, value) AT(name), VALUE_F32, 0, (value)
#define C(name, value) offsetof(kvf_prune_config, name), VALUE_U32, (value), 0.0f

static const refusal refusals[] = {
    {"fastkv", F(keep, 0.0f), {"keep = 0:", "above 0", "at most 1"}},
    {"fastkv", F(keep, -0.1f), {"keep = -0.1:", "above 0", "at most 1"}},
    {"fastkv", F(keep, 1.01f), {"keep = 1.01:", "above 0", "at most 1"}},
    {"fastkv", F(keep, NAN), {"keep = nan:", "above 0", "at most 1"}},
    {"fastkv", F(keep, INFINITY), {"keep = inf:", "above 0", "at most 1"}},
    {"fastkv", F(propagate, 0.0f), {"propagate = 0:", "above 0", "at most 1"}},
    {"fastkv", F(propagate, 2.0f), {"propagate = 2:", "above 0", "at most 1"}},
    {"fastkv", F(propagate, NAN), {"propagate = nan:", "above 0", "at most 1"}},
    {"fastkv", U(layer, 32), {"layer = 32:", "layers 0 to 31", "AUTO"}},
    {"asl", U(layer_min, 32), {"layer_min = 32:", "layers 0 to 31", "AUTO"}},
    {"structkv", U(layer_max, 99), {"layer_max = 99:", "layers 0 to 31", "AUTO"}},
    {"fastkv", U(window, 129), {"window = 129:", "from 1 to 128", "newest queries"}},
    {"snapkv", U(window, 0), {"window = 0:", "newest queries", "at least 1"}},
    {"fastkv", U(window, 0), {"window = 0:", "newest queries", "at least 1"}},
    {"fastkv", U(pool_width, 0), {"pool_width = 0:", "from 1 to 1023", "odd"}},
    {"fastkv", U(pool_width, 6), {"pool_width = 6:", "odd", "5 or 7"}},
    {"fastkv", U(pool, 2), {"pool = 2:", "max or avg", "smoothed"}},
    {"fastkv",
     U(group_reduce, 3),
     {"group_reduce = 3:", "mean-softmax, max or sum", "query heads"}},
    {"fastkv", U(window_mean, 2), {"window_mean = 2:", "on or off", "sum"}},
    {"fastkv", U(keep_tokens, 7), {"keep_tokens = 7:", "below window = 8", "raise it to 8"}},
    {"fastkv", U(propagate_tokens, 3), {"propagate_tokens = 3:", "window = 8", "raise it to 8"}},
    {"fastkv", F(keep, 0.0004f), {"keep = 0.0004:", "is 6, below window = 8", "raise it to 0.001"}},
    {"streaming", U(sink_tokens, 1638), {"sink_tokens = 1638:", "only 1638", "lower it"}},
    {"h2o", F(recent_share, -1.0f), {"recent_share = -1:", "from 0 to 1", "newest"}},
    {"h2o", F(recent_share, NAN), {"recent_share = nan:", "from 0 to 1", "newest"}},
    {"pyramidkv", U(beta, 0), {"beta = 0:", "from 1 to", "20"}},
    {"structkv", F(decay, 1.5f), {"decay = 1.5:", "from 0 to 1", "0.9"}},
    {"structkv", F(decay, NAN), {"decay = nan:", "from 0 to 1", "0.9"}},
    {"structkv", F(weights[0], -0.2f), {"weights[0] = -0.2:", "at least 0", "0.2, 0.3, 0.5"}},
    {"structkv", F(weights[1], NAN), {"weights[1] = nan:", "at least 0", "0.2, 0.3, 0.5"}},
    {"structkv", F(weights[2], INFINITY), {"weights[2] = inf:", "at least 0", "0.2, 0.3, 0.5"}},
    {"structkv", F(mass_share, 0.0f), {"mass_share = 0:", "above 0", "0.1"}},
    {"structkv", U(pivot, 3), {"pivot = 3:", "online, calibrated or fixed", "pivot comes"}},
    {"asl", F(threshold, NAN), {"threshold = nan:", "from 0 to 1e+09", "0.3"}},
    {"asl", U(layers_observed, 0), {"layers_observed = 0:", "from 1 to", "8"}},
    {"asl", U(two_pass, 2), {"two_pass = 2:", "on or off", "run again"}},
    {"snapkv", C(retention, 2), {"retention = 2:", "offload or evict", "the rest"}},
    {"snapkv", C(eviction, 3), {"eviction = 3:", "none, naive or patched", "chunk"}},
    {"snapkv", C(eviction, KVF_EVICTION_NAIVE), {"eviction = NAIVE:", "OFFLOAD", "set retention"}},
    {"snapkv", C(eviction, KVF_EVICTION_PATCHED), {"eviction = PATCHED:", "OFFLOAD", "EVICT"}},
    {"snapkv", C(chunk_queries, 0), {"chunk_queries = 0:", "from 1 to 128", "score a chunk"}},
    {"snapkv", C(chunk_queries, 129), {"chunk_queries = 129:", "from 1 to 128", "score a chunk"}},
    {"snapkv", C(compat_bf16, 2), {"compat_bf16 = 2:", "on or off", "round"}},
};

static void expect_refusal(const char *what, const kvf_prune_config *config,
                           const kvf_prune_shape *shape, const char *const says[3])
{
    kvf_error error = {0};
    if (kvf_prune_config_check(config, shape, &error) != KVF_INVALID)
        fail_msg("%s: not refused", what);
    assert_int_equal(error.status, KVF_INVALID);
    for (uint32_t i = 0; i < 3; i++)
        if (!strstr(error.text, says[i]))
            fail_msg("%s: '%s' does not say '%s'", what, error.text, says[i]);
    assert_int_equal(kvf_prune_config_check(config, shape, NULL), KVF_INVALID);
}

static void refuses_bad_values(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof refusals / sizeof *refusals; i++) {
        const refusal *r = refusals + i;
        kvf_prune_config config = config_of(r->policy);
        const void *value = r->kind == VALUE_U32 ? (const void *)&r->whole : (const void *)&r->real;
        memcpy((char *)&config + r->offset, value, 4);
        expect_refusal(r->says[0], &config, &shape_llama, r->says);
    }
}

static void refuses_what_does_not_fit_together(void **state)
{
    (void)state;
    kvf_prune_config config = config_of("structkv");
    config.settings.layer_min = 9;
    config.settings.layer_max = 8;
    expect_refusal("layer_min above layer_max", &config, &shape_llama,
                   (const char *const[]){"layer_min = 9:", "layer_max = 8", "lower it"});

    kvf_prune_shape shape = shape_llama;
    shape.tokens_max = 20;
    config = config_of("snapkv");
    expect_refusal("window beyond the longest prompt", &config, &shape,
                   (const char *const[]){"window = 32:", "20 tokens", "lower window"});

    config = config_of("fastkv");
    config.size = 1;
    expect_refusal("size", &config, &shape_llama,
                   (const char *const[]){"size = 1:", "this library knows", "config_init"});
    config = config_of("fastkv");
    config.settings.size = 1;
    expect_refusal("settings.size", &config, &shape_llama,
                   (const char *const[]){"settings.size = 1:", "this library knows", "init"});
    config.settings.size = sizeof config.settings;
    config.policy = NULL;
    expect_refusal("no policy", &config, &shape_llama,
                   (const char *const[]){"policy = NULL:", "kvf_prune_policy_find", "your own"});
    expect_refusal("no config", NULL, &shape_llama,
                   (const char *const[]){"size = 0:", "this library knows", "init"});
    config = config_of("fastkv");
    shape = shape_llama;
    shape.query_heads = 12;
    expect_refusal("shape", &config, &shape,
                   (const char *const[]){"shape", "query_heads", "multiple of kv_heads"});
}

static void refuses_eviction_of_what_starts_over(void **state)
{
    (void)state;
    kvf_prune_config config = config_of("gemfilter");
    config.retention = KVF_RETENTION_EVICT;
    config.eviction = KVF_EVICTION_NAIVE;
    expect_refusal("gemfilter", &config, &shape_llama,
                   (const char *const[]){"eviction = NAIVE:", "gemfilter", "another policy"});
    config = config_of("asl");
    config.retention = KVF_RETENTION_EVICT;
    config.eviction = KVF_EVICTION_PATCHED;
    config.settings.two_pass = 1;
    expect_refusal("asl", &config, &shape_llama,
                   (const char *const[]){"eviction = PATCHED:", "two_pass = 1", "NONE"});
    config = config_of("fastkv");
    config.retention = KVF_RETENTION_EVICT;
    config.eviction = KVF_EVICTION_PATCHED;
    expect_refusal("fastkv", &config, &shape_llama,
                   (const char *const[]){"eviction = PATCHED:", "fastkv", "propagate = 1"});
    config.settings.propagate = 1.0f;
    assert_int_equal(kvf_prune_config_check(&config, &shape_llama, NULL), KVF_OK);
    config = config_of("snapkv");
    config.retention = KVF_RETENTION_EVICT;
    config.eviction = KVF_EVICTION_NAIVE;
    assert_int_equal(kvf_prune_config_check(&config, &shape_llama, NULL), KVF_OK);
}

/* ---- an embedder's own policy ---- */

static const char *own_check(const kvf_prune_settings *settings, const kvf_prune_shape *shape,
                             char *text, size_t capacity)
{
    if (settings->beta < shape->layers)
        return NULL;
    snprintf(text, capacity, "beta = %u: own policies take less than %u", settings->beta,
             shape->layers);
    return text;
}

/* Every beta-th token, and the window. */
static void own_decide(const kvf_prune_view *view, kvf_prune_answer *answer)
{
    ++*(uint32_t *)view->user;
    uint32_t count = 0;
    for (uint32_t h = 0; h < view->kv_heads; h++)
        for (uint32_t j = 0; j < view->tokens; j++)
            if (j % view->settings->beta == 0 || view->tokens - j <= view->window)
                answer->keep[count++] = j;
    answer->keep_count = count / view->kv_heads;
}

static kvf_prune_policy own_policy(uint32_t *calls)
{
    return (kvf_prune_policy){.size = sizeof(kvf_prune_policy),
                              .name = "own",
                              .source = "this test",
                              .settings = "window=2 beta=3",
                              .check = own_check,
                              .decide = own_decide,
                              .user = calls};
}

static void takes_a_policy_of_the_embedder(void **state)
{
    (void)state;
    uint32_t calls = 0;
    const kvf_prune_policy own = own_policy(&calls);
    kvf_prune_config config;
    kvf_prune_config_init(&config, &own);
    assert_int_equal(config.settings.window, 2);
    assert_int_equal(config.settings.beta, 3);
    assert_int_equal(kvf_prune_config_check(&config, &shape_llama, NULL), KVF_OK);
    config.settings.beta = 32;
    expect_refusal("its own check", &config, &shape_llama,
                   (const char *const[]){"beta = 32:", "own policies", "less than 32"});
}

static void refuses_policies_with_parts_missing(void **state)
{
    (void)state;
    uint32_t calls = 0;
    kvf_prune_policy own = own_policy(&calls);
    kvf_prune_config config;
    kvf_prune_config_init(&config, &own);
    own.size = 8;
    expect_refusal("size", &config, &shape_llama,
                   (const char *const[]){"policy->size = 8:", "this library knows", "set it to"});
    own = own_policy(&calls);
    own.name = NULL;
    expect_refusal("name", &config, &shape_llama,
                   (const char *const[]){"policy->name = NULL:", "a name", "give"});
    own = own_policy(&calls);
    own.needs = KVF_PRUNE_ALL + 1;
    expect_refusal("needs", &config, &shape_llama,
                   (const char *const[]){"policy->needs = 0x20:", "own", "kvf_prune_needs"});
    own = own_policy(&calls);
    own.settings = "keep widow=4";
    expect_refusal("settings", &config, &shape_llama,
                   (const char *const[]){"policy->settings", "own", "'widow=4'"});
    own.settings = "keep=2";
    expect_refusal("settings", &config, &shape_llama,
                   (const char *const[]){"policy->settings", "own", "'keep=2'"});
    own = own_policy(&calls);
    own.decide = NULL;
    expect_refusal("decide", &config, &shape_llama,
                   (const char *const[]){"policy->decide = NULL:", "own", "must decide"});
    assert_int_equal(calls, 0);
}

/* ---- prompts ---- */

static void expect_problem(const kvf_prune_settings *settings, uint32_t tokens, const char *says)
{
    char text[256] = "";
    const char *problem = kvf_prune_prompt_problem(settings, tokens, text, sizeof text);
    if (!says && problem)
        fail_msg("%u tokens: %s", tokens, problem);
    if (says && (!problem || !strstr(problem, says)))
        fail_msg("%u tokens: '%s' does not say '%s'", tokens, problem ? problem : "nothing", says);
}

static void knows_prompts_that_are_too_short(void **state)
{
    (void)state;
    kvf_prune_settings s = config_of("fastkv").settings;
    expect_problem(&s, 7, "window = 8: the prompt has only 7 tokens; lower window");
    expect_problem(&s, 79, "keep = 0.1: of the prompt's 79 tokens that is 7, below window = 8");
    expect_problem(&s, 79, "raise it to 0.102 or more");
    expect_problem(&s, 80, NULL);
    s.keep = 1.0f;
    expect_problem(&s, 39, "propagate = 0.2: of the prompt's 39 tokens that is 7, below window");
    expect_problem(&s, 40, NULL);
    s.keep_tokens = 2048;
    s.propagate_tokens = 2048;
    expect_problem(&s, 8, NULL);
    s = config_of("streaming").settings;
    expect_problem(&s, 9, "keep = 0.1: of the prompt's 9 tokens that is none");
    expect_problem(&s, 49, "sink_tokens = 4: only 4 of the prompt's 49 tokens are kept");
    expect_problem(&s, 50, NULL);
    s = config_of("full").settings;
    expect_problem(&s, 1, NULL);
}

/* ---- numbers worked out by hand ---- */

static void shares_are_what_they_are_written_as(void **state)
{
    (void)state;
    /* 10 * 0.7f is 6.99999988; 0.7 in decimals gives 7. 0.29 * 100 is 28.999999999999996. */
    assert_int_equal(kvf_share_count(10, kvf_share_value(0.7f)), 7);
    assert_int_equal(kvf_share_count(100, kvf_share_value(0.29f)), 28);
    assert_int_equal(kvf_share_count(1000, kvf_share_value(0.1f)), 100);
    assert_int_equal(kvf_share_count(1u << 26, kvf_share_value(1.0f)), 1u << 26);
    assert_int_equal(kvf_share_count(7, kvf_share_value(1e-30f)), 0);
    assert_int_equal(kvf_share_count(0, 0.5), 0);
    assert_int_equal(kvf_share_count(10, 1.5), 10);
    assert_true(kvf_share_value(0.1f) == 0.1);
    assert_true(kvf_share_value(0.123456f) == 0.123456);
    assert_true(kvf_share_value(1.0f) == 1.0);
    assert_true((float)kvf_share_value(1.0f / 3.0f) == 1.0f / 3.0f);
    assert_true(kvf_share_value(1e-30f) == (double)1e-30f);
}

/* C = capacity - 8, mn = C / 20, mx = 2 C - mn, but at most n - 8; step = (mx - mn) / (L - 1). */
static void pyramidkv_budgets_are_the_formulas(void **state)
{
    (void)state;
    static const struct {
        uint32_t n, capacity, layers, layer, count;
    } golden[] = {
        /* C = 100: mn 5, mx 195, step 190 / 31 = 6 */
        {1000, 108, 32, 0, 195},
        {1000, 108, 32, 1, 189},
        {1000, 108, 32, 31, 9},
        /* C = 2040: mn 102, mx 3978, step 3876 / 3 = 1292 */
        {16384, 2048, 4, 0, 3978},
        {16384, 2048, 4, 1, 2686},
        {16384, 2048, 4, 2, 1394},
        {16384, 2048, 4, 3, 102},
        /* n - 8 = 193 < 195: mx 193, mn 7, step 186 / 31 = 6 */
        {201, 108, 32, 0, 193},
        {201, 108, 32, 31, 7},
        /* n < 2 C = 200: C everywhere */
        {199, 108, 32, 0, 100},
        {199, 108, 32, 31, 100},
        /* C = 56: mn 2, mx 110, step 108 / 1; one layer: C */
        {512, 64, 2, 0, 110},
        {512, 64, 2, 1, 2},
        {512, 64, 1, 0, 56},
        /* C = 0 */
        {512, 8, 4, 0, 0},
        {512, 8, 4, 3, 0},
    };
    const kvf_prune_settings settings = config_of("pyramidkv").settings;
    for (size_t i = 0; i < sizeof golden / sizeof *golden; i++) {
        const kvf_prune_view view = {.layer = golden[i].layer,
                                     .layers = golden[i].layers,
                                     .tokens = golden[i].n,
                                     .prompt = golden[i].n,
                                     .window = 8,
                                     .candidates = golden[i].n - 8};
        const uint32_t count = kvf_pyramidkv_count(&settings, &view, golden[i].capacity);
        if (count != golden[i].count)
            fail_msg("n = %u, capacity = %u, layer %u of %u: %u, by hand %u", golden[i].n,
                     golden[i].capacity, golden[i].layer, golden[i].layers, count, golden[i].count);
    }
}

/* ---- choosing ---- */

typedef struct ranked {
    float score;
    uint32_t id;
} ranked;

static int by_score(const void *a, const void *b)
{
    const ranked *x = a, *y = b;
    const float p = isnan(x->score) ? -INFINITY : x->score;
    const float q = isnan(y->score) ? -INFINITY : y->score;
    if (p != q)
        return p > q ? -1 : 1;
    if (isnan(x->score) != isnan(y->score))
        return isnan(x->score) ? 1 : -1;
    return x->id < y->id ? -1 : 1;
}

static int by_id(const void *a, const void *b)
{
    const uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return x < y ? -1 : x > y;
}

static void fill_row(float *row, uint32_t n, uint32_t kind, uint64_t *seed)
{
    static const float odd[] = {0.0f,   -0.0f,   INFINITY, -INFINITY, NAN,
                                1e-45f, -1e-45f, 3e38f,    -3e38f,    1.0f};
    for (uint32_t j = 0; j < n; j++) {
        const uint32_t r = (uint32_t)kvf_random_next(seed);
        if (kind == 0)
            row[j] = odd[r % (sizeof odd / sizeof *odd)];
        else if (kind == 1)
            row[j] = (float)(r % 3);
        else if (kind == 2)
            row[j] = 0.5f;
        else
            row[j] = (float)((double)r / 4294967296.0 - 0.5);
    }
}

#define ROW_MAX 300u

static void chooses_as_a_sort_would(void **state)
{
    (void)state;
    uint64_t seed = 71;
    printf("chooses_as_a_sort_would: seed %u\n", (unsigned)seed);
    float row[ROW_MAX];
    ranked order[ROW_MAX];
    uint32_t ids[ROW_MAX], keys[ROW_MAX], wanted[ROW_MAX];
    for (uint32_t turn = 0; turn < 4000; turn++) {
        const uint32_t n = 1 + (uint32_t)(kvf_random_next(&seed) % ROW_MAX);
        uint32_t count = (uint32_t)(kvf_random_next(&seed) % (n + 1));
        count = turn % 17 == 0 ? n : turn % 19 == 0 ? 0 : count;
        fill_row(row, n, turn % 4, &seed);
        for (uint32_t j = 0; j < n; j++) {
            order[j] = (ranked){row[j], j};
            keys[j] = kvf_choose_key(row[j]);
        }
        qsort(order, n, sizeof *order, by_score);
        for (uint32_t i = 0; i < count; i++)
            wanted[i] = order[i].id;
        qsort(wanted, count, sizeof *wanted, by_id);
        kvf_choose_best(row, n, count, ids);
        kvf_choose_top_keys(keys, n, count, keys); /* in place */
        if (count && memcmp(ids, wanted, count * sizeof *ids) != 0)
            fail_msg("turn %u: %u of %u scores: not those of the sort", turn, count, n);
        if (count && memcmp(keys, wanted, count * sizeof *ids) != 0)
            fail_msg("turn %u: %u of %u keys in place: not those of the sort", turn, count, n);
    }
}

static void keys_order_like_scores(void **state)
{
    (void)state;
    static const float rising[] = {-INFINITY, -3e38f, -1.0f, -1e-45f, 0.0f,
                                   1e-45f,    1.0f,   3e38f, INFINITY};
    for (size_t i = 1; i < sizeof rising / sizeof *rising; i++)
        assert_true(kvf_choose_key(rising[i - 1]) < kvf_choose_key(rising[i]));
    assert_int_equal(kvf_choose_key(-0.0f), kvf_choose_key(0.0f));
    assert_true(kvf_choose_key(NAN) < kvf_choose_key(-INFINITY));
    assert_true(kvf_choose_key(-NAN) < kvf_choose_key(-INFINITY));
    assert_true(kvf_choose_key(INFINITY) < UINT32_MAX);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(finds_all_by_name),
        cmocka_unit_test(has_sound_defaults),
        cmocka_unit_test(refuses_bad_values),
        cmocka_unit_test(refuses_what_does_not_fit_together),
        cmocka_unit_test(refuses_eviction_of_what_starts_over),
        cmocka_unit_test(takes_a_policy_of_the_embedder),
        cmocka_unit_test(refuses_policies_with_parts_missing),
        cmocka_unit_test(knows_prompts_that_are_too_short),
        cmocka_unit_test(shares_are_what_they_are_written_as),
        cmocka_unit_test(pyramidkv_budgets_are_the_formulas),
        cmocka_unit_test(chooses_as_a_sort_would),
        cmocka_unit_test(keys_order_like_scores),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
