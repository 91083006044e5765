/* SPDX-License-Identifier: Apache-2.0 */

/* Finished answers; see the header. */

#include "prompt.h"

#include <math.h>
#include <stdlib.h>

#define TOKENS_MAX (1u << 24) /* of an answer */

typedef struct reading {
    const kvf_model_config *model;
    const cli_jobs *jobs;
    cli_given *given;
} reading;

/* Which prompt a line answers: that of its id. */
static kvf_status find_job(const reading *r, json_t *line, const char *where, uint32_t *out,
                           kvf_error *error)
{
    json_t *id = json_get_set(line, "id");
    char text[96];
    uint64_t number = 0;
    if (!json_is_string(id) && !json_is_written_whole(id, JSON_WHOLE_MAX, &number))
        return model_fail(error, KVF_INVALID,
                          "%s: give id, that of its prompt; lines of kvferry run have one", where);
    for (uint32_t i = 0; i < r->jobs->count; i++) {
        const cli_job *job = &r->jobs->jobs[i];
        if (json_is_string(id) ? job->name && json_is_text(id, job->name)
                               : !job->name && job->number == number) {
            *out = i;
            return KVF_OK;
        }
    }
    return model_fail(error, KVF_INVALID,
                      "%s: id %s is that of no prompt; give the prompts that "
                      "were answered, as they were given to kvferry run",
                      where, json_show(id, text, sizeof text));
}

static kvf_status read_ids(const reading *r, json_t *line, const char *where,
                           cli_given_answer *answer, kvf_error *error)
{
    json_t *ids = json_get_set(line, "ids");
    if (json_array_size(ids) == 0 || json_array_size(ids) > TOKENS_MAX)
        return model_fail(error, KVF_INVALID,
                          "%s: ids must be a list of 1 to %u tokens; an answer without any has "
                          "nothing to score",
                          where, TOKENS_MAX);
    answer->first = r->given->ids.count;
    answer->count = (uint32_t)json_array_size(ids);
    json_t *item;
    size_t i;
    json_array_foreach (ids, i, item) {
        uint64_t id;
        if (!json_is_written_whole(item, r->model->vocab_size - 1, &id))
            return model_fail(error, KVF_INVALID,
                              "%s: ids must be whole numbers from 0 to %u, the model's tokens",
                              where, r->model->vocab_size - 1);
        KVF_TRY(kvf_token_ids_push(&r->given->ids, (uint32_t)id, error));
    }
    return KVF_OK;
}

static kvf_status read_logprobs(const reading *r, json_t *line, const char *where,
                                cli_given_answer *answer, kvf_error *error)
{
    cli_given *g = r->given;
    json_t *values = json_get_set(line, "logprobs");
    char shown[96];
    float *grown = realloc(g->logprobs, g->ids.count * sizeof *grown);
    if (!grown)
        return model_out_of_memory(error, g->ids.count * sizeof *grown, "the answers");
    g->logprobs = grown;
    for (size_t i = answer->first; i < g->ids.count; i++)
        grown[i] = NAN;
    if (!values)
        return KVF_OK;
    if (json_array_size(values) != answer->count)
        return model_fail(error, KVF_INVALID,
                          "%s: logprobs must be a list of %u numbers, one per id", where,
                          answer->count);
    answer->has_logprobs = true;
    json_t *v;
    size_t at;
    json_array_foreach (values, at, v) {
        if (!json_is_number(v) && !json_is_null(v))
            return model_fail(
                error, KVF_INVALID,
                "%s: logprobs[%zu] is %s; give a number, or null for a token without one", where,
                at, json_show(v, shown, sizeof shown));
        grown[answer->first + at] = json_is_number(v) ? (float)json_number_value(v) : NAN;
    }
    return KVF_OK;
}

