/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Every function of kvferry.h that takes a cache, a sequence or a recording: it enters, checks what
 * it was given, refuses, hands over, and leaves.
 *
 * Here it is asked whether a cache is being recorded; below, only statistics ask. Knows nothing of
 * how the work is done. A call that is refused has changed nothing.
 */

#include "api.h"

#include "append.h"
#include "cache.h"
#include "decode.h"
#include "lists.h"
#include "prefill.h"
#include "record.h"
#include "reserve.h"
#include "retain.h"
#include "settings.h"

kvf_status kvf_enter(kvf_cache *cache)
{
    KVF_CHECK_HANDLE(cache, cache);
    const bool was_in_use = atomic_flag_test_and_set_explicit(&cache->in_use, memory_order_acquire);
    KVF_ASSERT_DEBUG(!was_in_use);
    if (was_in_use)
        KVF_FAIL(cache->context, KVF_INVALID,
                 "two threads use one cache at once; give each thread a cache, or take a lock");
    for (uint32_t i = 0; !cache->broken && i < cache->kv_group_count; i++)
        kvf_page_pool_call(&cache->kv_groups[i].pool);
    if (cache->broken == KVF_OK)
        return KVF_OK;
    return kvf_leave(cache, kvf_fail(cache->context, cache->broken, 0,
                                     "an earlier call on this cache failed half-way; close it and "
                                     "open another"));
}

kvf_status kvf_enter_idle(kvf_cache *cache)
{
    KVF_TRY(kvf_enter(cache));
    if (!cache->recording)
        return KVF_OK;
    return kvf_leave(cache, kvf_fail(cache->context, KVF_INVALID, 0,
                                     "this cache is being recorded: until kvf_record_end only "
                                     "kvf_decode may be called"));
}

kvf_status kvf_enter_enqueueing(kvf_cache *cache, const kvf_stream *stream)
{
    KVF_TRY(kvf_enter_idle(cache));
    const kvf_status status = kvf_stream_check(cache->device, stream);
    return status == KVF_OK ? KVF_OK : kvf_leave(cache, status);
}

kvf_status kvf_leave(kvf_cache *cache, kvf_status status)
{
    for (uint32_t i = 0; i < cache->kv_group_count; i++)
        kvf_page_pool_start_writes(&cache->kv_groups[i].pool);
    atomic_flag_clear_explicit(&cache->in_use, memory_order_release);
    return status;
}

/* ---- caches ---- */

/* A cache that holds no memory yet: settings, sizes, plan. */
static kvf_status plan(kvf_runtime *runtime, const kvf_cache_config *config, kvf_reservation *r,
                       kvf_cache **out)
{
    kvf_cache_config own;
    KVF_CHECK_HANDLE(runtime, runtime);
    KVF_TRY(kvf_config_read(runtime->context, config, &own));
    KVF_TRY(kvf_cache_create(runtime, &own, out));
    return kvf_calls_plan(*out, r);
}

kvf_status kvf_cache_plan_make_sized(kvf_runtime *runtime, const kvf_cache_config *config,
                                     kvf_cache_plan *out, size_t size, kvf_error *error)
{
    kvf_cache *cache = NULL;
    kvf_reservation unused;
    kvf_status status = plan(runtime, config, &unused, &cache);
    if (status == KVF_OK)
        status = kvf_pointer_check(runtime->context, "plan", out);
    if (status == KVF_OK)
        KVF_SIZED_GIVE(out, size, &cache->plan);
    kvf_cache_close(cache);
    return kvf_runtime_report(runtime, status, error);
}

kvf_status kvf_cache_open(kvf_runtime *runtime, const kvf_cache_config *config, kvf_cache **out,
                          kvf_error *error)
{
    kvf_cache *cache = NULL;
    kvf_reservation r;
    if (out)
        *out = NULL;
    kvf_status status = plan(runtime, config, &r, &cache);
    if (status == KVF_OK)
        status = kvf_pointer_check(runtime->context, "out", out);
    if (status == KVF_OK)
        status = kvf_cache_reserve(cache, &r);
    (void)kvf_runtime_report(runtime, status, error);
    if (status != KVF_OK) {
        kvf_cache_close(cache);
        return status;
    }
    *out = cache;
    return KVF_OK;
}

void kvf_cache_close(kvf_cache *cache)
{
    if (cache && kvf_handle_is_alive(cache->context))
        kvf_cache_release(cache);
}

