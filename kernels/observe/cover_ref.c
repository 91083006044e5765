/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The tokens of one row as spans: all of them, or those of recent choices; and which of them may
 * join the static set.
 *
 * Knows nothing of scores. Spans of static pages come first, then sealed pages ascending, then
 * the window, so the candidates are one range that begins after the sink. Store entries are older
 * than every kept query, so their span index is 0.
 */

#include "variants.h"

typedef struct covering {
    kvf_span *spans;
    uint32_t *index;
    uint32_t count;
} covering;

static void put(covering *c, const void *page, uint64_t skip, uint32_t count, uint32_t index)
{
    c->spans[c->count] = (kvf_span){.page = page, .skip = skip, .count = count};
    c->index[c->count++] = index;
}

static void put_store(const kvf_cover_args *a, uint32_t head, covering *c)
{
    const uint32_t page_size = a->paging.shape.page_size, stored = a->row->static_count[head];
    for (uint32_t i = 0; i * page_size < stored; i++)
        put(c, kvf_static_page(&a->paging, a->row->static_kv, head, i), 0,
            kvf_min_u32(page_size, stored - i * page_size), 0);
}

static void put_sealed(const kvf_cover_args *a, uint32_t head, covering *c)
{
    const kvf_paging *p = &a->paging;
    const kvf_row *row = a->row;
    for (uint32_t i = 0; !a->resident && i < row->sealed; i++)
        put(c, kvf_row_run(p, row, i, head), 0, p->block_size, i * p->block_size);
    for (uint32_t i = 0; a->resident && i < kvf_row_sealed_pages(p, row); i++) {
        if (kvf_row_is_recent(p, row, head, i))
            put(c, kvf_row_nearest(p, row, head, i), kvf_row_skip(p, row, head, i),
                p->shape.page_size, i * p->shape.page_size);
    }
}

/* In spans as long as the others. */
static void put_window(const kvf_cover_args *a, uint32_t head, covering *c)
{
    const kvf_paging *p = &a->paging;
    const uint32_t tokens = kvf_cover_tokens(p, a->resident);
    const uint32_t length = a->row->length;
    for (uint32_t i = a->row->sealed * p->block_size; i < length; i += tokens)
        put(c, kvf_row_page(p, a->row, i / p->shape.page_size, head), 0,
            kvf_min_u32(tokens, length - i), i);
}

/* Slot s holds the query of the token that lies (newest slot - s) back, around the ring; slots
 * whose query is not valid mean nothing. */
static void put_limits(const kvf_cover_args *a)
{
    const kvf_row *row = a->row;
    const uint32_t n = a->paging.query_window;
    for (uint32_t s = 0; s < n; s++)
        a->limit[s] = row->length - 1 - (row->query_slot + n - s) % n;
}

void kvf_cover_ref(const void *args, uint32_t task)
{
    const kvf_cover_args *a = args;
    const kvf_paging *p = &a->paging;
    const kvf_row *row = a->row;
    covering c = {.spans = a->spans + (size_t)task * a->spans_max,
                  .index = a->span_index + (size_t)task * a->spans_max};
    if (a->resident)
        put_store(a, task, &c);
    put_sealed(a, task, &c);
    if (a->first) {
        const uint32_t sink = kvf_min_u32(p->sink, row->sealed * p->block_size);
        a->first[task] = sink;
        a->count[task] = c.count * kvf_cover_tokens(p, a->resident) - sink;
        a->take[task] = a->take_tokens ? a->take_tokens : kvf_row_static(row);
        if (task == 0 && a->limit)
            put_limits(a);
    }
    put_window(a, task, &c);
    KVF_ASSERT(c.count <= a->spans_max);
    a->span_count[task] = c.count;
}
