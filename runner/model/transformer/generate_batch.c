/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Continuous batching, and one answer of a sequence that is there already, which is a batch of one
 * row; see the headers.
 *
 * Memory is promised when an answer begins and taken back when it ends, so that no answer has to
 * give way to another. Prompts begin in their order. Invariant: what was promised is at most
 * tokens_max; at most one prompt is prefilled and has answers that did not begin; the token that
 * ended an answer was handed out, and is not in its sequence.
 */

#include "generate_batch.h"

#include "common/clock.h"

#include <stdlib.h>
#include <string.h>

/* Tokens of a block, at most. */
#define BLOCK_TOKENS 64u

/* A row of the batch. */
typedef struct row {
    kvf_sequence *sequence; /* NULL = free */
    uint32_t next;          /* token to feed */
    double start_ms;
    bool has_ended;   /* answer.stop says why */
    kvf_draft *draft; /* NULL = none; stays when an answer ends */
    kvf_batch_answer answer;
} row;

typedef struct batch {
    const kvf_session *session;
    const kvf_batch_request *request;
    uint32_t local_tokens;
    row *rows;
    uint32_t *alive;          /* [count] answers of a prompt that are on their way */
    kvf_sequence **sequences; /* [rows] of a step, as the next two */
    uint32_t *at;             /* row */
    uint32_t *tokens;         /* of each, in the step: one, and what its draft guessed */
    uint32_t count;           /* of these */
    uint32_t *ids;            /* [fed] one after the other */
    uint32_t fed;
    uint64_t promised;
    uint32_t prompt, sample; /* the answer that begins next */
    kvf_sequence *root;      /* its prompt; NULL = not yet */
    uint32_t read;           /* of the tokens that the root is to get */
    uint32_t since;          /* tokens read since the last step */
    bool is_held;            /* the next piece is read after a step */
    float *logits;           /* [vocab] of its last token */
    double start_ms;         /* of the root */
    double chunk_ms;         /* of its last chunk */
    uint32_t prefilled;      /* of the piece that is read */
    bool keeps;              /* the one sequence is the caller's: it has no token too many */
    bool stopped;
} batch;

/* ---- memory ---- */

/* A fork has its own window, which is sealed in blocks of its own. */
static uint64_t fork_tokens(uint32_t local_tokens)
{
    return (uint64_t)local_tokens + 2 * BLOCK_TOKENS;
}

static uint64_t prompt_tokens(const kvf_batch_prompt *p, uint32_t local_tokens)
{
    return p->shared ? (uint64_t)p->count - p->shared + fork_tokens(local_tokens)
                     : (uint64_t)p->count + BLOCK_TOKENS;
}

static uint64_t answer_tokens(const kvf_batch_prompt *p, uint32_t local_tokens)
{
    return (uint64_t)p->tokens + fork_tokens(local_tokens);
}

uint64_t kvf_batch_tokens(const kvf_batch_prompt *prompt, uint32_t answers, uint32_t local_tokens)
{
    return prompt_tokens(prompt, local_tokens) + answers * answer_tokens(prompt, local_tokens);
}

/* The tokens that the next answer adds; its prompt is there already if another one of it is. */
static uint64_t next_tokens(const batch *b)
{
    const kvf_batch_prompt *p = &b->request->prompts[b->prompt];
    return answer_tokens(p, b->local_tokens) +
           (b->root || b->alive[b->prompt] ? 0 : prompt_tokens(p, b->local_tokens));
}

static row *free_row(const batch *b)
{
    for (uint32_t i = 0; i < b->request->rows; i++)
        if (!b->rows[i].sequence)
            return &b->rows[i];
    return NULL;
}

static bool is_empty(const batch *b)
{
    for (uint32_t i = 0; i < b->request->rows; i++)
        if (b->rows[i].sequence)
            return false;
    return true;
}

/* ---- an answer ---- */

static void drop_sequence(const batch *b, kvf_sequence **sequence)
{
    kvf_transformer_forget(b->session->transformer);
    kvf_sequence_destroy(*sequence);
    *sequence = NULL;
}

