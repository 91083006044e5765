/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Topk, resolve and assemble in one launch: by their references, one behind the other.
 *
 * Knows nothing that they do not know.
 */

#include "variants.h"

void kvf_select_ref(const void *args, uint32_t task)
{
    const kvf_select_args *a = args;
    const kvf_topk_args top = kvf_select_topk(a);
    const kvf_assemble_args assemble = kvf_select_assemble(a);
    kvf_resolve_args resolve = kvf_select_resolve(a);
    const uint32_t first = task * KVF_ASSEMBLE_LISTS;
    const uint32_t end = kvf_min_u32(top.lists, first + KVF_ASSEMBLE_LISTS);
    for (uint32_t l = first; a->k && l < end; l++)
        kvf_topk_ref(&top, l);
    /* A task of resolve has other lists: these alone. */
    const size_t row = (size_t)first * a->ids_max;
    resolve.lists = end - first;
    resolve.ids += row;
    resolve.id_count += first;
    resolve.scores = a->list_scores ? a->list_scores + first : NULL;
    resolve.slot_of_page += first;
    resolve.page_of_slot += first;
    resolve.slot_of_id += row;
    resolve.missed += row;
    resolve.misses += row;
    resolve.miss_count += first;
    for (uint32_t t = 0; t < kvf_resolve_tasks(&resolve); t++)
        kvf_resolve_ref(&resolve, t);
    kvf_assemble_ref(&assemble, task);
}
