/* SPDX-License-Identifier: Apache-2.0 */

/* The command lines; see the header. */

#include "run_options.h"

#include "generate.h"
#include "logprobs.h"

#include <string.h>

#define FIELD(field) CLI_FIELD(cli_run_options, field)
#define TEXT         KVF_SETTING_TEXT
#define WHOLE        KVF_SETTING_WHOLE
#define SWITCH       KVF_SETTING_SWITCH
/* As many as a step takes: where drafts are wrong they become short by themselves. */
#define DRAFT_TOKENS "15"
/* The cache has a sequence more. */
#define BATCH_MAX    1024

#define EVERY "dense or dense:N, N at least 1"

static bool take_verify(const cli_option *option, const char *text, void *at)
{
    const char *every = strcmp(text, "dense") == 0 ? "1" : text + 6;
    if (strncmp(text, "dense:", 6) != 0 && strcmp(text, "dense") != 0)
        return cli_refuse(option, text, EVERY);
    return kvf_setting_parse(&option->is, every, at) || cli_refuse(option, text, EVERY);
}

static bool take_draft(const cli_option *option, const char *text, void *at)
{
    const char *most = "";
    if (strcmp(text, "ngram") == 0)
        most = DRAFT_TOKENS;
    else if (strncmp(text, "ngram:", 6) == 0)
        most = text + 6;
    return kvf_setting_parse(&option->is, most, at) ||
           cli_refuse(option, text, "ngram, or ngram:N with N from 1 to " DRAFT_TOKENS);
}

static bool take_stop(const cli_option *option, const char *text, void *at)
{
    cli_stop_texts *stop = (cli_stop_texts *)(void *)((char *)at + option->is.offset);
    if (!text[0])
        return cli_refuse(option, text, "a text that is not empty");
    if (stop->count == CLI_STOP_MAX)
        return cli_refuse(option, text, "it less often: 16 times at most");
    stop->texts[stop->count++] = text;
    return true;
}

/* Rows in the order of the help, each of the commands that have it. */
enum { OF_RUN = 1, OF_SCORE = 2, OF_BOTH = 3 };

typedef struct command_option {
    unsigned commands;
    cli_option option;
} command_option;

static const char *const extends[] = {"default", "sparse", "dense", NULL};

