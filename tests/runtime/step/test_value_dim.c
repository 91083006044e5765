/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Values that are narrower than keys (value_dim): whatever a cache does with them, it gives the
 * bits that a cache gives for the same values padded with zeros.
 *
 * A story is told to both caches: a prompt in chunks, steps of one token and of several, a fork, a
 * file, a cut, and tokens that are kept. Knows nothing of how pages are laid out.
 */

#include <string.h>

#include "disk_rig.h"
#include "retain_world.h"

#define PROMPT SAVE_PROMPT
#define TOKENS (PROMPT + 60u)
#define LESS   32u /* elements */

/* A cache and its tokens: narrow, then padded. */
typedef struct side {
    test_world w;
    test_tokens t;
    kvf_sequence *s;
} side;

/* The tokens of `narrow` with zeros after each value. */
static void pad(test_tokens *wide, const test_tokens *narrow, const kvf_cache_config *c)
{
    const size_t size = test_dtype_bytes(c->dtype), rows = (size_t)c->layers * TOKENS;
    const size_t value = narrow->value_dim * size;
    test_tokens_make(wide, c, &(test_tokens_spec){.count = TOKENS});
    memcpy(wide->q, narrow->q, rows * c->query_heads * c->head_dim * size);
    memcpy(wide->k, narrow->k, rows * c->kv_heads * c->head_dim * size);
    memset(wide->v, 0, rows * c->kv_heads * c->head_dim * size);
    for (size_t i = 0; i < rows * c->kv_heads; i++)
        memcpy((char *)wide->v + i * c->head_dim * size, (const char *)narrow->v + i * value,
               value);
}

static void open_sides(side x[2], kvf_cache_config c, uint64_t seed)
{
    c.value_dim = c.head_dim - LESS;
    test_open(&x[0].w, &x[0].t, &c,
              &(test_tokens_spec){.count = TOKENS, .seed = seed, .sharpness = 2.0f, .topics = 5});
    c.value_dim = 0;
    test_world_open(&x[1].w, NULL, &c);
    pad(&x[1].t, &x[0].t, &c);
    for (uint32_t i = 0; i < 2; i++)
        x[i].s = test_sequence(&x[i].w);
}

static void close_sides(side x[2])
{
    for (uint32_t i = 0; i < 2; i++)
        test_close(&x[i].w, &x[i].t);
}

/* Outputs of `heads` heads in all, which are freed. */
static void expect_same(const side x[2], void *const out[2], size_t heads, const char *what)
{
    const kvf_dtype dtype = x[0].t.dtype;
    const size_t size = test_dtype_bytes(dtype), less = x[0].t.value_dim, dim = x[1].t.value_dim;
    for (size_t h = 0; h < heads; h++) {
        const char *narrow = (const char *)out[0] + h * less * size;
        const char *wide = (const char *)out[1] + h * dim * size;
        if (memcmp(narrow, wide, less * size) != 0)
            fail_msg("%s: output %zu differs by %g", what, h,
                     test_distance(narrow, wide, dtype, less));
        for (size_t d = less; d < dim; d++)
            if (kvf_element_get(wide, dtype, d) != 0.0f)
                fail_msg("%s: padding of output %zu is not zero", what, h);
    }
}

static void prompt(side x[2])
{
    void *out[2];
    for (uint32_t layer = 0; layer < x[0].t.layers; layer++) {
        for (uint32_t i = 0; i < 2; i++) {
            const test_tokens *t = &x[i].t;
            out[i] = test_alloc((size_t)PROMPT * t->query_heads * t->value_dim *
                                test_dtype_bytes(t->dtype));
            test_prefill(&x[i].w, x[i].s, t,
                         &(test_range){.layer = layer, .count = PROMPT, .chunk = 40}, out[i]);
            test_wait(&x[i].w);
        }
        expect_same(x, out, (size_t)PROMPT * x[0].t.query_heads, "prompt");
        test_release(out[0]);
        test_release(out[1]);
    }
}

static void steps(side x[2], uint32_t first, uint32_t count, const char *what)
{
    void *out[2];
    for (uint32_t i = 0; i < 2; i++)
        out[i] = test_steps(&x[i].w, x[i].s, &x[i].t, first, count);
    expect_same(x, out, (size_t)count * x[0].t.layers * x[0].t.query_heads, what);
    free(out[0]);
    free(out[1]);
}

