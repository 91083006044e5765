/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Pruned prefill of a whole model, as identities: what must not change does not change a bit, a
 * restart is a fresh run, a batch is its prompts one by one, and lengths and true positions of
 * deeper layers are what the policy said.
 *
 * A run is compared by everything that comes out of it: lengths and positions of every layer, and
 * the logits of the steps after the prompt, decoded with a budget that makes selection matter.
 */

#include "common/convert.h"
#include "generate.h"
#include "layer_ops.h"
#include "model_fixture.h"
#include "random_model.h"
#include "transformer.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define LAYERS  4u
#define HEADS   2u
#define VOCAB   200u
#define HIDDEN  128u
#define PROMPT  150u
#define STEPS   5u
#define CHUNK   17u
#define BATCH   3u
#define WINDOW  8u
#define PROMPTS (2 * PROMPT + 20u) /* rows of a batch */

typedef struct rig {
    char *directory;
    kvf_runtime *runtime;
    kvf_stream *stream;
    kvf_weights *weights;
    kvf_model_config model;
    kvf_transformer *transformer;
    kvf_cache *cache;
} rig;

static void rig_open(rig *r, kvf_select select, uint32_t budget)
{
    char config[1024];
    kvf_error error;
    kvf_runtime_config rc;
    kvf_cache_config cc;
    *r = (rig){0};
    snprintf(config, sizeof config,
             "{\"architectures\": [\"Qwen3ForCausalLM\"], \"hidden_size\": %u,"
             " \"intermediate_size\": 192, \"num_hidden_layers\": %u, \"num_attention_heads\": 4,"
             " \"num_key_value_heads\": %u, \"head_dim\": 64, \"vocab_size\": %u,"
             " \"hidden_act\": \"silu\", \"max_position_embeddings\": 512,"
             " \"rope_theta\": 10000.0, \"rms_norm_eps\": 1e-6, \"tie_word_embeddings\": true,"
             " \"torch_dtype\": \"bfloat16\"}",
             HIDDEN, LAYERS, HEADS, VOCAB);
    r->directory = fixture_directory_create();
    assert_true(random_model_write(r->directory, config));
    kvf_runtime_config_init(&rc);
    fixture_device(&rc);
    rc.threads = 2;
    assert_int_equal(kvf_runtime_open(&rc, &r->runtime, &error), KVF_OK);
    assert_int_equal(kvf_stream_create(r->runtime, &r->stream), KVF_OK);
    assert_int_equal(kvf_weights_open(r->directory, NULL, &r->weights, &error), KVF_OK);
    assert_int_equal(kvf_model_config_read(r->directory, NULL, &r->model, &error), KVF_OK);
    const kvf_transformer_options options = {.runtime = r->runtime,
                                             .model = &r->model,
                                             .weights = r->weights,
                                             .chunk_max = CHUNK,
                                             .prompt_max = PROMPTS,
                                             .batch_max = BATCH,
                                             .isa_mask = KVF_ISA_ALL};
    assert_int_equal(kvf_transformer_open(&options, &r->transformer, &error), KVF_OK);
    kvf_cache_config_init(&cc);
    kvf_transformer_geometry(&options, &cc);
    cc.tokens_max = PROMPT + STEPS;
    cc.sequences_max = BATCH;
    cc.page_size = 8;
    cc.local_tokens = 16;
    cc.budget_tokens = budget;
    cc.select = select;
    cc.observe_window = WINDOW;
    if (kvf_cache_open(r->runtime, &cc, &r->cache, &error) != KVF_OK)
        fail_msg("kvf_cache_open: %s", error.text);
}

static void rig_close(rig *r)
{
    kvf_transformer_close(r->transformer);
    kvf_cache_close(r->cache);
    kvf_weights_close(r->weights);
    kvf_stream_destroy(r->stream);
    kvf_runtime_close(r->runtime);
    fixture_directory_remove(r->directory);
}

