/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Page lists of a cache with a disk tier: the same lists as without, the same bytes where they are
 * said to be, and the same attention over them. A listed page stays in memory for what the caller
 * enqueues on the stream; what is not has no address while it is on disk.
 */

#include "disk_rig.h"
#include "save_faults.h"

#include <errno.h>
#include <time.h>

#include "cache.h"

typedef struct listing {
    disk_worlds w;
    kvf_sequence *s[2]; /* of the tier, and of the cache without */
    kvf_page_lists lists[2];
    char *out;
    char *page;      /* room for two */
    uint32_t absent; /* pages that had no address */
} listing;

static size_t page_bytes(const listing *l)
{
    const kvf_cache_config *c = &l->w.plain.config;
    return 2 * c->page_size * c->head_dim * test_dtype_bytes(c->dtype);
}

static void open_listing(listing *l, kvf_cache_config config, const kvf_io_ops *engine)
{
    *l = (listing){0};
    config.static_ratio = 0.0f;
    disk_worlds_open(&l->w, config, engine);
    for (uint32_t i = 0; i < 2; i++) {
        test_world *world = i ? &l->w.plain : &l->w.tier;
        l->s[i] = test_sequence(world);
        test_fill(world, l->s[i], &l->w.t, 0, DISK_PROMPT);
        l->lists[i] = test_page_lists(world->cache, 1);
    }
    l->out = test_alloc(2 * test_steps_bytes(&l->w.t, 1));
    l->page = test_alloc(2 * page_bytes(l));
}

static void close_listing(listing *l)
{
    for (uint32_t i = 0; i < 2; i++)
        test_page_lists_free(&l->lists[i]);
    test_release(l->out);
    test_release(l->page);
    disk_worlds_close(&l->w);
}

static kvf_decode_args args_of(listing *l, uint32_t side, uint32_t layer, uint32_t token)
{
    const test_tokens *t = &l->w.t;
    return test_step_args(&l->s[side], t, layer, token, l->out + side * test_steps_bytes(t, 1));
}

/* Lists are equal, and every page that they name has the same bytes in both. */
static void same_pages(listing *l, uint32_t layer)
{
    const uint32_t heads = l->w.t.kv_heads;
    const kvf_page_lists *a = &l->lists[0], *b = &l->lists[1];
    const uint32_t length = kvf_sequence_length(l->s[0], layer), size = l->w.plain.config.page_size;
    const size_t row = page_bytes(l) / size;
    assert_memory_equal(a->indptr, b->indptr, (heads + 1) * sizeof *a->indptr);
    assert_memory_equal(a->indices, b->indices, (uint32_t)b->indptr[heads] * sizeof *a->indices);
    assert_memory_equal(a->last_page_len, b->last_page_len, heads * sizeof *a->indptr);
    for (uint32_t head = 0; head < heads; head++)
        for (int32_t i = a->indptr[head]; i < a->indptr[head + 1]; i++) {
            const uint32_t page = (uint32_t)a->indices[i];
            const uint32_t rest = length - page * size; /* what follows was never written */
            const void *got = kvf_page_address(l->s[0], layer, head, page);
            const size_t bytes = row * (rest < size ? rest : size);
            assert_non_null(got);
            test_copy(l->page, got, bytes);
            test_copy(l->page + bytes, kvf_page_address(l->s[1], layer, head, page), bytes);
            assert_memory_equal(l->page, l->page + bytes, bytes);
        }
    for (uint32_t page = 0; page < (length + size - 1) / size; page++)
        l->absent += !kvf_page_address(l->s[0], layer, 0, page);
}

static void select_both(listing *l, uint32_t layer, uint32_t token)
{
    for (uint32_t side = 0; side < 2; side++) {
        test_world *world = side ? &l->w.plain : &l->w.tier;
        const kvf_decode_args args = args_of(l, side, layer, token);
        test_ok(world, kvf_select_pages(world->cache, &args, &l->lists[side], world->stream));
        test_wait(world);
    }
}

