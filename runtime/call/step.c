/* SPDX-License-Identifier: Apache-2.0 */

/*
 * One call on its way: frames, order between streams, rows.
 *
 * Knows nothing of what a call does. Frames are used in ring order; a frame is written again only
 * after the call that had it is done.
 */

#include "step.h"

#include "ahead.h"

kvf_status kvf_step_begin(kvf_cache *cache, kvf_stream *stream, kvf_step *step)
{
    const kvf_device_ops *ops = cache->device->ops;
    kvf_frame *frame = &cache->frames[cache->next_frame];
    if (frame->is_busy)
        KVF_TRY(ops->event_wait(frame->done));
    /* What the caller enqueued since reads pages that the last call brought. */
    if (cache->is_listed && cache->last_stream == stream)
        KVF_TRY(ops->event_record(cache->last_done, stream));
    cache->is_listed = 0;
    if (cache->last_done && cache->last_stream != stream)
        KVF_TRY(ops->stream_wait_event(stream, cache->last_done));
    cache->next_frame = (cache->next_frame + 1) % KVF_FRAMES;
    frame->host.bytes = 0;
    *step = (kvf_step){.cache = cache, .stream = stream, .frame = frame};
    return KVF_OK;
}

void *kvf_step_take(kvf_step *step, size_t size, size_t count)
{
    kvf_carver *host = &step->frame->host;
    void *array = kvf_carve(host, size, &(uint64_t){count}, 1);
    KVF_ASSERT(!host->base || host->bytes <= step->cache->dims.frame_bytes);
    return array;
}

const void *kvf_step_seen(const kvf_step *step, const void *array)
{
    const kvf_frame *frame = step->frame;
    return array ? frame->device + ((const char *)array - frame->host.base) : NULL;
}

size_t kvf_step_measure(kvf_cache *cache, uint32_t rows, uint32_t sealed_blocks,
                        void (*take)(kvf_step *step))
{
    kvf_frame frame = {0};
    kvf_step step = {.cache = cache, .frame = &frame, .rows = rows, .sealed_blocks = sealed_blocks};
    take(&step);
    return frame.host.bytes;
}

/* Pages of the budget beside sink, static set, and the window as it is. */
static uint32_t chosen_pages(const kvf_cache *cache, const kvf_layer *state)
{
    if (cache->policy->all_pages || cache->dims.dynamic_pages == 0)
        return cache->dims.dynamic_pages;
    const uint32_t taken = cache->dims.static_tokens, rest = kvf_rest_tokens(cache, state);
    return taken < rest ? (rest - taken) / cache->config.page_size : 0;
}

kvf_row kvf_step_row(const kvf_cache *cache, const kvf_sequence *sequence, uint32_t layer)
{
    const kvf_tables *t = &cache->tables;
    const kvf_paging *p = &cache->dims.paging;
    const kvf_layer *state = &sequence->layers[layer];
    const size_t n = kvf_row_number(cache, sequence, layer);
    const size_t rows = (size_t)cache->config.sequences_max * cache->config.layers;
    const size_t stored = state->store * rows + n; /* two stores per row */
    const size_t runs = (size_t)p->kv_heads * p->blocks_max;
    const size_t page = kvf_page_bytes(&p->shape);
    const size_t query = p->query_window * (size_t)p->kv_heads * p->group * p->shape.head_dim *
                         kvf_dtype_bytes(p->shape.dtype);
    const uint32_t list = (uint32_t)(n * p->lists);
    return (kvf_row){
        .blocks = t->blocks + n * p->blocks_max,
        .ring = t->rings + n * p->ring_blocks * kvf_block_bytes(p),
        .digests = t->digests + n * runs * p->digest_bytes,
        .bits = t->bits + n * runs,
        .store = t->stores + stored * p->kv_heads * p->store_pages * page,
        .store_index = t->store_index + stored * p->kv_heads * kvf_store_tokens(p),
        .store_count = t->store_count + stored * p->kv_heads,
        .queries = t->queries + n * query,
        .slot_of_page = kvf_residency_slot_of_page(&cache->residency, list),
        .slots =
            cache->residency.slot_bytes ? kvf_residency_slot(&cache->residency, list, 0) : NULL,
        .share = t->share ? t->share + n * 2 : NULL,
        .fault = cache->control_device.faults + sequence->slot,
        .fault_key = sequence->generation << 12 | layer,
        .static_tokens = cache->dims.static_tokens,
        .chosen_pages = chosen_pages(cache, state),
        .length = state->length,
        .sealed = state->sealed,
        .sealed_before = state->sealed,
        .query_slot = state->queries ? (state->queries - 1) % p->query_window : 0,
        .query_count = kvf_kept_queries(cache, state),
        .attend_all = cache->policy->all_pages || state->length <= cache->config.budget_tokens,
    };
}

/* Of all rows; what a recorded step seals is sealed before its graph. */
static uint32_t blocks_to_seal(const kvf_step *step, const uint32_t *sealed_before)
{
    uint32_t blocks = 0;
    for (uint32_t b = 0; b < step->rows; b++)
        blocks += step->sequences[b]->layers[step->layer].sealed - sealed_before[b];
    KVF_ASSERT(!step->is_recorded || blocks == 0);
    return blocks;
}

