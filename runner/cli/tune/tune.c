/* SPDX-License-Identifier: Apache-2.0 */

/*
 * `kvferry tune`: opens everything in the order in which it can fail, cheapest first, measures,
 * writes.
 *
 * It knows what depends on what. Invariant: whatever was opened is closed on every path, in
 * reverse; the file of --out is complete or as it was.
 */

#include "tune.h"

#include "commands.h"
#include "head_mask.h"
#include "interrupt.h"
#include "run_machine.h"

#include <stdlib.h>
#include <string.h>

/* The layers that are tried; half depth is where the published layers are. */
static kvf_status choose_layers(cli_tune *tune, kvf_error *error)
{
    cli_tune_options *o = &tune->options;
    const uint32_t layers = tune->model.layers;
    if (!o->are_layers_given && o->questions > 0)
        o->layer_last = layers < 2 ? 0 : layers - 2;
    else if (!o->are_layers_given)
        o->layer_last = layers < 2 ? 0 : layers / 2 - 1;
    if (o->layer_last < layers)
        return KVF_OK;
    return model_fail(error, KVF_INVALID,
                      "--layers ends at %u and the model has layers 0 to %u; give less",
                      o->layer_last, layers - 1);
}

static kvf_status check_method(const cli_tune *tune, const char *policy, kvf_error *error)
{
    kvf_prune_config config;
    const kvf_prune_shape shape = cli_prune_shape(&tune->model, tune->tuning.tokens);
    cli_tune_config(tune, policy, &config);
    return kvf_prune_config_check(&config, &shape, error);
}

static kvf_status open_input(cli_tune *tune, kvf_error *error)
{
    const cli_tune_options *o = &tune->options;
    KVF_TRY(kvf_model_config_read(o->model, &tune->model, error));
    if (tune->model.window)
        return model_fail(
            error, KVF_UNSUPPORTED,
            "%.200s has layers with a window of %u tokens (sliding_window), which can neither be "
            "pruned nor get heads of other kinds; take a model without",
            o->model, tune->model.window);
    KVF_TRY(kvf_weights_open(o->model, &tune->weights, error));
    kvf_model_config_fit(&tune->model, tune->weights);
    if (tune->model.note[0])
        fprintf(stderr, "kvferry: %s\n", tune->model.note);
    if (!o->heads)
        KVF_TRY(choose_layers(tune, error));
    KVF_TRY(kvf_tokenizer_open(o->model, &tune->tokenizer, error));
    KVF_TRY(cli_tune_read(tune, error));
    if (o->questions > 0)
        KVF_TRY(cli_tune_hide(tune, error));
    tune->tuning.asked = o->asked;
    for (uint32_t m = 0; m < CLI_METHODS; m++)
        if (o->wants[m])
            KVF_TRY(check_method(tune, cli_method_names[m], error));
    return KVF_OK;
}

/* The largest window of the methods. */
static uint32_t window_of(const cli_tune *tune)
{
    kvf_prune_config config;
    uint32_t window = 0;
    for (uint32_t m = 0; m < CLI_METHODS; m++) {
        cli_tune_config(tune, cli_method_names[m], &config);
        window = config.settings.window > window ? config.settings.window : window;
    }
    return window;
}

static uint32_t longest_question(const cli_tune *tune)
{
    uint32_t longest = 0;
    for (uint32_t i = 0; i < tune->question_count; i++) {
        const uint32_t tokens = tune->questions[i].count - tune->questions[i].body;
        longest = tokens > longest ? tokens : longest;
    }
    return longest;
}

static kvf_status open_machine(cli_tune *tune, kvf_error *error)
{
    const uint32_t tokens = tune->tuning.tokens;
    kvf_cache_config config;
    KVF_TRY(kvf_runtime_open(&tune->options.runtime, &tune->runtime, error));
    kvf_transformer_options options = {.runtime = tune->runtime,
                                       .model = &tune->model,
                                       .weights = tune->weights,
                                       .prompt_max = tokens,
                                       .cublas = tune->options.cublas,
                                       .device_ordinal = tune->options.runtime.device_ordinal,
                                       .starts_late = !tune->options.runtime.early_starts};
    cli_transformer_fit(&options, tokens);
    kvf_cache_config_init(&config);
    kvf_transformer_geometry(&options, &config);
    config.tokens_max = tokens;
    if (tune->options.heads) {
        cli_tune_heads_cache(tune, &config);
    } else if (tune->options.questions > 0) {
        config.tokens_max += TUNE_ANSWER_TOKENS_MAX;
        config.select = KVF_SELECT_FULL;
    }
    if (tune->options.asked == CLI_ASKED_AFTER) {
        /* A piece, and a fork with a window, a question and an answer of its own, in blocks of 64
         * tokens at most. */
        config.sequences_max = 2;
        config.host_tokens_max = (uint64_t)config.tokens_max + longest_question(tune) +
                                 TUNE_ANSWER_TOKENS_MAX + config.local_tokens + 4u * 64u;
    }
    config.observe_window = tune->options.heads ? 0 : window_of(tune);
    KVF_TRY(cli_plan_make(&options, &config, &tune->plan, error));
    cli_note_widening(tune->weights);
    if (!cli_memory_plan_check(&tune->plan))
        return model_fail(error, KVF_OUT_OF_MEMORY, "give fewer --tokens");
    KVF_TRY(kvf_transformer_open(&options, &tune->transformer, error));
    KVF_TRY(kvf_transformer_cache_open(tune->transformer, &config, &tune->cache, error));
    return kvf_library_told(tune->runtime, kvf_stream_create(tune->runtime, &tune->stream), error);
}

