/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The emulated runtime: streams, events, host functions, words.
 *
 * Random programs over several streams, ordered by events alone and under delays, are those of
 * test_host_stream.c, on the device that is emulated.
 */

#include "runtime_rig.h"

#include <pthread.h>
#include <time.h>

#include "common/clock.h"

#define CELL_WORDS 48u
#define CELL_BYTES (CELL_WORDS * 4)

/* A wait is for the record that was last before it, whatever is recorded later. */
TEST(test_event_snapshot)
{
    cudaStream_t held = rig_stream(), free_stream = rig_stream(), waits = rig_stream();
    cudaEvent_t event = rig_event();
    uint32_t *words = rig_pinned(2);
    OK(cudaStreamWaitEvent(waits, event, 0)); /* never recorded: nothing to wait for */
    OK(cudaEventQuery(event));
    OK(cudaEventRecord(event, free_stream));
    OK(cudaStreamWaitEvent(waits, event, 0));
    OK(rig_wait_word(held, &words[0], 1));
    OK(cudaEventRecord(event, held));
    OK(rig_write_word(waits, &words[1], 7));
    OK(cudaStreamSynchronize(waits));
    assert_int_equal(words[1], 7);
    FAILS(cudaErrorNotReady, cudaEventQuery(event));
    FAILS(cudaErrorNotReady, cudaStreamQuery(held));
    OK(cudaStreamWaitEvent(waits, event, 0));
    OK(rig_write_word(waits, &words[1], 8));
    FAILS(cudaErrorNotReady, cudaStreamQuery(waits));
    rig_set_word(&words[0], 1);
    OK(cudaEventSynchronize(event));
    OK(cudaEventQuery(event));
    OK(cudaStreamSynchronize(waits));
    assert_int_equal(words[1], 8);
}

/* More records of one event than it has slots, on two streams in turn. */
TEST(test_event_reused)
{
    cudaStream_t a = rig_stream(), b = rig_stream();
    cudaEvent_t event = rig_event();
    uint32_t *cell = rig_memory(CELL_BYTES), expected[CELL_WORDS] = {0}, seen[CELL_WORDS];
    uint32_t *other = rig_memory(CELL_BYTES), zeros[CELL_WORDS] = {0};
    OK(cudaMemcpy(cell, expected, sizeof expected, cudaMemcpyHostToDevice));
    OK(cudaMemcpy(other, expected, sizeof expected, cudaMemcpyHostToDevice));
    for (uint32_t i = 0; i < 300; i++) {
        OK(rig_mix(i & 1 ? a : b, cell, other, i, CELL_WORDS));
        rig_mix_now(expected, zeros, i, CELL_WORDS);
        rig_join(i & 1 ? b : a, event, i & 1 ? a : b);
    }
    OK(cudaStreamSynchronize(a));
    OK(cudaStreamSynchronize(b));
    OK(cudaMemcpy(seen, cell, sizeof seen, cudaMemcpyDeviceToHost));
    assert_memory_equal(seen, expected, sizeof seen);
}

TEST(test_elapsed_time)
{
    cudaStream_t stream = rig_stream();
    cudaEvent_t from, to, untimed = rig_event();
    uint32_t *word = rig_pinned(1);
    float ms = -1;
    OK(cudaEventCreate(&from));
    OK(cudaEventCreate(&to));
    FAILS(cudaErrorInvalidResourceHandle, cudaEventElapsedTime(&ms, from, to));
    OK(cudaEventRecord(from, stream));
    OK(rig_wait_word(stream, word, 1));
    OK(cudaEventRecord(to, stream));
    OK(cudaEventRecord(untimed, stream));
    OK(cudaEventSynchronize(from));
    FAILS(cudaErrorNotReady, cudaEventElapsedTime(&ms, from, to));
    const struct timespec pause = {.tv_nsec = 3000000};
    nanosleep(&pause, NULL);
    rig_set_word(word, 1);
    OK(cudaStreamSynchronize(stream));
    OK(cudaEventElapsedTime(&ms, from, to));
    assert_true(ms >= 3.0f);
    FAILS(cudaErrorInvalidResourceHandle, cudaEventElapsedTime(&ms, from, untimed));
    OK(cudaEventDestroy(from));
    OK(cudaEventDestroy(to));
}

/* ---- who runs what ---- */

typedef struct call_seen {
    pthread_t thread;
    int errors[3];
} call_seen;

static void CUDART_CB call_cuda(void *raw)
{
    call_seen *seen = raw;
    void *memory = NULL;
    seen->thread = pthread_self();
    seen->errors[0] = (int)cudaMalloc(&memory, 16);
    seen->errors[1] = (int)cudaDeviceSynchronize();
    seen->errors[2] = (int)cudaGetDevice(&(int){0});
}

