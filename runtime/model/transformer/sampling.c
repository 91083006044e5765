/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Sampling without a sort: one pass finds the largest logit, a second one the candidates by a
 * threshold, and only what top-k left of them gets an exp. The likeliest are popped from a heap
 * until top-k or top-p is full.
 *
 * It knows nothing of tokens. Invariant: masses are relative to the largest, so nothing overflows.
 */

#include "sampling.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common/random.h"

/* Masses below e^-60 of the largest are left out: all of 2^32 of them are less than the rounding of
 * a sum that holds the largest. */
#define REACH 60.0

typedef struct candidate {
    double mass; /* exp((logit - largest) / temperature) */
    float logit;
    uint32_t id;
} candidate;

typedef struct sampler_row {
    kvf_sampling_config config;
    uint64_t state;
    uint64_t *seen; /* [words] a bit per token */
} sampler_row;

struct kvf_sampler {
    uint32_t vocab_size;
    size_t words;
    sampler_row *rows;
    uint64_t *seen;  /* [rows, words] */
    float *logits;   /* [vocab_size] after the penalty */
    candidate *heap; /* [vocab_size]; popped ones gather at the end, likeliest last */
};

void kvf_sampling_config_init(kvf_sampling_config *config)
{
    *config = (kvf_sampling_config){.top_p = 1.0, .repetition_penalty = 1.0};
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
    sampler->heap = calloc(vocab_size, sizeof *sampler->heap);
    if (!sampler->rows || !sampler->seen || !sampler->logits || !sampler->heap) {
        kvf_sampler_destroy(sampler);
        return model_out_of_memory(error, vocab_size * sizeof *sampler->heap, "a sampler");
    }
    for (uint32_t i = 0; i < rows; i++) {
        sampler->rows[i].seen = sampler->seen + i * sampler->words;
        kvf_sampling_config_init(&sampler->rows[i].config);
    }
    *out = sampler;
    return KVF_OK;
}

void kvf_sampler_destroy(kvf_sampler *sampler)
{
    if (!sampler)
        return;
    free(sampler->heap);
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
    sampler->rows[row].config = *config;
    sampler->rows[row].state = config->seed;
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
    const double penalty = row->config.repetition_penalty;
    if (penalty == 1.0)
        return logits;
    memcpy(sampler->logits, logits, sampler->vocab_size * sizeof *logits);
    for (size_t word = 0; word < sampler->words; word++)
        for (uint64_t bits = row->seen[word]; bits; bits &= bits - 1) {
            float *at = &sampler->logits[word * 64 + (size_t)__builtin_ctzll(bits)];
            *at = (float)(*at > 0.0f ? (double)*at / penalty : (double)*at * penalty);
        }
    return sampler->logits;
}

static uint32_t largest(const float *logits, uint32_t count)
{
    uint32_t best = KVF_SAMPLER_NONE;
    for (uint32_t i = 0; i < count; i++)
        if (isfinite(logits[i]) && (best == KVF_SAMPLER_NONE || logits[i] > logits[best]))
            best = i;
    return best;
}

static bool before(const candidate *a, const candidate *b)
{
    return a->logit > b->logit || (a->logit == b->logit && a->id < b->id);
}

static void sift_down(candidate *heap, size_t count, size_t at)
{
    for (size_t child = 2 * at + 1; child < count; child = 2 * at + 1) {
        if (child + 1 < count && before(&heap[child + 1], &heap[child]))
            child++;
        if (!before(&heap[child], &heap[at]))
            return;
        candidate swap = heap[at];
        heap[at] = heap[child];
        heap[child] = swap;
        at = child;
    }
}

/* Move the likeliest to the end until there are @p limit of them, or their mass reaches @p enough.
 * @return the index of the first of them; the likeliest is heap[count - 1] */
