/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Prompts and tokens that are given, and what a session can do. Tokens that are generated are in
 * generate_batch.c.
 *
 * It knows when a token is fed, timed and scored. Invariant: a step is waited for before the next
 * one.
 */

#include "generate.h"

#include "common/clock.h"

#include <math.h>

kvf_status kvf_session_finish(const kvf_session *session, kvf_status enqueued, kvf_error *error)
{
    kvf_status waited = kvf_stream_wait(session->stream);
    kvf_status status = enqueued != KVF_OK ? enqueued : waited;
    if (status == KVF_OK)
        return kvf_transformer_check(session->transformer, error);
    return kvf_library_told(session->runtime, status, error);
}

kvf_status kvf_session_cut(const kvf_session *session, kvf_sequence *sequence, uint32_t count)
{
    const uint32_t length = kvf_sequence_length(sequence, 0);
    const uint32_t end = kvf_sequence_position(sequence, 0, length - 1) + 1;
    return kvf_sequence_truncate(session->cache, sequence, end - count, session->stream);
}

kvf_status kvf_session_check_draft(const kvf_session *session, kvf_error *error)
{
    const kvf_cache_plan *plan = kvf_cache_memory(session->cache);
    if (plan->static_tokens)
        return model_fail(error, KVF_UNSUPPORTED,
                          "a static set of %u tokens is not restored when tokens of a draft are "
                          "taken back; use a selection without one",
                          plan->static_tokens);
    return KVF_OK;
}

static bool evicts(const kvf_session *session)
{
    return session->prune && kvf_prune_config_get(session->prune)->eviction != KVF_EVICTION_NONE;
}

/* Whether such a prompt can go in: by chunks where the session has them or the pruner needs them,
 * else whole where there is a pruner. */
static kvf_status check_prompt(const kvf_session *session, uint32_t count, kvf_error *error)
{
    const uint32_t prompt_max = kvf_transformer_prompt_max(session->transformer);
    if (session->chunk || evicts(session))
        KVF_TRY(kvf_transformer_chunk_check(session->transformer, session->prune, count,
                                            session->chunk, error));
    if (session->prune && !evicts(session) && count > prompt_max)
        return model_fail(error, KVF_INVALID,
                          "the prompt has %u tokens, and only %u fit one prefill, which pruning "
                          "needs; open the transformer with a larger prompt_max",
                          count, prompt_max);
    return KVF_OK;
}

/* A piece of a prompt on its way. */
typedef struct prompt_watch {
    const kvf_prefill_request *request;
    uint32_t done; /* in front of it */
} prompt_watch;

static bool ask(void *user, uint32_t done, uint32_t total)
{
    const prompt_watch *w = user;
    (void)total;
    return w->request->progress(w->request->user, w->done + done, w->request->count);
}

kvf_status kvf_generate_prefill(const kvf_session *session, const kvf_prefill_request *request,
                                kvf_stop *stop, kvf_error *error)
{
    kvf_transformer *transformer = session->transformer;
    *stop = KVF_STOP_LENGTH;
    if (request->count == 0)
        return KVF_OK;
    KVF_TRY(check_prompt(session, request->count, error));
    /* A pruned prompt goes in one call: a policy looks at all of it, and what is evicted from
     * chunks depends on where the prompt ends. */
    const uint32_t piece_max = session->prune   ? request->count
                               : session->chunk ? session->chunk
                                                : kvf_transformer_prompt_max(transformer);
    for (uint32_t done = 0; done < request->count;) {
        const uint32_t rest = request->count - done, piece = rest < piece_max ? rest : piece_max;
        prompt_watch watch = {request, done};
        kvf_transformer_watch(transformer, request->progress ? ask : NULL, &watch);
        const kvf_status status = kvf_transformer_prefill_chunked(
            transformer, session->cache, session->prune, request->sequence, request->ids + done,
            piece, evicts(session) ? session->chunk : piece,
            request->wants_logits && done + piece == request->count, session->stream);
        kvf_transformer_watch(transformer, NULL, NULL);
        KVF_TRY(kvf_session_finish(session, status, error));
        done += piece;
        if (kvf_transformer_stopped(transformer)) {
            *stop = KVF_STOP_CALLER;
            return KVF_OK;
        }
        if (request->progress && !request->progress(request->user, done, request->count) &&
            done < request->count) {
            *stop = KVF_STOP_CALLER;
            return KVF_OK;
        }
    }
    return KVF_OK;
}

