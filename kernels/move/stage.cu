/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Blocks of rows to one place, on the GPU; see stage_ref.c for the meaning.
 *
 * Knows nothing of who attends to them. A block of threads per block, a warp per page, so that many
 * pages are on their way at once. Bound: bytes, from device memory to device memory; of pages
 * without a slot over the link.
 */

#include "cuda/words.cuh"
#include "cuda_kernels.h"
#include "paging.cuh"
#include "slots.h"

#define THREADS 256u
#define WORDS   4u /* of 16 bytes, per lane */

/* By a warp. Returns the bytes that came from where the table names the page. */
static __device__ __forceinline__ uint32_t stage_page(const kvf_paging *p, const kvf_row *row,
                                                      uint32_t head, uint32_t page, char *to)
{
    const uint32_t bytes = (uint32_t)kvf_page_bytes(&p->shape);
    const int32_t slot = kvf_row_slot_of(p, row, head, page);
    const char *from = kvf_row_page_in(p, row, head, page, slot);
    for (uint32_t at = 0; at < bytes; at += WORDS * KVF_WARP_LANES * 16)
        kvf_warp_move<WORDS>(to + at, from + at,
                             kvf_min_u32(bytes - at, WORDS * KVF_WARP_LANES * 16));
    return slot < 0 ? bytes : 0;
}

static __global__ void __launch_bounds__(THREADS)
    stage_blocks(const __grid_constant__ kvf_stage_args a)
{
    const kvf_paging *p = &a.paging;
    const kvf_row *row = &a.row[blockIdx.y];
    const uint32_t block = blockIdx.x, first = block * p->block_pages;
    char *to = a.to + (blockIdx.y * a.count + block) * kvf_block_bytes(p);
    uint64_t bytes = 0;
    if (block >= kvf_row_blocks(p, row))
        return;
    for (uint32_t i = threadIdx.x / KVF_WARP_LANES; i < p->kv_heads * p->block_pages;
         i += THREADS / KVF_WARP_LANES) {
        const uint32_t page = first + i % p->block_pages;
        if (page * p->shape.page_size < row->length)
            bytes +=
                stage_page(p, row, i / p->block_pages, page, to + i * kvf_page_bytes(&p->shape));
    }
    if (threadIdx.x % KVF_WARP_LANES == 0 && bytes)
        kvf_counter_add(&a.counters->bytes_prompt, bytes);
    if (!a.home)
        return;
    __syncthreads(); /* everybody has read the table */
    if (threadIdx.x == 0) {
        a.home[block] = row->blocks[block];
        row->blocks[block] = to;
    }
}

KVF_LAUNCHER(stage, stage_blocks, dim3(a->count, a->rows), THREADS, 0)
