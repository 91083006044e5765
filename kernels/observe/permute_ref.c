/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Physical restructuring: the sealed tokens of a KV head in a new order, pages re-formed in new
 * blocks, the static ones also in the store.
 *
 * Knows nothing of scores. A *position* is a place among the sealed tokens, `order` says which
 * token is there. Before and after: sink first, then the static set, then the rest, each ascending
 * by token; the store holds positions 0 .. store_count-1, and bit t of a page is set iff its
 * position is among them.
 */

#include <stdbool.h>
#include <string.h>

#include "variants.h"

/* One KV head of one launch. */
typedef struct permuting {
    const kvf_permute_args *a;
    uint32_t head;
    const uint32_t *order;
    uint32_t *new_order;
    uint32_t written;
} permuting;

/* Positions first .. end-1 that are chosen, or those that are not; both runs ascend by token. */
typedef struct run {
    uint32_t position;
    uint32_t end;
    uint32_t id; /* next id that may be in the run */
    bool wants_chosen;
} run;

/* Position of an id, which counts positions of spans; UINT32_MAX if there is no live token. */
static uint32_t position_of(const permuting *k, uint32_t i)
{
    const kvf_permute_args *a = k->a;
    const uint32_t page_size = a->paging.shape.page_size;
    const uint32_t id = (uint32_t)a->ids[(size_t)k->head * a->ids_max + i];
    const uint32_t stored = a->row->store_count[k->head];
    const uint32_t store_spans = a->resident ? kvf_div_ceil_u32(stored, page_size) : 0;
    const size_t at = (size_t)k->head * a->spans_max + id / page_size;
    if (!(kvf_live_bits(a->spans[at].count, a->spans[at].skip) >> id % page_size & 1))
        return UINT32_MAX;
    return id < store_spans * page_size ? id : a->span_index[at] + id % page_size;
}

/* Move on to the first position of the run at or after the present one. */
static void settle(const permuting *k, run *r)
{
    const uint32_t count = k->a->id_count[k->head];
    for (; r->position < r->end; r->position++) {
        while (r->id < count) {
            const uint32_t p = position_of(k, r->id);
            if (p != UINT32_MAX && p >= r->position)
                break;
            r->id++;
        }
        const bool is_chosen = r->id < count && position_of(k, r->id) == r->position;
        if (is_chosen == r->wants_chosen)
            return;
    }
}

static void move_row(permuting *k, uint32_t from, bool is_stored)
{
    const kvf_permute_args *a = k->a;
    const kvf_paging *p = &a->paging;
    const uint32_t page_size = p->shape.page_size, to = k->written++;
    const size_t bytes = kvf_row_bytes(&p->shape), half = kvf_half_page_bytes(&p->shape);
    const char *source =
        kvf_row_page(p, a->row, from / page_size, k->head) + from % page_size * bytes;
    char *page = (char *)a->after->pool[to / page_size] + k->head * kvf_page_bytes(&p->shape);
    char *target = page + to % page_size * bytes;
    memcpy(target, source, bytes);
    memcpy(target + half, source + half, bytes);
    k->new_order[to] = k->order[from];
    if (!is_stored)
        return;
    KVF_ASSERT(to < kvf_store_tokens(p));
    target = kvf_store_page(p, a->after->store, k->head, to / page_size) + to % page_size * bytes;
    memcpy(target, source, bytes);
    memcpy(target + half, source + half, bytes);
    a->after->store_index[k->head * kvf_store_tokens(p) + to] = to;
}

static void merge_runs(permuting *k, run x, run y, bool is_stored)
{
    settle(k, &x);
    settle(k, &y);
    while (x.position < x.end || y.position < y.end) {
        const bool takes_x = x.position < x.end &&
                             (y.position == y.end || k->order[x.position] < k->order[y.position]);
        run *r = takes_x ? &x : &y;
        move_row(k, r->position++, is_stored);
        settle(k, r);
    }
}

/* Bits and digest jobs of every page: the front is in the store. */
static void renew_pages(const permuting *k, uint32_t stored)
{
    const kvf_permute_args *a = k->a;
    const kvf_paging *p = &a->paging;
    const uint32_t page_size = p->shape.page_size, pages = a->row->sealed;
    for (uint32_t page = 0; page < pages; page++) {
        const uint32_t first = page * page_size;
        const uint32_t front = stored > first ? kvf_min_u32(page_size, stored - first) : 0;
        const uint64_t bits = kvf_live_bits(front, 0);
        kvf_row_bits(p, a->row, k->head)[page] = bits;
        a->jobs[(size_t)k->head * pages + page] = (kvf_digest_job){
            .page = (char *)a->after->pool[page] + k->head * kvf_page_bytes(&p->shape),
            .digest = kvf_row_digest(p, a->row, page, k->head),
            .skip = bits,
            .count = page_size};
    }
}

void kvf_permute_ref(const void *args, uint32_t task)
{
    const kvf_permute_args *a = args;
    const kvf_paging *p = &a->paging;
    const uint32_t tokens = a->row->sealed * p->shape.page_size;
    const uint32_t sink = kvf_min_u32(p->sink, tokens), stored = a->row->store_count[task];
    const size_t stride = (size_t)p->pages_max * p->shape.page_size;
    permuting k = {.a = a,
                   .head = task,
                   .order = a->row->order + task * stride,
                   .new_order = a->after->order + task * stride};
    for (uint32_t i = 0; i < sink; i++)
        move_row(&k, i, true);
    for (uint32_t rest = 0; rest < 2; rest++) {
        const run was_static = {.position = sink, .end = stored, .wants_chosen = rest == 0};
        const run was_rest = {.position = stored, .end = tokens, .wants_chosen = rest == 0};
        merge_runs(&k, was_static, was_rest, rest == 0);
        if (rest == 0)
            a->after->store_count[task] = k.written;
    }
    KVF_ASSERT(k.written == tokens);
    renew_pages(&k, a->after->store_count[task]);
    const uint64_t bytes = tokens * 2 * kvf_row_bytes(&p->shape) +
                           (a->resident ? 0 : tokens * kvf_row_bytes(&p->shape));
    __atomic_fetch_add(&a->counters->bytes_refresh, bytes, __ATOMIC_RELAXED);
}
