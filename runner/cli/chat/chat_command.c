/* SPDX-License-Identifier: Apache-2.0 */

/*
 * `kvferry chat`: a conversation that stays in the cache.
 *
 * The template's text of all messages is compared with the text that the sequence holds. Where
 * that is its beginning, only the rest is read. Where it is not, because a template drops what a
 * model thought or trims an answer, the conversation goes on from a fork that was made in front of
 * the answer. It knows texts, not what they mean. Invariant: `now` holds the tokens of `now_text`
 * and nothing else; so does `before`, if there is one.
 */

#include "chat_channels.h"
#include "commands.h"
#include "common/clock.h"
#include "interrupt.h"
#include "line_input.h"
#include "progress.h"
#include "run.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Tokens from which on reading is shown. */
#define LONG_READING 512u

typedef struct conversation {
    cli_run *run;
    kvf_chat_message *messages; /* [count]; texts are owned, but for the system prompt */
    size_t count, capacity;
    kvf_text now_text, before_text;
    kvf_sequence *before; /* a fork in front of the last answer, or NULL; `now` is run->sequence */
    size_t now_count, before_count; /* tokens that were read for them, which a draft has seen */
    kvf_token_ids after;            /* tokens of `now` after the prompt that was pruned */
} conversation;

/* A turn: what it adds. */
typedef struct turn {
    kvf_text full;     /* all messages, up to the opening of the answer */
    size_t stable;     /* bytes of it that later turns begin with, as far as is known */
    kvf_token_ids ids; /* of what is new */
    size_t stable_ids; /* of them in front of `stable` */
    bool is_pruned;    /* the whole of it, into an empty sequence */
    bool is_read;      /* the sequence has changed */
    double read_ms;
} turn;

/* ---- messages ---- */

static kvf_status add_message(conversation *c, kvf_chat_role role, const char *text,
                              kvf_error *error)
{
    if (c->count == c->capacity) {
        const size_t capacity = c->capacity ? 2 * c->capacity : 64;
        kvf_chat_message *grown = realloc(c->messages, capacity * sizeof *grown);
        if (!grown)
            return model_out_of_memory(error, capacity * sizeof *grown, "messages");
        c->messages = grown;
        c->capacity = capacity;
    }
    char *copy = strdup(text);
    if (!copy)
        return model_out_of_memory(error, strlen(text), "a message");
    c->messages[c->count++] = (kvf_chat_message){.role = role, .text = copy};
    return KVF_OK;
}

static void drop_messages(conversation *c, size_t left)
{
    while (c->count > left)
        free((char *)(uintptr_t)c->messages[--c->count].text);
}

/* Only the system prompt is left. */
static kvf_status begin(conversation *c, kvf_error *error)
{
    drop_messages(c, 0);
    kvf_sampler_forget(c->run->sampler, 0);
    return c->run->options.chat.system
               ? add_message(c, KVF_ROLE_SYSTEM, c->run->options.chat.system, error)
               : KVF_OK;
}

/* ---- sequences ---- */

static void set_text(kvf_text *text, size_t size)
{
    text->size = size < text->size ? size : text->size;
}

static bool begins_with(const kvf_text *text, const kvf_text *beginning)
{
    return beginning->size <= text->size &&
           (beginning->size == 0 || memcmp(text->bytes, beginning->bytes, beginning->size) == 0);
}

static void drop_sequence(cli_run *run, kvf_sequence **sequence)
{
    if (run->prune.completion && kvf_completion_of(run->prune.completion) == *sequence)
        cli_run_complete_drop(run);
    kvf_transformer_forget(run->transformer);
    kvf_sequence_destroy(*sequence);
    *sequence = NULL;
}

