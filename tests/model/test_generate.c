/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Generating: where an answer stops the sequence goes on as one answer; given tokens go several in
 * a step and leave what single steps leave; and answers of a batch are those of single runs, and go
 * on while a prompt is read.
 */

#include "generate.h"
#include "generate_batch.h"
#include "prune_run_rig.h"

#define TOKENS 16u
#define GIVEN  40u

/* A rig with room for answers. */
typedef struct runner {
    rig rig;
    kvf_session session;
    kvf_sampler *sampler;
    kvf_sequence *sequence;
    kvf_draft *draft; /* NULL = none */
    uint32_t drafted, accepted;
    uint32_t ids[TOKENS];
    uint32_t count, stop_at; /* tokens handed out; 0 = never */
} runner;

static kvf_sampling_config warm(uint64_t seed)
{
    return (kvf_sampling_config){.temperature = 20.0,
                                 .top_p = 0.95,
                                 .min_p = 0.001,
                                 .top_k = 150,
                                 .repetition_penalty = 1.5,
                                 .seed = seed};
}

static void runner_open(runner *r, const kvf_sampling_config *config)
{
    kvf_error error;
    *r = (runner){0};
    rig_open(&r->rig, KVF_SELECT_DYNAMIC, 64);
    r->session = rig_session(&r->rig, NULL);
    model_rig_must(&r->rig, kvf_sampler_create(VOCAB, BATCH, &r->sampler, &error), "sampler");
    model_rig_must(&r->rig, kvf_sampler_begin(r->sampler, 0, config, &error), "begin");
}

static void runner_close(runner *r)
{
    kvf_transformer_forget(r->rig.transformer);
    kvf_sequence_destroy(r->sequence);
    kvf_prune_close(r->session.prune);
    kvf_draft_destroy(r->draft);
    kvf_sampler_destroy(r->sampler);
    model_rig_close(&r->rig);
}

static bool on_token(void *user, uint32_t id, const float *logits)
{
    runner *r = user;
    assert_non_null(logits);
    r->ids[r->count++] = id;
    return r->count != r->stop_at;
}

/* From here on prompts are pruned. */
static void prune(runner *r)
{
    kvf_prune_config config = rig_config_of("snapkv");
    config.settings.window = WINDOW;
    config.settings.keep_tokens = GIVEN / 2;
    r->session.prune = rig_open_prune(&r->rig, &config);
}

static void read_prompt(runner *r)
{
    const rig_prompt b = one_prompt(1, GIVEN);
    kvf_error error;
    kvf_stop stop;
    r->sequence = model_rig_sequence(&r->rig);
    const kvf_prefill_request request = {
        .sequence = r->sequence, .ids = b.ids, .count = GIVEN, .wants_logits = true};
    model_rig_must(&r->rig, kvf_generate_prefill(&r->session, &request, &stop, &error), "prefill");
    kvf_sampler_see(r->sampler, 0, b.ids, GIVEN);
}

/* A token that was handed out becomes the sequence's last one. */
static void feed(runner *r, const uint32_t *id)
{
    const kvf_prefill_request request = {
        .sequence = r->sequence, .ids = id, .count = 1, .wants_logits = true};
    kvf_error error;
    kvf_stop stop;
    model_rig_must(&r->rig, kvf_generate_extend(&r->session, &request, &stop, &error), "extend");
}

static kvf_stop answer(runner *r, uint32_t tokens, const uint32_t *eos)
{
    double ms[TOKENS];
    kvf_error error;
    const kvf_decode_request request = {.sequence = r->sequence,
                                        .tokens = tokens,
                                        .sampler = r->sampler,
                                        .eos_ids = eos,
                                        .eos_count = eos ? 1 : 0,
                                        .token = on_token,
                                        .user = r,
                                        .draft = r->draft};
    kvf_decode_result result = {.step_ms = ms};
    const uint32_t before = r->count;
    fixture_must(kvf_generate_decode(&r->session, &request, &result, &error), &error);
    assert_int_equal(result.generated, r->count - before);
    /* Behind a step come what of its draft is right, and one token more. */
    assert_int_equal(result.steps + result.accepted, result.generated - 1);
    r->drafted += result.drafted;
    r->accepted += result.accepted;
    return result.stop;
}

