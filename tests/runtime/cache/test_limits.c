/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Bad input and full caches: a status, a text that names field and value, nothing half done, and a
 * cache that works afterwards. Lengths and positions of sequences.
 */

#include "harness.h"
#include "refusals.h"

#include <kvferry/setting.h>
#include <math.h>

/* ---- settings ---- */

/* FIELD VALUE & FIELD VALUE ...: opened and planned, with the same answer. */
static kvf_status open_row(void *user, char *change, size_t size, kvf_error *error)
{
    kvf_runtime *runtime = user;
    kvf_cache_config c = test_config_small();
    kvf_cache *cache = NULL;
    kvf_cache_plan plan;
    kvf_error planned = {0};
    uint8_t *mask = test_alloc(2048);
    uint32_t *windows = test_alloc(3 * sizeof *windows);
    const uint64_t live = runtime->context->live_bytes;
    for (char *field = change, *next; field; field = next) {
        const char *value = refusals_part(field, &next);
        if (strcmp(field, "head_mask") == 0) {
            c.head_mask = mask;
            for (size_t i = 0; value[i] != '\0'; i++)
                mask[i] = (uint8_t)(value[i] - '0');
        } else if (strncmp(field, "layer_windows", 13) == 0) {
            c.layer_windows = windows; /* layer_windowsN: of layer N */
            windows[(field[13] - '0') % 3] = (uint32_t)strtoul(value, NULL, 10);
        } else if (!refusals_set(kvf_cache_setting, &c, field, value)) {
            fail_msg("there is no field %s", field);
        }
    }
    const kvf_status status = kvf_cache_open(runtime, &c, &cache, error);
    assert_int_equal(cache == NULL, status != KVF_OK);
    kvf_cache_close(cache);
    assert_int_equal(runtime->context->live_bytes, live);
    assert_int_equal(kvf_cache_plan_make(runtime, &c, &plan, &planned), status);
    assert_string_equal(planned.text, error->text);
    test_release(windows);
    test_release(mask);
    return status;
}

/* A GPU has kernels for some shapes. */
TEST(every_bad_setting_is_named)
{
    kvf_runtime *runtime = test_runtime();
    refusals_check(&(refusals){
        .path = "tests/runtime/cache/cache.refusals", .call = open_row, .user = runtime});
    if (test_on_cuda())
        refusals_check(&(refusals){
            .path = "tests/runtime/cache/cache_cuda.refusals", .call = open_row, .user = runtime});
    kvf_runtime_close(runtime);
}

/* The least budget, and what no text can say. */
TEST(settings_at_the_border)
{
    test_world w;
    const kvf_cache_config good = test_config_small();
    test_world_open(&w, NULL, &good);
    kvf_cache *cache = NULL;
    kvf_error error = {0};
    kvf_cache_config c = good; /* sink + local + P - 1 + P is the least */
    c.budget_tokens = c.sink_tokens + c.local_tokens + c.page_size - 1 + c.page_size;
    test_expect(w.runtime, kvf_cache_open(w.runtime, &c, &cache, &error), KVF_OK);
    kvf_cache_close(cache);
    c = good;
    c.size = 8; /* not filled by init */
    test_expect(w.runtime, kvf_cache_open(w.runtime, &c, &cache, &error), KVF_INVALID);
    assert_non_null(strstr(error.text, "size = 8"));
    test_expect(w.runtime, kvf_cache_open(w.runtime, &c, &cache, NULL), KVF_INVALID);
    assert_string_equal(kvf_runtime_error(w.runtime)->text, error.text);
    test_world_close(&w);
}

