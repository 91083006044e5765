/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Bytes of a cache and of its KV groups: where each array lies in its reservation, and what the
 * plan says about it.
 *
 * Knows nothing of what the arrays mean. The same functions plan, over bases of NULL, and carve:
 * both kvf_cache_plan_make and kvf_cache_open take their sizes from here, so a plan is exact.
 */

#include "layout.h"

#include "disk_settings.h"
#include "rings.h"
#include "score/score_args.h"
#include "slots.h"

/* Per row of the cache: one (sequence, layer). */
static void carve_rows(kvf_kv_group *kv_group, kvf_reservation *r)
{
    const kvf_cache_config *c = &kv_group->config;
    const kvf_dims *d = &kv_group->dims;
    const kvf_paging *p = &d->paging;
    const uint64_t rows = (uint64_t)c->sequences_max * c->layers;
    const uint64_t page = kvf_page_bytes(&p->shape), block = kvf_block_bytes(p);
    /* Under blocks of the caller, what belongs to a row is its ring and one store. */
    const uint64_t kept = d->by_block ? 0 : rows;
    const uint64_t ringed = kept || kvf_brings_tokens(kv_group) ? rows : 0;
    kvf_row_tables *t = &kv_group->tables.rows;
    KVF_CARVE(&r->kv, t->rings, ringed, p->ring_blocks + p->spare_blocks, block);
    KVF_CARVE(&r->kv, t->static_kv, kept ? 2 : 1, rows, p->kv_heads, p->static_pages, page);
    KVF_CARVE(&r->kv, kv_group->tables.arena, d->arena_blocks, block);
    KVF_CARVE(&r->kv, kv_group->tables.scratch.blocks, d->scratch_blocks, block);
    KVF_CARVE(&r->digest, t->digests, p->kv_heads, d->digest_blocks, p->digest_bytes);
    KVF_CARVE(&r->digest, t->centroids, kept, p->kv_heads, p->segments_max, c->head_dim);
    KVF_CARVE(&r->digest, t->centroid_scales, kept, p->kv_heads, p->segments_max);
    KVF_CARVE(&r->table, t->blocks, kept, p->blocks_max);
    KVF_CARVE(&r->table, t->block_of, kept, p->blocks_max);
    KVF_CARVE(&r->table, t->chosen_at, d->recalls ? kept : 0, p->kv_heads, p->pages_max);
    KVF_CARVE(&r->table, t->bits, kept, p->kv_heads, p->blocks_max);
    KVF_CARVE(&r->table, t->static_ids, 2, kept, p->kv_heads, kvf_static_room(p));
    KVF_CARVE(&r->table, t->static_count, 2, kept, p->kv_heads);
    KVF_CARVE(&r->table, t->queries, kept, p->query_window, c->query_heads, c->head_dim,
              kvf_dtype_bytes(c->dtype));
    KVF_CARVE(&r->table, t->share, c->static_ratio == KVF_STATIC_RATIO_AUTO ? 2 : 0, rows);
}

/* Copies of what a call changes, where it may fail half-way. */
static void carve_undo(kvf_kv_group *kv_group, kvf_reservation *r)
{
    const kvf_cache_config *c = &kv_group->config;
    const kvf_dims *d = &kv_group->dims;
    const kvf_paging *p = &d->paging;
    const uint64_t s = d->page_frames ? c->sequences_max : 0;
    const uint64_t set = d->static_tokens ? s : 0;
    const uint64_t twice = c->refresh_interval < c->tokens_per_step_max ? set : 0;
    const uint64_t blocks = kvf_undo_blocks(kv_group) + p->spare_blocks;
    kvf_undo_tables *t = &kv_group->tables.undo;
    KVF_CARVE(&r->kv, t->blocks, s, blocks, kvf_block_bytes(p));
    KVF_CARVE(&r->kv, t->static_kv, twice, p->kv_heads, p->static_pages, kvf_page_bytes(&p->shape));
    KVF_CARVE(&r->table, t->static_ids, twice, p->kv_heads, kvf_static_room(p));
    KVF_CARVE(&r->table, t->static_count, s, p->kv_heads);
    KVF_CARVE(&r->table, t->bits, set, p->kv_heads, p->blocks_max);
    KVF_CARVE(&r->table, t->share, c->static_ratio == KVF_STATIC_RATIO_AUTO ? s : 0, 2);
    KVF_CARVE(&r->table, t->chosen_at, d->recalls ? s : 0, p->kv_heads, p->pages_max);
    KVF_CARVE(&r->table, t->queries, s, kvf_undo_queries(kv_group), c->query_heads, c->head_dim,
              kvf_dtype_bytes(c->dtype));
    KVF_CARVE(&r->table, t->faults, s);
    KVF_CARVE(&r->table, t->counters, s ? 1 : 0);
}

