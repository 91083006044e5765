/* SPDX-License-Identifier: Apache-2.0 */

/*
 * `kvferry run` and its forms `score` and `chat`: open everything in the order in which it can
 * fail, cheapest first, so that a mistake is told before memory is reserved.
 *
 * It knows what depends on what. Invariant: whatever was opened is closed on every path, in
 * reverse.
 */

#include "run.h"

#include "calibration_file.h"
#include "commands.h"
#include "common/clock.h"
#include "common/text.h"
#include "interrupt.h"
#include "progress.h"
#include "saved_prompt.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Tokens of a prefill chunk: enough rows for matrix products to be bound by arithmetic, few enough
 * that hidden states stay small next to the weights and Ctrl-C is heard soon. */
#define CHUNK_TOKENS     256u
/* Of hidden states and products on a GPU: fills it, and takes 0.6 GiB at Llama-3.1-8B's width. */
#define GPU_CHUNK_TOKENS 4096u
/* Prompt tokens that go layer by layer at once: 1 GiB of hidden states at that width. */
#define PROMPT_TOKENS    65536u
/* Answers at once, at most, where nothing else is asked for. On the host rows that meet weights
 * which are widened once: with more of them a step takes longer, and all answers no shorter. On a
 * GPU fewer, because nobody here knows what memory it has left. */
#define HOST_ROWS        16u
#define GPU_ROWS         8u

/* Of a conversation, where nothing else is asked for. */
#define CHAT_TOKENS       8192u
#define MEMORY_PAGE_BYTES 4096u

/* ---- input ---- */

/* The tokenizer may be absent, or one that is not known, where ids go in: then ids come out. */
static kvf_status open_tokenizer(cli_run *run, kvf_error *error)
{
    const cli_run_options *o = &run->options;
    kvf_status status = kvf_tokenizer_open(o->model, NULL, &run->tokenizer, error);
    const bool is_lacking = status == KVF_SYSTEM || status == KVF_UNSUPPORTED;
    if (is_lacking && o->token_ids_file && !o->ask_file && !o->text_file) {
        fprintf(stderr, "kvferry: %s; token ids are printed instead of text\n", error->text);
        return KVF_OK;
    }
    return status;
}

/* The format of the chat, and the token that ends an answer in it. */
static kvf_status open_chat(cli_run *run, kvf_error *error)
{
    const cli_run_options *o = &run->options;
    if (run->chat.format.source)
        return KVF_OK;
    KVF_TRY(cli_chat_open(&o->chat, o->model, run->tokenizer, &run->chat, error));
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

static uint32_t tokens_needed(const cli_run *run)
{
    return (uint32_t)(run->prompt.count + run->text.count) + run->questions.longest +
           run->options.tokens;
}

static kvf_status check_positions(const cli_run *run, kvf_error *error)
{
    const uint32_t context = run->options.context_tokens;
    if (context <= run->model.positions_max)
        return KVF_OK;
    return model_fail(error, KVF_INVALID,
                      "--context %u is past the %u positions that the model was made for "
                      "(max_position_embeddings)",
                      context, run->model.positions_max);
}

static kvf_status check_context(const cli_run *run, kvf_error *error)
{
    uint32_t needed = tokens_needed(run), context = run->options.context_tokens;
    const bool scores = run->options.text_file != NULL;
    const char *name = scores ? "--text" : "-n";
    char rest[48];
    if (scores)
        snprintf(rest, sizeof rest, "a text of %zu", run->text.count);
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
                          "for %u (max_position_embeddings); shorten the prompt or %s",
                          run->prompt.count, rest, needed, run->model.positions_max, name);
    return check_positions(run, error);
}

/* Every prompt of a batch and its answer have room. */
static kvf_status check_jobs(const cli_run *run, kvf_error *error)
{
    const cli_jobs *jobs = &run->jobs;
    const uint32_t context = run->options.context_tokens, positions = run->model.positions_max;
    KVF_TRY(check_positions(run, error));
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
                              "there %s %u (%s); shorten it, or generate fewer",
                              which, p->count, p->tokens, p->count + p->tokens,
                              context ? "is --context" : "are", most,
                              context ? "raise it" : "max_position_embeddings of the model");
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
                                   .before = run->loaded ? &run->saved : NULL,
                                   .shared = run->loaded,
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

