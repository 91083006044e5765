/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Boxes over the boxes of consecutive pages, on the GPU.
 *
 * Knows nothing of keys. One warp per super, four per block, grid (ceil(supers_max / 4), lists). A
 * lane keeps 8 channels of lo or of hi and walks over the boxes of the super in order, 16 bytes per
 * load and LOADS in flight; at head_dim 128 the 32 lanes are exactly one box. Bound: one read of
 * the digests of the pages, 8 KiB per super at head_dim 128, 512 bytes written. The bits of
 * super_ref.c, because no lane changes the order.
 */

#include <math.h>

#include "cuda_kernels.h"

#include "cuda/cuda.cuh"
#include "cuda/words.cuh"

#define WARPS 4u
#define LOADS 8u
#define LANES 8u /* channels of a lane */

static __global__ void __launch_bounds__(WARPS *KVF_WARP_LANES)
    build_supers(const __grid_constant__ kvf_super_args a)
{
    const uint32_t list = blockIdx.y, index = blockIdx.x * WARPS + threadIdx.x / KVF_WARP_LANES;
    const uint32_t supers = kvf_div_ceil_u32(a.pages[list], KVF_SUPER_PAGES);
    const uint32_t base = kvf_min_u32(supers, a.first ? a.first[list] : 0);
    if (index >= kvf_min_u32(supers - base, a.count ? a.count[list] : a.supers_max) ||
        index >= a.supers_max)
        return;
    const uint32_t first = (base + index) * KVF_SUPER_PAGES * a.subs;
    const uint32_t end = kvf_min_u32(a.pages[list] * a.subs, first + KVF_SUPER_PAGES * a.subs);
    const size_t box_bytes = 4 * (size_t)a.head_dim;
    char *to = (char *)a.supers[list] + (base + index) * box_bytes;
    /* The words of a box: those of lo, then those of hi. */
    for (uint32_t word = threadIdx.x % KVF_WARP_LANES; word < a.head_dim / LANES * 2;
         word += KVF_WARP_LANES) {
        const char *from = (const char *)a.digests[list] + word * (size_t)16;
        const bool is_high = word >= a.head_dim / LANES;
        float best[LANES];
#pragma unroll
        for (uint32_t i = 0; i < LANES; i++)
            best[i] = is_high ? -INFINITY : INFINITY;
        for (uint32_t b = first; b < end; b += LOADS) {
            uint4 data[LOADS];
#pragma unroll
            for (uint32_t k = 0; k < LOADS; k++)
                if (b + k < end)
                    data[k] = kvf_load_once(from + (b + k) * box_bytes);
#pragma unroll
            for (uint32_t k = 0; k < LOADS; k++) {
                float x[LANES];
                if (b + k >= end)
                    continue;
                kvf_widen_word<kvf_bf16>(data[k], x);
#pragma unroll
                for (uint32_t i = 0; i < LANES; i++)
                    best[i] = (is_high ? x[i] > best[i] : x[i] < best[i]) ? x[i] : best[i];
            }
        }
        uint32_t out[LANES / 2];
#pragma unroll
        for (uint32_t i = 0; i < LANES / 2; i++)
            out[i] = kvf_pair_bits(kvf_bf16_from_float(best[2 * i]),
                                   kvf_bf16_from_float(best[2 * i + 1]));
        *(uint4 *)(to + word * (size_t)16) = make_uint4(out[0], out[1], out[2], out[3]);
    }
}

extern "C" int kvf_super_cuda(const void *args, uint32_t tasks, void *stream)
{
    const kvf_super_args *a = (const kvf_super_args *)args;
    (void)tasks;
    if (a->lists == 0 || a->supers_max == 0)
        return cudaSuccess;
    return kvf_cuda_launch(build_supers, dim3(kvf_div_ceil_u32(a->supers_max, WARPS), a->lists),
                           dim3(WARPS * KVF_WARP_LANES), 0, (cudaStream_t)stream, *a);
}
