/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The cheapest settings of a policy that keep the answers.
 *
 * Questions that full attention does not answer say nothing and are left out. A setting must keep
 * the goal on the rest. First the compute: for each share of tokens that deeper layers get, the
 * shallowest layer that keeps the answers, by halving, where that would be cheaper than what was
 * found so far. Then the memory: the smallest share that KV heads keep. Answers need not rise with
 * the layer, so a better setting may be missed; what is returned was measured. Tokens that a
 * policy does not keep are deleted here, and all others are attended. Each reported
 * time is measured alternately with full attention, so load on the machine affects both.
 *
 * At the end of a prompt every question has a sequence of its own, and the window knows it. Asked
 * afterwards, it has a fork of the piece, which was pruned without it; the piece is read once for
 * questions that follow each other.
 *
 * It knows settings and answers, not text or files. Invariant: every question is asked of what was
 * read with the setting on trial, and nothing else.
 */

#include "common/clock.h"
#include "common/percentile.h"
#include "interrupt.h"
#include "tune.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common/text.h"

static const float shares[] = {0.1f, 0.2f, 0.3f, 0.5f, 0.7f};

#define SHARES (sizeof shares / sizeof *shares)
#define PAIRS  5u

/* A setting on its way. */
typedef struct trial {
    kvf_prune_config config;
    uint32_t layer; /* after which few tokens go on; of asl in the mean prompt */
    uint32_t kept;  /* answers */
    double computed;
} trial;

typedef struct search {
    cli_tune *tune;
    kvf_sampler *sampler;
    kvf_sequence *document; /* a piece, for questions that are asked afterwards; NULL = none */
    uint32_t piece;         /* which */
    uint32_t needed;        /* answers */
    bool has_best, is_fit;  /* best is the cheapest that fits, or the one with most answers */
    trial best;
} search;

/* ---- one question ---- */

typedef struct said {
    uint32_t ids[TUNE_ANSWER_TOKENS_MAX];
    uint32_t count;
    double first_ms; /* until the first token */
    bool is_right;
} said;

static bool on_token(void *user, uint32_t id, const float *logits)
{
    said *s = user;
    (void)logits;
    s->ids[s->count++] = id;
    return s->count < TUNE_ANSWER_TOKENS_MAX;
}

/* Whether it begins with the answer, and not with a longer word or number. */
static kvf_status judge(const cli_tune *tune, said *s, const char *answer, kvf_error *error)
{
    kvf_text text = {0};
    KVF_TRY(kvf_tokenizer_decode(tune->tokenizer, s->ids, s->count, true, &text, error));
    size_t at = 0, size = strlen(answer);
    while (at < text.size && kvf_is_space(text.bytes[at]))
        at++;
    s->is_right = text.size - at >= size && memcmp(text.bytes + at, answer, size) == 0 &&
                  (text.size == at + size || !kvf_is_alnum(text.bytes[at + size]));
    kvf_text_free(&text);
    return KVF_OK;
}

/* `out` gets the first tokens of a prompt. */
static kvf_status read_tokens(const search *s, kvf_prune *prune, const tune_question *q,
                              uint32_t count, kvf_sequence **out, kvf_error *error)
{
    const cli_tune *tune = s->tune;
    const kvf_session session = cli_tune_session(s->tune, prune);
    kvf_stop stop;
    KVF_TRY(kvf_library_told(tune->runtime, kvf_sequence_create(tune->cache, out), error));
    const kvf_prefill_request prefill = {.sequence = *out,
                                         .ids = tune->prompts.ids + q->first,
                                         .count = count,
                                         .wants_logits = count == q->count};
    return kvf_generate_prefill(&session, &prefill, &stop, error);
}

/* Behind every setting. */
static void forget_document(search *s)
{
    kvf_sequence_destroy(s->document);
    s->document = NULL;
}

/* A fork of the piece, which was read without the question. */
static kvf_status fork_document(search *s, kvf_prune *prune, const tune_question *q,
                                kvf_sequence **out, kvf_error *error)
{
    if (s->document && s->piece != q->piece)
        forget_document(s);
    if (!s->document)
        KVF_TRY(read_tokens(s, prune, q, q->body, &s->document, error));
    s->piece = q->piece;
    return kvf_library_told(s->tune->runtime,
                            kvf_sequence_fork(s->tune->cache, s->document, s->tune->stream, out),
                            error);
}