/* Go on from `before`, or from nothing. */
static kvf_status go_back(conversation *c, kvf_error *error)
{
    cli_run *run = c->run;
    const kvf_text text = c->now_text;
    drop_sequence(run, &run->sequence);
    run->sequence = c->before;
    c->now_count = c->before ? c->before_count : 0;
    c->before = NULL;
    if (run->draft.of)
        kvf_draft_cut(run->draft.of, c->now_count);
    c->now_text = c->before_text;
    c->before_text = text;
    set_text(&c->before_text, 0);
    if (run->sequence)
        return KVF_OK;
    set_text(&c->now_text, 0);
    const kvf_status status = kvf_sequence_create(run->cache, &run->sequence);
    return status == KVF_OK ? status : model_fail(error, status, "no sequence could be created");
}

/* `before` becomes what `now` is. */
static kvf_status remember(conversation *c, kvf_error *error)
{
    cli_run *run = c->run;
    if (c->before)
        drop_sequence(run, &c->before);
    set_text(&c->before_text, 0);
    c->before_count = c->now_count;
    if (c->now_text.size == 0)
        return KVF_OK;
    KVF_TRY(kvf_library_told(run->runtime,
                             kvf_sequence_fork(run->cache, run->sequence, run->stream, &c->before),
                             error));
    return kvf_text_append(&c->before_text, c->now_text.bytes, c->now_text.size, error);
}

/* ---- a turn ---- */

/* All messages as text, and how much of it stays as it is when the answer is there. */
static kvf_status render(const conversation *c, turn *t, kvf_error *error)
{
    kvf_chat chat = cli_chat_of(&c->run->chat, c->messages, c->count);
    kvf_text closed = {0};
    KVF_TRY(kvf_chat_render(&chat, &t->full, error));
    t->stable = t->full.size;
    chat.generate = false;
    if (kvf_chat_render(&chat, &closed, NULL) == KVF_OK && begins_with(&t->full, &closed))
        t->stable = closed.size;
    kvf_text_free(&closed);
    return KVF_OK;
}

static kvf_status encode(const conversation *c, turn *t, kvf_error *error)
{
    const kvf_tokenizer *tokenizer = c->run->tokenizer;
    const size_t from = c->now_text.size;
    if (t->stable < from)
        t->stable = from;
    const char *text = t->full.bytes ? t->full.bytes : "";
    if (from > 0)
        KVF_TRY(
            kvf_tokenizer_encode_more(tokenizer, text + from, t->stable - from, &t->ids, error));
    else
        KVF_TRY(kvf_tokenizer_encode(tokenizer, text, t->stable, false, &t->ids, error));
    t->stable_ids = t->ids.count;
    KVF_TRY(kvf_tokenizer_encode_more(tokenizer, text + t->stable, t->full.size - t->stable,
                                      &t->ids, error));
    KVF_TRY(cli_check_ids(&c->run->model, &t->ids, error));
    return t->ids.count ? KVF_OK : model_fail(error, KVF_INVALID, "the chat template adds no text");
}

/* Tokens that the sequence went through, also those that pruning took out of it. */
static uint32_t tokens_read(const cli_run *run)
{
    const uint32_t length = kvf_sequence_length(run->sequence, 0);
    return length ? kvf_sequence_position(run->sequence, 0, length - 1) + 1 : 0;
}

static kvf_status check_room(const conversation *c, const turn *t, kvf_error *error)
{
    const uint32_t context = cli_run_prompt_tokens(c->run);
    const size_t held = tokens_read(c->run);
    if (held + t->ids.count + 1 <= context)
        return KVF_OK;
    return model_fail(error, KVF_FULL,
                      "the conversation would have %zu tokens and there is room for %u; /clear "
                      "begins anew, --context makes more room",
                      held + t->ids.count + 1, context);
}

/* A prompt of an empty sequence is pruned, unless it is too short for that. */
static bool can_prune(const conversation *c, const turn *t)
{
    const cli_run *run = c->run;
    kvf_error why = {0};
    if (!run->prune.of || kvf_sequence_length(run->sequence, 0) > 0)
        return false;
    if (cli_run_prune_check(run, (uint32_t)t->ids.count, &why) == KVF_OK)
        return true;
    fprintf(stderr, "kvferry: a beginning of %zu tokens is not pruned: %s\n", t->ids.count,
            why.text);
    return false;
}

