/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Tables and lengths of the caller as rows, the specification and the only host form.
 *
 * Knows nothing of what the physical blocks hold. Nothing after the end of a table is read,
 * whatever the lengths say.
 */

#include "variants.h"

/* The row's blocks and physical blocks. Returns the first token that is not finite, 0 if an id is
 * none, or UINT32_MAX. */
static uint32_t fill_blocks(const kvf_rows_args *a, uint32_t task, const kvf_row *row)
{
    const kvf_physical_blocks *c = a->blocks;
    const kvf_paging *p = &c->paging;
    uint32_t *physical = c->physical + (size_t)task * p->blocks_max;
    uint32_t bad = UINT32_MAX;
    for (uint32_t b = 0; b < kvf_row_blocks(p, row); b++) {
        const uint32_t block = kvf_rows_physical(a, c, task, b);
        const uint32_t tokens = kvf_min_u32(p->block_size, row->length - b * p->block_size);
        if (block == UINT32_MAX) {
            bad = 0;
            continue;
        }
        const uint64_t nonfinite =
            *kvf_physical_nonfinite(c, a->layer, block) & kvf_live_bits(tokens, 0);
        if (nonfinite)
            bad = kvf_min_u32(bad, b * p->block_size + (uint32_t)__builtin_ctzll(nonfinite));
        physical[b] = block;
        row->blocks[b] = b < row->sealed || !row->ring ? kvf_physical_home(c, a->layer, block)
                                                       : kvf_row_ring_block(p, row, b);
    }
    return bad;
}

void kvf_rows_ref(const void *args, uint32_t task)
{
    const kvf_rows_args *a = args;
    const kvf_physical_blocks *c = a->blocks;
    const kvf_paging *p = &c->paging;
    const uint32_t length = (uint32_t)a->lengths[task];
    const uint32_t expected = kvf_rows_expected(a, task);
    uint32_t is_none = kvf_rows_is_bad(a, task);
    for (uint32_t i = 0; i < task; i++)
        is_none |= kvf_rows_is_taken(a, task, i);
    const uint32_t region =
        is_none || length == 0 || expected || !a->regions ? task : (uint32_t)a->regions[task];
    kvf_row row = kvf_physical_row(c, a->layer, task, region, is_none ? 0 : length);
    if (expected)
        row.ring = NULL;
    const uint32_t bad = is_none ? 0 : fill_blocks(a, task, &row);
    if (bad == 0 || (bad != UINT32_MAX && !expected)) {
        row = kvf_physical_row(c, a->layer, task, task, 0);
        for (uint32_t b = 0; b < kvf_div_ceil_u32(expected, p->block_size); b++)
            row.blocks[b] = kvf_physical_home(c, a->layer, 0);
    }
    if (bad != UINT32_MAX)
        __atomic_fetch_add(&c->counters[a->layer].bad_rows, 1, __ATOMIC_RELAXED);
    for (uint32_t l = 0; l < p->lists; l++)
        kvf_rows_list(c, a->layer, task, &row, l);
    c->row[task] = row;
    c->region[task] = region;
    c->is_bad[task] = bad + 1; /* UINT32_MAX is none */
}
