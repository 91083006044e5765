/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Parses `kvferry run` with getopt_long from one table, which the help is printed from too.
 *
 * It knows the table. Invariant: every row of the table has its case in take().
 */

#include "options.h"

#include "option_values.h"

#include <getopt.h>
#include <string.h>

#define OPTIONS_MAX 80u

enum option_id {
    OPT_MODEL = 256,
    OPT_PROMPT,
    OPT_PROMPT_FILE,
    OPT_TOKEN_IDS,
    OPT_ASK,
    OPT_TOKENS,
    OPT_CONTEXT,
    OPT_CHAT,
    OPT_IGNORE_EOS,
    OPT_BUDGET,
    OPT_PAGE_SIZE,
    OPT_LOCAL,
    OPT_SINK,
    OPT_STATIC_RATIO,
    OPT_REFRESH,
    OPT_REFRESH_MODE,
    OPT_SELECT,
    OPT_RESTRUCTURE,
    OPT_TRANSFER,
    OPT_SLOTS,
    OPT_DIGEST,
    OPT_SUB_DIGESTS,
    OPT_GROUP_REDUCE,
    OPT_SPECULATE,
    OPT_SPECULATE_PAGES,
    OPT_DEVICE,
    OPT_DEVICE_ORDINAL,
    OPT_CALIBRATION,
    OPT_THREADS,
    OPT_ALLOW_UNPINNED,
    OPT_TEMPERATURE,
    OPT_TOP_P,
    OPT_TOP_K,
    OPT_SEED,
    OPT_STATS,
    OPT_VERIFY,
    OPT_EMIT_IDS,
    OPT_DUMP_LOGITS,
    OPT_DRY_RUN,
    OPT_HELP,
};

static const cli_option rows[] = {
    {"model", OPT_MODEL, "DIR",
     "Hugging Face directory: config.json, tokenizer.json, *.safetensors"},
    {"prompt", OPT_PROMPT, "TEXT", "the prompt; without any, standard input is read"},
    {"prompt-file", OPT_PROMPT_FILE, "FILE", "the prompt, as UTF-8 text"},
    {"token-ids", OPT_TOKEN_IDS, "FILE", "the prompt as numbers, apart by spaces, commas or lines"},
    {"ask", OPT_ASK, "FILE", "one question per line, each answered on its own after the prompt"},
    {"tokens", OPT_TOKENS, "N", "tokens to generate, also -n; 128"},
    {"context", OPT_CONTEXT, "N", "tokens to reserve memory for; what prompt and -n need"},
    {"chat", OPT_CHAT, NULL, "the prompt is a message of a user: apply the chat format"},
    {"ignore-eos", OPT_IGNORE_EOS, NULL, "go on after an end token"},
    {"budget", OPT_BUDGET, "K", "tokens attended per KV head and step; 1024"},
    {"page-size", OPT_PAGE_SIZE, "P", "tokens of a page: 8, 16, 32 or 64; 32"},
    {"local", OPT_LOCAL, "W", "newest tokens that are always attended; 64"},
    {"sink", OPT_SINK, "N", "first tokens that are always attended; 4"},
    {"static-ratio", OPT_STATIC_RATIO, "R", "share of the static set, 0 to 1, or auto; 0.25"},
    {"refresh", OPT_REFRESH, "T", "steps between refreshes of the static set; 128"},
    {"refresh-mode", OPT_REFRESH_MODE, "NAME", "exact or resident"},
    {"select", OPT_SELECT, "NAME",
     "hybrid, full, static, dynamic, streaming, quest, arkvale or oracle"},
    {"restructure", OPT_RESTRUCTURE, "NAME", "logical or physical"},
    {"transfer", OPT_TRANSFER, "NAME", "auto, direct, gather, mapped, batch or each"},
    {"slots", OPT_SLOTS, "N", "pages per KV head on the device; twice the selected ones"},
    {"digest", OPT_DIGEST, "NAME", "minmax, cuboid-mean or mean"},
    {"sub-digests", OPT_SUB_DIGESTS, "N", "boxes per page: 1, 2 or 4; 1"},
    {"group-reduce", OPT_GROUP_REDUCE, "NAME", "mean-softmax, max or sum"},
    {"speculate", OPT_SPECULATE, "on|off", "bring pages that the next step may want; off"},
    {"speculate-pages", OPT_SPECULATE_PAGES, "N", "how many per KV head; a quarter of the chosen"},
    {"device", OPT_DEVICE, "NAME", "auto, host or cuda"},
    {"device-ordinal", OPT_DEVICE_ORDINAL, "N", "which GPU; 0"},
    {"calibration", OPT_CALIBRATION, "FILE",
     "keeps what was measured of the link; ~/.cache/kvferry/links, - = no file"},
    {"threads", OPT_THREADS, "N", "compute threads; one per usable core"},
    {"allow-unpinned", OPT_ALLOW_UNPINNED, NULL, "run on pageable memory where pinning fails"},
    {"temperature", OPT_TEMPERATURE, "X", "0 = always the likeliest token; 0"},
    {"top-p", OPT_TOP_P, "X", "draw from the likeliest tokens with this mass; 1"},
    {"top-k", OPT_TOP_K, "N", "draw from so many likeliest tokens; 0 = all"},
    {"seed", OPT_SEED, "N", "of the draws; 0"},
    {"stats", OPT_STATS, "FILE", "write statistics as JSON to FILE; json = to standard error"},
    {"verify", OPT_VERIFY, "dense[:N]", "every N-th step, attend densely too and report recall; 1"},
    {"emit-ids", OPT_EMIT_IDS, "FILE", "write the generated token ids, one per line"},
    {"dump-logits", OPT_DUMP_LOGITS, "FILE", "write logits as float32 [generated, vocab]"},
    {"dry-run", OPT_DRY_RUN, NULL, "print the memory plan and stop"},
    {"help", OPT_HELP, NULL, "this text"},
};

