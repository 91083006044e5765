/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Sealed blocks into home form, on the GPU; see narrow_ref.c for the meaning.
 *
 * Knows nothing of what else sealing does. A block of threads is one run, a thread a token, whose
 * numbers are in local memory: plain, and the way of the host device; CUDA caches do not pack yet.
 * Bits are those of the reference.
 */

#include "cuda_kernels.h"
#include "packed.h"
#include "paging.cuh"

#define THREADS 64u

static __global__ void narrow_kernel(const __grid_constant__ kvf_narrow_args a)
{
    const kvf_paging *p = &a.paging;
    const kvf_row *row = &a.row[blockIdx.x / (a.count * p->kv_heads)];
    const uint32_t head = blockIdx.x % p->kv_heads;
    const uint32_t block =
        (a.wide ? a.first : row->sealed_before) + blockIdx.x / p->kv_heads % a.count;
    if (block >= row->sealed)
        return;
    const size_t token = kvf_token_bytes(&p->shape), run = head * kvf_run_bytes(p);
    const size_t home = kvf_home_page_bytes(&p->shape);
    char *from =
        (a.wide ? a.wide + block * kvf_block_bytes(p) : kvf_row_ring_block(p, row, block)) + run;
    char *to = (char *)row->pool[block - row->sealed_before] + head * kvf_home_run_bytes(p);
    const uint64_t sink = kvf_sink_bits(p, block);
    float x[KVF_HEAD_DIM_MAX];
    for (uint32_t i = threadIdx.x; i < kvf_home_run_bytes(p) / 4; i += blockDim.x)
        ((uint32_t *)(void *)to)[i] = 0;
    const bool is_last = p->spare_blocks && block + 1 == row->sealed;
    for (uint32_t i = threadIdx.x; is_last && i < kvf_run_bytes(p) / 4; i += blockDim.x)
        ((uint32_t *)(void *)(kvf_row_spare(p, row) + run))[i] =
            ((const uint32_t *)(const void *)from)[i];
    __syncthreads();
    for (uint32_t t = threadIdx.x; t < p->block_size; t += blockDim.x) {
        char *page = to + t / p->shape.page_size * home;
        kvf_pack_token(&p->shape, page, t % p->shape.page_size, from + t * token, x);
        if (!(sink >> t & 1))
            kvf_unpack_token(&p->shape, page, t % p->shape.page_size, from + t * token, x);
    }
}

extern "C" int kvf_narrow_cuda(const void *args, uint32_t tasks, void *stream)
{
    const kvf_narrow_args *a = (const kvf_narrow_args *)args;
    if (tasks == 0)
        return cudaSuccess;
    return kvf_cuda_launch<narrow_kernel>(dim3(tasks), dim3(THREADS), 0, (cudaStream_t)stream, *a);
}
