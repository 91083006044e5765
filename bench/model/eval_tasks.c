/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Reads tasks; see eval_tasks.h.
 */

#include "eval_tasks.h"

#include <stdlib.h>
#include <string.h>
#include <strings.h>

#define FILE_BYTES_MAX (1u << 30)

/* In place. @return its size */
static size_t unescape(char *text)
{
    char *to = text;
    for (const char *from = text; *from; from++) {
        if (*from == '\\' && from[1]) {
            from++;
            *to++ = *from == 'n' ? '\n' : *from == 't' ? '\t' : *from;
        } else {
            *to++ = *from;
        }
    }
    return (size_t)(to - text);
}

void eval_text_write(FILE *file, const char *bytes, size_t size)
{
    fputc('\t', file);
    for (size_t i = 0; i < size; i++) {
        const char c = bytes[i];
        if (c == '\n' || c == '\t' || c == '\\')
            fprintf(file, "\\%c", c == '\n' ? 'n' : c == '\t' ? 't' : '\\');
        else
            fputc(c, file);
    }
}

/* One more element of an array that doubles. */
static void *grow(void *array, uint32_t count, size_t bytes)
{
    if (count & (count - 1))
        return array;
    void *grown = realloc(array, (count ? 2 * (size_t)count : 1) * bytes);
    if (grown)
        memset((char *)grown + count * bytes, 0, (count ? count : 1) * bytes);
    return grown;
}

static kvf_status encode(const kvf_tokenizer *tokenizer, char *text, bool is_first, size_t least,
                         kvf_token_ids *ids, kvf_error *error)
{
    const size_t size = unescape(text), before = ids->count;
    KVF_TRY(kvf_tokenizer_encode(tokenizer, text, size, is_first, ids, error));
    if (ids->count < before + least)
        return model_fail(error, KVF_INVALID, "a text of %zu bytes has %zu tokens, too few", size,
                          ids->count - before);
    return KVF_OK;
}

static kvf_status add_document(eval_tasks *out, char *text, const kvf_tokenizer *tokenizer,
                               kvf_error *error)
{
    eval_document *grown = grow(out->documents, out->count, sizeof *grown);
    if (!grown)
        return model_out_of_memory(error, sizeof *grown, "a document");
    out->documents = grown;
    eval_document *d = &out->documents[out->count++];
    KVF_TRY(encode(tokenizer, text, true, 2, &d->ids, error));
    out->tokens += d->ids.count;
    out->longest = kvf_max_u32(out->longest, (uint32_t)d->ids.count);
    return KVF_OK;
}

static kvf_status add_task(eval_tasks *out, eval_task **task, kvf_error *error)
{
    if (out->count == 0)
        return model_fail(error, KVF_INVALID, "a task is in front of the first document");
    eval_document *d = &out->documents[out->count - 1];
    eval_task *grown = grow(d->tasks, d->count, sizeof *grown);
    if (!grown)
        return model_out_of_memory(error, sizeof *grown, "a task");
    d->tasks = grown;
    *task = &d->tasks[d->count++];
    return KVF_OK;
}

/* Texts apart by tabs, behind those of a question. */
static kvf_status read_enough(eval_task *t, char *texts, kvf_error *error)
{
    const size_t size = strlen(texts) + 2;
    char *to = t->enough = calloc(1, size);
    if (!to)
        return model_out_of_memory(error, size, "what is enough");
    for (char *text = texts, *next; text; text = next) {
        next = strchr(text, '\t');
        if (next)
            *next++ = '\0';
        const size_t length = unescape(text);
        memcpy(to, text, length);
        to += length > 0 ? length + 1 : 0;
    }
    return KVF_OK;
}

/* Whether a text is in another one, in capitals or not. */
static bool has(const char *said, const char *text)
{
    const size_t length = strlen(text);
    for (; *said; said++)
        if (strncasecmp(said, text, length) == 0)
            return true;
    return false;
}

bool eval_task_is_said(const eval_task *task, const char *said)
{
    const char *text = task->enough;
    for (; text && *text; text += strlen(text) + 1)
        if (!has(said, text))
            return false;
    return text != NULL;
}

/* What stands behind the first tab of a task: two fields. */
static kvf_status read_task(eval_tasks *out, bool asks, char *first, char *second,
                            const kvf_tokenizer *tokenizer, kvf_error *error)
{
    eval_task *t = NULL;
    KVF_TRY(add_task(out, &t, error));
    if (asks) {
        const long count = strtol(first, NULL, 10);
        if (count < 1 || count > 65536)
            return model_fail(error, KVF_INVALID, "ask %.20s: give 1 to 65536", first);
        t->generate = (uint32_t)count;
        char *enough = strchr(second, '\t');
        if (enough) {
            *enough++ = '\0';
            KVF_TRY(read_enough(t, enough, error));
        }
    } else {
        KVF_TRY(encode(tokenizer, first, false, 0, &t->ids, error));
        t->cue = (uint32_t)t->ids.count;
    }
    KVF_TRY(encode(tokenizer, second, false, 1, &t->ids, error));
    out->longest_task = kvf_max_u32(out->longest_task, (uint32_t)t->ids.count + t->generate);
    return KVF_OK;
}

/* A line without its end. */
static kvf_status read_line(eval_tasks *out, char *line, const kvf_tokenizer *tokenizer,
                            kvf_error *error)
{
    char *first = strchr(line, '\t'), *second = first ? strchr(first + 1, '\t') : NULL;
    if (!line[0])
        return KVF_OK;
    if (first)
        *first++ = '\0';
    if (first && !second && strcmp(line, "document") == 0)
        return add_document(out, first, tokenizer, error);
    if (!second || (strcmp(line, "ask") != 0 && strcmp(line, "score") != 0))
        return model_fail(error, KVF_INVALID, "'%.40s' is no task", line);
    *second++ = '\0';
    return read_task(out, line[0] == 'a', first, second, tokenizer, error);
}

kvf_status eval_tasks_read(const char *path, const kvf_tokenizer *tokenizer, eval_tasks *out,
                           kvf_error *error)
{
    kvf_text text = {0};
    kvf_status status = model_read_file(NULL, path, FILE_BYTES_MAX, &text, error);
    for (char *line = text.bytes, *next; status == KVF_OK && line; line = next) {
        next = strchr(line, '\n');
        if (next)
            *next++ = '\0';
        status = read_line(out, line, tokenizer, error);
    }
    kvf_text_free(NULL, &text);
    if (status == KVF_OK && out->count == 0)
        return model_fail(error, KVF_INVALID, "%s has no document", path);
    return status;
}

void eval_tasks_free(eval_tasks *tasks)
{
    for (uint32_t i = 0; i < tasks->count; i++) {
        eval_document *d = &tasks->documents[i];
        for (uint32_t j = 0; j < d->count; j++) {
            kvf_token_ids_free(NULL, &d->tasks[j].ids);
            free(d->tasks[j].enough);
        }
        kvf_token_ids_free(NULL, &d->ids);
        free(d->tasks);
    }
    free(tasks->documents);
}