const kvf_cache_config *kvf_cache_settings(const kvf_cache *cache)
{
    return cache ? &cache->config : NULL;
}

const kvf_cache_plan *kvf_cache_memory(const kvf_cache *cache)
{
    return cache ? &cache->plan : NULL;
}

static kvf_status set_attention(kvf_cache *cache, uint32_t layer,
                                const kvf_attention_params *params)
{
    KVF_TRY(kvf_layer_check(cache, layer));
    return kvf_attention_params_set(cache, layer, params);
}

kvf_status kvf_cache_attention_params(kvf_cache *cache, uint32_t layer,
                                      const kvf_attention_params *params)
{
    KVF_TRY(kvf_enter_idle(cache));
    return kvf_leave(cache, set_attention(cache, layer, params));
}

/* ---- statistics ---- */

void kvf_cache_stats_sized(const kvf_cache *cache, kvf_stats *stats, size_t size)
{
    kvf_stats own = {0};
    if (KVF_IS_ALIVE(cache))
        kvf_stats_read(cache, &own);
    KVF_SIZED_GIVE(stats, size, &own);
}

void kvf_cache_layer_stats_sized(const kvf_cache *cache, uint32_t layer, kvf_stats *stats,
                                 size_t size)
{
    kvf_stats own = {0};
    if (KVF_IS_ALIVE(cache)) {
        KVF_ASSERT(layer < cache->config.layers);
        kvf_stats_read_layer(cache, layer, &own);
    }
    KVF_SIZED_GIVE(stats, size, &own);
}

void kvf_cache_stats_reset(kvf_cache *cache)
{
    if (!KVF_IS_ALIVE(cache))
        return;
    kvf_footprint_reset(cache);
    kvf_stats_reset(cache);
}

void kvf_cache_footprint_sized(const kvf_cache *cache, kvf_footprint *footprint, size_t size)
{
    kvf_footprint own = {0};
    if (KVF_IS_ALIVE(cache))
        kvf_footprint_read(cache, &own);
    KVF_SIZED_GIVE(footprint, size, &own);
}

/* ---- sequences ---- */

kvf_status kvf_sequence_create(kvf_cache *cache, kvf_sequence **out)
{
    KVF_CHECK_OPENS(cache, cache, out);
    KVF_TRY(kvf_enter(cache));
    return kvf_leave(cache, kvf_sequence_begin(cache, out));
}

kvf_status kvf_sequence_fork(kvf_cache *cache, kvf_sequence *parent, kvf_stream *stream,
                             kvf_sequence **out)
{
    KVF_CHECK_OPENS(cache, cache, out);
    KVF_CHECK_POINTER(cache->context, parent);
    KVF_TRY(kvf_enter_enqueueing(cache, stream));
    kvf_status status = kvf_sequence_check(cache, parent);
    if (status == KVF_OK)
        status = kvf_fork(cache, parent, stream, out);
    return kvf_leave(cache, status);
}

static kvf_status cut(kvf_cache *cache, kvf_sequence *sequence, uint32_t tokens, kvf_stream *stream)
{
    KVF_TRY(kvf_sequence_check(cache, sequence));
    if (kvf_has_streaming_heads(cache))
        KVF_FAIL(cache->context, KVF_UNSUPPORTED,
                 "head_mask has streaming heads, whose rings no longer hold the tokens that newer "
                 "ones replaced; fork before tokens that may be cut, or open the cache without "
                 "a mask");
    return kvf_truncate(cache, sequence, tokens, stream);
}

kvf_status kvf_sequence_truncate(kvf_cache *cache, kvf_sequence *sequence, uint32_t tokens,
                                 kvf_stream *stream)
{
    KVF_TRY(kvf_enter_enqueueing(cache, stream));
    return kvf_leave(cache, cut(cache, sequence, tokens, stream));
}

void kvf_sequence_destroy(kvf_sequence *sequence)
{
    if (!sequence || !kvf_handle_is_alive(sequence->cache->context))
        return;
    KVF_ASSERT(sequence->is_alive);
    kvf_sequence_end(sequence);
}

uint32_t kvf_sequence_length(const kvf_sequence *sequence, uint32_t layer)
{
    if (!sequence)
        return 0;
    KVF_ASSERT(layer < sequence->cache->config.layers);
    return sequence->layers[layer].extent.length;
}

