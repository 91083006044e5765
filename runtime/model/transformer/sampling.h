/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_MODEL_SAMPLING_H
#define KVF_MODEL_SAMPLING_H

/*
 * From logits to a token: greedy, or drawn after temperature, top-k and top-p, in this order; and
 * what a given token costs.
 *
 * It knows numbers, not models. Invariant: the same seed and the same logits give the same tokens;
 * ties go to the lower id.
 */

#include "model_memory.h"

typedef struct kvf_sampling_config {
    double temperature; /**< 0 = greedy; otherwise logits are divided by it */
    double top_p;       /**< smallest set of likeliest tokens with this mass; 1 = all */
    uint32_t top_k;     /**< at most so many likeliest tokens; 0 = all */
    uint64_t seed;
} kvf_sampling_config;

typedef struct kvf_sampler kvf_sampler;

/** What kvf_sampler_next returns when no logit is a finite number. */
#define KVF_SAMPLER_NONE UINT32_MAX

/** @return KVF_OK; KVF_INVALID naming the setting; KVF_OUT_OF_MEMORY */
KVF_CHECKED kvf_status kvf_sampler_create(const kvf_sampling_config *config, uint32_t vocab_size,
                                          kvf_sampler **out, kvf_error *error);
void kvf_sampler_destroy(kvf_sampler *sampler);

/** Choose a token. logits [vocab_size]. Memory: allocates nothing. */
uint32_t kvf_sampler_next(kvf_sampler *sampler, const float *logits);

/** What a token costs: -ln of its probability, in nats. NaN where the logits give it none: they
 * hold a NaN or +infinity. logits [vocab_size]; @p id < vocab_size. */
double kvf_logits_loss(const float *logits, uint32_t vocab_size, uint32_t id);

#endif