#define ROW_COUNT (sizeof rows / sizeof rows[0])

/* ---- names of settings ---- */

static const cli_named select_names[] = {{"hybrid", KVF_SELECT_HYBRID},
                                         {"full", KVF_SELECT_FULL},
                                         {"static", KVF_SELECT_STATIC},
                                         {"dynamic", KVF_SELECT_DYNAMIC},
                                         {"streaming", KVF_SELECT_STREAMING},
                                         {"quest", KVF_SELECT_QUEST},
                                         {"arkvale", KVF_SELECT_ARKVALE},
                                         {"oracle", KVF_SELECT_ORACLE},
                                         {NULL, 0}};
static const cli_named refresh_names[] = {
    {"exact", KVF_REFRESH_EXACT}, {"resident", KVF_REFRESH_RESIDENT}, {NULL, 0}};
static const cli_named restructure_names[] = {
    {"logical", KVF_RESTRUCTURE_LOGICAL}, {"physical", KVF_RESTRUCTURE_PHYSICAL}, {NULL, 0}};
static const cli_named transfer_names[] = {{"auto", KVF_TRANSFER_AUTO},
                                           {"direct", KVF_TRANSFER_DIRECT},
                                           {"gather", KVF_TRANSFER_GATHER},
                                           {"mapped", KVF_TRANSFER_MAPPED},
                                           {"batch", KVF_TRANSFER_BATCH},
                                           {"each", KVF_TRANSFER_EACH},
                                           {NULL, 0}};
static const cli_named digest_names[] = {{"minmax", KVF_DIGEST_MINMAX},
                                         {"cuboid-mean", KVF_DIGEST_CUBOID_MEAN},
                                         {"mean", KVF_DIGEST_MEAN},
                                         {NULL, 0}};
static const cli_named reduce_names[] = {{"mean-softmax", KVF_GROUP_MEAN_SOFTMAX},
                                         {"max", KVF_GROUP_MAX},
                                         {"sum", KVF_GROUP_SUM},
                                         {NULL, 0}};
static const cli_named device_names[] = {
    {"auto", KVF_DEVICE_AUTO}, {"host", KVF_DEVICE_HOST}, {"cuda", KVF_DEVICE_CUDA}, {NULL, 0}};
