/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Recorded decode: replays and enqueued steps in any mixture give the bits of enqueued steps alone,
 * and move what these move, while pages and lengths change; and nothing of a replay waits.
 *
 * Needs the CUDA device. In builds with the emulator it also counts what the emulated runtime was
 * asked for.
 */

#include "harness.h"

#ifndef TEST_HAS_EMULATOR
#define TEST_HAS_EMULATOR 0
#endif
#if TEST_HAS_EMULATOR
#include "emu_control.h"
#endif

#define ROWS   2u
#define LAYERS 2u
#define STEPS  (TEST_SANITIZED ? 30u : 60u)

#define CUT 100u /* of a fork: tokens that stay */

static const uint32_t prompts[ROWS] = {140, 41};

/* One cache with two sequences, and fixed places for what a step reads and writes. */
typedef struct bench {
    test_world w;
    test_tokens t[ROWS];
    kvf_sequence *s[ROWS];
    kvf_recording *recording;
    test_rows rows; /* [layers, ROWS] */
    uint32_t replays, eager;
} bench;

static void bench_open_with(bench *b, const kvf_cache_config *cc, uint64_t seed,
                            uint32_t early_starts)
{
    kvf_runtime_config rc = test_runtime_config();
    rc.early_starts = early_starts;
    *b = (bench){0};
    test_world_open(&b->w, &rc, cc);
    for (uint32_t i = 0; i < ROWS; i++) {
        test_tokens_make(
            &b->t[i], cc,
            &(test_tokens_spec){
                .count = prompts[i] + STEPS, .seed = seed + i, .sharpness = 2.0f, .topics = 5});
        b->s[i] = test_sequence(&b->w);
        test_fill(&b->w, b->s[i], &b->t[i], 0, prompts[i]);
    }
    test_rows_open(&b->rows, cc, LAYERS * ROWS);
}

static void bench_open(bench *b, const kvf_cache_config *cc, uint64_t seed)
{
    bench_open_with(b, cc, seed, 1);
}

/* The second sequence becomes a fork of the first, and gets tokens of its own. */
static void make_fork(bench *b)
{
    kvf_sequence_destroy(b->s[1]);
    test_ok(&b->w, kvf_sequence_fork(b->w.cache, b->s[0], b->w.stream, &b->s[1]));
}

/* After that it has less in common. */
static void cut_fork(bench *b)
{
    test_ok(&b->w, kvf_sequence_truncate(b->w.cache, b->s[1], CUT, b->w.stream));
}

static void bench_close(bench *b)
{
    test_wait(&b->w);
    kvf_recording_destroy(b->recording);
    test_rows_close(&b->rows);
    test_world_close(&b->w);
    for (uint32_t i = 0; i < ROWS; i++)
        test_tokens_free(&b->t[i]);
}

static kvf_decode_args call_of(const bench *b, uint32_t layer)
{
    return test_rows_args(&b->rows, layer * ROWS, b->s, ROWS, layer);
}

static void record(bench *b)
{
    test_ok(&b->w, kvf_record_begin(b->w.cache, b->s, ROWS, b->w.stream));
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        const kvf_decode_args a = call_of(b, layer);
        test_ok(&b->w, kvf_decode(b->w.cache, &a, b->w.stream));
    }
    test_ok(&b->w, kvf_record_end(b->w.cache, &b->recording));
    assert_non_null(b->recording);
}

/* The step's tokens to their places; the results out of them afterwards. */
static void step(bench *b, uint32_t n, int may_replay, char *out)
{
    for (uint32_t layer = 0; layer < LAYERS; layer++)
        for (uint32_t i = 0; i < ROWS; i++)
            test_rows_put(&b->rows, layer * ROWS + i, &b->t[i], layer, prompts[i] + n);
    if (b->recording && may_replay && kvf_replay_is_possible(b->recording)) {
        test_ok(&b->w, kvf_replay(b->recording, b->w.stream));
        b->replays++;
    } else {
        for (uint32_t layer = 0; layer < LAYERS; layer++) {
            const kvf_decode_args a = call_of(b, layer);
            test_ok(&b->w, kvf_decode(b->w.cache, &a, b->w.stream));
        }
        b->eager++;
    }
    test_wait(&b->w);
    memcpy(out, b->rows.out, LAYERS * ROWS * b->rows.out_bytes);
}

static kvf_cache_config config_of(kvf_select select)
{
    kvf_cache_config cc = test_config_small();
    cc.layers = LAYERS;
    cc.dtype = KVF_BF16;
    cc.sequences_max = ROWS + 1;
    cc.select = select;
    cc.transfer = KVF_TRANSFER_MAPPED;
    return cc;
}

