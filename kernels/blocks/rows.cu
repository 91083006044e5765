/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Tables and lengths of the caller as rows, on the GPU; see rows_ref.c for the meaning.
 *
 * Knows nothing of what the physical blocks hold. A block per row, which takes EACH blocks of
 * tokens per thread at a time: all ids, then all words, then all stores. So the longest path is
 * three loads that wait for each other: the length beside the description, an id, a word beside the
 * place. Bound: those; by bytes an id, a word and 12 bytes written per 32 tokens. Exact.
 */

#include "cuda_kernels.h"
#include "paging.cuh"

#define THREADS_MIN 128u
#define THREADS_MAX 1024u
#define EACH        4u
#define LEAST       16u /* bytes, of one number */
#define SHARED      (LEAST + sizeof(kvf_physical_blocks))

/* The description in shared memory, after the next barrier: what is stored elsewhere could be part
 * of it, so it would be loaded again after every store. */
static __device__ __forceinline__ const kvf_physical_blocks *describe(const kvf_rows_args &a)
{
    uint32_t *to = (uint32_t *)(kvf_shared() + LEAST);
    for (uint32_t i = threadIdx.x; i < sizeof *a.blocks / sizeof *to; i += blockDim.x)
        to[i] = ((const uint32_t *)a.blocks)[i];
    return (const kvf_physical_blocks *)to;
}

/* Blocks first, first + blockDim.x and so on of the row, EACH of them, and their physical blocks.
 * Returns what fill_blocks does, of these. */
static __device__ __forceinline__ uint32_t fill_some(const kvf_rows_args &a,
                                                     const kvf_physical_blocks *c, uint32_t number,
                                                     const kvf_row *row, uint32_t first)
{
    const kvf_paging *p = &c->paging;
    const kvf_physical_pool pool = kvf_physical_pool_of(c);
    const uint32_t blocks = kvf_row_blocks(p, row), homes = row->ring ? row->sealed : blocks;
    uint32_t *physical = c->physical + (size_t)number * p->blocks_max;
    uint32_t block[EACH], bad = UINT32_MAX;
    uint64_t nonfinite[EACH];
    char *home[EACH];
#pragma unroll
    for (uint32_t i = 0; i < EACH; i++)
        block[i] =
            kvf_rows_physical(&a, c, number, kvf_min_u32(first + i * blockDim.x, blocks - 1));
#pragma unroll
    for (uint32_t i = 0; i < EACH; i++) {
        const uint32_t at = block[i] == UINT32_MAX ? 0 : block[i];
        nonfinite[i] = *kvf_physical_nonfinite(c, a.layer, at);
        home[i] = kvf_pool_home(&pool, a.layer, at);
    }
#pragma unroll
    for (uint32_t i = 0; i < EACH; i++) {
        const uint32_t b = first + i * blockDim.x;
        if (b >= blocks)
            break;
        if (block[i] == UINT32_MAX) {
            bad = 0;
            continue;
        }
        const uint32_t tokens = kvf_min_u32(p->block_size, row->length - b * p->block_size);
        const uint64_t found = nonfinite[i] & kvf_live_bits(tokens, 0);
        if (found)
            bad = kvf_min_u32(bad, b * p->block_size + (uint32_t)__ffsll((long long)found) - 1);
        physical[b] = block[i];
        row->blocks[b] = b < homes ? home[i] : kvf_row_ring_block(p, row, b);
    }
    return bad;
}

/* The row's blocks and physical blocks. Returns, of those that the thread met, the first token that
 * is not finite, 0 if an id is none, or UINT32_MAX. */
static __device__ __forceinline__ uint32_t fill_blocks(const kvf_rows_args &a,
                                                       const kvf_physical_blocks *c,
                                                       uint32_t number, const kvf_row *row)
{
    uint32_t bad = UINT32_MAX;
    for (uint32_t first = threadIdx.x; first < kvf_row_blocks(&c->paging, row);
         first += EACH * blockDim.x)
        bad = kvf_min_u32(bad, fill_some(a, c, number, row, first));
    return bad;
}

/* The least of all threads, in all of them. */
static __device__ __forceinline__ uint32_t block_least(uint32_t value)
{
    uint32_t *least = (uint32_t *)kvf_shared();
    if (threadIdx.x == 0)
        *least = UINT32_MAX;
    if (!__syncthreads_or(value != UINT32_MAX))
        return UINT32_MAX;
    atomicMin(least, value);
    __syncthreads();
    return *least;
}

/* Whether the call says that a row is bad, before its table is looked at; in all threads. */
static __device__ __forceinline__ bool is_bad(const kvf_rows_args &a, uint32_t number)
{
    bool bad = kvf_rows_is_bad(&a, number);
    for (uint32_t i = threadIdx.x; i < number; i += blockDim.x)
        bad = bad || kvf_rows_is_taken(&a, number, i);
    return __syncthreads_or(bad);
}

static __global__ void __launch_bounds__(THREADS_MAX)
    make_rows(const __grid_constant__ kvf_rows_args a)
{
    const kvf_physical_blocks *c = describe(a);
    const kvf_paging *p = &c->paging;
    const uint32_t number = blockIdx.x, length = (uint32_t)a.lengths[number];
    const uint32_t expected = kvf_rows_expected(&a, number);
    const bool is_none = is_bad(a, number);
    const uint32_t region =
        is_none || length == 0 || expected || !a.regions ? number : (uint32_t)a.regions[number];
    kvf_row row = kvf_physical_row(c, a.layer, number, region, is_none ? 0 : length);
    if (expected)
        row.ring = NULL;
    const uint32_t bad = block_least(is_none ? 0 : fill_blocks(a, c, number, &row));
    const bool is_empty = bad == 0 || (bad != UINT32_MAX && !expected);
    for (uint32_t b = threadIdx.x; is_empty && b < kvf_div_ceil_u32(expected, p->block_size);
         b += blockDim.x)
        c->blocks[(size_t)number * p->blocks_max + b] = kvf_physical_home(c, a.layer, 0);
    if (threadIdx.x >= kvf_max_u32(1, p->lists))
        return;
    row = kvf_physical_row(c, a.layer, number, is_empty ? number : region, is_empty ? 0 : length);
    if (expected && !is_empty)
        row.ring = NULL;
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
    const kvf_rows_args *a = (const kvf_rows_args *)args;
    const uint32_t ids = (uint32_t)kvf_round_up(a->table_stride, KVF_WARP_LANES);
    const uint32_t threads = kvf_min_u32(THREADS_MAX, kvf_max_u32(THREADS_MIN, ids));
    return kvf_cuda_launch<make_rows>(dim3(tasks), dim3(threads), SHARED, (cudaStream_t)stream, *a);
}