static const command_option of_input[] = {
    {OF_BOTH,
     {.is = {"model", TEXT, FIELD(model),
             .meaning = "Hugging Face directory (config.json, tokenizer.json, *.safetensors), "
                        "or GGUF file"},
      .argument = "DIR"}},
    {OF_BOTH,
     {.is = {"prompt", TEXT, FIELD(prompt), .meaning = "the prompt"},
      .argument = "TEXT",
      .absent = "read standard input"}},
    {OF_BOTH,
     {.is = {"prompt-file", TEXT, FIELD(prompt_file), .meaning = "the prompt, as UTF-8 text"}}},
    {OF_BOTH,
     {.is = {"token-ids", TEXT, FIELD(token_ids_file),
             .meaning = "the prompt as numbers, separated by spaces, commas or lines"}}},
    {OF_RUN,
     {.is = {"ask", TEXT, FIELD(ask_file),
             .meaning =
                 "one question per line, each answered on its own after the prompt; what prunes "
                 "the prompt does not know them. In a file *.jsonl a line is {\"prompt\": "
                 "\"...\"}"}}},
    {OF_SCORE,
     {.is = {"text", TEXT, FIELD(text_file), .meaning = "what follows the prompt, as UTF-8 text"},
      .argument = "FILE"}},
    {OF_SCORE,
     {.is = {"answers", TEXT, FIELD(answers_file),
             .meaning = "lines of JSON that kvferry run gave for these prompts: each answer is "
                        "scored again, densely unless --select or --preset is given, and compared "
                        "with its logprobs"},
      .argument = "FILE"}},
    {OF_BOTH,
     {.is = {"prompts", TEXT, FIELD(prompts_file),
             .meaning =
                 "many prompts, as lines of JSON: {\"prompt\": \"...\"} or {\"messages\": "
                 "[...]}, with id, system, tokens, seed, temperature, top_p, top_k, min_p and "
                 "repetition_penalty if wanted; answers are lines of JSON too, as they end"}}},
    {OF_RUN,
     {.is = {"samples", WHOLE, FIELD(samples), .low = 1, .high = 1 << 20,
             .meaning =
                 "answers to each prompt, as lines of JSON; answer i draws with the seed plus "
                 "i"},
      .absent = "one, as text"}},
    {OF_BOTH,
     {.is = {"batch", WHOLE, FIELD(batch), .low = 1, .high = BATCH_MAX,
             .meaning = "answers that are on their way at once"},
      .absent = "what memory has room for, 16 at most, 8 on a GPU"}},
    {OF_BOTH,
     {.is = {"memory", WHOLE, FIELD(memory_bytes), .low = 1, .high = 0x1p62,
             .meaning =
                 "bytes of keys and values of a batch on the host; an answer begins when there "
                 "is room for it"},
      .absent = "what the batch needs"}},
    {OF_BOTH,
     {.is = {"logprobs", WHOLE, FIELD(logprobs), .high = CLI_LIKELY_MAX,
             .meaning = "lines have the log-probability of each token, and of so many likeliest "
                        "ones beside it"},
      .absent = "none"}},
    {OF_RUN,
     {.is = {"tokens", WHOLE, FIELD(tokens), .high = 1 << 24, .meaning = "tokens to generate"},
      .letter = 'n'}},
    {OF_RUN,
     {.is = {"stop", TEXT, FIELD(stop), .meaning = "end the answer in front of it; several times"},
      .argument = "TEXT",
      .absent = "end tokens of the model and of its chat format",
      .take = take_stop}},
    {OF_RUN,
     {.is = {"ignore-eos", SWITCH, FIELD(ignore_eos), .meaning = "go on after an end token"}}},
    {OF_RUN,
     {.is = {"draft", WHOLE, FIELD(draft_tokens), .low = 1, .high = KVF_DRAFT_MAX,
             .meaning =
                 "guess up to N tokens by what followed when the newest ones came up before, "
                 "and check them in one step: the same answer, sooner where it quotes; N is "
                 "1 to 15, 15 if it is left out"},
      .argument = "ngram[:N]",
      .absent = "one token per step",
      .take = take_draft}},
    {OF_BOTH,
     {.is = {"context", WHOLE, FIELD(context_tokens), .low = 1, .high = 1 << 30,
             .meaning = "tokens to reserve memory for"},
      .absent = "what the prompt and what follows it need"}},
    {OF_RUN,
     {.is = {"save", TEXT, FIELD(save_file),
             .meaning = "keep the prefilled prompt in a file, while tokens are generated"}}},
    {OF_BOTH,
     {.is = {"load", TEXT, FIELD(load_file),
             .meaning = "do not prefill what a file of --save holds: the prompt begins with it, or "
                        "is it, if none is given; lines of --prompts go on from it"}}},
    {OF_BOTH,
     {.is = {"reselect", SWITCH, FIELD(reselect),
             .meaning = "take the tokens of --load also where they were saved under other settings "
                        "of the cache: a static set is then chosen anew, without the prompt's "
                        "queries"},
      .absent = "a file of other settings is refused"}},
    {OF_RUN,
     {.is = {"extend", KVF_SETTING_NAME, FIELD(extend), .names = extends,
             .meaning = "how tokens after those that the cache has are read: sparse = as steps, "
                        "up to 16 tokens in one, each of which selects; dense = as a prompt"},
      .absent = "sparse for questions of --ask, dense after --load"}},
};

static const char *const chat_formats[] = {"model", KVF_CHAT_FORMAT_LIST(CLI_CHAT_NAME) NULL};
static const char *const thinking[] = {"default", "on", "off", NULL};

