/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A decode step on the pages of a KV group: append, seal, refresh, score, choose, resolve, attend.
 *
 * Knows the order of the phases and nothing of their insides. Everything is enqueued; what depends
 * on data stays on the device.
 */

#include "pages.h"

#include "attend.h"
#include "prefill_arena.h"
#include "seal.h"
#include "select.h"
#include "static_set.h"

void kvf_pages_take(kvf_call *call)
{
    if (!call->kv_group)
        return;
    kvf_call_rows(call);
    kvf_call_lists(call);
}

static bool is_one_turn(const kvf_call *call)
{
    return kvf_call_turn(call, 0) == call->rows;
}

/* Blocks to seal were complete before the call, so sealing may come first; it does where tokens
 * after the first one of a sequence may need the room in the ring. */
static kvf_status append(kvf_call *call, const kvf_decode_args *args)
{
    const kvf_kv_group *kv_group = call->kv_group;
    const kvf_cache_config *c = &call->cache->config;
    const kvf_decode_args *in = call->caller ? call->caller : args;
    kvf_append_args a = {.paging = kv_group->dims.paging,
                         .rows = call->rows,
                         .wide_queries = call->caller && kvf_has_wide_queries(c),
                         .wide_keys = call->caller && kvf_has_wide_keys(c),
                         .row = call->row,
                         .q = in->q,
                         .k = in->k,
                         .v = in->v,
                         .rounded = (void *)(uintptr_t)args->q,
                         .scale = kvf_call_attention(call)->scale,
                         .choose_lists = kv_group->dims.choose_lists,
                         .choose = kv_group->tables.choose};
    call->is_rotated = call->is_fused && kvf_select_rotates(call);
    if (call->is_rotated) {
        a.rotated = kv_group->tables.by_codes.rotated;
        a.rotated_scale = kv_group->tables.by_codes.scale;
    }
    if (is_one_turn(call)) {
        KVF_TRY(KVF_LAUNCH(call, append, a));
        return kvf_call_seal(call);
    }
    KVF_TRY(kvf_call_seal(call));
    KVF_TRY(kvf_call_publish(call));
    call->sealed_blocks = 0;
    return KVF_LAUNCH(call, append, a);
}

static kvf_status refresh(kvf_call *call, uint64_t *clock)
{
    for (uint32_t b = 0; b < call->rows; b++)
        if (call->states[b]->refresh.is_due)
            KVF_TRY(kvf_static_refresh(call, b));
    call->row = call->row_after;
    call->row_host = call->row_after_host;
    return kvf_call_stamp(call, clock);
}

kvf_status kvf_pages_select(kvf_call *call, const kvf_decode_args *args, const kvf_due *due)
{
    kvf_layer_counters *counters = kvf_counters_device(call->kv_group, call->index);
    call->q = args->q;
    call->caller_selection =
        (kvf_caller_selection){args->page_scores, args->page_ids, args->page_stride};
    KVF_TRY(kvf_call_stamp(call, NULL));
    KVF_TRY(append(call, args));
    KVF_TRY(kvf_call_stamp(call, &counters->append_ns));
    if (due->refreshes)
        KVF_TRY(refresh(call, &counters->refresh_ns));
    /* After a refresh, which may look at every page. */
    if (!call->is_recorded)
        KVF_TRY(kvf_arena_leave_rows(call));
    if (call->kv_group->policy->scores_pages) {
        KVF_TRY(kvf_select_score(call));
        KVF_TRY(kvf_call_stamp(call, &counters->score_ns));
    }
    KVF_TRY(kvf_select_choose(call));
    return kvf_call_publish(call);
}

static kvf_status place_and_attend(kvf_call *call, void *out, float *lse)
{
    kvf_layer_counters *counters = kvf_counters_device(call->kv_group, call->index);
    KVF_TRY(kvf_call_place(call));
    KVF_TRY(kvf_call_stamp(call, &counters->select_ns));
    KVF_TRY(kvf_call_attend(call, out, lse));
    return kvf_call_stamp(call, &counters->attend_ns);
}

kvf_status kvf_pages_decode(kvf_call *call, const kvf_decode_args *args, const kvf_due *due)
{
    const kvf_kv_group *kv_group = call->kv_group;
    float *lse = args->lse ? args->lse : kv_group->tables.lse;
    KVF_TRY(kvf_pages_select(call, args, due));
    KVF_TRY(place_and_attend(call, args->out, lse));
    for (uint32_t b = 0; due->verifies && b < call->rows; b++)
        if (call->states[b]->is_verified)
            KVF_TRY(kvf_call_verify(call, b, args->out, lse));
    return KVF_OK;
}
