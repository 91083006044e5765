/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_MODEL_SAMPLING_H
#define KVF_MODEL_SAMPLING_H

/*
 * From logits to a token: greedy, or drawn, after repetition penalty, temperature, top-k, top-p and
 * min-p, in this order; and what a given token costs.
 *
 * A sampler has rows, one per answer that is on its way: each with settings, draws and tokens seen
 * of its own. It knows numbers, not models. Invariant: what a row gives depends on its settings and
 * on what it was given; ties go to the lower id.
 */

#include "draw_mass.h"
#include "model_memory.h"

typedef struct kvf_sampling_config {
    double temperature; /**< 0 = greedy; otherwise logits are divided by it */
    double top_p;       /**< smallest set of likeliest tokens with this mass; 1 = all */
    double min_p;       /**< no token below this share of the likeliest one's mass; 0 = all */
    double repetition_penalty; /**< of tokens seen: positive logits are divided by it, others
                                  multiplied; 1 = none */
    uint32_t top_k;            /**< at most so many likeliest tokens; 0 = all */
    uint64_t seed;
} kvf_sampling_config;

typedef struct kvf_sampler kvf_sampler;

/** kvf_sampler_next returns it when no logit is a finite number. */
#define KVF_SAMPLER_NONE UINT32_MAX

/** Greedy, nothing cut. */
void kvf_sampling_config_init(kvf_sampling_config *config);

/** The settings of a row's draws (draw_mass.h), from the first on. */
kvf_draw_settings kvf_draw_settings_of(const kvf_sampling_config *config);

/** @return KVF_OK; KVF_INVALID naming the setting */
KVF_CHECKED kvf_status kvf_sampling_config_check(const kvf_sampling_config *config,
                                                 kvf_error *error);

/** Every row is greedy until it begins. @return KVF_OK; KVF_OUT_OF_MEMORY */
KVF_CHECKED kvf_status kvf_sampler_create(uint32_t vocab_size, uint32_t rows, kvf_sampler **out,
                                          kvf_error *error);
void kvf_sampler_destroy(kvf_sampler *sampler);

/** A new answer: the draws of the seed from the first on, no token seen.
 * @return KVF_OK; KVF_INVALID naming the setting, with the row as it was */
KVF_CHECKED kvf_status kvf_sampler_begin(kvf_sampler *sampler, uint32_t row,
                                         const kvf_sampling_config *config, kvf_error *error);

/** Tokens of the prompt, for the repetition penalty; what was drawn is seen by itself.
 * ids [count] < vocab_size */
void kvf_sampler_see(kvf_sampler *sampler, uint32_t row, const uint32_t *ids, size_t count);
/** No token was seen; the draws go on. */
void kvf_sampler_forget(kvf_sampler *sampler, uint32_t row);

/** Choose a token. logits [vocab_size]. Memory: allocates nothing. */
uint32_t kvf_sampler_next(kvf_sampler *sampler, uint32_t row, const float *logits);

/** ln of the probability with which the row's last call of kvf_sampler_next drew its token @p id:
 * of the logits after penalty, temperature and all cuts. 0 of a greedy row. Valid until the next
 * call, of any row. */
double kvf_sampler_logprob(const kvf_sampler *sampler, uint32_t row, uint32_t id);

/** A token's loss: -ln of its probability, in nats. NaN where the logits give it none: they
 * hold a NaN or +infinity. logits [vocab_size]; @p id < vocab_size. */
double kvf_logits_loss(const float *logits, uint32_t vocab_size, uint32_t id);

#endif
