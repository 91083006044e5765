/* SPDX-License-Identifier: Apache-2.0 */

/*
 * `kvferry run` and its form `score`: open everything in the order in which it can
 * fail, cheapest first, so that a mistake is told before memory is reserved.
 *
 * It knows what depends on what. Invariant: whatever was opened is closed on every path, in
 * reverse.
 */

#include "run.h"

#include "commands.h"
#include "common/clock.h"
#include "interrupt.h"
#include "progress.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MEMORY_PAGE_BYTES 4096u

/* ---- open ---- */

void cli_log_line(void *user, int level, const char *line)
{
    (void)user;
    (void)level;
    fprintf(stderr, "kvferry: %s\n", line);
}

/* Read every page of the weights once, so that the first token does not wait for the disk. */
static void load_weights(const cli_run *run)
{
    cli_progress progress;
    unsigned sum = 0;
    uint64_t done = 0;
    cli_progress_begin(&progress, "loading weights", kvf_weights_bytes(run->weights) >> 20, "MiB");
    for (size_t i = 0; i < kvf_weights_count(run->weights) && !cli_interrupted(); i++) {
        const kvf_tensor *tensor = kvf_weights_at(run->weights, i);
        const volatile unsigned char *bytes = tensor->data;
        for (uint64_t at = 0; at < tensor->bytes; at += MEMORY_PAGE_BYTES) {
            sum += bytes[at];
            if (at % (16u << 20) == 0)
                cli_progress_at(&progress, (done + at) >> 20);
        }
        done += tensor->bytes;
    }
    (void)sum;
    cli_progress_end(&progress);
}

kvf_status cli_runtime_open(kvf_runtime_config *config, const kvf_model_config *model,
                            kvf_weights *weights, kvf_runtime **out, kvf_error *error)
{
    kvf_error why = {0};
    KVF_TRY(kvf_runtime_open(config, out, error));
    if (config->device != KVF_DEVICE_AUTO || kvf_runtime_device(*out) == KVF_DEVICE_HOST)
        return KVF_OK;
    kvf_weights_keep_packed(weights);
    if (kvf_transformer_on_gpu(model, weights, &why) == KVF_OK)
        return KVF_OK;
    fprintf(stderr, "kvferry: on the host device: %.*s\n", (int)strcspn(why.text, ";"), why.text);
    kvf_runtime_close(*out);
    *out = NULL;
    config->device = KVF_DEVICE_HOST;
    return kvf_runtime_open(config, out, error);
}

kvf_status cli_weights_convert(kvf_weights *weights, const kvf_runtime *runtime, kvf_error *error)
{
    cli_progress progress;
    uint64_t done = 0;
    kvf_status status = KVF_OK;
    cli_progress_begin(&progress, "converting weights", kvf_weights_bytes(weights) >> 20, "MiB");
    for (size_t i = 0; i < kvf_weights_count(weights) && status == KVF_OK && !cli_interrupted();
         i++) {
        const kvf_tensor *tensor = kvf_weights_at(weights, i);
        status = kvf_weights_load(tensor, kvf_runtime_threads(runtime), error);
        done += tensor->bytes;
        cli_progress_at(&progress, done >> 20);
    }
    cli_progress_end(&progress);
    return status;
}

static kvf_status open_cache(cli_run *run, kvf_error *error)
{
    cli_progress progress;
    cli_progress_begin(&progress, "pinning memory", 1, "");
    kvf_status status =
        kvf_transformer_cache_open(run->transformer, &run->options.cache, &run->cache, error);
    cli_progress_end(&progress);
    if (status == KVF_OK)
        status = run->batch.rows ? KVF_OK : kvf_sequence_create(run->cache, &run->sequence);
    if (status != KVF_OK && !run->cache)
        return status;
    if (status != KVF_OK)
        return model_fail(error, status, "no sequence could be created");
    return cli_run_prune_open(run, error);
}

