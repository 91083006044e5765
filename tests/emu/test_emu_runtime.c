/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The emulated runtime: streams, events, host functions, words.
 *
 * The main property: a random program over several streams, ordered by events alone and under
 * delays, gives what running it in sequence gives.
 */

#include "runtime_rig.h"

#include <pthread.h>
#include <string.h>
#include <time.h>

#include "common/clock.h"

#define STREAMS    4u
#define CELLS      12u
#define CELL_WORDS 48u
#define CELL_BYTES (CELL_WORDS * 4)
#define PROGRAM    200u

typedef struct step {
    enum { STEP_MIX, STEP_COPY, STEP_FILL, STEP_CALL } kind;
    uint32_t stream, to, from, salt;
} step;

typedef struct mix_call {
    uint32_t *to;
    const uint32_t *from;
    uint32_t salt, count;
} mix_call;

static void CUDART_CB mix_on_host(void *raw)
{
    const mix_call *c = raw;
    rig_mix_now(c->to, c->from, c->salt, c->count);
}

static void make_program(uint64_t *random, step *program)
{
    for (uint32_t i = 0; i < PROGRAM; i++) {
        const uint32_t dice = rig_random(random) % 8;
        program[i] = (step){.kind = dice < 4   ? STEP_MIX
                                    : dice < 6 ? STEP_COPY
                                    : dice < 7 ? STEP_CALL
                                               : STEP_FILL,
                            .stream = rig_random(random) % STREAMS,
                            .to = rig_random(random) % CELLS,
                            .from = rig_random(random) % CELLS,
                            .salt = rig_random(random)};
        if (program[i].from == program[i].to)
            program[i].from = (program[i].to + 1) % CELLS;
    }
}

static void run_in_sequence(const step *s, uint32_t *cells)
{
    uint32_t *to = cells + s->to * CELL_WORDS;
    const uint32_t *from = cells + s->from * CELL_WORDS;
    if (s->kind == STEP_COPY)
        memcpy(to, from, CELL_BYTES);
    else if (s->kind == STEP_FILL)
        memset(to, (int)(s->salt & 0xff), CELL_BYTES);
    else
        rig_mix_now(to, from, s->salt, s->kind == STEP_CALL ? 1 : CELL_WORDS);
}

static void enqueue(const step *s, uint32_t *cells, mix_call *call, cudaStream_t stream)
{
    uint32_t *to = cells + s->to * CELL_WORDS;
    const uint32_t *from = cells + s->from * CELL_WORDS;
    *call = (mix_call){to, from, s->salt, 1};
    if (s->kind == STEP_COPY)
        rig_copy(stream, to, from, CELL_BYTES);
    else if (s->kind == STEP_FILL)
        OK(cudaMemsetAsync(to, (int)(s->salt & 0xff), CELL_BYTES, stream));
    else if (s->kind == STEP_CALL)
        OK(cudaLaunchHostFunc(stream, mix_on_host, call));
    else
        OK(rig_mix(stream, to, from, s->salt, CELL_WORDS));
}

/* One event per cell: a step waits for both of its cells before, and records both after. */
static void run_on_streams(const step *program, uint32_t *cells, uint32_t seed)
{
    cudaStream_t streams[STREAMS];
    cudaEvent_t events[CELLS];
    mix_call calls[PROGRAM];
    kvf_emu_config config;
    kvf_emu_get_config(&config);
    config.delay_seed = seed;
    config.queue_entries = 64;
    kvf_emu_set_config(&config);
    for (uint32_t i = 0; i < STREAMS; i++)
        streams[i] = rig_stream();
    for (uint32_t i = 0; i < CELLS; i++)
        events[i] = rig_event();
    for (uint32_t i = 0; i < PROGRAM; i++) {
        const step *s = &program[i];
        cudaStream_t stream = streams[s->stream];
        OK(cudaStreamWaitEvent(stream, events[s->to], 0));
        OK(cudaStreamWaitEvent(stream, events[s->from], 0));
        enqueue(s, cells, &calls[i], stream);
        OK(cudaEventRecord(events[s->to], stream));
        OK(cudaEventRecord(events[s->from], stream));
    }
    for (uint32_t i = 0; i < STREAMS; i++)
        OK(cudaStreamSynchronize(streams[i]));
    for (uint32_t i = 0; i < CELLS; i++)
        OK(cudaEventDestroy(events[i]));
    for (uint32_t i = 0; i < STREAMS; i++)
        OK(cudaStreamDestroy(streams[i]));
}

