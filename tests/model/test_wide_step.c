/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A step of 64 rows, each of which has the bits that it has alone; and how many launches a layer
 * has on a GPU, where a step is recorded as one graph.
 */

#include "model_fixture.h"
#include "model_rig.h"
#include "transformer_ops.h"
#include "unit.h"

#define VOCAB     96u
#define PROMPTS   3u
#define BATCH_MAX 64u
#define STEPS     3u /* as it comes, recorded, once more */
#define TOKENS    44u
#define WINDOW    20u

typedef struct rig {
    model_rig model;
    kvf_sequence *prompts[PROMPTS];
} rig;

static void rig_open(rig *r, const char *family, uint32_t layers)
{
    kvf_cache_config cc;
    model_rig_make(&r->model,
                   &(model_shape){.family = family,
                                  .layers = layers,
                                  .hidden = 64,
                                  .intermediate = 96,
                                  .heads = 2,
                                  .kv_heads = 1,
                                  .head_dim = 32,
                                  .vocab = VOCAB,
                                  .window = strcmp(family, "Mistral") == 0 ? WINDOW : 0},
                   0);
    kvf_transformer_options options = model_rig_options(&r->model);
    options.chunk_max = TOKENS;
    options.batch_max = BATCH_MAX;
    model_rig_transformer(&r->model, &options, &cc);
    cc.tokens_max = TOKENS + STEPS;
    cc.sequences_max = PROMPTS + BATCH_MAX;
    cc.local_tokens = 1;
    cc.budget_tokens = 40;
    model_rig_cache(&r->model, &cc);
}

/* Prompts of three lengths: with a block that is sealed, and without. */
static void prefill(rig *r)
{
    uint32_t ids[TOKENS];
    for (uint32_t p = 0; p < PROMPTS; p++) {
        const uint32_t count = TOKENS - 13 * p;
        for (uint32_t i = 0; i < count; i++)
            ids[i] = (i * 37 + p * 11) % VOCAB;
        r->prompts[p] = model_rig_sequence(&r->model);
        model_rig_prefill(&r->model, r->prompts[p], ids, count);
    }
}

/* Steps of rows first to first + batch - 1, each of which goes on from one of the prompts. The
 * nodes of the graph that the last of them was; 0 on the host device, which has none. */
static uint32_t decode(rig *r, uint32_t first, uint32_t batch, float *logits)
{
    kvf_sequence *rows[BATCH_MAX];
    uint32_t ids[BATCH_MAX];
    for (uint32_t i = 0; i < batch; i++)
        assert_int_equal(kvf_sequence_fork(r->model.cache, r->prompts[(first + i) % PROMPTS],
                                           r->model.stream, &rows[i]),
                         KVF_OK);
    for (uint32_t step = 0; step < STEPS; step++) {
        for (uint32_t i = 0; i < batch; i++)
            ids[i] = ((first + i) * 29 + step * 7) % VOCAB;
        model_rig_decode(&r->model, rows, ids, batch, logits + (size_t)step * batch * VOCAB);
    }
    const kvf_recording *recording = r->model.transformer->recording.recording;
    const uint32_t nodes = recording ? kvf_recording_nodes(recording) : 0;
    assert_int_equal(nodes != 0, kvf_runtime_device(r->model.runtime) == KVF_DEVICE_CUDA);
    kvf_transformer_forget(r->model.transformer);
    for (uint32_t i = 0; i < batch; i++)
        kvf_sequence_destroy(rows[i]);
    return nodes;
}

static void expect_nodes(const char *family, uint32_t layers, uint32_t of_layer)
{
    static float logits[STEPS * VOCAB];
    rig r = {0};
    rig_open(&r, family, layers);
    prefill(&r);
    const uint32_t nodes = decode(&r, 0, 1, logits);
    if (kvf_runtime_device(r.model.runtime) == KVF_DEVICE_CUDA)
        assert_int_equal(nodes, 1 + layers * of_layer + 3);
    model_rig_close(&r.model);
}

/* A layer: four of attention (test_record), and four products with what follows them, norms too.
 * Around the layers: what brings the arguments, the first norm, the logits and their way to the
 * host. */
TEST(a_layer_has_few_launches)
{
    expect_nodes("Llama", 1, 4 + 4);
    expect_nodes("Llama", 3, 4 + 4);
    expect_nodes("Qwen3", 2, 4 + 4);
}

/* In batches of 8, whose forks score what they have in common in one launch per layer more
 * (test_record), as in ones of 64, which have two more for their norms. */
static void wide_rows_are_single_ones(const char *family)
{
    static const uint32_t looked_at[] = {0, 7, 8, 16, 33, BATCH_MAX - 1};
    static float all[STEPS][BATCH_MAX][VOCAB], some[STEPS][8][VOCAB], alone[STEPS][VOCAB];
    rig r = {0};
    rig_open(&r, family, 1);
    prefill(&r);
    const uint32_t nodes = decode(&r, 0, 1, alone[0]);
    assert_int_equal(decode(&r, 0, 8, some[0][0]), nodes ? nodes + 1 : 0);
    assert_int_equal(decode(&r, 0, BATCH_MAX, all[0][0]), nodes ? nodes + 1 + 2 : 0);
    for (uint32_t step = 0; step < STEPS; step++)
        assert_memory_equal(some[step], all[step], sizeof some[step]);
    for (size_t i = 0; i < sizeof looked_at / sizeof *looked_at; i++) {
        assert_int_equal(decode(&r, looked_at[i], 1, alone[0]), nodes);
        for (uint32_t step = 0; step < STEPS; step++)
            assert_memory_equal(alone[step], all[step][looked_at[i]], sizeof alone[step]);
    }
    model_rig_close(&r.model);
}

/* Others have biases, norms of heads, and windows. A GPU takes the first. */
TEST(rows_of_a_wide_batch_are_single_ones)
{
    static const char *const families[] = {"Llama", "Qwen2", "Qwen3", "Mistral"};
    kvf_runtime_config device;
    fixture_device(&device);
    for (uint32_t i = 0; i < (device.device == KVF_DEVICE_HOST ? 4 : 1); i++)
        wide_rows_are_single_ones(families[i]);
}
