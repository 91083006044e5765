/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A policy that the library does not know, on a real cache: what it answers is what is kept and
 * handed on, and what it answers wrongly is an error that names it.
 *
 * Uses the public API only, as an embedder would.
 */

#include <kvferry/prune.h>

#include "harness.h"

#define TOKENS 75u

/* The policy's behaviour, and the questions that it was asked. */
typedef struct own {
    uint32_t step;     /* keeps tokens 0, step, 2 step, ..., and the window */
    uint32_t descends; /* 1: answers in the wrong order */
    uint32_t calls;
    uint32_t layers_seen; /* bit per layer */
    uint32_t tokens[2];   /* per layer */
    uint32_t positions[2][TOKENS];
} own;

static uint32_t spaced(const own *o, const kvf_prune_view *view, uint32_t *ids)
{
    uint32_t count = 0;
    for (uint32_t j = 0; j < view->tokens; j++)
        if (j % o->step == 0 || view->tokens - j <= view->window)
            ids[count++] = j;
    return count;
}

static void own_decide(const kvf_prune_view *view, kvf_prune_answer *answer)
{
    own *o = view->user;
    o->calls++;
    o->layers_seen |= 1u << view->layer;
    o->tokens[view->layer] = view->tokens;
    memcpy(o->positions[view->layer], view->positions, view->tokens * sizeof *view->positions);
    uint32_t *ids = answer->keep;
    for (uint32_t h = 0; h < view->kv_heads; h++, ids += answer->keep_count)
        answer->keep_count = spaced(o, view, ids);
    if (view->layer == 0)
        answer->propagate_count = spaced(o, view, answer->propagate);
    if (o->descends)
        for (uint32_t i = 0; i < 2; i++)
            answer->keep[i] = 1 - i;
}

/* Everything that a prompt in two layers needs. */
typedef struct scene {
    own own;
    kvf_prune_policy policy;
    test_world world;
    test_tokens tokens;
    kvf_prune *prune;
    kvf_sequence *sequence;
} scene;

static void scene_open(scene *s, kvf_retention retention)
{
    *s = (scene){.own = {.step = 3}};
    s->policy = (kvf_prune_policy){.size = sizeof s->policy,
                                   .name = "every-third",
                                   .source = "this test",
                                   .settings = "window=4",
                                   .needs = KVF_PRUNE_SCORES,
                                   .decide = own_decide,
                                   .user = &s->own};
    kvf_prune_config pc;
    kvf_prune_config_init(&pc, &s->policy);
    pc.retention = retention;
    kvf_cache_config cc = test_config_small();
    cc.layers = 2;
    cc.observe_window = pc.settings.window;
    test_world_open(&s->world, NULL, &cc);
    const test_tokens_spec spec = {.count = TOKENS, .seed = 5, .sharpness = 1.0f};
    test_seed_print("own policy", spec.seed);
    test_tokens_make(&s->tokens, &s->world.config, &spec);
    test_expect(s->world.runtime, kvf_prune_open(s->world.cache, &pc, &s->prune, NULL), KVF_OK);
    s->sequence = test_sequence(&s->world);
}

static void scene_close(scene *s)
{
    kvf_sequence_destroy(s->sequence);
    test_wait(&s->world);
    kvf_prune_close(s->prune);
    test_tokens_free(&s->tokens);
    test_world_close(&s->world);
}

static kvf_status prune_layer(scene *s, uint32_t layer, uint32_t tokens, kvf_prune_result *result)
{
    const test_range range = {.layer = layer, .count = tokens, .chunk = 32};
    test_prefill(&s->world, s->sequence, &s->tokens, &range, NULL);
    return kvf_prune_layer(s->prune, s->sequence, layer, s->world.stream, result);
}

/* 0, 3, ..., 69 and 71, 72, 73, 74: 24 and 4, of which 72 is in both. */
static void keeps_what_it_answers(void **state)
{
    scene s;
    scene_open(&s, KVF_RETENTION_EVICT);
    test_ok(&s.world, kvf_prune_begin(s.prune, s.sequence, TOKENS));
    kvf_prune_result result;
    test_ok(&s.world, prune_layer(&s, 0, TOKENS, &result));
    assert_int_equal(result.keep_count, 28);
    assert_int_equal(result.propagate_count, 28);
    assert_int_equal(result.restart, 0);
    assert_int_equal(kvf_sequence_length(s.sequence, 0), 28);
    for (uint32_t i = 0; i < 28; i++) {
        const uint32_t wanted = i < 24 ? 3 * i : 71 + (i - 24);
        assert_int_equal(result.propagate[i], wanted);
        assert_int_equal(kvf_sequence_position(s.sequence, 0, i), wanted);
    }
    test_ok(&s.world, prune_layer(&s, 1, 28, &result));
    assert_int_equal(result.keep_count, 12); /* 0, 3, ..., 27, and 25, 26 */
    assert_int_equal(result.propagate_count, 28);
    assert_int_equal(kvf_sequence_length(s.sequence, 1), 12);
    assert_int_equal(s.own.calls, 2);
    assert_int_equal(s.own.layers_seen, 3);
    assert_int_equal(s.own.tokens[0], TOKENS);
    assert_int_equal(s.own.tokens[1], 28);
    for (uint32_t i = 0; i < TOKENS; i++)
        assert_int_equal(s.own.positions[0][i], i);
    scene_close(&s);
}

static void keeps_the_rest_where_it_can_be_retrieved(void **state)
{
    scene s;
    scene_open(&s, KVF_RETENTION_OFFLOAD);
    test_ok(&s.world, kvf_prune_begin(s.prune, s.sequence, TOKENS));
    kvf_prune_result result;
    test_ok(&s.world, prune_layer(&s, 0, TOKENS, &result));
    assert_int_equal(result.keep_count, 28);
    assert_int_equal(kvf_sequence_length(s.sequence, 0), TOKENS);
    scene_close(&s);
}

static void is_named_when_it_answers_wrongly(void **state)
{
    scene s;
    scene_open(&s, KVF_RETENTION_EVICT);
    s.own.descends = 1;
    test_ok(&s.world, kvf_prune_begin(s.prune, s.sequence, TOKENS));
    kvf_prune_result result;
    assert_int_equal(prune_layer(&s, 0, TOKENS, &result), KVF_INVALID);
    const char *text = kvf_runtime_error(s.world.runtime)->text;
    if (!strstr(text, "every-third") || !strstr(text, "ascend"))
        fail_msg("'%s' does not say who and what", text);
    scene_close(&s);
}

static void refuses_a_prompt_within_the_window(void **state)
{
    scene s;
    scene_open(&s, KVF_RETENTION_EVICT);
    assert_int_equal(kvf_prune_begin(s.prune, s.sequence, 3), KVF_INVALID);
    const char *text = kvf_runtime_error(s.world.runtime)->text;
    if (!strstr(text, "window = 4") || !strstr(text, "3 tokens"))
        fail_msg("'%s' does not name the field and both numbers", text);
    test_ok(&s.world, kvf_prune_begin(s.prune, s.sequence, TOKENS)); /* still usable */
    kvf_prune_result result;
    test_ok(&s.world, prune_layer(&s, 0, TOKENS, &result));
    assert_int_equal(s.own.calls, 1);
    scene_close(&s);
}

int main(void)
{
    return unit_run(keeps_what_it_answers, keeps_the_rest_where_it_can_be_retrieved,
                    is_named_when_it_answers_wrongly, refuses_a_prompt_within_the_window);
}
