/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Sampling without a sort: one pass finds the largest logit, a second one the mass and the bin of
 * every token. The wanted ones (top-k, top-p, a draw) are found by the sums of bins of equal
 * likelihood; only the tokens of one bin are put in order.
 *
 * It knows nothing of tokens. Invariant: all sums are of integers, so every machine draws the same
 * token from the same logits.
 */

#include "sampling.h"
#include "common/cpu_isa.h"
#include "draw_mass.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define LOG2_E 1.4426950408889634

/* A token of the bin that is put in order. */
typedef struct candidate {
    uint64_t key; /* kvf_draw_key */
    uint64_t weight;
} candidate;

typedef struct sampler_row {
    kvf_draw_settings settings;
    uint64_t *seen; /* [words] a bit per token */
} sampler_row;

struct kvf_sampler {
    uint32_t vocab_size;
    size_t words;
    sampler_row *rows;
    uint64_t *seen;        /* [rows, words] */
    float *logits;         /* [vocab_size] after the penalty */
    candidate *candidates; /* [vocab_size] */
    uint64_t *mass;        /* [vocab_size] what the last draw was from */
    uint64_t total;        /* sum of mass */
    uint16_t *bin;         /* [vocab_size] KVF_DRAW_NO_BIN = not wanted */
    const kvf_draw_kernels *kernels;
};

extern const kvf_draw_kernels kvf_draw_kernels_plain, kvf_draw_kernels_avx2,
    kvf_draw_kernels_avx512;

const kvf_draw_kernels *kvf_draw_kernels_choose(uint32_t isa_mask)
{
    const uint32_t usable = kvf_cpu_has() & KVF_ISA_LIMIT & isa_mask;
    (void)usable;
#ifdef KVF_HAVE_AVX512
    if (usable & KVF_ISA_AVX512)
        return &kvf_draw_kernels_avx512;
#endif
#ifdef KVF_HAVE_AVX2
    if (usable & KVF_ISA_AVX2)
        return &kvf_draw_kernels_avx2;
#endif
    return &kvf_draw_kernels_plain;
}

void kvf_sampling_config_init(kvf_sampling_config *config)
{
    *config = (kvf_sampling_config){.top_p = 1.0, .repetition_penalty = 1.0};
}

kvf_draw_settings kvf_draw_settings_of(const kvf_sampling_config *config)
{
    const double share = fmax(1.0, config->top_p * 0x1p64);
    kvf_draw_settings s = {
        .state = config->seed,
        .penalty = config->repetition_penalty,
        .share = config->top_p < 1.0 ? (uint64_t)share : 0,
        .mass_min = (uint64_t)fmax(1.0, ceil(config->min_p * (double)KVF_MASS_ONE)),
        .top_k = config->top_k,
        .is_greedy = config->temperature == 0.0,
    };
    int exponent = 0;
    if (!s.is_greedy)
        s.scale =
            (uint32_t)(frexp(fmin(LOG2_E / config->temperature, DBL_MAX), &exponent) * 0x1p32);
    s.exponent = exponent - 32;
    return s;
}

kvf_status kvf_sampler_create(uint32_t vocab_size, uint32_t rows, kvf_sampler **out,
                              kvf_error *error)
{
    *out = NULL;
    kvf_sampler *sampler = calloc(1, sizeof *sampler);
    if (!sampler)
        return model_out_of_memory(error, sizeof *sampler, "a sampler");
    sampler->vocab_size = vocab_size;
    sampler->words = ((size_t)vocab_size + 63) / 64;
    sampler->rows = calloc(rows, sizeof *sampler->rows);
    sampler->seen = calloc(rows * sampler->words, sizeof *sampler->seen);
    sampler->logits = calloc(vocab_size, sizeof *sampler->logits);
    sampler->candidates = calloc(vocab_size, sizeof *sampler->candidates);
    sampler->mass = calloc(vocab_size, sizeof *sampler->mass);
    sampler->bin = calloc(vocab_size, sizeof *sampler->bin);
    sampler->kernels = kvf_draw_kernels_choose(KVF_ISA_ALL);
    if (!sampler->rows || !sampler->seen || !sampler->logits || !sampler->candidates ||
        !sampler->mass || !sampler->bin) {
        kvf_sampler_destroy(sampler);
        return model_out_of_memory(error, vocab_size * sizeof *sampler->candidates, "a sampler");
    }
    kvf_sampling_config greedy;
    kvf_sampling_config_init(&greedy);
    for (uint32_t i = 0; i < rows; i++) {
        sampler->rows[i].seen = sampler->seen + i * sampler->words;
        sampler->rows[i].settings = kvf_draw_settings_of(&greedy);
    }
    *out = sampler;
    return KVF_OK;
}