static void attend_both(listing *l, uint32_t layer, uint32_t token)
{
    const size_t bytes = test_steps_bytes(&l->w.t, 1);
    for (uint32_t side = 0; side < 2; side++) {
        test_world *world = side ? &l->w.plain : &l->w.tier;
        const kvf_decode_args args = args_of(l, side, layer, token);
        test_ok(world, kvf_attend_pages(world->cache, &args, &l->lists[side], world->stream));
        test_wait(world);
    }
    assert_memory_equal(l->out, l->out + bytes, bytes / l->w.t.layers);
}

static void run(const save_case *c, kvf_transfer transfer, uint32_t bundle_bytes)
{
    listing l;
    kvf_stats stats;
    kvf_cache_config config = disk_config_of(c, bundle_bytes);
    config.transfer = transfer;
    open_listing(&l, config, NULL);
    for (uint32_t i = 0; i < DISK_STEPS; i++)
        for (uint32_t layer = 0; layer < config.layers; layer++) {
            select_both(&l, layer, DISK_PROMPT + i);
            same_pages(&l, layer);
            attend_both(&l, layer, DISK_PROMPT + i);
        }
    /* Lists that were made long ago name pages that are on disk again. */
    for (uint32_t layer = 0; layer + 1 < config.layers; layer++)
        disk_same_steps(&l.w, (disk_pair){l.s[0], l.s[1]}, DISK_PROMPT + DISK_STEPS + layer, 1,
                        c->name);
    attend_both(&l, config.layers - 1, DISK_PROMPT);
    kvf_cache_stats(l.w.tier.cache, &stats);
    printf("# %s: %llu bundles read, %u pages had no address\n", c->name,
           (unsigned long long)stats.disk_reads, l.absent);
    assert_true(stats.disk_reads > 0 && l.absent > 0);
    close_listing(&l);
}

TEST(lists_are_those_without_a_tier)
{
    run(&save_cases[4], KVF_TRANSFER_AUTO, 1);
    if (!TEST_SANITIZED)
        run(&save_cases[0], KVF_TRANSFER_GATHER, 20000);
}

/* ---- what the caller enqueues ---- */

#define LISTED_MAX 256u

typedef struct late_reader {
    const char *pages[LISTED_MAX];
    char *to;
    size_t bytes;
    uint32_t count;
} late_reader;

static void read_late(const void *raw, uint32_t task)
{
    const late_reader *const *r = raw;
    (void)nanosleep(&(struct timespec){.tv_nsec = 20000000}, NULL);
    for (uint32_t i = 0; i < (*r)->count; i++)
        memcpy((*r)->to + i * (*r)->bytes, (*r)->pages[i], (*r)->bytes);
}

/* Sealed pages that are listed for KV head 0 of layer 0; nobody writes them. */
static uint32_t listed(const listing *l, uint32_t *pages)
{
    const test_world *tier = &l->w.tier;
    const uint32_t end =
        l->s[0]->layers[0].extent.sealed * tier->cache->kv_groups[0].dims.paging.block_pages;
    uint32_t count = 0;
    for (int32_t i = 0; i < l->lists[0].indptr[1]; i++)
        if ((uint32_t)l->lists[0].indices[i] < end && count < LISTED_MAX)
            pages[count++] = (uint32_t)l->lists[0].indices[i];
    return count;
}