/* [LAYERS, KV heads]: layers alike, layers with different numbers of retrieval heads (so of two
 * KV groups), a layer of each kind, streaming heads alone; coarse heads in one layer of two, and
 * beside a streaming one. */
static const uint8_t mask_of_both_kinds[] = {0, 1, 1, 0}, mask_of_two_kv_groups[] = {0, 1, 1, 1},
                     mask_by_layer[] = {1, 1, 0, 0}, mask_of_none[] = {0, 0, 0, 0},
                     mask_of_coarse[] = {1, 2, 1, 1}, mask_of_three[] = {2, 0, 1, 2};

static void masked(kvf_cache_config *cc, const uint8_t *mask)
{
    static const uint32_t windows[] = {21, 9};
    assert_int_equal(cc->layers * cc->kv_heads, sizeof mask_of_none);
    cc->head_mask = mask;
    if (mask && memchr(mask, 2, sizeof mask_of_none)) { /* as little as may be is scored by codes */
        cc->digest = KVF_DIGEST_CODES;
        cc->coarse_share = 0.0f;
        cc->budget_tokens = 64;
    }
    cc->streaming_sink = 3;
    cc->streaming_recent = 21;
    if (mask == mask_of_both_kinds) /* both layers have streaming heads */
        cc->layer_windows = windows;
}

/* Two sequences, a fork beside its parent, or one that is cut after a while. */
typedef enum kinship { STRANGERS, FORKS, CUT_FORKS } kinship;

static void run_both(const kvf_cache_config *cc, kinship kin, uint64_t seed, const char *what)
{
    bench eager, mixed;
    uint32_t length = kin == STRANGERS ? prompts[1] : prompts[0];
    bench_open(&eager, cc, seed);
    bench_open(&mixed, cc, seed);
    if (kin != STRANGERS) {
        make_fork(&eager);
        make_fork(&mixed);
    }
    const size_t bytes = LAYERS * ROWS * eager.rows.out_bytes;
    char *a = malloc(bytes), *b = malloc(bytes);
    assert_true(a && b);
    record(&mixed);
    for (uint32_t n = 0; n < STEPS; n++, length++) {
        if (kin == CUT_FORKS && n == STEPS / 2) {
            cut_fork(&eager);
            cut_fork(&mixed);
            length = CUT;
        }
        step(&eager, n, 0, a);
        step(&mixed, n, n % 7 != 6, b); /* now and then enqueued without need */
        if (memcmp(a, b, bytes) != 0)
            fail_msg("%s: step %u differs by %g", what, n,
                     test_distance(a, b, cc->dtype, bytes / test_dtype_bytes(cc->dtype)));
        assert_memory_equal(eager.rows.lse, mixed.rows.lse,
                            LAYERS * ROWS * cc->query_heads * sizeof(float));
    }
    assert_int_equal(kvf_sequence_length(mixed.s[0], 1), prompts[0] + STEPS);
    assert_int_equal(kvf_sequence_position(mixed.s[1], 0, length - 1), length - 1);
    print_message("# %s: %u replays, %u enqueued\n", what, mixed.replays, mixed.eager);
    assert_true(mixed.replays > STEPS / 2 && mixed.eager > 3);
    test_same_stats(&eager.w, &mixed.w, 1);
    free(a);
    free(b);
    bench_close(&eager);
    bench_close(&mixed);
}