/* A prompt that was read, pruned or not. */
static void runner_begin(runner *r, const kvf_sampling_config *config, bool is_pruned)
{
    runner_open(r, config);
    if (is_pruned)
        prune(r);
    read_prompt(r);
}

/* Tokens of one answer without a stop, each from its logits on the host. */
static void plain_answer(const kvf_sampling_config *config, bool is_pruned, uint32_t ids[TOKENS])
{
    runner r;
    runner_begin(&r, config, is_pruned);
    assert_int_equal(answer(&r, TOKENS, NULL), KVF_STOP_LENGTH);
    assert_int_equal(r.count, TOKENS);
    memcpy(ids, r.ids, sizeof r.ids);
    runner_close(&r);
}

/* A draft that has seen the answer before, with some ids that are wrong. */
static void open_draft(runner *r, const uint32_t want[TOKENS])
{
    kvf_error error;
    const rig_prompt b = one_prompt(1, GIVEN);
    uint32_t almost[TOKENS];
    memcpy(almost, want, sizeof almost);
    almost[2] = (almost[2] + 1) % VOCAB;
    almost[10] = (almost[10] + 1) % VOCAB;
    model_rig_must(&r->rig, kvf_draft_create(BATCH - 1, 200, &r->draft, &error), "draft");
    kvf_draft_see(r->draft, &b.ids[GIVEN - 2], 2);
    kvf_draft_see(r->draft, almost, TOKENS);
    kvf_draft_see(r->draft, b.ids, GIVEN);
}

/* The first token from `first` + 3 on that is not there since `first`; TOKENS: none, as greedy ones
 * come again. */
static uint32_t new_token(const uint32_t *ids, uint32_t first)
{
    for (uint32_t i = first + 3; i < TOKENS - 2; i++) {
        uint32_t j = first;
        while (j < i && ids[j] != ids[i])
            j++;
        if (j == i)
            return i;
    }
    return TOKENS;
}

static void expect_last(const runner *r, uint32_t layer, uint32_t position)
{
    const uint32_t length = kvf_sequence_length(r->sequence, layer);
    assert_int_equal(kvf_sequence_position(r->sequence, layer, length - 1), position);
}

/* One answer in three parts, with and without drafts: the end of one is the caller's, of one an end
 * token's, maybe inside a draft. The next fed token is the one that ended it, so that all of it is
 * one answer. Returns how many tokens of drafts were wrong. */
static uint32_t check_parts(const kvf_sampling_config *config, bool is_pruned, uint32_t stop_at,
                            bool has_draft)
{
    static uint32_t want[TOKENS];
    runner r;
    plain_answer(config, is_pruned, want);
    const uint32_t eos_at = new_token(want, stop_at);
    runner_begin(&r, config, is_pruned);
    if (has_draft)
        open_draft(&r, want);
    r.stop_at = stop_at;
    assert_int_equal(answer(&r, TOKENS, NULL), KVF_STOP_CALLER);
    expect_last(&r, 0, GIVEN + stop_at - 2);
    feed(&r, &r.ids[stop_at - 1]);
    assert_true(eos_at < TOKENS || config->temperature == 0.0);
    if (eos_at < TOKENS) {
        assert_int_equal(answer(&r, TOKENS - stop_at, &want[eos_at]), KVF_STOP_EOS);
        assert_int_equal(r.count, eos_at + 1);
        expect_last(&r, LAYERS - 1, GIVEN + eos_at - 1);
        feed(&r, &r.ids[eos_at]);
    }
    assert_int_equal(answer(&r, TOKENS - r.count, NULL), KVF_STOP_LENGTH);
    assert_int_equal(r.count, TOKENS);
    assert_memory_equal(r.ids, want, sizeof want);
    assert_true(r.accepted > 2 || !has_draft);
    const uint32_t wrong = r.drafted - r.accepted;
    runner_close(&r);
    return wrong;
}

