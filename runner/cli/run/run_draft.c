/* SPDX-License-Identifier: Apache-2.0 */

/*
 * `--draft-model`: a second model, with a cache of its own, that guesses.
 *
 * It reads the whole prompt before its first guess, under the same selection. It knows how a model
 * is opened, not when it guesses. Invariant: its ids are those of the model that checks.
 */

#include "common/text.h"
#include "run.h"
#include "tokenizer.h"

#include <string.h>

/* Tokens by their ids, as far as both say what they are. */
static kvf_status check_tokens(const cli_run *run, kvf_error *error)
{
    const char *path = run->options.draft_model;
    const uint32_t size = run->model.vocab_size;
    kvf_tokenizer *own = NULL;
    if (run->draft.model.model.vocab_size != size)
        return model_fail(error, KVF_INVALID,
                          "--draft-model %.200s: it has %u tokens, and the model has %u; take a "
                          "model of the same family",
                          path, run->draft.model.model.vocab_size, size);
    kvf_status status = run->tokenizer ? kvf_tokenizer_open(path, &own, error) : KVF_OK;
    for (uint32_t id = 0; own && status == KVF_OK && id < size; id++) {
        const char *a = kvf_tokenizer_token(run->tokenizer, id), *b = kvf_tokenizer_token(own, id);
        if (a != b && (!a || !b || strcmp(a, b) != 0))
            status = model_fail(error, KVF_INVALID,
                                "--draft-model %.200s: token %u is '%.40s', and the model's is "
                                "'%.40s'; take a model of the same family",
                                path, id, b ? b : "", a ? a : "");
    }
    kvf_tokenizer_close(own);
    return status;
}

kvf_status cli_run_draft_read(cli_run *run, kvf_error *error)
{
    cli_draft_model *d = &run->draft.model;
    const char *path = run->options.draft_model;
    if (!path)
        return KVF_OK;
    KVF_TRY(kvf_model_config_read(path, &d->model, error));
    if (d->model.window)
        return model_fail(error, KVF_UNSUPPORTED,
                          "--draft-model %.200s has layers with a window of %u tokens "
                          "(sliding_window), which cannot take tokens back; take a model without",
                          path, d->model.window);
    KVF_TRY(kvf_weights_open(path, &d->weights, error));
    kvf_model_config_fit(&d->model, d->weights);
    return check_tokens(run, error);
}

static kvf_transformer_options options_of(const cli_run *run)
{
    const cli_draft_model *d = &run->draft.model;
    kvf_transformer_options options = cli_run_transformer(run, &d->model, d->weights);
    options.batch_max = 1 + KVF_DRAFT_MAX;
    return options;
}

kvf_status cli_run_draft_plan(cli_run *run, kvf_error *error)
{
    cli_draft_model *d = &run->draft.model;
    const kvf_transformer_options options = options_of(run);
    if (!run->options.draft_model)
        return KVF_OK;
    d->config = run->options.cache;
    kvf_transformer_geometry(&options, &d->config);
    d->config.tokens_max += run->options.draft_tokens;
    d->config.sequences_max = 1;
    d->config.host_tokens_max = 0;
    d->config.tokens_per_step_max = options.batch_max;
    d->config.observe_window = d->config.verify_interval = 0;
    d->config.host_bytes = d->config.disk_bytes = 0;
    d->config.disk_path = NULL;
    d->config.head_mask = NULL;
    if (d->config.tokens_max > d->model.positions_max)
        return model_fail(error, KVF_FULL,
                          "--draft-model %.200s was made for %u positions, and %u are needed "
                          "(%s); give a smaller --context or another draft model",
                          run->options.draft_model, d->model.positions_max, d->config.tokens_max,
                          d->model.positions_by);
    KVF_TRY(cli_plan_make(&options, &d->config, &d->plan, error));
    run->plan.draft = &d->plan;
    return KVF_OK;
}

kvf_status cli_run_draft_open(cli_run *run, kvf_error *error)
{
    cli_draft_model *d = &run->draft.model;
    const kvf_transformer_options options = options_of(run);
    if (!run->options.draft_model)
        return KVF_OK;
    KVF_TRY(cli_weights_convert(d->weights, run->runtime, error));
    KVF_TRY(kvf_transformer_open(&options, &d->transformer, error));
    KVF_TRY(kvf_transformer_cache_open(d->transformer, &d->config, &d->cache, error));
    KVF_TRY(kvf_library_told(run->runtime, kvf_sequence_create(d->cache, &d->sequence), error));
    d->session = (kvf_session){.runtime = run->runtime,
                               .transformer = d->transformer,
                               .cache = d->cache,
                               .stream = run->stream,
                               .step_tokens = d->config.tokens_per_step_max};
    KVF_TRY(kvf_draft_model_create(&d->session, d->sequence, d->model.vocab_size,
                                   d->config.tokens_max, &d->guesser, error));
    kvf_draft_ask(run->draft.of, kvf_draft_model_guess, d->guesser);
    return KVF_OK;
}

void cli_run_draft_close(cli_run *run)
{
    cli_draft_model *d = &run->draft.model;
    if (d->transformer)
        kvf_transformer_forget(d->transformer);
    kvf_draft_model_destroy(d->guesser);
    kvf_sequence_destroy(d->sequence);
    kvf_cache_close(d->cache);
    kvf_transformer_close(d->transformer);
    kvf_weights_close(d->weights);
}