/* Room for what `s` rows choose. */
static void carve_choice(const kvf_kv_group *kv_group, kvf_carver *k, uint64_t s,
                         kvf_choice *choice)
{
    const kvf_dims *d = &kv_group->dims;
    const uint64_t lists = s * d->paging.lists, chosen = s * d->choose_lists;
    const uint64_t moved = kvf_moves_pages(kv_group) ? lists : 0;
    const uint64_t flights = d->page_frames ? 2 : 1;
    choice->ids_max = d->ids_max;
    KVF_CARVE(k, choice->ids, lists, choice->ids_max);
    KVF_CARVE(k, choice->id_count, lists);
    KVF_CARVE(k, choice->list_ids, d->choose_lists < d->paging.lists ? chosen : 0, choice->ids_max);
    KVF_CARVE(k, choice->list_count, chosen);
    KVF_CARVE(k, choice->slot_of_id, lists, choice->ids_max);
    KVF_CARVE(k, choice->missed, lists, choice->ids_max);
    KVF_CARVE(k, choice->misses, lists, choice->ids_max);
    KVF_CARVE(k, choice->miss_count, lists);
    KVF_CARVE(k, choice->from, flights, moved, choice->ids_max);
    KVF_CARVE(k, choice->to, flights, moved, choice->ids_max);
    KVF_CARVE(k, choice->fetch_count, moved ? flights : 0);
}

/* Room to choose for as many rows as there may be. */
static void carve_choices(kvf_kv_group *kv_group, kvf_carver *k)
{
    const kvf_cache_config *c = &kv_group->config;
    const kvf_dims *d = &kv_group->dims;
    const kvf_paging *p = &d->paging;
    const uint64_t s = kvf_rows_max(c);
    const kvf_select_policy *policy = kvf_select_find(c->select);
    const uint64_t scored = policy->scores_pages ? p->pages_max : 0;
    kvf_tables *t = &kv_group->tables;
    carve_choice(kv_group, k, s, &t->now);
    KVF_CARVE(k, t->choose, s, d->choose_lists);
    const uint64_t by_codes = kvf_has_codes(kv_group) ? scored : 0, coded = by_codes ? s : 0;
    const uint64_t tiles = kvf_tiles(p->pages_max, c->page_size);
    KVF_CARVE(k, t->scores, s, c->query_heads, scored - by_codes);
    KVF_CARVE(k, t->by_codes.rotated, coded, c->query_heads, c->head_dim);
    KVF_CARVE(k, t->by_codes.scale, coded, c->query_heads);
    KVF_CARVE(k, t->by_codes.mass, coded, c->query_heads, by_codes);
    KVF_CARVE(k, t->by_codes.tile_max, coded, c->query_heads, tiles);
    KVF_CARVE(k, t->by_codes.tile_sum, coded, c->query_heads, tiles);
    KVF_CARVE(k, t->reduced, s, d->choose_lists, scored);
    const uint64_t ranking = p->segments_max ? s : 0;
    KVF_CARVE(k, t->coarse.scores, ranking, c->query_heads, p->segments_max);
    KVF_CARVE(k, t->coarse.ranked, ranking, p->lists, p->segments_max);
    KVF_CARVE(k, t->coarse.ids, ranking, p->lists, p->segments_max);
    KVF_CARVE(k, t->coarse.count, ranking, p->lists);
    KVF_CARVE(k, t->coarse.bits, ranking, p->lists, p->blocks_max);
    KVF_CARVE(k, t->topk_work, s, d->choose_lists, scored);
    KVF_CARVE(k, t->arrived, s, p->lists);
    KVF_CARVE(k, t->masks, policy->by_token ? s : 0, p->lists, d->ids_max);
}

