/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The disk tier below the runtime: whatever is wanted is there, with its bytes, for random calls on
 * few page frames; what is used often stays; a pool with bundles hands out neighbours and loses
 * none.
 */

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "offload_rig.h"
#include "page_pool.h"
#include "plain_file.h"

#define BLOCK       4096u
#define BLOCKS      120u
#define PAGE_FRAMES 8u

typedef struct tiered {
    rig r;
    kvf_page_pool pool;
    uint32_t drained;
} tiered;

static kvf_status drain(void *user)
{
    ((tiered *)user)->drained++;
    return KVF_OK;
}

static void open_pool(tiered *t, uint32_t bundle_blocks)
{
    const kvf_host_memory_config memory = {.node = -1,
                                           .huge_pages = KVF_HUGE_PAGES_OFF,
                                           .allow_unpinned = 1,
                                           .touch_threads = 1,
                                           .arena_bytes_max = 5 * BLOCK * bundle_blocks};
    const kvf_page_pool_disk disk = {.folder = "/tmp",
                                     .bundle_blocks = bundle_blocks,
                                     .page_frames = PAGE_FRAMES,
                                     .groups = 1,
                                     .drain = drain,
                                     .user = t};
    rig_open(&t->r, &(rig_config){0});
    t->drained = 0;
    RIG_OK(
        kvf_page_pool_create(t->r.context, t->r.device, &memory, &disk, BLOCK, BLOCKS, &t->pool));
}

static void close_pool(tiered *t)
{
    assert_true(kvf_disk_tier_is_valid(t->pool.tier));
    kvf_page_pool_destroy(&t->pool);
    rig_close(&t->r);
}

static void want(tiered *t, kvf_block b)
{
    kvf_disk_tier_want(t->pool.tier, kvf_page_pool_bundle(&t->pool, b), 0);
}

TEST(bytes_come_back)
{
    for (uint32_t bundle_blocks = 1; bundle_blocks <= 3; bundle_blocks++) {
        tiered t;
        kvf_block blocks[BLOCKS];
        uint8_t value[BLOCKS];
        uint32_t held = 0;
        kvf_disk_stats stats;
        rig_random random = rig_seed("tier", 5);
        open_pool(&t, bundle_blocks);
        for (uint32_t turn = 0; turn < 3000; turn++) {
            kvf_disk_tier_call(t.pool.tier);
            kvf_block mine[4];
            uint32_t at[4], count = 0;
            for (; held && count < 4; count++) {
                at[count] = rig_below(&random, held);
                mine[count] = blocks[at[count]];
                want(&t, mine[count]);
            }
            const kvf_block before = held ? blocks[held - 1] : KVF_BLOCK_NONE;
            const bool grows = held < BLOCKS && rig_below(&random, 3) > 0;
            if (grows) {
                RIG_OK(kvf_page_pool_acquire_near(&t.pool, before, &blocks[held]));
                want(&t, blocks[held]);
            }
            RIG_OK(kvf_disk_tier_bring(t.pool.tier));
            for (uint32_t i = 0; i < count; i++) {
                const uint8_t *bytes = kvf_page_pool_host(&t.pool, mine[i]);
                assert_non_null(bytes);
                assert_int_equal(bytes[0], value[at[i]]);
                assert_int_equal(bytes[BLOCK - 1], value[at[i]]);
            }
            if (grows) {
                kvf_disk_tier_write(t.pool.tier, kvf_page_pool_bundle(&t.pool, blocks[held]));
                value[held] = (uint8_t)rig_next(&random);
                memset(kvf_page_pool_host(&t.pool, blocks[held]), value[held], BLOCK);
                held++;
            } else if (held && rig_below(&random, 4) == 0) {
                const uint32_t i = rig_below(&random, held--);
                kvf_page_pool_release(&t.pool, blocks[i]);
                blocks[i] = blocks[held];
                value[i] = value[held];
            }
            kvf_disk_tier_start_writes(t.pool.tier);
            if (held) {
                char copy[16];
                const uint32_t i = rig_below(&random, held);
                RIG_OK(kvf_page_pool_copy_out(&t.pool, t.r.context, blocks[i], 100, 16, copy));
                assert_int_equal((uint8_t)copy[15], value[i]);
            }
            assert_true(kvf_page_pool_is_valid(&t.pool));
        }
        kvf_disk_tier_stats(t.pool.tier, &stats);
        assert_true(stats.read > 100 && t.drained > 100);
        close_pool(&t);
    }
}

