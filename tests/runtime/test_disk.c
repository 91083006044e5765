/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A cache with a disk tier gives the same bits as one without: prompts, steps, forks, batches,
 * cuts, saves and restores, under every policy and digest, with a quarter of the pages in memory.
 * Its file is private. What a tier cannot do is refused by name.
 */

#include "disk_rig.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cache.h"

#define PROMPT 170u
#define STEPS  14u
#define BRANCH 3u

typedef struct two_worlds {
    test_world tier, plain;
    test_tokens t;
} two_worlds;

static kvf_cache_config config_of(const save_case *c, uint32_t bundle_bytes)
{
    kvf_cache_config config = save_config(c);
    config.layers = 8;
    config.tokens_max = 256;
    config.speculate = 0;
    disk_config(&config, 2 * (PROMPT + STEPS), bundle_bytes);
    return config;
}

static void open_worlds(two_worlds *w, kvf_cache_config config)
{
    test_world_open(&w->tier, NULL, &config);
    assert_non_null(w->tier.cache->pool.tier);
    config.disk_path = NULL;
    config.host_bytes = config.disk_bundle_bytes = 0;
    test_world_open(&w->plain, NULL, &config);
    assert_null(w->plain.cache->pool.tier);
    test_tokens_make(&w->t, &config,
                     &(test_tokens_spec){
                         .count = PROMPT + 4 * STEPS, .seed = 7, .sharpness = 2.0f, .topics = 5});
}

static void close_worlds(two_worlds *w)
{
    const kvf_page_pool *pool = &w->tier.cache->pool;
    test_wait(&w->tier);
    assert_true(kvf_page_pool_is_valid(pool));
    assert_true(kvf_disk_tier_is_valid(pool->tier));
    test_world_close(&w->tier);
    test_world_close(&w->plain);
    test_tokens_free(&w->t);
}

/* The same steps in both give the same bits. */
static void same_steps(two_worlds *w, kvf_sequence *a, kvf_sequence *b, uint32_t first,
                       uint32_t count, const char *what)
{
    void *got = save_decode(&w->tier, a, &w->t, first, count);
    void *wanted = save_decode(&w->plain, b, &w->t, first, count);
    if (memcmp(got, wanted, save_decode_bytes(&w->t, count)) != 0)
        fail_msg("%s: other bits", what);
    free(got);
    free(wanted);
}

/* The prompt with its outputs, chunk by chunk through all layers. */
static void same_prompt(two_worlds *w, kvf_sequence *a, kvf_sequence *b)
{
    const size_t bytes =
        (size_t)PROMPT * w->t.query_heads * w->t.head_dim * test_dtype_bytes(w->t.dtype);
    char *out[2] = {test_alloc(bytes), test_alloc(bytes)};
    for (uint32_t first = 0; first < PROMPT; first += 85)
        for (uint32_t layer = 0; layer < w->t.layers; layer++) {
            const test_range range = {.layer = layer, .first = first, .count = 85, .chunk = 40};
            test_prefill(&w->tier, a, &w->t, &range, out[0]);
            test_prefill(&w->plain, b, &w->t, &range, out[1]);
            test_wait(&w->tier);
            test_wait(&w->plain);
            assert_memory_equal(out[0], out[1], bytes);
        }
    test_release(out[0]);
    test_release(out[1]);
}

/* Both sequences of each world in one call. */
static void same_batch(two_worlds *w, kvf_sequence *const a[2], kvf_sequence *const b[2],
                       uint32_t token)
{
    const test_tokens *t = &w->t;
    const size_t q = (size_t)t->query_heads * t->head_dim * test_dtype_bytes(t->dtype);
    const size_t k = (size_t)t->kv_heads * t->head_dim * test_dtype_bytes(t->dtype);
    char *in = test_alloc(2 * (q + 2 * k)), *out = test_alloc(4 * q);
    for (uint32_t layer = 0; layer < t->layers; layer++) {
        for (uint32_t i = 0; i < 2; i++) {
            memcpy(in + i * q, test_q(t, layer, token + i), q);
            memcpy(in + 2 * q + i * k, test_k(t, layer, token + i), k);
            memcpy(in + 2 * q + (2 + i) * k, test_v(t, layer, token + i), k);
        }
        for (uint32_t side = 0; side < 2; side++) {
            test_world *world = side ? &w->plain : &w->tier;
            const kvf_decode_args args = {.layer = layer,
                                          .batch = 2,
                                          .sequences = side ? b : a,
                                          .q = in,
                                          .k = in + 2 * q,
                                          .v = in + 2 * q + 2 * k,
                                          .out = out + side * 2 * q};
            test_ok(world, kvf_decode(world->cache, &args, world->stream));
            test_wait(world);
        }
        assert_memory_equal(out, out + 2 * q, 2 * q);
    }
    test_release(in);
    test_release(out);
}

