/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Digest scores, and the ways to choose.
 *
 * Knows nothing of residency or attention. Ids of every list ascend; no list has more than
 * dims.ids_max.
 */

#include "select.h"

/* Coarse heads: which segments are scored by codes, and bits that skip all others. */
static kvf_status filter(kvf_step *step)
{
    const kvf_kv_group *kv_group = step->kv_group;
    const kvf_tables *t = &kv_group->tables;
    const kvf_paging *p = &kv_group->dims.paging;
    const kvf_score_centroids_args score_centroids = {.head_dim = p->shape.head_dim,
                                                      .lists = step->rows * p->lists,
                                                      .group = p->group,
                                                      .stride = p->segments_max,
                                                      .q = t->by_codes.rotated,
                                                      .q_scale = t->by_codes.scale,
                                                      .centroids = step->coarse.centroids,
                                                      .scale = step->coarse.scales,
                                                      .physical = step->by_block.physical,
                                                      .physical_stride = p->blocks_max,
                                                      .physical_centroids =
                                                          step->by_block.centroids,
                                                      .count = step->coarse.count,
                                                      .scores = t->coarse.scores};
    const kvf_reduce_args reduce = {.kind = kv_group->config.group_reduce,
                                    .outputs = score_centroids.lists,
                                    .heads = p->group,
                                    .pages_max = score_centroids.stride,
                                    .scale = 1.0f,
                                    .cap = kvf_step_attention(step)->cap,
                                    .scores = t->coarse.scores,
                                    .pages = step->coarse.count,
                                    .out = t->coarse.ranked};
    const kvf_topk_args top = {.lists = score_centroids.lists,
                               .stride = score_centroids.stride,
                               .ids_max = score_centroids.stride,
                               .work_stride = p->pages_max,
                               .scores = t->coarse.ranked,
                               .count = step->coarse.count,
                               .k = step->coarse.take,
                               .ids = t->coarse.ids,
                               .id_count = t->coarse.count,
                               .work = t->topk_work,
                               .arrived = t->arrived};
    const kvf_filter_args filter = {.lists = score_centroids.lists,
                                    .block_size = p->block_size,
                                    .blocks_max = p->blocks_max,
                                    .ids_max = top.ids_max,
                                    .from = step->coarse.unfiltered,
                                    .blocks = step->coarse.blocks,
                                    .ids = top.ids,
                                    .id_count = top.id_count,
                                    .bits = t->coarse.bits};
    if (!p->segments_max || !kvf_has_coarse_heads(step->cache, step->layer))
        return KVF_OK;
    KVF_TRY(KVF_LAUNCH(step, score_centroids, score_centroids));
    KVF_TRY(KVF_LAUNCH(step, reduce, reduce));
    KVF_TRY(KVF_LAUNCH(step, topk, top));
    return KVF_LAUNCH(step, filter, filter);
}

static kvf_reduce_mass_args masses_of(const kvf_step *step)
{
    const kvf_kv_group *kv_group = step->kv_group;
    const kvf_tables *t = &kv_group->tables;
    const kvf_paging *p = &kv_group->dims.paging;
    return (kvf_reduce_mass_args){.kind = kv_group->config.group_reduce,
                                  .page_size = p->shape.page_size,
                                  .block_size = p->block_size,
                                  .lists = step->rows * p->lists,
                                  .group = p->group,
                                  .pages_max = step->stride,
                                  .tiles_max = kvf_tiles(step->stride, p->shape.page_size),
                                  .mass = t->by_codes.mass,
                                  .tile_max = t->by_codes.tile_max,
                                  .tile_sum = t->by_codes.tile_sum,
                                  .bits = step->bits,
                                  .pages = step->pages,
                                  .out = t->reduced};
}

/* The caller says what pages score, or which ones it wants. */
static bool has_caller_selection(const kvf_step *step)
{
    return step->caller_selection.scores || step->caller_selection.ids;
}

bool kvf_select_rotates(const kvf_step *step)
{
    return step->kv_group->policy->scores_pages && kvf_has_codes(step->kv_group) &&
           !has_caller_selection(step);
}

