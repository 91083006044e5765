/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_MODEL_EXPERTS_H
#define KVF_MODEL_EXPERTS_H

/*
 * Which experts a token goes through, and with which shares; tokens by expert.
 *
 * It knows numbers, not layers or streams. Invariant: a token's experts and shares depend on its
 * own logits alone.
 */

#include "linear.h"
#include "model_config.h"

/**
 * The model's `experts_used` likeliest experts, likeliest first, of equal ones the lower first, and
 * their shares: softmax over all experts in fp32, of those chosen alone where the model is
 * `normed`.
 *
 * @param logits  [experts]
 * @param chosen  [experts_used] receives numbers of experts, each once even where logits are NaN
 * @param shares  [experts_used]
 */
void kvf_experts_choose(const kvf_model_config *model, const float *logits, uint32_t *chosen,
                        float *shares);

/**
 * Put choices into groups, one for every expert that has any, in order of experts and of choices.
 *
 * @param chosen  [count] < experts
 * @param places  [count] receives the row of each choice among the groups' rows
 * @param ends    [experts] scratch
 * @param groups  its arrays have room for `experts` groups
 */
void kvf_experts_group(const uint32_t *chosen, uint32_t count, uint32_t experts, uint32_t *places,
                       uint32_t *ends, kvf_linear_groups *groups);

#endif
