/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Sequences: slots of a cache that are alive, their blocks, forks.
 *
 * Knows nothing of attention. A destroyed sequence gives its blocks back at once: whoever gets them
 * writes them later in the order of the cache's work, after every reader that is still enqueued.
 */

#include <string.h>

#include "masked.h"
#include "prefill_arena.h"
#include "retain.h"
#include "step.h"

#define GENERATION_FIRST 0xffffeu /* of 20 bits; all ones marks a word without fault */

static kvf_sequence *find_free(kvf_cache *cache)
{
    for (uint32_t i = 0; i < cache->config.sequences_max; i++)
        if (!cache->sequences[i].is_alive)
            return &cache->sequences[i];
    return NULL;
}

/* A new generation; after a million of them, wait until no older one can report any more. */
static kvf_status renew(kvf_cache *cache, kvf_sequence *sequence)
{
    if (sequence->generation == 0) {
        if (cache->last_done)
            KVF_TRY(cache->device->ops->event_wait(cache->last_done));
        __atomic_store_n(&cache->control.faults[sequence->slot], UINT64_MAX, __ATOMIC_RELAXED);
        sequence->generation = GENERATION_FIRST;
    } else {
        sequence->generation--;
    }
    sequence->is_alive = 1;
    for (uint32_t i = 0; i < cache->config.layers; i++) {
        kvf_layer *layer = &sequence->layers[i];
        *layer = (kvf_layer){.is_fresh = 1,
                             .needs_exact = 1,
                             .blocks = layer->blocks,
                             .positions = layer->positions};
    }
    return KVF_OK;
}

static kvf_status create(kvf_cache *cache, kvf_sequence **out)
{
    kvf_sequence *sequence = find_free(cache);
    if (!sequence)
        KVF_FAIL(cache->context, KVF_FULL,
                 "sequences_max = %u sequences are alive; destroy one, or open the cache with more",
                 cache->config.sequences_max);
    KVF_TRY(renew(cache, sequence));
    kvf_footprint_begin(cache, sequence);
    *out = sequence;
    return KVF_OK;
}

kvf_status kvf_sequence_create(kvf_cache *cache, kvf_sequence **out)
{
    *out = NULL;
    KVF_TRY(kvf_cache_enter(cache));
    kvf_status status = create(cache, out);
    if (status == KVF_OK && cache->masked) {
        status = kvf_masked_create(cache, *out);
        if (status != KVF_OK) {
            kvf_sequence_destroy(*out);
            *out = NULL;
        }
    }
    kvf_cache_leave(cache);
    return status;
}

static kvf_status fork_sequence(kvf_cache *cache, kvf_sequence *parent, kvf_stream *stream,
                                kvf_sequence **out)
{
    kvf_sequence *child = NULL;
    KVF_TRY(kvf_sequence_check(cache, parent));
    KVF_TRY(create(cache, &child));
    const kvf_status status = kvf_fork_enqueue(cache, parent, child, stream);
    if (status != KVF_OK) {
        kvf_sequence_destroy(child);
        return status;
    }
    *out = child;
    return KVF_OK;
}

kvf_status kvf_sequence_fork(kvf_cache *cache, kvf_sequence *parent, kvf_stream *stream,
                             kvf_sequence **out)
{
    *out = NULL;
    KVF_TRY(kvf_cache_enter(cache));
    const kvf_status status = fork_sequence(cache, parent, stream, out);
    kvf_cache_leave(cache);
    return status;
}

static void release(kvf_sequence *sequence)
{
    kvf_cache *cache = sequence->cache;
    if (cache->masked)
        kvf_masked_release(sequence);
    kvf_arena_forget(cache, sequence);
    cache->is_unsettled = cache->dims.ahead_max != 0;
    for (uint32_t i = 0; i < cache->config.layers; i++) {
        kvf_layer *layer = &sequence->layers[i];
        for (uint32_t p = 0; p < layer->sealed; p++)
            kvf_page_pool_release(&cache->pool, layer->blocks[p]);
        layer->length = layer->sealed = 0;
    }
    sequence->is_alive = 0;
}

void kvf_sequence_destroy(kvf_sequence *sequence)
{
    if (!sequence)
        return;
    KVF_ASSERT(sequence->is_alive);
    kvf_footprint_end(sequence->cache, sequence);
    release(sequence);
}

/* A restart has said already what becomes of its steps (kvf_footprint_restart). */
static bool has_steps(const kvf_cache *cache, const kvf_sequence *sequence)
{
    uint32_t seen = 0;
    for (uint32_t i = 0; i < cache->config.layers; i++)
        seen |= cache->footprint.rows[kvf_row_number(cache, sequence, i)].seen;
    return seen != 0;
}

static kvf_status clear(kvf_cache *cache, kvf_sequence *sequence)
{
    if (cache->recording)
        KVF_FAIL(
            cache->context, KVF_INVALID,
            "this cache is being recorded: until kvf_record_end only kvf_decode may be called");
    const kvf_status status = kvf_sequence_check(cache, sequence);
    if (status != KVF_OK && status != KVF_NOT_FINITE)
        return status; /* what was not finite goes with its tokens */
    if (has_steps(cache, sequence)) {
        kvf_footprint_end(cache, sequence);
        kvf_footprint_begin(cache, sequence);
    }
    release(sequence);
    KVF_TRY(renew(cache, sequence));
    return cache->masked ? kvf_masked_create(cache, sequence) : KVF_OK;
}

kvf_status kvf_sequence_clear(kvf_cache *cache, kvf_sequence *sequence, kvf_stream *stream)
{
    (void)stream; /* later calls overwrite what they need in the cache's order */
    KVF_TRY(kvf_cache_enter(cache));
    const kvf_status status = clear(cache, sequence);
    kvf_cache_leave(cache);
    return status;
}

bool kvf_sequence_fault(const kvf_sequence *sequence, uint32_t *layer, uint32_t *token)
{
    const kvf_cache *cache = sequence->cache;
    const uint64_t fault =
        __atomic_load_n(&cache->control.faults[sequence->slot], __ATOMIC_RELAXED);
    *layer = (uint32_t)(fault >> 32) & 0xfffu;
    *token = (uint32_t)fault;
    return fault >> 44 == sequence->generation;
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
    if (kvf_sequence_fault(sequence, &layer, &token) ||
        (cache->masked && kvf_masked_fault(sequence, &layer, &token)))
        KVF_FAIL(cache->context, KVF_NOT_FINITE,
                 "layer %u, token %u: its key or value is NaN or infinite; destroy this sequence "
                 "and look for the overflow in the model (other sequences are not affected)",
                 layer, token);
    return KVF_OK;
}

uint32_t kvf_sequence_length(const kvf_sequence *sequence, uint32_t layer)
{
    KVF_ASSERT(layer < sequence->cache->config.layers);
    return sequence->layers[layer].length;
}

uint32_t kvf_sequence_position(const kvf_sequence *sequence, uint32_t layer, uint32_t index)
{
    KVF_ASSERT(layer < sequence->cache->config.layers);
    KVF_ASSERT(index < sequence->layers[layer].length);
    return sequence->layers[layer].positions[index];
}
