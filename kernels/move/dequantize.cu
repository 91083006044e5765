/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Sealed blocks of a row in full precision, on the GPU; see dequantize_ref.c for the meaning.
 *
 * Knows nothing of who reads them. Block 0 of threads makes the view; every other one is a run,
 * which comes to shared memory 16 bytes per thread, because the pool is across a link, and from
 * there half a warp takes a token. Bound: the bytes of the pool over that link. Bits are those of
 * the reference.
 */

#include "cuda_kernels.h"
#include "quantized.cuh"

#define THREADS 256u
#define TOKENS  (THREADS / KVF_CODE_LANES)

static __device__ void make_view(const kvf_dequantize_args *a)
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

static __global__ void __launch_bounds__(THREADS)
    dequantize_kernel(const __grid_constant__ kvf_dequantize_args a)
{
    const kvf_paging *p = &a.paging;
    const kvf_row *row = a.row;
    if (blockIdx.x == 0) {
        make_view(&a);
        return;
    }
    const uint32_t head = (blockIdx.x - 1) % p->kv_heads;
    const uint32_t block = a.first + (blockIdx.x - 1) / p->kv_heads;
    const size_t token = kvf_token_bytes(&p->shape), all = kvf_stored_run_bytes(p);
    const uint64_t sink = kvf_sink_bits(p, block);
    const char *from = (const char *)(a.block ? a.block : row->blocks[block]) + head * all;
    char *to = (a.wide ? a.wide + block * kvf_block_bytes(p) : kvf_row_ring_block(p, row, block)) +
               head * kvf_run_bytes(p);
    quantized_fetch(from, all);
    /* A block has an even number of tokens, so warps stay whole. */
    for (uint32_t t = threadIdx.x / KVF_CODE_LANES; t < p->block_size; t += TOKENS)
        quantized_token_back(
            &p->shape, kvf_shared() + t / p->shape.page_size * kvf_stored_page_bytes(&p->shape),
            t % p->shape.page_size, to + t * token, sink >> t & 1);
    for (uint32_t t = threadIdx.x / KVF_WARP_LANES; t < p->block_size;
         t += THREADS / KVF_WARP_LANES) {
        if (!(sink >> t & 1))
            continue;
        const uint4 *stored =
            (const uint4 *)kvf_store_token(p, row->store, head, block * p->block_size + t);
        for (uint32_t i = threadIdx.x % KVF_WARP_LANES; i < token / 16; i += KVF_WARP_LANES)
            ((uint4 *)(to + t * token))[i] = stored[i];
    }
}

extern "C" int kvf_dequantize_cuda(const void *args, uint32_t tasks, void *stream)
{
    const kvf_dequantize_args *a = (const kvf_dequantize_args *)args;
    return kvf_cuda_launch<dequantize_kernel>(
        dim3(tasks), dim3(THREADS), kvf_stored_run_bytes(&a->paging), (cudaStream_t)stream, *a);
}
