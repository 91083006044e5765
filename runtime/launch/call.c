/* SPDX-License-Identifier: Apache-2.0 */

/*
 * One call on its way: frames, order between streams, rows.
 *
 * Knows nothing of what a call does. Frames are used in ring order; a frame is written again only
 * after the call that had it is done.
 */

#include "call.h"

kvf_status kvf_call_begin(kvf_cache *cache, kvf_stream *stream, kvf_call *call)
{
    const kvf_device_ops *ops = cache->device->ops;
    kvf_order *order = &cache->order;
    kvf_frame *frame = &order->frames[order->next_frame];
    if (frame->is_busy)
        KVF_TRY(ops->event_wait(frame->done));
    /* Work that the caller enqueued since reads pages that the last call brought. */
    if (order->is_listed && order->last_stream == stream)
        KVF_TRY(ops->event_record(order->last_done, stream));
    order->is_listed = 0;
    if (order->last_done && order->last_stream != stream)
        KVF_TRY(ops->stream_wait_event(stream, order->last_done));
    order->next_frame = (order->next_frame + 1) % KVF_FRAMES;
    frame->host.bytes = 0;
    *call = (kvf_call){.cache = cache, .stream = stream, .frame = frame};
    return KVF_OK;
}

void kvf_call_at(kvf_call *call, uint32_t layer, kvf_sequence *const *sequences, uint32_t rows)
{
    const kvf_layer_group *at = &call->cache->layer_groups[layer];
    call->layer = layer;
    call->kv_group = at->kv_group;
    call->index = at->index;
    call->rows = rows;
    call->states = call->cache->states;
    for (uint32_t b = 0; b < rows; b++) {
        kvf_layer *state = &sequences[b]->layers[layer];
        kvf_extent_begin(&state->extent);
        call->cache->states[b] = state;
    }
}

kvf_layer kvf_call_state(const kvf_call *call, uint32_t row)
{
    kvf_layer state = *call->states[row];
    for (uint32_t b = row + 1; b < call->rows && !kvf_call_is_first(call, b); b++) {
        state.extent.length--;
        state.queries.count--;
        state.steps--;
    }
    return state;
}

uint32_t kvf_call_turn(const kvf_call *call, uint32_t first)
{
    uint32_t end = call->states ? first + 1 : call->rows;
    while (end < call->rows && kvf_call_is_first(call, end))
        end++;
    return end;
}

void *kvf_call_take(kvf_call *call, size_t size, size_t count)
{
    kvf_carver *host = &call->frame->host;
    void *array = kvf_carve(host, size, &(uint64_t){count}, 1);
    KVF_ASSERT(!host->base || host->bytes <= call->cache->frame_bytes);
    return array;
}

const void *kvf_call_seen(const kvf_call *call, const void *array)
{
    const kvf_frame *frame = call->frame;
    return array ? frame->device + ((const char *)array - frame->host.base) : NULL;
}

/* Pages of the budget beside sink, static set, and the window as it is. */
static uint32_t chosen_pages(const kvf_kv_group *kv_group, const kvf_layer *state)
{
    if (kv_group->policy->all_pages || kv_group->dims.dynamic_pages == 0)
        return kv_group->dims.dynamic_pages;
    const uint32_t taken = kv_group->dims.static_tokens, rest = kvf_rest_tokens(kv_group, state);
    return taken < rest ? (rest - taken) / kv_group->config.page_size : 0;
}

