/* SPDX-License-Identifier: Apache-2.0 */

/* Prompts of a batch; see the header. */

#include "prompt.h"

#include "chat_format.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Tokens at the end of a prompt that may say that a thought begins. */
#define TAIL_TOKENS 16u

static const char *const known[] = {
    "id",          "prompt", "messages",           "system", "tokens", "seed", "top_p",
    "temperature", "min_p",  "repetition_penalty", "top_k",  NULL};

/* ---- a list of jobs ---- */

static kvf_status reserve(cli_jobs *jobs, kvf_error *error)
{
    uint32_t capacity = jobs->capacity;
    kvf_batch_prompt *prompts = model_room(jobs->prompts, jobs->count, &capacity, sizeof *prompts);
    if (prompts)
        jobs->prompts = prompts;
    cli_job *list = model_room(jobs->jobs, jobs->count, &jobs->capacity, sizeof *list);
    if (list)
        jobs->jobs = list;
    return prompts && list ? KVF_OK : model_out_of_memory(error, sizeof *list, "the prompts");
}

void cli_jobs_free(cli_jobs *jobs)
{
    for (uint32_t i = 0; i < jobs->count; i++)
        free(jobs->jobs[i].name);
    free(jobs->jobs);
    free(jobs->prompts);
    kvf_token_ids_free(&jobs->ids);
    *jobs = (cli_jobs){0};
}

static bool is_thinking(const kvf_tokenizer *tokenizer, const uint32_t *ids, size_t count)
{
    const size_t tail = count < TAIL_TOKENS ? count : TAIL_TOKENS;
    kvf_text text = {0};
    if (!tokenizer ||
        kvf_tokenizer_decode(tokenizer, ids + count - tail, tail, false, &text, NULL) != KVF_OK)
        return false;
    const bool open = text.bytes && kvf_thought_is_open(text.bytes, text.size);
    kvf_text_free(&text);
    return open;
}

/* The newest job is complete: its ids are the last ones. */
static void add(const cli_job_source *source, cli_jobs *jobs)
{
    kvf_batch_prompt *p = &jobs->prompts[jobs->count];
    cli_job *job = &jobs->jobs[jobs->count++];
    p->count = (uint32_t)(jobs->ids.count - job->first);
    p->shared = source->shared;
    p->samples = source->options->samples ? source->options->samples : 1;
    job->thinks = is_thinking(source->tokenizer, jobs->ids.ids + job->first, p->count);
    jobs->longest = p->count > jobs->longest ? p->count : jobs->longest;
    jobs->most = p->count + p->tokens > jobs->most ? p->count + p->tokens : jobs->most;
    jobs->answers += p->samples;
}

/* Ids no longer move. */
static void bind(cli_jobs *jobs)
{
    for (uint32_t i = 0; i < jobs->count; i++)
        jobs->prompts[i].ids = jobs->ids.ids + jobs->jobs[i].first;
}

/* ---- a line ---- */

static kvf_status bad(const char *where, const char *key, json_t *value, const char *what,
                      kvf_error *error)
{
    char shown[96];
    return model_fail(error, KVF_INVALID, "%s: %s is %s; it must be %s", where, key,
                      json_show(value, shown, sizeof shown), what);
}

static kvf_status read_whole(json_t *line, const char *where, const char *key, uint64_t low,
                             uint64_t high, uint64_t *out, kvf_error *error)
{
    json_t *value = json_get_set(line, key);
    char range[64];
    if (!value)
        return KVF_OK;
    snprintf(range, sizeof range, "a whole number from %llu to %llu", (unsigned long long)low,
             (unsigned long long)high);
    return json_is_written_whole(value, high, out) && *out >= low
               ? KVF_OK
               : bad(where, key, value, range, error);
}

/* A setting of the sampler; integers are little endian, of 4 bytes or 8. */
static kvf_status read_setting(json_t *line, const char *where, const kvf_setting *s,
                               kvf_sampling_config *out, kvf_error *error)
{
    const bool is_whole = s->kind == KVF_SETTING_WHOLE;
    const double most = fmin(s->high, (double)JSON_WHOLE_MAX);
    json_t *value = json_get_set(line, s->name);
    uint64_t whole = 0;
    if (!value)
        return KVF_OK;
    if (is_whole)
        KVF_TRY(read_whole(line, where, s->name, 0, (uint64_t)most, &whole, error));
    else if (!json_is_number(value))
        return bad(where, s->name, value, "a number", error);
    const double real = json_number_value(value);
    memcpy((char *)out + s->offset, is_whole ? (const void *)&whole : &real, s->bytes);
    return KVF_OK;
}

