/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Prefill with a bar, then tokens to standard output as they come.
 *
 * It knows the order of a run. Invariant: every token that was generated is in the outputs, also
 * when the run is interrupted.
 */

#include "common/clock.h"
#include "interrupt.h"
#include "printer.h"
#include "progress.h"
#include "run.h"

#include <unistd.h>

/* Where tokens go. */
typedef struct outlet {
    cli_run *run;
    cli_printer printer;
    cli_progress progress;
    double start_ms;
    uint32_t count;
} outlet;

bool cli_run_go_on(void *progress, uint32_t done, uint32_t total)
{
    (void)total;
    cli_progress_at(progress, done);
    return !cli_interrupted();
}

static bool on_token(void *user, uint32_t id, const float *logits)
{
    outlet *o = user;
    cli_run *run = o->run;
    char number[16];
    int size = snprintf(number, sizeof number, "%u\n", id);
    cli_output_write(&run->ids, number, (size_t)size);
    if (run->in->options.dump_logits_file)
        cli_output_write(&run->logits, logits, run->in->model.vocab_size * sizeof *logits);
    cli_progress_pace(&o->progress, ++o->count, o->start_ms);
    cli_progress_at(&o->progress, o->count);
    if (o->count > 1)
        cli_run_complete_beside(run, o->start_ms);
    return cli_printer_token(&o->printer, id) && !cli_interrupted();
}

kvf_stats cli_stats_between(const kvf_stats *before, const kvf_stats *after)
{
    kvf_stats d = *after;
    d.steps -= before->steps;
    d.tokens_attended -= before->tokens_attended;
    d.tokens_held -= before->tokens_held;
    d.pages_selected -= before->pages_selected;
    d.hits -= before->hits;
    d.misses -= before->misses;
    d.bytes_to_device -= before->bytes_to_device;
    d.verified -= before->verified;
    d.recall_sum -= before->recall_sum;
    return d;
}

/* Print what follows from row 0 of the transformer's logits. @return KVF_OK also when interrupted
 */
static kvf_status answer(cli_run *run, kvf_sequence *sequence, kvf_error *error)
{
    const uint32_t tokens = run->in->options.tokens;
    cli_answer *a = &run->answers.of[run->answers.count];
    *a = (cli_answer){.first_step = run->steps.count};
    kvf_stats before, after;
    kvf_cache_stats(run->machine->cache, &before);
    outlet o = {.run = run,
                .printer = {.tokenizer = run->in->tokenizer,
                            .ends = run->in->end_ids,
                            .end_count = run->in->options.ignore_eos ? 0 : run->in->end_count,
                            .one_line = run->in->options.ask_file}};
    cli_printer_begin(&o.printer, &run->in->options.stop);
    o.start_ms = kvf_now_ms();
    if (!isatty(STDOUT_FILENO)) /* where the tokens are what is seen */
        cli_progress_begin(&o.progress, "decode", tokens, "tokens");
    kvf_decode_request request = {
        .sequence = sequence,
        .tokens = tokens,
        .sampler = run->machine->sampler,
        .eos_ids = run->in->end_ids,
        .eos_count = run->in->options.ignore_eos ? 0 : run->in->end_count,
        .token = on_token,
        .user = &o,
        .draft = run->machine->draft,
    };
    kvf_decode_result result = {.step_ms = run->steps.ms + run->steps.count};
    kvf_status status = kvf_generate_decode(&run->machine->session, &request, &result, error);
    cli_progress_end(&o.progress);
    run->steps.count += result.steps;
    run->drafted += result.drafted;
    run->accepted += result.accepted;
    run->answers.count++;
    kvf_cache_stats(run->machine->cache, &after);
    a->generated = result.generated;
    a->stop = result.stop;
    a->first_ms = result.first_ms;
    a->steps = result.steps;
    a->stats = cli_stats_between(&before, &after);
    if (result.generated > 0)
        cli_printer_end(&o.printer);
    run->output_failed = run->output_failed || o.printer.failed;
    run->interrupted = a->interrupted = cli_interrupted();
    return status;
}

/* Tokens after others, as steps or densely. */
static kvf_status read_more(const kvf_session *session, const kvf_prefill_request *request,
                            bool is_sparse, kvf_stop *stop, kvf_error *error)
{
    return is_sparse ? kvf_generate_extend(session, request, stop, error)
                     : kvf_generate_prefill(session, request, stop, error);
}

static kvf_status ask(cli_run *run, kvf_sequence *fork, const uint32_t *ids, uint32_t count,
                      kvf_error *error)
{
    const double start = kvf_now_ms();
    const kvf_prefill_request request = {
        .sequence = fork, .ids = ids, .count = count, .wants_logits = true};
    kvf_session session = run->machine->session;
    kvf_stats before, after;
    kvf_stop stop;
    session.prune = NULL;
    kvf_cache_stats(run->machine->cache, &before);
    KVF_TRY(
        read_more(&session, &request, run->in->options.extend != CLI_EXTEND_DENSE, &stop, error));
    kvf_sampler_see(run->machine->sampler, 0, ids, count);
    if (run->machine->draft)
        kvf_draft_see(run->machine->draft, ids, count);
    const double read_ms = kvf_now_ms() - start;
    const kvf_status status = answer(run, fork, error);
    cli_answer *a = &run->answers.of[run->answers.count - 1];
    kvf_cache_stats(run->machine->cache, &after);
    a->stats = cli_stats_between(&before, &after);
    a->prompt_tokens = count;
    a->first_ms += read_ms;
    return status;
}