static void end_answer(batch *b, row *r)
{
    const kvf_batch_prompt *p = &b->request->prompts[r->answer.prompt];
    if (b->keeps) {
        r->sequence = NULL;
        return;
    }
    drop_sequence(b, &r->sequence);
    b->promised -= answer_tokens(p, b->local_tokens);
    if (--b->alive[r->answer.prompt] == 0 && !(b->root && b->prompt == r->answer.prompt))
        b->promised -= prompt_tokens(p, b->local_tokens);
    r->answer.ms = kvf_now_ms() - r->start_ms;
    b->request->end(b->request->user, &r->answer);
}

/* After a chunk of a prompt. */
static bool on_chunk(void *user, uint32_t done, uint32_t total)
{
    batch *b = user;
    const double now = kvf_now_ms();
    (void)total;
    b->stopped = !b->request->pass(b->request->user, done - b->prefilled, 0, now - b->chunk_ms);
    b->prefilled = done;
    b->chunk_ms = now;
    return !b->stopped;
}

/* Tokens of the prompt of the next answer that are its own. */
static uint32_t root_tokens(const batch *b)
{
    const kvf_batch_prompt *p = &b->request->prompts[b->prompt];
    return p->count - p->shared;
}

/* The prompt of the next answer, without its tokens. */
static kvf_status begin_root(batch *b, kvf_error *error)
{
    const kvf_batch_prompt *p = &b->request->prompts[b->prompt];
    b->start_ms = kvf_now_ms();
    b->read = 0;
    const kvf_status created = p->shared ? kvf_sequence_fork(b->session->cache, b->request->base,
                                                             b->session->stream, &b->root)
                                         : kvf_sequence_create(b->session->cache, &b->root);
    KVF_TRY(kvf_library_told(b->session->runtime, created, error));
    b->promised += prompt_tokens(p, b->local_tokens);
    return KVF_OK;
}

/* Tokens of the next piece: all that is left where nobody waits, or where a policy looks at all. */
static uint32_t next_piece(const batch *b)
{
    const uint32_t rest = root_tokens(b) - b->read, piece = b->request->piece;
    return !piece || b->session->prune || rest < piece || is_empty(b) ? rest : piece;
}

static kvf_status read_piece(batch *b, kvf_error *error)
{
    const kvf_batch_prompt *p = &b->request->prompts[b->prompt];
    const kvf_prefill_request prefill = {.sequence = b->root,
                                         .ids = p->ids + p->shared + b->read,
                                         .count = next_piece(b),
                                         .wants_logits = b->read + next_piece(b) == root_tokens(b),
                                         .progress = on_chunk,
                                         .user = b};
    kvf_stop stop;
    b->chunk_ms = kvf_now_ms();
    b->prefilled = 0;
    KVF_TRY(kvf_generate_prefill(b->session, &prefill, &stop, error));
    b->read += prefill.count;
    b->since += prefill.count;
    if (prefill.wants_logits && stop == KVF_STOP_LENGTH)
        memcpy(b->logits, kvf_transformer_logits(b->session->transformer, 0),
               b->request->vocab_size * sizeof *b->logits);
    return KVF_OK;
}

static void mark_end(row *r, kvf_stop stop)
{
    r->has_ended = true;
    r->answer.stop = stop;
}

static uint32_t choose(const batch *b, const row *r, const float *logits)
{
    const kvf_batch_request *request = b->request;
    return request->choose ? request->choose(request->user, &r->answer, logits)
                           : kvf_sampler_next(request->sampler, r->answer.row, logits);
}

/* A row's next token. */
static void hand_out(const batch *b, row *r, uint32_t id)
{
    const kvf_batch_request *request = b->request;
    kvf_batch_answer *a = &r->answer;
    a->has_no_logits = id == KVF_SAMPLER_NONE;
    if (a->has_no_logits) {
        mark_end(r, KVF_STOP_CALLER);
        return;
    }
    if (a->generated++ == 0)
        a->first_ms = kvf_now_ms() - r->start_ms;
    const bool goes_on = request->token(request->user, a, id);
    r->next = id;
    if (r->draft)
        kvf_draft_see(r->draft, &id, 1);
    if (!request->ignores_eos && kvf_ids_have(request->eos_ids, request->eos_count, id))
        mark_end(r, KVF_STOP_EOS);
    else if (!goes_on)
        mark_end(r, KVF_STOP_CALLER);
    else if (a->generated == request->prompts[a->prompt].tokens)
        mark_end(r, KVF_STOP_LENGTH);
}