static size_t pop_likeliest(candidate *heap, size_t count, size_t limit, double enough)
{
    size_t first = count;
    for (size_t i = count / 2; i-- > 0;)
        sift_down(heap, count, i);
    for (double mass = 0.0; first > 0 && count - first < limit && mass < enough;) {
        candidate top = heap[0];
        heap[0] = heap[--first];
        heap[first] = top;
        sift_down(heap, first, 0);
        mass += top.mass;
    }
    return first;
}

/* Tokens in reach of the largest logit, by id. Without top-p, min-p needs nobody's mass but the
 * largest, so it is the reach. */
static size_t find_candidates(kvf_sampler *sampler, const kvf_sampling_config *config,
                              const float *logits, float highest)
{
    double reach = REACH;
    if (config->top_p >= 1.0 && config->min_p > 0.0 && -log(config->min_p) < REACH)
        reach = 1e-9 - log(config->min_p); /* a little more: the mass decides */
    const double lowest = fmax((double)highest - reach * config->temperature, -FLT_MAX);
    const float floor = nextafterf((float)lowest, -INFINITY);
    size_t count = 0;
    for (uint32_t i = 0; i < sampler->vocab_size; i++)
        if (logits[i] >= floor && isfinite(logits[i]))
            sampler->heap[count++] = (candidate){.logit = logits[i], .id = i};
    return count;
}

/* @return the sum, from the last one on */
static double weigh(candidate *heap, size_t first, size_t count, double highest, double temperature)
{
    double sum = 0.0;
    for (size_t i = count; i-- > first;) {
        heap[i].mass = exp(((double)heap[i].logit - highest) / temperature);
        sum += heap[i].mass;
    }
    return sum;
}

/* Top-k, then top-p of what it left, then min-p. Candidates that stay are heap[first] to
 * heap[count - 1], and likeliest last if there was a top-k or a top-p. @return first */
static size_t restrict_candidates(const kvf_sampler *sampler, const kvf_sampling_config *config,
                                  size_t count, double highest)
{
    candidate *heap = sampler->heap;
    size_t first = 0;
    if (config->top_k > 0)
        first = pop_likeliest(heap, count, config->top_k, INFINITY);
    const double enough = config->top_p * weigh(heap, first, count, highest, config->temperature);
    if (config->top_p < 1.0 && config->top_k == 0) {
        first = pop_likeliest(heap, count, count, enough);
    } else if (config->top_p < 1.0) {
        size_t nucleus = count;
        for (double mass = 0.0; nucleus > first && mass < enough;)
            mass += heap[--nucleus].mass;
        first = nucleus;
    }
    size_t kept = count;
    for (size_t i = count; config->min_p > 0.0 && i-- > first;)
        if (heap[i].mass >= config->min_p)
            heap[--kept] = heap[i];
    return config->min_p > 0.0 ? kept : first;
}

static uint32_t draw(kvf_sampler *sampler, sampler_row *row, const float *logits, uint32_t best)
{
    const candidate *heap = sampler->heap;
    const size_t count = find_candidates(sampler, &row->config, logits, logits[best]);
    const size_t first = restrict_candidates(sampler, &row->config, count, (double)logits[best]);
    double mass = 0.0;
    for (size_t i = count; i-- > first;)
        mass += heap[i].mass;
    double target = kvf_random_unit(&row->state) * mass;
    for (size_t i = count; i-- > first;) {
        target -= heap[i].mass;
        if (target < 0.0)
            return heap[i].id;
    }
    return best; /* the last subtraction rounded the other way */
}

uint32_t kvf_sampler_next(kvf_sampler *sampler, uint32_t index, const float *logits)
{
    sampler_row *row = &sampler->rows[index];
    logits = penalize(sampler, row, logits);
    uint32_t id = largest(logits, sampler->vocab_size);
    if (id != KVF_SAMPLER_NONE && row->config.temperature > 0.0)
        id = draw(sampler, row, logits, id);
    if (id != KVF_SAMPLER_NONE)
        kvf_sampler_see(sampler, index, &id, 1);
    return id;
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
