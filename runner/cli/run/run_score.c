/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Scores of a given text, and of finished answers.
 *
 * Prefill with a bar, then a given text token by token, each scored by what the model expected.
 *
 * It knows the order of a run. Invariant: a loss for every token of the text that was reached.
 */

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common/percentile.h"
#include "common/text.h"
#include "interrupt.h"
#include "progress.h"
#include "run_report.h"

/* A text on its way. */
typedef struct scoring {
    cli_run *run;
    cli_progress progress;
} scoring;

static bool on_step(void *user, uint32_t done, uint32_t total)
{
    scoring *s = user;
    s->run->scored.count = 1 + done;
    return cli_run_go_on(&s->progress, done, total);
}

kvf_status cli_run_score(cli_run *run, kvf_error *error)
{
    const uint32_t count = (uint32_t)run->in->text.count;
    scoring s = {.run = run};
    kvf_decode_result result = {.step_ms = run->steps.ms};
    kvf_stats before, after;
    KVF_TRY(cli_run_prefill(run, error));
    if (run->interrupted)
        return KVF_OK;
    const kvf_score_request request = {
        .sequence = run->sequence,
        .ids = run->in->text.ids,
        .count = count,
        .vocab_size = run->in->model.vocab_size,
        .loss = run->scored.losses,
        .likeliest = run->scored.likeliest,
        .progress = on_step,
        .user = &s,
    };
    kvf_cache_stats(run->machine->cache, &before);
    cli_progress_begin(&s.progress, "scoring", count - 1, "tokens");
    const kvf_status status = kvf_generate_score(&run->machine->session, &request, &result, error);
    cli_progress_end(&s.progress);
    kvf_cache_stats(run->machine->cache, &after);
    run->answers.of[0].stats = cli_stats_between(&before, &after);
    run->steps.count = result.steps;
    run->interrupted = cli_interrupted();
    run->scored.count = status == KVF_OK ? kvf_max_u32(run->scored.count, 1) : 0;
    return status;
}

/*
 * Log-probabilities of finished answers under another selection, and their distance to those at
 * which they were drawn.
 *
 * It knows log-probabilities, not how they come about. Invariant: a difference is of one token, the
 * answer's minus this run's; a token for which either has no finite number is not compared.
 */

typedef struct difference {
    double mean, mean_abs, p99, most; /* the last two of absolute values */
} difference;

/* A group of its own for each selection that answers were drawn under. */
static cli_rescored *group_of(cli_rescores *all, const char *selection)
{
    for (uint32_t i = 0; i < all->count; i++)
        if (strcmp(all->of[i].selection, selection) == 0)
            return &all->of[i];
    cli_rescored *grown = realloc(all->of, (all->count + 1) * sizeof *grown);
    if (!grown)
        return NULL;
    all->of = grown;
    cli_rescored *group = &grown[all->count++];
    *group = (cli_rescored){0};
    snprintf(group->selection, sizeof group->selection, "%s", selection);
    return group;
}

static bool add(cli_rescored *group, double value)
{
    double *grown = model_room(group->values, group->count, &group->capacity, sizeof *grown);
    if (!grown)
        return false;
    group->values = grown;
    group->values[group->count++] = value;
    return true;
}

static difference of_values(double *absolute, const double *values, size_t count)
{
    difference d = {0};
    for (size_t i = 0; i < count; i++) {
        absolute[i] = fabs(values[i]);
        d.mean += values[i] / (double)count;
        d.mean_abs += absolute[i] / (double)count;
    }
    kvf_sort(absolute, count);
    d.p99 = kvf_percentile(absolute, count, 99);
    d.most = absolute[count - 1];
    return d;
}

static bool summarise(const double *values, size_t count, difference *out)
{
    double *absolute = count ? malloc(count * sizeof *absolute) : NULL;
    if (!absolute)
        return false;
    *out = of_values(absolute, values, count);
    free(absolute);
    return true;
}

static void write_difference(cli_json *j, const double *values, size_t count)
{
    difference d;
    if (!summarise(values, count, &d))
        return;
    cli_json_integer(j, "compared_tokens", count);
    cli_json_real(j, "mean", d.mean);
    cli_json_real(j, "mean_abs", d.mean_abs);
    cli_json_real(j, "p99_abs", d.p99);
    cli_json_real(j, "max_abs", d.most);
}

bool cli_rescore_write(cli_run *run, cli_json *j, const cli_given_answer *given,
                       const cli_logprobs *now)
{
    cli_rescored *group = group_of(&run->rescores, given->selection);
    if (!group)
        return false;
    const size_t before = group->count;
    double sum = 0.0;
    for (uint32_t i = 0; i < now->count; i++) {
        const double was = (double)run->in->given.logprobs[given->first + i],
                     is = (double)now->model[i];
        sum += is;
        if (isfinite(was) && isfinite(is) && !add(group, was - is))
            return false;
    }
    run->rescores.sum += sum;
    cli_json_integer(j, "sample", given->sample);
    if (given->selection[0])
        cli_json_text(j, "drawn_with", given->selection);
    cli_json_integer(j, "scored_tokens", now->count);
    cli_json_real(j, "logprob_sum", sum);
    if (given->has_logprobs) {
        cli_json_object(j, "difference");
        write_difference(j, group->values + before, group->count - before);
        cli_json_end(j, '}');
    }
    return true;
}

void cli_rescore_write_all(cli_json *j, const cli_run *run)
{
    cli_json_object(j, "rescored");
    cli_json_integer(j, "answers", run->batch.answers);
    cli_json_real(j, "loss",
                  run->batch.generated ? -run->rescores.sum / (double)run->batch.generated : 0.0);
    cli_json_array(j, "differences");
    for (uint32_t i = 0; i < run->rescores.count; i++) {
        const cli_rescored *group = &run->rescores.of[i];
        cli_json_object(j, NULL);
        cli_json_text(j, "drawn_with", group->selection);
        write_difference(j, group->values, group->count);
        cli_json_end(j, '}');
    }
    cli_json_end(j, ']');
    cli_json_end(j, '}');
}

void cli_rescore_summary(const cli_run *run)
{
    if (run->batch.generated == 0)
        return;
    kvf_print(stderr, "score     %.4f nats per token, over %llu tokens of %u answers\n",
              -run->rescores.sum / (double)run->batch.generated,
              (unsigned long long)run->batch.generated, run->batch.answers);
    for (uint32_t i = 0; i < run->rescores.count; i++) {
        const cli_rescored *group = &run->rescores.of[i];
        difference d;
        if (summarise(group->values, group->count, &d))
            kvf_print(stderr,
                      "drawn     %s: log-probabilities differ by %+.2g nats on average, %.2g "
                      "without sign (p99 %.2g, largest %.2g)\n",
                      group->selection[0] ? group->selection : "elsewhere", d.mean, d.mean_abs,
                      d.p99, d.most);
    }
}

void cli_rescore_free(cli_rescores *rescores)
{
    for (uint32_t i = 0; i < rescores->count; i++)
        free(rescores->of[i].values);
    free(rescores->of);
}
