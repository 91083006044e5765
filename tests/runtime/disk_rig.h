/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TESTS_RUNTIME_DISK_RIG_H
#define KVF_TESTS_RUNTIME_DISK_RIG_H

/*
 * What tests of the disk tier share: settings of a cache that has a quarter of its pages in memory.
 */

#include "save_rig.h"

/* `config` with a disk tier of small bundles, in the folder of the rig. In memory is a quarter of
 * what `tokens` tokens take, or as much as a call needs. */
void disk_config(kvf_cache_config *config, uint32_t tokens, uint32_t bundle_bytes);

#endif
