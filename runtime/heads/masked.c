/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Opening a cache with a head mask, and calls on it: which inner cache a layer belongs to, and what
 * the host keeps of sequences.
 *
 * Knows nothing of rings (streaming_heads.c) or of what inner caches do. A call that an inner cache
 * refuses has changed nothing: packing writes scratch memory only.
 */

#include "masked.h"

#include <string.h>

#include "append.h"
#include "streaming_heads.h"

/* ---- sizes ---- */

static uint32_t retrieval_heads(const kvf_cache_config *c, uint32_t layer)
{
    uint32_t count = 0;
    for (uint32_t h = 0; h < c->kv_heads; h++)
        count += c->head_mask[(size_t)layer * c->kv_heads + h];
    return count;
}

/* Layers with r retrieval heads; at most r = kv_heads. */
static uint32_t layers_with(const kvf_cache_config *c, uint32_t r)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < c->layers; i++)
        count += retrieval_heads(c, i) == r;
    return count;
}

/* The inner cache of layers with r retrieval heads. */
static kvf_cache_config part_config(const kvf_cache_config *config, uint32_t r, uint32_t layers)
{
    kvf_cache_config c = *config;
    c.head_mask = NULL;
    c.layers = layers;
    c.query_heads = config->query_heads / config->kv_heads * r;
    c.kv_heads = r;
    c.observe_window = 0; /* pruning is refused */
    return c;
}

static void count_blocks(const kvf_cache_config *c, const kvf_dims *d, kvf_masked_sizes *z)
{
    const uint32_t page_size = c->page_size, pages = d->paging.pages_max;
    const uint32_t recent = kvf_div_ceil_u32(c->streaming_recent - 1, page_size) + 1;
    kvf_ring *ring = &z->ring;
    *ring = (kvf_ring){
        .shape = d->paging.shape, .sink = c->streaming_sink, .recent = c->streaming_recent};
    ring->sink_blocks = kvf_min_u32(kvf_div_ceil_u32(c->streaming_sink, page_size), pages);
    ring->ring_blocks = kvf_max_u32(1, kvf_min_u32(recent, pages - ring->sink_blocks));
    z->blocks = ring->sink_blocks + ring->ring_blocks;
    z->chunk_blocks = kvf_div_ceil_u32(c->prefill_chunk_max, page_size) + 1;
    z->window_blocks = z->blocks + z->chunk_blocks + 1;
    z->split = kvf_max_u32(1, KVF_SPLIT_TOKENS / page_size);
    z->group = c->query_heads / c->kv_heads;
}

static void count_heads(const kvf_cache_config *c, kvf_masked_sizes *z)
{
    for (uint32_t i = 0; i < c->layers; i++) {
        const uint32_t r = retrieval_heads(c, i), s = c->kv_heads - r;
        z->streaming_max = kvf_max_u32(z->streaming_max, s);
        z->packed[0] = kvf_max_u32(z->packed[0], s ? r : 0);
        z->packed[1] = kvf_max_u32(z->packed[1], r ? s : 0);
    }
    for (uint32_t r = 1; r <= c->kv_heads; r++)
        z->parts += layers_with(c, r) != 0;
}

/* What of the outer cache does not exist takes no room. */
static void shape_outer(kvf_cache *cache)
{
    const kvf_cache_config *c = &cache->config;
    const kvf_masked_sizes *z = &cache->masked->sizes;
    kvf_dims *d = &cache->dims;
    d->paging.pages_max = 0;
    d->needs_mirror = d->arena_blocks = d->ahead_max = d->shadow_slots = d->is_physical = 0;
    d->spare_blocks = d->block_count = 0;
    d->frame_bytes =
        kvf_round_up(c->sequences_max * sizeof(kvf_row) + c->kv_heads * sizeof(uint32_t) +
                         KVF_MASKED_JOBS_MAX * sizeof(kvf_heads_job) +
                         ((size_t)3 * z->chunk_blocks + z->window_blocks) * sizeof(void *) + 8 * 64,
                     64);
}