static kvf_status open_input(cli_run *run, kvf_error *error)
{
    const cli_run_options *o = &run->options;
    KVF_TRY(kvf_model_config_read(o->model, NULL, &run->model, error));
    if (run->model.note[0])
        fprintf(stderr, "kvferry: %s\n", run->model.note);
    KVF_TRY(kvf_weights_open(o->model, NULL, &run->weights, error));
    KVF_TRY(open_tokenizer(run, error));
    for (uint32_t i = 0; i < run->model.eos_count; i++)
        run->end_ids[run->end_count++] = run->model.eos_ids[i];
    if (cli_chat_wanted(&o->chat))
        KVF_TRY(open_chat(run, error));
    KVF_TRY(cli_run_draft_read(run, error));
    KVF_TRY(cli_saved_read(run, error));
    if (o->prompts_file) {
        KVF_TRY(open_jobs(run, error));
        return cli_run_prune_prepare(run, error);
    }
    if (o->ask_file)
        KVF_TRY(
            cli_questions_read(o->ask_file, &run->model, run->tokenizer, &run->questions, error));
    if (o->interactive) {
        KVF_TRY(check_positions(run, error));
        return cli_run_prune_prepare(run, error);
    }
    if (o->text_file)
        KVF_TRY(cli_text_read(o->text_file, &run->model, run->tokenizer, &run->text, error));
    KVF_TRY(cli_prompt_read(o, &run->model, run->tokenizer,
                            cli_chat_wanted(&o->chat) ? &run->chat : NULL, &run->prompt, error));
    KVF_TRY(cli_saved_match(run, error));
    KVF_TRY(check_context(run, error));
    if (o->samples || o->answers_file)
        KVF_TRY(open_jobs(run, error));
    return cli_run_prune_prepare(run, error);
}

/* ---- plan ---- */

void cli_log_line(void *user, int level, const char *line)
{
    (void)user;
    (void)level;
    fprintf(stderr, "kvferry: %s\n", line);
}

static bool is_on_gpu(const kvf_runtime *runtime)
{
    return runtime && kvf_runtime_device(runtime) == KVF_DEVICE_CUDA;
}

void cli_transformer_fit(kvf_transformer_options *options, uint32_t tokens)
{
    options->chunk_max =
        kvf_min_u32(tokens, is_on_gpu(options->runtime) ? GPU_CHUNK_TOKENS : CHUNK_TOKENS);
    options->batch_max = 1;
}

/* Matrices stay packed, once a plan was made; what is quantised beside them, a norm say, does not.
 */
void cli_note_widening(const kvf_weights *weights)
{
    char from[32], to[32];
    uint64_t in_file = 0, loaded = 0, bytes;
    for (size_t i = 0; i < kvf_weights_count(weights); i++) {
        const kvf_tensor *tensor = kvf_weights_at(weights, i);
        kvf_weights_source(tensor, &bytes);
        if (tensor->bytes > bytes) {
            in_file += bytes;
            loaded += tensor->bytes;
        }
    }
    if (loaded > 0)
        fprintf(stderr, "kvferry: some weights are widened: %s of the file take %s\n",
                kvf_bytes_text(in_file, from), kvf_bytes_text(loaded, to));
}

kvf_status cli_plan_make(const kvf_transformer_options *options, const kvf_cache_config *cache,
                         cli_memory_plan *plan, kvf_error *error)
{
    kvf_weights_keep_packed(options->weights);
    *plan = (cli_memory_plan){
        .weight_bytes = kvf_weights_bytes(options->weights),
        .own_bytes = kvf_weights_own_bytes(options->weights),
        .runner_bytes = kvf_transformer_bytes(options, kvf_runtime_threads(options->runtime)),
        .tokens = cache->tokens_max,
        .page_size = cache->page_size,
        .on_gpu = is_on_gpu(options->runtime),
    };
    cli_show(kvf_cache_setting, "digest", cache, plan->digest);
    cli_memory_available(plan);
    return kvf_cache_plan_make(options->runtime, cache, &plan->cache, error);
}

/* Tokens that a sequence has room for. */
static uint32_t context_of(const cli_run *run)
{
    if (run->options.context_tokens)
        return run->options.context_tokens;
    if (run->batch.rows)
        return run->jobs.most;
    return run->options.interactive ? kvf_min_u32(CHAT_TOKENS, run->model.positions_max)
                                    : tokens_needed(run);
}

