/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Pages of new tokens into slots, on the GPU; see lodge_ref.c for the meaning.
 *
 * Knows nothing of rows. A block of threads per token, of which those go on with which a page
 * begins: a warp per KV head. Pages of a launch differ, so no two warps want the same one. Bound:
 * bytes, from device memory to device memory.
 */

#include "cuda_kernels.h"
#include "select/find_slot.cuh"

#define THREADS 256u
#define BLOCKS  4u /* per multiprocessor: without it the compiler spills to have six */

/* A key or a value, or zeros, by a warp. */
static __device__ __forceinline__ void copy_row(char *to, const char *from, uint32_t bytes,
                                                bool is_nonfinite)
{
    const uint32_t lane = threadIdx.x % KVF_WARP_LANES;
    if ((size_t)from % 16 == 0)
        for (uint32_t at = lane * 16; at < bytes; at += KVF_WARP_LANES * 16)
            *(uint4 *)(to + at) =
                is_nonfinite ? make_uint4(0, 0, 0, 0) : *(const uint4 *)(from + at);
    else
        for (uint32_t at = lane * 2; at < bytes; at += KVF_WARP_LANES * 2)
            *(uint16_t *)(to + at) = is_nonfinite ? (uint16_t)0 : *(const uint16_t *)(from + at);
}

static __device__ __forceinline__ void lodge_page(const kvf_write_args &a, const kvf_row *row,
                                                  uint32_t head, uint32_t page)
{
    const kvf_paging *p = &a.blocks->paging;
    const kvf_slot_tables t = kvf_slot_tables_of(p, row, head);
    const uint32_t first = blockIdx.x, bytes = (uint32_t)kvf_row_bytes(&p->shape);
    const size_t element = kvf_dtype_bytes(p->shape.dtype);
    const uint32_t slot = kvf_slot_admit(p, t, page, row->use - 1);
    if (slot == UINT32_MAX)
        return;
    if (threadIdx.x % KVF_WARP_LANES == 0)
        t.tags[slot] = kvf_row_page_tag(p, row, page);
    for (uint32_t i = first; row->slots && i < first + p->shape.page_size; i++) {
        char *to = kvf_row_slot(p, row, head, slot) + (i - first) * kvf_token_bytes(&p->shape);
        const bool is_nonfinite = kvf_lodge_is_nonfinite(&a, i);
        copy_row(to, (const char *)a.k + i * a.k_stride * element + head * bytes, bytes,
                 is_nonfinite);
        copy_row(to + bytes, (const char *)a.v + i * a.v_stride * element + head * bytes, bytes,
                 is_nonfinite);
    }
}

static __global__ void __launch_bounds__(THREADS, BLOCKS)
    lodge_pages(const __grid_constant__ kvf_write_args a)
{
    const kvf_physical_blocks *c = a.blocks;
    const uint32_t page = kvf_lodge_page(&a, blockIdx.x);
    if (page == UINT32_MAX)
        return;
    const kvf_row row = kvf_physical_slots(c);
    for (uint32_t h = threadIdx.x / KVF_WARP_LANES; h < c->paging.kv_heads;
         h += THREADS / KVF_WARP_LANES)
        if (!c->streaming.number || !c->streaming.number[a.layer * c->paging.kv_heads + h])
            lodge_page(a, &row, h, page);
}

extern "C" int kvf_lodge_cuda(const void *args, uint32_t tasks, void *stream)
{
    const kvf_write_args *a = (const kvf_write_args *)args;
    if (tasks == 0 || a->tokens == 0)
        return cudaSuccess;
    return kvf_cuda_launch<lodge_pages>(dim3(a->tokens), dim3(THREADS), 0, (cudaStream_t)stream,
                                        *a);
}
