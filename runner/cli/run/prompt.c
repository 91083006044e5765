/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Reads prompts and questions.
 *
 * It knows nothing of what follows. Invariant: as in prompt.h.
 */

#include "prompt.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/text.h"

#define PROMPT_BYTES_MAX (1u << 30)
#define READ_BYTES       65536u

static kvf_status read_standard_input(kvf_text *text, kvf_error *error)
{
    char block[READ_BYTES];
    for (size_t got; (got = fread(block, 1, sizeof block, stdin)) > 0;) {
        KVF_TRY(kvf_text_append(text, block, got, error));
        if (text->size > PROMPT_BYTES_MAX)
            return model_fail(error, KVF_INVALID, "standard input is larger than 1 GiB");
    }
    if (ferror(stdin))
        return model_fail_errno(error, errno, "standard input cannot be read");
    if (text->size > 0)
        model_skip_mark(text);
    return KVF_OK;
}

static kvf_status read_text(const cli_run_options *o, kvf_text *text, kvf_error *error)
{
    if (o->prompt)
        return kvf_text_append(text, o->prompt, strlen(o->prompt), error);
    if (o->prompt_file)
        return model_read_file(o->prompt_file, PROMPT_BYTES_MAX, text, error);
    /* A saved sequence is a prompt, too, and nobody has to type one. */
    return o->load_file && isatty(STDIN_FILENO) ? KVF_OK : read_standard_input(text, error);
}

bool cli_note_start(const char *where, const kvf_tokenizer *tokenizer, const uint32_t *ids,
                    size_t count)
{
    if (!kvf_tokenizer_starts_twice(tokenizer, ids, count))
        return false;
    fprintf(stderr,
            "kvferry: %s begins with %s, which the tokenizer adds too: there are two; leave it out "
            "of the text\n",
            where, kvf_tokenizer_token(tokenizer, ids[0]));
    return true;
}

/* A text from its beginning, or one that goes on; an error begins with where it is from. */
static kvf_status encode(const char *where, const kvf_tokenizer *tokenizer, const char *text,
                         size_t size, bool begins, kvf_token_ids *ids, kvf_error *error)
{
    kvf_error why = {0};
    const size_t first = ids->count;
    const kvf_status status = kvf_tokenizer_encode(tokenizer, text, size, begins, ids, &why);
    if (status != KVF_OK)
        return model_fail(error, status, "%s: %s", where, why.text);
    if (begins)
        cli_note_start(where, tokenizer, ids->ids + first, ids->count - first);
    return KVF_OK;
}

static const char *name_of(const cli_run_options *o)
{
    return o->prompt ? "--prompt" : o->prompt_file ? o->prompt_file : "standard input";
}

/* Numbers, apart by white space or commas. */
static kvf_status parse_ids(const char *path, const kvf_text *text, uint32_t vocab_size,
                            kvf_token_ids *ids, kvf_error *error)
{
    const char *next = text->bytes, *end = text->bytes + text->size;
    while (next < end) {
        if (kvf_is_space(*next) || *next == ',') {
            next++;
            continue;
        }
        char *after = NULL;
        unsigned long long id = kvf_is_digit(*next) ? strtoull(next, &after, 10) : 0;
        if (!after || (after < end && !kvf_is_space(*after) && *after != ','))
            return model_fail(error, KVF_INVALID, "%s: byte %td begins no token id: '%.12s'", path,
                              next - text->bytes, next);
        if (id >= vocab_size)
            return model_fail(error, KVF_INVALID,
                              "%s: token id %llu is out of range; the model has ids 0 to %u", path,
                              id, vocab_size - 1);
        KVF_TRY(kvf_token_ids_push(ids, (uint32_t)id, error));
        next = after;
    }
    return KVF_OK;
}

kvf_status cli_check_ids(const kvf_model_config *model, const kvf_token_ids *ids, kvf_error *error)
{
    for (size_t i = 0; i < ids->count; i++)
        if (ids->ids[i] >= model->vocab_size)
            return model_fail(error, KVF_INVALID,
                              "the tokenizer gives id %u and the model has ids 0 to %u; "
                              "tokenizer.json belongs to another model",
                              ids->ids[i], model->vocab_size - 1);
    return KVF_OK;
}

kvf_status cli_prompt_read(const cli_run_options *o, const kvf_model_config *model,
                           const kvf_tokenizer *tokenizer, const cli_chat *chat, kvf_token_ids *ids,
                           kvf_error *error)
{
    kvf_text text = {0};
    kvf_status status;
    if (chat && !o->prompt && !o->prompt_file && o->chat.messages_file) {
        status = cli_chat_encode(chat, &o->chat, tokenizer, NULL, ids, error);
    } else if (o->token_ids_file) {
        status = model_read_file(o->token_ids_file, PROMPT_BYTES_MAX, &text, error);
        if (status == KVF_OK && text.size > 0)
            status = parse_ids(o->token_ids_file, &text, model->vocab_size, ids, error);
    } else {
        status = read_text(o, &text, error);
        if (status == KVF_OK && text.size > 0)
            status = chat ? cli_chat_encode(chat, &o->chat, tokenizer, &text, ids, error)
                          : encode(name_of(o), tokenizer, text.bytes, text.size, true, ids, error);
    }
    kvf_text_free(&text);
    if (status == KVF_OK && ids->count == 0 && !o->load_file)
        return model_fail(error, KVF_INVALID, "the prompt is empty; give at least one token");
    if (status == KVF_OK && ids->count > UINT32_MAX / 2)
        return model_fail(error, KVF_INVALID, "the prompt has %zu tokens, more than %u", ids->count,
                          UINT32_MAX / 2);
    return status == KVF_OK ? cli_check_ids(model, ids, error) : status;
}

