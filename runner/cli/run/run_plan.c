/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The memory plan of a run before any of it is taken: room of its sequences, rows of a batch,
 * chunks of the model, and the memory of all of them.
 */

#include "run.h"

#include "common/text.h"

/* Tokens of a prefill chunk: enough rows for matrix products to be bound by arithmetic, few enough
 * that hidden states stay small next to the weights and Ctrl-C is heard soon. */
#define CHUNK_TOKENS     256u
/* Rows of hidden states and products on a GPU: this fills it, and takes 0.6 GiB at Llama-3.1-8B's
 * width. */
#define GPU_CHUNK_TOKENS 4096u
/* Prompt tokens that go layer by layer at once: 1 GiB of hidden states at that width. */
#define PROMPT_TOKENS    65536u
/* Answers at once on a GPU, at most, where nothing else is asked for: fewer than on the host,
 * because nobody here knows what memory it has left. */
#define GPU_ROWS         8u
/* Tokens of a step with drafts, of all answers together: as many as weights that are widened once
 * meet. */
#define DRAFT_ROWS       16u

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
    cli_memory_available(plan);
    KVF_TRY(kvf_cache_plan_make(options->runtime, cache, &plan->cache, error));
    const kvf_cache_config in_force = {.digest = plan->cache.digest};
    cli_show(kvf_cache_setting, "digest", &in_force, plan->digest);
    return KVF_OK;
}

/* Tokens that a sequence has room for. */
static uint32_t context_of(const cli_run *run)
{
    if (run->options.context_tokens)
        return run->options.context_tokens;
    if (run->batch.rows)
        return run->jobs.most;
    return cli_run_tokens_needed(run);
}

uint32_t cli_run_prompt_tokens(const cli_run *run)
{
    return run->batch.rows ? run->jobs.longest : (uint32_t)run->prompt.count;
}

/* Tokens of a sequence in a step: with a draft, or given ones, as those of a text. Streaming heads
 * and a disk tier take them one by one. */
static uint32_t step_tokens(const cli_run *run)
{
    const cli_run_options *o = &run->options;
    const bool feeds = o->extend == CLI_EXTEND_SPARSE || o->text_file ||
                       (o->ask_file && o->extend != CLI_EXTEND_DENSE);
    const bool is_single = run->head_mask.streaming && o->cache.disk_path;
    return feeds && !is_single ? 1 + KVF_DRAFT_MAX : 1 + o->draft_tokens;
}

kvf_transformer_options cli_run_transformer_options(const cli_run *run)
{
    const uint32_t tokens = cli_run_prompt_tokens(run);
    kvf_transformer_options options = {.runtime = run->runtime,
                                       .model = &run->model,
                                       .weights = run->weights,
                                       .cublas = run->options.cublas,
                                       .device_ordinal = run->options.runtime.device_ordinal,
                                       .starts_late = !run->options.runtime.early_starts};
    cli_transformer_fit(&options, tokens);
    options.batch_max = run->batch.rows ? run->batch.step_rows : step_tokens(run);
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
    if (c.pages == KVF_PAGES_NATIVE ||
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
    c->sequences_max = run->batch.rows + 1 + (run->loaded.tokens > 0);
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
    if (run->model.window)
        return model_fail(error, KVF_UNSUPPORTED,
                          "--draft takes tokens back, and layers with a window of %u tokens "
                          "(sliding_window) have lost what they took the place of; leave it out",
                          run->model.window);
    if (run->head_mask.streaming)
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

/* The cache that is to be opened, with as many rows as there are now. */
static kvf_status plan_rows(cli_run *run, kvf_error *error)
{
    kvf_cache_config *c = &run->options.cache;
    run->batch.step_rows =
        run->options.draft_tokens ? kvf_max_u32(run->batch.rows, DRAFT_ROWS) : run->batch.rows;
    kvf_transformer_options options = cli_run_transformer_options(run);
    kvf_transformer_geometry(&options, c);
    c->tokens_max = context_of(run);
    c->tokens_per_step_max = run->batch.rows ? 1 + run->options.draft_tokens : step_tokens(run);
    /* Patched, the prompt's last tokens come after every chunk for a while. */
    if (run->options.prune.values.config.eviction == KVF_EVICTION_PATCHED)
        c->tokens_max += run->prune.config.chunk_queries;
    if (run->options.ask_file) {
        /* The document, and one fork at a time with its own window and answer,
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

/* A policy that has a digest of its own ignores another one; who asks for both is told. */
static kvf_status check_digest(const cli_run *run, kvf_error *error)
{
    const char *given = cli_option_find(&run->command, "digest")->given;
    if (!given || run->options.cache.digest == run->plan.cache.digest)
        return KVF_OK;
    return model_fail(error, KVF_INVALID,
                      "--digest is '%s'; --select %s scores by %s: leave it out", given,
                      cli_option_find(&run->command, "select")->given, run->plan.digest);
}

/* A batch whose rows nobody has set has fewer, until memory has room for them. */
kvf_status cli_run_make_plan(cli_run *run, kvf_error *error)
{
    uint32_t *rows = &run->batch.rows;
    const bool is_free = *rows && !run->options.batch;
    if (is_free && is_on_gpu(run->runtime))
        *rows = kvf_min_u32(*rows, GPU_ROWS);
    KVF_TRY(plan_rows(run, error));
    KVF_TRY(check_digest(run, error));
    while (is_free && *rows > 1 && cli_memory_plan_total(&run->plan) > run->plan.available_bytes) {
        --*rows;
        KVF_TRY(plan_rows(run, error));
    }
    cli_note_widening(run->weights);
    return check_draft(run, error);
}
