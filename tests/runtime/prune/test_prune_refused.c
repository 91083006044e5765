/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Refusals of the pruner, by name: nonsense that a policy answers, wrong calls, and keys that are
 * not finite. Another prompt goes on afterwards.
 */

#include "prune_rig.h"

#include <math.h>

/* ---- nonsense ---- */

static void keeps_too_few(const kvf_prune_view *view, kvf_prune_answer *answer)
{
    answer->keep_count = WINDOW - 1;
}

static void keeps_too_many(const kvf_prune_view *view, kvf_prune_answer *answer)
{
    answer->keep_count = view->tokens + 1;
}

static void all_but_one(const kvf_prune_view *view, kvf_prune_answer *answer, uint32_t missing)
{
    answer->keep_count = view->tokens - 1;
    for (uint32_t h = 0; h < view->kv_heads; h++)
        for (uint32_t i = 0; i < view->tokens - 1; i++)
            answer->keep[h * (view->tokens - 1) + i] = i < missing ? i : i + 1;
}

static void drops_the_window(const kvf_prune_view *view, kvf_prune_answer *answer)
{
    all_but_one(view, answer, view->tokens - 2);
}

static void keeps_one_twice(const kvf_prune_view *view, kvf_prune_answer *answer)
{
    all_but_one(view, answer, 5);
    answer->keep[answer->keep_count + 7] = answer->keep[answer->keep_count + 6];
}

static void keeps_what_is_not_there(const kvf_prune_view *view, kvf_prune_answer *answer)
{
    all_but_one(view, answer, 5);
    answer->keep[3] = UINT32_MAX;
}

static void propagates_nothing(const kvf_prune_view *view, kvf_prune_answer *answer)
{
    answer->propagate_count = 0;
}

static void propagates_too_many(const kvf_prune_view *view, kvf_prune_answer *answer)
{
    answer->propagate_count = view->tokens + 1;
}

static void propagates_backwards(const kvf_prune_view *view, kvf_prune_answer *answer)
{
    answer->propagate_count = view->tokens - 1;
    for (uint32_t i = 0; i < view->tokens - 1; i++)
        answer->propagate[i] = view->tokens - 1 - i;
}

static void starts_over_again(const kvf_prune_view *view, kvf_prune_answer *answer)
{
    answer->restart = 1;
}

TEST(nonsense_is_refused_by_name)
{
    static rig r;
    static const struct {
        void (*nonsense)(const kvf_prune_view *view, kvf_prune_answer *answer);
        const char *text;
    } cases[] = {
        {keeps_too_few, "policy 'told' at layer 0: keep_count = 5: must be 6 (the window) to 160"},
        {keeps_too_many,
         "policy 'told' at layer 0: keep_count = 161: must be 6 (the window) to 160"},
        {drops_the_window, "policy 'told' at layer 0: keep lacks token 158; the newest 6 (the "
                           "window) are always kept"},
        {keeps_one_twice, "policy 'told' at layer 0: keep[7] = 7 follows 7; indexes must ascend"},
        {keeps_what_is_not_there,
         "policy 'told' at layer 0: keep[3] = 4294967295: the layer has 160 tokens"},
        {propagates_nothing, "policy 'told' at layer 0: propagate_count = 0: must be 6 to 160"},
        {propagates_too_many, "policy 'told' at layer 0: propagate_count = 161: must be 6 to 160"},
        {propagates_backwards,
         "policy 'told' at layer 0: propagate[1] = 158 follows 159; indexes must ascend"},
        {starts_over_again,
         "policy 'told' at layer 0: restart in pass 1: a restart loop; a prompt starts over once"},
    };
    const kvf_cache_config cc = rig_cache_config();
    rig_open(&r, &cc, KVF_PRUNE_SCORES);
    rig_prune(&r);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        r.told.nonsense = cases[i].nonsense;
        progress p = rig_begin(&r, PROMPT);
        rig_fill_layer(&r, &p);
        kvf_status status = rig_prune_layer(&r, &p);
        if (cases[i].nonsense == starts_over_again) { /* once is no loop */
            assert_int_equal(status, KVF_OK);
            rig_fill_layer(&r, &p);
            status = rig_prune_layer(&r, &p);
        }
        test_refused(r.w.runtime, status, KVF_INVALID, cases[i].text);
        r.told.nonsense = NULL; /* and now it can only be destroyed */
        test_refused(r.w.runtime, rig_prune_layer(&r, &p), KVF_INVALID,
                     "no prompt is under way in this sequence; call kvf_prune_begin first, "
                     "and after an error destroy the sequence");
        kvf_sequence_destroy(p.sequence);
        const progress good = rig_run(&r, PROMPT);
        kvf_sequence_destroy(good.sequence);
    }
    rig_close(&r);
}

