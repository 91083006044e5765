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

void kvf_pages_take(kvf_step *step)
{
    if (!step->kv_group)
        return;
    kvf_step_rows(step);
    kvf_step_lists(step);
}

static bool is_one_turn(const kvf_step *step)
{
    return kvf_step_turn(step, 0) == step->rows;
}

/* Blocks to seal were complete before the call, so sealing may come first; it does where tokens
 * after the first one of a sequence may need the room in the ring. */
static kvf_status append(kvf_step *step, const kvf_decode_args *args)
{
    const kvf_kv_group *kv_group = step->kv_group;
    const kvf_cache_config *c = &step->cache->config;
    const kvf_decode_args *in = step->caller ? step->caller : args;
    kvf_append_args a = {.paging = kv_group->dims.paging,
                         .rows = step->rows,
                         .wide_queries = step->caller && kvf_has_wide_queries(c),
                         .wide_keys = step->caller && kvf_has_wide_keys(c),
                         .row = step->row,
                         .q = in->q,
                         .k = in->k,
                         .v = in->v,
                         .rounded = (void *)(uintptr_t)args->q,
                         .scale = kvf_step_attention(step)->scale,
                         .choose_lists = kv_group->dims.choose_lists,
                         .choose = kv_group->tables.choose};
    step->is_rotated = step->is_fused && kvf_select_rotates(step);
    if (step->is_rotated) {
        a.rotated = kv_group->tables.by_codes.rotated;
        a.rotated_scale = kv_group->tables.by_codes.scale;
    }
    if (is_one_turn(step)) {
        KVF_TRY(KVF_LAUNCH(step, append, a));
        return kvf_step_seal(step);
    }
    KVF_TRY(kvf_step_seal(step));
    KVF_TRY(kvf_step_publish(step));
    step->sealed_blocks = 0;
    return KVF_LAUNCH(step, append, a);
}

static kvf_status refresh(kvf_step *step, uint64_t *clock)
{
    for (uint32_t b = 0; b < step->rows; b++)
        if (step->states[b]->refresh.is_due)
            KVF_TRY(kvf_static_refresh(step, b));
    step->row = step->row_after;
    step->row_host = step->row_after_host;
    return kvf_step_stamp(step, clock);
}

kvf_status kvf_pages_select(kvf_step *step, const kvf_decode_args *args, const kvf_due *due)
{
    kvf_layer_counters *counters = kvf_counters_device(step->kv_group, step->index);
    step->q = args->q;
    step->caller_selection =
        (kvf_caller_selection){args->page_scores, args->page_ids, args->page_stride};
    KVF_TRY(kvf_step_stamp(step, NULL));
    KVF_TRY(append(step, args));
    KVF_TRY(kvf_step_stamp(step, &counters->append_ns));
    if (due->refreshes)
        KVF_TRY(refresh(step, &counters->refresh_ns));
    /* After a refresh, which may look at every page. */
    if (!step->is_recorded)
        KVF_TRY(kvf_arena_leave_rows(step));
    if (step->kv_group->policy->scores_pages) {
        KVF_TRY(kvf_select_score(step));
        KVF_TRY(kvf_step_stamp(step, &counters->score_ns));
    }
    KVF_TRY(kvf_select_choose(step));
    return kvf_step_publish(step);
}

static kvf_status place_and_attend(kvf_step *step, void *out, float *lse)
{
    kvf_layer_counters *counters = kvf_counters_device(step->kv_group, step->index);
    KVF_TRY(kvf_step_place(step));
    KVF_TRY(kvf_step_stamp(step, &counters->select_ns));
    KVF_TRY(kvf_step_attend(step, out, lse));
    return kvf_step_stamp(step, &counters->attend_ns);
}

kvf_status kvf_pages_decode(kvf_step *step, const kvf_decode_args *args, const kvf_due *due)
{
    const kvf_kv_group *kv_group = step->kv_group;
    float *lse = args->lse ? args->lse : kv_group->tables.lse;
    KVF_TRY(kvf_pages_select(step, args, due));
    KVF_TRY(place_and_attend(step, args->out, lse));
    for (uint32_t b = 0; due->verifies && b < step->rows; b++)
        if (step->states[b]->is_verified)
            KVF_TRY(kvf_step_verify(step, b, args->out, lse));
    return KVF_OK;
}