static void close_tune(cli_tune *tune)
{
    cli_output_discard(&tune->output);
    if (tune->stream)
        (void)!kvf_stream_wait(tune->stream);
    if (tune->transformer)
        kvf_transformer_forget(tune->transformer);
    kvf_cache_close(tune->cache);
    kvf_transformer_close(tune->transformer);
    kvf_stream_destroy(tune->stream);
    kvf_runtime_close(tune->runtime);
    free(tune->questions);
    free(tune->pruned);
    free(tune->hidden);
    free(tune->sensitivity);
    free(tune->mask);
    free(tune->figures);
    kvf_token_ids_free(&tune->prompts);
    kvf_token_ids_free(&tune->pieces);
    kvf_tokenizer_close(tune->tokenizer);
    kvf_weights_close(tune->weights);
}

static bool has_result(const cli_tune *tune)
{
    bool is_found = tune->options.heads;
    for (uint32_t m = 0; m < CLI_METHODS; m++)
        is_found = is_found || tune->tuning.of[m].scores || tune->tuning.of[m].keeps;
    return is_found;
}

static kvf_status measure(cli_tune *tune, kvf_error *error)
{
    return tune->options.heads           ? cli_tune_heads(tune, error)
           : tune->options.questions > 0 ? cli_tune_search(tune, error)
                                         : cli_tune_measure(tune, error);
}

/* @return false after a message */
static bool write_result(cli_tune *tune)
{
    cli_json json = {0};
    if (tune->options.heads) {
        json.failed = kvf_head_mask_write(tune->mask, tune->model.layers, tune->model.kv_heads,
                                          &json.text, NULL) != KVF_OK;
    } else {
        cli_model_print_make(&tune->model, tune->weights, &tune->tuning.model);
        cli_prune_file_write(&json, &tune->tuning);
        cli_json_end(&json, '\n');
    }
    const bool written = cli_json_write(&json, &tune->output, stdout);
    cli_json_free(&json);
    return written;
}

/* @return exit status */
static int measure_and_report(cli_tune *tune, kvf_error *error)
{
    const cli_tune_options *o = &tune->options;
    const bool is_piped = o->out && strcmp(o->out, "-") == 0;
    if (measure(tune, error) != KVF_OK) {
        fprintf(stderr, "kvferry: %s\n", error->text);
        return 1;
    }
    if (tune->interrupted)
        return cli_interrupt_status();
    (o->heads ? cli_tune_heads_print : cli_tune_print)(tune, is_piped ? stderr : stdout);
    bool done = fflush(is_piped ? stderr : stdout) == 0;
    if (!done)
        perror("kvferry: standard output");
    if (o->out && !has_result(tune)) {
        fprintf(stderr, "kvferry: no policy keeps enough, so nothing is written to %s\n", o->out);
        return 1;
    }
    if (o->out)
        done = write_result(tune) && done;
    return done ? 0 : 1;
}

int cli_tune_main(int argc, char **argv)
{
    cli_tune tune = {0};
    kvf_error error = {0};
    char calibration[CLI_CALIBRATION_BYTES];
    const int parsed = cli_tune_options_parse(argc, argv, &tune.command, &tune.options);
    if (parsed >= 0)
        return parsed;
    const char *out = tune.options.out;
    tune.options.runtime.log = cli_log_line;
    cli_calibration_choose(&tune.options.runtime, calibration);
    cli_interrupt_watch();
    int result = 1;
    if (open_input(&tune, &error) != KVF_OK || open_machine(&tune, &error) != KVF_OK)
        cli_complain(&tune.command, error.text);
    else if (!out || strcmp(out, "-") == 0 || cli_output_open(&tune.output, out))
        result = measure_and_report(&tune, &error);
    close_tune(&tune);
    return result;
}