static const cli_named switch_names[] = {{"off", 0}, {"on", 1}, {NULL, 0}};
static const cli_named dtype_names[] = {
    {"bf16", KVF_BF16}, {"fp16", KVF_FP16}, {"fp32", KVF_FP32}, {NULL, 0}};

const char *cli_select_name(kvf_select value)
{
    return value == KVF_SELECT_CUSTOM ? "custom" : cli_name_of(select_names, (int)value);
}

const char *cli_digest_name(kvf_digest_kind value)
{
    return cli_name_of(digest_names, (int)value);
}

const char *cli_group_reduce_name(kvf_group_reduce value)
{
    return cli_name_of(reduce_names, (int)value);
}

const char *cli_refresh_name(kvf_refresh value)
{
    return cli_name_of(refresh_names, (int)value);
}

const char *cli_restructure_name(kvf_restructure value)
{
    return cli_name_of(restructure_names, (int)value);
}

const char *cli_transfer_name(kvf_transfer value)
{
    return cli_name_of(transfer_names, (int)value);
}

const char *cli_device_name(kvf_device_kind value)
{
    return cli_name_of(device_names, (int)value);
}

const char *cli_dtype_name(kvf_dtype value)
{
    return cli_name_of(dtype_names, (int)value);
}

/* ---- single values ---- */

static bool parse_ratio(const cli_option *row, const char *text, float *out)
{
    double value;
    if (strcmp(text, "auto") == 0) {
        *out = KVF_STATIC_RATIO_AUTO;
        return true;
    }
    if (!cli_option_real(row, text, 0.0, 1.0, &value))
        return false;
    *out = (float)value;
    return true;
}

static bool parse_verify(const cli_option *row, const char *text, uint32_t *out)
{
    if (strcmp(text, "dense") == 0) {
        *out = 1;
        return true;
    }
    if (strncmp(text, "dense:", 6) == 0)
        return cli_option_u32(row, text + 6, 1, UINT32_MAX, out);
    fprintf(stderr, "kvferry: --verify is '%s'; give dense or dense:N\n", text);
    return false;
}

static bool parse_page_size(const cli_option *row, const char *text, uint32_t *out)
{
    uint32_t value;
    if (!cli_option_u32(row, text, 1, UINT32_MAX, &value))
        return false;
    *out = value;
    if (value == 8 || value == 16 || value == 32 || value == 64)
        return true;
    fprintf(stderr, "kvferry: --page-size is %u; give 8, 16, 32 or 64\n", value);
    return false;
}

static bool parse_sub_digests(const cli_option *row, const char *text, uint32_t *out)
{
    if (!cli_option_u32(row, text, 1, 4, out))
        return false;
    if (*out != 3)
        return true;
    fputs("kvferry: --sub-digests is 3; give 1, 2 or 4\n", stderr);
    return false;
}

/* ---- all options ---- */

/* Options that shape the cache. @return -1 if the option is none of them, else whether it is fine
 */
static int take_cache(const cli_option *row, const char *text, kvf_cache_config *c)
{
    int value = 0;
    bool fine;
    switch (row->id) {
    case OPT_BUDGET:
        return cli_option_u32(row, text, 1, 1u << 30, &c->budget_tokens);
    case OPT_PAGE_SIZE:
        return parse_page_size(row, text, &c->page_size);
    case OPT_LOCAL:
        return cli_option_u32(row, text, 1, 1u << 20, &c->local_tokens);
    case OPT_SINK:
        return cli_option_u32(row, text, 0, 1u << 20, &c->sink_tokens);
    case OPT_STATIC_RATIO:
        return parse_ratio(row, text, &c->static_ratio);
    case OPT_REFRESH:
        return cli_option_u32(row, text, 1, UINT32_MAX, &c->refresh_interval);
    case OPT_SLOTS:
        return cli_option_u32(row, text, 1, 1u << 24, &c->slots);
    case OPT_SUB_DIGESTS:
        return parse_sub_digests(row, text, &c->sub_digests);
    case OPT_VERIFY:
        return parse_verify(row, text, &c->verify_interval);
    case OPT_REFRESH_MODE:
        fine = cli_option_name(row, text, refresh_names, &value);
        c->refresh = (kvf_refresh)value;
        return fine;
    case OPT_SELECT:
        fine = cli_option_name(row, text, select_names, &value);
        c->select = (kvf_select)value;
        return fine;
    case OPT_RESTRUCTURE:
        fine = cli_option_name(row, text, restructure_names, &value);
        c->restructure = (kvf_restructure)value;
        return fine;
    case OPT_TRANSFER:
        fine = cli_option_name(row, text, transfer_names, &value);
        c->transfer = (kvf_transfer)value;
        return fine;
    case OPT_SPECULATE:
        fine = cli_option_name(row, text, switch_names, &value);
        c->speculate = (uint32_t)value;
        return fine;
    case OPT_SPECULATE_PAGES:
        return cli_option_u32(row, text, 1, 1u << 24, &c->speculate_pages);
    case OPT_DIGEST:
        fine = cli_option_name(row, text, digest_names, &value);
        c->digest = (kvf_digest_kind)value;
        return fine;
    case OPT_GROUP_REDUCE:
        fine = cli_option_name(row, text, reduce_names, &value);
        c->group_reduce = (kvf_group_reduce)value;
        return fine;
    default:
        return -1;
    }
}

