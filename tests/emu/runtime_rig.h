/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TESTS_EMU_RUNTIME_RIG_H
#define KVF_TESTS_EMU_RUNTIME_RIG_H

/*
 * Helpers of the tests of the emulated runtime: checks, random numbers, a kernel that shows any
 * wrong order, words that hold a stream up. They call CUDA as the library does, through the
 * toolkit's own headers.
 */

#include "unit.h"

#include <cuda_runtime_api.h>

#include "emu_control.h"

#define OK(call) assert_int_equal(call, cudaSuccess)
/* Fails with this error, which cudaGetLastError then gives once. */
#define FAILS(error, call)                                                                         \
    do {                                                                                           \
        assert_int_equal(call, error);                                                             \
        assert_int_equal(cudaPeekAtLastError(), error);                                            \
        assert_int_equal(cudaGetLastError(), error);                                               \
        assert_int_equal(cudaGetLastError(), cudaSuccess);                                         \
    } while (0)

/* Word t of `count`: to[t] = to[t] * 31 + (from[t] ^ (salt + t)). Neither commutes nor repeats, so
 * any wrong order shows. A kernel; returns a cudaError_t. */
int rig_load(void); /* before a test holds a stream up: the first launch of a kernel may wait */
int rig_mix(cudaStream_t stream, uint32_t *to, const uint32_t *from, uint32_t salt, uint32_t count);
static inline void rig_mix_now(uint32_t *to, const uint32_t *from, uint32_t salt, uint32_t count)
{
    for (uint32_t t = 0; t < count; t++)
        to[t] = to[t] * 31u + (from[t] ^ (salt + t));
}

/* One word, by a kernel that starts early: read before it waits for what comes before it, which is
 * wrong, or after. */
int rig_take(cudaStream_t stream, uint32_t *to, const uint32_t *from, int is_wrong);
/* The right one, early wherever it stands. */
int rig_take_at_once(cudaStream_t stream, uint32_t *to, const uint32_t *from);

/* A kernel with so much shared memory writes 7; the other is on no list of kernels to load, and may
 * ask for what rig_allow_shared allowed. */
int rig_fill_shared(cudaStream_t stream, uint32_t *to, size_t bytes);
int rig_fill_shared_unlisted(cudaStream_t stream, uint32_t *to, size_t bytes);
int rig_allow_shared(int bytes);

/* Kernels: hold the stream up until (int32_t)(*word - value) >= 0; write a word. */
int rig_wait_word(cudaStream_t stream, uint32_t *word, uint32_t value);
int rig_write_word(cudaStream_t stream, uint32_t *word, uint32_t value);
static inline void rig_set_word(uint32_t *word, uint32_t value)
{
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
}

/* Everything that a test takes here is given back at its end, or by rig_drop. */
typedef enum rig_kind { RIG_EVENT, RIG_STREAM, RIG_MEMORY, RIG_PINNED, RIG_KINDS } rig_kind;
typedef struct rig_taken {
    rig_kind kind;
    void *what;
} rig_taken;
#define RIG_TAKEN_MAX 128u
static rig_taken rig_all[RIG_TAKEN_MAX];
static uint32_t rig_count;

static inline void *rig_take_over(rig_kind kind, void *what)
{
    assert_true(rig_count < RIG_TAKEN_MAX);
    rig_all[rig_count++] = (rig_taken){kind, what};
    return what;
}
static inline cudaStream_t rig_stream(void)
{
    cudaStream_t stream;
    OK(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, 0));
    return rig_take_over(RIG_STREAM, stream);
}
static inline cudaEvent_t rig_event(void)
{
    cudaEvent_t event;
    OK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    return rig_take_over(RIG_EVENT, event);
}
static inline void *rig_memory(size_t bytes)
{
    void *memory;
    OK(cudaMalloc(&memory, bytes));
    return rig_take_over(RIG_MEMORY, memory);
}
static inline uint32_t *rig_pinned(size_t words)
{
    void *memory;
    OK(cudaHostAlloc(&memory, words * 4, cudaHostAllocMapped));
    memset(memory, 0, words * 4);
    return rig_take_over(RIG_PINNED, memory);
}
/* Gives back everything of a kind, or one thing. */
static inline void rig_give_back(rig_kind kind, const void *only)
{
    for (uint32_t i = 0; i < rig_count; i++) {
        void *what = rig_all[i].what;
        if (!what || rig_all[i].kind != kind || (only && only != what))
            continue;
        OK(kind == RIG_EVENT    ? cudaEventDestroy(what)
           : kind == RIG_STREAM ? cudaStreamDestroy(what)
           : kind == RIG_MEMORY ? cudaFree(what)
                                : cudaFreeHost(what));
        rig_all[i].what = NULL;
    }
}
static inline void rig_drop(const void *what)
{
    for (int kind = 0; kind < RIG_KINDS; kind++)
        rig_give_back((rig_kind)kind, what);
}
static inline void rig_copy(cudaStream_t stream, void *to, const void *from, size_t bytes)
{
    OK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream));
}
static inline void rig_join(cudaStream_t waits, cudaEvent_t event, cudaStream_t records)
{
    OK(cudaEventRecord(event, records));
    OK(cudaStreamWaitEvent(waits, event, 0));
}

static inline void rig_capture_begin(cudaStream_t stream)
{
    OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
}
static inline cudaGraphExec_t rig_capture_end(cudaStream_t stream)
{
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    OK(cudaStreamEndCapture(stream, &graph));
    OK(cudaGraphInstantiate(&exec, graph, 0));
    OK(cudaGraphDestroy(graph));
    return exec;
}

static inline kvf_emu_counts rig_counts(void)
{
    kvf_emu_counts counts;
    kvf_emu_get_counts(&counts);
    return counts;
}

static inline kvf_emu_config rig_config(void)
{
    kvf_emu_config config;
    kvf_emu_get_config(&config);
    return config;
}

static inline uint32_t rig_random(uint64_t *state)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(*state >> 33);
}

/* For every test: the machine as it is by default; at the end nothing is alive. */
static inline int rig_begin(void **state)
{
    kvf_emu_reset();
    OK(rig_load());
    kvf_emu_reset();
    rig_count = 0;
    return 0;
}
static inline int rig_end(void **state)
{
    rig_drop(NULL);
    return kvf_emu_is_clean() ? 0 : -1;
}

#endif