static kvf_status generate(search *s, kvf_prune *prune, const tune_question *q,
                           kvf_sequence **sequence, said *out, kvf_error *error)
{
    const cli_tune *tune = s->tune;
    const kvf_session session = cli_tune_session(s->tune, prune);
    const bool is_after = tune->options.asked == CLI_ASKED_AFTER;
    const double start = kvf_now_ms();
    KVF_TRY(is_after ? fork_document(s, prune, q, sequence, error)
                     : read_tokens(s, prune, q, q->count, sequence, error));
    const kvf_prefill_request question = {.sequence = *sequence,
                                          .ids = tune->prompts.ids + q->first + q->body,
                                          .count = q->count - q->body,
                                          .wants_logits = true};
    kvf_stop stop;
    if (is_after)
        KVF_TRY(kvf_generate_extend(&session, &question, &stop, error));
    const double read_ms = kvf_now_ms() - start;
    const kvf_decode_request decode = {.sequence = *sequence,
                                       .tokens = kvf_min_u32(q->tokens, TUNE_ANSWER_TOKENS_MAX),
                                       .sampler = s->sampler,
                                       .token = on_token,
                                       .user = out};
    kvf_decode_result result = {0};
    KVF_TRY(kvf_generate_decode(&session, &decode, &result, error));
    out->first_ms = read_ms + result.first_ms;
    return KVF_OK;
}

static kvf_status ask(search *s, kvf_prune *prune, const tune_question *q, said *out,
                      kvf_error *error)
{
    cli_tune *tune = s->tune;
    kvf_sequence *sequence = NULL;
    *out = (said){.count = 0};
    kvf_status status = generate(s, prune, q, &sequence, out, error);
    (void)!kvf_stream_wait(tune->stream);
    kvf_transformer_forget(tune->transformer);
    kvf_sequence_destroy(sequence);
    cli_tune_ran(tune);
    return status == KVF_OK ? judge(tune, out, q->answer, error) : status;
}

/* ---- one setting ---- */

/* Whether so many answers more would neither be enough nor more than the best setting has. */
static bool is_hopeless(const search *s, uint32_t answers)
{
    return answers < s->needed && s->has_best && (s->is_fit || answers <= s->best.kept);
}

/* An answer that was lost once is easily lost again: asked first, it ends a hopeless trial early.
 */
static void ask_first(cli_tune *tune, uint32_t index)
{
    const tune_question lost = tune->questions[index];
    memmove(tune->questions + 1, tune->questions, index * sizeof lost);
    tune->questions[0] = lost;
}

/* All questions that full attention answers, or as many as it takes to know that they tell nothing.
 */
static kvf_status measure(search *s, trial *t, kvf_error *error)
{
    cli_tune *tune = s->tune;
    kvf_prune *prune = NULL;
    uint32_t left = tune->full_right;
    kvf_prune_stats stats;
    KVF_TRY(kvf_prune_open(tune->cache, &t->config, &prune, error));
    kvf_status status = KVF_OK;
    t->kept = 0;
    for (uint32_t i = 0; status == KVF_OK && i < tune->question_count && !cli_interrupted(); i++) {
        said out;
        if (!tune->questions[i].is_right)
            continue;
        status = ask(s, prune, &tune->questions[i], &out, error);
        t->kept += out.is_right;
        if (!out.is_right)
            ask_first(tune, i);
        if (is_hopeless(s, t->kept + --left))
            break;
    }
    forget_document(s);
    kvf_prune_stats_get(prune, &stats);
    t->computed = stats.tokens_full ? (double)stats.tokens_computed / (double)stats.tokens_full : 1;
    kvf_prune_close(prune);
    return status;
}

static bool is_given(const search *s, const char *field)
{
    return (s->tune->options.prune.values.given & cli_setting_bit(field)) != 0;
}

static void set_share(search *s, trial *t, const char *field, float share)
{
    kvf_prune_settings *to = &t->config.settings;
    const bool is_keep = strcmp(field, "keep") == 0;
    if (is_given(s, field) || is_given(s, is_keep ? "keep_tokens" : "propagate_tokens"))
        return;
    if (is_keep) {
        to->keep = share;
        to->keep_tokens = 0;
    } else {
        to->propagate = share;
        to->propagate_tokens = 0;
    }
}