/* ---- bad input ---- */

TEST(wrong_calls_are_refused)
{
    static rig r;
    const kvf_cache_config cc = rig_cache_config();
    kvf_prune_result result;
    rig_open(&r, &cc, KVF_PRUNE_SUMS);
    rig_prune(&r);
    kvf_sequence *s = test_sequence(&r.w);
    test_refused(r.w.runtime, kvf_prune_layer(r.prune, s, 0, r.w.stream, &result), KVF_INVALID,
                 "no prompt is under way in this sequence; call kvf_prune_begin first, and after "
                 "an error destroy the sequence");
    test_refused(r.w.runtime, kvf_prune_begin(r.prune, s, 0), KVF_INVALID,
                 "tokens = 0: a prompt has 1 to tokens_max = 163");
    test_refused(r.w.runtime, kvf_prune_begin(r.prune, s, TOKENS + 1), KVF_INVALID,
                 "tokens = 164: a prompt has 1 to tokens_max = 163");
    test_refused(r.w.runtime, kvf_prune_begin(r.prune, s, WINDOW - 1), KVF_INVALID,
                 "window = 6: the prompt has only 5 tokens; lower window, or do not prune it");
    test_refused(r.w.runtime, kvf_prune_begin(r.prune, NULL, PROMPT), KVF_INVALID,
                 "sequence is NULL; create one first");
    kvf_sequence_destroy(s);

    progress p = rig_begin(&r, PROMPT);
    test_refused(r.w.runtime, kvf_prune_layer(r.prune, p.sequence, 1, r.w.stream, &result),
                 KVF_INVALID, "layer = 1: the next layer of this prompt is 0 (pass 0)");
    rig_fill_chunk(&r, &p, 0, CHUNK, true);
    test_refused(r.w.runtime, kvf_prune_layer(r.prune, p.sequence, 0, r.w.stream, &result),
                 KVF_INVALID,
                 "layer 0 holds 48 of 160 tokens; prefill the rest before it is pruned");
    test_refused(r.w.runtime, kvf_prune_begin(r.prune, p.sequence, PROMPT), KVF_INVALID,
                 "the sequence is not empty: layer 0 holds 48 tokens; a pruned prompt begins in "
                 "a new sequence");
    const kvf_prefill_args again = rig_chunk_args(&r, &p, 0, CHUNK);
    test_refused(r.w.runtime, kvf_prune_append(r.prune, &again, r.w.stream), KVF_INVALID,
                 "tokens = 48: layer 0 holds 48 of 160 tokens and the queries of 48 were seen; "
                 "call kvf_prune_append once after every kvf_prefill, with its arguments");
    kvf_sequence_destroy(p.sequence);
    rig_close(&r);
}

/* A chunk whose queries were not seen. */
TEST(missing_sums_are_refused)
{
    static rig r;
    const kvf_cache_config cc = rig_cache_config();
    rig_open(&r, &cc, KVF_PRUNE_SUMS);
    rig_prune(&r);
    progress p = rig_begin(&r, PROMPT);
    for (uint32_t first = 0; first < PROMPT; first += CHUNK)
        rig_fill_chunk(&r, &p, first, CHUNK, first + CHUNK < PROMPT);
    test_refused(r.w.runtime, rig_prune_layer(&r, &p), KVF_INVALID,
                 "layer 0: kvf_prune_append saw the queries of 144 of 160 tokens; call it "
                 "after every kvf_prefill");
    kvf_sequence_destroy(p.sequence);
    rig_close(&r);
}