static const command_option of_chat[] = {
    {OF_BOTH,
     {.is = {"chat", SWITCH, FIELD(chat.chat),
             .meaning = "the prompt is a message of a user, in the chat format of the model"}}},
    {OF_BOTH,
     {.is = {"messages", TEXT, FIELD(chat.messages_file),
             .meaning = "turns before the prompt, or with none all of them, as JSON: "
                        "[{\"role\": \"user\", \"content\": \"...\"}, ...]"}}},
    {OF_BOTH,
     {.is = {"system", TEXT, FIELD(chat.system), .meaning = "the system prompt"},
      .argument = "TEXT",
      .absent = "none"}},
    {OF_BOTH,
     {.is = {"thinking", KVF_SETTING_NAME, FIELD(chat.thinking), .names = thinking,
             .meaning = "whether a model that can think does"}}},
    {OF_BOTH,
     {.is = {"chat-format", KVF_SETTING_NAME, FIELD(chat.format), .names = chat_formats,
             .meaning = "model = by the markers in its own template"}}},
};

#define SAMPLING(field) CLI_FIELD(kvf_sampling_config, field)

static const kvf_setting sampling[] = {
    {"temperature", KVF_SETTING_REAL, SAMPLING(temperature), .high = 100,
     .meaning = "divide logits by it; 0 = always take the likeliest token"},
    {"top_p", KVF_SETTING_SHARE, SAMPLING(top_p), .high = 1,
     .meaning = "draw from the likeliest tokens with this mass"},
    {"top_k", WHOLE, SAMPLING(top_k), .high = UINT32_MAX,
     .meaning = "draw from so many likeliest tokens; 0 = all"},
    {"min_p", KVF_SETTING_REAL, SAMPLING(min_p), .high = 1,
     .meaning = "draw no token below this share of the likeliest one's probability"},
    {"repetition_penalty", KVF_SETTING_REAL, SAMPLING(repetition_penalty), .low = 0.01, .high = 100,
     .meaning = "divide the logits of tokens that the prompt or the answer has by it, multiply "
                "negative ones; 1 = none"},
    {"seed", WHOLE, SAMPLING(seed), .high = 0x1p64, .meaning = "seed of the draws"},
};

const kvf_setting *cli_sampling_setting(uint32_t index)
{
    return index < sizeof sampling / sizeof *sampling ? &sampling[index] : NULL;
}

static const command_option of_output[] = {
    {OF_BOTH,
     {.is = {"verify", WHOLE, FIELD(cache.verify_interval), .low = 1, .high = UINT32_MAX,
             .meaning =
                 "every N-th step, attend densely too and report recall; dense = every step"},
      .argument = "dense[:N]",
      .absent = "never",
      .take = take_verify}},
    {OF_BOTH,
     {.is = {"stats", TEXT, FIELD(stats),
             .meaning = "write statistics as JSON; json = to standard error"}}},
    {OF_RUN,
     {.is = {"emit-ids", TEXT, FIELD(emit_ids_file),
             .meaning = "write the generated token ids, one per line"}}},
    {OF_RUN,
     {.is = {"dump-logits", TEXT, FIELD(dump_logits_file),
             .meaning = "write logits as float32 [generated, vocab]"}}},
    {OF_BOTH,
     {.is = {"dry-run", SWITCH, FIELD(dry_run),
             .meaning =
                 "print the memory plan, and how many tokens each of --prompts has, and stop"}}},
};

static const command_option of_completing[] = {
    {OF_RUN,
     {.is =
          {"complete-share", KVF_SETTING_REAL, FIELD(complete_share), .high = 1,
           .meaning =
               "share of the time of an answer for what --retention complete has left; 0 = all of "
               "it follows the first answer"},
      .argument = "R"}},
};

