/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Bytes of a cache: where each array lies in its reservation, and what the plan says about it.
 *
 * Knows nothing of what the arrays mean. Both kvf_cache_plan_make and kvf_cache_open take their
 * sizes from here, so a plan is exact. Arrays begin at multiples of 64 bytes.
 */

#include <stdbool.h>
#include <string.h>

#include "carve.h"
#include "select.h"

/* Per row of the cache: one (sequence, layer). */
static void carve_rows(carver *kv, carver *digest, carver *table, const kvf_cache_config *c,
                       const kvf_dims *d, kvf_layout *l)
{
    const kvf_paging *p = &d->paging;
    const uint64_t rows = (uint64_t)c->sequences_max * c->layers;
    const size_t page = kvf_page_bytes(&p->shape);
    l->rings = carve(kv, rows, p->ring_blocks, p->kv_heads, page);
    l->stores = carve(kv, 2 * rows, p->kv_heads, p->store_pages, page);
    l->arena = carve(kv, d->arena_blocks, p->kv_heads, page, 1);
    l->digests =
        carve(digest, rows, p->kv_heads, p->pages_max, kvf_digest_bytes(c->head_dim, p->subs));
    l->blocks = carve(table, rows, p->pages_max, 1, sizeof(void *));
    l->bits = carve(table, rows, p->kv_heads, p->pages_max, sizeof(uint64_t));
    l->store_index = carve(table, 2 * rows, p->kv_heads, kvf_store_tokens(p), sizeof(uint32_t));
    l->store_count = carve(table, 2 * rows, p->kv_heads, 1, sizeof(uint32_t));
    l->order = carve(table, d->is_physical ? 2 * rows : 0, p->kv_heads,
                     (uint64_t)p->pages_max * c->page_size, sizeof(uint32_t));
    l->queries = carve(table, rows, p->query_window, c->query_heads,
                       c->head_dim * kvf_dtype_bytes(c->dtype));
    l->share =
        carve(table, c->static_ratio == KVF_STATIC_RATIO_AUTO ? rows : 0, 2, 1, sizeof(uint32_t));
}

static bool moves_ahead(const kvf_cache_config *c, const kvf_dims *d)
{
    return d->ahead_max && c->transfer != KVF_TRANSFER_DIRECT;
}