uint32_t kvf_sequence_position(const kvf_sequence *sequence, uint32_t layer, uint32_t index)
{
    if (!sequence)
        return 0;
    KVF_ASSERT(layer < sequence->cache->config.layers);
    KVF_ASSERT(index < sequence->layers[layer].extent.length);
    return sequence->layers[layer].positions[index];
}

/* ---- what prefill and decode are given ---- */

kvf_status kvf_buffers_check(const kvf_cache *cache, const void *q, const void *k, const void *v,
                             const void *out)
{
    const struct {
        const char *name;
        const void *address;
    } buffers[] = {{"q", q}, {"k", k}, {"v", v}, {"out", out}};
    if (cache->runtime->device->ops->kind == KVF_DEVICE_HOST)
        return KVF_OK;
    for (size_t i = 0; i < sizeof buffers / sizeof *buffers; i++)
        if ((uintptr_t)buffers[i].address % 16 != 0)
            KVF_FAIL(cache->context, KVF_INVALID,
                     "%s = %p: on this device it must be a multiple of 16 bytes", buffers[i].name,
                     buffers[i].address);
    return KVF_OK;
}

kvf_status kvf_caller_selection_check(const kvf_cache *cache, const float *scores,
                                      const int32_t *ids, uint32_t stride)
{
    const char *name = scores ? "page_scores" : "page_ids";
    const void *selection = scores ? (const void *)scores : ids;
    if (!selection)
        return KVF_OK;
    if (scores && ids)
        KVF_FAIL(cache->context, KVF_INVALID,
                 "page_scores and page_ids are both set; pass one, and NULL for the other");
    if (!kvf_takes_caller_selection(kvf_select_find(cache->config.select)))
        KVF_FAIL(cache->context, KVF_UNSUPPORTED,
                 "%s is set with select = %s, which does not choose pages for KV heads by score; "
                 "leave it NULL, or open with select dynamic",
                 name, kvf_select_name(cache->config.select));
    if (stride == 0 || stride > KVF_CALLER_STRIDE_MAX)
        KVF_FAIL(cache->context, KVF_INVALID, "page_stride = %u: lists of %s have 1 to %u entries",
                 stride, name, KVF_CALLER_STRIDE_MAX);
    if ((uintptr_t)selection % sizeof(float))
        KVF_FAIL(cache->context, KVF_INVALID, "%s = %p: must be a multiple of 4 bytes", name,
                 selection);
    return KVF_OK;
}

/* Queries alone: they attend to tokens that the layer has. */
static bool has_queries_alone(const void *q, const void *k, const void *v)
{
    return q && !k && !v;
}

static kvf_status check_queries(kvf_cache *cache, uint32_t layer, const uint32_t *positions)
{
    if (positions)
        KVF_FAIL(cache->context, KVF_INVALID,
                 "positions is set with queries alone: their tokens have positions; leave it NULL");
    if (kvf_streaming_count(cache, layer))
        KVF_FAIL(
            cache->context, KVF_UNSUPPORTED,
            "head_mask has streaming heads in layer %u, whose rings take queries with keys and "
            "values only; open the cache without them",
            layer);
    return KVF_OK;
}

static kvf_status check_prefill_queries(kvf_cache *cache, const kvf_prefill_args *args)
{
    const uint32_t length = args->sequence->layers[args->layer].extent.length;
    KVF_TRY(check_queries(cache, args->layer, args->positions));
    if (cache->config.pages != KVF_PAGES_NATIVE)
        KVF_FAIL(cache->context, KVF_UNSUPPORTED,
                 "pages = %s: a chunk of queries alone would attend to quantized tokens that a "
                 "chunk with keys and values finds exact; open the cache with pages bf16",
                 kvf_pages_name(cache->config.pages));
    if (args->tokens > length)
        KVF_FAIL(
            cache->context, KVF_INVALID,
            "tokens = %u: queries alone are of the newest tokens, and layer %u holds %u; append "
            "them first",
            args->tokens, args->layer, length);
    return KVF_OK;
}

