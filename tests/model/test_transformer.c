/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The transformer apart from its numbers: tensors that are missing or misshapen are named, ids out
 * of range are refused, and the order of layers and chunks does not change what comes out.
 */

#include "model_fixture.h"
#include "model_rig.h"
#include "unit.h"

#define PROMPT 90u
#define STEPS  12u
#define VOCAB  200u
#define CHUNK  64u

typedef struct rig {
    model_rig model;
    kvf_sequence *sequences[2];
    uint32_t chunk_max, prompt_max; /* 0 = CHUNK, as chunk_max */
    uint32_t budget;                /* 0 = less than there are tokens */
} rig;

static kvf_transformer_options options_of(const rig *r)
{
    kvf_transformer_options options = model_rig_options(&r->model);
    options.chunk_max = r->chunk_max ? r->chunk_max : CHUNK;
    options.prompt_max = r->prompt_max;
    options.batch_max = 2;
    return options;
}

static void rig_open(rig *r)
{
    kvf_cache_config cc;
    model_rig_make(&r->model, &(model_shape){.layers = 2}, 2);
    const kvf_transformer_options options = options_of(r);
    model_rig_transformer(&r->model, &options, &cc);
    kvf_cache_config_preset(&cc, KVF_PRESET_PRKV);
    cc.refresh = KVF_REFRESH_RESIDENT;
    cc.tokens_max = PROMPT + STEPS;
    cc.sequences_max = 2;
    cc.page_size = 8;
    cc.local_tokens = 16;
    cc.budget_tokens = r->budget ? r->budget : 88;
    model_rig_cache(&r->model, &cc);
    for (int i = 0; i < 2; i++)
        r->sequences[i] = model_rig_sequence(&r->model);
}

static uint32_t id_of(uint32_t index)
{
    return index * 37u % VOCAB;
}

static void prefill(rig *r, uint32_t chunk)
{
    uint32_t ids[PROMPT];
    for (uint32_t i = 0; i < PROMPT; i++)
        ids[i] = id_of(i);
    for (uint32_t done = 0; done < PROMPT; done += chunk)
        model_rig_prefill(&r->model, r->sequences[0], ids + done,
                          PROMPT - done < chunk ? PROMPT - done : chunk);
}

/* Logits of all steps: [STEPS][VOCAB]. */
static void decode(rig *r, float *logits)
{
    for (uint32_t step = 0; step < STEPS; step++) {
        const uint32_t id = id_of(PROMPT + step);
        model_rig_decode(&r->model, r->sequences, &id, 1, logits + (size_t)step * VOCAB);
    }
}

static void feed(rig *r, kvf_sequence *sequence, uint32_t first, uint32_t count, bool by_steps)
{
    uint32_t ids[PROMPT];
    for (uint32_t i = 0; i < count; i++)
        ids[i] = id_of(first + i);
    if (!by_steps)
        model_rig_prefill(&r->model, sequence, ids, count);
    for (uint32_t i = 0; by_steps && i < count; i++)
        model_rig_decode(&r->model, &sequence, &ids[i], 1, NULL);
}

/* A conversation: a prompt, steps, and another prompt on a fork, after one that was given up. With
 * a budget for all tokens it is one prompt. bf16 keys of a chunk may round differently where a
 * product was summed in another order, so this is a comparison of numbers; a token that is lost or
 * moved is off by far more. */
TEST(a_prompt_goes_on_behind_steps)
{
    enum { FIRST = 48, ANSWER = 11 };
    static float want[STEPS * VOCAB], got[STEPS * VOCAB];
    for (uint32_t by_layer = 0; by_layer < 2; by_layer++) {
        rig whole = {.budget = 4 * PROMPT, .prompt_max = by_layer * PROMPT};
        rig parts = whole;
        rig_open(&whole);
        prefill(&whole, CHUNK);
        decode(&whole, want);
        model_rig_close(&whole.model);
        rig_open(&parts);
        kvf_sequence_destroy(parts.sequences[1]);
        feed(&parts, parts.sequences[0], 0, FIRST, false);
        assert_int_equal(kvf_sequence_fork(parts.model.cache, parts.sequences[0],
                                           parts.model.stream, &parts.sequences[1]),
                         KVF_OK);
        feed(&parts, parts.sequences[0], 3, ANSWER + 2, true);
        kvf_transformer_forget(parts.model.transformer);
        kvf_sequence_destroy(parts.sequences[0]);
        feed(&parts, parts.sequences[1], FIRST, ANSWER, true);
        assert_int_equal(kvf_sequence_fork(parts.model.cache, parts.sequences[1],
                                           parts.model.stream, &parts.sequences[0]),
                         KVF_OK);
        feed(&parts, parts.sequences[0], FIRST + ANSWER, PROMPT - FIRST - ANSWER, false);
        decode(&parts, got);
        model_rig_close(&parts.model);
        if (!(model_rig_distance(got, want, STEPS * VOCAB) < 5e-3))
            fail_msg("by layer %u: %g", by_layer, model_rig_distance(got, want, STEPS * VOCAB));
    }
}

/* A prompt that goes layer by layer gives the bits of one that goes chunk by chunk. */
TEST(order_of_layers_does_not_matter)
{
    static float want[STEPS * VOCAB], got[STEPS * VOCAB];
    rig by_chunk = {.chunk_max = 17}, by_layer = {.chunk_max = 17, .prompt_max = PROMPT};
    rig_open(&by_chunk);
    prefill(&by_chunk, 17);
    decode(&by_chunk, want);
    model_rig_close(&by_chunk.model);
    rig_open(&by_layer);
    assert_int_equal(kvf_transformer_prompt_max(by_layer.model.transformer), PROMPT);
    prefill(&by_layer, PROMPT);
    decode(&by_layer, got);
    model_rig_close(&by_layer.model);
    assert_memory_equal(got, want, sizeof want);
}

