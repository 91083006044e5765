/* SPDX-License-Identifier: Apache-2.0 */

/*
 * StructKV's transition score, section 3.3 of the paper (equations 4 to 9).
 *
 * Knows no tokens. Sums go over heads and layers in ascending order, so that the same profile gives
 * the same bits.
 */

#include <math.h>
#include <stddef.h>

#include "structkv_transition.h"

#define MEASURES 3u

/* In the direction that a transition goes: entropy falls, the others rise. */
static double rising(const kvf_structkv_measures *m, uint32_t which)
{
    return which == 0 ? -m->entropy : which == 1 ? m->sparsity : m->variance;
}

kvf_structkv_measures kvf_structkv_measure(const kvf_prune_profile *profile, uint32_t heads)
{
    kvf_structkv_measures mean = {0};
    for (uint32_t h = 0; h < heads; h++) {
        mean.entropy += (double)profile[h].entropy;
        mean.sparsity += (double)profile[h].mass;
        mean.variance += (double)profile[h].variance;
    }
    if (heads) {
        mean.entropy /= heads;
        mean.sparsity /= heads;
        mean.variance /= heads;
    }
    return mean;
}

void kvf_structkv_transition(const float weights[3], const kvf_structkv_measures *measures,
                             uint32_t layers, double *score)
{
    for (uint32_t l = 0; l < layers; l++)
        score[l] = 0.0;
    for (uint32_t which = 0; which < MEASURES; which++) {
        double least = INFINITY, most = -INFINITY;
        for (uint32_t l = 1; l < layers; l++) {
            const double change = rising(&measures[l], which) - rising(&measures[l - 1], which);
            least = fmin(least, change);
            most = fmax(most, change);
        }
        if (!(most > least))
            continue;
        for (uint32_t l = 1; l < layers; l++) {
            const double change = rising(&measures[l], which) - rising(&measures[l - 1], which);
            score[l] += (double)weights[which] * ((change - least) / (most - least));
        }
    }
}

/* Of the layers from layer_min on; 0 if no score is above 0. */
static uint32_t highest(const double *score, uint32_t layers, uint32_t layer_min)
{
    uint32_t best = 0;
    double top = 0.0;
    for (uint32_t l = layer_min ? layer_min : 1; l < layers; l++) {
        if (score[l] > top) {
            top = score[l];
            best = l;
        }
    }
    return best;
}

uint32_t kvf_structkv_pivot(const double *score, uint32_t layers, uint32_t layer_min,
                            uint32_t layer_max)
{
    const uint32_t best = highest(score, layers, layer_min);
    return best && best < layer_max ? best + 1 : layer_max;
}

bool kvf_structkv_is_past(const double *score, uint32_t layers, uint32_t layer_min)
{
    const uint32_t best = highest(score, layers, layer_min);
    return best && layers >= best + 3;
}
