/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Pruned prefill of a whole model, as identities: what must not change does not change a bit, a
 * restart is a fresh run, and nothing is lost where every page is selected; the hidden state is
 * what the head sees, a session prunes its prompt, and bad prompts are refused.
 */

#include "common/convert.h"
#include "layer_ops.h"
#include "prune_run_rig.h"
#include "sweep.h"

#include <math.h>

/* ---- identities ---- */

/* The emulator takes its time: there each policy meets one retention, and each retention meets
 * every second policy. */
TEST(keeping_all_is_full)
{
    static const char *const names[] = {"full",      "snapkv",       "h2o",    "streaming",
                                        "pyramidkv", "pyramidinfer", "fastkv", "structkv"};
    static outcome plain, got;
    rig r;
    kvf_prune_stats stats;
    uint64_t tried = 0, cases = 0;
    const rig_prompt b = one_prompt(0, PROMPT);
    rig_open(&r, KVF_SELECT_HYBRID, 64);
    const bool on_host = kvf_runtime_device(r.runtime) == KVF_DEVICE_HOST;
    rig_run_plain(&r, b.ids, PROMPT, &plain);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        for (kvf_retention retention = KVF_RETENTION_OFFLOAD; retention <= KVF_RETENTION_EVICT;
             retention++, cases++) {
            if (!on_host && i % 2 != (retention == KVF_RETENTION_EVICT))
                continue;
            tried++;
            kvf_prune_config config = rig_config_of(names[i]);
            config.settings.window = WINDOW;
            config.settings.keep = 1.0f;
            config.settings.propagate = 1.0f;
            config.retention = retention;
            rig_run_one(&r, &config, &got, &stats);
            outcome_expect_same(&plain, &got, names[i]);
            assert_int_equal(stats.prompts, 1);
            assert_int_equal(stats.tokens_computed, PROMPT * LAYERS);
            assert_int_equal(stats.tokens_full, PROMPT * LAYERS);
            assert_int_equal(stats.kept, PROMPT * LAYERS);
        }
    sweep_tell(tried, cases);
    model_rig_close(&r);
}

/* ---- restart ---- */

/* Shortens twice, then starts over. */
static void shorten_and_restart(const kvf_prune_view *view, kvf_prune_answer *answer)
{
    spy *s = view->user;
    if (view->pass > 0 || view->layer == 3)
        return;
    answer->propagate_count = pick_strided(view, 2, answer->propagate);
    answer->restart = view->layer == 2;
    s->restarts += answer->restart;
    s->count = answer->propagate_count;
    for (uint32_t i = 0; i < s->count; i++)
        s->ids[i] = view->positions[answer->propagate[i]];
}

static void expect_fresh(rig *r, const spy *s, const outcome *got, const char *what)
{
    static outcome fresh;
    const rig_prompt b = one_prompt(0, PROMPT);
    uint32_t ids[PROMPT];
    assert_int_equal(s->restarts, 1);
    assert_in_range(s->count, 1, PROMPT - 1);
    for (uint32_t i = 0; i < s->count; i++)
        ids[i] = b.ids[s->ids[i]];
    rig_run_plain(r, ids, s->count, &fresh);
    outcome_expect_same(&fresh, got, what);
}

TEST(restart_is_a_fresh_run)
{
    static outcome got;
    rig r;
    rig_open(&r, KVF_SELECT_HYBRID, 64);
    spy gem = {0}, twice = {0}, asl = {0};
    kvf_prune_config config = rig_config_of("gemfilter");
    kvf_prune_stats stats;
    kvf_prune_policy policy = spy_policy(&gem, "gemfilter");
    config.policy = &policy;
    config.settings.keep = 0.4f;
    rig_run_one(&r, &config, &got, &stats);
    expect_fresh(&r, &gem, &got, "gemfilter");
    assert_int_equal(stats.tokens_computed, PROMPT * (stats.chosen_layer + 1) + gem.count * LAYERS);

    policy = own_policy(shorten_and_restart, &twice);
    kvf_prune_config_init(&config, &policy);
    config.settings.window = WINDOW;
    rig_run_one(&r, &config, &got, NULL);
    expect_fresh(&r, &twice, &got, "after two propagations");

    config = rig_config_of("asl");
    policy = spy_policy(&asl, "asl");
    config.policy = &policy;
    config.settings.window = WINDOW;
    config.settings.two_pass = 1;
    config.settings.layers_observed = 2;
    config.settings.layer_min = 1;
    config.settings.threshold = 1e9f;
    config.settings.propagate_tokens = 60;
    config.settings.keep_tokens = 60;
    rig_run_one(&r, &config, &got, NULL);
    expect_fresh(&r, &asl, &got, "asl in two passes");
    model_rig_close(&r);
}

