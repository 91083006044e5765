/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Pruning and head masks of a run: from options to the cache's settings and the pruner, and what
 * they did.
 *
 * It knows which parts need which. Invariant: whatever can be said from options, model and prompt
 * is said before memory is reserved.
 */

#include "head_mask.h"
#include "run_report.h"

#include <stdlib.h>
#include <string.h>

#include "common/text.h"

/* Heads of layers with windows stream; the transformer sets their mask. */
static kvf_status prepare_windows(const cli_input *in, cli_machine *m, kvf_error *error)
{
    const cli_prune_options *o = &in->options.prune;
    const kvf_model_config *model = &in->model;
    if (model->window && (o->mask_file || o->policy))
        return model_fail(error, KVF_UNSUPPORTED,
                          "%s %s is not supported for a model whose layers attend to a window of "
                          "%u tokens (sliding_window); leave it out, or take a model without",
                          o->mask_file ? "--head-mask" : "--prune",
                          o->mask_file ? o->mask_file : o->policy->name, model->window);
    for (uint32_t i = 0; model->window && i < model->layers * model->kv_heads; i++)
        m->head_mask.streaming += model->window_mask[i] == 0;
    return KVF_OK;
}

static kvf_status prepare_mask(const cli_input *in, cli_machine *m, kvf_error *error)
{
    const cli_prune_options *o = &in->options.prune;
    kvf_cache_config *c = &m->config;
    const size_t heads = (size_t)in->model.layers * in->model.kv_heads;
    if (in->model.window || !o->mask_file)
        return prepare_windows(in, m, error);
    m->head_mask.of = malloc(heads);
    if (!m->head_mask.of)
        return model_out_of_memory(error, heads, "the head mask");
    KVF_TRY(kvf_head_mask_read(o->mask_file, in->model.layers, in->model.kv_heads, o->mask_sparsity,
                               m->head_mask.of, error));
    c->head_mask = m->head_mask.of;
    for (size_t i = 0; i < heads; i++)
        m->head_mask.streaming += m->head_mask.of[i] == 0;
    if (m->head_mask.streaming > 0 && o->policy)
        return model_fail(error, KVF_INVALID,
                          "--head-mask %s has %u streaming heads, which keep their own tokens; "
                          "leave --prune %s out, or the mask",
                          o->mask_file, m->head_mask.streaming, o->policy->name);
    return KVF_OK;
}

/* Queries that eviction between chunks scores with. */
static uint32_t queries_observed(const kvf_prune_config *config)
{
    const uint32_t window = config->settings.window ? config->settings.window : 1;
    return config->eviction != KVF_EVICTION_NONE && config->chunk_queries > window
               ? config->chunk_queries
               : window;
}

/* Whether a prompt of so many tokens can be pruned; before the transformer is open, as far as is
 * known then. */
static kvf_status check_prompt(const cli_input *in, const cli_machine *m, uint32_t tokens,
                               kvf_error *error)
{
    const kvf_prune_config *config = &m->prune_config;
    const kvf_prune_shape shape = cli_prune_shape(&in->model, tokens);
    kvf_error why = {0};
    kvf_status status = kvf_prune_config_check(config, &shape, &why);
    if (status == KVF_OK && m->transformer && config->eviction != KVF_EVICTION_NONE)
        status = kvf_transformer_chunk_check(m->transformer, m->prune, tokens,
                                             cli_run_prune_chunk(in), &why);
    if (status == KVF_OK)
        return KVF_OK;
    return model_fail(error, status, "--prune %s: %s", config->policy->name, why.text);
}

/* Every prompt of a file, or the longest one. */
static kvf_status check_prompts(const cli_input *in, const cli_machine *m, kvf_error *error)
{
    const cli_jobs *jobs = &in->jobs;
    kvf_error why = {0};
    if (!in->options.prompts_file)
        return check_prompt(in, m, cli_input_prompt_tokens(in), error);
    for (uint32_t i = 0; i < jobs->count; i++) {
        const kvf_status status = check_prompt(in, m, jobs->prompts[i].count, &why);
        if (status != KVF_OK)
            return model_fail(error, status, "%.200s: line %llu: %s", in->options.prompts_file,
                              (unsigned long long)jobs->jobs[i].line, why.text);
    }
    return KVF_OK;
}

static kvf_status prepare_pruning(const cli_input *in, cli_machine *m, kvf_error *error)
{
    const cli_prune_options *o = &in->options.prune;
    if (!o->policy)
        return KVF_OK;
    KVF_TRY(cli_prune_make(o, &in->model, in->weights, &m->prune_config, error));
    KVF_TRY(check_prompts(in, m, error));
    m->config.observe_window = queries_observed(&m->prune_config);
    return KVF_OK;
}

