/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Quantized pages: what a cache attends to is what was quantized, and everything else is as ever.
 *
 * The yardstick is the naive model, whose keys and values are quantized and dequantized once their
 * block is sealed. The loss of quantization is the business of kernels' tests; that ways to move
 * pages, chunks, forks, cuts, files and disks change no bit, that of test_bits.c, test_forks.c,
 * test_save.c and test_disk_random.c.
 */

#include <math.h>
#include <string.h>

#include "cache.h"
#include "naive.h"
#include "quantized.h"

static const kvf_pages forms[] = {KVF_PAGES_K8V8, KVF_PAGES_K8V4};

/* A GPU dequantizes in bf16, heads of 64, 128 and 192; and the emulated one is slow. */
static kvf_dtype dtype_here(kvf_dtype dtype)
{
    return test_on_cuda() ? KVF_BF16 : dtype;
}

static uint32_t turns_here(uint32_t turns)
{
    return test_on_cuda() ? 2 : turns;
}

/* ---- against the definition ---- */

/* That of pages of one token. */
static kvf_shape token_shape(const kvf_cache_config *c)
{
    return (kvf_shape){c->dtype, c->head_dim, 1, c->pages, (uint16_t)c->value_dim};
}

/* The token as a quantized page has it, in place. */
static void repack(const kvf_shape *s, const void *k, const void *v, float *key, float *value)
{
    _Alignas(64) char page[64 + 4 * KVF_HEAD_DIM_MAX];
    char token[8 * KVF_HEAD_DIM_MAX];
    float x[KVF_HEAD_DIM_MAX];
    memcpy(token, k, kvf_key_bytes(s));
    memcpy(token + kvf_key_bytes(s), v, kvf_value_bytes(s));
    kvf_quantize_token(s, page, 0, token, x);
    kvf_dequantize_key(s, page, 0, key);
    kvf_quantized_rotate_back(key, s->head_dim);
    kvf_dequantize_value(s, page, 0, value);
}

/* Sealed tokens first .. end - 1 of the model but those of the sink. */
static void seal(naive *n, const test_tokens *t, uint32_t layer, uint32_t first, uint32_t end)
{
    const kvf_cache_config *c = &n->c;
    const kvf_shape s = token_shape(c);
    for (uint32_t i = kvf_max_u32(first, c->sink_tokens); i < end; i++)
        for (uint32_t h = 0; h < c->kv_heads; h++) {
            const size_t at = (size_t)i * c->kv_heads + h;
            repack(&s, (const char *)test_k(t, layer, i) + h * kvf_key_bytes(&s),
                   (const char *)test_v(t, layer, i) + h * kvf_value_bytes(&s),
                   n->layers[layer].k + at * c->head_dim, n->layers[layer].v + at * c->value_dim);
        }
}

static uint32_t sealed_of(const kvf_cache_config *c, uint32_t length)
{
    const uint32_t size = test_hooks.block_size ? test_hooks.block_size : 32;
    const uint32_t block = kvf_max_u32(c->page_size, size);
    return length < c->local_tokens ? 0 : (length - c->local_tokens) / block * block;
}

static void seal_newest(naive *n, const test_tokens *t, uint32_t layer)
{
    const uint32_t length = n->layers[layer].length;
    seal(n, t, layer, sealed_of(&n->c, length - 1), sealed_of(&n->c, length));
}

/* Every token of a prompt, and every step, attends to sink and window as they came and to the rest
 * as it was quantized. */
