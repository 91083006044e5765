/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Counting entries over steps: sums of lengths in closed form.
 *
 * Knows nothing of kernels. A token is one entry per KV head; a streaming head holds at most its
 * first and newest tokens, whatever the layer's length.
 */

#include "cache.h"

/* ---- what lengths mean ---- */

/* 1 + 2 + ... + n */
static uint64_t sum_to(uint64_t n)
{
    return n * (n + 1) / 2;
}

/* Entries of a layer by its length. */
typedef struct holder {
    uint32_t retrieval, streaming; /* KV heads */
    uint64_t ring;                 /* tokens of a streaming head */
    uint32_t block;
    uint32_t local;      /* newest tokens: at least so many are not sealed */
    uint64_t sealed_max; /* sealed tokens of a retrieval head that the device may hold as well */
} holder;

void kvf_footprint_shape(kvf_cache *cache, uint32_t layer)
{
    const kvf_kv_group *kv_group = cache->layer_groups[layer].kv_group;
    const uint32_t retrieval = kv_group ? kv_group->config.kv_heads : 0;
    kvf_footprint_layer *shape = &cache->footprint.layers[layer];
    *shape = (kvf_footprint_layer){.retrieval = retrieval,
                                   .streaming = cache->config.kv_heads - retrieval};
    if (kv_group)
        shape->chosen = kv_group->dims.static_tokens;
    if (kv_group && kvf_moves_pages(kv_group)) {
        const kvf_paging *p = &kv_group->dims.paging;
        const uint64_t rows = (uint64_t)cache->config.sequences_max * kv_group->config.layers;
        shape->chosen += (uint64_t)p->slots * p->shape.page_size / rows;
    }
}

/* The sink is always on the device; static set and a row's share of the slots are filled from the
 * first decode step on, and count as full. */
static holder holder_of(const kvf_cache *cache, const kvf_layer *state, uint32_t layer)
{
    const kvf_cache_config *c = &cache->config;
    const kvf_footprint_layer *shape = &cache->footprint.layers[layer];
    return (holder){.retrieval = shape->retrieval,
                    .streaming = shape->streaming,
                    .ring = (uint64_t)c->streaming_sink + kvf_streaming_recent(c, layer),
                    .block = cache->plan.block_size,
                    .local = c->local_tokens,
                    .sealed_max = c->sink_tokens + (state->steps ? shape->chosen : 0)};
}

static uint64_t ring_at(const holder *h, uint64_t length)
{
    return length < h->ring ? length : h->ring;
}

/* Sum of ring_at over lengths 1 .. length. */
static uint64_t ring_sum(const holder *h, uint64_t length)
{
    const uint64_t ramp = ring_at(h, length);
    return sum_to(ramp) + (length - ramp) * h->ring;
}

static uint64_t sealed_at(const holder *h, uint64_t length)
{
    return length < h->local ? 0 : (length - h->local) / h->block * h->block;
}

static uint64_t device_at(const holder *h, uint64_t length)
{
    const uint64_t sealed = sealed_at(h, length);
    return length - sealed + (sealed < h->sealed_max ? sealed : h->sealed_max);
}

/* Sum over y < count of y, rounded down to blocks. */
static uint64_t sum_rounded(uint64_t block, uint64_t count)
{
    const uint64_t whole = count / block, rest = count % block;
    return whole == 0 ? 0 : block * (block * (whole * (whole - 1) / 2) + rest * whole);
}

/* Sum of device_at over lengths 1 .. length. */
static uint64_t device_sum(const holder *h, uint64_t length)
{
    const uint64_t counts = length < h->local ? 0 : length - h->local + 1; /* lengths from local on
                                                                            */
    const uint64_t below =
        (h->sealed_max / h->block + 1) * h->block; /* with sealed <= sealed_max */
    const uint64_t full = counts < below ? counts : below;
    return sum_to(length) - sum_rounded(h->block, counts) + sum_rounded(h->block, full) +
           (counts - full) * h->sealed_max;
}

/* Sums over all KV heads of a layer. */
static uint64_t held_entries(const holder *h, uint64_t length)
{
    return h->retrieval * length + h->streaming * ring_at(h, length);
}

static uint64_t device_entries(const holder *h, uint64_t length)
{
    return h->retrieval * device_at(h, length) + h->streaming * ring_at(h, length);
}