uint32_t cli_run_prompt_tokens(const cli_run *run)
{
    if (run->options.interactive)
        return context_of(run);
    return run->batch.rows ? run->jobs.longest : (uint32_t)run->prompt.count;
}

/* Tokens of a sequence in a step: with a draft, or given ones. Streaming heads and a disk tier take
 * them one by one. */
static uint32_t step_tokens(const cli_run *run)
{
    const cli_run_options *o = &run->options;
    const bool feeds =
        o->extend == CLI_EXTEND_SPARSE || (o->ask_file && o->extend != CLI_EXTEND_DENSE);
    const bool is_single = run->streaming_heads && o->cache.disk_path;
    return feeds && !is_single ? 1 + KVF_DRAFT_MAX : 1 + o->draft_tokens;
}

kvf_transformer_options cli_run_transformer(const cli_run *run, const kvf_model_config *model,
                                            kvf_weights *weights)
{
    kvf_transformer_options options = {.runtime = run->runtime,
                                       .model = model,
                                       .weights = weights,
                                       .cublas = run->options.cublas,
                                       .device_ordinal = run->options.runtime.device_ordinal,
                                       .starts_late = !run->options.runtime.early_starts};
    cli_transformer_fit(&options, cli_run_prompt_tokens(run));
    return options;
}

static kvf_transformer_options transformer_options(const cli_run *run)
{
    const uint32_t tokens = cli_run_prompt_tokens(run);
    kvf_transformer_options options = cli_run_transformer(run, &run->model, run->weights);
    options.batch_max = run->batch.rows ? run->batch.rows : step_tokens(run);
    /* On a GPU a prompt goes layer by layer, so that only one layer's keys are on the device. */
    if (is_on_gpu(run->runtime))
        options.prompt_max = kvf_min_u32(tokens, PROMPT_TOKENS);
    cli_run_prune_options(run, &options);
    return options;
}

/* Host memory of a token: of packed pages by the library's own plan. */
static uint64_t token_bytes_of(cli_run *run)
{
    enum { TOKENS = 4096 };
    kvf_cache_config c = run->options.cache;
    kvf_cache_plan plan;
    c.disk_path = NULL;
    c.host_bytes = c.disk_bytes = 0;
    c.head_mask = NULL;
    c.host_tokens_max = TOKENS;
    if (c.pages == KVF_PAGES_BF16 ||
        kvf_cache_plan_make(run->runtime, &c, &plan, NULL) != KVF_OK) /* opening says why */
        return 2 * (uint64_t)c.layers * c.kv_heads * c.head_dim * kvf_dtype_bytes(c.dtype);
    return plan.host_kv_bytes / TOKENS;
}

/* Sequences and host memory of a batch: as much as its rows can need, or as the user allows. */
static kvf_status reserve_batch(cli_run *run, kvf_error *error)
{
    kvf_cache_config *c = &run->options.cache;
    const cli_jobs *jobs = &run->jobs;
    const uint64_t token_bytes = token_bytes_of(run);
    uint64_t needed = 0, all = 0;
    for (uint32_t i = 0; i < jobs->count; i++) {
        const uint64_t one = kvf_batch_tokens(&jobs->prompts[i], 1, c->local_tokens);
        const uint32_t rows = kvf_min_u32(jobs->prompts[i].samples, run->batch.rows);
        const uint64_t shared = kvf_batch_tokens(&jobs->prompts[i], rows, c->local_tokens);
        needed = one > needed ? one : needed;
        all = jobs->count == 1 ? shared : needed * run->batch.rows;
    }
    needed += cli_saved_room(run);
    all += cli_saved_room(run);
    c->sequences_max = run->batch.rows + 1 + (run->loaded > 0);
    c->host_tokens_max = run->options.memory_bytes ? run->options.memory_bytes / token_bytes : all;
    if (c->host_tokens_max >= needed)
        return KVF_OK;
    const uint64_t wanted = needed * token_bytes;
    return model_fail(error, KVF_FULL,
                      "--memory %llu has room for %llu tokens, and the longest prompt needs %llu "
                      "with its answer; give %llu or more",
                      (unsigned long long)run->options.memory_bytes,
                      (unsigned long long)c->host_tokens_max, (unsigned long long)needed,
                      (unsigned long long)wanted);
}