kvf_status cli_run_prune_prepare(const cli_input *in, cli_machine *m, kvf_error *error)
{
    KVF_TRY(prepare_mask(in, m, error));
    return prepare_pruning(in, m, error);
}

kvf_status cli_run_prune_plan(const cli_input *in, cli_machine *m, kvf_error *error)
{
    kvf_prune_plan plan;
    if (!in->options.prune.policy)
        return KVF_OK;
    kvf_status status = kvf_prune_plan_make(m->runtime, &m->config, &m->prune_config, &plan, error);
    if (status == KVF_OK) {
        m->plan.prune_device_bytes = plan.device_bytes;
        m->plan.prune_host_bytes = plan.host_bytes;
        cli_run_complete_plan(in, m);
    }
    return status;
}

kvf_status cli_run_prune_open(const cli_input *in, cli_machine *m, kvf_error *error)
{
    const cli_prune_options *o = &in->options.prune;
    if (!o->policy)
        return KVF_OK;
    const kvf_status status = kvf_prune_open(m->cache, &m->prune_config, &m->prune, error);
    KVF_TRY(status);
    KVF_TRY(check_prompts(in, m, error));
    return cli_run_complete_open(in, m, error);
}

uint32_t cli_run_prune_chunk(const cli_input *in)
{
    const cli_prune_options *o = &in->options.prune;
    const uint32_t tokens = cli_input_prompt_tokens(in);
    if (o->policy && o->values.config.eviction == KVF_EVICTION_NONE)
        return 0;
    return tokens > 0 && o->chunk_tokens > tokens ? tokens : o->chunk_tokens;
}

void cli_run_prune_options(const cli_input *in, const cli_machine *m,
                           kvf_transformer_options *options)
{
    const cli_prune_options *o = &in->options.prune;
    const uint32_t chunk = cli_run_prune_chunk(in);
    if (o->chunk_tokens && o->chunk_tokens < options->chunk_max)
        options->chunk_max = o->chunk_tokens;
    /* A policy looks at whole layers: the prompt goes layer by layer, unless it is chunked. */
    if (chunk)
        options->prompt_max = o->values.config.eviction == KVF_EVICTION_PATCHED
                                  ? chunk + m->prune_config.chunk_queries
                                  : chunk;
    else if (o->policy)
        options->prompt_max = cli_input_prompt_tokens(in);
}

kvf_status cli_run_prune_note(cli_run *run, kvf_error *error)
{
    run->pruned.layer_tokens = calloc(run->in->model.layers, sizeof *run->pruned.layer_tokens);
    if (!run->pruned.layer_tokens)
        return model_out_of_memory(error, run->in->model.layers * sizeof *run->pruned.layer_tokens,
                                   "the lengths of all layers");
    for (uint32_t l = 0; l < run->in->model.layers; l++)
        run->pruned.layer_tokens[l] = kvf_sequence_length(run->sequence, l);
    if (run->machine->prune)
        kvf_prune_stats_get(run->machine->prune, &run->pruned.stats);
    return KVF_OK;
}

/* ---- figures ---- */

/* Tokens of a prompt, on average. */
static double kept_per_layer(const cli_run *run)
{
    const kvf_prune_stats *s = &run->pruned.stats;
    return ratio((double)s->kept, (double)s->prompts * run->in->model.layers);
}

void cli_run_prune_summary(const cli_run *run)
{
    const kvf_prune_stats *s = &run->pruned.stats;
    char layer[40] = "";
    if (!run->machine->prune || s->prompts == 0)
        return;
    if (s->chosen_layer != KVF_PRUNE_LAYER_AUTO)
        snprintf(layer, sizeof layer, ", layer %u", s->chosen_layer);
    kvf_print(
        stderr, "pruning   %s%s: %.0f%% of the prefill computed, %.0f tokens kept per layer\n",
        run->in->options.prune.policy->name, layer,
        100.0 * ratio((double)s->tokens_computed, (double)s->tokens_full), kept_per_layer(run));
}

static void write_mask(cli_json *j, const cli_run *run)
{
    const cli_prune_options *o = &run->in->options.prune;
    if (!run->machine->head_mask.of)
        return;
    cli_json_object(j, "head_mask");
    cli_json_text(j, "file", o->mask_file);
    if (o->mask_sparsity >= 0.0)
        cli_json_real(j, "sparsity", o->mask_sparsity);
    cli_json_integer(j, "heads", (uint64_t)run->in->model.layers * run->in->model.kv_heads);
    cli_json_integer(j, "streaming_heads", run->machine->head_mask.streaming);
    cli_json_integer(j, "streaming_sink", run->machine->config.streaming_sink);
    cli_json_integer(j, "streaming_recent", run->machine->config.streaming_recent);
    cli_json_end(j, '}');
}

