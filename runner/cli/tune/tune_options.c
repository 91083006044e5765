/* SPDX-License-Identifier: Apache-2.0 */

/* The command line of `kvferry tune`. Settings of pruning are the options of `kvferry run`. */

#include "tune.h"

#include <stdlib.h>
#include <string.h>

#include "common/text.h"

/* "4..15", or one layer. */
static bool take_layers(const cli_option *option, const char *text, void *at)
{
    cli_tune_options *o = at;
    char *end = NULL;
    unsigned long long first = kvf_is_digit(*text) ? strtoull(text, &end, 10) : 0;
    unsigned long long last = first;
    if (end && strncmp(end, "..", 2) == 0 && kvf_is_digit(end[2]))
        last = strtoull(end + 2, &end, 10);
    if (!end || *end || first > last || last > 1023)
        return cli_refuse(option, text, "the first and the last layer, such as 4..15");
    o->layer_first = (uint32_t)first;
    o->layer_last = (uint32_t)last;
    return o->are_layers_given = true;
}

static bool take_text(const cli_option *option, const char *text, void *at)
{
    cli_tune_options *o = at;
    (void)option;
    if (o->text_count < TUNE_TEXTS_MAX) {
        o->texts[o->text_count++] = text;
        return true;
    }
    fprintf(stderr, "kvferry: --text is given more than %u times; join some files\n",
            TUNE_TEXTS_MAX);
    return false;
}

static const char *const methods[] = {"fastkv", "structkv", "both", "asl", NULL};

#define FIELD(field) CLI_FIELD(cli_tune_options, field)
#define TEXT         KVF_SETTING_TEXT

static const cli_option rows[] = {
    {.is = {"model", TEXT, FIELD(model),
            .meaning = "Hugging Face directory (config.json, tokenizer.json, *.safetensors), "
                       "or GGUF file"},
     .argument = "DIR"},
    {.is = {"text", TEXT, .meaning = "UTF-8 text such as the model will read; may be repeated"},
     .absent = "",
     .take = take_text},
    {.is = {"method", KVF_SETTING_NAME, FIELD(method), .high = 3, .names = methods,
            .meaning = "policies to find a layer for (asl: its first layer and threshold); both = "
                       "fastkv and structkv"}},
    {.is = {"layers", TEXT, .meaning = "layers that may be chosen, from 0"},
     .argument = "A..B",
     .absent = "all but the last; with --questions 0, 0 to half depth",
     .take = take_layers},
    {.is = {"questions", KVF_SETTING_WHOLE, FIELD(questions), .low = 0, .high = 4096,
            .meaning = "lines to hide in the text and to ask for; 0 = measure hidden states and "
                       "attention instead, as the papers do"}},
    {.is = {"asked", KVF_SETTING_NAME, FIELD(asked), .high = 1, .names = cli_asked_names,
            .meaning = "where they are asked: at the end of the prompt, where the window knows "
                       "the question, or after the text was pruned, as of a document"}},
    {.is = {"goal", KVF_SETTING_SHARE, FIELD(goal), .high = 1,
            .meaning = "share of full attention's answers to keep"}},
    {.is = {"hide", TEXT, FIELD(lines_file),
            .meaning = "lines to hide instead of numbers of cities: LINE, QUESTION and ANSWER, "
                       "separated by tabs"}},
    {.is = {"samples", KVF_SETTING_WHOLE, FIELD(samples), .low = 1, .high = 4096,
            .meaning = "pieces of the text to measure on; in fewer pieces more lines compete"}},
    {.is = {"tokens", KVF_SETTING_WHOLE, FIELD(tokens), .low = 16, .high = 1 << 24,
            .meaning = "tokens of a piece"}},
    {.is = {"out", TEXT, FIELD(out),
            .meaning = "write the result for run --prune-config, or with --heads for "
                       "--head-mask; - = standard output"}},
};

static const cli_option of_heads[] = {
    {.is = {"heads", KVF_SETTING_SWITCH, FIELD(heads),
            .meaning = "find hot heads instead: those that need what they choose"}},
    {.is = {"hot-share", KVF_SETTING_SHARE, FIELD(hot_share), .high = 1,
            .meaning = "share of hot heads; the others are coarse"},
     .absent = "a third"},
};
static const cli_spelling heads_cache[] = {{"pages", NULL, CLI_PLAIN, NULL}, {0}};

static bool is_given(const cli_command *c, const char *name)
{
    return cli_option_find(c, name)->given;
}