static kvf_status check_prefill(kvf_cache *cache, const kvf_prefill_args *args)
{
    const bool asks = has_queries_alone(args->q, args->k, args->v);
    if (!asks && (!args->k || !args->v))
        KVF_FAIL(cache->context, KVF_INVALID, "k or v is NULL; pass the keys and values");
    if (args->q && !args->out)
        KVF_FAIL(cache->context, KVF_INVALID, "out is NULL with q set; pass both or q = NULL");
    KVF_TRY(kvf_layer_check(cache, args->layer));
    if (args->tokens == 0 || args->tokens > cache->config.prefill_chunk_max)
        KVF_FAIL(cache->context, KVF_INVALID,
                 "tokens = %u: a chunk has 1 to prefill_chunk_max = %u; split it", args->tokens,
                 cache->config.prefill_chunk_max);
    KVF_TRY(kvf_sequence_check(cache, args->sequence));
    KVF_TRY(asks ? check_prefill_queries(cache, args)
                 : kvf_append_check(cache, &args->sequence->layers[args->layer], args->tokens,
                                    args->positions));
    return kvf_buffers_check(cache, args->q, args->k, args->v, args->q ? args->out : NULL);
}

static kvf_status check_batch(kvf_cache *cache, kvf_sequence *const *sequences, uint32_t batch)
{
    if (batch == 0 || batch > cache->config.sequences_max)
        KVF_FAIL(cache->context, KVF_INVALID, "batch = %u: 1 to sequences_max = %u", batch,
                 cache->config.sequences_max);
    for (uint32_t b = 0; b < batch; b++) {
        KVF_TRY(kvf_sequence_check(cache, sequences[b]));
        for (uint32_t i = 0; i < b; i++)
            if (sequences[i] == sequences[b])
                KVF_FAIL(cache->context, KVF_INVALID,
                         "sequences[%u] is also sequences[%u]; a batch contains each sequence once",
                         b, i);
    }
    return KVF_OK;
}

/* Tokens of sequence b. */
static uint32_t tokens_of(const kvf_decode_args *args, uint32_t b)
{
    return args->tokens ? args->tokens[b] : 1;
}

static kvf_status check_tokens(kvf_cache *cache, const kvf_decode_args *args)
{
    for (uint32_t b = 0; args->tokens && b < args->batch; b++)
        if (args->tokens[b] == 0 || args->tokens[b] > cache->config.tokens_per_step_max)
            KVF_FAIL(cache->context, KVF_INVALID,
                     "tokens[%u] = %u: a step has 1 to tokens_per_step_max = %u of a sequence; use "
                     "kvf_prefill, several calls, or open the cache with more",
                     b, args->tokens[b], cache->config.tokens_per_step_max);
    return KVF_OK;
}

static kvf_status check_rows(kvf_cache *cache, const kvf_decode_args *args)
{
    KVF_TRY(kvf_layer_check(cache, args->layer));
    KVF_TRY(check_batch(cache, args->sequences, args->batch));
    KVF_TRY(check_tokens(cache, args));
    return kvf_buffers_check(cache, args->q, args->k, args->v, args->out);
}

static kvf_status check_step(kvf_cache *cache, const kvf_decode_args *args)
{
    if (!args->q || !args->sequences)
        KVF_FAIL(cache->context, KVF_INVALID, "q or sequences is NULL; pass the batch");
    KVF_TRY(
        kvf_caller_selection_check(cache, args->page_scores, args->page_ids, args->page_stride));
    return check_rows(cache, args);
}

/* Calls that have one token of each sequence. */
static kvf_status check_single(kvf_cache *cache, const kvf_decode_args *args, const char *what)
{
    for (uint32_t b = 0; b < args->batch; b++)
        if (tokens_of(args, b) > 1)
            KVF_FAIL(cache->context, KVF_UNSUPPORTED,
                     "tokens[%u] = %u: %s one token of each sequence; leave tokens NULL", b,
                     args->tokens[b], what);
    return KVF_OK;
}

static kvf_status check_out(kvf_cache *cache, const kvf_decode_args *args)
{
    if (!args->out)
        KVF_FAIL(cache->context, KVF_INVALID, "out is NULL; pass room for the outputs");
    return KVF_OK;
}

/* Every sequence has tokens to read. */
static kvf_status check_tokens_there(kvf_cache *cache, const kvf_decode_args *args)
{
    for (uint32_t b = 0; b < args->batch; b++)
        if (args->sequences[b]->layers[args->layer].extent.length == 0)
            KVF_FAIL(cache->context, KVF_INVALID, "sequences[%u] has no tokens in layer %u", b,
                     args->layer);
    return KVF_OK;
}

