/* SPDX-License-Identifier: Apache-2.0 */

/*
 * From chosen pages to attention: slots, spans, passes, merge; and the check against dense
 * attention.
 *
 * Knows nothing of how pages were chosen. Hits are attended while misses are on their way, and what
 * is addressable is attended before what is late, but for pages that share a split; because splits
 * are fixed and merged in order, that changes no bit.
 */

#include "attend.h"

#include "fetch.h"
#include "select.h"

static kvf_assemble_args assemble_args(const kvf_call *call, kvf_arrival arrival)
{
    const kvf_kv_group *kv_group = call->kv_group;
    return (kvf_assemble_args){.choices = kvf_call_choices(call, &kv_group->tables.now),
                               .spans_max = kv_group->dims.spans_max,
                               .arrival = arrival,
                               .masks = call->masks,
                               .spans = kv_group->tables.spans,
                               .span_count = kv_group->tables.span_count};
}

/* All of it in one launch. */
static kvf_status select_at_once(kvf_call *call)
{
    const kvf_kv_group *kv_group = call->kv_group;
    const kvf_tables *t = &kv_group->tables;
    /* Each of several sub-groups would bring what the group misses. */
    const bool is_large = kv_group->dims.paging.group > KVF_SUBGROUP_HEADS;
    const bool comes_first = call->shared.any || is_large;
    const kvf_select_args select = {
        .assemble = assemble_args(call, comes_first ? KVF_ARRIVES_FIRST : KVF_ARRIVES_BY_ATTEND),
        .stride = call->stride,
        .work_stride = kv_group->dims.paging.pages_max,
        .scores = kv_group->policy->per_query_head ? t->scores : t->reduced,
        .masses = kvf_select_masses(call),
        .count = call->choose_pages,
        .k = kvf_topk_is_fused(call) ? t->choose : NULL,
        .work = t->topk_work,
        .arrived = t->arrived};
    KVF_TRY(KVF_LAUNCH(call, select, select));
    return comes_first ? KVF_LAUNCH(call, collect, select.assemble.choices) : KVF_OK;
}

kvf_status kvf_call_place(kvf_call *call)
{
    if (call->is_fused)
        return select_at_once(call);
    const kvf_assemble_args assemble = assemble_args(call, KVF_ARRIVES_BY_FETCH);
    KVF_TRY(KVF_LAUNCH(call, resolve, assemble.choices));
    KVF_TRY(kvf_fetch_begin(call));
    KVF_TRY(KVF_LAUNCH(call, assemble, assemble));
    return kvf_fetch_mark(call);
}

static kvf_attend_args attend_args(const kvf_call *call, const kvf_attention *a, kvf_pass pass)
{
    return (kvf_attend_args){
        .shape = a->shape,
        .pass = pass,
        .lists = a->lists,
        .group = a->group,
        .spans_max = a->spans_max,
        .split = kvf_split(a->spans_max, a->shape.page_size),
        .scale = kvf_call_attention(call)->scale,
        .cap = kvf_call_attention(call)->cap,
        .q = a->q,
        .spans = a->spans,
        .span_count = a->span_count,
        .partial_o = a->partial_o ? a->partial_o : call->kv_group->tables.partial_o,
        .partial_lse = a->partial_lse ? a->partial_lse : call->kv_group->tables.partial_lse};
}

static kvf_status attend_pass(const kvf_call *call, const kvf_attention *a, kvf_pass pass)
{
    const kvf_attend_args args = attend_args(call, a, pass);
    return KVF_LAUNCH(call, attend, args);
}

/* The launch that attends brings misses. */
static kvf_status attend_at_once(kvf_call *call, const kvf_attention *a)
{
    const kvf_attend_step_args args = {.attend = attend_args(call, a, KVF_PASS_ALL),
                                       .out = a->out,
                                       .lse = a->lse,
                                       .arrived = call->kv_group->tables.arrived,
                                       .sinks = kvf_call_attention(call)->sinks,
                                       .heads = call->kv_group->config.query_heads,
                                       .out_dtype = kvf_query_dtype(&call->cache->config)};
    return KVF_LAUNCH(call, attend_step, args);
}

