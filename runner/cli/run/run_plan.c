/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The memory plan of a run before any of it is taken: room of its sequences, rows of a batch,
 * chunks of the model, and the memory of all of them.
 */

#include "run_machine.h"

#include <stdio.h>

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
static uint32_t context_of(const cli_input *in)
{
    if (in->options.context_tokens)
        return in->options.context_tokens;
    if (in->rows)
        return in->jobs.most;
    return cli_input_tokens(in);
}

/* Tokens of a sequence in a step: with a draft, or given ones, as those of a text. Streaming heads
 * and a disk tier take them one by one. */
static uint32_t step_tokens(const cli_input *in, const cli_machine *m)
{
    const cli_run_options *o = &in->options;
    const bool feeds = o->extend == CLI_EXTEND_SPARSE || o->text_file ||
                       (o->ask_file && o->extend != CLI_EXTEND_DENSE);
    const bool is_single = m->head_mask.streaming && m->config.disk_path;
    return feeds && !is_single ? 1 + KVF_DRAFT_MAX : 1 + o->draft_tokens;
}

kvf_transformer_options cli_machine_transformer(const cli_input *in, const cli_machine *m)
{
    const uint32_t tokens = cli_input_prompt_tokens(in);
    kvf_transformer_options options = {.runtime = m->runtime,
                                       .model = &in->model,
                                       .weights = in->weights,
                                       .cublas = in->options.cublas,
                                       .device_ordinal = in->options.runtime.device_ordinal,
                                       .starts_late = !in->options.runtime.early_starts};
    cli_transformer_fit(&options, tokens);
    options.batch_max = m->rows ? m->step_rows : step_tokens(in, m);
    /* On a GPU a prompt goes layer by layer, so that only one layer's keys are on the device. */
    if (is_on_gpu(m->runtime))
        options.prompt_max = kvf_min_u32(tokens, PROMPT_TOKENS);
    cli_run_prune_options(in, m, &options);
    return options;
}

/* Host memory of a token: of packed pages by the library's own plan. */
static uint64_t token_bytes_of(const cli_machine *m)
{
    enum { TOKENS = 4096 };
    kvf_cache_config c = m->config;
    kvf_cache_plan plan;
    c.disk_path = NULL;
    c.host_bytes = c.disk_bytes = 0;
    c.head_mask = NULL;
    c.host_tokens_max = TOKENS;
    if (c.pages == KVF_PAGES_NATIVE ||
        kvf_cache_plan_make(m->runtime, &c, &plan, NULL) != KVF_OK) /* opening says why */
        return 2 * (uint64_t)c.layers * c.kv_heads * c.head_dim * kvf_dtype_bytes(c.dtype);
    return plan.host_kv_bytes / TOKENS;
}

/* Sequences and host memory of a batch: as much as its rows can need, or as the user allows. */
static kvf_status reserve_batch(const cli_input *in, cli_machine *m, kvf_error *error)
{
    kvf_cache_config *c = &m->config;
    const cli_jobs *jobs = &in->jobs;
    const uint64_t token_bytes = token_bytes_of(m);
    uint64_t needed = 0, all = 0;
    for (uint32_t i = 0; i < jobs->count; i++) {
        const uint64_t one = kvf_batch_tokens(&jobs->prompts[i], 1, c->local_tokens);
        const uint32_t rows = kvf_min_u32(jobs->prompts[i].samples, m->rows);
        const uint64_t shared = kvf_batch_tokens(&jobs->prompts[i], rows, c->local_tokens);
        needed = one > needed ? one : needed;
        all = jobs->count == 1 ? shared : needed * m->rows;
    }
    needed += cli_saved_room(in, m);
    all += cli_saved_room(in, m);
    c->sequences_max = m->rows + 1 + (in->loaded.tokens > 0);
    c->host_tokens_max = in->options.memory_bytes ? in->options.memory_bytes / token_bytes : all;
    if (c->host_tokens_max >= needed)
        return KVF_OK;
    const uint64_t wanted = needed * token_bytes;
    return model_fail(error, KVF_FULL,
                      "--memory %llu has room for %llu tokens, and the longest prompt needs %llu "
                      "with its answer; give %llu or more",
                      (unsigned long long)in->options.memory_bytes,
                      (unsigned long long)c->host_tokens_max, (unsigned long long)needed,
                      (unsigned long long)wanted);
}