static kvf_status check_append(kvf_cache *cache, const kvf_decode_args *args)
{
    uint32_t row = 0;
    if (!args->k || !args->v)
        KVF_FAIL(cache->context, KVF_INVALID, "k or v is NULL; pass the new keys and values");
    for (uint32_t b = 0; b < args->batch; b++) {
        KVF_TRY(kvf_append_check(cache, &args->sequences[b]->layers[args->layer],
                                 tokens_of(args, b),
                                 args->positions ? args->positions + row : NULL));
        row += tokens_of(args, b);
    }
    return KVF_OK;
}

/* ---- prefill and decode ---- */

kvf_status kvf_prefill_sized(kvf_cache *cache, const kvf_prefill_args *args, size_t size,
                             kvf_stream *stream)
{
    kvf_prefill_args own;
    KVF_TRY(kvf_enter_enqueueing(cache, stream));
    kvf_status status = KVF_SIZED_TAKE(cache->context, kvf_prefill_args, args, size, &own);
    if (status == KVF_OK)
        status = check_prefill(cache, &own);
    if (status == KVF_OK)
        status = own.k ? kvf_layer_prefill(cache, &own, stream)
                       : kvf_layer_prefill_queries(cache, &own, stream);
    return kvf_leave(cache, status);
}

static kvf_status decode_queries(kvf_cache *cache, const kvf_decode_args *args, kvf_stream *stream)
{
    KVF_TRY(check_queries(cache, args->layer, args->positions));
    KVF_TRY(check_single(cache, args, "queries alone are of"));
    KVF_TRY(check_tokens_there(cache, args));
    if (cache->recording)
        KVF_FAIL(cache->context, KVF_UNSUPPORTED,
                 "k and v are NULL: a recorded step appends; enqueue steps of queries alone");
    if (kvf_select_find(cache->config.select)->by_token)
        KVF_FAIL(cache->context, KVF_UNSUPPORTED,
                 "k and v are NULL with select = %s, which needs the queries of appended tokens; "
                 "use another policy",
                 kvf_select_name(cache->config.select));
    return kvf_layer_decode_queries(cache, args, stream);
}

static kvf_status decode(kvf_cache *cache, const kvf_decode_args *args, kvf_stream *stream)
{
    KVF_TRY(kvf_stream_check(cache->device, stream));
    KVF_TRY(check_step(cache, args));
    KVF_TRY(check_out(cache, args));
    if (has_queries_alone(args->q, args->k, args->v))
        return decode_queries(cache, args, stream);
    if (cache->recording) {
        KVF_TRY(check_single(cache, args, "a recorded step has"));
        return kvf_recording_decode(cache->recording, args, stream);
    }
    KVF_TRY(check_append(cache, args));
    if (cache->plan.disk_bytes && kvf_has_streaming_heads(cache))
        KVF_TRY(check_single(cache, args, "a cache with disk_path and streaming heads takes"));
    return kvf_layer_decode(cache, args, stream);
}

kvf_status kvf_decode_sized(kvf_cache *cache, const kvf_decode_args *args, size_t size,
                            kvf_stream *stream)
{
    kvf_decode_args own;
    KVF_TRY(kvf_enter(cache));
    kvf_status status = KVF_SIZED_TAKE(cache->context, kvf_decode_args, args, size, &own);
    if (status == KVF_OK)
        status = decode(cache, &own, stream);
    return kvf_leave(cache, status);
}

/* ---- recordings ---- */

static kvf_status record_begin(kvf_cache *cache, kvf_sequence *const *sequences, uint32_t batch,
                               kvf_stream *stream)
{
    const kvf_cache_config *c = &cache->config;
    KVF_TRY(kvf_stream_check(cache->device, stream));
    if (!sequences)
        KVF_FAIL(cache->context, KVF_INVALID, "sequences is NULL; pass the batch");
    if (!cache->runtime->properties.can_capture)
        KVF_FAIL(cache->context, KVF_UNSUPPORTED,
                 "the %s device cannot record work; enqueue every step", cache->device->ops->name);
    if (!kvf_transfer_can_record(c->transfer))
        KVF_FAIL(cache->context, KVF_UNSUPPORTED,
                 "transfer = %s needs the host in every step; open the cache with mapped or auto",
                 kvf_transfer_name(c->transfer));
    if (!kvf_select_find(c->select)->can_record)
        KVF_FAIL(cache->context, KVF_UNSUPPORTED,
                 "select = %s needs the host in every step; use a policy that runs on the device",
                 kvf_select_name(cache->config.select));
    if (cache->plan.disk_bytes)
        KVF_FAIL(cache->context, KVF_UNSUPPORTED,
                 "disk_path = %s needs the host in every step; enqueue every step, or open the "
                 "cache without disk_path",
                 c->disk_path);
    if (cache->recording)
        KVF_FAIL(cache->context, KVF_INVALID,
                 "this cache is being recorded already; call kvf_record_end first");
    KVF_TRY(check_batch(cache, sequences, batch));
    return kvf_recording_begin(cache, sequences, batch, stream);
}

