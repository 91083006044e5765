/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_RUNTIME_CONFIG_H
#define KVF_RUNTIME_CONFIG_H

/*
 * Settings of a cache, and the sizes that follow from them.
 */

#include "cache.h"

/* The caller's settings, as this library knows them; everything else takes such. */
KVF_CHECKED kvf_status kvf_config_read(kvf_context *context, const kvf_cache_config *config,
                                       kvf_cache_config *own);

/* Settings -> sizes. `resolved` gets the defaults. */
KVF_CHECKED kvf_status kvf_config_resolve(kvf_runtime *runtime, const kvf_cache_config *config,
                                          kvf_cache_config *resolved, kvf_dims *dims);
/* Of kvf_cache_config.pages. */
const char *kvf_pages_name(kvf_pages pages);
/* Some head of the mask, in any layer, has this value. */
bool kvf_config_has_heads(const kvf_cache_config *config, uint8_t kind);
/* With a disk tier: bytes of pages that a call may need in memory at once. */
uint64_t kvf_config_memory_least(const kvf_cache_config *config, const kvf_dims *dims);

#endif
