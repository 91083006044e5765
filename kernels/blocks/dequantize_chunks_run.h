/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_KERNELS_BLOCKS_DEQUANTIZE_CHUNKS_RUN_H
#define KVF_KERNELS_BLOCKS_DEQUANTIZE_CHUNKS_RUN_H

/* The run of a task of dequantize_chunks, for every implementation on the host. Knows nothing of
 * numbers. */

#include "blocks_args.h"
#include "move/quantized_run.h"

/* Returns its tokens; 0: the task has none. */
static inline uint32_t kvf_dequantize_chunks_begin(const kvf_dequantize_chunks_args *a,
                                                   uint32_t task, kvf_quantized_run *run)
{
    const kvf_paging *p = &a->paging;
    const uint32_t head = task % p->kv_heads, place = task / p->kv_heads;
    const uint32_t row = place / a->blocks_each, block = place % a->blocks_each;
    const uint32_t tokens = kvf_dequantize_chunks_tokens(a, row, block);
    if (tokens == 0)
        return 0;
    *run = (kvf_quantized_run){.exact = a->scratch + place * kvf_block_bytes(p) +
                                        head * kvf_run_bytes(p),
                               .home = (char *)a->blocks[(size_t)row * p->blocks_max + block] +
                                       head * kvf_stored_run_bytes(p)};
    return tokens;
}

#endif
