/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_PRUNE_STRUCTKV_TRANSITION_H
#define KVF_PRUNE_STRUCTKV_TRANSITION_H

/*
 * At which layer attention stops exploring: StructKV's transition score, from the shape of every
 * layer's attention.
 *
 * Pure functions of numbers, for the policy while a prompt comes in, and for a calibration that has
 * seen all layers. With d(M) the change of M against the layer before, scaled to [0, 1] by the
 * least and the greatest change of the layers given,
 *
 *     score[l] = w[0] d(-entropy) + w[1] d(sparsity) + w[2] d(variance),  l >= 1; score[0] = 0.
 *
 * A measure that changes by the same amount everywhere says nothing: its d is 0. All in double.
 */

#include <stdbool.h>

#include "kvferry/prune.h"

/* Of one layer, means over its query heads. */
typedef struct kvf_structkv_measures {
    double entropy;
    double sparsity; /* mass on the top tokens */
    double variance;
} kvf_structkv_measures;

kvf_structkv_measures kvf_structkv_measure(const kvf_prune_profile *profile, uint32_t heads);

/* score [layers], from measures [layers]. */
void kvf_structkv_transition(const float weights[3], const kvf_structkv_measures *measures,
                             uint32_t layers, double *score);

/* The calibrated pivot: the layer behind the highest score (ties: the lower layer), at most
 * layer_max; layer_max if no score is above 0. Scores of layers below layer_min do not compete. */
uint32_t kvf_structkv_pivot(const double *score, uint32_t layers, uint32_t layer_min,
                            uint32_t layer_max);

/* The online rule after `layers` layers, whose scores are scaled by what was seen so far: true if
 * the highest score, which is above 0, is followed by two that do not exceed it. */
bool kvf_structkv_is_past(const double *score, uint32_t layers, uint32_t layer_min);

#endif
