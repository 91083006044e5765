/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Tails of streaming heads, and their spans, the specification and the only host form.
 *
 * Knows nothing of other heads. A token is brought only if the newest one sees it.
 */

#include "bring_token.h"
#include "variants.h"

/* Tokens of a span that are not there yet; returns how many there were. */
static uint32_t bring(const kvf_gather_window_args *a, uint32_t block, uint32_t head,
                      const kvf_span *span, kvf_physical_tag *tags)
{
    const kvf_physical_blocks *c = a->blocks;
    const size_t bytes = kvf_token_bytes(&c->paging.shape);
    uint32_t brought = 0;
    for (uint32_t t = 0; t < span->count; t++) {
        const kvf_physical_tag wanted = kvf_physical_tag_of(c, a->layer, block, t, 1);
        if (span->skip >> t & 1 || kvf_physical_tag_is(&tags[t], wanted))
            continue;
        kvf_bring_token(c, kvf_physical_page(c, a->layer, block, head, t), t,
                        (char *)(uintptr_t)span->page + t * bytes);
        tags[t] = wanted;
        brought++;
    }
    return brought;
}

void kvf_gather_window_ref(const void *args, uint32_t task)
{
    const kvf_gather_window_args *a = args;
    const kvf_physical_blocks *c = a->blocks;
    const kvf_paging *p = &c->paging;
    const uint32_t number = task / a->kv_heads, head = task % a->kv_heads;
    const uint32_t one = c->streaming.number[a->layer * a->kv_heads + head];
    const kvf_row *row = &c->row[number];
    const uint32_t *physical = c->physical + (size_t)number * p->blocks_max;
    const uint32_t count = one ? kvf_ring_spans(&c->streaming.ring, row->length) : 0;
    const size_t tail = (size_t)c->region[number] * c->streaming.heads + (one ? one - 1 : 0);
    /* Without tails only to count from: spans get other pages below. */
    char *blocks = c->streaming.tails
                       ? c->streaming.tails + tail * kvf_tail_blocks(c) * kvf_run_bytes(p)
                       : kvf_physical_home(c, a->layer, 0);
    uint64_t brought = 0, attended = 0;
    a->span_count[task] = count;
    for (uint32_t i = 0; i < count; i++) {
        const uint32_t page = kvf_tail_page(c, row->length, i);
        kvf_span span = kvf_ring_span(&c->streaming.ring, blocks, row->length, 0, i);
        if (c->streaming.tails)
            brought += bring(a, physical[page], head, &span,
                             c->streaming.tags + tail * kvf_tail_tokens(c) +
                                 (size_t)kvf_ring_block(&c->streaming.ring, page) * p->block_size);
        else
            span.page = kvf_physical_home(c, a->layer, physical[page]) + head * kvf_run_bytes(p);
        attended += (uint64_t)__builtin_popcountll(kvf_live_bits(span.count, span.skip));
        a->spans[(size_t)task * a->spans_max + i] = span;
    }
    __atomic_fetch_add(&c->counters[a->layer].tokens_brought, brought, __ATOMIC_RELAXED);
    __atomic_fetch_add(&c->counters[a->layer].tokens_attended, attended, __ATOMIC_RELAXED);
}
