/* SPDX-License-Identifier: Apache-2.0 */

/*
 * From chosen pages to attention: slots, transfer, spans, passes, merge; and the check against
 * dense attention.
 *
 * Knows nothing of how pages were chosen. Hits are attended while misses are on their way; because
 * splits are fixed and merged in order, that changes no bit.
 */

#include "select.h"

static kvf_status submit(kvf_step *step)
{
    kvf_cache *cache = step->cache;
    const kvf_tables *t = &cache->tables;
    const kvf_fetch_args fetch = {.paging = cache->dims.paging,
                                  .rows = step->rows,
                                  .ids_max = cache->dims.ids_max,
                                  .row = step->row,
                                  .misses = t->misses,
                                  .miss_count = t->miss_count,
                                  .from = t->from,
                                  .to = t->to,
                                  .count = t->fetch_count};
    const kvf_transfer_request request = {.from = fetch.from, .to = fetch.to, .count = fetch.count};
    KVF_TRY(KVF_LAUNCH(step, fetch, fetch, 1));
    if (!step->is_recorded)
        KVF_TRY(kvf_transfer_wait_room(cache->transfer));
    return kvf_transfer_submit(cache->transfer, &request, step->stream, &step->ticket);
}

kvf_status kvf_step_resolve(kvf_step *step)
{
    const kvf_cache *cache = step->cache;
    const kvf_tables *t = &cache->tables;
    const kvf_resolve_args resolve = {.lists = step->rows * cache->dims.paging.lists,
                                      .ids_max = cache->dims.ids_max,
                                      .slots = cache->dims.paging.slots,
                                      .stride = step->stride,
                                      .ids = t->ids,
                                      .id_count = t->id_count,
                                      .scores = step->list_scores,
                                      .slot_of_page = step->slot_of_page,
                                      .page_of_slot = step->page_of_slot,
                                      .slot_of_id = t->slot_of_id,
                                      .missed = t->missed,
                                      .misses = t->misses,
                                      .miss_count = t->miss_count};
    KVF_TRY(KVF_LAUNCH(step, resolve, resolve, kvf_resolve_tasks(&resolve)));
    return kvf_moves_pages(cache) ? submit(step) : KVF_OK;
}

kvf_status kvf_step_assemble(kvf_step *step)
{
    const kvf_cache *cache = step->cache;
    const kvf_tables *t = &cache->tables;
    const kvf_assemble_args assemble = {.paging = cache->dims.paging,
                                        .rows = step->rows,
                                        .ids_max = cache->dims.ids_max,
                                        .spans_max = cache->dims.spans_max,
                                        .row = step->row,
                                        .ids = t->ids,
                                        .id_count = t->id_count,
                                        .slot_of_id = t->slot_of_id,
                                        .missed = t->missed,
                                        .masks = step->masks,
                                        .spans = t->spans,
                                        .span_count = t->span_count,
                                        .counters = kvf_counters_device(cache, step->layer)};
    const uint32_t lists = step->rows * cache->dims.paging.lists;
    return KVF_LAUNCH(step, assemble, assemble, kvf_div_ceil_u32(lists, KVF_ASSEMBLE_LISTS));
}

kvf_status kvf_step_pass(kvf_step *step, const kvf_attention *a, kvf_pass pass)
{
    const kvf_cache *cache = step->cache;
    const kvf_attend_args args = {.shape = cache->dims.paging.shape,
                                  .pass = pass,
                                  .lists = a->lists,
                                  .group = a->group,
                                  .spans_max = a->spans_max,
                                  .split = cache->dims.split,
                                  .scale = cache->config.softmax_scale,
                                  .q = a->q,
                                  .spans = a->spans,
                                  .span_count = a->span_count,
                                  .partial_o = cache->tables.partial_o,
                                  .partial_lse = cache->tables.partial_lse};
    return KVF_LAUNCH(step, attend, args, kvf_attend_tasks(&args));
}

kvf_status kvf_step_merge(kvf_step *step, const kvf_attention *a)
{
    const kvf_cache *cache = step->cache;
    const kvf_merge_args args = {.shape = cache->dims.paging.shape,
                                 .lists = a->lists,
                                 .group = a->group,
                                 .splits_max = kvf_div_ceil_u32(a->spans_max, cache->dims.split),
                                 .split = cache->dims.split,
                                 .span_count = a->span_count,
                                 .partial_o = cache->tables.partial_o,
                                 .partial_lse = cache->tables.partial_lse,
                                 .out = a->out,
                                 .lse = a->lse};
    return KVF_LAUNCH(step, merge, args, kvf_merge_tasks(&args));
}

kvf_status kvf_step_attend(kvf_step *step, void *out, float *lse)
{
    const kvf_cache *cache = step->cache;
    const kvf_paging *p = &cache->dims.paging;
    const kvf_attention a = {.lists = step->rows * p->lists,
                             .group = p->kv_heads * p->group / p->lists,
                             .spans_max = cache->dims.spans_max,
                             .q = step->q,
                             .spans = cache->tables.spans,
                             .span_count = cache->tables.span_count,
                             .out = out,
                             .lse = lse};
    if (kvf_moves_pages(cache)) {
        KVF_TRY(kvf_step_pass(step, &a, KVF_PASS_RESIDENT));
        KVF_TRY(kvf_transfer_join(cache->transfer, step->ticket, step->stream));
        KVF_TRY(kvf_step_pass(step, &a, KVF_PASS_FETCHED));
    } else {
        KVF_TRY(kvf_step_pass(step, &a, KVF_PASS_ALL));
    }
    return kvf_step_merge(step, &a);
}

kvf_status kvf_step_verify(kvf_step *step, uint32_t index, const void *out, const float *lse)
{
    const kvf_cache *cache = step->cache;
    const kvf_tables *t = &cache->tables;
    const kvf_paging *p = &cache->dims.paging;
    const uint32_t heads = cache->config.query_heads;
    const size_t first = (size_t)index * heads;
    const size_t bytes = first * p->shape.head_dim * kvf_dtype_bytes(p->shape.dtype);
    const kvf_cover_args cover = {.paging = *p,
                                  .spans_max = cache->dims.cover_max,
                                  .row = step->row + index,
                                  .spans = t->cover.spans,
                                  .span_index = t->cover.span_index,
                                  .span_count = t->cover.span_count};
    const kvf_attention a = {.lists = p->kv_heads,
                             .group = p->group,
                             .spans_max = cover.spans_max,
                             .q = (const char *)step->q + bytes,
                             .spans = cover.spans,
                             .span_count = cover.span_count,
                             .out = t->verify_out,
                             .lse = t->verify_lse};
    const kvf_compare_args compare = {.shape = p->shape,
                                      .heads = heads,
                                      .out = (const char *)out + bytes,
                                      .dense = a.out,
                                      .lse = lse + first,
                                      .dense_lse = a.lse,
                                      .counters = kvf_counters_device(cache, step->layer)};
    KVF_TRY(KVF_LAUNCH(step, cover, cover, p->kv_heads));
    KVF_TRY(kvf_step_pass(step, &a, KVF_PASS_ALL));
    KVF_TRY(kvf_step_merge(step, &a));
    return KVF_LAUNCH(step, compare, compare, 1);
}