static uint64_t held_entries_sum(const holder *h, uint64_t length)
{
    return h->retrieval * sum_to(length) + h->streaming * ring_sum(h, length);
}

static uint64_t device_entries_sum(const holder *h, uint64_t length)
{
    return h->retrieval * device_sum(h, length) + h->streaming * ring_sum(h, length);
}

/* Highest device_entries over lengths first .. last: at the end, or just before the last page that
 * was sealed. */
static uint64_t device_highest(const holder *h, uint64_t first, uint64_t last)
{
    const uint64_t at_end = device_entries(h, last);
    if (last < h->local)
        return at_end;
    const uint64_t before = last - (last - h->local) % h->block - 1;
    if (before < first || before > last)
        return at_end;
    const uint64_t at_seal = device_entries(h, before);
    return at_seal > at_end ? at_seal : at_end;
}

/* ---- counting ---- */

static kvf_footprint_row *row_of(const kvf_cache *cache, const kvf_sequence *sequence,
                                 uint32_t layer)
{
    return &cache->footprint.rows[(size_t)sequence->slot * cache->config.layers + layer];
}

static kvf_footprint_span *span_of(const kvf_cache *cache, const kvf_sequence *sequence)
{
    return &cache->footprint.spans[sequence->slot];
}

/* Steps that a sequence is through, full attention's way. */
static uint64_t steps_of(const kvf_cache *cache, const kvf_sequence *sequence)
{
    uint32_t seen = 0;
    for (uint32_t i = 0; i < cache->config.layers; i++)
        seen = kvf_max_u32(seen, row_of(cache, sequence, i)->seen);
    return span_of(cache, sequence)->again + seen;
}

static void raise_to(uint64_t *most, uint64_t value)
{
    if (value > *most)
        *most = value;
}

/* Steps at each of which the length is one more than at the one before: first .. last. */
static void count_ramp(kvf_cache *cache, kvf_footprint_row *row, const holder *h, uint32_t first,
                       uint32_t last)
{
    const uint64_t before = first - 1;
    cache->footprint.entry_steps += held_entries_sum(h, last) - held_entries_sum(h, before);
    cache->footprint.device_entry_steps +=
        device_entries_sum(h, last) - device_entries_sum(h, before);
    raise_to(&row->held_max, held_entries(h, last));
    raise_to(&row->device_max, device_highest(h, first, last));
}

/* Steps of tokens that this layer never gets. */
static void count_still(kvf_cache *cache, const holder *h, uint32_t length, uint64_t steps)
{
    cache->footprint.entry_steps += steps * held_entries(h, length);
    cache->footprint.device_entry_steps += steps * device_entries(h, length);
}

void kvf_footprint_append(kvf_cache *cache, const kvf_sequence *sequence, uint32_t layer,
                          uint32_t tokens)
{
    const kvf_layer *state = &sequence->layers[layer];
    kvf_footprint_row *row = row_of(cache, sequence, layer);
    const uint32_t base = state->extent.length - tokens;
    const uint32_t *positions = state->positions + base;
    const uint32_t last = positions[tokens - 1];
    const holder h = holder_of(cache, state, layer);
    if (positions[0] > row->seen)
        count_still(cache, &h, base, positions[0] - row->seen);
    count_ramp(cache, row, &h, base + 1, state->extent.length);
    if (last - positions[0] != tokens - 1)
        for (uint32_t i = 1; i < tokens; i++)
            count_still(cache, &h, base + i, positions[i] - positions[i - 1] - 1);
    row->seen = last + 1;
}

void kvf_footprint_rewind(kvf_cache *cache, const kvf_sequence *sequence, uint32_t layer,
                          uint32_t tokens)
{
    kvf_footprint_row *row = row_of(cache, sequence, layer);
    KVF_ASSERT(tokens <= row->seen);
    row->seen -= tokens;
}

void kvf_footprint_cut(kvf_cache *cache, const kvf_sequence *sequence, uint32_t layer)
{
    const kvf_layer *state = &sequence->layers[layer];
    row_of(cache, sequence, layer)->seen =
        state->extent.length ? state->positions[state->extent.length - 1] + 1 : 0;
}

/* ---- sequences ---- */

static void clear_rows(kvf_cache *cache, const kvf_sequence *sequence)
{
    for (uint32_t i = 0; i < cache->config.layers; i++)
        *row_of(cache, sequence, i) = (kvf_footprint_row){0};
}