/* A status that must be; on failure says the library's text. */
static void must(const rig *r, kvf_status status, const char *what)
{
    if (status != KVF_OK)
        fail_msg("%s: %s %s", what, kvf_status_name(status), kvf_runtime_error(r->runtime)->text);
}

/* ---- a run and what comes out of it ---- */

typedef struct outcome {
    uint32_t lengths[LAYERS];
    uint32_t positions[LAYERS][PROMPT];
    float logits[STEPS][VOCAB];
} outcome;

static uint32_t id_of(uint32_t sequence, uint32_t index)
{
    return (index * index * 7u + index * 37u + sequence * 11u) % VOCAB;
}

static void note_layers(const kvf_sequence *s, outcome *o)
{
    memset(o, 0, sizeof *o);
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        o->lengths[layer] = kvf_sequence_length(s, layer);
        for (uint32_t i = 0; i < o->lengths[layer]; i++)
            o->positions[layer][i] = kvf_sequence_position(s, layer, i);
    }
}

static void decode(rig *r, kvf_sequence *s, outcome *o)
{
    for (uint32_t step = 0; step < STEPS; step++) {
        const uint32_t id = id_of(9, step);
        must(r, kvf_transformer_decode(r->transformer, r->cache, &s, &id, 1, true, r->stream),
             "kvf_transformer_decode");
        must(r, kvf_stream_wait(r->stream), "kvf_stream_wait");
        memcpy(o->logits[step], kvf_transformer_logits(r->transformer, 0), sizeof o->logits[step]);
    }
    kvf_transformer_forget(r->transformer);
}

static kvf_prune *open_prune(rig *r, const kvf_prune_config *config)
{
    kvf_prune *prune = NULL;
    kvf_error error;
    if (kvf_prune_open(r->cache, config, &prune, &error) != KVF_OK)
        fail_msg("kvf_prune_open: %s", error.text);
    return prune;
}

/* Prompts of these lengths and ids in one call. */
typedef struct batch {
    uint32_t count;
    uint32_t lengths[BATCH];
    uint32_t ids[BATCH][PROMPT];
} batch;

static batch one_prompt(uint32_t sequence, uint32_t length)
{
    batch b = {.count = 1, .lengths = {length}};
    for (uint32_t i = 0; i < length; i++)
        b.ids[0][i] = id_of(sequence, i);
    return b;
}

static void run_batch(rig *r, const kvf_prune_config *config, const batch *b, outcome *out,
                      kvf_prune_stats *stats)
{
    kvf_sequence *s[BATCH] = {NULL};
    kvf_prompt prompts[BATCH];
    kvf_prune *prune = open_prune(r, config);
    for (uint32_t i = 0; i < b->count; i++) {
        must(r, kvf_sequence_create(r->cache, &s[i]), "kvf_sequence_create");
        prompts[i] = (kvf_prompt){.sequence = s[i], .ids = b->ids[i], .count = b->lengths[i]};
    }
    must(r,
         kvf_transformer_prefill_pruned(r->transformer, r->cache, prune, prompts, b->count,
                                        r->stream),
         "kvf_transformer_prefill_pruned");
    must(r, kvf_stream_wait(r->stream), "kvf_stream_wait");
    if (stats)
        kvf_prune_stats_get(prune, stats);
    for (uint32_t i = 0; i < b->count; i++)
        note_layers(s[i], &out[i]);
    for (uint32_t i = 0; i < b->count; i++) {
        decode(r, s[i], &out[i]);
        kvf_sequence_destroy(s[i]);
    }
    must(r, kvf_stream_wait(r->stream), "kvf_stream_wait");
    kvf_prune_close(prune);
}

static void run_one(rig *r, const kvf_prune_config *config, outcome *out, kvf_prune_stats *stats)
{
    const batch b = one_prompt(0, PROMPT);
    run_batch(r, config, &b, out, stats);
}

