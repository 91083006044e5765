/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_RUNTIME_STATS_H
#define KVF_RUNTIME_STATS_H

/*
 * Statistics of a cache, in all and of one layer.
 *
 * Where kernels count in device memory, counts are brought to the host and sent back. The caller's
 * streams are waited for; a stream that is being recorded cannot be, and then nothing is brought.
 */

#include "cache.h"

void kvf_stats_read(const kvf_cache *cache, kvf_stats *stats);
void kvf_stats_read_layer(const kvf_cache *cache, uint32_t layer, kvf_stats *stats);
void kvf_stats_reset(kvf_cache *cache);
/* As at open: nothing was counted, and what is on the device is not looked at. After a failure the
 * device may still be told so while kernels count. */
KVF_CHECKED kvf_status kvf_stats_clear(kvf_cache *cache);

#endif
