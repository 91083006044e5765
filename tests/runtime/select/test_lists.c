/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Selection on its own: page lists for an engine's kernel, which reads pages at kvf_page_address,
 * and policies of the caller. Attention over lists is compared with plain sums in test_quantized.c.
 */

#include "harness.h"

#include <math.h>
#include <setjmp.h>
#include <signal.h>

#include "naive.h"

#define BATCH 2u
#define STEPS 40u
#define HEADS 4u
#define KV    2u
#define DIM   64u
#define PAGE  8u

static const uint32_t prompts[BATCH] = {250, 41};

typedef struct engine {
    test_world w;
    test_tokens t[BATCH];
    kvf_sequence *s[BATCH];
    kvf_page_lists lists;
    test_rows rows; /* of the batch */
} engine;

static kvf_cache_config lists_config(void)
{
    kvf_cache_config c = test_config_small();
    c.sequences_max = BATCH;
    c.static_ratio = 0.0f;
    return c;
}

static void engine_open(engine *e, const kvf_cache_config *c, uint64_t seed)
{
    test_world_open(&e->w, NULL, c);
    test_rows_open(&e->rows, c, BATCH);
    for (uint32_t b = 0; b < BATCH; b++) {
        test_tokens_make(
            &e->t[b], c,
            &(test_tokens_spec){
                .count = prompts[b] + STEPS, .seed = seed + b, .sharpness = 2.0f, .topics = 5});
        e->s[b] = test_sequence(&e->w);
        test_prefill(&e->w, e->s[b], &e->t[b], &(test_range){.count = prompts[b], .chunk = 128},
                     NULL);
    }
    const uint32_t pages = kvf_select_pages_max(e->w.cache);
    assert_true(pages >= 1 && pages <= (c->tokens_max + PAGE - 1) / PAGE);
    e->lists = test_page_lists(e->w.cache, BATCH);
}

static void engine_close(engine *e)
{
    test_rows_close(&e->rows);
    test_page_lists_free(&e->lists);
    test_world_close(&e->w);
    for (uint32_t b = 0; b < BATCH; b++)
        test_tokens_free(&e->t[b]);
}

static kvf_decode_args engine_args(engine *e, uint32_t step)
{
    for (uint32_t b = 0; b < BATCH; b++)
        test_rows_put(&e->rows, b, &e->t[b], 0, prompts[b] + step);
    return test_rows_args(&e->rows, 0, e->s, BATCH, 0);
}

static const float *page_seen(const kvf_sequence *s, uint32_t kv_head, uint32_t page)
{
    return test_seen(kvf_page_address(s, 0, kv_head, page), PAGE * 2 * DIM * sizeof(float));
}

/* Ascending, each page once, sink and window in, within the budget, lengths as FlashInfer wants. */
static void check_lists(const engine *e)
{
    const kvf_cache_config *c = &e->w.config;
    assert_int_equal(e->lists.indptr[0], 0);
    for (uint32_t list = 0; list < BATCH * KV; list++) {
        const uint32_t length = kvf_sequence_length(e->s[list / KV], 0);
        const int32_t first = e->lists.indptr[list], end = e->lists.indptr[list + 1];
        const int32_t *ids = e->lists.indices;
        const int32_t last = (int32_t)((length - 1) / PAGE);
        assert_true(end > first && end <= (int32_t)e->lists.capacity);
        assert_true((uint32_t)(end - first) <= kvf_select_pages_max(e->w.cache));
        for (int32_t i = first + 1; i < end; i++)
            assert_true(ids[i] > ids[i - 1]);
        assert_int_equal(ids[first], 0); /* the sink */
        assert_int_equal(ids[end - 1], last);
        assert_int_equal(e->lists.last_page_len[list], (length - 1) % PAGE + 1);
        const uint32_t sealed = length > c->local_tokens ? (length - c->local_tokens) / PAGE : 0;
        int32_t young = 0;
        for (int32_t i = first; i < end; i++)
            young += ids[i] >= (int32_t)sealed;
        assert_int_equal(young, last + 1 - (int32_t)sealed);
        if (length <= c->budget_tokens)
            assert_int_equal(end - first, last + 1);
    }
}

