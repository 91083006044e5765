/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Digest scores, and the ways to choose.
 *
 * Knows nothing of residency or attention. Ids of every list ascend; no list has more than
 * dims.ids_max.
 */

#include "select.h"

/* Coarse heads: which segments are scored by codes, and bits that skip all others. */
static kvf_status filter(kvf_call *call)
{
    const kvf_kv_group *kv_group = call->kv_group;
    const kvf_tables *t = &kv_group->tables;
    const kvf_paging *p = &kv_group->dims.paging;
    const kvf_score_centroids_args score_centroids = {.head_dim = p->shape.head_dim,
                                                      .lists = call->rows * p->lists,
                                                      .group = p->group,
                                                      .stride = p->segments_max,
                                                      .q = t->by_codes.rotated,
                                                      .q_scale = t->by_codes.scale,
                                                      .centroids = call->coarse.centroids,
                                                      .scale = call->coarse.scales,
                                                      .physical = call->by_block.physical,
                                                      .physical_stride = p->blocks_max,
                                                      .physical_centroids =
                                                          call->by_block.centroids,
                                                      .count = call->coarse.count,
                                                      .scores = t->coarse.scores};
    const kvf_reduce_args reduce = {.kind = kv_group->config.group_reduce,
                                    .outputs = score_centroids.lists,
                                    .heads = p->group,
                                    .pages_max = score_centroids.stride,
                                    .scale = 1.0f,
                                    .cap = kvf_call_attention(call)->cap,
                                    .scores = t->coarse.scores,
                                    .pages = call->coarse.count,
                                    .out = t->coarse.ranked};
    const kvf_topk_args top = {.lists = score_centroids.lists,
                               .stride = score_centroids.stride,
                               .ids_max = score_centroids.stride,
                               .work_stride = p->pages_max,
                               .scores = t->coarse.ranked,
                               .count = call->coarse.count,
                               .k = call->coarse.take,
                               .ids = t->coarse.ids,
                               .id_count = t->coarse.count,
                               .work = t->topk_work,
                               .arrived = t->arrived};
    const kvf_filter_args filter = {.lists = score_centroids.lists,
                                    .block_size = p->block_size,
                                    .blocks_max = p->blocks_max,
                                    .ids_max = top.ids_max,
                                    .from = call->coarse.unfiltered,
                                    .blocks = call->coarse.blocks,
                                    .ids = top.ids,
                                    .id_count = top.id_count,
                                    .bits = t->coarse.bits};
    if (!p->segments_max || !kvf_has_coarse_heads(call->cache, call->layer))
        return KVF_OK;
    KVF_TRY(KVF_LAUNCH(call, score_centroids, score_centroids));
    KVF_TRY(KVF_LAUNCH(call, reduce, reduce));
    KVF_TRY(KVF_LAUNCH(call, topk, top));
    return KVF_LAUNCH(call, filter, filter);
}

static kvf_reduce_mass_args masses_of(const kvf_call *call)
{
    const kvf_kv_group *kv_group = call->kv_group;
    const kvf_tables *t = &kv_group->tables;
    const kvf_paging *p = &kv_group->dims.paging;
    return (kvf_reduce_mass_args){.kind = kv_group->config.group_reduce,
                                  .page_size = p->shape.page_size,
                                  .block_size = p->block_size,
                                  .lists = call->rows * p->lists,
                                  .group = p->group,
                                  .pages_max = call->stride,
                                  .tiles_max = kvf_tiles(call->stride, p->shape.page_size),
                                  .mass = t->by_codes.mass,
                                  .tile_max = t->by_codes.tile_max,
                                  .tile_sum = t->by_codes.tile_sum,
                                  .bits = call->bits,
                                  .pages = call->pages,
                                  .out = t->reduced};
}

/* The caller says what pages score, or which ones it wants. */
static bool has_caller_selection(const kvf_call *call)
{
    return call->caller_selection.scores || call->caller_selection.ids;
}

bool kvf_select_rotates(const kvf_call *call)
{
    return call->kv_group->policy->scores_pages && kvf_has_codes(call->kv_group) &&
           !has_caller_selection(call);
}

