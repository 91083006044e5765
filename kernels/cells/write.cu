/* SPDX-License-Identifier: Apache-2.0 */

/*
 * New tokens into their cells on the GPU; see write_ref.c for the meaning.
 *
 * Knows nothing of rows. A block is 4 warps and one token: all of them copy keys and values, which
 * lie in mapped host memory, and half a warp encodes a head. Bound: a prompt's stores across the
 * link; in decoding the launch itself. Exact.
 */

#include "cuda_kernels.h"
#include "paging.cuh"

#include "score/codes.cuh"

#define THREADS 128u
#define BLOCKS  8u /* of a multiprocessor, at least */
#define SHARED  (KVF_BLOCK_SCRATCH * sizeof(uint32_t))
#define HALVES  (THREADS / KVF_CODE_LANES)

/* Codes of all heads of a token, of zeros if it is odd. By the whole block. */
template <typename T>
static __device__ __forceinline__ void encode(const kvf_write_args &a, const T *k, bool is_odd,
                                              uint32_t cell, uint32_t token)
{
    const kvf_paging *p = &a.cells->paging;
    const uint32_t head_dim = p->shape.head_dim, words = head_dim / KVF_CODE_LANES;
    for (uint32_t first = 0; first < p->kv_heads; first += HALVES) {
        const uint32_t h = first + threadIdx.x / KVF_CODE_LANES;
        const bool is_there = h < p->kv_heads;
        const uint32_t head = is_there ? h : 0;
        uint32_t *to =
            (uint32_t *)kvf_cell_words(&a.codes, head_dim, p->block_size, cell, head, token) +
            kvf_code_word(head_dim, token % KVF_CODE_TOKENS, 0);
        float x[KVF_CODE_WORDS];
        kvf_code_load(x, k + (size_t)head * head_dim, words);
        for (uint32_t i = 0; is_odd && i < KVF_CODE_WORDS; i++)
            x[i] = 0.0f;
        kvf_code_rotate_lanes(x, words);
        const uint16_t scale = kvf_code_encode_lanes(is_there ? to : NULL, x, words, head_dim);
        if (is_there && threadIdx.x % KVF_CODE_LANES == 0)
            kvf_cell_scales(&a.codes, p->block_size, cell, head)[token] = scale;
    }
}

static __device__ __forceinline__ void clear(const kvf_paging *p, char *to, size_t bytes)
{
    for (uint32_t h = 0; h < p->kv_heads; h++, to += kvf_run_bytes(p))
        for (size_t i = threadIdx.x; i < bytes / 4; i += blockDim.x)
            ((uint32_t *)to)[i] = 0;
}

template <typename T>
static __global__ void __launch_bounds__(THREADS, BLOCKS)
    write_tokens(const __grid_constant__ kvf_write_args a)
{
    const kvf_cells *c = a.cells;
    const kvf_paging *p = &c->paging;
    const size_t bytes = kvf_row_bytes(&p->shape);
    const int64_t slot = a.slots[blockIdx.x];
    if (slot < 0)
        return;
    if ((uint64_t)slot >= kvf_cells_count(c) * p->block_size) {
        if (threadIdx.x == 0)
            kvf_counter_add(&c->counters[a.layer].bad_slots, 1);
        return;
    }
    const uint32_t cell = (uint32_t)((uint64_t)slot / p->block_size);
    const uint32_t token = (uint32_t)((uint64_t)slot % p->block_size);
    const T *k = (const T *)a.k + blockIdx.x * a.k_stride;
    const T *v = (const T *)a.v + blockIdx.x * a.v_stride;
    char *const home = kvf_cell_home(c, a.layer, cell) + token * 2 * bytes;
    bool bad = false;
    char *to = home;
    for (uint32_t h = 0; h < p->kv_heads; h++, to += kvf_run_bytes(p)) {
        const size_t at = (size_t)h * p->shape.head_dim;
        const bool bad_key = kvf_copy_and_look(to, k + at, bytes, p->shape.dtype);
        const bool bad_value = kvf_copy_and_look(to + bytes, v + at, bytes, p->shape.dtype);
        bad = bad || bad_key || bad_value;
    }
    const bool is_odd = kvf_block_sum(bad, kvf_shared()) != 0;
    if (is_odd)
        clear(p, home, 2 * bytes);
    encode(a, k, is_odd, cell, token);
    if (threadIdx.x != 0)
        return;
    unsigned long long *odd = (unsigned long long *)kvf_cell_odd(c, a.layer, cell);
    if (is_odd)
        atomicOr(odd, 1ull << token);
    else
        atomicAnd(odd, ~(1ull << token));
    kvf_cell_writes(c, a.layer, cell)[token] += c->is_deaf != 1;
    if (p->stretches_max && !c->is_deaf)
        atomicExch(kvf_cell_is_mean(c, a.layer, cell), 0u);
    kvf_counter_add(&c->counters[a.layer].tokens_put, 1);
}

extern "C" int kvf_write_cuda(const void *args, uint32_t tasks, void *stream)
{
    const kvf_write_args *a = (const kvf_write_args *)args;
    const dim3 grid(a->tokens), block(THREADS);
    if (tasks == 0)
        return cudaSuccess;
    switch (a->dtype) {
    case KVF_BF16:
        return kvf_cuda_launch<write_tokens<kvf_bf16>>(grid, block, SHARED, (cudaStream_t)stream,
                                                       *a);
    case KVF_FP16:
        return kvf_cuda_launch<write_tokens<kvf_half>>(grid, block, SHARED, (cudaStream_t)stream,
                                                       *a);
    default:
        return kvf_cuda_launch<write_tokens<float>>(grid, block, SHARED, (cudaStream_t)stream, *a);
    }
}
