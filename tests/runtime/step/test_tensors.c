/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Callers whose numbers are wider than the cache's (tensors = fp32). The property: they are worth
 * what they round to. Whatever a cache does with them, its outputs, rounded, have the bits that a
 * cache of the same element type gives for rounded numbers; logarithms, statistics, pages and files
 * are the same.
 *
 * Compares runs of the library with each other. Tokens of the same seed are the same numbers.
 * Several tokens of a call, queries alone, forks and cuts are compared with single steps under wide
 * numbers too, in test_several.c, test_queries.c and test_forks.c.
 */

#include <string.h>

#include "disk_rig.h"
#include "retain_world.h"

#define PROMPT SAVE_PROMPT
#define TOKENS (PROMPT + 60u)

/* ---- whole runs ---- */

/* Numbers of the wide side, rounded, are the bits of the other. */
static void expect_rounded(const void *same, const float *wide, kvf_dtype dtype, size_t count,
                           const char *what)
{
    size_t different = 0;
    for (size_t i = 0; i < count; i++) {
        const float rounded = kvf_element_round(dtype, wide[i]);
        if (rounded != kvf_element_get(same, dtype, i))
            fail_msg("%s: output %zu is %.9g, which is not %.9g rounded", what, i, (double)wide[i],
                     (double)kvf_element_get(same, dtype, i));
        different += wide[i] != kvf_element_get(same, dtype, i);
    }
    if (different < count / 2)
        fail_msg("%s: only %zu of %zu outputs have more digits than the cache", what, different,
                 count);
}

static kvf_cache_config narrow(kvf_cache_config c)
{
    c.dtype = c.dtype == KVF_FP32 ? KVF_BF16 : c.dtype;
    c.tensors = KVF_TENSORS_DTYPE;
    return c;
}

static void run_both(kvf_cache_config c, uint64_t seed, const char *what)
{
    test_scenario sc = {.cc = narrow(c),
                        .tokens = {.seed = seed, .sharpness = 2.5f, .topics = 6},
                        .prompt = PROMPT,
                        .steps = test_afford(30),
                        .chunk = 64};
    test_trace same, wide;
    test_run(&sc, &same);
    sc.cc.tensors = KVF_TENSORS_FP32;
    test_run(&sc, &wide);
    expect_rounded(same.out, wide.out, same.dtype, same.out_bytes / 2, what);
    expect_rounded(same.prefill, wide.prefill, same.dtype, same.prefill_bytes / 2, what);
    assert_memory_equal(same.lse, wide.lse, same.lse_count * sizeof *same.lse);
    assert_int_equal(same.stats.pages_selected, wide.stats.pages_selected);
    assert_int_equal(same.stats.tokens_attended, wide.stats.tokens_attended);
    assert_int_equal(same.stats.verified, wide.stats.verified);
    assert_true(same.stats.recall_sum == wide.stats.recall_sum);
    test_trace_free(&same);
    test_trace_free(&wide);
}

TEST(runs_are_those_of_rounded_numbers)
{
    static const save_case more[] = {
        {"fp16", "digest=codes select=dynamic page_size=4 dtype=fp16 head_dim=80"},
        {"oracle", "select=oracle"},
        {"verified", "select=hybrid verify_interval=2 transfer=gather"},
        {"int8, boxes", "pages=k8v8 select=quest"},
        {NULL, NULL},
    };
    const uint64_t seed = test_seed(710);
    for (uint32_t i = 0; save_cases[i].name; i++)
        if (test_takes(i))
            run_both(save_config(&save_cases[i]), seed + i, save_cases[i].name);
    for (uint32_t i = 0; more[i].name; i++)
        run_both(save_config(&more[i]), seed + 50 + i, more[i].name);
}

/* ---- calls one by one ---- */

/* The cache of rounded numbers, then that of wide ones. */
typedef struct pair {
    test_world w[2];
    test_tokens t[2];
    kvf_sequence *s[2];
    void *out[2];
    float *lse[2];
} pair;

static void pair_open(pair *p, kvf_cache_config c, uint64_t seed)
{
    const test_tokens_spec spec = {.count = TOKENS, .seed = seed, .sharpness = 2.0f, .topics = 5};
    *p = (pair){0};
    c = narrow(c);
    for (uint32_t i = 0; i < 2; i++) {
        c.tensors = i ? KVF_TENSORS_FP32 : KVF_TENSORS_DTYPE;
        test_open(&p->w[i], &p->t[i], &c, &spec);
        p->s[i] = test_sequence(&p->w[i]);
        p->out[i] = test_alloc((size_t)PROMPT * c.query_heads * c.head_dim * sizeof(float));
        p->lse[i] = test_alloc((size_t)PROMPT * c.query_heads * sizeof *p->lse[i]);
        test_fill(&p->w[i], p->s[i], &p->t[i], 0, PROMPT);
    }
}

static void pair_close(pair *p)
{
    for (uint32_t i = 0; i < 2; i++) {
        kvf_sequence_destroy(p->s[i]);
        test_release(p->out[i]);
        test_release(p->lse[i]);
        test_close(&p->w[i], &p->t[i]);
    }
}