static void carve_tables(kvf_cache *cache, kvf_carver *k)
{
    const kvf_cache_config *c = &cache->config;
    kvf_masked *m = cache->masked;
    const kvf_masked_sizes *z = &m->sizes;
    const uint64_t rows = kvf_max_u32(c->prefill_chunk_max, c->sequences_max);
    const uint64_t row = kvf_row_bytes(&z->ring.shape);
    const uint64_t lists = (uint64_t)c->sequences_max * z->streaming_max;
    const uint64_t splits = lists * kvf_div_ceil_u32(z->blocks, z->split);
    for (uint32_t kind = 0; kind < 2; kind++) {
        KVF_CARVE(k, m->q[kind], rows, z->packed[kind], z->group, row);
        KVF_CARVE(k, m->k[kind], rows, z->packed[kind], row);
        KVF_CARVE(k, m->v[kind], rows, z->packed[kind], row);
        KVF_CARVE(k, m->out[kind], rows, z->packed[kind], z->group, row);
        KVF_CARVE(k, m->lse[kind], c->sequences_max, z->packed[kind], z->group);
    }
    KVF_CARVE(k, cache->tables.spans, lists, z->blocks);
    KVF_CARVE(k, cache->tables.span_count, lists);
    KVF_CARVE(k, cache->tables.partial_o, splits, z->group, c->head_dim);
    KVF_CARVE(k, cache->tables.partial_lse, splits, z->group);
    KVF_CARVE(k, cache->tables.chunk_fault, 1);
    KVF_CARVE(k, cache->tables.frames, KVF_FRAMES, cache->dims.frame_bytes);
}

static void carve_host(kvf_cache *cache, kvf_carver *k)
{
    const kvf_cache_config *c = &cache->config;
    kvf_masked *m = cache->masked;
    KVF_CARVE(k, m->mask, c->layers, c->kv_heads);
    KVF_CARVE(k, m->heads, c->layers, c->kv_heads);
    KVF_CARVE(k, m->layer_of, c->layers);
    KVF_CARVE(k, m->layers, c->layers);
    KVF_CARVE(k, m->parts, m->sizes.parts);
    KVF_CARVE(k, m->inner, c->sequences_max, m->sizes.parts);
    KVF_CARVE(k, m->batch, c->sequences_max);
    kvf_layout_carve_host(cache, k);
}

static void carve_outer(kvf_cache *cache, kvf_reservation *r)
{
    const kvf_cache_config *c = &cache->config;
    kvf_masked *m = cache->masked;
    const uint64_t page = kvf_page_bytes(&m->sizes.ring.shape);
    carve_host(cache, &r->host);
    for (uint32_t i = 0; i < c->layers; i++) {
        char *rings;
        KVF_CARVE(&r->kv, rings, c->sequences_max, m->sizes.blocks,
                  c->kv_heads - retrieval_heads(c, i), page);
        if (m->layers)
            m->layers[i].rings = rings;
    }
    KVF_CARVE(&r->kv, m->chunk, m->sizes.chunk_blocks, m->sizes.streaming_max, page);
    carve_tables(cache, &r->table);
    kvf_layout_carve_control(cache, &r->control, &cache->control);
    kvf_layout_carve_control(cache, &r->control_device, &cache->control_device);
}

/* ---- plan ---- */

static kvf_status plan_outer(kvf_cache *cache, kvf_reservation *r)
{
    const kvf_cache_config *c = &cache->config;
    kvf_masked_sizes *z = &cache->masked->sizes;
    count_blocks(c, &cache->dims, z);
    count_heads(c, z);
    shape_outer(cache);
    *r = (kvf_reservation){0};
    carve_outer(cache, r);
    if (kvf_reservation_is_too_large(r) || r->control.bytes > KVF_ARENA_BYTES_MAX ||
        (uint64_t)c->sequences_max * z->streaming_max * z->blocks > UINT32_MAX)
        KVF_FAIL(cache->context, KVF_INVALID,
                 "streaming_recent = %u with %u layers and sequences_max = %u is more than any "
                 "memory; lower streaming_recent, sequences_max or prefill_chunk_max",
                 c->streaming_recent, c->layers, c->sequences_max);
    cache->plan = (kvf_cache_plan){.device_kv_bytes = r->kv.bytes,
                                   .device_table_bytes = r->table.bytes,
                                   .host_table_bytes = r->host.bytes + r->control.bytes,
                                   .transfer = c->transfer};
    return KVF_OK;
}

