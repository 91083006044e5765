/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The input of a run: the model's configuration and weights, its tokenizer, and the prompt, the
 * text, the questions or the jobs that are read with them. Each is checked against the model as
 * soon as it is there.
 */

#include "run_input.h"

#include "run_machine.h"

#include <stdio.h>
#include <string.h>

/* Answers at once on the host, at most, where nothing else is asked for: rows that meet weights
 * which are widened once. With more of them a step takes longer, and all answers no shorter. */
#define HOST_ROWS 16u

/* The tokenizer may be absent, or one that is not known, where ids go in: then ids come out. */
static kvf_status open_tokenizer(cli_input *in, kvf_error *error)
{
    const cli_run_options *o = &in->options;
    kvf_status status = kvf_tokenizer_open(o->model, &in->tokenizer, error);
    const bool is_lacking = status == KVF_SYSTEM || status == KVF_UNSUPPORTED;
    if (is_lacking && o->token_ids_file && !o->ask_file && !o->text_file) {
        fprintf(stderr, "kvferry: %s; token ids are printed instead of text\n", error->text);
        return KVF_OK;
    }
    if (status == KVF_OK && kvf_tokenizer_note(in->tokenizer)[0])
        fprintf(stderr, "kvferry: %s\n", kvf_tokenizer_note(in->tokenizer));
    return status;
}

/* The format of the chat, and the token that ends an answer in it. */
static kvf_status open_chat(cli_input *in, kvf_error *error)
{
    const cli_run_options *o = &in->options;
    if (in->chat.format)
        return KVF_OK;
    KVF_TRY(cli_chat_choose(&o->chat, o->model, in->tokenizer, &in->chat, error));
    if (in->chat.end < in->model.vocab_size &&
        !kvf_ids_have(in->end_ids, in->end_count, in->chat.end))
        in->end_ids[in->end_count++] = in->chat.end;
    return KVF_OK;
}

static kvf_status chat_of(void *user, const cli_chat **chat, kvf_error *error)
{
    cli_input *in = user;
    *chat = &in->chat;
    return open_chat(in, error);
}

uint32_t cli_input_tokens(const cli_input *in)
{
    return (uint32_t)(in->prompt.count + in->text.count) + in->questions.longest +
           in->options.tokens;
}

uint32_t cli_input_prompt_tokens(const cli_input *in)
{
    return in->rows ? in->jobs.longest : (uint32_t)in->prompt.count;
}

/* Who asks for more than the model was made for gets it, and is told. */
static void warn_of_context(const cli_input *in)
{
    const uint32_t context = in->options.context_tokens;
    if (context > in->model.positions_max)
        fprintf(stderr,
                "kvferry: --context %u is past the %u positions that the model was made for (%s); "
                "answers may be worse there\n",
                context, in->model.positions_max, in->model.positions_by);
}

static kvf_status check_context(const cli_input *in, kvf_error *error)
{
    uint32_t needed = cli_input_tokens(in), context = in->options.context_tokens;
    const bool scores = in->options.text_file != NULL;
    const char *name = scores ? "--text" : "-n";
    char rest[48];
    if (scores)
        snprintf(rest, sizeof rest, "a text of %zu", in->text.count);
    else
        snprintf(rest, sizeof rest, "-n %u", in->options.tokens);
    if (context > 0 && needed > context)
        return model_fail(error, KVF_FULL,
                          "the prompt of %zu tokens and %s need %u tokens, --context is %u; "
                          "raise --context, or shorten the prompt or %s",
                          in->prompt.count, rest, needed, context, name);
    if (context == 0 && needed > in->model.positions_max)
        return model_fail(error, KVF_FULL,
                          "the prompt of %zu tokens and %s need %u tokens, the model was made "
                          "for %u (%s); shorten the prompt or %s, or give --context %u",
                          in->prompt.count, rest, needed, in->model.positions_max,
                          in->model.positions_by, name, needed);
    return KVF_OK;
}