/* Tokens that are taken back leave nothing behind, where that can be. */
static kvf_status check_draft(const cli_input *in, const cli_machine *m, kvf_error *error)
{
    if (in->options.draft_tokens == 0)
        return KVF_OK;
    if (in->model.window)
        return model_fail(error, KVF_UNSUPPORTED,
                          "--draft takes tokens back, and layers with a window of %u tokens "
                          "(sliding_window) no longer hold the replaced tokens; leave it out",
                          in->model.window);
    if (m->head_mask.streaming)
        return model_fail(error, KVF_UNSUPPORTED,
                          "--draft takes tokens back, and streaming heads of --head-mask no longer "
                          "hold the replaced tokens; leave one of them out");
    if (m->plan.cache.static_tokens)
        return model_fail(error, KVF_UNSUPPORTED,
                          "--draft takes tokens back, and a static set of %u tokens is not "
                          "restored; give --static-ratio 0, or a --select without one",
                          m->plan.cache.static_tokens);
    return KVF_OK;
}

/* The cache that is to be opened, with as many rows as there are now. */
static kvf_status plan_rows(const cli_input *in, cli_machine *m, kvf_error *error)
{
    kvf_cache_config *c = &m->config;
    m->step_rows = in->options.draft_tokens ? kvf_max_u32(m->rows, DRAFT_ROWS) : m->rows;
    kvf_transformer_options options = cli_machine_transformer(in, m);
    kvf_transformer_geometry(&options, c);
    c->tokens_max = context_of(in);
    c->tokens_per_step_max = m->rows ? 1 + in->options.draft_tokens : step_tokens(in, m);
    /* Patched, the prompt's last tokens come after every chunk for a while. */
    if (in->options.prune.values.config.eviction == KVF_EVICTION_PATCHED)
        c->tokens_max += m->prune_config.chunk_queries;
    if (in->options.ask_file) {
        /* The document, and one fork at a time with its own window and answer,
         * each in blocks of 64 tokens at most. */
        c->sequences_max = 2;
        c->host_tokens_max = (uint64_t)c->tokens_max + in->questions.longest + in->options.tokens +
                             c->local_tokens + 4u * 64u;
    }
    cli_run_complete_reserve(in, m);
    if (m->rows)
        KVF_TRY(reserve_batch(in, m, error));
    KVF_TRY(cli_plan_make(&options, c, &m->plan, error));
    return cli_run_prune_plan(in, m, error);
}

/* A policy that has a digest of its own ignores another one; who asks for both is told. */
static kvf_status check_digest(const cli_input *in, const cli_machine *m, kvf_error *error)
{
    const char *given = cli_option_find(&in->command, "digest")->given;
    if (!given || m->config.digest == m->plan.cache.digest)
        return KVF_OK;
    return model_fail(error, KVF_INVALID,
                      "--digest is '%s'; --select %s scores by %s: leave it out", given,
                      cli_option_find(&in->command, "select")->given, m->plan.digest);
}

/* A batch whose rows nobody has set has fewer, until memory has room for them. */
kvf_status cli_machine_plan(const cli_input *in, cli_machine *m, kvf_error *error)
{
    uint32_t *rows = &m->rows;
    *rows = in->rows;
    const bool is_free = *rows && !in->options.batch;
    if (is_free && is_on_gpu(m->runtime))
        *rows = kvf_min_u32(*rows, GPU_ROWS);
    KVF_TRY(plan_rows(in, m, error));
    KVF_TRY(check_digest(in, m, error));
    while (is_free && *rows > 1 && cli_memory_plan_total(&m->plan) > m->plan.available_bytes) {
        --*rows;
        KVF_TRY(plan_rows(in, m, error));
    }
    cli_note_widening(in->weights);
    return check_draft(in, m, error);
}
