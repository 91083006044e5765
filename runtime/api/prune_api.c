/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Part of kvferry/prune.h: every function of it that takes a cache or a pruner; see api.c.
 */

#include <math.h>

#include "api.h"
#include "cache.h"
#include "policies.h"
#include "pruner.h"
#include "settings.h"

static kvf_status check_cache(const kvf_cache *cache)
{
    if (kvf_has_streaming_heads(cache))
        KVF_FAIL(cache->context, KVF_UNSUPPORTED,
                 "head_mask of the cache has streaming heads, which keep their own tokens; open "
                 "the cache without a mask, or do not prune");
    return KVF_OK;
}

static kvf_status plan(kvf_runtime *runtime, const kvf_cache_config *cache_config,
                       const kvf_prune_config *config, kvf_prune_plan *out)
{
    kvf_cache_config own_cache;
    kvf_prune_given own;
    kvf_cache *cache = NULL;
    KVF_CHECK_HANDLE(runtime, runtime);
    KVF_CHECK_POINTER(runtime->context, cache_config);
    KVF_TRY(kvf_config_read(runtime->context, cache_config, &own_cache));
    KVF_TRY(kvf_prune_config_read(runtime->context, config, &own));
    kvf_status status = kvf_cache_create(runtime, &own_cache, &cache);
    if (status == KVF_OK)
        status = check_cache(cache);
    if (status == KVF_OK)
        status = kvf_pruner_plan(cache, &own.config, out);
    kvf_cache_destroy(cache);
    return status;
}

kvf_status kvf_prune_plan_make_sized(kvf_runtime *runtime, const kvf_cache_config *cache_config,
                                     const kvf_prune_config *config, kvf_prune_plan *out,
                                     size_t size, kvf_error *error)
{
    kvf_prune_plan own;
    kvf_status status = plan(runtime, cache_config, config, &own);
    if (status == KVF_OK)
        status = kvf_pointer_check(runtime->context, "plan", out);
    if (status == KVF_OK)
        KVF_SIZED_GIVE(out, size, &own);
    return kvf_runtime_report(runtime, status, error);
}

static kvf_status open_prune(kvf_cache *cache, const kvf_prune_config *config, kvf_prune **out)
{
    kvf_prune_given own;
    KVF_CHECK_OPENS(cache, cache, out);
    KVF_TRY(check_cache(cache));
    KVF_TRY(kvf_prune_config_read(cache->context, config, &own));
    return kvf_pruner_open(cache, &own.config, out);
}

kvf_status kvf_prune_open(kvf_cache *cache, const kvf_prune_config *config, kvf_prune **out,
                          kvf_error *error)
{
    const kvf_status status = open_prune(cache, config, out);
    (void)kvf_runtime_report(cache ? cache->runtime : NULL, status, error);
    if (status != KVF_OK && out) {
        kvf_pruner_close(*out);
        *out = NULL;
    }
    return status;
}

void kvf_prune_close(kvf_prune *prune)
{
    if (prune && kvf_handle_is_alive(prune->context))
        kvf_pruner_close(prune);
}

const kvf_prune_config *kvf_prune_config_get(const kvf_prune *prune)
{
    return prune ? &prune->config : NULL;
}

void kvf_prune_stats_get_sized(const kvf_prune *prune, kvf_prune_stats *stats, size_t size)
{
    kvf_prune_stats own = {0};
    if (KVF_IS_ALIVE(prune)) {
        own = prune->stats;
        own.observe_ns += __atomic_load_n(&prune->clock->observe_ns, __ATOMIC_RELAXED);
        own.retain_ns += __atomic_load_n(&prune->clock->retain_ns, __ATOMIC_RELAXED);
    }
    KVF_SIZED_GIVE(stats, size, &own);
}

void kvf_prune_measures(const kvf_prune *prune, double *measures, uint32_t count)
{
    const bool is_alive = KVF_IS_ALIVE(prune);
    for (uint32_t l = 0; measures && l < count; l++)
        measures[l] = is_alive && l < prune->shape.layers ? prune->measures[l] : NAN;
}

kvf_status kvf_prune_begin(kvf_prune *prune, kvf_sequence *sequence, uint32_t tokens)
{
    KVF_CHECK_HANDLE(prune, prune);
    KVF_TRY(kvf_enter(prune->cache));
    return kvf_leave(prune->cache, kvf_pruner_begin(prune, sequence, tokens));
}

