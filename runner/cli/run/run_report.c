/* SPDX-License-Identifier: Apache-2.0 */

/* Figures of a run, for people and for programs; see the header. */

#include "run_report.h"

#include "common/percentile.h"
#include "progress.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common/text.h"

#define PACE_STEPS 1000u

/* ---- figures ---- */

/* Over some steps: how many, and times in ms. */
typedef struct step_times {
    uint32_t count;
    double p50, p95, mean;
} step_times;

static step_times times_of(const double *step_ms, uint32_t count)
{
    step_times t = {.count = count};
    double *sorted = count ? malloc(count * sizeof *sorted) : NULL;
    if (!sorted)
        return t;
    memcpy(sorted, step_ms, count * sizeof *sorted);
    kvf_sort(sorted, count);
    t.p50 = kvf_percentile(sorted, count, 50);
    t.p95 = kvf_percentile(sorted, count, 95);
    for (uint32_t i = 0; i < count; i++)
        t.mean += sorted[i] / count;
    free(sorted);
    return t;
}

/* Time per token: all steps, except that the step to the first token is latency, not pace. */
static step_times token_times(const cli_run *run)
{
    if (run->steps.count == 0) /* and maybe no array */
        return (step_times){0};
    const bool is_first = !run->in->options.ask_file && !run->machine->prune;
    uint32_t skip = is_first && run->steps.count > 1 ? 1 : 0;
    return times_of(run->steps.ms + skip, run->steps.count - skip);
}

static uint64_t generated_tokens(const cli_run *run)
{
    uint64_t sum = 0;
    for (uint32_t i = 0; i < run->answers.count; i++)
        sum += run->answers.of[i].generated;
    return sum + run->batch.generated;
}

static double attended_per_head_step(const cli_run *run, const kvf_stats *s)
{
    return ratio((double)s->tokens_attended, (double)s->steps * run->in->model.kv_heads);
}

static double attended_share(const kvf_stats *s)
{
    return ratio((double)s->tokens_attended, (double)s->tokens_held);
}

static double rows_at_once(const cli_run *run)
{
    return ratio((double)run->batch.rows_sum, run->steps.count);
}

static double mean_loss(const cli_scored *scored)
{
    double sum = 0.0;
    for (uint32_t i = 0; i < scored->count; i++)
        sum += (double)scored->losses[i];
    return ratio(sum, scored->count);
}

/* To the first token: prefill, and the steps up to it. */
static double first_token_ms(const cli_run *run)
{
    if (run->machine->rows)
        return run->batch.first_ms;
    return run->answers.count ? run->prefill_ms + run->answers.of[0].first_ms : run->prefill_ms;
}

/* ---- people ---- */

