/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Part of select.h. True top tokens of each step by full attention of the current query, mean over
 * the group; for evaluation. It reads all keys, so it is as slow as dense attention, and it is the
 * best that a choice of tokens per KV head can do by attention mass.
 */

#include "select.h"

static kvf_status choose_row(kvf_call *call, uint32_t index)
{
    const kvf_kv_group *kv_group = call->kv_group;
    const kvf_tables *t = &kv_group->tables;
    const kvf_paging *p = &kv_group->dims.paging;
    const kvf_row *row = &call->row_host[index];
    const kvf_layer state = kvf_call_state(call, index);
    const uint32_t take =
        row->attend_all ? kv_group->dims.tokens_max : kvf_rest_tokens(kv_group, &state);
    const kvf_observation now = {.index = index,
                                 .take_tokens = take,
                                 .q = (const char *)call->q + index * kvf_queries_bytes(p),
                                 .limit = t->cover.limit + row->query_slot,
                                 .window = 1};
    const size_t first = (size_t)index * p->lists;
    const kvf_mask_args mask = {.paging = *p,
                                .ids_max = kv_group->dims.ids_max,
                                .tokens_max = kv_group->dims.tokens_max,
                                .tokens = t->tokens.ids,
                                .token_count = t->tokens.count,
                                .ids = t->now.ids + first * kv_group->dims.ids_max,
                                .id_count = t->now.id_count + first,
                                .masks = t->masks + first * kv_group->dims.ids_max};
    KVF_TRY(kvf_call_cover(call, &now));
    KVF_TRY(kvf_call_observe(call, &now));
    KVF_TRY(kvf_call_top_tokens(call, 0, t->tokens.ids, t->tokens.count));
    return KVF_LAUNCH(call, mask, mask);
}

kvf_status kvf_choose_tokens(kvf_call *call)
{
    for (uint32_t b = 0; b < call->rows; b++)
        KVF_TRY(choose_row(call, b));
    call->masks = call->kv_group->tables.masks;
    return KVF_OK;
}
