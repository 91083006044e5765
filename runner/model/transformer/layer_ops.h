/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_MODEL_LAYER_OPS_H
#define KVF_MODEL_LAYER_OPS_H

/*
 * Operations of a transformer layer on one row, besides matrix products and attention.
 *
 * It knows vectors, not models or streams. Invariant: a row's result depends on that row alone, and
 * sums are formed in one fixed order.
 */

#include "model_memory.h"

/** The sum of a[i] b[i], i < count. */
double kvf_dot(const float *a, const float *b, size_t count);

/** y = x / sqrt(mean(x^2) + eps) * weight; y may be x. */
void kvf_rms_norm(const float *x, const float *weight, size_t count, double eps, float *y);

/** cosine[i], sine[i] = scaling x cos, sin of position x inv_freq[i], i < count. */
void kvf_rope_angles(const float *inv_freq, size_t count, float scaling, uint32_t position,
                     float *cosine, float *sine);

/** Rotate channel i with channel i + count, i < count, in place. x [2 count] */
void kvf_rope_rotate(float *x, size_t count, const float *cosine, const float *sine);

/** y[i] = silu(gate[i]) up[i]; y may be gate or up. The specification for devices. */
void kvf_swiglu(const float *gate, const float *up, size_t count, float *y);

/** Elements of @p dtype to and from fp32; narrowing rounds to nearest even. */
void kvf_numbers_widen(const void *from, kvf_dtype dtype, size_t count, float *to);
void kvf_numbers_narrow(const float *from, kvf_dtype dtype, size_t count, void *to);

#endif
