/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Bytes of a cache: where each array lies in its reservation, and what the plan says about it.
 *
 * Knows nothing of what the arrays mean. The same functions plan, over bases of NULL, and carve:
 * both kvf_cache_plan_make and kvf_cache_open take their sizes from here, so a plan is exact.
 */

#include "layout.h"

#include "cache.h"
#include "score/score_args.h"

/* Per row of the cache: one (sequence, layer). */
static void carve_rows(kvf_cache *cache, kvf_reservation *r)
{
    const kvf_cache_config *c = &cache->config;
    const kvf_dims *d = &cache->dims;
    const kvf_paging *p = &d->paging;
    const uint64_t rows = (uint64_t)c->sequences_max * c->layers;
    const uint64_t page = kvf_page_bytes(&p->shape), block = kvf_block_bytes(p);
    kvf_tables *t = &cache->tables;
    KVF_CARVE(&r->kv, t->rings, rows, p->ring_blocks, block);
    KVF_CARVE(&r->kv, t->stores, 2, rows, p->kv_heads, p->store_pages, page);
    KVF_CARVE(&r->kv, t->arena, d->arena_blocks, block);
    KVF_CARVE(&r->digest, t->digests, rows, p->kv_heads, p->blocks_max, p->digest_bytes);
    KVF_CARVE(&r->table, t->blocks, rows, p->blocks_max);
    KVF_CARVE(&r->table, t->bits, rows, p->kv_heads, p->blocks_max);
    KVF_CARVE(&r->table, t->store_index, 2, rows, p->kv_heads, kvf_store_tokens(p));
    KVF_CARVE(&r->table, t->store_count, 2, rows, p->kv_heads);
    KVF_CARVE(&r->table, t->queries, rows, p->query_window, c->query_heads, c->head_dim,
              kvf_dtype_bytes(c->dtype));
    KVF_CARVE(&r->table, t->share, c->static_ratio == KVF_STATIC_RATIO_AUTO ? 2 : 0, rows);
}

/* Room for what `s` sequences choose, with tables of misses that are `wide`. */
static void carve_choice(const kvf_cache *cache, kvf_carver *k, uint64_t s, uint64_t wide,
                         uint64_t flights, kvf_choice *choice)
{
    const kvf_dims *d = &cache->dims;
    const uint64_t lists = s * d->paging.lists, chosen = s * d->choose_lists;
    const uint64_t moved = kvf_moves_pages(cache) ? lists : 0;
    KVF_CARVE(k, choice->ids, lists, choice->ids_max);
    KVF_CARVE(k, choice->id_count, lists);
    KVF_CARVE(k, choice->list_ids, d->choose_lists < d->paging.lists ? chosen : 0, choice->ids_max);
    KVF_CARVE(k, choice->list_count, chosen);
    KVF_CARVE(k, choice->slot_of_id, lists, wide);
    KVF_CARVE(k, choice->missed, lists, wide);
    KVF_CARVE(k, choice->misses, lists, wide);
    KVF_CARVE(k, choice->miss_count, lists);
    KVF_CARVE(k, choice->from, flights, moved, choice->ids_max);
    KVF_CARVE(k, choice->to, flights, moved, choice->ids_max);
    KVF_CARVE(k, choice->fetch_count, moved ? flights : 0);
}

/* Room to choose on as many sequences as there may be. */
static void carve_choices(kvf_cache *cache, kvf_carver *k)
{
    const kvf_cache_config *c = &cache->config;
    const kvf_dims *d = &cache->dims;
    const kvf_paging *p = &d->paging;
    const uint64_t s = c->sequences_max, ahead = d->ahead_max ? s : 0;
    const kvf_select_policy *policy = kvf_select_find(c->select);
    const uint64_t scored = policy->scores_pages ? p->pages_max : 0;
    kvf_tables *t = &cache->tables;
    t->now.ids_max = d->ids_max;
    t->ahead.ids_max = d->ahead_max;
    carve_choice(cache, k, s, d->ids_max, d->berths ? 2 : 1, &t->now);
    carve_choice(cache, k, ahead, kvf_max_u32(d->ahead_max, d->ids_max), c->layers, &t->ahead);
    KVF_CARVE(k, t->choose, s, d->choose_lists);
    const uint64_t by_codes = kvf_has_codes(cache) ? scored : 0, coded = by_codes ? s : 0;
    const uint64_t tiles = kvf_tiles(p->pages_max, c->page_size);
    KVF_CARVE(k, t->scores, s, c->query_heads, scored - by_codes);
    KVF_CARVE(k, t->rotated, coded, c->query_heads, c->head_dim);
    KVF_CARVE(k, t->rotated_scale, coded, c->query_heads);
    KVF_CARVE(k, t->mass, coded, c->query_heads, by_codes);
    KVF_CARVE(k, t->top, coded, c->query_heads, tiles);
    KVF_CARVE(k, t->sum, coded, c->query_heads, tiles);
    KVF_CARVE(k, t->reduced, s, d->choose_lists, scored);
    KVF_CARVE(k, t->topk_work, s, d->choose_lists, scored);
    KVF_CARVE(k, t->arrived, s, p->lists);
    KVF_CARVE(k, t->masks, policy->by_token ? s : 0, p->lists, d->ids_max);
    KVF_CARVE(k, t->marks, c->layers, ahead, p->lists, kvf_div_ceil_u32(p->slots, 32));
}

