/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Sampling: greedy and ties, the share of draws against softmax, and every draw and its
 * probability against a plain sampler that sorts all tokens and goes filter by filter. Settings out
 * of range are rows of tests/cli/lines.refusals.
 */

#include "sampling.h"
#include "unit.h"

#include <math.h>

#include "common/random.h"
#include "draw_mass.h"

#define VOCAB 6u
#define DRAWS 40000u

static kvf_sampler *sampler_of(const kvf_sampling_config *config, uint32_t vocab_size)
{
    kvf_sampler *s;
    kvf_error error;
    assert_int_equal(kvf_sampler_create(vocab_size, 1, &s, &error), KVF_OK);
    assert_int_equal(kvf_sampler_begin(s, 0, config, &error), KVF_OK);
    return s;
}

static kvf_sampler *sampler(double temperature, uint64_t seed)
{
    kvf_sampling_config config;
    kvf_sampling_config_init(&config);
    config.temperature = temperature;
    config.seed = seed;
    return sampler_of(&config, VOCAB);
}

/* Probabilities 0.4, 0.1, 0.3, 0.05, 0.15 and none. */
static const double shares[VOCAB] = {0.4, 0.1, 0.3, 0.05, 0.15, 0.0};

static void make_logits(float logits[VOCAB], double temperature)
{
    for (uint32_t i = 0; i < VOCAB; i++)
        logits[i] = shares[i] > 0.0 ? (float)(temperature * log(shares[i])) : -INFINITY;
}

/* ---- cases: all follow from the numbers that are given ---- */

/* Kinds of logits: harmless, ties, huge distances, everything equal, and some that are not finite.
 */
#define SAMPLING_KINDS 5u
static void sampling_logits(float *logits, uint32_t count, uint32_t kind, uint64_t *random)
{
    for (uint32_t i = 0; i < count; i++) {
        const float normal = kvf_random_normal(random);
        logits[i] = kind == 0   ? 3.0f * normal
                    : kind == 1 ? (float)kvf_random_below(random, 4)
                    : kind == 2 ? 1e4f * normal
                    : kind == 3 ? 1.0f
                                : normal * 0x1p125f;
        const uint32_t odd = kvf_random_below(random, 50);
        if (kind == 4 && odd < 3)
            logits[i] = odd == 0 ? NAN : odd == 1 ? INFINITY : -INFINITY;
    }
}

/* Settings with and without every filter. */
#define SAMPLING_CASES 625u
static kvf_sampling_config sampling_case(uint32_t n, uint64_t *random)
{
    static const double temperatures[] = {0.0, 0.3, 1.0, 5.0, 100.0};
    static const double top_ps[] = {1.0, 1.0, 0.95, 0.3, 1e-9};
    static const double min_ps[] = {0.0, 0.0, 0.05, 0.7, 1.0};
    static const double penalties[] = {1.0, 1.3, 0.5};
    static const uint32_t top_ks[] = {0, 0, 1, 40, 1000};
    return (kvf_sampling_config){.temperature = temperatures[n % 5],
                                 .top_p = top_ps[n / 5 % 5],
                                 .min_p = min_ps[n / 25 % 5],
                                 .top_k = top_ks[n / 125 % 5],
                                 .repetition_penalty = penalties[kvf_random_below(random, 3)],
                                 .seed = kvf_random_next(random)};
}

/* Draw many times and compare with the shares. */
static void check_shares(double temperature)
{
    float logits[VOCAB];
    uint32_t count[VOCAB] = {0};
    make_logits(logits, temperature);
    kvf_sampler *s = sampler(temperature, 7);
    for (uint32_t i = 0; i < DRAWS; i++) {
        const uint32_t id = kvf_sampler_next(s, 0, logits);
        count[id]++;
        if (fabs(kvf_sampler_logprob(s, 0, id) - log(shares[id])) > 1e-6)
            fail_msg("token %u: ln p %.9g, expected %.9g", id, kvf_sampler_logprob(s, 0, id),
                     log(shares[id]));
    }
    kvf_sampler_destroy(s);
    for (uint32_t i = 0; i < VOCAB; i++) {
        double share = (double)count[i] / DRAWS;
        double sigma = sqrt(shares[i] * (1.0 - shares[i]) / DRAWS);
        if (fabs(share - shares[i]) > 4.0 * sigma)
            fail_msg("token %u: share %.4f, expected %.4f", i, share, shares[i]);
    }
}

TEST(greedy_takes_the_first_of_the_largest)
{
    kvf_sampler *s = sampler(0.0, 1);
    const float tie[VOCAB] = {1.0f, 3.0f, 2.0f, 3.0f, -1.0f, NAN};
    assert_int_equal(kvf_sampler_next(s, 0, tie), 1);
    assert_true(kvf_sampler_logprob(s, 0, 1) == 0.0);
    const float none[VOCAB] = {NAN, INFINITY, -INFINITY, NAN, NAN, NAN};
    assert_int_equal(kvf_sampler_next(s, 0, none), KVF_SAMPLER_NONE);
    kvf_sampler_destroy(s);
}

