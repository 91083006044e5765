/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Merge of partial attention results by log-sum-exp, on the GPU; see merge_ref.c for the meaning
 * and merge.cuh for how.
 *
 * Knows nothing of spans. A thread owns four channels of one query of (list, group) and walks the
 * splits in order, so there is no barrier and no order to choose. Grid: queries x value_dim / 4
 * threads, THREADS a block. Bound: the bytes of the partial results, read once, 4 * value_dim + 4
 * per split and query.
 */

#include "cuda_kernels.h"
#include "merge.cuh"

#define THREADS 128u

static __global__ void __launch_bounds__(THREADS)
    merge_queries(const __grid_constant__ kvf_merge_args a)
{
    kvf_wait_for_earlier();
    kvf_let_next_start();
    const uint32_t value_dim = kvf_value_dim(&a.shape), quads = value_dim / 4;
    const uint32_t at = blockIdx.x * THREADS + threadIdx.x;
    const uint32_t query = at / quads;
    if (query < a.lists * a.group)
        kvf_merge_quad(a, kvf_div_ceil_u32(a.span_count[query / a.group], a.split), query,
                       at % quads * 4, value_dim);
}

KVF_LAUNCHER_EARLY(merge, merge_queries,
                   kvf_div_ceil_u32(a->lists * a->group * (kvf_value_dim(&a->shape) / 4), THREADS),
                   THREADS, 0)