/* The selected pages are the best ones by the naive model's scores; the pages are the tokens given.
 */
TEST(listed_pages_are_the_best)
{
    const uint64_t seed = test_seed(509);
    const kvf_cache_config c = lists_config();
    engine e = {0};
    naive n[BATCH];
    double scores[64];
    unsigned char best[64];
    uint32_t compared = 0, all = 0;
    engine_open(&e, &c, seed);
    for (uint32_t b = 0; b < BATCH; b++) {
        naive_open(&n[b], kvf_cache_settings(e.w.cache), kvf_cache_memory(e.w.cache));
        for (uint32_t i = 0; i < prompts[b]; i++)
            naive_append(&n[b], 0, NULL, test_k(&e.t[b], 0, i), test_v(&e.t[b], 0, i));
    }
    for (uint32_t step = 0; step < STEPS; step++) {
        const kvf_decode_args a = engine_args(&e, step);
        test_ok(&e.w, kvf_select_pages(e.w.cache, &a, &e.lists, e.w.stream));
        test_wait(&e.w);
        assert_int_equal(kvf_sequence_length(e.s[0], 0), prompts[0] + step + 1);
        check_lists(&e);
        for (uint32_t list = 0; list < BATCH * KV; list++) {
            const uint32_t b = list / KV, h = list % KV, token = prompts[b] + step;
            if (h == 0)
                naive_append(&n[b], 0, NULL, test_k(&e.t[b], 0, token), test_v(&e.t[b], 0, token));
            const uint32_t sealed = naive_sealed(&n[b], 0);
            naive_scores(&n[b], 0, (naive_heads){h * 2, 2}, test_q(&e.t[b], 0, token), scores);
            const uint32_t window = token + 1 - sealed * PAGE;
            const uint32_t budget =
                token + 1 <= c.budget_tokens ? sealed : (96 - 4 - window) / PAGE;
            all++;
            if (naive_top(scores, sealed, budget, best) < NAIVE_BORDER)
                continue;
            compared++;
            unsigned char listed[64] = {0};
            for (int32_t i = e.lists.indptr[list]; i < e.lists.indptr[list + 1]; i++)
                listed[e.lists.indices[i]] = 1;
            for (uint32_t p = 1; p < sealed; p++) /* page 0 is listed for its sink anyway */
                if (listed[p] != best[p])
                    fail_msg("step %u list %u: page %u is %slisted", step, list, p,
                             listed[p] ? "" : "not ");
        }
        for (uint32_t token = 0; token < prompts[0] + step; token += 7) {
            const float *page = page_seen(e.s[0], 1, token / PAGE);
            const float *k = test_k(&e.t[0], 0, token), *v = test_v(&e.t[0], 0, token);
            assert_memory_equal(page + token % PAGE * 2 * DIM, k + DIM, DIM * 4);
            assert_memory_equal(page + (token % PAGE * 2 + 1) * DIM, v + DIM, DIM * 4);
        }
    }
    print_message("# %u of %u lists compared\n", compared, all);
    assert_true(compared * 4 >= all * 3);
    for (uint32_t b = 0; b < BATCH; b++)
        naive_close(&n[b]);
    engine_close(&e);
}

