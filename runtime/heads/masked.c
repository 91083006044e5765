/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A cache with a head mask: sequences with inner ones, who has which pages, sums of statistics.
 *
 * Knows nothing of chunks and steps (masked_step.c), of rings but that a fork copies them, or of
 * what inner caches do.
 */

#include "masked.h"

#include "fork.h"
#include "lists.h"
#include "masked_step.h"
#include "sequence.h"
#include "stats.h"
#include "streaming_heads.h"

/* ---- sequences ---- */

kvf_sequence **kvf_masked_inner(const kvf_sequence *sequence)
{
    const kvf_masked *m = sequence->cache->masked;
    return m->inner + (size_t)sequence->slot * m->sizes.parts;
}

void kvf_masked_end(kvf_sequence *sequence)
{
    const kvf_masked *m = sequence->cache->masked;
    for (uint32_t i = 0; i < m->sizes.parts; i++) {
        if (kvf_masked_inner(sequence)[i])
            kvf_sequence_end(kvf_masked_inner(sequence)[i]);
        kvf_masked_inner(sequence)[i] = NULL;
    }
    kvf_sequence_end(sequence);
}

kvf_status kvf_masked_begin(kvf_cache *cache, kvf_sequence **out)
{
    const kvf_masked *m = cache->masked;
    kvf_sequence *sequence = NULL;
    KVF_TRY(kvf_sequence_begin(cache, &sequence));
    kvf_status status = KVF_OK;
    for (uint32_t i = 0; status == KVF_OK && i < m->sizes.parts; i++)
        status = kvf_sequence_begin(m->parts[i].cache, &kvf_masked_inner(sequence)[i]);
    if (status != KVF_OK) {
        kvf_masked_end(sequence);
        return status;
    }
    *out = sequence;
    return KVF_OK;
}

static kvf_status fork_parts(kvf_cache *cache, kvf_sequence *parent, kvf_sequence *child,
                             kvf_stream *stream)
{
    const kvf_masked *m = cache->masked;
    kvf_step step;
    KVF_TRY(kvf_step_begin(cache, stream, &step));
    for (uint32_t i = 0; i < m->sizes.parts; i++) {
        kvf_cache *part = m->parts[i].cache;
        const kvf_status status =
            kvf_fork(part, kvf_masked_inner(parent)[i], stream, &kvf_masked_inner(child)[i]);
        if (status != KVF_OK)
            return kvf_masked_end_refused(&step, part, status);
    }
    kvf_footprint_fork(cache, parent, child);
    for (uint32_t i = 0; i < cache->config.layers; i++)
        kvf_layer_copy(&child->layers[i], &parent->layers[i]);
    return kvf_step_end(&step, kvf_streaming_fork(&step, parent, child));
}

kvf_status kvf_masked_fork(kvf_cache *cache, kvf_sequence *parent, kvf_stream *stream,
                           kvf_sequence **out)
{
    kvf_sequence *child = NULL;
    KVF_TRY(kvf_sequence_begin(cache, &child));
    const kvf_status status = fork_parts(cache, parent, child, stream);
    if (status != KVF_OK) {
        kvf_masked_end(child);
        return status;
    }
    *out = child;
    return KVF_OK;
}

kvf_status kvf_masked_usable(kvf_cache *cache, const kvf_sequence *sequence)
{
    const kvf_masked *m = cache->masked;
    uint32_t layer, token;
    for (uint32_t i = 0; i < m->sizes.parts; i++)
        if (kvf_sequence_fault(kvf_masked_inner(sequence)[i], &layer, &token))
            return kvf_sequence_fail(cache, m->parts[i].layer_of[layer], token);
    return KVF_OK;
}

kvf_masked_row kvf_masked_row_of(kvf_cache *cache, kvf_sequence *sequence, uint32_t layer)
{
    kvf_cache *const pages = kvf_masked_pages_of(cache, layer);
    if (!pages || pages == cache)
        return (kvf_masked_row){pages, pages ? sequence : NULL, layer};
    const kvf_masked_layer *l = &cache->masked->layers[layer];
    return (kvf_masked_row){pages, kvf_masked_inner(sequence)[l->part], l->inner};
}

