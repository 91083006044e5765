/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TESTS_MODEL_SAMPLING_CASES_H
#define KVF_TESTS_MODEL_SAMPLING_CASES_H

/*
 * Logits and settings for tests of sampling, on the host and on a GPU. All follow from the numbers
 * that are given.
 */

#include "sampling.h"

/** Kinds of logits: from harmless to ties, huge distances, no finite logit, everything equal. */
#define SAMPLING_KINDS 5u
void sampling_logits(float *logits, uint32_t count, uint32_t kind, uint64_t *random);

/** Settings with and without every filter. */
#define SAMPLING_CASES 625u
kvf_sampling_config sampling_case(uint32_t n, uint64_t *random);

#endif
