/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Appending tokens, on the host: limits, blocks, positions; see the header.
 *
 * Knows nothing of the device. A block is acquired when the tokens that seal it are appended, and
 * what it will have in it is put there by whoever seals it.
 */

#include "append.h"

#include <string.h>

#include "addressable.h"

kvf_status kvf_append_full(const kvf_kv_group *kv_group)
{
    KVF_FAIL(kv_group->context, KVF_FULL,
             "host_tokens_max = %llu: all %u blocks of the pool are in use; destroy a sequence, or "
             "open the cache with more",
             (unsigned long long)kv_group->config.host_tokens_max, kv_group->dims.block_count);
}

kvf_status kvf_append_reserve(kvf_layer *layer, uint32_t tokens)
{
    kvf_kv_group *kv_group = layer->kv_group;
    const uint32_t sealed = kvf_sealed_blocks(kv_group, layer->extent.length + tokens);
    for (uint32_t p = kvf_max_u32(layer->extent.sealed, layer->cut.held); p < sealed; p++) {
        const kvf_block before = p ? layer->blocks[p - 1] : KVF_BLOCK_NONE;
        if (kvf_page_pool_acquire_near(&kv_group->pool, before, &layer->blocks[p]) == KVF_OK)
            continue;
        kvf_append_release(layer, p);
        return kvf_append_full(kv_group);
    }
    return KVF_OK;
}

kvf_status kvf_append_acquire(kvf_layer *layer, uint32_t tokens)
{
    const uint32_t sealed = kvf_sealed_blocks(layer->kv_group, layer->extent.length + tokens);
    KVF_TRY(kvf_append_reserve(layer, tokens));
    if (sealed <= layer->extent.sealed)
        return KVF_OK;
    const kvf_status status = kvf_addressable_fresh(
        layer->kv_group, layer->blocks + layer->extent.sealed, sealed - layer->extent.sealed);
    if (status != KVF_OK)
        kvf_append_release(layer, sealed);
    return status;
}

void kvf_append_release(kvf_layer *layer, uint32_t end)
{
    for (uint32_t p = end; p-- > kvf_max_u32(layer->extent.sealed, layer->cut.held);)
        kvf_page_pool_release(&layer->kv_group->pool, layer->blocks[p]);
}

kvf_status kvf_append_check(kvf_cache *cache, const kvf_layer *layer, uint32_t tokens,
                            const uint32_t *positions)
{
    if (tokens > cache->config.tokens_max - layer->extent.length)
        KVF_FAIL(cache->context, KVF_FULL,
                 "tokens_max = %u: the sequence holds %u tokens and %u more do not fit; open the "
                 "cache with more",
                 cache->config.tokens_max, layer->extent.length, tokens);
    uint32_t last = layer->extent.length ? layer->positions[layer->extent.length - 1] : 0;
    uint32_t has_last = layer->extent.length > 0;
    for (uint32_t i = 0; positions && i < tokens; i++) {
        if (has_last && positions[i] <= last)
            KVF_FAIL(cache->context, KVF_INVALID,
                     "positions[%u] = %u: must be above %u, the position of the token before", i,
                     positions[i], last);
        last = positions[i];
        has_last = 1;
    }
    /* The position after the last one must be a number, too. */
    const uint64_t end = positions ? (uint64_t)last + 1 : (uint64_t)last + has_last + tokens;
    if (end > UINT32_MAX)
        KVF_FAIL(cache->context, KVF_INVALID,
                 "positions[%u] = %llu: at most %u are known; begin at a lower one", tokens - 1,
                 (unsigned long long)end - 1, UINT32_MAX - 1);
    return KVF_OK;
}

void kvf_append_note(kvf_layer *layer, uint32_t tokens, const uint32_t *positions)
{
    uint32_t next = layer->extent.length ? layer->positions[layer->extent.length - 1] + 1 : 0;
    for (uint32_t i = 0; i < tokens; i++)
        layer->positions[layer->extent.length + i] = positions ? positions[i] : next + i;
    memset(layer->by_step + layer->extent.length, 0, tokens);
    kvf_extent_append(
        &layer->extent, tokens,
        layer->kv_group ? kvf_sealed_blocks(layer->kv_group, layer->extent.length + tokens) : 0);
}
