/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Bits of the blocks that stay, the specification. Knows nothing of scores.
 */

#include <string.h>

#include "variants.h"

void kvf_filter_ref(const void *args, uint32_t task)
{
    const kvf_filter_args *a = args;
    const uint64_t *from = a->from[task];
    const int32_t *ids = a->ids + (size_t)task * a->ids_max;
    uint64_t *bits = a->bits + (size_t)task * a->blocks_max;
    const uint32_t per = KVF_CENTROID_TOKENS / a->block_size;
    if (!from)
        return;
    const uint32_t blocks = a->blocks[task], whole = kvf_stretches(a->block_size, blocks) * per;
    memcpy(bits, from, blocks * sizeof *bits);
    if (whole > per)
        memset(bits + per, 0xff, (whole - per) * sizeof *bits);
    for (uint32_t i = 0; i < a->id_count[task]; i++)
        for (uint32_t k = 0; k < per; k++) {
            const uint32_t b = ((uint32_t)ids[i] + 1) * per + k;
            bits[b] = from[b];
        }
}
