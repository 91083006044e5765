/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Queries alone: layers that attend to keys of another layer. The property: outputs and logarithms
 * have the bits of a layer that holds copies of the keys, in chunks and in steps, at any budget;
 * the layer with the keys gives what it does when nobody asks; a full budget is dense attention.
 */

#include "harness.h"

#include <string.h>

#include "naive.h"

enum { PROMPT = 230, STEPS = 40, CHUNK = 96, SEQUENCES = 2, WIDTH = 4 * 64 };

/* Outputs of two layers: the one with the keys, and the one that asks or holds copies. */
typedef struct answers {
    float chunk[SEQUENCES][2][PROMPT][WIDTH];
    float step[SEQUENCES][STEPS][2][WIDTH], lse[SEQUENCES][STEPS][2][4];
} answers;

/* Who the second layer's queries go to. */
typedef enum asked { COPIES, OWNER, NOBODY } asked;

static void chunk(test_world *w, kvf_sequence *s, const test_tokens *t, uint32_t first, asked who,
                  float (*own)[WIDTH], float (*other)[WIDTH])
{
    const uint32_t count = PROMPT - first < CHUNK ? PROMPT - first : CHUNK;
    kvf_prefill_args a = test_chunk_args(s, t, 0, first, count, own[first]);
    test_ok(w, kvf_prefill(w->cache, &a, w->stream));
    a.q = test_q(t, 1, first);
    a.out = other[first];
    a.layer = who == COPIES;
    a.k = who == COPIES ? a.k : NULL;
    a.v = who == COPIES ? a.v : NULL;
    if (who != NOBODY)
        test_ok(w, kvf_prefill(w->cache, &a, w->stream));
}

static void step(test_world *w, kvf_sequence *s, const test_tokens *t, uint32_t i, asked who,
                 float (*out)[WIDTH], float (*lse)[4])
{
    kvf_decode_args a = test_step_args(&s, t, 0, PROMPT + i, out[0]);
    a.lse = lse[0];
    test_ok(w, kvf_decode(w->cache, &a, w->stream));
    a.q = test_q(t, 1, PROMPT + i);
    a.out = out[1];
    a.lse = lse[1];
    a.layer = who == COPIES;
    a.k = who == COPIES ? a.k : NULL;
    a.v = who == COPIES ? a.v : NULL;
    if (who != NOBODY)
        test_ok(w, kvf_decode(w->cache, &a, w->stream));
}

static void play(const kvf_cache_config *c, const test_tokens t[SEQUENCES], asked who, answers *to)
{
    test_world w;
    test_world_open(&w, NULL, c);
    kvf_sequence *s[SEQUENCES];
    memset(to, 0, sizeof *to);
    for (uint32_t i = 0; i < SEQUENCES; i++)
        s[i] = test_sequence(&w);
    for (uint32_t first = 0; first < PROMPT; first += CHUNK)
        for (uint32_t i = 0; i < SEQUENCES; i++)
            chunk(&w, s[i], &t[i], first, who, to->chunk[i][0], to->chunk[i][1]);
    for (uint32_t n = 0; n < STEPS; n++)
        for (uint32_t i = 0; i < SEQUENCES; i++)
            step(&w, s[i], &t[i], n, who, to->step[i][n], to->lse[i][n]);
    test_wait(&w);
    test_world_close(&w);
}

static void compare(const answers *a, const answers *b, uint32_t layers, const char *what)
{
    for (uint32_t i = 0; i < SEQUENCES; i++)
        for (uint32_t l = 0; l < layers; l++) {
            if (memcmp(a->chunk[i][l], b->chunk[i][l], sizeof a->chunk[i][l]) != 0)
                fail_msg("%s: chunks of sequence %u, layer %u differ", what, i, l);
            for (uint32_t n = 0; n < STEPS; n++)
                if (memcmp(a->step[i][n][l], b->step[i][n][l], sizeof a->step[i][n][l]) != 0 ||
                    memcmp(a->lse[i][n][l], b->lse[i][n][l], sizeof a->lse[i][n][l]) != 0)
                    fail_msg("%s: step %u of sequence %u, layer %u differs", what, n, i, l);
        }
}

