/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Full budget gives dense attention, in every dtype, head_dim, group and page size; a prefill
 * without queries leaves the same cache; attention parameters.
 *
 * The yardstick is the naive model. Knows nothing of how the library selects or stores; one test
 * holds the device back.
 */

#include "harness.h"
#include "refusals.h"

#include <math.h>
#include <time.h>

#include "cache.h"
#include "naive.h"

typedef struct geometry {
    kvf_dtype dtype;
    uint32_t head_dim, kv_heads, group, page_size, layers, value_dim;
} geometry;

/* Every value of every dimension at least once with every dtype. */
static const geometry geometries[] = {
    {KVF_FP32, 64, 2, 2, 8, 1, 0},   {KVF_BF16, 64, 1, 4, 16, 2, 0},
    {KVF_FP16, 64, 2, 1, 32, 1, 0},  {KVF_BF16, 80, 2, 3, 8, 1, 0},
    {KVF_FP32, 80, 1, 5, 32, 1, 0},  {KVF_FP16, 80, 1, 2, 64, 1, 0},
    {KVF_FP16, 96, 1, 7, 8, 1, 0},   {KVF_FP32, 96, 2, 1, 64, 1, 0},
    {KVF_BF16, 96, 1, 6, 32, 1, 0},  {KVF_BF16, 128, 2, 4, 32, 1, 0},
    {KVF_FP32, 128, 1, 8, 16, 1, 0}, {KVF_FP16, 128, 3, 2, 16, 1, 0},
    {KVF_FP16, 256, 1, 4, 8, 1, 0},  {KVF_BF16, 256, 1, 16, 64, 1, 0},
    {KVF_FP32, 256, 2, 2, 32, 1, 0}, {KVF_BF16, 64, 2, 3, 1, 2, 0},
    {KVF_FP32, 96, 1, 2, 2, 1, 0},   {KVF_FP16, 128, 2, 4, 4, 1, 0},
    {KVF_BF16, 32, 2, 3, 4, 1, 0},   {KVF_FP16, 32, 1, 8, 16, 1, 0},
    {KVF_FP32, 32, 1, 1, 1, 1, 0},   {KVF_BF16, 128, 1, 48, 8, 1, 0},
    {KVF_FP16, 64, 1, 71, 16, 1, 0}, {KVF_FP32, 64, 2, 29, 4, 2, 0},
    {KVF_BF16, 64, 1, 128, 1, 1, 0},
};

static kvf_cache_config config_of(const geometry *g)
{
    kvf_cache_config c = test_config_small();
    c.layers = g->layers;
    c.kv_heads = g->kv_heads;
    c.query_heads = g->kv_heads * g->group;
    c.head_dim = g->head_dim;
    c.value_dim = g->value_dim;
    c.dtype = g->dtype;
    c.page_size = g->page_size;
    c.tokens_max = 256;
    c.budget_tokens = 256;
    return c;
}

static void run_against_dense(kvf_cache_config config, uint64_t seed, const char *what)
{
    const test_scenario sc = {.cc = config,
                              .tokens = {.seed = seed, .sharpness = 1.5f},
                              .prompt = 111,
                              .steps = 10,
                              .chunk = 128};
    naive_expect_run(&(naive_run){.scenario = &sc, .what = what, .every = 23});
}

TEST(full_budget_is_dense)
{
    const uint64_t seed = test_seed(20260101);
    for (size_t i = 0; i < sizeof geometries / sizeof *geometries; i++) {
        const geometry *g = &geometries[i];
        char what[128];
        snprintf(what, sizeof what, "dtype %d, head_dim %u, kv_heads %u, group %u, page %u",
                 (int)g->dtype, g->head_dim, g->kv_heads, g->group, g->page_size);
        run_against_dense(config_of(g), seed + i, what);
    }
}

/* The host device takes every multiple of 16. */
TEST(head_dims_are_multiples_of_16)
{
    const uint64_t seed = test_seed(53);
    for (uint32_t i = 0; i < KVF_HEAD_DIM_MAX / 16 && !test_on_cuda(); i++) {
        const geometry g = {(kvf_dtype)(i % 3), 16 * (i + 1), 1, 1 + i % 4, 4, 1, 0};
        char what[64];
        snprintf(what, sizeof what, "head_dim %u", g.head_dim);
        run_against_dense(config_of(&g), seed + i, what);
    }
}