kvf_row kvf_call_row(const kvf_kv_group *kv_group, const kvf_layer *state)
{
    const kvf_row_tables *t = &kv_group->tables.rows;
    const kvf_paging *p = &kv_group->dims.paging;
    const size_t n = state->row;
    const size_t rows = (size_t)kv_group->config.sequences_max * kv_group->config.layers;
    const size_t stored = state->refresh.in_force * rows + n; /* two stores per row */
    const size_t runs = (size_t)p->kv_heads * p->blocks_max;
    const size_t centroids = (size_t)p->kv_heads * p->segments_max; /* no coarse head: none */
    const size_t page = kvf_page_bytes(&p->shape);
    const size_t queries = p->query_window * kvf_queries_bytes(p);
    return (kvf_row){
        .blocks = t->blocks + n * p->blocks_max,
        .ring = t->rings + n * kvf_ring_size(p),
        .digests = t->digests,
        .digest_stride = (size_t)kv_group->dims.digest_blocks * p->digest_bytes,
        .block_of = t->block_of + n * p->blocks_max,
        .centroids = t->centroids ? t->centroids + n * centroids * p->shape.head_dim : NULL,
        .centroid_scales = t->centroid_scales ? t->centroid_scales + n * centroids : NULL,
        .bits = t->bits + n * runs,
        .static_kv = t->static_kv + stored * p->kv_heads * p->static_pages * page,
        .static_ids = t->static_ids + stored * p->kv_heads * kvf_static_room(p),
        .static_count = t->static_count + stored * p->kv_heads,
        .queries = t->queries + n * queries,
        .slot_of_page = kv_group->residency.slot_of_page,
        .slot_words = kv_group->residency.words,
        .slots = kv_group->residency.slot_memory,
        .use = kv_group->residency.clock,
        .step = state->steps,
        .chosen_at = t->chosen_at ? t->chosen_at + n * p->kv_heads * p->pages_max : NULL,
        .share = t->share ? t->share + n * 2 : NULL,
        .fault = state->fault,
        .fault_key = state->fault_key,
        .static_tokens = kv_group->dims.static_tokens,
        .chosen_pages = chosen_pages(kv_group, state),
        .length = state->extent.length,
        .sealed = state->extent.sealed,
        .sealed_before = state->extent.sealed,
        .query_slot = state->queries.count ? (state->queries.count - 1) % p->query_window : 0,
        .query_count = kvf_kept_queries(kv_group, state),
        .attend_all =
            kv_group->policy->all_pages ||
            state->extent.length <= kvf_budget_tokens(&kv_group->config, state->extent.length),
    };
}

/* Blocks of all rows; those of a recorded step are sealed before its graph. */
static uint32_t blocks_to_seal(const kvf_call *call)
{
    uint32_t blocks = 0;
    for (uint32_t b = 0; b < call->rows; b++)
        if (kvf_call_is_first(call, b))
            blocks += call->states[b]->extent.sealed - call->states[b]->extent.sealed_before;
    KVF_ASSERT(!call->is_recorded || blocks == 0);
    return blocks;
}

void kvf_call_rows(kvf_call *call)
{
    kvf_kv_group *kv_group = call->kv_group;
    const kvf_paging *p = &kv_group->dims.paging;
    uint32_t job = 0;
    if (call->states)
        call->sealed_blocks = blocks_to_seal(call);
    KVF_TAKE(call, call->row_host, call->row, call->rows);
    KVF_TAKE(call, call->pool_host, call->pool, call->sealed_blocks);
    KVF_TAKE(call, call->block_of_host, call->new_block_of, call->sealed_blocks);
    if (!call->row_host)
        return;
    ++kv_group->residency.clock;
    call->stride = call->is_recorded ? p->pages_max : 1;
    for (uint32_t b = 0; b < call->rows; b++) {
        const kvf_layer state = kvf_call_state(call, b);
        kvf_row *row = &call->row_host[b];
        *row = kvf_call_row(kv_group, &state);
        if (kvf_call_is_first(call, b))
            row->sealed_before = state.extent.sealed_before;
        /* A query that this step brings and overwrites is not kept. */
        if (call->states[b]->queries.count - state.queries.count >= p->query_window)
            row->queries = NULL;
        KVF_ASSERT(job + row->sealed - row->sealed_before <= call->sealed_blocks);
        row->job_first = job;
        row->pool = call->pool ? call->pool + job : NULL;
        row->new_block_of = call->new_block_of ? call->new_block_of + job : NULL;
        call->stride = kvf_max_u32(call->stride, kvf_row_sealed_pages(p, row));
        for (uint32_t i = row->sealed_before; i < row->sealed; i++, job++) {
            call->pool_host[job] = kvf_page_pool_device(&kv_group->pool, state.blocks[i]);
            call->block_of_host[job] = state.blocks[i].index;
        }
    }
}

