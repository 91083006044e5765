/* SPDX-License-Identifier: Apache-2.0 */

/*
 * `--retention complete`: what the deeper layers of a pruned prompt did not get is computed after
 * the first answer, or for a share of the time before.
 *
 * It knows when there is time, not what is computed. Invariant: an error or Ctrl-C ends the
 * completing and not the run; the sequence is then what pruning left.
 */

#include "common/clock.h"
#include "interrupt.h"
#include "progress.h"
#include "run_report.h"

static void tell(const char *why)
{
    fprintf(stderr, "kvferry: the prompt stays pruned: %s\n", why);
}

bool cli_run_completes(const cli_input *in, const cli_machine *m)
{
    return in->options.prune.policy && m->prune_config.retention == KVF_RETENTION_COMPLETE;
}

/* Tokens of the pruned prompt in each deeper layer, at most: those that hold pages beside the whole
 * form. A policy without a layer of its own hands on more in front of its last. */
static uint32_t pruned_tokens(const cli_input *in, const cli_machine *m)
{
    const kvf_prune_settings *s = &m->prune_config.settings;
    const uint32_t tokens = cli_input_prompt_tokens(in);
    const uint32_t share = s->propagate_tokens
                               ? s->propagate_tokens
                               : (uint32_t)((double)s->propagate * tokens) + s->window;
    const bool has_pivot = kvf_prune_policy_takes(m->prune_config.policy, "layer");
    return has_pivot && share < tokens ? share : tokens;
}

void cli_run_complete_reserve(const cli_input *in, cli_machine *m)
{
    kvf_cache_config *cache = &m->config;
    if (!cli_run_completes(in, m))
        return;
    cache->sequences_max++;
    cache->host_tokens_max += pruned_tokens(in, m) + cache->local_tokens + 4u * 64u;
}

static kvf_hidden_plan hidden_of(const cli_input *in, const cli_machine *m)
{
    kvf_hidden_plan plan;
    kvf_completion_plan(&in->model, cli_input_prompt_tokens(in), m->config.disk_path != NULL,
                        &plan);
    return plan;
}

void cli_run_complete_plan(const cli_input *in, cli_machine *m)
{
    if (!cli_run_completes(in, m))
        return;
    const kvf_hidden_plan plan = hidden_of(in, m);
    m->plan.prune_host_bytes += plan.host_bytes;
    m->plan.hidden_disk_bytes = plan.disk_bytes;
}

kvf_status cli_run_complete_open(const cli_input *in, cli_machine *m, kvf_error *error)
{
    if (!cli_run_completes(in, m))
        return KVF_OK;
    KVF_TRY(kvf_completion_open(m->runtime, &in->model, cli_input_prompt_tokens(in),
                                m->config.disk_path, &m->completion, error));
    kvf_transformer_keep(m->transformer, m->completion);
    return KVF_OK;
}

void cli_run_complete_note(const cli_run *run)
{
    const kvf_error *lost =
        run->machine->completion ? kvf_completion_lost(run->machine->completion) : NULL;
    if (lost)
        tell(lost->text);
}

uint64_t cli_run_complete_left(const cli_run *run)
{
    return run->machine->completion ? kvf_completion_left(run->machine->completion) : 0;
}

/* Some rows. @return whether more are left */
static bool complete_some(cli_run *run)
{
    const double start = kvf_now_ms();
    cli_complete *c = &run->complete;
    if (cli_run_complete_left(run) == 0)
        return false;
    c->tokens = kvf_completion_tokens(run->machine->completion);
    c->rows = kvf_completion_rows(run->machine->completion);
    const kvf_status status =
        kvf_completion_step(run->machine->completion, run->machine->transformer,
                            run->machine->cache, run->machine->stream);
    if (status != KVF_OK)
        tell(kvf_runtime_error(run->machine->runtime)->text);
    c->ms += kvf_now_ms() - start;
    c->rows_left = cli_run_complete_left(run);
    return c->rows_left > 0;
}

void cli_run_complete_beside(cli_run *run, double start_ms)
{
    const double share = run->in->options.complete_share;
    cli_complete *c = &run->complete;
    if (c->beside_start_ms != start_ms)
        c->beside_ms = 0.0;
    c->beside_start_ms = start_ms;
    bool goes_on = share > 0.0;
    while (goes_on && c->beside_ms < share * (kvf_now_ms() - start_ms) && !cli_interrupted()) {
        const double before = c->ms;
        goes_on = complete_some(run);
        c->beside_ms += c->ms - before;
    }
}

void cli_run_complete_end(cli_run *run)
{
    const double start = kvf_now_ms();
    if (!run->machine->completion || !kvf_completion_of(run->machine->completion) ||
        cli_run_complete_left(run) > 0)
        return;
    const kvf_status status =
        kvf_completion_end(run->machine->completion, run->machine->transformer, run->machine->cache,
                           NULL, 0, run->machine->stream);
    run->complete.ms += kvf_now_ms() - start;
    run->complete.is_whole = status == KVF_OK;
    if (status != KVF_OK)
        tell(kvf_runtime_error(run->machine->runtime)->text);
}

void cli_run_complete_all(cli_run *run)
{
    cli_progress progress;
    const uint64_t all =
        run->machine->completion ? kvf_completion_rows(run->machine->completion) : 0;
    if (all == 0)
        return;
    cli_progress_begin(&progress, "completing", all, "rows");
    while (!cli_interrupted() && complete_some(run))
        cli_progress_at(&progress, all - cli_run_complete_left(run));
    cli_progress_end(&progress);
    run->interrupted = cli_interrupted();
}

void cli_run_complete_write(cli_json *j, const cli_run *run)
{
    const cli_complete *c = &run->complete;
    if (!cli_run_completes(run->in, run->machine))
        return;
    const kvf_hidden_plan hidden = hidden_of(run->in, run->machine);
    cli_json_object(j, "complete");
    cli_json_integer(j, "hidden_host_bytes", hidden.host_bytes);
    cli_json_integer(j, "hidden_disk_bytes", hidden.disk_bytes);
    cli_json_bool(j, "whole", c->is_whole);
    cli_json_integer(j, "tokens", c->tokens);
    cli_json_integer(j, "rows", c->rows);
    cli_json_integer(j, "rows_left", c->rows_left);
    cli_json_real(j, "ms", c->ms);
    cli_json_end(j, '}');
}