/* Room to attend, and the arguments of calls. */
static void carve_step(kvf_kv_group *kv_group, kvf_carver *k)
{
    const kvf_cache_config *c = &kv_group->config;
    const kvf_dims *d = &kv_group->dims;
    const uint64_t s = kvf_rows_max(c), lists = s * d->paging.lists;
    /* Partial results: of a step, or of dense attention to verify one row. */
    const uint64_t dense =
        c->verify_interval
            ? kvf_div_ceil_u32(d->cover_max, kvf_split(d->cover_max, d->paging.block_size))
            : 0;
    const uint64_t splits = dense > s * d->splits_max ? dense : s * d->splits_max;
    kvf_tables *t = &kv_group->tables;
    KVF_CARVE(k, t->spans, lists, d->spans_max);
    KVF_CARVE(k, t->span_count, lists);
    KVF_CARVE(k, t->partial_o, splits, c->query_heads, c->value_dim);
    KVF_CARVE(k, t->partial_lse, splits, c->query_heads);
    KVF_CARVE(k, t->lse, s, c->query_heads);
    const uint64_t verified = c->verify_interval ? c->query_heads : 0;
    KVF_CARVE(k, t->verify_out, verified, c->value_dim, kvf_dtype_bytes(kvf_query_dtype(c)));
    KVF_CARVE(k, t->verify_lse, verified);
    KVF_CARVE(k, t->jobs, d->jobs_max);
    KVF_CARVE(k, t->chunk_fault, 1);
    KVF_CARVE(k, t->counters, d->needs_mirror ? c->layers : 0);
    KVF_CARVE(k, t->arena_pool, d->arena_blocks);
    const uint64_t scratch = d->by_block ? 0 : d->scratch_blocks;
    KVF_CARVE(k, t->scratch.table, scratch);
    KVF_CARVE(k, t->scratch.view, scratch ? 1 : 0);
}

/* Room to observe one row, and to attend to it densely. */
static void carve_cover(kvf_kv_group *kv_group, kvf_carver *k)
{
    const kvf_cache_config *c = &kv_group->config;
    const kvf_dims *d = &kv_group->dims;
    const kvf_paging *p = &d->paging;
    const uint64_t heads = d->cover_max ? p->kv_heads : 0, seen = d->observe_max ? p->kv_heads : 0;
    const uint64_t taken = d->tokens_max ? p->kv_heads : 0;
    const uint64_t taken_b = c->static_ratio == KVF_STATIC_RATIO_AUTO ? taken : 0;
    const uint64_t chunks = kvf_div_ceil_u32(d->cover_max, KVF_OBSERVE_SPANS);
    kvf_tables *t = &kv_group->tables;
    KVF_CARVE(k, t->cover.spans, heads, d->cover_max);
    KVF_CARVE(k, t->cover.span_index, heads, d->cover_max);
    KVF_CARVE(k, t->cover.span_count, heads);
    KVF_CARVE(k, t->cover.first, taken);
    KVF_CARVE(k, t->cover.count, taken);
    KVF_CARVE(k, t->cover.take, taken);
    KVF_CARVE(k, t->cover.limit, taken ? p->query_window : 0);
    KVF_CARVE(k, t->tokens.query_max, seen, chunks, p->group, d->observe_max);
    KVF_CARVE(k, t->tokens.query_sum, seen, chunks, p->group, d->observe_max);
    KVF_CARVE(k, t->tokens.score, seen, d->cover_max, p->block_size);
    KVF_CARVE(k, t->tokens.work, taken, d->cover_max, p->block_size);
    KVF_CARVE(k, t->tokens.ids, taken, d->tokens_max);
    KVF_CARVE(k, t->tokens.count, taken);
    KVF_CARVE(k, t->tokens.ids_b, taken_b, d->tokens_max);
    KVF_CARVE(k, t->tokens.count_b, taken_b);
}

