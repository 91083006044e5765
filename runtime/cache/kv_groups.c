/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Part of kv_group.h. Which KV group a layer is in: without a head mask there is one KV group; with
 * one, a KV group for every number of retrieval heads that a layer has. With a disk tier each has a
 * share of the memory and a file of its own. And opening and closing one: its pool, slots, transfer
 * engine and write-back.
 *
 * Knows nothing of steps. A half-open KV group is closed by the same function as an open one.
 */

#include <string.h>

#include "cache.h"
#include "disk_settings.h"
#include "kv_group.h"
#include "plain_file.h"
#include "rings.h"
#include "runtime.h"
#include "score/score_args.h"

static uint32_t retrieval_heads(const kvf_cache *cache, uint32_t layer)
{
    return cache->config.kv_heads - kvf_streaming_count(cache, layer);
}

/* Layers with r retrieval heads; at most r = kv_heads. */
static uint32_t layers_with(const kvf_cache *cache, uint32_t r)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < cache->config.layers; i++)
        count += retrieval_heads(cache, i) == r;
    return count;
}

/* Settings of the KV group with r heads of a layer, by those that the user gave. */
static kvf_cache_config kv_group_config(const kvf_cache *cache, const kvf_cache_config *config,
                                        uint32_t r)
{
    kvf_cache_config c = *config;
    c.head_mask = NULL;
    c.layer_windows = NULL;
    c.disk_path = cache->config.disk_path;
    c.layers = layers_with(cache, r);
    c.query_heads = config->query_heads / config->kv_heads * r;
    c.kv_heads = r;
    c.observe_window = 0; /* pruning is refused */
    c.disk_bytes = 0;     /* of all files: kvf_disk_plan */
    return c;
}

/* ---- a disk tier: memory for each ---- */

/* All pages, and what of them must be in memory at least. */
typedef struct page_bytes {
    uint64_t all, least;
} page_bytes;

static kvf_status measure(kvf_cache *cache, kvf_cache_config config, page_bytes *out)
{
    kvf_cache_config resolved;
    kvf_dims dims;
    config.disk_path = NULL;
    config.host_bytes = 0;
    KVF_TRY(kvf_config_resolve(cache->runtime, &config, &resolved, &dims));
    const uint64_t least = kvf_disk_memory_least(&config, &dims);
    out->all = (uint64_t)dims.block_count * kvf_stored_block_bytes(&dims.paging);
    out->least = least < out->all ? least : out->all;
    return KVF_OK;
}

static kvf_status measure_all(kvf_cache *cache, const kvf_cache_config *config, page_bytes *sum)
{
    *sum = (page_bytes){0};
    for (uint32_t r = 1; config->disk_path && r <= config->kv_heads; r++) {
        page_bytes kv_group = {0};
        if (layers_with(cache, r))
            KVF_TRY(measure(cache, kv_group_config(cache, config, r), &kv_group));
        sum->all += kv_group.all;
        sum->least += kv_group.least;
    }
    if (config->disk_path && config->host_bytes < sum->least)
        KVF_FAIL(cache->context, KVF_INVALID,
                 "host_bytes = %llu: layers with different numbers of retrieval heads each need "
                 "pages in memory; give at least %llu, or lower tokens_max",
                 (unsigned long long)config->host_bytes, (unsigned long long)sum->least);
    return KVF_OK;
}

/* Its needs, and its share of the rest. */
static kvf_status share_memory(kvf_cache *cache, const page_bytes *sum, kvf_cache_config *config)
{
    page_bytes kv_group;
    if (!config->disk_path)
        return KVF_OK;
    KVF_TRY(measure(cache, *config, &kv_group));
    const double rest = (double)(config->host_bytes - sum->least);
    const uint64_t more = (uint64_t)(rest * ((double)kv_group.all / (double)sum->all));
    config->host_bytes = sum->all <= config->host_bytes ? kv_group.all : kv_group.least + more;
    return KVF_OK;
}

/* ---- KV groups ---- */

/* The name of the folder becomes a copy: settings are read as long as the cache lives. */
static kvf_status own_path(kvf_cache *cache)
{
    kvf_cache_config *c = &cache->config;
    const size_t length = c->disk_path ? strlen(c->disk_path) + 1 : 0;
    if (length == 0)
        return KVF_OK;
    cache->disk_path = kvf_alloc(cache->context, length, 1);
    if (!cache->disk_path)
        KVF_FAIL(cache->context, KVF_OUT_OF_MEMORY, "no memory for the name of a folder");
    c->disk_path = memcpy(cache->disk_path, c->disk_path, length);
    return KVF_OK;
}