TEST(what_was_quantized_is_attended)
{
    const uint64_t seed = test_seed(1301);
    static const struct {
        kvf_dtype dtype;
        uint32_t head_dim, kv_heads, group, page_size, chunk, value_dim;
    } cases[] = {
        {KVF_FP32, 64, 2, 2, 8, 100, 0},   {KVF_BF16, 128, 1, 4, 4, 37, 0},
        {KVF_BF16, 192, 1, 3, 4, 41, 128}, {KVF_FP16, 80, 2, 1, 1, 9, 0},
        {KVF_FP32, 16, 1, 3, 32, 64, 0},   {KVF_BF16, 256, 1, 7, 2, 111, 0},
    };
    /* On a GPU the first three, of which two in one form each. */
    for (size_t i = 0; i < 2 * sizeof cases / sizeof *cases; i++) {
        if (test_on_cuda() && (i / 2 > 2 || i == 1 || i == 2))
            continue;
        test_scenario sc = {.cc = test_config_small(),
                            .tokens = {.seed = seed + i, .sharpness = 1.5f},
                            .prompt = 111,
                            .steps = 30,
                            .chunk = cases[i / 2].chunk};
        kvf_runtime_config rc = test_runtime_config();
        char what[80];
        sc.rc = &rc;
        test_hooks.block_size = i % 4 < 2 ? 8 : 0;
        sc.cc.pages = forms[i % 2];
        sc.cc.layers = 2;
        sc.cc.dtype = dtype_here(cases[i / 2].dtype);
        sc.cc.head_dim = cases[i / 2].head_dim;
        sc.cc.value_dim = cases[i / 2].value_dim;
        sc.cc.kv_heads = cases[i / 2].kv_heads;
        sc.cc.query_heads = sc.cc.kv_heads * cases[i / 2].group;
        sc.cc.page_size = cases[i / 2].page_size;
        sc.cc.tokens_max = 160;
        sc.cc.select = i % 3 ? KVF_SELECT_FULL : KVF_SELECT_DYNAMIC;
        sc.cc.budget_tokens = 160;
        snprintf(what, sizeof what, "pages %d, dtype %d, head_dim %u, pages of %u",
                 (int)sc.cc.pages, (int)sc.cc.dtype, sc.cc.head_dim, sc.cc.page_size);
        naive_expect_run(&(naive_run){.scenario = &sc, .what = what, .appended = seal_newest});
    }
}

static kvf_cache_config quantized_config(uint32_t i)
{
    kvf_cache_config c = test_config_small();
    c.pages = forms[i % 2];
    c.layers = 2;
    c.dtype = dtype_here(i % 3 ? KVF_BF16 : KVF_FP32);
    c.page_size = 4;
    c.budget_tokens = 120;
    c.digest = KVF_DIGEST_CODES;
    if (i % 2) { /* narrow values, in the widths that a GPU has */
        c.head_dim = 192;
        c.value_dim = 128;
    }
    return c;
}

/* ---- sizes ---- */

TEST(pages_are_smaller)
{
    if (test_on_cuda())
        return;
    static const struct {
        uint32_t head_dim, page_size;
        kvf_pages pages;
        size_t bytes; /* of a token */
        uint32_t value_dim;
    } cases[] = {
        {128, 32, KVF_PAGES_K8V8, 260, 0},  {128, 32, KVF_PAGES_K8V4, 210, 0},
        {128, 4, KVF_PAGES_K8V8, 272, 0},   {128, 4, KVF_PAGES_K8V4, 224, 0},
        {64, 4, KVF_PAGES_K8V8, 144, 0},    {64, 4, KVF_PAGES_K8V4, 112, 0},
        {64, 4, KVF_PAGES_NATIVE, 192, 32},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        kvf_cache_config c = test_config_small();
        kvf_runtime_config rc = test_runtime_config();
        kvf_runtime *runtime = NULL;
        kvf_cache_plan plan;
        c.dtype = KVF_BF16;
        c.head_dim = cases[i].head_dim;
        c.value_dim = cases[i].value_dim;
        c.page_size = cases[i].page_size;
        c.pages = cases[i].pages;
        c.tokens_max = 4096;
        c.budget_tokens = 256;
        test_hooks.block_size = 0;
        assert_int_equal(test_runtime_open(&rc, &runtime, NULL), KVF_OK);
        assert_int_equal(kvf_cache_plan_make(runtime, &c, &plan, NULL), KVF_OK);
        assert_int_equal(plan.host_kv_bytes, cases[i].bytes * c.tokens_max * c.kv_heads);
        kvf_runtime_close(runtime);
    }
}

/* ---- page lists ---- */

#define LISTS_PROMPT 150u
#define LISTS_STEPS  24u

typedef struct lister {
    test_world w;
    test_tokens t;
    kvf_sequence *s, *twin; /* of the same tokens */
    naive n;                /* of `s` */
    uint32_t sealed;        /* tokens in `n` */
    kvf_page_lists lists;
    char *pages; /* what was read of them */
    char *out, *wanted;
    float *lse;
} lister;

/* The model gets a token, and what the sequence has sealed. */
static void follow(lister *l, uint32_t token)
{
    const kvf_layer *layer = &l->s->layers[0];
    const uint32_t sealed = layer->extent.sealed * layer->kv_group->dims.paging.block_size;
    naive_append(&l->n, 0, NULL, test_k(&l->t, 0, token), test_v(&l->t, 0, token));
    if (l->w.config.pages != KVF_PAGES_NATIVE && token + 1 == kvf_sequence_length(l->s, 0)) {
        seal(&l->n, &l->t, 0, l->sealed, sealed);
        l->sealed = sealed;
    }
}

