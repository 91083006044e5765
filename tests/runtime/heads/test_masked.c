/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Streaming heads: what a cache with a head mask attends to, head by head, against plain sums in
 * double.
 *
 * A streaming head sees token j from query i iff j < sink or j > i - recent, which a layer may have
 * of its own. Retrieval heads are held to the bits that they have in a cache without a mask.
 */

#include "harness.h"

#include <math.h>

#include "forms.h"

typedef struct expectation {
    const kvf_cache_config *c;
    const test_tokens *t;
} expectation;

static int is_seen(const kvf_cache_config *c, uint32_t layer, uint32_t kv_head, uint32_t query,
                   uint32_t j)
{
    if (!c->head_mask || c->head_mask[layer * c->kv_heads + kv_head])
        return 1;
    const uint32_t recent = c->layer_windows ? c->layer_windows[layer] : c->streaming_recent;
    return j < c->streaming_sink || query - j < recent;
}

/* Attention of token `query` by one query head: out [head_dim], returns the log-sum-exp. */
static double naive_head(const expectation *e, uint32_t layer, uint32_t head, uint32_t query,
                         double *out)
{
    const kvf_cache_config *c = e->c;
    const uint32_t d = c->head_dim, kv_head = head / (c->query_heads / c->kv_heads);
    double *logit = test_alloc((query + 1) * sizeof *logit);
    double top = test_sink(layer, head), sum = 0.0;
    assert_non_null(logit);
    memset(out, 0, d * sizeof *out);
    for (int pass = 0; pass < 2; pass++) {
        if (pass)
            sum = exp(test_sink(layer, head) - top);
        for (uint32_t j = 0; j <= query; j++) {
            if (!is_seen(c, layer, kv_head, query, j))
                continue;
            if (pass) {
                const double weight = exp(logit[j] - top);
                sum += weight;
                for (uint32_t x = 0; x < d; x++)
                    out[x] += weight * (double)kvf_element_get(test_v(e->t, layer, j), c->dtype,
                                                               kv_head * d + x);
                continue;
            }
            for (uint32_t x = 0; x < d; x++)
                logit[j] +=
                    (double)kvf_element_get(test_q(e->t, layer, query), c->dtype, head * d + x) *
                    (double)kvf_element_get(test_k(e->t, layer, j), c->dtype, kv_head * d + x);
            logit[j] = test_logit(c, layer, logit[j]);
            top = logit[j] > top ? logit[j] : top;
        }
    }
    for (uint32_t x = 0; x < d; x++)
        out[x] /= sum;
    test_release(logit);
    return top + log(sum);
}

/* One row of outputs, all query heads; lse may be NULL. */
static void expect_row(const expectation *e, uint32_t layer, uint32_t query, const void *out,
                       const float *lse, const char *what)
{
    const kvf_cache_config *c = e->c;
    double want[256];
    for (uint32_t h = 0; h < c->query_heads; h++) {
        const double want_lse = naive_head(e, layer, h, query, want);
        for (uint32_t x = 0; x < c->head_dim; x++) {
            const double got = (double)kvf_element_get(out, c->dtype, h * c->head_dim + x);
            if (!(fabs(got - want[x]) <= test_tolerance(c->dtype)))
                fail_msg("%s: layer %u, token %u, head %u, element %u: %g, not %g", what, layer,
                         query, h, x, got, want[x]);
        }
        if (lse && !(fabs((double)lse[h] - want_lse) <= TEST_LSE_TOLERANCE))
            fail_msg("%s: layer %u, token %u, head %u: lse %g, not %g", what, layer, query, h,
                     (double)lse[h], want_lse);
    }
}

/* Three layers of four KV heads: both kinds, no retrieval head, no streaming head. */
static const uint8_t mask_of_all_kinds[12] = {0, 1, 0, 1, 0, 0, 0, 0, 1, 1, 1, 1};

static kvf_cache_config config_masked(const uint8_t *mask)
{
    kvf_cache_config c = test_config_small();
    c.layers = 3;
    c.kv_heads = 4;
    c.query_heads = 8;
    c.tokens_max = 400;
    c.prefill_chunk_max = 100;
    c.select = KVF_SELECT_FULL;
    c.head_mask = mask;
    c.streaming_sink = 6;
    c.streaming_recent = 21;
    return c;
}