static void add_plan(kvf_cache_plan *sum, const kvf_cache_plan *p)
{
    sum->host_kv_bytes += p->host_kv_bytes;
    sum->host_staging_bytes += p->host_staging_bytes;
    sum->host_table_bytes += p->host_table_bytes;
    sum->device_kv_bytes += p->device_kv_bytes;
    sum->device_digest_bytes += p->device_digest_bytes;
    sum->device_table_bytes += p->device_table_bytes;
    sum->static_tokens = p->static_tokens; /* the same for all */
    sum->dynamic_pages = p->dynamic_pages;
    sum->slots = p->slots;
    sum->transfer = p->transfer;
}

kvf_status kvf_masked_plan(kvf_cache *cache, const kvf_cache_config *config, kvf_reservation *r)
{
    cache->masked = kvf_alloc(cache->context, 1, sizeof *cache->masked);
    if (!cache->masked)
        KVF_FAIL(cache->context, KVF_OUT_OF_MEMORY, "no memory for a head mask");
    KVF_TRY(plan_outer(cache, r));
    for (uint32_t heads = 1; heads <= cache->config.kv_heads; heads++) {
        const uint32_t layers = layers_with(&cache->config, heads);
        const kvf_cache_config part = part_config(config, heads, layers);
        kvf_cache_plan plan;
        if (layers == 0)
            continue;
        KVF_TRY(kvf_cache_plan_make(cache->runtime, &part, &plan, NULL));
        add_plan(&cache->plan, &plan);
    }
    return KVF_OK;
}

/* ---- open and close ---- */

static void list_heads(const kvf_cache_config *c, kvf_masked *m, uint32_t layer)
{
    const uint8_t *mask = m->mask + (size_t)layer * c->kv_heads;
    uint32_t *heads = m->heads + (size_t)layer * c->kv_heads;
    kvf_masked_layer *l = &m->layers[layer];
    uint32_t streaming = l->retrieval = retrieval_heads(c, layer), retrieval = 0;
    l->streaming = c->kv_heads - l->retrieval;
    l->heads = heads;
    for (uint32_t h = 0; h < c->kv_heads; h++)
        heads[mask[h] ? retrieval++ : streaming++] = h;
}

/* A custom policy sees layers and heads of the outer cache. */
static uint32_t select_outer(void *user, const kvf_select_view *view, int32_t *ids)
{
    const kvf_masked_part *part = user;
    const kvf_cache_config *c = &part->outer->config;
    kvf_select_view outer = *view;
    outer.layer = part->layer_of[view->layer];
    outer.kv_head = part->outer->masked->layers[outer.layer].heads[view->kv_head];
    return c->select_fn(c->select_user, &outer, ids);
}

static kvf_status open_part(kvf_cache *cache, const kvf_cache_config *config, kvf_masked_part *part)
{
    kvf_cache_config c = part_config(config, part->heads, part->layers);
    if (c.select == KVF_SELECT_CUSTOM) {
        c.select_fn = select_outer;
        c.select_user = part;
    }
    return kvf_cache_open(cache->runtime, &c, &part->cache, NULL);
}

static kvf_status open_parts(kvf_cache *cache, const kvf_cache_config *config, kvf_masked *m)
{
    uint32_t n = 0, done = 0;
    for (uint32_t r = 1; r <= cache->config.kv_heads; r++) {
        const uint32_t layers = layers_with(&cache->config, r);
        if (layers == 0)
            continue;
        kvf_masked_part *part = &m->parts[n];
        *part = (kvf_masked_part){
            .outer = cache, .heads = r, .layers = layers, .layer_of = m->layer_of + done};
        for (uint32_t i = 0, inner = 0; i < cache->config.layers; i++)
            if (m->layers[i].retrieval == r) {
                m->layers[i].part = n;
                m->layers[i].inner = inner;
                part->layer_of[inner++] = i;
            }
        KVF_TRY(open_part(cache, config, part));
        done += layers;
        n++;
    }
    return KVF_OK;
}

kvf_status kvf_masked_open(kvf_cache *cache, const kvf_cache_config *config, kvf_reservation *r)
{
    kvf_masked *m = cache->masked;
    carve_outer(cache, r);
    memcpy(m->mask, cache->config.head_mask, (size_t)cache->config.layers * cache->config.kv_heads);
    cache->config.head_mask = m->mask;
    for (uint32_t i = 0; i < cache->config.layers; i++)
        list_heads(&cache->config, m, i);
    return open_parts(cache, config, m);
}

