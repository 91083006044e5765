/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The registry, what settings may be, and how tokens are chosen.
 *
 * The policies' choice from scores is checked against other definitions by check_prune.py; here
 * are texts of refusals, shares by hand, and choosing at its extremes against a sort.
 */

#include <math.h>

#include "common/random.h"
#include "kvferry/setting.h"
#include "policies.h"
#include "refusals.h"
#include "unit.h"

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

TEST(finds_all_by_name)
{
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

TEST(has_sound_defaults)
{
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

/* One of an embedder. */
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

/* FIELD VALUE of what is checked. */
static int set_other(kvf_prune_config *config, kvf_prune_shape *shape, kvf_prune_policy *own,
                     const char *field, const char *value)
{
    const uint32_t number = (uint32_t)strtoul(value, NULL, 10);
    if (strcmp(field, "policy") == 0)
        config->policy = NULL;
    else if (strcmp(field, "tokens_max") == 0)
        shape->tokens_max = number;
    else if (strcmp(field, "query_heads") == 0)
        shape->query_heads = number;
    else if (strcmp(field, "policy.name") == 0)
        own->name = NULL;
    else if (strcmp(field, "policy.needs") == 0)
        own->needs = number;
    else if (strcmp(field, "policy.settings") == 0)
        own->settings = value;
    else if (strcmp(field, "policy.decide") == 0)
        own->decide = NULL;
    else
        return 0;
    return 1;
}

/* POLICY & FIELD VALUE & FIELD VALUE ... */
static kvf_status check_row(void *user, char *change, size_t size, kvf_error *error)
{
    uint32_t calls = 0;
    kvf_prune_policy own = own_policy(&calls);
    kvf_prune_shape shape = shape_llama;
    char *field = NULL;
    refusals_part(change, &field);
    const bool is_own = strcmp(change, "own") == 0;
    kvf_prune_config config = is_own ? (kvf_prune_config){0} : config_of(change);
    if (is_own)
        kvf_prune_config_init(&config, &own);
    for (char *next; field; field = next) {
        const char *value = refusals_part(field, &next);
        if (!set_other(&config, &shape, &own, field, value) &&
            !refusals_set(kvf_prune_setting, &config, field, value))
            fail_msg("there is no field %s", field);
    }
    const kvf_status status = kvf_prune_config_check(&config, &shape, error);
    assert_int_equal(kvf_prune_config_check(&config, &shape, NULL), status);
    assert_int_equal(calls, 0);
    return status;
}

TEST(refuses_bad_settings)
{
    refusals_check(&(refusals){.path = "tests/prune/policies.refusals", .call = check_row});
}

static void expect_size(const kvf_prune_config *config, const char *format, size_t known)
{
    char text[256];
    kvf_error error = {0};
    snprintf(text, sizeof text, format, known);
    refusals_expect(kvf_prune_config_check(config, &shape_llama, &error), &error, KVF_INVALID,
                    text);
}

TEST(refuses_other_sizes)
{
    uint32_t calls = 0;
    kvf_prune_config config = config_of("fastkv");
    kvf_prune_policy own = own_policy(&calls);
    expect_size(NULL, "config is NULL; pass a kvf_prune_config", 0);
    config.settings.size = 1;
    expect_size(&config,
                "settings.size = 1: it is the last member, at byte 48, of a struct whose size = "
                "%zu; leave both as _init sets them",
                sizeof config);
    kvf_prune_config_init(&config, &own);
    own.size = 8;
    expect_size(&config,
                "policy: size = 8 is not the size of a kvf_prune_policy; set it to "
                "sizeof(kvf_prune_policy), or call its _init",
                0);
}

TEST(takes_what_fits_together)
{
    uint32_t calls = 0;
    kvf_prune_config config = config_of("fastkv");
    config.retention = KVF_RETENTION_EVICT;
    config.eviction = KVF_EVICTION_PATCHED;
    config.settings.propagate = 1.0f;
    assert_int_equal(kvf_prune_config_check(&config, &shape_llama, NULL), KVF_OK);
    config = config_of("snapkv");
    config.retention = KVF_RETENTION_EVICT;
    config.eviction = KVF_EVICTION_NAIVE;
    assert_int_equal(kvf_prune_config_check(&config, &shape_llama, NULL), KVF_OK);
    const kvf_prune_policy own = own_policy(&calls);
    kvf_prune_config_init(&config, &own);
    assert_int_equal(config.settings.window, 2);
    assert_int_equal(config.settings.beta, 3);
    assert_int_equal(kvf_prune_config_check(&config, &shape_llama, NULL), KVF_OK);
}

/* ---- prompts ---- */

static void expect_problem(const kvf_prune_settings *settings, uint32_t tokens, const char *says)
{
    char text[256] = "";
    const char *problem = kvf_prune_prompt_problem(settings, tokens, text, sizeof text);
    if (!says && problem)
        fail_msg("%u tokens: %s", tokens, problem);
    if (says && (!problem || strcmp(problem, says) != 0))
        fail_msg("%u tokens: '%s' is not '%s'", tokens, problem ? problem : "nothing", says);
}

TEST(knows_prompts_that_are_too_short)
{
    kvf_prune_settings s = config_of("fastkv").settings;
    expect_problem(&s, 7,
                   "window = 8: the prompt has only 7 tokens; lower window, or do not prune it");
    expect_problem(&s, 79,
                   "keep = 0.1: of the prompt's 79 tokens that is 7, below window = 8, whose "
                   "tokens are always kept; raise it to 0.102 or more, or lower window");
    expect_problem(&s, 80, NULL);
    s.keep = 1.0f;
    expect_problem(&s, 39,
                   "propagate = 0.2: of the prompt's 39 tokens that is 7, below window = 8, whose "
                   "tokens are always kept; raise it to 0.206 or more, or lower window");
    expect_problem(&s, 40, NULL);
    s.keep_tokens = 2048;
    s.propagate_tokens = 2048;
    expect_problem(&s, 8, NULL);
    s = config_of("streaming").settings;
    expect_problem(&s, 9,
                   "keep = 0.1: of the prompt's 9 tokens that is none; raise it to 0.112 or more");
    expect_problem(&s, 49,
                   "sink_tokens = 4: only 4 of the prompt's 49 tokens are kept; lower it below "
                   "that, or raise keep");
    expect_problem(&s, 50, NULL);
    s = config_of("full").settings;
    expect_problem(&s, 1, NULL);
}

/* ---- shares ---- */

TEST(shares_are_what_they_are_written_as)
{
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
    static const float special[] = {0.0f,   -0.0f,   INFINITY, -INFINITY, NAN,
                                    1e-45f, -1e-45f, 3e38f,    -3e38f,    1.0f};
    for (uint32_t j = 0; j < n; j++) {
        const uint32_t r = (uint32_t)kvf_random_next(seed);
        if (kind == 0)
            row[j] = special[r % (sizeof special / sizeof *special)];
        else if (kind == 1)
            row[j] = (float)(r % 3);
        else if (kind == 2)
            row[j] = 0.5f;
        else
            row[j] = (float)((double)r / 4294967296.0 - 0.5);
    }
}

#define ROW_MAX 300u

TEST(chooses_as_a_sort_would)
{
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

TEST(keys_order_like_scores)
{
    static const float rising[] = {-INFINITY, -3e38f, -1.0f, -1e-45f, 0.0f,
                                   1e-45f,    1.0f,   3e38f, INFINITY};
    for (size_t i = 1; i < sizeof rising / sizeof *rising; i++)
        assert_true(kvf_choose_key(rising[i - 1]) < kvf_choose_key(rising[i]));
    assert_int_equal(kvf_choose_key(-0.0f), kvf_choose_key(0.0f));
    assert_true(kvf_choose_key(NAN) < kvf_choose_key(-INFINITY));
    assert_true(kvf_choose_key(-NAN) < kvf_choose_key(-INFINITY));
    assert_true(kvf_choose_key(INFINITY) < UINT32_MAX);
}