TEST(draws_follow_the_softmax)
{
    check_shares(1.0);
    check_shares(2.5);
}

/* To 2^-29 of itself and the unit: the series is cut at 2^-31, logits are fp32. */
TEST(masses_are_those_of_exp)
{
    static const double temperatures[] = {1.0, 0.3, 5.0, 100.0, 1e-300, 1e300, 0x1p-1070};
    uint64_t random = 3;
    for (uint32_t n = 0; n < 20000; n++) {
        kvf_sampling_config config;
        kvf_sampling_config_init(&config);
        config.temperature = temperatures[n % 7];
        const kvf_draw_settings settings = kvf_draw_settings_of(&config);
        const float highest = 8.0f * kvf_random_normal(&random);
        const float size = (float)(1u << kvf_random_below(&random, 12));
        const float logit = highest - (float)kvf_random_unit(&random) * size;
        const double want = 0x1p40 * exp(((double)logit - (double)highest) / config.temperature);
        const uint64_t distance = kvf_draw_distance(&settings, highest, logit);
        const uint64_t mass = kvf_draw_mass(distance);
        /* The distance is rounded once, as a float. */
        const double slack = 0x1p-29 + 0x1p-24 * log(0x1p40);
        if (fabs((double)mass - want) > 1.0 + want * slack)
            fail_msg("%g under %g at %g: %llu, expected %g", (double)logit, (double)highest,
                     config.temperature, (unsigned long long)mass, want);
    }
}

/* For every instruction set, at every count: the numbers of draw_mass.h, and nothing after them. */
TEST(passes_over_tokens_are_exact)
{
    enum { COUNT = 150 };
    static const uint32_t isas[] = {KVF_ISA_REFERENCE, KVF_ISA_BASELINE | KVF_ISA_AVX2,
                                    KVF_ISA_ALL};
    static const float special[] = {-0.0f,     0.0f,   NAN,       INFINITY,
                                    -INFINITY, -3e38f, 0x1p-149f, 3e38f};
    float logits[COUNT];
    uint64_t mass[COUNT + 1], random = 5;
    uint16_t bin[COUNT + 1];
    for (uint32_t n = 0; n < SAMPLING_CASES; n++) {
        const kvf_sampling_config config = sampling_case(n, &random);
        const kvf_draw_settings settings = kvf_draw_settings_of(&config);
        sampling_logits(logits, COUNT, n % SAMPLING_KINDS, &random);
        for (uint32_t i = 0; i < n % 8; i++)
            logits[kvf_random_below(&random, COUNT)] = special[kvf_random_below(&random, 8)];
        const size_t count = n < COUNT ? n : COUNT;
        size_t best = count;
        for (size_t i = 0; i < count; i++)
            if (isfinite(logits[i]) && (best == count || logits[i] > logits[best]))
                best = i;
        for (size_t isa = 0; isa < sizeof isas / sizeof *isas; isa++) {
            const kvf_draw_kernels *k = kvf_draw_kernels_choose(isas[isa]);
            assert_int_equal(k->largest(logits, count), best);
            mass[count] = bin[count] = 7;
            if (best == count || settings.is_greedy) /* no masses are wanted */
                continue;
            k->weigh(&settings, logits[best], logits, count, mass, bin);
            assert_true(mass[count] == 7 && bin[count] == 7);
            for (size_t i = 0; i < count; i++) {
                const uint64_t distance =
                    isfinite(logits[i]) ? kvf_draw_distance(&settings, logits[best], logits[i])
                                        : KVF_DRAW_FAR;
                if (mass[i] != kvf_draw_mass(distance) || bin[i] != distance >> KVF_DRAW_BIN_SHIFT)
                    fail_msg("%s, case %u: %a under %a weighs %llu, in bin %u", k->name, n,
                             (double)logits[i], (double)logits[best], (unsigned long long)mass[i],
                             bin[i]);
            }
        }
    }
}

/* ---- filter by filter ---- */

#define MANY 300u

typedef struct plain_token {
    float logit;
    uint32_t id;
    uint64_t mass;
} plain_token;

static int by_logit(const void *a, const void *b)
{
    const plain_token *x = a, *y = b;
    if (x->logit != y->logit)
        return x->logit > y->logit ? -1 : 1;
    return x->id < y->id ? -1 : 1;
}

/* The tokens that are left, likeliest first. */
static size_t plain_filters(const kvf_sampling_config *c, const kvf_draw_settings *settings,
                            const float *logits, const bool *seen, plain_token left[MANY])
{
    size_t count = 0;
    for (uint32_t i = 0; i < MANY; i++) {
        float logit = logits[i];
        if (seen[i])
            logit = (float)(logit > 0.0f ? (double)logit / c->repetition_penalty
                                         : (double)logit * c->repetition_penalty);
        if (isfinite(logit))
            left[count++] = (plain_token){.logit = logit, .id = i};
    }
    qsort(left, count, sizeof *left, by_logit);
    if (c->temperature == 0.0)
        return count ? 1 : 0;
    for (size_t i = 0; i < count; i++)
        left[i].mass = kvf_draw_mass(kvf_draw_distance(settings, left[0].logit, left[i].logit));
    if (c->top_k > 0 && c->top_k < count)
        count = c->top_k;
    uint64_t total = 0, mass = 0;
    size_t kept = 0;
    for (size_t i = 0; i < count; i++)
        total += left[i].mass;
    while (c->top_p < 1.0 && (kept == 0 || (mass < kvf_draw_part(settings->share, total))))
        mass += left[kept++].mass;
    count = c->top_p < 1.0 ? kept : count;
    for (kept = 0; kept < count && (double)left[kept].mass >= c->min_p * 0x1p40;)
        kept++;
    return kept;
}

