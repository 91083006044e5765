/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Selection on its own: page lists out, and attention over given page lists.
 *
 * Knows nothing of kernels of others. Lists name pages of a (sequence, layer); nothing is fetched,
 * because the caller's kernel reads pages where kvf_page_address says.
 */

#include "lists.h"

#include "attend.h"
#include "decode.h"
#include "prefill_arena.h"
#include "select.h"

static kvf_csr_args csr_args(const kvf_step *step, const kvf_page_lists *lists)
{
    const kvf_cache *cache = step->cache;
    return (kvf_csr_args){.paging = cache->dims.paging,
                          .rows = step->rows,
                          .ids_max = cache->dims.ids_max,
                          .spans_max = cache->dims.spans_max,
                          .row = step->row,
                          .ids = cache->tables.now.ids,
                          .id_count = cache->tables.now.id_count,
                          .indptr = lists->indptr,
                          .indices = lists->indices,
                          .last_page_len = lists->last_page_len,
                          .spans = cache->tables.spans,
                          .span_count = cache->tables.span_count};
}

uint32_t kvf_lists_pages_max(const kvf_cache *cache)
{
    const kvf_dims *d = &cache->dims;
    const uint32_t sink_pages = kvf_div_ceil_u32(d->paging.sink, d->paging.shape.page_size);
    return kvf_min_u32(d->paging.pages_max, sink_pages + d->window_pages + d->ids_max);
}

static kvf_status enqueue_select(kvf_step *step, const kvf_decode_args *args, const kvf_due *due,
                                 const kvf_page_lists *lists)
{
    KVF_TRY(kvf_decode_select(step, args, due));
    const kvf_csr_args csr = csr_args(step, lists);
    KVF_TRY(KVF_LAUNCH(step, csr_out, csr));
    return kvf_step_stamp(step, &kvf_counters_device(step->cache, step->layer)->select_ns);
}

kvf_status kvf_lists_select(kvf_cache *cache, const kvf_decode_args *args,
                            const kvf_page_lists *lists, kvf_stream *stream)
{
    kvf_step step = {.cache = cache};
    kvf_due due;
    KVF_TRY(kvf_decode_prepare(&step, args, stream, &due));
    return kvf_step_end(&step, enqueue_select(&step, args, &due, lists));
}

const void *kvf_lists_page_address(const kvf_sequence *sequence, uint32_t layer, uint32_t kv_head,
                                   uint32_t page)
{
    const kvf_cache *cache = sequence->cache;
    const kvf_paging *p = &cache->dims.paging;
    const kvf_layer *state = &sequence->layers[layer];
    KVF_ASSERT(layer < cache->config.layers && kv_head < p->kv_heads);
    KVF_ASSERT(page < kvf_div_ceil_u32(state->length, p->shape.page_size));
    kvf_arena_wait_block(sequence, layer, page / p->block_pages);
    const size_t n = kvf_row_number(cache, sequence, layer);
    const uint32_t index = page / p->block_pages;
    const char *ring = cache->tables.rings + n * p->ring_blocks * kvf_block_bytes(p);
    const char *block = index < state->sealed
                            ? kvf_page_pool_device(&cache->pool, state->blocks[index])
                            : ring + index % p->ring_blocks * kvf_block_bytes(p);
    return block + kv_head * kvf_run_bytes(p) + page % p->block_pages * kvf_page_bytes(&p->shape);
}

/* ---- attention over given lists ---- */

/* Lists and rows where the host reads them. */
typedef struct lists_check {
    kvf_stream *stream;
    const kvf_row *row;
    const int32_t *indptr;
    const int32_t *indices;
    const int32_t *last_page_len;
    kvf_shape shape;
    uint32_t lists;    /* of all rows */
    uint32_t kv_heads; /* lists of a row */
    uint32_t spans_max;
    uint32_t indices_max; /* that can be read */
    int32_t *cleared;     /* bad lists are made empty here, for work that is enqueued already */
} lists_check;