/* The same prompt without a pruner. */
static void run_plain(rig *r, const uint32_t *ids, uint32_t count, outcome *out)
{
    kvf_sequence *s = NULL;
    must(r, kvf_sequence_create(r->cache, &s), "kvf_sequence_create");
    must(r, kvf_transformer_prefill(r->transformer, r->cache, s, ids, count, r->stream),
         "kvf_transformer_prefill");
    must(r, kvf_stream_wait(r->stream), "kvf_stream_wait");
    note_layers(s, out);
    decode(r, s, out);
    kvf_sequence_destroy(s);
}

static void expect_same(const outcome *a, const outcome *b, const char *what)
{
    for (uint32_t layer = 0; layer < LAYERS; layer++)
        if (a->lengths[layer] != b->lengths[layer] ||
            memcmp(a->positions[layer], b->positions[layer], sizeof a->positions[layer]) != 0)
            fail_msg("%s: layer %u holds other tokens (%u and %u)", what, layer, a->lengths[layer],
                     b->lengths[layer]);
    for (uint32_t step = 0; step < STEPS; step++)
        if (memcmp(a->logits[step], b->logits[step], sizeof a->logits[step]) != 0)
            fail_msg("%s: other logits at step %u", what, step);
}

static bool is_same_logits(const outcome *a, const outcome *b)
{
    return memcmp(a->logits, b->logits, sizeof a->logits) == 0;
}

/* Of all logits, relative. */
static double distance(const outcome *a, const outcome *b)
{
    double difference = 0.0, norm = 0.0;
    for (uint32_t step = 0; step < STEPS; step++)
        for (uint32_t i = 0; i < VOCAB; i++) {
            const double x = (double)a->logits[step][i], y = (double)b->logits[step][i];
            difference += (x - y) * (x - y);
            norm += y * y;
        }
    return sqrt(difference / norm);
}

static kvf_prune_config config_of(const char *name)
{
    kvf_prune_config config;
    const kvf_prune_policy *policy = kvf_prune_policy_find(name);
    assert_non_null(policy);
    kvf_prune_config_init(&config, policy);
    return config;
}

/* ---- identities ---- */

static void full_changes_nothing(void **state)
{
    (void)state;
    static outcome plain, full;
    rig r;
    const batch b = one_prompt(0, PROMPT);
    for (kvf_retention retention = KVF_RETENTION_OFFLOAD; retention <= KVF_RETENTION_EVICT;
         retention++) {
        rig_open(&r, KVF_SELECT_HYBRID, 64);
        kvf_prune_config config = config_of("full");
        kvf_prune_stats stats;
        config.retention = retention;
        run_plain(&r, b.ids[0], PROMPT, &plain);
        run_one(&r, &config, &full, &stats);
        expect_same(&plain, &full, "full");
        assert_int_equal(stats.prompts, 1);
        assert_int_equal(stats.tokens_computed, PROMPT * LAYERS);
        assert_int_equal(stats.tokens_full, PROMPT * LAYERS);
        assert_int_equal(stats.kept, PROMPT * LAYERS);
        assert_int_equal(stats.chosen_layer, KVF_PRUNE_LAYER_AUTO);
        rig_close(&r);
    }
}

static void keeping_all_is_full(void **state)
{
    (void)state;
    static const char *const names[] = {"snapkv",       "h2o",    "streaming", "pyramidkv",
                                        "pyramidinfer", "fastkv", "structkv"};
    static outcome plain, got;
    rig r;
    const batch b = one_prompt(0, PROMPT);
    rig_open(&r, KVF_SELECT_HYBRID, 64);
    run_plain(&r, b.ids[0], PROMPT, &plain);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        for (kvf_retention retention = KVF_RETENTION_OFFLOAD; retention <= KVF_RETENTION_EVICT;
             retention++) {
            kvf_prune_config config = config_of(names[i]);
            config.settings.window = WINDOW;
            config.settings.keep = 1.0f;
            config.settings.propagate = 1.0f;
            config.retention = retention;
            run_one(&r, &config, &got, NULL);
            expect_same(&plain, &got, names[i]);
        }
    rig_close(&r);
}

