/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Sampling with a heap: the likeliest tokens are popped one by one until top-k or top-p is full, so
 * a large vocabulary is never sorted.
 *
 * It knows nothing of tokens. Invariant: masses are relative to the largest, so nothing overflows.
 */

#include "sampling.h"

#include <math.h>
#include <stdlib.h>

#include "common/random.h"

typedef struct candidate {
    double mass; /* exp((logit - largest) / temperature) */
    uint32_t id;
} candidate;

struct kvf_sampler {
    kvf_sampling_config config;
    uint32_t vocab_size;
    uint64_t state;
    candidate *heap; /* [vocab_size]; popped ones gather at the end, likeliest last */
};

kvf_status kvf_sampler_create(const kvf_sampling_config *config, uint32_t vocab_size,
                              kvf_sampler **out, kvf_error *error)
{
    *out = NULL;
    if (!(config->temperature >= 0.0) || isinf(config->temperature))
        return model_fail(error, KVF_INVALID, "temperature is %g; give 0 (greedy) or more",
                          config->temperature);
    if (!(config->top_p > 0.0 && config->top_p <= 1.0))
        return model_fail(error, KVF_INVALID, "top-p is %g; give a value above 0, up to 1",
                          config->top_p);
    kvf_sampler *sampler = calloc(1, sizeof *sampler);
    if (!sampler)
        return model_out_of_memory(error, sizeof *sampler, "a sampler");
    sampler->config = *config;
    sampler->vocab_size = vocab_size;
    sampler->state = config->seed;
    sampler->heap = calloc(vocab_size, sizeof *sampler->heap);
    if (!sampler->heap) {
        kvf_sampler_destroy(sampler);
        return model_out_of_memory(error, vocab_size * sizeof *sampler->heap, "a sampler");
    }
    *out = sampler;
    return KVF_OK;
}

void kvf_sampler_destroy(kvf_sampler *sampler)
{
    if (!sampler)
        return;
    free(sampler->heap);
    free(sampler);
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
    return a->mass > b->mass || (a->mass == b->mass && a->id < b->id);
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

/* Move the likeliest to the end of the heap until there are @p limit of them, or their mass reaches
 * @p enough. @return how many; the likeliest is heap[count - 1] */
static size_t pop_likeliest(candidate *heap, size_t count, size_t limit, double enough)
{
    size_t popped = 0;
    for (double mass = 0.0; popped < limit && popped < count && mass < enough; popped++) {
        size_t last = count - 1 - popped;
        candidate top = heap[0];
        heap[0] = heap[last];
        heap[last] = top;
        sift_down(heap, last, 0);
        mass += top.mass;
    }
    return popped;
}

/* Apply top-k, then top-p to what it left. @return the index of the first candidate that stays */
static size_t restrict_candidates(const kvf_sampler *sampler, size_t count, double total)
{
    const kvf_sampling_config *config = &sampler->config;
    candidate *heap = sampler->heap;
    if (config->top_k == 0 && config->top_p >= 1.0)
        return 0;
    for (size_t i = count / 2; i-- > 0;)
        sift_down(heap, count, i);
    if (config->top_k == 0)
        return count - pop_likeliest(heap, count, count, config->top_p * total);
    size_t first = count - pop_likeliest(heap, count, config->top_k, INFINITY);
    double mass = 0.0, kept = 0.0;
    for (size_t i = count; i-- > first;)
        mass += heap[i].mass;
    size_t nucleus = count;
    while (nucleus > first && kept < config->top_p * mass)
        kept += heap[--nucleus].mass;
    return nucleus;
}

uint32_t kvf_sampler_next(kvf_sampler *sampler, const float *logits)
{
    uint32_t best = largest(logits, sampler->vocab_size);
    if (sampler->config.temperature == 0.0 || best == KVF_SAMPLER_NONE)
        return best;
    candidate *heap = sampler->heap;
    size_t count = 0;
    double total = 0.0;
    for (uint32_t i = 0; i < sampler->vocab_size; i++) {
        if (!isfinite(logits[i]))
            continue;
        double distance = (double)logits[i] - (double)logits[best];
        heap[count] = (candidate){.mass = exp(distance / sampler->config.temperature), .id = i};
        total += heap[count++].mass;
    }
    size_t first = restrict_candidates(sampler, count, total);
    double mass = 0.0;
    for (size_t i = count; i-- > first;)
        mass += heap[i].mass;
    double target = kvf_random_unit(&sampler->state) * mass;
    for (size_t i = count; i-- > first;) {
        target -= heap[i].mass;
        if (target < 0.0)
            return heap[i].id;
    }
    return best; /* the last subtraction rounded the other way */
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
