/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A disk that takes its time: requests stay in flight until somebody waits for them, half of their
 * bytes moved. Ranges that are being written are cut, forked, freed, saved and written again; what
 * is in memory is attended and moved before a read is waited for. The bits are those of a cache
 * without a tier.
 */

#include "disk_rig.h"
#include "save_faults.h"

#include <stdatomic.h>

#include "cache.h"
#include "disk_tier.h"

/* ---- what is being written ---- */

static bool is_being_written(const kvf_cache *cache, kvf_block block)
{
    return cache->kv_groups[0]
        .pool.tier->bundles[kvf_page_pool_bundle(&cache->kv_groups[0].pool, block)]
        .is_writing;
}

/* The first token of a block that is being written, as late in the sequence as there is one; 0:
 * none is. */
static uint32_t written_token(const kvf_cache *cache, const kvf_sequence *s)
{
    uint32_t latest = 0;
    for (uint32_t layer = 0; layer < cache->config.layers; layer++)
        for (uint32_t b = 1; b < s->layers[layer].extent.sealed; b++)
            if (b > latest && is_being_written(cache, s->layers[layer].blocks[b]))
                latest = b;
    return latest * cache->kv_groups[0].dims.paging.block_size;
}

typedef struct scene {
    disk_worlds w;
    disk_pair p;
    uint32_t token; /* where a block that is being written begins */
} scene;

/* Prompts, and steps until something that can be cut off is being written; it stays so. */
static void open_scene(scene *s)
{
    const kvf_cache_config config = disk_config_of(&save_cases[4], 1);
    uint32_t first = DISK_PROMPT;
    *s = (scene){0};
    disk_worlds_open(&s->w, config, &fail_engine);
    s->p = disk_begin(&s->w);
    atomic_store(&fail_holds_writes, 1);
    disk_same_prompt(&s->w, s->p, 0, DISK_PROMPT);
    do {
        assert_true(first < DISK_PROMPT + DISK_STEPS);
        disk_same_steps(&s->w, s->p, first++, 1, "until something is written");
        s->token = written_token(s->w.tier.cache, s->p.tier);
    } while (s->token == 0);
    printf("# %u writes in flight, the latest of token %u\n",
           s->w.tier.cache->kv_groups[0].pool.tier->writes_in_flight, s->token);
}

static void close_scene(scene *s)
{
    disk_same_steps(&s->w, s->p, DISK_PROMPT + 2 * DISK_STEPS, 6, "in the end");
    atomic_store(&fail_holds_writes, 0);
    disk_same_steps(&s->w, s->p, DISK_PROMPT + 3 * DISK_STEPS, 3, "written");
    disk_worlds_close(&s->w);
}

/* ---- scenes ---- */

/* Other tokens take the place of what is cut off, before its write has ended. */
static void cut_and_go_on(uint32_t more)
{
    scene s;
    open_scene(&s);
    disk_cut(&s.w, s.p, s.token - 1 + more);
    assert_true(s.w.tier.cache->kv_groups[0].pool.tier->writes_in_flight > 0);
    disk_same_prompt(&s.w, s.p, 3, 72);
    close_scene(&s);
}

TEST(cut_off)
{
    cut_and_go_on(0);
}

/* The block that is being written comes back to the window. */
TEST(cut_through)
{
    cut_and_go_on(4);
}

/* A fork keeps what it shares while the other goes; then it is cut, and a third takes the room. */
TEST(forked_and_freed)
{
    scene s;
    open_scene(&s);
    disk_pair other = s.p;
    s.p = disk_fork(&s.w, s.p);
    disk_end(other);
    assert_true(written_token(s.w.tier.cache, s.p.tier) > 0);
    disk_same_steps(&s.w, s.p, DISK_PROMPT + DISK_STEPS, 2, "a fork");
    s.token = written_token(s.w.tier.cache, s.p.tier);
    assert_true(s.token > 0);
    disk_cut(&s.w, s.p, s.token - 1);
    other = s.p;
    s.p = disk_begin(&s.w);
    disk_same_prompt(&s.w, s.p, 5, 120);
    disk_end(s.p);
    s.p = other;
    disk_same_prompt(&s.w, s.p, 3, 40);
    close_scene(&s);
}

/* A sequence goes while it is being written, and the next one takes its blocks. */
TEST(freed)
{
    scene s;
    open_scene(&s);
    disk_end(s.p);
    assert_true(s.w.tier.cache->kv_groups[0].pool.tier->writes_in_flight > 0);
    s.p = disk_begin(&s.w);
    disk_same_prompt(&s.w, s.p, 5, 160);
    close_scene(&s);
}

/* A save reads what is being written, while that is cut off and written again. */
TEST(saved)
{
    scene s;
    kvf_sequence *kept;
    open_scene(&s);
    kvf_save *save = save_begin(&s.w.tier, s.p.tier, save_path("held"), "test");
    test_ok(&s.w.plain, kvf_sequence_fork(s.w.plain.cache, s.p.plain, s.w.plain.stream, &kept));
    assert_true(s.w.tier.cache->kv_groups[0].pool.tier->writes_in_flight > 0);
    disk_cut(&s.w, s.p, s.token - 1);
    disk_same_prompt(&s.w, s.p, 3, 72);
    assert_int_equal(kvf_save_finish(save, NULL), KVF_OK);
    disk_end(s.p);
    s.p = (disk_pair){save_restore(&s.w.tier, save_path("held"), 1), kept};
    close_scene(&s);
}

