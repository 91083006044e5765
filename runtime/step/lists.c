/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Selection on its own: page lists out, and given page lists attended to, or copied.
 *
 * Knows nothing of kernels of others. Lists name pages of a (sequence, layer); nothing is fetched,
 * because the caller's kernel reads pages where kvf_page_address says: what lists name is in memory
 * until the next call.
 */

#include "lists.h"

#include "addressable.h"
#include "attend.h"
#include "decode.h"
#include "prefill_arena.h"
#include "select.h"
#include "undo.h"

static kvf_csr_args csr_args(const kvf_call *call, const kvf_page_lists *lists)
{
    const kvf_kv_group *kv_group = call->kv_group;
    return (kvf_csr_args){.paging = kv_group->dims.paging,
                          .rows = call->rows,
                          .ids_max = kv_group->dims.ids_max,
                          .spans_max = kv_group->dims.spans_max,
                          .row = call->row,
                          .ids = kv_group->tables.now.ids,
                          .id_count = kv_group->tables.now.id_count,
                          .indptr = lists->indptr,
                          .indices = lists->indices,
                          .last_page_len = lists->last_page_len,
                          .spans = kv_group->tables.spans,
                          .span_count = kv_group->tables.span_count};
}

uint32_t kvf_lists_pages_max(const kvf_cache *cache)
{
    if (kvf_has_streaming_heads(cache))
        return 0; /* nothing can be listed */
    const kvf_dims *d = &cache->kv_groups[0].dims;
    const uint32_t sink_pages = kvf_div_ceil_u32(d->paging.sink, d->paging.shape.page_size);
    return kvf_min_u32(d->paging.pages_max, sink_pages + d->window_pages + d->ids_max);
}

/* Lists and rows where the host reads them. */
typedef struct lists_check {
    kvf_stream *stream;
    const kvf_row *row;
    const int32_t *indptr;
    const int32_t *indices;
    const int32_t *last_page_len;
    kvf_shape shape;
    uint32_t lists;       /* of all rows */
    uint32_t kv_heads;    /* lists of a row */
    uint32_t pages_max;   /* of a list */
    uint32_t ascends;     /* 1: a page is there once */
    uint32_t indices_max; /* that can be read */
    int32_t *cleared;     /* bad lists are made empty here, for work that is enqueued already */
} lists_check;

static kvf_status check_lists(const lists_check *c)
{
    bool is_good = true;
    for (uint32_t l = 0; l < c->lists; l++) {
        const int32_t first = c->indptr[l], end = c->indptr[l + 1];
        const uint32_t pages = kvf_div_ceil_u32(c->row[l / c->kv_heads].length, c->shape.page_size);
        is_good = first >= 0 && end >= first && (uint32_t)(end - first) <= c->pages_max &&
                  (uint32_t)end <= c->indices_max && c->last_page_len[l] >= 0;
        for (int32_t i = first; is_good && i < end; i++)
            is_good = c->indices[i] >= 0 && (uint32_t)c->indices[i] < pages &&
                      (!c->ascends || i == first || c->indices[i] > c->indices[i - 1]);
        if (!is_good)
            KVF_FAIL(c->stream->device->context, KVF_INVALID,
                     "page list %u: indptr must ascend to at most %u, a list has at most %u pages, "
                     "and page ids %sare below %u",
                     l, c->indices_max, c->pages_max, c->ascends ? "ascend and " : "", pages);
    }
    return KVF_OK;
}

/* In stream order, because the lists are written there. */
static void check_on_stream(const void *raw, uint32_t task)
{
    const lists_check *c = raw;
    const kvf_status status = check_lists(c);
    (void)task;
    if (status == KVF_OK)
        return;
    c->stream->device->ops->stream_fail(c->stream, status);
    for (uint32_t l = 0; c->cleared && l <= c->lists; l++)
        c->cleared[l] = 0;
}

