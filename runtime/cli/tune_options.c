/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The command line of `kvferry tune`. Settings of pruning are the options of `kvferry run`.
 *
 * Invariant: every row of the table has its case in take().
 */

#include "tune.h"

#include <ctype.h>
#include <getopt.h>
#include <stdlib.h>
#include <string.h>

enum option_id {
    OPT_MODEL = 256,
    OPT_TEXT,
    OPT_METHOD,
    OPT_LAYERS,
    OPT_SAMPLES,
    OPT_TOKENS,
    OPT_OUT,
    OPT_PLOT,
    OPT_DEVICE,
    OPT_ORDINAL,
    OPT_THREADS,
    OPT_UNPINNED,
    OPT_HELP,
};

static const cli_option rows[] = {
    {"model", OPT_MODEL, "DIR",
     "Hugging Face directory: config.json, tokenizer.json, *.safetensors"},
    {"text", OPT_TEXT, "FILE", "UTF-8 text such as the model will read; may be repeated"},
    {"method", OPT_METHOD, "NAME", "fastkv, structkv or both; both"},
    {"layers", OPT_LAYERS, "A..B", "where fastkv may propagate, from 0; 0 to half depth"},
    {"samples", OPT_SAMPLES, "N", "pieces of the text to measure on; 8"},
    {"tokens", OPT_TOKENS, "N", "tokens of a piece; 2048"},
    {"out", OPT_OUT, "FILE", "write the result for run --prune-config; - = standard output"},
    {"plot", OPT_PLOT, "DIR", "draw the scores there, as SVG and PNG (needs gnuplot)"},
    {"device", OPT_DEVICE, "NAME", "auto, host or cuda"},
    {"device-ordinal", OPT_ORDINAL, "N", "which GPU; 0"},
    {"threads", OPT_THREADS, "N", "compute threads; one per usable core"},
    {"allow-unpinned", OPT_UNPINNED, NULL, "run on pageable memory where pinning fails"},
    {"help", OPT_HELP, NULL, "this text"},
};

#define OWN_COUNT   (sizeof rows / sizeof *rows)
#define SHARED_MAX  8u
#define OPTIONS_MAX (OWN_COUNT + SHARED_MAX + 1)

static const cli_named device_names[] = {
    {"auto", KVF_DEVICE_AUTO}, {"host", KVF_DEVICE_HOST}, {"cuda", KVF_DEVICE_CUDA}, {NULL, 0}};
static const cli_named method_names[] = {{"fastkv", 1}, {"structkv", 2}, {"both", 3}, {NULL, 0}};

/* The options of run that are settings which a layer is found with. */
static bool is_shared(const cli_option *row)
{
    static const char *const names[] = {"propagate", "prune-window", "pool", "prune-set"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strcmp(row->name, names[i]) == 0)
            return true;
    return false;
}

/* All rows of this command, its own first. @return how many */
static size_t collect(const cli_option *out[OPTIONS_MAX])
{
    size_t count = 0, shared;
    const cli_option *others = cli_prune_rows(&shared);
    for (size_t i = 0; i < OWN_COUNT; i++)
        out[count++] = &rows[i];
    for (size_t i = 0; i < shared && count < OPTIONS_MAX - 1; i++)
        if (is_shared(&others[i]))
            out[count++] = &others[i];
    return count;
}

/* "4..15", or one layer. */
static bool parse_layers(const cli_option *row, const char *text, cli_tune_options *o)
{
    char *end = NULL;
    unsigned long long first = isdigit((unsigned char)*text) ? strtoull(text, &end, 10) : 0;
    unsigned long long last = first;
    if (end && strncmp(end, "..", 2) == 0 && isdigit((unsigned char)end[2]))
        last = strtoull(end + 2, &end, 10);
    if (!end || *end || first > last || last > 1023) {
        fprintf(stderr, "kvferry: --%s is '%s'; give the first and the last layer, such as 4..15\n",
                row->name, text);
        return false;
    }
    o->layer_first = (uint32_t)first;
    o->layer_last = (uint32_t)last;
    return o->are_layers_given = true;
}

static bool take_own(const cli_option *row, const char *text, cli_tune_options *o)
{
    int value = 0;
    switch (row->id) {
    case OPT_MODEL:
        o->model = text;
        return true;
    case OPT_TEXT:
        if (o->text_count < TUNE_TEXTS_MAX) {
            o->texts[o->text_count++] = text;
            return true;
        }
        fprintf(stderr, "kvferry: --text is given more than %u times; join some files\n",
                TUNE_TEXTS_MAX);
        return false;
    case OPT_METHOD:
        if (!cli_option_name(row, text, method_names, &value))
            return false;
        o->fastkv = (value & 1) != 0;
        o->structkv = (value & 2) != 0;
        return true;
    case OPT_LAYERS:
        return parse_layers(row, text, o);
    case OPT_SAMPLES:
        return cli_option_u32(row, text, 1, 4096, &o->samples);
    case OPT_TOKENS:
        return cli_option_u32(row, text, 16, 1u << 24, &o->tokens);
    case OPT_OUT:
        o->out = text;
        return true;
    case OPT_PLOT:
        o->plot = text;
        return true;
    case OPT_DEVICE:
        if (!cli_option_name(row, text, device_names, &value))
            return false;
        o->runtime.device = (kvf_device_kind)value;
        return true;
    case OPT_ORDINAL:
        return cli_option_u32(row, text, 0, 1024, &o->runtime.device_ordinal);
    case OPT_THREADS:
        return cli_option_u32(row, text, 1, 1024, &o->runtime.threads);
    case OPT_UNPINNED:
        o->runtime.allow_unpinned = 1;
        return true;
    default:
        return o->help = true;
    }
}