kvf_reduce_mass_args kvf_select_masses(const kvf_step *step)
{
    return kvf_topk_is_fused(step) && kvf_select_rotates(step) ? masses_of(step)
                                                               : (kvf_reduce_mass_args){0};
}

/* Two bits per channel of every token against rotated queries: masses of pages, then scores. */
static kvf_status score_by_codes(kvf_step *step)
{
    const kvf_kv_group *kv_group = step->kv_group;
    const kvf_tables *t = &kv_group->tables;
    const kvf_paging *p = &kv_group->dims.paging;
    const kvf_reduce_mass_args reduce = masses_of(step);
    const kvf_rotate_args rotate = {.dtype = p->shape.dtype,
                                    .head_dim = p->shape.head_dim,
                                    .queries = step->rows * kv_group->config.query_heads,
                                    .scale = kvf_step_attention(step)->scale,
                                    .q = step->q,
                                    .y = t->by_codes.rotated,
                                    .y_scale = t->by_codes.scale};
    const kvf_score_codes_args score_codes = {.head_dim = p->shape.head_dim,
                                              .page_size = reduce.page_size,
                                              .block_size = p->block_size,
                                              .lists = reduce.lists,
                                              .group = p->group,
                                              .pages_max = step->stride,
                                              .tiles_max = reduce.tiles_max,
                                              .cap = kvf_step_attention(step)->cap,
                                              .q = t->by_codes.rotated,
                                              .q_scale = t->by_codes.scale,
                                              .codes = step->digests,
                                              .block_of = step->block_of,
                                              .physical = step->by_block.physical,
                                              .physical_stride = p->blocks_max,
                                              .physical_codes = step->by_block.codes,
                                              .row_lists = p->lists,
                                              .order =
                                                  step->shared.tiles ? step->shared.order : NULL,
                                              .common = step->shared.common,
                                              .bits = step->bits,
                                              .pages = step->pages,
                                              .mass = t->by_codes.mass,
                                              .tile_max = t->by_codes.tile_max,
                                              .tile_sum = t->by_codes.tile_sum};
    /* Policies with other lists than KV heads have boxes of their own. */
    KVF_ASSERT(p->lists == p->kv_heads && kv_group->dims.choose_lists == p->lists);
    if (!step->is_rotated)
        KVF_TRY(KVF_LAUNCH(step, rotate, rotate));
    KVF_TRY(filter(step));
    KVF_TRY(KVF_LAUNCH(step, score_codes, score_codes));
    return kvf_topk_is_fused(step) ? KVF_OK : KVF_LAUNCH(step, reduce_mass, reduce);
}

/* The caller's scores, or its pages as scores. */
static kvf_status take_caller_selection(kvf_step *step)
{
    const kvf_kv_group *kv_group = step->kv_group;
    const kvf_caller_scores_args args = {.paging = kv_group->dims.paging,
                                         .rows = step->rows,
                                         .stride = step->stride,
                                         .caller_stride = step->caller_selection.stride,
                                         .caller_heads = step->cache->config.kv_heads,
                                         .heads = step->heads,
                                         .row = step->row,
                                         .scores = step->caller_selection.scores,
                                         .ids = step->caller_selection.ids,
                                         .out = kv_group->tables.reduced};
    KVF_ASSERT(kvf_takes_caller_selection(kv_group->policy));
    return KVF_LAUNCH(step, caller_scores, args);
}

kvf_status kvf_select_score(kvf_step *step)
{
    const kvf_kv_group *kv_group = step->kv_group;
    const kvf_paging *p = &kv_group->dims.paging;
    const kvf_select_policy *policy = kv_group->policy;
    if (has_caller_selection(step))
        return take_caller_selection(step);
    if (kvf_has_codes(kv_group))
        return score_by_codes(step);
    const kvf_score_args score = {.shape = p->shape,
                                  .subs = p->subs,
                                  .lists = step->rows * p->lists,
                                  .group = policy->per_query_head ? 1 : p->group,
                                  .pages_max = step->stride,
                                  .block_size = p->block_size,
                                  .q = step->q,
                                  .digests = step->digests,
                                  .block_of = step->block_of,
                                  .bits = step->bits,
                                  .pages = step->pages,
                                  .scores = kv_group->tables.scores};
    KVF_TRY(KVF_LAUNCH(step, score, score));
    if (policy->per_query_head)
        return KVF_OK;
    const uint32_t outputs = step->rows * kv_group->dims.choose_lists;
    const kvf_reduce_args reduce = {.kind = kv_group->config.group_reduce,
                                    .outputs = outputs,
                                    .heads =
                                        kv_group->config.query_heads / kv_group->dims.choose_lists,
                                    .pages_max = step->stride,
                                    .scale = kvf_step_attention(step)->scale,
                                    .cap = kvf_step_attention(step)->cap,
                                    .scores = score.scores,
                                    .pages = step->choose_pages,
                                    .out = kv_group->tables.reduced};
    return KVF_LAUNCH(step, reduce, reduce);
}

