/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Part of retain.h. The static set out of given scores: a refresh whose observation somebody else
 * has made.
 *
 * Knows nothing of where scores come from. Candidates are those of every refresh, so that scores of
 * the sink and of the window change nothing. Afterwards the row is as after an exact refresh.
 */

#include "addressable.h"
#include "cache.h"
#include "retain.h"
#include "select.h"
#include "static_set.h"

/* Scores [kv_heads, length] into token_score, whose stride is longer. */
static kvf_status put_scores(kvf_call *call, const float *scores)
{
    const kvf_kv_group *kv_group = call->kv_group;
    const kvf_pool_args args = {.vectors = kv_group->config.kv_heads,
                                .stride = call->row_host->length,
                                .count = call->row_host->length,
                                .width = 1,
                                .out_stride = kvf_token_stride(kv_group, 0),
                                .in = scores,
                                .out = kv_group->tables.tokens.score};
    return KVF_LAUNCH(call, pool, args);
}

static kvf_status enqueue(kvf_call *call, const float *scores)
{
    kvf_kv_group *kv_group = call->kv_group;
    KVF_TRY(kvf_call_send(call));
    KVF_TRY(kvf_call_stamp(call, NULL));
    KVF_TRY(kvf_static_seed(call, 0, scores, put_scores));
    return kvf_call_stamp(call, &kvf_counters_device(kv_group, call->index)->refresh_ns);
}

kvf_status kvf_sequence_seed(kvf_cache *cache, kvf_sequence *sequence, uint32_t layer,
                             const float *scores, kvf_stream *stream)
{
    KVF_TRY(kvf_layer_check(cache, layer));
    if (!scores)
        KVF_FAIL(cache->context, KVF_INVALID, "scores is NULL; pass those of the layer's tokens");
    KVF_TRY(kvf_sequence_check(cache, sequence));
    kvf_layer *state = &sequence->layers[layer];
    if (state->kv_group->dims.static_tokens == 0)
        return KVF_OK;
    if (state->extent.sealed > 0) {
        kvf_call call = {.cache = cache};
        KVF_TRY(kvf_call_open(&call, layer, &sequence, true, stream));
        kvf_refresh_seed(&state->refresh);
        kvf_call_rows(&call);
        kvf_call_rows_after(&call);
        KVF_TRY(kvf_call_end(&call, enqueue(&call, scores)));
    }
    kvf_refresh_seeded(&state->refresh);
    return KVF_OK;
}