/* Room to attend, and the arguments of calls. */
static void carve_step(kvf_cache *cache, kvf_carver *k)
{
    const kvf_cache_config *c = &cache->config;
    const kvf_dims *d = &cache->dims;
    const uint64_t s = c->sequences_max, lists = s * d->paging.lists;
    /* Partial results: of a step, or of dense attention to verify one row. */
    const uint64_t dense =
        c->verify_interval
            ? kvf_div_ceil_u32(d->cover_max, kvf_split(d->cover_max, d->paging.block_size))
            : 0;
    const uint64_t splits = dense > s * d->splits_max ? dense : s * d->splits_max;
    kvf_tables *t = &cache->tables;
    KVF_CARVE(k, t->spans, lists, d->spans_max);
    KVF_CARVE(k, t->span_count, lists);
    KVF_CARVE(k, t->partial_o, splits, c->query_heads, c->head_dim);
    KVF_CARVE(k, t->partial_lse, splits, c->query_heads);
    KVF_CARVE(k, t->lse, s, c->query_heads);
    const uint64_t verified = c->verify_interval ? c->query_heads : 0;
    KVF_CARVE(k, t->verify_out, verified, c->head_dim, kvf_dtype_bytes(c->dtype));
    KVF_CARVE(k, t->verify_lse, verified);
    KVF_CARVE(k, t->jobs, d->jobs_max);
    KVF_CARVE(k, t->chunk_fault, 1);
    KVF_CARVE(k, t->counters, d->needs_mirror ? c->layers : 0);
    KVF_CARVE(k, t->arena_pool, d->arena_blocks);
    KVF_CARVE(k, t->frames, KVF_FRAMES, d->frame_bytes);
}

/* Room to observe one row, and to attend to it densely. */
static void carve_cover(kvf_cache *cache, kvf_carver *k)
{
    const kvf_cache_config *c = &cache->config;
    const kvf_dims *d = &cache->dims;
    const kvf_paging *p = &d->paging;
    const uint64_t heads = d->cover_max ? p->kv_heads : 0, seen = d->observe_max ? p->kv_heads : 0;
    const uint64_t taken = d->tokens_max ? p->kv_heads : 0;
    const uint64_t taken_b = c->static_ratio == KVF_STATIC_RATIO_AUTO ? taken : 0;
    const uint64_t chunks = kvf_div_ceil_u32(d->cover_max, KVF_OBSERVE_SPANS);
    kvf_tables *t = &cache->tables;
    KVF_CARVE(k, t->cover.spans, heads, d->cover_max);
    KVF_CARVE(k, t->cover.span_index, heads, d->cover_max);
    KVF_CARVE(k, t->cover.span_count, heads);
    KVF_CARVE(k, t->cover.first, taken);
    KVF_CARVE(k, t->cover.count, taken);
    KVF_CARVE(k, t->cover.take, taken);
    KVF_CARVE(k, t->cover.limit, taken ? p->query_window : 0);
    KVF_CARVE(k, t->row_max, seen, chunks, p->group, d->observe_max);
    KVF_CARVE(k, t->row_sum, seen, chunks, p->group, d->observe_max);
    KVF_CARVE(k, t->token_score, seen, d->cover_max, p->block_size);
    KVF_CARVE(k, t->token_work, taken, d->cover_max, p->block_size);
    KVF_CARVE(k, t->token_ids, taken, d->tokens_max);
    KVF_CARVE(k, t->token_count, taken);
    KVF_CARVE(k, t->token_ids_b, taken_b, d->tokens_max);
    KVF_CARVE(k, t->token_count_b, taken_b);
}

