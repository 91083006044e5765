/* SPDX-License-Identifier: Apache-2.0 */

/*
 * How static the attention of a layer is: tokens that the first and the last query of the window
 * both rank highest (PRKV, appendix G).
 *
 * Knows nothing of scores. Static tokens and pages together never exceed `rest`.
 */

#include "variants.h"

static uint32_t common(const int32_t *a, uint32_t a_count, const int32_t *b, uint32_t b_count)
{
    uint32_t i = 0, j = 0, n = 0;
    while (i < a_count && j < b_count) {
        n += a[i] == b[j];
        const int32_t x = a[i], y = b[j];
        i += x <= y;
        j += y <= x;
    }
    return n;
}

void kvf_overlap_ref(const void *args, uint32_t task)
{
    const kvf_overlap_args *a = args;
    const kvf_paging *p = &a->paging;
    uint64_t sum = 0;
    (void)task;
    for (uint32_t h = 0; h < p->kv_heads; h++)
        sum += common(a->a + (size_t)h * a->ids_max, a->a_count[h], a->b + (size_t)h * a->ids_max,
                      a->b_count[h]);
    const uint32_t page_size = p->shape.page_size;
    const uint32_t tokens = (uint32_t)(sum / p->kv_heads) / page_size * page_size;
    /* With fewer candidates than room all overlap, which says nothing yet: a quarter, for now. */
    a->row->share[0] = a->a_count[0] < a->rest ? a->rest / 4 : kvf_min_u32(tokens, a->rest);
    a->row->share[1] = (a->rest - a->row->share[0]) / page_size;
    for (uint32_t i = 0; i < a->choose_lists; i++)
        a->choose[i] = kvf_row_choose(p, a->row);
    if (a->row->share[0] < a->counters->static_min)
        a->counters->static_min = a->row->share[0];
    if (a->row->share[0] > a->counters->static_max)
        a->counters->static_max = a->row->share[0];
}
