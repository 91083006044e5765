/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Many answers at once, each a line of JSON on standard output when it ends.
 *
 * It knows the order of a run. Invariant: every answer that began has its line, also when the run
 * is interrupted.
 */

#include "chat_format.h"
#include "common/clock.h"
#include "interrupt.h"
#include "printer.h"
#include "progress.h"
#include "run.h"

#include <stdlib.h>

/* The answer of a row of the batch so far. */
typedef struct outlet {
    cli_printer printer;
    kvf_text text;
    kvf_token_ids ids;
    cli_logprobs logprobs; /* if they are wanted */
} outlet;

typedef struct batch_run {
    cli_run *run;
    outlet *outlets; /* [rows] */
    cli_progress progress;
    double start_ms;
    bool wants_logprobs;
    uint32_t step_room; /* of run->steps.ms */
} batch_run;

static void begin(batch_run *b, outlet *o)
{
    cli_run *run = b->run;
    o->ids.count = 0;
    o->text.size = 0;
    o->printer = (cli_printer){.tokenizer = run->in->tokenizer,
                               .ends = run->in->end_ids,
                               .end_count = run->in->options.ignore_eos ? 0 : run->in->end_count,
                               .silent = true,
                               .copy = &o->text};
    cli_printer_begin(&o->printer, &run->in->options.stop);
}

/* A token with its log-probability: that which is given, or what the sampler draws. */
static uint32_t choose(void *user, const kvf_batch_answer *answer, const float *logits)
{
    batch_run *b = user;
    cli_run *run = b->run;
    cli_logprobs *logprobs = &b->outlets[answer->row].logprobs;
    double drawn = 0.0;
    uint32_t id;
    if (answer->generated == 0)
        logprobs->count = 0;
    if (run->in->given.count) {
        id = run->in->given.ids
                 .ids[cli_given_of(&run->in->given, answer)->first + answer->generated];
    } else {
        id = kvf_sampler_next(run->machine->sampler, answer->row, logits);
        if (id == KVF_SAMPLER_NONE)
            return id;
        drawn = kvf_sampler_logprob(run->machine->sampler, answer->row, id);
    }
    if (!cli_logprobs_add(logprobs, logits, run->in->model.vocab_size, id, drawn))
        run->output_failed = true;
    return id;
}

static bool on_token(void *user, const kvf_batch_answer *answer, uint32_t id)
{
    batch_run *b = user;
    outlet *o = &b->outlets[answer->row];
    if (answer->generated == 1)
        begin(b, o);
    b->run->batch.generated++;
    if (answer->prompt == 0 && answer->sample == 0 && answer->generated == 1)
        b->run->batch.first_ms = answer->first_ms;
    if (kvf_token_ids_push(&o->ids, id, NULL) != KVF_OK)
        b->run->output_failed = true;
    if (b->run->in->given.count &&
        answer->generated == cli_given_of(&b->run->in->given, answer)->count)
        return false;
    return (!b->run->in->tokenizer || cli_printer_token(&o->printer, id)) && !b->run->output_failed;
}

/* ---- a line ---- */

static const char *stop_of(const batch_run *b, const kvf_batch_answer *a, const outlet *o)
{
    if (a->has_no_logits)
        return "error";
    if (a->stop == KVF_STOP_EOS)
        return "eos";
    if (a->stop == KVF_STOP_LENGTH)
        return "length";
    return a->generated && o->printer.filter.found ? "text"
           : b->run->interrupted                   ? "interrupted"
                                                   : "error";
}

static void write_text(cli_json *j, const cli_job *job, const outlet *o)
{
    const char *text = o->text.bytes ? o->text.bytes : "";
    const kvf_thought parts = kvf_thought_split(text, o->text.size, job->thinks);
    if (parts.reasoning) {
        cli_json_bytes(j, "reasoning", parts.reasoning, parts.reasoning_size);
        cli_json_bytes(j, "answer", parts.answer, parts.answer_size);
    } else {
        cli_json_bytes(j, "answer", text, o->text.size);
    }
}

static void begin_line(cli_json *j, const cli_job *job)
{
    cli_json_object(j, NULL);
    if (job->name)
        cli_json_text(j, "id", job->name);
    else
        cli_json_integer(j, "id", job->number);
}

bool cli_run_print_jobs(const cli_input *in)
{
    bool is_printed = true;
    for (uint32_t i = 0; is_printed && i < in->jobs.count; i++) {
        cli_json j = {0};
        begin_line(&j, &in->jobs.jobs[i]);
        cli_json_integer(&j, "prompt_tokens", in->jobs.prompts[i].count);
        cli_json_end(&j, '}');
        is_printed = cli_json_print(&j);
        cli_json_free(&j);
    }
    return is_printed;
}

/* The selection that tokens were drawn with, so that they can be scored again. */
static void write_logprobs(const batch_run *b, cli_json *j, const kvf_batch_answer *a,
                           const outlet *o)
{
    const kvf_cache_config *cache = kvf_cache_settings(b->run->machine->cache);
    const bool is_drawn = b->run->in->jobs.prompts[a->prompt].sampling.temperature > 0.0;
    char text[32];
    cli_json_text(j, "select", cli_show(kvf_cache_setting, "select", cache, text));
    cli_json_integer(j, "budget", cache->budget_tokens);
    cli_logprobs_write(j, &o->logprobs, is_drawn);
}