static void carve_mirror(const kvf_cache *cache, kvf_carver *k, kvf_control *t)
{
    const kvf_dims *d = &cache->dims;
    const kvf_paging *p = &d->paging;
    const uint64_t lists = (uint64_t)cache->config.sequences_max * p->lists;
    const uint64_t chosen = kvf_select_find(cache->config.select)->calls_function ? lists : 0;
    const uint64_t listed = d->static_tokens || p->lists != p->kv_heads ? 0 : lists;
    const uint64_t brought = d->berths ? lists : 0;
    KVF_CARVE(k, t->mirror.choose, chosen);
    KVF_CARVE(k, t->mirror.scores, chosen, p->pages_max);
    KVF_CARVE(k, t->mirror.bits, chosen, p->blocks_max);
    KVF_CARVE(k, t->mirror.ids, chosen, d->ids_max);
    KVF_CARVE(k, t->mirror.id_count, chosen);
    KVF_CARVE(k, t->mirror.indptr, listed ? listed + 1 : 0);
    KVF_CARVE(k, t->mirror.indices, listed, d->spans_max);
    KVF_CARVE(k, t->mirror.last_page_len, listed);
    KVF_CARVE(k, t->mirror.misses, brought, d->ids_max);
    KVF_CARVE(k, t->mirror.miss_count, brought);
    KVF_CARVE(k, t->mirror.ahead_ids, d->berths ? lists : 0, d->ahead_max);
    KVF_CARVE(k, t->mirror.ahead_count, d->berths && d->ahead_max ? lists : 0);
}

void kvf_layout_carve_control(const kvf_cache *cache, kvf_carver *k, kvf_control *t)
{
    KVF_CARVE(k, t->frames, KVF_FRAMES, cache->dims.frame_bytes);
    KVF_CARVE(k, t->counters, cache->config.layers);
    KVF_CARVE(k, t->faults, cache->config.sequences_max);
    KVF_CARVE(k, t->stamp, 1);
    const kvf_dims *d = &cache->dims;
    const uint64_t s = d->berths ? cache->config.sequences_max : 0;
    const uint64_t stay = kvf_moves_pages(cache) ? 0 : s * d->paging.lists;
    const uint64_t move = s * d->paging.lists - stay;
    KVF_CARVE(k, t->places, s, d->paging.blocks_max);
    KVF_CARVE(k, t->late, stay, d->ids_max);
    KVF_CARVE(k, t->parted, 2, move, d->ids_max);
    KVF_CARVE(k, t->part_count, 2, move);
    if (cache->dims.needs_mirror)
        carve_mirror(cache, k, t);
    k->bytes = kvf_round_up(k->bytes, 4096);
}

void kvf_layout_carve_host(kvf_cache *cache, kvf_carver *k)
{
    const kvf_cache_config *c = &cache->config;
    const uint64_t rows = (uint64_t)c->sequences_max * c->layers;
    KVF_CARVE(k, cache->sequences, c->sequences_max);
    KVF_CARVE(k, cache->layers, rows);
    KVF_CARVE(k, cache->blocks, rows, cache->dims.paging.blocks_max);
    KVF_CARVE(k, cache->positions, rows, c->tokens_max);
    KVF_CARVE(k, cache->by_step, rows, c->tokens_max);
    KVF_CARVE(k, cache->host_counters, c->layers);
    KVF_CARVE(k, cache->ahead, c->layers);
    KVF_CARVE(k, cache->footprint.layers, c->layers);
    KVF_CARVE(k, cache->footprint.rows, rows);
    KVF_CARVE(k, cache->footprint.spans, c->sequences_max);
    KVF_CARVE(k, cache->sealed_before, c->sequences_max);
    KVF_CARVE(k, cache->expected, c->sequences_max);
}

void kvf_layout_carve(kvf_cache *cache, kvf_reservation *r)
{
    carve_rows(cache, r);
    carve_choices(cache, &r->table);
    carve_step(cache, &r->table);
    carve_cover(cache, &r->table);
    kvf_layout_carve_control(cache, &r->control, &cache->control);
    kvf_layout_carve_control(cache, &r->control_device, &cache->control_device);
    kvf_layout_carve_host(cache, &r->host);
}