void cli_report_summary(const cli_report *report)
{
    const cli_run *run = report->run;
    kvf_stats s;
    kvf_cache_stats(run->machine->cache, &s);
    step_times t = token_times(run);
    char host[32], device[32], moved[32];
    if (run->in->loaded.tokens)
        kvf_print(stderr, "\nloaded    %u tokens in %.2f s (%.0f tokens/s)", run->in->loaded.tokens,
                  run->restore_ms / 1e3, ratio(run->in->loaded.tokens, run->restore_ms / 1e3));
    kvf_print(stderr, "\nprefill   %u tokens in %.2f s (%.0f tokens/s)%s\n", run->prefilled,
              run->prefill_ms / 1e3, ratio(run->prefilled, run->prefill_ms / 1e3),
              run->interrupted ? ", interrupted" : "");
    if (run->scored.count > 0)
        kvf_print(stderr,
                  "score     %.4f nats per token, over %u tokens; %.2f ms per token (p95 %.2f)\n",
                  mean_loss(&run->scored), run->scored.count, t.p50, t.p95);
    else if (run->in->given.count)
        cli_rescore_summary(run);
    else if (generated_tokens(run) > 0)
        kvf_print(stderr,
                  "decode    %llu tokens generated in %u steps; %.2f ms per %s (p95 %.2f), first "
                  "token after %.2f s\n",
                  (unsigned long long)generated_tokens(run), run->steps.count, t.p50,
                  run->machine->rows || run->machine->draft ? "step" : "token", t.p95,
                  first_token_ms(run) / 1e3);
    if (run->drafted > 0)
        fprintf(stderr, "draft     %llu of %llu guessed tokens were right\n",
                (unsigned long long)run->accepted, (unsigned long long)run->drafted);
    if (run->machine->rows)
        kvf_print(stderr, "batch     %u of %llu answers, %.1f at once; %.1f tokens/s\n",
                  run->batch.answers, (unsigned long long)run->in->jobs.answers, rows_at_once(run),
                  ratio((double)run->batch.generated, run->batch.ms / 1e3));
    cli_run_prune_summary(run);
    fprintf(stderr, "KV        %s on the host, %s on the device\n",
            kvf_bytes_text(run->machine->plan.cache.host_kv_bytes, host),
            kvf_bytes_text(run->machine->plan.cache.device_kv_bytes, device));
    if (s.steps > 0)
        kvf_print(
            stderr,
            "attention %.0f tokens per KV head and step, %.1f%% of the context; %.0f%% hits, %s "
            "moved\n",
            attended_per_head_step(run, &s), 100.0 * attended_share(&s),
            100.0 * ratio((double)s.hits, (double)(s.hits + s.misses)),
            kvf_bytes_text(s.bytes_to_device, moved));
    if (s.disk_wanted > 0)
        kvf_print(stderr,
                  "disk      %.1f%% of what was needed was in memory; %s read, %s written\n",
                  100.0 * (1.0 - ratio((double)s.disk_reads, (double)s.disk_wanted)),
                  kvf_bytes_text(s.bytes_from_disk, host), kvf_bytes_text(s.bytes_to_disk, device));
    if (s.verified > 0)
        kvf_print(stderr, "verified  attention recall %.4f, largest error %.2g, over %llu rows\n",
                  s.recall_sum / (double)s.verified, s.error_max, (unsigned long long)s.verified);
}

/* ---- programs ---- */

static void write_times(cli_json *j, const char *key, const step_times *t)
{
    cli_json_object(j, key);
    cli_json_real(j, "p50", t->p50);
    cli_json_real(j, "p95", t->p95);
    cli_json_real(j, "mean", t->mean);
    cli_json_end(j, '}');
}

static void write_counters(cli_json *j, const cli_run *run, const kvf_stats *s)
{
    /* Steps may have several; what is counted below is of all of them. */
    cli_json_integer(j, "decoded_tokens", s->steps / run->in->model.layers);
    cli_json_integer(j, "hits", s->hits);
    cli_json_integer(j, "misses", s->misses);
    cli_json_integer(j, "bytes_moved", s->bytes_to_device);
    cli_json_integer(j, "pages_selected", s->pages_selected);
    cli_json_integer(j, "tokens_attended", s->tokens_attended);
    cli_json_real(j, "tokens_attended_per_head_step", attended_per_head_step(run, s));
    cli_json_real(j, "attended_share", attended_share(s));
    if (s->verified > 0) {
        cli_json_real(j, "attention_recall", s->recall_sum / (double)s->verified);
        cli_json_integer(j, "verified_rows", s->verified);
    }
}

