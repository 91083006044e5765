/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Programs that were built with an earlier or a later header: structs of theirs are shorter or
 * longer than the library's.
 *
 * Every buffer has just the bytes that its size says, so AddressSanitizer sees what is touched
 * after them.
 */

#include "save_rig.h"

#include <stddef.h>
#include <string.h>

#include <kvferry/blocks.h>
#include <kvferry/disk.h>
#include <kvferry/link.h>
#include <kvferry/prune.h>
#include <kvferry/save.h>

/* ---- what programs were built with ---- */

/* Structs that ended with this field; nothing before it ever moves (struct_layout.txt). */
#define UNTIL(type, field) ((offsetof(type, field) + sizeof(((type *)0)->field) + 7) / 8 * 8)
enum {
    OLD_RUNTIME_CONFIG = UNTIL(kvf_runtime_config, isa_mask),
    OLD_CACHE_CONFIG = UNTIL(kvf_cache_config, reserved_limits),
    OLD_PREFILL_ARGS = UNTIL(kvf_prefill_args, v),
    OLD_DECODE_ARGS = UNTIL(kvf_decode_args, out),
    OLD_STATS = UNTIL(kvf_stats, pages_selected),
};

/* Not inlined, so that the compiler does not compare the size with that of the type. */
__attribute__((noinline)) static void *exactly(size_t size)
{
    void *p = malloc(size);
    assert_non_null(p);
    memset(p, 0xa5, size);
    return p;
}

static void set_geometry(kvf_cache_config *c)
{
    c->layers = 1;
    c->query_heads = 4;
    c->kv_heads = 2;
    c->head_dim = 64;
    c->dtype = KVF_FP32;
    c->tokens_max = 512;
}

/* A whole life of an old program: what its structs lack has the defaults. */
TEST(an_old_program_goes_on)
{
    kvf_runtime_config *rc = exactly(OLD_RUNTIME_CONFIG);
    kvf_cache_config *cc = exactly(OLD_CACHE_CONFIG);
    kvf_runtime *runtime = NULL;
    kvf_cache *cache = NULL;
    kvf_runtime_config_init_sized(rc, OLD_RUNTIME_CONFIG);
    assert_int_equal(rc->size, OLD_RUNTIME_CONFIG);
    assert_int_equal(rc->isa_mask, KVF_ISA_ALL);
    rc->device = KVF_DEVICE_HOST;
    rc->threads = 2;
    rc->allow_unpinned = 1;
    test_expect(NULL, kvf_runtime_open(rc, &runtime, NULL), KVF_OK);
    assert_int_equal(kvf_runtime_threads(runtime), 2);
    kvf_cache_config_init_sized(cc, OLD_CACHE_CONFIG);
    assert_int_equal(cc->prefill_chunk_max, 512);
    set_geometry(cc);
    kvf_cache_config_preset(cc, KVF_PRESET_PRKV); /* lies after it */
    test_expect(runtime, kvf_cache_open(runtime, cc, &cache, NULL), KVF_OK);
    kvf_cache_config whole;
    kvf_cache_config_init(&whole);
    const kvf_cache_config *now = kvf_cache_settings(cache);
    assert_int_equal(now->size, sizeof whole);
    assert_int_equal(now->page_size, whole.page_size);
    assert_int_equal(now->budget_tokens, whole.budget_tokens);
    assert_int_equal(now->streaming_recent, whole.streaming_recent);
    kvf_cache_close(cache);
    kvf_runtime_close(runtime);
    free(cc);
    free(rc);
}

/* ---- every length ---- */

/* The plan of a configuration of `size` bytes, whose byte `at` is 1 if at is below size. */
static kvf_status plan_sized(kvf_runtime *runtime, size_t size, size_t at, kvf_cache_plan *plan)
{
    kvf_cache_config *c = exactly(size);
    kvf_cache_config_init_sized(c, size);
    if (size >= OLD_CACHE_CONFIG)
        set_geometry(c);
    if (at < size)
        ((unsigned char *)c)[at] = 1;
    const kvf_status status = kvf_cache_plan_make(runtime, c, plan, NULL);
    free(c);
    return status;
}

static void expect_refused(kvf_status status, const char *word)
{
    if (status != KVF_INVALID || !strstr(kvf_runtime_error(NULL)->text, word))
        fail_msg("no \"%s\" in %s: %s", word, kvf_status_name(status),
                 kvf_runtime_error(NULL)->text);
}

