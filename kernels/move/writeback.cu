/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Sealed blocks from the ring to the pool, on the GPU.
 *
 * Knows nothing of block tables: they point to the ring until the kernel `table` runs. Grid (parts
 * of at most 64 KiB of a block, rows); 8 warps move 4 KiB each at a time, 8 loads of 16 bytes per
 * lane in flight, for every block that the row sealed, which in decoding is none or one. Bound: the
 * link: the stores to mapped host memory are posted and 512 contiguous bytes per warp. Exact.
 */

#include "cuda_kernels.h"

#include "cuda/cuda.cuh"
#include "cuda/words.cuh"

#define WARPS 8u
#define WORDS 8u /* of 16 bytes, per lane */
#define PIECE (WORDS * KVF_WARP_LANES * 16u)
#define PART  (64u * 1024u)

static __global__ void __launch_bounds__(WARPS *KVF_WARP_LANES)
    write_back(const __grid_constant__ kvf_writeback_args a)
{
    const kvf_row *row = &a.row[blockIdx.y];
    const size_t bytes = kvf_block_bytes(&a.paging), begin = blockIdx.x * (size_t)PART;
    const size_t end = bytes - begin < PART ? bytes : begin + PART;
    for (uint32_t block = row->sealed_before; block < row->sealed; block++) {
        const char *from = kvf_row_ring_block(&a.paging, row, block);
        char *to = (char *)row->pool[block - row->sealed_before];
        for (size_t at = begin + threadIdx.x / KVF_WARP_LANES * PIECE; at < end;
             at += WARPS * PIECE)
            kvf_warp_move<WORDS>(to + at, from + at,
                                 (uint32_t)(end - at < PIECE ? end - at : PIECE));
    }
}

KVF_LAUNCHER(writeback, write_back,
             dim3((uint32_t)((kvf_block_bytes(&a->paging) + PART - 1) / PART), a->rows),
             (WARPS * KVF_WARP_LANES), 0)
