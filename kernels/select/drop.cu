/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Stores without the sink tokens that a row has lost, or without a static set, on the GPU; see
 * drop_ref.c for the meaning. A block per KV head of a row. Exact.
 */

#include "cuda_kernels.h"
#include "paging.cuh"

#define THREADS 128u

static __global__ void drop_kernel(const __grid_constant__ kvf_drop_args a)
{
    const kvf_paging *p = &a.paging;
    const kvf_row *row = &a.row[blockIdx.x / p->kv_heads];
    const uint32_t head = blockIdx.x % p->kv_heads, sealed = row->sealed * p->block_size;
    if (threadIdx.x == 0 && (a.sets || sealed < p->sink))
        row->static_count[head] = kvf_min_u32(sealed, p->sink);
    for (uint32_t b = threadIdx.x; a.sets && b < row->sealed; b += THREADS)
        kvf_row_bits(p, row, head)[b] = kvf_sink_bits(p, b);
    for (uint32_t i = threadIdx.x; a.sets && row->chosen_at && i < kvf_row_sealed_pages(p, row);
         i += THREADS)
        row->chosen_at[(size_t)head * p->pages_max + i] = 0;
}

KVF_LAUNCHER(drop, drop_kernel, tasks, THREADS, 0)