static kvf_status read_settings(json_t *line, const char *where, kvf_batch_prompt *out,
                                kvf_error *error)
{
    uint64_t tokens = out->tokens;
    const kvf_setting *s;
    KVF_TRY(read_whole(line, where, "tokens", 1, 1 << 24, &tokens, error));
    out->tokens = (uint32_t)tokens;
    for (uint32_t i = 0; (s = cli_sampling_setting(i)) != NULL; i++)
        KVF_TRY(read_setting(line, where, s, &out->sampling, error));
    kvf_error why = {0};
    const kvf_status status = kvf_sampling_config_check(&out->sampling, &why);
    return status == KVF_OK ? KVF_OK : model_fail(error, status, "%s: %s", where, why.text);
}

static kvf_status read_name(json_t *line, const char *where, cli_job *job, kvf_error *error)
{
    json_t *id = json_get_set(line, "id");
    if (!id)
        return KVF_OK;
    if (json_is_written_whole(id, JSON_WHOLE_MAX, &job->number))
        return KVF_OK;
    if (!json_plain_text(id))
        return bad(where, "id", id, "a text without zero bytes, or a whole number", error);
    job->name = strdup(json_string_value(id));
    return job->name ? KVF_OK : model_out_of_memory(error, json_string_length(id), "an id");
}

static kvf_status check_texts(json_t *line, const char *where, kvf_error *error)
{
    static const char *const texts[] = {"prompt", "system"};
    for (size_t i = 0; i < 2; i++) {
        json_t *text = json_get_set(line, texts[i]);
        if (text && !json_plain_text(text))
            return bad(where, texts[i], text, "a text without zero bytes", error);
    }
    if (!json_get_set(line, "prompt") && !json_get_set(line, "messages"))
        return model_fail(error, KVF_INVALID, "%s: give prompt, or messages", where);
    return KVF_OK;
}

static kvf_status encode_line(const cli_job_source *source, json_t *line, const char *where,
                              bool *told, kvf_token_ids *ids, kvf_error *error)
{
    const cli_chat_options *o = &source->options->chat;
    json_t *prompt = json_get_set(line, "prompt");
    json_t *messages = json_get_set(line, "messages");
    json_t *system = json_get_set(line, "system");
    KVF_TRY(check_texts(line, where, error));
    if (source->before && (messages || system))
        return model_fail(
            error, KVF_INVALID,
            "%s: with --load a prompt goes on from what was saved; leave messages and "
            "system out",
            where);
    if (source->before)
        KVF_TRY(kvf_token_ids_append(ids, source->before->ids, source->before->count, error));
    if (!o->chat && !messages && !system) {
        const size_t first = ids->count;
        KVF_TRY(kvf_tokenizer_encode(source->tokenizer, json_string_value(prompt),
                                     json_string_length(prompt), !source->before, ids, error));
        if (!*told && !source->before)
            *told = cli_note_start(where, source->tokenizer, ids->ids + first, ids->count - first);
        return KVF_OK;
    }
    const cli_chat *chat = NULL;
    KVF_TRY(source->chat(source->user, &chat, error));
    kvf_text text = {0};
    if (prompt)
        KVF_TRY(kvf_text_append(&text, json_string_value(prompt), json_string_length(prompt) + 1,
                                error));
    text.size -= prompt ? 1 : 0;
    const cli_turns turns = {.system = system ? json_string_value(system) : o->system,
                             .messages = messages,
                             .path = where,
                             .prompt = prompt ? &text : NULL};
    const kvf_status status = cli_chat_encode_turns(chat, &turns, source->tokenizer, ids, error);
    kvf_text_free(&text);
    return status;
}

/* The reader of lines. */
typedef struct reading {
    const cli_job_source *source;
    cli_jobs *jobs;
} reading;