/* The last call's outputs, of `rows` queries, agree. */
static void pair_expect(pair *p, size_t rows, const char *what)
{
    const test_tokens *t = &p->t[0];
    for (uint32_t i = 0; i < 2; i++)
        test_wait(&p->w[i]);
    expect_rounded(p->out[0], p->out[1], t->dtype, rows * t->query_heads * t->value_dim, what);
    assert_memory_equal(p->lse[0], p->lse[1], rows * t->query_heads * sizeof *p->lse[0]);
}

/* A file of either side comes back to both, and is the same file. */
static void pair_swap_files(pair *p)
{
    size_t bytes[2];
    char *file[2];
    for (uint32_t i = 0; i < 2; i++) {
        const char *path = save_path(i ? "of_wide" : "of_same");
        test_ok(&p->w[i], save_now(&p->w[i], p->s[i], path, NULL));
        file[i] = save_read(path, &bytes[i]);
        kvf_sequence_destroy(p->s[i]);
    }
    assert_int_equal(bytes[0], bytes[1]);
    assert_memory_equal(file[0], file[1], bytes[0]);
    for (uint32_t i = 0; i < 2; i++) {
        p->s[i] = save_restore(&p->w[i], save_path(i ? "of_same" : "of_wide"), 1);
        free(file[i]);
    }
}

TEST(files_are_those_of_rounded_numbers)
{
    static const save_case cases[] = {
        {"codes", "digest=codes select=dynamic page_size=4"},
        {"static set", "digest=codes refresh_interval=5 dtype=fp16"},
        {"int8", "pages=k8v8 digest=codes"},
        {"rings", "digest=codes head_mask=101100 layers=3 streaming_sink=5 streaming_recent=21"},
        {NULL, NULL},
    };
    const uint64_t seed = test_seed(740);
    for (uint32_t i = 0; cases[i].name; i++) {
        pair p;
        pair_open(&p, save_config(&cases[i]), seed + i);
        pair_swap_files(&p);
        for (uint32_t layer = 0; layer < p.t[0].layers; layer++) {
            for (uint32_t k = 0; k < 2; k++)
                test_decode(&p.w[k], p.s[k], &p.t[k], layer, PROMPT, p.out[k], p.lse[k]);
            pair_expect(&p, 1, cases[i].name);
        }
        pair_close(&p);
    }
}

/* Queries and outputs alone are wide: the bits of a cache for which all are. */
TEST(wide_queries_have_the_bits_of_all)
{
    static const save_case cases[] = {
        {"codes", "digest=codes select=dynamic page_size=4"},
        {"rings", "digest=codes head_mask=101100 layers=3 streaming_sink=5 streaming_recent=21"},
        {"int4", "pages=k8v4 digest=codes"},
        {NULL, NULL},
    };
    for (uint32_t i = 0; cases[i].name; i++) {
        kvf_cache_config c = save_config(&cases[i]);
        test_world w;
        pair p;
        c.tokens_per_step_max = 3;
        pair_open(&p, c, test_seed(760));
        c = narrow(c);
        c.tensors = KVF_TENSORS_FP32_QUERIES;
        test_world_open(&w, NULL, &c);
        kvf_sequence *s = test_sequence(&w);
        const uint32_t count = 3;
        const size_t row = p.t[1].query_heads * p.t[1].value_dim;
        float *out = test_alloc(PROMPT * row * sizeof *out);
        for (uint32_t layer = 0; layer < c.layers; layer++) {
            kvf_prefill_args a = test_chunk_args(s, &p.t[1], layer, 0, c.prefill_chunk_max, out);
            for (uint32_t first = 0; first < PROMPT; first += a.tokens) {
                a = test_chunk_args(s, &p.t[1], layer, first,
                                    kvf_min_u32(PROMPT - first, c.prefill_chunk_max),
                                    out + first * row);
                a.k = test_k(&p.t[0], layer, first);
                a.v = test_v(&p.t[0], layer, first);
                test_ok(&w, kvf_prefill(w.cache, &a, w.stream));
            }
            kvf_decode_args d[2] = {test_step_args(&s, &p.t[1], layer, PROMPT, out),
                                    test_step_args(&p.s[1], &p.t[1], layer, PROMPT, p.out[1])};
            d[0].k = test_k(&p.t[0], layer, PROMPT);
            d[0].v = test_v(&p.t[0], layer, PROMPT);
            d[0].tokens = d[1].tokens = &count;
            test_ok(&w, kvf_decode(w.cache, &d[0], w.stream));
            test_ok(&p.w[1], kvf_decode(p.w[1].cache, &d[1], p.w[1].stream));
            test_wait(&w);
            test_wait(&p.w[1]);
            assert_memory_equal(out, p.out[1], count * row * sizeof *out);
        }
        test_release(out);
        kvf_sequence_destroy(s);
        test_world_close(&w);
        pair_close(&p);
    }
}

/* ---- lists and scores ---- */