/* Options of a batch, and those that do not go with one. */
static const char *batch_problem(const cli_command *command, const cli_run_options *o)
{
    const bool has_prompt = o->prompt || o->prompt_file || o->token_ids_file;
    if (!o->prompts_file && !o->samples && !o->answers_file) {
        if (cli_option_find(command, "batch")->given || o->memory_bytes ||
            cli_option_find(command, "logprobs")->given)
            return "--batch, --memory and --logprobs belong to --prompts, --samples or --answers";
        return NULL;
    }
    if (o->text_file)
        return "--text is scored after one prompt; leave --prompts and --answers out";
    if (o->prompts_file && (has_prompt || o->chat.messages_file))
        return "--prompts has the prompts; leave --prompt, --prompt-file, --token-ids and "
               "--messages out";
    if (o->ask_file)
        return "--ask has one answer to each question; leave --prompts and --samples out";
    if (o->extend)
        return "--extend is of one answer at a time; leave --prompts and --samples out";
    if (o->emit_ids_file || o->dump_logits_file)
        return "lines of a batch have the ids; leave --emit-ids and --dump-logits out";
    return o->tokens == 0 && !o->answers_file ? "--prompts and --samples need -n of at least 1"
                                              : NULL;
}

/* Options of completing, and those that do not go with it. */
static const char *completing_problem(const cli_run_options *o)
{
    if (!o->prune.policy || o->prune.values.config.retention != KVF_RETENTION_COMPLETE)
        return o->complete_share > 0.0 ? "--complete-share needs --retention complete" : NULL;
    if (o->draft_tokens && o->complete_share > 0.0)
        return "--complete-share computes between tokens, of which --draft has several in a step; "
               "leave one of them out";
    if (!o->ask_file)
        return "--retention complete computes between questions what it left out; give --ask";
    return NULL;
}

/* Whether two results would take each other's place. Devices take any number. */
static bool share_a_file(const cli_run_options *o)
{
    const char *stats = o->stats && strcmp(o->stats, "json") != 0 ? o->stats : NULL;
    const char *const files[] = {o->emit_ids_file, o->dump_logits_file, stats, o->save_file};
    for (size_t i = 0; i < sizeof files / sizeof *files; i++)
        for (size_t k = 0; k < i; k++)
            if (files[i] && files[k] && strcmp(files[i], files[k]) == 0 &&
                strncmp(files[i], "/dev/", 5) != 0)
                return true;
    return false;
}

/* Refusals without a look at the model. */
static bool check_together(const cli_command *command, const cli_run_options *o)
{
    int prompts = (o->prompt != NULL) + (o->prompt_file != NULL) + (o->token_ids_file != NULL);
    const char *problem = batch_problem(command, o);
    if (!problem)
        problem = completing_problem(o);
    if (problem)
        ;
    else if (!o->model)
        problem = "--model DIR is needed";
    else if (prompts > 1)
        problem = "give only one of --prompt, --prompt-file and --token-ids";
    else if (cli_chat_wanted(&o->chat) && o->token_ids_file)
        problem = "--chat needs text, not --token-ids";
    else if (o->ask_file && cli_chat_wanted(&o->chat))
        problem = "--ask continues plain text; leave --chat out";
    else if (!cli_chat_wanted(&o->chat) && !o->prompts_file &&
             (o->chat.system || o->chat.format || o->chat.thinking))
        problem = "--system, --thinking and --chat-format belong to --chat or --messages";
    else if (o->ask_file && o->tokens == 0)
        problem = "--ask needs -n of at least 1";
    else if (o->save_file && (o->prompts_file || o->samples))
        problem = "--save takes one prompt and one answer; leave --prompts and --samples out";
    else if (share_a_file(o))
        problem = "each of --emit-ids, --dump-logits, --stats and --save needs a file of its own";
    else if (o->load_file && o->prompts_file && cli_chat_wanted(&o->chat))
        problem =
            "--load with --prompts goes on from what was saved, as plain text; leave --chat out";
    else if (o->extend && !o->ask_file && !o->load_file)
        problem = "--extend says how tokens after a prompt are read that is there; give --ask or "
                  "--load";
    else if (o->reselect && !o->load_file)
        problem = "--reselect says how a file of --load is taken; give --load";
    else if (o->load_file && o->prune.policy)
        problem = "--load continues a prompt as it was saved; leave --prune out";
    if (problem)
        fprintf(stderr, "kvferry: %s; see kvferry %s --help\n", problem, command->name);
    return !problem && cli_prune_check(&o->prune, command);
}

