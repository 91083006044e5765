/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The static set: which tokens of a row are kept on the device one by one, and when they change.
 *
 * Knows nothing of pages beyond static bits and digests. A refresh looks at the attention of the
 * last queries, takes the best tokens per KV head into the store that is not in force, and sets the
 * bits of their pages. Boxes, which are those of whole pages, and host pages stay as they are. The
 * first refresh after a prefill is exact: it looks at all tokens.
 */

#include "static_set.h"

#include "call.h"
#include "select.h"

bool kvf_refresh_is_due(const kvf_kv_group *kv_group, const kvf_layer *layer, uint32_t sealed)
{
    return kv_group->dims.static_tokens && sealed &&
           (layer->refresh.needs_exact ||
            layer->refresh.since >= kv_group->config.refresh_interval);
}

void kvf_call_rows_after(kvf_call *call)
{
    const kvf_kv_group *kv_group = call->kv_group;
    KVF_TAKE(call, call->row_after_host, call->row_after, call->rows);
    for (uint32_t b = 0; call->states && b < call->rows; b++) {
        kvf_layer *state = call->states[b];
        kvf_refresh_flip(&state->refresh, state->extent.length);
        const kvf_row other = kvf_call_row(kv_group, state);
        call->row_after_host[b] = call->row_host[b];
        call->row_after_host[b].static_kv = other.static_kv;
        call->row_after_host[b].static_ids = other.static_ids;
        call->row_after_host[b].static_count = other.static_count;
    }
}

/* Tokens that single query `slot` of the kept ones ranks highest. */
static kvf_status top_of_query(kvf_call *call, const kvf_observation *all, uint32_t slot,
                               int32_t *ids, uint32_t *count)
{
    const kvf_kv_group *kv_group = call->kv_group;
    const size_t bytes = kvf_queries_bytes(&kv_group->dims.paging);
    kvf_observation one = *all;
    one.q = (const char *)all->q + slot * bytes;
    one.limit = kv_group->tables.cover.limit + slot;
    one.window = 1;
    one.ring_slots = 0;
    KVF_TRY(kvf_call_observe(call, &one));
    return kvf_call_top_tokens(call, all->resident, ids, count);
}

/* static_ratio = auto: the overlap of what the first and the last query of the window rank highest.
 */
static kvf_status choose_share(kvf_call *call, const kvf_observation *all, kvf_layer *layer)
{
    const kvf_kv_group *kv_group = call->kv_group;
    const kvf_tables *t = &kv_group->tables;
    const kvf_row *row = &call->row_host[all->index];
    const uint32_t newest = row->query_slot, slots = kv_group->dims.paging.query_window;
    const kvf_overlap_args args = {.paging = kv_group->dims.paging,
                                   .row = call->row + all->index,
                                   .rest = kv_group->dims.rest_tokens,
                                   .ids_max = kv_group->dims.tokens_max,
                                   .a = t->tokens.ids,
                                   .a_count = t->tokens.count,
                                   .b = t->tokens.ids_b,
                                   .b_count = t->tokens.count_b,
                                   .choose =
                                       t->choose + (size_t)all->index * kv_group->dims.choose_lists,
                                   .choose_lists = kv_group->dims.choose_lists,
                                   .counters = kvf_counters_device(kv_group, call->index)};
    kvf_observation whole = *all;
    whole.take_tokens = kv_group->dims.rest_tokens;
    KVF_TRY(kvf_call_cover(call, &whole));
    if (all->window) {
        KVF_TRY(top_of_query(call, all, (newest + 1 + slots - all->window) % slots, t->tokens.ids,
                             t->tokens.count));
        KVF_TRY(top_of_query(call, all, newest, t->tokens.ids_b, t->tokens.count_b));
    } else { /* no query was kept, which says nothing about them */
        const size_t bytes = kv_group->config.kv_heads * sizeof(uint32_t);
        KVF_TRY(kv_group->device->ops->fill(call->stream, t->tokens.count, 0, bytes));
        KVF_TRY(kv_group->device->ops->fill(call->stream, t->tokens.count_b, 0, bytes));
    }
    if (all->window && row->sealed * kv_group->dims.paging.block_size >
                           kv_group->dims.rest_tokens + kv_group->config.sink_tokens)
        kvf_refresh_chose_share(&layer->refresh, row->length);
    return KVF_LAUNCH(call, overlap, args);
}

