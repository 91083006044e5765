/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Random settings: whatever is allowed gives the bits with a disk tier that it gives without, for a
 * prompt, steps, a fork, a cut, a save and a restore. And a pool that is full.
 *
 * test_runtime_disk_random [SETTINGS [SEED]]     24 settings where nothing else is said
 */

#include "disk_rig.h"

#include "cache.h"

static uint32_t settings = 24;
static uint64_t seed = 1;

static uint32_t one_of(test_random *r, uint32_t count, const uint32_t *values)
{
    return values[test_random_below(r, count)];
}

#define ONE_OF(r, ...)                                                                             \
    one_of((r), sizeof((uint32_t[]){__VA_ARGS__}) / sizeof(uint32_t), (uint32_t[]){__VA_ARGS__})

static void set_policy(kvf_cache_config *c, test_random *r)
{
    c->select = (kvf_select)ONE_OF(r, KVF_SELECT_HYBRID, KVF_SELECT_HYBRID, KVF_SELECT_DYNAMIC,
                                   KVF_SELECT_DYNAMIC, KVF_SELECT_STATIC, KVF_SELECT_STREAMING,
                                   KVF_SELECT_QUEST, KVF_SELECT_ARKVALE, KVF_SELECT_ORACLE,
                                   KVF_SELECT_FULL);
    c->static_ratio = test_random_below(r, 3) ? 0.25f : KVF_STATIC_RATIO_AUTO;
    c->refresh = (kvf_refresh)test_random_below(r, 2);
    c->fill = (kvf_fill)test_random_below(r, 2);
    c->refresh_interval = 3 + test_random_below(r, 6);
    c->digest = (kvf_digest_kind)test_random_below(r, 4);
    c->group_reduce = (kvf_group_reduce)test_random_below(r, 2);
    c->page_size = ONE_OF(r, 1, 4, 8, 32, 64);
    c->budget_tokens =
        c->sink_tokens + c->local_tokens + 2 * c->page_size + 63 + test_random_below(r, 64);
    c->verify_interval = test_random_below(r, 4) ? 0 : 3;
}

static kvf_cache_config random_config(test_random *r, uint8_t mask[32])
{
    kvf_cache_config c = test_config_small();
    c.layers = 2 + test_random_below(r, 5);
    c.kv_heads = 1 + test_random_below(r, 4);
    c.query_heads = c.kv_heads * ONE_OF(r, 1, 2, 4);
    c.head_dim = ONE_OF(r, 16, 32, 64);
    if (test_on_cuda() && c.head_dim == 16) /* which it has no products for */
        c.head_dim = 96;
    c.dtype = (kvf_dtype)test_random_below(r, 3);
    c.sequences_max = 3;
    c.tokens_max = 256;
    c.local_tokens = 1 + test_random_below(r, 24);
    set_policy(&c, r);
    c.transfer = (kvf_transfer)ONE_OF(r, KVF_TRANSFER_AUTO, KVF_TRANSFER_DIRECT,
                                      KVF_TRANSFER_GATHER, KVF_TRANSFER_EACH);
    for (uint32_t i = 0; i < c.layers * c.kv_heads; i++)
        mask[i] = i == 0 || test_random_below(r, 3) > 0;
    c.head_mask = test_random_below(r, 3) ? NULL : mask;
    c.streaming_sink = 5;
    c.streaming_recent = 21;
    return c;
}

static void cut_both(disk_worlds *w, kvf_sequence *a, kvf_sequence *b, uint32_t tokens)
{
    if (w->tier.config.head_mask)
        return;
    test_ok(&w->tier, kvf_sequence_truncate(w->tier.cache, a, tokens, w->tier.stream));
    test_ok(&w->plain, kvf_sequence_truncate(w->plain.cache, b, tokens, w->plain.stream));
}

static void play(disk_worlds *w, test_random *r, const char *what)
{
    const uint32_t steps = 2 + test_random_below(r, 6);
    kvf_sequence *a[2] = {test_sequence(&w->tier), NULL};
    kvf_sequence *b[2] = {test_sequence(&w->plain), NULL};
    save_prefill(&w->tier, a[0], &w->t, DISK_PROMPT);
    save_prefill(&w->plain, b[0], &w->t, DISK_PROMPT);
    disk_same_steps(w, a[0], b[0], DISK_PROMPT, steps, what);
    test_ok(&w->tier, kvf_sequence_fork(w->tier.cache, a[0], w->tier.stream, &a[1]));
    test_ok(&w->plain, kvf_sequence_fork(w->plain.cache, b[0], w->plain.stream, &b[1]));
    for (uint32_t i = 0; i < 3; i++) /* by turns, so that each drives out the other's pages */
        disk_same_steps(w, a[i % 2], b[i % 2], DISK_PROMPT + 10 * i, steps, what);
    cut_both(w, a[0], b[0], DISK_PROMPT - test_random_below(r, 60));
    disk_same_steps(w, a[0], b[0], DISK_PROMPT, steps, what);
    assert_int_equal(save_now(&w->tier, a[0], save_path("random"), NULL), KVF_OK);
    kvf_sequence_destroy(a[0]);
    disk_same_steps(w, a[1], b[1], DISK_PROMPT + 7, steps, what);
    a[0] = save_restore(&w->tier, save_path("random"), 1);
    disk_same_steps(w, a[0], b[0], DISK_PROMPT + 3, steps, what);
}