/* Tokens that the sequence got after what was pruned. */
static kvf_status note_after(conversation *c, const uint32_t *ids, size_t count, kvf_error *error)
{
    return c->run->prune.completion ? kvf_token_ids_append(&c->after, ids, count, error) : KVF_OK;
}

/* Read ids of the turn: densely, or as steps after what is there. An interrupted one leaves `now`
 * as it was. */
static kvf_status prefill(conversation *c, const turn *t, size_t from, size_t to, bool *stopped,
                          kvf_error *error)
{
    cli_run *run = c->run;
    kvf_stop stop;
    cli_progress progress = {0}; /* a zero one shows nothing */
    const kvf_prefill_request request = {.sequence = run->sequence,
                                         .ids = t->ids.ids + from,
                                         .count = (uint32_t)(to - from),
                                         .wants_logits = to == t->ids.count,
                                         .progress = cli_run_go_on,
                                         .user = &progress};
    kvf_session session = run->session;
    if (!t->is_pruned)
        session.prune = NULL;
    const double start = kvf_now_ms();
    if (request.count >= LONG_READING)
        cli_progress_begin(&progress, "reading", request.count, "tokens");
    const bool extends =
        run->options.extend == CLI_EXTEND_SPARSE && kvf_sequence_length(run->sequence, 0) > 0;
    const kvf_status status = extends ? kvf_generate_extend(&session, &request, &stop, error)
                                      : kvf_generate_prefill(&session, &request, &stop, error);
    cli_progress_end(&progress);
    KVF_TRY(status);
    run->prefill_ms += kvf_now_ms() - start;
    *stopped = stop == KVF_STOP_CALLER;
    run->prefilled += *stopped ? 0 : request.count;
    if (*stopped)
        return go_back(c, error);
    c->now_count += request.count;
    if (run->draft.of)
        kvf_draft_see(run->draft.of, request.ids, request.count);
    if (t->is_pruned) {
        cli_run_complete_note(run);
        c->after.count = 0;
    }
    return t->is_pruned ? KVF_OK : note_after(c, request.ids, request.count, error);
}

/* Read what is new. A fork is made where later turns may have to go on from: not of a prompt that
 * is pruned, which is read at once, and never after the last token, whose logits are wanted. */
static kvf_status read_turn(conversation *c, turn *t, bool *stopped, kvf_error *error)
{
    const size_t count = t->ids.count;
    const size_t stable = t->stable_ids < count ? t->stable_ids : count - 1;
    KVF_TRY(remember(c, error));
    if (t->is_pruned)
        return prefill(c, t, 0, count, stopped, error);
    KVF_TRY(prefill(c, t, 0, stable, stopped, error));
    if (*stopped)
        return KVF_OK;
    set_text(&c->now_text, 0);
    if (stable == t->stable_ids && stable > 0) {
        KVF_TRY(kvf_text_append(&c->now_text, t->full.bytes, t->stable, error));
        KVF_TRY(remember(c, error));
    }
    return prefill(c, t, stable, count, stopped, error);
}

/* The text of tokens that were fed; of one that ends inside a character nothing is known. */
static kvf_status note_fed(conversation *c, const turn *t, const kvf_token_ids *generated,
                           kvf_error *error)
{
    kvf_token_stream stream = {.tokenizer = c->run->tokenizer};
    kvf_text text = {0};
    kvf_status status = KVF_OK;
    set_text(&c->now_text, 0);
    if (t->full.size)
        KVF_TRY(kvf_text_append(&c->now_text, t->full.bytes, t->full.size, error));
    for (size_t i = 0; status == KVF_OK && i + 1 < generated->count; i++)
        status = kvf_token_stream_push(&stream, generated->ids[i], &text, error);
    if (status == KVF_OK && text.size)
        status = kvf_text_append(&c->now_text, text.bytes, text.size, error);
    /* No template writes this, so the next turn goes back. */
    if (status == KVF_OK && stream.pending_count)
        status = kvf_text_append(&c->now_text, "\0", 1, error);
    kvf_text_free(&text);
    return status;
}

