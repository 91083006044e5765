/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Part of call.h. Queries, keys and values of the caller in the element type; see the header.
 *
 * Knows nothing of what a call does with them. The room is that of one call: calls of a cache run
 * in their order, so whoever rounds comes after the last reader.
 */

#include "call.h"

kvf_inputs kvf_inputs_seen(const kvf_cache *cache, const void *q, const void *k, const void *v)
{
    const kvf_input_room *room = &cache->inputs;
    kvf_inputs seen = {q, k, v};
    if (q && kvf_has_wide_queries(&cache->config))
        seen.q = room->q;
    if (k && kvf_has_wide_keys(&cache->config))
        seen.k = room->k, seen.v = room->v;
    return seen;
}

kvf_status kvf_inputs_round(kvf_call *call, const void *q, const void *k, const void *v,
                            uint32_t rows)
{
    const kvf_cache_config *c = &call->cache->config;
    const kvf_input_room *room = &call->cache->inputs;
    const size_t per_query = q && kvf_has_wide_queries(c) ? rows : 0;
    const size_t per_key = k && kvf_has_wide_keys(c) ? rows : 0;
    const size_t queries = per_query * c->query_heads * c->head_dim;
    const size_t keys = per_key * c->kv_heads * c->head_dim;
    const size_t values = per_key * c->kv_heads * c->value_dim;
    const size_t most = queries > keys ? queries : keys;
    const kvf_narrow_args args = {
        .dtype = c->dtype,
        .parts = (uint32_t)((most + KVF_NARROW_NUMBERS - 1) / KVF_NARROW_NUMBERS),
        .jobs = {{q, room->q, queries}, {k, room->k, keys}, {v, room->v, values}}};
    KVF_ASSERT(most == 0 || rows <= kvf_input_rows(call->cache));
    return most ? KVF_LAUNCH(call, narrow, args) : KVF_OK;
}

kvf_shape kvf_out_shape(const kvf_cache *cache, const kvf_shape *shape)
{
    kvf_shape out = *shape;
    out.dtype = kvf_query_dtype(&cache->config);
    return out;
}
