/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Undoing a call of decode that fails half-way; see the header.
 *
 * Knows which arrays of a row a step writes, and no phase. One function lists these pieces, and
 * both directions go through it, so that what is kept is what is put back. Everything is in stream
 * order. Tables from `sealed` on and tokens from `length` on need no copy: nobody reads them.
 */

#include "undo.h"

#include "addressable.h"
#include "retain.h"
#include "seal.h"

typedef struct undoing {
    kvf_call *call;
    const kvf_decode_args *args;
    uint32_t index;        /* of the sequence in the call */
    const kvf_layer *from; /* as it was before the call */
    kvf_row row;           /* the same on the device */
    bool back;
    kvf_status status; /* of the first copy that failed */
} undoing;

static uint32_t tokens_of(const kvf_decode_args *args, uint32_t b)
{
    return !args->k ? 0 : args->tokens ? args->tokens[b] : 1;
}

static const kvf_undo_tables *kept_of(const undoing *u)
{
    return &u->call->kv_group->tables.undo;
}

/* Bytes at `at`; their copy is piece `index` of those at `kept`. */
static void piece(undoing *u, void *at, void *kept, size_t index, size_t bytes)
{
    char *copy = (char *)kept + index * bytes;
    if (u->status == KVF_OK && bytes)
        u->status = u->call->kv_group->device->ops->copy(u->call->stream, u->back ? at : copy,
                                                         u->back ? copy : at, bytes);
}

/* Queries that those of new tokens take the place of. */
static void queries(undoing *u, uint32_t tokens)
{
    const kvf_kv_group *kv_group = u->call->kv_group;
    const kvf_paging *p = &kv_group->dims.paging;
    const size_t bytes = kvf_queries_bytes(p);
    const uint32_t most = kvf_undo_queries(kv_group);
    for (uint32_t i = 0; i < kvf_min_u32(tokens, most); i++)
        piece(u, u->row.queries + (u->from->queries.count + i) % p->query_window * bytes,
              kept_of(u)->queries, (size_t)u->index * most + i, bytes);
}

/* Blocks that the call seals, as the ring has them, and the spare one. */
static void blocks(undoing *u, uint32_t tokens)
{
    const kvf_kv_group *kv_group = u->call->kv_group;
    const kvf_paging *p = &kv_group->dims.paging;
    const uint32_t most = kvf_undo_blocks(kv_group), there = kvf_row_blocks(p, &u->row);
    const uint32_t sealed = kvf_sealed_blocks(kv_group, u->from->extent.length + tokens);
    size_t at = (size_t)u->index * (most + p->spare_blocks);
    KVF_ASSERT(sealed < u->from->extent.sealed || sealed - u->from->extent.sealed <= most);
    for (uint32_t b = u->from->extent.sealed; b < kvf_min_u32(sealed, there); b++)
        piece(u, kvf_row_ring_block(p, &u->row, b), kept_of(u)->blocks, at++, kvf_block_bytes(p));
    if (u->from->extent.sealed < sealed && u->from->cut.spare)
        piece(u, kvf_row_spare(p, &u->row), kept_of(u)->blocks, at, kvf_block_bytes(p));
}

/* The static set. A refresh leaves the store in force as it was, and a second one does not. */
static void static_set(undoing *u, uint32_t tokens)
{
    const kvf_kv_group *kv_group = u->call->kv_group;
    const kvf_paging *p = &kv_group->dims.paging;
    const kvf_undo_tables *t = kept_of(u);
    const uint32_t interval = kv_group->config.refresh_interval;
    const bool is_due =
        kv_group->dims.static_tokens &&
        (u->from->refresh.needs_exact || u->from->refresh.since + tokens > interval);
    const size_t b = u->index, entries = kvf_static_room(p);
    piece(u, u->row.static_count, t->static_count, b, p->kv_heads * sizeof *t->static_count);
    for (uint32_t h = 0; is_due && h < p->kv_heads; h++)
        piece(u, kvf_row_bits(p, &u->row, h), t->bits + (b * p->kv_heads + h) * p->blocks_max, 0,
              u->from->extent.sealed * sizeof *t->bits);
    if (is_due && u->row.share)
        piece(u, u->row.share, t->share, b, 2 * sizeof *t->share);
    if (!is_due || interval >= tokens)
        return;
    piece(u, u->row.static_kv, t->static_kv, b,
          p->kv_heads * p->static_pages * kvf_page_bytes(&p->shape));
    piece(u, u->row.static_ids, t->static_ids, b, p->kv_heads * entries * sizeof *t->static_ids);
}