/* Where the host reads them once the stream has come here: in place, or in copies. */
static kvf_status see_lists(kvf_call *call, const kvf_page_lists *lists, lists_check *c)
{
    const kvf_kv_group *kv_group = call->kv_group;
    const kvf_device_ops *ops = kv_group->device->ops;
    const kvf_control *to = &kv_group->control_device;
    *c = (lists_check){.stream = call->stream,
                       .row = call->row_host,
                       .indptr = lists->indptr,
                       .indices = lists->indices,
                       .last_page_len = lists->last_page_len,
                       .shape = kv_group->dims.paging.shape,
                       .lists = call->rows * kv_group->dims.paging.kv_heads,
                       .kv_heads = kv_group->dims.paging.kv_heads,
                       .pages_max =
                           kv_group->dims.spans_max - kvf_parted_pages(&kv_group->dims.paging),
                       .ascends = kvf_quantizes_pages(kv_group),
                       .indices_max = kvf_min_u32(lists->capacity, INT32_MAX)};
    if (!kv_group->dims.needs_mirror)
        return KVF_OK;
    c->indices_max = kvf_min_u32(c->indices_max, c->lists * c->pages_max);
    c->indptr = c->cleared = kv_group->control.mirror.indptr;
    c->indices = kv_group->control.mirror.indices;
    c->last_page_len = kv_group->control.mirror.last_page_len;
    KVF_TRY(ops->copy(call->stream, to->mirror.indptr, lists->indptr,
                      (c->lists + 1) * sizeof *c->indptr));
    KVF_TRY(ops->copy(call->stream, to->mirror.indices, lists->indices,
                      c->indices_max * sizeof *c->indices));
    return ops->copy(call->stream, to->mirror.last_page_len, lists->last_page_len,
                     c->lists * sizeof *c->last_page_len);
}

/* ---- pages of the lists ---- */

/* As kvf_addressable_listed wants it. */
static kvf_status find(kvf_call *call, const kvf_page_lists *lists, const int32_t **indptr,
                       const int32_t **indices)
{
    lists_check c;
    KVF_TRY(see_lists(call, lists, &c));
    KVF_TRY(kvf_addressable_wait(call->kv_group, call->stream));
    *indptr = c.indptr;
    *indices = c.indices;
    return check_lists(&c);
}

/* ---- selection ---- */

static kvf_status enqueue_select(kvf_call *call, const kvf_decode_args *args, const kvf_due *due,
                                 const kvf_page_lists *lists)
{
    const kvf_inputs in = kvf_inputs_seen(call->cache, args->q, args->k, args->v);
    kvf_decode_args own = *args;
    own.q = in.q;
    own.k = in.k;
    own.v = in.v;
    KVF_TRY(kvf_decode_send(call));
    KVF_TRY(kvf_inputs_round(call, args->q, args->k, args->v, call->rows));
    KVF_TRY(kvf_pages_select(call, &own, due));
    const kvf_csr_args csr = csr_args(call, lists);
    KVF_TRY(KVF_LAUNCH(call, csr_out, csr));
    KVF_TRY(kvf_call_stamp(call, &kvf_counters_device(call->kv_group, call->index)->select_ns));
    return kvf_addressable_listed(call, lists, find);
}

static kvf_status select_pages(kvf_cache *cache, const kvf_decode_args *args,
                               const kvf_page_lists *lists, kvf_stream *stream)
{
    kvf_call call = {.cache = cache};
    kvf_due due;
    KVF_TRY(kvf_decode_prepare(&call, args, stream, &due));
    return kvf_call_close(&call, enqueue_select(&call, args, &due, lists));
}

kvf_status kvf_lists_select(kvf_cache *cache, const kvf_decode_args *args,
                            const kvf_page_lists *lists, kvf_stream *stream)
{
    KVF_TRY(kvf_undo_keep(cache, args, stream));
    return kvf_undo_unless_ok(cache, args, stream, select_pages(cache, args, lists, stream));
}

const void *kvf_lists_page_address(const kvf_sequence *sequence, uint32_t layer, uint32_t kv_head,
                                   uint32_t page)
{
    KVF_ASSERT(layer < sequence->cache->config.layers);
    KVF_ASSERT(kv_head < sequence->cache->config.kv_heads);
    const kvf_layer *state = &sequence->layers[layer];
    const kvf_kv_group *kv_group = state->kv_group;
    const uint32_t head =
        kv_group ? kvf_layer_group_head(&sequence->cache->layer_groups[layer], kv_head) : 0;
    if (!kv_group || head >= kv_group->config.kv_heads)
        return NULL; /* it streams */
    const kvf_paging *p = &kv_group->dims.paging;
    KVF_ASSERT(page < kvf_div_ceil_u32(state->extent.length, p->shape.page_size));
    if (kvf_quantizes_pages(kv_group) && page / p->block_pages < state->extent.sealed)
        return NULL;
    kvf_arena_wait_block(state, page / p->block_pages);
    const uint32_t index = page / p->block_pages;
    const char *ring = kv_group->tables.rows.rings + (size_t)state->row * kvf_ring_size(p);
    /* One that is not in memory has none. */
    const char *block = index < state->extent.sealed
                            ? kvf_page_pool_device(&kv_group->pool, state->blocks[index])
                            : ring + index % p->ring_blocks * kvf_block_bytes(p);
    return block
               ? block + head * kvf_run_bytes(p) + page % p->block_pages * kvf_page_bytes(&p->shape)
               : NULL;
}

