/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TESTS_RUNTIME_LOSSLESS_H
#define KVF_TESTS_RUNTIME_LOSSLESS_H

/*
 * Tokens that quantization does not change: with them a sequence, which quantizes what leaves its
 * window, has the bits of blocks, which quantize all.
 *
 * Such a key is, rotated, a whole number of units in every channel, one of them 127, and a unit is
 * a power of two; of heads of 64 the way back is then exact. What quantization made of any token
 * would not do: it is often quantized to something else again, because a largest code of 126 asks
 * for a smaller unit, and because keys are rounded on the way back.
 */

#include "harness.h"

/* For head_dim 64: every key and value becomes one near it. Fails the test if quantization changes
 * any. */
void lossless_make(test_tokens *t, kvf_pages pages);

#endif
