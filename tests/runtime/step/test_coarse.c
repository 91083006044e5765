/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Coarse heads: which pages they may choose, against plain arithmetic on codes; and that nothing
 * else changes. However tokens came, the same ones give the same bits: test_bits.c, test_forks.c.
 *
 * A head that scores all of its segments is a hot head, bit for bit.
 */

#include "attention_params.h"
#include "harness.h"

#include <math.h>

#include "kernels.h"
#include "score/code_key.h"

enum {
    LAYERS = 2,
    HEADS = 3,
    GROUP = 2,
    DIM = 64,
    PROMPT = TEST_SANITIZED ? 600 : 900,
    STEPS = 40
};

static const uint8_t coarse_mask[] = {1, 2, 1, 2, 2, 2}, all_coarse[] = {2, 2, 2, 2, 2, 2};

static kvf_cache_config config_of(const uint8_t *mask, float share)
{
    kvf_cache_config c = test_config_small();
    c.layers = LAYERS;
    c.kv_heads = HEADS;
    c.query_heads = HEADS * GROUP;
    c.head_dim = DIM;
    c.tokens_max = 1024;
    c.page_size = 4;
    c.budget_tokens = 128;
    c.select = KVF_SELECT_DYNAMIC;
    c.digest = KVF_DIGEST_CODES;
    c.head_mask = mask;
    c.coarse_share = share;
    c.streaming_sink = 6;
    c.streaming_recent = 50;
    return c;
}

static test_scenario scenario_of(const uint8_t *mask, float share)
{
    return (test_scenario){.cc = config_of(mask, share),
                           .tokens = {.seed = 31, .sharpness = 2.5f, .topics = 9},
                           .prompt = PROMPT,
                           .steps = test_afford(STEPS),
                           .chunk = 128};
}

TEST(all_segments_are_all_hot)
{
    /* The emulated device is slow: three cases with all types. */
    for (uint32_t i = 0; i < (TEST_SANITIZED && test_on_cuda() ? 3 : 6); i++) {
        test_trace hot, coarse;
        test_scenario sc = scenario_of(NULL, 1.0f);
        sc.cc.page_size = 1u << (i + 1);
        sc.cc.budget_tokens = 192;
        sc.cc.select = i % 2 ? KVF_SELECT_HYBRID : KVF_SELECT_DYNAMIC;
        sc.cc.dtype = (kvf_dtype)(i % 3);
        test_run(&sc, &hot);
        sc.cc.head_mask = i % 3 ? coarse_mask : all_coarse;
        test_run(&sc, &coarse);
        test_same_bits(&hot, &coarse, "a share of 1");
        sc.cc.coarse_share = 0.0f;
        sc.cc.budget_tokens = 1024; /* as is a budget that all fits in */
        test_trace_free(&coarse);
        test_run(&sc, &coarse);
        test_trace_free(&hot);
        sc.cc.head_mask = NULL;
        test_run(&sc, &hot);
        test_same_bits(&hot, &coarse, "a full budget");
        test_trace_free(&hot);
        test_trace_free(&coarse);
    }
}

/* ---- what is left out ---- */

typedef struct seen_view {
    uint32_t pages, chosen;
    float scores[1024];
} seen_view;

static seen_view views[LAYERS * HEADS];

/* Chooses nothing, and keeps what it sees. */
static uint32_t note_view(void *user, const kvf_select_view *view, int32_t *ids)
{
    seen_view *to = &views[view->layer * HEADS + view->kv_head];
    to->pages = view->pages;
    to->chosen = view->pages_max;
    memcpy(to->scores, view->scores, view->pages * sizeof *to->scores);
    return 0;
}

/* The mean of 64 keys as their codes have them, in int8, as plain numbers. */
static void mean_of(const test_tokens *t, uint32_t layer, uint32_t head, uint32_t first,
                    double mean[DIM])
{
    static const double level[] = {-10.0, -3.0, 3.0, 10.0};
    double largest = 0.0;
    memset(mean, 0, DIM * sizeof *mean);
    for (uint32_t i = first; i < first + 64; i++) {
        uint32_t words[DIM / KVF_CODE_LANES * KVF_CODE_LANES] = {0};
        float x[DIM];
        for (uint32_t c = 0; c < DIM; c++)
            x[c] = kvf_element_get(test_k(t, layer, i), t->dtype, head * DIM + c);
        const double scale = (double)kvf_fp16_to_float(kvf_code_key(words, x, DIM));
        for (uint32_t c = 0; c < DIM; c++) {
            const uint32_t word = words[c / KVF_CODE_LANES * KVF_CODE_LANES];
            mean[c] += scale * level[word >> kvf_code_shift(c % KVF_CODE_LANES) & 3] / 64.0;
        }
    }
    for (uint32_t c = 0; c < DIM; c++)
        largest = fmax(largest, fabs(mean[c]));
    for (uint32_t c = 0; c < DIM; c++)
        mean[c] = rint(mean[c] * 127.0 / largest) * (largest / 127.0);
}

