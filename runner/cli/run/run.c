/* SPDX-License-Identifier: Apache-2.0 */

/*
 * `kvferry run` and its form `score`: read the input, open the machine, run, and report, in the
 * order in which things can fail, cheapest first, so that a mistake is told before memory is
 * reserved.
 *
 * It knows the four, not what they do. Invariant: whatever was opened is closed on every path, in
 * reverse.
 */

#include "run.h"

#include "commands.h"
#include "common/clock.h"
#include "interrupt.h"
#include "run_report.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* A command from its options to its exit status. */
typedef struct job {
    cli_input input;
    cli_machine machine;
    cli_run run;
    cli_report report;
} job;

/* ---- open ---- */

static kvf_status reserve_records(cli_run *run, kvf_error *error)
{
    const cli_input *in = run->in;
    const bool is_batch = run->machine->rows > 0;
    run->answers.max = in->options.ask_file ? in->questions.count : 1;
    const size_t steps = in->questions.ids.count + in->text.count + 1 +
                         (size_t)run->answers.max * in->options.tokens;
    run->answers.of = calloc(run->answers.max, sizeof *run->answers.of);
    run->steps.ms = is_batch ? NULL : calloc(steps, sizeof *run->steps.ms);
    run->scored.losses = calloc(steps, sizeof *run->scored.losses);
    run->scored.likeliest = calloc(steps, sizeof *run->scored.likeliest);
    return run->answers.of && (run->steps.ms || is_batch) && run->scored.losses &&
                   run->scored.likeliest
               ? KVF_OK
               : model_out_of_memory(error, steps * sizeof *run->steps.ms,
                                     "the times of all steps");
}

/* @return KVF_OK also if it was interrupted: then less is open */
static kvf_status open_run(job *j, kvf_error *error)
{
    cli_run *run = &j->run;
    KVF_TRY(reserve_records(run, error));
    KVF_TRY(cli_machine_open(&j->input, &j->machine, error));
    if (cli_interrupted() || j->machine.rows)
        return KVF_OK;
    return kvf_library_told(j->machine.runtime,
                            kvf_sequence_create(j->machine.cache, &run->sequence), error);
}

static bool open_outputs(job *j)
{
    const cli_run_options *o = &j->input.options;
    return (!o->emit_ids_file || cli_output_open(&j->run.ids, o->emit_ids_file)) &&
           (!o->dump_logits_file || cli_output_open(&j->run.logits, o->dump_logits_file)) &&
           (!o->stats || strcmp(o->stats, "json") == 0 ||
            cli_output_open(&j->report.stats, o->stats));
}

static void close_run(cli_run *run)
{
    const cli_machine *m = run->machine;
    cli_output_discard(&run->logits);
    cli_output_discard(&run->ids);
    if (m->stream)
        (void)!kvf_stream_wait(m->stream);
    (void)cli_saved_end(run);
    if (m->transformer) {
        kvf_transformer_forget(m->transformer);
        kvf_transformer_keep(m->transformer, NULL);
    }
    kvf_completion_close(m->completion);
    kvf_sequence_destroy(run->sequence);
    cli_rescore_free(&run->rescores);
    free(run->pruned.layer_tokens);
    free(run->scored.losses);
    free(run->scored.likeliest);
    free(run->steps.ms);
    free(run->answers.of);
}

static void close_job(job *j)
{
    cli_output_discard(&j->report.stats);
    close_run(&j->run);
    cli_machine_close(&j->machine);
    cli_input_close(&j->input);
}

/* ---- run ---- */

/* Tells what a default decided. */
static void tell_dense(const cli_input *in, const cli_machine *m)
{
    const kvf_cache_config *c = &m->config;
    if (c->select != KVF_SELECT_FULL && c->tokens_max <= c->budget_tokens &&
        !cli_option_find(&in->command, "budget")->given)
        fprintf(stderr,
                "kvferry: every step is dense: a context of %u tokens fits into --budget %u, the "
                "default\n",
                c->tokens_max, c->budget_tokens);
}