TEST(settings_in_force_are_told)
{
    kvf_cache_config c = test_config_small();
    c.softmax_scale = 0.0f;
    c.device_bytes = KVF_DEVICE_BYTES_AUTO;
    test_world w;
    test_world_open(&w, NULL, &c);
    const kvf_cache_config *s = kvf_cache_settings(w.cache);
    const kvf_cache_plan *p = kvf_cache_memory(w.cache);
    assert_true(fabs((double)s->softmax_scale - 0.125) < 1e-6);
    assert_int_equal(s->host_tokens_max, c.tokens_max);
    const kvf_transfer own = test_on_cuda() ? KVF_TRANSFER_AUTO : KVF_TRANSFER_DIRECT;
    assert_int_equal(s->transfer, own);
    assert_int_equal(p->transfer, own);
    assert_true(s->device_bytes == KVF_DEVICE_BYTES_AUTO);
    assert_int_equal(p->slots % 32, 0);
    /* rest = 96 - 4 - (16 + 7) = 69, a quarter of it 17 static tokens; with the shortest window
     * (76 - 17) / 8 = 7 pages */
    assert_int_equal(p->static_tokens, 17);
    assert_int_equal(p->dynamic_pages, 7);
    assert_int_equal(p->block_size, 8);
    assert_int_equal(p->host_kv_bytes, 512u * 2 * 2 * 64 * 4);
    kvf_cache_plan again;
    test_ok(&w, kvf_cache_plan_make(w.runtime, &c, &again, NULL));
    assert_memory_equal(&again, p, sizeof again);
    test_world_close(&w);
}

/* ---- full caches ---- */

/* Fill the pool with two sequences, be refused, give one back, go on: the same bits as alone. */
TEST(an_exhausted_pool_appends_nothing)
{
    const uint64_t seed = test_seed(403);
    kvf_cache_config c = test_config_small();
    c.sequences_max = 2;
    c.tokens_max = 256;
    c.host_tokens_max = 320;
    test_tokens t;
    test_world w;
    test_tokens_make(
        &t, &c, &(test_tokens_spec){.count = 256, .seed = seed, .sharpness = 2.0f, .topics = 4});
    float *out = test_scratch(128 * 256 * sizeof *out);
    float *lone = test_scratch(256 * sizeof *lone);
    float *after = test_scratch(256 * sizeof *after);
    for (uint32_t crowded = 0; crowded < 2; crowded++) {
        test_world_open(&w, NULL, &c);
        kvf_sequence *s = test_sequence(&w), *hog = NULL;
        test_prefill(&w, s, &t, &(test_range){.count = 200, .chunk = 100}, NULL);
        if (crowded) {
            hog = test_sequence(&w);
            uint32_t held = 0;
            kvf_status status = KVF_OK;
            while (status == KVF_OK && held < 256) {
                kvf_prefill_args a = test_chunk_args(hog, &t, 0, held, 16, out);
                status = kvf_prefill(w.cache, &a, w.stream);
                held += status == KVF_OK ? 16 : 0;
            }
            assert_int_equal(status, KVF_FULL);
            assert_non_null(strstr(kvf_runtime_error(w.runtime)->text, "host_tokens_max"));
            assert_int_equal(kvf_sequence_length(hog, 0), held);
            assert_true(held >= 64 && held <= 160);
            kvf_sequence_destroy(hog);
        }
        for (uint32_t i = 200; i < 256; i++)
            test_decode(&w, s, &t, 0, i, crowded ? after : lone, NULL);
        test_wait(&w);
        test_world_close(&w);
    }
    assert_memory_equal(lone, after, 256 * sizeof *lone);
    test_tokens_free(&t);
}

/* A batch in which one sequence cannot grow: no other one grows either. */
TEST(a_batch_appends_all_or_nothing)
{
    const uint64_t seed = test_seed(405);
    kvf_cache_config c = test_config_small();
    c.sequences_max = 2;
    c.tokens_max = 64;
    test_tokens t;
    test_world w;
    test_open(&w, &t, &c, &(test_tokens_spec){.count = 64, .seed = seed, .sharpness = 1.0f});
    kvf_sequence *s[2] = {test_sequence(&w), test_sequence(&w)};
    test_prefill(&w, s[0], &t, &(test_range){.count = 20, .chunk = 20}, NULL);
    test_prefill(&w, s[1], &t, &(test_range){.count = 64, .chunk = 64}, NULL);
    float *out = test_scratch(2 * 256 * sizeof *out);
    kvf_decode_args d = test_step_args(s, &t, 0, 0, out);
    d.batch = 2;
    test_expect(w.runtime, kvf_decode(w.cache, &d, w.stream), KVF_FULL);
    assert_int_equal(kvf_sequence_length(s[0], 0), 20);
    assert_int_equal(kvf_sequence_length(s[1], 0), 64);
    kvf_sequence *twice[2] = {s[0], s[0]};
    d.sequences = twice;
    test_expect(w.runtime, kvf_decode(w.cache, &d, w.stream), KVF_INVALID);
    assert_int_equal(kvf_sequence_length(s[0], 0), 20);
    test_wait(&w);
    test_close(&w, &t);
}