kvf_transfer_config kvf_cache_transfer_config(const kvf_cache *cache)
{
    const kvf_dims *d = &cache->dims;
    const kvf_cache_config *c = &cache->config;
    return (kvf_transfer_config){.method = c->transfer,
                                 .page_bytes = kvf_page_bytes(&d->paging.shape),
                                 .pages_max = c->sequences_max * d->paging.lists *
                                              kvf_max_u32(d->ids_max, d->ahead_max),
                                 /* Besides one per frame, one per layer ahead of need. */
                                 .requests_max = KVF_FRAMES + 2 + (d->ahead_max ? c->layers : 0),
                                 .gather_threads = cache->runtime->config.gather_threads,
                                 .memory = kvf_runtime_memory(cache->runtime)};
}

uint64_t kvf_reservation_bytes(const kvf_reservation *r)
{
    return r->kv.bytes + r->digest.bytes + r->table.bytes + r->control.bytes + r->host.bytes;
}

kvf_status kvf_layout_plan(kvf_cache *cache, kvf_reservation *r)
{
    const kvf_cache_config *c = &cache->config;
    const kvf_dims *d = &cache->dims;
    const kvf_paging *p = &d->paging;
    const uint64_t lists = (uint64_t)c->sequences_max * c->layers * p->lists;
    const uint64_t chosen = (uint64_t)c->sequences_max * p->lists * d->ids_max;
    kvf_carver pool = {0}, residency = {0}, slots = {0};
    const size_t bundle = kvf_page_pool_bundle_bytes(kvf_block_bytes(p), d->bundle_blocks);
    char *blocks;
    *r = (kvf_reservation){0};
    kvf_layout_carve(cache, r);
    KVF_CARVE(&pool, blocks, d->berths ? d->berths : d->block_count,
              d->berths ? bundle : kvf_block_bytes(p));
    kvf_residency_needs((uint32_t)lists, p->pages_max, p->slots, kvf_cache_slot_bytes(cache),
                        &residency, &slots);
    if (d->shadow_slots)
        kvf_residency_needs((uint32_t)lists, p->pages_max, d->shadow_slots, 0, &residency, &slots);
    if (kvf_reservation_bytes(r) + pool.bytes + residency.bytes + slots.bytes > KVF_CARVE_MAX ||
        lists > UINT32_MAX || chosen > UINT32_MAX || d->jobs_max > UINT32_MAX)
        KVF_FAIL(cache->context, KVF_INVALID,
                 "tokens_max = %u with %u layers and sequences_max = %u is more than any memory; "
                 "lower tokens_max, sequences_max or budget_tokens",
                 c->tokens_max, c->layers, c->sequences_max);
    if (r->control.bytes > KVF_ARENA_BYTES_MAX)
        KVF_FAIL(cache->context, KVF_INVALID,
                 "sequences_max = %u: arguments of a call would take %llu bytes; lower it",
                 c->sequences_max, (unsigned long long)r->control.bytes);

    const kvf_transfer_config transfer = kvf_cache_transfer_config(cache);
    const uint32_t bundles = d->berths ? d->block_count / d->bundle_blocks : 0;
    uint64_t staging_host = 0, staging_device = 0;
    kvf_transfer_needs(cache->device, &transfer, &staging_host, &staging_device);
    cache->plan = (kvf_cache_plan){
        .host_kv_bytes = pool.bytes,
        .host_staging_bytes = staging_host,
        .host_table_bytes =
            r->host.bytes + kvf_page_pool_table_bytes(d->block_count, d->bundle_blocks) +
            (bundles ? kvf_disk_tier_table_bytes(bundles, d->berths, c->layers + 1) : 0) +
            r->control.bytes,
        .device_kv_bytes = r->kv.bytes + slots.bytes,
        .device_digest_bytes = r->digest.bytes,
        .device_table_bytes = r->table.bytes + residency.bytes + staging_device,
        .static_tokens = d->static_tokens,
        .dynamic_pages = kvf_min_u32(p->pages_max, d->dynamic_pages),
        .slots = p->slots,
        .transfer = c->transfer,
        .block_size = p->block_size,
        .disk_bundle_bytes = bundles ? (uint32_t)bundle : 0,
        .disk_bytes = (uint64_t)bundles * bundle,
    };
    return KVF_OK;
}