kvf_reduce_mass_args kvf_select_masses(const kvf_call *call)
{
    return kvf_topk_is_fused(call) && kvf_select_rotates(call) ? masses_of(call)
                                                               : (kvf_reduce_mass_args){0};
}

/* Two bits per channel of every token against rotated queries: masses of pages, then scores. */
static kvf_status score_by_codes(kvf_call *call)
{
    const kvf_kv_group *kv_group = call->kv_group;
    const kvf_tables *t = &kv_group->tables;
    const kvf_paging *p = &kv_group->dims.paging;
    const kvf_reduce_mass_args reduce = masses_of(call);
    const kvf_rotate_args rotate = {.dtype = p->shape.dtype,
                                    .head_dim = p->shape.head_dim,
                                    .queries = call->rows * kv_group->config.query_heads,
                                    .scale = kvf_call_attention(call)->scale,
                                    .q = call->q,
                                    .y = t->by_codes.rotated,
                                    .y_scale = t->by_codes.scale};
    const kvf_score_codes_args score_codes = {.head_dim = p->shape.head_dim,
                                              .page_size = reduce.page_size,
                                              .block_size = p->block_size,
                                              .lists = reduce.lists,
                                              .group = p->group,
                                              .pages_max = call->stride,
                                              .tiles_max = reduce.tiles_max,
                                              .cap = kvf_call_attention(call)->cap,
                                              .q = t->by_codes.rotated,
                                              .q_scale = t->by_codes.scale,
                                              .codes = call->digests,
                                              .block_of = call->block_of,
                                              .physical = call->by_block.physical,
                                              .physical_stride = p->blocks_max,
                                              .physical_codes = call->by_block.codes,
                                              .row_lists = p->lists,
                                              .order =
                                                  call->shared.tiles ? call->shared.order : NULL,
                                              .common = call->shared.common,
                                              .bits = call->bits,
                                              .pages = call->pages,
                                              .mass = t->by_codes.mass,
                                              .tile_max = t->by_codes.tile_max,
                                              .tile_sum = t->by_codes.tile_sum};
    /* Policies with other lists than KV heads have boxes of their own. */
    KVF_ASSERT(p->lists == p->kv_heads && kv_group->dims.choose_lists == p->lists);
    if (!call->is_rotated)
        KVF_TRY(KVF_LAUNCH(call, rotate, rotate));
    KVF_TRY(filter(call));
    KVF_TRY(KVF_LAUNCH(call, score_codes, score_codes));
    return kvf_topk_is_fused(call) ? KVF_OK : KVF_LAUNCH(call, reduce_mass, reduce);
}

/* The caller's scores, or its pages as scores. */
static kvf_status take_caller_selection(kvf_call *call)
{
    const kvf_kv_group *kv_group = call->kv_group;
    const kvf_caller_scores_args args = {.paging = kv_group->dims.paging,
                                         .rows = call->rows,
                                         .stride = call->stride,
                                         .caller_stride = call->caller_selection.stride,
                                         .caller_heads = call->cache->config.kv_heads,
                                         .heads = call->heads,
                                         .row = call->row,
                                         .scores = call->caller_selection.scores,
                                         .ids = call->caller_selection.ids,
                                         .out = kv_group->tables.reduced};
    KVF_ASSERT(kvf_takes_caller_selection(kv_group->policy));
    return KVF_LAUNCH(call, caller_scores, args);
}

kvf_status kvf_select_score(kvf_call *call)
{
    const kvf_kv_group *kv_group = call->kv_group;
    const kvf_paging *p = &kv_group->dims.paging;
    const kvf_select_policy *policy = kv_group->policy;
    if (has_caller_selection(call))
        return take_caller_selection(call);
    if (kvf_has_codes(kv_group))
        return score_by_codes(call);
    const kvf_score_args score = {.shape = p->shape,
                                  .subs = p->subs,
                                  .lists = call->rows * p->lists,
                                  .group = policy->per_query_head ? 1 : p->group,
                                  .pages_max = call->stride,
                                  .block_size = p->block_size,
                                  .q = call->q,
                                  .digests = call->digests,
                                  .block_of = call->block_of,
                                  .bits = call->bits,
                                  .pages = call->pages,
                                  .scores = kv_group->tables.scores};
    KVF_TRY(KVF_LAUNCH(call, score, score));
    if (policy->per_query_head)
        return KVF_OK;
    const uint32_t outputs = call->rows * kv_group->dims.choose_lists;
    const kvf_reduce_args reduce = {.kind = kv_group->config.group_reduce,
                                    .outputs = outputs,
                                    .heads =
                                        kv_group->config.query_heads / kv_group->dims.choose_lists,
                                    .pages_max = call->stride,
                                    .scale = kvf_call_attention(call)->scale,
                                    .cap = kvf_call_attention(call)->cap,
                                    .scores = score.scores,
                                    .pages = call->choose_pages,
                                    .out = kv_group->tables.reduced};
    return KVF_LAUNCH(call, reduce, reduce);
}