static void life_of(two_worlds *w, const char *name)
{
    kvf_sequence *a[2], *b[2];
    a[0] = test_sequence(&w->tier);
    b[0] = test_sequence(&w->plain);
    same_prompt(w, a[0], b[0]);
    same_steps(w, a[0], b[0], PROMPT, STEPS, name);
    test_ok(&w->tier, kvf_sequence_fork(w->tier.cache, a[0], w->tier.stream, &a[1]));
    test_ok(&w->plain, kvf_sequence_fork(w->plain.cache, b[0], w->plain.stream, &b[1]));
    same_steps(w, a[1], b[1], PROMPT + STEPS, BRANCH, name);
    same_steps(w, a[0], b[0], PROMPT + 2 * STEPS, STEPS, name);
    same_batch(w, a, b, PROMPT + STEPS);
    test_ok(&w->tier, kvf_sequence_truncate(w->tier.cache, a[0], PROMPT - 33, w->tier.stream));
    test_ok(&w->plain, kvf_sequence_truncate(w->plain.cache, b[0], PROMPT - 33, w->plain.stream));
    same_steps(w, a[0], b[0], PROMPT, STEPS, name);
    kvf_sequence_destroy(a[1]);
    kvf_sequence_destroy(b[1]);
    assert_int_equal(save_now(&w->tier, a[0], save_path("tier"), NULL), KVF_OK);
    a[1] = save_restore(&w->tier, save_path("tier"), 1);
    test_ok(&w->plain, kvf_sequence_fork(w->plain.cache, b[0], w->plain.stream, &b[1]));
    same_steps(w, a[1], b[1], PROMPT, STEPS, name);
    /* A cache of either kind takes a file of the other. */
    assert_int_equal(save_now(&w->plain, b[0], save_path("plain"), NULL), KVF_OK);
    kvf_sequence_destroy(a[1]);
    a[1] = save_restore(&w->tier, save_path("plain"), 1);
    same_steps(w, a[1], b[0], PROMPT, STEPS, name);
    kvf_sequence_destroy(a[0]);
    kvf_sequence_destroy(b[0]);
}

static void run(const save_case *c, kvf_transfer transfer, uint32_t bundle_bytes)
{
    two_worlds w;
    kvf_stats stats;
    kvf_cache_config config = config_of(c, bundle_bytes);
    config.transfer = transfer;
    open_worlds(&w, config);
    life_of(&w, c->name);
    kvf_cache_stats(w.tier.cache, &stats);
    printf("# %s: %llu of %llu bundles read, %llu KiB, %llu KiB written; %u berths for %u\n",
           c->name, (unsigned long long)stats.disk_reads, (unsigned long long)stats.disk_wanted,
           (unsigned long long)stats.bytes_from_disk / 1024,
           (unsigned long long)stats.bytes_to_disk / 1024, w.tier.cache->dims.berths,
           w.tier.cache->pool.block_count / w.tier.cache->pool.bundle_blocks);
    if (stats.disk_reads == 0)
        fail_msg("%s: nothing was ever read from disk", c->name);
    close_worlds(&w);
}

static void same_bits(void **state)
{
    (void)state;
    for (const save_case *c = save_cases; c->name; c++) {
        kvf_cache_config config = save_config(c);
        if (config.head_mask || config.speculate)
            continue;
        if (TEST_SANITIZED && c != &save_cases[4]) /* which take a minute */
            continue;
        run(c, KVF_TRANSFER_AUTO, 1);
    }
}

/* Hits are attended before misses are read; what is gathered comes from berths. */
static void same_bits_gathered(void **state)
{
    (void)state;
    run(&save_cases[0], KVF_TRANSFER_GATHER, 1);
    if (TEST_SANITIZED)
        return;
    run(&save_cases[4], KVF_TRANSFER_GATHER, 1);
    run(&save_cases[5], KVF_TRANSFER_GATHER, 1);
}

/* Several blocks in a bundle, which does not end where an alignment does. */
static void same_bits_in_bundles(void **state)
{
    (void)state;
    if (!TEST_SANITIZED)
        run(&save_cases[0], KVF_TRANSFER_AUTO, 20000);
    run(&save_cases[4], KVF_TRANSFER_GATHER, 11000);
}

/* ---- the file ---- */

