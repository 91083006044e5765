/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Tables and lengths of the caller as rows, on the GPU; see rows_ref.c for the meaning.
 *
 * Knows nothing of what the physical blocks hold. A block per row, a thread per block of tokens.
 * Bound: an id, a word and 12 bytes written per 32 tokens. Exact.
 */

#include "cuda_kernels.h"
#include "paging.cuh"

#define THREADS 256u
#define BLOCKS  4u /* of a multiprocessor, at least */
#define SHARED  sizeof(uint32_t)

/* The row's blocks and physical blocks. Returns, of those that the thread met, the first token that
 * is not finite, 0 if an id is none, or UINT32_MAX. */
static __device__ __forceinline__ uint32_t fill_blocks(const kvf_rows_args &a, uint32_t number,
                                                       const kvf_row *row)
{
    const kvf_physical_blocks *c = a.blocks;
    const kvf_paging *p = &c->paging;
    uint32_t *physical = c->physical + (size_t)number * p->blocks_max;
    uint32_t bad = UINT32_MAX;
    for (uint32_t b = threadIdx.x; b < kvf_row_blocks(p, row); b += blockDim.x) {
        const uint32_t block = kvf_rows_physical(&a, number, b);
        const uint32_t tokens = kvf_min_u32(p->block_size, row->length - b * p->block_size);
        if (block == UINT32_MAX) {
            bad = 0;
            continue;
        }
        const uint64_t nonfinite =
            *kvf_physical_nonfinite(c, a.layer, block) & kvf_live_bits(tokens, 0);
        if (nonfinite)
            bad = kvf_min_u32(bad, b * p->block_size + (uint32_t)__ffsll((long long)nonfinite) - 1);
        physical[b] = block;
        row->blocks[b] = b < row->sealed || !row->ring ? kvf_physical_home(c, a.layer, block)
                                                       : kvf_row_ring_block(p, row, b);
    }
    return bad;
}

/* The least of all threads, in all of them. */
static __device__ __forceinline__ uint32_t block_least(uint32_t value)
{
    uint32_t *least = (uint32_t *)kvf_shared();
    if (threadIdx.x == 0)
        *least = UINT32_MAX;
    __syncthreads();
    atomicMin(least, value);
    __syncthreads();
    return *least;
}

static __global__ void __launch_bounds__(THREADS, BLOCKS)
    make_rows(const __grid_constant__ kvf_rows_args a)
{
    const kvf_physical_blocks *c = a.blocks;
    const kvf_paging *p = &c->paging;
    const uint32_t number = blockIdx.x, length = (uint32_t)a.lengths[number];
    const uint32_t expected = kvf_rows_expected(&a, number);
    const bool is_none = kvf_rows_is_bad(&a, number) != 0;
    const uint32_t region =
        is_none || length == 0 || expected || !a.regions ? number : (uint32_t)a.regions[number];
    kvf_row row = kvf_physical_row(c, a.layer, number, region, is_none ? 0 : length);
    if (expected)
        row.ring = NULL;
    const uint32_t bad = block_least(is_none ? 0 : fill_blocks(a, number, &row));
    if (bad == 0 || (bad != UINT32_MAX && !expected)) {
        row = kvf_physical_row(c, a.layer, number, number, 0);
        for (uint32_t b = threadIdx.x; b < kvf_div_ceil_u32(expected, p->block_size);
             b += blockDim.x)
            row.blocks[b] = kvf_physical_home(c, a.layer, 0);
    }
    for (uint32_t l = threadIdx.x; l < p->lists; l += blockDim.x)
        kvf_rows_list(c, a.layer, number, &row, l);
    if (threadIdx.x != 0)
        return;
    c->row[number] = row;
    c->region[number] = region;
    c->is_bad[number] = bad + 1; /* UINT32_MAX is none */
    if (bad != UINT32_MAX)
        kvf_counter_add(&c->counters[a.layer].bad_rows, 1);
}

extern "C" int kvf_rows_cuda(const void *args, uint32_t tasks, void *stream)
{
    if (tasks == 0)
        return cudaSuccess;
    return kvf_cuda_launch<make_rows>(dim3(tasks), dim3(THREADS), SHARED, (cudaStream_t)stream,
                                      *(const kvf_rows_args *)args);
}
