/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Chunk by chunk through the whole model: without eviction it is a plain prefill, with it lengths,
 * true positions and the footprint are those of closed forms, and decoding goes on from there. A
 * policy of the test's own looks at what policies are shown.
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

/* A chunk of an emulated GPU takes its time: very short ones are for the host device. */
static bool is_too_slow(uint32_t chunk)
{
    const char *device = getenv("KVF_TEST_DEVICE");
    return device && strcmp(device, "cuda") == 0 && chunk < 7;
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

/* ---- counts ---- */

static uint64_t sum_to(uint64_t n)
{
    return n * (n + 1) / 2;
}

typedef struct counts {
    uint64_t entry_steps; /* of one KV head of one layer */
    uint32_t kept, peak;
} counts;

/* By the definition: a chunk of c tokens keeps floor(c x keep), of which the window is part where
 * it is the chunk's own; short chunks keep their window. */
static counts expect(kvf_eviction eviction, uint32_t chunk, float keep)
{
    counts c = {0};
    for (uint32_t done = 0; done < PROMPT;) {
        const uint32_t rest = PROMPT - done, tokens = rest < chunk ? rest : chunk;
        const bool is_patched = eviction == KVF_EVICTION_PATCHED && rest > chunk;
        const uint32_t patch = is_patched ? QUERIES : 0;
        uint32_t kept = (uint32_t)((double)tokens * (double)keep + 1e-4);
        if (!is_patched && kept < QUERIES)
            kept = tokens < QUERIES ? tokens : QUERIES;
        c.entry_steps += (uint64_t)c.kept * (tokens + patch) + sum_to(tokens + patch);
        c.peak = c.kept + tokens + patch > c.peak ? c.kept + tokens + patch : c.peak;
        c.kept += kept;
        done += tokens;
    }
    c.entry_steps += (uint64_t)c.kept * STEPS + sum_to(STEPS);
    c.peak = c.kept + STEPS > c.peak ? c.kept + STEPS : c.peak;
    return c;
}

static void check_counts(kvf_eviction eviction, uint32_t chunk, float keep)
{
    static float logits[STEPS * VOCAB];
    rig r;
    kvf_footprint f;
    if (is_too_slow(chunk))
        return;
    rig_open(&r);
    const kvf_prune_config pc = evicting("snapkv", eviction, keep);
    const counts want = expect(eviction, chunk, keep);
    open_prune(&r, &pc);
    prefill_chunked(&r, PROMPT, chunk);
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        assert_int_equal(kvf_sequence_length(r.sequence, layer), want.kept);
        for (uint32_t i = 0; i < QUERIES; i++) /* the prompt's end is always there */
            assert_int_equal(kvf_sequence_position(r.sequence, layer, want.kept - 1 - i),
                             PROMPT - 1 - i);
    }
    decode(&r, logits);
    for (uint32_t i = 0; i < STEPS * VOCAB; i++)
        assert_true(isfinite(logits[i]));
    for (uint32_t layer = 0; layer < LAYERS; layer++)
        for (uint32_t i = 0; i < STEPS; i++)
            assert_int_equal(kvf_sequence_position(r.sequence, layer, want.kept + i), PROMPT + i);
    kvf_cache_footprint(r.model.cache, &f);
    assert_true(f.entry_steps == want.entry_steps * LAYERS * HEADS);
    assert_true(f.full_entry_steps == sum_to(PROMPT + STEPS) * LAYERS * HEADS);
    assert_true(f.steps == PROMPT + STEPS);
    assert_true(f.peak_entries == (uint64_t)want.peak * LAYERS * HEADS);
    rig_close(&r);
}

TEST(lengths_and_footprints_are_closed_forms)
{
    static const uint32_t chunks[] = {12, 20, 64, PROMPT};
    for (size_t i = 0; i < sizeof chunks / sizeof *chunks; i++) {
        check_counts(KVF_EVICTION_NAIVE, chunks[i], 0.5f);
        check_counts(KVF_EVICTION_PATCHED, chunks[i], 0.3f + 0.2f * (float)(chunks[i] == PROMPT));
    }
    check_counts(KVF_EVICTION_PATCHED, 7, 0.3f);
    check_counts(KVF_EVICTION_NAIVE, 5, 0.1f); /* no chunk is longer than the window */
    check_counts(KVF_EVICTION_NAIVE, 1, 0.1f);
}

/* Sink and window over the whole prompt, whatever the chunks. */
TEST(streaming_is_streaming)
{
    const uint32_t kept = 24, sink = 4;
    static const uint32_t chunks[] = {1, 7, 64};
    for (size_t i = 0; i < sizeof chunks / sizeof *chunks; i++) {
        rig r;
        kvf_footprint f;
        if (is_too_slow(chunks[i]))
            continue;
        rig_open(&r);
        kvf_prune_config pc = evicting("streaming", KVF_EVICTION_NAIVE, 1.0f);
        pc.settings.keep_tokens = kept;
        open_prune(&r, &pc);
        prefill_chunked(&r, PROMPT, chunks[i]);
        for (uint32_t layer = 0; layer < LAYERS; layer++)
            for (uint32_t j = 0; j < kept; j++)
                assert_int_equal(kvf_sequence_position(r.sequence, layer, j),
                                 j < sink ? j : PROMPT - kept + j);
        uint64_t want = 0;
        for (uint32_t done = 0, held = 0; done < PROMPT;) {
            const uint32_t tokens = PROMPT - done < chunks[i] ? PROMPT - done : chunks[i];
            want += (uint64_t)held * tokens + sum_to(tokens);
            held = held + tokens < kept ? held + tokens : kept;
            done += tokens;
        }
        kvf_cache_footprint(r.model.cache, &f);
        assert_true(f.entry_steps == want * LAYERS * HEADS);
        assert_true(f.full_entry_steps == sum_to(PROMPT) * LAYERS * HEADS);
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