void kvf_masked_close(kvf_cache *cache)
{
    kvf_masked *m = cache->masked;
    if (!m)
        return;
    for (uint32_t i = m->parts ? m->sizes.parts : 0; i-- > 0;)
        kvf_cache_close(m->parts[i].cache);
    kvf_free(cache->context, m);
    cache->masked = NULL;
}

/* ---- sequences ---- */

static kvf_sequence **inner_of(const kvf_sequence *sequence)
{
    const kvf_masked *m = sequence->cache->masked;
    return m->inner + (size_t)sequence->slot * m->sizes.parts;
}

kvf_status kvf_masked_create(kvf_cache *cache, kvf_sequence *sequence)
{
    const kvf_masked *m = cache->masked;
    for (uint32_t i = 0; i < m->sizes.parts; i++)
        KVF_TRY(kvf_sequence_create(m->parts[i].cache, &inner_of(sequence)[i]));
    return KVF_OK;
}

void kvf_masked_release(kvf_sequence *sequence)
{
    const kvf_masked *m = sequence->cache->masked;
    for (uint32_t i = 0; i < m->sizes.parts; i++) {
        kvf_sequence_destroy(inner_of(sequence)[i]);
        inner_of(sequence)[i] = NULL;
    }
}

/* Nothing of the outer cache has changed unless the inner one broke. */
static kvf_status end_refused(kvf_step *step, const kvf_cache *inner, kvf_status status)
{
    const kvf_status ended = kvf_step_end(step, inner->broken);
    return status != KVF_OK ? status : ended;
}

kvf_status kvf_masked_fork(kvf_cache *cache, kvf_sequence *parent, kvf_sequence *child,
                           kvf_stream *stream)
{
    const kvf_masked *m = cache->masked;
    kvf_step step;
    KVF_TRY(kvf_step_begin(cache, stream, &step));
    for (uint32_t i = 0; i < m->sizes.parts; i++) {
        kvf_cache *part = m->parts[i].cache;
        const kvf_status status =
            kvf_sequence_fork(part, inner_of(parent)[i], stream, &inner_of(child)[i]);
        if (status != KVF_OK)
            return end_refused(&step, part, status);
    }
    kvf_footprint_fork(cache, parent, child);
    for (uint32_t i = 0; i < cache->config.layers; i++) {
        const kvf_layer *from = &parent->layers[i];
        kvf_layer *to = &child->layers[i];
        uint32_t *positions = to->positions;
        kvf_block *blocks = to->blocks;
        *to = *from;
        to->positions = positions;
        to->blocks = blocks;
        memcpy(positions, from->positions, from->length * sizeof *positions);
    }
    return kvf_step_end(&step, kvf_streaming_fork(&step, parent, child));
}

bool kvf_masked_fault(const kvf_sequence *sequence, uint32_t *layer, uint32_t *token)
{
    const kvf_masked *m = sequence->cache->masked;
    for (uint32_t i = 0; i < m->sizes.parts; i++) {
        const kvf_sequence *inner = inner_of(sequence)[i];
        if (!kvf_sequence_fault(inner, layer, token))
            continue;
        *layer = m->parts[i].layer_of[*layer];
        return true;
    }
    return false;
}

/* ---- calls ---- */

/* Text in terms of the outer cache. */
static kvf_status explain(kvf_cache *cache, kvf_sequence *const *sequences, uint32_t count,
                          kvf_status status)
{
    for (uint32_t b = 0; status == KVF_NOT_FINITE && b < count; b++)
        KVF_TRY(kvf_sequence_check(cache, sequences[b]));
    return status;
}

static void note(kvf_cache *cache, kvf_sequence *sequence, uint32_t layer, uint32_t tokens,
                 const uint32_t *positions)
{
    kvf_layer *state = &sequence->layers[layer];
    kvf_append_note(cache, state, tokens, positions);
    state->sealed = 0;
    kvf_footprint_append(cache, sequence, layer, tokens);
}

static kvf_status prefill_inner(kvf_cache *cache, const kvf_prefill_args *args,
                                const kvf_masked_heads *heads, kvf_stream *stream)
{
    const kvf_masked *m = cache->masked;
    const kvf_masked_layer *layer = &m->layers[args->layer];
    const kvf_prefill_args inner = {.sequence = inner_of(args->sequence)[layer->part],
                                    .layer = layer->inner,
                                    .tokens = args->tokens,
                                    .q = heads->q,
                                    .k = heads->k,
                                    .v = heads->v,
                                    .positions = args->positions,
                                    .out = heads->out};
    return explain(cache, &args->sequence, 1,
                   kvf_prefill(m->parts[layer->part].cache, &inner, stream));
}