TEST(lists_are_those_of_rounded_numbers)
{
    const save_case of = {"lists", "digest=codes select=dynamic page_size=4 static_ratio=0"};
    pair p;
    uint32_t count[2];
    kvf_page_lists lists[2];
    pair_open(&p, save_config(&of), test_seed(770));
    for (uint32_t i = 0; i < 2; i++) {
        lists[i] = test_page_lists(p.w[i].cache, 1);
        kvf_decode_args a = test_step_args(&p.s[i], &p.t[i], 0, PROMPT, p.out[i]);
        a.lse = p.lse[i];
        test_ok(&p.w[i], kvf_select_pages(p.w[i].cache, &a, &lists[i], p.w[i].stream));
        test_ok(&p.w[i], kvf_attend_pages(p.w[i].cache, &a, &lists[i], p.w[i].stream));
        test_wait(&p.w[i]);
        count[i] = (uint32_t)lists[i].indptr[p.t[i].kv_heads];
    }
    pair_expect(&p, 1, "lists");
    assert_int_equal(count[0], count[1]);
    assert_memory_equal(lists[0].indices, lists[1].indices, count[0] * sizeof(int32_t));
    for (uint32_t i = 0; i < 2; i++) { /* pages have the cache's type on both sides */
        const kvf_cache_config *c = &p.w[i].config;
        const size_t page = (size_t)c->page_size * 2 * c->head_dim * test_dtype_bytes(c->dtype);
        kvf_decode_args a = {.batch = 1, .sequences = &p.s[i]};
        a.out = test_alloc(count[i] * page);
        test_ok(&p.w[i], kvf_read_pages(p.w[i].cache, &a, &lists[i], p.w[i].stream));
        test_wait(&p.w[i]);
        if (i)
            assert_memory_equal(p.out[0], a.out, kvf_min_u32(count[0], 8) * page);
        else
            memcpy(p.out[0], a.out, kvf_min_u32(count[0], 8) * page);
        test_release(a.out);
        test_page_lists_free(&lists[i]);
    }
    pair_close(&p);
}

/* Queries that are given, more than one launch takes; and those that the cache has kept. */
TEST(scores_are_those_of_rounded_numbers)
{
    const save_case of = {"scores", "digest=codes select=dynamic observe_window=32"};
    pair p;
    float *out[2];
    pair_open(&p, save_config(&of), test_seed(780));
    for (uint32_t kept = 0; kept < 2; kept++) {
        for (uint32_t i = 0; i < 2; i++) {
            const uint32_t heads = p.t[i].kv_heads;
            void *work = test_alloc(kvf_scores_work_floats(p.w[i].cache) * sizeof(float));
            out[i] = test_alloc(heads * PROMPT * sizeof *out[i]);
            const kvf_scores_args a = {.q = kept ? NULL : test_q(&p.t[i], 0, 10),
                                       .window = kept ? 32 : PROMPT - 10,
                                       .first = kept ? 0 : 10,
                                       .candidates = PROMPT,
                                       .pool_width = 1,
                                       .out = out[i]};
            test_ok(&p.w[i], kvf_sequence_scores(p.w[i].cache, p.s[i], &a, work, p.w[i].stream));
            test_wait(&p.w[i]);
            test_release(work);
        }
        assert_memory_equal(out[0], out[1], p.t[0].kv_heads * PROMPT * sizeof *out[0]);
        test_release(out[0]);
        test_release(out[1]);
    }
    pair_close(&p);
}

/* ---- what is not finite once it is rounded ---- */

TEST(what_rounds_to_infinity_is_no_number)
{
    const save_case of = {"large", "digest=codes select=dynamic dtype=fp16"};
    kvf_cache_config c = save_config(&of);
    test_world w;
    test_tokens t;
    c.tensors = KVF_TENSORS_FP32;
    for (uint32_t is_large = 0; is_large < 2; is_large++) {
        test_open(&w, &t, &c, &(test_tokens_spec){.count = TOKENS, .seed = 790, .sharpness = 1.0f});
        kvf_sequence *s = test_sequence(&w);
        ((float *)test_k(&t, 0, PROMPT))[7] = is_large ? 65520.0f : 65519.0f;
        test_fill(&w, s, &t, 0, PROMPT);
        float *out = test_alloc((size_t)t.query_heads * t.value_dim * sizeof *out);
        const kvf_decode_args step = test_step_args(&s, &t, 0, PROMPT, out);
        test_ok(&w, kvf_decode(w.cache, &step, w.stream));
        test_wait(&w); /* the next call reports it */
        test_release(out);
        test_expect(w.runtime,
                    kvf_prefill(w.cache,
                                &(kvf_prefill_args){.sequence = s,
                                                    .tokens = 1,
                                                    .k = test_k(&t, 0, PROMPT + 1),
                                                    .v = test_v(&t, 0, PROMPT + 1)},
                                w.stream),
                    is_large ? KVF_NOT_FINITE : KVF_OK);
        test_wait(&w);
        kvf_sequence_destroy(s);
        test_close(&w, &t);
    }
}

TESTS_RUN_BETWEEN(NULL, save_remove_folder)
