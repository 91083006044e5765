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
} scoring;

static bool on_step(void *user, uint32_t done, uint32_t total)
{
    scoring *s = user;
    s->run->scored.count = 1 + done;
    return cli_run_go_on(&s->progress, done, total);
}

kvf_status cli_run_score(cli_run *run, kvf_error *error)
{
    const uint32_t count = (uint32_t)run->scored.text.count;
    scoring s = {.run = run};
    kvf_decode_result result = {.step_ms = run->steps.ms};
    kvf_stats before, after;
    KVF_TRY(cli_run_prefill(run, error));
    if (run->interrupted)
        return KVF_OK;
    const kvf_score_request request = {
        .sequence = run->sequence,
        .ids = run->scored.text.ids,
        .count = count,
        .vocab_size = run->model.vocab_size,
        .loss = run->scored.losses,
        .likeliest = run->scored.likeliest,
        .progress = on_step,
        .user = &s,
    };
    kvf_cache_stats(run->cache, &before);
    cli_progress_begin(&s.progress, "scoring", count - 1, "tokens");
    const kvf_status status = kvf_generate_score(&run->session, &request, &result, error);
    cli_progress_end(&s.progress);
    kvf_cache_stats(run->cache, &after);
    run->answers.of[0].stats = cli_stats_between(&before, &after);
    run->steps.count = result.steps;
    run->interrupted = cli_interrupted();
    run->scored.count = status == KVF_OK ? kvf_max_u32(run->scored.count, 1) : 0;
    return status;
}