/* Room for one call on as many sequences as there may be. */
static void carve_step(carver *table, const kvf_cache_config *c, const kvf_dims *d, kvf_layout *l)
{
    const kvf_paging *p = &d->paging;
    const uint64_t s = c->sequences_max, lists = s * p->lists, chosen = s * d->choose_lists;
    const bool scores = kvf_select_find(c->select)->scores_pages;
    l->scores = carve(table, scores ? s : 0, c->query_heads, p->pages_max, sizeof(float));
    l->reduced = carve(table, scores ? chosen : 0, p->pages_max, 1, sizeof(float));
    l->topk_work = carve(table, scores ? chosen : 0, p->pages_max, 1, sizeof(uint32_t));
    l->choose = carve(table, chosen, 1, 1, sizeof(uint32_t));
    l->ids = carve(table, lists, d->ids_max, 1, sizeof(int32_t));
    l->id_count = carve(table, lists, 1, 1, sizeof(uint32_t));
    l->list_ids =
        carve(table, d->choose_lists < p->lists ? chosen : 0, d->ids_max, 1, sizeof(int32_t));
    l->list_count = carve(table, chosen, 1, 1, sizeof(uint32_t));
    l->slot_of_id = carve(table, lists, d->ids_max, 1, sizeof(int32_t));
    l->missed = carve(table, lists, d->ids_max, 1, sizeof(uint32_t));
    l->misses = carve(table, lists, d->ids_max, 1, sizeof(kvf_miss));
    l->miss_count = carve(table, lists, 1, 1, sizeof(uint32_t));
    const bool by_token = kvf_select_find(c->select)->by_token;
    l->masks = carve(table, by_token ? lists : 0, d->ids_max, 1, sizeof(uint64_t));
    const uint64_t ahead = d->ahead_max ? lists : 0, flying = moves_ahead(c, d) ? lists : 0;
    l->ahead_ids = carve(table, ahead, d->ahead_max, 1, sizeof(int32_t));
    l->ahead_count = carve(table, ahead, 1, 1, sizeof(uint32_t));
    l->ahead_list_ids = carve(table, d->ahead_max && d->choose_lists < p->lists ? chosen : 0,
                              d->ahead_max, 1, sizeof(int32_t));
    l->ahead_list_count = carve(table, d->ahead_max ? chosen : 0, 1, 1, sizeof(uint32_t));
    /* The shadow's results go here too. */
    const uint32_t widest = kvf_max_u32(d->ahead_max, d->ids_max);
    l->ahead_slot_of_id = carve(table, ahead, widest, 1, sizeof(int32_t));
    l->ahead_missed = carve(table, ahead, widest, 1, sizeof(uint32_t));
    l->ahead_misses = carve(table, ahead, widest, 1, sizeof(kvf_miss));
    l->ahead_miss_count = carve(table, ahead, 1, 1, sizeof(uint32_t));
    l->ahead_from = carve(table, flying, c->layers, d->ahead_max, sizeof(void *));
    l->ahead_to = carve(table, flying, c->layers, d->ahead_max, sizeof(void *));
    l->ahead_fetch_count = carve(table, flying ? c->layers : 0, 1, 1, sizeof(uint32_t));
    l->ahead_marks = carve(table, ahead, c->layers, (p->slots + 31) / 32, sizeof(uint32_t));
    const uint64_t moves = c->transfer == KVF_TRANSFER_DIRECT ? 0 : lists;
    l->from = carve(table, moves, d->ids_max, 1, sizeof(void *));
    l->to = carve(table, moves, d->ids_max, 1, sizeof(void *));
    l->fetch_count = carve(table, 1, 1, 1, sizeof(uint32_t));
    l->spans = carve(table, lists, d->spans_max, 1, sizeof(kvf_span));
    l->span_count = carve(table, lists, 1, 1, sizeof(uint32_t));
    l->lse = carve(table, s, c->query_heads, 1, sizeof(float));
    l->jobs = carve(table, d->jobs_max, 1, 1, sizeof(kvf_digest_job));
    l->chunk_fault = carve(table, 1, 1, 1, sizeof(uint32_t));
    l->frames = carve(table, KVF_FRAMES, d->frame_bytes, 1, 1);
    l->device_counters =
        carve(table, d->needs_mirror ? c->layers : 0, 1, 1, sizeof(kvf_layer_counters));
    l->arena_pool = carve(table, d->arena_blocks, 1, 1, sizeof(void *));

    /* Partial results: of a step, or of dense attention to verify one row. */
    const uint64_t dense = c->verify_interval ? kvf_div_ceil_u32(d->cover_max, d->split) : 0;
    const uint64_t sparse = s * d->splits_max;
    const uint64_t splits = dense > sparse ? dense : sparse;
    l->partial_o = carve(table, splits, c->query_heads, c->head_dim, sizeof(float));
    l->partial_lse = carve(table, splits, c->query_heads, 1, sizeof(float));
}

