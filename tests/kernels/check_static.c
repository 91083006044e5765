/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Kernels on the static set of a row against their references: cover and pack. Bit for bit.
 *
 * Their meaning is checked without the reference as well: cover has every token once, pack
 * leaves bits that say exactly what its store holds.
 */

#include <stdio.h>
#include <string.h>

#include "check_rows.h"

static kvf_cover_args cover_args(check *c, const check_rows *w, bool resident)
{
    const kvf_paging *p = &w->p;
    kvf_cover_args a = {.paging = *p,
                        .resident = resident,
                        .spans_max = p->pages_max + p->static_pages,
                        .row = w->row};
    const size_t all = (size_t)p->kv_heads * a.spans_max;
    a.spans = check_changed(c, "spans", all * sizeof *a.spans);
    a.span_index = check_changed(c, "span_index", all * sizeof *a.span_index);
    a.span_count = check_changed(c, "span_count", p->kv_heads * sizeof *a.span_count);
    a.first = check_changed(c, "first", p->kv_heads * sizeof *a.first);
    a.count = check_changed(c, "count", p->kv_heads * sizeof *a.count);
    a.take = check_changed(c, "take", p->kv_heads * sizeof *a.take);
    a.limit = check_changed(c, "limit", p->query_window * sizeof *a.limit);
    return a;
}

/* Every token of the row at most once, those of pages that can be read exactly once. */
static void cover_properties(check *c, const kvf_cover_args *a, uint32_t head)
{
    const kvf_paging *p = &a->paging;
    const kvf_row *row = a->row;
    const uint32_t page_size = p->shape.page_size;
    const uint32_t tokens = kvf_cover_tokens(p, a->resident);
    const uint32_t *index = row->static_ids + head * kvf_static_room(p);
    const uint32_t stored = a->resident ? row->static_count[head] : 0;
    uint8_t *seen = calloc(row->length, 1);
    KVF_ASSERT(seen);
    for (uint32_t i = 0; i < stored; i++)
        seen[index[i]]++;
    for (uint32_t i = kvf_div_ceil_u32(stored, page_size); i < a->span_count[head]; i++) {
        const size_t at = (size_t)head * a->spans_max + i;
        const uint64_t live = kvf_live_bits(a->spans[at].count, a->spans[at].skip);
        for (uint32_t t = 0; t < tokens; t++)
            if (live >> t & 1)
                seen[a->span_index[at] + t]++;
    }
    for (uint32_t t = 0; t < row->length; t++) {
        const uint32_t page = t / page_size;
        const bool is_far = a->resident && page < kvf_row_sealed_pages(p, row) &&
                            !kvf_row_is_recent(p, row, head, page);
        if (seen[t] > 1 || (seen[t] == 0 && !is_far))
            check_fail(c, "head %u: token %u is covered %u times", head, t, seen[t]);
    }
    free(seen);
}

static void cover_case(check *c, uint32_t blocks_max)
{
    check_rows w;
    if (!CHECK_ROWS(c, &w, "cover", .rows = 1, .blocks_max = blocks_max,
                    .without_slots = blocks_max > 100 || check_below(c, 3) == 0, .pool_blocks = 30))
        return;
    kvf_cover_args a = cover_args(c, &w, check_below(c, 2));
    a.take_tokens = check_below(c, 2) ? check_below(c, 100) : 0;
    if (check_below(c, 4) == 0) {
        a.first = a.count = a.take = a.limit = NULL;
        a.take_tokens = 0;
    } else if (check_below(c, 4) == 0) {
        a.limit = NULL;
    }
    CHECK_BOTH(c, cover, &a);
    for (uint32_t h = 0; h < w.p.kv_heads; h++)
        cover_properties(c, &a, h);
}

void check_cover(check *c)
{
    for (uint32_t i = 0; i < 60; i++)
        cover_case(c, 1 + i);
    for (uint32_t i = 0; i < 4; i++) /* around the edges of parts, and long */
        cover_case(c, i < 3 ? 1023 + i : 5000);
}

/* Candidates of one row in `cover`'s spans, and at most statics_max of them per KV head. */
typedef struct chosen_tokens {
    kvf_cover_args cover;
    uint32_t ids_max;
    int32_t *ids;       /* [kv_heads, ids_max] */
    uint32_t *id_count; /* [kv_heads] */
} chosen_tokens;

