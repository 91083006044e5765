/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Part of select.h. How much queries look at single tokens: every place of a row's tokens listed,
 * attention summed over the queries, the best taken.
 *
 * Knows nothing of what the tokens are for.
 */

#include "select.h"

#include "call.h"

kvf_status kvf_call_cover(kvf_call *call, const kvf_observation *o)
{
    const kvf_kv_group *kv_group = call->kv_group;
    const kvf_tables *t = &kv_group->tables;
    const kvf_row *row;
    KVF_TRY(kvf_dequantized_view(call, o->index, &row));
    const kvf_cover_args args = {.paging = kv_group->dims.paging,
                                 .resident = o->resident,
                                 .spans_max = kv_group->dims.cover_max,
                                 .row = row,
                                 .spans = t->cover.spans,
                                 .span_index = t->cover.span_index,
                                 .span_count = t->cover.span_count,
                                 .first = t->cover.first,
                                 .count = t->cover.count,
                                 .take = t->cover.take,
                                 .limit = t->cover.limit,
                                 .take_tokens = o->take_tokens};
    return KVF_LAUNCH(call, cover, args);
}

kvf_observe_args kvf_call_observe_args(const kvf_call *call, uint32_t resident)
{
    const kvf_kv_group *kv_group = call->kv_group;
    const kvf_tables *t = &kv_group->tables;
    const kvf_paging *p = &kv_group->dims.paging;
    return (kvf_observe_args){.shape = resident ? p->shape : kvf_run_shape(p),
                              .kv_heads = p->kv_heads,
                              .group = p->group,
                              .spans_max = kv_group->dims.cover_max,
                              .scale = kvf_call_attention(call)->scale,
                              .cap = kvf_call_attention(call)->cap,
                              .spans = t->cover.spans,
                              .span_index = t->cover.span_index,
                              .span_count = t->cover.span_count,
                              .query_max = t->tokens.query_max,
                              .query_sum = t->tokens.query_sum,
                              .sinks = kvf_call_attention(call)->sinks,
                              .score = t->tokens.score};
}

kvf_status kvf_call_observe(kvf_call *call, const kvf_observation *o)
{
    kvf_observe_args args = kvf_call_observe_args(call, o->resident);
    args.window = o->window;
    args.window_mean = 1;
    args.group_reduce = KVF_GROUP_MEAN_SOFTMAX;
    args.ring_slots = o->ring_slots;
    args.ring_first = o->ring_first;
    args.limit_first = o->limit_first;
    args.q = o->q;
    args.limit = o->limit;
    const uint32_t most = kvf_observe_window_max(args.group);
    uint32_t first = 0;
    do {
        kvf_observe_args piece =
            kvf_observe_piece(&args, first, kvf_min_u32(most, o->window - first));
        piece.accumulates = first > 0;
        KVF_TRY(KVF_LAUNCH(call, observe_stats, piece));
        KVF_TRY(KVF_LAUNCH(call, observe_score, piece));
        first += most;
    } while (first < o->window);
    return KVF_OK;
}

uint32_t kvf_token_stride(const kvf_kv_group *kv_group, uint32_t resident)
{
    return kv_group->dims.cover_max * kvf_cover_tokens(&kv_group->dims.paging, resident);
}

kvf_status kvf_call_top_tokens(kvf_call *call, uint32_t resident, int32_t *ids, uint32_t *count)
{
    const kvf_kv_group *kv_group = call->kv_group;
    const kvf_tables *t = &kv_group->tables;
    const uint32_t stride = kvf_token_stride(kv_group, resident);
    const kvf_topk_args args = {.lists = kv_group->config.kv_heads,
                                .stride = stride,
                                .ids_max = kv_group->dims.tokens_max,
                                .work_stride = stride,
                                .scores = t->tokens.score,
                                .first = t->cover.first,
                                .count = t->cover.count,
                                .k = t->cover.take,
                                .ids = ids,
                                .id_count = count,
                                .work = t->tokens.work,
                                .arrived = t->arrived};
    return KVF_LAUNCH(call, topk, args);
}
