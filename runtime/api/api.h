/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_RUNTIME_API_H
#define KVF_RUNTIME_API_H

/*
 * How every call of the user begins and ends. One thread at a time uses a cache: asserted in debug
 * builds, refused otherwise.
 */

#include "cache.h"

KVF_CHECKED kvf_status kvf_enter(kvf_cache *cache);
/* Likewise, for what must not be called while the cache is being recorded. */
KVF_CHECKED kvf_status kvf_enter_idle(kvf_cache *cache);
/* Likewise, for what enqueues on a stream of the caller. */
KVF_CHECKED kvf_status kvf_enter_enqueueing(kvf_cache *cache, const kvf_stream *stream);
/* Returns `status`. */
KVF_CHECKED kvf_status kvf_leave(kvf_cache *cache, kvf_status status);

/* The alignment of arrays that kernels of a GPU read and write 16 bytes at a time. NULL is fine. */
KVF_CHECKED kvf_status kvf_buffers_check(const kvf_cache *cache, const void *q, const void *k,
                                         const void *v, const void *out);
/* The caller's own selection, of a decode step. */
KVF_CHECKED kvf_status kvf_caller_selection_check(const kvf_cache *cache, const float *scores,
                                                  const int32_t *ids, uint32_t stride);

#endif