/* A call may need all there is. */
static bool has_tier(const kvf_cache_config *c)
{
    kvf_runtime *runtime = test_runtime();
    kvf_cache_plan plan;
    assert_int_equal(kvf_cache_plan_make(runtime, c, &plan, NULL), KVF_OK);
    kvf_runtime_close(runtime);
    return plan.disk_bytes > 0;
}

static void random_settings_give_the_same_bits(void **state)
{
    test_random r = {seed};
    uint64_t reads = 0, masked = 0;
    test_seed_print(__func__, seed);
    const uint32_t rounds = TEST_SANITIZED ? settings / (test_on_cuda() ? 16 : 6) : settings;
    for (uint32_t n = 0; n < rounds; n++) {
        uint8_t mask[32];
        char what[160];
        disk_worlds w;
        kvf_stats stats;
        kvf_cache_config c = random_config(&r, mask);
        disk_config(&c, DISK_PROMPT, ONE_OF(&r, 1, 9000, 30000));
        if (!has_tier(&c))
            continue;
        snprintf(what, sizeof what,
                 "%u: select %d, digest %d, page %u, dim %u, kv %u, transfer %d, "
                 "mask %d, bundles %u",
                 n, c.select, c.digest, c.page_size, c.head_dim, c.kv_heads, c.transfer,
                 c.head_mask != NULL, c.disk_bundle_bytes);
        disk_worlds_open(&w, c, NULL);
        play(&w, &r, what);
        kvf_cache_stats(w.tier.cache, &stats);
        reads += stats.disk_reads;
        masked += c.head_mask != NULL;
        disk_worlds_close(&w);
    }
    printf("# %llu bundles read; %llu head masks\n", (unsigned long long)reads,
           (unsigned long long)masked);
    assert_true(reads > 0);
}

/* A restore that finds no room is refused and changes nothing; once a sequence has gone, it is
 * made. */
static void a_pool_that_is_full(void **state)
{
    disk_worlds w;
    kvf_cache_config c = disk_config_of(&save_cases[4], 1);
    kvf_restore_args args;
    kvf_sequence *refused = NULL;
    c.host_tokens_max = DISK_PROMPT + 20;
    disk_worlds_open(&w, c, NULL);
    kvf_sequence *a = test_sequence(&w.tier), *b = test_sequence(&w.plain);
    save_prefill(&w.tier, a, &w.t, DISK_PROMPT);
    save_prefill(&w.plain, b, &w.t, DISK_PROMPT);
    assert_int_equal(save_now(&w.tier, a, save_path("full"), NULL), KVF_OK);
    kvf_restore_args_init(&args);
    args.path = save_path("full");
    const uint32_t blocks = w.tier.cache->kv_groups[0].pool.free_count;
    test_expect(w.tier.runtime, kvf_sequence_restore(w.tier.cache, &args, w.tier.stream, &refused),
                KVF_FULL);
    assert_non_null(strstr(kvf_runtime_error(w.tier.runtime)->text, "host_tokens_max"));
    assert_null(refused);
    assert_int_equal(w.tier.cache->kv_groups[0].pool.free_count, blocks);
    disk_same_steps(&w, a, b, DISK_PROMPT, 3, "beside a restore that was refused");
    cut_both(&w, a, b, DISK_PROMPT);
    kvf_sequence_destroy(a);
    a = save_restore(&w.tier, save_path("full"), 1);
    disk_same_steps(&w, a, b, DISK_PROMPT + 5, 3, "after the other has gone");
    disk_worlds_close(&w);
}

int main(int argc, char **argv)
{
    if (TEST_SANITIZED && test_on_cuda())
        seed = 4; /* of which the one setting reads much */
    if (argc > 1)
        settings = (uint32_t)strtoul(argv[1], NULL, 10);
    if (argc > 2)
        seed = strtoull(argv[2], NULL, 10);
    return unit_run_around(NULL, save_remove_folder, random_settings_give_the_same_bits,
                           a_pool_that_is_full);
}