static void fastkv_that_propagates_all_is_snapkv(void **state)
{
    (void)state;
    static outcome fast, snap, plain;
    rig r;
    const batch b = one_prompt(0, PROMPT);
    rig_open(&r, KVF_SELECT_HYBRID, 64);
    run_plain(&r, b.ids[0], PROMPT, &plain);
    for (kvf_retention retention = KVF_RETENTION_OFFLOAD; retention <= KVF_RETENTION_EVICT;
         retention++) {
        kvf_prune_config config = config_of("fastkv");
        config.settings.keep = 0.3f;
        config.settings.propagate = 1.0f;
        config.retention = retention;
        run_one(&r, &config, &fast, NULL);
        config.policy = kvf_prune_policy_find("snapkv");
        run_one(&r, &config, &snap, NULL);
        expect_same(&fast, &snap, "snapkv");
        assert_false(is_same_logits(&fast, &plain)); /* or nothing was compared */
    }
    rig_close(&r);
}

static void fastkv_at_half_depth_computes_three_fifths(void **state)
{
    (void)state;
    static outcome got;
    rig r;
    for (kvf_retention retention = KVF_RETENTION_OFFLOAD; retention <= KVF_RETENTION_EVICT;
         retention++) {
        kvf_prune_config config = config_of("fastkv");
        kvf_prune_stats stats;
        rig_open(&r, KVF_SELECT_HYBRID, 64);
        config.retention = retention;
        run_one(&r, &config, &got, &stats);
        assert_int_equal(stats.tokens_full, PROMPT * LAYERS);
        assert_int_equal(5 * stats.tokens_computed, 3 * stats.tokens_full);
        assert_int_equal(stats.chosen_layer, LAYERS / 2 - 1);
        assert_int_equal(stats.kept, LAYERS * (PROMPT / 10));
        for (uint32_t layer = 0; layer < LAYERS; layer++) {
            const uint32_t tokens = layer < LAYERS / 2 ? PROMPT : PROMPT / 5;
            assert_int_equal(got.lengths[layer],
                             retention == KVF_RETENTION_EVICT ? PROMPT / 10 : tokens);
            assert_int_equal(got.positions[layer][got.lengths[layer] - 1], PROMPT - 1);
        }
        rig_close(&r);
    }
}

/* ---- policies of the test's own ---- */

/* What a wrapped policy said of the last restart or propagation, as indexes of its layer. */
typedef struct spy {
    const kvf_prune_policy *inner;
    uint32_t ids[PROMPT];
    uint32_t count;
    uint32_t restarts;
} spy;

static void spy_decide(const kvf_prune_view *view, kvf_prune_answer *answer)
{
    spy *s = view->user;
    s->inner->decide(view, answer);
    if (!answer->restart && answer->propagate_count == view->tokens)
        return;
    s->restarts += answer->restart;
    s->count = answer->propagate_count;
    for (uint32_t i = 0; i < s->count; i++)
        s->ids[i] =
            view->positions[answer->propagate_count < view->tokens ? answer->propagate[i] : i];
}

static kvf_prune_policy spy_policy(spy *s, const char *name)
{
    s->inner = kvf_prune_policy_find(name);
    assert_non_null(s->inner);
    kvf_prune_policy policy = *s->inner;
    policy.name = "spy";
    policy.decide = spy_decide;
    policy.user = s;
    return policy;
}

/* Token i goes on where i % stride is 0, and the window; the layer and the stride follow from the
 * length of the prompt. Keeps all. */
static uint32_t pick_strided(const kvf_prune_view *view, uint32_t stride, uint32_t *ids)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < view->tokens; i++)
        if (i % stride == 0 || i >= view->tokens - view->window)
            ids[count++] = i;
    return count;
}

static void pivot_by_length(const kvf_prune_view *view, kvf_prune_answer *answer)
{
    if (view->pass > 0 || view->layer != view->prompt % 3)
        return;
    answer->propagate_count = pick_strided(view, 2 + view->prompt % 2, answer->propagate);
    answer->restart = view->prompt % 3 == 1;
    answer->is_chosen = 1;
}

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