bool kvf_topk_is_fused(const kvf_step *step)
{
    const kvf_kv_group *kv_group = step->kv_group;
    return step->is_fused && kv_group->policy->choose == KVF_CHOOSE_TOP &&
           kv_group->dims.choose_lists == kv_group->dims.paging.lists &&
           !kv_group->dims.paging.extra_pages;
}

/* As many pages as give the tokens of full ones, where fill = tokens. */
static kvf_status trim(kvf_step *step)
{
    const kvf_kv_group *kv_group = step->kv_group;
    const kvf_trim_args args = {.paging = kv_group->dims.paging,
                                .rows = step->rows,
                                .stride = step->stride,
                                .ids_max = kv_group->tables.now.ids_max,
                                .row = step->row,
                                .scores = kv_group->tables.reduced,
                                .ids = kv_group->tables.now.ids,
                                .id_count = kv_group->tables.now.id_count};
    return args.paging.extra_pages ? KVF_LAUNCH(step, trim, args) : KVF_OK;
}

/* The best of each list by score, ascending. */
static kvf_status choose_top(kvf_step *step)
{
    const kvf_kv_group *kv_group = step->kv_group;
    const kvf_tables *t = &kv_group->tables;
    const kvf_choice *c = &t->now;
    const kvf_paging *p = &kv_group->dims.paging;
    const bool is_shared = kv_group->dims.choose_lists < p->lists;
    const kvf_topk_args top = {.lists = step->rows * kv_group->dims.choose_lists,
                               .stride = step->stride,
                               .ids_max = c->ids_max,
                               .work_stride = p->pages_max,
                               .scores = kv_group->policy->per_query_head ? t->scores : t->reduced,
                               .count = step->choose_pages,
                               .k = t->choose,
                               .ids = is_shared ? c->list_ids : c->ids,
                               .id_count = is_shared ? c->list_count : c->id_count,
                               .work = t->topk_work,
                               .arrived = t->arrived};
    if (kvf_topk_is_fused(step))
        return KVF_OK;
    KVF_TRY(KVF_LAUNCH(step, topk, top));
    if (!is_shared)
        return trim(step);
    const kvf_spread_args spread = {.rows = step->rows,
                                    .lists = p->lists,
                                    .ids_max = c->ids_max,
                                    .from = top.ids,
                                    .from_count = top.id_count,
                                    .ids = c->ids,
                                    .id_count = c->id_count};
    return KVF_LAUNCH(step, spread, spread);
}

static kvf_status choose_newest(kvf_step *step)
{
    const kvf_kv_group *kv_group = step->kv_group;
    const kvf_newest_args args = {.paging = kv_group->dims.paging,
                                  .rows = step->rows,
                                  .ids_max = kv_group->dims.ids_max,
                                  .row = step->row,
                                  .choose = kv_group->tables.choose,
                                  .ids = kv_group->tables.now.ids,
                                  .id_count = kv_group->tables.now.id_count};
    return KVF_LAUNCH(step, newest, args);
}

kvf_status kvf_select_choose(kvf_step *step)
{
    static kvf_status (*const ways[])(kvf_step * step) = {
        [KVF_CHOOSE_TOP] = choose_top,
        [KVF_CHOOSE_NEWEST] = choose_newest,
        [KVF_CHOOSE_TOKENS] = kvf_choose_tokens,
        [KVF_CHOOSE_FUNCTION] = kvf_choose_by_function,
    };
    return ways[step->kv_group->policy->choose](step);
}