static void replays_of(kinship kin, uint64_t seed)
{
    static const struct {
        const char *name;
        kvf_select select;
        uint32_t verify_interval;
        kvf_refresh refresh;
        const uint8_t *mask;
    } ways[] = {
        {"hybrid", KVF_SELECT_HYBRID, 0, KVF_REFRESH_RESIDENT, NULL},
        {"dynamic, verified", KVF_SELECT_DYNAMIC, 7, KVF_REFRESH_RESIDENT, NULL},
        {"quest", KVF_SELECT_QUEST, 0, KVF_REFRESH_EXACT, NULL},
        {"arkvale", KVF_SELECT_ARKVALE, 0, KVF_REFRESH_EXACT, NULL},
        {"full", KVF_SELECT_FULL, 0, KVF_REFRESH_EXACT, NULL},
        {"streaming", KVF_SELECT_STREAMING, 0, KVF_REFRESH_EXACT, NULL},
        {"head mask", KVF_SELECT_HYBRID, 0, KVF_REFRESH_RESIDENT, mask_of_both_kinds},
        {"head mask of two KV groups", KVF_SELECT_QUEST, 5, KVF_REFRESH_EXACT,
         mask_of_two_kv_groups},
        {"head mask of one kind", KVF_SELECT_DYNAMIC, 0, KVF_REFRESH_EXACT, mask_by_layer},
        {"coarse heads", KVF_SELECT_DYNAMIC, 0, KVF_REFRESH_EXACT, mask_of_coarse},
        {"three kinds", KVF_SELECT_DYNAMIC, 0, KVF_REFRESH_EXACT, mask_of_three},
        {"no retrieval head", KVF_SELECT_DYNAMIC, 0, KVF_REFRESH_EXACT, mask_of_none},
        {"static", KVF_SELECT_STATIC, 0, KVF_REFRESH_EXACT, NULL},
    };
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
        if (!test_takes(i))
            continue;
        kvf_cache_config cc = config_of(ways[i].select);
        cc.verify_interval = ways[i].verify_interval;
        cc.refresh = ways[i].refresh;
        masked(&cc, ways[i].mask);
        const bool can_cut = !ways[i].mask || !memchr(ways[i].mask, 0, sizeof mask_of_none);
        run_both(&cc, kin == CUT_FORKS && !can_cut ? FORKS : kin, seed + i, ways[i].name);
    }
    kvf_cache_config other[] = {config_of(KVF_SELECT_HYBRID), config_of(KVF_SELECT_HYBRID),
                                config_of(KVF_SELECT_HYBRID)};
    static const char *const names[] = {"quantized pages", "quantized pages, narrow values",
                                        "filled with tokens"};
    other[0].pages = other[1].pages = KVF_PAGES_K8V4;
    other[1].head_dim = 192;
    other[1].value_dim = 128;
    other[2].fill = KVF_FILL_TOKENS;
    for (size_t i = 0; i < sizeof other / sizeof *other; i++)
        if (test_takes(i))
            run_both(&other[i], kin, seed, names[i]);
}

TEST_IF(test_on_cuda(), replays_equal_enqueued_steps)
{
    replays_of(STRANGERS, test_seed(1009));
}

TEST_IF(test_on_cuda(), replays_of_forks_equal_enqueued_steps)
{
    replays_of(CUT_FORKS, test_seed(1049));
}

/* Nodes on the stream of whoever records, where the emulator can say. */
static uint64_t chain_nodes(uint64_t otherwise)
{
#if TEST_HAS_EMULATOR
    kvf_emu_counts counts;
    kvf_emu_get_counts(&counts);
    otherwise = counts.chain_nodes;
#endif
    return otherwise;
}

/* One kernel brings a step's arguments, however many KV groups it has; then come those of two
 * layers.
 */
TEST_IF(test_on_cuda(), nodes_are_as_few_as_they_should_be)
{
    static const struct {
        kvf_select select;
        kvf_digest_kind digest;
        uint32_t nodes;
        const uint8_t *mask;
        bool forks;
        uint32_t streaming; /* layers with such heads: there a launch of its own rounds fp32 */
    } ways[] = {
        /* the default: append, score_codes, select, attend */
        {KVF_SELECT_DYNAMIC, KVF_DIGEST_CODES, 2 * 4, .mask = NULL},
        {KVF_SELECT_DYNAMIC, KVF_DIGEST_MINMAX, 2 * 5, .mask = NULL},
        {KVF_SELECT_STREAMING, KVF_DIGEST_MINMAX, 2 * 4, .mask = NULL},
        /* pack, the four, ring, attend, merge, unpack */
        {KVF_SELECT_DYNAMIC, KVF_DIGEST_CODES, 2 * 9, .mask = mask_of_both_kinds, .streaming = 2},
        {KVF_SELECT_DYNAMIC, KVF_DIGEST_CODES, 9 + 4, .mask = mask_of_two_kv_groups,
         .streaming = 1},
        {KVF_SELECT_DYNAMIC, KVF_DIGEST_CODES, 2 * 3, .mask = mask_of_none, .streaming = 2},
        /* and of a layer with coarse heads: score_centroids, reduce, topk, filter */
        {KVF_SELECT_DYNAMIC, KVF_DIGEST_CODES, 2 * 4 + 4, .mask = mask_of_coarse},
        /* forks: collect */
        {KVF_SELECT_DYNAMIC, KVF_DIGEST_CODES, 2 * 5, .mask = NULL, .forks = true},
        {KVF_SELECT_STREAMING, KVF_DIGEST_MINMAX, 2 * 5, .mask = NULL, .forks = true},
        {KVF_SELECT_DYNAMIC, KVF_DIGEST_CODES, 2 * 10, .mask = mask_of_both_kinds, .forks = true,
         .streaming = 2},
        {KVF_SELECT_HYBRID, KVF_DIGEST_CODES, 2 * 5, .mask = NULL, .forks = true},
    };
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
        if (!test_takes(i))
            continue;
        kvf_cache_config cc = config_of(ways[i].select);
        cc.digest = ways[i].digest;
        masked(&cc, ways[i].mask);
        bench b;
        bench_open(&b, &cc, 1031);
        if (ways[i].forks)
            make_fork(&b);
        record(&b);
        const uint32_t narrow = cc.tensors == KVF_TENSORS_FP32 ? ways[i].streaming : 0;
        const uint32_t chain = 1 + ways[i].nodes + narrow;
        assert_int_equal(kvf_recording_nodes(b.recording), chain);
        assert_int_equal(chain_nodes(chain), chain);
        bench_close(&b);
    }
}