static void the_file_is_private(void **state)
{
    (void)state;
    const kvf_cache_config config = config_of(&save_cases[4], 1);
    const uint32_t files = save_count_files();
    test_world w;
    struct stat about;
    test_world_open(&w, NULL, &config);
    assert_int_equal(fstat(kvf_disk_tier_file(w.cache->pool.tier), &about), 0);
    assert_int_equal(about.st_mode & 07777, 0600);
    assert_int_equal(about.st_nlink, 0);
    assert_int_equal((uint64_t)about.st_size, kvf_cache_memory(w.cache)->disk_bytes);
    assert_int_equal(save_count_files(), files);
    test_world_close(&w);
}

/* ---- refusals ---- */

static void refused(kvf_runtime *runtime, const kvf_cache_config *config, kvf_status wanted,
                    const char *word)
{
    kvf_cache *cache = NULL;
    kvf_error error = {0};
    const uint64_t live = runtime->context->live_bytes;
    assert_int_equal(kvf_cache_open(runtime, config, &cache, &error), wanted);
    assert_null(cache);
    if (!strstr(error.text, word))
        fail_msg("%s: %s", word, error.text);
    assert_int_equal(runtime->context->live_bytes, live);
}

static void contradictions_are_refused(void **state)
{
    (void)state;
    static const uint8_t mask[16] = {1, 0, 1, 1};
    const kvf_cache_config good = config_of(&save_cases[4], 1);
    kvf_runtime_config rc = test_runtime_config();
    kvf_runtime *runtime = NULL;
    assert_int_equal(test_runtime_open(&rc, &runtime, NULL), KVF_OK);
    kvf_cache_config c = good;
    c.disk_path = NULL;
    refused(runtime, &c, KVF_INVALID, "host_bytes = ");
    c = good;
    c.host_bytes = 0;
    refused(runtime, &c, KVF_INVALID, "host_bytes = 0");
    c = good;
    c.host_bytes /= 8;
    refused(runtime, &c, KVF_INVALID, "give at least");
    c = good;
    c.disk_bytes = 1 << 20;
    refused(runtime, &c, KVF_INVALID, "disk_bytes = 1048576");
    c = good;
    c.disk_path = "/nowhere/at/all";
    refused(runtime, &c, KVF_SYSTEM, "/nowhere/at/all");
    c = good;
    c.head_mask = mask;
    refused(runtime, &c, KVF_UNSUPPORTED, "head_mask");
    c = good;
    c.speculate = 1;
    refused(runtime, &c, KVF_UNSUPPORTED, "speculate");
    c = good;
    c.disk_bundle_bytes = UINT32_MAX;
    refused(runtime, &c, KVF_INVALID, "disk_bundle_bytes");
    kvf_runtime_close(runtime);
}

/* All fits: there is no file, and nothing else is different. */
static void no_tier_where_all_fits(void **state)
{
    (void)state;
    kvf_cache_config c = config_of(&save_cases[4], 1);
    test_world w;
    c.host_bytes = 1 << 30;
    test_world_open(&w, NULL, &c);
    assert_null(w.cache->pool.tier);
    assert_int_equal(kvf_cache_memory(w.cache)->disk_bytes, 0);
    test_world_close(&w);
}

static void lists_are_refused(void **state)
{
    (void)state;
    const kvf_cache_config config = config_of(&save_cases[4], 1);
    test_world w;
    test_tokens t;
    test_world_open(&w, NULL, &config);
    test_tokens_make(&t, &config, &(test_tokens_spec){.count = 40, .seed = 3});
    kvf_sequence *s = test_sequence(&w);
    save_prefill(&w, s, &t, 40);
    int32_t *memory = test_alloc(4096);
    char *out = test_alloc(4096);
    const kvf_page_lists lists = {
        .indptr = memory, .indices = memory, .capacity = 1000, .last_page_len = memory};
    const kvf_decode_args args = {.batch = 1,
                                  .sequences = &s,
                                  .q = test_q(&t, 0, 0),
                                  .k = test_k(&t, 0, 0),
                                  .v = test_v(&t, 0, 0),
                                  .out = out};
    test_expect(w.runtime, kvf_select_pages(w.cache, &args, &lists, w.stream), KVF_UNSUPPORTED);
    test_expect(w.runtime, kvf_attend_pages(w.cache, &args, &lists, w.stream), KVF_UNSUPPORTED);
    assert_null(kvf_page_address(s, 0, 0, 0));
    test_release(memory);
    test_release(out);
    test_tokens_free(&t);
    test_world_close(&w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(same_bits),
        cmocka_unit_test(same_bits_gathered),
        cmocka_unit_test(same_bits_in_bundles),
        cmocka_unit_test(the_file_is_private),
        cmocka_unit_test(contradictions_are_refused),
        cmocka_unit_test(no_tier_where_all_fits),
        cmocka_unit_test(lists_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, save_remove_folder);
}
