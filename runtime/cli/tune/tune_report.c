/* SPDX-License-Identifier: Apache-2.0 */

/*
 * What was found, for people: bars in the terminal.
 *
 * It knows figures, not how they came about. Invariant: what was not measured is not shown.
 */

#include "tune.h"

#include "bars.h"

/* Share of a full prefill's tokens that FastKV computes: all up to its layer, few behind it. */
static double share_computed(const cli_tune *tune, const cli_tuned *tuned)
{
    const double layers = tune->model.layers, whole = tuned->layer + 1.0;
    const kvf_prune_settings *s = &tuned->settings;
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
        fprintf(file, "%g of the tokens", (double)s->propagate);
}

static void print_scores(const cli_tuned *tuned, FILE *file)
{
    const cli_bars bars = {
        .head = "layer",
        .first = tuned->first,
        .count = tuned->count,
        .values = tuned->scores,
        .marked = tuned->layer,
        .mark = "<- chosen",
        .is_ascii = cli_locale_is_ascii(),
    };
    cli_bars_print(&bars, file);
}

void cli_tune_print(const cli_tune *tune, FILE *file)
{
    const cli_tuned *fastkv = &tune->tuning.fastkv, *structkv = &tune->tuning.structkv;
    fprintf(file, "%s: %u layers; %u samples of %u tokens\n", tune->options.model,
            tune->model.layers, tune->tuning.samples, tune->tuning.tokens);
    if (fastkv->scores) {
        fprintf(file, "\nfastkv: layer %u of 0 to %u; it computes %.0f%% of a full prefill\n",
                fastkv->layer, tune->model.layers - 1, 100.0 * share_computed(tune, fastkv));
        fputs("relative change of the last hidden state if ", file);
        print_propagated(&fastkv->settings, file);
        fputs(" go on\n", file);
        print_scores(fastkv, file);
    }
    if (structkv->scores) {
        fprintf(file,
                "\nstructkv: pivot at layer %u of 0 to %u, behind the highest transition score\n",
                structkv->layer, tune->model.layers - 1);
        print_scores(structkv, file);
    }
}