/* The mass of the ranked segments 1 .. count: the mean over the group of softmax. */
static void mass_of_segments(const test_tokens *t, uint32_t layer, uint32_t head, uint32_t query,
                             uint32_t count, double *weight)
{
    const kvf_cache_config c = {.head_dim = DIM};
    double mean[16][DIM], logit[16];
    assert_true(count < 16);
    for (uint32_t i = 0; i < count; i++) {
        mean_of(t, layer, head, 64 * (i + 1), mean[i]);
        weight[i] = 0.0;
    }
    for (uint32_t g = 0; g < GROUP; g++) {
        float q[DIM];
        double top = -INFINITY, sum = 0.0;
        for (uint32_t d = 0; d < DIM; d++)
            q[d] = kvf_element_get(test_q(t, layer, query), t->dtype, (head * GROUP + g) * DIM + d);
        kvf_code_rotate(q, DIM);
        for (uint32_t i = 0; i < count; i++) {
            logit[i] = 0.0;
            for (uint32_t d = 0; d < DIM; d++)
                logit[i] += (double)q[d] * mean[i][d];
            logit[i] = test_logit(&c, layer, logit[i]);
            top = fmax(top, logit[i]);
        }
        for (uint32_t i = 0; i < count; i++)
            sum += exp(logit[i] - top);
        for (uint32_t i = 0; i < count; i++)
            weight[i] += exp(logit[i] - top) / sum / GROUP;
    }
}

/* Segments that stay have at least as much mass as those left out, but for the rounding of a query
 * to int8, which moves a logit by about 1%. */
static void expect_best(const seen_view *v, const double *weight, uint32_t count, uint32_t take,
                        uint32_t token)
{
    double least = INFINITY, most = 0.0;
    uint32_t kept = 0;
    for (uint32_t i = 0; i < count; i++) {
        const int stays = v->scores[16 * (i + 1)] > -INFINITY;
        for (uint32_t p = 16 * (i + 1); p < 16 * (i + 2); p++)
            assert_int_equal(v->scores[p] > -INFINITY, stays);
        kept += (uint32_t)stays;
        least = stays ? fmin(least, weight[i]) : least;
        most = stays ? most : fmax(most, weight[i]);
    }
    assert_int_equal(kept, take);
    if (most > least * 1.3)
        fail_msg("token %u: a segment of %g was left out, one of %g was not", token, most, least);
}

TEST(what_is_left_out_follows_from_codes)
{
    test_world w;
    test_tokens t;
    double weight[16];
    uint32_t filtered = 0;
    kvf_cache_config c = config_of(coarse_mask, 0.3f);
    float *out = test_scratch((size_t)HEADS * GROUP * DIM * sizeof *out);
    c.select = KVF_SELECT_CUSTOM;
    c.select_fn = note_view;
    c.sink_tokens = 0; /* every token of a page counts */
    c.static_ratio = 0.0f;
    test_tokens_make(
        &t, &c,
        &(test_tokens_spec){.count = PROMPT + STEPS, .seed = 37, .sharpness = 1.0f, .topics = 9});
    test_world_open(&w, NULL, &c);
    kvf_sequence *s = test_sequence(&w);
    test_fill(&w, s, &t, 0, 300);
    for (uint32_t token = 300; token < PROMPT; token += 1)
        for (uint32_t layer = 0; layer < LAYERS; layer++) {
            test_decode(&w, s, &t, layer, token, out, NULL);
            if (token % 29)
                continue;
            test_wait(&w);
            for (uint32_t h = 0; h < HEADS; h++) {
                const seen_view *v = &views[layer * HEADS + h];
                const uint32_t whole = v->pages / 16, count = whole - 1;
                const uint32_t twice = (2 * v->chosen * 4 + 63) / 64;
                uint32_t take = (uint32_t)(0.3f * (float)count + 0.5f);
                take = take > twice ? take : twice;
                take = coarse_mask[layer * HEADS + h] == 1 || take > count ? count : take;
                for (uint32_t p = 0; p < v->pages; p++) /* the first, and after the last */
                    if (p < 16 || p >= 16 * whole)
                        assert_true(v->scores[p] > -INFINITY);
                mass_of_segments(&t, layer, h, token, count, weight);
                expect_best(v, weight, count, take, token);
                filtered += take < count;
            }
        }
    assert_true(filtered > 20);
    test_world_close(&w);
    test_tokens_free(&t);
}

TEST(centroids_are_part_of_the_plan)
{
    test_world w;
    kvf_cache_plan with, without;
    kvf_cache_config c = config_of(NULL, 0.1f);
    test_world_open(&w, NULL, &c);
    kvf_error error;
    assert_int_equal(kvf_cache_plan_make(w.runtime, &c, &without, &error), KVF_OK);
    c.head_mask = coarse_mask;
    assert_int_equal(kvf_cache_plan_make(w.runtime, &c, &with, &error), KVF_OK);
    const uint64_t centroids = (uint64_t)LAYERS * HEADS * (c.tokens_max / 64) * (DIM + 2);
    assert_true(with.device_digest_bytes >= without.device_digest_bytes + centroids);
    assert_true(with.device_digest_bytes <= without.device_digest_bytes + centroids + 256);
    assert_int_equal(with.device_kv_bytes, without.device_kv_bytes);
    test_world_close(&w);
}