kvf_status kvf_record_begin(kvf_cache *cache, kvf_sequence *const *sequences, uint32_t batch,
                            kvf_stream *stream)
{
    KVF_TRY(kvf_enter(cache));
    return kvf_leave(cache, record_begin(cache, sequences, batch, stream));
}

static kvf_status record_end(kvf_cache *cache, kvf_recording **out)
{
    if (!cache->recording)
        KVF_FAIL(cache->context, KVF_INVALID,
                 "this cache is not being recorded; call kvf_record_begin first");
    return kvf_recording_end(cache->recording, out);
}

kvf_status kvf_record_end(kvf_cache *cache, kvf_recording **out)
{
    KVF_CHECK_OPENS(cache, cache, out);
    KVF_TRY(kvf_enter(cache));
    return kvf_leave(cache, record_end(cache, out));
}

int kvf_replay_is_possible(const kvf_recording *recording)
{
    return recording && kvf_handle_is_alive(recording->cache->context) &&
           kvf_recording_can_replay(recording);
}

kvf_status kvf_replay(kvf_recording *recording, kvf_stream *stream)
{
    KVF_TRY(kvf_handle_check(recording ? recording->cache->context : NULL, "recording"));
    KVF_TRY(kvf_enter_enqueueing(recording->cache, stream));
    return kvf_leave(recording->cache, kvf_recording_replay(recording, stream));
}

uint32_t kvf_recording_nodes(const kvf_recording *recording)
{
    return recording ? recording->cache->device->ops->graph_nodes(recording->graph) : 0;
}

void kvf_recording_destroy(kvf_recording *recording)
{
    if (recording && kvf_handle_is_alive(recording->cache->context))
        kvf_recording_close(recording);
}

/* ---- selection on its own ---- */

uint32_t kvf_select_pages_max(const kvf_cache *cache)
{
    return cache ? kvf_lists_pages_max(cache) : 0;
}

static kvf_status check_lists(kvf_cache *cache, const kvf_decode_args *args,
                              const kvf_page_lists *lists)
{
    KVF_TRY(check_single(cache, args, "page lists are of"));
    if (kvf_has_streaming_heads(cache))
        KVF_FAIL(cache->context, KVF_UNSUPPORTED,
                 "head_mask has streaming heads, whose pages cannot be listed; use kvf_decode, or "
                 "open the cache without a mask");
    if (!lists->indptr || !lists->indices || !lists->last_page_len)
        KVF_FAIL(cache->context, KVF_INVALID,
                 "lists has a NULL array; pass indptr, indices and last_page_len in device memory");
    const kvf_kv_group *kv_group = &cache->kv_groups[0];
    if (kv_group->dims.paging.lists != kv_group->dims.paging.kv_heads || kv_group->policy->by_token)
        KVF_FAIL(cache->context, KVF_UNSUPPORTED,
                 "select = %s does not choose whole pages per KV head; use another policy for page "
                 "lists",
                 kvf_select_name(cache->config.select));
    if (kv_group->dims.static_tokens)
        KVF_FAIL(cache->context, KVF_UNSUPPORTED,
                 "static_ratio = %g: tokens outside pages cannot be in page lists; open the "
                 "cache with static_ratio 0",
                 (double)cache->config.static_ratio);
    return KVF_OK;
}

static kvf_status select_pages(kvf_cache *cache, const kvf_decode_args *args,
                               const kvf_page_lists *lists, kvf_stream *stream)
{
    KVF_TRY(check_step(cache, args));
    KVF_TRY(check_lists(cache, args, lists));
    const uint64_t needed =
        (uint64_t)args->batch * cache->config.kv_heads * kvf_lists_pages_max(cache);
    if (lists->capacity < needed)
        KVF_FAIL(cache->context, KVF_INVALID,
                 "capacity = %u: batch %u x %u KV heads x kvf_select_pages_max() = %llu are needed",
                 lists->capacity, args->batch, cache->config.kv_heads, (unsigned long long)needed);
    KVF_TRY(check_append(cache, args));
    return kvf_lists_select(cache, args, lists, stream);
}

