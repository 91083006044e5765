/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_KERNELS_BLOCKS_BRING_TOKEN_CUH
#define KVF_KERNELS_BLOCKS_BRING_TOKEN_CUH

/*
 * A token out of its physical block, in full precision, by a warp: for what fills regions on the
 * GPU.
 *
 * Knows nothing of tags. Bits are those of bring_token.h.
 */

#include "kernels.h"

#include "move/quantized.cuh"

/* Token `token` of a physical block, which is in `page`. Half of the warp dequantizes, and half
 * repeats it.
 * */
template <bool is_quantized>
static __device__ __forceinline__ void kvf_bring_token(const kvf_physical_blocks *c,
                                                       const char *page, uint32_t token, char *to)
{
    const kvf_shape *s = &c->paging.shape;
    const uint32_t t = token % s->page_size, lane = threadIdx.x % KVF_WARP_LANES;
    if constexpr (is_quantized) {
        quantized_token_back(s, page, t, to, lane >= KVF_CODE_LANES);
        return;
    }
    const size_t bytes = kvf_token_bytes(s);
    const char *from = (const char *)kvf_page_key(s, page, t);
    for (size_t i = lane * sizeof(uint4); i < bytes; i += KVF_WARP_LANES * sizeof(uint4))
        *(uint4 *)(to + i) = *(const uint4 *)(from + i);
}

#endif