static kvf_status reserve_answer(cli_run *run, uint32_t tokens, kvf_error *error)
{
    const size_t steps = (size_t)run->steps.count + tokens + 1;
    double *step_ms = realloc(run->steps.ms, steps * sizeof *step_ms);
    if (step_ms)
        run->steps.ms = step_ms;
    cli_answer *answers = realloc(run->answers.of, (run->answers.count + 1) * sizeof *answers);
    if (answers)
        run->answers.of = answers;
    return step_ms && answers ? KVF_OK
                              : model_out_of_memory(error, steps * sizeof *step_ms, "a turn");
}

/* Tokens of an answer that were fed: not its last token, which a template may or may not write. */
static void count_answer(conversation *c, uint32_t fed)
{
    c->now_count += fed;
    if (c->run->draft.of)
        kvf_draft_cut(c->run->draft.of, c->now_count);
}

/* A template of channels is told the answer alone: its thoughts would be part of the answer. */
static const char *without_thoughts(const cli_run *run, kvf_text *text)
{
    if (!text->bytes)
        return "";
    if (!kvf_channels_of(run->tokenizer).known)
        return text->bytes;
    const kvf_thought parts = kvf_thought_split(text->bytes, text->size, false);
    const size_t first = (size_t)(parts.answer - text->bytes);
    text->bytes[first + parts.answer_size] = '\0';
    return text->bytes + first;
}

static kvf_status answer(conversation *c, turn *t, uint32_t kept, kvf_error *error)
{
    cli_run *run = c->run;
    kvf_text text = {0};
    kvf_token_ids generated = {0};
    const uint32_t room = cli_run_prompt_tokens(run) - tokens_read(run) + 1;
    const uint32_t tokens = kvf_min_u32(run->options.tokens, room);
    KVF_TRY(reserve_answer(run, tokens, error));
    kvf_sampler_see(run->sampler, 0, t->ids.ids, t->ids.count);
    kvf_status status = cli_run_answer(run, run->sequence, tokens, &text, &generated, error);
    cli_answer *a = &run->answers.of[run->answers.count - 1];
    a->prompt_tokens = (uint32_t)t->ids.count;
    a->kept_tokens = kept;
    a->first_ms += t->read_ms;
    count_answer(c, a->generated ? a->generated - 1 : 0);
    if (status == KVF_OK && generated.count)
        status = note_after(c, generated.ids, generated.count - 1, error);
    if (status == KVF_OK)
        status = note_fed(c, t, &generated, error);
    if (status == KVF_OK)
        status = add_message(c, KVF_ROLE_ASSISTANT, without_thoughts(run, &text), error);
    if (status == KVF_OK && a->stop == KVF_STOP_LENGTH && tokens < run->options.tokens)
        fprintf(stderr, "kvferry: the context of %u tokens is full; /clear begins anew\n",
                cli_run_prompt_tokens(run));
    kvf_token_ids_free(&generated);
    kvf_text_free(&text);
    return status;
}

/* @return KVF_OK also if it was interrupted */
static kvf_status run_turn(conversation *c, turn *t, kvf_error *error)
{
    bool stopped = false;
    KVF_TRY(render(c, t, error));
    while (!begins_with(&t->full, &c->now_text))
        KVF_TRY(go_back(c, error));
    KVF_TRY(encode(c, t, error));
    KVF_TRY(check_room(c, t, error));
    const uint32_t kept = tokens_read(c->run);
    t->is_pruned = can_prune(c, t);
    t->is_read = true;
    const double start = kvf_now_ms();
    KVF_TRY(read_turn(c, t, &stopped, error));
    t->read_ms = kvf_now_ms() - start;
    if (!stopped)
        return answer(c, t, kept, error);
    drop_messages(c, c->count - 1);
    fputs("kvferry: interrupted before the message was read; it is forgotten\n", stderr);
    return KVF_OK;
}