static kvf_cache_config config_of(const char *settings)
{
    kvf_cache_config c = test_config_small();
    c.layers = 2;
    c.sequences_max = SEQUENCES;
    c.tokens_max = PROMPT + STEPS;
    c.budget_tokens = 110;
    test_set(&c, settings);
    return c;
}

static void make(test_tokens t[SEQUENCES], const kvf_cache_config *c, uint64_t seed)
{
    for (uint32_t i = 0; i < SEQUENCES; i++)
        test_tokens_make(
            &t[i], c,
            &(test_tokens_spec){
                .count = PROMPT + STEPS, .seed = seed + i, .sharpness = 1.5f, .topics = 4});
}

TEST(queries_have_the_bits_of_copies)
{
    static const char *const settings[] = {
        "select=dynamic digest=codes",
        "select=dynamic digest=codes transfer=gather device_bytes=0 page_size=4",
        "select=dynamic digest=minmax group_reduce=max",
        "select=quest",
        "select=arkvale",
        "select=streaming",
        "select=full",
        "select=dynamic digest=codes head_mask=1212 coarse_share=0.2",
        "select=dynamic digest=codes verify_interval=3 budget_share=0.6",
    };
    const uint64_t seed = test_seed(4241);
    answers *of = test_scratch(3 * sizeof *of);
    for (size_t i = 0; i < sizeof settings / sizeof *settings; i++) {
        if (!test_takes(i))
            continue;
        kvf_cache_config c = config_of(settings[i]);
        test_tokens t[SEQUENCES];
        c.transfer = test_transfer(c.transfer);
        make(t, &c, seed);
        for (asked who = COPIES; who <= NOBODY; who++)
            play(&c, t, who, &of[who]);
        compare(&of[OWNER], &of[COPIES], 2, settings[i]);
        compare(&of[OWNER], &of[NOBODY], 1, settings[i]);
        for (uint32_t n = 0; n < SEQUENCES; n++)
            test_tokens_free(&t[n]);
    }
}

/* A static set is the owner's, and is chosen as if nobody had asked. */
TEST(a_static_set_does_not_notice)
{
    static const char *const settings[] = {"select=hybrid refresh_interval=5 static_ratio=0.5",
                                           "select=static refresh_interval=3",
                                           "select=hybrid refresh=exact refresh_interval=4"};
    const uint64_t seed = test_seed(4243);
    answers *of = test_scratch(2 * sizeof *of);
    for (size_t i = 0; i < sizeof settings / sizeof *settings; i++) {
        if (!test_takes(i))
            continue;
        const kvf_cache_config c = config_of(settings[i]);
        test_tokens t[SEQUENCES];
        make(t, &c, seed);
        play(&c, t, OWNER, &of[0]);
        play(&c, t, NOBODY, &of[1]);
        compare(&of[0], &of[1], 1, settings[i]);
        for (uint32_t n = 0; n < SEQUENCES; n++)
            test_tokens_free(&t[n]);
    }
}

TEST(a_full_budget_is_dense)
{
    const uint64_t seed = test_seed(4253);
    const kvf_cache_config c = config_of("budget_tokens=2000");
    answers *of = test_scratch(sizeof *of);
    test_tokens t[SEQUENCES];
    naive n;
    naive_result r;
    make(t, &c, seed);
    play(&c, t, OWNER, of);
    naive_open(&n, &c, &(kvf_cache_plan){0});
    naive_result_open(&r, &c);
    for (uint32_t i = 0; i < PROMPT + STEPS; i++) {
        naive_append(&n, 0, test_q(&t[0], 0, i), test_k(&t[0], 0, i), test_v(&t[0], 0, i));
        naive_dense(&n, 0, test_q(&t[0], 1, i), i + 1, r.out, r.lse);
        const float *got = i < PROMPT ? of->chunk[0][1][i] : of->step[0][i - PROMPT][1];
        for (uint32_t d = 0; d < WIDTH; d++)
            if (!(fabs(r.out[d] - (double)got[d]) <= test_tolerance(c.dtype)))
                fail_msg("token %u, element %u: %g, dense %g", i, d, (double)got[d], r.out[d]);
    }
    naive_result_close(&r);
    naive_close(&n);
    for (uint32_t i = 0; i < SEQUENCES; i++)
        test_tokens_free(&t[i]);
}
