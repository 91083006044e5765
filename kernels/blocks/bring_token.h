/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_KERNELS_BLOCKS_BRING_TOKEN_H
#define KVF_KERNELS_BLOCKS_BRING_TOKEN_H

/*
 * A token out of its physical block, in full precision: for the host forms of what fills regions.
 *
 * Knows nothing of tags.
 */

#include <string.h>

#include "blocks_args.h"
#include "quantized.h"

/* Token `token` of a physical block, which is in `page`. */
static inline void kvf_bring_token(const kvf_physical_blocks *c, const char *page, uint32_t token,
                                   void *to)
{
    const kvf_shape *s = &c->paging.shape;
    const uint32_t t = token % s->page_size;
    float x[KVF_HEAD_DIM_MAX];
    if (s->pages == KVF_PAGES_NATIVE)
        memcpy(to, kvf_page_key(s, page, t), kvf_token_bytes(s));
    else
        kvf_dequantize_token(s, page, t, to, x);
}

#endif
