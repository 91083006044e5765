/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Means of stretches that were written, on the GPU; see average_ref.c for the meaning.
 *
 * Knows nothing of keys. A block is KVF_AVERAGE_STRETCHES stretches of a row: a thread per channel
 * (score/means.cuh), one stretch and head after another. Bound: a word per stretch; after a prompt
 * its codes, once. Exact.
 */

#include "cuda_kernels.h"
#include "score/means.cuh"

/* Means of all coarse heads of the stretch that begins in a cell. By the whole block. */
static __device__ __forceinline__ void average(const kvf_average_args &a, uint32_t cell, float *all)
{
    const kvf_cells *c = a.cells;
    const kvf_paging *p = &c->paging;
    const uint32_t stretch = cell / kvf_stretch_cells(c), head_dim = p->shape.head_dim;
    for (uint32_t h = 0; h < p->kv_heads; h++) {
        const uint32_t number = c->coarse[a.layer * p->kv_heads + h];
        kvf_code_group group[KVF_MEAN_GROUPS];
        if (number == UINT32_MAX)
            continue;
        const size_t at = (size_t)number * c->stretches + stretch;
        kvf_stretch_groups(&a, cell, h, group);
        const uint16_t scale =
            kvf_mean_of(c->means + at * head_dim + threadIdx.x, group, all, head_dim);
        if (threadIdx.x == 0)
            c->mean_scales[at] = scale;
        __syncthreads(); /* `all` is read */
    }
}

static __global__ void __launch_bounds__(KVF_HEAD_DIM_MAX)
    average_cells(const __grid_constant__ kvf_average_args a)
{
    const kvf_cells *c = a.cells;
    const uint32_t parts = kvf_div_ceil_u32(a.stretches_max, KVF_AVERAGE_STRETCHES);
    const uint32_t number = blockIdx.x / parts, per = kvf_stretch_cells(c);
    const uint32_t first = 1 + blockIdx.x % parts * KVF_AVERAGE_STRETCHES;
    const uint32_t *cells = c->cell + (size_t)number * c->paging.blocks_max;
    const uint32_t end =
        kvf_min_u32(1 + kvf_cells_ranked(c, number), first + KVF_AVERAGE_STRETCHES);
    float *const all = (float *)kvf_shared();
    uint32_t *const is_ours = (uint32_t *)(all + c->paging.shape.head_dim);
    /* A thread claims a stretch, or several where heads are small. */
    for (uint32_t i = first + threadIdx.x; i < end; i += blockDim.x)
        is_ours[i - first] =
            atomicExch(kvf_cell_is_mean(c, a.layer, cells[(size_t)i * per]), 1u) == 0;
    __syncthreads();
    for (uint32_t i = first; i < end; i++)
        if (is_ours[i - first])
            average(a, cells[(size_t)i * per], all);
}

extern "C" int kvf_average_cuda(const void *args, uint32_t tasks, void *stream)
{
    const kvf_average_args *a = (const kvf_average_args *)args;
    const uint32_t head_dim = a->head_dim;
    if (tasks == 0)
        return cudaSuccess;
    return kvf_cuda_launch<average_cells>(dim3(tasks), dim3(head_dim),
                                          (head_dim + KVF_AVERAGE_STRETCHES) * sizeof(float),
                                          (cudaStream_t)stream, *a);
}
