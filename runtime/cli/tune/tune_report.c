/* SPDX-License-Identifier: Apache-2.0 */

/*
 * What was found, for people: bars in the terminal, pictures by gnuplot.
 *
 * It knows figures, not how they came about. Invariant: what was not measured is not shown.
 */

#include "tune.h"

#include "bars.h"
#include "gnuplot.h"

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

/* ---- pictures ---- */

static void plot_fastkv(cli_gnuplot *g, const cli_tuned *t)
{
    char settings[512];
    fputs("$fastkv << EOD\n", g->script);
    for (uint32_t i = 0; i < t->count; i++)
        fprintf(g->script, "%u %.9g\n", t->first + i, t->scores[i]);
    fprintf(g->script, "EOD\n$chosen << EOD\n%u %.9g\nEOD\n", t->layer,
            t->scores[t->layer - t->first]);
    snprintf(settings, sizeof settings,
             "set title 'FastKV: change of the last hidden state by propagation layer'\n"
             "set xlabel 'layer'\nset ylabel '|H - H_L|^2 / |H|^2'\nset grid\nset yrange [0:*]\n"
             "set xrange [%u-0.5:%u+0.5]\nset xtics %u\nset key top right\n",
             t->first, t->first + t->count - 1, t->count / 16 + 1);
    cli_gnuplot_draw(g, "fastkv", settings,
                     "plot $fastkv using 1:2 with linespoints lw 2 pt 7 lc rgb '#2171b5' title "
                     "'mean over samples', $chosen using 1:2 with points pt 6 ps 3 lw 3 lc rgb "
                     "'#cb181d' title 'chosen'");
}

static void plot_structkv(cli_gnuplot *g, const cli_tuned *t)
{
    char settings[768], body[1024];
    const double *measures[] = {t->entropy, t->sparsity, t->variance};
    fputs("$structkv << EOD\n", g->script);
    for (uint32_t l = 0; l < t->count; l++) {
        fprintf(g->script, "%u %.9g", l, t->scores[l]);
        /* Each measure from its least to its greatest, for one axis. */
        for (size_t m = 0; m < 3; m++) {
            double least = measures[m][0], most = measures[m][0];
            for (uint32_t i = 1; i < t->count; i++) {
                least = measures[m][i] < least ? measures[m][i] : least;
                most = measures[m][i] > most ? measures[m][i] : most;
            }
            fprintf(g->script, " %.9g",
                    most > least ? (measures[m][l] - least) / (most - least) : 0.5);
        }
        fputs("\n", g->script);
    }
    fputs("EOD\n", g->script);
    snprintf(settings, sizeof settings,
             "set grid\nset xrange [-0.5:%u.5]\nset xtics %u\nset style fill solid 0.8\nset "
             "boxwidth 0.8\n"
             "set lmargin 9\nset rmargin 16\nset key outside right top samplen 2\n"
             "set arrow from %u, graph 0 to %u, graph 1 nohead front lw 2 dt 2 lc rgb '#cb181d'\n",
             t->count - 1, t->count / 16 + 1, t->layer, t->layer);
    snprintf(body, sizeof body,
             "set multiplot layout 2,1\n"
             "set title 'StructKV: transition score, pivot at layer %u'\nset yrange [0:*]\n"
             "plot $structkv using 1:2 with boxes lc rgb '#6baed6' title 'score'\n"
             "set title 'attention by layer, each from its least to its greatest'\n"
             "set xlabel 'layer'\nset yrange [-0.05:1.05]\n"
             "plot $structkv using 1:3 with linespoints lw 2 pt 7 title 'entropy', '' using 1:4 "
             "with linespoints lw 2 pt 5 title 'sparsity', '' using 1:5 with linespoints lw 2 pt 9 "
             "title 'variance'\nunset multiplot",
             t->layer);
    cli_gnuplot_draw(g, "structkv", settings, body);
}

bool cli_tune_plot(const cli_tune *tune)
{
    cli_gnuplot g;
    if (!cli_gnuplot_open(&g, tune->options.plot))
        return false;
    if (tune->tuning.fastkv.scores)
        plot_fastkv(&g, &tune->tuning.fastkv);
    if (tune->tuning.structkv.scores)
        plot_structkv(&g, &tune->tuning.structkv);
    return cli_gnuplot_close(&g, NULL);
}
