/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_RUNTIME_LISTS_H
#define KVF_RUNTIME_LISTS_H

/*
 * Page lists: chosen here and attended by the caller, or the other way round. Arguments were
 * checked.
 */

#include "call.h"

/* Most pages of one list. */
uint32_t kvf_lists_pages_max(const kvf_cache *cache);
KVF_CHECKED kvf_status kvf_lists_select(kvf_cache *cache, const kvf_decode_args *args,
                                        const kvf_page_lists *lists, kvf_stream *stream);
KVF_CHECKED kvf_status kvf_lists_attend(kvf_cache *cache, const kvf_decode_args *args,
                                        const kvf_page_lists *lists, kvf_stream *stream);
/* To args->out, in full precision. */
KVF_CHECKED kvf_status kvf_lists_read(kvf_cache *cache, const kvf_decode_args *args,
                                      const kvf_page_lists *lists, kvf_stream *stream);
/* Where a page is; the host waits if it is on its way. */
const void *kvf_lists_page_address(const kvf_sequence *sequence, uint32_t layer, uint32_t kv_head,
                                   uint32_t page);

#endif
