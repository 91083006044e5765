/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Statistics: what kernels counted, what the host counted, what the transfer engine counted.
 *
 * Knows nothing of how things were counted. Times are differences of stamps in stream order. The
 * transfer engine does not know layers, so its figures are in the totals only.
 */

#include "stats.h"

#include <math.h>

static void copy_counters(const kvf_cache *cache, void *to, const void *from)
{
    const kvf_device_ops *ops = cache->device->ops;
    if (cache->recording)
        return;
    /* What is brought ahead of need is counted beside the stream that the caller has waited for. */
    if (cache->dims.ahead_max && cache->last_done)
        (void)ops->event_wait(cache->last_done);
    if (!cache->dims.needs_mirror)
        return;
    kvf_status status =
        ops->copy(cache->writeback, to, from, cache->config.layers * sizeof(kvf_layer_counters));
    if (status == KVF_OK)
        status = ops->stream_wait(cache->writeback);
    (void)status; /* a device that fails here fails in the caller's next wait too */
}

void kvf_stats_bring(const kvf_cache *cache)
{
    copy_counters(cache, cache->control_device.counters, kvf_counters_device(cache, 0));
}

void kvf_stats_send(const kvf_cache *cache)
{
    copy_counters(cache, kvf_counters_device(cache, 0), cache->control_device.counters);
}

static void add_layer(const kvf_cache *cache, uint32_t layer, kvf_stats *s)
{
    const kvf_layer_counters *c = &cache->control.counters[layer];
    const kvf_layer_host_counters *h = &cache->host_counters[layer];
    const kvf_paging *p = &cache->dims.paging;
    const uint64_t share = p->lists / p->kv_heads; /* lists of a KV head: mean over them */
    const uint64_t page = kvf_page_bytes(&p->shape);
    s->steps += h->steps;
    s->bytes_to_host += h->bytes_to_host;
    s->refreshes += h->refreshes;
    s->tokens_attended += c->tokens_attended / share;
    s->pages_selected += c->pages_selected;
    s->hits += c->hits;
    s->misses += c->misses;
    s->pages_ahead += c->pages_ahead;
    s->pages_ahead_used += c->pages_ahead_used;
    s->bytes_to_device += kvf_moves_pages(cache) ? (c->misses + c->pages_ahead) * page : 0;
    s->bytes_refresh += c->bytes_refresh;
    s->append_ns += c->append_ns;
    s->score_ns += c->score_ns;
    s->select_ns += c->select_ns;
    s->attend_ns += c->attend_ns;
    s->refresh_ns += c->refresh_ns;
    s->verified += c->verified;
    s->recall_sum += c->recall_sum;
    s->error_max = fmax(s->error_max, c->error_max);
    if (c->static_min < s->static_tokens_min)
        s->static_tokens_min = c->static_min;
    if (c->static_max > s->static_tokens_max)
        s->static_tokens_max = c->static_max;
}

static void finish(kvf_stats *s)
{
    if (s->static_tokens_min > s->static_tokens_max)
        s->static_tokens_min = s->static_tokens_max;
}

void kvf_stats_read_layer(const kvf_cache *cache, uint32_t layer, kvf_stats *stats)
{
    *stats = (kvf_stats){.static_tokens_min = UINT32_MAX};
    add_layer(cache, layer, stats);
    finish(stats);
}

void kvf_stats_read(const kvf_cache *cache, kvf_stats *stats)
{
    kvf_transfer_stats moved;
    *stats = (kvf_stats){.static_tokens_min = UINT32_MAX};
    for (uint32_t i = 0; i < cache->config.layers; i++)
        add_layer(cache, i, stats);
    finish(stats);
    kvf_transfer_stats_read(cache->transfer, &moved);
    stats->copies = moved.copies;
    stats->gather_ns = moved.gather_ns;
    stats->copy_ns = moved.copy_ns;
    if (!cache->pool.tier)
        return;
    kvf_disk_stats disk;
    kvf_disk_tier_stats(cache->pool.tier, &disk);
    stats->disk_wanted = disk.wanted;
    stats->disk_reads = disk.read;
    stats->bytes_from_disk = disk.bytes_read;
    stats->bytes_to_disk = disk.bytes_written;
    stats->disk_ahead = disk.ahead;
    stats->disk_ahead_used = disk.ahead_used;
    stats->disk_wait_ns = disk.wait_ns;
    stats->pages_from_disk = cache->pages_from_disk;
}

void kvf_stats_reset(kvf_cache *cache)
{
    const bool is_auto = cache->config.static_ratio == KVF_STATIC_RATIO_AUTO;
    for (uint32_t i = 0; i < cache->config.layers; i++) {
        kvf_layer_counters *c = &cache->control.counters[i];
        const uint32_t low = c->static_min, high = c->static_max;
        const bool has_chosen = is_auto && high && low <= high;
        *c = (kvf_layer_counters){.static_min = is_auto ? UINT32_MAX : cache->dims.static_tokens,
                                  .static_max = is_auto ? 0 : cache->dims.static_tokens};
        if (has_chosen) { /* a choice stays in force, a count does not */
            c->static_min = low;
            c->static_max = high;
        }
        cache->host_counters[i] = (kvf_layer_host_counters){0};
    }
    kvf_transfer_stats_reset(cache->transfer);
    cache->pages_from_disk = 0;
    if (cache->pool.tier)
        kvf_disk_tier_stats_reset(cache->pool.tier);
}
