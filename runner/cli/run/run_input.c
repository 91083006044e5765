/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The input of a run: the model's configuration and weights, its tokenizer, and the prompt, the
 * text, the questions or the jobs that are read with them. Each is checked against the model as
 * soon as it is there.
 */

#include "run.h"

/* Answers at once on the host, at most, where nothing else is asked for: rows that meet weights
 * which are widened once. With more of them a step takes longer, and all answers no shorter. */
#define HOST_ROWS 16u

/* The tokenizer may be absent, or one that is not known, where ids go in: then ids come out. */
static kvf_status open_tokenizer(cli_run *run, kvf_error *error)
{
    const cli_run_options *o = &run->options;
    kvf_status status = kvf_tokenizer_open(o->model, &run->tokenizer, error);
    const bool is_lacking = status == KVF_SYSTEM || status == KVF_UNSUPPORTED;
    if (is_lacking && o->token_ids_file && !o->ask_file && !o->text_file) {
        fprintf(stderr, "kvferry: %s; token ids are printed instead of text\n", error->text);
        return KVF_OK;
    }
    if (status == KVF_OK && kvf_tokenizer_note(run->tokenizer)[0])
        fprintf(stderr, "kvferry: %s\n", kvf_tokenizer_note(run->tokenizer));
    return status;
}

/* The format of the chat, and the token that ends an answer in it. */
static kvf_status open_chat(cli_run *run, kvf_error *error)
{
    const cli_run_options *o = &run->options;
    if (run->chat.format)
        return KVF_OK;
    KVF_TRY(cli_chat_choose(&o->chat, o->model, run->tokenizer, &run->chat, error));
    if (run->chat.end < run->model.vocab_size &&
        !kvf_ids_have(run->end_ids, run->end_count, run->chat.end))
        run->end_ids[run->end_count++] = run->chat.end;
    return KVF_OK;
}

static kvf_status chat_of(void *user, const cli_chat **chat, kvf_error *error)
{
    cli_run *run = user;
    *chat = &run->chat;
    return open_chat(run, error);
}

uint32_t cli_run_tokens_needed(const cli_run *run)
{
    return (uint32_t)(run->prompt.count + run->scored.text.count) + run->questions.longest +
           run->options.tokens;
}

/* Who asks for more than the model was made for gets it, and is told. */
static void warn_of_context(const cli_run *run)
{
    const uint32_t context = run->options.context_tokens;
    if (context > run->model.positions_max)
        fprintf(stderr,
                "kvferry: --context %u is past the %u positions that the model was made for (%s); "
                "answers may be worse there\n",
                context, run->model.positions_max, run->model.positions_by);
}

static kvf_status check_context(const cli_run *run, kvf_error *error)
{
    uint32_t needed = cli_run_tokens_needed(run), context = run->options.context_tokens;
    const bool scores = run->options.text_file != NULL;
    const char *name = scores ? "--text" : "-n";
    char rest[48];
    if (scores)
        snprintf(rest, sizeof rest, "a text of %zu", run->scored.text.count);
    else
        snprintf(rest, sizeof rest, "-n %u", run->options.tokens);
    if (context > 0 && needed > context)
        return model_fail(error, KVF_FULL,
                          "the prompt of %zu tokens and %s need %u tokens, --context is %u; "
                          "raise --context, or shorten the prompt or %s",
                          run->prompt.count, rest, needed, context, name);
    if (context == 0 && needed > run->model.positions_max)
        return model_fail(error, KVF_FULL,
                          "the prompt of %zu tokens and %s need %u tokens, the model was made "
                          "for %u (%s); shorten the prompt or %s, or give --context %u",
                          run->prompt.count, rest, needed, run->model.positions_max,
                          run->model.positions_by, name, needed);
    return KVF_OK;
}

