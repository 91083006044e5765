/* SPDX-License-Identifier: Apache-2.0 */

/* Caches with a disk tier, and the same without; see the header. */

#include "disk_rig.h"

#include "cache.h"

void disk_config(kvf_cache_config *config, uint32_t tokens, uint32_t bundle_bytes)
{
    kvf_runtime *runtime = test_runtime();
    kvf_error error = {0};
    config->disk_path = save_folder();
    config->disk_bundle_bytes = bundle_bytes;
    config->transfer = test_transfer(config->transfer);
    /* The least that is taken, as the refusal says. */
    config->host_bytes = 1;
    assert_int_equal(kvf_cache_plan_make(runtime, config, &(kvf_cache_plan){0}, &error),
                     KVF_INVALID);
    const char *least = strstr(error.text, "give at least ");
    if (!least)
        fail_msg("%s", error.text);
    const uint64_t bytes = strtoull(least + strlen("give at least "), NULL, 10);
    config->host_bytes = (uint64_t)tokens * config->layers * config->kv_heads * config->head_dim *
                         2 * test_dtype_bytes(config->dtype) / 4;
    if (config->host_bytes < bytes)
        config->host_bytes = bytes;
    kvf_runtime_close(runtime);
}

#define HEADS "refresh_interval=5 head_mask=1011001101101110 streaming_sink=5 streaming_recent=21"

const save_case disk_heads[2] = {
    {"streaming heads", HEADS},
    {"streaming heads, dynamic", "digest=codes select=dynamic page_size=4 dtype=fp16 " HEADS}};

kvf_cache_config disk_config_of(const save_case *c, uint32_t bundle_bytes)
{
    kvf_cache_config config = save_config(c);
    config.layers = TEST_SANITIZED && test_on_cuda() ? 3 : 8;
    config.tokens_max = 256;
    disk_config(&config, 2 * (DISK_PROMPT + DISK_STEPS), bundle_bytes);
    return config;
}

void disk_worlds_open(disk_worlds *w, kvf_cache_config config, const kvf_io_ops *engine)
{
    kvf_runtime_config rc = test_runtime_config();
    test_hooks.io_engine = engine;
    test_world_open(&w->tier, &rc, &config);
    assert_true(w->tier.cache->plan.disk_bytes > 0);
    config.disk_path = NULL;
    config.host_bytes = config.disk_bundle_bytes = 0;
    test_world_open(&w->plain, NULL, &config);
    assert_int_equal(w->plain.cache->plan.disk_bytes, 0);
    test_tokens_make(
        &w->t, &config,
        &(test_tokens_spec){
            .count = DISK_PROMPT + 4 * DISK_STEPS, .seed = 7, .sharpness = 2.0f, .topics = 5});
}

void disk_worlds_check(disk_worlds *w)
{
    test_wait(&w->tier);
    test_wait(&w->plain);
    const kvf_cache *caches[] = {w->tier.cache, w->plain.cache};
    for (uint32_t n = 0; n < 2 * caches[0]->kv_group_count; n++) {
        const kvf_kv_group *kv_group = &caches[n % 2]->kv_groups[n / 2];
        assert_true(kvf_page_pool_is_valid(&kv_group->pool));
        assert_true(test_residency_is_valid(&kv_group->residency));
        assert_true(!kv_group->pool.tier || kvf_disk_tier_is_valid(kv_group->pool.tier));
    }
    assert_int_equal(w->tier.cache->broken, KVF_OK);
}

void disk_worlds_close(disk_worlds *w)
{
    disk_worlds_check(w);
    test_world_close(&w->tier);
    test_close(&w->plain, &w->t);
}

disk_pair disk_begin(disk_worlds *w)
{
    return (disk_pair){test_sequence(&w->tier), test_sequence(&w->plain)};
}

disk_pair disk_fork(disk_worlds *w, disk_pair p)
{
    disk_pair child = {NULL, NULL};
    test_ok(&w->tier, kvf_sequence_fork(w->tier.cache, p.tier, w->tier.stream, &child.tier));
    test_ok(&w->plain, kvf_sequence_fork(w->plain.cache, p.plain, w->plain.stream, &child.plain));
    return child;
}

void disk_cut(disk_worlds *w, disk_pair p, uint32_t tokens)
{
    test_ok(&w->tier, kvf_sequence_truncate(w->tier.cache, p.tier, tokens, w->tier.stream));
    test_ok(&w->plain, kvf_sequence_truncate(w->plain.cache, p.plain, tokens, w->plain.stream));
}

void disk_end(disk_pair p)
{
    kvf_sequence_destroy(p.tier);
    kvf_sequence_destroy(p.plain);
}

void disk_same_prompt(disk_worlds *w, disk_pair p, uint32_t first, uint32_t count)
{
    const size_t bytes = test_steps_bytes(&w->t, count) / w->t.layers;
    char *out[2] = {test_alloc(bytes), test_alloc(bytes)};
    for (uint32_t layer = 0; layer < w->t.layers; layer++) {
        const test_range range = {.layer = layer, .first = first, .count = count, .chunk = 40};
        test_prefill(&w->tier, p.tier, &w->t, &range, out[0]);
        test_prefill(&w->plain, p.plain, &w->t, &range, out[1]);
        test_wait(&w->tier);
        test_wait(&w->plain);
        assert_memory_equal(out[0], out[1], bytes);
    }
    test_release(out[0]);
    test_release(out[1]);
}

void disk_same_steps(disk_worlds *w, disk_pair p, uint32_t first, uint32_t count, const char *what)
{
    void *got = test_steps(&w->tier, p.tier, &w->t, first, count);
    void *wanted = test_steps(&w->plain, p.plain, &w->t, first, count);
    if (memcmp(got, wanted, test_steps_bytes(&w->t, count)) != 0)
        fail_msg("%s: other bits", what);
    free(got);
    free(wanted);
}
