/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Rotated queries in int8 on the GPU.
 *
 * Knows nothing of heads or lists. Half a warp is one query, a block is 8 queries; those beyond the
 * last repeat it and are not stored. Bound: a launch, for the few queries of a step. Exactness: the
 * bits of rotate_ref.c.
 */

#include "cuda_kernels.h"

#include "score/rotate.cuh"

#define THREADS 128u
#define QUERIES (THREADS / KVF_CODE_LANES)

template <typename T>
static __global__ void __launch_bounds__(THREADS)
    rotate_queries(const __grid_constant__ kvf_rotate_args a)
{
    const uint32_t words = a.head_dim / KVF_CODE_LANES;
    const uint32_t mine = blockIdx.x * QUERIES + threadIdx.x / KVF_CODE_LANES;
    const size_t first = (size_t)kvf_min_u32(mine, a.queries - 1) * a.head_dim;
    float x[KVF_CODE_WORDS];
    kvf_wait_for_earlier();
    kvf_let_next_start();
    kvf_code_load(x, (const T *)a.q + first, words);
    kvf_rotate_query(a, x, mine);
}

extern "C" int kvf_rotate_cuda(const void *args, uint32_t, void *stream)
{
    const kvf_rotate_args *a = (const kvf_rotate_args *)args;
    const dim3 grid(kvf_div_ceil_u32(a->queries, QUERIES)), block(THREADS);
    switch (a->dtype) {
    case KVF_BF16:
        return kvf_cuda_launch_early<rotate_queries<kvf_bf16>>(grid, block, 0, (cudaStream_t)stream,
                                                               *a);
    case KVF_FP16:
        return kvf_cuda_launch_early<rotate_queries<kvf_half>>(grid, block, 0, (cudaStream_t)stream,
                                                               *a);
    default:
        return kvf_cuda_launch_early<rotate_queries<float>>(grid, block, 0, (cudaStream_t)stream,
                                                            *a);
    }
}