/* A whole run, every output against the definition. */
static void expect_run(const test_scenario *sc, const char *what)
{
    test_trace trace;
    test_tokens t;
    test_tokens_spec spec = sc->tokens;
    const kvf_cache_config *c = &sc->cc;
    spec.count = sc->prompt + sc->steps;
    test_tokens_make(&t, c, &spec);
    const expectation e = {c, &t};
    const size_t row = (size_t)c->query_heads * c->head_dim * test_dtype_bytes(c->dtype);
    test_run(sc, &trace);
    for (uint32_t layer = 0; layer < c->layers; layer++) {
        for (uint32_t i = 0; i < sc->prompt; i++)
            expect_row(&e, layer, i, (char *)trace.prefill + (layer * sc->prompt + i) * row, NULL,
                       what);
        for (uint32_t i = 0; i < sc->steps; i++) {
            const size_t at = (size_t)i * c->layers + layer;
            expect_row(&e, layer, sc->prompt + i, (char *)trace.out + at * row,
                       trace.lse + at * c->query_heads, what);
        }
    }
    test_trace_free(&trace);
    test_tokens_free(&t);
}

static void any_mask_is_what_it_says(void **state)
{
    static const uint32_t sinks[] = {0, 6, 8, 17}, recents[] = {1, 8, 21, 64};
    const uint64_t seed = 401;
    test_random r = {seed};
    test_seed_print("any_mask_is_what_it_says", seed);
    for (uint32_t i = 0; i < (test_on_cuda() || TEST_SANITIZED ? 4u : 12u); i++) {
        uint8_t mask[12];
        char what[96];
        memcpy(mask, mask_of_all_kinds, sizeof mask);
        for (uint32_t k = 0; i && k < 12; k++)
            mask[k] = (uint8_t)test_random_below(&r, 2);
        test_scenario sc = {.cc = config_masked(mask),
                            .tokens = {.seed = seed + i, .sharpness = 1.5f},
                            .prompt = 60 + test_random_below(&r, 60),
                            .steps = 30,
                            .chunk = 1 + test_random_below(&r, 100)};
        sc.cc.dtype = (kvf_dtype)(i % 3);
        sc.cc.head_dim = i % 2 ? 80 : 64;
        sc.cc.page_size = 8u << (i % 3);
        sc.cc.budget_tokens = 400;
        sc.cc.streaming_sink = sinks[(i + i / 4) % 4];
        sc.cc.streaming_recent = recents[i % 4];
        snprintf(what, sizeof what, "mask %u, sink %u, recent %u, pages of %u, chunks of %u", i,
                 sc.cc.streaming_sink, sc.cc.streaming_recent, sc.cc.page_size, sc.chunk);
        expect_run(&sc, what);
    }
}

/* One layer in full, two with windows of their own. */
static const uint8_t mask_of_windows[12] = {1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0};

static void a_layer_has_the_window_that_is_given(void **state)
{
    static const uint32_t windows[][3] = {{0, 9, 40}, {0, 64, 1}, {0, 8, 500}, {0, 21, 21}};
    for (uint32_t i = 0; i < 4; i++) {
        char what[64];
        if (!test_takes(i))
            continue;
        test_scenario sc = {.cc = config_masked(mask_of_windows),
                            .tokens = {.seed = 61 + i, .sharpness = 1.5f},
                            .prompt = i == 2 ? 0 : 130,
                            .steps = i == 2 ? 150 : 30,
                            .chunk = 17 + 20 * i};
        sc.cc.layer_windows = windows[i];
        sc.cc.streaming_recent = 3; /* which is not looked at */
        sc.cc.streaming_sink = i % 2 ? 6 : 0;
        sc.cc.budget_tokens = 400;
        sc.cc.dtype = (kvf_dtype)(i % 3);
        snprintf(what, sizeof what, "windows of %u and %u", windows[i][1], windows[i][2]);
        expect_run(&sc, what);
    }
}

/* A layer's bits are those of a cache whose layers all have its window. */
static void windows_beside_each_other_have_the_same_bits(void **state)
{
    static const uint32_t windows[] = {0, 9, 70};
    test_trace mixed, alone;
    test_scenario sc = {.cc = config_masked(mask_of_windows),
                        .tokens = {.seed = 67, .sharpness = 1.5f},
                        .prompt = 200,
                        .steps = 30,
                        .chunk = 37};
    sc.cc.layer_windows = windows;
    test_run(&sc, &mixed);
    const size_t prompt = mixed.prefill_bytes / 3, row = mixed.out_bytes / 3 / sc.steps;
    for (uint32_t layer = 1; layer < 3; layer++) {
        const uint32_t equal[] = {0, windows[layer], windows[layer]};
        for (uint32_t as_windows = 0; as_windows < 2; as_windows++) {
            sc.cc.layer_windows = as_windows ? equal : NULL;
            sc.cc.streaming_recent = as_windows ? 5 : windows[layer];
            test_run(&sc, &alone);
            assert_memory_equal((char *)mixed.prefill + layer * prompt,
                                (char *)alone.prefill + layer * prompt, prompt);
            for (uint32_t i = 0; i < sc.steps; i++)
                assert_memory_equal((char *)mixed.out + (3 * i + layer) * row,
                                    (char *)alone.out + (3 * i + layer) * row, row);
            test_trace_free(&alone);
        }
    }
    test_trace_free(&mixed);
}