static void lister_open(lister *l, const kvf_cache_config *c, uint64_t seed)
{
    const kvf_shape s = token_shape(c);
    test_open(
        &l->w, &l->t, c,
        &(test_tokens_spec){.count = LISTS_PROMPT + LISTS_STEPS, .seed = seed, .sharpness = 2});
    l->s = test_sequence(&l->w);
    l->twin = test_sequence(&l->w);
    test_fill(&l->w, l->s, &l->t, 0, LISTS_PROMPT);
    test_fill(&l->w, l->twin, &l->t, 0, LISTS_PROMPT);
    naive_open(&l->n, c, &(kvf_cache_plan){0});
    for (uint32_t i = 0; i < LISTS_PROMPT; i++)
        follow(l, i);
    l->lists = test_page_lists(l->w.cache, 1);
    l->pages = test_alloc(l->lists.capacity * c->page_size * kvf_token_bytes(&s));
    l->out = test_alloc(2 * c->query_heads * kvf_value_bytes(&s));
    l->wanted = l->out + c->query_heads * kvf_value_bytes(&s);
    l->lse = test_alloc(c->query_heads * sizeof *l->lse);
}

static void lister_close(lister *l)
{
    test_close(&l->w, &l->t);
    test_page_lists_free(&l->lists);
    test_release(l->pages);
    test_release(l->out);
    test_release(l->lse);
    naive_close(&l->n);
}

/* Pages that were read have those tokens, and zeros after the last. */
static void expect_read(const lister *l)
{
    const kvf_cache_config *c = &l->n.c;
    const naive_layer *layer = &l->n.layers[0];
    const uint32_t both = c->head_dim + c->value_dim;
    for (uint32_t h = 0; h < c->kv_heads; h++)
        for (int32_t i = l->lists.indptr[h]; i < l->lists.indptr[h + 1]; i++)
            for (uint32_t j = 0; j < c->page_size; j++) {
                const uint32_t token = (uint32_t)l->lists.indices[i] * c->page_size + j;
                const size_t at = ((size_t)i * c->page_size + j) * both;
                const size_t of = (size_t)token * c->kv_heads + h;
                char want[8 * KVF_HEAD_DIM_MAX] = {0};
                for (uint32_t d = 0; token < layer->length && d < both; d++)
                    kvf_element_set(want, c->dtype, d,
                                    d < c->head_dim
                                        ? layer->k[of * c->head_dim + d]
                                        : layer->v[of * c->value_dim + d - c->head_dim]);
                assert_memory_equal(l->pages + at * test_dtype_bytes(c->dtype), want,
                                    both * test_dtype_bytes(c->dtype));
            }
}

/* Attention of the token's queries over the listed tokens. */
static void expect_attended(lister *l, uint32_t token)
{
    const kvf_cache_config *c = &l->n.c;
    naive_result r;
    naive_result_open(&r, c);
    memset(l->n.attended, 0, (size_t)c->query_heads * c->tokens_max);
    for (uint32_t head = 0; head < c->query_heads; head++)
        for (int32_t i = l->lists.indptr[head / l->n.group];
             i < l->lists.indptr[head / l->n.group + 1]; i++)
            memset(l->n.attended + (size_t)head * c->tokens_max +
                       (uint32_t)l->lists.indices[i] * c->page_size,
                   1, c->page_size);
    naive_attend(&l->n, 0, test_q(&l->t, 0, token), l->n.attended, &r);
    for (uint32_t head = 0; head < c->query_heads; head++)
        assert_true(fabs(r.lse[head] - (double)l->lse[head]) <= TEST_LSE_TOLERANCE);
    assert_true(naive_distance(r.out, l->out, c->dtype, (size_t)c->query_heads * c->value_dim) <=
                test_tolerance(c->dtype));
    naive_result_close(&r);
}

/* Pages of the caller's choice: any of those there are, the last among them. */
static void choose_pages(lister *l, test_random *r)
{
    const kvf_cache_config *c = &l->w.config;
    const uint32_t length = kvf_sequence_length(l->s, 0);
    const uint32_t pages = kvf_div_ceil_u32(length, c->page_size);
    const uint32_t most = kvf_select_pages_max(l->w.cache);
    int32_t at = 0;
    for (uint32_t h = 0; h < c->kv_heads; h++) {
        l->lists.indptr[h] = at;
        for (uint32_t p = 0; p + 1 < pages; p++)
            if (test_random_below(r, 3) == 0 && (uint32_t)(at - l->lists.indptr[h]) + 1 < most)
                l->lists.indices[at++] = (int32_t)p;
        l->lists.indices[at++] = (int32_t)pages - 1;
        l->lists.last_page_len[h] = (int32_t)((length - 1) % c->page_size + 1);
    }
    l->lists.indptr[c->kv_heads] = at;
}

