/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_MODEL_MATMUL_H
#define KVF_MODEL_MATMUL_H

/*
 * The part of oneDNN that the runner uses, the same for versions 2 and 3.
 *
 * It knows dense matrices in memory, not models. Invariant: every product runs on the calling
 * thread alone. oneDNN would start a team of its own otherwise, and its results would depend on
 * the size of that team.
 */

#include <kvferry/kvferry.h>
#include <stdbool.h>

/** C[rows, outputs] = A[rows, inputs] B[outputs, inputs]^T; strides are in elements. */
typedef struct kvf_matmul_shape {
    uint32_t rows, outputs, inputs;
    uint32_t a_stride, b_stride, c_stride;
} kvf_matmul_shape;

/**
 * Whether products in bf16 are faster here than in fp32, and oneDNN was seen to do them right: with
 * AMX, and with AVX-512 on AMD. Elsewhere an instruction of AVX512_BF16 takes two cycles for 32
 * products (measured on a Xeon whose AMX is hidden), in which fp32 has 64.
 */
bool kvf_matmul_bf16_native(void);

/** "oneDNN 2.6.3" of the library in use. @p text [capacity] */
void kvf_matmul_describe(char *text, size_t capacity);

/** One handle per thread that multiplies in bf16. */
typedef struct kvf_matmul kvf_matmul;

KVF_CHECKED kvf_status kvf_matmul_create(kvf_matmul **out);
void kvf_matmul_destroy(kvf_matmul *matmul);

/** A and B in bf16, C in fp32, sums in fp32. @return false if oneDNN failed (out of memory) */
KVF_CHECKED bool kvf_matmul_bf16(kvf_matmul *matmul, const kvf_matmul_shape *shape,
                                 const uint16_t *a, const uint16_t *b, float *c);

#endif
