/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Prefill with a bar, then a given text token by token, each scored by what the model expected.
 *
 * It knows the order of a run. Invariant: a loss for every token of the text that was reached.
 */

#include "interrupt.h"
#include "progress.h"
#include "run.h"

/* A text on its way. */
typedef struct scoring {
    cli_run *run;
    cli_progress progress;
    uint32_t first; /* of its tokens, in this call */
} scoring;

static bool on_step(void *user, uint32_t done, uint32_t total)
{
    scoring *s = user;
    (void)total;
    s->run->scored = s->first + done;
    return cli_run_go_on(&s->progress, s->run->scored, (uint32_t)s->run->text.count);
}

/* Tokens of the text from s->first on, by what was fed before them and by one another. */
static kvf_status score(scoring *s, const uint32_t *ids, uint32_t count, bool scores_first,
                        kvf_error *error)
{
    cli_run *run = s->run;
    const kvf_score_request request = {
        .sequence = run->sequence,
        .ids = ids,
        .count = count,
        .scores_first = scores_first,
        .first = s->first,
        .vocab_size = run->model.vocab_size,
        .loss = run->losses + s->first,
        .likeliest = run->likeliest + s->first,
        .progress = on_step,
        .user = s,
    };
    kvf_decode_result result = {.step_ms = run->step_ms + run->step_count};
    const kvf_status status = kvf_generate_score(&run->session, &request, &result, error);
    run->step_count += result.steps;
    run->interrupted = cli_interrupted();
    return status;
}

/* The first token by what was held back of the prompt, then the others, whose steps are counted. */
static kvf_status score_text(scoring *s, kvf_error *error)
{
    cli_run *run = s->run;
    const bool is_held = kvf_generate_held_back(&run->session) > 0;
    const uint32_t first[] = {run->prompt.ids[run->prompt.count - 1], run->text.ids[0]};
    kvf_stats before, after;
    KVF_TRY(score(s, first + !is_held, 1u + is_held, !is_held, error));
    s->first = run->scored = 1;
    if (run->interrupted || run->text.count == 1)
        return KVF_OK;
    kvf_cache_stats(run->cache, &before);
    KVF_TRY(score(s, run->text.ids, (uint32_t)run->text.count, false, error));
    kvf_cache_stats(run->cache, &after);
    run->answers[0].stats = cli_stats_between(&before, &after);
    return KVF_OK;
}

kvf_status cli_run_score(cli_run *run, kvf_error *error)
{
    scoring s = {.run = run};
    KVF_TRY(cli_run_prefill(run, error));
    if (run->interrupted)
        return KVF_OK;
    cli_progress_begin(&s.progress, "scoring", (uint32_t)run->text.count, "tokens");
    const kvf_status status = score_text(&s, error);
    cli_progress_end(&s.progress);
    if (status != KVF_OK)
        run->scored = 0;
    return status;
}