static void test_random_program(void **state)
{
    for (uint32_t seed = 1; seed <= 3; seed++) {
        uint64_t random = seed;
        step program[PROGRAM];
        uint32_t expected[CELLS * CELL_WORDS], seen[CELLS * CELL_WORDS];
        print_message("seed %u\n", seed);
        make_program(&random, program);
        for (uint32_t i = 0; i < CELLS * CELL_WORDS; i++)
            expected[i] = rig_random(&random);
        uint32_t *cells = rig_memory(sizeof expected);
        OK(cudaMemcpy(cells, expected, sizeof expected, cudaMemcpyHostToDevice));
        for (uint32_t i = 0; i < PROGRAM; i++)
            run_in_sequence(&program[i], expected);
        run_on_streams(program, cells, seed);
        OK(cudaMemcpy(seen, cells, sizeof seen, cudaMemcpyDeviceToHost));
        assert_memory_equal(seen, expected, sizeof seen);
        OK(cudaFree(cells));
    }
}

/* A wait is for the record that was last before it, whatever is recorded later. */
static void test_event_snapshot(void **state)
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
    OK(cudaEventDestroy(event));
    OK(cudaStreamDestroy(held));
    OK(cudaStreamDestroy(free_stream));
    OK(cudaStreamDestroy(waits));
    OK(cudaFreeHost(words));
}

/* More records of one event than it has slots, on two streams in turn. */
static void test_event_reused(void **state)
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
    OK(cudaEventDestroy(event));
    OK(cudaStreamDestroy(a));
    OK(cudaStreamDestroy(b));
    OK(cudaFree(cell));
    OK(cudaFree(other));
}

static void test_elapsed_time(void **state)
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
    OK(cudaEventDestroy(untimed));
    OK(cudaStreamDestroy(stream));
    OK(cudaFreeHost(word));
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

static void test_host_functions(void **state)
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
    OK(cudaStreamDestroy(stream));
}

/* Work that was queued still happens after its stream is gone. */
static void test_destroy_is_not_a_wait(void **state)
{
    cudaStream_t stream = rig_stream();
    uint32_t *words = rig_pinned(2);
    OK(rig_wait_word(stream, &words[0], 1));
    OK(rig_write_word(stream, &words[1], 5));
    OK(cudaStreamDestroy(stream));
    assert_int_equal(__atomic_load_n(&words[1], __ATOMIC_ACQUIRE), 0);
    rig_set_word(&words[0], 1);
    OK(cudaDeviceSynchronize());
    assert_int_equal(words[1], 5);
    OK(cudaFreeHost(words));
}

static void *open_gate(void *word)
{
    const struct timespec pause = {.tv_nsec = 20000000};
    nanosleep(&pause, NULL);
    rig_set_word(word, 1);
    return NULL;
}

static void test_full_queue(void **state)
{
    kvf_emu_config config;
    kvf_emu_get_config(&config);
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
    OK(cudaStreamDestroy(stream));
    OK(cudaFreeHost(words));
}

/* 400 entries: about 100 pauses of 100 us on average. */
static void test_delays(void **state)
{
    kvf_emu_config config;
    kvf_emu_get_config(&config);
    config.delay_seed = 11;
    kvf_emu_set_config(&config);
    cudaStream_t stream = rig_stream();
    uint32_t *word = rig_pinned(1);
    const uint64_t start = kvf_now_ns();
    for (uint32_t i = 0; i < 400; i++)
        OK(rig_write_word(stream, word, i));
    OK(cudaStreamSynchronize(stream));
    assert_true(kvf_now_ns() - start >= 4000000);
    OK(cudaStreamDestroy(stream));
    OK(cudaFreeHost(word));
}

/* The default stream of cudaMemcpy and cudaMemset: blocking streams are ordered against it. */
static void test_legacy_order(void **state)
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
    OK(cudaFree(memory));
    OK(cudaFreeHost(word));
}

/* Streams that share a queue of the hardware begin their work in the order in which it was
 * enqueued: a wait for a word holds up the write after it, though that is another stream's. */
static void test_connections(void **state)
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
        OK(cudaStreamDestroy(waits));
        OK(cudaStreamDestroy(writes));
        OK(cudaFreeHost(words));
    }
}

/* A launch gets 48 KiB of shared memory, or what its kernel was allowed. A call that loads all
 * kernels of a list allows all there is, whoever did so before, and nobody takes it away. */
static void test_shared_memory(void **state)
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
    OK(cudaFreeHost(word));
    OK(cudaStreamDestroy(stream));
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, rig_begin, rig_end)
    const struct CMUnitTest tests[] = {
        TEST(test_random_program), TEST(test_event_snapshot), TEST(test_event_reused),
        TEST(test_elapsed_time),   TEST(test_host_functions), TEST(test_destroy_is_not_a_wait),
        TEST(test_full_queue),     TEST(test_delays),         TEST(test_legacy_order),
        TEST(test_connections),    TEST(test_shared_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
