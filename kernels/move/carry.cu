/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Kept tokens of quantized pages into the blocks that they seal, on the GPU; see carry_ref.c for
 * the meaning.
 *
 * Knows nothing of why these tokens. A block of threads is a KV head, and takes its runs one by one
 * through shared memory, half a warp a token: all are quantized, so that warps stay whole, then
 * those that were quantized already take their places. A run is read before it is written. Bound:
 * bytes of the pool over the link. Bits are those of the reference.
 */

#include "cuda_kernels.h"
#include "quantized.cuh"

#define THREADS 256u
#define BLOCKS  2u /* of a multiprocessor, at least */
#define TOKENS  (THREADS / KVF_CODE_LANES)

/* Token t of the run that was quantized already. */
static __device__ __forceinline__ void move_token(const kvf_carry_args *a, char *quantized,
                                                  uint32_t t, uint32_t id, size_t head)
{
    const kvf_paging *p = &a->paging;
    const kvf_shape *s = &p->shape;
    const size_t home = kvf_stored_page_bytes(s);
    const char *from = (const char *)a->from[id / p->block_size] + head * kvf_stored_run_bytes(p) +
                       id % p->block_size / s->page_size * home;
    char *to = quantized + t / s->page_size * home;
    quantized_move(s, to, t % s->page_size, s, from, id % s->page_size);
}

static __global__ void __launch_bounds__(THREADS, BLOCKS)
    carry_kernel(const __grid_constant__ kvf_carry_args a)
{
    const kvf_paging *p = &a.paging;
    const kvf_row *row = a.row;
    const size_t head = blockIdx.x, token = kvf_token_bytes(&p->shape);
    const size_t home = kvf_stored_page_bytes(&p->shape), all = kvf_stored_run_bytes(p);
    const uint32_t page_size = p->shape.page_size, first = threadIdx.x / KVF_CODE_LANES;
    char *quantized = kvf_shared();
    for (uint32_t b = row->sealed_before; b < row->sealed; b++) {
        const uint32_t *ids = a.ids + head * a.stride + b * p->block_size;
        char *exact = a.wide + b * kvf_block_bytes(p) + head * kvf_run_bytes(p);
        char *to = (char *)row->pool[b - row->sealed_before] + head * all;
        const uint64_t sink = kvf_sink_bits(p, b);
        for (uint32_t i = threadIdx.x; i < all / 16; i += blockDim.x)
            ((uint4 *)quantized)[i] = make_uint4(0, 0, 0, 0);
        __syncthreads();
        /* A block has an even number of tokens, so warps stay whole. */
        for (uint32_t t = first; t < p->block_size; t += TOKENS)
            quantized_token(&p->shape, quantized + t / page_size * home, t % page_size,
                            exact + t * token, true);
        __syncthreads();
        for (uint32_t t = first; t < p->block_size; t += TOKENS)
            if (ids[t] / p->block_size < a.quantized)
                move_token(&a, quantized, t, ids[t], head);
        __syncthreads();
        for (uint32_t t = first; t < p->block_size; t += TOKENS)
            quantized_token_back(&p->shape, quantized + t / page_size * home, t % page_size,
                                 exact + t * token, sink >> t & 1);
        for (uint32_t i = threadIdx.x; i < all / 16; i += blockDim.x)
            ((uint4 *)to)[i] = ((const uint4 *)quantized)[i];
        __syncthreads();
    }
}

extern "C" int kvf_carry_cuda(const void *args, uint32_t tasks, void *stream)
{
    const kvf_carry_args *a = (const kvf_carry_args *)args;
    if (tasks == 0)
        return cudaSuccess;
    return kvf_cuda_launch<carry_kernel>(
        dim3(tasks), dim3(THREADS), kvf_stored_run_bytes(&a->paging), (cudaStream_t)stream, *a);
}
