/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Calls on sequences that are refused: each row of calls.refusals in a cache of its own, on one of
 * two sequences of the same tokens. Nothing changes: lengths and positions stay, and the next step
 * has the bits of the other sequence.
 *
 * A row is SETTINGS & CALL & FIELD VALUE ..., of a call that would be taken without the fields.
 * Beside settings of a cache, - is none; `custom` is a policy that is a function; `empty` leaves
 * the sequences without tokens, and end=N gives their last token that position.
 */

#include "cache.h"
#include "harness.h"
#include "refusals.h"
#include "retain.h"

enum { LENGTH = 30, WINDOW = 8 };

typedef struct subject {
    test_world w;
    test_tokens t;
    kvf_sequence *s[2];
    uint32_t length, end; /* of both; end = 0: positions are contiguous */
    void *here;           /* memory for whatever a call reads or writes */
    kvf_prefill_args prefill;
    kvf_decode_args decode;
    kvf_page_lists lists;
    kvf_scores_args scores;
    struct { /* of calls that take no struct */
        kvf_sequence *sequence;
        uint32_t layer, tokens;
        const uint32_t *ids;
        const float *scores;
    } plain;
} subject;

#define FIELD(field) REFUSALS_FIELD(subject, field)

static const refusals_field fields[] = {
    FIELD(prefill.sequence),   FIELD(prefill.layer),     FIELD(prefill.tokens),
    FIELD(prefill.k),          FIELD(prefill.v),         FIELD(prefill.positions),
    FIELD(decode.layer),       FIELD(decode.batch),      FIELD(decode.k),
    FIELD(decode.v),           FIELD(decode.positions),  FIELD(decode.tokens),
    FIELD(decode.page_scores), FIELD(decode.page_ids),   FIELD(decode.page_stride),
    FIELD(lists.capacity),     FIELD(scores.layer),      FIELD(scores.q),
    FIELD(scores.window),      FIELD(scores.first),      FIELD(scores.begin),
    FIELD(scores.candidates),  FIELD(scores.pool_width), FIELD(scores.out),
    FIELD(plain.sequence),     FIELD(plain.layer),       FIELD(plain.tokens),
    FIELD(plain.ids),          FIELD(plain.scores),      {NULL, 0, 0},
};

static kvf_status prefill(subject *x)
{
    return kvf_prefill(x->w.cache, &x->prefill, x->w.stream);
}

static kvf_status decode(subject *x)
{
    return kvf_decode(x->w.cache, &x->decode, x->w.stream);
}

static kvf_status select_pages(subject *x)
{
    return kvf_select_pages(x->w.cache, &x->decode, &x->lists, x->w.stream);
}

static kvf_status attend(subject *x)
{
    return kvf_attend_pages(x->w.cache, &x->decode, &x->lists, x->w.stream);
}

static kvf_status cut(subject *x)
{
    return kvf_sequence_truncate(x->w.cache, x->plain.sequence, x->plain.tokens, x->w.stream);
}

static kvf_status keep(subject *x)
{
    return kvf_sequence_keep(x->w.cache, x->plain.sequence, x->plain.layer, x->plain.ids,
                             x->plain.tokens, x->here, x->w.stream);
}

static kvf_status seed(subject *x)
{
    return kvf_sequence_seed(x->w.cache, x->plain.sequence, x->plain.layer, x->plain.scores,
                             x->w.stream);
}

static kvf_status clear(subject *x)
{
    return kvf_sequence_clear(x->w.cache, x->plain.sequence);
}

static kvf_status scores(subject *x)
{
    return kvf_sequence_scores(x->w.cache, x->plain.sequence, &x->scores, x->here, x->w.stream);
}

static const struct {
    const char *name, *args;
    kvf_status (*make)(subject *x);
} calls[] = {
    {"prefill", "prefill", prefill},
    {"decode", "decode", decode},
    {"select", "decode", select_pages},
    {"lists", "lists", select_pages},
    {"attend", "decode", attend},
    {"truncate", "plain", cut},
    {"keep", "plain", keep},
    {"seed", "plain", seed},
    {"clear", "plain", clear},
    {"scores", "scores", scores},
};

/* ---- a cache, and calls that it would take ---- */

static uint32_t choose_none(void *user, const kvf_select_view *view, int32_t *ids)
{
    return 0;
}