static void lengths_about_sink_and_window(void **state)
{
    for (uint32_t prompt = 25; prompt <= 29; prompt++) { /* sink + recent = 27 */
        if (!test_takes(prompt - 24))
            continue;
        test_scenario sc = {.cc = config_masked(mask_of_all_kinds),
                            .tokens = {.seed = prompt, .sharpness = 1.5f},
                            .prompt = prompt,
                            .steps = 4,
                            .chunk = 9};
        expect_run(&sc, "short");
    }
    test_scenario one = {.cc = config_masked(mask_of_all_kinds),
                         .tokens = {.seed = 7, .sharpness = 1.5f},
                         .prompt = 0,
                         .steps = 40,
                         .chunk = 1};
    expect_run(&one, "from an empty sequence");
    one.prompt = 40;
    one.steps = 1;
    one.cc.tokens_max = 41; /* rings are as long as the longest sequence */
    one.cc.streaming_sink = 30;
    one.cc.streaming_recent = 1000;
    expect_run(&one, "a ring that holds all");
    one.cc.streaming_sink = 1000;
    one.cc.streaming_recent = 1;
    expect_run(&one, "a sink that holds all");
}

static void a_ring_wraps_many_times(void **state)
{
    test_scenario sc = {.cc = config_masked(mask_of_all_kinds),
                        .tokens = {.seed = 11, .sharpness = 1.5f},
                        .prompt = 5,
                        .steps = 190,
                        .chunk = 5};
    sc.cc.streaming_sink = 3;
    sc.cc.streaming_recent = 10;
    expect_run(&sc, "wrapped by steps");
    sc.prompt = 190;
    sc.steps = 5;
    sc.chunk = 7;
    expect_run(&sc, "wrapped by chunks");
}

/* Wherever a prompt is cut: sink and window are summed in the same order. */
static void chunks_change_no_bit(void **state)
{
    static const uint32_t sizes[] = {1, 7, 32, 100};
    for (uint32_t i = 0; i < 3; i++) {
        test_scenario sc = {.cc = config_masked(mask_of_all_kinds),
                            .tokens = {.seed = 13, .sharpness = 1.5f},
                            .prompt = 300,
                            .steps = 3,
                            .chunk = 300};
        test_trace whole, cut;
        sc.cc.prefill_chunk_max = 300;
        sc.cc.dtype = i == 1 ? KVF_BF16 : KVF_FP32;
        sc.cc.page_size = i == 1 ? 64 : 8;
        sc.cc.streaming_sink = i == 2 ? 0 : 6;
        sc.cc.streaming_recent = i == 2 ? 1 : 77;
        test_run(&sc, &whole);
        for (uint32_t size = 0; size < 4; size++) {
            if (!test_takes(size + i))
                continue;
            sc.chunk = sizes[size];
            test_run(&sc, &cut);
            if (memcmp(whole.prefill, cut.prefill, whole.prefill_bytes) != 0 ||
                memcmp(whole.out, cut.out, whole.out_bytes) != 0)
                fail_msg("case %u: chunks of %u", i, sc.chunk);
            test_trace_free(&cut);
        }
        test_trace_free(&whole);
    }
}

static test_scenario scenario_hybrid(const uint8_t *mask)
{
    test_scenario sc = {.cc = config_masked(mask),
                        .tokens = {.seed = 17, .sharpness = 3.0f, .topics = 5},
                        .prompt = 220,
                        .steps = 40,
                        .chunk = 64};
    sc.cc.select = KVF_SELECT_HYBRID;
    sc.cc.budget_tokens = 96;
    return sc;
}

static void all_ones_are_no_mask(void **state)
{
    uint8_t ones[12];
    test_trace plain, masked;
    memset(ones, 1, sizeof ones);
    test_scenario sc = scenario_hybrid(NULL);
    test_run(&sc, &plain);
    sc.cc.head_mask = ones;
    test_run(&sc, &masked);
    test_same_bits(&plain, &masked, "all ones");
    assert_memory_equal(plain.prefill, masked.prefill, plain.prefill_bytes);
    test_trace_free(&plain);
    test_trace_free(&masked);
}

