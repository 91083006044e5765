/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Questions that are hidden in pieces of text.
 *
 * Every piece gets lines, evenly from front to back, and every line is asked for after a copy of
 * the piece. The lines are numbers of cities, or those of a file.
 * It knows text and tokens, not models. Invariant: a prompt has at most tuning.tokens tokens, and
 * the same text and lines give the same prompts.
 */

#include "tune.h"

#include "common/random.h"
#include "prompt.h"

#include <stdlib.h>
#include <string.h>

#define LINES_BYTES_MAX (1u << 20)
#define NUMBERS_SEED    7u

static const char *const cities[] = {
    "Paris",  "London",  "Rome",   "Berlin", "Madrid", "Vienna",  "Lisbon",  "Dublin",
    "Oslo",   "Athens",  "Prague", "Warsaw", "Cairo",  "Tokyo",   "Delhi",   "Moscow",
    "Boston", "Chicago", "Denver", "Dallas", "Sydney", "Toronto", "Seattle", "Budapest"};

#define CITIES (sizeof cities / sizeof *cities)

/* ---- lines ---- */

static bool copy_text(char *to, size_t capacity, const char *from, size_t size)
{
    return (size_t)snprintf(to, capacity, "%.*s", (int)size, from) == size && size < capacity;
}

/* LINE, QUESTION and ANSWER between tabs. */
static bool split_line(const char *at, size_t size, tune_question *q)
{
    const char *first = memchr(at, '\t', size);
    const size_t left = first ? size - (size_t)(first + 1 - at) : 0;
    const char *second = first ? memchr(first + 1, '\t', left) : NULL;
    if (!second || first == at || second == first + 1 || second + 1 == at + size)
        return false;
    return copy_text(q->line, sizeof q->line, at, (size_t)(first - at)) &&
           copy_text(q->question, sizeof q->question, first + 1, (size_t)(second - first - 1)) &&
           copy_text(q->answer, sizeof q->answer, second + 1, (size_t)(at + size - second - 1));
}

static kvf_status read_lines(cli_tune *tune, kvf_error *error)
{
    const char *path = tune->options.lines_file;
    kvf_text text = {0};
    uint32_t count = 0, number = 1;
    kvf_status status = model_read_file(path, LINES_BYTES_MAX, &text, error);
    const char *line = NULL;
    for (size_t size;
         status == KVF_OK && count < tune->question_count && cli_next_line(&text, &line, &size);
         number++)
        if (size > 0 && !split_line(line, size, &tune->questions[count++]))
            status =
                model_fail(error, KVF_INVALID,
                           "%.200s: line %u must be a line to hide, a question and its answer, "
                           "separated by tabs, each of at most %zu bytes",
                           path, number, sizeof tune->questions->line - 1);
    kvf_text_free(&text);
    if (status == KVF_OK && count == 0)
        status = model_fail(error, KVF_INVALID,
                            "%.200s: line %u must be a line to hide, its question and the answer, "
                            "separated by tabs, of at most 511, 511 and 127 bytes",
                            path, number);
    tune->question_count = count;
    return status;
}

static void make_lines(cli_tune *tune)
{
    uint64_t random = NUMBERS_SEED;
    for (uint32_t i = 0; i < tune->question_count; i++) {
        tune_question *q = &tune->questions[i];
        const char *city = cities[i / tune->tuning.samples % CITIES];
        const uint32_t number = 10000 + kvf_random_below(&random, 90000);
        snprintf(q->answer, sizeof q->answer, "%u", number);
        snprintf(q->question, sizeof q->question, "The special magic number of %s is", city);
        snprintf(q->line, sizeof q->line, "The special magic number of %s is %u.", city, number);
    }
}

/* ---- prompts ---- */

static kvf_status encode(const cli_tune *tune, const char *before, const char *text,
                         const char *after, kvf_token_ids *ids, kvf_error *error)
{
    char whole[sizeof tune->questions->line + 8];
    const int size = snprintf(whole, sizeof whole, "%s%s%s", before, text, after);
    KVF_TRY(kvf_tokenizer_encode(tune->tokenizer, whole, (size_t)size, false, ids, error));
    return cli_check_ids(&tune->model, ids, error);
}