/* In stream order, because the lists are written there. */
static void check_on_stream(const void *raw, uint32_t task)
{
    const lists_check *c = raw;
    bool is_good = true;
    (void)task;
    for (uint32_t l = 0; l < c->lists && is_good; l++) {
        const int32_t first = c->indptr[l], end = c->indptr[l + 1];
        const uint32_t pages = kvf_div_ceil_u32(c->row[l / c->kv_heads].length, c->shape.page_size);
        is_good = first >= 0 && end >= first && (uint32_t)(end - first) <= c->spans_max &&
                  (uint32_t)end <= c->indices_max && c->last_page_len[l] >= 0;
        for (int32_t i = first; is_good && i < end; i++)
            is_good = c->indices[i] >= 0 && (uint32_t)c->indices[i] < pages;
        if (!is_good)
            c->stream->device->ops->stream_fail(
                c->stream,
                kvf_fail(c->stream->device->context, KVF_INVALID, 0,
                         "page list %u: indptr must ascend, a list has at most %u pages, and page "
                         "ids are below %u",
                         l, c->spans_max, pages));
    }
    for (uint32_t l = 0; !is_good && c->cleared && l <= c->lists; l++)
        c->cleared[l] = 0;
}

/* Copies first, where the host cannot read the lists in place; `csr` then names the copies. */
static kvf_status check_in_order(kvf_step *step, const kvf_page_lists *lists, kvf_csr_args *csr)
{
    const kvf_cache *cache = step->cache;
    const kvf_device_ops *ops = cache->device->ops;
    lists_check c = {.stream = step->stream,
                     .row = step->row_host,
                     .indptr = lists->indptr,
                     .indices = lists->indices,
                     .last_page_len = lists->last_page_len,
                     .shape = cache->dims.paging.shape,
                     .lists = step->rows * cache->dims.paging.kv_heads,
                     .kv_heads = cache->dims.paging.kv_heads,
                     .spans_max = cache->dims.spans_max,
                     .indices_max = INT32_MAX};
    if (cache->dims.needs_mirror) {
        c.indices_max = kvf_min_u32(lists->capacity, c.lists * c.spans_max);
        c.indptr = c.cleared = cache->control.mirror.indptr;
        c.indices = cache->control.mirror.indices;
        c.last_page_len = cache->control.mirror.last_page_len;
        csr->indptr = cache->control_device.mirror.indptr;
        csr->indices = cache->control_device.mirror.indices;
        csr->last_page_len = cache->control_device.mirror.last_page_len;
        KVF_TRY(
            ops->copy(step->stream, csr->indptr, lists->indptr, (c.lists + 1) * sizeof *c.indptr));
        KVF_TRY(ops->copy(step->stream, csr->indices, lists->indices,
                          c.indices_max * sizeof *c.indices));
        KVF_TRY(ops->copy(step->stream, csr->last_page_len, lists->last_page_len,
                          c.lists * sizeof *c.last_page_len));
    }
    return ops->host_call(step->stream, check_on_stream, &c, sizeof c);
}

static kvf_status enqueue_attend(kvf_step *step, const kvf_decode_args *args,
                                 const kvf_page_lists *lists)
{
    const kvf_cache *cache = step->cache;
    const kvf_paging *p = &cache->dims.paging;
    kvf_csr_args csr = csr_args(step, lists);
    const kvf_attention a = {.shape = p->shape,
                             .lists = step->rows * p->kv_heads,
                             .group = p->group,
                             .spans_max = cache->dims.spans_max,
                             .q = args->q,
                             .spans = csr.spans,
                             .span_count = csr.span_count,
                             .out = args->out,
                             .lse = args->lse};
    KVF_TRY(kvf_step_send(step));
    KVF_TRY(check_in_order(step, lists, &csr));
    KVF_TRY(kvf_step_stamp(step, NULL));
    KVF_TRY(KVF_LAUNCH(step, csr_in, csr));
    KVF_TRY(kvf_step_pass(step, &a, KVF_PASS_ALL));
    KVF_TRY(kvf_step_merge(step, &a));
    return kvf_step_stamp(step, &kvf_counters_device(cache, step->layer)->attend_ns);
}

kvf_status kvf_lists_attend(kvf_cache *cache, const kvf_decode_args *args,
                            const kvf_page_lists *lists, kvf_stream *stream)
{
    kvf_step step;
    KVF_TRY(kvf_step_begin(cache, stream, &step));
    step.layer = args->layer;
    step.rows = args->batch;
    step.sequences = args->sequences;
    step.q = args->q;
    for (uint32_t b = 0; b < args->batch; b++)
        cache->sealed_before[b] = args->sequences[b]->layers[args->layer].sealed;
    kvf_step_rows(&step, cache->sealed_before);
    return kvf_step_end(&step, enqueue_attend(&step, args, lists));
}