/* ---- sequences ---- */

/* Sealed pages are shared: many children of a long parent fit into a pool for little more than one.
 */
TEST(fork_shares_pages)
{
    const uint64_t seed = test_seed(311);
    kvf_cache_config c = test_config_small();
    c.sequences_max = 8;
    c.host_tokens_max = 400 + 8 * 48;
    test_tokens t;
    test_world w;
    test_open(&w, &t, &c, &(test_tokens_spec){.count = 410, .seed = seed, .sharpness = 1.0f});
    kvf_sequence *s[8];
    float(*out)[256] = test_scratch(8 * sizeof *out);
    s[0] = test_sequence(&w);
    test_prefill(&w, s[0], &t, &(test_range){.count = 400, .chunk = 128}, NULL);
    for (uint32_t i = 1; i < 8; i++)
        test_ok(&w, kvf_sequence_fork(w.cache, s[0], w.stream, &s[i]));
    kvf_sequence *extra = NULL;
    test_expect(w.runtime, kvf_sequence_fork(w.cache, s[0], w.stream, &extra), KVF_FULL);
    test_expect(w.runtime, kvf_sequence_create(w.cache, &extra), KVF_FULL);
    assert_null(extra);
    kvf_sequence_destroy(NULL);
    kvf_sequence_destroy(s[3]);
    test_ok(&w, kvf_sequence_fork(w.cache, s[2], w.stream, &s[3]));
    for (uint32_t i = 0; i < 8; i++)
        test_decode(&w, s[i], &t, 0, 400, out[i], NULL);
    test_wait(&w);
    for (uint32_t i = 1; i < 8; i++)
        assert_memory_equal(out[0], out[i], sizeof out[0]);
    test_close(&w, &t);
}

/* Digests of what forks share are there once: with a prompt of Llama-3.1-8B's shape, all digests of
 * sixteen take an eighth. */
TEST(sixteen_forks_take_an_eighth)
{
    enum { FORKS = 16, ANSWER = 256, WINDOW = 64 + 32 };
    static const char *const kinds[] = {"digest=codes", "digest=codes head_mask=1221221221221221",
                                        "digest=minmax"}; /* coarse heads have centroids, too */
    kvf_runtime *runtime = test_runtime();
    for (uint32_t i = 0; i < 6; i++) {
        const uint32_t context = i % 2 ? 131072 : 32768;
        uint64_t bytes[3]; /* a sequence; forks with prompts of their own, and with one */
        for (uint32_t k = 0; k < 3; k++) {
            kvf_cache_config c;
            kvf_cache_plan plan;
            kvf_cache_config_init(&c);
            test_set(&c, "layers=2 query_heads=32 kv_heads=8 head_dim=128 dtype=bf16");
            test_set(&c, kinds[i / 2]);
            c.sequences_max = k ? FORKS : 1;
            c.tokens_max = context + ANSWER;
            c.host_tokens_max = k == 2 ? context + FORKS * (ANSWER + WINDOW) : 0;
            test_expect(runtime, kvf_cache_plan_make(runtime, &c, &plan, NULL), KVF_OK);
            bytes[k] = plan.device_digest_bytes;
        }
        assert_true(bytes[1] >= FORKS * bytes[0]);
        assert_true(8 * bytes[2] <= FORKS * bytes[0]);
    }
    kvf_runtime_close(runtime);
}

/* ---- lengths ---- */

