/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Random prompts, steps, forks, cuts, ends, saves and restores on one cache; on another the same
 * without files, where a restore is a fork of a sequence that was kept. Every output has the same
 * bits, and nothing is left at the end. Then once more with a quarter of the pages in memory, and
 * the others on disk.
 *
 * test_runtime_save_soak [STEPS [SEED]]     400 steps where nothing else is said
 */

#include "disk_rig.h"

#include "cache.h"

#define ALIVE   4u /* sequences at once */
#define FILES   3u
#define BANK    256u /* tokens to take from */
#define LONGEST 300u

static uint32_t steps = 400;
static uint64_t seed = 23;

/* A sequence and what it must be. */
typedef struct pair {
    kvf_sequence *saved, *kept; /* NULL = there is none */
    uint32_t length;
} pair;

typedef struct soak {
    test_world a, b; /* with files, and without */
    test_tokens bank;
    test_random random;
    pair pairs[ALIVE];
    pair files[FILES];      /* `kept` is what the file must give */
    kvf_save *saves[FILES]; /* under way */
    uint64_t done[8];
} soak;

static pair *alive(soak *s)
{
    const uint32_t first = test_random_below(&s->random, ALIVE);
    for (uint32_t i = 0; i < ALIVE; i++)
        if (s->pairs[(first + i) % ALIVE].saved)
            return &s->pairs[(first + i) % ALIVE];
    return NULL;
}

static pair *room(soak *s)
{
    for (uint32_t i = 0; i < ALIVE; i++)
        if (!s->pairs[i].saved)
            return &s->pairs[i];
    return NULL;
}

static void end(pair *p)
{
    kvf_sequence_destroy(p->saved);
    kvf_sequence_destroy(p->kept);
    *p = (pair){0};
}

static void begin(soak *s)
{
    pair *p = room(s);
    if (!p)
        return;
    *p = (pair){test_sequence(&s->a), test_sequence(&s->b), 0};
    s->done[0]++;
}

/* A chunk of a prompt for both. */
static void append(soak *s, pair *p)
{
    const uint32_t count = 1 + test_random_below(&s->random, 70);
    const uint32_t first = test_random_below(&s->random, BANK - count + 1);
    if (p->length + count > LONGEST)
        return;
    for (uint32_t layer = 0; layer < s->bank.layers; layer++) {
        const test_range range = {.layer = layer, .first = first, .count = count, .chunk = count};
        test_prefill(&s->a, p->saved, &s->bank, &range, NULL);
        test_prefill(&s->b, p->kept, &s->bank, &range, NULL);
    }
    p->length += count;
    s->done[1]++;
}

static void decode(soak *s, pair *p)
{
    const uint32_t token = test_random_below(&s->random, BANK);
    if (p->length + 1 > LONGEST) {
        end(p);
        return;
    }
    void *got = save_decode(&s->a, p->saved, &s->bank, token, 1);
    void *wanted = save_decode(&s->b, p->kept, &s->bank, token, 1);
    if (memcmp(got, wanted, save_decode_bytes(&s->bank, 1)) != 0)
        fail_msg("other bits at length %u", p->length);
    free(got);
    free(wanted);
    p->length++;
    s->done[2]++;
}

static void fork_pair(soak *s, const pair *p)
{
    pair *to = room(s);
    if (!to)
        return;
    test_ok(&s->a, kvf_sequence_fork(s->a.cache, p->saved, s->a.stream, &to->saved));
    test_ok(&s->b, kvf_sequence_fork(s->b.cache, p->kept, s->b.stream, &to->kept));
    to->length = p->length;
    s->done[3]++;
}

/* The newest tokens go, often beyond what was restored. */
static void cut(soak *s, pair *p)
{
    const uint32_t drop =
        test_random_below(&s->random, p->length + 1) >> test_random_below(&s->random, 4);
    p->length -= drop;
    test_ok(&s->a, kvf_sequence_truncate(s->a.cache, p->saved, p->length, s->a.stream));
    test_ok(&s->b, kvf_sequence_truncate(s->b.cache, p->kept, p->length, s->b.stream));
    s->done[6]++;
}

static void finish(soak *s, uint32_t file)
{
    if (s->saves[file])
        test_ok(&s->a, kvf_save_finish(s->saves[file], NULL));
    s->saves[file] = NULL;
}

static void begin_save(soak *s, const pair *p)
{
    const uint32_t file = test_random_below(&s->random, FILES);
    char name[8];
    finish(s, file);
    snprintf(name, sizeof name, "soak-%u", file);
    kvf_sequence_destroy(s->files[file].kept);
    s->files[file] = (pair){.length = p->length};
    s->saves[file] = save_begin(&s->a, p->saved, save_path(name), "test");
    test_ok(&s->b, kvf_sequence_fork(s->b.cache, p->kept, s->b.stream, &s->files[file].kept));
    s->done[4]++;
}