/* So do mask and windows. */
static kvf_status own_mask(kvf_cache *cache)
{
    kvf_cache_config *c = &cache->config;
    const size_t cells = (size_t)c->layers * c->kv_heads;
    if (!c->head_mask)
        return KVF_OK;
    cache->head_mask = kvf_alloc(cache->context, cells, sizeof *cache->head_mask);
    cache->layer_windows = kvf_alloc(cache->context, c->layers, sizeof *cache->layer_windows);
    if (!cache->head_mask || !cache->layer_windows)
        KVF_FAIL(cache->context, KVF_OUT_OF_MEMORY, "no memory for a head mask");
    c->head_mask = memcpy(cache->head_mask, c->head_mask, cells);
    if (c->layer_windows)
        c->layer_windows =
            memcpy(cache->layer_windows, c->layer_windows, c->layers * sizeof *c->layer_windows);
    return KVF_OK;
}

/* KV groups of layers with coarse heads keep centroids, of all their heads. */
static void note_coarse(kvf_cache *cache)
{
    for (uint32_t i = 0; i < cache->config.layers; i++) {
        kvf_kv_group *kv_group = cache->layer_groups[i].kv_group;
        if (kv_group && kv_group->policy->scores_pages && kvf_has_coarse_heads(cache, i)) {
            kvf_paging *p = &kv_group->dims.paging;
            p->segments_max = kvf_segments(p->block_size, p->blocks_max);
        }
    }
}

static kvf_kv_group *add_kv_group(kvf_cache *cache)
{
    kvf_kv_group *kv_group = &cache->kv_groups[cache->kv_group_count++];
    *kv_group = (kvf_kv_group){.runtime = cache->runtime,
                               .context = cache->context,
                               .device = cache->device,
                               .order = &cache->order,
                               .policy = kvf_select_find(cache->config.select)};
    return kv_group;
}

/* Layers with r retrieval heads are in this KV group from here on. */
static void place_layers(kvf_cache *cache, kvf_kv_group *kv_group, uint32_t r)
{
    uint32_t index = 0;
    for (uint32_t i = 0; i < cache->config.layers; i++)
        if (retrieval_heads(cache, i) == r)
            cache->layer_groups[i] = (kvf_layer_group){.kv_group = kv_group, .index = index++};
}

/* Layers by their number of retrieval heads. */
static kvf_status divide(kvf_cache *cache, const kvf_cache_config *config)
{
    const uint32_t heads = cache->config.kv_heads;
    page_bytes sum;
    KVF_TRY(measure_all(cache, config, &sum));
    for (uint32_t r = 1; r <= heads; r++) {
        if (layers_with(cache, r) == 0)
            continue;
        kvf_kv_group *kv_group = add_kv_group(cache);
        kvf_cache_config c = kv_group_config(cache, config, r);
        KVF_TRY(share_memory(cache, &sum, &c));
        KVF_TRY(kvf_config_resolve(cache->runtime, &c, &kv_group->config, &kv_group->dims));
        place_layers(cache, kv_group, r);
    }
    for (uint32_t i = 0; i < cache->config.layers; i++)
        cache->layer_groups[i].heads = cache->rings->heads + (size_t)i * heads;
    return KVF_OK;
}

kvf_status kvf_kv_groups_create(kvf_cache *cache, const kvf_cache_config *config,
                                const kvf_dims *dims)
{
    const kvf_cache_config *c = &cache->config;
    KVF_TRY(own_path(cache));
    KVF_TRY(own_mask(cache));
    KVF_TRY(kvf_rings_create(cache, &dims->paging));
    const uint32_t most = cache->rings ? c->kv_heads : 1;
    cache->layer_groups = kvf_alloc(cache->context, c->layers, sizeof *cache->layer_groups);
    cache->kv_groups = kvf_alloc(cache->context, most, sizeof *cache->kv_groups);
    if (!cache->layer_groups || !cache->kv_groups)
        KVF_FAIL(cache->context, KVF_OUT_OF_MEMORY, "no memory for a cache of %u layers",
                 c->layers);
    if (cache->rings) {
        KVF_TRY(divide(cache, config));
        note_coarse(cache);
        return KVF_OK;
    }
    kvf_kv_group *kv_group = add_kv_group(cache);
    kv_group->config = *c;
    kv_group->dims = *dims;
    place_layers(cache, kv_group, c->kv_heads);
    note_coarse(cache);
    return KVF_OK;
}