/* A slow kernel of the caller's reads pages while the next call wants their page frames. */
TEST(pages_stay_for_what_is_enqueued)
{
    listing l;
    uint32_t pages[LISTED_MAX], gone = 0;
    kvf_cache_config config = save_config(&save_cases[4]);
    config.tokens_max = 224;
    disk_config(&config, 0, 1);
    open_listing(&l, config, NULL);
    test_world *tier = &l.w.tier;
    const size_t bytes = page_bytes(&l);
    const test_range more = {.layer = 0, .first = DISK_PROMPT, .count = 40, .chunk = 40};
    const test_range other = {.layer = 1, .first = DISK_PROMPT, .count = 40, .chunk = 40};
    char *out = test_scratch(64 * test_steps_bytes(&l.w.t, 1));
    test_prefill(tier, l.s[0], &l.w.t, &more, NULL);
    const kvf_decode_args args = args_of(&l, 0, 0, DISK_PROMPT + 40);
    test_ok(tier, kvf_select_pages(tier->cache, &args, &l.lists[0], tier->stream));
    late_reader r = {.bytes = bytes, .to = test_alloc(2 * LISTED_MAX * bytes)};
    const late_reader *const given = &r;
    r.count = listed(&l, pages);
    for (uint32_t i = 0; i < r.count; i++) {
        r.pages[i] = kvf_page_address(l.s[0], 0, 0, pages[i]);
        assert_non_null(r.pages[i]);
        memcpy(r.to + (LISTED_MAX + i) * bytes, r.pages[i], bytes);
    }
    test_ok(tier,
            tier->cache->device->ops->host_call(tier->stream, read_late, &given, sizeof given));
    test_prefill(tier, l.s[0], &l.w.t, &other, out);
    for (uint32_t i = 0; i < r.count; i++)
        gone += !kvf_page_address(l.s[0], 0, 0, pages[i]);
    test_wait(tier);
    assert_true(gone > 0);
    assert_memory_equal(r.to, r.to + LISTED_MAX * bytes, r.count * bytes);
    test_release(r.to);
    close_listing(&l);
}

/* ---- refusals and failures ---- */

/* Whoever waits for the lists can tell at once that they are bad. */
TEST(bad_lists_change_nothing)
{
    listing l;
    open_listing(&l, disk_config_of(&save_cases[4], 1), NULL);
    test_world *tier = &l.w.tier;
    select_both(&l, 0, DISK_PROMPT);
    const kvf_decode_args args = args_of(&l, 0, 0, DISK_PROMPT);
    int32_t *const first = l.lists[0].indices, good = *first;
    *first = 1 << 20;
    test_expect(tier->runtime, kvf_attend_pages(tier->cache, &args, &l.lists[0], tier->stream),
                KVF_INVALID);
    *first = good;
    attend_both(&l, 0, DISK_PROMPT);
    close_listing(&l);
}

/* Each read of a call fails once: the call is taken back, and made again it gives the same. */
TEST(a_disk_that_fails)
{
    listing l;
    uint32_t failures = 0;
    kvf_cache_config config = disk_config_of(&save_cases[4], 1);
    fail_plan_set(UINT32_MAX, NOTHING, 0);
    open_listing(&l, config, &fail_engine);
    test_world *tier = &l.w.tier;
    for (uint32_t turn = 0; turn < 16; turn++) {
        const uint32_t layer = turn % config.layers, token = DISK_PROMPT + turn / config.layers;
        const kvf_decode_args args = args_of(&l, 0, layer, token);
        const uint32_t length = kvf_sequence_length(l.s[0], layer);
        kvf_status status = KVF_SYSTEM;
        for (uint32_t n = 0; status != KVF_OK && n < 100; n++) {
            fail_plan_set(n, ERRNO + EIO, 0);
            fail_plan.kind = FAIL_READS;
            status = kvf_select_pages(tier->cache, &args, &l.lists[0], tier->stream);
            fail_plan_set(UINT32_MAX, NOTHING, 0);
            test_wait(tier);
            assert_int_equal(tier->cache->broken, KVF_OK);
            assert_int_equal(kvf_sequence_length(l.s[0], layer), length + (status == KVF_OK));
            failures += status != KVF_OK;
            if (status != KVF_OK)
                assert_int_equal(kvf_runtime_error(tier->runtime)->foreign, EIO);
        }
        const kvf_decode_args wanted = args_of(&l, 1, layer, token);
        test_ok(&l.w.plain,
                kvf_select_pages(l.w.plain.cache, &wanted, &l.lists[1], l.w.plain.stream));
        test_wait(&l.w.plain);
        same_pages(&l, layer);
    }
    printf("# %u failures\n", failures);
    assert_true(failures > 5);
    close_listing(&l);
}

TESTS_RUN_BETWEEN(NULL, save_remove_folder)
