/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Rotated queries in int8 on the GPU.
 *
 * Knows nothing of heads or lists. Half a warp is one row, a block is 8 rows; rows beyond the last
 * repeat it and are not stored. Bound: a launch, for the few rows of a step. Exactness: the bits of
 * rotate_ref.c.
 */

#include <float.h>

#include "cuda_kernels.h"

#include "score/codes.cuh"

#define THREADS 128u
#define ROWS    (THREADS / KVF_CODE_LANES)

template <typename T>
static __global__ void __launch_bounds__(THREADS)
    rotate_rows(const __grid_constant__ kvf_rotate_args a)
{
    const uint32_t words = a.head_dim / KVF_CODE_LANES, lane = threadIdx.x % KVF_CODE_LANES;
    const uint32_t mine = blockIdx.x * ROWS + threadIdx.x / KVF_CODE_LANES;
    const size_t first = (size_t)kvf_min_u32(mine, a.rows - 1) * a.head_dim;
    float x[KVF_CODE_WORDS];
    uint32_t top = 0; /* bits, whose order is that of magnitudes; NaN is above all numbers */
    kvf_wait_for_earlier();
    kvf_let_next_start();
    kvf_code_load(x, (const T *)a.q + first, words);
    kvf_code_rotate_lanes(x, words);
#pragma unroll
    for (uint32_t k = 0; k < KVF_CODE_WORDS; k++)
        if (k < words)
            top = kvf_max_u32(top, kvf_float_bits(x[k]) & 0x7fffffffu);
#pragma unroll
    for (int step = 1; step < (int)KVF_CODE_LANES; step *= 2)
        top = kvf_max_u32(top, __shfl_xor_sync(KVF_FULL_WARP, top, step));
    const float largest = kvf_bits_float(top), unit = __fdiv_rn(127.0f, largest);
    const bool is_flat = !(largest <= FLT_MAX && unit <= FLT_MAX);
    if (mine >= a.rows)
        return;
#pragma unroll
    for (uint32_t k = 0; k < KVF_CODE_WORDS; k++)
        if (k < words) {
            /* Adding 1.5 * 2^23 rounds to an integer, in the low bits. */
            const float y = __fadd_rn(__fmul_rn(x[k], unit), 0x1.8p23f);
            a.y[first + k * KVF_CODE_LANES + lane] = is_flat ? 0 : (int8_t)kvf_float_bits(y);
        }
    const float scale = __fmul_rn(__fdiv_rn(largest, 127.0f), a.scale);
    if (lane == 0)
        a.y_scale[mine] =
            is_flat ? 0.0f : (scale < KVF_QUERY_SCALE_MAX ? scale : KVF_QUERY_SCALE_MAX);
}

extern "C" int kvf_rotate_cuda(const void *args, uint32_t tasks, void *stream)
{
    const kvf_rotate_args *a = (const kvf_rotate_args *)args;
    const dim3 grid(kvf_div_ceil_u32(a->rows, ROWS)), block(THREADS);
    (void)tasks;
    if (a->rows == 0)
        return cudaSuccess;
    switch (a->dtype) {
    case KVF_BF16:
        return kvf_cuda_launch_early<rotate_rows<kvf_bf16>>(grid, block, 0, (cudaStream_t)stream,
                                                            *a);
    case KVF_FP16:
        return kvf_cuda_launch_early<rotate_rows<kvf_half>>(grid, block, 0, (cudaStream_t)stream,
                                                            *a);
    default:
        return kvf_cuda_launch_early<rotate_rows<float>>(grid, block, 0, (cudaStream_t)stream, *a);
    }
}