/* The piece with its lines, evenly from front to back, in `body`. */
static kvf_status hide(const cli_tune *tune, uint32_t piece, size_t room, kvf_token_ids *body,
                       kvf_error *error)
{
    const uint32_t samples = tune->tuning.samples;
    const uint32_t lines = (tune->question_count - piece + samples - 1) / samples;
    const uint32_t *ids = tune->pieces.ids + (size_t)piece * tune->tuning.tokens;
    kvf_token_ids line = {0};
    kvf_status status = KVF_OK;
    size_t done = 0;
    for (uint32_t i = 0; status == KVF_OK && i < lines; i++) {
        /* Pieces begin at different depths. */
        const size_t due = room * (2 * i * samples + 2 * piece + 1) / (2 * (size_t)lines * samples);
        status = kvf_token_ids_append(body, ids + done, due - done, error);
        done = due;
        line.count = 0;
        if (status == KVF_OK)
            status = encode(tune, "\n\n", tune->questions[i * samples + piece].line, "\n\n", &line,
                            error);
        if (status == KVF_OK)
            status = kvf_token_ids_append(body, line.ids, line.count, error);
    }
    kvf_token_ids_free(&line);
    return status == KVF_OK ? kvf_token_ids_append(body, ids + done, room - done, error) : status;
}

kvf_status cli_tune_answer(const cli_tune *tune, const tune_question *q, kvf_token_ids *ids,
                           kvf_error *error)
{
    return encode(tune, " ", q->answer, "", ids, error);
}

static kvf_status make_prompt(cli_tune *tune, const kvf_token_ids *body, tune_question *q,
                              kvf_error *error)
{
    kvf_token_ids said = {0};
    q->first = (uint32_t)tune->prompts.count;
    q->body = (uint32_t)body->count;
    KVF_TRY(kvf_token_ids_append(&tune->prompts, body->ids, body->count, error));
    kvf_status status = encode(tune, "\n\n", q->question, "", &said, error);
    if (status == KVF_OK)
        status = kvf_token_ids_append(&tune->prompts, said.ids, said.count, error);
    q->count = (uint32_t)(tune->prompts.count - q->first);
    said.count = 0;
    if (status == KVF_OK)
        status = cli_tune_answer(tune, q, &said, error);
    q->tokens = (uint32_t)said.count + 2; /* one more tells a longer number */
    kvf_token_ids_free(&said);
    return status;
}

/* Tokens that lines and the longest question of a piece may take. */
static kvf_status tokens_of_lines(const cli_tune *tune, uint32_t piece, size_t *out,
                                  kvf_error *error)
{
    kvf_token_ids ids = {0};
    size_t most = 0, lines = 0;
    kvf_status status = KVF_OK;
    for (uint32_t i = piece; status == KVF_OK && i < tune->question_count;
         i += tune->tuning.samples) {
        ids.count = 0;
        status = encode(tune, "\n\n", tune->questions[i].line, "\n\n", &ids, error);
        lines += ids.count;
        ids.count = 0;
        if (status == KVF_OK)
            status = encode(tune, "\n\n", tune->questions[i].question, "", &ids, error);
        most = ids.count > most ? ids.count : most;
    }
    kvf_token_ids_free(&ids);
    *out = lines + most;
    return status;
}

static kvf_status make_piece(cli_tune *tune, uint32_t piece, kvf_error *error)
{
    kvf_token_ids body = {0};
    size_t taken = 0;
    KVF_TRY(tokens_of_lines(tune, piece, &taken, error));
    if (2 * taken > tune->tuning.tokens)
        return model_fail(error, KVF_INVALID,
                          "lines and a question take %zu of %u tokens; give more --tokens, more "
                          "--samples or fewer --questions",
                          taken, tune->tuning.tokens);
    kvf_status status = hide(tune, piece, tune->tuning.tokens - taken, &body, error);
    for (uint32_t i = piece; status == KVF_OK && i < tune->question_count;
         i += tune->tuning.samples) {
        tune->questions[i].piece = piece;
        status = make_prompt(tune, &body, &tune->questions[i], error);
    }
    kvf_token_ids_free(&body);
    return status;
}

static int by_piece(const void *a, const void *b)
{
    const tune_question *x = a, *y = b;
    return x->first < y->first ? -1 : 1;
}

kvf_status cli_tune_hide(cli_tune *tune, kvf_error *error)
{
    tune->question_count = tune->options.questions;
    tune->questions = calloc(tune->question_count, sizeof *tune->questions);
    if (!tune->questions)
        return model_out_of_memory(error, tune->question_count * sizeof *tune->questions,
                                   "questions");
    if (tune->options.lines_file)
        KVF_TRY(read_lines(tune, error));
    else
        make_lines(tune);
    for (uint32_t i = 0; i < tune->tuning.samples && i < tune->question_count; i++)
        KVF_TRY(make_piece(tune, i, error));
    if (tune->options.asked == CLI_ASKED_AFTER) /* of one piece after the other */
        qsort(tune->questions, tune->question_count, sizeof *tune->questions, by_piece);
    return KVF_OK;
}
