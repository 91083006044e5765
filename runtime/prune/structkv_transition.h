/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_PRUNE_STRUCTKV_TRANSITION_H
#define KVF_PRUNE_STRUCTKV_TRANSITION_H

/*
 * At which layer attention stops exploring: StructKV's transition score, from the shape of every
 * layer's attention.
 *
 * Pure functions of numbers: the public ones (kvferry/prune.h) for a calibration that has seen all
 * layers, and the rule for a policy while a prompt comes in. All in double.
 */

#include <stdbool.h>

#include "kvferry/prune.h"

/* The online rule after `layers` layers, whose scores are scaled by what was seen so far: true if
 * the highest score, which is above 0, is followed by two that do not exceed it. */
bool kvf_structkv_is_past(const double *score, uint32_t layers, uint32_t layer_min);

#endif