void kvf_sampler_destroy(kvf_sampler *sampler)
{
    if (!sampler)
        return;
    free(sampler->bin);
    free(sampler->mass);
    free(sampler->candidates);
    free(sampler->logits);
    free(sampler->seen);
    free(sampler->rows);
    free(sampler);
}

kvf_status kvf_sampling_config_check(const kvf_sampling_config *config, kvf_error *error)
{
    if (!(config->temperature >= 0.0) || isinf(config->temperature))
        return model_fail(error, KVF_INVALID, "temperature is %g; give 0 (greedy) or more",
                          config->temperature);
    if (!(config->top_p > 0.0 && config->top_p <= 1.0))
        return model_fail(error, KVF_INVALID, "top-p is %g; give a value above 0, up to 1",
                          config->top_p);
    if (!(config->min_p >= 0.0 && config->min_p <= 1.0))
        return model_fail(error, KVF_INVALID, "min-p is %g; give a value from 0 to 1",
                          config->min_p);
    if (!(config->repetition_penalty > 0.0) || isinf(config->repetition_penalty))
        return model_fail(error, KVF_INVALID,
                          "repetition-penalty is %g; give a value above 0, or 1 for none",
                          config->repetition_penalty);
    return KVF_OK;
}

kvf_status kvf_sampler_begin(kvf_sampler *sampler, uint32_t row, const kvf_sampling_config *config,
                             kvf_error *error)
{
    KVF_TRY(kvf_sampling_config_check(config, error));
    sampler->rows[row].settings = kvf_draw_settings_of(config);
    kvf_sampler_forget(sampler, row);
    return KVF_OK;
}

void kvf_sampler_forget(kvf_sampler *sampler, uint32_t row)
{
    memset(sampler->rows[row].seen, 0, sampler->words * sizeof *sampler->seen);
}

void kvf_sampler_see(kvf_sampler *sampler, uint32_t row, const uint32_t *ids, size_t count)
{
    for (size_t i = 0; i < count; i++)
        sampler->rows[row].seen[ids[i] / 64] |= UINT64_C(1) << ids[i] % 64;
}

/* The logits as the row's penalty leaves them. */
static const float *penalize(kvf_sampler *sampler, const sampler_row *row, const float *logits)
{
    const double penalty = row->settings.penalty;
    if (penalty == 1.0)
        return logits;
    memcpy(sampler->logits, logits, sampler->vocab_size * sizeof *logits);
    for (size_t word = 0; word < sampler->words; word++)
        for (uint64_t bits = row->seen[word]; bits; bits &= bits - 1) {
            float *at = &sampler->logits[word * 64 + (size_t)__builtin_ctzll(bits)];
            *at = kvf_draw_penalize(*at, penalty);
        }
    return sampler->logits;
}

static void swap(candidate *a, candidate *b)
{
    const candidate c = *a;
    *a = *b;
    *b = c;
}

static void sift_down(candidate *heap, size_t count, size_t at)
{
    for (size_t child = 2 * at + 1; child < count; child = 2 * at + 1) {
        if (child + 1 < count && heap[child + 1].key < heap[child].key)
            child++;
        if (heap[at].key <= heap[child].key)
            return;
        swap(&heap[at], &heap[child]);
        at = child;
    }
}

/* Likeliest first, the first candidate with which weights are @p wanted. @return its key */
static uint64_t pop_until(candidate *heap, size_t count, uint64_t wanted)
{
    for (size_t i = count / 2; i-- > 0;)
        sift_down(heap, count, i);
    while (count > 1 && heap[0].weight < wanted) {
        wanted -= heap[0].weight;
        swap(&heap[0], &heap[--count]);
        sift_down(heap, count, 0);
    }
    return heap[0].key;
}

/* How many of the tokens are wanted, by bin, or what they weigh. Two neighbours are
 * often in one bin, so they have sums of their own. @return of all */