TEST(neighbours_share_a_bundle)
{
    tiered t;
    kvf_block a = KVF_BLOCK_NONE, b = KVF_BLOCK_NONE, first[BLOCKS];
    open_pool(&t, 3);
    for (uint32_t i = 0; i < 9; i++) { /* two layers in turn */
        RIG_OK(kvf_page_pool_acquire_near(&t.pool, a, &a));
        RIG_OK(kvf_page_pool_acquire_near(&t.pool, b, &b));
        first[i] = a;
        assert_true(kvf_page_pool_bundle(&t.pool, a) != kvf_page_pool_bundle(&t.pool, b));
        assert_int_equal(kvf_page_pool_bundle(&t.pool, a),
                         kvf_page_pool_bundle(&t.pool, first[i / 3 * 3]));
    }
    /* Until none is left, wherever it is. */
    for (uint32_t i = 18; i < BLOCKS; i++)
        RIG_OK(kvf_page_pool_acquire_near(&t.pool, KVF_BLOCK_NONE, &a));
    assert_int_equal(kvf_page_pool_acquire_near(&t.pool, KVF_BLOCK_NONE, &a), KVF_FULL);
    assert_true(kvf_page_pool_is_valid(&t.pool));
    close_pool(&t);
}

/* More than page frames in one call: refused, and nothing is lost. */
TEST(a_crowd_is_refused)
{
    tiered t;
    kvf_block blocks[PAGE_FRAMES + 1];
    open_pool(&t, 1);
    kvf_disk_tier_call(t.pool.tier);
    for (uint32_t i = 0; i <= PAGE_FRAMES; i++) {
        RIG_OK(kvf_page_pool_acquire_near(&t.pool, KVF_BLOCK_NONE, &blocks[i]));
        want(&t, blocks[i]);
    }
    assert_int_equal(kvf_disk_tier_bring(t.pool.tier), KVF_FULL);
    for (uint32_t i = 0; i < PAGE_FRAMES; i++)
        want(&t, blocks[i]);
    RIG_OK(kvf_disk_tier_bring(t.pool.tier));
    want(&t, blocks[PAGE_FRAMES]);
    assert_int_equal(kvf_disk_tier_bring(t.pool.tier), KVF_FULL);
    assert_non_null(kvf_page_pool_host(&t.pool, blocks[0]));
    assert_null(kvf_page_pool_lasting(&t.pool, blocks[0])); /* it may go */
    close_pool(&t);
}

/* Something closes all descriptors, and opens a file of its own, which gets the tier's numbers. On
 * a GPU these would be its driver's too. */
TEST(files_of_others)
{
    if (rig_kind() == KVF_DEVICE_CUDA)
        return;
    rig r;
    kvf_disk_file f;
    kvf_error error;
    char path[] = "/tmp/kvf-other-XXXXXX", bytes[16] = "the tier's";
    rig_open(&r, &(rig_config){0});
    RIG_OK(kvf_disk_file_open(r.context, "/tmp", BLOCK, &f));
    RIG_OK(kvf_disk_file_write(&f, r.context, 0, sizeof bytes, bytes));
    assert_true(kvf_disk_file_has(&f, f.direct) && kvf_disk_file_has(&f, f.buffered));
    const int other = mkstemp(path);
    const int numbers[] = {f.direct, f.buffered};
    assert_int_equal(pwrite(other, "another's", 10, 0), 10);
    assert_true(dup2(other, f.direct) == f.direct && dup2(other, f.buffered) == f.buffered);
    assert_int_equal(kvf_disk_file_read(&f, r.context, 0, sizeof bytes, bytes), KVF_SYSTEM);
    assert_int_equal((kvf_context_error(r.context, &error), error.foreign), EBADF);
    assert_string_equal(bytes, "the tier's");
    assert_int_equal(kvf_disk_file_write(&f, r.context, 0, sizeof bytes, bytes), KVF_SYSTEM);
    assert_false(kvf_disk_file_has(&f, f.direct));
    kvf_disk_file_close(&f);
    for (size_t i = 0; i < 2; i++) {
        assert_int_equal(pread(numbers[i], bytes, sizeof bytes, 0), 10);
        assert_string_equal(bytes, "another's");
    }
    close(numbers[0]);
    close(numbers[1]);
    close(other);
    assert_int_equal(unlink(path), 0);
    rig_close(&r);
}

