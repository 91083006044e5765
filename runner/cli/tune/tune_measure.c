/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Runs a model on pieces of text, whole and pruned, and finds the layers.
 *
 * FastKV, equation 3: the layer with the least change of the last token's last hidden state,
 * mean_i |H_i - H'_(L,i)|^2 / |H_i|^2; every layer is tried. StructKV: one pass without pruning, in
 * which a policy of its own records the shape of each layer's attention, mean over pieces; the
 * pivot follows from the changes of that shape from layer to layer.
 *
 * It knows what is measured, not files or pictures. Invariant: every piece is run on an empty
 * sequence that is gone afterwards.
 */

#include "tune.h"

#include "interrupt.h"
#include <kvferry/prune.h>

#include <math.h>
#include <stdlib.h>

static kvf_status run_piece(const cli_tune *tune, kvf_prune *prune, uint32_t index, float *hidden,
                            kvf_error *error)
{
    const uint32_t tokens = tune->tuning.tokens;
    const cli_tune_prompt piece = {tune->pieces.ids + (size_t)index * tokens, tokens};
    return cli_tune_run(tune, prune, &piece, hidden, error);
}

/* ---- structkv ---- */

/* Scores that the recording policy sees, summed over pieces. */
typedef struct recorder {
    kvf_structkv_measures *sums; /* [layers] */
    uint32_t *counts;            /* [layers] */
} recorder;

static void record_profile(const kvf_prune_view *view, kvf_prune_answer *answer)
{
    recorder *r = view->user;
    (void)answer; /* keep all, propagate all */
    if (!view->profile)
        return;
    const kvf_structkv_measures m = kvf_structkv_measure(view->profile, view->query_heads);
    r->sums[view->layer].entropy += m.entropy;
    r->sums[view->layer].sparsity += m.sparsity;
    r->sums[view->layer].variance += m.variance;
    r->counts[view->layer]++;
}

/* From the sums to figures per layer and the pivot. */
static kvf_status find_pivot(cli_tune *tune, const recorder *r, const kvf_prune_settings *settings,
                             double *figures, kvf_error *error)
{
    const uint32_t layers = tune->model.layers;
    double *scores = figures, *entropy = scores + layers;
    double *sparsity = entropy + layers, *variance = sparsity + layers;
    for (uint32_t l = 0; l < layers; l++) {
        kvf_structkv_measures *m = &r->sums[l];
        if (r->counts[l] == 0)
            return model_fail(error, KVF_INVALID, "layer %u was not measured", l);
        m->entropy /= r->counts[l];
        m->sparsity /= r->counts[l];
        m->variance /= r->counts[l];
        entropy[l] = m->entropy;
        sparsity[l] = m->sparsity;
        variance[l] = m->variance;
    }
    kvf_structkv_transition(settings->weights, r->sums, layers, scores);
    /* As the policy resolves them. */
    const uint32_t least =
        settings->layer_min == KVF_PRUNE_LAYER_AUTO ? layers / 3 : settings->layer_min;
    const uint32_t most = settings->layer_max != KVF_PRUNE_LAYER_AUTO ? settings->layer_max
                          : layers > 2                                ? layers - 2
                                                                      : 0;
    tune->tuning.of[CLI_STRUCTKV] = (cli_tuned){
        .layer = kvf_structkv_pivot(scores, layers, least, most),
        .settings = *settings,
        .count = layers,
        .scores = scores,
        .entropy = entropy,
        .sparsity = sparsity,
        .variance = variance,
    };
    return KVF_OK;
}

static kvf_status measure_structkv(cli_tune *tune, double *figures, kvf_error *error)
{
    const uint32_t layers = tune->model.layers;
    recorder r = {calloc(layers, sizeof *r.sums), calloc(layers, sizeof *r.counts)};
    const kvf_prune_policy policy = {
        .size = sizeof policy,
        .name = "profile",
        .source = "records the shape of attention",
        .needs = KVF_PRUNE_SCORES | KVF_PRUNE_PROFILE,
        .decide = record_profile,
        .user = &r,
    };
    kvf_prune_config config, structkv;
    kvf_prune *prune = NULL;
    cli_tune_config(tune, "structkv", &structkv);
    kvf_prune_config_init(&config, &policy);
    config.settings = structkv.settings;
    kvf_status status = KVF_OK;
    if (!r.sums || !r.counts)
        status = model_out_of_memory(error, layers * sizeof *r.sums, "the profile of all layers");
    if (status == KVF_OK)
        status = kvf_prune_open(tune->cache, &config, &prune, error);
    for (uint32_t i = 0; status == KVF_OK && i < tune->tuning.samples && !cli_interrupted(); i++) {
        status = run_piece(tune, prune, i, tune->pruned, error);
        cli_tune_ran(tune);
    }
    if (status == KVF_OK && !cli_interrupted())
        status = find_pivot(tune, &r, &structkv.settings, figures, error);
    kvf_prune_close(prune);
    free(r.counts);
    free(r.sums);
    return status;
}