static kvf_prune_policy own_policy(void (*decide)(const kvf_prune_view *, kvf_prune_answer *),
                                   void *user)
{
    return (kvf_prune_policy){.size = sizeof(kvf_prune_policy),
                              .name = "own",
                              .source = "test",
                              .decide = decide,
                              .user = user};
}

/* ---- restart ---- */

static void expect_fresh(rig *r, const spy *s, const outcome *got, const char *what)
{
    static outcome fresh;
    const batch b = one_prompt(0, PROMPT);
    uint32_t ids[PROMPT];
    assert_int_equal(s->restarts, 1);
    assert_in_range(s->count, 1, PROMPT - 1);
    for (uint32_t i = 0; i < s->count; i++)
        ids[i] = b.ids[0][s->ids[i]];
    run_plain(r, ids, s->count, &fresh);
    expect_same(&fresh, got, what);
}

static void restart_is_a_fresh_run(void **state)
{
    (void)state;
    static outcome got;
    rig r;
    rig_open(&r, KVF_SELECT_HYBRID, 64);
    spy gem = {0}, twice = {0}, asl = {0};
    kvf_prune_config config = config_of("gemfilter");
    kvf_prune_stats stats;
    kvf_prune_policy policy = spy_policy(&gem, "gemfilter");
    config.policy = &policy;
    config.settings.keep = 0.4f;
    run_one(&r, &config, &got, &stats);
    expect_fresh(&r, &gem, &got, "gemfilter");
    assert_int_equal(stats.tokens_computed, PROMPT * (stats.chosen_layer + 1) + gem.count * LAYERS);

    policy = own_policy(shorten_and_restart, &twice);
    kvf_prune_config_init(&config, &policy);
    config.settings.window = WINDOW;
    run_one(&r, &config, &got, NULL);
    expect_fresh(&r, &twice, &got, "after two propagations");

    config = config_of("asl");
    policy = spy_policy(&asl, "asl");
    config.policy = &policy;
    config.settings.window = WINDOW;
    config.settings.two_pass = 1;
    config.settings.layers_observed = 2;
    config.settings.layer_min = 1;
    config.settings.threshold = 1e9f;
    config.settings.propagate_tokens = 60;
    config.settings.keep_tokens = 60;
    run_one(&r, &config, &got, NULL);
    expect_fresh(&r, &asl, &got, "asl in two passes");
    rig_close(&r);
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

/* With every page selected nothing is lost: as if the tokens that were propagated were all kept. */
static void offload_with_all_pages_is_dense(void **state)
{
    (void)state;
    static outcome kept, dense, evicted;
    rig r;
    spy s = {0};
    rig_open(&r, KVF_SELECT_FULL, 64);
    kvf_prune_config config = config_of("fastkv");
    const kvf_prune_policy watched = spy_policy(&s, "fastkv");
    config.policy = &watched;
    config.settings.propagate = 0.4f;
    run_one(&r, &config, &kept, NULL);
    config.retention = KVF_RETENTION_EVICT;
    run_one(&r, &config, &evicted, NULL);
    const kvf_prune_policy all = own_policy(propagate_the_same, &s);
    kvf_prune_config_init(&config, &all);
    config.settings.window = WINDOW;
    run_one(&r, &config, &dense, NULL);
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        assert_int_equal(kept.lengths[layer], layer <= 1 ? PROMPT : PROMPT * 2 / 5);
        assert_int_equal(kept.lengths[layer], dense.lengths[layer]);
        assert_memory_equal(kept.positions[layer], dense.positions[layer],
                            sizeof kept.positions[layer]);
    }
    /* Attention is summed in another order, and rounded to bf16 in every layer. */
    const double far = distance(&evicted, &dense);
    assert_true(distance(&kept, &dense) < 1e-2);
    assert_true(far > 5e-2); /* or it would pass with tokens lost */
    rig_close(&r);
}