/* Every prompt of a batch and its answer have room. */
static kvf_status check_jobs(const cli_input *in, kvf_error *error)
{
    const cli_jobs *jobs = &in->jobs;
    const uint32_t context = in->options.context_tokens, positions = in->model.positions_max;
    for (uint32_t i = 0; i < jobs->count; i++) {
        const kvf_batch_prompt *p = &jobs->prompts[i];
        const uint32_t most = context ? context : positions;
        char which[256] = "the prompt";
        if (jobs->jobs[i].line)
            snprintf(which, sizeof which, "%.200s: line %llu: a prompt", in->options.prompts_file,
                     (unsigned long long)jobs->jobs[i].line);
        if (p->count + p->tokens > most)
            return model_fail(error, KVF_FULL,
                              "%s of %u tokens and an answer of %u need %u tokens, and "
                              "there %s %u (%s); shorten it, or generate fewer%s",
                              which, p->count, p->tokens, p->count + p->tokens,
                              context ? "is --context" : "are", most,
                              context ? "raise it" : in->model.positions_by,
                              context ? "" : ", or give --context");
    }
    return KVF_OK;
}

/* Without a temperature there is nothing to draw. */
static void warn_of_equal_answers(const cli_input *in)
{
    const cli_jobs *jobs = &in->jobs;
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
static kvf_status open_jobs(cli_input *in, kvf_error *error)
{
    const cli_job_source source = {.options = &in->options,
                                   .model = &in->model,
                                   .tokenizer = in->tokenizer,
                                   .before = in->loaded.tokens ? &in->loaded.prompt : NULL,
                                   .shared = in->loaded.tokens,
                                   .chat = chat_of,
                                   .user = in};
    if (in->options.prompts_file)
        KVF_TRY(cli_jobs_read(&source, &in->jobs, error));
    else
        KVF_TRY(cli_jobs_single(&source, &in->prompt, &in->jobs, error));
    if (in->options.answers_file)
        KVF_TRY(cli_given_read(in->options.answers_file, &in->model, &in->jobs, &in->given, error));
    else
        warn_of_equal_answers(in);
    const uint32_t most = in->options.batch ? in->options.batch : HOST_ROWS;
    in->rows = in->jobs.answers < most ? (uint32_t)in->jobs.answers : most;
    return check_jobs(in, error);
}

kvf_status cli_input_read(cli_input *in, cli_machine *machine, kvf_error *error)
{
    const cli_run_options *o = &in->options;
    KVF_TRY(kvf_model_config_read(o->model, &in->model, error));
    KVF_TRY(kvf_weights_open(o->model, &in->weights, error));
    kvf_model_config_fit(&in->model, in->weights);
    if (in->model.note[0])
        fprintf(stderr, "kvferry: %s\n", in->model.note);
    warn_of_context(in);
    KVF_TRY(open_tokenizer(in, error));
    for (uint32_t i = 0; i < in->model.eos_count; i++)
        in->end_ids[in->end_count++] = in->model.eos_ids[i];
    if (cli_chat_wanted(&o->chat))
        KVF_TRY(open_chat(in, error));
    KVF_TRY(cli_saved_read(in, machine, error));
    if (o->prompts_file)
        return open_jobs(in, error);
    if (o->ask_file)
        KVF_TRY(cli_questions_read(o->ask_file, &in->model, in->tokenizer, &in->questions, error));
    if (o->text_file)
        KVF_TRY(cli_text_read(o->text_file, &in->model, in->tokenizer, &in->text, error));
    KVF_TRY(cli_prompt_read(o, &in->model, in->tokenizer,
                            cli_chat_wanted(&o->chat) ? &in->chat : NULL, &in->prompt, error));
    KVF_TRY(cli_saved_match(in, error));
    KVF_TRY(check_context(in, error));
    return o->samples || o->answers_file ? open_jobs(in, error) : KVF_OK;
}

void cli_input_close(cli_input *in)
{
    kvf_token_ids_free(&in->text);
    kvf_token_ids_free(&in->prompt);
    kvf_token_ids_free(&in->loaded.prompt);
    cli_questions_free(&in->questions);
    cli_jobs_free(&in->jobs);
    cli_given_free(&in->given);
    kvf_tokenizer_close(in->tokenizer);
    kvf_weights_close(in->weights);
}
