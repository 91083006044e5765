/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_RUNTIME_MASKED_RECORD_H
#define KVF_RUNTIME_MASKED_RECORD_H

/*
 * Recorded steps of a cache with a head mask: one graph with the calls of the outer cache and of
 * every inner one.
 *
 * Each cache has a recording (record.h) with frames of its own, so each graph begins with one
 * kernel per cache that brings them; only the outer recording has the graph. What the outer one has
 * in a frame are the jobs that pack heads and the rows of rings.
 */

#include "masked.h"
#include "record.h"

KVF_CHECKED kvf_status kvf_masked_record_begin(kvf_cache *cache, kvf_sequence *const *sequences,
                                               uint32_t batch, kvf_stream *stream);
KVF_CHECKED kvf_status kvf_masked_record_decode(kvf_recording *recording,
                                                const kvf_decode_args *args, kvf_stream *stream);
KVF_CHECKED kvf_status kvf_masked_record_end(kvf_recording *recording, kvf_recording **out);
bool kvf_masked_can_replay(const kvf_recording *recording);
KVF_CHECKED kvf_status kvf_masked_replay(kvf_recording *recording, kvf_stream *stream);
void kvf_masked_record_close(kvf_recording *recording);

#endif