static kvf_status reserve_records(cli_run *run, kvf_error *error)
{
    const uint32_t rows = run->batch.rows ? run->batch.rows : 1;
    run->answers.max = run->options.ask_file ? run->questions.count : 1;
    size_t steps = run->questions.ids.count + run->scored.text.count + 1 +
                   (size_t)run->answers.max * run->options.tokens;
    run->answers.of = calloc(run->answers.max, sizeof *run->answers.of);
    run->steps.ms = run->batch.rows ? NULL : calloc(steps, sizeof *run->steps.ms);
    run->scored.losses = calloc(steps, sizeof *run->scored.losses);
    run->scored.likeliest = calloc(steps, sizeof *run->scored.likeliest);
    if (!run->answers.of || (!run->steps.ms && !run->batch.rows) || !run->scored.losses ||
        !run->scored.likeliest)
        return model_out_of_memory(error, steps * sizeof *run->steps.ms, "the times of all steps");
    if (run->options.draft_tokens && !run->batch.rows)
        KVF_TRY(kvf_draft_create(run->options.draft_tokens, run->options.cache.tokens_max + 1,
                                 &run->draft.of, error));
    KVF_TRY(kvf_sampler_create(run->model.vocab_size, rows, &run->sampler, error));
    return kvf_sampler_begin(run->sampler, 0, &run->options.sampling, error);
}

/* @return KVF_OK also if it was interrupted: then less is open */
static kvf_status open_machine(cli_run *run, kvf_error *error)
{
    kvf_transformer_options options = cli_run_transformer_options(run);
    run->batch.piece = options.chunk_max;
    KVF_TRY(reserve_records(run, error));
    KVF_TRY(cli_weights_convert(run->weights, run->runtime, error));
    if (cli_interrupted())
        return KVF_OK;
    KVF_TRY(kvf_transformer_open(&options, &run->transformer, error));
    if (kvf_runtime_device(run->runtime) == KVF_DEVICE_HOST)
        load_weights(run);
    if (cli_interrupted())
        return KVF_OK;
    KVF_TRY(open_cache(run, error));
    KVF_TRY(kvf_library_told(run->runtime, kvf_stream_create(run->runtime, &run->stream), error));
    run->session = (kvf_session){
        .runtime = run->runtime,
        .transformer = run->transformer,
        .cache = run->cache,
        .stream = run->stream,
        .prune = run->prune.of,
        .chunk = cli_run_prune_chunk(run),
        .step_tokens = run->options.cache.tokens_per_step_max,
    };
    return KVF_OK;
}

static bool open_outputs(cli_run *run)
{
    const cli_run_options *o = &run->options;
    return (!o->emit_ids_file || cli_output_open(&run->outputs.ids, o->emit_ids_file)) &&
           (!o->dump_logits_file || cli_output_open(&run->outputs.logits, o->dump_logits_file)) &&
           (!o->stats || strcmp(o->stats, "json") == 0 ||
            cli_output_open(&run->outputs.stats, o->stats));
}

static void close_run(cli_run *run)
{
    cli_output_discard(&run->outputs.stats);
    cli_output_discard(&run->outputs.logits);
    cli_output_discard(&run->outputs.ids);
    if (run->stream)
        (void)!kvf_stream_wait(run->stream);
    (void)cli_saved_end(run);
    if (run->transformer)
        kvf_transformer_forget(run->transformer);
    cli_run_complete_close(run);
    kvf_sequence_destroy(run->sequence);
    cli_run_prune_close(run);
    kvf_cache_close(run->cache);
    kvf_transformer_close(run->transformer);
    kvf_stream_destroy(run->stream);
    kvf_draft_destroy(run->draft.of);
    kvf_sampler_destroy(run->sampler);
    free(run->scored.losses);
    free(run->scored.likeliest);
    free(run->steps.ms);
    free(run->answers.of);
    kvf_runtime_close(run->runtime);
    kvf_token_ids_free(&run->scored.text);
    kvf_token_ids_free(&run->prompt);
    kvf_token_ids_free(&run->loaded.prompt);
    cli_questions_free(&run->questions);
    cli_jobs_free(&run->jobs);
    cli_given_free(&run->given);
    cli_rescore_free(&run->rescores);
    kvf_tokenizer_close(run->tokenizer);
    kvf_weights_close(run->weights);
}

/* ---- run ---- */