/* A GPU takes the first two of these values narrower than keys. */
TEST(values_are_narrower)
{
    static const geometry narrow[] = {
        {KVF_BF16, 192, 2, 4, 4, 2, 128}, {KVF_FP32, 192, 1, 3, 16, 1, 128},
        {KVF_FP16, 80, 2, 2, 8, 1, 48},   {KVF_FP32, 48, 1, 1, 1, 1, 16},
        {KVF_BF16, 512, 1, 2, 32, 1, 32}, {KVF_FP16, 128, 1, 16, 64, 1, 96}};
    const uint64_t seed = test_seed(54);
    for (uint32_t i = 0; i < (test_on_cuda() ? 2 : sizeof narrow / sizeof *narrow); i++) {
        char what[64];
        snprintf(what, sizeof what, "head_dim %u, value_dim %u", narrow[i].head_dim,
                 narrow[i].value_dim);
        run_against_dense(config_of(&narrow[i]), seed + i, what);
    }
}

/* Without a static set nothing depends on the queries of the prompt. */
TEST(append_only_prefill_leaves_the_same_cache)
{
    const uint64_t seed = test_seed(43);
    kvf_cache_config c = test_config_small();
    c.select = KVF_SELECT_DYNAMIC;
    test_tokens t;
    test_tokens_make(&t, &c, &(test_tokens_spec){.count = 220, .seed = seed, .sharpness = 1.0f});
    float(*out)[20][256] = test_scratch(2 * sizeof *out);
    for (uint32_t mode = 0; mode < 2; mode++) {
        test_world w;
        test_world_open(&w, NULL, &c);
        kvf_sequence *s = test_sequence(&w);
        test_prefill(&w, s, &t, &(test_range){.count = 200, .chunk = 77, .append_only = mode},
                     NULL);
        assert_int_equal(kvf_sequence_length(s, 0), 200);
        for (uint32_t i = 0; i < 20; i++)
            test_decode(&w, s, &t, 0, 200 + i, out[mode][i], NULL);
        test_wait(&w);
        test_world_close(&w);
    }
    assert_memory_equal(out[0], out[1], sizeof out[0]);
    test_tokens_free(&t);
}

static kvf_status params_row(void *user, char *change, size_t size, kvf_error *error)
{
    const test_world *w = user;
    uint32_t layer;
    float sinks[] = {0.0f, -INFINITY, 0.0f, 0.0f};
    kvf_attention_params params;
    kvf_attention_params_init(&params);
    params.sinks = sinks;
    assert_int_equal(
        sscanf(change, "%u %f %f %f", &layer, &params.scale, &sinks[3], &params.soft_cap), 4);
    const kvf_status status = kvf_cache_attention_params(w->cache, layer, &params);
    *error = *kvf_runtime_error(w->runtime);
    return status;
}

/* Attention parameters that are none are refused by name, and change nothing. */
TEST(bad_forms_are_named)
{
    const kvf_cache_config c = test_config_small();
    test_world w;
    test_world_open(&w, NULL, &c);
    refusals_check(&(refusals){
        .path = "tests/runtime/step/attention_params.refusals", .call = params_row, .user = &w});
    test_expect(w.runtime, kvf_cache_attention_params(w.cache, 0, NULL), KVF_INVALID);
    test_world_close(&w);
}

/* Holds a stream back until *given is 1, or for so long that whoever sets it must be waiting. */
static void hold_back(const void *given, uint32_t task)
{
    const struct timespec pause = {.tv_nsec = 1000000};
    const _Atomic int *const *flag = given;
    for (uint32_t i = 0; i < 200 && !atomic_load(*flag); i++)
        nanosleep(&pause, NULL);
}

static void give_sink(const test_world *w, float sink)
{
    const float sinks[4] = {sink, sink, sink, sink};
    kvf_attention_params params;
    kvf_attention_params_init(&params);
    params.sinks = sinks;
    test_ok(w, kvf_cache_attention_params(w->cache, 0, &params));
}

/* The sequence of a step may end before the step has begun, and then its layer takes others. */
TEST(a_step_has_the_sinks_of_its_time)
{
    const kvf_cache_config c = test_config_small();
    static _Atomic int is_given;
    _Atomic int *const flag = &is_given;
    float *out[2] = {test_scratch(4 * 64 * sizeof(float)), test_scratch(4 * 64 * sizeof(float))};
    test_world w;
    test_tokens t;
    test_open(&w, &t, &c, &(test_tokens_spec){.count = 41, .seed = 61, .sharpness = 1.0f});
    give_sink(&w, 1.0f);
    for (uint32_t i = 0; i < 2; i++) {
        kvf_sequence *s = test_sequence(&w);
        test_prefill(&w, s, &t, &(test_range){.count = 40, .chunk = 40}, NULL);
        test_wait(&w);
        if (i)
            test_ok(&w, w.cache->device->ops->host_call(w.stream, hold_back, &flag, sizeof flag));
        test_decode(&w, s, &t, 0, 40, out[i], NULL);
        kvf_sequence_destroy(s);
    }
    give_sink(&w, 4.0f);
    atomic_store(&is_given, 1);
    test_wait(&w);
    assert_memory_equal(out[1], out[0], 4 * 64 * sizeof(float));
    test_close(&w, &t);
}
