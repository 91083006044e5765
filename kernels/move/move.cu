/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Pages of registered host memory into slots, as the device finds their list, on the GPU.
 *
 * Knows nothing of misses. `blocks` blocks, host-known; the number of pages is read on the device.
 * Pages are cut into pieces, which go round the blocks (or warps) by index. Small pages, rows of
 * one token, go several at once: as many as fit, but no more than gives every warp or buffer some.
 * Bound: the link: bytes in flight over its round trip of 1.5 to 2.5 microseconds, so 55 GB/s need
 * 82 to 137 KB.
 *
 *   loads and stores: 16 warps per block, pieces of 4 KiB, 8 loads of 16 bytes per lane before the
 *   first store: 64 KiB in flight per block. Warps do not wait for each other. A row of 512 bytes
 *   is one instruction, 4 whole lines; 4 rows are in flight per warp, 32 KiB per block.
 *   bulk copies: one warp per block, a ring of `stages` pieces of 16 KiB (a page of 32 x 128 in
 *   bf16 is one): 128 KiB in flight per block with 8. A lane asks for a row; 32 rows of 512 bytes
 *   share a buffer. A buffer is filled again as soon as its stores have read it. No registers and
 *   few warps are taken from what else runs there.
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

/* Of small pages half as many, because each of them has addresses to hold. */
#define ROW_WORDS 4u
#define ROW_PIECE (ROW_WORDS * KVF_WARP_LANES * 16u)

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
    const uint32_t rows = pieces_at_once(a, n, ROW_PIECE, warps);
    if (rows == 1) {
        for (uint32_t i = warp; i < n * pieces; i += warps) {
            const piece p = piece_at(a, i, pieces, PIECE);
            kvf_warp_move<WORDS>(p.to, p.from, p.bytes);
        }
        return;
    }
    for (uint32_t i = warp * rows; i < n; i += warps * rows)
        kvf_warp_move_rows<ROW_WORDS>(a.to + i, a.from + i, kvf_min_u32(rows, n - i),
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

#if KVF_HAS_BULK_COPY
/* One warp. In shared memory: the buffers, then a barrier of each. Lane i takes pieces i, i + 32,
 * ... of a buffer, where they lie one behind the other. */
static __device__ void move_by_bulk(const kvf_move_args &a, uint32_t n)
{
    const uint32_t lane = threadIdx.x, step = gridDim.x;
    const uint32_t pieces = (uint32_t)((a.bytes + KVF_MOVE_STAGE_BYTES - 1) / KVF_MOVE_STAGE_BYTES);
    const uint32_t rows = pieces_at_once(a, n, KVF_MOVE_STAGE_BYTES, step * a.stages);
    const uint32_t all = n * pieces, turns = kvf_div_ceil_u32(all, rows);
    char *ring = kvf_shared();
    uint64_t *barrier = (uint64_t *)(ring + a.stages * (size_t)KVF_MOVE_STAGE_BYTES);
    /* Turn number k of this block is in buffer k % stages, in round k / stages of its barrier. */
    const uint32_t mine = turns > blockIdx.x ? (turns - blockIdx.x - 1) / step + 1 : 0;
    const auto load = [&](uint32_t k) {
        const uint32_t first = (blockIdx.x + k * step) * rows;
        const uint32_t end = kvf_min_u32(all, first + rows), stage = k % a.stages;
        char *buffer = ring + stage * (size_t)KVF_MOVE_STAGE_BYTES;
        if (lane == 0)
            kvf_barrier_expect(&barrier[stage],
                               rows > 1 ? (end - first) * (uint32_t)a.bytes
                                        : piece_at(a, first, pieces, KVF_MOVE_STAGE_BYTES).bytes);
        __syncwarp();
        for (uint32_t i = first + lane; i < end; i += KVF_WARP_LANES) {
            const piece p = piece_at(a, i, pieces, KVF_MOVE_STAGE_BYTES);
            kvf_bulk_load(buffer + (i - first) * (size_t)p.bytes, p.from, p.bytes, &barrier[stage]);
        }
    };
    for (uint32_t s = lane; s < a.stages; s += KVF_WARP_LANES)
        kvf_barrier_init(&barrier[s], 1);
    __syncwarp();
    for (uint32_t k = 0; k < a.stages && k < mine; k++)
        load(k);
    for (uint32_t k = 0; k < mine; k++) {
        const uint32_t first = (blockIdx.x + k * step) * rows;
        const uint32_t end = kvf_min_u32(all, first + rows), stage = k % a.stages;
        const char *buffer = ring + stage * (size_t)KVF_MOVE_STAGE_BYTES;
        kvf_barrier_wait(&barrier[stage], k / a.stages % 2);
        for (uint32_t i = first + lane; i < end; i += KVF_WARP_LANES) {
            const piece p = piece_at(a, i, pieces, KVF_MOVE_STAGE_BYTES);
            kvf_bulk_store(p.to, buffer + (i - first) * (size_t)p.bytes, p.bytes);
        }
        kvf_bulk_commit();
        /* With one buffer its own stores must have read it; else those of the turn before, so that
         * these go on meanwhile. */
        if (a.stages == 1)
            kvf_bulk_wait_read<0>();
        else
            kvf_bulk_wait_read<1>();
        __syncwarp();
        const uint32_t freed = a.stages == 1 ? k : k - 1; /* wraps for k == 0: nothing is freed */
        if (freed < mine && freed + a.stages < mine)
            load(freed + a.stages);
    }
    kvf_bulk_wait<0>();
}
#endif

static __global__ void __launch_bounds__(KVF_WARP_LANES)
    move_bulk(const __grid_constant__ kvf_move_args a)
{
    const uint32_t n = *a.count;
    if (n < a.low || n >= a.high)
        return;
#if KVF_HAS_BULK_COPY
    move_by_bulk(a, n);
#else
    move_by_warps(a, n, blockIdx.x, gridDim.x);
#endif
    __syncthreads();
    if (threadIdx.x == 0)
        announce(a);
}

extern "C" int kvf_move_cuda(const void *args, uint32_t tasks, void *stream)
{
    const kvf_move_args *a = (const kvf_move_args *)args;
    (void)tasks;
    if (a->blocks == 0 || a->blocks > KVF_MOVE_BLOCKS_MAX || a->stages > KVF_MOVE_STAGES_MAX)
        return cudaErrorInvalidValue;
    if (a->stages == 0)
        return kvf_cuda_launch<move_pages>(dim3(a->blocks), dim3(WARPS * KVF_WARP_LANES), 0,
                                           (cudaStream_t)stream, *a);
    return kvf_cuda_launch<move_bulk>(dim3(a->blocks), dim3(KVF_WARP_LANES),
                                      a->stages * (KVF_MOVE_STAGE_BYTES + sizeof(uint64_t)),
                                      (cudaStream_t)stream, *a);
}