kvf_status cli_text_read(const char *path, const kvf_model_config *model,
                         const kvf_tokenizer *tokenizer, kvf_token_ids *ids, kvf_error *error)
{
    kvf_text text = {0};
    kvf_status status = model_read_file(path, PROMPT_BYTES_MAX, &text, error);
    if (status == KVF_OK)
        status = encode(path, tokenizer, text.bytes, text.size, false, ids, error);
    kvf_text_free(&text);
    if (status == KVF_OK && ids->count == 0)
        return model_fail(error, KVF_INVALID, "%s holds no token", path);
    if (status == KVF_OK && ids->count > UINT32_MAX / 4)
        return model_fail(error, KVF_INVALID, "%s has %zu tokens, more than %u", path, ids->count,
                          UINT32_MAX / 4);
    return status == KVF_OK ? cli_check_ids(model, ids, error) : status;
}

static kvf_status add_question(const char *where, const kvf_tokenizer *tokenizer, const char *line,
                               size_t size, cli_questions *out, kvf_error *error)
{
    size_t first = out->ids.count;
    kvf_status status = encode(where, tokenizer, line, size, false, &out->ids, error);
    if (status != KVF_OK || out->ids.count == first)
        return status;
    uint32_t tokens = (uint32_t)(out->ids.count - first);
    if (tokens > out->longest)
        out->longest = tokens;
    out->count++;
    return kvf_token_ids_push(&out->starts, (uint32_t)out->ids.count, error);
}

/* The target of lines that are questions. */
typedef struct asking {
    const kvf_tokenizer *tokenizer;
    cli_questions *out;
} asking;

static kvf_status on_question(void *user, json_t *line, const char *where, uint64_t number,
                              kvf_error *error)
{
    static const char *const known[] = {"prompt", NULL};
    const asking *a = user;
    (void)number;
    KVF_TRY(json_check_keys(line, where, known, error));
    json_t *text = json_get_set(line, "prompt");
    if (json_string_length(text) == 0)
        return model_fail(error, KVF_INVALID, "%s: prompt must be a text that is not empty", where);
    return add_question(where, a->tokenizer, json_string_value(text), json_string_length(text),
                        a->out, error);
}

bool cli_next_line(const kvf_text *text, const char **line, size_t *size)
{
    const char *end = text->bytes + text->size;
    *line = *line ? *line + *size + 1 : text->bytes;
    if (!*line || *line >= end)
        return false;
    const char *newline = memchr(*line, '\n', (size_t)(end - *line));
    *size = (size_t)((newline ? newline : end) - *line);
    return true;
}

/* A question a line, as it is. */
static kvf_status read_questions(const char *path, const kvf_tokenizer *tokenizer,
                                 cli_questions *out, kvf_error *error)
{
    kvf_text text = {0};
    char where[300];
    uint32_t number = 0;
    kvf_status status = model_read_file(path, PROMPT_BYTES_MAX, &text, error);
    const char *line = NULL;
    for (size_t size; status == KVF_OK && cli_next_line(&text, &line, &size);) {
        snprintf(where, sizeof where, "%.250s: line %u", path, ++number);
        const size_t shown = size - (size > 0 && line[size - 1] == '\r');
        if (shown > 0)
            status = add_question(where, tokenizer, line, shown, out, error);
    }
    kvf_text_free(&text);
    return status;
}

kvf_status cli_questions_read(const char *path, const kvf_model_config *model,
                              const kvf_tokenizer *tokenizer, cli_questions *out, kvf_error *error)
{
    const size_t length = strlen(path);
    const bool is_json = length > 6 && strcmp(path + length - 6, ".jsonl") == 0;
    *out = (cli_questions){0};
    kvf_status status = kvf_token_ids_push(&out->starts, 0, error);
    if (status == KVF_OK)
        status = is_json ? cli_json_lines(path, on_question, &(asking){tokenizer, out}, error)
                         : read_questions(path, tokenizer, out, error);
    if (status == KVF_OK && out->count == 0)
        status = model_fail(error, KVF_INVALID, "%s holds no question", path);
    if (status == KVF_OK)
        status = cli_check_ids(model, &out->ids, error);
    if (status != KVF_OK)
        cli_questions_free(out);
    return status;
}

void cli_questions_free(cli_questions *questions)
{
    kvf_token_ids_free(&questions->ids);
    kvf_token_ids_free(&questions->starts);
}

/* Lines of JSON; see the header. */

#define FILE_BYTES_MAX (1u << 30)

static bool is_blank(const char *line, size_t size)
{
    while (size > 0 && memchr(" \t\r", line[size - 1], 3))
        size--;
    return size == 0;
}

kvf_status cli_json_lines(const char *path, cli_line_fn fn, void *user, kvf_error *error)
{
    char where[256];
    kvf_text text = {0};
    uint64_t number = 0;
    kvf_status status = model_read_file(path, FILE_BYTES_MAX, &text, error);
    const char *line = NULL;
    for (size_t size; status == KVF_OK && cli_next_line(&text, &line, &size);) {
        json_t *document = NULL;
        snprintf(where, sizeof where, "%.200s: line %llu", path, (unsigned long long)++number);
        if (is_blank(line, size))
            continue;
        status = json_parse_as_written(line, size, where, &document, error);
        if (status == KVF_OK)
            status = fn(user, document, where, number, error);
        json_decref(document);
    }
    kvf_text_free(&text);
    return status;
}