static void carve_mirror(const kvf_kv_group *kv_group, kvf_carver *k, kvf_control *t)
{
    const kvf_dims *d = &kv_group->dims;
    const kvf_paging *p = &d->paging;
    const uint64_t lists = (uint64_t)kv_group->config.sequences_max * p->lists;
    const uint64_t chosen = kvf_select_find(kv_group->config.select)->calls_function
                                ? (uint64_t)kvf_rows_max(&kv_group->config) * p->lists
                                : 0;
    const uint64_t listed = d->static_tokens || p->lists != p->kv_heads ? 0 : lists;
    const uint64_t brought = d->page_frames ? lists : 0;
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
}

static void carve_control(const kvf_kv_group *kv_group, kvf_carver *k, kvf_control *t)
{
    const kvf_dims *d = &kv_group->dims;
    KVF_CARVE(k, t->counters, kv_group->config.layers);
    const uint64_t s = d->page_frames ? kv_group->config.sequences_max : 0;
    const uint64_t stay = kvf_moves_pages(kv_group) ? 0 : s * d->paging.lists;
    const uint64_t move = s * d->paging.lists - stay;
    KVF_CARVE(k, t->places, s, d->paging.blocks_max);
    KVF_CARVE(k, t->late, stay, d->ids_max);
    KVF_CARVE(k, t->parted, 2, move, d->ids_max);
    KVF_CARVE(k, t->part_count, 2, move);
    if (kv_group->dims.needs_mirror)
        carve_mirror(kv_group, k, t);
}

static void carve_kv_group(kvf_kv_group *kv_group, kvf_reservation *r)
{
    carve_rows(kv_group, r);
    carve_undo(kv_group, r);
    carve_choices(kv_group, &r->table);
    carve_step(kv_group, &r->table);
    carve_cover(kv_group, &r->table);
    carve_control(kv_group, &r->control, &kv_group->control);
    carve_control(kv_group, &r->control_device, &kv_group->control_device);
}

/* The host's tables of rows. */
static void carve_sequences(kvf_cache *cache, kvf_carver *k)
{
    const kvf_cache_config *c = &cache->config;
    const uint64_t rows = (uint64_t)c->sequences_max * c->layers;
    const bool by_block = cache->kv_group_count && cache->kv_groups[0].dims.by_block;
    const uint64_t tokens = by_block ? 0 : c->tokens_max;
    const uint64_t most = kvf_div_ceil_u32((uint32_t)tokens, cache->plan.block_size);
    kvf_block *blocks;
    uint32_t *positions;
    uint8_t *by_step;
    KVF_CARVE(k, cache->sequences, c->sequences_max);
    KVF_CARVE(k, cache->sinks_host, c->layers, c->query_heads);
    KVF_CARVE(k, cache->layers, rows);
    KVF_CARVE(k, cache->states, kvf_rows_max(c));
    KVF_CARVE(k, cache->row_sequences, kvf_rows_max(c));
    KVF_CARVE(k, cache->counters, c->layers);
    KVF_CARVE(k, cache->attention, c->layers);
    KVF_CARVE(k, cache->undo.layers, c->sequences_max);
    KVF_CARVE(k, cache->undo.rows, c->sequences_max);
    KVF_CARVE(k, cache->footprint.layers, c->layers);
    KVF_CARVE(k, cache->footprint.rows, rows);
    KVF_CARVE(k, cache->footprint.spans, c->sequences_max);
    KVF_CARVE(k, blocks, rows, most);
    KVF_CARVE(k, positions, rows, tokens);
    KVF_CARVE(k, by_step, rows, tokens);
    for (size_t n = 0; k->base && !by_block && n < rows; n++) {
        cache->layers[n].blocks = blocks + n * most;
        cache->layers[n].positions = positions + n * c->tokens_max;
        cache->layers[n].by_step = by_step + n * c->tokens_max;
    }
}