/* Every prompt of a batch and its answer have room. */
static kvf_status check_jobs(const cli_run *run, kvf_error *error)
{
    const cli_jobs *jobs = &run->jobs;
    const uint32_t context = run->options.context_tokens, positions = run->model.positions_max;
    for (uint32_t i = 0; i < jobs->count; i++) {
        const kvf_batch_prompt *p = &jobs->prompts[i];
        const uint32_t most = context ? context : positions;
        char which[256] = "the prompt";
        if (jobs->jobs[i].line)
            snprintf(which, sizeof which, "%.200s: line %llu: a prompt", run->options.prompts_file,
                     (unsigned long long)jobs->jobs[i].line);
        if (p->count + p->tokens > most)
            return model_fail(error, KVF_FULL,
                              "%s of %u tokens and an answer of %u need %u tokens, and "
                              "there %s %u (%s); shorten it, or generate fewer%s",
                              which, p->count, p->tokens, p->count + p->tokens,
                              context ? "is --context" : "are", most,
                              context ? "raise it" : run->model.positions_by,
                              context ? "" : ", or give --context");
    }
    return KVF_OK;
}

/* Without a temperature there is nothing to draw. */
static void warn_of_equal_answers(const cli_run *run)
{
    const cli_jobs *jobs = &run->jobs;
    uint32_t greedy = 0;
    for (uint32_t i = 0; i < jobs->count; i++)
        greedy += jobs->prompts[i].samples > 1 && jobs->prompts[i].sampling.temperature == 0.0;
    if (greedy && greedy == jobs->count)
        fprintf(stderr,
                "kvferry: --samples %u: with temperature 0 all answers to a prompt are the same; "
                "give --temperature\n",
                jobs->prompts[0].samples);
}

/* Prompts from a file, or the one prompt for all samples. */
static kvf_status open_jobs(cli_run *run, kvf_error *error)
{
    const cli_job_source source = {.options = &run->options,
                                   .model = &run->model,
                                   .tokenizer = run->tokenizer,
                                   .before = run->loaded.tokens ? &run->loaded.prompt : NULL,
                                   .shared = run->loaded.tokens,
                                   .chat = chat_of,
                                   .user = run};
    if (run->options.prompts_file)
        KVF_TRY(cli_jobs_read(&source, &run->jobs, error));
    else
        KVF_TRY(cli_jobs_single(&source, &run->prompt, &run->jobs, error));
    if (run->options.answers_file)
        KVF_TRY(
            cli_given_read(run->options.answers_file, &run->model, &run->jobs, &run->given, error));
    else
        warn_of_equal_answers(run);
    const uint32_t most = run->options.batch ? run->options.batch : HOST_ROWS;
    run->batch.rows = run->jobs.answers < most ? (uint32_t)run->jobs.answers : most;
    return check_jobs(run, error);
}

kvf_status cli_run_read_input(cli_run *run, kvf_error *error)
{
    const cli_run_options *o = &run->options;
    KVF_TRY(kvf_model_config_read(o->model, &run->model, error));
    KVF_TRY(kvf_weights_open(o->model, &run->weights, error));
    kvf_model_config_fit(&run->model, run->weights);
    if (run->model.note[0])
        fprintf(stderr, "kvferry: %s\n", run->model.note);
    warn_of_context(run);
    KVF_TRY(open_tokenizer(run, error));
    for (uint32_t i = 0; i < run->model.eos_count; i++)
        run->end_ids[run->end_count++] = run->model.eos_ids[i];
    if (cli_chat_wanted(&o->chat))
        KVF_TRY(open_chat(run, error));
    KVF_TRY(cli_saved_read(run, error));
    if (o->prompts_file) {
        KVF_TRY(open_jobs(run, error));
        return cli_run_prune_prepare(run, error);
    }
    if (o->ask_file)
        KVF_TRY(
            cli_questions_read(o->ask_file, &run->model, run->tokenizer, &run->questions, error));
    if (o->text_file)
        KVF_TRY(cli_text_read(o->text_file, &run->model, run->tokenizer, &run->scored.text, error));
    KVF_TRY(cli_prompt_read(o, &run->model, run->tokenizer,
                            cli_chat_wanted(&o->chat) ? &run->chat : NULL, &run->prompt, error));
    KVF_TRY(cli_saved_match(run, error));
    KVF_TRY(check_context(run, error));
    if (o->samples || o->answers_file)
        KVF_TRY(open_jobs(run, error));
    return cli_run_prune_prepare(run, error);
}