/* ---- fastkv ---- */

/* |a - b|^2 / |a|^2 */
static double relative_change(const float *a, const float *b, uint32_t count)
{
    double change = 0.0, size = 0.0;
    for (uint32_t i = 0; i < count; i++) {
        const double d = (double)a[i] - (double)b[i];
        change += d * d;
        size += (double)a[i] * (double)a[i];
    }
    return change / size;
}

static kvf_status measure_layer(cli_tune *tune, uint32_t layer, double *score, kvf_error *error)
{
    const uint32_t width = tune->model.hidden_size;
    kvf_prune_config config;
    kvf_prune *prune = NULL;
    cli_tune_config(tune, "fastkv", &config);
    config.settings.layer = layer;
    kvf_status status = kvf_prune_open(tune->cache, &config, &prune, error);
    double sum = 0.0;
    for (uint32_t i = 0; status == KVF_OK && i < tune->tuning.samples && !cli_interrupted(); i++) {
        status = run_piece(tune, prune, i, tune->pruned, error);
        sum += relative_change(tune->hidden + (size_t)i * width, tune->pruned, width);
        cli_tune_ran(tune);
    }
    kvf_prune_close(prune);
    *score = sum / tune->tuning.samples;
    return status;
}

static kvf_status measure_fastkv(cli_tune *tune, double *scores, kvf_error *error)
{
    const cli_tune_options *o = &tune->options;
    const uint32_t width = tune->model.hidden_size, count = o->layer_last - o->layer_first + 1;
    kvf_status status = KVF_OK;
    kvf_prune_config config;
    for (uint32_t i = 0; status == KVF_OK && i < tune->tuning.samples && !cli_interrupted(); i++) {
        status = run_piece(tune, NULL, i, tune->hidden + (size_t)i * width, error);
        cli_tune_ran(tune);
    }
    for (uint32_t i = 0; status == KVF_OK && i < count && !cli_interrupted(); i++)
        status = measure_layer(tune, o->layer_first + i, &scores[i], error);
    if (status != KVF_OK || cli_interrupted())
        return status;
    uint32_t best = 0;
    for (uint32_t i = 0; i < count; i++) {
        if (!isfinite(scores[i]))
            return model_fail(error, KVF_NOT_FINITE,
                              "hidden states with layer %u are not finite numbers; the weights may "
                              "be damaged, or too large for their type",
                              o->layer_first + i);
        if (scores[i] < scores[best])
            best = i;
    }
    cli_tune_config(tune, "fastkv", &config);
    tune->tuning.of[CLI_FASTKV] = (cli_tuned){
        .layer = o->layer_first + best,
        .settings = config.settings,
        .first = o->layer_first,
        .count = count,
        .scores = scores,
    };
    return KVF_OK;
}

/* The recovery of what was found. */
static kvf_status measure_recovery(cli_tune *tune, double *figures, kvf_error *error)
{
    for (uint32_t m = 0; m < CLI_METHODS && !cli_interrupted(); m++)
        if (tune->tuning.of[m].scores)
            KVF_TRY(cli_tune_recovery(tune, m, figures + m * tune->model.layers, error));
    return KVF_OK;
}

kvf_status cli_tune_measure(cli_tune *tune, kvf_error *error)
{
    const cli_tune_options *o = &tune->options;
    const uint64_t layers = tune->model.layers, samples = tune->tuning.samples;
    const uint64_t methods =
        (uint64_t)o->wants[CLI_FASTKV] + o->wants[CLI_STRUCTKV] + o->wants[CLI_ASL];
    const uint64_t runs =
        (o->wants[CLI_STRUCTKV] || o->wants[CLI_ASL] ? samples : 0) + 2 * samples * methods +
        (o->wants[CLI_FASTKV] ? samples * (2ull + o->layer_last - o->layer_first) : 0);
    tune->figures = calloc(8 * layers, sizeof *tune->figures);
    tune->hidden = calloc(samples * tune->model.hidden_size, sizeof *tune->hidden);
    tune->pruned = calloc(tune->model.hidden_size, sizeof *tune->pruned);
    if (!tune->figures || !tune->hidden || !tune->pruned)
        return model_out_of_memory(error, samples * tune->model.hidden_size * sizeof *tune->hidden,
                                   "hidden states");
    cli_progress_begin(&tune->progress, "measuring", runs, "runs");
    kvf_status status = KVF_OK;
    if (o->wants[CLI_STRUCTKV])
        status = measure_structkv(tune, tune->figures + layers, error);
    if (status == KVF_OK && o->wants[CLI_FASTKV] && !cli_interrupted())
        status = measure_fastkv(tune, tune->figures, error);
    if (status == KVF_OK && o->wants[CLI_ASL] && !cli_interrupted())
        status = cli_tune_asl_measure(tune, tune->figures, error);
    if (status == KVF_OK)
        status = measure_recovery(tune, tune->figures + 5 * layers, error);
    cli_progress_end(&tune->progress);
    tune->interrupted = cli_interrupted();
    return status;
}
