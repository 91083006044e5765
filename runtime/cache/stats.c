/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Part of cache.h. Statistics: what kernels counted, what the host counted, what the transfer
 * engine counted.
 *
 * Knows nothing of how things were counted. Times are differences of stamps in stream order. The
 * transfer engine does not know layers, so its figures are in the totals only.
 */

#include "cache.h"

#include <math.h>

static kvf_status copy_counters(const kvf_cache *cache, const kvf_kv_group *kv_group, void *to,
                                const void *from)
{
    const kvf_device_ops *ops = cache->device->ops;
    if (cache->recording || !kv_group->dims.needs_mirror)
        return KVF_OK;
    KVF_TRY(ops->copy(kv_group->writeback, to, from,
                      kv_group->config.layers * sizeof(kvf_layer_counters)));
    return ops->stream_wait(kv_group->writeback);
}

/*
 * Whether all counters are here. After a refused wait they may still be written, so nobody reads
 * them; a device that fails here fails in the caller's next wait too.
 */
static bool bring(const kvf_cache *cache)
{
    bool is_here = true;
    for (uint32_t i = 0; i < cache->kv_group_count && is_here; i++) {
        const kvf_kv_group *kv_group = &cache->kv_groups[i];
        is_here = copy_counters(cache, kv_group, kv_group->control_device.counters,
                                kvf_counters_device(kv_group, 0)) == KVF_OK;
    }
    return is_here;
}

/* Counters that kernels keep of the layer's pages. */
static void add_counters(const kvf_kv_group *kv_group, uint32_t index, kvf_stats *s)
{
    const kvf_layer_counters *c = &kv_group->control.counters[index];
    const kvf_paging *p = &kv_group->dims.paging;
    const uint64_t share = p->lists / p->kv_heads; /* lists of a KV head: mean over them */
    const uint64_t page = kvf_stored_page_bytes(&p->shape);
    s->tokens_attended += c->tokens_attended / share;
    s->pages_selected += c->pages_selected;
    s->hits += c->hits;
    s->misses += c->misses;
    s->bytes_to_device += kvf_moves_pages(kv_group) ? c->misses * page : 0;
    s->bytes_refresh += c->bytes_refresh;
    s->bytes_prompt += c->bytes_prompt;
    s->append_ns += c->append_ns;
    s->score_ns += c->score_ns;
    s->select_ns += c->select_ns;
    s->attend_ns += c->attend_ns;
    s->refresh_ns += c->refresh_ns;
    s->verified += c->verified;
    s->recall_sum += c->recall_sum;
    s->error_max = fmax(s->error_max, c->error_max);
    s->static_tokens_min = kvf_min_u32(s->static_tokens_min, c->static_min);
    s->static_tokens_max = kvf_max_u32(s->static_tokens_max, c->static_max);
}

static void add_layer(const kvf_cache *cache, uint32_t layer, bool is_here, kvf_stats *s)
{
    const kvf_layer_group *at = &cache->layer_groups[layer];
    const kvf_layer_host_counters *h = &cache->counters[layer];
    s->steps += h->steps;
    s->bytes_to_host += h->bytes_to_host;
    s->refreshes += h->refreshes;
    s->tokens_attended += h->streamed;
    s->tokens_held += h->held;
    if (at->kv_group && is_here)
        add_counters(at->kv_group, at->index, s);
}

static void add_kv_group(const kvf_kv_group *kv_group, kvf_stats *s)
{
    kvf_transfer_stats moved;
    kvf_transfer_stats_read(kv_group->transfer, &moved);
    s->copies += moved.copies;
    s->gather_ns += moved.gather_ns;
    s->copy_ns += moved.copy_ns;
    kvf_disk_stats disk;
    kvf_page_pool_stats(&kv_group->pool, &disk);
    s->disk_wanted += disk.wanted;
    s->disk_reads += disk.read;
    s->bytes_from_disk += disk.bytes_read;
    s->bytes_to_disk += disk.bytes_written;
    s->disk_wait_ns += disk.wait_ns;
    s->pages_from_disk += kv_group->pages_brought;
}

/* Layers first .. end-1. */
static void read_layers(const kvf_cache *cache, uint32_t first, uint32_t end, kvf_stats *s)
{
    *s = (kvf_stats){.static_tokens_min = UINT32_MAX};
    const bool is_here = bring(cache);
    for (uint32_t i = first; i < end; i++)
        add_layer(cache, i, is_here, s);
    s->static_tokens_min = kvf_min_u32(s->static_tokens_min, s->static_tokens_max);
}

void kvf_stats_read_layer(const kvf_cache *cache, uint32_t layer, kvf_stats *stats)
{
    read_layers(cache, layer, layer + 1, stats);
}

void kvf_stats_read(const kvf_cache *cache, kvf_stats *stats)
{
    read_layers(cache, 0, cache->config.layers, stats);
    for (uint32_t i = 0; i < cache->kv_group_count; i++)
        add_kv_group(&cache->kv_groups[i], stats);
}

static kvf_status clear_kv_group(const kvf_cache *cache, kvf_kv_group *kv_group)
{
    const bool is_auto = kv_group->config.static_ratio == KVF_STATIC_RATIO_AUTO;
    for (uint32_t i = 0; i < kv_group->config.layers; i++) {
        kvf_layer_counters *c = &kv_group->control.counters[i];
        const uint32_t low = c->static_min, high = c->static_max;
        const bool has_chosen = is_auto && high && low <= high;
        *c = (kvf_layer_counters){.static_min = is_auto ? UINT32_MAX : kv_group->dims.static_tokens,
                                  .static_max = is_auto ? 0 : kv_group->dims.static_tokens};
        if (has_chosen) { /* a choice stays in force, a count does not */
            c->static_min = low;
            c->static_max = high;
        }
    }
    kvf_transfer_stats_reset(kv_group->transfer);
    kv_group->pages_brought = 0;
    kvf_page_pool_stats_reset(&kv_group->pool);
    return copy_counters(cache, kv_group, kvf_counters_device(kv_group, 0),
                         kv_group->control_device.counters);
}

kvf_status kvf_stats_clear(kvf_cache *cache)
{
    kvf_status status = KVF_OK;
    for (uint32_t i = 0; i < cache->kv_group_count; i++) {
        const kvf_status cleared = clear_kv_group(cache, &cache->kv_groups[i]);
        status = status == KVF_OK ? cleared : status;
    }
    for (uint32_t i = 0; i < cache->config.layers; i++)
        cache->counters[i] = (kvf_layer_host_counters){0};
    return status;
}

void kvf_stats_reset(kvf_cache *cache)
{
    if (bring(cache))
        (void)!kvf_stats_clear(cache); /* as in bring */
}