TEST(test_host_functions)
{
    cudaStream_t stream = rig_stream();
    call_seen seen;
    OK(cudaLaunchHostFunc(stream, call_cuda, &seen));
    OK(cudaStreamSynchronize(stream));
    assert_false(pthread_equal(seen.thread, pthread_self()));
    for (int i = 0; i < 3; i++)
        assert_int_equal(seen.errors[i], cudaErrorNotPermitted);
    assert_int_equal(rig_counts().forbidden_calls, 3);
    FAILS(cudaErrorInvalidValue, cudaLaunchHostFunc(stream, NULL, NULL));
}

/* Work that was queued still happens after its stream is gone. */
TEST(test_destroy_is_not_a_wait)
{
    cudaStream_t stream = rig_stream();
    uint32_t *words = rig_pinned(2);
    OK(rig_wait_word(stream, &words[0], 1));
    OK(rig_write_word(stream, &words[1], 5));
    rig_drop(stream);
    assert_int_equal(__atomic_load_n(&words[1], __ATOMIC_ACQUIRE), 0);
    rig_set_word(&words[0], 1);
    OK(cudaDeviceSynchronize());
    assert_int_equal(words[1], 5);
}

static void *open_gate(void *word)
{
    const struct timespec pause = {.tv_nsec = 20000000};
    nanosleep(&pause, NULL);
    rig_set_word(word, 1);
    return NULL;
}

TEST(test_full_queue)
{
    kvf_emu_config config = rig_config();
    config.queue_entries = 16;
    kvf_emu_set_config(&config);
    cudaStream_t stream = rig_stream();
    uint32_t *words = rig_pinned(2);
    pthread_t thread;
    OK(rig_wait_word(stream, &words[0], 1));
    for (uint32_t i = 1; i < 16; i++)
        OK(rig_write_word(stream, &words[1], i));
    assert_int_equal(rig_counts().full_queues, 0);
    assert_int_equal(pthread_create(&thread, NULL, open_gate, words), 0);
    for (uint32_t i = 16; i < 100; i++)
        OK(rig_write_word(stream, &words[1], i));
    assert_true(rig_counts().full_queues >= 1);
    pthread_join(thread, NULL);
    OK(cudaStreamSynchronize(stream));
    assert_int_equal(words[1], 99);
}

/* 400 entries: about 100 pauses of 100 us on average. */
TEST(test_delays)
{
    kvf_emu_config config = rig_config();
    config.delay_seed = 11;
    kvf_emu_set_config(&config);
    cudaStream_t stream = rig_stream();
    uint32_t *word = rig_pinned(1);
    const uint64_t start = kvf_now_ns();
    for (uint32_t i = 0; i < 400; i++)
        OK(rig_write_word(stream, word, i));
    OK(cudaStreamSynchronize(stream));
    assert_true(kvf_now_ns() - start >= 4000000);
}

static int is_done(cudaStream_t stream)
{
    const cudaError_t error = cudaStreamQuery(stream);
    if (error == cudaErrorNotReady)
        (void)cudaGetLastError();
    else
        OK(error);
    return error == cudaSuccess;
}

/* Kernels on NULL and on a stream that was not made non-blocking come one after the other, whoever
 * is first; others do not wait for them. */
TEST(test_default_stream)
{
    static const cudaStream_t names[] = {NULL, cudaStreamLegacy};
    cudaStream_t blocking, apart = rig_stream();
    OK(cudaStreamCreate(&blocking));
    uint32_t *words = rig_pinned(4);
    for (uint32_t i = 0; i < 2; i++) {
        const cudaStream_t none = names[i];
        const struct {
            cudaStream_t first, second;
        } order[] = {{none, blocking}, {blocking, none}};
        for (uint32_t o = 0; o < 2; o++) {
            memset(words, 0, 4 * sizeof *words);
            OK(rig_wait_word(order[o].first, &words[0], 1));
            OK(rig_write_word(order[o].first, &words[1], 1));
            OK(rig_write_word(order[o].second, &words[1], 2));
            OK(rig_write_word(order[o].first, &words[1], 3));
            OK(rig_write_word(apart, &words[2], 1));
            OK(cudaStreamSynchronize(apart));
            assert_int_equal(words[2], 1);
            assert_false(is_done(none));
            assert_false(is_done(blocking));
            rig_set_word(&words[0], 1);
            OK(cudaStreamSynchronize(none)); /* and so for the other */
            assert_int_equal(words[1], 3);
            assert_true(is_done(none) && is_done(blocking));
        }
    }
    OK(rig_wait_word(blocking, &words[0], 2));
    assert_false(is_done(NULL)); /* though it has nothing of its own */
    rig_set_word(&words[0], 2);
    OK(cudaStreamSynchronize(NULL));
    FAILS(cudaErrorInvalidResourceHandle, cudaStreamDestroy(NULL));
    FAILS(cudaErrorInvalidValue, cudaStreamSynchronize(cudaStreamPerThread)); /* not there */
    OK(cudaStreamDestroy(blocking));
}