static void write_totals(cli_json *j, const kvf_stats *s)
{
    cli_json_integer(j, "layer_steps", s->steps);
    cli_json_integer(j, "bytes_to_host", s->bytes_to_host);
    cli_json_integer(j, "bytes_refresh", s->bytes_refresh);
    cli_json_integer(j, "bytes_prompt", s->bytes_prompt);
    cli_json_integer(j, "copies", s->copies);
    if (s->disk_wanted > 0) {
        cli_json_integer(j, "disk_wanted", s->disk_wanted);
        cli_json_integer(j, "disk_reads", s->disk_reads);
        cli_json_integer(j, "bytes_from_disk", s->bytes_from_disk);
        cli_json_integer(j, "bytes_to_disk", s->bytes_to_disk);
        cli_json_integer(j, "pages_from_disk", s->pages_from_disk);
        cli_json_integer(j, "disk_wait_ns", s->disk_wait_ns);
    }
    cli_json_integer(j, "refreshes", s->refreshes);
    cli_json_integer(j, "static_tokens_min", s->static_tokens_min);
    cli_json_integer(j, "static_tokens_max", s->static_tokens_max);
    if (s->verified > 0)
        cli_json_real(j, "attention_error_max", s->error_max);
    cli_json_object(j, "time_ms");
    cli_json_real(j, "append", (double)s->append_ns * 1e-6);
    cli_json_real(j, "score", (double)s->score_ns * 1e-6);
    cli_json_real(j, "select", (double)s->select_ns * 1e-6);
    cli_json_real(j, "gather", (double)s->gather_ns * 1e-6);
    cli_json_real(j, "copy", (double)s->copy_ns * 1e-6);
    cli_json_real(j, "attend", (double)s->attend_ns * 1e-6);
    cli_json_real(j, "refresh", (double)s->refresh_ns * 1e-6);
    cli_json_end(j, '}');
}

/* Halfway between the least and the most that were chosen. */
static double static_tokens(const kvf_stats *s)
{
    return 0.5 * ((double)s->static_tokens_min + (double)s->static_tokens_max);
}

/* The share of the static set where it is chosen: of a layer, and one for the model, the mean over
 * layers in whole pages. The plan has room for what is shared out. */
static void write_static_ratio(cli_json *j, const cli_run *run, double tokens, bool is_mean)
{
    const kvf_cache_config *c = kvf_cache_settings(run->machine->cache);
    const double all = run->machine->plan.cache.static_tokens, page = c->page_size;
    if (c->static_ratio == KVF_STATIC_RATIO_AUTO)
        cli_json_real(j, is_mean ? "static_ratio_mean" : "static_ratio",
                      ratio(is_mean ? page * floor(tokens / page) : tokens, all));
}

static void write_layers(cli_json *j, const cli_run *run)
{
    const uint32_t layers = run->in->model.layers;
    double sum = 0.0;
    cli_json_array(j, "layers");
    for (uint32_t l = 0; l < layers; l++) {
        kvf_stats s;
        kvf_cache_layer_stats(run->machine->cache, l, &s);
        sum += static_tokens(&s);
        cli_json_object(j, NULL);
        cli_json_integer(j, "hits", s.hits);
        cli_json_integer(j, "misses", s.misses);
        cli_json_integer(j, "pages_selected", s.pages_selected);
        cli_json_integer(j, "tokens_attended", s.tokens_attended);
        cli_json_integer(j, "static_tokens_min", s.static_tokens_min);
        cli_json_integer(j, "static_tokens_max", s.static_tokens_max);
        write_static_ratio(j, run, static_tokens(&s), false);
        if (s.verified > 0)
            cli_json_real(j, "attention_recall", s.recall_sum / (double)s.verified);
        cli_json_end(j, '}');
    }
    cli_json_end(j, ']');
    write_static_ratio(j, run, sum / layers, true);
}

static void write_memory(cli_json *j, const cli_run *run)
{
    const kvf_cache_plan *p = &run->machine->plan.cache;
    cli_json_integer(j, "host_kv_bytes", p->host_kv_bytes);
    cli_json_integer(j, "host_staging_bytes", p->host_staging_bytes);
    cli_json_integer(j, "host_table_bytes", p->host_table_bytes);
    if (p->disk_bytes)
        cli_json_integer(j, "disk_bytes", p->disk_bytes);
    cli_json_integer(j, "device_kv_bytes", p->device_kv_bytes);
    cli_json_integer(j, "device_digest_bytes", p->device_digest_bytes);
    cli_json_integer(j, "device_table_bytes", p->device_table_bytes);
    cli_json_integer(j, "weight_bytes", run->machine->plan.weight_bytes);
    cli_json_integer(j, "runner_bytes", run->machine->plan.runner_bytes);
    if (run->machine->prune)
        cli_json_integer(j, "prune_bytes",
                         run->machine->plan.prune_device_bytes +
                             run->machine->plan.prune_host_bytes);
}