/* An error of one message ends that message, not the conversation. */
static kvf_status take_turn(conversation *c, const kvf_text *line, kvf_error *error)
{
    turn t = {0};
    const size_t count = c->count;
    kvf_status status = add_message(c, KVF_ROLE_USER, line->bytes, error);
    if (status == KVF_OK)
        status = run_turn(c, &t, error);
    kvf_token_ids_free(&t.ids);
    kvf_text_free(&t.full);
    if (t.is_read || (status != KVF_INVALID && status != KVF_FULL))
        return status;
    drop_messages(c, count);
    fprintf(stderr, "kvferry: %s\n", error->text);
    return KVF_OK;
}

/* ---- the conversation ---- */

/* A message of one line or more. @return how the last line ended */
static cli_line_end read_message(cli_line_input *input, kvf_text *message)
{
    const char *prompt = "> ";
    for (;;) {
        const cli_line_end end = cli_line_read(input, prompt, message);
        if (end != CLI_LINE_READ || message->size == 0 || message->bytes[message->size - 1] != '\\')
            return end;
        message->bytes[message->size - 1] = '\n';
        prompt = "  ";
    }
}

static bool is_word(const kvf_text *message, const char *word)
{
    return message->size == strlen(word) && memcmp(message->bytes, word, message->size) == 0;
}

/* A slash and letters alone: a command, or meant as one. */
static bool is_command(const kvf_text *message)
{
    size_t letters = 1;
    while (letters < message->size && message->bytes[letters] >= 'a' &&
           message->bytes[letters] <= 'z')
        letters++;
    return message->bytes[0] == '/' && letters > 1 && letters == message->size;
}

/* @return whether to go on */
static bool take_message(conversation *c, const kvf_text *message, kvf_status *status,
                         kvf_error *error)
{
    if (message->size == 0)
        return true;
    if (is_word(message, "/exit"))
        return false;
    if (is_word(message, "/clear"))
        *status = begin(c, error);
    else if (is_command(message))
        fprintf(stderr,
                "kvferry: %.*s is no command: /clear begins anew, /exit ends; with a blank in "
                "front of it, it is a message\n",
                (int)kvf_min_u32((uint32_t)message->size, 40u), message->bytes);
    else if (memchr(message->bytes, '\0', message->size))
        fputs("kvferry: the message holds a zero byte; it is forgotten\n", stderr);
    else
        *status = take_turn(c, message, error);
    return *status == KVF_OK && !c->run->output_failed;
}

/* While nobody types. @return whether there is more */
static bool complete(void *user)
{
    conversation *c = user;
    if (cli_run_complete_step(c->run))
        return true;
    cli_run_complete_end(c->run, c->after.ids, (uint32_t)c->after.count);
    return false;
}

/* Until whoever types ends it. @return KVF_OK also when interrupted */
static kvf_status converse(cli_run *run, kvf_error *error)
{
    conversation c = {.run = run};
    kvf_status status = begin(&c, error);
    cli_line_input *input = cli_line_open();
    bool goes_on = input;
    if (input && run->prune.completion)
        cli_line_idle(input, complete, &c);
    if (isatty(STDIN_FILENO))
        fputs("/exit or Ctrl-D ends, /clear begins anew, Ctrl-C stops an answer\n", stderr);
    while (goes_on && status == KVF_OK) {
        kvf_text message = {0};
        const cli_line_end end = read_message(input, &message);
        goes_on = (end == CLI_LINE_INTERRUPTED ||
                   (end == CLI_LINE_READ && take_message(&c, &message, &status, error))) &&
                  !cli_interrupt_ends();
        kvf_text_free(&message);
    }
    run->interrupted = cli_interrupt_ends();
    cli_line_close(input);
    (void)!kvf_stream_wait(run->stream);
    if (run->prune.of)
        kvf_prune_stats_get(run->prune.of, &run->prune.stats);
    if (c.before)
        drop_sequence(run, &c.before);
    kvf_token_ids_free(&c.after);
    drop_messages(&c, 0);
    free(c.messages);
    kvf_text_free(&c.now_text);
    kvf_text_free(&c.before_text);
    return input ? status : model_out_of_memory(error, 1, "the input");
}

int cli_chat_main(int argc, char **argv)
{
    return cli_run_command(argc, argv, cli_chat_options_parse, converse);
}
