/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_RUNTIME_PREFILL_ARENA_H
#define KVF_RUNTIME_PREFILL_ARENA_H

/*
 * The prefill arena: device memory for the sealed blocks of one layer of one sequence, so that
 * chunks of that layer attend to memory of the device, and its blocks are written back meanwhile.
 *
 * Present where pages are moved to be attended, unless device_bytes leaves no room for it.
 * Block b of the owner is block b of the arena. Invariants: of the owner, page tables name the
 * arena for blocks first .. end-1 and the pool for blocks below first; of everybody else they name
 * the pool. A chunk attends with first == 0. Whoever leaves has waited for its write-back.
 */

#include "call.h"

/* The arena belongs to this layer from now on; the page tables of the owner before it go to the
 * pool. Call it before the bookkeeping of new blocks: `sealed` blocks lie in the pool. */
KVF_CHECKED kvf_status kvf_arena_take(kvf_call *call, kvf_layer *layer, uint32_t sealed);
/* The owner's blocks below `first` come to the arena: from their slots, or over the link, once for
 * however many queries look at them. */
KVF_CHECKED kvf_status kvf_arena_fill(kvf_call *call);
/* The layer, if it is the owner, has only `sealed` blocks left. Blocks after them may be written
 * on the call's stream. */
KVF_CHECKED kvf_status kvf_arena_shorten(kvf_call *call, const kvf_layer *layer, uint32_t sealed);
/* The blocks that this call of the owner seals: the page tables will name the arena for them.
 * Before kvf_call_send. */
void kvf_arena_place(kvf_call *call);
/* After they are complete: on their way to the pool. */
KVF_CHECKED kvf_status kvf_arena_write_back(kvf_call *call);
/* The owner leaves if it is a row of the step. */
KVF_CHECKED kvf_status kvf_arena_leave_rows(kvf_call *call);
/* The owner leaves if it is a layer of this sequence. */
KVF_CHECKED kvf_status kvf_arena_leave_sequence(kvf_call *call, const kvf_sequence *sequence);
/* Whoever it is leaves, and no write-back is left in flight: the pool of the KV group may be
 * written on the call's stream. */
KVF_CHECKED kvf_status kvf_arena_settle(kvf_call *call, kvf_kv_group *kv_group);
/* The host waits if this block is still on its way. */
void kvf_arena_wait_block(const kvf_layer *layer, uint32_t block);

#endif
