/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Sealed blocks into storage format and back, and kept tokens into the blocks that they seal, on
 * the GPU; see quantize_ref.c for the meaning.
 *
 * Knows nothing of who reads them. Runs go through shared memory, half a warp a token, and from and
 * to the pool, which is host memory, 16 bytes per thread, so that whole lines cross the link. Bits
 * are those of the reference.
 */

#include "cuda_kernels.h"
#include "quantized.cuh"

#define THREADS 256u
#define TOKENS  (THREADS / KVF_CODE_LANES)

/* ---- quantize: a block of threads is one run. Bound: a launch, for the runs of a step. ---- */

static __global__ void __launch_bounds__(THREADS)
    quantize_kernel(const __grid_constant__ kvf_quantize_args a)
{
    const kvf_paging *p = &a.paging;
    const kvf_row *row = &a.row[blockIdx.x / (a.count * p->kv_heads)];
    const uint32_t head = blockIdx.x % p->kv_heads;
    const uint32_t block =
        (a.scratch ? a.first : row->sealed_before) + blockIdx.x / p->kv_heads % a.count;
    if (block >= row->sealed)
        return;
    const size_t token = kvf_token_bytes(&p->shape), run = head * kvf_run_bytes(p);
    const size_t home = kvf_stored_page_bytes(&p->shape), all = kvf_stored_run_bytes(p);
    char *from =
        (a.scratch ? a.scratch + block * kvf_block_bytes(p) : kvf_row_ring_block(p, row, block)) +
        run;
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

KVF_LAUNCHER(quantize, quantize_kernel, tasks, THREADS, kvf_stored_run_bytes(&a->paging))

/* ---- dequantize: block 0 of threads makes the view; every other one is a run. Bound: the bytes of
 * the pool over the link. ---- */

static __device__ void make_view(const kvf_dequantize_args *a)
{
    const kvf_paging *p = &a->paging;
    for (uint32_t b = threadIdx.x; a->table && b < p->blocks_max; b += blockDim.x)
        a->table[b] = b < a->row->sealed ? a->scratch + b * kvf_block_bytes(p)
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
    char *to =
        (a.scratch ? a.scratch + block * kvf_block_bytes(p) : kvf_row_ring_block(p, row, block)) +
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
            (const uint4 *)kvf_static_token(p, row->static_kv, head, block * p->block_size + t);
        for (uint32_t i = threadIdx.x % KVF_WARP_LANES; i < token / 16; i += KVF_WARP_LANES)
            ((uint4 *)(to + t * token))[i] = stored[i];
    }
}

KVF_LAUNCHER(dequantize, dequantize_kernel, tasks, THREADS, kvf_stored_run_bytes(&a->paging))

/* ---- carry: a block of threads is a KV head, and takes its runs one by one: all are quantized, so
 * that warps stay whole, then those that were quantized already take their places. A run is read
 * before it is written. Bound: bytes of the pool over the link. ---- */

#define BLOCKS 2u /* of a multiprocessor, at least */

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
    const size_t head = blockIdx.x;
    const uint32_t token = (uint32_t)kvf_token_bytes(&p->shape);
    const uint32_t home = (uint32_t)kvf_stored_page_bytes(&p->shape);
    const uint32_t all = (uint32_t)kvf_stored_run_bytes(p);
    const uint32_t page_size = p->shape.page_size, first = threadIdx.x / KVF_CODE_LANES;
    char *quantized = kvf_shared();
    for (uint32_t b = row->sealed_before; b < row->sealed; b++) {
        const uint32_t *ids = a.ids + head * a.stride + b * p->block_size;
        char *exact = a.scratch + (b * p->kv_heads + head) * p->block_size * token;
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

KVF_LAUNCHER(carry, carry_kernel, tasks, THREADS, kvf_stored_run_bytes(&a->paging))