static bool is_possible(const search *s, const trial *t)
{
    const kvf_prune_shape shape = cli_prune_shape(&s->tune->model, s->tune->tuning.tokens);
    kvf_error unused;
    return kvf_prune_config_check(&t->config, &shape, &unused) == KVF_OK;
}

static double expected_share(const search *s, const trial *t)
{
    return cli_tune_share(s->tune, &t->config.settings, t->layer);
}

static void set_layer(const search *s, trial *t, uint32_t layer)
{
    const cli_tuned *asl = &s->tune->tuning.of[CLI_ASL];
    t->layer = layer;
    if (!s->tune->options.wants[CLI_ASL])
        t->config.settings.layer = layer;
    else if (!is_given(s, "threshold"))
        t->config.settings.threshold = (float)cli_tune_asl_threshold(asl, layer);
}

/* Measured; the best of what was measured is remembered. */
static kvf_status try_setting(search *s, trial *t, bool *fits, kvf_error *error)
{
    KVF_TRY(measure(s, t, error));
    if (cli_interrupted())
        return KVF_OK;
    *fits = t->kept >= s->needed;
    const bool is_better = *fits       ? !s->is_fit || t->computed <= s->best.computed
                           : s->is_fit ? false
                                       : !s->has_best || t->kept > s->best.kept;
    if (is_better)
        s->best = *t;
    s->is_fit = s->is_fit || *fits;
    s->has_best = true;
    return KVF_OK;
}

/* The shallowest layer that keeps the answers when so many tokens go on after it. */
static kvf_status search_layer(search *s, trial t, kvf_error *error)
{
    uint32_t low = s->tune->options.layer_first, high = s->tune->options.layer_last;
    bool fits = false;
    if (s->tune->options.wants[CLI_ASL]) /* which chooses after its first layer */
        low = kvf_max_u32(low, s->tune->tuning.of[CLI_ASL].settings.layer_min + 1);
    high = kvf_max_u32(low, high);
    set_layer(s, &t, high);
    while (s->is_fit && high > low && expected_share(s, &t) >= s->best.computed)
        set_layer(s, &t, --high);
    if (!is_possible(s, &t) || (s->is_fit && expected_share(s, &t) >= s->best.computed))
        return KVF_OK;
    KVF_TRY(try_setting(s, &t, &fits, error));
    while (fits && low < high && !cli_interrupted()) {
        bool is_enough = false;
        const uint32_t middle = low + (high - low) / 2;
        set_layer(s, &t, middle);
        KVF_TRY(try_setting(s, &t, &is_enough, error));
        if (is_enough)
            high = middle;
        else
            low = middle + 1;
    }
    return KVF_OK;
}

/* With less kept, at the layer and the share that were found. */
static kvf_status search_keep(search *s, kvf_error *error)
{
    for (size_t i = 0; s->is_fit && i < SHARES && !is_given(s, "keep") && !cli_interrupted(); i++) {
        trial t = s->best;
        bool fits = false;
        set_share(s, &t, "keep", shares[i]);
        if (is_possible(s, &t))
            KVF_TRY(try_setting(s, &t, &fits, error));
        if (fits)
            return KVF_OK;
    }
    return KVF_OK;
}

/* Time to the first token with the best setting, as a share of full attention's: a median. */
static kvf_status time_first(search *s, double *share, kvf_error *error)
{
    const cli_tune *tune = s->tune;
    double shares_of[PAIRS];
    uint32_t count = 0;
    kvf_prune *prune = NULL;
    KVF_TRY(kvf_prune_open(tune->cache, &s->best.config, &prune, error));
    kvf_status status = KVF_OK;
    for (uint32_t i = 0; status == KVF_OK && i < tune->question_count && count < PAIRS; i++) {
        const tune_question *q = &tune->questions[i];
        said full, pruned = {.first_ms = 0.0};
        if (!q->is_right)
            continue;
        status = ask(s, NULL, q, &full, error);
        forget_document(s);
        if (status == KVF_OK)
            status = ask(s, prune, q, &pruned, error);
        forget_document(s);
        shares_of[count++] = pruned.first_ms / full.first_ms;
    }
    kvf_prune_close(prune);
    kvf_sort(shares_of, count);
    *share = kvf_percentile(shares_of, count, 50);
    return status;
}

