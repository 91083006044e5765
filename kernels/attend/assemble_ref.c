/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The spans that each list attends: static store, window, then chosen pages by ascending id.
 *
 * Knows nothing of policies. The order depends on ids alone, not on what is resident, and a token
 * is in one span only: static store and pages are disjoint by the static bits.
 */

#include "variants.h"

typedef struct list_sums {
    uint64_t tokens;
    uint64_t misses;
} list_sums;

static uint32_t add_span(kvf_span *spans, uint32_t n, kvf_span span, list_sums *sums)
{
    spans[n] = span;
    sums->tokens += (uint64_t)__builtin_popcountll(kvf_live_bits(span.count, span.skip));
    return n + 1;
}

static void count(kvf_layer_counters *c, uint64_t pages, const list_sums *sums)
{
    __atomic_fetch_add(&c->tokens_attended, sums->tokens, __ATOMIC_RELAXED);
    __atomic_fetch_add(&c->pages_selected, pages, __ATOMIC_RELAXED);
    __atomic_fetch_add(&c->hits, pages - sums->misses, __ATOMIC_RELAXED);
    __atomic_fetch_add(&c->misses, sums->misses, __ATOMIC_RELAXED);
}

/* Lists of a head, and tokens of a sequence, may choose the same page. */
static void note_choice(const kvf_paging *p, const kvf_row *row, uint32_t head, uint32_t page)
{
    uint32_t *at = &row->chosen_at[(size_t)head * p->pages_max + page];
    uint32_t before = __atomic_load_n(at, __ATOMIC_RELAXED);
    while (before < row->step + 1 &&
           !__atomic_compare_exchange_n(at, &before, row->step + 1, true, __ATOMIC_RELAXED,
                                        __ATOMIC_RELAXED))
        ;
}

static void assemble_list(const kvf_assemble_args *a, uint32_t list)
{
    const kvf_choices *c = &a->choices;
    const kvf_paging *p = &c->paging;
    const kvf_row *row = &c->row[list / p->lists];
    const uint32_t head = kvf_list_head(p, list % p->lists), ids = c->id_count[list];
    const uint32_t page_size = p->shape.page_size, stored = row->static_count[head];
    const uint32_t pages = kvf_row_pages(p, row);
    kvf_span *spans = a->spans + (size_t)list * a->spans_max;
    list_sums sums = {0};
    uint32_t n = 0;
    if (kvf_row_is_idle(row, list % p->lists)) {
        a->span_count[list] = 0;
        return;
    }
    for (uint32_t i = 0; i * page_size < stored; i++)
        n = add_span(spans, n,
                     (kvf_span){.page = kvf_static_page(p, row->static_kv, head, i),
                                .count = kvf_min_u32(page_size, stored - i * page_size)},
                     &sums);
    for (uint32_t i = kvf_row_sealed_pages(p, row); i < pages; i++)
        n = add_span(
            spans, n,
            (kvf_span){.page = kvf_row_page(p, row, i, head), .count = kvf_row_tokens(p, row, i)},
            &sums);
    KVF_ASSERT(n + ids <= a->spans_max);
    for (uint32_t i = 0; i < ids; i++) {
        const size_t at = (size_t)list * c->ids_max + i;
        kvf_span span;
        kvf_assemble_home(p, row, list % p->lists, (uint32_t)c->ids[at],
                          a->masks ? a->masks[at] : 0, &span);
        sums.misses += kvf_assemble_slot(a, row, list % p->lists, (uint32_t)c->slot_of_id[at],
                                         c->missed[at], &span);
        n = add_span(spans, n, span, &sums);
        if (row->chosen_at)
            note_choice(p, row, head, (uint32_t)c->ids[at]);
    }
    a->span_count[list] = n;
    count(c->counters, ids, &sums);
}

void kvf_assemble_ref(const void *args, uint32_t task)
{
    const kvf_assemble_args *a = args;
    const uint32_t lists = a->choices.rows * a->choices.paging.lists;
    const uint32_t first = task * KVF_ASSEMBLE_LISTS;
    for (uint32_t l = first; l < kvf_min_u32(lists, first + KVF_ASSEMBLE_LISTS); l++)
        assemble_list(a, l);
}
