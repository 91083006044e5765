/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_RUNTIME_PARTS_H
#define KVF_RUNTIME_PARTS_H

/*
 * The parts of a cache: how many there are, which layers each has, and their settings.
 */

#include "cache.h"

/* Places, parts and rings, without memory for pages. `config` is as the user gave it, `dims` are of
 * the cache's settings. */
KVF_CHECKED kvf_status kvf_parts_create(kvf_cache *cache, const kvf_cache_config *config,
                                        const kvf_dims *dims);
void kvf_parts_destroy(kvf_cache *cache); /* half of them is fine */

#endif