/* The last answer of a prompt goes on with its sequence itself. */
static kvf_status begin_answer(batch *b, row *r, kvf_error *error)
{
    const kvf_batch_prompt *p = &b->request->prompts[b->prompt];
    kvf_sampling_config sampling = p->sampling;
    const uint32_t index = (uint32_t)(r - b->rows);
    if (b->sample + 1 < p->samples) {
        const kvf_status forked =
            kvf_sequence_fork(b->session->cache, b->root, b->session->stream, &r->sequence);
        KVF_TRY(kvf_library_told(b->session->runtime, forked, error));
    } else {
        r->sequence = b->root;
        b->root = NULL;
    }
    sampling.seed += b->sample;
    b->promised += answer_tokens(p, b->local_tokens);
    b->alive[b->prompt]++;
    r->has_ended = false;
    r->start_ms = b->start_ms;
    r->answer = (kvf_batch_answer){.prompt = b->prompt, .sample = b->sample, .row = index};
    b->sample++;
    if (b->sample == p->samples) {
        b->prompt++;
        b->sample = 0;
    }
    KVF_TRY(kvf_sampler_begin(b->request->sampler, index, &sampling, error));
    kvf_sampler_see(b->request->sampler, index, p->ids, p->count);
    if (r->draft) {
        kvf_draft_cut(r->draft, 0);
        kvf_draft_see(r->draft, p->ids, p->count);
    }
    hand_out(b, r, choose(b, r, b->logits));
    if (r->has_ended)
        end_answer(b, r);
    return KVF_OK;
}

/* ---- the batch ---- */

/* Whether answers under way have waited long enough for what is read. */
static bool has_to_step(const batch *b)
{
    return b->request->piece && b->since && b->since + next_piece(b) > b->request->piece &&
           !is_empty(b);
}

/* Begin answers until there is no row or no memory for the next, or its prompt has to wait. */
static kvf_status fill(batch *b, kvf_error *error)
{
    const kvf_batch_request *request = b->request;
    row *r;
    b->is_held = false;
    while (!b->stopped && b->prompt < request->count && (r = free_row(b)) != NULL) {
        if (b->promised + next_tokens(b) > request->tokens_max) {
            if (!is_empty(b))
                return KVF_OK;
            return model_fail(error, KVF_FULL,
                              "prompt %u needs room for %llu tokens and the cache has %llu",
                              b->prompt, (unsigned long long)next_tokens(b),
                              (unsigned long long)request->tokens_max);
        }
        if (!b->root)
            KVF_TRY(begin_root(b, error));
        if (b->read == root_tokens(b)) {
            KVF_TRY(begin_answer(b, r, error));
            continue;
        }
        b->is_held = has_to_step(b);
        if (b->is_held)
            return KVF_OK;
        KVF_TRY(read_piece(b, error));
    }
    return KVF_OK;
}

/* The batch ends before it, or with it. */
static void stop_answer(batch *b, row *r)
{
    if (!r->has_ended)
        mark_end(r, KVF_STOP_CALLER);
    end_answer(b, r);
}

/* The rows of the next step. */
static void collect(batch *b)
{
    b->count = 0;
    for (uint32_t i = 0; i < b->request->rows; i++)
        if (b->rows[i].sequence) {
            b->sequences[b->count] = b->rows[i].sequence;
            b->at[b->count++] = i;
        }
}

/* Their inputs: their next tokens, and what drafts guess, as far as the step has room. */
static void feed(batch *b)
{
    uint32_t room = kvf_max_u32(b->count, b->request->step_rows) - b->count;
    b->fed = 0;
    for (uint32_t i = 0; i < b->count; i++) {
        const row *r = &b->rows[b->at[i]];
        const kvf_batch_answer *a = &r->answer;
        const uint32_t rest = b->request->prompts[a->prompt].tokens - a->generated - 1;
        const uint32_t most = kvf_min_u32(rest, room / (b->count - i));
        uint32_t guessed = 0;
        b->ids[b->fed++] = r->next;
        if (r->draft && most > 0)
            guessed = kvf_draft_guess(r->draft, most, b->ids + b->fed);
        b->tokens[i] = 1 + guessed;
        b->fed += guessed;
        room -= guessed;
    }
}

