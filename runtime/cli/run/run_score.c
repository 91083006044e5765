/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Prefill with a bar, then a given text token by token, each scored by what the model expected.
 *
 * It knows the order of a run. Invariant: a loss for every token of the text that was reached.
 */

#include "interrupt.h"
#include "progress.h"
#include "run.h"

#include <stdlib.h>
#include <string.h>

/* What was held back of the prompt, then the text. */
static kvf_status score(cli_run *run, const uint32_t *ids, uint32_t held_back, kvf_error *error)
{
    const uint32_t count = (uint32_t)run->text.count + held_back;
    cli_progress progress;
    cli_progress_begin(&progress, "scoring", count - 1, "tokens");
    const kvf_score_request request = {
        .sequence = run->sequence,
        .ids = ids,
        .count = count,
        .scores_first = held_back == 0,
        .vocab_size = run->model.vocab_size,
        .loss = run->losses,
        .progress = cli_run_go_on,
        .user = &progress,
    };
    kvf_decode_result result = {.step_ms = run->step_ms};
    const kvf_status status = kvf_generate_score(&run->session, &request, &result, error);
    cli_progress_end(&progress);
    run->step_count = result.steps;
    run->scored = status == KVF_OK ? result.steps + (held_back == 0) : 0;
    run->interrupted = cli_interrupted();
    return status;
}

kvf_status cli_run_score(cli_run *run, kvf_error *error)
{
    KVF_TRY(cli_run_prefill(run, error));
    if (run->interrupted)
        return KVF_OK;
    const uint32_t held_back = kvf_generate_held_back(&run->session);
    uint32_t *ids = malloc((run->text.count + 1) * sizeof *ids);
    if (!ids)
        return model_out_of_memory(error, (run->text.count + 1) * sizeof *ids, "the text");
    ids[0] = run->prompt.ids[run->prompt.count - 1];
    memcpy(ids + held_back, run->text.ids, run->text.count * sizeof *ids);
    const kvf_status status = score(run, ids, held_back, error);
    free(ids);
    return status;
}