/* Selection and attention on their own are a step, whoever attends, over the pages of a step or of
 * the caller. */
TEST(listed_pages_are_what_steps_attend_to)
{
    const uint64_t seed = test_seed(1321);
    for (uint32_t i = 0; i < turns_here(6); i++) {
        kvf_cache_config c = quantized_config(i);
        test_random r = {seed + i};
        lister l = {0};
        if (i == turns_here(6) - 1)
            c.pages = KVF_PAGES_NATIVE;
        c.transfer = test_transfer(i % 2 ? KVF_TRANSFER_GATHER : KVF_TRANSFER_DIRECT);
        c.layers = 1;
        c.select = i % 2 ? KVF_SELECT_FULL : KVF_SELECT_DYNAMIC;
        c.budget_tokens = 90;
        c.page_size = i == 3 ? 16 : 4;
        c.sink_tokens = i % 3 ? 11 : 4; /* the first ends within a page */
        c.sequences_max = 2;
        lister_open(&l, &c, seed + i);
        for (uint32_t step = 0; step < LISTS_STEPS; step++) {
            const uint32_t token = LISTS_PROMPT + step;
            kvf_decode_args args = test_step_args(&l.s, &l.t, 0, token, l.out);
            args.lse = l.lse;
            test_ok(&l.w, kvf_select_pages(l.w.cache, &args, &l.lists, l.w.stream));
            test_wait(&l.w);
            if (step % 3 == 2)
                choose_pages(&l, &r);
            test_ok(&l.w, kvf_attend_pages(l.w.cache, &args, &l.lists, l.w.stream));
            args.out = l.pages;
            args.q = NULL;
            test_ok(&l.w, kvf_read_pages(l.w.cache, &args, &l.lists, l.w.stream));
            test_decode(&l.w, l.twin, &l.t, 0, token, l.wanted, NULL);
            test_wait(&l.w);
            follow(&l, token);
            expect_read(&l);
            expect_attended(&l, token);
            /* A list has the whole page that the sink ends within. */
            if (step % 3 != 2 && c.sink_tokens % c.page_size == 0)
                assert_true(
                    test_distance(l.out, l.wanted, c.dtype, c.query_heads * test_value_dim(&c)) <=
                    test_tolerance(c.dtype));
        }
        assert_int_equal(kvf_page_address(l.s, 0, 0, 3) == NULL, c.pages != KVF_PAGES_NATIVE);
        assert_non_null(
            kvf_page_address(l.s, 0, 0, (LISTS_PROMPT + LISTS_STEPS) / c.page_size - 1));
        lister_close(&l);
    }
}

TEST(lists_of_anything_else_are_refused)
{
    if (test_on_cuda())
        return;
    kvf_cache_config c = quantized_config(1);
    lister l = {0};
    c.layers = 1;
    c.select = KVF_SELECT_DYNAMIC;
    c.sequences_max = 2;
    lister_open(&l, &c, 1327);
    kvf_decode_args args = {.batch = 1, .sequences = &l.s, .out = l.pages};
    l.lists.indptr[c.kv_heads] = 2;
    l.lists.indices[0] = 4;
    l.lists.indices[1] = 4; /* twice */
    test_ok(&l.w, kvf_read_pages(l.w.cache, &args, &l.lists, l.w.stream));
    test_expect(l.w.runtime, kvf_stream_wait(l.w.stream), KVF_INVALID);
    assert_non_null(strstr(kvf_runtime_error(l.w.runtime)->text, "page ids ascend and are below"));
    args.out = NULL;
    test_expect(l.w.runtime, kvf_read_pages(l.w.cache, &args, &l.lists, l.w.stream), KVF_INVALID);
    args.sequences = NULL;
    test_expect(l.w.runtime, kvf_read_pages(l.w.cache, &args, &l.lists, l.w.stream), KVF_INVALID);
    assert_string_equal(kvf_runtime_error(l.w.runtime)->text, "sequences is NULL; pass the batch");
    lister_close(&l);
}