/* Tokens that are taken back leave nothing behind, where that can be. */
static kvf_status check_draft(const cli_run *run, kvf_error *error)
{
    if (run->options.draft_tokens == 0)
        return KVF_OK;
    if (run->streaming_heads)
        return model_fail(error, KVF_UNSUPPORTED,
                          "--draft takes tokens back, and streaming heads of --head-mask have lost "
                          "what they took the place of; leave one of them out");
    if (run->plan.cache.static_tokens)
        return model_fail(
            error, KVF_UNSUPPORTED,
            "--draft takes tokens back, and a static set of %u tokens does not become "
            "what it was; give --static-ratio 0, or a --select without one",
            run->plan.cache.static_tokens);
    return KVF_OK;
}

/* What is to be opened, with as many rows as there are now. */
static kvf_status plan_rows(cli_run *run, kvf_error *error)
{
    kvf_cache_config *c = &run->options.cache;
    kvf_transformer_options options = transformer_options(run);
    kvf_transformer_geometry(&options, c);
    c->tokens_max = context_of(run);
    c->tokens_per_step_max = run->batch.rows ? 1 : step_tokens(run);
    /* Patched, the prompt's last tokens are behind every chunk for a while. */
    if (run->options.prune.values.config.eviction == KVF_EVICTION_PATCHED)
        c->tokens_max += run->prune_config.chunk_queries;
    if (run->options.ask_file || run->options.interactive) {
        /* The document or the conversation, and one fork at a time with its own window and answer,
         * each in blocks of 64 tokens at most. */
        c->sequences_max = 2;
        c->host_tokens_max = (uint64_t)c->tokens_max + run->questions.longest +
                             run->options.tokens + c->local_tokens + 4u * 64u;
    }
    cli_run_complete_reserve(run, c);
    if (run->batch.rows)
        KVF_TRY(reserve_batch(run, error));
    KVF_TRY(cli_plan_make(&options, c, &run->plan, error));
    return cli_run_prune_plan(run, error);
}

/* A batch whose rows nobody has set has fewer, until memory has room for them. */
static kvf_status make_plan(cli_run *run, kvf_error *error)
{
    uint32_t *rows = &run->batch.rows;
    const bool is_free = *rows && !run->options.batch;
    if (is_free && is_on_gpu(run->runtime))
        *rows = kvf_min_u32(*rows, GPU_ROWS);
    KVF_TRY(plan_rows(run, error));
    while (is_free && *rows > 1 && cli_memory_plan_total(&run->plan) > run->plan.available_bytes) {
        --*rows;
        KVF_TRY(plan_rows(run, error));
    }
    cli_note_widening(run->weights);
    KVF_TRY(check_draft(run, error));
    return cli_run_draft_plan(run, error);
}

/* ---- open ---- */

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

kvf_status cli_weights_convert(kvf_weights *weights, const kvf_runtime *runtime, kvf_error *error)
{
    cli_progress progress;
    uint64_t done = 0;
    kvf_status status = KVF_OK;
    cli_progress_begin(&progress, "converting weights", kvf_weights_bytes(weights) >> 20, "MiB");
    for (size_t i = 0; i < kvf_weights_count(weights) && status == KVF_OK && !cli_interrupted();
         i++) {
        const kvf_tensor *tensor = kvf_weights_at(weights, i);
        status = kvf_weights_load(weights, tensor, kvf_runtime_threads(runtime), error);
        done += tensor->bytes;
        cli_progress_at(&progress, done >> 20);
    }
    cli_progress_end(&progress);
    return status;
}

static kvf_status open_cache(cli_run *run, kvf_error *error)
{
    cli_memory_watch watch;
    cli_memory_watch_begin(&watch, "pinning memory",
                           cli_memory_plan_total(&run->plan) - run->plan.weight_bytes);
    kvf_status status = kvf_cache_open(run->runtime, &run->options.cache, &run->cache, error);
    cli_memory_watch_end(&watch);
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
    run->answer_max = run->options.ask_file ? run->questions.count : 1;
    size_t steps = run->questions.ids.count + run->text.count + 1 +
                   (size_t)run->answer_max * run->options.tokens;
    run->answers = calloc(run->answer_max, sizeof *run->answers);
    run->step_ms = run->batch.rows ? NULL : calloc(steps, sizeof *run->step_ms);
    run->losses = calloc(steps, sizeof *run->losses);
    if (!run->answers || (!run->step_ms && !run->batch.rows) || !run->losses)
        return model_out_of_memory(error, steps * sizeof *run->step_ms, "the times of all steps");
    if (run->options.draft_tokens)
        KVF_TRY(
            kvf_draft_create(run->options.draft_tokens, tokens_needed(run), &run->draft, error));
    KVF_TRY(kvf_sampler_create(run->model.vocab_size, rows, &run->sampler, error));
    return kvf_sampler_begin(run->sampler, 0, &run->options.sampling, error);
}