static kvf_cache_config take_settings(subject *x, char *settings)
{
    kvf_cache_config c = test_config_small();
    c.sequences_max = 2;
    c.observe_window = WINDOW;
    test_set(&c, "select=dynamic static_ratio=0");
    x->length = LENGTH;
    for (char *rest, *word = strtok_r(settings, " ", &rest); word;
         word = strtok_r(NULL, " ", &rest))
        if (strcmp(word, "custom") == 0) {
            c.select = KVF_SELECT_CUSTOM;
            c.select_fn = choose_none;
        } else if (strcmp(word, "empty") == 0) {
            x->length = 0;
        } else if (strncmp(word, "end=", 4) == 0) {
            x->end = (uint32_t)strtoul(word + 4, NULL, 10);
        } else if (strcmp(word, "-") != 0) {
            test_set(&c, word);
        }
    return c;
}

static void fill(subject *x, kvf_sequence *s)
{
    const test_range range = {.count = x->length - (x->end != 0), .chunk = LENGTH};
    kvf_prefill_args last = test_chunk_args(s, &x->t, 0, LENGTH - 1, 1, x->here);
    last.positions = &x->end;
    if (x->length)
        test_prefill(&x->w, s, &x->t, &range, NULL);
    if (x->end)
        test_ok(&x->w, kvf_prefill(x->w.cache, &last, x->w.stream));
}

static void open_subject(subject *x, char *settings)
{
    const kvf_cache_config c = take_settings(x, settings);
    test_open(&x->w, &x->t, &c, &(test_tokens_spec){.count = 200, .seed = 1, .sharpness = 1.0f});
    x->here = test_alloc(1 << 20);
    for (uint32_t i = 0; i < 2; i++)
        fill(x, x->s[i] = test_sequence(&x->w));
    x->prefill = test_chunk_args(x->s[0], &x->t, 0, x->length, 1, x->here);
    x->decode = test_step_args(x->s, &x->t, 0, x->length, x->here);
    x->decode.page_stride = 8;
    x->lists = (kvf_page_lists){
        .indptr = x->here, .indices = x->here, .capacity = 1024, .last_page_len = x->here};
    x->scores = (kvf_scores_args){.window = WINDOW,
                                  .candidates = LENGTH - WINDOW,
                                  .pool = KVF_POOL_MAX,
                                  .pool_width = 7,
                                  .out = x->here};
    x->plain.sequence = x->s[0];
    x->plain.tokens = 3;
    x->plain.ids = x->here;
    x->plain.scores = x->here;
    assert_true(kvf_keep_work_bytes(x->w.cache) <= 1 << 20);
}

/* Lengths and positions, and a step, where there is room for a token and a next position. */
static void expect_unchanged(subject *x)
{
    const size_t bytes = test_steps_bytes(&x->t, 1);
    test_wait(&x->w);
    char *out = memset(x->here, 0, 2 * bytes);
    for (uint32_t i = 0; i < 2; i++) {
        assert_int_equal(kvf_sequence_length(x->s[i], 0), x->length);
        if (x->length)
            assert_int_equal(kvf_sequence_position(x->s[i], 0, x->length - 1),
                             x->end ? x->end : LENGTH - 1);
        if (!x->end && x->length < x->w.config.tokens_max)
            test_decode(&x->w, x->s[i], &x->t, 0, x->length, out + i * bytes, NULL);
    }
    test_wait(&x->w);
    assert_memory_equal(out, out + bytes, bytes);
}

static kvf_status call_row(void *user, char *change, size_t size, kvf_error *error)
{
    subject x = {0};
    char *name = NULL, *next;
    size_t i = 0;
    char *words = refusals_part(change, &name);
    if (*words)
        words[-1] = ' '; /* settings are several words */
    open_subject(&x, change);
    refusals_part(name, &next);
    while (strcmp(calls[i].name, name) != 0)
        assert_true(++i < sizeof calls / sizeof *calls);
    for (char *field = next; field; field = next) {
        const char *value = refusals_part(field, &next);
        char whole[64];
        snprintf(whole, sizeof whole, "%s.%s", calls[i].args, field);
        refusals_put(fields, &x, whole, value, x.here);
    }
    const kvf_status status = calls[i].make(&x);
    *error = status == KVF_OK ? (kvf_error){.text = "taken"} : *kvf_runtime_error(x.w.runtime);
    expect_unchanged(&x);
    test_close(&x.w, &x.t);
    test_release(x.here);
    return status;
}

TEST(refused_calls_are_named_and_change_nothing)
{
    refusals_check(&(refusals){.path = "tests/runtime/api/calls.refusals", .call = call_row});
}