TEST(ids_out_of_range_are_refused)
{
    rig r = {0};
    rig_open(&r);
    const uint32_t ids[2] = {3, VOCAB};
    assert_int_equal(kvf_transformer_prefill(r.model.transformer, r.model.cache, r.sequences[0],
                                             ids, 2, r.model.stream),
                     KVF_INVALID);
    assert_int_equal(kvf_transformer_decode(r.model.transformer, r.model.cache, r.sequences, ids, 2,
                                            true, r.model.stream),
                     KVF_INVALID);
    assert_int_equal(kvf_transformer_prefill(r.model.transformer, r.model.cache, r.sequences[0],
                                             ids, 0, r.model.stream),
                     KVF_INVALID);
    assert_int_equal(kvf_sequence_length(r.sequences[0], 0), 0);
    model_rig_close(&r.model);
}

/* Opening weights of two layers of Qwen3 as something else. */
static void expect_refusal(const model_shape *as, const char *part)
{
    rig r = {0};
    char config[MODEL_TEXT_BYTES];
    kvf_error error = {0};
    model_rig_make(&r.model, &(model_shape){.layers = 2}, 1);
    model_shape_text(as, config);
    assert_int_equal(
        kvf_model_config_parse(config, strlen(config), NULL, 0, &r.model.model, &error), KVF_OK);
    const kvf_transformer_options options = options_of(&r);
    const kvf_status status = kvf_transformer_open(&options, &r.model.transformer, &error);
    fixture_expect(status, &error, KVF_CORRUPT, part);
    assert_null(r.model.transformer);
    model_rig_close(&r.model);
}

/* Says no to one question. */
typedef struct asker {
    uint32_t asked, no_at, last;
} asker;

static bool ask(void *user, uint32_t done, uint32_t total)
{
    asker *a = user;
    assert_int_equal(total, PROMPT);
    assert_in_range(done, a->last, total);
    a->last = done;
    return ++a->asked != a->no_at;
}

/* Two layers of two operations each: asked in front of all but the first. */
TEST(a_prefill_stops_where_it_is_told)
{
    static float want[STEPS * VOCAB], got[STEPS * VOCAB];
    rig r = {.prompt_max = PROMPT};
    rig_open(&r);
    for (uint32_t no_at = 1; no_at <= 4; no_at++) {
        asker a = {.no_at = no_at};
        kvf_transformer_watch(r.model.transformer, ask, &a);
        prefill(&r, PROMPT);
        assert_int_equal(kvf_transformer_stopped(r.model.transformer), no_at < 4);
        assert_int_equal(a.asked, no_at < 4 ? no_at : 3);
        if (no_at < 4) {
            kvf_sequence_destroy(r.sequences[0]);
            r.sequences[0] = model_rig_sequence(&r.model);
        }
    }
    decode(&r, got);
    kvf_transformer_watch(r.model.transformer, NULL, NULL);
    kvf_transformer_forget(r.model.transformer);
    kvf_sequence_destroy(r.sequences[0]);
    r.sequences[0] = model_rig_sequence(&r.model);
    prefill(&r, PROMPT);
    decode(&r, want);
    assert_memory_equal(want, got, sizeof want);
    model_rig_close(&r.model);
}

TEST(tensors_are_named)
{
    expect_refusal(&(model_shape){.layers = 3}, "model.layers.2.input_layernorm.weight");
    expect_refusal(&(model_shape){.layers = 2, .intermediate = 256},
                   "model.layers.0.mlp.gate_proj.weight");
    expect_refusal(&(model_shape){.layers = 2, .is_untied = true}, "lm_head.weight");
    expect_refusal(&(model_shape){.family = "Qwen2", .layers = 2},
                   "model.layers.0.self_attn.q_proj.bias");
}

static kvf_cache_config config_of(model_rig *model)
{
    kvf_cache_config cc;
    model_rig_make(model, &(model_shape){.layers = 2}, 1);
    kvf_transformer_options options = model_rig_options(model);
    options.chunk_max = CHUNK;
    options.batch_max = 1;
    model_rig_transformer(model, &options, &cc);
    cc.tokens_max = CHUNK;
    return cc;
}

TEST(another_geometry_is_refused)
{
    static const char *texts[] = {
        "layers = 3: the model has 2;",       "query_heads = 8: the model has 4;",
        "kv_heads = 1: the model has 2;",     "head_dim = 32: the model has 64;",
        "value_dim = 32: the model has 64;",  "dtype = 1: the model has 0;",
        "softmax_scale = 0.5: the model has "};
    model_rig model;
    const kvf_cache_config own = config_of(&model);
    kvf_cache_config others[] = {own, own, own, own, own, own, own};
    others[0].layers = 3;
    others[1].query_heads = 8;
    others[2].kv_heads = 1;
    others[3].head_dim = 32;
    others[4].value_dim = 32;
    others[5].dtype = KVF_FP16;
    others[6].softmax_scale = 0.5f;
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        kvf_error error = {0};
        kvf_cache *cache = (kvf_cache *)&model;
        assert_int_equal(kvf_transformer_cache_open(model.transformer, &others[i], &cache, &error),
                         KVF_INVALID);
        assert_null(cache);
        if (strncmp(error.text, texts[i], strlen(texts[i])) != 0 ||
            !strstr(error.text, "leave it to kvf_transformer_geometry"))
            fail_msg("%s", error.text);
    }
    model_rig_cache(&model, &own);
    model_rig_close(&model);
}