static void end_answers(batch *b)
{
    for (uint32_t i = 0; i < b->count; i++)
        if (b->rows[b->at[i]].has_ended)
            end_answer(b, &b->rows[b->at[i]]);
}

/* ---- steps ---- */

static kvf_status enqueue(const batch *b)
{
    const kvf_session *session = b->session;
    const kvf_several several = {b->sequences, b->tokens, b->ids, b->count};
    return kvf_transformer_decode_several(session->transformer, session->cache, &several, true,
                                          session->stream);
}

/* The token that an answer draws after each of its tokens ids, the first of which is row @p at of
 * the step, as long as its draft has guessed that. The rest of the draft is taken back. */
static kvf_status follow(const batch *b, uint32_t i, uint32_t at)
{
    row *r = &b->rows[b->at[i]];
    const uint32_t guessed = b->tokens[i] - 1;
    uint32_t right = 0;
    for (;; right++) {
        const float *logits = kvf_transformer_logits(b->session->transformer, at + right);
        hand_out(b, r, choose(b, r, logits));
        if (r->has_ended || right == guessed || r->next != b->ids[at + right + 1])
            break;
    }
    if (r->draft)
        kvf_draft_learn(r->draft, guessed, right);
    r->answer.drafted += guessed;
    r->answer.accepted += right;
    return (r->has_ended && !b->keeps) || right == guessed
               ? KVF_OK
               : kvf_session_cut(b->session, r->sequence, guessed - right);
}

static kvf_status choose_step(batch *b, kvf_error *error)
{
    collect(b);
    b->since = 0;
    feed(b);
    const double start = kvf_now_ms();
    KVF_TRY(kvf_session_finish(b->session, enqueue(b), error));
    const double ms = kvf_now_ms() - start;
    kvf_status status = KVF_OK;
    for (uint32_t i = 0, at = 0; i < b->count && status == KVF_OK; at += b->tokens[i++])
        status = follow(b, i, at);
    if (b->fed > b->count)
        KVF_TRY(kvf_session_finish(b->session, status, error));
    end_answers(b);
    b->stopped = !b->request->pass(b->request->user, 0, b->count, ms) || b->stopped;
    return KVF_OK;
}

static kvf_status run(batch *b, kvf_error *error)
{
    while (!b->stopped) {
        KVF_TRY(fill(b, error));
        if (is_empty(b) || b->stopped)
            return KVF_OK;
        KVF_TRY(choose_step(b, error));
    }
    return KVF_OK;
}

static kvf_status open_drafts(const batch *b, kvf_error *error)
{
    const kvf_batch_request *request = b->request;
    size_t ids_max = 0;
    for (uint32_t i = 0; i < request->count; i++) {
        const kvf_batch_prompt *p = &request->prompts[i];
        ids_max = p->count + p->tokens > ids_max ? p->count + p->tokens : ids_max;
    }
    KVF_TRY(kvf_session_check_draft(b->session, error));
    for (uint32_t i = 0; i < request->rows; i++)
        KVF_TRY(kvf_draft_create(request->draft_tokens, ids_max, &b->rows[i].draft, error));
    return KVF_OK;
}

static kvf_status open_batch(batch *b, kvf_error *error)
{
    const kvf_batch_request *request = b->request;
    const uint32_t rows = request->rows;
    b->rows = calloc(rows, sizeof *b->rows);
    b->alive = calloc(request->count, sizeof *b->alive);
    b->sequences = calloc(rows, sizeof(kvf_sequence *));
    b->ids = calloc(kvf_max_u32(rows, request->step_rows), sizeof *b->ids);
    b->at = calloc(rows, sizeof *b->at);
    b->tokens = calloc(rows, sizeof *b->tokens);
    b->logits = calloc(request->vocab_size, sizeof *b->logits);
    if (!b->rows || !b->alive || !b->sequences || !b->ids || !b->at || !b->tokens || !b->logits)
        return model_out_of_memory(error, rows * sizeof *b->rows, "a batch");
    return request->draft_tokens ? open_drafts(b, error) : KVF_OK;
}

