/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Sealed blocks into home form, 16 tokens at a time. Bound: arithmetic, about 12 operations per
 * channel of a key, there and back, and 8 of a value.
 *
 * Knows nothing of what else sealing does. Exactness: the bits of narrow_ref.c.
 */

#include "packed_simd.h"
#include "variants.h"

void KVF_SIMD_NAME(narrow)(const void *args, uint32_t task)
{
    const kvf_narrow_args *a = args;
    const kvf_shape *s = &a->paging.shape;
    kvf_packed_run run;
    code_tile tile;
    packed_rows rows;
    if (!kvf_narrow_begin(a, task, &run))
        return;
    for (uint32_t first = 0; first < a->paging.block_size; first += KVF_CODE_LANES) {
        const uint32_t count = tokens_at(&a->paging, first);
        pack_keys(s, &run, first, count, &tile, &rows);
        for (uint32_t r = 0; r < count; r++)
            pack_value(s, &run, first + r, rows.at[r]);
        unpack_tokens(s, &run, first, count, &tile, &rows);
    }
}