static kvf_status on_line(void *user, json_t *line, const char *where, uint64_t number,
                          kvf_error *error)
{
    const reading *r = user;
    const cli_job_source *source = r->source;
    cli_jobs *jobs = r->jobs;
    kvf_error why = {0};
    KVF_TRY(reserve(jobs, error));
    kvf_batch_prompt *prompt = &jobs->prompts[jobs->count];
    cli_job *job = &jobs->jobs[jobs->count];
    *prompt = (kvf_batch_prompt){.tokens = source->options->tokens,
                                 .sampling = source->options->sampling};
    *job = (cli_job){.number = number, .line = number, .first = jobs->ids.count};
    KVF_TRY(json_check_keys(line, where, known, error));
    KVF_TRY(read_settings(line, where, prompt, error));
    kvf_status status = encode_line(source, line, where, &jobs->told_start, &jobs->ids, &why);
    if (status == KVF_OK && jobs->ids.count == job->first + source->shared)
        status = model_fail(&why, KVF_INVALID, "the prompt is empty; give at least one token");
    if (status != KVF_OK)
        return strncmp(why.text, where, strlen(where)) == 0
                   ? model_fail(error, status, "%s", why.text)
                   : model_fail(error, status, "%s: %s", where, why.text);
    if (jobs->ids.count > UINT32_MAX / 2)
        return model_fail(error, KVF_INVALID, "%s: all prompts have more than %u tokens", where,
                          UINT32_MAX / 2);
    KVF_TRY(read_name(line, where, job, error));
    add(source, jobs);
    return KVF_OK;
}

/* ---- the file ---- */

/* By id, equal ones in the order of their lines. */
static int compare_jobs(const void *a, const void *b)
{
    const cli_job *x = *(cli_job *const *)a, *y = *(cli_job *const *)b;
    int order = (x->name != NULL) - (y->name != NULL);
    if (order == 0 && x->name)
        order = strcmp(x->name, y->name);
    if (order == 0 && !x->name)
        order = (x->number > y->number) - (x->number < y->number);
    return order ? order : (x->line > y->line) - (x->line < y->line);
}

static bool have_same_id(const cli_job *x, const cli_job *y)
{
    return x->name && y->name ? strcmp(x->name, y->name) == 0
                              : !x->name && !y->name && x->number == y->number;
}

/* Results come in the order in which they end, so only their ids tell whose they are. */
static kvf_status check_names(const cli_jobs *jobs, const char *path, kvf_error *error)
{
    const cli_job **sorted = calloc(jobs->count + 1u, sizeof *sorted);
    char number[24];
    kvf_status status = KVF_OK;
    if (!sorted)
        return model_out_of_memory(error, jobs->count * sizeof *sorted, "the ids");
    for (uint32_t i = 0; i < jobs->count; i++)
        sorted[i] = &jobs->jobs[i];
    qsort(sorted, jobs->count, sizeof *sorted, compare_jobs);
    for (uint32_t i = 1; status == KVF_OK && i < jobs->count; i++) {
        const cli_job *one = sorted[i - 1], *other = sorted[i];
        snprintf(number, sizeof number, "%llu", (unsigned long long)other->number);
        if (have_same_id(one, other))
            status = model_fail(error, KVF_INVALID,
                                "%.200s: line %llu: id %.80s is also that of line %llu (without "
                                "one it is the line's number); give each prompt its own id",
                                path, (unsigned long long)other->line,
                                other->name ? other->name : number, (unsigned long long)one->line);
    }
    free(sorted);
    return status;
}

kvf_status cli_jobs_read(const cli_job_source *source, cli_jobs *out, kvf_error *error)
{
    const char *path = source->options->prompts_file;
    kvf_status status = cli_json_lines(path, on_line, &(reading){source, out}, error);
    if (status == KVF_OK && out->count == 0)
        status = model_fail(error, KVF_INVALID, "%s holds no prompt", path);
    if (status == KVF_OK)
        status = check_names(out, path, error);
    bind(out);
    return status == KVF_OK ? cli_check_ids(source->model, &out->ids, error) : status;
}

kvf_status cli_jobs_single(const cli_job_source *source, const kvf_token_ids *prompt, cli_jobs *out,
                           kvf_error *error)
{
    KVF_TRY(reserve(out, error));
    out->prompts[0] = (kvf_batch_prompt){.tokens = source->options->tokens,
                                         .sampling = source->options->sampling};
    out->jobs[0] = (cli_job){.number = 1};
    KVF_TRY(kvf_token_ids_append(&out->ids, prompt->ids, prompt->count, error));
    add(source, out);
    bind(out);
    return KVF_OK;
}