static bool take_text(const char **to, const char *text)
{
    *to = text;
    return true;
}

static bool take_flag(bool *to)
{
    *to = true;
    return true;
}

static bool take(const cli_option *row, const char *text, cli_run_options *o)
{
    int value = 0;
    int cache = take_cache(row, text, &o->cache);
    if (cache >= 0)
        return cache != 0;
    switch (row->id) {
    case OPT_MODEL:
        return take_text(&o->model, text);
    case OPT_PROMPT:
        return take_text(&o->prompt, text);
    case OPT_PROMPT_FILE:
        return take_text(&o->prompt_file, text);
    case OPT_TOKEN_IDS:
        return take_text(&o->token_ids_file, text);
    case OPT_ASK:
        return take_text(&o->ask_file, text);
    case OPT_STATS:
        return take_text(&o->stats, text);
    case OPT_EMIT_IDS:
        return take_text(&o->emit_ids_file, text);
    case OPT_DUMP_LOGITS:
        return take_text(&o->dump_logits_file, text);
    case OPT_TOKENS:
        return cli_option_u32(row, text, 0, 1u << 24, &o->tokens);
    case OPT_CONTEXT:
        return cli_option_u32(row, text, 1, 1u << 30, &o->context_tokens);
    case OPT_CHAT:
        return take_flag(&o->chat);
    case OPT_IGNORE_EOS:
        return take_flag(&o->ignore_eos);
    case OPT_DRY_RUN:
        return take_flag(&o->dry_run);
    case OPT_HELP:
        return take_flag(&o->help);
    case OPT_ALLOW_UNPINNED:
        o->runtime.allow_unpinned = 1;
        return true;
    case OPT_THREADS:
        return cli_option_u32(row, text, 1, 1024, &o->runtime.threads);
    case OPT_DEVICE:
        if (!cli_option_name(row, text, device_names, &value))
            return false;
        o->runtime.device = (kvf_device_kind)value;
        return true;
    case OPT_DEVICE_ORDINAL:
        return cli_option_u32(row, text, 0, 1024, &o->runtime.device_ordinal);
    case OPT_CALIBRATION:
        return take_text(&o->runtime.calibration_path, text);
    case OPT_TEMPERATURE:
        return cli_option_real(row, text, 0.0, 100.0, &o->sampling.temperature);
    case OPT_TOP_P:
        return cli_option_real(row, text, 1e-9, 1.0, &o->sampling.top_p);
    case OPT_TOP_K:
        return cli_option_u32(row, text, 0, UINT32_MAX, &o->sampling.top_k);
    case OPT_SEED:
        return cli_option_u64(row, text, 0, UINT64_MAX, &o->sampling.seed);
    default:
        return false;
    }
}

/* Rows of this file, then those of pruning. @return NULL after the last */
static const cli_option *row_at(size_t index)
{
    size_t count;
    const cli_option *others = cli_prune_rows(&count);
    if (index < ROW_COUNT)
        return &rows[index];
    return index - ROW_COUNT < count ? &others[index - ROW_COUNT] : NULL;
}

