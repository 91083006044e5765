/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Blocks of chunks in exact form, 16 tokens at a time. Bound: arithmetic, that of widen.
 *
 * Knows nothing of who reads them. Exactness: the bits of expand_ref.c.
 */

#include "expand_run.h"
#include "move/packed_simd.h"
#include "variants.h"

void KVF_SIMD_NAME(expand)(const void *args, uint32_t task)
{
    const kvf_expand_args *a = args;
    kvf_packed_run run;
    code_tile tile;
    packed_rows rows;
    const uint32_t tokens = kvf_expand_begin(a, task, &run);
    for (uint32_t first = 0; first < tokens; first += KVF_CODE_LANES)
        unpack_tokens(&a->paging.shape, &run, first, kvf_min_u32(KVF_CODE_LANES, tokens - first),
                      &tile, &rows);
}