kvf_status kvf_prune_append_sized(kvf_prune *prune, const kvf_prefill_args *args, size_t size,
                                  kvf_stream *stream)
{
    kvf_prefill_args own;
    KVF_CHECK_HANDLE(prune, prune);
    KVF_TRY(kvf_enter_enqueueing(prune->cache, stream));
    kvf_status status = KVF_SIZED_TAKE(prune->context, kvf_prefill_args, args, size, &own);
    if (status == KVF_OK)
        status = kvf_buffers_check(prune->cache, own.q, NULL, NULL, NULL);
    if (status == KVF_OK)
        status = kvf_pruner_append(prune, &own, stream);
    return kvf_leave(prune->cache, status);
}

static kvf_status prune_layer(kvf_prune *prune, kvf_sequence *sequence, uint32_t layer,
                              kvf_stream *stream, kvf_prune_result *result)
{
    if (prune->config.eviction != KVF_EVICTION_NONE)
        KVF_FAIL(prune->context, KVF_INVALID,
                 "eviction = %s: layers are pruned after each chunk; call kvf_prune_chunk, or open "
                 "the pruner with NONE",
                 prune->config.eviction == KVF_EVICTION_NAIVE ? "NAIVE" : "PATCHED");
    return kvf_pruner_layer(prune, sequence, layer, stream, result);
}

kvf_status kvf_prune_layer_sized(kvf_prune *prune, kvf_sequence *sequence, uint32_t layer,
                                 kvf_stream *stream, kvf_prune_result *result, size_t size)
{
    kvf_prune_result own = {0};
    KVF_CHECK_HANDLE(prune, prune);
    KVF_CHECK_POINTER(prune->context, result);
    KVF_TRY(kvf_enter_enqueueing(prune->cache, stream));
    const kvf_status status = prune_layer(prune, sequence, layer, stream, &own);
    if (status == KVF_OK)
        KVF_SIZED_GIVE(result, size, &own);
    return kvf_leave(prune->cache, status);
}

static kvf_status prune_chunk(kvf_prune *prune, kvf_sequence *sequence, uint32_t layer,
                              uint32_t tokens, uint32_t patch, kvf_stream *stream)
{
    if (prune->config.eviction == KVF_EVICTION_NONE)
        KVF_FAIL(prune->context, KVF_INVALID,
                 "eviction = NONE: chunks are not pruned; call kvf_prune_layer after the whole "
                 "prompt, or open the pruner with NAIVE or PATCHED");
    return kvf_pruner_chunk(prune, sequence, layer, tokens, patch, stream);
}

kvf_status kvf_prune_chunk(kvf_prune *prune, kvf_sequence *sequence, uint32_t layer,
                           uint32_t tokens, uint32_t patch, kvf_stream *stream)
{
    KVF_CHECK_HANDLE(prune, prune);
    KVF_TRY(kvf_enter_enqueueing(prune->cache, stream));
    return kvf_leave(prune->cache, prune_chunk(prune, sequence, layer, tokens, patch, stream));
}

static kvf_status begin_whole(kvf_cache *cache, kvf_sequence *sequence, uint32_t first_layer,
                              uint32_t tokens, kvf_stream *stream, kvf_sequence **whole)
{
    KVF_TRY(check_cache(cache));
    return kvf_whole_begin(cache, sequence, first_layer, tokens, stream, whole);
}

kvf_status kvf_complete_begin(kvf_cache *cache, kvf_sequence *sequence, uint32_t first_layer,
                              uint32_t tokens, kvf_stream *stream, kvf_sequence **whole)
{
    KVF_CHECK_OPENS(cache, cache, whole);
    KVF_TRY(kvf_enter_enqueueing(cache, stream));
    return kvf_leave(cache, begin_whole(cache, sequence, first_layer, tokens, stream, whole));
}

kvf_status kvf_complete_end(kvf_cache *cache, kvf_sequence *sequence, kvf_sequence *whole,
                            kvf_stream *stream)
{
    KVF_CHECK_HANDLE(cache, cache);
    KVF_CHECK_POINTER(cache->context, whole);
    KVF_TRY(kvf_enter_enqueueing(cache, stream));
    return kvf_leave(cache, kvf_whole_end(cache, sequence, whole, stream));
}
