/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_RUNTIME_PREFILL_H
#define KVF_RUNTIME_PREFILL_H

/*
 * A chunk of a prompt, on one layer of one sequence. Arguments were checked.
 */

#include "call.h"
#include "prefill_quantized.h"

/* A chunk, of the KV group's heads and of those that stream. */
KVF_CHECKED kvf_status kvf_layer_prefill(kvf_cache *cache, const kvf_prefill_args *args,
                                         kvf_stream *stream);
/* Queries alone, of the layer's newest tokens; of a layer without streaming heads. */
KVF_CHECKED kvf_status kvf_layer_prefill_queries(kvf_cache *cache, const kvf_prefill_args *args,
                                                 kvf_stream *stream);
/* A chunk of tokens that the layer has had before, without queries (args->q is NULL): what is
 * known of queries and of the footprint stays. They go to the blocks that the layer holds.
 * `carried` is looked at where pages are quantized. */
KVF_CHECKED kvf_status kvf_layer_append_again(kvf_cache *cache, const kvf_prefill_args *args,
                                              const kvf_carried *carried, kvf_stream *stream);

#endif