/* The name that its figures are told under. */
static void name_selection(json_t *line, cli_given_answer *answer)
{
    json_t *select = json_get_set(line, "select"), *budget = json_get_set(line, "budget");
    uint64_t tokens;
    answer->selection[0] = '\0';
    if (!json_is_string(select))
        return;
    if (json_is_written_whole(budget, JSON_WHOLE_MAX, &tokens) && !json_is_text(select, "full"))
        snprintf(answer->selection, sizeof answer->selection, "%.32s, budget %llu",
                 json_string_value(select), (unsigned long long)tokens);
    else
        snprintf(answer->selection, sizeof answer->selection, "%.32s", json_string_value(select));
}

static kvf_status on_line(void *user, json_t *line, const char *where, uint64_t number,
                          kvf_error *error)
{
    const reading *r = user;
    cli_given_answer answer = {0};
    json_t *sample = json_get_set(line, "sample");
    (void)number;
    cli_given *g = r->given;
    cli_given_answer *grown = model_room(g->answers, g->count, &g->capacity, sizeof *grown);
    if (!grown)
        return model_out_of_memory(error, sizeof *grown, "the answers");
    g->answers = grown;
    KVF_TRY(find_job(r, line, where, &answer.job, error));
    if (sample && !json_is_written_whole(sample, JSON_WHOLE_MAX, &answer.sample))
        return model_fail(error, KVF_INVALID, "%s: sample must be a whole number", where);
    KVF_TRY(read_ids(r, line, where, &answer, error));
    KVF_TRY(read_logprobs(r, line, where, &answer, error));
    name_selection(line, &answer);
    g->answers[g->count++] = answer;
    return KVF_OK;
}

/* ---- the file ---- */

static int compare(const void *a, const void *b)
{
    const cli_given_answer *x = a, *y = b;
    const int order = (x->job > y->job) - (x->job < y->job);
    return order ? order : (x->first > y->first) - (x->first < y->first);
}

/* Answers become samples of their prompts. */
static void bind(cli_given *g, cli_jobs *jobs)
{
    uint32_t kept = 0;
    jobs->most = jobs->longest = 0;
    for (uint32_t i = 0, at = 0; i < jobs->count; i++) {
        kvf_batch_prompt *p = &jobs->prompts[i];
        const uint32_t first = at;
        p->tokens = 0;
        for (; at < g->count && g->answers[at].job == i; at++)
            p->tokens = g->answers[at].count > p->tokens ? g->answers[at].count : p->tokens;
        p->samples = at - first;
        if (p->samples == 0) {
            free(jobs->jobs[i].name);
            continue;
        }
        for (uint32_t k = first; k < at; k++)
            g->answers[k].job = kept;
        g->first[kept] = first;
        jobs->longest = p->count > jobs->longest ? p->count : jobs->longest;
        jobs->most = p->count + p->tokens > jobs->most ? p->count + p->tokens : jobs->most;
        jobs->prompts[kept] = *p;
        jobs->jobs[kept++] = jobs->jobs[i];
    }
    jobs->count = kept;
    jobs->answers = g->count;
}

kvf_status cli_given_read(const char *path, const kvf_model_config *model, cli_jobs *jobs,
                          cli_given *out, kvf_error *error)
{
    reading r = {.model = model, .jobs = jobs, .given = out};
    KVF_TRY(cli_json_lines(path, on_line, &r, error));
    if (out->count == 0)
        return model_fail(error, KVF_INVALID, "%s holds no answer", path);
    out->first = calloc(jobs->count, sizeof *out->first);
    if (!out->first)
        return model_out_of_memory(error, jobs->count * sizeof *out->first, "the answers");
    qsort(out->answers, out->count, sizeof *out->answers, compare);
    bind(out, jobs);
    return KVF_OK;
}

const cli_given_answer *cli_given_of(const cli_given *g, const kvf_batch_answer *answer)
{
    return &g->answers[g->first[answer->prompt] + answer->sample];
}

void cli_given_free(cli_given *g)
{
    free(g->answers);
    free(g->first);
    free(g->logprobs);
    kvf_token_ids_free(&g->ids);
    *g = (cli_given){0};
}
