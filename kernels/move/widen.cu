/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Sealed blocks of a row in exact form, on the GPU; see widen_ref.c for the meaning.
 *
 * Knows nothing of who reads them. Block 0 of threads makes the view; every other one is a run, a
 * thread a token, whose numbers are in local memory: plain, and the way of the host device; CUDA
 * caches do not pack yet. Bits are those of the reference.
 */

#include "cuda_kernels.h"
#include "packed.h"
#include "paging.cuh"

#define THREADS 64u

static __device__ void make_view(const kvf_widen_args *a)
{
    const kvf_paging *p = &a->paging;
    for (uint32_t b = threadIdx.x; a->table && b < p->blocks_max; b += blockDim.x)
        a->table[b] = b < a->row->sealed ? a->wide + b * kvf_block_bytes(p)
                                         : kvf_row_ring_block(p, a->row, b);
    if (!a->view || threadIdx.x)
        return;
    *a->view = *a->row;
    a->view->blocks = a->table;
    a->view->slots = NULL;
}

static __global__ void widen_kernel(const __grid_constant__ kvf_widen_args a)
{
    const kvf_paging *p = &a.paging;
    const kvf_row *row = a.row;
    if (blockIdx.x == 0) {
        make_view(&a);
        return;
    }
    const uint32_t head = (blockIdx.x - 1) % p->kv_heads;
    const uint32_t block = a.first + (blockIdx.x - 1) / p->kv_heads;
    const size_t token = kvf_token_bytes(&p->shape);
    const uint64_t sink = kvf_sink_bits(p, block);
    const char *from =
        (const char *)(a.block ? a.block : row->blocks[block]) + head * kvf_home_run_bytes(p);
    char *to = (a.wide ? a.wide + block * kvf_block_bytes(p) : kvf_row_ring_block(p, row, block)) +
               head * kvf_run_bytes(p);
    float x[KVF_HEAD_DIM_MAX];
    for (uint32_t t = threadIdx.x; t < p->block_size; t += blockDim.x) {
        uint32_t *at = (uint32_t *)(void *)(to + t * token);
        if (!(sink >> t & 1)) {
            kvf_unpack_token(&p->shape,
                             from + t / p->shape.page_size * kvf_home_page_bytes(&p->shape),
                             t % p->shape.page_size, at, x);
            continue;
        }
        const uint32_t *stored = (const uint32_t *)(const void *)kvf_store_token(
            p, row->store, head, block * p->block_size + t);
        for (uint32_t i = 0; i < token / 4; i++)
            at[i] = stored[i];
    }
}

extern "C" int kvf_widen_cuda(const void *args, uint32_t tasks, void *stream)
{
    const kvf_widen_args *a = (const kvf_widen_args *)args;
    return kvf_cuda_launch<widen_kernel>(dim3(tasks), dim3(THREADS), 0, (cudaStream_t)stream, *a);
}