/* ---- batches ---- */

static void expect_batch_is_alone(rig *r, const kvf_prune_config *config, const char *what)
{
    static const uint32_t lengths[BATCH] = {PROMPT, 61, 97}; /* pivots 0 and 1 twice: % 3 */
    static outcome together[BATCH], alone;
    kvf_prune_stats all, each;
    batch b = {.count = BATCH};
    uint64_t computed = 0;
    for (uint32_t i = 0; i < BATCH; i++) {
        const batch one = one_prompt(i, lengths[i]);
        b.lengths[i] = lengths[i];
        memcpy(b.ids[i], one.ids[0], sizeof b.ids[i]);
    }
    run_batch(r, config, &b, together, &all);
    for (uint32_t i = 0; i < BATCH; i++) {
        const batch one = one_prompt(i, lengths[i]);
        run_batch(r, config, &one, &alone, &each);
        computed += each.tokens_computed;
        expect_same(&alone, &together[i], what);
    }
    assert_int_equal(all.prompts, BATCH);
    assert_int_equal(all.tokens_computed, computed);
}

static void batch_is_its_prompts_alone(void **state)
{
    (void)state;
    static const char *const names[] = {"fastkv",   "snapkv",       "h2o",
                                        "structkv", "pyramidinfer", "gemfilter"};
    rig r;
    rig_open(&r, KVF_SELECT_HYBRID, 64);
    const kvf_prune_policy policy = own_policy(pivot_by_length, NULL);
    kvf_prune_config config;
    kvf_prune_config_init(&config, &policy);
    config.settings.window = 3;
    expect_batch_is_alone(&r, &config, "own pivots and restarts");
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        config = config_of(names[i]);
        config.settings.window = config.settings.window ? WINDOW : 0;
        config.settings.keep = 0.3f;
        config.settings.propagate = 0.5f;
        config.retention = i % 2 ? KVF_RETENTION_EVICT : KVF_RETENTION_OFFLOAD;
        expect_batch_is_alone(&r, &config, names[i]);
    }
    rig_close(&r);
}

static void deeper_layers_hold_what_was_propagated(void **state)
{
    (void)state;
    static outcome got;
    rig r;
    spy s = {0};
    rig_open(&r, KVF_SELECT_HYBRID, 64);
    kvf_prune_config config = config_of("fastkv");
    const kvf_prune_policy policy = spy_policy(&s, "fastkv");
    config.policy = &policy;
    config.settings.layer = 1;
    config.settings.propagate = 0.3f;
    run_one(&r, &config, &got, NULL);
    assert_int_equal(s.count, PROMPT * 3 / 10);
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        assert_int_equal(got.lengths[layer], layer <= 1 ? PROMPT : s.count);
        for (uint32_t i = 0; i < got.lengths[layer]; i++)
            assert_int_equal(got.positions[layer][i], layer <= 1 ? i : s.ids[i]);
    }
    rig_close(&r);
}

/* ---- hidden states ---- */

static void hidden_of(rig *r, const kvf_prune_config *config, float *hidden)
{
    kvf_sequence *s = NULL;
    kvf_prune *prune = config ? open_prune(r, config) : NULL;
    const batch b = one_prompt(0, PROMPT);
    must(r, kvf_sequence_create(r->cache, &s), "kvf_sequence_create");
    const kvf_prompt prompt = {.sequence = s, .ids = b.ids[0], .count = PROMPT};
    must(r, kvf_transformer_hidden(r->transformer, r->cache, prune, &prompt, hidden, r->stream),
         "kvf_transformer_hidden");
    kvf_sequence_destroy(s);
    kvf_prune_close(prune);
}