/* Three tokens in one call. */
static void several(side x[2], uint32_t first)
{
    const uint32_t tokens = 3;
    for (uint32_t layer = 0; layer < x[0].t.layers; layer++) {
        void *out[2];
        for (uint32_t i = 0; i < 2; i++) {
            const test_tokens *t = &x[i].t;
            out[i] = test_alloc((size_t)tokens * t->query_heads * t->value_dim *
                                test_dtype_bytes(t->dtype));
            kvf_decode_args args = test_step_args(&x[i].s, t, layer, first, out[i]);
            args.tokens = &tokens;
            test_ok(&x[i].w, kvf_decode(x[i].w.cache, &args, x[i].w.stream));
            test_wait(&x[i].w);
        }
        expect_same(x, out, (size_t)tokens * x[0].t.query_heads, "several tokens");
        test_release(out[0]);
        test_release(out[1]);
    }
}

/* The sequences go on as their forks. */
static void fork_both(side x[2])
{
    for (uint32_t i = 0; i < 2; i++) {
        kvf_sequence *child = NULL;
        test_ok(&x[i].w, kvf_sequence_fork(x[i].w.cache, x[i].s, x[i].w.stream, &child));
        kvf_sequence_destroy(x[i].s);
        x[i].s = child;
    }
}

/* And as what comes back of files, of which the narrow one says so. */
static void save_both(side x[2])
{
    kvf_saved about[2];
    for (uint32_t i = 0; i < 2; i++) {
        const char *path = save_path(i ? "wide" : "narrow");
        test_ok(&x[i].w, save_now(&x[i].w, x[i].s, path, NULL));
        test_ok(&x[i].w, kvf_saved_read(x[i].w.runtime, path, 1, &about[i], NULL, 0, NULL));
        assert_int_equal(about[i].head_dim, x[i].t.head_dim);
        assert_int_equal(about[i].value_dim, x[i].t.value_dim);
        kvf_sequence_destroy(x[i].s);
        x[i].s = save_restore(&x[i].w, path, 1);
    }
    assert_true(about[0].bytes < about[1].bytes);
    kvf_restore_args args;
    kvf_sequence *none = NULL;
    kvf_restore_args_init(&args);
    args.path = save_path("narrow");
    test_expect(x[1].w.runtime, kvf_sequence_restore(x[1].w.cache, &args, x[1].w.stream, &none),
                KVF_INVALID);
    assert_non_null(strstr(kvf_runtime_error(x[1].w.runtime)->text, "was saved with value_dim = "));
}

static void cut_both(side x[2], uint32_t tokens)
{
    for (uint32_t i = 0; i < 2; i++)
        test_ok(&x[i].w, kvf_sequence_truncate(x[i].w.cache, x[i].s, tokens, x[i].w.stream));
}

/* Every layer keeps some tokens of `length`. */
static void keep_both(side x[2], uint32_t length, uint64_t seed)
{
    const subset of = {.length = length, .count = length * 2 / 3, .window = 20, .front = 8};
    for (uint32_t layer = 0; layer < x[0].t.layers; layer++)
        for (uint32_t i = 0; i < 2; i++) {
            test_random r = {seed + layer};
            uint32_t *ids = retain_choose(&r, x[i].t.kv_heads, &of);
            void *work = must(kvf_keep_work_bytes(x[i].w.cache));
            test_ok(&x[i].w, kvf_sequence_keep(x[i].w.cache, x[i].s, layer, ids, of.count, work,
                                               x[i].w.stream));
            test_wait(&x[i].w);
            test_release(work);
            test_release(ids);
        }
}

static void tell(kvf_cache_config c, uint64_t seed)
{
    side x[2];
    const bool has_rings = c.head_mask && memchr(c.head_mask, 0, (size_t)c.layers * c.kv_heads);
    c.tokens_per_step_max = 3;
    open_sides(x, c, seed);
    prompt(x);
    steps(x, PROMPT, 9, "steps");
    several(x, PROMPT + 9);
    fork_both(x);
    steps(x, PROMPT + 12, 6, "a fork");
    save_both(x);
    steps(x, PROMPT + 18, 6, "a file");
    if (!has_rings) {
        cut_both(x, PROMPT - 20);
        steps(x, PROMPT - 20, 30, "a cut");
        keep_both(x, PROMPT + 10, seed);
        steps(x, PROMPT + 10, 12, "what is kept");
    }
    for (uint32_t i = 0; i < 2; i++)
        kvf_sequence_destroy(x[i].s);
    close_sides(x);
}

