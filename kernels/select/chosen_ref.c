/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Lists of chosen pages that no ranking makes, or that are cut after it, the specification: what
 * the caller gave, the newest, one list for all, pages of chosen tokens, as many as there is room
 * for, and how much of a budget is for pages.
 *
 * Knows nothing of where pages lie.
 */

#include <math.h>
#include <string.h>

#include "variants.h"

/*
 * Pages that the caller wants as scores of pages, the specification.
 *
 * Knows nothing of where scores come from. No entry, whatever it is, is used as an index before it
 * is known to name a page.
 */

void kvf_caller_scores_ref(const void *args, uint32_t task)
{
    const kvf_caller_scores_args *a = args;
    const kvf_paging *p = &a->paging;
    const kvf_row *row = &a->row[task / p->lists];
    const uint32_t head = task % p->lists, pages = kvf_row_sealed_pages(p, row);
    const size_t first = kvf_caller_scores_first(a, task);
    float *out = a->out + (size_t)task * a->stride;
    KVF_ASSERT(pages <= a->stride);
    for (uint32_t i = 0; i < pages; i++) {
        const int is_scored = a->scores && i < a->caller_stride;
        out[i] =
            is_scored && kvf_caller_page_counts(p, row, head, i) ? a->scores[first + i] : -INFINITY;
    }
    for (uint32_t i = a->scores ? 0 : a->caller_stride; i-- > 0;) {
        const uint32_t page = (uint32_t)a->ids[first + i]; /* -1 is none */
        if (kvf_caller_page_counts(p, row, head, page))
            out[page] = (float)(a->caller_stride - i);
    }
}

/*
 * The newest pages of each list; with as many as there are, all of them. Knows nothing of scores.
 */

void kvf_newest_ref(const void *args, uint32_t task)
{
    const kvf_newest_args *a = args;
    const kvf_row *row = &a->row[task / a->paging.lists];
    const uint32_t sealed = kvf_row_sealed_pages(&a->paging, row);
    const uint32_t count = kvf_min_u32(a->choose[task], sealed);
    KVF_ASSERT(count <= a->ids_max);
    for (uint32_t i = 0; i < count; i++)
        a->ids[(size_t)task * a->ids_max + i] = (int32_t)(sealed - count + i);
    a->id_count[task] = count;
}

/*
 * One list of ids for every list of a row. Knows nothing of what the ids mean.
 */

void kvf_spread_ref(const void *args, uint32_t task)
{
    const kvf_spread_args *a = args;
    const uint32_t from = task / a->lists, count = a->from_count[from];
    memcpy(a->ids + (size_t)task * a->ids_max, a->from + (size_t)from * a->ids_max,
           count * sizeof *a->ids);
    a->id_count[task] = count;
}

/*
 * Chosen tokens, ascending, into the pages that hold them and what to skip of each. Knows nothing
 * of why they were chosen.
 */

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

/*
 * The best of chosen pages, as many as there is room for by their tokens, the specification.
 *
 * Knows nothing of how pages were chosen, only that the best come first by score, ties by the lower
 * id. Ids stay ascending.
 */

static uint32_t tokens_of(const kvf_trim_args *a, uint32_t list, int32_t id)
{
    return (uint32_t)__builtin_popcountll(kvf_trim_live(a, list, id));
}

/* Tokens of the pages whose key is at least `key`. */
static uint32_t tokens_from(const kvf_trim_args *a, uint32_t list, uint32_t key)
{
    const int32_t *ids = a->ids + (size_t)list * a->ids_max;
    uint32_t tokens = 0;
    for (uint32_t i = 0; i < a->id_count[list]; i++)
        if (kvf_trim_key(a, list, ids[i]) >= key)
            tokens += tokens_of(a, list, ids[i]);
    return tokens;
}

void kvf_trim_ref(const void *args, uint32_t task)
{
    const kvf_trim_args *a = args;
    int32_t *ids = a->ids + (size_t)task * a->ids_max;
    const uint32_t room = kvf_trim_room(a, task);
    uint32_t key = 0, count = 0;
    if (tokens_from(a, task, 0) <= room)
        return;
    /* The best key at which pages no longer fit, found bit by bit. */
    for (uint32_t bit = 0x80000000u; bit; bit >>= 1)
        if (tokens_from(a, task, key | bit) > room)
            key |= bit;
    uint32_t tokens = key == UINT32_MAX ? 0 : tokens_from(a, task, key + 1);
    for (uint32_t i = 0; i < a->id_count[task]; i++) {
        const uint32_t own = kvf_trim_key(a, task, ids[i]);
        if (own < key)
            continue;
        tokens += own == key ? tokens_of(a, task, ids[i]) : 0;
        if (own > key || tokens <= room)
            ids[count++] = ids[i];
    }
    a->id_count[task] = count;
}

/*
 * How static the attention of a layer is: tokens that the first and the last query of the window
 * both rank highest (PRKV, appendix G).
 *
 * Knows nothing of scores. Static tokens and pages together never exceed `rest`.
 */

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
