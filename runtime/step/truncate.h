/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_RUNTIME_TRUNCATE_H
#define KVF_RUNTIME_TRUNCATE_H

/*
 * Cutting the newest tokens off a sequence of a cache without streaming heads.
 */

#include "step.h"

/* Tokens at positions below `tokens` stay in every layer; arguments but `tokens` were checked. */
KVF_CHECKED kvf_status kvf_truncate(kvf_cache *cache, kvf_sequence *sequence, uint32_t tokens,
                                    kvf_stream *stream);
/* The newest token of one layer, whose other tokens stay as they are. A static set that it has
 * helped to choose stays too. */
KVF_CHECKED kvf_status kvf_truncate_layer(kvf_cache *cache, kvf_sequence *sequence, uint32_t layer,
                                          kvf_stream *stream);

#endif
