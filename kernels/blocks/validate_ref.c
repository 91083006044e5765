/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Regions are validated against rows, the specification and the only host form.
 *
 * Knows nothing of policies, and nothing of slots.
 */

#include "bring_token.h"
#include "variants.h"

/* Token `token` of the row, to `to` unless it is there; returns 1 if it was not. */
static uint32_t bring(const kvf_validate_args *a, const uint32_t *physical, uint32_t head,
                      uint32_t token, kvf_physical_tag *tag, char *to)
{
    const kvf_physical_blocks *c = a->blocks;
    const kvf_paging *p = &c->paging;
    const uint32_t block = token / p->block_size, t = token % p->block_size;
    const kvf_physical_tag wanted = kvf_physical_tag_of(c, a->layer, physical[block], t, 1);
    if (kvf_physical_tag_is(tag, wanted))
        return 0;
    kvf_bring_token(c, kvf_physical_page(c, a->layer, physical[block], head, t), t, to);
    *tag = wanted;
    return 1;
}

void kvf_validate_ref(const void *args, uint32_t task)
{
    const kvf_validate_args *a = args;
    const kvf_physical_blocks *c = a->blocks;
    const kvf_paging *p = &c->paging;
    const uint32_t number = task / a->kv_heads, head = task % a->kv_heads;
    const kvf_row *row = &c->row[number];
    const uint32_t *physical = c->physical + (size_t)number * p->blocks_max;
    const size_t token_bytes = kvf_token_bytes(&p->shape);
    if (task == 0)
        ++*c->clock;
    if (row->length == 0 || kvf_row_is_idle(row, head))
        return;
    kvf_physical_tag *tags = c->token_tags + kvf_region_head(c, c->region[number], a->layer, head) *
                                                 kvf_region_tokens(p);
    uint32_t brought = 0;
    for (uint32_t t = 0; t < row->store_count[head]; t++)
        brought += bring(a, physical, head, t, &tags[t], kvf_store_token(p, row->store, head, t));
    for (uint32_t t = row->sealed * p->block_size; row->ring && t < row->length; t++)
        brought +=
            bring(a, physical, head, t, &tags[p->sink + t % (p->ring_blocks * p->block_size)],
                  kvf_row_run(p, row, t / p->block_size, head) + t % p->block_size * token_bytes);
    __atomic_fetch_add(&c->counters[a->layer].tokens_brought, brought, __ATOMIC_RELAXED);
}