static bool unknown_option(const char *word, const cli_option *const *all, size_t count)
{
    const char *names[OPTIONS_MAX];
    char bare[64];
    for (size_t i = 0; i < count; i++)
        names[i] = all[i]->name;
    names[count] = NULL;
    snprintf(bare, sizeof bare, "%s", word + strspn(word, "-"));
    bare[strcspn(bare, "=")] = '\0';
    const char *near = cli_suggest(bare, names);
    fprintf(stderr, "kvferry: unknown option '%s'", word);
    fprintf(stderr, near ? "; did you mean --%s?\n" : "; see kvferry tune --help\n", near);
    return false;
}

static bool check_together(const cli_tune_options *o)
{
    const uint32_t known = (o->fastkv ? cli_settings_of("fastkv") : 0) |
                           (o->structkv ? cli_settings_of("structkv") : 0);
    const uint32_t stray = o->prune.values.given & ~known;
    const char *problem = NULL;
    if (!o->model)
        problem = "--model DIR is needed";
    else if (o->text_count == 0)
        problem = "--text FILE is needed: text such as the model will read";
    else if (o->are_layers_given && !o->fastkv)
        problem = "--layers is for fastkv; structkv looks at all layers";
    if (problem)
        fprintf(stderr, "kvferry: %s; see kvferry tune --help\n", problem);
    for (unsigned i = 0; !problem && i < SETTING_COUNT; i++)
        if (stray & SETTING_BIT(i)) {
            fprintf(stderr, "kvferry: %s means nothing to the chosen method; leave it out\n",
                    cli_setting_name((cli_setting)i));
            return false;
        }
    return problem == NULL;
}

bool cli_tune_options_parse(int argc, char **argv, cli_tune_options *out)
{
    const cli_option *all[OPTIONS_MAX];
    struct option table[OPTIONS_MAX] = {{0}};
    const size_t count = collect(all);
    for (size_t i = 0; i < count; i++)
        table[i] = (struct option){.name = all[i]->name,
                                   .has_arg = all[i]->argument ? required_argument : no_argument,
                                   .val = all[i]->id};
    *out = (cli_tune_options){.samples = 8, .tokens = 2048, .fastkv = true, .structkv = true};
    kvf_runtime_config_init(&out->runtime);
    cli_prune_options_init(&out->prune);
    opterr = 0;
    optind = 1;
    for (int id; (id = getopt_long(argc, argv, ":h", table, NULL)) != -1;) {
        const cli_option *row = NULL;
        if (id == '?')
            return unknown_option(argv[optind - 1], all, count);
        if (id == ':') {
            fprintf(stderr, "kvferry: %s needs a value; see kvferry tune --help\n",
                    argv[optind - 1]);
            return false;
        }
        for (size_t i = 0; i < count; i++)
            if (all[i]->id == (id == 'h' ? (int)OPT_HELP : id))
                row = all[i];
        if (!(row->id >= CLI_PRUNE_FIRST ? cli_prune_take(row, optarg, &out->prune)
                                         : take_own(row, optarg, out)))
            return false;
    }
    if (out->help)
        return true;
    if (optind < argc) {
        fprintf(stderr, "kvferry: '%s' belongs to no option; text is given with --text\n",
                argv[optind]);
        return false;
    }
    return check_together(out);
}

void cli_tune_help(FILE *file)
{
    const cli_option *all[OPTIONS_MAX];
    const size_t count = collect(all);
    fputs("usage: kvferry tune --model DIR --text FILE... [OPTION...]\n\n"
          "Find where to prune a model: after which layer FastKV may propagate fewer tokens with "
          "the\nleast change of the last hidden state, and at which layer StructKV's attention "
          "turns.\n\n",
          file);
    for (size_t i = 0; i < count; i++) {
        char left[48];
        if (i == OWN_COUNT)
            fputs("\nSettings, as of kvferry run:\n\n", file);
        snprintf(left, sizeof left, "--%s %s", all[i]->name,
                 all[i]->argument ? all[i]->argument : "");
        fprintf(file, "  %-24s %s\n", left, all[i]->help);
    }
    fputs("\nThe model runs once per piece of text for structkv, and once more per layer for "
          "fastkv.\n\nExit status: 0 done, 1 something failed, 2 wrong usage, 130 interrupted.\n",
          file);
}