static kvf_status pack(kvf_call *call, const kvf_observation *all)
{
    const kvf_kv_group *kv_group = call->kv_group;
    const kvf_tables *t = &kv_group->tables;
    const kvf_paging *p = &kv_group->dims.paging;
    const kvf_row *after = &call->row_after_host[all->index];
    const kvf_pack_args args = {.paging = *p,
                                .resident = all->resident,
                                .spans_max = kv_group->dims.cover_max,
                                .ids_max = kv_group->dims.tokens_max,
                                .row = kvf_dequantized_last(call, all->index),
                                .spans = t->cover.spans,
                                .span_index = t->cover.span_index,
                                .ids = t->tokens.ids,
                                .id_count = t->tokens.count,
                                .static_kv = after->static_kv,
                                .static_ids = after->static_ids,
                                .static_count = after->static_count,
                                .counters = kvf_counters_device(kv_group, call->index)};
    return KVF_LAUNCH(call, pack, args);
}

/* The newest queries of a row, as many as the local window has. */
static kvf_observation newest_queries(const kvf_call *call, uint32_t index, bool resident)
{
    const kvf_kv_group *kv_group = call->kv_group;
    const kvf_row *row = &call->row_host[index];
    const uint32_t slots = kv_group->dims.paging.query_window;
    kvf_observation o = {.index = index,
                         .resident = resident,
                         .q = row->queries,
                         .limit = kv_group->tables.cover.limit,
                         .window = kvf_min_u32(row->query_count, kv_group->config.local_tokens)};
    const uint32_t first = (row->query_slot + 1 + slots - o.window) % slots;
    if (o.window && o.window < slots &&
        first) { /* more are kept, for pruning, or a cut lost some */
        o.limit = NULL;
        o.limit_first = row->length - o.window;
        o.ring_slots = slots;
        o.ring_first = first;
    }
    return o;
}

/* The best candidates of token_score, into the store that was not in force. */
static kvf_status take_best(kvf_call *call, const kvf_observation *all)
{
    const kvf_kv_group *kv_group = call->kv_group;
    KVF_TRY(kvf_call_top_tokens(call, all->resident, kv_group->tables.tokens.ids,
                                kv_group->tables.tokens.count));
    return pack(call, all);
}

kvf_status kvf_static_seed(kvf_call *call, uint32_t index, const float *scores,
                           kvf_status (*put)(kvf_call *call, const float *scores))
{
    kvf_kv_group *kv_group = call->kv_group;
    kvf_layer *layer = call->states[index];
    const kvf_observation all = newest_queries(call, index, false);
    call->cache->counters[call->layer].refreshes++;
    if (kv_group->config.static_ratio == KVF_STATIC_RATIO_AUTO && !layer->refresh.share_from)
        KVF_TRY(choose_share(call, &all, layer));
    KVF_TRY(kvf_call_cover(call, &all));
    KVF_TRY(put(call, scores));
    return take_best(call, &all);
}

kvf_status kvf_static_refresh(kvf_call *call, uint32_t index)
{
    kvf_kv_group *kv_group = call->kv_group;
    kvf_layer *layer = call->states[index];
    const bool chooses_share =
        kv_group->config.static_ratio == KVF_STATIC_RATIO_AUTO && !layer->refresh.share_from;
    const bool is_exact = layer->refresh.needs_exact || chooses_share ||
                          kv_group->config.refresh == KVF_REFRESH_EXACT;
    const kvf_observation all = newest_queries(call, index, !is_exact);
    call->cache->counters[call->layer].refreshes++;
    kvf_refresh_was_exact(&layer->refresh);
    if (chooses_share)
        KVF_TRY(choose_share(call, &all, layer));
    KVF_TRY(kvf_call_cover(call, &all));
    KVF_TRY(kvf_call_observe(call, &all));
    return take_best(call, &all);
}
