/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A cache with a disk tier gives the same bits as one without: prompts, steps, forks, batches,
 * cuts, saves and restores, under every policy and digest, with a quarter of the pages in memory.
 * Its file is private. Settings that a tier cannot have are refused by name.
 */

#include "disk_rig.h"
#include "save_faults.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cache.h"
#include "retain.h"

#define PROMPT DISK_PROMPT
#define STEPS  DISK_STEPS
#define BRANCH 3u

/* The prompt with its outputs, chunk by chunk through all layers. */
static void same_prompt(disk_worlds *w, kvf_sequence *a, kvf_sequence *b)
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
static void same_batch(disk_worlds *w, kvf_sequence *const a[2], kvf_sequence *const b[2],
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

static void life_of(disk_worlds *w, const char *name)
{
    kvf_sequence *a[2], *b[2];
    a[0] = test_sequence(&w->tier);
    b[0] = test_sequence(&w->plain);
    same_prompt(w, a[0], b[0]);
    disk_same_steps(w, a[0], b[0], PROMPT, STEPS, name);
    test_ok(&w->tier, kvf_sequence_fork(w->tier.cache, a[0], w->tier.stream, &a[1]));
    test_ok(&w->plain, kvf_sequence_fork(w->plain.cache, b[0], w->plain.stream, &b[1]));
    disk_same_steps(w, a[1], b[1], PROMPT + STEPS, BRANCH, name);
    disk_same_steps(w, a[0], b[0], PROMPT + 2 * STEPS, STEPS, name);
    same_batch(w, a, b, PROMPT + STEPS);
    if (!w->tier.config.head_mask) { /* rings have lost what they held */
        test_ok(&w->tier, kvf_sequence_truncate(w->tier.cache, a[0], PROMPT - 33, w->tier.stream));
        test_ok(&w->plain,
                kvf_sequence_truncate(w->plain.cache, b[0], PROMPT - 33, w->plain.stream));
    }
    disk_same_steps(w, a[0], b[0], PROMPT, STEPS, name);
    kvf_sequence_destroy(a[1]);
    kvf_sequence_destroy(b[1]);
    assert_int_equal(save_now(&w->tier, a[0], save_path("tier"), NULL), KVF_OK);
    a[1] = save_restore(&w->tier, save_path("tier"), 1);
    test_ok(&w->plain, kvf_sequence_fork(w->plain.cache, b[0], w->plain.stream, &b[1]));
    disk_same_steps(w, a[1], b[1], PROMPT, STEPS, name);
    /* A cache of either kind takes a file of the other. */
    assert_int_equal(save_now(&w->plain, b[0], save_path("plain"), NULL), KVF_OK);
    kvf_sequence_destroy(a[1]);
    a[1] = save_restore(&w->tier, save_path("plain"), 1);
    disk_same_steps(w, a[1], b[0], PROMPT, STEPS, name);
    kvf_sequence_destroy(a[0]);
    kvf_sequence_destroy(b[0]);
}

static void run(const save_case *c, kvf_transfer transfer, uint32_t bundle_bytes)
{
    disk_worlds w;
    kvf_stats stats;
    kvf_cache_config config = disk_config_of(c, bundle_bytes);
    config.transfer = transfer;
    disk_worlds_open(&w, config, NULL);
    const kvf_kv_group *kv_group = &w.tier.cache->kv_groups[0];
    life_of(&w, c->name);
    kvf_cache_stats(w.tier.cache, &stats);
    printf("# %s: %llu of %llu bundles read, %llu KiB, %llu KiB written; %u page_frames for %u\n",
           c->name, (unsigned long long)stats.disk_reads, (unsigned long long)stats.disk_wanted,
           (unsigned long long)stats.bytes_from_disk / 1024,
           (unsigned long long)stats.bytes_to_disk / 1024, kv_group->dims.page_frames,
           kv_group->pool.block_count / kv_group->pool.bundle_blocks);
    if (stats.disk_reads == 0)
        fail_msg("%s: nothing was ever read from disk", c->name);
    assert_true(stats.disk_wait_ns > 0);
    if (config.head_mask &&
        !kv_group->dims.needs_mirror) /* else slots may hold all that was chosen */
        assert_true(stats.pages_from_disk > 0);
    disk_worlds_close(&w);
}

static void same_bits(void **state)
{
    for (const save_case *c = save_cases; c->name; c++) {
        kvf_cache_config config = save_config(c);
        if (config.head_mask)
            continue;
        if (TEST_SANITIZED && c != &save_cases[4]) /* which take a minute */
            continue;
        run(c, KVF_TRANSFER_AUTO, 1);
    }
}

/* Hits are attended before misses are read; what is gathered comes from page frames. */
static void same_bits_gathered(void **state)
{
    run(&save_cases[0], KVF_TRANSFER_GATHER, 1);
    if (TEST_SANITIZED)
        return;
    run(&save_cases[4], KVF_TRANSFER_GATHER, 1);
    run(&save_cases[5], KVF_TRANSFER_GATHER, 1);
}

/* Several blocks in a bundle, which does not end where an alignment does. */
static void same_bits_in_bundles(void **state)
{
    if (!TEST_SANITIZED)
        run(&save_cases[0], KVF_TRANSFER_AUTO, 20000);
    run(&save_cases[4], KVF_TRANSFER_GATHER, 11000);
}

/* ---- streaming heads ---- */

static void same_bits_with_streaming_heads(void **state)
{
    run(&disk_heads[1], KVF_TRANSFER_AUTO, 1);
    if (!TEST_SANITIZED)
        run(&disk_heads[0], KVF_TRANSFER_GATHER, 20000);
}

/* Each KV group has what it needs and a share of the rest, and no more together. */
static void memory_is_shared(void **state)
{
    const kvf_cache_config config = disk_config_of(&disk_heads[1], 1);
    for (uint32_t i = 0; i < 4; i++) {
        kvf_cache_config c = config;
        test_world w;
        c.host_bytes += i * c.host_bytes / 5;
        test_world_open(&w, NULL, &c);
        const kvf_cache_plan *plan = kvf_cache_memory(w.cache);
        uint64_t in_memory = 0, on_disk = 0;
        for (uint32_t n = 0; n < w.cache->kv_group_count; n++) {
            const kvf_kv_group *kv_group = &w.cache->kv_groups[n];
            const size_t bundle = kvf_page_pool_bundle_bytes(
                kvf_block_bytes(&kv_group->dims.paging), kv_group->dims.bundle_blocks);
            in_memory += kv_group->dims.page_frames * bundle;
            on_disk += kv_group->dims.block_count / kv_group->dims.bundle_blocks * (uint64_t)bundle;
        }
        assert_true(in_memory <= c.host_bytes && in_memory > c.host_bytes / 2);
        assert_int_equal(plan->host_kv_bytes, in_memory);
        assert_int_equal(plan->disk_bytes, on_disk);
        assert_true(on_disk > 0 && plan->disk_bundle_bytes > 0);
        test_world_close(&w);
    }
}

/* ---- the file ---- */

static void the_file_is_private(void **state)
{
    const kvf_cache_config config = disk_config_of(&save_cases[4], 1);
    const uint32_t files = save_count_files();
    test_world w;
    struct stat about;
    test_world_open(&w, NULL, &config);
    assert_int_equal(fstat(kvf_disk_tier_file(w.cache->kv_groups[0].pool.tier), &about), 0);
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
    const kvf_cache_config good = disk_config_of(&save_cases[4], 1);
    kvf_runtime *runtime = test_runtime();
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
    c.host_bytes = 1 << 30; /* all fits, and nothing would be written there */
    refused(runtime, &c, KVF_SYSTEM, "/nowhere/at/all");
    c = disk_config_of(&disk_heads[1], 1);
    c.host_bytes /= 8;
    refused(runtime, &c, KVF_INVALID, "retrieval heads each need pages in memory; give at least");
    c = disk_config_of(&disk_heads[1], 1);
    c.disk_bytes = 1 << 16;
    refused(runtime, &c, KVF_INVALID, "disk_bytes = 65536");
    c = good;
    c.disk_bundle_bytes = UINT32_MAX;
    refused(runtime, &c, KVF_INVALID, "disk_bundle_bytes");
    kvf_runtime_close(runtime);
}

/* Where nothing is said, as many whole blocks as 128 KiB need. */
static void bundles_have_128_KiB(void **state)
{
    kvf_runtime *runtime = test_runtime();
    kvf_cache_plan plan;
    kvf_cache_config c = disk_config_of(&save_cases[4], 0);
    const size_t block = 32u * 2 * c.kv_heads * c.head_dim * test_dtype_bytes(c.dtype);
    c.tokens_max = 1 << 17;
    c.host_bytes = (uint64_t)c.tokens_max / 32 * block * c.layers / 2;
    assert_int_equal(kvf_cache_plan_make(runtime, &c, &plan, NULL), KVF_OK);
    assert_int_equal(plan.block_size, 32);
    assert_true(plan.disk_bundle_bytes >= 128 << 10 &&
                plan.disk_bundle_bytes < (128 << 10) + block && plan.disk_bytes > 0);
    assert_int_equal(plan.disk_bundle_bytes % block, 0);
    kvf_runtime_close(runtime);
}

/* Some tokens are kept of a layer whose pages are on disk by then. */
static void tokens_are_kept_of_pages_on_disk(void **state)
{
    kvf_cache_config c = disk_config_of(&save_cases[4], 1);
    disk_worlds w;
    uint32_t ids[2 * PROMPT / 2];
    disk_worlds_open(&w, c, NULL);
    kvf_sequence *a = test_sequence(&w.tier), *b = test_sequence(&w.plain);
    same_prompt(&w, a, b);
    for (uint32_t i = 0; i < PROMPT; i++) /* of two KV heads */
        ids[i] = i % (PROMPT / 2) * 2 + i / (PROMPT / 2);
    for (uint32_t side = 0; side < 2; side++) {
        test_world *world = side ? &w.plain : &w.tier;
        void *work = test_alloc(kvf_keep_work_bytes(world->cache));
        for (uint32_t layer = 0; layer < w.t.layers; layer++) {
            kvf_page_pool_call(&world->cache->kv_groups[0].pool); /* as a public call does */
            test_ok(world, kvf_sequence_keep(world->cache, side ? b : a, layer, ids, PROMPT / 2,
                                             work, world->stream));
        }
        test_wait(world);
        test_release(work);
    }
    disk_same_steps(&w, a, b, PROMPT, STEPS, "kept tokens");
    disk_worlds_close(&w);
}

/* All fits: there is no file, and nothing else is different. */
static void no_tier_where_all_fits(void **state)
{
    kvf_cache_config c = disk_config_of(&save_cases[4], 1);
    test_world w;
    c.host_bytes = 1 << 30;
    test_world_open(&w, NULL, &c);
    assert_null(w.cache->kv_groups[0].pool.tier);
    assert_int_equal(kvf_cache_memory(w.cache)->disk_bytes, 0);
    test_world_close(&w);
}

int main(void)
{
    return unit_run_around(NULL, save_remove_folder, same_bits, same_bits_gathered,
                           same_bits_in_bundles, same_bits_with_streaming_heads, memory_is_shared,
                           the_file_is_private, contradictions_are_refused, bundles_have_128_KiB,
                           tokens_are_kept_of_pages_on_disk, no_tier_where_all_fits);
}