/* ---- what is not read does not wait for what is ---- */

static struct {
    const test_world *world;
    float *seen; /* partial sums: what they were before the call, and what they are */
    size_t count;
    uint64_t pages;          /* that had moved before the call */
    uint32_t calls;          /* that waited for a read */
    uint64_t attended, rest; /* splits, while reads were held */
    uint64_t moved;
} meanwhile;

static uint64_t pages_moved(const kvf_cache *cache)
{
    kvf_transfer_stats stats;
    kvf_transfer_stats_read(cache->kv_groups[0].transfer, &stats);
    return stats.pages;
}

/* Everything that the call has enqueued is done, and the read is not. */
static void look_meanwhile(void)
{
    const kvf_cache *cache = meanwhile.world->cache;
    fail_at_wait = NULL;
    assert_int_equal(kvf_stream_wait(meanwhile.world->stream), KVF_OK);
    test_copy(meanwhile.seen, cache->kv_groups[0].tables.partial_lse,
              meanwhile.count * sizeof(float));
    meanwhile.calls++;
    for (size_t i = 0; i < meanwhile.count; i++) {
        meanwhile.attended += meanwhile.seen[i] != 1234.5f;
        meanwhile.rest += meanwhile.seen[i] == 1234.5f;
    }
    meanwhile.moved += pages_moved(cache) - meanwhile.pages;
}

static void step_meanwhile(disk_worlds *w, kvf_sequence *a, uint32_t layer, uint32_t token,
                           void *out)
{
    const kvf_cache *cache = w->tier.cache;
    for (size_t i = 0; i < meanwhile.count; i++)
        meanwhile.seen[i] = 1234.5f;
    test_copy(cache->kv_groups[0].tables.partial_lse, meanwhile.seen,
              meanwhile.count * sizeof(float));
    meanwhile.pages = pages_moved(cache);
    fail_at_wait = look_meanwhile;
    test_decode(&w->tier, a, &w->t, layer, token, out, NULL);
    fail_at_wait = NULL;
    test_wait(&w->tier);
}

static void attended_meanwhile(kvf_transfer transfer)
{
    disk_worlds w;
    kvf_cache_config config = disk_config_of(&save_cases[4], 1);
    config.transfer = test_transfer(transfer);
    config.budget_tokens = 96;
    disk_worlds_open(&w, config, &fail_engine);
    const kvf_cache *cache = w.tier.cache;
    const size_t row = test_steps_bytes(&w.t, 1) / w.t.layers;
    const uint32_t split = kvf_split(cache->kv_groups[0].dims.spans_max,
                                     cache->kv_groups[0].dims.paging.shape.page_size);
    const disk_pair p = disk_begin(&w);
    char *out = test_alloc(2 * row);
    memset(&meanwhile, 0, sizeof meanwhile);
    meanwhile.world = &w.tier;
    meanwhile.count = (size_t)kvf_div_ceil_u32(cache->kv_groups[0].dims.spans_max, split) *
                      w.tier.config.query_heads;
    meanwhile.seen = test_alloc(meanwhile.count * sizeof(float));
    disk_same_prompt(&w, p, 0, DISK_PROMPT);
    atomic_store(&fail_holds_reads, 1);
    for (uint32_t token = DISK_PROMPT; token < DISK_PROMPT + 2 * DISK_STEPS; token++)
        for (uint32_t layer = 0; layer < w.t.layers; layer++) {
            step_meanwhile(&w, p.tier, layer, token, out);
            test_decode(&w.plain, p.plain, &w.t, layer, token, out + row, NULL);
            test_wait(&w.plain);
            assert_memory_equal(out, out + row, row);
        }
    atomic_store(&fail_holds_reads, 0);
    printf("# %s: %u calls waited; %llu partial results before, %llu after; %llu pages moved\n",
           kvf_transfer_name(config.transfer), meanwhile.calls,
           (unsigned long long)meanwhile.attended, (unsigned long long)meanwhile.rest,
           (unsigned long long)meanwhile.moved);
    assert_true(meanwhile.calls > 0 && meanwhile.attended > 0 && meanwhile.rest > 0);
    if (config.transfer == KVF_TRANSFER_GATHER)
        assert_true(meanwhile.moved > 0);
    test_release(meanwhile.seen);
    test_release(out);
    disk_worlds_close(&w);
}

TEST(hits_do_not_wait)
{
    attended_meanwhile(KVF_TRANSFER_DIRECT);
}

TEST(misses_in_memory_do_not_wait)
{
    attended_meanwhile(KVF_TRANSFER_GATHER);
}

TESTS_RUN_BETWEEN(NULL, save_remove_folder)