/* ---- given lists ---- */

/* `csr` then names the lists that were checked. */
static kvf_status check_in_order(kvf_call *call, const kvf_page_lists *lists, kvf_csr_args *csr)
{
    const kvf_control *copies = &call->kv_group->control_device;
    lists_check c;
    KVF_TRY(see_lists(call, lists, &c));
    if (call->kv_group->dims.needs_mirror) {
        csr->indptr = copies->mirror.indptr;
        csr->indices = copies->mirror.indices;
        csr->last_page_len = copies->mirror.last_page_len;
    }
    return call->stream->device->ops->host_call(call->stream, check_on_stream, &c, sizeof c);
}

static kvf_status enqueue_attend(kvf_call *call, const kvf_decode_args *args,
                                 const kvf_page_lists *lists)
{
    const kvf_kv_group *kv_group = call->kv_group;
    const kvf_paging *p = &kv_group->dims.paging;
    kvf_csr_args csr = csr_args(call, lists);
    const kvf_attention a = {.shape = p->shape,
                             .lists = call->rows * p->kv_heads,
                             .group = p->group,
                             .spans_max = kv_group->dims.spans_max,
                             .q = kvf_inputs_seen(call->cache, args->q, NULL, NULL).q,
                             .spans = csr.spans,
                             .span_count = csr.span_count,
                             .out = args->out,
                             .lse = args->lse};
    KVF_TRY(kvf_call_send(call));
    KVF_TRY(kvf_inputs_round(call, args->q, NULL, NULL, call->rows));
    KVF_TRY(check_in_order(call, lists, &csr));
    KVF_TRY(kvf_call_stamp(call, NULL));
    KVF_TRY(KVF_LAUNCH(call, csr_in, csr));
    KVF_TRY(kvf_call_attend_to(call, &a));
    return kvf_call_stamp(call, &kvf_counters_device(kv_group, call->index)->attend_ns);
}

static kvf_status enqueue_read(kvf_call *call, const kvf_decode_args *args,
                               const kvf_page_lists *lists)
{
    kvf_csr_args csr = csr_args(call, lists);
    KVF_TRY(kvf_call_send(call));
    KVF_TRY(check_in_order(call, lists, &csr));
    const kvf_read_args read = {.paging = csr.paging,
                                .rows = csr.rows,
                                .row = csr.row,
                                .indptr = csr.indptr,
                                .indices = csr.indices,
                                .out = args->out};
    return KVF_LAUNCH(call, read, read);
}

/* A call on given lists. */
static kvf_status use_lists(kvf_cache *cache, const kvf_decode_args *args,
                            const kvf_page_lists *lists, kvf_stream *stream,
                            kvf_status (*enqueue)(kvf_call *call, const kvf_decode_args *args,
                                                  const kvf_page_lists *lists))
{
    kvf_call call;
    KVF_TRY(kvf_call_begin(cache, stream, &call));
    kvf_call_at(&call, args->layer, args->sequences, args->batch);
    kvf_call_rows(&call);
    const kvf_status status = kvf_addressable_listed(&call, lists, find);
    return status == KVF_OK ? kvf_call_end(&call, enqueue(&call, args, lists))
                            : kvf_call_refuse(&call, status);
}

kvf_status kvf_lists_read(kvf_cache *cache, const kvf_decode_args *args,
                          const kvf_page_lists *lists, kvf_stream *stream)
{
    return use_lists(cache, args, lists, stream, enqueue_read);
}

kvf_status kvf_lists_attend(kvf_cache *cache, const kvf_decode_args *args,
                            const kvf_page_lists *lists, kvf_stream *stream)
{
    return use_lists(cache, args, lists, stream, enqueue_attend);
}