static void write_line(const batch_run *b, cli_json *j, const kvf_batch_answer *a, const outlet *o,
                       const char *stop)
{
    const cli_jobs *jobs = &b->run->in->jobs;
    const cli_job *job = &jobs->jobs[a->prompt];
    begin_line(j, job);
    cli_json_integer(j, "sample", a->sample);
    cli_json_integer(j, "seed", jobs->prompts[a->prompt].sampling.seed + a->sample);
    cli_json_integer(j, "prompt_tokens", jobs->prompts[a->prompt].count);
    cli_json_integer(j, "generated_tokens", a->generated);
    cli_json_text(j, "stop", stop);
    cli_json_real(j, "ttft_ms", a->first_ms);
    cli_json_real(j, "ms", a->ms);
    if (a->has_no_logits)
        cli_json_text(j, "error",
                      "no logit is a finite number; the weights may be damaged, or "
                      "too large for their type");
    if (b->run->in->tokenizer)
        write_text(j, job, o);
    cli_json_array(j, "ids");
    for (size_t i = 0; i < o->ids.count; i++)
        cli_json_integer(j, NULL, o->ids.ids[i]);
    cli_json_end(j, ']');
    if (b->wants_logprobs)
        write_logprobs(b, j, a, o);
    cli_json_end(j, '}');
}

static void write_score(batch_run *b, cli_json *j, const kvf_batch_answer *a, const outlet *o)
{
    begin_line(j, &b->run->in->jobs.jobs[a->prompt]);
    if (!cli_rescore_write(b->run, j, cli_given_of(&b->run->in->given, a), &o->logprobs))
        j->failed = true;
    if (b->wants_logprobs)
        cli_logprobs_write(j, &o->logprobs, false);
    cli_json_end(j, '}');
}

static void on_end(void *user, const kvf_batch_answer *answer)
{
    batch_run *b = user;
    cli_run *run = b->run;
    outlet *o = &b->outlets[answer->row];
    cli_json j = {0};
    if (answer->generated == 0) {
        begin(b, o);
        o->logprobs.count = 0;
    }
    run->interrupted = cli_interrupted();
    const char *stop = stop_of(b, answer, o);
    cli_printer_end(&o->printer);
    cli_progress_clear(&b->progress);
    if (run->in->given.count)
        write_score(b, &j, answer, o);
    else
        write_line(b, &j, answer, o, stop);
    if (!cli_json_print(&j) || o->printer.failed)
        run->output_failed = true;
    cli_json_free(&j);
    run->batch.answers++;
    run->batch.failed += answer->has_no_logits;
    run->drafted += answer->drafted;
    run->accepted += answer->accepted;
}

/* ---- the batch ---- */

static void show_progress(batch_run *b)
{
    const cli_batch *batch = &b->run->batch;
    cli_progress_pace(&b->progress, batch->generated, b->start_ms);
    cli_progress_at(&b->progress, batch->answers);
}

static bool on_pass(void *user, uint32_t prefilled, uint32_t rows, double ms)
{
    batch_run *b = user;
    cli_run *run = b->run;
    if (rows == 0) {
        run->prefilled += prefilled;
        run->prefill_ms += ms;
    } else {
        double *grown = model_room(run->steps.ms, run->steps.count, &b->step_room, sizeof *grown);
        if (!grown)
            return !(run->output_failed = true);
        run->steps.ms = grown;
        run->steps.ms[run->steps.count++] = ms;
        run->batch.rows_sum += rows;
    }
    show_progress(b);
    run->interrupted = cli_interrupted();
    return !run->interrupted && !run->output_failed;
}

kvf_status cli_run_batch(cli_run *run, kvf_error *error)
{
    KVF_TRY(cli_saved_load(run, error));
    batch_run b = {.run = run,
                   .outlets = calloc(run->machine->rows, sizeof *b.outlets),
                   .wants_logprobs = cli_option_find(&run->in->command, "logprobs")->given,
                   .start_ms = kvf_now_ms()};
    if (!b.outlets)
        return model_out_of_memory(error, run->machine->rows * sizeof *b.outlets, "the answers");
    const bool is_given = run->in->given.count > 0;
    for (uint32_t i = 0; i < run->machine->rows; i++)
        b.outlets[i].logprobs.top = run->in->options.logprobs;
    const kvf_batch_request request = {.prompts = run->in->jobs.prompts,
                                       .count = run->in->jobs.count,
                                       .rows = run->machine->rows,
                                       .piece = run->machine->piece,
                                       .base = run->sequence,
                                       .tokens_max = run->machine->config.host_tokens_max -
                                                     cli_saved_room(run->in, run->machine),
                                       .vocab_size = run->in->model.vocab_size,
                                       .sampler = run->machine->sampler,
                                       .eos_ids = run->in->end_ids,
                                       .eos_count = run->in->end_count,
                                       .ignores_eos = run->in->options.ignore_eos || is_given,
                                       .draft_tokens = run->in->options.draft_tokens,
                                       .step_rows = run->machine->step_rows,
                                       .choose = is_given || b.wants_logprobs ? choose : NULL,
                                       .token = on_token,
                                       .end = on_end,
                                       .pass = on_pass,
                                       .user = &b};
    cli_progress_begin(&b.progress, "answers", run->in->jobs.answers, "answers");
    kvf_status status =
        cli_interrupted() ? KVF_OK : kvf_generate_batch(&run->machine->session, &request, error);
    cli_progress_end(&b.progress);
    run->interrupted = cli_interrupted();
    run->batch.ms = kvf_now_ms() - b.start_ms;
    for (uint32_t i = 0; i < run->machine->rows; i++) {
        kvf_text_free(&b.outlets[i].text);
        kvf_token_ids_free(&b.outlets[i].ids);
        cli_logprobs_free(&b.outlets[i].logprobs);
    }
    free(b.outlets);
    if (status == KVF_OK && run->machine->prune)
        kvf_prune_stats_get(run->machine->prune, &run->pruned.stats);
    return status;
}
