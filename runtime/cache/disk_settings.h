/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_RUNTIME_DISK_SETTINGS_H
#define KVF_RUNTIME_DISK_SETTINGS_H

/*
 * Settings of the disk tier -> sizes.
 */

#include "cache.h"
#include "kv_group.h"

/* Those that contradict others are refused. */
KVF_CHECKED kvf_status kvf_disk_check(kvf_context *context, const kvf_cache_config *config);

/* Bundles, page frames and the file. All in memory if all fits. With streaming heads each KV group
 * counts its own. */
KVF_CHECKED kvf_status kvf_disk_count(kvf_context *context, const kvf_cache_config *config,
                                      kvf_dims *dims);

/* Bytes of pages that a call may need in memory at once. */
uint64_t kvf_disk_memory_least(const kvf_cache_config *config, const kvf_dims *dims);

/* Files of all KV groups, into the plan. KVF_INVALID if disk_bytes is less. */
KVF_CHECKED kvf_status kvf_disk_plan(kvf_cache *cache);

#endif