/* Final norm and head, in double. */
static void head_of(const rig *r, const float *hidden, double *logits)
{
    const kvf_tensor *norm = NULL, *table = NULL;
    kvf_error error;
    float weight[HIDDEN], row[HIDDEN];
    const uint64_t norm_shape[2] = {HIDDEN, 0}, table_shape[2] = {VOCAB, HIDDEN};
    double square = 0.0;
    must(r, kvf_weights_find(r->weights, "model.norm.weight", 1, norm_shape, &norm, &error),
         "norm");
    must(r,
         kvf_weights_find(r->weights, "model.embed_tokens.weight", 2, table_shape, &table, &error),
         "embedding");
    kvf_numbers_widen(norm->data, norm->dtype, HIDDEN, weight);
    for (uint32_t i = 0; i < HIDDEN; i++)
        square += (double)hidden[i] * (double)hidden[i];
    const double scale = 1.0 / sqrt(square / HIDDEN + 1e-6);
    for (uint32_t id = 0; id < VOCAB; id++) {
        const size_t bytes = HIDDEN * kvf_weights_dtype_bytes(table->dtype);
        kvf_numbers_widen((const unsigned char *)table->data + id * bytes, table->dtype, HIDDEN,
                          row);
        logits[id] = 0.0;
        for (uint32_t i = 0; i < HIDDEN; i++)
            logits[id] += (double)hidden[i] * scale * (double)weight[i] * (double)row[i];
    }
}

static void hidden_state_is_what_the_head_sees(void **state)
{
    (void)state;
    static float hidden[HIDDEN], pruned[HIDDEN];
    double logits[VOCAB];
    rig r;
    rig_open(&r, KVF_SELECT_FULL, 64);
    const batch b = one_prompt(0, PROMPT);
    kvf_sequence *s = NULL;
    hidden_of(&r, NULL, hidden);
    head_of(&r, hidden, logits);
    must(&r, kvf_sequence_create(r.cache, &s), "kvf_sequence_create");
    must(&r, kvf_transformer_prefill(r.transformer, r.cache, s, b.ids[0], PROMPT - 1, r.stream),
         "kvf_transformer_prefill");
    must(&r, kvf_stream_wait(r.stream), "kvf_stream_wait");
    must(&r,
         kvf_transformer_decode(r.transformer, r.cache, &s, &b.ids[0][PROMPT - 1], 1, true,
                                r.stream),
         "kvf_transformer_decode");
    must(&r, kvf_stream_wait(r.stream), "kvf_stream_wait");
    const float *want = kvf_transformer_logits(r.transformer, 0);
    double difference = 0.0, norm = 0.0;
    for (uint32_t i = 0; i < VOCAB; i++) {
        difference += ((double)want[i] - logits[i]) * ((double)want[i] - logits[i]);
        norm += (double)want[i] * (double)want[i];
    }
    assert_true(sqrt(difference / norm) < 1e-2); /* bf16 in other places */
    kvf_transformer_forget(r.transformer);
    kvf_sequence_destroy(s);

    kvf_prune_config config = config_of("full");
    hidden_of(&r, &config, pruned);
    assert_memory_equal(pruned, hidden, sizeof hidden);
    config = config_of("fastkv");
    config.settings.propagate = 1.0f; /* keeping comes after a layer's attention */
    hidden_of(&r, &config, pruned);
    assert_memory_equal(pruned, hidden, sizeof hidden);
    config.settings.propagate = 0.2f;
    hidden_of(&r, &config, pruned);
    assert_memory_not_equal(pruned, hidden, sizeof hidden);
    rig_close(&r);
}

/* ---- sessions and bad input ---- */

