/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_RUNTIME_FOOTPRINT_H
#define KVF_RUNTIME_FOOTPRINT_H

/*
 * The meter of the KV footprint: how many entries were held, summed over steps.
 *
 * After PruLong (section 2.1 and appendix A). Time is the position of a token: whatever order a
 * model goes through chunks and layers in, a token that a layer holds is held from its own position
 * on, until the tokens that are dropped by an eviction are no longer in the layer's length. So
 * nothing has to be told of an eviction: the next append counts with the length it finds.
 *
 * Knows lengths and positions, not what was kept or why. All of it is host bookkeeping at the time
 * of enqueueing: O(1) per call where positions are contiguous, O(tokens) where they have gaps, no
 * allocation after open.
 *
 * Invariants: rows[n].seen is the position after the last one that (sequence, layer) n counted; the
 * steps of full attention of a live sequence are span.first to span.again + the highest seen of its
 * layers; entry_steps >= device_entry_steps.
 */

#include "runtime.h"

/* Sums of one layer of one sequence. */
typedef struct kvf_footprint_row {
    uint32_t seen;
    uint64_t held_max;   /* most entries held at a step */
    uint64_t device_max; /* likewise on the device */
} kvf_footprint_row;

/* Constants of one layer, set at open. */
typedef struct kvf_footprint_layer {
    uint32_t retrieval, streaming; /* KV heads */
    uint64_t chosen; /* tokens of a retrieval head in static set and its share of slots */
} kvf_footprint_layer;

/* Steps of one sequence, as full attention would count them. */
typedef struct kvf_footprint_span {
    uint64_t first; /* counted from here: a fork, or the last reset */
    uint64_t again; /* step of position 0 */
} kvf_footprint_span;

typedef struct kvf_footprint_meter {
    kvf_footprint_layer *layers; /* [layers] */
    kvf_footprint_row *rows;     /* [sequences_max, layers] */
    kvf_footprint_span *spans;   /* [sequences_max] */
    uint64_t entry_steps, device_entry_steps;
    kvf_footprint ended; /* sums over sequences that are no more; shares unused */
} kvf_footprint_meter;

/* How many heads of a layer have pages, and what of these may be on the device. */
void kvf_footprint_shape(kvf_cache *cache, uint32_t layer);

/* A sequence begins; its slot is its own. */
void kvf_footprint_begin(kvf_cache *cache, const kvf_sequence *sequence);
/* A child continues from its parent: what it holds counts from here on. */
void kvf_footprint_fork(kvf_cache *cache, const kvf_sequence *parent, const kvf_sequence *child);
/* A sequence came from a file: what it holds counts from here on. */
void kvf_footprint_restore(kvf_cache *cache, const kvf_sequence *sequence);
/* Before a sequence ends: its steps go to the sums. */
void kvf_footprint_end(kvf_cache *cache, const kvf_sequence *sequence);

/* A layer was given `tokens` more tokens: length and positions are there already. */
void kvf_footprint_append(kvf_cache *cache, const kvf_sequence *sequence, uint32_t layer,
                          uint32_t tokens);

/* Before a sequence is cleared: it starts over with `tokens` of the tokens it saw, at positions 0,
 * 1, ...; computing them again is no step of full attention. */
void kvf_footprint_restart(kvf_cache *cache, const kvf_sequence *sequence, uint32_t tokens);

/* The last `tokens` tokens of a layer were a patch: they were held, and the positions come again.
 */
void kvf_footprint_rewind(kvf_cache *cache, const kvf_sequence *sequence, uint32_t layer,
                          uint32_t tokens);

/* The newest tokens of a layer were cut off, its length says so already: they were held, and the
 * positions come again. */
void kvf_footprint_cut(kvf_cache *cache, const kvf_sequence *sequence, uint32_t layer);

void kvf_footprint_reset(kvf_cache *cache);
void kvf_footprint_read(const kvf_cache *cache, kvf_footprint *footprint);

#endif