static void close_batch(batch *b)
{
    for (uint32_t i = 0; b->rows && b->alive && i < b->request->rows; i++) {
        if (b->rows[i].sequence)
            stop_answer(b, &b->rows[i]);
        kvf_draft_destroy(b->rows[i].draft);
    }
    if (b->root)
        drop_sequence(b, &b->root);
    free(b->logits);
    free(b->rows);
    free(b->alive);
    free(b->sequences);
    free(b->ids);
    free(b->at);
    free(b->tokens);
}

kvf_status kvf_generate_batch(const kvf_session *session, const kvf_batch_request *request,
                              kvf_error *error)
{
    batch b = {.session = session,
               .request = request,
               .local_tokens = kvf_cache_settings(session->cache)->local_tokens};
    kvf_status status = open_batch(&b, error);
    if (status == KVF_OK)
        status = run(&b, error);
    if (status != KVF_OK)
        (void)!kvf_stream_wait(session->stream);
    close_batch(&b);
    return status;
}

/* ---- one answer ---- */

typedef struct single {
    const kvf_decode_request *request;
    kvf_decode_result *result;
    const float *logits; /* of the next token */
} single;

static uint32_t choose_one(void *user, const kvf_batch_answer *answer, const float *logits)
{
    single *s = user;
    s->logits = logits;
    return kvf_sampler_next(s->request->sampler, answer->row, logits);
}

static bool on_token(void *user, const kvf_batch_answer *answer, uint32_t id)
{
    single *s = user;
    s->result->generated = answer->generated;
    return !s->request->token || s->request->token(s->request->user, id, s->logits);
}

static bool on_step(void *user, uint32_t prefilled, uint32_t rows, double ms)
{
    const single *s = user;
    (void)prefilled;
    (void)rows;
    if (s->result->step_ms)
        s->result->step_ms[s->result->steps] = ms;
    s->result->steps++;
    return true;
}

/* The first token, from logits that are there, and those that follow it. */
static kvf_status answer_one(batch *b, row *r, kvf_error *error)
{
    const float *logits = kvf_transformer_logits(b->session->transformer, 0);
    hand_out(b, r, choose_one(b->request->user, &r->answer, logits));
    return r->has_ended ? KVF_OK : run(b, error);
}

kvf_status kvf_generate_decode(const kvf_session *session, const kvf_decode_request *request,
                               kvf_decode_result *result, kvf_error *error)
{
    single s = {.request = request, .result = result};
    const kvf_batch_prompt prompt = {.tokens = request->tokens, .samples = 1};
    const kvf_batch_request of_one = {.prompts = &prompt,
                                      .rows = 1,
                                      .sampler = request->sampler,
                                      .eos_ids = request->eos_ids,
                                      .eos_count = request->eos_count,
                                      .step_rows = 1 + KVF_DRAFT_MAX,
                                      .choose = choose_one,
                                      .token = on_token,
                                      .pass = on_step,
                                      .user = &s};
    kvf_sequence *sequence;
    uint32_t at, tokens, ids[1 + KVF_DRAFT_MAX];
    row r = {.sequence = request->sequence, .draft = request->draft, .start_ms = kvf_now_ms()};
    batch b = {.session = session,
               .request = &of_one,
               .rows = &r,
               .sequences = &sequence,
               .at = &at,
               .tokens = &tokens,
               .ids = ids,
               .keeps = true};
    *result = (kvf_decode_result){.stop = KVF_STOP_LENGTH, .step_ms = result->step_ms};
    if (request->tokens == 0)
        return KVF_OK;
    if (request->draft)
        KVF_TRY(kvf_session_check_draft(session, error));
    KVF_TRY(answer_one(&b, &r, error));
    result->stop = r.answer.stop;
    result->first_ms = r.answer.first_ms;
    result->drafted = r.answer.drafted;
    result->accepted = r.answer.accepted;
    if (!r.answer.has_no_logits)
        return KVF_OK;
    return model_fail(error, KVF_NOT_FINITE,
                      "no logit is a finite number after %u generated tokens; the weights may "
                      "be damaged, or too large for their type",
                      result->generated);
}