#if TEST_HAS_EMULATOR
/* Replays in a row: the host only writes frames and launches graphs. */
TEST_IF(test_on_cuda(), a_replay_waits_for_nothing)
{
    kvf_cache_config cc = config_of(KVF_SELECT_DYNAMIC);
    bench b;
    char out[LAYERS * ROWS * 4 * 64 * sizeof(float)];
    bench_open(&b, &cc, 1013);
    record(&b);
    step(&b, 0, 0, out);
    kvf_emu_counts before, after;
    kvf_emu_get_counts(&before);
    for (uint32_t n = 0; n < 6; n++)
        test_ok(&b.w, kvf_replay(b.recording, b.w.stream));
    kvf_emu_get_counts(&after);
    assert_int_equal(after.graph_launches - before.graph_launches, 6);
    assert_int_equal(after.waits, before.waits);
    assert_int_equal(after.pageable_copies, before.pageable_copies);
    bench_close(&b);
}
#endif

#if TEST_HAS_EMULATOR
/* Kernels that started early in a recorded step and an enqueued one, whose results are left in
 * `out`. */
static uint64_t early_starts_of(uint32_t early_starts, const kvf_cache_config *cc, char *out,
                                size_t bytes)
{
    bench b;
    kvf_emu_counts before, after;
    bench_open_with(&b, cc, 1033, early_starts);
    record(&b);
    kvf_emu_get_counts(&before);
    step(&b, 0, 1, out);
    step(&b, 1, 0, out + bytes);
    kvf_emu_get_counts(&after);
    assert_int_equal(b.replays, 1);
    bench_close(&b);
    return after.early_starts - before.early_starts;
}

/* The switch: none while a runtime is open that wants none, as many as before once it is closed. */
TEST_IF(test_on_cuda(), early_starts_can_be_switched_off)
{
    const kvf_cache_config cc = config_of(KVF_SELECT_DYNAMIC);
    char out[3][2][LAYERS * ROWS * 4 * 64 * sizeof(float)];
    const size_t bytes = LAYERS * ROWS * cc.query_heads * cc.head_dim * test_dtype_bytes(cc.dtype);
    assert_true(bytes <= sizeof out[0][0]);
    memset(out, 0, sizeof out);
    const uint64_t on = early_starts_of(1, &cc, out[0][0], sizeof out[0][0]);
    assert_true(on > LAYERS);
    assert_int_equal(early_starts_of(0, &cc, out[1][0], sizeof out[0][0]), 0);
    assert_int_equal(early_starts_of(1, &cc, out[2][0], sizeof out[0][0]), on);
    assert_memory_equal(out[0], out[1], sizeof out[0]);
    assert_memory_equal(out[0], out[2], sizeof out[0]);
}
#endif

static void refused(bench *b, kvf_status got, kvf_status wanted, const char *word)
{
    test_expect(b->w.runtime, got, wanted);
    if (!strstr(kvf_runtime_error(b->w.runtime)->text, word))
        fail_msg("no \"%s\" in \"%s\"", word, kvf_runtime_error(b->w.runtime)->text);
}

TEST(what_cannot_be_recorded_is_said)
{
    kvf_cache_config cc = config_of(KVF_SELECT_DYNAMIC);
    cc.transfer = KVF_TRANSFER_GATHER;
    bench b;
    kvf_recording *r = NULL;
    bench_open(&b, &cc, 1019);
    refused(&b, kvf_record_begin(b.w.cache, b.s, ROWS, b.w.stream), KVF_UNSUPPORTED,
            test_on_cuda() ? "gather" : "host");
    refused(&b, kvf_record_end(b.w.cache, &r), KVF_INVALID, "begin");
    assert_null(r);
    char out[LAYERS * ROWS * 4 * 64 * sizeof(float)];
    step(&b, 0, 0, out); /* still in order */
    bench_close(&b);
}