static uint64_t sum_bins(const kvf_sampler *sampler, kvf_draw_goal goal, uint64_t *bins)
{
    uint64_t sums[2][KVF_DRAW_BINS + 1] = {{0}}, total = 0;
    for (uint32_t i = 0; i < sampler->vocab_size; i++)
        sums[i % 2][sampler->bin[i]] += goal == KVF_DRAW_COUNT ? 1 : sampler->mass[i];
    for (size_t b = 0; b < KVF_DRAW_BINS; b++)
        total += bins[b] = sums[0][b] + sums[1][b];
    return total;
}

/* @return the key of the last token that is wanted; UINT64_MAX if all are */
static uint64_t reach(kvf_sampler *sampler, kvf_draw_settings *settings, const float *logits,
                      kvf_draw_goal goal)
{
    uint64_t bins[KVF_DRAW_BINS];
    const uint64_t total = sum_bins(sampler, goal, bins);
    if (goal == KVF_DRAW_COUNT && settings->top_k >= total)
        return UINT64_MAX;
    if (goal == KVF_DRAW_TOKEN)
        sampler->total = total;
    const uint64_t random = goal == KVF_DRAW_TOKEN ? kvf_random_next(&settings->state) : 0;
    uint64_t wanted = kvf_draw_wanted(settings, goal, total, random);
    size_t bin = 0, held = 0;
    while (bins[bin] < wanted)
        wanted -= bins[bin++];
    for (uint32_t i = 0; i < sampler->vocab_size; i++)
        if (sampler->bin[i] == bin)
            sampler->candidates[held++] =
                (candidate){.key = kvf_draw_key(logits[i], i),
                            .weight = goal == KVF_DRAW_COUNT ? 1 : sampler->mass[i]};
    return pop_until(sampler->candidates, held, wanted);
}

/* Only tokens up to a key are wanted, with masses from @p mass_min on. */
static void keep(kvf_sampler *sampler, const float *logits, uint64_t last, uint64_t mass_min)
{
    if (last == UINT64_MAX && mass_min <= 1)
        return;
    for (uint32_t i = 0; i < sampler->vocab_size; i++)
        if (kvf_draw_key(logits[i], i) > last || sampler->mass[i] < mass_min) {
            sampler->mass[i] = 0;
            sampler->bin[i] = KVF_DRAW_NO_BIN;
        }
}

static uint32_t draw(kvf_sampler *sampler, sampler_row *row, const float *logits, float highest)
{
    kvf_draw_settings *s = &row->settings;
    sampler->kernels->weigh(s, highest, logits, sampler->vocab_size, sampler->mass, sampler->bin);
    if (s->top_k > 0)
        keep(sampler, logits, reach(sampler, s, logits, KVF_DRAW_COUNT), 1);
    if (s->share > 0)
        keep(sampler, logits, reach(sampler, s, logits, KVF_DRAW_SHARE), 1);
    keep(sampler, logits, UINT64_MAX, s->mass_min);
    return (uint32_t)reach(sampler, s, logits, KVF_DRAW_TOKEN);
}

uint32_t kvf_sampler_next(kvf_sampler *sampler, uint32_t index, const float *logits)
{
    sampler_row *row = &sampler->rows[index];
    logits = penalize(sampler, row, logits);
    const size_t best = sampler->kernels->largest(logits, sampler->vocab_size);
    uint32_t id = best < sampler->vocab_size ? (uint32_t)best : KVF_SAMPLER_NONE;
    if (id != KVF_SAMPLER_NONE && !row->settings.is_greedy)
        id = draw(sampler, row, logits, logits[best]);
    if (id != KVF_SAMPLER_NONE)
        kvf_sampler_see(sampler, index, &id, 1);
    return id;
}

double kvf_sampler_logprob(const kvf_sampler *sampler, uint32_t row, uint32_t id)
{
    if (sampler->rows[row].settings.is_greedy)
        return 0.0;
    return log((double)sampler->mass[id] / (double)sampler->total);
}

double kvf_logits_loss(const float *logits, uint32_t vocab_size, uint32_t id)
{
    float highest = -INFINITY;
    for (uint32_t i = 0; i < vocab_size; i++)
        highest = logits[i] > highest ? logits[i] : highest;
    double sum = 0.0;
    for (uint32_t i = 0; i < vocab_size; i++)
        sum += (double)expf(logits[i] - highest);
    return log(sum) - ((double)logits[id] - (double)highest);
}