/* @return KVF_OK also if it was interrupted: then less is open */
static kvf_status open_machine(cli_run *run, kvf_error *error)
{
    kvf_transformer_options options = transformer_options(run);
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
    const kvf_status status = kvf_stream_create(run->runtime, &run->stream);
    if (status != KVF_OK)
        return model_fail(error, status, "no stream could be created");
    run->session = (kvf_session){
        .runtime = run->runtime,
        .transformer = run->transformer,
        .cache = run->cache,
        .stream = run->stream,
        .prune = run->prune,
        .chunk = cli_run_prune_chunk(run),
        .step_tokens = run->options.cache.tokens_per_step_max,
    };
    return cli_run_draft_open(run, error);
}

static bool open_outputs(cli_run *run)
{
    const cli_run_options *o = &run->options;
    return (!o->emit_ids_file || cli_output_open(&run->ids_output, o->emit_ids_file)) &&
           (!o->dump_logits_file || cli_output_open(&run->logits_output, o->dump_logits_file)) &&
           (!o->stats || strcmp(o->stats, "json") == 0 ||
            cli_output_open(&run->stats_output, o->stats));
}

static void close_run(cli_run *run)
{
    cli_output_discard(&run->stats_output);
    cli_output_discard(&run->logits_output);
    cli_output_discard(&run->ids_output);
    if (run->stream)
        (void)!kvf_stream_wait(run->stream);
    (void)cli_saved_end(run);
    if (run->transformer)
        kvf_transformer_forget(run->transformer);
    cli_run_complete_close(run);
    cli_run_draft_close(run);
    kvf_sequence_destroy(run->sequence);
    cli_run_prune_close(run);
    kvf_cache_close(run->cache);
    kvf_transformer_close(run->transformer);
    kvf_stream_destroy(run->stream);
    kvf_draft_destroy(run->draft);
    kvf_sampler_destroy(run->sampler);
    free(run->losses);
    free(run->step_ms);
    free(run->resident);
    free(run->answers);
    kvf_runtime_close(run->runtime);
    kvf_token_ids_free(NULL, &run->text);
    kvf_token_ids_free(NULL, &run->prompt);
    kvf_token_ids_free(NULL, &run->saved);
    cli_questions_free(&run->questions);
    cli_jobs_free(&run->jobs);
    cli_given_free(&run->given);
    cli_rescore_free(run);
    cli_chat_close(&run->chat);
    kvf_tokenizer_close(run->tokenizer);
    kvf_weights_close(run->weights);
}

/* ---- run ---- */

/* What a default decided. */
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
    written = cli_output_commit(&run->ids_output) && written;
    written = cli_output_commit(&run->logits_output) && written;
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
    return run->interrupted ? 130 : 0;
}

/* Before the first token there is nothing to tell but that. @return exit status */
static int report_interrupted(cli_run *run)
{
    run->interrupted = true;
    fputs("kvferry: interrupted while the model was loaded; nothing was generated\n", stderr);
    return cli_run_write_stats(run) ? 130 : 1;
}

/* Up to the point where memory is reserved. @return -1 to go on, else the exit status */
static int prepare(cli_run *run, kvf_error *error)
{
    kvf_status status = open_input(run, error);
    if (status == KVF_OK && !run->runtime)
        status = kvf_runtime_open(&run->options.runtime, &run->runtime, error);
    if (status == KVF_OK)
        status = cli_saved_check(run, error);
    if (status == KVF_OK)
        status = make_plan(run, error);
    if (status != KVF_OK) {
        cli_complain(&run->command, error->text);
        return 1;
    }
    if (run->options.dry_run || isatty(STDERR_FILENO))
        cli_memory_plan_print(&run->plan, stderr);
    if (!cli_memory_plan_check(&run->plan))
        return 1;
    if (run->options.dry_run)
        return 0;
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