bool kvf_topk_is_fused(const kvf_call *call)
{
    const kvf_kv_group *kv_group = call->kv_group;
    return call->is_fused && kv_group->policy->choose == KVF_CHOOSE_TOP &&
           kv_group->dims.choose_lists == kv_group->dims.paging.lists &&
           !kv_group->dims.paging.extra_pages;
}

/* As many pages as give the tokens of full ones, where fill = tokens. */
static kvf_status trim(kvf_call *call)
{
    const kvf_kv_group *kv_group = call->kv_group;
    const kvf_trim_args args = {.paging = kv_group->dims.paging,
                                .rows = call->rows,
                                .stride = call->stride,
                                .ids_max = kv_group->tables.now.ids_max,
                                .row = call->row,
                                .scores = kv_group->tables.reduced,
                                .ids = kv_group->tables.now.ids,
                                .id_count = kv_group->tables.now.id_count};
    return args.paging.extra_pages ? KVF_LAUNCH(call, trim, args) : KVF_OK;
}

/* The best of each list by score, ascending. */
static kvf_status choose_top(kvf_call *call)
{
    const kvf_kv_group *kv_group = call->kv_group;
    const kvf_tables *t = &kv_group->tables;
    const kvf_choice *c = &t->now;
    const kvf_paging *p = &kv_group->dims.paging;
    const bool is_shared = kv_group->dims.choose_lists < p->lists;
    const kvf_topk_args top = {.lists = call->rows * kv_group->dims.choose_lists,
                               .stride = call->stride,
                               .ids_max = c->ids_max,
                               .work_stride = p->pages_max,
                               .scores = kv_group->policy->per_query_head ? t->scores : t->reduced,
                               .count = call->choose_pages,
                               .k = t->choose,
                               .ids = is_shared ? c->list_ids : c->ids,
                               .id_count = is_shared ? c->list_count : c->id_count,
                               .work = t->topk_work,
                               .arrived = t->arrived};
    if (kvf_topk_is_fused(call))
        return KVF_OK;
    KVF_TRY(KVF_LAUNCH(call, topk, top));
    if (!is_shared)
        return trim(call);
    const kvf_spread_args spread = {.rows = call->rows,
                                    .lists = p->lists,
                                    .ids_max = c->ids_max,
                                    .from = top.ids,
                                    .from_count = top.id_count,
                                    .ids = c->ids,
                                    .id_count = c->id_count};
    return KVF_LAUNCH(call, spread, spread);
}

static kvf_status choose_newest(kvf_call *call)
{
    const kvf_kv_group *kv_group = call->kv_group;
    const kvf_newest_args args = {.paging = kv_group->dims.paging,
                                  .rows = call->rows,
                                  .ids_max = kv_group->dims.ids_max,
                                  .row = call->row,
                                  .choose = kv_group->tables.choose,
                                  .ids = kv_group->tables.now.ids,
                                  .id_count = kv_group->tables.now.id_count};
    return KVF_LAUNCH(call, newest, args);
}

kvf_status kvf_select_choose(kvf_call *call)
{
    static kvf_status (*const ways[])(kvf_call * call) = {
        [KVF_CHOOSE_TOP] = choose_top,
        [KVF_CHOOSE_NEWEST] = choose_newest,
        [KVF_CHOOSE_TOKENS] = kvf_choose_tokens,
        [KVF_CHOOSE_FUNCTION] = kvf_choose_by_function,
    };
    return ways[call->kv_group->policy->choose](call);
}
