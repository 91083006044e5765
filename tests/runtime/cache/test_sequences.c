/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Sequences: fork, destroy, reuse, lengths, positions, limits, and one that brings NaN.
 *
 * A fork is compared with a sequence that was prefilled and decoded on its own, bit for bit.
 */

#include "harness.h"

#include <math.h>

/* ---- fork ---- */

typedef struct line {
    kvf_sequence *sequence;
    const test_tokens *tokens;
} line;

/* Steps first .. first+count-1 of every layer; out is [count, layers, query_heads, head_dim]. */
static void run_steps(test_world *w, const line *l, uint32_t first, uint32_t count, void *out)
{
    const kvf_cache_config *c = &w->config;
    const size_t row = (size_t)c->query_heads * c->head_dim * test_dtype_bytes(c->dtype);
    for (uint32_t i = 0; i < count; i++)
        for (uint32_t layer = 0; layer < c->layers; layer++)
            test_decode(w, l->sequence, l->tokens, layer, first + i,
                        (char *)out + ((size_t)i * c->layers + layer) * row, NULL);
}

static void prefill_all(test_world *w, const line *l, uint32_t count)
{
    for (uint32_t layer = 0; layer < w->config.layers; layer++)
        test_prefill(w, l->sequence, l->tokens,
                     &(test_range){.layer = layer, .count = count, .chunk = 128}, NULL);
}

typedef struct fork_case {
    kvf_cache_config cc;
    uint32_t prompt, before, order; /* order: 0 parent dies first, 1 child dies first */
} fork_case;

/* Prefill, `before` steps, fork, then both lines go their own way, turn by turn. */
static void check_fork(const fork_case *f, uint64_t seed)
{
    const uint32_t half = test_afford(20), steps = 2 * half;
    const uint32_t common = f->prompt + f->before, total = common + steps;
    const size_t row = (size_t)f->cc.query_heads * f->cc.head_dim * test_dtype_bytes(f->cc.dtype);
    const size_t bytes = row * f->cc.layers * steps;
    test_tokens branch[2];
    test_branches_make(branch, &f->cc, total, common, seed);
    char *alone = test_alloc(2 * bytes), *forked = test_alloc(2 * bytes);
    char *scratch = test_alloc(row * f->cc.layers * (f->before + 1));
    assert_true(alone && forked && scratch);
    test_world w;
    for (uint32_t b = 0; b < 2; b++) {
        test_world_open(&w, NULL, &f->cc);
        line l = {test_sequence(&w), &branch[b]};
        prefill_all(&w, &l, f->prompt);
        run_steps(&w, &l, f->prompt, f->before, scratch);
        run_steps(&w, &l, common, steps, alone + b * bytes);
        test_wait(&w);
        test_world_close(&w);
    }
    test_world_open(&w, NULL, &f->cc);
    line l[2] = {{test_sequence(&w), &branch[0]}, {NULL, &branch[1]}};
    prefill_all(&w, &l[0], f->prompt);
    run_steps(&w, &l[0], f->prompt, f->before, scratch);
    test_ok(&w, kvf_sequence_fork(w.cache, l[0].sequence, w.stream, &l[1].sequence));
    assert_int_equal(kvf_sequence_length(l[1].sequence, 0), common);
    for (uint32_t i = 0; i < half; i++)
        for (uint32_t b = 0; b < 2; b++)
            run_steps(&w, &l[b], common + i, 1, forked + b * bytes + i * row * f->cc.layers);
    const uint32_t rest = f->order ? 0 : 1; /* the line that goes on after the other one is gone */
    run_steps(&w, &l[!rest], common + half, half,
              forked + (size_t)!rest * bytes + half * row * f->cc.layers);
    kvf_sequence_destroy(l[!rest].sequence);
    run_steps(&w, &l[rest], common + half, half, forked + rest * bytes + half * row * f->cc.layers);
    kvf_sequence_destroy(l[rest].sequence);
    test_wait(&w);
    test_world_close(&w);
    for (uint32_t b = 0; b < 2; b++)
        if (memcmp(alone + b * bytes, forked + b * bytes, bytes) != 0)
            fail_msg(
                "prompt %u, %u steps before the fork: the %s differs from a run of its own by %g",
                f->prompt, f->before, b ? "child" : "parent",
                test_distance(alone + b * bytes, forked + b * bytes, f->cc.dtype,
                              bytes / test_dtype_bytes(f->cc.dtype)));
    test_release(alone);
    test_release(forked);
    test_release(scratch);
    test_tokens_free(&branch[0]);
    test_tokens_free(&branch[1]);
}

static void fork_equals_copy(void **state)
{
    const uint64_t seed = test_seed(307);
    static const struct {
        uint32_t prompt, before;
        kvf_transfer transfer;
    } rows[] = {
        {200, 0, KVF_TRANSFER_DIRECT}, {203, 13, KVF_TRANSFER_GATHER}, {40, 5, KVF_TRANSFER_EACH},
        {7, 0, KVF_TRANSFER_GATHER},   {210, 21, KVF_TRANSFER_GATHER},
    };
    for (uint32_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        fork_case f = {.cc = test_config_small(),
                       .prompt = rows[i].prompt,
                       .before = rows[i].before,
                       .order = i % 2};
        f.cc.layers = 2;
        f.cc.sequences_max = 2;
        f.cc.dtype = KVF_BF16;
        f.cc.transfer = rows[i].transfer;
        check_fork(&f, seed + 10 * i);
    }
}