TEST(layers_may_have_different_lengths)
{
    const uint64_t seed = test_seed(317);
    kvf_cache_config c = test_config_small();
    c.layers = 3;
    static const uint32_t lengths[3] = {300, 60, 5};
    test_tokens t;
    test_tokens_make(
        &t, &c, &(test_tokens_spec){.count = 330, .seed = seed, .sharpness = 2.0f, .topics = 4});
    float(*together)[20][256] = test_scratch(3 * sizeof *together);
    float(*alone)[256] = test_scratch(20 * sizeof *alone);
    test_world w;
    test_world_open(&w, NULL, &c);
    kvf_sequence *s = test_sequence(&w);
    for (uint32_t layer = 0; layer < 3; layer++)
        test_prefill(&w, s, &t,
                     &(test_range){.layer = layer, .count = lengths[layer], .chunk = 128}, NULL);
    for (uint32_t i = 0; i < 20; i++)
        for (uint32_t layer = 0; layer < 3; layer++)
            test_decode(&w, s, &t, layer, lengths[layer] + i, together[layer][i], NULL);
    test_wait(&w);
    for (uint32_t layer = 0; layer < 3; layer++)
        assert_int_equal(kvf_sequence_length(s, layer), lengths[layer] + 20);
    test_world_close(&w);
    for (uint32_t layer = 0; layer < 3; layer++) {
        test_world_open(&w, NULL, &c);
        s = test_sequence(&w);
        test_prefill(&w, s, &t,
                     &(test_range){.layer = layer, .count = lengths[layer], .chunk = 128}, NULL);
        for (uint32_t i = 0; i < 20; i++)
            test_decode(&w, s, &t, layer, lengths[layer] + i, alone[i], NULL);
        test_wait(&w);
        assert_memory_equal(together[layer], alone, 20 * sizeof *alone);
        test_world_close(&w);
    }
    test_tokens_free(&t);
}

TEST(positions_come_back)
{
    const uint64_t seed = test_seed(331);
    kvf_cache_config c = test_config_small();
    c.layers = 2;
    c.sequences_max = 2;
    test_tokens t;
    test_world w;
    test_random r = {seed};
    test_open(&w, &t, &c, &(test_tokens_spec){.count = 200, .seed = seed, .sharpness = 1.0f});
    kvf_sequence *s = test_sequence(&w), *child = NULL;
    uint32_t positions[200], next = 0;
    for (uint32_t i = 0; i < 200; i++) {
        next += test_random_below(&r, 3) ? 1 : 1 + test_random_below(&r, 1000);
        positions[i] = next;
    }
    float *out = test_scratch(128 * 256 * sizeof *out);
    for (uint32_t at = 0; at < 180; at += 60) {
        uint32_t copy[60];
        memcpy(copy, positions + at, sizeof copy);
        kvf_prefill_args a = test_chunk_args(s, &t, 0, at, 60, out);
        a.positions = copy;
        test_ok(&w, kvf_prefill(w.cache, &a, w.stream));
        memset(copy, 0xff, sizeof copy); /* they are copied */
    }
    test_prefill(&w, s, &t, &(test_range){.layer = 1, .count = 70, .chunk = 33}, NULL);
    for (uint32_t i = 180; i < 190; i++) {
        kvf_decode_args d = test_step_args(&s, &t, 0, i, out);
        d.positions = &positions[i];
        test_ok(&w, kvf_decode(w.cache, &d, w.stream));
        test_wait(&w);
    }
    test_ok(&w, kvf_sequence_fork(w.cache, s, w.stream, &child));
    for (uint32_t i = 190; i < 200; i++) {
        test_decode(&w, child, &t, 0, i, out, NULL); /* last + 1 */
        test_wait(&w);
    }
    for (uint32_t i = 0; i < 190; i++) {
        assert_int_equal(kvf_sequence_position(s, 0, i), positions[i]);
        assert_int_equal(kvf_sequence_position(child, 0, i), positions[i]);
    }
    for (uint32_t i = 190; i < 200; i++)
        assert_int_equal(kvf_sequence_position(child, 0, i), positions[189] + i - 189);
    for (uint32_t i = 0; i < 70; i++)
        assert_int_equal(kvf_sequence_position(s, 1, i), i);
    assert_int_equal(kvf_sequence_length(s, 0), 190);
    assert_int_equal(kvf_sequence_length(child, 0), 200);
    test_close(&w, &t);
}

/* ---- NaN ---- */

typedef struct nan_case {
    uint32_t layer, token, head, in_value, infinite, by_decode;
    const char *settings;
} nan_case;