void kvf_footprint_begin(kvf_cache *cache, const kvf_sequence *sequence)
{
    clear_rows(cache, sequence);
    *span_of(cache, sequence) = (kvf_footprint_span){0};
}

void kvf_footprint_fork(kvf_cache *cache, const kvf_sequence *parent, const kvf_sequence *child)
{
    *span_of(cache, child) = (kvf_footprint_span){.first = steps_of(cache, parent),
                                                  .again = span_of(cache, parent)->again};
    for (uint32_t i = 0; i < cache->config.layers; i++)
        *row_of(cache, child, i) = (kvf_footprint_row){.seen = row_of(cache, parent, i)->seen};
}

void kvf_footprint_restore(kvf_cache *cache, const kvf_sequence *sequence)
{
    for (uint32_t i = 0; i < cache->config.layers; i++) {
        const kvf_layer *layer = &sequence->layers[i];
        *row_of(cache, sequence, i) = (kvf_footprint_row){
            .seen = layer->extent.length ? layer->positions[layer->extent.length - 1] + 1 : 0};
    }
    *span_of(cache, sequence) = (kvf_footprint_span){0};
    span_of(cache, sequence)->first = steps_of(cache, sequence);
}

void kvf_footprint_restart(kvf_cache *cache, const kvf_sequence *sequence, uint32_t tokens)
{
    const uint64_t steps = steps_of(cache, sequence);
    KVF_ASSERT(tokens <= steps);
    span_of(cache, sequence)->again = steps - tokens;
    for (uint32_t i = 0; i < cache->config.layers; i++)
        row_of(cache, sequence, i)->seen = 0;
}

/* A sequence's part of the sums of full attention, and its peaks. */
static void add_sequence(const kvf_cache *cache, const kvf_sequence *sequence, kvf_footprint *f)
{
    const uint64_t steps = steps_of(cache, sequence), first = span_of(cache, sequence)->first;
    const uint64_t heads = (uint64_t)cache->config.layers * cache->config.kv_heads;
    if (steps <= first)
        return;
    f->steps += steps - first;
    f->full_entry_steps += heads * (sum_to(steps) - sum_to(first));
    f->full_entries += heads * steps;
    for (uint32_t i = 0; i < cache->config.layers; i++) {
        const kvf_footprint_row *row = row_of(cache, sequence, i);
        f->peak_entries += row->held_max;
        f->device_peak_entries += row->device_max;
    }
}

void kvf_footprint_end(kvf_cache *cache, const kvf_sequence *sequence)
{
    add_sequence(cache, sequence, &cache->footprint.ended);
}

void kvf_footprint_reset(kvf_cache *cache)
{
    kvf_footprint_meter *meter = &cache->footprint;
    meter->entry_steps = meter->device_entry_steps = 0;
    meter->ended = (kvf_footprint){0};
    for (uint32_t s = 0; s < cache->config.sequences_max; s++) {
        const kvf_sequence *sequence = &cache->sequences[s];
        if (!sequence->is_alive)
            continue;
        span_of(cache, sequence)->first = steps_of(cache, sequence);
        for (uint32_t i = 0; i < cache->config.layers; i++)
            *row_of(cache, sequence, i) =
                (kvf_footprint_row){.seen = row_of(cache, sequence, i)->seen};
    }
}

/* ---- reading ---- */

static double share(uint64_t part, uint64_t whole)
{
    return whole ? (double)part / (double)whole : 0.0;
}

void kvf_footprint_read(const kvf_cache *cache, kvf_footprint *footprint)
{
    const kvf_footprint_meter *meter = &cache->footprint;
    kvf_footprint f = meter->ended;
    for (uint32_t s = 0; s < cache->config.sequences_max; s++)
        if (cache->sequences[s].is_alive)
            add_sequence(cache, &cache->sequences[s], &f);
    f.entry_steps = meter->entry_steps;
    f.device_entry_steps = meter->device_entry_steps;
    f.footprint = share(f.entry_steps, f.full_entry_steps);
    f.device = share(f.device_entry_steps, f.full_entry_steps);
    f.host = share(f.entry_steps - f.device_entry_steps, f.full_entry_steps);
    f.peak = share(f.peak_entries, f.full_entries);
    f.device_peak = share(f.device_peak_entries, f.full_entries);
    *footprint = f;
}
