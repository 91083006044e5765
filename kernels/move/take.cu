/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Tokens of pages by index, on the GPU; see take_ref.c for the meaning.
 *
 * Knows nothing of why these tokens. Grid: (parts of KVF_TAKE_TOKENS tokens, KV heads), THREADS a
 * block; a thread moves pieces of 16 bytes, PIECES of them in flight, keys and values alike. Tokens
 * are scattered, and each is read whole by neighbouring threads. Bound: bytes, 2 * count * kv_heads
 * * token bytes read and as many written. Exact.
 */

#include "cuda_kernels.h"
#include "tile.cuh"

#define THREADS 128u
#define PIECES  4u

/* k [count, kv_heads, head_dim], v [.., value_dim]; blocks [pages] -> [kv_heads] pages. */
static __global__ void __launch_bounds__(THREADS)
    take_tokens(const __grid_constant__ kvf_take_args a)
{
    const uint32_t base = blockIdx.x * KVF_TAKE_TOKENS, head = blockIdx.y;
    const uint32_t count = kvf_min_u32(KVF_TAKE_TOKENS, a.count - base);
    const uint32_t page_size = a.shape.page_size;
    const uint32_t key_pieces = (uint32_t)(kvf_key_bytes(&a.shape) / 16);
    const uint32_t value_pieces = (uint32_t)(kvf_value_bytes(&a.shape) / 16);
    const uint32_t token_pieces = key_pieces + value_pieces, pieces = count * token_pieces;
    const uint32_t *ids = a.ids + (size_t)head * a.stride + base;
    for (uint32_t first = threadIdx.x; first < pieces; first += PIECES * THREADS) {
        uint4 piece[PIECES];
#pragma unroll
        for (uint32_t i = 0; i < PIECES; i++) {
            const uint32_t at = first + i * THREADS;
            if (at >= pieces)
                continue;
            const uint32_t id = ids[at / token_pieces];
            const char *page =
                (const char *)a.blocks[id / page_size] + head * kvf_page_bytes(&a.shape);
            piece[i] = kvf_load_once(
                page + ((size_t)(id % page_size) * token_pieces + at % token_pieces) * 16);
        }
#pragma unroll
        for (uint32_t i = 0; i < PIECES; i++) {
            const uint32_t at = first + i * THREADS, of_token = at % token_pieces;
            if (at >= pieces)
                continue;
            const size_t at_head = (size_t)(base + at / token_pieces) * a.kv_heads + head;
            char *to = of_token < key_pieces
                           ? (char *)a.k + (at_head * key_pieces + of_token) * 16
                           : (char *)a.v + (at_head * value_pieces + of_token - key_pieces) * 16;
            *(uint4 *)to = piece[i];
        }
    }
}

KVF_LAUNCHER(take, take_tokens, dim3(kvf_div_ceil_u32(a->count, KVF_TAKE_TOKENS), a->kv_heads),
             THREADS, 0)