void kvf_step_rows(kvf_step *step, const uint32_t *sealed_before)
{
    kvf_cache *cache = step->cache;
    const kvf_paging *p = &cache->dims.paging;
    uint32_t job = 0;
    if (step->sequences)
        step->sealed_blocks = blocks_to_seal(step, sealed_before);
    KVF_TAKE(step, step->row_host, step->row, step->rows);
    KVF_TAKE(step, step->pool_host, step->pool, step->sealed_blocks);
    if (!step->row_host)
        return;
    step->stride = step->is_recorded ? p->pages_max : 1;
    for (uint32_t b = 0; b < step->rows; b++) {
        const kvf_layer *state = &step->sequences[b]->layers[step->layer];
        kvf_row *row = &step->row_host[b];
        *row = kvf_step_row(cache, step->sequences[b], step->layer);
        row->sealed_before = sealed_before[b];
        KVF_ASSERT(job + row->sealed - sealed_before[b] <= step->sealed_blocks);
        row->job_first = job;
        row->pool = step->pool ? step->pool + job : NULL;
        step->stride = kvf_max_u32(step->stride, kvf_row_sealed_pages(p, row));
        for (uint32_t i = sealed_before[b]; i < row->sealed; i++)
            step->pool_host[job++] = kvf_page_pool_device(&cache->pool, state->blocks[i]);
    }
}

kvf_status kvf_step_send(kvf_step *step)
{
    if (step->is_recorded)
        return KVF_OK; /* the frame is brought by the recording itself */
    if (step->cache->is_unsettled)
        KVF_TRY(kvf_ahead_settle(step));
    return step->cache->device->ops->copy(step->stream, step->frame->device, step->frame->host.base,
                                          step->frame->host.bytes);
}

kvf_status kvf_step_end(kvf_step *step, kvf_status status)
{
    kvf_cache *cache = step->cache;
    const kvf_status recorded = cache->device->ops->event_record(step->frame->done, step->stream);
    if (status == KVF_OK)
        status = recorded;
    step->frame->is_busy = recorded == KVF_OK;
    cache->last_stream = step->stream;
    cache->last_done = step->frame->done;
    if (status != KVF_OK)
        cache->broken = status;
    return status;
}

kvf_status kvf_step_refuse(kvf_step *step, kvf_status status)
{
    const kvf_status ended = step->cache->pool.tier ? kvf_step_end(step, KVF_OK) : KVF_OK;
    return ended == KVF_OK ? status : ended;
}

kvf_status kvf_step_stamp(kvf_step *step, uint64_t *sum)
{
    const kvf_stamp_args args = {.last = step->cache->control_device.stamp, .sum = sum};
    return step->cache->config.phase_times ? KVF_LAUNCH(step, stamp, args) : KVF_OK;
}

kvf_status kvf_step_clear(kvf_step *step, kvf_sequence *sequence, uint32_t layer)
{
    kvf_cache *cache = step->cache;
    const kvf_device_ops *ops = cache->device->ops;
    const kvf_paging *p = &cache->dims.paging;
    kvf_layer *state = &sequence->layers[layer];
    const kvf_row row = kvf_step_row(cache, sequence, layer);
    if (!state->is_fresh)
        return KVF_OK;
    KVF_TRY(kvf_residency_clear(&cache->residency,
                                (uint32_t)kvf_row_number(cache, sequence, layer) * p->lists,
                                p->lists, step->stream));
    KVF_TRY(kvf_ahead_clear(step, kvf_row_number(cache, sequence, layer)));
    KVF_TRY(ops->fill(step->stream, row.store_count, 0, p->kv_heads * sizeof(uint32_t)));
    state->is_fresh = 0;
    return KVF_OK;
}

/* Score rows by list: reduced ones where there is a group or a shared choice, else the raw ones. */
static const float *list_score(const kvf_step *step, uint32_t list)
{
    const kvf_cache *cache = step->cache;
    const kvf_paging *p = &cache->dims.paging;
    const float *scores =
        cache->policy->per_query_head ? cache->tables.scores : cache->tables.reduced;
    const uint32_t chosen = list / (p->lists / cache->dims.choose_lists);
    return scores + (size_t)chosen * step->stride;
}

void kvf_step_lists(kvf_step *step)
{
    const kvf_cache *cache = step->cache;
    const kvf_paging *p = &cache->dims.paging;
    const uint32_t lists = step->rows * p->lists, chosen = step->rows * cache->dims.choose_lists;
    const void **digests;
    const uint64_t **bits;
    uint32_t *pages, *choose_pages;
    const float **scores;
    int32_t **slot_of_page, **page_of_slot;
    KVF_TAKE(step, digests, step->digests, lists);
    KVF_TAKE(step, bits, step->bits, kvf_has_codes(cache) ? lists : 0);
    KVF_TAKE(step, pages, step->pages, lists);
    KVF_TAKE(step, choose_pages, step->choose_pages, chosen);
    KVF_TAKE(step, scores, step->list_scores, cache->policy->scores_pages ? lists : 0);
    KVF_TAKE(step, slot_of_page, step->slot_of_page, lists);
    KVF_TAKE(step, page_of_slot, step->page_of_slot, lists);
    if (!digests)
        return;
    for (uint32_t l = 0; l < lists; l++) {
        const uint32_t b = l / p->lists, list = l % p->lists;
        const kvf_row *row = &step->row_host[b];
        const uint32_t number =
            (uint32_t)kvf_row_number(cache, step->sequences[b], step->layer) * p->lists + list;
        digests[l] = kvf_row_digest(p, row, 0, kvf_list_head(p, list));
        if (bits)
            bits[l] = kvf_row_bits(p, row, kvf_list_head(p, list));
        pages[l] = kvf_row_sealed_pages(p, row);
        if (scores)
            scores[l] = list_score(step, l);
        slot_of_page[l] = kvf_residency_slot_of_page(&cache->residency, number);
        page_of_slot[l] = kvf_residency_page_of_slot(&cache->residency, number);
    }
    for (uint32_t i = 0; i < chosen; i++)
        choose_pages[i] = kvf_row_sealed_pages(p, &step->row_host[i / cache->dims.choose_lists]);
}
