/* SPDX-License-Identifier: Apache-2.0 */

/* See experts.h. */

#include "experts.h"

#include <math.h>
#include <string.h>

/* Insertion into the best so far: they are few, and most experts are no better than the last. */
static void choose_best(const float *logits, uint32_t experts, uint32_t used, uint32_t *chosen)
{
    for (uint32_t expert = 0; expert < experts; expert++) {
        uint32_t at = expert < used ? expert : used;
        for (; at > 0 && logits[expert] > logits[chosen[at - 1]]; at--)
            if (at < used)
                chosen[at] = chosen[at - 1];
        if (at < used)
            chosen[at] = expert;
    }
}

void kvf_experts_choose(const kvf_model_config *model, const float *logits, uint32_t *chosen,
                        float *shares)
{
    const uint32_t used = model->experts_used;
    choose_best(logits, model->experts, used, chosen);
    const float largest = logits[chosen[0]];
    float sum = 0.0f;
    for (uint32_t i = 0; i < used; i++) {
        shares[i] = expf(logits[chosen[i]] - largest);
        sum += model->experts_normed ? shares[i] : 0.0f;
    }
    for (uint32_t i = 0; i < model->experts && !model->experts_normed; i++)
        sum += expf(logits[i] - largest);
    for (uint32_t i = 0; i < used; i++)
        shares[i] /= sum;
}

void kvf_experts_group(const uint32_t *chosen, uint32_t count, uint32_t experts, uint32_t *places,
                       uint32_t *ends, kvf_linear_groups *groups)
{
    uint32_t row = 0;
    memset(ends, 0, experts * sizeof *ends);
    for (uint32_t i = 0; i < count; i++)
        ends[chosen[i]]++;
    groups->count = 0;
    for (uint32_t expert = 0; expert < experts; expert++) {
        const uint32_t rows = ends[expert];
        ends[expert] = row; /* where its next row goes */
        if (rows == 0)
            continue;
        groups->first[groups->count] = row;
        groups->matrix[groups->count++] = expert;
        row += rows;
    }
    groups->first[groups->count] = row;
    for (uint32_t i = 0; i < count; i++)
        places[i] = ends[chosen[i]]++;
}