/* ---- offload ---- */

/* Propagates at layer 1 what a spy saw, and keeps all. */
static void propagate_the_same(const kvf_prune_view *view, kvf_prune_answer *answer)
{
    const spy *s = view->user;
    if (view->layer != 1)
        return;
    memcpy(answer->propagate, s->ids, s->count * sizeof *s->ids);
    answer->propagate_count = s->count;
}

static double distance(const outcome *a, const outcome *b)
{
    return model_rig_distance(a->logits[0], b->logits[0], STEPS * VOCAB);
}

/* With every page selected nothing is lost: as if the tokens that were propagated were all kept. */
TEST(offload_with_all_pages_is_dense)
{
    static outcome kept, dense, evicted;
    rig r;
    spy s = {0};
    rig_open(&r, KVF_SELECT_FULL, 64);
    kvf_prune_config config = rig_config_of("fastkv");
    const kvf_prune_policy watched = spy_policy(&s, "fastkv");
    config.policy = &watched;
    config.settings.propagate = 0.4f;
    rig_run_one(&r, &config, &kept, NULL);
    config.retention = KVF_RETENTION_EVICT;
    rig_run_one(&r, &config, &evicted, NULL);
    const kvf_prune_policy all = own_policy(propagate_the_same, &s);
    kvf_prune_config_init(&config, &all);
    config.settings.window = WINDOW;
    rig_run_one(&r, &config, &dense, NULL);
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        assert_int_equal(kept.lengths[layer], layer <= 1 ? PROMPT : PROMPT * 2 / 5);
        for (uint32_t i = 0; i < kept.lengths[layer]; i++)
            assert_int_equal(kept.positions[layer][i], layer <= 1 ? i : s.ids[i]);
        assert_int_equal(kept.lengths[layer], dense.lengths[layer]);
        assert_memory_equal(kept.positions[layer], dense.positions[layer],
                            sizeof kept.positions[layer]);
    }
    /* Attention is summed in another order, and rounded to bf16 in every layer. */
    const double far = distance(&evicted, &dense);
    assert_true(distance(&kept, &dense) < 1e-2);
    assert_true(far > 5e-2); /* or it would pass with tokens lost */
    model_rig_close(&r);
}

/* ---- hidden states ---- */

static void hidden_of(rig *r, const kvf_prune_config *config, float *hidden)
{
    kvf_sequence *s = model_rig_sequence(r);
    kvf_prune *prune = config ? rig_open_prune(r, config) : NULL;
    const rig_prompt b = one_prompt(0, PROMPT);
    const kvf_prompt prompt = {.sequence = s, .ids = b.ids, .count = PROMPT};
    model_rig_must(
        r, kvf_transformer_hidden(r->transformer, r->cache, prune, &prompt, hidden, r->stream),
        "kvf_transformer_hidden");
    kvf_sequence_destroy(s);
    kvf_prune_close(prune);
}

/* Final norm and head, in double. */
static void head_of(const rig *r, const float *hidden, float *logits)
{
    const kvf_tensor *norm = NULL, *table = NULL;
    kvf_error error;
    float weight[HIDDEN], row[HIDDEN];
    const uint64_t norm_shape[2] = {HIDDEN, 0}, table_shape[2] = {VOCAB, HIDDEN};
    double square = 0.0;
    model_rig_must(
        r, kvf_weights_find(r->weights, "model.norm.weight", 1, norm_shape, &norm, &error), "norm");
    model_rig_must(
        r,
        kvf_weights_find(r->weights, "model.embed_tokens.weight", 2, table_shape, &table, &error),
        "embedding");
    kvf_numbers_widen(norm->data, norm->dtype, HIDDEN, weight);
    for (uint32_t i = 0; i < HIDDEN; i++)
        square += (double)hidden[i] * (double)hidden[i];
    const double scale = 1.0 / sqrt(square / HIDDEN + 1e-6);
    for (uint32_t id = 0; id < VOCAB; id++) {
        const size_t bytes = HIDDEN * kvf_dtype_bytes(table->dtype);
        kvf_numbers_widen((const unsigned char *)table->data + id * bytes, table->dtype, HIDDEN,
                          row);
        double logit = 0.0;
        for (uint32_t i = 0; i < HIDDEN; i++)
            logit += (double)hidden[i] * scale * (double)weight[i] * (double)row[i];
        logits[id] = (float)logit;
    }
}

