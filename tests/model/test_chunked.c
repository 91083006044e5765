/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Chunk by chunk through the whole model: without eviction it is a plain prefill, and so it is
 * where eviction keeps all. A policy of the test's own looks at what policies are shown, and what
 * it says is what layers hold. test_eviction.c holds the numbers of kept tokens.
 */

#include "model_fixture.h"
#include "model_rig.h"
#include "unit.h"

#include <math.h>

#define PROMPT  90u
#define STEPS   6u
#define VOCAB   200u
#define ROWS    16u /* of one operation */
#define HIDDEN  100u
#define LAYERS  3u
#define HEADS   2u
#define QUERIES 6u

typedef struct rig {
    model_rig model;
    kvf_sequence *sequence;
    kvf_prune *prune;
} rig;

static void rig_open(rig *r)
{
    kvf_cache_config cc;
    *r = (rig){0};
    model_rig_make(&r->model, &(model_shape){.layers = LAYERS, .kv_heads = HEADS, .vocab = VOCAB},
                   2);
    kvf_transformer_options options = model_rig_options(&r->model);
    options.chunk_max = ROWS;
    options.prompt_max = HIDDEN;
    options.batch_max = 1;
    model_rig_transformer(&r->model, &options, &cc);
    kvf_cache_config_preset(&cc, KVF_PRESET_PRKV);
    cc.refresh = KVF_REFRESH_RESIDENT;
    cc.tokens_max = 128;
    cc.page_size = 8;
    cc.local_tokens = 16;
    cc.budget_tokens = 64;
    cc.observe_window = 32;
    model_rig_cache(&r->model, &cc);
    r->sequence = model_rig_sequence(&r->model);
}

static void rig_close(rig *r)
{
    model_rig_wait(&r->model);
    kvf_transformer_forget(r->model.transformer);
    kvf_prune_close(r->prune);
    model_rig_close(&r->model);
}

static kvf_prune_config evicting(const char *policy, kvf_eviction eviction, float keep)
{
    kvf_prune_config pc;
    kvf_prune_config_init(&pc, kvf_prune_policy_find(policy));
    pc.eviction = eviction;
    pc.retention = KVF_RETENTION_EVICT;
    pc.chunk_queries = QUERIES;
    pc.settings.keep = keep;
    pc.settings.window = pc.settings.window ? QUERIES : 0;
    return pc;
}

static void open_prune(rig *r, const kvf_prune_config *pc)
{
    kvf_error error;
    fixture_must(kvf_prune_open(r->model.cache, pc, &r->prune, &error), &error);
}

static const uint32_t *ids_of_prompt(void)
{
    static uint32_t ids[PROMPT + STEPS];
    for (uint32_t i = 0; i < PROMPT + STEPS; i++)
        ids[i] = i * 37u % VOCAB;
    return ids;
}

static void prefill_chunked(rig *r, uint32_t count, uint32_t chunk)
{
    model_rig_must(&r->model,
                   kvf_transformer_prefill_chunked(r->model.transformer, r->model.cache, r->prune,
                                                   r->sequence, ids_of_prompt(), count, chunk, true,
                                                   r->model.stream),
                   "kvf_transformer_prefill_chunked");
    model_rig_wait(&r->model);
}

/* Logits [STEPS][VOCAB] of the tokens that follow the prompt. */
static void decode(rig *r, float *logits)
{
    for (uint32_t step = 0; step < STEPS; step++)
        model_rig_decode(&r->model, &r->sequence, ids_of_prompt() + PROMPT + step, 1,
                         logits + (size_t)step * VOCAB);
}

static void plain_logits(float *logits)
{
    rig r;
    rig_open(&r);
    model_rig_prefill(&r.model, r.sequence, ids_of_prompt(), PROMPT);
    decode(&r, logits);
    rig_close(&r);
}

/* ---- identities ---- */

/* A row of a matrix product may be summed in another order where it shares its operation with other
 * rows. Chunks of whole operations cut the prompt where a plain prefill cuts it, so they give its
 * bits; other chunks give its numbers. */
