/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Scattered equal blocks of bytes, on the GPU: also from the landing area of a transfer into slots.
 *
 * Knows nothing of pages. A warp moves a piece of at most 2 KiB, or as many whole blocks of the
 * list as fit, 4 loads of 16 bytes per lane in flight; 8 warps per block, and as many blocks as
 * there are pieces. A block of 512 bytes is one instruction of a warp, 4 lines. Bound: one read and
 * one write of every byte; with 6 blocks on a multiprocessor 96 KiB are in flight there. Exact.
 */

#include "cuda_kernels.h"

#include "cuda/cuda.cuh"
#include "cuda/words.cuh"

#define WARPS 8u
#define WORDS 4u /* of 16 bytes, per lane */
#define PIECE (WORDS * KVF_WARP_LANES * 16u)

static __global__ void __launch_bounds__(WARPS *KVF_WARP_LANES, 6)
    copy_blocks(const __grid_constant__ kvf_copy_args a, uint32_t pieces)
{
    const uint32_t piece = blockIdx.x * WARPS + threadIdx.x / KVF_WARP_LANES;
    const uint32_t index = piece / pieces;
    if (index >= a.count)
        return;
    const size_t at = piece % pieces * (size_t)PIECE;
    const size_t left = a.bytes - at;
    kvf_warp_move<WORDS>((char *)a.to[index] + at, (const char *)a.from[index] + at,
                         left < PIECE ? (uint32_t)left : PIECE);
}

static __global__ void __launch_bounds__(WARPS *KVF_WARP_LANES, 6)
    copy_small(const __grid_constant__ kvf_copy_args a, uint32_t each)
{
    const uint32_t first = (blockIdx.x * WARPS + threadIdx.x / KVF_WARP_LANES) * each;
    if (first < a.count)
        kvf_warp_move_pieces<WORDS>(a.to + first, a.from + first,
                                    kvf_min_u32(each, a.count - first), (uint32_t)a.bytes);
}

extern "C" int kvf_copy_cuda(const void *args, uint32_t, void *stream)
{
    const kvf_copy_args *a = (const kvf_copy_args *)args;
    const uint64_t pieces = (a->bytes + PIECE - 1) / PIECE;
    if (a->count == 0 || a->bytes == 0)
        return cudaSuccess;
    if (a->bytes <= PIECE / 2) {
        const uint32_t each = PIECE / (uint32_t)a->bytes;
        const uint32_t blocks = kvf_div_ceil_u32(a->count, each * WARPS);
        return kvf_cuda_launch<copy_small>(dim3(blocks), dim3(WARPS * KVF_WARP_LANES), 0,
                                           (cudaStream_t)stream, *a, each);
    }
    if (pieces > (UINT32_MAX - WARPS) / a->count)
        return cudaErrorInvalidValue;
    const uint32_t blocks = kvf_div_ceil_u32((uint32_t)pieces * a->count, WARPS);
    return kvf_cuda_launch<copy_blocks>(dim3(blocks), dim3(WARPS * KVF_WARP_LANES), 0,
                                        (cudaStream_t)stream, *a, (uint32_t)pieces);
}
