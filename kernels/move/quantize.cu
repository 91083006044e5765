/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Sealed blocks into storage format, on the GPU; see quantize_ref.c for the meaning.
 *
 * Knows nothing of what else sealing does. A block of threads is one run, half a warp a token. The
 * run is quantized in shared memory and goes from there to the pool, which is host memory, 16 bytes
 * per thread, so that whole lines cross the link. Bound: a launch, for the runs of a step. Bits are
 * those of the reference.
 */

#include "cuda_kernels.h"
#include "quantized.cuh"

#define THREADS 256u
#define TOKENS  (THREADS / KVF_CODE_LANES)

static __global__ void __launch_bounds__(THREADS)
    quantize_kernel(const __grid_constant__ kvf_quantize_args a)
{
    const kvf_paging *p = &a.paging;
    const kvf_row *row = &a.row[blockIdx.x / (a.count * p->kv_heads)];
    const uint32_t head = blockIdx.x % p->kv_heads;
    const uint32_t block =
        (a.wide ? a.first : row->sealed_before) + blockIdx.x / p->kv_heads % a.count;
    if (block >= row->sealed)
        return;
    const size_t token = kvf_token_bytes(&p->shape), run = head * kvf_run_bytes(p);
    const size_t home = kvf_stored_page_bytes(&p->shape), all = kvf_stored_run_bytes(p);
    char *from =
        (a.wide ? a.wide + block * kvf_block_bytes(p) : kvf_row_ring_block(p, row, block)) + run;
    char *to = (char *)row->pool[block - row->sealed_before] + head * all,
         *quantized = kvf_shared();
    const uint64_t sink = kvf_sink_bits(p, block);
    const bool is_last = p->spare_blocks && block + 1 == row->sealed;
    for (uint32_t i = threadIdx.x; i < all / 16; i += blockDim.x)
        ((uint4 *)quantized)[i] = make_uint4(0, 0, 0, 0);
    for (uint32_t i = threadIdx.x; is_last && i < kvf_run_bytes(p) / 16; i += blockDim.x)
        ((uint4 *)(kvf_row_spare(p, row) + run))[i] = ((const uint4 *)from)[i];
    __syncthreads();
    /* A block has an even number of tokens, so warps stay whole. */
    for (uint32_t t = threadIdx.x / KVF_CODE_LANES; t < p->block_size; t += TOKENS)
        quantized_token(&p->shape, quantized + t / p->shape.page_size * home,
                        t % p->shape.page_size, from + t * token, sink >> t & 1);
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < all / 16; i += blockDim.x)
        ((uint4 *)to)[i] = ((const uint4 *)quantized)[i];
}

extern "C" int kvf_quantize_cuda(const void *args, uint32_t tasks, void *stream)
{
    const kvf_quantize_args *a = (const kvf_quantize_args *)args;
    if (tasks == 0)
        return cudaSuccess;
    return kvf_cuda_launch<quantize_kernel>(
        dim3(tasks), dim3(THREADS), kvf_stored_run_bytes(&a->paging), (cudaStream_t)stream, *a);
}