static void same_heads(const void *a, const void *b, const test_scenario *sc, uint32_t rows,
                       uint32_t layer_of_row_0, uint32_t layers_in_rows)
{
    const kvf_cache_config *c = &sc->cc;
    const size_t head =
        (size_t)c->query_heads / c->kv_heads * c->head_dim * test_dtype_bytes(c->dtype);
    for (uint32_t row = 0; row < rows; row++) {
        const uint32_t layer = layers_in_rows ? row % layers_in_rows : layer_of_row_0;
        for (uint32_t h = 0; h < c->kv_heads; h++)
            if (mask_of_all_kinds[layer * c->kv_heads + h]) {
                const size_t at = ((size_t)row * c->kv_heads + h) * head;
                if (memcmp((const char *)a + at, (const char *)b + at, head) != 0)
                    fail_msg("layer %u, row %u, KV head %u differs", layer, row, h);
            }
    }
}

static void retrieval_heads_keep_their_bits(void **state)
{
    test_trace plain, masked;
    test_scenario sc = scenario_hybrid(NULL);
    test_run(&sc, &plain);
    sc.cc.head_mask = mask_of_all_kinds;
    test_run(&sc, &masked);
    same_heads(plain.out, masked.out, &sc, sc.steps * sc.cc.layers, 0, sc.cc.layers);
    const size_t layer_bytes = plain.prefill_bytes / sc.cc.layers;
    for (uint32_t i = 0; i < sc.cc.layers; i++)
        same_heads((char *)plain.prefill + i * layer_bytes,
                   (char *)masked.prefill + i * layer_bytes, &sc, sc.prompt, i, 0);
    /* 2 and 4 of 4 heads retrieve in two of three layers */
    assert_int_equal(masked.stats.steps, plain.stats.steps);
    assert_int_equal(masked.stats.pages_selected, plain.stats.pages_selected / 12 * 6);
    test_trace_free(&plain);
    test_trace_free(&masked);
}

/* Sequences of different lengths in one batch, one a fork that goes its own way; of three layers
 * two stream, with windows of their own. */
static void batches_and_forks(void **state)
{
    enum { FIRST = 70, SECOND = 15, STEPS = 30 };
    static const uint32_t windows[] = {33, 12, 0};
    test_world w;
    test_tokens t, other;
    kvf_cache_config c = config_masked(mask_of_all_kinds);
    c.layer_windows = windows;
    c.sequences_max = 3;
    test_tokens_make(&t, &c,
                     &(test_tokens_spec){.count = FIRST + STEPS, .seed = 21, .sharpness = 1.5f});
    test_open(&w, &other, &c,
              &(test_tokens_spec){.count = FIRST + STEPS, .seed = 22, .sharpness = 1.5f});
    kvf_sequence *s[3] = {test_sequence(&w), test_sequence(&w), NULL};
    for (uint32_t layer = 0; layer < c.layers; layer++) {
        test_prefill(&w, s[0], &t, &(test_range){.layer = layer, .count = FIRST, .chunk = 33},
                     NULL);
        test_prefill(&w, s[1], &other, &(test_range){.layer = layer, .count = SECOND, .chunk = 33},
                     NULL);
    }
    test_ok(&w, kvf_sequence_fork(w.cache, s[0], w.stream, &s[2]));
    assert_int_equal(kvf_sequence_length(s[2], 1), FIRST);
    assert_int_equal(kvf_sequence_position(s[2], 1, FIRST - 1), FIRST - 1);
    /* The fork follows the other tokens. */
    test_tokens forked;
    test_tokens_make(&forked, &c,
                     &(test_tokens_spec){.count = FIRST + STEPS, .seed = 21, .sharpness = 1.5f});
    const size_t size = test_dtype_bytes(c.dtype), d = c.head_dim;
    const size_t q_bytes = c.query_heads * d * size, k_bytes = c.kv_heads * d * size;
    char *q = test_alloc(3 * q_bytes), *k = test_alloc(3 * k_bytes), *v = test_alloc(3 * k_bytes);
    char *out = test_alloc(3 * q_bytes);
    float *lse = test_alloc(3 * c.query_heads * sizeof *lse);
    for (uint32_t step = 0; step < STEPS; step++)
        for (uint32_t layer = 0; layer < c.layers; layer++) {
            const test_tokens *from[3] = {&t, &other, &other};
            const uint32_t token[3] = {FIRST + step, SECOND + step, FIRST + step};
            for (uint32_t b = 0; b < 3; b++) {
                memcpy(q + b * q_bytes, test_q(from[b], layer, token[b]), q_bytes);
                memcpy(k + b * k_bytes, test_k(from[b], layer, token[b]), k_bytes);
                memcpy(v + b * k_bytes, test_v(from[b], layer, token[b]), k_bytes);
            }
            memcpy(test_q(&forked, layer, token[2]), q + 2 * q_bytes, q_bytes);
            memcpy(test_k(&forked, layer, token[2]), k + 2 * k_bytes, k_bytes);
            memcpy(test_v(&forked, layer, token[2]), v + 2 * k_bytes, k_bytes);
            const kvf_decode_args a = {.layer = layer,
                                       .batch = 3,
                                       .sequences = s,
                                       .q = q,
                                       .k = k,
                                       .v = v,
                                       .out = out,
                                       .lse = lse};
            test_ok(&w, kvf_decode(w.cache, &a, w.stream));
            test_wait(&w);
            expect_row(&(expectation){&c, &t}, layer, token[0], out, lse, "first");
            expect_row(&(expectation){&c, &other}, layer, token[1], out + q_bytes,
                       lse + c.query_heads, "second");
            expect_row(&(expectation){&c, &forked}, layer, token[2], out + 2 * q_bytes,
                       lse + 2 * c.query_heads, "fork");
        }
    /* A slot that was used begins empty. */
    kvf_sequence_destroy(s[0]);
    s[0] = test_sequence(&w);
    assert_int_equal(kvf_sequence_length(s[0], 0), 0);
    test_decode(&w, s[0], &t, 1, 0, out, lse);
    test_wait(&w);
    expect_row(&(expectation){&c, &t}, 1, 0, out, lse, "again");
    for (uint32_t b = 0; b < 3; b++)
        kvf_sequence_destroy(s[b]);
    test_release(q);
    test_release(k);
    test_release(v);
    test_release(out);
    test_release(lse);
    test_close(&w, &t);
    test_tokens_free(&other);
    test_tokens_free(&forked);
}

