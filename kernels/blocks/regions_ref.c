/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Regions are filled with tokens of their rows: sink and window, and the tails of streaming heads,
 * whose outputs go among the others. The specification and the only host form.
 *
 * Knows nothing of policies, and nothing of slots.
 */

#include <string.h>

#include "quantized.h"
#include "variants.h"

/* Token `token` of a physical block, which is in `page`. */
static void copy_token(const kvf_physical_blocks *c, const char *page, uint32_t token, void *to)
{
    const kvf_shape *s = &c->paging.shape;
    const uint32_t t = token % s->page_size;
    float x[KVF_HEAD_DIM_MAX];
    if (s->pages == KVF_PAGES_NATIVE)
        memcpy(to, kvf_page_key(s, page, t), kvf_token_bytes(s));
    else
        kvf_dequantize_token(s, page, t, to, x);
}

/* A token of a physical block to `to`, unless it is there; returns 1 if it was not. */
static uint32_t bring(const kvf_physical_blocks *c, uint32_t layer, uint32_t block, uint32_t head,
                      uint32_t token, kvf_physical_tag *tag, char *to)
{
    const kvf_physical_tag wanted = kvf_physical_tag_of(c, layer, block, token, 1);
    if (kvf_physical_tag_is(tag, wanted))
        return 0;
    copy_token(c, kvf_physical_page(c, layer, block, head, token), token, to);
    *tag = wanted;
    return 1;
}

void kvf_validate_ref(const void *args, uint32_t task)
{
    const kvf_validate_args *a = args;
    const kvf_physical_blocks *c = a->blocks;
    const kvf_paging *p = &c->paging;
    const uint32_t number = task / a->kv_heads, head = task % a->kv_heads;
    const kvf_row *row = &a->row[number];
    const uint32_t *physical = c->physical + (size_t)number * p->blocks_max;
    const size_t token_bytes = kvf_token_bytes(&p->shape);
    if (task == 0)
        ++*c->clock;
    if (row->length == 0 || kvf_row_is_idle(row, head))
        return;
    kvf_physical_tag *tags = c->token_tags + kvf_region_head(c, a->region[number], a->layer, head) *
                                                 kvf_region_tokens(p);
    uint32_t brought = 0;
    for (uint32_t t = 0; t < a->static_count[task]; t++)
        brought += bring(c, a->layer, physical[t / p->block_size], head, t % p->block_size,
                         &tags[t], kvf_static_token(p, row->static_kv, head, t));
    for (uint32_t t = row->sealed * p->block_size; row->ring && t < row->length; t++)
        brought +=
            bring(c, a->layer, physical[t / p->block_size], head, t % p->block_size,
                  &tags[p->sink + t % (p->ring_blocks * p->block_size)],
                  kvf_row_run(p, row, t / p->block_size, head) + t % p->block_size * token_bytes);
    __atomic_fetch_add(&c->counters[a->layer].tokens_brought, brought, __ATOMIC_RELAXED);
}

/* Tokens of a span that the newest one sees and that are not there yet; returns how many. */
static uint32_t bring_span(const kvf_gather_window_args *a, uint32_t block, uint32_t head,
                           const kvf_span *span, kvf_physical_tag *tags)
{
    const size_t bytes = kvf_token_bytes(&a->blocks->paging.shape);
    uint32_t brought = 0;
    for (uint32_t t = 0; t < span->count; t++)
        if (!(span->skip >> t & 1))
            brought += bring(a->blocks, a->layer, block, head, t, &tags[t],
                             (char *)(uintptr_t)span->page + t * bytes);
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
    const uint32_t count = one ? kvf_ring_spans(&a->ring, row->length) : 0;
    const size_t tail = kvf_tail_block(a, c->region[number], one);
    /* Without tails only to count from: spans get other pages below. */
    char *blocks = c->streaming.tails ? c->streaming.tails + tail * kvf_run_bytes(p)
                                      : kvf_physical_home(c, a->layer, 0);
    uint64_t brought = 0, attended = 0;
    a->span_count[task] = count;
    for (uint32_t i = 0; i < count; i++) {
        const uint32_t page = kvf_tail_page(&a->ring, row->length, i);
        kvf_span span = kvf_ring_span(&a->ring, blocks, row->length, 0, i);
        if (c->streaming.tails)
            brought += bring_span(a, physical[page], head, &span,
                                  c->streaming.tags +
                                      (tail + kvf_ring_block(&a->ring, page)) * p->block_size);
        else
            span.page = kvf_physical_home(c, a->layer, physical[page]) + head * kvf_run_bytes(p);
        attended += (uint64_t)__builtin_popcountll(kvf_live_bits(span.count, span.skip));
        a->spans[(size_t)task * a->spans_max + i] = span;
    }
    __atomic_fetch_add(&c->counters[a->layer].tokens_brought, brought, __ATOMIC_RELAXED);
    __atomic_fetch_add(&c->counters[a->layer].tokens_attended, attended, __ATOMIC_RELAXED);
}

void kvf_scatter_heads_ref(const void *args, uint32_t task)
{
    const kvf_scatter_heads_args *a = args;
    for (uint32_t h = 0; h < a->kv_heads; h++) {
        const size_t at = ((size_t)task * a->kv_heads + h) * a->group;
        if (!a->streaming[h])
            continue;
        memcpy((char *)a->out + at * a->value_bytes, kvf_offset(a->from, at * a->value_bytes),
               (size_t)a->group * a->value_bytes);
        if (a->lse)
            memcpy(a->lse + at, a->from_lse + at, a->group * sizeof *a->lse);
    }
}
