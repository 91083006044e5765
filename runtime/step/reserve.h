/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_RUNTIME_RESERVE_H
#define KVF_RUNTIME_RESERVE_H

/*
 * Memory that a cache reserves, once it is known how much a call takes: the frame is as large as
 * the largest.
 */

#include "cache.h"

/* cache->frame_bytes, then as kvf_layout_plan. */
KVF_CHECKED kvf_status kvf_calls_plan(kvf_cache *cache, kvf_reservation *r);

#endif
