/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The staging ring: order, back-pressure, and bytes that are never overwritten while in flight.
 */

#include "staging.h"

#include <stdatomic.h>
#include <time.h>

#include "offload_rig.h"

#define CHUNK ((size_t)8192)

static kvf_staging *open_ring(rig *r, uint32_t depth)
{
    kvf_staging_config config = {
        .chunk_bytes = CHUNK, .depth = depth, .memory = {.node = -1, .touch_threads = 1}};
    kvf_staging *staging;
    RIG_OK(kvf_staging_create(r->context, r->device, &config, &staging));
    return staging;
}

static void await_count(const void *raw, uint32_t task)
{
    atomic_uint *left = *(atomic_uint *const *)raw;
    while (atomic_load(left) == 0) {
        struct timespec time = {.tv_nsec = 50000};
        nanosleep(&time, NULL);
    }
    atomic_fetch_sub(left, 1);
}

/*
 * Random reserve, submit and completion against a model that counts: chunk n is index n % depth, at
 * most depth are out, try_reserve is busy exactly when the next one is. Completion is let through
 * one chunk at a time.
 */
TEST(test_against_model)
{
    for (uint32_t depth = 1; depth <= 4; depth++) {
        rig_random random = rig_seed("staging model", depth);
        rig r;
        rig_open(&r, NULL);
        kvf_staging *staging = open_ring(&r, depth);
        kvf_stream *stream = rig_stream(&r);
        atomic_uint permits;
        atomic_init(&permits, 0);
        atomic_uint *pointer = &permits;
        kvf_chunk held[4];
        kvf_event *fired[4]; /* after the ring's own event on the same stream */
        for (uint32_t i = 0; i < depth; i++)
            fired[i] = rig_event(&r);
        uint32_t reserved = 0, submitted = 0, completed = 0, busy = 0;
        for (uint32_t step = 0; step < 600; step++) {
            uint32_t dice = rig_below(&random, 3);
            if (dice == 0) {
                kvf_chunk chunk;
                kvf_status status = kvf_staging_try_reserve(staging, &chunk);
                if (reserved - completed == depth) {
                    assert_int_equal(status, KVF_BUSY);
                    busy++;
                    continue;
                }
                RIG_OK(status);
                assert_int_equal(chunk.index, reserved % depth);
                assert_int_equal(chunk.bytes, CHUNK);
                memset(chunk.host, (int)reserved, CHUNK);
                held[reserved++ % depth] = chunk;
            } else if (dice == 1 && submitted < reserved) {
                RIG_OK(r.ops->host_call(stream, await_count, &pointer, sizeof pointer));
                RIG_OK(kvf_staging_submit(staging, &held[submitted % depth], stream));
                RIG_OK(r.ops->event_record(fired[submitted % depth], stream));
                submitted++;
            } else if (dice == 2 && completed < submitted) {
                /* Before it completes, its bytes are as they were filled. */
                const kvf_chunk *oldest = &held[completed % depth];
                assert_int_equal((unsigned char)oldest->device[CHUNK - 1], completed & 0xff);
                atomic_fetch_add(&permits, 1);
                RIG_OK(r.ops->event_wait(fired[completed % depth]));
                completed++;
            }
        }
        assert_true(busy > 0);
        atomic_fetch_add(&permits, submitted - completed);
        RIG_OK(r.ops->stream_wait(stream));
        kvf_staging_destroy(staging);
        rig_close(&r);
    }
}

/* A writer ahead of a slow, pausing stream: everything arrives, in order, through any depth. */
TEST(test_bytes_arrive)
{
    enum { CHUNKS = 120 };
    static unsigned char arrived[CHUNKS][CHUNK];
    for (uint32_t depth = 1; depth <= 3; depth++) {
        rig r;
        rig_open(&r, &(rig_config){.threads = 1, .delay_seed = depth});
        kvf_staging *staging = open_ring(&r, depth);
        kvf_stream *stream = rig_stream(&r);
        memset(arrived, 0xee, sizeof arrived);
        for (uint32_t i = 0; i < CHUNKS; i++) {
            kvf_chunk chunk;
            RIG_OK(kvf_staging_reserve(staging, &chunk));
            assert_int_equal(chunk.index, i % depth);
            memset(chunk.host, (int)(i * 7 + depth), CHUNK);
            RIG_OK(r.ops->copy(stream, arrived[i], chunk.device, CHUNK));
            RIG_OK(kvf_staging_submit(staging, &chunk, stream));
        }
        RIG_OK(r.ops->stream_wait(stream));
        for (uint32_t i = 0; i < CHUNKS; i++)
            for (size_t b = 0; b < CHUNK; b += 511)
                assert_int_equal(arrived[i][b], (i * 7 + depth) & 0xff);
        kvf_staging_destroy(staging);
        rig_close(&r);
    }
}