/* From the first token on, under other attention parameters; then a replay would mix them. */
TEST_IF(test_on_cuda(), a_recording_ends_with_its_attention_params)
{
    const float sinks[4] = {1.0f, -1.0f, 2.0f, 0.5f};
    const kvf_cache_config cc = config_of(KVF_SELECT_DYNAMIC);
    char out[LAYERS * ROWS * 4 * 64 * sizeof(float)];
    kvf_attention_params params;
    kvf_attention_params_init(&params);
    params.sinks = sinks;
    params.scale = 0.3f;
    bench b;
    bench_open(&b, &cc, 1051);
    record(&b);
    step(&b, 0, 0, out);
    test_expect(b.w.runtime, kvf_cache_attention_params(b.w.cache, 1, &params), KVF_INVALID);
    assert_int_equal(kvf_replay_is_possible(b.recording), 1); /* that changed nothing */
    for (uint32_t i = 0; i < ROWS; i++)
        test_ok(&b.w, kvf_sequence_truncate(b.w.cache, b.s[i], 0, b.w.stream));
    test_wait(&b.w);
    test_ok(&b.w, kvf_cache_attention_params(b.w.cache, 1, &params));
    for (uint32_t i = 0; i < ROWS; i++)
        test_fill(&b.w, b.s[i], &b.t[i], 0, prompts[i]);
    step(&b, 0, 0, out);
    assert_int_equal(kvf_replay_is_possible(b.recording), 0);
    refused(&b, kvf_replay(b.recording, b.w.stream), KVF_INVALID, "other attention parameters");
    kvf_recording_destroy(b.recording);
    record(&b);
    step(&b, 1, 1, out);
    assert_int_equal(b.replays, 1);
    bench_close(&b);
}

static void misuse(const uint8_t *mask)
{
    kvf_cache_config cc = config_of(KVF_SELECT_DYNAMIC);
    masked(&cc, mask);
    bench b;
    bench_open(&b, &cc, 1021);
    kvf_sequence *other = NULL;
    kvf_recording *r = NULL;
    refused(&b, kvf_record_end(b.w.cache, &r), KVF_INVALID, "kvf_record_begin");
    refused(&b, kvf_record_begin(b.w.cache, NULL, 1, b.w.stream), KVF_INVALID,
            "sequences is NULL; pass the batch");
    test_ok(&b.w, kvf_record_begin(b.w.cache, b.s, ROWS, b.w.stream));
    refused(&b, kvf_record_begin(b.w.cache, b.s, ROWS, b.w.stream), KVF_INVALID, "already");
    refused(&b, kvf_sequence_fork(b.w.cache, b.s[0], b.w.stream, &other), KVF_INVALID, "recorded");
    const kvf_prefill_args p = test_chunk_args(b.s[0], b.t, 0, 0, 1, NULL);
    refused(&b, kvf_prefill(b.w.cache, &p, b.w.stream), KVF_INVALID, "being recorded");
    test_ok(&b.w, kvf_record_end(b.w.cache, &r) == KVF_INVALID ? KVF_OK : KVF_SYSTEM); /* empty */
    assert_null(r);

    test_ok(&b.w, kvf_record_begin(b.w.cache, b.s, ROWS, b.w.stream));
    kvf_decode_args a = call_of(&b, 0);
    test_ok(&b.w, kvf_decode(b.w.cache, &a, b.w.stream));
    refused(&b, kvf_decode(b.w.cache, &a, b.w.stream), KVF_INVALID, "layer = 0");
    test_expect(b.w.runtime, kvf_record_end(b.w.cache, &r), KVF_INVALID);
    assert_null(r);

    record(&b); /* and it works again */
    char out[LAYERS * ROWS * 4 * 64 * sizeof(float)];
    step(&b, 0, 0, out);
    step(&b, 1, 1, out);
    assert_int_equal(b.replays, 1);
    kvf_sequence_destroy(b.s[1]);
    assert_int_equal(kvf_replay_is_possible(b.recording), 0);
    b.s[1] = test_sequence(&b.w); /* the same slot, another sequence */
    assert_int_equal(kvf_replay_is_possible(b.recording), 0);
    refused(&b, kvf_replay(b.recording, b.w.stream), KVF_INVALID, "destroyed");
    bench_close(&b);
}

TEST_IF(test_on_cuda(), misuse_while_recording_is_refused)
{
    misuse(NULL);
    misuse(mask_of_two_kv_groups);
}