static void set_defaults(void *options)
{
    cli_run_options *o = options;
    *o = (cli_run_options){.tokens = 128};
    kvf_sampling_config_init(&o->sampling);
    kvf_runtime_config_init(&o->runtime);
    kvf_cache_config_init(&o->cache);
    cli_prune_options_init(&o->prune);
}

static void set_score_defaults(void *options)
{
    set_defaults(options);
    ((cli_run_options *)options)->tokens = 0;
}

static void add_rows(cli_command *c, unsigned command, const command_option *rows, size_t count)
{
    for (size_t i = 0; i < count; i++)
        if (rows[i].commands & command)
            cli_add(c, &rows[i].option, 1, 0);
}

#define ADD(c, command, rows) add_rows(c, command, rows, sizeof(rows) / sizeof *(rows))

static void add_options(cli_command *c, unsigned command)
{
    cli_heading(c, "Input:");
    ADD(c, command, of_input);
    cli_heading(c, "Chat:");
    ADD(c, command, of_chat);
    cli_heading(c, "Cache:");
    cli_add_cache(c, offsetof(cli_run_options, cache), NULL);
    cli_add_runtime(c, offsetof(cli_run_options, runtime));
    cli_add_cublas(c, offsetof(cli_run_options, cublas));
    if (command == OF_RUN) {
        cli_heading(c, "Sampling:");
        cli_add_settings(c, &(cli_settings){.at = cli_sampling_setting,
                                            .base = offsetof(cli_run_options, sampling)});
    }
    cli_heading(c, "Output:");
    ADD(c, command, of_output);
    cli_heading(c, "Pruning the prompt:");
    cli_prune_add(c, offsetof(cli_run_options, prune));
    ADD(c, command, of_completing);
    cli_heading(c, "Heads that only stream:");
    cli_prune_add_mask(c, offsetof(cli_run_options, prune), offsetof(cli_run_options, cache));
}

/* @return -1 to go on, else the exit status */
static int parse(cli_command *c, int argc, char **argv, cli_run_options *out)
{
    const int parsed = cli_parse(c, argc, argv, out);
    if (parsed >= 0)
        return parsed;
    if (out->prune.wants_list) {
        cli_policies_print(stdout);
        return 0;
    }
    if (!check_together(c, out))
        return 2;
    return -1;
}

int cli_run_options_parse(int argc, char **argv, cli_command *c, cli_run_options *out)
{
    c->name = "run";
    c->usage = "usage: kvferry run --model DIR [OPTION...]\n\n"
               "Read a prompt, generate tokens. Tokens go to standard output, all else to standard "
               "error.";
    c->stray = "a prompt is given with --prompt";
    c->defaults = set_defaults;
    add_options(c, OF_RUN);
    return parse(c, argc, argv, out);
}

int cli_score_options_parse(int argc, char **argv, cli_command *c, cli_run_options *out)
{
    c->name = "score";
    c->usage =
        "usage: kvferry score --model DIR --text FILE | --answers FILE [OPTION...]\n\n"
        "How well the model predicts a text after a prompt: the mean loss of its tokens, in "
        "nats. Every token is a decode step under the selection in force, and the text's own "
        "token is fed whatever the model would have said. One JSON object goes to standard "
        "output, all else to standard error; --stats has the loss of every token.\nWith --answers "
        "the same for finished answers of a batch, a line of JSON for each.";
    c->stray = "a text is given with --text";
    c->defaults = set_score_defaults;
    add_options(c, OF_SCORE);
    const int parsed = parse(c, argc, argv, out);
    if (parsed >= 0)
        return parsed;
    if (!out->text_file && !out->answers_file) {
        fputs("kvferry: --text FILE or --answers FILE is needed; see kvferry score --help\n",
              stderr);
        return 2;
    }
    if (out->answers_file && !cli_option_find(c, "select")->given &&
        !cli_option_find(c, "preset")->given)
        out->cache.select = KVF_SELECT_FULL;
    return -1;
}