TEST(chunks_without_eviction_are_plain)
{
    static float want[STEPS * VOCAB], got[STEPS * VOCAB];
    static const uint32_t chunks[] = {ROWS, 2 * ROWS, 64, PROMPT, HIDDEN, 7, 1};
    plain_logits(want);
    for (size_t i = 0; i < sizeof chunks / sizeof *chunks; i++) {
        rig r;
        rig_open(&r);
        prefill_chunked(&r, PROMPT, chunks[i]);
        decode(&r, got);
        if (chunks[i] % ROWS == 0 || chunks[i] >= PROMPT)
            assert_memory_equal(got, want, sizeof want);
        else
            assert_true(model_rig_distance(got, want, STEPS * VOCAB) < 5e-3);
        rig_close(&r);
    }
}

TEST(eviction_none_prunes_the_whole_prompt)
{
    static float want[STEPS * VOCAB], got[STEPS * VOCAB];
    plain_logits(want);
    rig r;
    rig_open(&r);
    kvf_prune_config pc;
    kvf_prune_config_init(&pc, NULL);
    open_prune(&r, &pc);
    prefill_chunked(&r, PROMPT, 7);
    decode(&r, got);
    assert_memory_equal(got, want, sizeof want);
    rig_close(&r);
}

/* Logits [VOCAB] of the last of `count` tokens: as a step, or of a prefill in chunks. */
static void last_logits(uint32_t count, uint32_t chunk, const kvf_prune_config *pc, float *logits)
{
    const uint32_t *ids = ids_of_prompt();
    rig r;
    rig_open(&r);
    if (pc)
        open_prune(&r, pc);
    if (chunk) {
        prefill_chunked(&r, count, chunk);
        memcpy(logits, kvf_transformer_logits(r.model.transformer, 0), VOCAB * sizeof *logits);
    } else {
        model_rig_prefill(&r.model, r.sequence, ids, count - 1);
        model_rig_decode(&r.model, &r.sequence, &ids[count - 1], 1, logits);
    }
    rig_close(&r);
}

/* Those of a prefill are those of a step, as long as that attends to everything. */
TEST(a_prefill_has_logits)
{
    const uint32_t count = 60; /* within the budget */
    float want[VOCAB], got[VOCAB];
    kvf_prune_config full;
    kvf_prune_config_init(&full, NULL);
    const kvf_prune_config patched = evicting("snapkv", KVF_EVICTION_PATCHED, 1.0f);
    const kvf_prune_config *const configs[] = {NULL, NULL, &full, &patched};
    static const uint32_t chunks[] = {60, 20, 60, 2 * ROWS};
    last_logits(count, 0, NULL, want);
    for (size_t i = 0; i < sizeof chunks / sizeof *chunks; i++) {
        last_logits(count, chunks[i], configs[i], got);
        assert_true(model_rig_distance(got, want, VOCAB) < 5e-3);
    }
}

/* Nothing is evicted but patches, which leave no trace. */
TEST(keeping_all_is_plain)
{
    static float want[STEPS * VOCAB], got[STEPS * VOCAB];
    static const char *const policies[] = {"full", "snapkv", "pyramidkv", "streaming"};
    plain_logits(want);
    for (uint32_t i = 0; i < 8; i++) {
        rig r;
        rig_open(&r);
        const kvf_prune_config pc =
            evicting(policies[i / 2], i % 2 ? KVF_EVICTION_PATCHED : KVF_EVICTION_NAIVE, 1.0f);
        open_prune(&r, &pc);
        prefill_chunked(&r, PROMPT, 2 * ROWS);
        for (uint32_t layer = 0; layer < LAYERS; layer++)
            assert_int_equal(kvf_sequence_length(r.sequence, layer), PROMPT);
        decode(&r, got);
        assert_memory_equal(got, want, sizeof want);
        rig_close(&r);
    }
}

/* ---- what a policy sees ---- */

/* Looks at its view, and keeps the lower half of the even candidates (head 0) or of the odd ones.
 */
typedef struct spy {
    uint32_t calls, chunk;
    bool is_wrong;
} spy;

