/* SPDX-License-Identifier: Apache-2.0 */

/* Layers of a sequence as snapshots; see the header. Knows no file. */

#include "snapshot.h"

#include <string.h>

/* ---- out of a cache ---- */

void kvf_snapshot_describe(const kvf_layer *state, kvf_saved_layer *out)
{
    const kvf_kv_group *kv_group = state->kv_group;
    const kvf_paging *p = &kv_group->dims.paging;
    *out = (kvf_saved_layer){
        .length = state->extent.length,
        .sealed = state->extent.sealed,
        .queries = state->queries.count,
        .since_refresh = state->refresh.since,
        .steps = state->steps,
        .flags = (state->is_fresh ? KVF_SAVED_FRESH : 0u) |
                 (state->refresh.needs_exact ? KVF_SAVED_NEEDS_EXACT : 0u) |
                 (kv_group->tables.rows.share ? KVF_SAVED_AUTO : 0u) |
                 (state->cut.spare ? KVF_SAVED_SPARE : 0u) |
                 (kv_group->tables.rows.chosen_at ? KVF_SAVED_RECENT : 0u),
        .heads = p->kv_heads,
        .static_room = (uint32_t)kvf_static_room(p),
        .query_window = p->query_window,
        .queries_from = state->queries.from,
        .kept = state->cut.kept,
        .static_from = state->refresh.static_from,
        .share_from = state->refresh.share_from,
        .exact_from = state->refresh.needs_exact ? state->refresh.exact_from : 0,
    };
}

/* ---- both ways ---- */

void kvf_snapshot_piece(kvf_snapshot_copy *c, void *kept, void *at, size_t bytes)
{
    const kvf_device_ops *ops = c->call->cache->device->ops;
    if (c->status != KVF_OK || !kept || !at || !bytes)
        return;
    c->status = c->put ? ops->copy(c->call->stream, at, kvf_seen_device(c->put, kept), bytes)
                       : ops->copy(c->call->stream, kept, at, bytes);
}

void kvf_snapshot_state(kvf_snapshot_copy *c, const kvf_layer *state, const kvf_saved_layer *l,
                        const kvf_snapshot *s, const kvf_row *row)
{
    const kvf_paging *p = &state->kv_group->dims.paging;
    const size_t sealed = state->extent.sealed, pages = sealed * p->block_pages;
    const size_t tokens = p->kv_heads * kvf_static_room(p);
    kvf_snapshot_piece(c, s->static_count, row->static_count,
                       p->kv_heads * sizeof *s->static_count);
    kvf_snapshot_piece(c, s->static_ids, row->static_ids, tokens * sizeof *s->static_ids);
    kvf_snapshot_piece(c, s->static_kv, row->static_kv, tokens * kvf_token_bytes(&p->shape));
    kvf_snapshot_piece(c, s->share, row->share, 2 * sizeof *s->share);
    if (l->queries)
        kvf_snapshot_piece(c, s->queries, row->queries, p->query_window * kvf_queries_bytes(p));
    for (uint32_t h = 0; sealed && h < p->kv_heads; h++) {
        kvf_snapshot_piece(c, s->bits + h * sealed, kvf_row_bits(p, row, h),
                           sealed * sizeof *s->bits);
        if (s->chosen_at && row->chosen_at)
            kvf_snapshot_piece(c, s->chosen_at + h * pages,
                               row->chosen_at + (size_t)h * p->pages_max,
                               pages * sizeof *s->chosen_at);
    }
}

kvf_status kvf_snapshot_take(kvf_call *call, const kvf_layer *state, const kvf_saved_layer *l,
                             const kvf_snapshot *snapshot, char *tail)
{
    const kvf_paging *p = &state->kv_group->dims.paging;
    const kvf_row row = kvf_call_row(state->kv_group, state);
    kvf_snapshot_copy c = {.call = call};
    if (l->flags & KVF_SAVED_FRESH)
        return KVF_OK;
    if (snapshot->by_step)
        memcpy(snapshot->by_step, state->by_step, l->length);
    kvf_snapshot_state(&c, state, l, snapshot, &row);
    if (snapshot->spare)
        kvf_snapshot_piece(&c, snapshot->spare, kvf_row_spare(p, &row), kvf_block_bytes(p));
    for (uint32_t b = l->sealed; b < kvf_row_blocks(p, &row); b++)
        kvf_snapshot_piece(&c, tail + (b - l->sealed) * kvf_block_bytes(p),
                           kvf_row_ring_block(p, &row, b), kvf_block_bytes(p));
    return c.status;
}