static kvf_status search_policy(search *s, uint32_t method, cli_tuned *out, kvf_error *error)
{
    trial t = {.computed = 1.0};
    s->has_best = s->is_fit = false;
    cli_tune_config(s->tune, cli_method_names[method], &t.config);
    t.config.retention = KVF_RETENTION_EVICT;
    if (is_given(s, "keep"))
        t.config.settings.keep = s->tune->options.prune.values.config.settings.keep;
    if (method == CLI_STRUCTKV)
        t.config.settings.pivot = KVF_PIVOT_FIXED;
    if (s->tune->options.wants[CLI_ASL])
        t.config.settings.layer_min = s->tune->tuning.of[CLI_ASL].settings.layer_min;
    const size_t count = is_given(s, "propagate") || is_given(s, "propagate_tokens") ? 1 : SHARES;
    for (size_t i = 0; i < count && !cli_interrupted(); i++) {
        set_share(s, &t, "propagate", shares[i]);
        KVF_TRY(search_layer(s, t, error));
    }
    KVF_TRY(search_keep(s, error));
    if (!s->has_best)
        return KVF_OK;
    *out = (cli_tuned){.layer = s->best.layer,
                       .settings = s->best.config.settings,
                       .is_answered = true,
                       .keeps = s->is_fit,
                       .full = s->tune->full_right,
                       .kept = s->best.kept,
                       .computed = s->best.computed};
    return cli_interrupted() ? KVF_OK : time_first(s, &out->first_share, error);
}

/* ---- everything ---- */

static kvf_status ask_full(search *s, kvf_error *error)
{
    cli_tune *tune = s->tune;
    for (uint32_t i = 0; i < tune->question_count && !cli_interrupted(); i++) {
        tune_question *q = &tune->questions[i];
        said out;
        KVF_TRY(ask(s, NULL, q, &out, error));
        q->is_right = out.is_right;
        tune->full_right += q->is_right;
    }
    forget_document(s);
    if (tune->full_right == 0 && !cli_interrupted())
        return model_fail(error, KVF_INVALID,
                          "full attention answers none of %u questions, so they tell nothing; give "
                          "fewer --tokens, lines that the model understands with --hide, or "
                          "--questions 0",
                          tune->question_count);
    s->needed = (uint32_t)ceil(tune->options.goal * tune->full_right - 1e-9);
    return KVF_OK;
}

static uint64_t runs_at_most(const cli_tune *tune)
{
    const cli_tune_options *o = &tune->options;
    const uint32_t policies =
        (uint32_t)o->wants[CLI_FASTKV] + o->wants[CLI_STRUCTKV] + o->wants[CLI_ASL];
    uint32_t halvings = 1;
    while (tune->model.layers >> halvings)
        halvings++;
    return (uint64_t)tune->question_count * (1 + policies * SHARES * (2 + halvings)) +
           (uint64_t)policies * 2 * PAIRS;
}

/* How ranks settle, then the threshold by answers. */
static kvf_status search_asl(search *s, kvf_error *error)
{
    cli_tune *tune = s->tune;
    tune->figures = calloc(tune->model.layers, sizeof *tune->figures);
    if (!tune->figures)
        return model_out_of_memory(error, tune->model.layers * sizeof *tune->figures, "a curve");
    KVF_TRY(cli_tune_asl_curve(tune, tune->figures, error));
    if (cli_interrupted())
        return KVF_OK;
    cli_tuned found = tune->tuning.of[CLI_ASL];
    KVF_TRY(search_policy(s, CLI_ASL, &found, error));
    tune->tuning.of[CLI_ASL] = found;
    return KVF_OK;
}

kvf_status cli_tune_search(cli_tune *tune, kvf_error *error)
{
    search s = {.tune = tune};
    const cli_tune_options *o = &tune->options;
    KVF_TRY(kvf_sampler_create(tune->model.vocab_size, 1, &s.sampler, error));
    cli_progress_begin(&tune->progress, "asking", runs_at_most(tune), "runs");
    kvf_status status = ask_full(&s, error);
    for (uint32_t m = 0; m < CLI_METHODS; m++)
        if (status == KVF_OK && o->wants[m] && !cli_interrupted())
            status = m == CLI_ASL ? search_asl(&s, error)
                                  : search_policy(&s, m, &tune->tuning.of[m], error);
    forget_document(&s);
    cli_progress_end(&tune->progress);
    kvf_sampler_destroy(s.sampler);
    tune->interrupted = cli_interrupted();
    return status;
}
