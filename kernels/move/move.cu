/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Pages of registered host memory into slots, as the device finds their list, on the GPU.
 *
 * Knows nothing of misses. `blocks` blocks, host-known; the number of pages is read on the device.
 * Pages are cut into pieces, which go round the warps by index. Small pages, of one token, go
 * several at once: as many as fit, but no more than gives every warp some.
 * Bound: the link: bytes in flight over its round trip of 1.5 to 2.5 microseconds, so 55 GB/s need
 * 82 to 137 KB.
 *
 * 16 warps per block, pieces of 4 KiB, 8 loads of 16 bytes per lane before the first store: 64 KiB
 * in flight per block. Warps do not wait for each other. A page of 512 bytes
 * is one instruction, 4 whole lines; 4 pages are in flight per warp, 32 KiB per block.
 *
 * Exact. Invariant: a block announces itself after a barrier that all its stores precede, and a
 * fence for the whole system; the last one to do so stores `done` with release order for the
 * system, so that who sees the value sees every byte. It leaves `arrived` at zero for the next
 * launch.
 */

#include "cuda_kernels.h"

#include "cuda/cuda.cuh"
#include "cuda/words.cuh"

#define WARPS 16u
#define WORDS 8u /* of 16 bytes, per lane */
#define PIECE (WORDS * KVF_WARP_LANES * 16u)

/* Half as many small pages, because each of them has addresses to hold. */
#define SMALL_WORDS 4u
#define SMALL_PIECE (SMALL_WORDS * KVF_WARP_LANES * 16u)

/* One piece: where it goes and how many bytes it has. */
struct piece {
    const char *from;
    char *to;
    uint32_t bytes;
};

static __device__ __forceinline__ piece piece_at(const kvf_move_args &a, uint32_t index,
                                                 uint32_t pieces, uint32_t piece_bytes)
{
    const uint32_t page = index / pieces;
    const size_t at = index % pieces * (size_t)piece_bytes, left = a.bytes - at;
    return {(const char *)a.from[page] + at, (char *)a.to[page] + at,
            left < piece_bytes ? (uint32_t)left : piece_bytes};
}

/* By one thread of the block, when all bytes of the block are written. */
static __device__ __forceinline__ void announce(const kvf_move_args &a)
{
    if (!a.done)
        return;
    __threadfence_system();
    if (atomicAdd(a.arrived, 1u) + 1 != gridDim.x)
        return;
    *a.arrived = 0;
    __threadfence_system();
    kvf_store_release_system(a.done, a.value);
}

/* How many pieces go at once: 1, or of small pages what `room` holds, if there are that many for
 * each of `places`. */
static __device__ __forceinline__ uint32_t pieces_at_once(const kvf_move_args &a, uint32_t n,
                                                          uint32_t room, uint32_t places)
{
    if (a.bytes > room / 2)
        return 1;
    return kvf_max_u32(1, kvf_min_u32(room / (uint32_t)a.bytes, n / places));
}

static __device__ __forceinline__ void move_by_warps(const kvf_move_args &a, uint32_t n,
                                                     uint32_t warp, uint32_t warps)
{
    const uint32_t pieces = (uint32_t)((a.bytes + PIECE - 1) / PIECE);
    const uint32_t together = pieces_at_once(a, n, SMALL_PIECE, warps);
    if (together == 1) {
        for (uint32_t i = warp; i < n * pieces; i += warps) {
            const piece p = piece_at(a, i, pieces, PIECE);
            kvf_warp_move<WORDS>(p.to, p.from, p.bytes);
        }
        return;
    }
    for (uint32_t i = warp * together; i < n; i += warps * together)
        kvf_warp_move_pieces<SMALL_WORDS>(a.to + i, a.from + i, kvf_min_u32(together, n - i),
                                          (uint32_t)a.bytes);
}

static __global__ void __launch_bounds__(WARPS *KVF_WARP_LANES)
    move_pages(const __grid_constant__ kvf_move_args a)
{
    const uint32_t n = *a.count;
    if (n < a.low || n >= a.high)
        return;
    move_by_warps(a, n, blockIdx.x * WARPS + threadIdx.x / KVF_WARP_LANES, gridDim.x * WARPS);
    __syncthreads();
    if (threadIdx.x == 0)
        announce(a);
}

extern "C" int kvf_move_cuda(const void *args, uint32_t, void *stream)
{
    const kvf_move_args *a = (const kvf_move_args *)args;
    if (a->blocks == 0 || a->blocks > KVF_MOVE_BLOCKS_MAX)
        return cudaErrorInvalidValue;
    return kvf_cuda_launch<move_pages>(dim3(a->blocks), dim3(WARPS * KVF_WARP_LANES), 0,
                                       (cudaStream_t)stream, *a);
}
