/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Pruned prefill of a session: the hidden state is what the head sees, a session prunes its prompt,
 * and bad prompts are refused.
 */

#include "common/convert.h"
#include "generate.h"
#include "layer_ops.h"
#include "prune_run_rig.h"

#include <math.h>

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
