/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_MODEL_DRAW_SIMD_H
#define KVF_MODEL_DRAW_SIMD_H

/*
 * Passes over all tokens of a row of logits, once per instruction set: what a draw spends its time
 * on.
 *
 * It knows numbers, no settings beyond draw_mass.h. Invariant: every instruction set gives the bits
 * of draw_mass.h.
 */

#include "draw_mass.h"

#include <stddef.h>

/** The bin of tokens that have no mass. */
#define KVF_DRAW_NO_BIN KVF_DRAW_BINS

typedef struct kvf_draw_kernels {
    const char *name;
    /** The first of the largest finite logits; @p count if there is none. */
    size_t (*largest)(const float *logits, size_t count);
    /** Masses, and distances in bins; logits that are not finite have none. */
    void (*weigh)(const kvf_draw_settings *settings, float highest, const float *logits,
                  size_t count, uint64_t *mass, uint16_t *bin);
} kvf_draw_kernels;

/** The best that the CPU has and @p isa_mask (kvf_isa) allows. Never NULL. */
const kvf_draw_kernels *kvf_draw_kernels_choose(uint32_t isa_mask);

#endif