static bool unknown_option(const char *word)
{
    const char *names[OPTIONS_MAX];
    size_t count = 0;
    for (const cli_option *row; (row = row_at(count)) != NULL; count++)
        names[count] = row->name;
    names[count] = NULL;
    char bare[64];
    snprintf(bare, sizeof bare, "%s", word + strspn(word, "-"));
    bare[strcspn(bare, "=")] = '\0';
    const char *near = cli_suggest(bare, names);
    fprintf(stderr, "kvferry: unknown option '%s'", word);
    fprintf(stderr, near ? "; did you mean --%s?\n" : "; see kvferry run --help\n", near);
    return false;
}

/* What can be said without looking at the model. */
static bool check_together(const cli_run_options *o)
{
    int prompts = (o->prompt != NULL) + (o->prompt_file != NULL) + (o->token_ids_file != NULL);
    const char *problem = NULL;
    if (!o->model)
        problem = "--model DIR is needed";
    else if (prompts > 1)
        problem = "give only one of --prompt, --prompt-file and --token-ids";
    else if (o->chat && o->token_ids_file)
        problem = "--chat needs text, not --token-ids";
    else if (o->ask_file && o->chat)
        problem = "--ask continues plain text; leave --chat out";
    else if (o->ask_file && o->tokens == 0)
        problem = "--ask needs -n of at least 1";
    if (problem)
        fprintf(stderr, "kvferry: %s; see kvferry run --help\n", problem);
    return problem == NULL && cli_prune_check(&o->prune);
}

static void set_defaults(cli_run_options *o)
{
    *o = (cli_run_options){.tokens = 128, .sampling = {.top_p = 1.0}};
    kvf_runtime_config_init(&o->runtime);
    kvf_cache_config_init(&o->cache);
    cli_prune_options_init(&o->prune);
}

static const cli_option *row_of(int id)
{
    const cli_option *row = NULL;
    for (size_t i = 0; (row = row_at(i)) != NULL && row->id != id; i++)
        ;
    return row;
}

bool cli_run_options_parse(int argc, char **argv, cli_run_options *out)
{
    struct option table[OPTIONS_MAX] = {{0}};
    const cli_option *each;
    for (size_t i = 0; i + 1 < OPTIONS_MAX && (each = row_at(i)) != NULL; i++)
        table[i] = (struct option){.name = each->name,
                                   .has_arg = each->argument ? required_argument : no_argument,
                                   .val = each->id};
    set_defaults(out);
    opterr = 0;
    optind = 1;
    for (int id; (id = getopt_long(argc, argv, ":n:h", table, NULL)) != -1;) {
        if (id == '?')
            return unknown_option(argv[optind - 1]);
        if (id == ':') {
            fprintf(stderr, "kvferry: %s needs a value; see kvferry run --help\n",
                    argv[optind - 1]);
            return false;
        }
        const cli_option *row = row_of(id == 'n' ? OPT_TOKENS : id == 'h' ? OPT_HELP : id);
        if (!(row->id >= CLI_PRUNE_FIRST ? cli_prune_take(row, optarg, &out->prune)
                                         : take(row, optarg, out)))
            return false;
    }
    if (out->help || out->prune.wants_list)
        return true;
    if (optind < argc) {
        fprintf(stderr, "kvferry: '%s' belongs to no option; a prompt is given with --prompt\n",
                argv[optind]);
        return false;
    }
    return check_together(out);
}

void cli_run_help(FILE *file)
{
    fputs("usage: kvferry run --model DIR [OPTION...]\n\n"
          "Read a prompt, generate tokens. Tokens go to standard output, all else to standard "
          "error.\n\n",
          file);
    const cli_option *row;
    for (size_t i = 0; (row = row_at(i)) != NULL; i++) {
        char left[48];
        if (i == ROW_COUNT)
            fputs("\nPruning the prompt, and heads that only stream:\n\n", file);
        snprintf(left, sizeof left, "--%s %s", row->name, row->argument ? row->argument : "");
        fprintf(file, "  %-24s %s\n", left, row->help);
    }
    fputs("\nExit status: 0 done, 1 something failed, 2 wrong usage, 130 interrupted.\n", file);
}