TEST(a_configuration_may_have_any_length)
{
    kvf_runtime *runtime = test_runtime();
    const size_t whole = sizeof(kvf_cache_config);
    kvf_cache_plan wanted, plan;
    test_expect(runtime, plan_sized(runtime, whole, SIZE_MAX, &wanted), KVF_OK);
    for (size_t size = OLD_CACHE_CONFIG; size <= whole + 64; size += 8) {
        memset(&plan, 0, sizeof plan);
        test_expect(runtime, plan_sized(runtime, size, SIZE_MAX, &plan), KVF_OK);
        assert_memory_equal(&plan, &wanted, sizeof plan);
    }
    expect_refused(plan_sized(runtime, 16, SIZE_MAX, &plan), "layers = 0");
#define RESERVED(heading)                                                                          \
    expect_refused(                                                                                \
        plan_sized(runtime, whole, offsetof(kvf_cache_config, reserved_##heading), &plan),         \
        "reserved_" #heading " = 1: kvferry ")
    RESERVED(limits);
    RESERVED(policy);
    for (size_t at = whole; at < whole + 64; at += 9) { /* asks for what is not here */
        char word[64];
        snprintf(word, sizeof word, "byte %zu is not 0", at);
        expect_refused(plan_sized(runtime, whole + 64, at, &plan), word);
    }
    kvf_cache_config cc;
    kvf_cache_config_init(&cc);
    static const size_t none[] = {0, 3, 8, 12, sizeof cc - 4, 5000, SIZE_MAX};
    for (size_t i = 0; i < sizeof none / sizeof *none; i++) {
        cc.size = none[i];
        expect_refused(kvf_cache_plan_make(runtime, &cc, &plan, NULL), "size = ");
    }
    expect_refused(kvf_cache_plan_make(runtime, NULL, &plan, NULL), "config is NULL");
    kvf_runtime_close(runtime);
}

TEST(a_struct_inside_grows_as_the_last_member)
{
    kvf_runtime *runtime = test_runtime();
    kvf_blocks_plan wanted, plan;
    const size_t inner = offsetof(kvf_blocks_config, cache);
    for (size_t i = 0; i < 3; i++) { /* today's, shorter, longer */
        const size_t sizes[] = {sizeof(kvf_blocks_config), inner + OLD_CACHE_CONFIG,
                                sizeof(kvf_blocks_config) + 24};
        kvf_blocks_config *bc = exactly(sizes[i]);
        kvf_blocks_config_init_sized(bc, sizes[i]);
        assert_int_equal(bc->cache.size, sizes[i] - inner);
        set_geometry(&bc->cache);
        bc->block_count = 16;
        memset(&plan, 0, sizeof plan);
        test_expect(runtime, kvf_blocks_plan_make(runtime, bc, &plan, NULL), KVF_OK);
        wanted = i ? wanted : plan;
        assert_memory_equal(&plan, &wanted, sizeof plan);
        bc->reserved[1] = 7;
        expect_refused(kvf_blocks_plan_make(runtime, bc, &plan, NULL), "reserved[1] = 7");
        bc->reserved[1] = 0;
        bc->cache.size -= 8;
        expect_refused(kvf_blocks_plan_make(runtime, bc, &plan, NULL), "cache.size = ");
        free(bc);
    }
    kvf_runtime_close(runtime);
}

TEST(pruners_and_policies_may_have_any_length)
{
    const kvf_prune_shape shape = {.layers = 4, .kv_heads = 2, .query_heads = 4, .tokens_max = 512};
    const size_t longer = sizeof(kvf_prune_config) + 16;
    kvf_prune_config *pc = exactly(longer);
    kvf_prune_config_init_sized(pc, kvf_prune_policy_find("snapkv"), longer);
    assert_int_equal(kvf_prune_config_check(pc, &shape, NULL), KVF_OK);
    ((unsigned char *)pc)[longer - 1] = 1;
    expect_refused(kvf_prune_config_check(pc, &shape, NULL), "is not 0");
    ((unsigned char *)pc)[longer - 1] = 0;
    const size_t more = sizeof(kvf_prune_policy) + 8;
    kvf_prune_policy *policy = memset(exactly(more), 0, more);
    memcpy(policy, pc->policy, sizeof *policy);
    policy->size = more;
    pc->policy = policy;
    assert_int_equal(kvf_prune_config_check(pc, &shape, NULL), KVF_OK);
    ((unsigned char *)policy)[sizeof *policy] = 1;
    expect_refused(kvf_prune_config_check(pc, &shape, NULL), "kvf_prune_policy");
    free(policy);
    free(pc);
}

TEST(measurements_and_saves_may_have_any_length)
{
    kvf_runtime *runtime = test_runtime();
    kvf_disk *disk = NULL;
    kvf_disk_result result;
    test_expect(runtime, kvf_disk_open(runtime, "/tmp", 16u << 20, &disk), KVF_OK);
    const size_t shorter = offsetof(kvf_disk_case, extent_bytes);
    kvf_disk_case *c = exactly(shorter);
    kvf_disk_case_init_sized(c, shorter);
    c->direct = 0;
    c->engine = KVF_DISK_PREADV;
    expect_refused(kvf_disk_measure(disk, c, &result), "extents = 512: the file has 128");
    free(c);
    kvf_disk_close(disk);
    kvf_save_args *sa = exactly(sizeof *sa + 8);
    kvf_restore_args *ra = exactly(16);
    kvf_save_args_init_sized(sa, sizeof *sa + 8);
    kvf_restore_args_init_sized(ra, 16);
    assert_int_equal(sa->size, sizeof *sa + 8);
    assert_int_equal(ra->size, 16);
    free(ra);
    free(sa);
    kvf_runtime_close(runtime);
}

/* ---- structs that come with their size ---- */

enum { PROMPT = 40, STEPS = 8 };

/* Prefill and steps of one sequence; the structs are today's, or those of an old program. */
static void run_steps(const test_tokens *t, test_world *w, int is_old, float *out, void *stats)
{
    const kvf_cache_config *c = kvf_cache_settings(w->cache);
    kvf_sequence *s = test_sequence(w);
    kvf_prefill_args chunk = test_chunk_args(s, t, 0, 0, PROMPT, NULL);
    chunk.q = NULL;
    const size_t chunk_bytes = is_old ? OLD_PREFILL_ARGS : sizeof chunk;
    void *given = memcpy(exactly(chunk_bytes), &chunk, chunk_bytes);
    test_ok(w, kvf_prefill_sized(w->cache, given, chunk_bytes, w->stream));
    free(given);
    for (uint32_t i = 0; i < STEPS; i++) {
        const kvf_decode_args step = test_step_args(&s, t, 0, PROMPT + i, out);
        const size_t step_bytes = is_old ? OLD_DECODE_ARGS : sizeof step;
        given = memcpy(exactly(step_bytes), &step, step_bytes);
        test_ok(w, kvf_decode_sized(w->cache, given, step_bytes, w->stream));
        free(given);
        out += (size_t)c->query_heads * c->head_dim;
    }
    test_wait(w);
    kvf_cache_stats_sized(w->cache, stats, is_old ? OLD_STATS : sizeof(kvf_stats));
    kvf_sequence_destroy(s);
}

/* Prompt, steps and statistics of an old program are those of one of today. */
TEST(steps_of_an_old_program_are_the_same)
{
    test_world w;
    test_tokens t;
    kvf_cache_config cc = test_config_small();
    const test_tokens_spec spec = {.count = PROMPT + STEPS, .seed = test_seed(39)};
    kvf_stats now;
    kvf_stats *old = exactly(OLD_STATS);
    test_open(&w, &t, &cc, &spec);
    const size_t bytes = (size_t)STEPS * cc.query_heads * cc.head_dim * sizeof(float);
    float *out[2] = {test_alloc(bytes), test_alloc(bytes)};
    run_steps(&t, &w, 0, out[0], &now);
    kvf_cache_stats_reset(w.cache);
    run_steps(&t, &w, 1, out[1], old);
    assert_memory_equal(out[0], out[1], bytes);
    assert_int_equal(old->steps, STEPS);
    assert_memory_equal(old, &now, OLD_STATS);
    test_release(out[0]);
    test_release(out[1]);
    free(old);
    test_close(&w, &t);
}

/* Memory that is only looked at where it is not refused before. */
static const _Alignas(64) char somewhere[64];

/* Handles that calls are made on. `size` is that of the struct which is tried. */
typedef struct handles {
    test_world w;
    kvf_blocks *blocks;
    kvf_blocks_config blocks_config;
    kvf_prune *prune;
    kvf_sequence *s;
    kvf_decode_args step;    /* right, but for what it needs lists for */
    kvf_page_lists no_lists; /* of zeros */
    test_tokens tokens;
    void *outputs;
    const char *saved;
    kvf_link *link;
    kvf_link_case link_case;
    kvf_disk *disk;
    kvf_disk_case disk_case;
    size_t size;
} handles;

static void open_handles(handles *h)
{
    kvf_cache_config cc = test_config_small();
    kvf_prune_config pc;
    kvf_prune_config_init(&pc, kvf_prune_policy_find("snapkv"));
    pc.settings.keep = 0.9f;
    cc.observe_window = pc.settings.window;
    test_world_open(&h->w, NULL, &cc);
    h->s = test_sequence(&h->w);
    h->step = (kvf_decode_args){
        .batch = 1, .sequences = &h->s, .q = somewhere, .k = somewhere, .v = somewhere};
    test_ok(&h->w, kvf_prune_open(h->w.cache, &pc, &h->prune, NULL));
    kvf_blocks_config_init(&h->blocks_config);
    h->blocks_config.cache.layers = 1;
    h->blocks_config.cache.query_heads = h->blocks_config.cache.kv_heads = 2;
    h->blocks_config.cache.head_dim = 64;
    h->blocks_config.cache.tokens_max = 128;
    h->blocks_config.cache.device_bytes = 0;
    h->blocks_config.block_count = 4;
    test_ok(&h->w, kvf_blocks_open(h->w.runtime, &h->blocks_config, &h->blocks, NULL));
}

static void close_handles(handles *h)
{
    kvf_blocks_close(h->blocks);
    kvf_prune_close(h->prune);
    test_world_close(&h->w);
}

/* Calls with a struct that the library reads; what else they need is there. */
#define READ_LIST(X)                                                                               \
    X(kvf_prefill_args, prefill, kvf_prefill_sized(h->w.cache, given, h->size, h->w.stream))       \
    X(kvf_prefill_args, prune_append,                                                              \
      kvf_prune_append_sized(h->prune, given, h->size, h->w.stream))                               \
    X(kvf_decode_args, decode, kvf_decode_sized(h->w.cache, given, h->size, h->w.stream))          \
    X(kvf_decode_args, select,                                                                     \
      kvf_select_pages_sized(h->w.cache, given, h->size, &h->no_lists, sizeof h->no_lists,         \
                             h->w.stream))                                                         \
    X(kvf_page_lists, select_lists,                                                                \
      kvf_select_pages_sized(h->w.cache, &h->step, sizeof h->step, given, h->size, h->w.stream))   \
    X(kvf_decode_args, attend,                                                                     \
      kvf_attend_pages_sized(h->w.cache, given, h->size, &h->no_lists, sizeof h->no_lists,         \
                             h->w.stream))                                                         \
    X(kvf_page_lists, attend_lists,                                                                \
      kvf_attend_pages_sized(h->w.cache, &h->step, sizeof h->step, given, h->size, h->w.stream))   \
    X(kvf_decode_args, read,                                                                       \
      kvf_read_pages_sized(h->w.cache, given, h->size, &h->no_lists, sizeof h->no_lists,           \
                           h->w.stream))                                                           \
    X(kvf_page_lists, read_lists,                                                                  \
      kvf_read_pages_sized(h->w.cache, &h->step, sizeof h->step, given, h->size, h->w.stream))     \
    X(kvf_blocks_put_args, put, kvf_blocks_put_sized(h->blocks, given, h->size, h->w.stream))      \
    X(kvf_blocks_get_args, get, kvf_blocks_get_sized(h->blocks, given, h->size, h->w.stream))      \
    X(kvf_blocks_decode_args, blocks_decode,                                                       \
      kvf_blocks_decode_sized(h->blocks, given, h->size, sizeof(kvf_blocks_rows), h->w.stream))    \
    X(kvf_blocks_extend_args, blocks_extend,                                                       \
      kvf_blocks_extend_sized(h->blocks, given, h->size, sizeof(kvf_blocks_rows), h->w.stream))    \
    X(kvf_blocks_rows, decode_rows,                                                                \
      kvf_blocks_decode_sized(h->blocks, &(kvf_blocks_decode_args){.rows = given},                 \
                              sizeof(kvf_blocks_decode_args), h->size, h->w.stream))               \
    X(kvf_blocks_rows, extend_rows,                                                                \
      kvf_blocks_extend_sized(h->blocks, &(kvf_blocks_extend_args){.rows = given},                 \
                              sizeof(kvf_blocks_extend_args), h->size, h->w.stream))               \
    X(kvf_prune_shape, shape,                                                                      \
      kvf_prune_config_check_sized(kvf_prune_config_get(h->prune), given, h->size, NULL))

#define AS_READ(type, name, call)                                                                  \
    static kvf_status call_##name(const handles *h, const void *given)                             \
    {                                                                                              \
        return call;                                                                               \
    }
READ_LIST(AS_READ)

static const struct {
    const char *name, *type;
    size_t size;
    kvf_status (*call)(const handles *h, const void *given);
} reads[] = {
#define AS_ROW(type, name, call) {#name, #type, sizeof(type), call_##name},
    READ_LIST(AS_ROW)};

/* An all-zero struct of `size` bytes, whose byte `at` is 1 if at is below size. */
static kvf_status call_with(handles *h, size_t i, size_t size, size_t at)
{
    unsigned char *given = memset(exactly(size), 0, size);
    if (at < size)
        given[at] = 1;
    h->size = size;
    const kvf_status status = reads[i].call(h, given);
    free(given);
    return status;
}

TEST(what_is_read_may_have_any_length)
{
    handles h = {0};
    open_handles(&h);
    for (size_t i = 0; i < sizeof reads / sizeof *reads; i++) {
        char whole[sizeof((kvf_error *)0)->text], words[128];
        const size_t size = reads[i].size;
        print_message("%s\n", reads[i].name);
        assert_int_not_equal(call_with(&h, i, size, SIZE_MAX), KVF_OK); /* nothing but zeros */
        snprintf(whole, sizeof whole, "%s", kvf_runtime_error(NULL)->text);
        assert_null(strstr(whole, reads[i].type));
        const size_t other[] = {8, size - 4, size + 4, size + 64};
        for (size_t k = 0; k < sizeof other / sizeof *other; k++) {
            assert_int_not_equal(call_with(&h, i, other[k], SIZE_MAX), KVF_OK);
            assert_string_equal(kvf_runtime_error(NULL)->text, whole);
        }
        for (size_t at = size; at < size + 64; at += 7) {
            snprintf(words, sizeof words,
                     "%s ends at byte %zu in kvferry %s, and byte %zu is not 0", reads[i].type,
                     size, kvf_version(), at);
            expect_refused(call_with(&h, i, size + 64, at), words);
        }
        snprintf(words, sizeof words, "is not the size of a %s; pass sizeof(%s)", reads[i].type,
                 reads[i].type);
        static const size_t none[] = {3, 5000};
        for (size_t k = 0; k < sizeof none / sizeof *none; k++)
            expect_refused(call_with(&h, i, none[k], SIZE_MAX), words);
        snprintf(words, sizeof words, "is NULL; pass a %s", reads[i].type);
        expect_refused(reads[i].call(&h, NULL), words);
    }
    close_handles(&h);
}

/* Calls with a struct that the library fills; `varies` where two calls do not give the same. */
#define FILL_LIST(X)                                                                               \
    X(kvf_stats, stats, 0, (kvf_cache_stats_sized(h->w.cache, out, h->size), KVF_OK))              \
    X(kvf_stats, layer_stats, 0,                                                                   \
      (kvf_cache_layer_stats_sized(h->w.cache, 0, out, h->size), KVF_OK))                          \
    X(kvf_footprint, footprint, 0, (kvf_cache_footprint_sized(h->w.cache, out, h->size), KVF_OK))  \
    X(kvf_cache_plan, plan, 0,                                                                     \
      kvf_cache_plan_make_sized(h->w.runtime, &h->w.config, out, h->size, NULL))                   \
    X(kvf_blocks_plan, blocks_plan, 0,                                                             \
      kvf_blocks_plan_make_sized(h->w.runtime, &h->blocks_config, out, h->size, NULL))             \
    X(kvf_blocks_stats, blocks_stats, 0,                                                           \
      (kvf_blocks_stats_get_sized(h->blocks, out, h->size), KVF_OK))                               \
    X(kvf_prune_plan, prune_plan, 0,                                                               \
      kvf_prune_plan_make_sized(h->w.runtime, &h->w.config, kvf_prune_config_get(h->prune), out,   \
                                h->size, NULL))                                                    \
    X(kvf_prune_stats, prune_stats, 0,                                                             \
      (kvf_prune_stats_get_sized(h->prune, out, h->size), KVF_OK))                                 \
    X(kvf_prune_result, prune_result, 0, prune_a_prompt(h, out))                                   \
    X(kvf_hidden_plan, hidden_plan, 0,                                                             \
      (kvf_hidden_plan_make_sized(4096, 2000, 1, out, h->size), KVF_OK))                           \
    X(kvf_saved, saved, 0,                                                                         \
      kvf_saved_read_sized(h->w.runtime, h->saved, 0, out, h->size, NULL, 0, NULL))                \
    X(kvf_link_result, link_result, 1,                                                             \
      kvf_link_measure_sized(h->link, &h->link_case, NULL, out, h->size))                          \
    X(kvf_disk_result, disk_result, 1, kvf_disk_measure_sized(h->disk, &h->disk_case, out, h->size))

static kvf_status prune_a_prompt(handles *h, void *out)
{
    test_ok(&h->w, kvf_sequence_truncate(h->w.cache, h->s, 0, h->w.stream));
    test_ok(&h->w, kvf_prune_begin(h->prune, h->s, PROMPT));
    const kvf_prefill_args chunk = test_chunk_args(h->s, &h->tokens, 0, 0, PROMPT, h->outputs);
    test_ok(&h->w, kvf_prefill(h->w.cache, &chunk, h->w.stream));
    test_ok(&h->w, kvf_prune_append(h->prune, &chunk, h->w.stream));
    return kvf_prune_layer_sized(h->prune, h->s, 0, h->w.stream, out, h->size);
}

static void open_more(handles *h)
{
    const kvf_cache_config *c = &h->w.config;
    const test_tokens_spec spec = {.count = PROMPT, .seed = test_seed(41)};
    test_tokens_make(&h->tokens, c, &spec);
    h->outputs = test_alloc((size_t)PROMPT * c->query_heads * c->head_dim * sizeof(float));
    kvf_prune_result result;
    h->size = sizeof result;
    test_ok(&h->w, prune_a_prompt(h, &result));
    h->saved = save_path("sized.kvs");
    test_ok(&h->w, save_now(&h->w, h->s, h->saved, NULL));
    test_ok(&h->w, kvf_link_open(h->w.runtime, &h->link));
    kvf_link_case_init(&h->link_case);
    h->link_case.what = KVF_LINK_PEAK;
    h->link_case.pages = 4;
    h->link_case.pool_bytes = 1 << 20;
    h->link_case.repetitions = 1;
    test_ok(&h->w, kvf_disk_open(h->w.runtime, "/tmp", 16u << 20, &h->disk));
    kvf_disk_case_init(&h->disk_case);
    h->disk_case.engine = KVF_DISK_PREADV;
    h->disk_case.direct = 0;
    h->disk_case.extents = 2;
}

static void close_more(handles *h)
{
    kvf_disk_close(h->disk);
    kvf_link_close(h->link);
    test_release(h->outputs);
    test_tokens_free(&h->tokens);
}

#define AS_FILL(type, name, varies, call)                                                          \
    static kvf_status fill_##name(handles *h, void *out)                                           \
    {                                                                                              \
        return call;                                                                               \
    }
FILL_LIST(AS_FILL)

static const struct {
    const char *name;
    size_t size;
    int varies;
    kvf_status (*call)(handles *h, void *out);
} fills[] = {
#define AS_FILL_ROW(type, name, varies, call) {#name, sizeof(type), varies, fill_##name},
    FILL_LIST(AS_FILL_ROW)};

/* Fields that both know are written, the rest of a longer struct is 0, and nothing after its end.
 */
TEST(what_is_filled_may_have_any_length)
{
    handles h = {0};
    open_handles(&h);
    open_more(&h);
    for (size_t i = 0; i < sizeof fills / sizeof *fills; i++) {
        const size_t known = fills[i].size;
        unsigned char *whole = exactly(known);
        h.size = known;
        print_message("%s\n", fills[i].name);
        test_ok(&h.w, fills[i].call(&h, whole));
        const size_t sizes[] = {8, known - 8, known, known + 8, known + 80};
        for (size_t k = 0; k < sizeof sizes / sizeof *sizes; k++) {
            unsigned char *out = exactly(sizes[k]);
            h.size = sizes[k];
            test_ok(&h.w, fills[i].call(&h, out));
            if (!fills[i].varies)
                assert_memory_equal(out, whole, h.size < known ? h.size : known);
            for (size_t at = known; at < h.size; at++)
                assert_int_equal(out[at], 0);
            free(out);
        }
        free(whole);
    }
    close_more(&h);
    close_handles(&h);
}

TESTS_RUN_BETWEEN(NULL, save_remove_folder)