static uint32_t plain_next(const kvf_sampling_config *c, const kvf_draw_settings *settings,
                           const float *logits, bool *seen, uint64_t *random, double *logprob)
{
    plain_token left[MANY];
    const size_t count = plain_filters(c, settings, logits, seen, left);
    if (count == 0)
        return KVF_SAMPLER_NONE;
    uint64_t total = 0, target = 0;
    size_t i = 0;
    for (size_t j = 0; j < count && c->temperature > 0.0; j++)
        total += left[j].mass;
    if (c->temperature > 0.0)
        target = kvf_draw_part(kvf_random_next(random), total);
    for (; c->temperature > 0.0 && target >= left[i].mass; i++)
        target -= left[i].mass;
    seen[left[i].id] = true;
    *logprob = c->temperature > 0.0 ? log((double)left[i].mass / (double)total) : 0.0;
    return left[i].id;
}

TEST(every_draw_is_that_of_plain_filters)
{
    uint64_t random = 41;
    float logits[MANY];
    for (uint32_t n = 0; n < SAMPLING_KINDS * SAMPLING_CASES; n++) {
        const kvf_sampling_config config = sampling_case(n, &random);
        uint64_t plain_state = config.seed;
        bool seen[MANY] = {false};
        const uint32_t prompt[2] = {kvf_random_below(&random, MANY), MANY - 1};
        const kvf_draw_settings settings = kvf_draw_settings_of(&config);
        kvf_sampler *s = sampler_of(&config, MANY);
        kvf_sampler_see(s, 0, prompt, 2);
        seen[prompt[0]] = seen[prompt[1]] = true;
        sampling_logits(logits, MANY, n / SAMPLING_CASES, &random);
        for (uint32_t i = 0; i < 6; i++) {
            double logprob;
            const uint32_t want =
                plain_next(&config, &settings, logits, seen, &plain_state, &logprob);
            const uint32_t got = kvf_sampler_next(s, 0, logits);
            if (got != want)
                fail_msg("case %u, draw %u: token %u, expected %u", n, i, got, want);
            if (got != KVF_SAMPLER_NONE && fabs(kvf_sampler_logprob(s, 0, got) - logprob) > 1e-6)
                fail_msg("case %u, draw %u: ln p %.9g, expected %.9g", n, i,
                         kvf_sampler_logprob(s, 0, got), logprob);
        }
        kvf_sampler_destroy(s);
    }
}

TEST(rows_know_nothing_of_each_other)
{
    float logits[VOCAB];
    kvf_error error;
    kvf_sampler *s;
    make_logits(logits, 1.0);
    assert_int_equal(kvf_sampler_create(VOCAB, 3, &s, &error), KVF_OK);
    kvf_sampling_config config;
    kvf_sampling_config_init(&config);
    config.temperature = 1.0;
    config.repetition_penalty = 1.1;
    for (uint32_t row = 0; row < 3; row++) {
        config.seed = 20 + row % 2;
        assert_int_equal(kvf_sampler_begin(s, row, &config, &error), KVF_OK);
    }
    uint32_t drawn[3][48];
    for (uint32_t i = 0; i < 48; i++)
        for (uint32_t row = 0; row < 3; row++)
            drawn[row][i] = kvf_sampler_next(s, row, logits);
    assert_memory_equal(drawn[0], drawn[2], sizeof drawn[0]);
    assert_memory_not_equal(drawn[0], drawn[1], sizeof drawn[0]);
    kvf_sampler_forget(s, 0);
    const float flat[VOCAB] = {1.0f, 0.95f, 0.0f, 0.0f, 0.0f, 0.0f};
    const uint32_t first = 0;
    kvf_sampling_config_init(&config);
    config.repetition_penalty = 1.2;
    assert_int_equal(kvf_sampler_begin(s, 0, &config, &error), KVF_OK);
    kvf_sampler_see(s, 0, &first, 1);
    assert_int_equal(kvf_sampler_next(s, 0, flat), 1); /* 1 / 1.2 < 0.95 */
    assert_int_equal(kvf_sampler_next(s, 0, flat), 0); /* both were seen now */
    kvf_sampler_destroy(s);
}

TEST(a_loss_is_the_negative_log_of_the_share)
{
    float logits[VOCAB];
    for (uint32_t i = 0; i < VOCAB; i++)
        logits[i] = logf((float)(i + 1)) + 300.0f; /* shares i + 1 of 21, far from overflow */
    /* A logit near 300 has 17 bits after the point: 2^-17 each, in the token's and in the sum. */
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
