/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_RUNTIME_UNDO_H
#define KVF_RUNTIME_UNDO_H

/*
 * Undoing a call of decode that fails half-way.
 *
 * A read of blocks can fail after a step has appended, sealed, refreshed and counted, or after
 * earlier steps of a call with several tokens. So a call that may fail (addressable.h) first keeps
 * a copy of all that it will change, and a failure puts that back.
 *
 * Invariant: after kvf_undo outputs, counts and saved bytes of later calls are those of a cache
 * that never had the call. Which pages lie in slots and in page frames is not put back, and so
 * neither are figures of transfers and of reads.
 */

#include "call.h"

/* Keep what the call may change; args->k NULL: it counts, and changes nothing else. Arguments were
 * checked. Does nothing where no read can fail. */
KVF_CHECKED kvf_status kvf_undo_keep(kvf_cache *cache, const kvf_decode_args *args,
                                     kvf_stream *stream);
/* The end of a call that kvf_undo_keep has begun: a failure is undone, and returned. */
KVF_CHECKED kvf_status kvf_undo_unless_ok(kvf_cache *cache, const kvf_decode_args *args,
                                          kvf_stream *stream, kvf_status status);

#endif