/* Room to observe one row, and to attend to it densely. */
static void carve_cover(carver *table, const kvf_cache_config *c, const kvf_dims *d, kvf_layout *l)
{
    const kvf_paging *p = &d->paging;
    const uint64_t heads = d->cover_max ? p->kv_heads : 0;
    l->cover_spans = carve(table, heads, d->cover_max, 1, sizeof(kvf_span));
    l->cover_index = carve(table, heads, d->cover_max, 1, sizeof(uint32_t));
    l->cover_count = carve(table, heads, 1, 1, sizeof(uint32_t));
    const uint64_t verify = c->verify_interval ? c->query_heads : 0;
    l->verify_out = carve(table, verify, c->head_dim, 1, kvf_dtype_bytes(c->dtype));
    l->verify_lse = carve(table, verify, 1, 1, sizeof(float));

    const uint64_t seen = d->observe_max ? p->kv_heads : 0;
    const uint64_t chunks = kvf_div_ceil_u32(d->cover_max, KVF_OBSERVE_SPANS);
    const uint64_t window = (uint64_t)p->group * d->observe_max;
    l->row_max = carve(table, seen, chunks, window, sizeof(float));
    l->row_sum = carve(table, seen, chunks, window, sizeof(float));
    l->token_score = carve(table, seen, d->cover_max, c->page_size, sizeof(float));
    const uint64_t observed = d->tokens_max ? p->kv_heads : 0;
    l->token_work = carve(table, observed, d->cover_max, c->page_size, sizeof(uint32_t));
    l->token_ids = carve(table, observed, d->tokens_max, 1, sizeof(int32_t));
    l->token_count = carve(table, observed, 1, 1, sizeof(uint32_t));
    const bool is_auto = c->static_ratio == KVF_STATIC_RATIO_AUTO;
    l->token_ids_b = carve(table, is_auto ? observed : 0, d->tokens_max, 1, sizeof(int32_t));
    l->token_count_b = carve(table, is_auto ? observed : 0, 1, 1, sizeof(uint32_t));
    l->first = carve(table, observed, 1, 1, sizeof(uint32_t));
    l->count = carve(table, observed, 1, 1, sizeof(uint32_t));
    l->take = carve(table, observed, 1, 1, sizeof(uint32_t));
    l->limit = carve(table, observed ? p->query_window : 0, 1, 1, sizeof(uint32_t));
}

/* What a function of the host reads and writes of the device, where it cannot do so in place: of a
 * custom choice, or of page lists that are checked. */
static void carve_mirror(carver *control, const kvf_cache_config *c, const kvf_dims *d,
                         kvf_layout *l)
{
    const kvf_paging *p = &d->paging;
    const uint64_t lists = (uint64_t)c->sequences_max * p->lists;
    const uint64_t chosen = c->select == KVF_SELECT_CUSTOM ? lists : 0;
    const uint64_t listed = d->static_tokens || p->lists != p->kv_heads ? 0 : lists;
    l->mirror_choose = carve(control, chosen, 1, 1, sizeof(uint32_t));
    l->mirror_scores = carve(control, chosen, p->pages_max, 1, sizeof(float));
    l->mirror_bits = carve(control, chosen, p->pages_max, 1, sizeof(uint64_t));
    l->mirror_ids = carve(control, chosen, d->ids_max, 1, sizeof(int32_t));
    l->mirror_count = carve(control, chosen, 1, 1, sizeof(uint32_t));
    l->mirror_indptr = carve(control, listed ? listed + 1 : 0, 1, 1, sizeof(int32_t));
    l->mirror_indices = carve(control, listed, d->spans_max, 1, sizeof(int32_t));
    l->mirror_last = carve(control, listed, 1, 1, sizeof(int32_t));
}

static void carve_control(carver *control, const kvf_cache_config *c, const kvf_dims *d,
                          kvf_layout *l)
{
    l->control_frames = carve(control, KVF_FRAMES, d->frame_bytes, 1, 1);
    l->counters = carve(control, c->layers, 1, 1, sizeof(kvf_layer_counters));
    l->faults = carve(control, c->sequences_max, 1, 1, sizeof(uint64_t));
    l->stamp = carve(control, 1, 1, 1, sizeof(uint64_t));
    if (d->needs_mirror)
        carve_mirror(control, c, d, l);
    control->total = (control->total + 4095) / 4096 * 4096;
}

static void carve_host(carver *host, const kvf_cache_config *c, const kvf_dims *d)
{
    const uint64_t rows = (uint64_t)c->sequences_max * c->layers;
    (void)carve(host, c->sequences_max, 1, 1, sizeof(kvf_sequence));
    (void)carve(host, rows, 1, 1, sizeof(kvf_layer));
    (void)carve(host, rows, d->paging.pages_max, 1, sizeof(kvf_block));
    (void)carve(host, rows, c->tokens_max, 1, sizeof(uint32_t));
    (void)carve(host, c->layers, 1, 1, sizeof(kvf_layer_host_counters));
    (void)carve(host, c->layers, 1, 1, sizeof(kvf_ahead));
    (void)carve(host, rows, 1, 1, sizeof(kvf_footprint_row));
    (void)carve(host, c->sequences_max, 1, 1, sizeof(kvf_footprint_span));
    (void)carve(host, c->sequences_max, 1, 1, sizeof(uint32_t));
    (void)carve(host, d->spare_blocks + UINT64_C(1), 1, 1, sizeof(kvf_block));
    (void)carve(host, d->block_count, 2, 1, sizeof(uint32_t)); /* of the pool */
}