static char *carve_words(const kvf_cache *cache, kvf_carver *k, kvf_words *words)
{
    char *frames;
    KVF_CARVE(k, frames, KVF_FRAMES, cache->frame_bytes);
    KVF_CARVE(k, words->faults, cache->config.sequences_max);
    KVF_CARVE(k, words->stamp, 1);
    KVF_CARVE(k, words->sinks, cache->config.query_heads);
    return frames;
}

static void carve_frames(kvf_cache *cache, kvf_reservation *r)
{
    char *device, *const host = carve_words(cache, &r->control, &cache->words);
    (void)carve_words(cache, &r->control_device, &cache->words_device);
    KVF_CARVE(&r->table, device, KVF_FRAMES, cache->frame_bytes);
    KVF_CARVE(&r->table, cache->sinks, cache->config.layers, cache->config.query_heads);
    for (uint32_t i = 0; host && i < KVF_FRAMES; i++) {
        cache->order.frames[i].host.base = host + i * cache->frame_bytes;
        cache->order.frames[i].device = device + i * cache->frame_bytes;
    }
}

/* The caller's numbers in the element type. Blocks of the caller are written from where they are.
 */
static void carve_inputs(kvf_cache *cache, kvf_carver *k)
{
    const kvf_cache_config *c = &cache->config;
    const bool by_block = cache->kv_group_count && cache->kv_groups[0].dims.by_block;
    const uint64_t rows = kvf_has_wide_queries(c) ? kvf_input_rows(cache) : 0;
    const uint64_t appended = by_block || !kvf_has_wide_keys(c) ? 0 : rows;
    const uint64_t element = kvf_dtype_bytes(c->dtype);
    KVF_CARVE(k, cache->inputs.q, rows, c->query_heads, c->head_dim, element);
    KVF_CARVE(k, cache->inputs.k, appended, c->kv_heads, c->head_dim, element);
    KVF_CARVE(k, cache->inputs.v, appended, c->kv_heads, c->value_dim, element);
}

void kvf_layout_carve(kvf_cache *cache, kvf_reservation *r)
{
    carve_sequences(cache, &r->host);
    carve_frames(cache, r);
    carve_inputs(cache, &r->table);
    kvf_rings_carve(cache, r);
    for (uint32_t i = 0; i < cache->kv_group_count; i++)
        carve_kv_group(&cache->kv_groups[i], r);
    r->control.bytes = kvf_round_up(r->control.bytes, 4096);
}

kvf_transfer_config kvf_kv_group_transfer_config(const kvf_kv_group *kv_group)
{
    const kvf_dims *d = &kv_group->dims;
    const kvf_cache_config *c = &kv_group->config;
    return (kvf_transfer_config){.method = c->transfer,
                                 .page_bytes = kvf_stored_page_bytes(&d->paging.shape),
                                 .pages_max = kvf_rows_max(c) * d->paging.lists * d->ids_max,
                                 .requests_max = KVF_FRAMES + 2, /* one per frame */
                                 .gather_threads = kv_group->runtime->config.gather_threads,
                                 .memory = kvf_runtime_memory(kv_group->runtime)};
}

/* ---- the plan ---- */

static kvf_status too_large(const kvf_cache *cache)
{
    const kvf_cache_config *c = &cache->config;
    KVF_FAIL(cache->context, KVF_INVALID,
             "tokens_max = %u with %u layers and sequences_max = %u is more than any memory; "
             "lower tokens_max, sequences_max or budget_tokens",
             c->tokens_max, c->layers, c->sequences_max);
}

/* ---- slots ---- */

