/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Hot heads, for people: what shares of the heads hold of all sensitivity, and a map of layers and
 * heads.
 *
 * It knows sensitivity and the mask, not how they came about. Invariant: no line is wider than 80
 * columns for models of up to 70 KV heads.
 */

#include "tune.h"

#include "output.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common/text.h"

#define WIDE_HEADS 35u /* more stand close together */

/* Hot heads by their share of all sensitivity; the last one is below all others. */
static const double levels[] = {0.1, 0.01, 0.001, 0.0};
static const char *const marks[] = {"@", "#", "+", "-"};

static int descending(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x < y) - (x > y);
}

static void print_shares(const double *sorted, size_t heads, double all, FILE *file)
{
    static const double shares[] = {0.0, 0.1, 0.2, 1.0 / 3, 0.5};
    static const char *const names[] = {"the most sensitive", "a tenth", "a fifth", "a third",
                                        "half"};
    double sum = 0.0;
    size_t done = 0;
    fputs("\n  of the heads         hold of all sensitivity\n", file);
    for (size_t i = 0; i < sizeof shares / sizeof *shares; i++) {
        const size_t count = (size_t)floor(shares[i] * (double)heads + 0.5);
        for (; done < (count ? count : 1); done++)
            sum += sorted[done];
        kvf_print(file, "  %-19s  %22.1f%%\n", names[i], 100.0 * sum / all);
    }
}

static void print_map(const cli_tune *tune, double all, FILE *file)
{
    const uint32_t heads = tune->model.kv_heads;
    const char *gap = heads > WIDE_HEADS ? "" : " ";
    fprintf(file,
            "\nhot heads by their share: %s 10%% and more, %s 1%%, %s 0.1%%, %s less; . coarse\n",
            marks[0], marks[1], marks[2], marks[3]);
    fprintf(file, "\n  layer  KV heads 0 to %u\n", heads - 1);
    for (uint32_t layer = 0; layer < tune->model.layers; layer++) {
        fprintf(file, "%7u  ", layer);
        for (uint32_t head = 0; head < heads; head++) {
            const size_t i = (size_t)layer * heads + head;
            size_t level = 0;
            while (tune->sensitivity[i] < levels[level] * all)
                level++;
            fprintf(file, "%s%s", head ? gap : "", tune->mask[i] == 1 ? marks[level] : ".");
        }
        fputs("\n", file);
    }
}

void cli_tune_heads_print(const cli_tune *tune, FILE *file)
{
    const size_t heads = (size_t)tune->model.layers * tune->model.kv_heads;
    double *sorted = malloc(heads * sizeof *sorted), all = 0.0;
    uint32_t hot = 0;
    for (size_t i = 0; i < heads; i++) {
        all += tune->sensitivity[i];
        hot += tune->mask[i] == 1;
    }
    fprintf(file, "%s: %u layers of %u KV heads; %u samples of %u tokens\n", tune->options.model,
            tune->model.layers, tune->model.kv_heads, tune->tuning.samples, tune->tuning.tokens);
    if (tune->options.questions > 0)
        fprintf(file, "the model foresees %u of %u answers\n", tune->foreseen,
                tune->question_count);
    fprintf(file, "hot heads: %u of %zu\n", hot, heads);
    if (sorted) {
        memcpy(sorted, tune->sensitivity, heads * sizeof *sorted);
        qsort(sorted, heads, sizeof *sorted, descending);
        print_shares(sorted, heads, all, file);
    }
    print_map(tune, all, file);
    free(sorted);
}