/* Values that ASL chose by; null where it did not look. */
static void write_variance(cli_json *j, const cli_run *run)
{
    const uint32_t layers = run->in->model.layers;
    double *measures = malloc(layers * sizeof *measures);
    if (!measures) /* a report is no reason to stop */
        return;
    kvf_prune_measures(run->machine->prune, measures, layers);
    cli_json_array(j, "relative_variance");
    for (uint32_t l = 0; l < layers; l++)
        cli_json_real(j, NULL, measures[l]);
    cli_json_end(j, ']');
    free(measures);
}

static void write_pruning(cli_json *j, const cli_run *run)
{
    const cli_prune_options *o = &run->in->options.prune;
    const kvf_prune_config *c = &run->machine->prune_config;
    const kvf_prune_stats *s = &run->pruned.stats;
    char text[32];
    const double overhead = (double)(s->observe_ns + s->decide_ns + s->retain_ns) * 1e-6;
    if (!run->machine->prune)
        return;
    cli_json_object(j, "prune");
    cli_json_text(j, "policy", o->policy->name);
    cli_json_text(j, "retention", cli_show(kvf_prune_setting, "retention", c, text));
    cli_json_text(j, "eviction", cli_show(kvf_prune_setting, "eviction", c, text));
    if (o->chunk_tokens)
        cli_json_integer(j, "chunk_tokens", o->chunk_tokens);
    if (c->eviction != KVF_EVICTION_NONE)
        cli_json_integer(j, "chunk_queries", c->chunk_queries);
    if (o->config_file)
        cli_json_text(j, "config", o->config_file);
    cli_settings_write(j, "settings", c, cli_settings_of(o->policy->name));
    if (s->prompts > 0) {
        cli_json_integer(j, "prompts", s->prompts);
        if (s->chosen_layer == KVF_PRUNE_LAYER_AUTO)
            cli_json_null(j, "chosen_layer");
        else
            cli_json_integer(j, "chosen_layer", s->chosen_layer);
        if (strcmp(o->policy->name, "asl") == 0)
            write_variance(j, run);
        cli_json_integer(j, "tokens_computed", s->tokens_computed);
        cli_json_integer(j, "tokens_full", s->tokens_full);
        cli_json_real(j, "compute_rate", ratio((double)s->tokens_computed, (double)s->tokens_full));
        cli_json_integer(j, "tokens_kept", s->kept);
        cli_json_real(j, "tokens_kept_per_layer", kept_per_layer(run));
        if (run->pruned.layer_tokens) {
            cli_json_array(j, "tokens_held");
            for (uint32_t l = 0; l < run->in->model.layers; l++)
                cli_json_integer(j, NULL, run->pruned.layer_tokens[l]);
            cli_json_end(j, ']');
        }
        cli_json_real(j, "observe_ms", (double)s->observe_ns * 1e-6);
        cli_json_real(j, "decide_ms", (double)s->decide_ns * 1e-6);
        cli_json_real(j, "retain_ms", (double)s->retain_ns * 1e-6);
        cli_json_real(j, "share_of_prefill", ratio(overhead, run->prefill_ms));
    }
    cli_run_complete_write(j, run);
    cli_json_end(j, '}');
}

static void write_footprint(cli_json *j, const cli_run *run)
{
    kvf_footprint f;
    if (!run->machine->cache)
        return;
    kvf_cache_footprint(run->machine->cache, &f);
    cli_json_object(j, "footprint");
    cli_json_real(j, "footprint", f.footprint);
    cli_json_real(j, "device", f.device);
    cli_json_real(j, "host", f.host);
    cli_json_real(j, "peak", f.peak);
    cli_json_real(j, "device_peak", f.device_peak);
    cli_json_integer(j, "steps", f.steps);
    cli_json_integer(j, "entry_steps", f.entry_steps);
    cli_json_integer(j, "device_entry_steps", f.device_entry_steps);
    cli_json_integer(j, "full_entry_steps", f.full_entry_steps);
    cli_json_integer(j, "peak_entries", f.peak_entries);
    cli_json_integer(j, "device_peak_entries", f.device_peak_entries);
    cli_json_integer(j, "full_entries", f.full_entries);
    cli_json_end(j, '}');
}

void cli_run_prune_write(cli_json *j, const cli_run *run)
{
    write_pruning(j, run);
    write_mask(j, run);
    write_footprint(j, run);
}