TEST(other_caches_and_small_windows_are_refused)
{
    static rig r, other;
    kvf_cache_config cc = rig_cache_config();
    kvf_error error;
    rig_open(&r, &cc, KVF_PRUNE_SCORES);
    rig_prune(&r);
    rig_open(&other, &cc, KVF_PRUNE_SCORES);
    kvf_sequence *s = test_sequence(&other.w);
    test_refused(r.w.runtime, kvf_prune_begin(r.prune, s, PROMPT), KVF_INVALID,
                 "the sequence belongs to another cache; pass it with the cache that created it");
    kvf_sequence_destroy(s);
    rig_close(&other);
    rig_close(&r);

    cc.observe_window = WINDOW - 1;
    rig_open(&r, &cc, KVF_PRUNE_SCORES);
    assert_int_equal(kvf_prune_open(r.w.cache, &r.config, &r.prune, &error), KVF_INVALID);
    assert_non_null(strstr(error.text, "observe_window = 5"));
    assert_null(r.prune);
    r.config.settings.keep = 0.0f;
    assert_int_equal(kvf_prune_open(r.w.cache, &r.config, &r.prune, &error), KVF_INVALID);
    assert_non_null(strstr(error.text, "keep = 0"));
    assert_int_equal(kvf_prune_open(r.w.cache, NULL, &r.prune, NULL), KVF_INVALID);
    kvf_prune_close(NULL);
    rig_close(&r);
}

/* Asks for what it did not say at open. */
static uint32_t moody_needs(const kvf_prune_view *view)
{
    return *(const uint32_t *)view->state > 1 ? KVF_PRUNE_PROFILE : KVF_PRUNE_SCORES;
}

TEST(needs_that_cannot_be_met_are_refused)
{
    static rig r;
    const kvf_cache_config cc = rig_cache_config();
    rig_open(&r, &cc, KVF_PRUNE_SCORES);
    r.policy.needs_at = moody_needs;
    rig_prune(&r);
    progress p = rig_begin(&r, PROMPT);
    for (uint32_t layer = 0; layer < 2; layer++) {
        rig_fill_layer(&r, &p);
        test_ok(&r.w, rig_prune_layer(&r, &p));
    }
    rig_fill_layer(&r, &p);
    test_refused(r.w.runtime, rig_prune_layer(&r, &p), KVF_INVALID,
                 "policy 'told' needs 0x2 at layer 2, which needs_at returned for no layer with "
                 "fresh state");
    kvf_sequence_destroy(p.sequence);
    rig_close(&r);

    rig_open(&r, &cc, KVF_PRUNE_SCORES);
    r.policy.needs_at = NULL;
    r.policy.needs = KVF_PRUNE_SCORES | KVF_PRUNE_LOGITS;
    rig_prune(&r);
    p = rig_begin(&r, PROMPT);
    rig_fill_layer(&r, &p);
    test_refused(r.w.runtime, rig_prune_layer(&r, &p), KVF_INVALID,
                 "policy 'told' needs 0x5 at layer 0: scores, logits and sums exclude each other");
    kvf_sequence_destroy(p.sequence);
    rig_close(&r);
}

/* No policy sees NaN; another prompt goes on. */
TEST(keys_that_are_not_finite_stop_the_prompt)
{
    static rig r;
    const kvf_cache_config cc = rig_cache_config();
    rig_open(&r, &cc, KVF_PRUNE_SCORES);
    rig_prune(&r);
    progress p = rig_begin(&r, PROMPT);
    float *key = test_k(&r.t, 0, 70);
    const float before = *key;
    *key = NAN;
    for (uint32_t first = 0; first < PROMPT; first += CHUNK) {
        const uint32_t n = PROMPT - first < CHUNK ? PROMPT - first : CHUNK;
        const kvf_prefill_args args = rig_chunk_args(&r, &p, first, n);
        const kvf_status status = kvf_prefill(r.w.cache, &args, r.w.stream);
        if (first <= CHUNK)
            test_expect(r.w.runtime, status, KVF_OK);
        test_wait(&r.w);
    }
    kvf_prune_result result;
    assert_int_equal(kvf_prune_layer(r.prune, p.sequence, 0, r.w.stream, &result), KVF_NOT_FINITE);
    assert_int_equal(r.told.calls, 0);
    kvf_sequence_destroy(p.sequence);
    *key = before;
    const progress good = rig_run(&r, PROMPT);
    kvf_sequence_destroy(good.sequence);
    rig_close(&r);
}