kvf_transfer_config kvf_cache_transfer_config(const kvf_runtime *runtime, const kvf_cache_config *c,
                                              const kvf_dims *d)
{
    return (kvf_transfer_config){.method = c->transfer,
                                 .page_bytes = kvf_page_bytes(&d->paging.shape),
                                 .pages_max = c->sequences_max * d->paging.lists *
                                              kvf_max_u32(d->ids_max, d->ahead_max),
                                 /* Besides one per frame, one per layer ahead of need. */
                                 .requests_max = KVF_FRAMES + 2 + (d->ahead_max ? c->layers : 0),
                                 .gather_threads = runtime->config.gather_threads,
                                 .memory = kvf_runtime_memory(runtime)};
}

kvf_status kvf_layout_make(kvf_runtime *runtime, const kvf_cache_config *c, const kvf_dims *d,
                           kvf_layout *l, kvf_cache_plan *plan)
{
    const kvf_paging *p = &d->paging;
    const uint64_t lists = (uint64_t)c->sequences_max * c->layers * p->lists;
    const size_t page = kvf_page_bytes(&p->shape);
    carver kv = {0}, digest = {0}, table = {0}, control = {0}, host = {0}, pool = {0};
    carver residency = {0}, slots = {0};
    *l = (kvf_layout){0};
    carve_rows(&kv, &digest, &table, c, d, l);
    carve_step(&table, c, d, l);
    carve_cover(&table, c, d, l);
    carve_control(&control, c, d, l);
    carve_host(&host, c, d);
    (void)carve(&residency, lists, (uint64_t)p->pages_max + p->slots, 1, sizeof(int32_t));
    (void)carve(&residency, d->shadow_slots ? lists : 0, (uint64_t)p->pages_max + d->shadow_slots,
                1, sizeof(int32_t));
    (void)carve(&slots, c->transfer == KVF_TRANSFER_DIRECT ? 0 : lists, p->slots, 1, page);
    (void)carve(&pool, d->block_count, p->kv_heads, 1, page);
    const carver *all[] = {&kv, &digest, &table, &control, &host, &pool, &residency, &slots};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (all[i]->is_too_large || lists > UINT32_MAX ||
            (uint64_t)c->sequences_max * p->lists * d->ids_max > UINT32_MAX ||
            d->jobs_max > UINT32_MAX)
            KVF_FAIL(
                runtime->context, KVF_INVALID,
                "tokens_max = %u with %u layers and sequences_max = %u is more than any memory; "
                "lower tokens_max, sequences_max or budget_tokens",
                c->tokens_max, c->layers, c->sequences_max);
    if (control.total > KVF_ARENA_BYTES_MAX)
        KVF_FAIL(runtime->context, KVF_INVALID,
                 "sequences_max = %u: arguments of a call would take %llu bytes; lower it",
                 c->sequences_max, (unsigned long long)control.total);
    l->device_kv = kv.total;
    l->device_digest = digest.total;
    l->device_table = table.total;
    l->control = control.total;
    l->residency = residency.total;
    l->slots = slots.total;

    const kvf_transfer_config transfer = kvf_cache_transfer_config(runtime, c, d);
    uint64_t staging_host = 0, staging_device = 0;
    kvf_transfer_needs(runtime->device, &transfer, &staging_host, &staging_device);
    *plan = (kvf_cache_plan){
        .host_kv_bytes = pool.total,
        .host_staging_bytes = staging_host,
        .host_table_bytes = host.total + control.total,
        .device_kv_bytes = kv.total + slots.total,
        .device_digest_bytes = digest.total,
        .device_table_bytes = table.total + residency.total + staging_device,
        .static_tokens = d->static_tokens,
        .dynamic_pages = kvf_min_u32(p->pages_max, d->dynamic_pages),
        .slots = p->slots,
        .transfer = c->transfer,
    };
    return KVF_OK;
}