/* Generate or score, and tell. @return exit status */
static int run_and_report(job *j, kvf_status (*work)(cli_run *run, kvf_error *error),
                          kvf_error *error)
{
    cli_run *run = &j->run;
    tell_dense(&j->input, &j->machine);
    const kvf_status status = (j->machine.rows ? cli_run_batch : work)(run, error);
    bool written = cli_saved_end(run);
    written = cli_output_commit(&run->ids) && written;
    written = cli_output_commit(&run->logits) && written;
    cli_report_summary(&j->report);
    written = cli_report_write(&j->report) && written;
    if (j->input.options.text_file && status == KVF_OK)
        written = cli_report_print_score(run) && written;
    if (status != KVF_OK) {
        fprintf(stderr, "kvferry: %s\n", error->text);
        return 1;
    }
    if (!written || run->output_failed || run->batch.failed)
        return 1;
    return run->interrupted ? cli_interrupt_status() : 0;
}

/* Before the first token there is nothing to tell but that. @return exit status */
static int report_interrupted(job *j)
{
    j->run.interrupted = true;
    fputs("kvferry: interrupted while the model was loaded; nothing was generated\n", stderr);
    return cli_report_write(&j->report) ? cli_interrupt_status() : 1;
}

static kvf_status read_and_plan(job *j, kvf_error *error)
{
    cli_input *in = &j->input;
    cli_machine *m = &j->machine;
    KVF_TRY(cli_input_read(in, m, error));
    KVF_TRY(cli_run_prune_prepare(in, m, error));
    if (!m->runtime)
        KVF_TRY(kvf_runtime_open(&in->options.runtime, &m->runtime, error));
    KVF_TRY(cli_machine_plan(in, m, error));
    return cli_saved_check(in, m, error);
}

/* Up to the point where memory is reserved. @return -1 to go on, else the exit status */
static int prepare(job *j, kvf_error *error)
{
    const cli_run_options *o = &j->input.options;
    const cli_memory_plan *plan = &j->machine.plan;
    if (read_and_plan(j, error) != KVF_OK) {
        cli_complain(&j->input.command, error->text);
        return 1;
    }
    if (o->dry_run || isatty(STDERR_FILENO))
        cli_memory_plan_print(plan, stderr);
    if (!cli_memory_plan_check(plan))
        return 1;
    if (o->dry_run)
        return !o->prompts_file || cli_run_print_jobs(&j->input) ? 0 : 1;
    return open_outputs(j) ? -1 : 1;
}

/* A form of the command: its options by @p parse, which returns -1 to go on; and @p work, which
 * returns KVF_OK also when interrupted. @return exit status */
static int run_command(int argc, char **argv,
                       int (*parse)(int argc, char **argv, cli_command *command,
                                    cli_run_options *out),
                       kvf_status (*work)(cli_run *run, kvf_error *error))
{
    job j = {.run = {.in = &j.input, .machine = &j.machine}, .report.run = &j.run};
    kvf_error error = {0};
    char calibration[CLI_CALIBRATION_BYTES];
    const int parsed = parse(argc, argv, &j.input.command, &j.input.options);
    if (parsed >= 0)
        return parsed;
    j.input.options.runtime.log = cli_log_line;
    j.machine.config = j.input.options.cache;
    cli_calibration_choose(&j.input.options.runtime, calibration);
    cli_interrupt_watch();
    const double start = kvf_now_ms();
    int result = prepare(&j, &error);
    if (result < 0) {
        const kvf_status status = open_run(&j, &error);
        j.report.load_ms = kvf_now_ms() - start;
        if (status != KVF_OK)
            fprintf(stderr, "kvferry: %s\n", error.text);
        result = status != KVF_OK    ? 1
                 : cli_interrupted() ? report_interrupted(&j)
                                     : run_and_report(&j, work, &error);
    }
    close_job(&j);
    return result;
}

int cli_run_main(int argc, char **argv)
{
    return run_command(argc, argv, cli_run_options_parse, cli_run_generate);
}

int cli_score_main(int argc, char **argv)
{
    return run_command(argc, argv, cli_score_options_parse, cli_run_score);
}