/* The header says that these calls ignore them. */
TEST(ignored_fields_are_not_looked_at)
{
    const kvf_cache_config c = lists_config();
    const uint32_t tokens[BATCH] = {0, 99};
    const void *const odd = (const void *)(uintptr_t)1;
    engine e = {0};
    engine_open(&e, &c, 3);
    const size_t page = PAGE * 2 * DIM * sizeof(float);
    char *pages = test_alloc(2 * e.lists.capacity * page), *again = pages + e.lists.capacity * page;
    kvf_decode_args a = engine_args(&e, 0);
    test_ok(&e.w, kvf_select_pages(e.w.cache, &a, &e.lists, e.w.stream));
    test_ok(&e.w, kvf_attend_pages(e.w.cache, &a, &e.lists, e.w.stream));
    test_wait(&e.w);
    char *const out = test_scratch(BATCH * e.rows.out_bytes);
    memcpy(out, e.rows.out, BATCH * e.rows.out_bytes);
    memset(e.rows.out, 0, BATCH * e.rows.out_bytes);
    a.k = a.v = odd;
    test_ok(&e.w, kvf_attend_pages(e.w.cache, &a, &e.lists, e.w.stream));
    test_wait(&e.w);
    assert_memory_equal(e.rows.out, out, BATCH * e.rows.out_bytes);

    memset(pages, 0, 2 * e.lists.capacity * page);
    const kvf_decode_args plain = {.batch = BATCH, .sequences = e.s, .out = pages};
    test_ok(&e.w, kvf_read_pages(e.w.cache, &plain, &e.lists, e.w.stream));
    a.q = odd;
    a.positions = a.tokens = tokens;
    a.page_scores = odd;
    a.page_ids = odd;
    a.out = again;
    test_ok(&e.w, kvf_read_pages(e.w.cache, &a, &e.lists, e.w.stream));
    test_wait(&e.w);
    assert_memory_equal(pages, again, e.lists.capacity * page);

    kvf_prefill_args p = test_chunk_args(e.s[0], &e.t[0], 0, prompts[0] + 1, 1, (void *)odd);
    p.q = NULL;
    test_ok(&e.w, kvf_prefill(e.w.cache, &p, e.w.stream));
    test_wait(&e.w);
    test_release(pages);
    engine_close(&e);
}

static sigjmp_buf before_call;

static void leave_call(int number)
{
    siglongjmp(before_call, number);
}

/* Whether the library aborts at the address of a page of this KV head. */
static int aborts_at(const kvf_sequence *s, uint32_t kv_head)
{
    const struct sigaction leave = {.sa_handler = leave_call};
    struct sigaction before;
    volatile int is_aborted = 1;
    assert_int_equal(sigaction(SIGABRT, &leave, &before), 0);
    if (sigsetjmp(before_call, 1) == 0) {
        (void)kvf_page_address(s, 0, kv_head, 0);
        is_aborted = 0;
    }
    assert_int_equal(sigaction(SIGABRT, &before, NULL), 0);
    return is_aborted;
}

/* With a head mask heads are looked up, and one of them may have no pages. */
TEST(a_head_that_is_not_there_has_no_address)
{
    static const char *const settings[] = {"sink_tokens=4", "head_mask=01"};
    for (size_t i = 0; i < 2; i++) {
        kvf_cache_config c = lists_config();
        test_world w;
        test_tokens t;
        test_set(&c, settings[i]);
        test_open(&w, &t, &c, &(test_tokens_spec){.count = 9, .seed = 1, .sharpness = 1.0f});
        kvf_sequence *s = test_sequence(&w);
        test_prefill(&w, s, &t, &(test_range){.count = 9, .chunk = 9}, NULL);
        test_wait(&w);
        assert_int_equal(kvf_page_address(s, 0, 0, 0) == NULL, i);
        assert_int_equal(aborts_at(s, KV - 1), 0);
        assert_int_equal(aborts_at(s, KV), 1);
        test_close(&w, &t);
    }
}

/* ---- custom policy ---- */

typedef struct watcher {
    const naive *n;
    const void *q;
    uint32_t calls, compared, static_seen, pages_max, pages;
} watcher;