kvf_cache *kvf_masked_pages_of(kvf_cache *cache, uint32_t layer)
{
    if (!cache->masked)
        return cache;
    const kvf_masked_layer *l = &cache->masked->layers[layer];
    return l->retrieval ? cache->masked->parts[l->part].cache : NULL;
}

kvf_cache *kvf_masked_pages(kvf_cache *cache, uint32_t index)
{
    if (!cache->masked)
        return index == 0 ? cache : NULL;
    return index < cache->masked->sizes.parts ? cache->masked->parts[index].cache : NULL;
}

bool kvf_masked_has_tier(kvf_cache *cache)
{
    const kvf_cache *pages;
    for (uint32_t n = 0; (pages = kvf_masked_pages(cache, n)) != NULL; n++)
        if (pages->pool.tier)
            return true;
    return false;
}

/* ---- pages ---- */

const void *kvf_masked_page_address(const kvf_sequence *sequence, uint32_t layer, uint32_t kv_head,
                                    uint32_t page)
{
    const kvf_masked_layer *l = &sequence->cache->masked->layers[layer];
    for (uint32_t i = 0; i < l->retrieval; i++)
        if (l->heads[i] == kv_head)
            return kvf_lists_page_address(kvf_masked_inner(sequence)[l->part], l->inner, i, page);
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
    sum->disk_wanted += s->disk_wanted;
    sum->disk_reads += s->disk_reads;
    sum->bytes_from_disk += s->bytes_from_disk;
    sum->bytes_to_disk += s->bytes_to_disk;
    sum->disk_ahead += s->disk_ahead;
    sum->disk_ahead_used += s->disk_ahead_used;
    sum->pages_from_disk += s->pages_from_disk;
    sum->disk_wait_ns += s->disk_wait_ns;
}

/* What streaming heads count, and the end of a sum. */
static void finish_stats(const kvf_cache *cache, uint32_t first, uint32_t end, kvf_stats *stats)
{
    const kvf_masked *m = cache->masked;
    stats->static_tokens_min = kvf_min_u32(stats->static_tokens_min, stats->static_tokens_max);
    for (uint32_t i = first; i < end; i++) {
        stats->steps += m->layers[i].steps;
        stats->tokens_attended += m->layers[i].attended;
    }
}

void kvf_masked_stats(const kvf_cache *cache, kvf_stats *stats)
{
    const kvf_masked *m = cache->masked;
    kvf_stats part;
    *stats = (kvf_stats){.static_tokens_min = UINT32_MAX};
    for (uint32_t i = 0; i < m->sizes.parts; i++) {
        kvf_stats_bring(m->parts[i].cache);
        kvf_stats_read(m->parts[i].cache, &part);
        add_stats(stats, &part);
    }
    finish_stats(cache, 0, cache->config.layers, stats);
}

void kvf_masked_layer_stats(const kvf_cache *cache, uint32_t layer, kvf_stats *stats)
{
    const kvf_masked_layer *l = &cache->masked->layers[layer];
    kvf_stats part;
    *stats = (kvf_stats){.static_tokens_min = UINT32_MAX};
    if (l->retrieval) {
        const kvf_cache *pages = cache->masked->parts[l->part].cache;
        kvf_stats_bring(pages);
        kvf_stats_read_layer(pages, l->inner, &part);
        add_stats(stats, &part);
    }
    finish_stats(cache, layer, layer + 1, stats);
}

void kvf_masked_stats_reset(kvf_cache *cache)
{
    kvf_masked *m = cache->masked;
    for (uint32_t i = 0; i < m->sizes.parts; i++) {
        kvf_cache *pages = m->parts[i].cache;
        kvf_stats_bring(pages);
        kvf_stats_reset(pages);
        kvf_stats_send(pages);
        kvf_footprint_reset(pages);
    }
    for (uint32_t i = 0; i < cache->config.layers; i++)
        m->layers[i].steps = m->layers[i].attended = 0;
}
