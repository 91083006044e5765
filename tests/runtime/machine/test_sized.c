/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Programs that were built with an earlier or a later header: structs of theirs are shorter or
 * longer than the library's.
 *
 * Every buffer has just the bytes that its `size` says, so AddressSanitizer sees what is touched
 * behind them. The structs below are frozen: they are what programs were built with, and the
 * assertions say that today's begin with the same.
 */

#include "harness.h"

#include <stddef.h>
#include <string.h>

#include <kvferry/blocks.h>
#include <kvferry/disk.h>
#include <kvferry/link.h>
#include <kvferry/prune.h>
#include <kvferry/save.h>

/* ---- what programs were built with ---- */

typedef struct old_runtime_config {
    size_t size;
    int device;
    uint32_t threads, gather_threads;
    int32_t numa_node;
    int huge_pages;
    uint32_t allow_unpinned, isa_mask;
} old_runtime_config;

typedef struct old_cache_config {
    size_t size;
    uint32_t layers, query_heads, kv_heads, head_dim;
    int dtype;
    float softmax_scale;
    int pages;
    uint32_t sequences_max, tokens_max;
    uint64_t host_tokens_max;
    uint32_t prefill_chunk_max, tokens_per_step_max;
} old_cache_config;

#define SAME(old, now, field)                                                                      \
    _Static_assert(offsetof(old, field) == offsetof(now, field) &&                                 \
                       sizeof(((old *)0)->field) == sizeof(((now *)0)->field),                     \
                   #field " is where it was")
SAME(old_runtime_config, kvf_runtime_config, device);
SAME(old_runtime_config, kvf_runtime_config, threads);
SAME(old_runtime_config, kvf_runtime_config, numa_node);
SAME(old_runtime_config, kvf_runtime_config, allow_unpinned);
SAME(old_runtime_config, kvf_runtime_config, isa_mask);
SAME(old_cache_config, kvf_cache_config, layers);
SAME(old_cache_config, kvf_cache_config, head_dim);
SAME(old_cache_config, kvf_cache_config, dtype);
SAME(old_cache_config, kvf_cache_config, tokens_max);
SAME(old_cache_config, kvf_cache_config, host_tokens_max);
SAME(old_cache_config, kvf_cache_config, tokens_per_step_max);

/* Not inlined, so that the compiler does not compare the size with that of the type. */
__attribute__((noinline)) static void *exactly(size_t size)
{
    void *p = malloc(size);
    assert_non_null(p);
    memset(p, 0xa5, size);
    return p;
}

static kvf_runtime *open_runtime(void)
{
    const kvf_runtime_config rc = test_runtime_config();
    kvf_runtime *runtime = NULL;
    test_expect(NULL, test_runtime_open(&rc, &runtime, NULL), KVF_OK);
    return runtime;
}

static void set_geometry(old_cache_config *c)
{
    c->layers = 1;
    c->query_heads = 4;
    c->kv_heads = 2;
    c->head_dim = 64;
    c->dtype = KVF_FP32;
    c->tokens_max = 512;
}

/* A whole life of an old program: what its structs lack has the defaults. */
static void an_old_program_goes_on(void **state)
{
    old_runtime_config *rc = exactly(sizeof *rc);
    old_cache_config *cc = exactly(sizeof *cc);
    kvf_runtime *runtime = NULL;
    kvf_cache *cache = NULL;
    kvf_runtime_config_init_sized((kvf_runtime_config *)(void *)rc, sizeof *rc);
    assert_int_equal(rc->size, sizeof *rc);
    assert_int_equal(rc->isa_mask, KVF_ISA_ALL);
    rc->device = KVF_DEVICE_HOST;
    rc->threads = 2;
    rc->allow_unpinned = 1;
    test_expect(NULL, kvf_runtime_open((kvf_runtime_config *)(void *)rc, &runtime, NULL), KVF_OK);
    assert_int_equal(kvf_runtime_threads(runtime), 2);
    kvf_cache_config_init_sized((kvf_cache_config *)(void *)cc, sizeof *cc);
    assert_int_equal(cc->prefill_chunk_max, 512);
    set_geometry(cc);
    kvf_cache_config_preset((kvf_cache_config *)(void *)cc, KVF_PRESET_PRKV); /* lies behind it */
    test_expect(runtime, kvf_cache_open(runtime, (kvf_cache_config *)(void *)cc, &cache, NULL),
                KVF_OK);
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
    unsigned char *bytes = exactly(size);
    kvf_cache_config_init_sized((kvf_cache_config *)(void *)bytes, size);
    if (size >= sizeof(old_cache_config))
        set_geometry((old_cache_config *)(void *)bytes);
    if (at < size)
        bytes[at] = 1;
    const kvf_status status =
        kvf_cache_plan_make(runtime, (const kvf_cache_config *)(void *)bytes, plan, NULL);
    free(bytes);
    return status;
}

static void expect_refused(kvf_status status, const char *word)
{
    if (status != KVF_INVALID || !strstr(kvf_runtime_error(NULL)->text, word))
        fail_msg("no \"%s\" in %s: %s", word, kvf_status_name(status),
                 kvf_runtime_error(NULL)->text);
}

static void a_configuration_may_have_any_length(void **state)
{
    kvf_runtime *runtime = open_runtime();
    const size_t whole = sizeof(kvf_cache_config);
    kvf_cache_plan wanted, plan;
    test_expect(runtime, plan_sized(runtime, whole, SIZE_MAX, &wanted), KVF_OK);
    for (size_t size = sizeof(old_cache_config); size <= whole + 64; size += 8) {
        memset(&plan, 0, sizeof plan);
        test_expect(runtime, plan_sized(runtime, size, SIZE_MAX, &plan), KVF_OK);
        assert_memory_equal(&plan, &wanted, sizeof plan);
    }
    expect_refused(plan_sized(runtime, 16, SIZE_MAX, &plan), "layers = 0");
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

static void a_struct_inside_grows_as_the_last_member(void **state)
{
    kvf_runtime *runtime = open_runtime();
    kvf_blocks_plan wanted, plan;
    const size_t inner = offsetof(kvf_blocks_config, cache);
    for (size_t i = 0; i < 3; i++) { /* today's, shorter, longer */
        const size_t sizes[] = {sizeof(kvf_blocks_config), inner + sizeof(old_cache_config),
                                sizeof(kvf_blocks_config) + 24};
        kvf_blocks_config *bc = exactly(sizes[i]);
        kvf_blocks_config_init_sized(bc, sizes[i]);
        assert_int_equal(bc->cache.size, sizes[i] - inner);
        set_geometry((old_cache_config *)(void *)&bc->cache);
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

static void pruners_and_policies_may_have_any_length(void **state)
{
    const kvf_prune_shape shape = {.layers = 4, .kv_heads = 2, .query_heads = 4, .tokens_max = 512};
    const size_t longer = sizeof(kvf_prune_config) + 16;
    kvf_prune_config *pc = exactly(longer);
    kvf_prune_config_init_sized(pc, kvf_prune_policy_find("snapkv"), longer);
    assert_int_equal(kvf_prune_config_check(pc, &shape, NULL), KVF_OK);
    ((unsigned char *)pc)[longer - 1] = 1;
    expect_refused(kvf_prune_config_check(pc, &shape, NULL), "is not 0");
    ((unsigned char *)pc)[longer - 1] = 0;
    unsigned char *policy = exactly(sizeof(kvf_prune_policy) + 8);
    memset(policy, 0, sizeof(kvf_prune_policy) + 8);
    memcpy(policy, pc->policy, sizeof(kvf_prune_policy));
    ((kvf_prune_policy *)(void *)policy)->size = sizeof(kvf_prune_policy) + 8;
    pc->policy = (const kvf_prune_policy *)(void *)policy;
    assert_int_equal(kvf_prune_config_check(pc, &shape, NULL), KVF_OK);
    policy[sizeof(kvf_prune_policy)] = 1;
    expect_refused(kvf_prune_config_check(pc, &shape, NULL), "kvf_prune_policy");
    free(policy);
    free(pc);
}

static void measurements_and_saves_may_have_any_length(void **state)
{
    kvf_runtime *runtime = open_runtime();
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

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(an_old_program_goes_on),
        cmocka_unit_test(a_configuration_may_have_any_length),
        cmocka_unit_test(a_struct_inside_grows_as_the_last_member),
        cmocka_unit_test(pruners_and_policies_may_have_any_length),
        cmocka_unit_test(measurements_and_saves_may_have_any_length),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
