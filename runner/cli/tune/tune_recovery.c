/* SPDX-License-Identifier: Apache-2.0 */

/*
 * How much of a whole prompt's attention is on the tokens that a layer still gets when the prompt
 * is pruned: StructKV's attention mass recovery.
 *
 * A piece is run twice. Without pruning, what the newest queries attend to is noted in every layer;
 * with it, which tokens the layer gets. The queries' own tokens always go on.
 *
 * It knows neither methods nor pictures. Invariant: every piece counts alike.
 */

#include "tune.h"

#include "interrupt.h"
#include <kvferry/prune.h>

#include <stdlib.h>

typedef struct recorder {
    const kvf_prune_policy *inner; /* asked in the second run */
    float *mass;                   /* [layers, tokens_max] on each token, of all queries' 1 */
    uint32_t tokens_max;
    double *sums; /* [layers] */
} recorder;

static void note_mass(const kvf_prune_view *view, kvf_prune_answer *answer)
{
    const recorder *r = view->user;
    float *row = r->mass + (size_t)view->layer * r->tokens_max;
    (void)answer; /* keep all, propagate all */
    for (uint32_t j = 0; j < view->candidates; j++) {
        double sum = 0.0;
        for (uint32_t h = 0; h < view->kv_heads; h++)
            sum += (double)view->scores[(size_t)h * view->candidates + j];
        row[j] = (float)(sum / view->kv_heads);
    }
}

/* The loss is the mass of tokens in front of the window that are not there. */
static void note_tokens(const kvf_prune_view *view, kvf_prune_answer *answer)
{
    const recorder *r = view->user;
    const uint32_t before = view->prompt - view->window;
    const float *row = r->mass + (size_t)view->layer * r->tokens_max;
    double lost = 0.0;
    for (uint32_t j = 0, next = 0; j < before; j++) {
        const bool is_there = next < view->tokens && view->positions[next] == j;
        next += is_there;
        lost += is_there ? 0.0 : (double)row[j];
    }
    r->sums[view->layer] += 1.0 - lost;
    r->inner->decide(view, answer);
}

/* Both runs of every piece, under pruners that note. */
static kvf_status run_pieces(cli_tune *tune, kvf_prune *whole, kvf_prune *pruned, kvf_error *error)
{
    const uint32_t tokens = tune->tuning.tokens;
    for (uint32_t i = 0; i < tune->tuning.samples && !cli_interrupted(); i++) {
        const cli_tune_prompt piece = {tune->pieces.ids + (size_t)i * tokens, tokens};
        KVF_TRY(cli_tune_run(tune, whole, &piece, tune->pruned, error));
        cli_tune_ran(tune);
        KVF_TRY(cli_tune_run(tune, pruned, &piece, tune->pruned, error));
        cli_tune_ran(tune);
    }
    return KVF_OK;
}

static kvf_status open_pruners(cli_tune *tune, recorder *r, const kvf_prune_settings *settings,
                               kvf_prune **whole, kvf_prune **pruned, kvf_error *error)
{
    const kvf_prune_policy notes = {.size = sizeof notes,
                                    .name = "mass",
                                    .source = "notes attention",
                                    .needs = KVF_PRUNE_SCORES,
                                    .decide = note_mass,
                                    .user = r};
    kvf_prune_policy watched = *r->inner;
    kvf_prune_config config;
    watched.decide = note_tokens;
    watched.user = r;
    kvf_prune_config_init(&config, &notes);
    config.settings.window = settings->window;
    config.settings.window_mean = 1;
    KVF_TRY(kvf_prune_open(tune->cache, &config, whole, error));
    kvf_prune_config_init(&config, &watched);
    config.settings = *settings;
    return kvf_prune_open(tune->cache, &config, pruned, error);
}

kvf_status cli_tune_recovery(cli_tune *tune, uint32_t method, double *figures, kvf_error *error)
{
    cli_tuned *tuned = &tune->tuning.of[method];
    const uint32_t layers = tune->model.layers, tokens = tune->tuning.tokens;
    recorder r = {.inner = kvf_prune_policy_find(cli_method_names[method]),
                  .mass = calloc((size_t)layers * tokens, sizeof(float)),
                  .tokens_max = tokens,
                  .sums = figures};
    kvf_prune *whole = NULL, *pruned = NULL;
    kvf_prune_settings settings = tuned->settings;
    if (!r.mass)
        return model_out_of_memory(error, (size_t)layers * tokens * sizeof(float),
                                   "what queries attend to");
    if (method != CLI_ASL)
        settings.layer = tuned->layer;
    kvf_status status = open_pruners(tune, &r, &settings, &whole, &pruned, error);
    if (status == KVF_OK)
        status = run_pieces(tune, whole, pruned, error);
    for (uint32_t l = 0; l < layers; l++)
        figures[l] /= tune->tuning.samples;
    tuned->layers = layers;
    tuned->recovery = status == KVF_OK && !cli_interrupted() ? figures : NULL;
    kvf_prune_close(pruned);
    kvf_prune_close(whole);
    free(r.mass);
    return status;
}