/* Bytes that a slot of every KV head of a KV group takes. */
static uint64_t slot_cost(const kvf_kv_group *kv_group)
{
    const kvf_residency r = kvf_kv_group_residency(kv_group);
    const size_t words = sizeof *r.words + (r.is_tagged ? sizeof *r.tags : 0);
    return r.heads * (words + r.slot_bytes);
}

/* Slots that a KV group could use beyond those that it has. */
static uint64_t slots_wanted(const kvf_kv_group *kv_group)
{
    const kvf_paging *p = &kv_group->dims.paging;
    return kvf_round_up(p->pool_pages, KVF_SLOT_WAYS) - p->slots;
}

static uint64_t device_total(const kvf_cache *cache)
{
    const kvf_cache_plan *plan = &cache->plan;
    return plan->device_kv_bytes + plan->device_digest_bytes + plan->device_table_bytes +
           cache->device_beside;
}

/* Bytes that the cache may take on the device; 0 = as few as a call needs. */
static uint64_t device_most(const kvf_cache *cache)
{
    const uint64_t hooked = cache->runtime->test_hooks.device_left;
    if (cache->config.device_bytes != KVF_DEVICE_BYTES_AUTO)
        return cache->config.device_bytes;
    const uint64_t left = hooked ? hooked : cache->device->ops->memory_left(cache->device);
    return left - left / 8;
}

static kvf_status check_device_bytes(const kvf_cache *cache)
{
    const uint64_t total = device_total(cache), asked = cache->config.device_bytes;
    if (asked == 0 || asked == KVF_DEVICE_BYTES_AUTO || asked >= total)
        return KVF_OK;
    KVF_FAIL(cache->context, KVF_INVALID,
             "device_bytes = %llu: windows, digests, tables and slots for one call take %llu; "
             "give that, or lower sequences_max, tokens_max or budget_tokens",
             (unsigned long long)asked, (unsigned long long)total);
}

/* Room that prompts could do without goes. Returns whether there was any. */
static bool leave_out_prompts(kvf_cache *cache)
{
    bool was_there = false;
    for (uint32_t i = 0; i < cache->kv_group_count; i++) {
        kvf_kv_group *kv_group = &cache->kv_groups[i];
        uint32_t *room = kv_group->dims.by_block && !kvf_quantizes_pages(kv_group)
                             ? &kv_group->dims.scratch_blocks
                             : &kv_group->dims.arena_blocks;
        was_there |= *room != 0;
        *room = 0;
    }
    return was_there;
}

/* Every KV group gets the same share of what it could use. */
static void share_slots(kvf_cache *cache, uint64_t bytes)
{
    double wanted = 0.0;
    for (uint32_t i = 0; i < cache->kv_group_count; i++)
        wanted +=
            (double)slots_wanted(&cache->kv_groups[i]) * (double)slot_cost(&cache->kv_groups[i]);
    const double share = wanted > (double)bytes ? (double)bytes / wanted : 1.0;
    for (uint32_t i = 0; i < cache->kv_group_count; i++) {
        kvf_kv_group *kv_group = &cache->kv_groups[i];
        const uint64_t more = (uint64_t)((double)slots_wanted(kv_group) * share);
        kv_group->dims.paging.slots += (uint32_t)(more / KVF_SLOT_WAYS * KVF_SLOT_WAYS);
    }
}

/* ---- KV groups ---- */

