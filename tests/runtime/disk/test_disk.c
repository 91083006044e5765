/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Memory and the private file of a cache with a disk tier; tokens that are kept of pages on disk;
 * and settings that a tier cannot have, which are refused by name. That nothing else is different
 * is the business of test_disk_random.c.
 */

#include "disk_rig.h"
#include "save_faults.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cache.h"

/* Each KV group has what it needs and a share of the rest, and no more together. */
TEST(memory_is_shared)
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

TEST(the_file_is_private)
{
    const kvf_cache_config config = disk_config_of(&save_cases[4], 1);
    const uint32_t files = save_count_files();
    test_world w;
    struct stat about;
    test_world_open(&w, NULL, &config);
    assert_int_equal(fstat(w.cache->kv_groups[0].pool.tier->file.buffered, &about), 0);
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

TEST(contradictions_are_refused)
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
TEST(bundles_have_128_KiB)
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

/* All fits: there is no file, and nothing else is different. */
TEST(no_tier_where_all_fits)
{
    kvf_cache_config c = disk_config_of(&save_cases[4], 1);
    test_world w;
    c.host_bytes = 1 << 30;
    test_world_open(&w, NULL, &c);
    assert_null(w.cache->kv_groups[0].pool.tier);
    assert_int_equal(kvf_cache_memory(w.cache)->disk_bytes, 0);
    test_world_close(&w);
}

TESTS_RUN_BETWEEN(NULL, save_remove_folder)
