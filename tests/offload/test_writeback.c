/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Write-back: blocks that lie together on both sides become one copy, no copy exceeds a chunk,
 * every byte arrives where it should, and nothing else is touched.
 */

#include "writeback.h"

#include "host_memory.h"

#include "offload_rig.h"

#define BLOCKS      40u
#define BLOCK_BYTES 1536u
#define BYTES       (BLOCKS * (size_t)BLOCK_BYTES)
#define GUARD       0xa5

typedef struct both_sides {
    char *device;         /* [BLOCKS] */
    char *device_mirror;  /* what the test can read */
    kvf_host_memory pool; /* [BLOCKS] */
    kvf_stream *stream;
} both_sides;

static void open_sides(rig *r, both_sides *s)
{
    kvf_host_memory_config pool = {
        .bytes = BYTES, .granule = BYTES, .node = -1, .touch_threads = 1};
    static char mirror[BYTES];
    s->device_mirror = mirror;
    s->device = rig_memory(r, BYTES);
    RIG_OK(kvf_host_memory_create(r->context, r->device, &pool, &s->pool));
    s->stream = rig_stream(r);
    for (size_t b = 0; b < BYTES; b++)
        mirror[b] = (char)(b * 31 + (b >> 9));
    rig_put(r, s->device, mirror, BYTES);
}

/* Blocks from[i] -> to[i]; returns the copies that it took. */
static uint64_t write_back(rig *r, both_sides *s, const uint32_t *from, const uint32_t *to,
                           uint32_t count, size_t chunk_bytes)
{
    kvf_writeback_block blocks[BLOCKS];
    kvf_writeback_job args = {
        .blocks = blocks, .count = count, .block_bytes = BLOCK_BYTES, .chunk_bytes = chunk_bytes};
    const kvf_arena *arena = &s->pool.arenas[0];
    uint8_t is_written[BLOCKS] = {0};
    uint64_t copies = 0;
    memset(arena->host, GUARD, BYTES);
    for (uint32_t i = 0; i < count; i++)
        blocks[i] = (kvf_writeback_block){s->device + from[i] * (size_t)BLOCK_BYTES,
                                          arena->device + to[i] * (size_t)BLOCK_BYTES};
    RIG_OK(kvf_writeback_enqueue(s->stream, &args, &copies));
    memset(blocks, 0xff, sizeof blocks); /* read before return */
    RIG_OK(r->ops->stream_wait(s->stream));
    for (uint32_t i = 0; i < count; i++) {
        is_written[to[i]] = 1;
        assert_memory_equal(arena->host + to[i] * (size_t)BLOCK_BYTES,
                            s->device_mirror + from[i] * (size_t)BLOCK_BYTES, BLOCK_BYTES);
    }
    for (uint32_t b = 0; b < BLOCKS; b++)
        for (size_t i = 0; i < BLOCK_BYTES && !is_written[b]; i++)
            assert_int_equal((unsigned char)arena->host[b * (size_t)BLOCK_BYTES + i], GUARD);
    return copies;
}

RIG_TEST(test_merges)
{
    both_sides s;
    open_sides(r, &s);
    const uint32_t up[] = {3, 4, 5, 6}, far[] = {10, 11, 12, 13}, down[] = {9, 8, 7, 6};
    const uint32_t gap[] = {20, 21, 30, 31};
    assert_int_equal(write_back(r, &s, up, far, 4, 0), 1);
    assert_int_equal(write_back(r, &s, up, down, 4, 0), 4);
    assert_int_equal(write_back(r, &s, down, down, 4, 0), 4);
    assert_int_equal(write_back(r, &s, up, gap, 4, 0), 2);
    assert_int_equal(write_back(r, &s, gap, up, 4, 0), 2);
    assert_int_equal(write_back(r, &s, up, far, 0, 0), 0);
    assert_int_equal(write_back(r, &s, up, far, 1, 0), 1);
    kvf_host_memory_destroy(r->context, &s.pool);
}

RIG_TEST(test_splits)
{
    both_sides s;
    uint32_t all[BLOCKS];
    open_sides(r, &s);
    for (uint32_t i = 0; i < BLOCKS; i++)
        all[i] = i;
    for (size_t chunk = 1000; chunk <= BYTES + 1000; chunk += 7001)
        assert_int_equal(write_back(r, &s, all, all, BLOCKS, chunk), (BYTES + chunk - 1) / chunk);
    kvf_host_memory_destroy(r->context, &s.pool);
}

TEST(test_random)
{
    rig r;
    both_sides s;
    rig_open(&r, &(rig_config){.delay_seed = 7});
    open_sides(&r, &s);
    rig_random random = rig_seed("write-back", 11);
    for (uint32_t round = 0; round < 50; round++) {
        uint32_t from[BLOCKS], to[BLOCKS], count = rig_below(&random, BLOCKS + 1);
        for (uint32_t i = 0; i < BLOCKS; i++)
            from[i] = to[i] = i;
        for (uint32_t swaps = rig_below(&random, 20); swaps-- > 0;) {
            uint32_t i = rig_below(&random, BLOCKS), j = rig_below(&random, BLOCKS), other = to[i];
            to[i] = to[j];
            to[j] = other;
        }
        uint64_t copies = write_back(&r, &s, from, to, count, 4 * BLOCK_BYTES);
        assert_true(copies <= count);
    }
    kvf_host_memory_destroy(r.context, &s.pool);
    rig_close(&r);
}