TEST(an_answer_in_parts_is_one_answer)
{
    const kvf_sampling_config config = warm(5);
    check_parts(&config, false, 5, false);
    check_parts(&config, true, 5, false);
}

TEST(drafts_change_no_token)
{
    uint32_t wrong = 0;
    kvf_sampling_config greedy;
    kvf_sampling_config_init(&greedy);
    for (uint32_t i = 0; i < 4; i++) {
        const kvf_sampling_config drawn = warm(7 + i);
        wrong += check_parts(&drawn, i == 1, 3 + i, true);
    }
    wrong += check_parts(&greedy, false, 5, true);
    assert_true(wrong > 0);
}

/* ---- given tokens ---- */

#define LONG 130u /* tokens of a prompt that the budget does not cover */

typedef struct reading {
    uint32_t looks, done, stop_at; /* 0 = never */
} reading;

static bool on_reading(void *user, uint32_t done, uint32_t total)
{
    reading *w = user;
    assert_true(done > w->done && done <= total);
    w->looks++;
    w->done = done;
    return done < w->stop_at || !w->stop_at;
}

/* Half a prompt is prefilled. The rest goes in by steps: until somebody stops them, then to its
 * end, whose logits are wanted. */
static void answer_extended(uint32_t step_tokens, uint32_t stop_at, uint32_t ids[TOKENS])
{
    const kvf_sampling_config config = warm(3);
    const rig_prompt b = one_prompt(1, LONG);
    const uint32_t half = LONG / 2;
    reading w = {.stop_at = stop_at};
    kvf_error error;
    kvf_stop stop;
    runner r;
    runner_open(&r, &config);
    r.sequence = model_rig_sequence(&r.rig);
    const kvf_prefill_request dense = {.sequence = r.sequence, .ids = b.ids, .count = half};
    model_rig_must(&r.rig, kvf_generate_prefill(&r.session, &dense, &stop, &error), "prefill");
    r.session.step_tokens = step_tokens;
    const kvf_prefill_request sparse = {.sequence = r.sequence,
                                        .ids = b.ids + half,
                                        .count = 31,
                                        .progress = on_reading,
                                        .user = &w};
    model_rig_must(&r.rig, kvf_generate_extend(&r.session, &sparse, &stop, &error), "extend");
    assert_int_equal(stop, stop_at ? KVF_STOP_CALLER : KVF_STOP_LENGTH);
    assert_int_equal(w.looks, kvf_div_ceil_u32(w.done, kvf_max_u32(step_tokens, 1)));
    assert_int_equal(kvf_sequence_length(r.sequence, LAYERS - 1), half + w.done);
    const kvf_prefill_request rest = {.sequence = r.sequence,
                                      .ids = b.ids + half + w.done,
                                      .count = LONG - half - w.done,
                                      .wants_logits = true};
    model_rig_must(&r.rig, kvf_generate_extend(&r.session, &rest, &stop, &error), "extend");
    const kvf_decode_request request = {.sequence = r.sequence,
                                        .tokens = TOKENS,
                                        .sampler = r.sampler,
                                        .token = on_token,
                                        .user = &r};
    kvf_decode_result result = {0};
    model_rig_must(&r.rig, kvf_generate_decode(&r.session, &request, &result, &error), "decode");
    assert_int_equal(r.count, TOKENS);
    memcpy(ids, r.ids, sizeof r.ids);
    runner_close(&r);
}

TEST(given_tokens_share_steps)
{
    uint32_t want[TOKENS], ids[TOKENS];
    answer_extended(0, 0, want);
    answer_extended(BATCH, 0, ids);
    assert_memory_equal(ids, want, sizeof want);
    answer_extended(BATCH - 1, 11, ids);
    assert_memory_equal(ids, want, sizeof want);
}

/* ---- drafts ---- */