static void narrow_values_have_the_bits_of_padded_ones(void **state)
{
    const uint64_t seed = test_seed(610);
    for (uint32_t i = 0; save_cases[i].name; i++)
        tell(save_config(&save_cases[i]), seed + i);
}

/* Quantized, on disk, over every way to move pages. */
static void forms_and_ways_change_nothing(void **state)
{
    static const save_case cases[] = {
        {"int8", "pages=k8v8 digest=codes dtype=bf16"},
        {"int4", "pages=k8v4 digest=codes select=dynamic page_size=4 transfer=gather"},
        {"int4, boxes", "pages=k8v4 dtype=fp16 refresh_interval=5"},
        {"int4, rings", "pages=k8v4 digest=codes head_mask=1011 streaming_sink=5 "
                        "streaming_recent=21"},
        {"head_dim 80", "digest=codes select=dynamic page_size=4 dtype=fp16 head_dim=80"},
        {"each", "transfer=each"},
        {"mapped", "transfer=mapped digest=codes"},
        {"batch", "transfer=batch"},
        {NULL, NULL},
    };
    const uint64_t seed = test_seed(640);
    for (uint32_t i = 0; cases[i].name; i++)
        tell(save_config(&cases[i]), seed + i);
    for (uint32_t i = 0; i < 2; i++) {
        kvf_cache_config c = save_config(&cases[i]);
        disk_config(&c, 100, 1);
        tell(c, seed + 20 + i);
    }
}

static void what_is_no_width_of_values_is_named(void **state)
{
    static const uint32_t wrong[] = {16, 48, 80, 96, 31};
    const kvf_runtime_config rc = test_runtime_config();
    kvf_runtime *runtime = NULL;
    kvf_cache_config c = test_config_small();
    kvf_cache_plan plan, narrow;
    kvf_error error;
    (void)state;
    test_expect(NULL, test_runtime_open(&rc, &runtime, NULL), KVF_OK);
    for (uint32_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        c.value_dim = wrong[i];
        test_expect(runtime, kvf_cache_plan_make(runtime, &c, &plan, &error), KVF_INVALID);
        assert_non_null(strstr(error.text, "must be head_dim = 64 less a multiple of 32"));
    }
    c.value_dim = 64;
    test_expect(runtime, kvf_cache_plan_make(runtime, &c, &plan, &error), KVF_OK);
    c.value_dim = 32;
    const kvf_status status = kvf_cache_plan_make(runtime, &c, &narrow, &error);
    test_expect(runtime, status, test_on_cuda() ? KVF_UNSUPPORTED : KVF_OK);
    if (status == KVF_OK) /* pages of 64 + 32 elements */
        assert_int_equal(narrow.host_kv_bytes * 4, plan.host_kv_bytes * 3);
    else
        assert_non_null(strstr(error.text, "with head_dim = 64 the CUDA device takes 64"));
    c.head_dim = 192;
    c.value_dim = 0;
    test_expect(runtime, kvf_cache_plan_make(runtime, &c, &plan, &error),
                test_on_cuda() ? KVF_UNSUPPORTED : KVF_OK);
    c.value_dim = 128;
    test_expect(runtime, kvf_cache_plan_make(runtime, &c, &plan, &error), KVF_OK);
    c.pages = KVF_PAGES_K8V4;
    c.dtype = KVF_BF16;
    test_expect(runtime, kvf_cache_plan_make(runtime, &c, &plan, &error), KVF_OK);
    c.value_dim = 0; /* whatever the form of pages */
    test_expect(runtime, kvf_cache_plan_make(runtime, &c, &plan, &error),
                test_on_cuda() ? KVF_UNSUPPORTED : KVF_OK);
    kvf_runtime_close(runtime);
}

int main(void)
{
    if (test_on_cuda()) /* which has no wide values to compare with */
        return unit_run(what_is_no_width_of_values_is_named);
    return unit_run_around(NULL, save_remove_folder, what_is_no_width_of_values_is_named,
                           narrow_values_have_the_bits_of_padded_ones,
                           forms_and_ways_change_nothing);
}