kvf_status kvf_masked_prefill(kvf_cache *cache, const kvf_prefill_args *args, kvf_stream *stream)
{
    const kvf_masked *m = cache->masked;
    const kvf_masked_layer *layer = &m->layers[args->layer];
    kvf_step step;
    KVF_TRY(kvf_step_begin(cache, stream, &step));
    step.layer = args->layer;
    kvf_masked_call call = {.step = &step,
                            .layer = layer,
                            .q = args->q,
                            .k = args->k,
                            .v = args->v,
                            .out = args->out,
                            .rows = args->tokens,
                            .is_chunk = true,
                            .is_mixed = layer->retrieval && layer->streaming};
    kvf_streaming_chunk chunk = {0};
    kvf_masked_take_jobs(&call);
    if (layer->streaming)
        chunk = kvf_streaming_take_chunk(&call, args->sequence);
    kvf_status status = kvf_step_send(&step);
    if (status == KVF_OK)
        status = KVF_LAUNCH(&step, heads, call.pack, kvf_heads_tasks(&call.pack));
    if (status == KVF_OK && layer->retrieval) {
        const kvf_masked_heads heads = kvf_masked_heads_of(&call, false);
        status = prefill_inner(cache, args, &heads, stream);
        if (status != KVF_OK)
            return end_refused(&step, m->parts[layer->part].cache, status);
    }
    note(cache, args->sequence, args->layer, args->tokens, args->positions);
    if (status == KVF_OK && layer->streaming)
        status = kvf_streaming_prefill(&call, &chunk);
    if (status == KVF_OK)
        status = KVF_LAUNCH(&step, heads, call.unpack, kvf_heads_tasks(&call.unpack));
    return kvf_step_end(&step, status);
}

static kvf_status check_decode(kvf_cache *cache, const kvf_decode_args *args)
{
    if (!args->k || !args->v)
        KVF_FAIL(cache->context, KVF_INVALID, "k or v is NULL; pass the new keys and values");
    for (uint32_t b = 0; b < args->batch; b++)
        KVF_TRY(kvf_append_check(cache, &args->sequences[b]->layers[args->layer], 1,
                                 args->positions ? args->positions + b : NULL));
    return KVF_OK;
}

static kvf_status decode_inner(kvf_cache *cache, const kvf_decode_args *args,
                               const kvf_masked_heads *heads, kvf_stream *stream)
{
    const kvf_masked *m = cache->masked;
    const kvf_masked_layer *layer = &m->layers[args->layer];
    const kvf_decode_args inner = {.layer = layer->inner,
                                   .batch = args->batch,
                                   .sequences = m->batch,
                                   .q = heads->q,
                                   .k = heads->k,
                                   .v = heads->v,
                                   .positions = args->positions,
                                   .out = heads->out,
                                   .lse = heads->lse};
    for (uint32_t b = 0; b < args->batch; b++)
        m->batch[b] = inner_of(args->sequences[b])[layer->part];
    return explain(cache, args->sequences, args->batch,
                   kvf_decode(m->parts[layer->part].cache, &inner, stream));
}

static void note_step(kvf_cache *cache, const kvf_decode_args *args)
{
    kvf_masked_layer *layer = &cache->masked->layers[args->layer];
    for (uint32_t b = 0; b < args->batch; b++) {
        kvf_layer *state = &args->sequences[b]->layers[args->layer];
        state->steps++;
        note(cache, args->sequences[b], args->layer, 1,
             args->positions ? args->positions + b : NULL);
        layer->attended +=
            (uint64_t)layer->streaming * kvf_masked_streaming_tokens(cache, state->length);
    }
    layer->steps += args->batch;
}