/* Fields have their own names but for a few that are said from the user's side. */
static const char *setting_key(const char *field)
{
    return strcmp(field, "refresh") == 0             ? "refresh_mode"
           : strcmp(field, "tokens_max") == 0        ? "context_tokens"
           : strcmp(field, "prefill_chunk_max") == 0 ? "prefill_chunk"
                                                     : field;
}

static void write_settings(cli_json *j, const cli_run *run)
{
    const kvf_cache_config *c =
        run->machine->cache ? kvf_cache_settings(run->machine->cache) : &run->machine->config;
    const kvf_setting *setting;
    cli_json_object(j, "settings");
    for (uint32_t i = 0; (setting = kvf_cache_setting(i)) != NULL; i++)
        cli_json_setting(j, setting_key(setting->name), setting, c);
    cli_json_text(j, "device",
                  kvf_runtime_device(run->machine->runtime) == KVF_DEVICE_CUDA ? "cuda" : "host");
    cli_json_integer(j, "threads", kvf_runtime_threads(run->machine->runtime));
    for (uint32_t i = 0; (setting = cli_sampling_setting(i)) != NULL; i++)
        cli_json_setting(j, setting->name, setting, &run->in->options.sampling);
    cli_json_end(j, '}');
}

static void write_batch(cli_json *j, const cli_run *run)
{
    const cli_batch *b = &run->batch;
    cli_json_object(j, "batch");
    cli_json_integer(j, "prompts", run->in->jobs.count);
    cli_json_integer(j, "answers", run->in->jobs.answers);
    cli_json_integer(j, "ended", b->answers);
    cli_json_integer(j, "rows", run->machine->rows);
    cli_json_real(j, "rows_at_once", rows_at_once(run));
    cli_json_real(j, "tokens_per_second", ratio((double)b->generated, b->ms / 1e3));
    cli_json_end(j, '}');
}

static const char *stop_name(const cli_run *run, const cli_answer *answer)
{
    const kvf_stop stop = answer ? answer->stop : KVF_STOP_LENGTH;
    if (answer ? answer->interrupted : run->interrupted)
        return "interrupted";
    if (stop == KVF_STOP_CALLER)
        return run->output_failed ? "output" : "text";
    return stop == KVF_STOP_EOS ? "eos" : "length";
}

static void write_answers(cli_json *j, const cli_run *run)
{
    cli_json_array(j, "questions");
    for (uint32_t i = 0; i < run->answers.count; i++) {
        const cli_answer *a = &run->answers.of[i];
        step_times t = times_of(run->steps.ms + a->first_step, a->steps);
        cli_json_object(j, NULL);
        cli_json_integer(j, "prompt_tokens", a->prompt_tokens);
        cli_json_integer(j, "generated_tokens", a->generated);
        cli_json_real(j, "ttft_ms", a->first_ms);
        cli_json_integer(j, "decode_steps", a->steps);
        write_times(j, "tpot_ms", &t);
        write_counters(j, run, &a->stats);
        cli_json_end(j, '}');
    }
    cli_json_end(j, ']');
}

static void write_losses(cli_json *j, const cli_run *run)
{
    cli_json_real(j, "loss", mean_loss(&run->scored));
    cli_json_array(j, "tokens");
    for (uint32_t i = 0; i < run->scored.count; i++) {
        cli_json_object(j, NULL);
        kvf_text text = {0};
        cli_json_integer(j, "id", run->in->text.ids[i]);
        if (kvf_tokenizer_decode(run->in->tokenizer, &run->in->text.ids[i], 1, false, &text,
                                 NULL) == KVF_OK &&
            text.bytes)
            cli_json_bytes(j, "text", text.bytes, text.size);
        kvf_text_free(&text);
        cli_json_bool(j, "likeliest", run->scored.likeliest[i]);
        cli_json_real(j, "loss", (double)run->scored.losses[i]);
        cli_json_end(j, '}');
    }
    cli_json_end(j, ']');
}