/* The same while the tier has requests to make: refused, and what is in memory stays. */
TEST(requests_to_others)
{
    if (rig_kind() == KVF_DEVICE_CUDA)
        return;
    tiered t;
    kvf_block blocks[BLOCKS];
    char path[] = "/tmp/kvf-other-XXXXXX";
    struct stat about;
    uint32_t failed = 0;
    open_pool(&t, 1);
    const int first = open("/dev/null", O_RDONLY | O_CLOEXEC), other = mkstemp(path);
    for (uint32_t i = 0; i < 4 * PAGE_FRAMES; i++) {
        kvf_disk_tier_call(t.pool.tier);
        if (i == 2 * PAGE_FRAMES) /* whatever the tier has is below */
            for (int file = 3; file < first; file++)
                assert_int_equal(dup2(other, file), file);
        RIG_OK(kvf_page_pool_acquire_near(&t.pool, KVF_BLOCK_NONE, &blocks[i]));
        want(&t, blocks[i]);
        const kvf_status status = kvf_disk_tier_bring(t.pool.tier);
        failed += status != KVF_OK;
        assert_true(status == KVF_OK || (status == KVF_SYSTEM && i >= 2 * PAGE_FRAMES));
        if (status != KVF_OK)
            break;
        kvf_disk_tier_write(t.pool.tier, kvf_page_pool_bundle(&t.pool, blocks[i]));
        memset(kvf_page_pool_host(&t.pool, blocks[i]), 7, BLOCK);
    }
    assert_int_equal(failed, 1);
    assert_int_equal(fstat(other, &about), 0);
    assert_int_equal(about.st_size, 0);
    kvf_page_pool_destroy(&t.pool);
    for (int file = 3; file < first; file++)
        (void)close(file);
    close(first);
    close(other);
    assert_int_equal(unlink(path), 0);
    rig_close(&t.r);
}

static bool may(const void *user, uint32_t page_frame)
{
    return page_frame != *(const uint32_t *)user;
}

TEST(what_is_used_stays)
{
    kvf_disk_use uses[PAGE_FRAMES] = {0};
    kvf_disk_turn turn = {0};
    uint32_t bundles[PAGE_FRAMES], pinned = 2;
    uint64_t call = 1;
    kvf_disk_policy p = {
        .page_frames = PAGE_FRAMES, .bundles = bundles, .uses = uses, .groups = &turn};
    for (uint32_t i = 0; i < PAGE_FRAMES; i++) {
        bundles[i] = i;
        kvf_disk_policy_use(&p, i, 0, call);
    }
    for (uint32_t i = 0; i < 100; i++) {
        kvf_disk_policy_use(&p, 5, 0, ++call); /* again and again */
        kvf_disk_policy_use(&p, 6, 0, call);
        const uint32_t victim = kvf_disk_policy_victim(&p, may, &pinned);
        assert_true(victim != 5 && victim != 6 && victim != pinned);
        kvf_disk_policy_use(&p, victim, 0, call);
    }
    for (uint32_t i = 0; i < 64; i++) { /* no more: it goes like the others */
        const uint32_t victim = kvf_disk_policy_victim(&p, may, &pinned);
        kvf_disk_policy_use(&p, victim, 0, ++call);
        if (victim == 5)
            return;
    }
    fail_msg("what was used once stays for ever");
}

/* Three layers in turn, each of which uses five bundles of its own; nine have room. */
typedef struct turns {
    uint32_t bundles[9];
    uint32_t group; /* whose turn it is */
} turns;

static bool of_another(const void *user, uint32_t page_frame)
{
    const turns *t = user;
    return t->bundles[page_frame] / 5 != t->group;
}

TEST(turns_keep_a_share)
{
    turns t;
    kvf_disk_use uses[15] = {0};
    kvf_disk_turn groups[3] = {0};
    kvf_disk_policy p = {.page_frames = 9, .bundles = t.bundles, .uses = uses, .groups = groups};
    uint32_t hits = 0;
    for (uint32_t i = 0; i < 9; i++)
        t.bundles[i] = i;
    for (uint32_t call = 1; call <= 300; call++) {
        t.group = call % 3;
        for (uint32_t bundle = 5 * t.group; bundle < 5 * t.group + 5; bundle++) {
            uint32_t page_frame = 0;
            while (page_frame < 9 && t.bundles[page_frame] != bundle)
                page_frame++;
            kvf_disk_policy_use(&p, bundle, t.group, call);
            hits += page_frame < 9;
            if (page_frame == 9)
                t.bundles[kvf_disk_policy_victim(&p, of_another, &t)] = bundle;
        }
    }
    /* Whoever comes finds what the two others leave; by recency alone he would find nothing. */
    assert_in_range(hits, 500, 1500);
}