static void spy_decide(const kvf_prune_view *view, kvf_prune_answer *answer)
{
    spy *s = view->user;
    const uint32_t chunk = s->calls / LAYERS, first = chunk * s->chunk;
    const uint32_t own = PROMPT - first < s->chunk ? PROMPT - first : s->chunk;
    s->is_wrong |= view->layer != s->calls++ % LAYERS;
    s->is_wrong |= view->window != QUERIES || view->settings->window != QUERIES;
    s->is_wrong |= view->tokens != own && view->tokens != own + QUERIES;
    s->is_wrong |= view->candidates != view->tokens - QUERIES;
    s->is_wrong |= view->prompt != PROMPT || view->pass != 0;
    for (uint32_t i = 0; i < view->tokens; i++)
        s->is_wrong |= view->positions[i] != first + i;
    for (uint32_t h = 0; h < HEADS; h++) {
        double sum = 0.0;
        for (uint32_t j = 0; j < view->candidates; j++) {
            const float x = view->scores[(size_t)h * view->candidates + j];
            s->is_wrong |= !(x >= 0.0f && x <= (float)QUERIES);
            sum += (double)x;
        }
        /* what the queries give to themselves is missing */
        s->is_wrong |= !(sum > 0.0 && sum < (double)QUERIES);
    }
    const uint32_t count = view->candidates / 4;
    for (uint32_t h = 0; h < HEADS; h++) {
        uint32_t *keep = answer->keep + (size_t)h * (count + QUERIES);
        for (uint32_t i = 0; i < count; i++)
            keep[i] = 2 * i + h;
        for (uint32_t i = 0; i < QUERIES; i++)
            keep[count + i] = view->candidates + i;
    }
    answer->keep_count = count + QUERIES;
}

TEST(a_policy_sees_the_chunk)
{
    static const kvf_eviction kinds[] = {KVF_EVICTION_NAIVE, KVF_EVICTION_PATCHED};
    for (uint32_t kind = 0; kind < 2; kind++) {
        const uint32_t chunk = 40;
        spy s = {.chunk = chunk};
        const kvf_prune_policy policy = {.size = sizeof policy,
                                         .name = "spy",
                                         .source = "this test",
                                         .needs = KVF_PRUNE_SCORES,
                                         .decide = spy_decide,
                                         .user = &s};
        rig r;
        rig_open(&r);
        kvf_prune_config pc = evicting("snapkv", kinds[kind], 0.5f);
        pc.policy = &policy;
        open_prune(&r, &pc);
        prefill_chunked(&r, PROMPT, chunk);
        assert_false(s.is_wrong);
        assert_int_equal(s.calls, 3 * LAYERS);
        for (uint32_t layer = 0, at = 0; layer < LAYERS; layer++, at = 0)
            for (uint32_t first = 0; first < PROMPT; first += chunk) {
                const uint32_t own = PROMPT - first < chunk ? PROMPT - first : chunk;
                const bool is_patched = kind == 1 && first + chunk < PROMPT;
                const uint32_t candidates = is_patched ? own : own - QUERIES;
                /* the position of an index is the highest of its heads */
                for (uint32_t i = 0; i < candidates / 4; i++)
                    assert_int_equal(kvf_sequence_position(r.sequence, layer, at++),
                                     first + 2 * i + 1);
                for (uint32_t i = candidates; i < own; i++)
                    assert_int_equal(kvf_sequence_position(r.sequence, layer, at++), first + i);
            }
        rig_close(&r);
    }
}

/* ---- bad input ---- */

static void expect_refusal(rig *r, uint32_t count, uint32_t chunk, const char *part)
{
    kvf_error error = {0};
    fixture_expect(
        kvf_transformer_chunk_check(r->model.transformer, r->prune, count, chunk, &error), &error,
        KVF_INVALID, part);
    assert_int_equal(kvf_transformer_prefill_chunked(r->model.transformer, r->model.cache, r->prune,
                                                     r->sequence, ids_of_prompt(), count, chunk,
                                                     true, r->model.stream),
                     KVF_INVALID);
    assert_int_equal(kvf_sequence_length(r->sequence, 0), 0);
}

TEST(bad_chunks_are_named)
{
    rig r;
    rig_open(&r);
    expect_refusal(&r, PROMPT, 0, "chunk = 0");
    expect_refusal(&r, PROMPT, HIDDEN + 1, "chunk = 101");
    expect_refusal(&r, 0, 8, "prompt is empty");
    const kvf_prune_config pc = evicting("snapkv", KVF_EVICTION_PATCHED, 0.5f);
    open_prune(&r, &pc);
    expect_refusal(&r, QUERIES - 1, 8, "chunk_queries = 6 is longer than the prompt");
    expect_refusal(&r, PROMPT, QUERIES - 1, "chunk = 5");
    expect_refusal(&r, HIDDEN, HIDDEN - 1, "with the patch of 6");
    rig_close(&r);
}
