/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Blocks of chunks in full precision, on the GPU; see dequantize_chunks_ref.c for the meaning.
 *
 * Knows nothing of who reads them. A block of threads is a run, which comes to shared memory 16
 * bytes per thread, because physical blocks are across a link, and from there half a warp takes a
 * token. Bound: the bytes of the physical blocks over that link. Bits are those of the reference.
 */

#include "cuda_kernels.h"
#include "move/quantized.cuh"

#define THREADS 256u
#define TOKENS  (THREADS / KVF_CODE_LANES)

static __global__ void __launch_bounds__(THREADS, 2)
    dequantize_chunks_blocks(const __grid_constant__ kvf_dequantize_chunks_args a)
{
    const kvf_paging *p = &a.paging;
    const uint32_t head = blockIdx.x % p->kv_heads, place = blockIdx.x / p->kv_heads;
    const uint32_t row = place / a.blocks_each, block = place % a.blocks_each;
    const uint32_t tokens = kvf_dequantize_chunks_tokens(&a, row, block);
    const size_t token = kvf_token_bytes(&p->shape), all = kvf_stored_run_bytes(p);
    if (tokens == 0)
        return;
    const char *from = (const char *)a.blocks[(size_t)row * p->blocks_max + block] + head * all;
    char *to = a.scratch + place * kvf_block_bytes(p) + head * kvf_run_bytes(p);
    quantized_fetch(from, all);
    /* A block has an even number of tokens, so warps stay whole. */
    for (uint32_t t = threadIdx.x / KVF_CODE_LANES; t < p->block_size; t += TOKENS)
        quantized_token_back(
            &p->shape, kvf_shared() + t / p->shape.page_size * kvf_stored_page_bytes(&p->shape),
            t % p->shape.page_size, to + t * token, t >= tokens);
}

KVF_LAUNCHER(dequantize_chunks, dequantize_chunks_blocks, tasks, THREADS,
             kvf_stored_run_bytes(&a->paging))