/* Its guesses follow from the ids that it has seen. */
TEST(a_draft_looks_back)
{
    kvf_draft *d = NULL;
    uint32_t ids[KVF_DRAFT_MAX];
    assert_int_equal(kvf_draft_create(4, 20, &d, NULL), KVF_OK);
    assert_int_equal(kvf_draft_guess(d, 4, ids), 0);
    kvf_draft_see(d, (const uint32_t[]){9, 1, 2, 3, 4, 5, 8, 2, 3, 6, 7}, 11);
    assert_int_equal(kvf_draft_guess(d, 4, ids), 0);
    kvf_draft_see(d, (const uint32_t[]){2, 3}, 2); /* the newest place wins, half as long */
    assert_int_equal(kvf_draft_guess(d, 4, ids), 2);
    assert_int_equal(ids[0], 6);
    assert_int_equal(kvf_draft_guess(d, 1, ids), 1);
    kvf_draft_learn(d, 2, 2);
    assert_int_equal(kvf_draft_guess(d, 9, ids), 4);
    assert_memory_equal(ids, ((const uint32_t[]){6, 7, 2, 3}), 16);
    kvf_draft_learn(d, 4, 0);
    assert_int_equal(kvf_draft_guess(d, 9, ids), 1);
    kvf_draft_cut(d, 11);
    kvf_draft_see(d, (const uint32_t[]){1, 2, 3}, 3); /* more of the newest ids agree there */
    assert_int_equal(kvf_draft_guess(d, 9, ids), 2);
    assert_memory_equal(ids, ((const uint32_t[]){4, 5}), 8);
    kvf_draft_see(d, (const uint32_t[]){0, 0, 0, 0, 0, 0, 0, 0}, 8); /* no room for the last two */
    assert_int_equal(kvf_draft_guess(d, 9, ids), 1);
    kvf_draft_destroy(d);
}

/* ---- a batch ---- */

#define SAMPLES 3u

typedef struct collector {
    runner *runner;
    uint32_t ids[SAMPLES][TOKENS];
    uint32_t counts[SAMPLES];
    uint32_t ended;
} collector;

static bool on_batch_token(void *user, const kvf_batch_answer *answer, uint32_t id)
{
    collector *c = user;
    assert_int_equal(c->counts[answer->sample] + 1, answer->generated);
    c->ids[answer->sample][c->counts[answer->sample]++] = id;
    return true;
}

static void on_batch_end(void *user, const kvf_batch_answer *answer)
{
    collector *c = user;
    c->ended++;
    assert_int_equal(answer->generated, c->counts[answer->sample]);
    assert_int_equal(answer->stop, answer->generated == TOKENS ? KVF_STOP_LENGTH : KVF_STOP_EOS);
}

static bool on_batch_pass(void *user, uint32_t prefilled, uint32_t rows, double ms)
{
    (void)user, (void)prefilled, (void)rows, (void)ms;
    return true;
}

/* Two rows for three answers: one that ends early makes room for the next while another goes on. */
static void check_batch(bool is_pruned)
{
    static uint32_t want[SAMPLES][TOKENS];
    kvf_sampling_config config = warm(11);
    kvf_error error;
    runner r;
    for (uint32_t i = 0; i < SAMPLES; i++) {
        const kvf_sampling_config one = warm(11 + i);
        plain_answer(&one, is_pruned, want[i]);
    }
    runner_open(&r, &config);
    if (is_pruned)
        prune(&r);
    const rig_prompt b = one_prompt(1, GIVEN);
    const kvf_batch_prompt prompt = {
        .ids = b.ids, .count = GIVEN, .tokens = TOKENS, .samples = SAMPLES, .sampling = config};
    const uint32_t eos = want[0][4];
    collector c = {.runner = &r};
    const kvf_batch_request request = {.prompts = &prompt,
                                       .count = 1,
                                       .rows = BATCH - 1,
                                       .tokens_max = 10000,
                                       .vocab_size = VOCAB,
                                       .sampler = r.sampler,
                                       .eos_ids = &eos,
                                       .eos_count = 1,
                                       .token = on_batch_token,
                                       .end = on_batch_end,
                                       .pass = on_batch_pass,
                                       .user = &c};
    fixture_must(kvf_generate_batch(&r.session, &request, &error), &error);
    assert_int_equal(c.ended, SAMPLES);
    assert_in_range(c.counts[0], 1, 5);
    for (uint32_t i = 0; i < SAMPLES; i++) {
        uint32_t count = 0;
        while (count < TOKENS && want[i][count++] != eos)
            ;
        assert_int_equal(c.counts[i], count);
        assert_memory_equal(c.ids[i], want[i], count * sizeof(uint32_t));
    }
    runner_close(&r);
}