static void session_prunes_its_prompt(void **state)
{
    (void)state;
    static outcome want, got;
    rig r;
    kvf_error error;
    kvf_stop stop;
    kvf_sequence *s = NULL;
    const batch b = one_prompt(0, PROMPT);
    rig_open(&r, KVF_SELECT_HYBRID, 64);
    const kvf_prune_config config = config_of("fastkv");
    run_one(&r, &config, &want, NULL);
    kvf_prune *prune = open_prune(&r, &config);
    const kvf_session session = {.runtime = r.runtime,
                                 .transformer = r.transformer,
                                 .cache = r.cache,
                                 .stream = r.stream,
                                 .prune = prune};
    must(&r, kvf_sequence_create(r.cache, &s), "kvf_sequence_create");
    kvf_prefill_request request = {.sequence = s, .ids = b.ids[0], .count = PROMPT};
    must(&r, kvf_generate_prefill(&session, &request, &stop, &error), "kvf_generate_prefill");
    assert_int_equal(stop, KVF_STOP_LENGTH);
    note_layers(s, &got);
    decode(&r, s, &got);
    expect_same(&want, &got, "a session");
    request.count = 5; /* not empty any more */
    fixture_expect(kvf_generate_prefill(&session, &request, &stop, &error), &error, KVF_INVALID,
                   "not empty");
    kvf_sequence_destroy(s);
    kvf_prune_close(prune);
    rig_close(&r);
}

static void bad_prompts_are_refused(void **state)
{
    (void)state;
    rig r;
    kvf_error error;
    kvf_stop stop;
    kvf_sequence *s = NULL;
    static uint32_t ids[PROMPTS + 1];
    rig_open(&r, KVF_SELECT_HYBRID, 64);
    const kvf_prune_config config = config_of("fastkv");
    kvf_prune *prune = open_prune(&r, &config);
    const kvf_session session = {.runtime = r.runtime,
                                 .transformer = r.transformer,
                                 .cache = r.cache,
                                 .stream = r.stream,
                                 .prune = prune};
    must(&r, kvf_sequence_create(r.cache, &s), "kvf_sequence_create");
    kvf_prefill_request request = {.sequence = s, .ids = ids, .count = PROMPTS + 1};
    fixture_expect(kvf_generate_prefill(&session, &request, &stop, &error), &error, KVF_INVALID,
                   "prompt_max");
    request.count = WINDOW - 1;
    fixture_expect(kvf_generate_prefill(&session, &request, &stop, &error), &error, KVF_INVALID,
                   "window");
    request.count = WINDOW + 1; /* of which a tenth is less than the window */
    fixture_expect(kvf_generate_prefill(&session, &request, &stop, &error), &error, KVF_INVALID,
                   "keep");
    kvf_prompt prompts[BATCH + 1] = {{.sequence = s, .ids = ids, .count = PROMPT}};
    for (uint32_t i = 1; i <= BATCH; i++)
        prompts[i] = prompts[0];
    assert_int_equal(
        kvf_transformer_prefill_pruned(r.transformer, r.cache, prune, prompts, BATCH + 1, r.stream),
        KVF_INVALID);
    assert_int_equal(
        kvf_transformer_prefill_pruned(r.transformer, r.cache, prune, prompts, 0, r.stream),
        KVF_INVALID);
    ids[3] = VOCAB;
    assert_int_equal(
        kvf_transformer_prefill_pruned(r.transformer, r.cache, prune, prompts, 1, r.stream),
        KVF_INVALID);
    ids[3] = 0;
    for (uint32_t layer = 0; layer < LAYERS; layer++) /* nothing of it touched the sequence */
        assert_int_equal(kvf_sequence_length(s, layer), 0);
    request.count = PROMPT;
    must(&r, kvf_generate_prefill(&session, &request, &stop, &error), "kvf_generate_prefill");
    kvf_sequence_destroy(s);
    kvf_prune_close(prune);
    rig_close(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(full_changes_nothing),
        cmocka_unit_test(keeping_all_is_full),
        cmocka_unit_test(fastkv_that_propagates_all_is_snapkv),
        cmocka_unit_test(fastkv_at_half_depth_computes_three_fifths),
        cmocka_unit_test(restart_is_a_fresh_run),
        cmocka_unit_test(offload_with_all_pages_is_dense),
        cmocka_unit_test(batch_is_its_prompts_alone),
        cmocka_unit_test(deeper_layers_hold_what_was_propagated),
        cmocka_unit_test(hidden_state_is_what_the_head_sees),
        cmocka_unit_test(session_prunes_its_prompt),
        cmocka_unit_test(bad_prompts_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
