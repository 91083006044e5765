/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Blocks of chunks in exact form, the specification. Knows nothing of who reads them.
 */

#include "expand_run.h"
#include "packed.h"
#include "variants.h"

void kvf_expand_ref(const void *args, uint32_t task)
{
    const kvf_expand_args *a = args;
    const kvf_shape *s = &a->paging.shape;
    kvf_packed_run run;
    float x[KVF_HEAD_DIM_MAX];
    const uint32_t tokens = kvf_expand_begin(a, task, &run);
    for (uint32_t t = 0; t < tokens; t++)
        kvf_unpack_token(s, run.home + t / s->page_size * kvf_home_page_bytes(s), t % s->page_size,
                         run.exact + t * kvf_token_bytes(s), x);
}
