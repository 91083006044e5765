/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Opens what a plan has, and closes it in reverse; see the header.
 *
 * It knows what depends on what, not what is asked. Invariant: whatever was opened is closed on
 * every path.
 */

#include "run_machine.h"

#include "interrupt.h"
#include "progress.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MEMORY_PAGE_BYTES 4096u

void cli_log_line(void *user, int level, const char *line)
{
    (void)user;
    (void)level;
    fprintf(stderr, "kvferry: %s\n", line);
}

/* Read every page of the weights once, so that the first token does not wait for the disk. */
static void load_weights(const cli_input *in)
{
    cli_progress progress;
    unsigned sum = 0;
    uint64_t done = 0;
    cli_progress_begin(&progress, "loading weights", kvf_weights_bytes(in->weights) >> 20, "MiB");
    for (size_t i = 0; i < kvf_weights_count(in->weights) && !cli_interrupted(); i++) {
        const kvf_tensor *tensor = kvf_weights_at(in->weights, i);
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
        status = kvf_weights_load(tensor, kvf_runtime_threads(runtime), error);
        done += tensor->bytes;
        cli_progress_at(&progress, done >> 20);
    }
    cli_progress_end(&progress);
    return status;
}

static kvf_status open_cache(const cli_input *in, cli_machine *m, kvf_error *error)
{
    cli_progress progress;
    cli_progress_begin(&progress, "pinning memory", 1, "");
    const kvf_status status =
        kvf_transformer_cache_open(m->transformer, &m->config, &m->cache, error);
    cli_progress_end(&progress);
    return status == KVF_OK ? cli_run_prune_open(in, m, error) : status;
}

/* Who chooses tokens, and who guesses them. */
static kvf_status open_choosing(const cli_input *in, cli_machine *m, kvf_error *error)
{
    const uint32_t rows = m->rows ? m->rows : 1;
    if (in->options.draft_tokens && !m->rows)
        KVF_TRY(
            kvf_draft_create(in->options.draft_tokens, m->config.tokens_max + 1, &m->draft, error));
    KVF_TRY(kvf_sampler_create(in->model.vocab_size, rows, &m->sampler, error));
    return kvf_sampler_begin(m->sampler, 0, &in->options.sampling, error);
}

kvf_status cli_machine_open(const cli_input *in, cli_machine *m, kvf_error *error)
{
    const kvf_transformer_options options = cli_machine_transformer(in, m);
    m->piece = options.chunk_max;
    KVF_TRY(open_choosing(in, m, error));
    KVF_TRY(cli_weights_convert(in->weights, m->runtime, error));
    if (cli_interrupted())
        return KVF_OK;
    KVF_TRY(kvf_transformer_open(&options, &m->transformer, error));
    if (kvf_runtime_device(m->runtime) == KVF_DEVICE_HOST)
        load_weights(in);
    if (cli_interrupted())
        return KVF_OK;
    KVF_TRY(open_cache(in, m, error));
    KVF_TRY(kvf_library_told(m->runtime, kvf_stream_create(m->runtime, &m->stream), error));
    m->session = (kvf_session){
        .runtime = m->runtime,
        .transformer = m->transformer,
        .cache = m->cache,
        .stream = m->stream,
        .prune = m->prune,
        .chunk = cli_run_prune_chunk(in),
        .step_tokens = m->config.tokens_per_step_max,
    };
    return KVF_OK;
}

void cli_machine_close(cli_machine *m)
{
    kvf_prune_close(m->prune);
    free(m->head_mask.of);
    kvf_cache_close(m->cache);
    kvf_transformer_close(m->transformer);
    kvf_stream_destroy(m->stream);
    kvf_draft_destroy(m->draft);
    kvf_sampler_destroy(m->sampler);
    kvf_runtime_close(m->runtime);
}