static void restore(soak *s)
{
    const uint32_t file = test_random_below(&s->random, FILES);
    pair *to = room(s);
    char name[8];
    if (!to || !s->files[file].kept)
        return;
    finish(s, file);
    snprintf(name, sizeof name, "soak-%u", file);
    to->saved = save_restore(&s->a, save_path(name), 1);
    test_ok(&s->b, kvf_sequence_fork(s->b.cache, s->files[file].kept, s->b.stream, &to->kept));
    to->length = s->files[file].length;
    s->done[5]++;
}

static void one_step(soak *s)
{
    pair *p = alive(s);
    if (!p) {
        begin(s);
        return;
    }
    switch (test_random_below(&s->random, 16)) {
    case 0:
        begin(s);
        break;
    case 1:
        append(s, p);
        break;
    case 2:
        fork_pair(s, p);
        break;
    case 3:
        end(p);
        break;
    case 4:
        begin_save(s, p);
        break;
    case 5:
        restore(s);
        break;
    case 6:
        cut(s, p);
        break;
    default:
        decode(s, p);
        break;
    }
}

static void run(const save_case *c, bool has_tier)
{
    kvf_cache_config config = save_config(c);
    soak s = {.random = {seed}};
    config.tokens_max = 512;
    config.sequences_max = ALIVE;
    if (has_tier) {
        config.layers = 4;
        config.tokens_max = LONGEST + 20;
        disk_config(&config, ALIVE * LONGEST / 2, 20000);
    }
    test_world_open(&s.a, NULL, &config);
    assert_int_equal(s.a.cache->kv_groups[0].pool.tier != NULL, has_tier);
    config.disk_path = NULL;
    config.host_bytes = config.disk_bundle_bytes = 0;
    config.sequences_max = ALIVE + FILES;
    test_world_open(&s.b, NULL, &config);
    test_tokens_make(
        &s.bank, &config,
        &(test_tokens_spec){.count = BANK, .seed = seed, .sharpness = 2.0f, .topics = 5});
    const uint64_t live = s.a.runtime->context->live_bytes;
    const uint32_t blocks = s.a.cache->kv_groups[0].pool.free_count;
    for (uint32_t i = 0; i < steps; i++)
        one_step(&s);
    for (uint32_t i = 0; i < FILES; i++) {
        finish(&s, i);
        end(&s.files[i]);
    }
    for (uint32_t i = 0; i < ALIVE; i++)
        end(&s.pairs[i]);
    test_wait(&s.a);
    assert_int_equal(s.a.runtime->context->live_bytes, live);
    assert_int_equal(s.a.cache->kv_groups[0].pool.free_count, blocks);
    printf("# %s%s: %llu begun, %llu chunks, %llu steps, %llu forks, %llu saves, %llu restores, "
           "%llu cuts\n",
           c->name, has_tier ? ", disk tier" : "", (unsigned long long)s.done[0],
           (unsigned long long)s.done[1], (unsigned long long)s.done[2],
           (unsigned long long)s.done[3], (unsigned long long)s.done[4],
           (unsigned long long)s.done[5], (unsigned long long)s.done[6]);
    assert_true(steps < 400 || (s.done[4] > 5 && s.done[5] > 2));
    if (has_tier) {
        kvf_stats stats;
        kvf_cache_stats(s.a.cache, &stats);
        assert_true(kvf_page_pool_is_valid(&s.a.cache->kv_groups[0].pool));
        assert_true(kvf_disk_tier_is_valid(s.a.cache->kv_groups[0].pool.tier));
        printf("# %llu of %llu bundles were read from disk\n", (unsigned long long)stats.disk_reads,
               (unsigned long long)stats.disk_wanted);
        assert_true(steps < 400 || stats.disk_reads > 0);
    }
    test_world_close(&s.a);
    test_close(&s.b, &s.bank);
}

static void same_bits_without_growth(void **state)
{
    test_seed_print("soak", seed);
    steps = test_afford(steps);
    run(&save_cases[0], false);
    run(&save_cases[4], false);
    for (uint32_t i = 4; i <= 8; i += 4)
        run(&save_cases[i], true);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(same_bits_without_growth)};
    if (argc > 1)
        steps = (uint32_t)strtoul(argv[1], NULL, 10);
    if (argc > 2)
        seed = strtoull(argv[2], NULL, 10);
    return cmocka_run_group_tests(tests, NULL, save_remove_folder);
}
