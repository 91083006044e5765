/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Part of cache.h. Sequences: slots of a cache that are alive, and their blocks.
 *
 * Knows nothing of attention. An ended sequence gives its blocks back at once: whoever gets them
 * writes them later in the order of the cache's work, after every reader that is still enqueued.
 */

#include "cache.h"

#include <string.h>

#define GENERATION_FIRST 0xffffeu /* of 20 bits; all ones marks a word without fault */

static kvf_sequence *find_free(kvf_cache *cache)
{
    for (uint32_t i = 0; i < cache->config.sequences_max; i++)
        if (!cache->sequences[i].is_alive)
            return &cache->sequences[i];
    return NULL;
}

/* Fields that are set once stay. */
static void replace(kvf_layer *layer, const kvf_layer *by)
{
    const kvf_layer before = *layer;
    *layer = *by;
    layer->kv_group = before.kv_group;
    layer->index = before.index;
    layer->row = before.row;
    layer->ring = before.ring;
    layer->fault = before.fault;
    layer->blocks = before.blocks;
    layer->positions = before.positions;
    layer->by_step = before.by_step;
    layer->fault_key = before.fault_key;
}

static void validate_layer(kvf_layer *layer)
{
    replace(layer, &(kvf_layer){.is_fresh = 1, .refresh.needs_exact = 1});
}

/* A new generation; after a million of them, wait until no older one can report any more. */
static kvf_status refill(kvf_cache *cache, kvf_sequence *sequence)
{
    if (sequence->generation == 0) {
        KVF_TRY(kvf_order_wait(&cache->order, cache->device));
        __atomic_store_n(&cache->words.faults[sequence->slot], UINT64_MAX, __ATOMIC_RELAXED);
        sequence->generation = GENERATION_FIRST;
    } else {
        sequence->generation--;
    }
    sequence->is_alive = 1;
    for (uint32_t i = 0; i < cache->config.layers; i++) {
        validate_layer(&sequence->layers[i]);
        sequence->layers[i].fault_key = sequence->generation << 12 | i;
    }
    return KVF_OK;
}

kvf_status kvf_sequence_begin(kvf_cache *cache, kvf_sequence **out)
{
    kvf_sequence *sequence = find_free(cache);
    if (!sequence)
        KVF_FAIL(cache->context, KVF_FULL,
                 "sequences_max = %u sequences are alive; destroy one, or open the cache with more",
                 cache->config.sequences_max);
    KVF_TRY(refill(cache, sequence));
    kvf_footprint_begin(cache, sequence);
    *out = sequence;
    return KVF_OK;
}

static void release_layer(kvf_layer *layer)
{
    kvf_kv_group *kv_group = layer->kv_group;
    if (kv_group && kv_group->arena.owner == layer)
        kv_group->arena.owner = NULL; /* its write-back may still run */
    for (uint32_t p = 0; p < layer->extent.sealed; p++)
        kvf_page_pool_release(&kv_group->pool, layer->blocks[p]);
    layer->extent = (kvf_layer_extent){0};
}

static void release(kvf_sequence *sequence)
{
    for (uint32_t i = 0; i < sequence->cache->config.layers; i++)
        release_layer(&sequence->layers[i]);
    sequence->is_alive = 0;
}

void kvf_layer_clear(kvf_layer *layer)
{
    release_layer(layer);
    validate_layer(layer);
}

void kvf_sequence_end(kvf_sequence *sequence)
{
    kvf_footprint_end(sequence->cache, sequence);
    release(sequence);
}

/* A restart has said already what becomes of its steps (kvf_footprint_restart). */
static bool has_steps(const kvf_cache *cache, const kvf_sequence *sequence)
{
    uint32_t seen = 0;
    for (uint32_t i = 0; i < cache->config.layers; i++)
        seen |= cache->footprint.rows[(size_t)sequence->slot * cache->config.layers + i].seen;
    return seen != 0;
}

kvf_status kvf_sequence_clear(kvf_cache *cache, kvf_sequence *sequence)
{
    const kvf_status status = kvf_sequence_check(cache, sequence);
    if (status != KVF_OK && status != KVF_NOT_FINITE)
        return status; /* what was not finite goes with its tokens */
    if (has_steps(cache, sequence)) {
        kvf_footprint_end(cache, sequence);
        kvf_footprint_begin(cache, sequence);
    }
    release(sequence);
    return refill(cache, sequence);
}

bool kvf_sequence_fault(const kvf_sequence *sequence, uint32_t *layer, uint32_t *token)
{
    const kvf_cache *cache = sequence->cache;
    const uint64_t fault = __atomic_load_n(&cache->words.faults[sequence->slot], __ATOMIC_RELAXED);
    *layer = (uint32_t)(fault >> 32) & 0xfffu;
    *token = (uint32_t)fault;
    return fault >> 44 == sequence->generation;
}

void kvf_layer_copy(kvf_layer *to, const kvf_layer *from)
{
    replace(to, from);
    memcpy(to->positions, from->positions, from->extent.length * sizeof *to->positions);
    memcpy(to->by_step, from->by_step, from->extent.length * sizeof *to->by_step);
}

kvf_status kvf_sequence_check(kvf_cache *cache, const kvf_sequence *sequence)
{
    if (!sequence)
        KVF_FAIL(cache->context, KVF_INVALID, "sequence is NULL; create one first");
    if (sequence->cache != cache)
        KVF_FAIL(cache->context, KVF_INVALID,
                 "the sequence belongs to another cache; pass it with the cache that created it");
    if (!sequence->is_alive)
        KVF_FAIL(cache->context, KVF_INVALID, "the sequence was destroyed; create another");
    uint32_t layer, token;
    return kvf_sequence_fault(sequence, &layer, &token) ? kvf_sequence_fail(cache, layer, token)
                                                        : KVF_OK;
}

kvf_status kvf_sequence_fail(kvf_cache *cache, uint32_t layer, uint32_t token)
{
    KVF_FAIL(cache->context, KVF_NOT_FINITE,
             "layer %u, token %u: its key or value is NaN or infinite; destroy this sequence "
             "and look for the overflow in the model (other sequences are not affected)",
             layer, token);
}

kvf_status kvf_layer_check(kvf_cache *cache, uint32_t layer)
{
    if (layer >= cache->config.layers)
        KVF_FAIL(cache->context, KVF_INVALID, "layer = %u: the cache has layers 0 to %u", layer,
                 cache->config.layers - 1);
    return KVF_OK;
}