/* A call on page lists, with structs of the library. */
typedef kvf_status (*lists_fn)(kvf_cache *cache, const kvf_decode_args *args,
                               const kvf_page_lists *lists, kvf_stream *stream);

static kvf_status on_lists(lists_fn fn, kvf_cache *cache, const kvf_decode_args *args,
                           size_t args_size, const kvf_page_lists *lists, size_t lists_size,
                           kvf_stream *stream)
{
    kvf_decode_args own_args;
    kvf_page_lists own_lists;
    kvf_context *context = cache->context;
    KVF_TRY(KVF_SIZED_TAKE(context, kvf_decode_args, args, args_size, &own_args));
    KVF_TRY(KVF_SIZED_TAKE(context, kvf_page_lists, lists, lists_size, &own_lists));
    return fn(cache, &own_args, &own_lists, stream);
}

kvf_status kvf_select_pages_sized(kvf_cache *cache, const kvf_decode_args *args, size_t args_size,
                                  const kvf_page_lists *lists, size_t lists_size,
                                  kvf_stream *stream)
{
    KVF_TRY(kvf_enter_enqueueing(cache, stream));
    return kvf_leave(cache,
                     on_lists(select_pages, cache, args, args_size, lists, lists_size, stream));
}

/* Lists of what is there, and room for what comes of them. */
static kvf_status check_listed(kvf_cache *cache, const kvf_decode_args *args,
                               const kvf_page_lists *lists)
{
    KVF_TRY(check_lists(cache, args, lists));
    if (args->page_scores || args->page_ids)
        KVF_FAIL(cache->context, KVF_INVALID,
                 "%s is set: the lists select the pages; leave it NULL, or call kvf_select_pages",
                 args->page_scores ? "page_scores" : "page_ids");
    KVF_TRY(check_out(cache, args));
    return check_tokens_there(cache, args);
}

static kvf_status attend_pages(kvf_cache *cache, const kvf_decode_args *args,
                               const kvf_page_lists *lists, kvf_stream *stream)
{
    kvf_decode_args seen = *args;
    seen.k = seen.v = NULL; /* nothing is appended */
    KVF_TRY(check_step(cache, &seen));
    KVF_TRY(check_listed(cache, &seen, lists));
    return kvf_lists_attend(cache, &seen, lists, stream);
}

kvf_status kvf_attend_pages_sized(kvf_cache *cache, const kvf_decode_args *args, size_t args_size,
                                  const kvf_page_lists *lists, size_t lists_size,
                                  kvf_stream *stream)
{
    KVF_TRY(kvf_enter_enqueueing(cache, stream));
    return kvf_leave(cache,
                     on_lists(attend_pages, cache, args, args_size, lists, lists_size, stream));
}

static kvf_status read_pages(kvf_cache *cache, const kvf_decode_args *args,
                             const kvf_page_lists *lists, kvf_stream *stream)
{
    const kvf_decode_args seen = {
        .layer = args->layer, .batch = args->batch, .sequences = args->sequences, .out = args->out};
    if (!args->sequences)
        KVF_FAIL(cache->context, KVF_INVALID, "sequences is NULL; pass the batch");
    KVF_TRY(check_rows(cache, &seen));
    KVF_TRY(check_listed(cache, &seen, lists));
    return kvf_lists_read(cache, &seen, lists, stream);
}

kvf_status kvf_read_pages_sized(kvf_cache *cache, const kvf_decode_args *args, size_t args_size,
                                const kvf_page_lists *lists, size_t lists_size, kvf_stream *stream)
{
    KVF_TRY(kvf_enter_enqueueing(cache, stream));
    return kvf_leave(cache,
                     on_lists(read_pages, cache, args, args_size, lists, lists_size, stream));
}

const void *kvf_page_address(const kvf_sequence *sequence, uint32_t layer, uint32_t kv_head,
                             uint32_t page)
{
    return sequence && kvf_handle_is_alive(sequence->cache->context)
               ? kvf_lists_page_address(sequence, layer, kv_head, page)
               : NULL;
}
