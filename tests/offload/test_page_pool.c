/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The page pool against a naive model: random acquire, share and release, with the invariants
 * walked after every step, and bytes that must stay where they were written.
 */

#include "page_pool.h"

#include "offload_rig.h"

#define BLOCKS      61u
#define BLOCK_BYTES ((size_t)4096)
#define STEPS       20000u

typedef struct model {
    uint32_t references[BLOCKS]; /* 0 = free */
    uint32_t free_count;
} model;

static kvf_status make_pool(rig *r, size_t block_bytes, uint32_t blocks, kvf_page_pool *pool)
{
    const kvf_host_memory_config memory = {.node = -1, .touch_threads = 1};
    return kvf_page_pool_create(r->context, r->device, &memory, NULL, block_bytes, blocks, pool);
}

static void pick_used(const model *m, rig_random *random, kvf_block *out)
{
    do {
        out->index = rig_below(random, BLOCKS);
    } while (m->references[out->index] == 0);
}

static void acquire(kvf_page_pool *pool, model *m)
{
    kvf_block block;
    kvf_status status = kvf_page_pool_acquire_near(pool, KVF_BLOCK_NONE, &block);
    if (m->free_count == 0) {
        assert_int_equal(status, KVF_FULL);
        assert_int_equal(block.index, KVF_BLOCK_NONE.index);
        return;
    }
    RIG_OK(status);
    assert_true(block.index < BLOCKS);
    assert_int_equal(m->references[block.index], 0);
    m->references[block.index] = 1;
    m->free_count--;
    memset(kvf_page_pool_host(pool, block), (int)block.index, BLOCK_BYTES);
}

static void check_bytes(const kvf_page_pool *pool, kvf_block block)
{
    const unsigned char *bytes = kvf_page_pool_device(pool, block);
    assert_int_equal(bytes[0], block.index);
    assert_int_equal(bytes[BLOCK_BYTES - 1], block.index);
}

RIG_TEST(test_random)
{
    kvf_page_pool pool;
    RIG_OK(make_pool(r, BLOCK_BYTES, BLOCKS, &pool));
    model m = {.free_count = BLOCKS};
    rig_random random = rig_seed("page pool", 11);
    uint32_t full = 0;
    for (uint32_t step = 0; step < STEPS; step++) {
        kvf_block block;
        /* Waves: mostly acquire, then mostly release, so that both ends are reached. */
        uint32_t lean = step / 500 % 2 == 0 ? 6 : 2;
        uint32_t dice = rig_below(&random, 10);
        full += m.free_count == 0;
        if (dice < lean || m.free_count == BLOCKS) {
            acquire(&pool, &m);
        } else if (dice < lean + 1) {
            pick_used(&m, &random, &block);
            kvf_page_pool_share(&pool, block);
            m.references[block.index]++;
        } else {
            pick_used(&m, &random, &block);
            check_bytes(&pool, block);
            kvf_page_pool_release(&pool, block);
            m.free_count += --m.references[block.index] == 0;
        }
        assert_int_equal(pool.free_count, m.free_count);
        assert_true(kvf_page_pool_is_valid(&pool));
        for (uint32_t i = 0; i < BLOCKS; i++)
            assert_int_equal(kvf_page_pool_references(&pool, (kvf_block){i}), m.references[i]);
    }
    assert_true(full > 100); /* exhaustion was really met */
    kvf_page_pool_destroy(&pool);
}

/* A fresh pool hands out ascending ids, whose bytes are contiguous. */
RIG_TEST(test_fresh_order)
{
    kvf_page_pool pool;
    RIG_OK(make_pool(r, BLOCK_BYTES, BLOCKS, &pool));
    char *first = kvf_page_pool_host(&pool, (kvf_block){0});
    for (uint32_t i = 0; i < BLOCKS; i++) {
        kvf_block block;
        RIG_OK(kvf_page_pool_acquire_near(&pool, KVF_BLOCK_NONE, &block));
        assert_int_equal(block.index, i);
        assert_ptr_equal(kvf_page_pool_host(&pool, block), first + i * BLOCK_BYTES);
        assert_ptr_equal(kvf_page_pool_lasting(&pool, block), first + i * BLOCK_BYTES);
    }
    kvf_page_pool_destroy(&pool);
}

/* is_valid sees a damaged free list: a walk that cannot fail would prove nothing. */
RIG_TEST(test_walk_sees_damage)
{
    kvf_page_pool pool;
    RIG_OK(make_pool(r, BLOCK_BYTES, 8, &pool));
    assert_true(kvf_page_pool_is_valid(&pool));
    pool.next[3] = 2; /* a ring */
    assert_false(kvf_page_pool_is_valid(&pool));
    pool.next[3] = 5; /* one is lost */
    assert_false(kvf_page_pool_is_valid(&pool));
    pool.next[3] = 4;
    pool.references[6] = 1; /* used and free */
    assert_false(kvf_page_pool_is_valid(&pool));
    pool.references[6] = 0;
    assert_true(kvf_page_pool_is_valid(&pool));
    kvf_page_pool_destroy(&pool);
    kvf_page_pool_destroy(&pool); /* a second time does nothing */
}

RIG_TEST(test_too_large)
{
    kvf_page_pool pool;
    /* More than any machine has: refused by preflight, before anything is mapped. */
    assert_int_equal(make_pool(r, (size_t)1 << 30, 1u << 20, &pool), KVF_OUT_OF_MEMORY);
    RIG_TELLS(r, "1.00 PiB");
    assert_null(pool.context);
}