static void check_nan(const nan_case *n, uint64_t seed)
{
    kvf_cache_config c = test_config_small();
    c.layers = 3;
    c.sequences_max = 2;
    c.dtype = KVF_BF16;
    test_set(&c, n->settings);
    test_tokens bad, good;
    test_world w;
    test_tokens_make(&bad, &c, &(test_tokens_spec){.count = 130, .seed = seed, .sharpness = 1.0f});
    test_tokens_make(&good, &c,
                     &(test_tokens_spec){.count = 150, .seed = seed + 1, .sharpness = 1.0f});
    void *row = n->in_value ? test_v(&bad, n->layer, n->token) : test_k(&bad, n->layer, n->token);
    kvf_element_set(row, c.dtype, n->head * 64 + 13, n->infinite ? -INFINITY : NAN);
    test_world_open(&w, NULL, &c);
    kvf_sequence *s = test_sequence(&w), *other = test_sequence(&w);
    const size_t elements = c.query_heads * c.head_dim;
    char *out = test_scratch(64 * elements * 4);
    const uint32_t prompt = n->by_decode ? n->token : 100;
    test_prefill(&w, other, &good, &(test_range){.layer = n->layer, .count = 120, .chunk = 64},
                 NULL);
    kvf_status status = KVF_OK;
    for (uint32_t at = 0; at < prompt && status == KVF_OK; at += 50) {
        kvf_prefill_args a =
            test_chunk_args(s, &bad, n->layer, at, prompt - at < 50 ? prompt - at : 50, out);
        status = kvf_prefill(w.cache, &a, w.stream);
    }
    for (uint32_t i = prompt; i < 130 && status == KVF_OK; i++) {
        kvf_decode_args d = test_step_args(&s, &bad, n->layer, i, out);
        status = kvf_decode(w.cache, &d, w.stream);
        const kvf_status waited = kvf_stream_wait(w.stream); /* then the next call must know */
        assert_true(waited == KVF_OK || waited == KVF_NOT_FINITE);
    }
    assert_int_equal(status, KVF_NOT_FINITE);
    const char *text = kvf_runtime_error(w.runtime)->text;
    char layer_text[32], token_text[32];
    snprintf(layer_text, sizeof layer_text, "layer %u", n->layer);
    snprintf(token_text, sizeof token_text, "token %u", n->token);
    if (!strstr(text, layer_text) || !strstr(text, token_text))
        fail_msg("\"%s\" does not name %s and %s", text, layer_text, token_text);
    kvf_sequence_destroy(s);
    /* The other sequence, and a new one in the same place, do not notice. */
    for (uint32_t i = 120; i < 150; i++)
        test_decode(&w, other, &good, n->layer, i, out, NULL);
    s = test_sequence(&w);
    test_prefill(&w, s, &good, &(test_range){.layer = n->layer, .count = 120, .chunk = 64}, NULL);
    char *again = test_scratch(elements * 4);
    for (uint32_t i = 120; i < 150; i++)
        test_decode(&w, s, &good, n->layer, i, again, NULL);
    test_wait(&w);
    assert_memory_equal(out, again, elements * test_dtype_bytes(c.dtype));
    for (size_t i = 0; i < elements; i++)
        assert_true(isfinite((double)kvf_element_get(again, c.dtype, i)));
    test_close(&w, &bad);
    test_tokens_free(&good);
}

TEST(a_sequence_with_nan_is_named)
{
    const uint64_t seed = test_seed(409);
#define HEADS                                                                                      \
    "kv_heads=4 query_heads=8 dtype=fp32 select=full head_mask=010100001111 streaming_sink=6 "     \
    "streaming_recent=21" /* both kinds, no retrieval head, no streaming head */
    static const nan_case cases[] = {
        {0, 3, 1, 0, 0, 0, ""},     {2, 97, 1, 1, 0, 0, ""},    {1, 104, 1, 0, 1, 1, ""},
        {2, 111, 1, 1, 1, 1, ""},   {1, 60, 1, 1, 1, 0, ""},    {0, 30, 0, 0, 1, 0, HEADS},
        {0, 30, 1, 1, 0, 0, HEADS}, {1, 5, 3, 0, 0, 0, HEADS},  {2, 40, 2, 1, 1, 0, HEADS},
        {0, 45, 2, 0, 0, 1, HEADS}, {0, 45, 3, 1, 0, 1, HEADS}, {1, 47, 0, 0, 1, 1, HEADS},
        {2, 44, 0, 1, 0, 1, HEADS},
    };
#undef HEADS
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        check_nan(&cases[i], seed + i);
}