/* ---- prompts between steps ---- */

#define PIECE 16u
#define LINES 3u

/* Tokens that answers under way wait for, counted. */
typedef struct waiting {
    uint32_t under_way, ended;
    uint32_t since, longest; /* tokens read since their last step; most of them */
    uint32_t held;           /* steps after such tokens */
    uint32_t ids[LINES][TOKENS];
} waiting;

static bool on_line_token(void *user, const kvf_batch_answer *answer, uint32_t id)
{
    waiting *w = user;
    w->under_way += answer->generated == 1;
    w->ids[answer->prompt][answer->generated - 1] = id;
    return true;
}

static void on_line_end(void *user, const kvf_batch_answer *answer)
{
    waiting *w = user;
    assert_int_equal(answer->generated, TOKENS);
    w->under_way--;
    w->ended++;
}

static bool on_line_pass(void *user, uint32_t prefilled, uint32_t rows, double ms)
{
    waiting *w = user;
    (void)ms;
    w->held += rows && w->since;
    w->since = rows ? 0 : w->since + (w->under_way ? prefilled : 0);
    w->longest = kvf_max_u32(w->longest, w->since);
    return true;
}

/* Two rows: long prompts are read while the answer to a short one goes on, piece by piece. */
TEST(answers_go_on_while_a_prompt_is_read)
{
    const uint32_t lengths[LINES] = {20, LONG, LONG - 9};
    const kvf_sampling_config config = warm(21);
    kvf_batch_prompt prompts[LINES];
    rig_prompt lines[LINES];
    waiting w = {0};
    kvf_error error;
    runner r;
    runner_open(&r, &config);
    for (uint32_t i = 0; i < LINES; i++) {
        lines[i] = one_prompt(i, lengths[i]);
        prompts[i] = (kvf_batch_prompt){.ids = lines[i].ids,
                                        .count = lengths[i],
                                        .tokens = TOKENS,
                                        .samples = 1,
                                        .sampling = config};
    }
    kvf_batch_request request = {.prompts = prompts,
                                 .count = LINES,
                                 .rows = BATCH - 1,
                                 .piece = PIECE,
                                 .tokens_max = 10000,
                                 .vocab_size = VOCAB,
                                 .sampler = r.sampler,
                                 .token = on_line_token,
                                 .end = on_line_end,
                                 .pass = on_line_pass,
                                 .user = &w};
    r.session.chunk = PIECE; /* pieces of a prompt that is read alone */
    model_rig_must(&r.rig, kvf_generate_batch(&r.session, &request, &error), "batch");
    assert_int_equal(w.ended, LINES);
    assert_in_range(w.longest, 1, PIECE);
    assert_true(w.held >= LONG / PIECE - 1);
    for (uint32_t i = 0; i < LINES; i++) {
        waiting one = {0};
        request.prompts = &prompts[i];
        request.count = 1;
        request.user = &one;
        model_rig_must(&r.rig, kvf_generate_batch(&r.session, &request, &error), "alone");
        assert_int_equal(one.longest, 0);
        assert_memory_equal(w.ids[i], one.ids[0], sizeof one.ids[0]);
    }
    runner_close(&r);
}

TEST(answers_of_a_batch_are_single_runs)
{
    check_batch(false);
    check_batch(true);
}
