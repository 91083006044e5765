/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Sampling: greedy and ties, seeds, and the share of draws against softmax, top-k and top-p.
 */

#include "sampling.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#define VOCAB 6u
#define DRAWS 40000u

static kvf_sampler *sampler(double temperature, double top_p, uint32_t top_k, uint64_t seed)
{
    kvf_sampling_config config = {
        .temperature = temperature, .top_p = top_p, .top_k = top_k, .seed = seed};
    kvf_sampler *s;
    kvf_error error;
    assert_int_equal(kvf_sampler_create(&config, VOCAB, &s, &error), KVF_OK);
    return s;
}

/* Probabilities 0.4, 0.1, 0.3, 0.05, 0.15 and none. */
static const double shares[VOCAB] = {0.4, 0.1, 0.3, 0.05, 0.15, 0.0};

static void make_logits(float logits[VOCAB], double temperature)
{
    for (uint32_t i = 0; i < VOCAB; i++)
        logits[i] = shares[i] > 0.0 ? (float)(temperature * log(shares[i])) : -INFINITY;
}

/* Draw many times and compare with the shares that are left. */
static void check_shares(double temperature, double top_p, uint32_t top_k, const double want[VOCAB])
{
    float logits[VOCAB];
    uint32_t count[VOCAB] = {0};
    make_logits(logits, temperature);
    kvf_sampler *s = sampler(temperature, top_p, top_k, 7);
    for (uint32_t i = 0; i < DRAWS; i++)
        count[kvf_sampler_next(s, logits)]++;
    kvf_sampler_destroy(s);
    for (uint32_t i = 0; i < VOCAB; i++) {
        double share = (double)count[i] / DRAWS;
        double sigma = sqrt(want[i] * (1.0 - want[i]) / DRAWS);
        if (fabs(share - want[i]) > 4.0 * sigma)
            fail_msg("token %u: share %.4f, expected %.4f", i, share, want[i]);
    }
}

static void greedy_takes_the_first_of_the_largest(void **state)
{
    (void)state;
    kvf_sampler *s = sampler(0.0, 1.0, 0, 1);
    const float tie[VOCAB] = {1.0f, 3.0f, 2.0f, 3.0f, -1.0f, NAN};
    assert_int_equal(kvf_sampler_next(s, tie), 1);
    const float none[VOCAB] = {NAN, INFINITY, -INFINITY, NAN, NAN, NAN};
    assert_int_equal(kvf_sampler_next(s, none), KVF_SAMPLER_NONE);
    kvf_sampler_destroy(s);
}

static void draws_follow_the_softmax(void **state)
{
    (void)state;
    check_shares(1.0, 1.0, 0, shares);
    check_shares(2.5, 1.0, 0, shares);
}

static void top_k_keeps_the_likeliest(void **state)
{
    (void)state;
    const double one[VOCAB] = {1.0, 0, 0, 0, 0, 0};
    const double three[VOCAB] = {0.4 / 0.85, 0, 0.3 / 0.85, 0, 0.15 / 0.85, 0};
    check_shares(1.0, 1.0, 1, one);
    check_shares(1.0, 1.0, 3, three);
    check_shares(1.0, 1.0, 100, shares);
}

static void top_p_keeps_the_smallest_set(void **state)
{
    (void)state;
    const double one[VOCAB] = {1.0, 0, 0, 0, 0, 0};
    const double two[VOCAB] = {0.4 / 0.7, 0, 0.3 / 0.7, 0, 0, 0};
    check_shares(1.0, 0.3, 0, one);
    check_shares(1.0, 0.65, 0, two);
    /* 0.4 / 0.85 = 0.47 of what top-k left: p counts after k. */
    check_shares(1.0, 0.46, 3, one);
    check_shares(1.0, 0.8, 3, two);
}

static void a_seed_repeats(void **state)
{
    (void)state;
    float logits[VOCAB];
    make_logits(logits, 1.0);
    uint32_t runs[3][64];
    for (uint32_t run = 0; run < 3; run++) {
        kvf_sampler *s = sampler(1.0, 1.0, 0, run == 2 ? 8 : 9);
        for (uint32_t i = 0; i < 64; i++)
            runs[run][i] = kvf_sampler_next(s, logits);
        kvf_sampler_destroy(s);
    }
    assert_memory_equal(runs[0], runs[1], sizeof runs[0]);
    assert_memory_not_equal(runs[0], runs[2], sizeof runs[0]);
}

static void settings_out_of_range_are_named(void **state)
{
    (void)state;
    kvf_sampler *s;
    kvf_error error;
    kvf_sampling_config config = {.temperature = -1.0, .top_p = 1.0};
    assert_int_equal(kvf_sampler_create(&config, VOCAB, &s, &error), KVF_INVALID);
    assert_non_null(strstr(error.text, "temperature"));
    config = (kvf_sampling_config){.temperature = 1.0, .top_p = 0.0};
    assert_int_equal(kvf_sampler_create(&config, VOCAB, &s, &error), KVF_INVALID);
    assert_non_null(strstr(error.text, "top-p"));
    assert_null(s);
}

static void a_loss_is_the_negative_log_of_the_share(void **state)
{
    (void)state;
    float logits[VOCAB];
    for (uint32_t i = 0; i < VOCAB; i++)
        logits[i] = logf((float)(i + 1)) + 300.0f; /* shares i + 1 of 21, far from overflow */
    /* A logit near 300 has 17 bits behind the point: 2^-17 each, in the token's and in the sum. */
    for (uint32_t i = 0; i < VOCAB; i++)
        assert_true(fabs(kvf_logits_loss(logits, VOCAB, i) + log((i + 1) / 21.0)) < 1e-4);
    logits[1] = -INFINITY;
    assert_true(kvf_logits_loss(logits, VOCAB, 1) == INFINITY);
    assert_true(fabs(kvf_logits_loss(logits, VOCAB, 0) + log(1 / 19.0)) < 1e-4);
    logits[2] = NAN;
    assert_true(isnan(kvf_logits_loss(logits, VOCAB, 0)));
    logits[2] = INFINITY;
    assert_true(isnan(kvf_logits_loss(logits, VOCAB, 0)));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(greedy_takes_the_first_of_the_largest),
        cmocka_unit_test(draws_follow_the_softmax),
        cmocka_unit_test(top_k_keeps_the_likeliest),
        cmocka_unit_test(top_p_keeps_the_smallest_set),
        cmocka_unit_test(a_seed_repeats),
        cmocka_unit_test(a_loss_is_the_negative_log_of_the_share),
        cmocka_unit_test(settings_out_of_range_are_named),
    };
    return cmocka_run_group_tests_name("sampling", tests, NULL, NULL);
}