/* Whether a step keeps its time as the context grows. */
static void write_pace(cli_json *j, const cli_steps *steps)
{
    cli_json_array(j, "tpot_ms_by_1000");
    for (uint32_t first = 0; first + PACE_STEPS <= steps->count; first += PACE_STEPS)
        cli_json_real(j, NULL, times_of(steps->ms + first, PACE_STEPS).p50);
    cli_json_end(j, ']');
}

static void write_all(cli_json *j, const cli_report *report)
{
    const cli_run *run = report->run;
    kvf_stats s = {0};
    if (run->machine->cache) /* which a run that was interrupted early does not have */
        kvf_cache_stats(run->machine->cache, &s);
    step_times t = token_times(run);
    const cli_answer *last = run->answers.count ? &run->answers.of[run->answers.count - 1] : NULL;
    cli_json_object(j, NULL);
    cli_json_text(j, "kvferry", kvf_version());
    cli_json_text(j, "model", run->in->options.model);
    cli_json_text(j, "family", run->in->model.architecture->family);
    cli_json_integer(j, "prompt_tokens",
                     run->in->options.prompts_file ? run->in->jobs.ids.count
                                                   : run->in->prompt.count);
    if (run->in->loaded.tokens) {
        cli_json_integer(j, "loaded_tokens", run->in->loaded.tokens);
        cli_json_real(j, "restore_ms", run->restore_ms);
    }
    cli_json_integer(j, "prefilled_tokens", run->prefilled);
    if (run->in->options.text_file)
        cli_json_integer(j, "scored_tokens", run->scored.count);
    else if (run->in->given.count)
        cli_json_integer(j, "scored_tokens", run->batch.generated);
    else
        cli_json_integer(j, "generated_tokens", generated_tokens(run));
    cli_json_integer(j, "decode_steps", run->steps.count);
    if (run->in->options.draft_tokens) {
        cli_json_integer(j, "drafted_tokens", run->drafted);
        cli_json_integer(j, "accepted_tokens", run->accepted);
    }
    if (run->machine->rows)
        write_batch(j, run);
    if (run->in->given.count)
        cli_rescore_write_all(j, run);
    cli_json_text(j, "stop", stop_name(run, last));
    cli_json_real(j, "load_ms", report->load_ms);
    cli_json_real(j, "prefill_ms", run->prefill_ms);
    cli_json_real(j, "ttft_ms", first_token_ms(run));
    write_times(j, "tpot_ms", &t);
    write_pace(j, &run->steps);
    write_counters(j, run, &s);
    write_totals(j, &s);
    if (run->machine->cache)
        write_layers(j, run);
    write_memory(j, run);
    cli_run_prune_write(j, run);
    write_settings(j, run);
    if (run->in->options.ask_file)
        write_answers(j, run);
    if (run->in->options.text_file)
        write_losses(j, run);
    cli_json_end(j, '}');
}

bool cli_report_print_score(const cli_run *run)
{
    cli_json j = {0};
    cli_json_object(&j, NULL);
    cli_json_real(&j, "loss", mean_loss(&run->scored));
    cli_json_integer(&j, "scored_tokens", run->scored.count);
    cli_json_integer(&j, "prompt_tokens", run->in->prompt.count);
    write_counters(&j, run, &run->answers.of[0].stats);
    cli_json_end(&j, '}');
    const bool done = cli_json_print(&j);
    cli_json_free(&j);
    return done;
}

bool cli_report_write(cli_report *report)
{
    if (!report->run->in->options.stats)
        return true;
    cli_json j = {0};
    write_all(&j, report);
    cli_json_end(&j, '\n');
    const bool done = cli_json_write(&j, &report->stats, stderr);
    cli_json_free(&j);
    return done;
}
