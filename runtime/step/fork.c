/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Part of retain.h. A second sequence from the same tokens: sealed blocks shared, everything on the
 * device copied in stream order.
 *
 * Knows nothing of policies, nor of slots, which belong to blocks. Recent choices are copied too,
 * so that the child's static set, which is chosen among them, is the one its parent would choose.
 */

#include "retain.h"

#include "cache.h"
#include "prefill_arena.h"
#include "rings.h"
#include "seal.h"

typedef struct copier {
    kvf_call *call;
    kvf_status status; /* of the first copy that failed */
} copier;

static void copy(copier *c, void *to, const void *from, size_t bytes)
{
    if (c->status == KVF_OK && bytes)
        c->status = c->call->kv_group->device->ops->copy(c->call->stream, to, from, bytes);
}

/* The tables of one layer; `to` and `from` have the same shape. */
static void copy_layer(copier *c, const kvf_row *to, const kvf_row *from)
{
    const kvf_kv_group *kv_group = c->call->kv_group;
    const kvf_paging *p = &kv_group->dims.paging;
    const size_t entries = kvf_static_room(p) * p->kv_heads;
    const size_t page = kvf_page_bytes(&p->shape);
    copy(c, to->blocks, from->blocks, from->sealed * sizeof *to->blocks);
    if (from->sealed) /* pages and digests, which both have from now on */
        copy(c, to->block_of, from->block_of, from->sealed * sizeof *to->block_of);
    copy(c, to->ring, from->ring, kvf_ring_size(p));
    copy(c, to->static_kv, from->static_kv, (size_t)p->kv_heads * p->static_pages * page);
    copy(c, to->static_ids, from->static_ids, entries * sizeof *to->static_ids);
    copy(c, to->static_count, from->static_count, p->kv_heads * sizeof *to->static_count);
    copy(c, to->queries, from->queries, p->query_window * kvf_queries_bytes(p));
    if (from->share)
        copy(c, to->share, from->share, 2 * sizeof *to->share);
    if (from->chosen_at)
        copy(c, to->chosen_at, from->chosen_at,
             (size_t)p->kv_heads * p->pages_max * sizeof *to->chosen_at);
    for (uint32_t h = 0; h < p->kv_heads; h++) {
        copy(c, kvf_row_bits(p, to, h), kvf_row_bits(p, from, h), from->sealed * sizeof *to->bits);
        if (p->segments_max == 0)
            continue;
        const size_t whole = kvf_segments(p->block_size, from->sealed);
        copy(c, kvf_row_centroid(p, to, h, 0), kvf_row_centroid(p, from, h, 0),
             whole * p->shape.head_dim);
        copy(c, kvf_row_centroid_scale(p, to, h, 0), kvf_row_centroid_scale(p, from, h, 0),
             whole * sizeof *to->centroid_scales);
    }
}

/* The host's half, whole before anything can fail: shared blocks get one more reference. */
static void share(kvf_cache *cache, const kvf_sequence *parent, kvf_sequence *child)
{
    kvf_footprint_fork(cache, parent, child);
    for (uint32_t i = 0; i < cache->config.layers; i++) {
        const kvf_layer *from = &parent->layers[i];
        kvf_layer *to = &child->layers[i];
        kvf_layer_copy(to, from);
        for (uint32_t b = 0; b < from->extent.sealed; b++) {
            to->blocks[b] = from->blocks[b];
            kvf_page_pool_share(&from->kv_group->pool, to->blocks[b]);
        }
    }
}

void kvf_fork_take(kvf_call *call)
{
    KVF_TAKE(call, call->row_host, call->row, call->rows);
}

static void copy_row(copier *c, const kvf_layer *to, const kvf_layer *from)
{
    const kvf_kv_group *kv_group = c->call->kv_group;
    const kvf_row target = kvf_call_row(kv_group, to), source = kvf_call_row(kv_group, from);
    if (from->is_fresh)
        return; /* nothing was ever written for it */
    copy_layer(c, &target, &source);
}

/* Layers of a KV group. Tokens that are not sealed lie in the child's own ring: sealed_before ==
 * sealed. */
static kvf_status copy_kv_group(kvf_call *call, kvf_kv_group *kv_group, const kvf_sequence *parent,
                                const kvf_sequence *child)
{
    copier c = {.call = call, .status = KVF_OK};
    call->kv_group = kv_group;
    call->rows = kv_group->config.layers;
    kvf_fork_take(call);
    for (uint32_t i = 0; i < call->cache->config.layers; i++) {
        const kvf_layer *to = &child->layers[i];
        if (to->kv_group != kv_group)
            continue;
        call->row_host[to->index] = kvf_call_row(kv_group, to);
        copy_row(&c, to, &parent->layers[i]);
    }
    if (c.status == KVF_OK)
        c.status = kvf_call_send(call);
    return c.status == KVF_OK ? kvf_call_point_tables(call) : c.status;
}

static kvf_status copy_rings(kvf_call *call, const kvf_sequence *parent, const kvf_sequence *child)
{
    const kvf_cache *cache = call->cache;
    for (uint32_t i = 0; i < cache->config.layers; i++) {
        const kvf_layer *from = &parent->layers[i];
        if (from->ring && from->extent.length)
            KVF_TRY(cache->device->ops->copy(call->stream, child->layers[i].ring, from->ring,
                                             kvf_ring_bytes(cache, i)));
    }
    return KVF_OK;
}

static kvf_status enqueue(kvf_cache *cache, kvf_sequence *parent, kvf_sequence *child,
                          kvf_stream *stream)
{
    kvf_call call;
    KVF_TRY(kvf_call_begin(cache, stream, &call));
    kvf_status status = kvf_arena_leave_sequence(&call, parent);
    share(cache, parent, child);
    for (uint32_t i = 0; status == KVF_OK && i < cache->kv_group_count; i++)
        status = copy_kv_group(&call, &cache->kv_groups[i], parent, child);
    if (status == KVF_OK)
        status = copy_rings(&call, parent, child);
    return kvf_call_end(&call, status);
}

kvf_status kvf_fork(kvf_cache *cache, kvf_sequence *parent, kvf_stream *stream, kvf_sequence **out)
{
    kvf_sequence *child = NULL;
    KVF_TRY(kvf_sequence_begin(cache, &child));
    const kvf_status status = enqueue(cache, parent, child, stream);
    if (status != KVF_OK) {
        kvf_sequence_end(child);
        return status;
    }
    *out = child;
    return KVF_OK;
}