/* Events, copies and fills on NULL; streams that are ordered by events alone. */
TEST(test_default_stream_by_events)
{
    cudaStream_t apart = rig_stream();
    cudaEvent_t event = rig_event();
    uint32_t *cell = rig_memory(CELL_BYTES), *other = rig_memory(CELL_BYTES);
    uint32_t expected[CELL_WORDS] = {0}, zeros[CELL_WORDS] = {0}, *seen = rig_pinned(CELL_WORDS);
    OK(cudaMemsetAsync(cell, 0, CELL_BYTES, NULL));
    OK(cudaMemsetAsync(other, 0, CELL_BYTES, NULL));
    for (uint32_t i = 0; i < 40; i++) {
        const cudaStream_t stream = i & 1 ? apart : NULL;
        rig_join(stream, event, i & 1 ? NULL : apart);
        OK(rig_mix(stream, cell, other, i, CELL_WORDS));
        rig_mix_now(expected, zeros, i, CELL_WORDS);
    }
    rig_join(NULL, event, apart);
    rig_copy(NULL, seen, cell, CELL_BYTES);
    OK(cudaEventRecord(event, NULL));
    OK(cudaEventSynchronize(event));
    assert_memory_equal(seen, expected, CELL_BYTES);
}

/* cudaMemcpy and cudaMemset are of the default stream: blocking streams are ordered with them. */
TEST(test_legacy_order)
{
    cudaStream_t blocking;
    OK(cudaStreamCreate(&blocking));
    uint32_t *word = rig_pinned(1), *memory = rig_memory(64), seen[16];
    pthread_t thread;
    OK(rig_wait_word(blocking, word, 1));
    OK(cudaMemsetAsync(memory, 1, 64, blocking));
    OK(cudaMemset(memory, 2, 64)); /* returns, though it waits for the stream */
    OK(cudaMemcpyAsync(memory + 8, memory, 16, cudaMemcpyDeviceToDevice, blocking));
    assert_int_equal(pthread_create(&thread, NULL, open_gate, word), 0);
    OK(cudaStreamSynchronize(blocking));
    OK(cudaMemcpy(seen, memory, 64, cudaMemcpyDeviceToHost));
    for (int i = 0; i < 16; i++)
        assert_int_equal(seen[i], 0x02020202);
    pthread_join(thread, NULL);
    OK(cudaStreamDestroy(blocking));
}

/* Streams that share a queue of the hardware begin their work in the order in which it was
 * enqueued: a wait for a word holds up the write after it, though that is another stream's. */
TEST(test_connections)
{
    kvf_emu_config c;
    kvf_emu_get_config(&c);
    for (c.connections = 0; c.connections < 2; c.connections++) {
        kvf_emu_set_config(&c);
        cudaStream_t waits = rig_stream(), writes = rig_stream();
        uint32_t *words = rig_pinned(2);
        OK(rig_wait_word(waits, &words[0], 1));
        OK(rig_write_word(writes, &words[1], 1));
        const struct timespec pause = {.tv_nsec = 30000000};
        nanosleep(&pause, NULL);
        if (c.connections == 0)
            OK(cudaStreamSynchronize(writes));
        else
            FAILS(cudaErrorNotReady, cudaStreamQuery(writes));
        rig_set_word(&words[0], 1);
        OK(cudaStreamSynchronize(waits));
        OK(cudaStreamSynchronize(writes));
    }
}

/* A launch gets 48 KiB of shared memory, or what its kernel was allowed. A call that loads all
 * kernels of a list allows all there is, whoever did so before, and nobody takes it away. */
TEST(test_shared_memory)
{
    cudaStream_t stream = rig_stream();
    uint32_t *word = rig_pinned(1);
    int most;
    OK(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0));
    assert_true(most > 64 * 1024);
    OK(rig_load());
    OK(rig_fill_shared(stream, word, (size_t)most));
    assert_int_equal(rig_fill_shared(stream, word, (size_t)most + 1), cudaErrorInvalidValue);
    OK(rig_fill_shared_unlisted(stream, word, 48 * 1024));
    assert_int_equal(rig_fill_shared_unlisted(stream, word, 48 * 1024 + 1), cudaErrorInvalidValue);
    OK(rig_allow_shared(64 * 1024));
    OK(rig_fill_shared_unlisted(stream, word, 64 * 1024));
    FAILS(cudaErrorInvalidValue, (cudaError_t)rig_allow_shared(48 * 1024));
    FAILS(cudaErrorInvalidValue, (cudaError_t)rig_allow_shared(most + 1));
    OK(cudaStreamSynchronize(stream));
    assert_int_equal(*word, 7);
}

EACH_TEST_RUNS_BETWEEN(rig_begin, rig_end)