/* Tells what a default decided. */
static void tell_dense(const cli_run *run)
{
    const kvf_cache_config *c = &run->options.cache;
    if (c->select != KVF_SELECT_FULL && c->tokens_max <= c->budget_tokens &&
        !cli_option_find(&run->command, "budget")->given)
        fprintf(stderr,
                "kvferry: every step is dense: a context of %u tokens fits into --budget %u, the "
                "default\n",
                c->tokens_max, c->budget_tokens);
}

/* Generate or score, and tell. @return exit status */
static int run_and_report(cli_run *run, kvf_status (*work)(cli_run *run, kvf_error *error),
                          kvf_error *error)
{
    const bool scores = run->options.text_file != NULL;
    tell_dense(run);
    const kvf_status status = work(run, error);
    bool written = cli_saved_end(run);
    written = cli_output_commit(&run->outputs.ids) && written;
    written = cli_output_commit(&run->outputs.logits) && written;
    cli_run_summary(run);
    written = cli_run_write_stats(run) && written;
    if (scores && status == KVF_OK)
        written = cli_run_print_score(run) && written;
    if (status != KVF_OK) {
        fprintf(stderr, "kvferry: %s\n", error->text);
        return 1;
    }
    if (!written || run->output_failed || run->batch.failed)
        return 1;
    return run->interrupted ? cli_interrupt_status() : 0;
}

/* Before the first token there is nothing to tell but that. @return exit status */
static int report_interrupted(cli_run *run)
{
    run->interrupted = true;
    fputs("kvferry: interrupted while the model was loaded; nothing was generated\n", stderr);
    return cli_run_write_stats(run) ? cli_interrupt_status() : 1;
}

/* Up to the point where memory is reserved. @return -1 to go on, else the exit status */
static int prepare(cli_run *run, kvf_error *error)
{
    kvf_status status = cli_run_read_input(run, error);
    if (status == KVF_OK && !run->runtime)
        status = cli_runtime_open(&run->options.runtime, &run->model, run->weights, &run->runtime,
                                  error);
    if (status == KVF_OK)
        status = cli_run_make_plan(run, error);
    if (status == KVF_OK)
        status = cli_saved_check(run, error);
    if (status != KVF_OK) {
        cli_complain(&run->command, error->text);
        return 1;
    }
    if (run->options.dry_run || isatty(STDERR_FILENO))
        cli_memory_plan_print(&run->plan, stderr);
    if (!cli_memory_plan_check(&run->plan))
        return 1;
    if (run->options.dry_run)
        return !run->options.prompts_file || cli_run_print_jobs(run) ? 0 : 1;
    return open_outputs(run) ? -1 : 1;
}

int cli_run_command(int argc, char **argv,
                    int (*parse)(int argc, char **argv, cli_command *command, cli_run_options *out),
                    kvf_status (*work)(cli_run *run, kvf_error *error))
{
    cli_run run = {0};
    kvf_error error = {0};
    char calibration[CLI_CALIBRATION_BYTES];
    const int parsed = parse(argc, argv, &run.command, &run.options);
    if (parsed >= 0)
        return parsed;
    run.options.runtime.log = cli_log_line;
    cli_calibration_choose(&run.options.runtime, calibration);
    cli_interrupt_watch();
    double start = kvf_now_ms();
    int result = prepare(&run, &error);
    if (result < 0) {
        kvf_status status = open_machine(&run, &error);
        run.load_ms = kvf_now_ms() - start;
        if (status != KVF_OK) {
            fprintf(stderr, "kvferry: %s\n", error.text);
            result = 1;
        } else {
            result =
                cli_interrupted() ? report_interrupted(&run) : run_and_report(&run, work, &error);
        }
    }
    close_run(&run);
    return result;
}

static kvf_status generate(cli_run *run, kvf_error *error)
{
    return run->batch.rows ? cli_run_batch(run, error) : cli_run_generate(run, error);
}

int cli_run_main(int argc, char **argv)
{
    return cli_run_command(argc, argv, cli_run_options_parse, generate);
}

static kvf_status score(cli_run *run, kvf_error *error)
{
    return run->batch.rows ? cli_run_batch(run, error) : cli_run_score(run, error);
}

int cli_score_main(int argc, char **argv)
{
    return cli_run_command(argc, argv, cli_score_options_parse, score);
}