/* Sealed pages are shared: many children of a long parent fit into a pool for little more than one.
 */
static void fork_shares_pages(void **state)
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
    assert_null(extra);
    for (uint32_t i = 0; i < 8; i++)
        test_decode(&w, s[i], &t, 0, 400, out[i], NULL);
    test_wait(&w);
    for (uint32_t i = 1; i < 8; i++)
        assert_memory_equal(out[0], out[i], sizeof out[0]);
    test_close(&w, &t);
}

/* ---- life cycle ---- */

/* The same sequence again and again in one cache, with others alive beside it. */
static void sequences_are_reused(void **state)
{
    const uint64_t seed = test_seed(313);
    kvf_cache_config c = test_config_small();
    c.sequences_max = 2;
    c.transfer = KVF_TRANSFER_GATHER;
    test_tokens t, other;
    test_world w;
    test_tokens_make(
        &t, &c, &(test_tokens_spec){.count = 240, .seed = seed, .sharpness = 2.0f, .topics = 4});
    test_open(&w, &other, &c,
              &(test_tokens_spec){.count = 300, .seed = seed + 1, .sharpness = 1.0f});
    float(*first)[256] = test_scratch(20 * sizeof *first);
    float(*again)[256] = test_scratch(20 * sizeof *again);
    for (uint32_t round = 0; round < 6; round++) {
        line l = {test_sequence(&w), &t};
        assert_int_equal(kvf_sequence_length(l.sequence, 0), 0);
        prefill_all(&w, &l, 220);
        kvf_sequence *beside = NULL;
        if (round % 2) {
            beside = test_sequence(&w);
            test_prefill(&w, beside, &other, &(test_range){.count = 100 + 30 * round, .chunk = 90},
                         NULL);
        }
        run_steps(&w, &l, 220, 20, round ? again : first);
        kvf_sequence_destroy(l.sequence); /* without waiting */
        kvf_sequence_destroy(beside);
        test_wait(&w);
        if (round)
            assert_memory_equal(first, again, 20 * sizeof *first);
    }
    test_close(&w, &t);
    test_tokens_free(&other);
}

static void sequences_max_is_a_limit(void **state)
{
    kvf_cache_config c = test_config_small();
    c.sequences_max = 3;
    test_world w;
    test_world_open(&w, NULL, &c);
    kvf_sequence *s[3], *extra = NULL;
    for (uint32_t i = 0; i < 3; i++)
        s[i] = test_sequence(&w);
    test_expect(w.runtime, kvf_sequence_create(w.cache, &extra), KVF_FULL);
    assert_null(extra);
    kvf_sequence_destroy(s[1]);
    s[1] = test_sequence(&w);
    test_expect(w.runtime, kvf_sequence_create(w.cache, &extra), KVF_FULL);
    kvf_sequence_destroy(NULL);
    test_world_close(&w); /* closes the living ones too */
}

/* ---- lengths ---- */

static void layers_may_have_different_lengths(void **state)
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

static void positions_come_back(void **state)
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

/* Positions that do not ascend, or have none after them, are refused, and nothing is appended. */
static void positions_must_ascend(void **state)
{
    kvf_cache_config c = test_config_small();
    test_tokens t;
    test_world w;
    test_open(&w, &t, &c, &(test_tokens_spec){.count = 8, .seed = 5, .sharpness = 1.0f});
    kvf_sequence *s = test_sequence(&w);
    float *out = test_scratch(8 * 256 * sizeof *out);
    const uint32_t bad[3] = {4, 9, 9};
    kvf_prefill_args a = test_chunk_args(s, &t, 0, 0, 3, out);
    a.positions = bad;
    test_expect(w.runtime, kvf_prefill(w.cache, &a, w.stream), KVF_INVALID);
    assert_non_null(strstr(kvf_runtime_error(w.runtime)->text, "position"));
    assert_int_equal(kvf_sequence_length(s, 0), 0);
    a.tokens = 2;
    test_ok(&w, kvf_prefill(w.cache, &a, w.stream));
    const uint32_t back = 3;
    kvf_decode_args d = test_step_args(&s, &t, 0, 2, out);
    d.positions = &back;
    test_expect(w.runtime, kvf_decode(w.cache, &d, w.stream), KVF_INVALID);
    assert_int_equal(kvf_sequence_length(s, 0), 2);
    const uint32_t no_next = UINT32_MAX, last = UINT32_MAX - 1;
    d.positions = &no_next;
    test_expect(w.runtime, kvf_decode(w.cache, &d, w.stream), KVF_INVALID);
    d.positions = &last;
    test_ok(&w, kvf_decode(w.cache, &d, w.stream));
    d.positions = NULL;
    test_expect(w.runtime, kvf_decode(w.cache, &d, w.stream), KVF_INVALID);
    a.positions = NULL;
    test_expect(w.runtime, kvf_prefill(w.cache, &a, w.stream), KVF_INVALID);
    assert_non_null(strstr(kvf_runtime_error(w.runtime)->text, "positions[1] = 4294967296"));
    assert_int_equal(kvf_sequence_length(s, 0), 3);
    test_wait(&w);
    test_close(&w, &t);
}

int main(void)
{
    return unit_run(fork_equals_copy, fork_shares_pages, sequences_are_reused,
                    sequences_max_is_a_limit, layers_may_have_different_lengths,
                    positions_come_back, positions_must_ascend);
}