/* Two streams by turns, with pauses anywhere: the order of calls is kept. */
static void streams_take_turns(void **state)
{
    test_world w;
    test_tokens t;
    kvf_runtime_config rc = test_runtime_config();
    kvf_cache_config c = config_masked(mask_of_all_kinds);
    kvf_stream *streams[2];
    test_seams.delay_seed = test_on_cuda() ? 0 : 5;
    test_tokens_make(&t, &c, &(test_tokens_spec){.count = 100, .seed = 31, .sharpness = 1.5f});
    test_world_open(&w, &rc, &c);
    streams[0] = w.stream;
    test_ok(&w, kvf_stream_create(w.runtime, &streams[1]));
    kvf_sequence *s = test_sequence(&w);
    const size_t row = c.query_heads * c.head_dim * test_dtype_bytes(c.dtype);
    char *out = test_alloc(100 * c.layers * row);
    for (uint32_t i = 0; i < 100; i++)
        for (uint32_t layer = 0; layer < c.layers; layer++) {
            w.stream = streams[(i + layer) % 2];
            char *to = out + (i * c.layers + layer) * row;
            if (i < 40)
                test_prefill(&w, s, &t,
                             &(test_range){.layer = layer, .first = i, .count = 1, .chunk = 1}, to);
            else
                test_decode(&w, s, &t, layer, i, to, NULL);
        }
    for (uint32_t i = 0; i < 2; i++)
        test_ok(&w, kvf_stream_wait(streams[i]));
    for (uint32_t i = 0; i < 100; i++)
        for (uint32_t layer = 0; layer < c.layers; layer++)
            expect_row(&(expectation){&c, &t}, layer, i, out + (i * c.layers + layer) * row, NULL,
                       "by turns");
    test_release(out);
    w.stream = streams[0];
    kvf_stream_destroy(streams[1]);
    test_close(&w, &t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(any_mask_is_what_it_says),
        cmocka_unit_test(a_layer_has_the_window_that_is_given),
        cmocka_unit_test(windows_beside_each_other_have_the_same_bits),
        cmocka_unit_test(lengths_about_sink_and_window),
        cmocka_unit_test(a_ring_wraps_many_times),
        cmocka_unit_test(chunks_change_no_bit),
        cmocka_unit_test(all_ones_are_no_mask),
        cmocka_unit_test(retrieval_heads_keep_their_bits),
        cmocka_unit_test(batches_and_forks),
        cmocka_unit_test(streams_take_turns),
    };
    return cmocka_run_group_tests_name("runtime: head masks", tests, NULL, NULL);
}
