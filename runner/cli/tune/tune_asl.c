/* SPDX-License-Identifier: Apache-2.0 */

/*
 * From where on, and how far, ASL's variance of ranks falls in a model.
 *
 * The policy looks at prompts without choosing, from the first layer at which ranks can be
 * compared. Its first layer is the one where the mean over prompts is greatest, for the published
 * rule divides by that layer's variance: in front of it the ratio rises. The threshold is what a
 * layer of the mean curve falls below. Published are a third of the depth and 0.3, for models in
 * which the variance falls from there on.
 *
 * It knows the curve, not answers. Invariant: every prompt counts alike.
 */

#include "tune.h"

#include "interrupt.h"
#include <kvferry/prune.h>

#include <math.h>
#include <stdlib.h>

#define PROMPTS_MAX 8u
#define SHARE       0.2f /* of tokens that go on, where nothing was said */
#define WAY_DOWN    0.75 /* to the least variance, where the layer is chosen without answers */

static bool is_given(const cli_tune *tune, const char *field)
{
    return (tune->options.prune.values.given & cli_setting_bit(field)) != 0;
}

static void config_of(const cli_tune *tune, kvf_prune_config *config)
{
    cli_tune_config(tune, "asl", config);
    kvf_prune_settings *s = &config->settings;
    if (!is_given(tune, "propagate") && !is_given(tune, "propagate_tokens")) {
        s->propagate = SHARE;
        s->propagate_tokens = 0;
    }
}

/* Prompt i: a piece of text, or a piece and a question where that is how they are asked. */
static cli_tune_prompt prompt_of(const cli_tune *tune, uint32_t i)
{
    if (tune->question_count == 0)
        return (cli_tune_prompt){tune->pieces.ids + (size_t)i * tune->tuning.tokens,
                                 tune->tuning.tokens};
    const tune_question *q = &tune->questions[i];
    return (cli_tune_prompt){tune->prompts.ids + q->first,
                             tune->options.asked == CLI_ASKED_AFTER ? q->body : q->count};
}

/* Adds the relative variances of every prompt to `sums`. */
static kvf_status look(cli_tune *tune, const kvf_prune_config *config, double *sums,
                       kvf_error *error)
{
    const uint32_t layers = tune->model.layers;
    const uint32_t all = tune->question_count ? tune->question_count : tune->tuning.samples;
    const uint32_t count = all < PROMPTS_MAX ? all : PROMPTS_MAX;
    double *measures = calloc(layers, sizeof *measures);
    float *hidden = calloc(tune->model.hidden_size, sizeof *hidden);
    kvf_prune *prune = NULL;
    kvf_status status = measures && hidden
                            ? kvf_prune_open(tune->cache, config, &prune, error)
                            : model_out_of_memory(error, layers * sizeof *measures, "a curve");
    for (uint32_t i = 0; status == KVF_OK && i < count && !cli_interrupted(); i++) {
        const cli_tune_prompt prompt = prompt_of(tune, i * all / count);
        status = cli_tune_run(tune, prune, &prompt, hidden, error);
        kvf_prune_measures(prune, measures, layers);
        for (uint32_t l = 0; l < layers; l++)
            sums[l] += measures[l] / count;
        cli_tune_ran(tune);
    }
    kvf_prune_close(prune);
    free(hidden);
    free(measures);
    return status;
}

/* The layer of the greatest variance; after it is at least one that may be chosen. */
static uint32_t peak_of(const double *curve, uint32_t layers)
{
    uint32_t peak = UINT32_MAX;
    for (uint32_t l = 0; l + 2 < layers; l++)
        if (isfinite(curve[l]) && (peak == UINT32_MAX || curve[l] > curve[peak]))
            peak = l;
    return peak;
}

static double least_behind(const cli_tuned *asl)
{
    double least = INFINITY;
    for (uint32_t l = asl->settings.layer_min + 1; l + 1 < asl->first + asl->count; l++)
        least = fmin(least, asl->scores[l - asl->first]);
    return least;
}

kvf_status cli_tune_asl_curve(cli_tune *tune, double *figures, kvf_error *error)
{
    const uint32_t layers = tune->model.layers;
    kvf_prune_config config;
    config_of(tune, &config);
    cli_tuned *asl = &tune->tuning.of[CLI_ASL];
    *asl = (cli_tuned){.settings = config.settings};
    config.settings.layer_min = 0;
    config.settings.threshold = 0.0f;
    KVF_TRY(look(tune, &config, figures, error));
    if (cli_interrupted())
        return KVF_OK;
    const uint32_t peak = peak_of(figures, layers);
    if (peak == UINT32_MAX)
        return model_fail(error, KVF_INVALID,
                          "asl compares no ranks in %u layers of prompts of %u tokens; lower "
                          "propagate_tokens or layers_observed, or give more --tokens",
                          layers, tune->tuning.tokens);
    if (!is_given(tune, "layer_min"))
        asl->settings.layer_min = peak;
    while (!isfinite(figures[asl->first]))
        asl->first++;
    asl->count = layers - asl->first;
    asl->scores = figures + asl->first;
    const double top = figures[asl->settings.layer_min];
    for (uint32_t l = asl->first; l < layers; l++)
        figures[l] /= top;
    if (least_behind(asl) < 1.0)
        return KVF_OK;
    return model_fail(error, KVF_INVALID,
                      "asl: the variance of ranks does not fall after layer %u, so no threshold "
                      "chooses a layer; take --method both",
                      asl->settings.layer_min);
}

double cli_tune_asl_threshold(const cli_tuned *asl, uint32_t layer)
{
    double least = 1.0, threshold = 0.0;
    for (uint32_t l = asl->settings.layer_min + 1; l <= layer; l++) {
        const double at = asl->scores[l - asl->first];
        if (at < least) {
            threshold = (least + at) / 2;
            least = at;
        }
    }
    return threshold;
}

/* The first layer whose variance is below the threshold. */
static uint32_t layer_below(const cli_tuned *asl, double threshold)
{
    uint32_t l = asl->settings.layer_min + 1;
    while (asl->scores[l - asl->first] >= threshold)
        l++;
    return l;
}

kvf_status cli_tune_asl_measure(cli_tune *tune, double *figures, kvf_error *error)
{
    cli_tuned *asl = &tune->tuning.of[CLI_ASL];
    KVF_TRY(cli_tune_asl_curve(tune, figures, error));
    if (cli_interrupted())
        return KVF_OK;
    const double least = least_behind(asl);
    if (!is_given(tune, "threshold"))
        asl->settings.threshold = (float)(1.0 - WAY_DOWN * (1.0 - least));
    if ((double)asl->settings.threshold <= least)
        return model_fail(error, KVF_INVALID,
                          "threshold = %g: the variance of ranks falls to %g of that of layer %u; "
                          "give more",
                          (double)asl->settings.threshold, least, asl->settings.layer_min);
    asl->layer = layer_below(asl, (double)asl->settings.threshold);
    return KVF_OK;
}