TEST(hidden_state_is_what_the_head_sees)
{
    static float hidden[HIDDEN], pruned[HIDDEN];
    float logits[VOCAB], want[VOCAB];
    rig r;
    rig_open(&r, KVF_SELECT_FULL, 64);
    const rig_prompt b = one_prompt(0, PROMPT);
    hidden_of(&r, NULL, hidden);
    head_of(&r, hidden, logits);
    kvf_sequence *s = model_rig_sequence(&r);
    model_rig_prefill(&r, s, b.ids, PROMPT - 1);
    model_rig_decode(&r, &s, &b.ids[PROMPT - 1], 1, want);
    assert_true(model_rig_distance(logits, want, VOCAB) < 1e-2); /* bf16 in other places */
    kvf_transformer_forget(r.transformer);
    kvf_sequence_destroy(s);

    kvf_prune_config config = rig_config_of("full");
    hidden_of(&r, &config, pruned);
    assert_memory_equal(pruned, hidden, sizeof hidden);
    config = rig_config_of("fastkv");
    config.settings.propagate = 1.0f; /* keeping comes after a layer's attention */
    hidden_of(&r, &config, pruned);
    assert_memory_equal(pruned, hidden, sizeof hidden);
    config.settings.propagate = 0.2f;
    hidden_of(&r, &config, pruned);
    assert_memory_not_equal(pruned, hidden, sizeof hidden);
    model_rig_close(&r);
}

/* ---- sessions and bad input ---- */

TEST(session_prunes_its_prompt)
{
    static outcome want, got;
    rig r;
    kvf_error error;
    kvf_stop stop;
    const rig_prompt b = one_prompt(0, PROMPT);
    rig_open(&r, KVF_SELECT_HYBRID, 64);
    const kvf_prune_config config = rig_config_of("fastkv");
    rig_run_one(&r, &config, &want, NULL);
    kvf_prune *prune = rig_open_prune(&r, &config);
    const kvf_session session = rig_session(&r, prune);
    kvf_sequence *s = model_rig_sequence(&r);
    kvf_prefill_request request = {.sequence = s, .ids = b.ids, .count = PROMPT};
    model_rig_must(&r, kvf_generate_prefill(&session, &request, &stop, &error),
                   "kvf_generate_prefill");
    assert_int_equal(stop, KVF_STOP_LENGTH);
    rig_note_layers(s, &got);
    rig_decode(&r, s, &got);
    outcome_expect_same(&want, &got, "a session");
    request.count = 5; /* not empty any more */
    fixture_expect(kvf_generate_prefill(&session, &request, &stop, &error), &error, KVF_INVALID,
                   "not empty");
    kvf_sequence_destroy(s);
    kvf_prune_close(prune);
    model_rig_close(&r);
}

TEST(bad_prompts_are_refused)
{
    rig r;
    kvf_error error;
    kvf_stop stop;
    static uint32_t ids[PROMPTS + 1];
    rig_open(&r, KVF_SELECT_HYBRID, 64);
    const kvf_prune_config config = rig_config_of("fastkv");
    kvf_prune *prune = rig_open_prune(&r, &config);
    const kvf_session session = rig_session(&r, prune);
    kvf_sequence *s = model_rig_sequence(&r);
    kvf_prefill_request request = {.sequence = s, .ids = ids, .count = PROMPTS + 1};
    fixture_expect(kvf_generate_prefill(&session, &request, &stop, &error), &error, KVF_INVALID,
                   "prompt_max");
    request.count = WINDOW - 1;
    fixture_expect(kvf_generate_prefill(&session, &request, &stop, &error), &error, KVF_INVALID,
                   "window");
    request.count = WINDOW + 1; /* of which a tenth is less than the window */
    fixture_expect(kvf_generate_prefill(&session, &request, &stop, &error), &error, KVF_INVALID,
                   "keep");
    ids[3] = VOCAB;
    assert_int_equal(kvf_transformer_prefill_chunked(r.transformer, r.cache, prune, s, ids, PROMPT,
                                                     PROMPT, false, r.stream),
                     KVF_INVALID);
    ids[3] = 0;
    for (uint32_t layer = 0; layer < LAYERS; layer++) /* nothing of it touched the sequence */
        assert_int_equal(kvf_sequence_length(s, layer), 0);
    request.count = PROMPT;
    model_rig_must(&r, kvf_generate_prefill(&session, &request, &stop, &error),
                   "kvf_generate_prefill");
    kvf_sequence_destroy(s);
    kvf_prune_close(prune);
    model_rig_close(&r);
}
