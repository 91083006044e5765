/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A cache with a disk tier, with a quarter of the pages in memory, gives the bits of one without
 * through any prompts, steps, batches, forks, cuts, ends, saves and restores: under every policy
 * and digest, and under random settings. And a pool that is full.
 *
 * test_runtime_disk_random [SETTINGS [SEED]]     24 settings where nothing else is said
 */

#include "disk_rig.h"

#include "cache.h"

static uint32_t settings = 24;
static uint64_t seed = 1;
static uint32_t restored;

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
    test_rows rows;
    test_rows_open(&rows, &w->tier.config, 4);
    for (uint32_t layer = 0; layer < t->layers; layer++) {
        for (uint32_t i = 0; i < 4; i++)
            test_rows_put(&rows, i, t, layer, token + i % 2);
        for (uint32_t side = 0; side < 2; side++) {
            test_world *world = side ? &w->plain : &w->tier;
            const kvf_decode_args args = test_rows_args(&rows, side * 2, s[side], 2, layer);
            test_ok(world, kvf_decode(world->cache, &args, world->stream));
            test_wait(world);
        }
        assert_memory_equal(rows.out, rows.out + 2 * rows.out_bytes, 2 * rows.out_bytes);
    }
    test_rows_close(&rows);
}

/* Two sequences of each cache, which drive out each other's pages, and a file. */
typedef struct life {
    disk_worlds w;
    test_random r;
    disk_pair p[2];
    uint32_t lengths[2];
    kvf_save *save;      /* under way */
    kvf_sequence *saved; /* what the file must give; NULL = there is none */
    uint32_t saved_length, restored;
} life;

static void finish(life *x)
{
    if (x->save)
        assert_int_equal(kvf_save_finish(x->save, NULL), KVF_OK);
    x->save = NULL;
}

/* The file of either cache is written while its sequence goes on, is cut or ends. */
static void save(life *x, uint32_t i)
{
    finish(x);
    kvf_sequence_destroy(x->saved);
    if (test_random_below(&x->r, 2))
        x->save = save_begin(&x->w.tier, x->p[i].tier, save_path("life"), "test");
    else
        x->save = save_begin(&x->w.plain, x->p[i].plain, save_path("life"), "test");
    test_world *plain = &x->w.plain;
    test_ok(plain, kvf_sequence_fork(plain->cache, x->p[i].plain, plain->stream, &x->saved));
    x->saved_length = x->lengths[i];
}

/* By what the file gives, or by a prompt. */
static void replace(life *x, uint32_t i)
{
    disk_end(x->p[i]);
    if (x->saved && test_random_below(&x->r, 3)) {
        test_world *plain = &x->w.plain;
        finish(x);
        x->p[i].tier = save_restore(&x->w.tier, save_path("life"), 1);
        test_ok(plain, kvf_sequence_fork(plain->cache, x->saved, plain->stream, &x->p[i].plain));
        x->lengths[i] = x->saved_length;
        x->restored++;
    } else {
        x->p[i] = disk_begin(&x->w);
        for (uint32_t first = 0; first < DISK_PROMPT; first += DISK_PROMPT / 2)
            disk_same_prompt(&x->w, x->p[i], first, DISK_PROMPT / 2);
        x->lengths[i] = DISK_PROMPT;
    }
}

static void fork_other(life *x, uint32_t i)
{
    disk_end(x->p[!i]);
    x->p[!i] = disk_fork(&x->w, x->p[i]);
    x->lengths[!i] = x->lengths[i];
}

/* Every fifth one replaces a sequence, mostly by the file that the one before it has begun. */
static void one_event(life *x, uint32_t n, uint32_t steps, const char *what)
{
    const uint32_t i = test_random_below(&x->r, 2);
    const uint32_t token = test_random_below(&x->r, x->w.t.count - DISK_STEPS);
    const uint32_t event = n % 5 == 4 ? 0 : n % 5 == 3 ? 1 : test_random_below(&x->r, 9);
    if (!x->p[i].tier || x->lengths[i] + DISK_STEPS > 250 || event == 0) {
        replace(x, i);
    } else if (event == 1) {
        save(x, i);
    } else if (event == 2 && !x->w.tier.config.head_mask) { /* rings have lost what they held */
        x->lengths[i] -= test_random_below(&x->r, x->lengths[i] + 1) >> test_random_below(&x->r, 4);
        disk_cut(&x->w, x->p[i], x->lengths[i]);
    } else if (event == 3) { /* of tokens that are shared, for which there is always room */
        fork_other(x, i);
        same_batch(&x->w, x->p, token);
        x->lengths[0]++;
        x->lengths[1]++;
    } else {
        disk_same_steps(&x->w, x->p[i], token, steps, what);
        x->lengths[i] += steps;
    }
}

/* Returns how many bundles were read; where they must, steps read pages of them, too. Nothing is
 * left at the end. */
static uint64_t run(const kvf_cache_config *c, uint64_t life_seed, uint32_t steps, const char *what,
                    bool must)
{
    life *x = calloc(1, sizeof *x);
    kvf_stats stats;
    assert_non_null(x);
    x->r.state = life_seed;
    disk_worlds_open(&x->w, *c, NULL);
    const kvf_cache *cache = x->w.tier.cache;
    const uint64_t live = x->w.tier.runtime->context->live_bytes;
    const uint32_t blocks = cache->kv_groups[0].pool.free_count;
    for (uint32_t i = 0; i < (test_on_cuda() ? 10 : 24); i++) {
        one_event(x, i, steps, what);
        disk_worlds_check(&x->w);
    }
    kvf_cache_stats(cache, &stats);
    printf("# %s: %llu of %llu bundles read, %llu KiB, %llu KiB written, %u restored\n", what,
           (unsigned long long)stats.disk_reads, (unsigned long long)stats.disk_wanted,
           (unsigned long long)stats.bytes_from_disk / 1024,
           (unsigned long long)stats.bytes_to_disk / 1024, x->restored);
    assert_true(stats.disk_reads == 0 || stats.disk_wait_ns > 0);
    if (must && c->head_mask && !cache->kv_groups[0].dims.needs_mirror)
        assert_true(stats.pages_from_disk > 0); /* else slots may hold all that was chosen */
    finish(x);
    disk_end(x->p[0]);
    disk_end(x->p[1]);
    kvf_sequence_destroy(x->saved);
    test_wait(&x->w.tier);
    assert_int_equal(x->w.tier.runtime->context->live_bytes, live);
    assert_int_equal(cache->kv_groups[0].pool.free_count, blocks);
    restored += x->restored;
    disk_worlds_close(&x->w);
    free(x);
    return stats.disk_reads;
}

static void named(const save_case *x, kvf_transfer transfer, uint32_t bundle_bytes)
{
    kvf_cache_config c = disk_config_of(x, bundle_bytes);
    c.transfer = transfer;
    if (run(&c, seed, DISK_STEPS, x->name, true) == 0)
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
        reads += run(&c, test_random_next(&r), 2 + test_random_below(&r, 6), what, false);
        masked += c.head_mask != NULL;
    }
    printf("# %llu bundles read; %llu head masks\n", (unsigned long long)reads,
           (unsigned long long)masked);
    assert_true(reads > 0);
    assert_true(restored > 0);
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
        seed = 2; /* of which every setting reads */
    if (argc > 1)
        settings = (uint32_t)strtoul(argv[1], NULL, 10);
    if (argc > 2)
        seed = strtoull(argv[2], NULL, 10);
    return unit_run_around(NULL, save_remove_folder, named_settings_give_the_same_bits,
                           random_settings_give_the_same_bits, a_pool_that_is_full);
}