/* Every question continues the document on a fork of its own. Behind the first answer the document
 * becomes whole, where that is wanted. */
static kvf_status ask_all(cli_run *run, kvf_error *error)
{
    const uint32_t *starts = run->in->questions.starts.ids;
    for (uint32_t i = 0; i < run->in->questions.count && !run->interrupted && !run->output_failed;
         i++) {
        kvf_sequence *fork = NULL;
        KVF_TRY(kvf_library_told(
            run->machine->runtime,
            kvf_sequence_fork(run->machine->cache, run->sequence, run->machine->stream, &fork),
            error));
        kvf_sampler_forget(run->machine->sampler, 0);
        kvf_sampler_see(run->machine->sampler, 0, run->in->prompt.ids, run->in->prompt.count);
        if (run->machine->draft)
            kvf_draft_cut(run->machine->draft, run->in->prompt.count);
        const kvf_status status = ask(run, fork, run->in->questions.ids.ids + starts[i],
                                      starts[i + 1] - starts[i], error);
        kvf_transformer_forget(run->machine->transformer);
        kvf_sequence_destroy(fork);
        if (status != KVF_OK)
            return status;
        if (i == 0 && run->in->questions.count > 1 && !run->interrupted) {
            cli_run_complete_all(run);
            cli_run_complete_end(run);
        }
    }
    return KVF_OK;
}

/* How far a prompt is on its way through the layers. */
typedef struct prompt_reading {
    cli_progress progress;
    uint32_t done;
} prompt_reading;

static bool on_reading(void *user, uint32_t done, uint32_t total)
{
    prompt_reading *r = user;
    r->done = done;
    return cli_run_go_on(&r->progress, done, total);
}

/* Questions follow a document. Where there is a static set the document ends with a step, which
 * chooses the set once for all of them; a policy that prunes has chosen it by then. */
static bool ends_with_step(const cli_run *run)
{
    return run->in->options.ask_file && !run->machine->session.prune &&
           kvf_cache_memory(run->machine->cache)->static_tokens > 0;
}

/* Tokens of the prompt after what was loaded that are read densely: with `--extend sparse` only
 * those that the saved prompt had, too. */
static uint32_t dense_tokens(const cli_run *run, uint32_t count)
{
    if (run->in->loaded.tokens && run->in->options.extend == CLI_EXTEND_SPARSE)
        count = kvf_min_u32(count, (uint32_t)run->in->loaded.prompt.count - run->in->loaded.tokens);
    return count > 0 && ends_with_step(run) ? count - 1 : count;
}

static kvf_status read_piece(cli_run *run, uint32_t piece, bool is_sparse, bool wants_logits,
                             kvf_error *error)
{
    prompt_reading reading = {0};
    const kvf_prefill_request request = {
        .sequence = run->sequence,
        .ids = run->in->prompt.ids + run->in->loaded.tokens + run->prefilled,
        .count = piece,
        .wants_logits = wants_logits,
        .progress = on_reading,
        .user = &reading,
    };
    kvf_stop stop;
    const double start = kvf_now_ms();
    cli_progress_begin(&reading.progress, "prefill", piece, "tokens");
    const kvf_status status = read_more(&run->machine->session, &request, is_sparse, &stop, error);
    cli_progress_end(&reading.progress);
    run->prefill_ms += kvf_now_ms() - start;
    /* Not what the sequence holds: a pruned prompt leaves less, one that was stopped is not yet in
     * its deeper layers. */
    run->prefilled += status == KVF_OK && stop == KVF_STOP_LENGTH ? piece : reading.done;
    run->interrupted = cli_interrupted();
    return status;
}

/* Up to the first `end` of @p count tokens. The last one's logits are wanted. */
static kvf_status read_prompt(cli_run *run, uint32_t end, uint32_t count, kvf_error *error)
{
    const uint32_t dense = dense_tokens(run, count);
    while (run->prefilled < end && !run->interrupted) {
        const bool is_sparse = run->prefilled >= dense;
        const uint32_t to = is_sparse ? end : kvf_min_u32(end, dense);
        KVF_TRY(read_piece(run, to - run->prefilled, is_sparse, to == count, error));
    }
    return KVF_OK;
}

/* A file has no logits, so a prompt is saved in front of its last token, which whoever loads it
 * reads. A pruned one cannot be cut there. */
kvf_status cli_run_prefill(cli_run *run, kvf_error *error)
{
    KVF_TRY(cli_saved_load(run, error));
    const uint32_t count = (uint32_t)run->in->prompt.count - run->in->loaded.tokens;
    const bool saves_less = run->in->options.save_file && !run->machine->session.prune && count > 0;
    KVF_TRY(read_prompt(run, count - saves_less, count, error));
    cli_run_complete_note(run);
    if (!run->interrupted)
        KVF_TRY(cli_saved_begin(run, error));
    KVF_TRY(read_prompt(run, count, count, error));
    return cli_run_prune_note(run, error);
}

kvf_status cli_run_generate(cli_run *run, kvf_error *error)
{
    KVF_TRY(cli_run_prefill(run, error));
    if (run->interrupted)
        return KVF_OK;
    kvf_sampler_see(run->machine->sampler, 0, run->in->prompt.ids, run->in->prompt.count);
    if (run->machine->draft)
        kvf_draft_see(run->machine->draft, run->in->prompt.ids, run->in->prompt.count);
    return run->in->options.ask_file ? ask_all(run, error) : answer(run, run->sequence, error);
}
