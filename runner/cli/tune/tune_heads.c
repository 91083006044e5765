/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Which heads are hot: their sensitivity (head_sensitivity.h) over answers to hidden questions, or
 * over text.
 *
 * Every piece is read once. Each of its questions is decoded on a fork, then the right answer,
 * token by token; the steps that say the answer are looked at. Without questions it is the last
 * tokens of the piece, decoded as they stand. A question or a piece counts once, however long it
 * is. It knows questions and sequences, not files or pictures. Invariant: every piece and question
 * is on a sequence that is gone afterwards.
 */

#include "head_mask.h"
#include "head_sensitivity.h"
#include "interrupt.h"
#include "tune.h"

#include <math.h>
#include <stdlib.h>

#define TEXT_STEPS 256u /* of a piece without questions */

typedef struct heads_run {
    cli_tune *tune;
    kvf_session session;
    kvf_head_sensitivity *sensitivity;
    kvf_sampler *sampler; /* greedy */
    kvf_sequence *piece, *fork;
} heads_run;

void cli_tune_heads_cache(const cli_tune *tune, kvf_cache_config *config)
{
    config->pages = tune->options.cache.pages;
    if (tune->options.questions > 0) {
        config->tokens_max += TUNE_ANSWER_TOKENS_MAX;
        config->sequences_max = 2;
    }
}

/* One token; `looks`: at its step. */
static kvf_status feed(const heads_run *r, kvf_sequence *sequence, uint32_t id, bool looks,
                       kvf_error *error)
{
    const kvf_session *s = &r->session;
    kvf_status status = kvf_transformer_observe(
        s->transformer, looks ? kvf_head_sensitivity_see : NULL, r->sensitivity);
    if (status == KVF_OK)
        status = kvf_transformer_decode(s->transformer, s->cache, &sequence, &id, 1,
                                        looks && r->tune->options.questions > 0, s->stream);
    return kvf_session_finish(s, status, error);
}

static kvf_status read(heads_run *r, const uint32_t *ids, uint32_t count, kvf_error *error)
{
    const kvf_session *s = &r->session;
    kvf_status status = kvf_sequence_create(s->cache, &r->piece);
    if (status == KVF_OK)
        status = kvf_transformer_prefill(s->transformer, s->cache, r->piece, ids, count, s->stream);
    return kvf_session_finish(s, status, error);
}

static void drop(const heads_run *r, kvf_sequence **sequence)
{
    (void)!kvf_stream_wait(r->session.stream);
    kvf_transformer_forget(r->session.transformer);
    kvf_sequence_destroy(*sequence);
    *sequence = NULL;
}

/* ---- answers ---- */

/* The question, then its answer but the last token. */
static kvf_status say(const heads_run *r, const tune_question *q, const kvf_token_ids *answer,
                      bool *is_foreseen, kvf_error *error)
{
    const uint32_t *asked = r->tune->prompts.ids + q->first + q->body;
    const uint32_t count = q->count - q->body;
    *is_foreseen = true;
    for (size_t i = 0; i + 1 < count + answer->count; i++) {
        const bool tells = i + 1 >= count;
        const uint32_t id = i < count ? asked[i] : answer->ids[i - count];
        KVF_TRY(feed(r, r->fork, id, tells, error));
        if (tells &&
            kvf_sampler_next(r->sampler, 0, kvf_transformer_logits(r->session.transformer, 0)) !=
                answer->ids[i + 1 - count])
            *is_foreseen = false;
    }
    return KVF_OK;
}

static kvf_status ask(heads_run *r, const tune_question *q, kvf_error *error)
{
    const kvf_session *s = &r->session;
    kvf_token_ids answer = {0};
    bool is_foreseen = false;
    kvf_status status = cli_tune_answer(r->tune, q, &answer, error);
    if (status == KVF_OK)
        status = kvf_session_finish(s, kvf_sequence_fork(s->cache, r->piece, s->stream, &r->fork),
                                    error);
    if (status == KVF_OK)
        status = say(r, q, &answer, &is_foreseen, error);
    kvf_head_sensitivity_take(r->sensitivity, r->tune->sensitivity);
    r->tune->foreseen += is_foreseen;
    drop(r, &r->fork);
    kvf_token_ids_free(&answer);
    cli_tune_ran(r->tune);
    return status;
}

/* All questions of a piece. */
static kvf_status ask_all(heads_run *r, uint32_t piece, kvf_error *error)
{
    const cli_tune *tune = r->tune;
    const tune_question *first = &tune->questions[piece];
    kvf_status status = read(r, tune->prompts.ids + first->first, first->body, error);
    for (uint32_t i = piece; status == KVF_OK && i < tune->question_count && !cli_interrupted();
         i += tune->tuning.samples)
        status = ask(r, &tune->questions[i], error);
    drop(r, &r->piece);
    return status;
}

