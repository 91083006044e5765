/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The settings of a disk tier: what they may be, and how many bundles, page frames and bytes of a
 * file follow from them; see the header.
 *
 * Knows sizes alone: no file, no read, no step.
 */

#include "disk_settings.h"

#include "disk_tier.h"

kvf_status kvf_disk_check(kvf_context *context, const kvf_cache_config *c)
{
    if (!c->disk_path && (c->host_bytes || c->disk_bytes))
        KVF_FAIL(context, KVF_INVALID,
                 "%s = %llu: without disk_path all pages stay in memory; name a folder, or leave "
                 "it 0 and set host_tokens_max",
                 c->host_bytes ? "host_bytes" : "disk_bytes",
                 (unsigned long long)(c->host_bytes ? c->host_bytes : c->disk_bytes));
    if (c->disk_path && c->host_bytes == 0)
        KVF_FAIL(context, KVF_INVALID,
                 "host_bytes = 0: with disk_path it is the memory for pages; "
                 "set it, or leave disk_path NULL");
    return KVF_OK;
}

static kvf_status check_file(kvf_context *context, const kvf_cache_config *c, uint64_t bytes)
{
    if (!c->disk_bytes || bytes <= c->disk_bytes)
        return KVF_OK;
    KVF_FAIL(context, KVF_INVALID,
             "disk_bytes = %llu: host_tokens_max = %llu tokens take %llu bytes; raise it, or "
             "lower host_tokens_max",
             (unsigned long long)c->disk_bytes, (unsigned long long)c->host_tokens_max,
             (unsigned long long)bytes);
}

/* Page frames of bundles that one call may need: a row that is looked at in full, or the newest
 * blocks of every layer of a sequence. */
static uint32_t page_frames_least(const kvf_cache_config *c, const kvf_dims *d)
{
    const uint32_t row = kvf_div_ceil_u32(d->paging.blocks_max, d->bundle_blocks) + 2;
    const uint32_t ends =
        c->layers * (kvf_div_ceil_u32(d->paging.ring_blocks, d->bundle_blocks) + 1);
    return kvf_max_u32(kvf_max_u32(row, ends), KVF_DISK_FRAMES_LEAST);
}

static uint32_t bundle_blocks(const kvf_cache_config *c, size_t block)
{
    const size_t least = c->disk_bundle_bytes ? c->disk_bundle_bytes : KVF_DISK_BUNDLE_MIN;
    return (uint32_t)((least + block - 1) / block);
}

uint64_t kvf_disk_memory_least(const kvf_cache_config *config, const kvf_dims *dims)
{
    const size_t block = kvf_stored_block_bytes(&dims->paging);
    kvf_dims d = *dims;
    d.bundle_blocks = bundle_blocks(config, block);
    return (uint64_t)page_frames_least(config, &d) *
           kvf_page_pool_bundle_bytes(block, d.bundle_blocks);
}

kvf_status kvf_disk_count(kvf_context *context, const kvf_cache_config *c, kvf_dims *dims)
{
    const size_t block = kvf_stored_block_bytes(&dims->paging);
    const uint64_t in_memory = dims->block_count;
    dims->bundle_blocks = 1;
    if (!c->disk_path || kvf_config_has_heads(c, KVF_HEAD_STREAMING) ||
        in_memory * block <= c->host_bytes)
        return KVF_OK;
    dims->bundle_blocks = bundle_blocks(c, block);
    const size_t bundle = kvf_page_pool_bundle_bytes(block, dims->bundle_blocks);
    /* The last bundle of a layer is not full. */
    const uint64_t blocks =
        in_memory + (uint64_t)c->sequences_max * c->layers * (dims->bundle_blocks - 1);
    const uint64_t bundles = (blocks + dims->bundle_blocks - 1) / dims->bundle_blocks;
    if (bundles * dims->bundle_blocks >= UINT32_MAX)
        KVF_FAIL(context, KVF_INVALID,
                 "disk_bundle_bytes = %u: %llu bundles of %u blocks are more than %u blocks; lower "
                 "it or host_tokens_max",
                 c->disk_bundle_bytes, (unsigned long long)bundles, dims->bundle_blocks,
                 UINT32_MAX - 1);
    KVF_TRY(check_file(context, c, bundles * bundle));
    if (c->host_bytes / bundle < page_frames_least(c, dims))
        KVF_FAIL(context, KVF_INVALID,
                 "host_bytes = %llu: a call may need %u bundles of %zu bytes in memory; give at "
                 "least %llu, or lower tokens_max",
                 (unsigned long long)c->host_bytes, page_frames_least(c, dims), bundle,
                 (unsigned long long)page_frames_least(c, dims) * bundle);
    dims->block_count = (uint32_t)(bundles * dims->bundle_blocks);
    const uint64_t page_frames = c->host_bytes / bundle;
    dims->page_frames = (uint32_t)(page_frames < bundles ? page_frames : bundles);
    return KVF_OK;
}

/* The same for all KV groups of a size; a KV group that is in memory whole has no file. */
static void add_file(kvf_cache_plan *plan, const kvf_dims *d)
{
    const size_t bundle =
        kvf_page_pool_bundle_bytes(kvf_stored_block_bytes(&d->paging), d->bundle_blocks);
    if (!d->page_frames)
        return;
    plan->disk_bundle_bytes = kvf_max_u32(plan->disk_bundle_bytes, (uint32_t)bundle);
    plan->disk_bytes += (uint64_t)(d->block_count / d->bundle_blocks) * bundle;
}

kvf_status kvf_disk_plan(kvf_cache *cache)
{
    const kvf_cache_config *c = &cache->config;
    for (uint32_t i = 0; i < cache->kv_group_count; i++)
        add_file(&cache->plan, &cache->kv_groups[i].dims);
    return check_file(cache->context, c, cache->plan.disk_bytes);
}
