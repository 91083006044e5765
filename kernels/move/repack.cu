/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A chunk in token order into pages, on the GPU; see repack_ref.c for the meaning.
 *
 * Knows nothing of what a token means beyond whether it is finite. Grid: (blocks, KV heads),
 * THREADS a block; a thread moves pieces of 16 bytes, PIECES of them in flight, keys and values
 * alike. Writes run along the page, so that pages in mapped host memory get full bursts. Bound:
 * bytes, 2 * tokens * kv_heads * token bytes read and as many written. Exact; the fault is an
 * atomic minimum, which does not depend on the order of threads.
 */

#include "cuda_kernels.h"
#include "tile.cuh"

#define THREADS 128u
#define PIECES  4u

/* Whether an element of a word has all bits of its exponent set. */
static __device__ __forceinline__ bool word_is_finite(uint32_t word, kvf_dtype dtype)
{
    if (dtype == KVF_FP32)
        return (word & 0x7f800000u) != 0x7f800000u;
    const uint32_t low = dtype == KVF_BF16 ? 0x7f80u : 0x7c00u;
    return (word & low) != low && (word >> 16 & low) != low;
}

static __device__ __forceinline__ bool piece_is_finite(uint4 x, kvf_dtype dtype)
{
    return word_is_finite(x.x, dtype) && word_is_finite(x.y, dtype) && word_is_finite(x.z, dtype) &&
           word_is_finite(x.w, dtype);
}

/* k [tokens, kv_heads, head_dim], v [.., value_dim]; blocks [blocks] -> [kv_heads] pages. */
static __global__ void __launch_bounds__(THREADS)
    repack_block(const __grid_constant__ kvf_repack_args a)
{
    const uint32_t block = blockIdx.x, head = blockIdx.y;
    const uint32_t page_size = a.shape.page_size;
    const uint32_t key_pieces = (uint32_t)(kvf_key_bytes(&a.shape) / 16);
    const uint32_t value_pieces = (uint32_t)(kvf_value_bytes(&a.shape) / 16);
    const uint32_t token_pieces = key_pieces + value_pieces;
    const uint32_t begin = block == 0 ? a.first : 0;
    const uint32_t end = kvf_min_u32(page_size, a.first + a.tokens - block * page_size);
    const uint32_t pieces = (end - begin) * token_pieces;
    const size_t zero = (size_t)block * page_size + begin - a.first; /* token of piece 0 */
    char *page = (char *)a.blocks[block] + head * kvf_page_bytes(&a.shape) +
                 begin * token_pieces * (size_t)16;
    for (uint32_t first = threadIdx.x; first < pieces; first += PIECES * THREADS) {
        uint4 piece[PIECES];
#pragma unroll
        for (uint32_t i = 0; i < PIECES; i++) {
            const uint32_t at = first + i * THREADS, of_token = at % token_pieces;
            if (at >= pieces)
                continue;
            const size_t at_head = (zero + at / token_pieces) * a.kv_heads + head;
            piece[i] = kvf_load_once(
                of_token < key_pieces
                    ? (const char *)a.k + (at_head * key_pieces + of_token) * 16
                    : (const char *)a.v + (at_head * value_pieces + of_token - key_pieces) * 16);
        }
#pragma unroll
        for (uint32_t i = 0; i < PIECES; i++) {
            const uint32_t at = first + i * THREADS;
            if (at >= pieces)
                continue;
            *(uint4 *)(page + at * (size_t)16) = piece[i];
            if (!piece_is_finite(piece[i], a.shape.dtype))
                atomicMin(a.fault, (uint32_t)zero + at / token_pieces);
        }
    }
}

KVF_LAUNCHER(repack, repack_block,
             dim3(kvf_div_ceil_u32(a->first + a->tokens, a->shape.page_size), a->kv_heads), THREADS,
             0)