/* ---- text ---- */

static kvf_status read_on(heads_run *r, uint32_t piece, kvf_error *error)
{
    const uint32_t tokens = r->tune->tuning.tokens;
    const uint32_t *ids = r->tune->pieces.ids + (size_t)piece * tokens;
    kvf_status status = read(r, ids, tokens - TEXT_STEPS, error);
    for (uint32_t i = tokens - TEXT_STEPS; status == KVF_OK && i < tokens && !cli_interrupted();
         i++)
        status = feed(r, r->piece, ids[i], true, error);
    kvf_head_sensitivity_take(r->sensitivity, r->tune->sensitivity);
    drop(r, &r->piece);
    cli_tune_ran(r->tune);
    return status;
}

/* ---- all ---- */

static kvf_status check_room(const cli_tune *tune, kvf_error *error)
{
    const uint32_t budget = kvf_cache_settings(tune->cache)->budget_tokens;
    const uint32_t least = budget + TEXT_STEPS;
    if (tune->tuning.tokens > least)
        return KVF_OK;
    return model_fail(error, KVF_INVALID,
                      "pieces of %u tokens hardly exceed the %u that a head attends to, so no head "
                      "differs; give more --tokens than %u",
                      tune->tuning.tokens, budget, least);
}

/* Means, and the mask that follows. */
static kvf_status conclude(cli_tune *tune, uint32_t count, kvf_error *error)
{
    const size_t heads = (size_t)tune->model.layers * tune->model.kv_heads;
    for (size_t i = 0; i < heads; i++) {
        tune->sensitivity[i] /= count;
        if (!isfinite(tune->sensitivity[i]))
            return model_fail(error, KVF_NOT_FINITE,
                              "the output of KV head %zu of layer %zu is not finite; the weights "
                              "may be damaged, or too large for their type",
                              i % tune->model.kv_heads, i / tune->model.kv_heads);
    }
    if (tune->options.questions > 0 && tune->foreseen == 0)
        return model_fail(error, KVF_INVALID,
                          "the model foresees none of %u answers, so they tell nothing; give fewer "
                          "--tokens, lines that the model understands with --hide, or "
                          "--questions 0",
                          tune->question_count);
    return kvf_head_mask_most_sensitive(tune->sensitivity, tune->model.layers, tune->model.kv_heads,
                                        tune->options.hot_share, tune->mask, error);
}

static kvf_status run_all(heads_run *r, kvf_error *error)
{
    cli_tune *tune = r->tune;
    const uint32_t samples = tune->tuning.samples, questions = tune->question_count;
    const bool asks = tune->options.questions > 0;
    const uint32_t pieces = asks && questions < samples ? questions : samples;
    const uint32_t runs = asks ? questions : samples;
    kvf_status status = KVF_OK;
    cli_progress_begin(&tune->progress, "measuring", runs, asks ? "questions" : "pieces");
    for (uint32_t i = 0; status == KVF_OK && i < pieces && !cli_interrupted(); i++)
        status = asks ? ask_all(r, i, error) : read_on(r, i, error);
    cli_progress_end(&tune->progress);
    return status == KVF_OK && !cli_interrupted() ? conclude(tune, runs, error) : status;
}

kvf_status cli_tune_heads(cli_tune *tune, kvf_error *error)
{
    const size_t heads = (size_t)tune->model.layers * tune->model.kv_heads;
    heads_run r = {.tune = tune, .session = cli_tune_session(tune, NULL)};
    tune->sensitivity = calloc(heads, sizeof *tune->sensitivity);
    tune->mask = calloc(heads, sizeof *tune->mask);
    if (!tune->sensitivity || !tune->mask)
        return model_out_of_memory(error, heads * sizeof *tune->sensitivity,
                                   "the sensitivity of heads");
    KVF_TRY(check_room(tune, error));
    KVF_TRY(kvf_sampler_create(tune->model.vocab_size, 1, &r.sampler, error));
    kvf_status status = kvf_head_sensitivity_open(tune->runtime, &tune->model, tune->cache,
                                                  tune->stream, &r.sensitivity, error);
    if (status == KVF_OK)
        status = run_all(&r, error);
    (void)!kvf_transformer_observe(tune->transformer, NULL, NULL);
    kvf_head_sensitivity_close(r.sensitivity);
    kvf_sampler_destroy(r.sampler);
    tune->interrupted = cli_interrupted();
    return status;
}