static chosen_tokens choose_tokens(check *c, const check_rows *w, bool resident)
{
    chosen_tokens t = {.cover = cover_args(c, w, resident), .ids_max = w->statics_max};
    CHECK_RUN(c, c->ref, cover, &t.cover, false);
    t.ids = check_in(c, (size_t)w->p.kv_heads * t.ids_max * sizeof *t.ids);
    t.id_count = check_in(c, w->p.kv_heads * sizeof *t.id_count);
    for (uint32_t h = 0; h < w->p.kv_heads; h++) {
        int32_t *ids = t.ids + (size_t)h * t.ids_max;
        t.id_count[h] = check_subset(c, t.cover.count[h], t.ids_max, ids);
        for (uint32_t i = 0; i < t.id_count[h]; i++)
            ids[i] += (int32_t)t.cover.first[h];
    }
    return t;
}

/* A new store ascends, holds what pages hold, and is what the bits say. */
static void pack_properties(check *c, const kvf_pack_args *a, uint32_t head)
{
    const kvf_paging *p = &a->paging;
    const uint32_t count = a->static_count[head];
    const size_t bytes = kvf_token_bytes(&p->shape);
    const uint32_t *index = a->static_ids + head * kvf_static_room(p);
    const uint64_t *bits = kvf_row_bits(p, a->row, head);
    uint32_t said = 0;
    for (uint32_t i = 0; i < a->row->sealed; i++)
        said += (uint32_t)__builtin_popcountll(bits[i]);
    if (said != count)
        check_fail(c, "head %u: %u tokens in the store, %u bits", head, count, said);
    for (uint32_t i = 0; i < count; i++) {
        const uint32_t token = index[i], t = token % p->block_size;
        const char *run = kvf_row_run(p, a->row, token / p->block_size, head);
        if ((i && token <= index[i - 1]) || !(bits[token / p->block_size] >> t & 1))
            check_fail(c, "head %u: entry %u is token %u", head, i, token);
        if (memcmp(kvf_page_key(&p->shape, run, t), kvf_static_token(p, a->static_kv, head, i),
                   bytes) != 0)
            check_fail(c, "head %u: entry %u is not what token %u is", head, i, token);
    }
}

static void pack_case(check *c, uint32_t blocks_max, uint32_t statics_max, bool resident)
{
    check_rows w;
    if (!CHECK_ROWS(c, &w, resident ? "pack resident" : "pack", .rows = 1, .blocks_max = blocks_max,
                    .without_slots = check_below(c, 3) == 0, .statics_max = statics_max,
                    .pool_blocks = 40))
        return;
    const kvf_paging *p = &w.p;
    const kvf_row *row = w.row;
    const chosen_tokens t = choose_tokens(c, &w, resident);
    kvf_pack_args a = {.paging = *p,
                       .resident = resident,
                       .spans_max = t.cover.spans_max,
                       .ids_max = t.ids_max,
                       .row = row,
                       .spans = t.cover.spans,
                       .span_index = t.cover.span_index,
                       .ids = t.ids,
                       .id_count = t.id_count,
                       .counters = w.counters};
    const size_t store_bytes = p->kv_heads * p->static_pages * kvf_page_bytes(&p->shape);
    const size_t index_bytes = p->kv_heads * kvf_static_room(p) * sizeof(uint32_t);
    a.static_kv = check_changed(c, "static_kv", store_bytes);
    a.static_ids = check_changed(c, "static_ids", index_bytes);
    a.static_count = check_changed(c, "static_count", p->kv_heads * sizeof(uint32_t));
    check_track(c, "counters", a.counters, sizeof *a.counters);
    check_track(c, "bits", row->bits, p->kv_heads * p->blocks_max * sizeof *row->bits);
    CHECK_BOTH(c, pack, &a);
    for (uint32_t h = 0; h < p->kv_heads; h++)
        pack_properties(c, &a, h);
}

void check_pack(check *c)
{
    for (uint32_t i = 0; i < 80; i++)
        pack_case(c, 1 + i, 0, i / 2 % 2);
    for (uint32_t i = 0; i < 5; i++) /* the last two take more rounds than a GPU has parts */
        pack_case(c, 1500, i < 3 ? 0 : 6000, i % 2);
}