kvf_status kvf_call_send(kvf_call *call)
{
    const kvf_cache *cache = call->cache;
    if (call->is_recorded)
        return KVF_OK; /* the frame is brought by the recording itself */
    return cache->device->ops->copy(call->stream, call->frame->device, call->frame->host.base,
                                    call->frame->host.bytes);
}

kvf_status kvf_call_end(kvf_call *call, kvf_status status)
{
    kvf_cache *cache = call->cache;
    const kvf_status recorded = cache->device->ops->event_record(call->frame->done, call->stream);
    if (status == KVF_OK)
        status = recorded;
    call->frame->is_busy = recorded == KVF_OK;
    cache->order.last_stream = call->stream;
    cache->order.last_done = call->frame->done;
    if (status != KVF_OK)
        cache->broken = status;
    return status;
}

kvf_status kvf_call_refuse(kvf_call *call, kvf_status status)
{
    const kvf_status ended = kvf_call_end(call, KVF_OK);
    return ended == KVF_OK ? status : ended;
}

kvf_choices kvf_call_choices(const kvf_call *call, const kvf_choice *choice)
{
    return (kvf_choices){.paging = call->kv_group->dims.paging,
                         .rows = call->rows,
                         .ids_max = choice->ids_max,
                         .row = call->row,
                         .ids = choice->ids,
                         .id_count = choice->id_count,
                         .slot_of_id = choice->slot_of_id,
                         .missed = choice->missed,
                         .misses = choice->misses,
                         .miss_count = choice->miss_count,
                         .counters = kvf_counters_device(call->kv_group, call->index)};
}

kvf_status kvf_call_stamp(kvf_call *call, uint64_t *sum)
{
    const kvf_stamp_args args = {.last = call->cache->words_device.stamp, .sum = sum};
    return call->cache->config.phase_times ? KVF_LAUNCH(call, stamp, args) : KVF_OK;
}

kvf_status kvf_call_clear(kvf_call *call, kvf_layer *state)
{
    kvf_kv_group *kv_group = state->kv_group;
    const kvf_paging *p = &kv_group->dims.paging;
    if (!state->is_fresh)
        return KVF_OK;
    const kvf_row row = kvf_call_row(kv_group, state);
    if (row.chosen_at)
        KVF_TRY(kv_group->device->ops->fill(call->stream, row.chosen_at, 0,
                                            (size_t)p->kv_heads * p->pages_max * sizeof(uint32_t)));
    KVF_TRY(kv_group->device->ops->fill(call->stream, row.static_count, 0,
                                        p->kv_heads * sizeof(uint32_t)));
    state->is_fresh = 0;
    return KVF_OK;
}

/* Segments that a coarse head of the row ranks. */
static uint32_t segments_ranked(const kvf_kv_group *kv_group, const kvf_row *row, uint32_t *take)
{
    const uint32_t pages = row->share ? kv_group->dims.dynamic_pages : row->chosen_pages;
    return kvf_segments_ranked(&kv_group->dims.paging, row, kv_group->config.coarse_share, pages,
                               take);
}