static kvf_status merge(const kvf_call *call, const kvf_attention *a)
{
    const kvf_attend_args of = attend_args(call, a, KVF_PASS_ALL);
    const kvf_merge_args args = {.shape = kvf_out_shape(call->cache, &a->shape),
                                 .lists = a->lists,
                                 .group = a->group,
                                 .splits_max = kvf_div_ceil_u32(a->spans_max, of.split),
                                 .split = of.split,
                                 .span_count = a->span_count,
                                 .partial_o = of.partial_o,
                                 .partial_lse = of.partial_lse,
                                 .out = a->out,
                                 .lse = a->lse,
                                 .sinks = a->sinks ? a->sinks : kvf_call_attention(call)->sinks,
                                 .heads = a->heads ? a->heads : call->kv_group->config.query_heads};
    return KVF_LAUNCH(call, merge, args);
}

kvf_status kvf_call_attend_to(const kvf_call *call, const kvf_attention *a)
{
    KVF_TRY(attend_pass(call, a, KVF_PASS_ALL));
    return merge(call, a);
}

kvf_status kvf_call_attend(kvf_call *call, void *out, float *lse)
{
    const kvf_kv_group *kv_group = call->kv_group;
    const kvf_paging *p = &kv_group->dims.paging;
    const kvf_attention a = {.shape = p->shape,
                             .lists = call->rows * p->lists,
                             .group = p->kv_heads * p->group / p->lists,
                             .spans_max = kv_group->dims.spans_max,
                             .q = call->q,
                             .spans = kv_group->tables.spans,
                             .span_count = kv_group->tables.span_count,
                             .out = out,
                             .lse = lse};
    if (call->is_fused)
        return attend_at_once(call, &a);
    if (!kvf_fetch_is_pending(call))
        return kvf_call_attend_to(call, &a);
    KVF_TRY(attend_pass(call, &a, KVF_PASS_RESIDENT));
    KVF_TRY(kvf_fetch_end(call));
    KVF_TRY(attend_pass(call, &a, KVF_PASS_FETCHED));
    return merge(call, &a);
}

bool kvf_verify_is_due(const kvf_kv_group *kv_group, const kvf_layer *layer)
{
    return kv_group->config.verify_interval && layer->steps % kv_group->config.verify_interval == 0;
}

kvf_status kvf_call_verify(kvf_call *call, uint32_t index, const void *out, const float *lse)
{
    const kvf_kv_group *kv_group = call->kv_group;
    const kvf_tables *t = &kv_group->tables;
    const kvf_paging *p = &kv_group->dims.paging;
    const uint32_t heads = kv_group->config.query_heads;
    const size_t first = (size_t)index * heads;
    const kvf_shape shape = kvf_out_shape(call->cache, &p->shape);
    const kvf_attention a = {.shape = kvf_run_shape(p),
                             .lists = p->kv_heads,
                             .group = p->group,
                             .spans_max = kv_group->dims.cover_max,
                             .q = (const char *)call->q + first * kvf_key_bytes(&p->shape),
                             .spans = t->cover.spans,
                             .span_count = t->cover.span_count,
                             .out = t->verify_out,
                             .lse = t->verify_lse};
    const kvf_compare_args compare = {.shape = shape,
                                      .heads = heads,
                                      .out = (const char *)out + first * kvf_value_bytes(&shape),
                                      .dense = a.out,
                                      .lse = lse + first,
                                      .dense_lse = a.lse,
                                      .counters = kvf_counters_device(kv_group, call->index)};
    KVF_TRY(kvf_call_cover(call, &(kvf_observation){.index = index}));
    KVF_TRY(kvf_call_attend_to(call, &a));
    return KVF_LAUNCH(call, compare, compare);
}