static void recent_choices(undoing *u)
{
    const kvf_paging *p = &u->call->kv_group->dims.paging;
    const size_t first = (size_t)u->index * p->kv_heads * p->pages_max;
    const size_t bytes = kvf_row_sealed_pages(p, &u->row) * sizeof *u->row.chosen_at;
    for (uint32_t h = 0; u->row.chosen_at && h < p->kv_heads; h++)
        piece(u, u->row.chosen_at + (size_t)h * p->pages_max,
              kept_of(u)->chosen_at + first + (size_t)h * p->pages_max, 0, bytes);
}

/* Every piece of every row, and counters that kernels keep, to where copies are kept or `back`. */
static kvf_status copy_pieces(kvf_call *call, const kvf_decode_args *args, bool back)
{
    kvf_kv_group *kv_group = call->kv_group;
    undoing u = {.call = call, .args = args, .back = back};
    piece(&u, kvf_counters_device(kv_group, call->index), kv_group->tables.undo.counters, 0,
          sizeof(kvf_layer_counters));
    for (; u.index < args->batch; u.index++) {
        const uint32_t tokens = tokens_of(args, u.index);
        u.from = &call->cache->undo.layers[u.index];
        u.row = kvf_call_row(kv_group, u.from);
        if (tokens == 0)
            continue;
        piece(&u, u.row.fault, kv_group->tables.undo.faults, u.index, sizeof *u.row.fault);
        queries(&u, tokens);
        blocks(&u, tokens);
        static_set(&u, tokens);
        recent_choices(&u);
    }
    return u.status;
}

/* ---- on the host ---- */

static kvf_footprint_row *footprint_of(const kvf_cache *cache, const kvf_decode_args *args,
                                       uint32_t b)
{
    return &cache->footprint
                .rows[(size_t)args->sequences[b]->slot * cache->config.layers + args->layer];
}

static void keep_counts(kvf_cache *cache, const kvf_decode_args *args)
{
    kvf_undo *u = &cache->undo;
    u->counters = cache->counters[args->layer];
    u->entry_steps = cache->footprint.entry_steps;
    u->device_entry_steps = cache->footprint.device_entry_steps;
    for (uint32_t b = 0; b < args->batch; b++) {
        u->layers[b] = args->sequences[b]->layers[args->layer];
        u->rows[b] = *footprint_of(cache, args, b);
    }
}

/* Blocks that the call has acquired go back. Page tables may hold older addresses of others. */
static void put_layer_back(kvf_layer *layer, const kvf_layer *before)
{
    for (uint32_t p = before->extent.sealed; p < layer->extent.sealed; p++)
        kvf_page_pool_release(&layer->kv_group->pool, layer->blocks[p]);
    *layer = *before;
    layer->arrivals = 0;
}

static void put_counts_back(kvf_cache *cache, const kvf_decode_args *args)
{
    const kvf_undo *u = &cache->undo;
    cache->counters[args->layer] = u->counters;
    cache->footprint.entry_steps = u->entry_steps;
    cache->footprint.device_entry_steps = u->device_entry_steps;
    for (uint32_t b = 0; b < args->batch; b++) {
        put_layer_back(&args->sequences[b]->layers[args->layer], &u->layers[b]);
        *footprint_of(cache, args, b) = u->rows[b];
    }
}

/* ---- a call ---- */

kvf_status kvf_undo_keep(kvf_cache *cache, const kvf_decode_args *args, kvf_stream *stream)
{
    kvf_call call;
    if (!kvf_call_may_fail(cache, args->layer))
        return KVF_OK;
    KVF_TRY(kvf_call_begin(cache, stream, &call));
    kvf_call_at(&call, args->layer, args->sequences, args->batch);
    keep_counts(cache, args);
    return kvf_call_end(&call, copy_pieces(&call, args, false));
}

/* Tokens that are not sealed lie in the ring again: sealed_before == sealed. */
static kvf_status enqueue_back(kvf_call *call, const kvf_decode_args *args)
{
    const kvf_kv_group *kv_group = call->kv_group;
    kvf_fork_take(call);
    for (uint32_t b = 0; b < call->rows; b++)
        call->row_host[b] = kvf_call_row(kv_group, call->states[b]);
    KVF_TRY(kvf_call_send(call));
    KVF_TRY(copy_pieces(call, args, true));
    return kvf_call_point_tables(call);
}

kvf_status kvf_undo_unless_ok(kvf_cache *cache, const kvf_decode_args *args, kvf_stream *stream,
                              kvf_status status)
{
    kvf_call call;
    if (status == KVF_OK || cache->broken != KVF_OK || !kvf_call_may_fail(cache, args->layer))
        return status;
    KVF_TRY(kvf_call_begin(cache, stream, &call));
    kvf_call_at(&call, args->layer, args->sequences, args->batch);
    put_counts_back(cache, args);
    KVF_TRY(kvf_call_end(&call, enqueue_back(&call, args)));
    return status;
}