/* Tables of coarse heads; `bits` of theirs become those that filtering leaves. */
static void take_coarse(kvf_call *call, const uint64_t **bits)
{
    const kvf_kv_group *kv_group = call->kv_group;
    const kvf_paging *p = &kv_group->dims.paging;
    const uint32_t lists = p->segments_max ? call->rows * p->lists : 0;
    const int8_t **centroids;
    const uint16_t **scales;
    uint32_t *count, *take, *blocks;
    const uint64_t **unfiltered;
    KVF_TAKE(call, centroids, call->coarse.centroids, lists);
    KVF_TAKE(call, scales, call->coarse.scales, lists);
    KVF_TAKE(call, count, call->coarse.count, lists);
    KVF_TAKE(call, take, call->coarse.take, lists);
    KVF_TAKE(call, blocks, call->coarse.blocks, lists);
    KVF_TAKE(call, unfiltered, call->coarse.unfiltered, lists);
    for (uint32_t l = 0; centroids && l < lists; l++) {
        const kvf_row *row = &call->row_host[l / p->lists];
        const uint32_t head = l % p->lists;
        const bool is_coarse = kvf_is_coarse(call->cache, call->layer, head);
        centroids[l] = kvf_row_centroid(p, row, head, 1);
        scales[l] = kvf_row_centroid_scale(p, row, head, 1);
        take[l] = 0;
        count[l] = is_coarse ? segments_ranked(kv_group, row, &take[l]) : 0;
        blocks[l] = row->sealed;
        unfiltered[l] = count[l] ? bits[l] : NULL;
        if (count[l])
            bits[l] = kv_group->tables.coarse.bits + (size_t)l * p->blocks_max;
    }
}

void kvf_call_lists(kvf_call *call)
{
    const kvf_kv_group *kv_group = call->kv_group;
    const kvf_paging *p = &kv_group->dims.paging;
    const uint32_t lists = call->rows * p->lists, chosen = call->rows * kv_group->dims.choose_lists;
    const void **digests;
    const uint32_t **block_of;
    const uint64_t **bits;
    uint32_t *pages, *choose_pages;
    KVF_TAKE(call, digests, call->digests, lists);
    KVF_TAKE(call, block_of, call->block_of, lists);
    KVF_TAKE(call, bits, call->bits,
             kvf_has_codes(kv_group) || kv_group->dims.static_tokens ? lists : 0);
    KVF_TAKE(call, pages, call->pages, lists);
    KVF_TAKE(call, choose_pages, call->choose_pages, chosen);
    kvf_call_share(call, kvf_call_rows_at_once(call, &call->cache->runtime->properties));
    if (!digests) {
        take_coarse(call, NULL);
        return;
    }
    for (uint32_t l = 0; l < lists; l++) {
        const uint32_t b = l / p->lists, list = l % p->lists;
        const kvf_row *row = &call->row_host[b];
        const uint32_t head = kvf_list_head(p, list);
        digests[l] = kvf_row_digests(p, row, 0, head);
        block_of[l] = row->block_of;
        if (bits)
            bits[l] = kvf_row_bits(p, row, head);
        pages[l] = kvf_row_sealed_pages(p, row);
    }
    take_coarse(call, bits);
    for (uint32_t i = 0; i < chosen; i++)
        choose_pages[i] = kvf_row_sealed_pages(p, &call->row_host[i / kv_group->dims.choose_lists]);
}

/* Quantized pages in full precision; see the header. Knows nothing of who reads them. */

kvf_status kvf_dequantized_row(const kvf_call *call, const kvf_kv_group *kv_group,
                               const kvf_row *row, uint32_t first, uint32_t count,
                               const kvf_row **view)
{
    const kvf_scratch_tables *t = &kv_group->tables.scratch;
    const kvf_dequantize_args args = {.paging = kv_group->dims.paging,
                                      .first = first,
                                      .count = count,
                                      .scratch = t->blocks,
                                      .table = t->table,
                                      .view = t->view,
                                      .row = row};
    *view = t->view;
    return KVF_LAUNCH(call, dequantize, args);
}

kvf_status kvf_dequantized_view(kvf_call *call, uint32_t index, const kvf_row **view)
{
    *view = call->row + index;
    return kvf_quantizes_pages(call->kv_group)
               ? kvf_dequantized_row(call, call->kv_group, *view, 0, call->row_host[index].sealed,
                                     view)
               : KVF_OK;
}