/* Memory of a KV group besides the carved arrays. */
static kvf_status add_kv_group(kvf_cache *cache, const kvf_kv_group *kv_group)
{
    const kvf_cache_config *c = &kv_group->config;
    const kvf_dims *d = &kv_group->dims;
    const kvf_paging *p = &d->paging;
    const uint64_t chosen = (uint64_t)kvf_rows_max(c) * p->lists * d->ids_max;
    kvf_carver pool = {0}, residency = {0}, slots = {0};
    const size_t bundle = kvf_page_pool_bundle_bytes(kvf_stored_block_bytes(p), d->bundle_blocks);
    char *blocks;
    KVF_CARVE(&pool, blocks, d->page_frames ? d->page_frames : d->block_count,
              d->page_frames ? bundle : kvf_stored_block_bytes(p));
    const kvf_residency shape = kvf_kv_group_residency(kv_group);
    kvf_residency_needs(&shape, &residency, &slots);
    if (pool.bytes + residency.bytes + slots.bytes > KVF_CARVE_MAX || chosen > UINT32_MAX ||
        d->jobs_max > UINT32_MAX)
        return too_large(cache);

    const kvf_transfer_config transfer = kvf_kv_group_transfer_config(kv_group);
    uint64_t staging_host = 0, staging_device = 0;
    kvf_cache_plan *plan = &cache->plan;
    kvf_transfer_needs(cache->device, &transfer, &staging_host, &staging_device);
    plan->host_kv_bytes += pool.bytes;
    plan->host_staging_bytes += staging_host;
    plan->host_table_bytes +=
        kvf_page_pool_table_bytes(d->block_count, d->bundle_blocks, d->page_frames, c->layers + 1);
    plan->device_kv_bytes += slots.bytes;
    plan->device_table_bytes += residency.bytes + staging_device;
    plan->prompt_bytes += (uint64_t)(d->arena_blocks + d->scratch_blocks) * kvf_block_bytes(p);
    plan->slots = kvf_min_u32(plan->slots ? plan->slots : UINT32_MAX, p->slots);
    const uint64_t resident = (uint64_t)p->slots * c->page_size / c->layers;
    if (plan->resident_tokens == 0 || resident < plan->resident_tokens)
        plan->resident_tokens = resident;
    /* The same for all KV groups. */
    plan->static_tokens = d->static_tokens;
    plan->dynamic_pages = kvf_min_u32(p->pages_max, d->dynamic_pages);
    return KVF_OK;
}

static kvf_status add_kv_groups(kvf_cache *cache, const kvf_cache_plan *carved)
{
    cache->plan = *carved;
    for (uint32_t i = 0; i < cache->kv_group_count; i++)
        KVF_TRY(add_kv_group(cache, &cache->kv_groups[i]));
    return KVF_OK;
}

/* `carved` becomes what the reservations have of the plan, with as few slots as there may be. */
static kvf_status lay_out(kvf_cache *cache, kvf_reservation *r, kvf_cache_plan *carved)
{
    *r = (kvf_reservation){0};
    kvf_layout_carve(cache, r);
    if (kvf_reservation_bytes(r) > KVF_CARVE_MAX)
        return too_large(cache);
    if (r->control.bytes > KVF_ARENA_BYTES_MAX)
        KVF_FAIL(cache->context, KVF_INVALID,
                 "sequences_max = %u: arguments of a call would take %llu bytes; lower it",
                 cache->config.sequences_max, (unsigned long long)r->control.bytes);
    *carved = (kvf_cache_plan){
        .host_table_bytes = r->host.bytes + r->control.bytes,
        .device_kv_bytes = r->kv.bytes,
        .device_digest_bytes = r->digest.bytes,
        .device_table_bytes = r->table.bytes,
        .transfer = cache->config.transfer,
        .digest = cache->config.digest,
        .block_size = cache->plan.block_size,
    };
    return add_kv_groups(cache, carved);
}

kvf_status kvf_layout_plan(kvf_cache *cache, kvf_reservation *r)
{
    kvf_cache_plan carved;
    KVF_TRY(kvf_rings_check(cache));
    KVF_TRY(lay_out(cache, r, &carved));
    const uint64_t most = device_most(cache);
    if (most && device_total(cache) > most && leave_out_prompts(cache))
        KVF_TRY(lay_out(cache, r, &carved));
    KVF_TRY(check_device_bytes(cache));
    const uint64_t total = device_total(cache);
    share_slots(cache, most > total ? most - total : 0);
    KVF_TRY(add_kv_groups(cache, &carved));
    return kvf_disk_plan(cache);
}
