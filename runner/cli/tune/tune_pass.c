/* SPDX-License-Identifier: Apache-2.0 */

/*
 * One pass over a prompt, pruned by a policy; see tune.h.
 *
 * Invariant: a prompt is run on an empty sequence that is gone afterwards.
 */

#include "tune.h"

kvf_status cli_tune_run(const cli_tune *tune, kvf_prune *prune, const cli_tune_prompt *prompt,
                        float *hidden, kvf_error *error)
{
    kvf_sequence *sequence = NULL;
    kvf_status status = kvf_sequence_create(tune->cache, &sequence);
    if (status == KVF_OK) {
        const kvf_prompt whole = {.sequence = sequence, .ids = prompt->ids, .count = prompt->count};
        status = kvf_transformer_hidden(tune->transformer, tune->cache, prune, &whole, hidden,
                                        tune->stream);
    }
    status = kvf_library_told(tune->runtime, status, error);
    if (tune->stream)
        (void)!kvf_stream_wait(tune->stream);
    kvf_transformer_forget(tune->transformer);
    kvf_sequence_destroy(sequence);
    return status == KVF_OK ? kvf_transformer_check(tune->transformer, error) : status;
}

kvf_session cli_tune_session(const cli_tune *tune, kvf_prune *prune)
{
    return (kvf_session){.runtime = tune->runtime,
                         .transformer = tune->transformer,
                         .cache = tune->cache,
                         .stream = tune->stream,
                         .prune = prune};
}

void cli_tune_config(const cli_tune *tune, const char *policy, kvf_prune_config *out)
{
    kvf_prune_config_init(out, kvf_prune_policy_find(policy));
    cli_settings_apply(&tune->options.prune.values, out);
    /* The kept tokens change nothing of a prefill's hidden states. */
    out->settings.keep = 1.0f;
    out->settings.keep_tokens = 0;
}