void kvf_kv_groups_destroy(kvf_cache *cache)
{
    for (uint32_t i = cache->kv_group_count; i-- > 0;)
        kvf_kv_group_close(&cache->kv_groups[i]);
    kvf_free(cache->context, cache->kv_groups);
    kvf_free(cache->context, cache->layer_groups);
    kvf_rings_destroy(cache);
    kvf_free(cache->context, cache->layer_windows);
    kvf_free(cache->context, cache->head_mask);
    kvf_free(cache->context, cache->disk_path);
}

/* ---- one KV group ---- */

/* For a disk tier: whatever earlier calls enqueued is done. */
static kvf_status drain(void *user)
{
    const kvf_kv_group *kv_group = user;
    KVF_TRY(kvf_order_wait(kv_group->order, kv_group->device));
    return kv_group->device->ops->event_wait(kv_group->written);
}

static kvf_status take_pool(kvf_kv_group *kv_group)
{
    const kvf_dims *d = &kv_group->dims;
    kvf_host_memory_config memory = kvf_runtime_memory(kv_group->runtime);
    const size_t block = kvf_stored_block_bytes(&d->paging);
    memory.lower = d->by_block ? "block_count" : memory.lower;
    memory.on_demand = d->on_demand;
    if (!d->page_frames && kv_group->config.disk_path)
        KVF_TRY(kvf_disk_folder_check(kv_group->context, kv_group->config.disk_path));
    if (!d->page_frames)
        return kvf_page_pool_create(kv_group->context, kv_group->device, &memory, NULL, block,
                                    d->block_count, &kv_group->pool);
    const kvf_page_pool_disk disk = {.folder = kv_group->config.disk_path,
                                     .engine = kv_group->runtime->test_hooks.io_engine,
                                     .bundle_blocks = d->bundle_blocks,
                                     .page_frames = d->page_frames,
                                     .groups = kv_group->config.layers + 1,
                                     .drain = drain,
                                     .user = kv_group};
    KVF_TRY(kv_group->device->ops->event_create(kv_group->device, false, &kv_group->chosen));
    KVF_TRY(kv_group->device->ops->event_create(kv_group->device, false, &kv_group->placed));
    return kvf_page_pool_create(kv_group->context, kv_group->device, &memory, &disk, block,
                                d->block_count, &kv_group->pool);
}

static kvf_status take_pages(kvf_kv_group *kv_group)
{
    const kvf_cache_config *c = &kv_group->config;
    KVF_TRY(take_pool(kv_group));
    const kvf_residency shape = kvf_kv_group_residency(kv_group);
    KVF_TRY(kvf_residency_create(&shape, &kv_group->residency));
    kvf_transfer_config transfer = kvf_kv_group_transfer_config(kv_group);
    kvf_transfer_choice choice;
    transfer.pool = &kv_group->pool.memory;
    if (c->transfer == KVF_TRANSFER_AUTO)
        KVF_TRY(
            kvf_runtime_choose(kv_group->runtime, transfer.page_bytes, &choice, &transfer.choice));
    return kvf_transfer_open(kv_group->device, &transfer, &kv_group->transfer);
}

kvf_status kvf_kv_group_open(kvf_kv_group *kv_group)
{
    const kvf_device_ops *ops = kv_group->device->ops;
    KVF_TRY(take_pages(kv_group));
    KVF_TRY(ops->stream_create(kv_group->device, KVF_PRIORITY_LOW, &kv_group->writeback));
    KVF_TRY(ops->event_create(kv_group->device, false, &kv_group->sealed));
    return ops->event_create(kv_group->device, false, &kv_group->written);
}

void kvf_kv_group_close(kvf_kv_group *kv_group)
{
    const kvf_device_ops *ops = kv_group->device->ops;
    ops->stream_destroy(kv_group->writeback);
    kvf_transfer_close(kv_group->transfer);
    ops->event_destroy(kv_group->placed);
    ops->event_destroy(kv_group->chosen);
    ops->event_destroy(kv_group->written);
    ops->event_destroy(kv_group->sealed);
    kvf_residency_destroy(&kv_group->residency);
    kvf_page_pool_destroy(&kv_group->pool);
}