/* Checks what it is shown, then takes every other page from the front. */
static uint32_t watch_and_choose(void *user, const kvf_select_view *view, int32_t *ids)
{
    watcher *w = user;
    double scores[64];
    __atomic_fetch_add(&w->calls, 1, __ATOMIC_RELAXED);
    if (view->layer != 0 || view->kv_head >= KV || view->pages != naive_sealed(w->n, 0))
        return 0;
    naive_scores(w->n, 0, (naive_heads){view->kv_head * 2, 2}, w->q, scores);
    uint32_t good = 1, bits = 0;
    for (uint32_t p = 0; p < view->pages; p++) {
        const double x = (double)view->scores[p], y = scores[p];
        if (isinf(y) ? !isinf(x) : !(fabs(x - y) <= 1e-4 * fmax(1.0, fabs(y))))
            good = 0;
        for (uint32_t t = 0; t < PAGE; t++)
            bits += view->static_bits[p] >> t & 1;
        if (view->page_size != PAGE || view->block_size != PAGE || view->static_bits[p] >> PAGE)
            good = 0;
    }
    __atomic_fetch_add(&w->compared, good, __ATOMIC_RELAXED);
    __atomic_fetch_add(&w->static_seen, bits, __ATOMIC_RELAXED);
    if (view->pages_max > w->pages_max) /* calls come one by one */
        w->pages_max = view->pages_max;
    uint32_t count = 0;
    for (uint32_t p = 0; p < view->pages && count < view->pages_max; p += 2)
        ids[count++] = (int32_t)p;
    __atomic_fetch_add(&w->pages, count, __ATOMIC_RELAXED);
    return count;
}

TEST(a_custom_policy_sees_what_was_promised)
{
    const uint64_t seed = test_seed(523);
    static const float ratios[] = {0.0f, 0.25f};
    for (uint32_t i = 0; i < 2; i++) {
        watcher watch = {0};
        kvf_cache_config c = test_config_small();
        c.select = KVF_SELECT_CUSTOM;
        c.static_ratio = ratios[i];
        c.refresh_interval = 1000; /* one static set, chosen after the prompt */
        c.select_fn = watch_and_choose;
        c.select_user = &watch;
        test_tokens t;
        test_world w;
        naive n;
        test_open(&w, &t, &c,
                  &(test_tokens_spec){.count = 260, .seed = seed, .sharpness = 2.0f, .topics = 5});
        kvf_sequence *s = test_sequence(&w);
        test_prefill(&w, s, &t, &(test_range){.count = 240, .chunk = 128}, NULL);
        naive_open(&n, kvf_cache_settings(w.cache), kvf_cache_memory(w.cache));
        for (uint32_t p = 0; p < 240; p++)
            naive_append(&n, 0, test_q(&t, 0, p), test_k(&t, 0, p), test_v(&t, 0, p));
        naive_result r;
        naive_result_open(&r, &c);
        watch.n = &n;
        float *out = test_scratch(HEADS * DIM * sizeof *out);
        for (uint32_t step = 0; step < 20; step++) {
            watch.q = test_q(&t, 0, 240 + step);
            naive_decode(&n, 0, watch.q, test_k(&t, 0, 240 + step), test_v(&t, 0, 240 + step), &r);
            assert_true(n.border >= NAIVE_BORDER || ratios[i] == 0.0f);
            test_decode(&w, s, &t, 0, 240 + step, out, NULL);
            test_wait(&w);
        }
        assert_int_equal(watch.calls, 20 * KV);
        assert_int_equal(watch.compared, watch.calls);
        assert_int_equal(watch.pages_max, kvf_cache_memory(w.cache)->dynamic_pages);
        assert_int_equal(watch.static_seen,
                         20 * KV * (kvf_cache_memory(w.cache)->static_tokens + c.sink_tokens));
        kvf_stats stats;
        kvf_cache_stats(w.cache, &stats);
        assert_int_equal(stats.pages_selected, watch.pages);
        assert_true(watch.pages > 20 * KV * (watch.pages_max - 1));
        naive_result_close(&r);
        naive_close(&n);
        test_close(&w, &t);
    }
}
