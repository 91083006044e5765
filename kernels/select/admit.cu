/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Pages of sealed blocks into slots, on the GPU; see admit_ref.c for the meaning.
 *
 * Knows nothing of what else sealing does. A block of threads per run, a warp per page: its slot,
 * then its bytes. Pages of one launch differ, so no two warps want the same one; what a warp took
 * nobody else of the launch takes. Bound: bytes, from device memory to device memory; quantized
 * pages come back from the pool, over the link.
 */

#include "cuda/words.cuh"
#include "cuda_kernels.h"
#include "find_slot.cuh"

#define THREADS 256u
#define WORDS   4u /* of 16 bytes, per lane */

static __device__ __forceinline__ void admit_page(const kvf_admit_args &a, const kvf_row *row,
                                                  uint32_t head, uint32_t block, uint32_t number)
{
    const kvf_paging *p = &a.paging;
    const kvf_slot_tables t = kvf_slot_tables_of(p, row, head);
    const uint32_t page = kvf_row_sealing(row, block) * p->block_pages + number;
    const uint32_t slot = kvf_slot_admit(p, t, page, row->use);
    if (slot == UINT32_MAX || !row->slots)
        return;
    const uint32_t bytes = (uint32_t)kvf_stored_page_bytes(&p->shape);
    const char *from = kvf_admit_from(p, row, head, block, number);
    char *to = kvf_row_slot(p, row, head, slot);
    for (uint32_t at = 0; at < bytes; at += WORDS * KVF_WARP_LANES * 16)
        kvf_warp_move<WORDS>(to + at, from + at,
                             kvf_min_u32(bytes - at, WORDS * KVF_WARP_LANES * 16));
}

static __global__ void __launch_bounds__(THREADS)
    admit_runs(const __grid_constant__ kvf_admit_args a)
{
    const kvf_row *row = &a.row[blockIdx.z];
    const uint32_t block = row->sealed_before + blockIdx.x;
    if (block >= row->sealed)
        return;
    for (uint32_t i = threadIdx.x / KVF_WARP_LANES; i < a.paging.block_pages;
         i += THREADS / KVF_WARP_LANES)
        admit_page(a, row, blockIdx.y, block, i);
}

extern "C" int kvf_admit_cuda(const void *args, uint32_t tasks, void *stream)
{
    const kvf_admit_args *a = (const kvf_admit_args *)args;
    if (tasks == 0 || a->count == 0)
        return cudaSuccess;
    return kvf_cuda_launch<admit_runs>(dim3(a->count, a->paging.kv_heads, a->rows), dim3(THREADS),
                                       0, (cudaStream_t)stream, *a);
}
