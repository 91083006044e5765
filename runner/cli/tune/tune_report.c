/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The result, for people: bars in the terminal.
 *
 * It knows figures, not how they came about. Invariant: what was not measured is not shown.
 */

#include "tune.h"

#include "common/text.h"
#include "output.h"

double cli_tune_share(const cli_tune *tune, const kvf_prune_settings *s, uint32_t layer)
{
    const double layers = tune->model.layers, whole = layer + 1.0;
    double share = s->propagate_tokens ? (double)s->propagate_tokens / tune->tuning.tokens
                                       : (double)s->propagate;
    if (share > 1.0)
        share = 1.0;
    return (whole + (layers - whole) * share) / layers;
}

static void print_propagated(const kvf_prune_settings *s, FILE *file)
{
    if (s->propagate_tokens)
        fprintf(file, "%u tokens", s->propagate_tokens);
    else
        kvf_print(file, "%g of the tokens", (double)s->propagate);
}

static void print_bars(const cli_tuned *tuned, const double *values, uint32_t first, uint32_t count,
                       FILE *file)
{
    const cli_bars bars = {
        .head = "layer",
        .first = first,
        .count = count,
        .values = values,
        .marked = tuned->layer,
        .mark = "<- chosen",
    };
    cli_bars_print(&bars, file);
}

static void print_scores(const cli_tuned *tuned, FILE *file)
{
    print_bars(tuned, tuned->scores, tuned->first, tuned->count, file);
}

static void print_measure(const cli_tuned *tuned, const char *title, const double *values,
                          FILE *file)
{
    fprintf(file, "\n%s\n", title);
    print_bars(tuned, values, tuned->first, tuned->count, file);
}

/* The terms of StructKV's score. */
static void print_measures(const cli_tuned *structkv, FILE *file)
{
    char title[96];
    kvf_format(title, sizeof title, "structkv: share of attention on the top %g of the tokens",
               (double)structkv->settings.mass_share);
    print_measure(structkv, "structkv: entropy of attention", structkv->entropy, file);
    print_measure(structkv, title, structkv->sparsity, file);
    print_measure(structkv, "structkv: variance of attention", structkv->variance, file);
}

/* From the layer on after which some tokens are not there. */
static void print_recovery(const cli_tuned *tuned, const char *policy, FILE *file)
{
    uint32_t first = 0;
    if (!tuned->recovery)
        return;
    while (first + 1 < tuned->layers && tuned->recovery[first + 1] >= 1.0)
        first++;
    fprintf(file, "\n%s: share of a whole prompt's attention on tokens that a layer still gets\n",
            policy);
    print_bars(tuned, tuned->recovery + first, first, tuned->layers - first, file);
}

static void print_setting(const cli_tuned *t, FILE *file)
{
    const kvf_prune_settings *s = &t->settings;
    if (s->layer == KVF_PRUNE_LAYER_AUTO)
        kvf_print(file, "layer_min %u, threshold %.4g (layer %u in the mean), propagate ",
                  s->layer_min, (double)s->threshold, t->layer);
    else
        fprintf(file, "layer %u, propagate ", s->layer);
    print_propagated(s, file);
    if (s->keep_tokens)
        fprintf(file, ", keep %u tokens", s->keep_tokens);
    else
        kvf_print(file, ", keep %g", (double)s->keep);
}

static void print_answers(const cli_tuned *t, const char *policy, double goal, FILE *file)
{
    if (!t->is_answered)
        return;
    fprintf(file, "\n%s: ", policy);
    if (!t->keeps)
        kvf_print(file, "no setting keeps %g%% of the answers; the best: ", 100.0 * goal);
    print_setting(t, file);
    kvf_print(file,
              "\n  keeps %u of %u answers, computes %.0f%% of a full prefill, first token after "
              "%.2f of its time\n",
              t->kept, t->full, 100.0 * t->computed, t->first_share);
}

void cli_tune_print(const cli_tune *tune, FILE *file)
{
    const cli_tuned *of = tune->tuning.of, *fastkv = &of[CLI_FASTKV];
    const cli_tuned *structkv = &of[CLI_STRUCTKV], *asl = &of[CLI_ASL];
    fprintf(file, "%s: %u layers; %u samples of %u tokens\n", tune->options.model,
            tune->model.layers, tune->tuning.samples, tune->tuning.tokens);
    if (tune->question_count)
        fprintf(file, "full attention answers %u of %u questions%s\n", tune->full_right,
                tune->question_count,
                tune->options.asked == CLI_ASKED_AFTER ? ", asked afterwards" : "");
    for (uint32_t m = 0; m < CLI_METHODS; m++)
        print_answers(&of[m], cli_method_names[m], tune->options.goal, file);
    if (fastkv->scores) {
        kvf_print(file, "\nfastkv: layer %u of 0 to %u; it computes %.0f%% of a full prefill\n",
                  fastkv->layer, tune->model.layers - 1,
                  100.0 * cli_tune_share(tune, &fastkv->settings, fastkv->layer));
        fputs("relative change of the last hidden state if ", file);
        print_propagated(&fastkv->settings, file);
        fputs(" go on\n", file);
        print_scores(fastkv, file);
    }
    if (structkv->scores) {
        fprintf(file,
                "\nstructkv: pivot at layer %u of 0 to %u, after the highest transition score\n",
                structkv->layer, tune->model.layers - 1);
        print_scores(structkv, file);
        print_measures(structkv, file);
    }
    if (asl->scores) {
        kvf_print(
            file,
            "\nasl: layer_min %u, threshold %.4g; the mean piece chooses layer %u of 0 to %u\n"
            "variance of ranks, relative to that of layer_min, if ",
            asl->settings.layer_min, (double)asl->settings.threshold, asl->layer,
            tune->model.layers - 1);
        print_propagated(&asl->settings, file);
        fputs(" go on\n", file);
        print_scores(asl, file);
    }
    for (uint32_t m = 0; m < CLI_METHODS; m++)
        print_recovery(&of[m], cli_method_names[m], file);
}
