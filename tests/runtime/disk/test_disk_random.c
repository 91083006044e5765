/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A cache with a disk tier gives the bits of one without, for prompts, steps, forks, batches, cuts,
 * saves and restores, with a quarter of the pages in memory: under every policy and digest, and
 * under random settings. And a pool that is full.
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

/* Both sequences of each world in one call. */
static void same_batch(disk_worlds *w, const disk_pair p[2], uint32_t token)
{
    const test_tokens *t = &w->t;
    kvf_sequence *const s[2][2] = {{p[0].tier, p[1].tier}, {p[0].plain, p[1].plain}};
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
                                          .sequences = s[side],
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

/* Prompt, steps, a fork, both by turns and at once, so that each drives out the other's pages; a
 * cut, a file, and a file of the other cache. */
static void play(disk_worlds *w, uint32_t steps, uint32_t cut, const char *what)
{
    disk_pair p[2] = {disk_begin(w)};
    for (uint32_t first = 0; first < DISK_PROMPT; first += DISK_PROMPT / 2)
        disk_same_prompt(w, p[0], first, DISK_PROMPT / 2);
    disk_same_steps(w, p[0], DISK_PROMPT, steps, what);
    p[1] = disk_fork(w, p[0]);
    for (uint32_t i = 0; i < 3; i++)
        disk_same_steps(w, p[i % 2], DISK_PROMPT + DISK_STEPS * i, steps, what);
    same_batch(w, p, DISK_PROMPT + DISK_STEPS);
    if (!w->tier.config.head_mask) /* rings have lost what they held */
        disk_cut(w, p[0], DISK_PROMPT - cut);
    disk_same_steps(w, p[0], DISK_PROMPT, steps, what);
    assert_int_equal(save_now(&w->tier, p[0].tier, save_path("tier"), NULL), KVF_OK);
    assert_int_equal(save_now(&w->plain, p[0].plain, save_path("plain"), NULL), KVF_OK);
    for (uint32_t i = 0; i < 2; i++) {
        disk_end(p[1]);
        p[1] = disk_fork(w, p[0]);
        kvf_sequence_destroy(p[1].tier);
        p[1].tier = save_restore(&w->tier, save_path(i ? "plain" : "tier"), 1);
        disk_same_steps(w, p[1], DISK_PROMPT + 3, steps, what);
    }
}

/* Returns how many bundles were read; where they must, steps read pages of them, too. */
static uint64_t run(const kvf_cache_config *c, uint32_t steps, uint32_t cut, const char *what,
                    bool must)
{
    disk_worlds w;
    kvf_stats stats;
    disk_worlds_open(&w, *c, NULL);
    play(&w, steps, cut, what);
    kvf_cache_stats(w.tier.cache, &stats);
    printf("# %s: %llu of %llu bundles read, %llu KiB, %llu KiB written\n", what,
           (unsigned long long)stats.disk_reads, (unsigned long long)stats.disk_wanted,
           (unsigned long long)stats.bytes_from_disk / 1024,
           (unsigned long long)stats.bytes_to_disk / 1024);
    assert_true(stats.disk_reads == 0 || stats.disk_wait_ns > 0);
    if (must && c->head_mask && !w.tier.cache->kv_groups[0].dims.needs_mirror)
        assert_true(stats.pages_from_disk > 0); /* else slots may hold all that was chosen */
    disk_worlds_close(&w);
    return stats.disk_reads;
}

static void named(const save_case *x, kvf_transfer transfer, uint32_t bundle_bytes)
{
    kvf_cache_config c = disk_config_of(x, bundle_bytes);
    c.transfer = transfer;
    if (run(&c, DISK_STEPS, 33, x->name, true) == 0)
        fail_msg("%s: nothing was ever read from disk", x->name);
}

/* Hits are attended before misses are read; what is gathered comes from page frames. Several blocks
 * in a bundle do not end where an alignment does. */
static void named_settings_give_the_same_bits(void **state)
{
    for (const save_case *x = save_cases; x->name; x++) /* all take a minute under a sanitizer */
        if (!strstr(x->settings, "head_mask") && (!TEST_SANITIZED || x == &save_cases[4]))
            named(x, KVF_TRANSFER_AUTO, 1);
    named(&save_cases[0], KVF_TRANSFER_GATHER, 1);
    named(&save_cases[4], KVF_TRANSFER_GATHER, 11000);
    named(&disk_heads[1], KVF_TRANSFER_AUTO, 1);
    if (TEST_SANITIZED)
        return;
    named(&save_cases[4], KVF_TRANSFER_GATHER, 1);
    named(&save_cases[5], KVF_TRANSFER_GATHER, 1);
    named(&save_cases[0], KVF_TRANSFER_AUTO, 20000);
    named(&disk_heads[0], KVF_TRANSFER_GATHER, 20000);
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
        kvf_cache_config c = random_config(&r, mask);
        disk_config(&c, DISK_PROMPT, ONE_OF(&r, 1, 9000, 30000));
        if (!has_tier(&c))
            continue;
        snprintf(what, sizeof what,
                 "%u: select %d, digest %d, page %u, dim %u, kv %u, transfer %d, "
                 "mask %d, bundles %u",
                 n, c.select, c.digest, c.page_size, c.head_dim, c.kv_heads, c.transfer,
                 c.head_mask != NULL, c.disk_bundle_bytes);
        const uint32_t steps = 2 + test_random_below(&r, 6), cut = test_random_below(&r, 60);
        reads += run(&c, steps, cut, what, false);
        masked += c.head_mask != NULL;
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
    disk_pair p = disk_begin(&w);
    disk_same_prompt(&w, p, 0, DISK_PROMPT);
    assert_int_equal(save_now(&w.tier, p.tier, save_path("full"), NULL), KVF_OK);
    kvf_restore_args_init(&args);
    args.path = save_path("full");
    const uint32_t blocks = w.tier.cache->kv_groups[0].pool.free_count;
    test_expect(w.tier.runtime, kvf_sequence_restore(w.tier.cache, &args, w.tier.stream, &refused),
                KVF_FULL);
    assert_non_null(strstr(kvf_runtime_error(w.tier.runtime)->text, "host_tokens_max"));
    assert_null(refused);
    assert_int_equal(w.tier.cache->kv_groups[0].pool.free_count, blocks);
    disk_same_steps(&w, p, DISK_PROMPT, 3, "beside a restore that was refused");
    disk_cut(&w, p, DISK_PROMPT);
    kvf_sequence_destroy(p.tier);
    p.tier = save_restore(&w.tier, save_path("full"), 1);
    disk_same_steps(&w, p, DISK_PROMPT + 5, 3, "after the other has gone");
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
    return unit_run_around(NULL, save_remove_folder, named_settings_give_the_same_bits,
                           random_settings_give_the_same_bits, a_pool_that_is_full);
}