void kvf_snapshot_scrub(const kvf_saved_head *head, const kvf_saved_layer *l,
                        const kvf_snapshot *snapshot, char *tail)
{
    const kvf_shape shape = kvf_saved_shape(head);
    const size_t token = kvf_token_bytes(&shape), run = head->block_size * token;
    const size_t queries = l->heads * (head->query_heads / head->kv_heads) * kvf_key_bytes(&shape);
    const uint32_t blocks = kvf_saved_blocks(head, l), last = l->length % head->block_size;
    for (uint32_t h = 0; last && h < l->heads; h++)
        memset(tail + (blocks - 1 - l->sealed) * kvf_saved_block_bytes(head, l) + h * run +
                   last * token,
               0, run - last * token);
    for (uint32_t h = 0; snapshot->static_count && h < l->heads; h++) {
        const size_t first = (size_t)h * l->static_room + snapshot->static_count[h];
        const size_t rest = l->static_room - snapshot->static_count[h];
        memset(snapshot->static_ids + first, 0, rest * sizeof *snapshot->static_ids);
        memset(snapshot->static_kv + first * token, 0, rest * token);
    }
    if (snapshot->queries && l->queries < l->query_window)
        memset(snapshot->queries + l->queries * queries, 0,
               (l->query_window - l->queries) * queries);
}

/* ---- numbers of a snapshot ---- */

static bool ascends(const uint32_t *numbers, uint32_t count, uint32_t end)
{
    for (uint32_t i = 0; i < count; i++)
        if (numbers[i] >= end || (i && numbers[i] <= numbers[i - 1]))
            return false;
    return true;
}

/* The bits of a head are those of the tokens in its store, no others. */
static bool are_bits(const uint64_t *bits, uint32_t blocks, uint32_t block_size,
                     const uint32_t *static_ids, uint32_t count)
{
    uint32_t i = 0;
    for (uint32_t b = 0; b < blocks; b++) {
        uint64_t want = 0;
        for (; i < count && static_ids[i] / block_size == b; i++)
            want |= UINT64_C(1) << static_ids[i] % block_size;
        if (bits[b] != want)
            return false;
    }
    return true;
}

static bool check_state(const kvf_saved_head *head, const kvf_saved_layer *l,
                        const kvf_snapshot *snapshot)
{
    const uint32_t tokens = l->sealed * head->block_size;
    for (uint32_t h = 0; h < l->heads; h++) {
        const uint32_t count = snapshot->static_count[h];
        const uint32_t *index =
            l->static_room ? snapshot->static_ids + (size_t)h * l->static_room : NULL;
        const uint64_t *bits = l->sealed ? snapshot->bits + (size_t)h * l->sealed : NULL;
        if (count > l->static_room || !ascends(index, count, tokens) ||
            !are_bits(bits, l->sealed, head->block_size, index, count))
            return false;
    }
    return true;
}

bool kvf_snapshot_is_same(const kvf_kv_group *kv_group, const kvf_saved_layer *l)
{
    const kvf_paging *p = &kv_group->dims.paging;
    const kvf_row_tables *t = &kv_group->tables.rows;
    return l->static_room == kvf_static_room(p) && l->query_window == p->query_window &&
           (l->flags & (KVF_SAVED_AUTO | KVF_SAVED_RECENT)) ==
               ((t->share ? KVF_SAVED_AUTO : 0u) | (t->chosen_at ? KVF_SAVED_RECENT : 0u));
}

bool kvf_snapshot_fits(const kvf_kv_group *kv_group, const kvf_saved_layer *l,
                       const kvf_snapshot *snapshot)
{
    const kvf_paging *p = &kv_group->dims.paging;
    const uint32_t sink = kvf_min_u32(p->sink, l->sealed * p->block_size);
    for (uint32_t h = 0; sink && h < l->heads; h++) /* indices ascend */
        if (snapshot->static_count[h] < sink ||
            snapshot->static_ids[(size_t)h * l->static_room + sink - 1] != sink - 1)
            return false;
    return !snapshot->share || (snapshot->share[0] <= kvf_static_room(p) - p->sink &&
                                snapshot->share[1] <= kv_group->dims.ids_max);
}

kvf_status kvf_snapshot_check(kvf_context *context, const char *path, const kvf_saved_head *head,
                              const kvf_saved_layer *l, const kvf_snapshot *snapshot)
{
    bool is_right = !snapshot->positions || ascends(snapshot->positions, l->length, UINT32_MAX);
    if (is_right && l->heads && !(l->flags & KVF_SAVED_FRESH))
        is_right = check_state(head, l, snapshot);
    if (!is_right)
        KVF_FAIL(context, KVF_CORRUPT, "%s: its tables contradict themselves; save it again", path);
    return KVF_OK;
}
