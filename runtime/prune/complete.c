/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Part of pruner.h. Completing a pruned sequence; see the header.
 *
 * The completed sequence is a fork whose deeper layers are empty. At the end both handles trade
 * their slots, and with them everything that the cache has of a slot: layers, tables, counts and
 * faults. Work that was enqueued names slots and not handles, so it may still run.
 */

#include "pruner.h"

#include "cache.h"
#include "retain.h"

/* Where a layer ends. */
static uint32_t end_of(const kvf_layer *layer)
{
    return layer->extent.length ? layer->positions[layer->extent.length - 1] + 1 : 0;
}

/* Positions 0 ... tokens - 1 are all there; they ascend, so the last tells. */
static bool has_all(const kvf_layer *layer, uint32_t tokens)
{
    return !layer->cut.kept && layer->extent.length >= tokens &&
           layer->positions[tokens - 1] == tokens - 1;
}

static kvf_status check_begin(kvf_cache *cache, const kvf_sequence *sequence, uint32_t first_layer,
                              uint32_t tokens)
{
    KVF_TRY(kvf_sequence_check(cache, sequence));
    KVF_TRY(kvf_layer_check(cache, first_layer));
    if (first_layer == 0 || tokens == 0)
        KVF_FAIL(cache->context, KVF_INVALID,
                 "first_layer = %u, tokens = %u: layers in front of first_layer hold the prompt's "
                 "tokens already; give the layer after the pivot, and the prompt",
                 first_layer, tokens);
    for (uint32_t i = 0; i < first_layer; i++)
        if (!has_all(&sequence->layers[i], tokens))
            KVF_FAIL(cache->context, KVF_INVALID,
                     "tokens = %u: layer %u does not hold all of them; open the pruner with "
                     "retention COMPLETE, and give the layer after the first that propagates",
                     tokens, i);
    return KVF_OK;
}

kvf_status kvf_whole_begin(kvf_cache *cache, kvf_sequence *sequence, uint32_t first_layer,
                           uint32_t tokens, kvf_stream *stream, kvf_sequence **whole)
{
    kvf_sequence *made = NULL;
    KVF_TRY(check_begin(cache, sequence, first_layer, tokens));
    KVF_TRY(kvf_fork(cache, sequence, stream, &made));
    for (uint32_t i = first_layer; i < cache->config.layers; i++) {
        kvf_layer_clear(&made->layers[i]);
        kvf_footprint_cut(cache, made, i);
    }
    const kvf_status status = kvf_truncate(cache, made, tokens, stream);
    if (status == KVF_OK)
        *whole = made;
    else
        kvf_sequence_end(made);
    return status;
}

static kvf_status check_end(kvf_cache *cache, const kvf_sequence *sequence,
                            const kvf_sequence *whole)
{
    KVF_TRY(kvf_sequence_check(cache, sequence));
    KVF_TRY(kvf_sequence_check(cache, whole));
    const uint32_t end = end_of(&sequence->layers[0]);
    if (sequence == whole)
        KVF_FAIL(cache->context, KVF_INVALID,
                 "whole is the sequence itself; pass what kvf_complete_begin gave");
    for (uint32_t i = 0; i < cache->config.layers; i++) {
        const kvf_layer *layer = &whole->layers[i];
        if (end_of(layer) != end || layer->extent.length != end)
            KVF_FAIL(cache->context, KVF_INVALID,
                     "layer %u of the whole sequence holds %u tokens up to position %u, and the "
                     "sequence ends at %u; prefill the rest, or cut the tokens that the sequence "
                     "no longer holds",
                     i, layer->extent.length, end_of(layer), end);
    }
    return KVF_OK;
}

static void trade(kvf_sequence *a, kvf_sequence *b)
{
    const kvf_sequence before = *a;
    a->slot = b->slot;
    a->generation = b->generation;
    a->layers = b->layers;
    b->slot = before.slot;
    b->generation = before.generation;
    b->layers = before.layers;
}

kvf_status kvf_whole_end(kvf_cache *cache, kvf_sequence *sequence, kvf_sequence *whole,
                         kvf_stream *stream)
{
    KVF_TRY(check_end(cache, sequence, whole));
    KVF_TRY(cache->device->ops->stream_wait(stream));
    KVF_TRY(kvf_sequence_check(cache, whole)); /* what the device found since */
    trade(sequence, whole);
    kvf_sequence_end(whole);
    return KVF_OK;
}