/* The next of @p count ids that are given: as many as one step takes, which are @p taken. */
static kvf_status feed(const kvf_session *session, kvf_sequence *sequence, const uint32_t *ids,
                       uint32_t count, bool wants_logits, uint32_t *taken, kvf_error *error)
{
    const uint32_t most = session->step_tokens ? session->step_tokens : 1;
    const kvf_several several = {&sequence, taken, ids, 1};
    *taken = count < most ? count : most;
    const kvf_status status = kvf_transformer_decode_several(
        session->transformer, session->cache, &several, wants_logits, session->stream);
    return kvf_session_finish(session, status, error);
}

kvf_status kvf_generate_extend(const kvf_session *session, const kvf_prefill_request *request,
                               kvf_stop *stop, kvf_error *error)
{
    *stop = KVF_STOP_LENGTH;
    for (uint32_t done = 0, taken; done < request->count;) {
        /* A step of several tokens has their logits in as many rows. */
        const uint32_t rest = request->count - done;
        const bool is_last = request->wants_logits && rest == 1;
        KVF_TRY(feed(session, request->sequence, request->ids + done,
                     request->wants_logits && !is_last ? rest - 1 : rest, is_last, &taken, error));
        done += taken;
        if (request->progress && !request->progress(request->user, done, request->count) &&
            done < request->count) {
            *stop = KVF_STOP_CALLER;
            return KVF_OK;
        }
    }
    return KVF_OK;
}

static bool is_likeliest(const float *logits, uint32_t vocab_size, uint32_t id)
{
    for (uint32_t i = 0; i < vocab_size; i++)
        if (logits[i] > logits[id] || (logits[i] == logits[id] && i < id))
            return false;
    return true;
}

/* A row of the logits scores id i. */
static kvf_status score(const kvf_session *session, const kvf_score_request *request, uint32_t row,
                        uint32_t i, kvf_error *error)
{
    const float *logits = kvf_transformer_logits(session->transformer, row);
    const double loss = kvf_logits_loss(logits, request->vocab_size, request->ids[i]);
    if (!isfinite(loss))
        return model_fail(error, KVF_NOT_FINITE,
                          "the model gives token %u of the text no probability; the weights "
                          "may be damaged, or too large for their type",
                          i + 1);
    request->loss[i] = (float)loss;
    if (request->likeliest)
        request->likeliest[i] = is_likeliest(logits, request->vocab_size, request->ids[i]);
    return KVF_OK;
}

/* Tokens of one step. */
static void tell_each(kvf_decode_result *result, uint32_t tokens, double ms)
{
    for (uint32_t i = 0; i < tokens; i++, result->steps++)
        if (result->step_ms)
            result->step_ms[result->steps] = ms;
}

kvf_status kvf_generate_score(const kvf_session *session, const kvf_score_request *request,
                              kvf_decode_result *result, kvf_error *error)
{
    result->stop = KVF_STOP_LENGTH;
    result->generated = 0;
    result->steps = 0;
    result->first_ms = 0.0;
    KVF_TRY(score(session, request, 0, 0, error));
    for (uint32_t i = 0, taken; i + 1 < request->count; i += taken) {
        const double start = kvf_now_ms();
        KVF_TRY(feed(session, request->sequence, request->ids + i, request->count - 1 - i, true,
                     &taken, error));
        tell_each(result, taken, (kvf_now_ms() - start) / taken);
        for (uint32_t row = 0; row < taken; row++)
            KVF_TRY(score(session, request, row, i + row + 1, error));
        if (request->progress && !request->progress(request->user, i + taken, request->count - 1)) {
            result->stop = KVF_STOP_CALLER;
            return KVF_OK;
        }
    }
    return KVF_OK;
}
