/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Topk, resolve and assemble in one launch, and reduce_mass before them: by their references, one
 * after the other.
 *
 * Knows nothing that they do not know.
 */

#include "variants.h"

void kvf_select_ref(const void *args, uint32_t task)
{
    const kvf_select_args *a = args;
    const kvf_topk_args top = kvf_select_topk(a);
    const kvf_choices *c = &a->assemble.choices;
    (void)task;
    for (uint32_t t = 0; a->masses.mass && t < kvf_reduce_mass_tasks(&a->masses); t++)
        kvf_reduce_mass_ref(&a->masses, t);
    for (uint32_t l = 0; a->k && l < kvf_topk_tasks(&top); l++)
        kvf_topk_ref(&top, l);
    for (uint32_t h = 0; h < kvf_resolve_tasks(c); h++)
        kvf_resolve_ref(c, h);
    for (uint32_t t = 0; t < kvf_assemble_tasks(&a->assemble); t++)
        kvf_assemble_ref(&a->assemble, t);
}
