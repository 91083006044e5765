/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Page tables of rows on the GPU; see table_ref.c for the meaning.
 *
 * Knows nothing of what the pages hold. Grid: (parts of a table, rows); a thread per entry. After a
 * decode step that is a page or two per row, after a restructuring all of them: 16 bytes are moved
 * per entry. Exact.
 */

#include "cuda.cuh"
#include "cuda_kernels.h"

#define THREADS 128u
#define PARTS   16u

static __global__ void table_kernel(const __grid_constant__ kvf_table_args a)
{
    const kvf_row *row = &a.row[blockIdx.y];
    const uint32_t end = kvf_row_blocks(&a.paging, row), first = row->sealed_before;
    const uint32_t sealed = row->sealed;
    void **blocks = row->blocks;   /* [blocks_max] */
    void *const *pool = row->pool; /* [sealed - first] */
    for (uint32_t b = first + blockIdx.x * blockDim.x + threadIdx.x; b < end;
         b += gridDim.x * blockDim.x)
        blocks[b] = b < sealed ? pool[b - first] : (void *)kvf_row_ring_block(&a.paging, row, b);
}

KVF_LAUNCHER(table, table_kernel,
             dim3(kvf_min_u32(PARTS, kvf_div_ceil_u32(a->paging.blocks_max, 8 * THREADS)), tasks),
             THREADS, 0)