static const char *problem_of_heads(const cli_command *c, const cli_tune_options *o)
{
    if (!o->heads)
        return is_given(c, "hot-share") ? "--hot-share needs --heads"
               : is_given(c, "pages")   ? "--pages needs --heads"
                                        : NULL;
    if (is_given(c, "method") || is_given(c, "layers") || is_given(c, "goal") ||
        is_given(c, "asked") || o->prune.values.given)
        return "--heads looks at all heads of all layers; leave --method, --layers, --goal, "
               "--asked and settings of pruning out";
    if (o->runtime.device == KVF_DEVICE_CUDA)
        return "--heads measures on the host device; leave --device out";
    return NULL;
}

static bool check_together(const cli_command *c, const cli_tune_options *o)
{
    uint32_t known = 0;
    for (uint32_t m = 0; m < CLI_METHODS; m++)
        known |= o->wants[m] ? cli_settings_of(cli_method_names[m]) : 0;
    const kvf_setting *stray = cli_settings_stray(&o->prune.values, known);
    const char *problem = problem_of_heads(c, o);
    if (!o->model)
        problem = "--model DIR is needed";
    else if (o->text_count == 0)
        problem = "--text FILE is needed: text such as the model will read";
    else if (o->are_layers_given && !o->wants[CLI_FASTKV] && o->questions == 0)
        problem = "without questions --layers is for fastkv; others look at all layers";
    else if (o->lines_file && o->questions == 0)
        problem = "--hide needs --questions of at least 1";
    else if (o->asked != CLI_ASKED_END && o->questions == 0)
        problem = "--asked needs --questions of at least 1";
    if (problem)
        fprintf(stderr, "kvferry: %s; see kvferry tune --help\n", problem);
    else if (stray)
        fprintf(stderr, "kvferry: %s means nothing to the chosen method; leave it out\n",
                stray->name);
    return !problem && !stray;
}

static void set_defaults(void *options)
{
    cli_tune_options *o = options;
    *o = (cli_tune_options){.samples = 8,
                            .tokens = 2048,
                            .method = 2,
                            .questions = 16,
                            .goal = 0.95,
                            .hot_share = 1.0 / 3};
    kvf_cache_config_init(&o->cache);
    kvf_runtime_config_init(&o->runtime);
    cli_prune_options_init(&o->prune);
}

int cli_tune_options_parse(int argc, char **argv, cli_command *c, cli_tune_options *out)
{
    c->name = "tune";
    c->usage =
        "usage: kvferry tune --model DIR --text FILE... [OPTION...]\n\n"
        "Find how to prune a model. Lines are hidden in the text and asked for; the layer and the "
        "shares\nare the cheapest that keep 95% of full attention's answers.\nWith --questions 0, "
        "as the papers do: after which layer FastKV "
        "changes the last hidden state least,\nat which layer StructKV's attention turns,\nor from "
        "where on, and how far, ASL's relative "
        "variance of ranks falls.\n"
        "With --heads find hot heads instead, for --head-mask: those whose output changes most "
        "when "
        "they\nattend to first and newest tokens only, over the tokens of answers, or with "
        "--questions 0 over text.";
    c->notes = "A setting takes one prefill per question (--asked after: per piece of text), or "
               "less where "
               "answers\nare lost; a policy has at most about thirty. With --questions 0 the model "
               "runs once per piece of text for "
               "structkv and asl, "
               "and once\nmore per layer for fastkv. With --heads each piece is read once.\n";
    c->stray = "text is given with --text";
    c->defaults = set_defaults;
    cli_heading(c, "Measurement:");
    cli_add(c, rows, sizeof rows / sizeof *rows, 0);
    cli_heading(c, "Hot heads:");
    cli_add(c, of_heads, sizeof of_heads / sizeof *of_heads, 0);
    cli_add_settings(c, &(cli_settings){.at = kvf_cache_setting,
                                        .base = offsetof(cli_tune_options, cache),
                                        .spellings = heads_cache,
                                        .only = true});
    cli_heading(c, "Settings, as of kvferry run:");
    cli_prune_add_found_with(c, offsetof(cli_tune_options, prune));
    cli_add_runtime(c, offsetof(cli_tune_options, runtime));
    cli_add_cublas(c, offsetof(cli_tune_options, cublas));
    const int parsed = cli_parse(c, argc, argv, out);
    out->wants[CLI_FASTKV] = !out->heads && (out->method == 0 || out->method == 2);
    out->wants[CLI_STRUCTKV] = !out->heads && (out->method == 1 || out->method == 2);
    out->wants[CLI_ASL] = !out->heads && out->method == 3;
    if (parsed >= 0)
        return parsed;
    if (!check_together(c, out))
        return 2;
    if (out->heads)
        out->runtime.device = KVF_DEVICE_HOST;
    return -1;
}