kvf_status kvf_masked_decode(kvf_cache *cache, const kvf_decode_args *args, kvf_stream *stream)
{
    const kvf_masked *m = cache->masked;
    const kvf_masked_layer *layer = &m->layers[args->layer];
    kvf_step step;
    KVF_TRY(check_decode(cache, args));
    KVF_TRY(kvf_step_begin(cache, stream, &step));
    step.layer = args->layer;
    kvf_masked_call call = {.step = &step,
                            .layer = layer,
                            .q = args->q,
                            .k = args->k,
                            .v = args->v,
                            .out = args->out,
                            .lse = args->lse,
                            .rows = args->batch,
                            .is_mixed = layer->retrieval && layer->streaming};
    kvf_masked_take_jobs(&call);
    const kvf_row *row = layer->streaming ? kvf_streaming_take_rows(&call, args->sequences) : NULL;
    kvf_status status = kvf_step_send(&step);
    if (status == KVF_OK)
        status = KVF_LAUNCH(&step, heads, call.pack, kvf_heads_tasks(&call.pack));
    if (status == KVF_OK && layer->retrieval) {
        const kvf_masked_heads heads = kvf_masked_heads_of(&call, false);
        status = decode_inner(cache, args, &heads, stream);
        if (status != KVF_OK)
            return end_refused(&step, m->parts[layer->part].cache, status);
    }
    note_step(cache, args);
    if (status == KVF_OK && layer->streaming)
        status = kvf_streaming_decode(&call, row);
    if (status == KVF_OK)
        status = KVF_LAUNCH(&step, heads, call.unpack, kvf_heads_tasks(&call.unpack));
    return kvf_step_end(&step, status);
}

const void *kvf_masked_page_address(const kvf_sequence *sequence, uint32_t layer, uint32_t kv_head,
                                    uint32_t page)
{
    const kvf_masked_layer *l = &sequence->cache->masked->layers[layer];
    for (uint32_t i = 0; i < l->retrieval; i++)
        if (l->heads[i] == kv_head)
            return kvf_page_address(inner_of(sequence)[l->part], l->inner, i, page);
    return NULL;
}

/* ---- statistics ---- */

static void add_stats(kvf_stats *sum, const kvf_stats *s)
{
    sum->tokens_attended += s->tokens_attended;
    sum->pages_selected += s->pages_selected;
    sum->hits += s->hits;
    sum->misses += s->misses;
    sum->bytes_to_device += s->bytes_to_device;
    sum->bytes_to_host += s->bytes_to_host;
    sum->bytes_refresh += s->bytes_refresh;
    sum->copies += s->copies;
    sum->refreshes += s->refreshes;
    sum->append_ns += s->append_ns;
    sum->score_ns += s->score_ns;
    sum->select_ns += s->select_ns;
    sum->gather_ns += s->gather_ns;
    sum->copy_ns += s->copy_ns;
    sum->attend_ns += s->attend_ns;
    sum->refresh_ns += s->refresh_ns;
    sum->verified += s->verified;
    sum->recall_sum += s->recall_sum;
    sum->error_max = s->error_max > sum->error_max ? s->error_max : sum->error_max;
    sum->static_tokens_min = kvf_min_u32(sum->static_tokens_min, s->static_tokens_min);
    sum->static_tokens_max = kvf_max_u32(sum->static_tokens_max, s->static_tokens_max);
    sum->pages_ahead += s->pages_ahead;
    sum->pages_ahead_used += s->pages_ahead_used;
}

void kvf_masked_stats(const kvf_cache *cache, uint32_t layer, kvf_stats *stats)
{
    const kvf_masked *m = cache->masked;
    const bool is_all = layer == UINT32_MAX;
    kvf_stats part;
    *stats = (kvf_stats){.static_tokens_min = UINT32_MAX};
    for (uint32_t i = 0; is_all && i < m->sizes.parts; i++) {
        kvf_cache_stats(m->parts[i].cache, &part);
        add_stats(stats, &part);
    }
    if (!is_all && m->layers[layer].retrieval) {
        kvf_cache_layer_stats(m->parts[m->layers[layer].part].cache, m->layers[layer].inner, &part);
        add_stats(stats, &part);
    }
    if (stats->static_tokens_min > stats->static_tokens_max)
        stats->static_tokens_min = stats->static_tokens_max;
    for (uint32_t i = is_all ? 0 : layer; i < (is_all ? cache->config.layers : layer + 1); i++) {
        stats->steps += m->layers[i].steps;
        stats->tokens_attended += m->layers[i].attended;
    }
}

void kvf_masked_stats_reset(kvf_cache *cache)
{
    kvf_masked *m = cache->masked;
    for (uint32_t i = 0; i < m->sizes.parts; i++)
        kvf_cache_stats_reset(m->parts[i].cache);
    for (uint32_t i = 0; i < cache->config.layers; i++)
        m->layers[i].steps = m->layers[i].attended = 0;
}
