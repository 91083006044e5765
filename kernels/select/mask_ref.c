/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Chosen tokens, ascending, into the pages that hold them and what to skip of each. Knows nothing
 * of why they were chosen.
 */

#include "variants.h"

void kvf_mask_ref(const void *args, uint32_t task)
{
    const kvf_mask_args *a = args;
    const int32_t page_size = (int32_t)a->paging.shape.page_size;
    const int32_t *tokens = a->tokens + (size_t)task * a->tokens_max;
    int32_t *ids = a->ids + (size_t)task * a->ids_max;
    uint64_t *masks = a->masks + (size_t)task * a->ids_max;
    uint32_t count = 0;
    for (uint32_t i = 0; i < a->token_count[task]; i++) {
        const int32_t page = tokens[i] / page_size;
        if (count == 0 || ids[count - 1] != page) {
            KVF_ASSERT(count < a->ids_max);
            ids[count] = page;
            masks[count++] = ~UINT64_C(0);
        }
        masks[count - 1] &= ~(UINT64_C(1) << tokens[i] % page_size);
    }
    a->id_count[task] = count;
}
