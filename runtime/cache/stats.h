/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_RUNTIME_STATS_H
#define KVF_RUNTIME_STATS_H

/*
 * Statistics of a cache without streaming heads, in all and of one layer.
 */

#include "cache.h"

/* Where kernels count in device memory: to the host, or back. The caller's streams are waited for;
 * a stream that is being recorded cannot be, and then nothing is done. */
void kvf_stats_bring(const kvf_cache *cache);
void kvf_stats_send(const kvf_cache *cache);

/* Of what was brought. */
void kvf_stats_read(const kvf_cache *cache, kvf_stats *stats);
void kvf_stats_read_layer(const kvf_cache *cache, uint32_t layer, kvf_stats *stats);
void kvf_stats_reset(kvf_cache *cache);

#endif
