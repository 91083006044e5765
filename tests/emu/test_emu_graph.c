/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Stream capture, graphs, batch copies, matrix products and early starts of the emulated runtime.
 *
 * The main properties: a replay does what the same calls do outside of a capture, with the inputs
 * it finds then; and what CUDA refuses in a capture is refused, voids it, and leaves the stream
 * usable. A kernel that starts early meets old data in every second replay until it waits, and
 * none after that.
 */

#include "runtime_rig.h"

#include <cublas_v2.h>
#include <pthread.h>
#include <time.h>

#define WORDS 64u
#define BYTES (WORDS * 4)

static void set_delays(uint32_t seed)
{
    kvf_emu_config config = rig_config();
    config.delay_seed = seed;
    kvf_emu_set_config(&config);
}

static enum cudaStreamCaptureStatus status_of(cudaStream_t stream)
{
    enum cudaStreamCaptureStatus status;
    OK(cudaStreamIsCapturing(stream, &status));
    return status;
}

/* A capture that was voided: it says so, ends with no graph, and the stream works again. */
static void expect_void(cudaStream_t stream, uint32_t *memory)
{
    cudaGraph_t graph = (cudaGraph_t)(void *)memory;
    assert_int_equal(status_of(stream), cudaStreamCaptureStatusInvalidated);
    FAILS(cudaErrorStreamCaptureInvalidated, cudaMemsetAsync(memory, 0, BYTES, stream));
    FAILS(cudaErrorStreamCaptureInvalidated, cudaStreamEndCapture(stream, &graph));
    assert_null(graph);
    assert_int_equal(status_of(stream), cudaStreamCaptureStatusNone);
    OK(cudaMemsetAsync(memory, 0, BYTES, stream));
    OK(cudaStreamSynchronize(stream));
}

/* ---- replay ---- */

typedef struct machine {
    cudaStream_t streams[3];
    cudaEvent_t events[4];
    uint32_t *input, *output, *a, *b, *c, *calls;
} machine;

static void CUDART_CB count_call(void *word)
{
    ++*(uint32_t *)word;
}

/* Two branches from one input, joined: c = mix(mix(a), mix(b)), copied out. */
static void enqueue_diamond(machine *m)
{
    cudaStream_t *s = m->streams;
    rig_copy(s[0], m->a, m->input, BYTES);
    rig_join(s[1], m->events[0], s[0]);
    rig_join(s[2], m->events[0], s[0]);
    OK(cudaMemsetAsync(m->b, 5, BYTES, s[1]));
    OK(rig_mix(s[1], m->b, m->a, 7, WORDS));
    OK(cudaMemsetAsync(m->c, 6, BYTES, s[2]));
    OK(rig_mix(s[2], m->c, m->a, 9, WORDS));
    OK(cudaLaunchHostFunc(s[2], count_call, m->calls));
    rig_join(s[1], m->events[1], s[2]);
    OK(rig_mix(s[1], m->c, m->b, 11, WORDS));
    rig_join(s[0], m->events[2], s[1]);
    rig_copy(s[0], m->output, m->c, BYTES);
}

static void diamond_now(const uint32_t *input, uint32_t *output)
{
    uint32_t b[WORDS];
    memset(b, 5, BYTES);
    memset(output, 6, BYTES);
    rig_mix_now(b, input, 7, WORDS);
    rig_mix_now(output, input, 9, WORDS);
    rig_mix_now(output, b, 11, WORDS);
}

static void open_machine(machine *m)
{
    for (int i = 0; i < 3; i++)
        m->streams[i] = rig_stream();
    for (int i = 0; i < 4; i++)
        m->events[i] = rig_event();
    m->input = rig_pinned(WORDS);
    m->output = rig_pinned(WORDS);
    m->calls = rig_pinned(1);
    m->a = rig_memory(BYTES);
    m->b = rig_memory(BYTES);
    m->c = rig_memory(BYTES);
}

TEST(test_replay)
{
    for (uint32_t seed = 0; seed < 4; seed++) {
        machine m;
        uint64_t random = seed + 1;
        uint32_t expected[WORDS];
        print_message("seed %u\n", seed);
        set_delays(seed);
        open_machine(&m);
        rig_capture_begin(m.streams[0]);
        assert_int_equal(status_of(m.streams[0]), cudaStreamCaptureStatusActive);
        enqueue_diamond(&m);
        assert_int_equal(status_of(m.streams[2]), cudaStreamCaptureStatusActive);
        cudaGraphExec_t exec = rig_capture_end(m.streams[0]);
        assert_int_equal(status_of(m.streams[2]), cudaStreamCaptureStatusNone);
        assert_int_equal(m.calls[0], 0);
        for (uint32_t i = 0; i < 20; i++) {
            for (uint32_t w = 0; w < WORDS; w++)
                m.input[w] = rig_random(&random);
            diamond_now(m.input, expected);
            OK(cudaGraphLaunch(exec, m.streams[i % 3]));
            OK(cudaStreamSynchronize(m.streams[i % 3]));
            assert_memory_equal(m.output, expected, BYTES);
        }
        assert_int_equal(m.calls[0], 20);
        assert_int_equal(rig_counts().launches, 60 + 60 * seed);
        OK(cudaGraphExecDestroy(exec));
    }
}

/* Launches of one graph on several streams do not overlap, and each goes in its stream's order. */
TEST(test_launches_in_order)
{
    set_delays(3);
    cudaStream_t a = rig_stream(), b = rig_stream();
    uint32_t *cell = rig_memory(BYTES), *zeros = rig_memory(BYTES), *seen = rig_pinned(WORDS);
    uint32_t expected[WORDS] = {0}, none[WORDS] = {0};
    cudaEvent_t event = rig_event();
    OK(cudaMemsetAsync(cell, 0, BYTES, a));
    OK(cudaMemsetAsync(zeros, 0, BYTES, a));
    rig_capture_begin(a);
    OK(rig_mix(a, cell, zeros, 1, WORDS));
    rig_join(b, event, a);
    OK(rig_mix(b, cell, zeros, 2, WORDS));
    rig_join(a, event, b);
    cudaGraphExec_t exec = rig_capture_end(a);
    for (uint32_t i = 0; i < 30; i++) {
        OK(cudaGraphLaunch(exec, a));
        OK(cudaGraphLaunch(exec, b));
        for (uint32_t k = 0; k < 4; k++)
            rig_mix_now(expected, none, k % 2 + 1, WORDS);
    }
    rig_join(a, event, b);
    rig_copy(a, seen, cell, BYTES);
    OK(cudaGraphExecDestroy(exec)); /* what is on its way still happens */
    OK(cudaStreamSynchronize(a));
    assert_memory_equal(seen, expected, BYTES);
    assert_int_equal(rig_counts().graph_launches, 60);
}

/* A branch waits for a word that another branch, and then the host, writes: branches run side by
 * side, whatever the order of recording. */
TEST(test_words_in_graph)
{
    cudaStream_t a = rig_stream(), b = rig_stream();
    cudaEvent_t event = rig_event();
    uint32_t *words = rig_pinned(4);
    rig_capture_begin(a);
    rig_join(b, event, a);
    OK(rig_wait_word(b, &words[0], 1));
    OK(rig_write_word(b, &words[1], 1));
    OK(rig_write_word(a, &words[0], 1));
    OK(rig_wait_word(a, &words[2], 1));
    rig_join(a, event, b);
    OK(rig_write_word(a, &words[3], 1));
    cudaGraphExec_t exec = rig_capture_end(a);
    for (int i = 0; i < 10; i++) {
        memset(words, 0, 16);
        OK(cudaGraphLaunch(exec, a));
        while (__atomic_load_n(&words[1], __ATOMIC_ACQUIRE) == 0) {
            const struct timespec pause = {.tv_nsec = 50000};
            nanosleep(&pause, NULL);
        }
        assert_int_equal(__atomic_load_n(&words[3], __ATOMIC_ACQUIRE), 0);
        rig_set_word(&words[2], 1);
        OK(cudaStreamSynchronize(a));
        assert_int_equal(words[3], 1);
    }
    OK(cudaGraphExecDestroy(exec));
}

/* ---- what a capture refuses ---- */

TEST(test_unjoined)
{
    cudaStream_t a = rig_stream(), b = rig_stream();
    cudaEvent_t event = rig_event();
    uint32_t *memory = rig_memory(BYTES);
    cudaGraph_t graph = NULL;
    rig_capture_begin(a);
    OK(cudaMemsetAsync(memory, 1, BYTES, a));
    rig_join(b, event, a);
    OK(cudaMemsetAsync(memory, 2, BYTES, b));
    FAILS(cudaErrorStreamCaptureUnjoined, cudaStreamEndCapture(a, &graph));
    assert_null(graph);
    assert_int_equal(status_of(b), cudaStreamCaptureStatusNone);
    /* Joined, then more work on the branch. */
    rig_capture_begin(a);
    rig_join(b, event, a);
    OK(cudaMemsetAsync(memory, 2, BYTES, b));
    rig_join(a, event, b);
    OK(cudaMemsetAsync(memory, 3, BYTES, b));
    OK(cudaMemsetAsync(memory, 4, BYTES, a));
    FAILS(cudaErrorStreamCaptureUnjoined, cudaStreamEndCapture(a, &graph));
    /* A branch without work of its own needs no join. */
    rig_capture_begin(a);
    OK(cudaMemsetAsync(memory, 1, BYTES, a));
    rig_join(b, event, a);
    OK(cudaStreamEndCapture(a, &graph));
    OK(cudaGraphDestroy(graph));
    FAILS(cudaErrorIllegalState, cudaStreamEndCapture(a, &graph));
    rig_capture_begin(a);
    FAILS(cudaErrorIllegalState, cudaStreamBeginCapture(a, cudaStreamCaptureModeRelaxed));
    rig_join(b, event, a);
    FAILS(cudaErrorStreamCaptureUnmatched, cudaStreamEndCapture(b, &graph));
    FAILS(cudaErrorStreamCaptureInvalidated, cudaStreamEndCapture(a, &graph));
}

TEST(test_refused_calls)
{
    cudaStream_t a = rig_stream(), b = rig_stream();
    cudaEvent_t outside = rig_event(), inside = rig_event();
    uint32_t *memory = rig_memory(BYTES), host[WORDS];
    void *more = NULL;
    OK(cudaEventRecord(outside, b));
    OK(cudaEventSynchronize(outside));

    rig_capture_begin(a);
    FAILS(cudaErrorStreamCaptureUnsupported, cudaStreamSynchronize(a));
    expect_void(a, memory);
    OK(cudaStreamBeginCapture(a, cudaStreamCaptureModeRelaxed));
    FAILS(cudaErrorStreamCaptureUnsupported, cudaStreamQuery(a));
    expect_void(a, memory);
    rig_capture_begin(a);
    FAILS(cudaErrorStreamCaptureUnsupported, cudaMalloc(&more, 4));
    expect_void(a, memory);
    rig_capture_begin(a);
    FAILS(cudaErrorStreamCaptureUnsupported, cudaEventQuery(outside));
    expect_void(a, memory);
    rig_capture_begin(a);
    FAILS(cudaErrorStreamCaptureUnsupported,
          cudaMemcpyAsync(memory, host, BYTES, cudaMemcpyDefault, a));
    expect_void(a, memory);
    rig_capture_begin(a);
    FAILS(cudaErrorStreamCaptureIsolation, cudaStreamWaitEvent(a, outside, 0));
    expect_void(a, memory);

    OK(cudaStreamBeginCapture(a, cudaStreamCaptureModeRelaxed));
    OK(cudaStreamBeginCapture(b, cudaStreamCaptureModeRelaxed));
    OK(cudaEventRecord(inside, a));
    FAILS(cudaErrorStreamCaptureMerge, cudaStreamWaitEvent(b, inside, 0));
    expect_void(b, memory);
    expect_void(a, memory);

    OK(cudaStreamBeginCapture(a, cudaStreamCaptureModeRelaxed));
    OK(cudaEventRecord(inside, a));
    FAILS(cudaErrorCapturedEvent, cudaEventQuery(inside));
    FAILS(cudaErrorCapturedEvent, cudaEventSynchronize(inside));
    OK(cudaEventQuery(outside)); /* a relaxed capture lets the thread do the rest */
    OK(cudaMalloc(&more, 4));
    OK(cudaFree(more));
    OK(cudaStreamSynchronize(b));
    OK(cudaGraphExecDestroy(rig_capture_end(a)));
    FAILS(cudaErrorCapturedEvent, cudaStreamWaitEvent(b, inside, 0));
    OK(cudaEventRecord(inside, b));
    OK(cudaEventSynchronize(inside));
    FAILS(cudaErrorStreamCaptureUnsupported, cudaStreamBeginCapture(NULL, 0));
}

/* While a blocking stream is captured nothing may come to the default stream, in whatever mode; to
 * ask voids nothing. A captured event is nothing that it can wait for. */
TEST(test_default_stream_beside_captures)
{
    enum cudaStreamCaptureStatus status;
    uint32_t *memory = rig_memory(BYTES), *word = rig_pinned(1);
    cudaStream_t blocking, apart = rig_stream();
    cudaEvent_t inside = rig_event();
    OK(cudaStreamCreate(&blocking));
    OK(cudaStreamBeginCapture(blocking, cudaStreamCaptureModeRelaxed));
    FAILS(cudaErrorStreamCaptureImplicit, cudaStreamIsCapturing(NULL, &status));
    OK(rig_write_word(apart, word, 3));
    OK(cudaGraphExecDestroy(rig_capture_end(blocking)));
    for (int i = 0; i < 4; i++) {
        OK(cudaStreamBeginCapture(blocking, cudaStreamCaptureModeRelaxed));
        FAILS(cudaErrorStreamCaptureImplicit, i == 0   ? (cudaError_t)rig_write_word(NULL, word, 1)
                                              : i == 1 ? cudaMemset(memory, 0, BYTES)
                                              : i == 2 ? cudaEventRecord(inside, NULL)
                                                       : cudaStreamSynchronize(NULL));
        expect_void(blocking, memory);
    }

    /* Beside a stream of no such order it is as ever, and nothing of it is recorded. */
    rig_capture_begin(apart);
    OK(cudaStreamIsCapturing(NULL, &status));
    assert_int_equal(status, cudaStreamCaptureStatusNone);
    OK(rig_write_word(NULL, word, 5));
    FAILS(cudaErrorStreamCaptureUnsupported, cudaStreamSynchronize(NULL));
    expect_void(apart, memory);
    rig_capture_begin(apart);
    OK(cudaEventRecord(inside, apart));
    FAILS(cudaErrorStreamCaptureImplicit, cudaStreamWaitEvent(NULL, inside, 0));
    expect_void(apart, memory);

    /* A graph may be launched there. */
    rig_capture_begin(apart);
    OK(rig_write_word(apart, word, 6));
    cudaGraphExec_t exec = rig_capture_end(apart);
    OK(rig_write_word(blocking, word, 7));
    OK(cudaGraphLaunch(exec, NULL));
    OK(cudaStreamSynchronize(blocking));
    OK(cudaStreamSynchronize(NULL));
    assert_int_equal(*word, 6);
    OK(cudaGraphExecDestroy(exec));
    OK(cudaStreamDestroy(blocking));
}

typedef struct elsewhere {
    cudaEvent_t event;
    cudaStream_t stream;
    int query, end;
} elsewhere;

static void *call_elsewhere(void *raw)
{
    elsewhere *e = raw;
    cudaGraph_t graph;
    e->query = (int)cudaEventQuery(e->event);
    e->end = (int)cudaStreamEndCapture(e->stream, &graph);
    return NULL;
}

/* The mode decides what another thread may do. */
TEST(test_modes)
{
    elsewhere e = {.event = rig_event(), .stream = rig_stream()};
    uint32_t *memory = rig_memory(BYTES);
    pthread_t thread;
    for (int mode = 0; mode < 2; mode++) {
        OK(cudaStreamBeginCapture(e.stream, mode == 0 ? cudaStreamCaptureModeGlobal
                                                      : cudaStreamCaptureModeThreadLocal));
        assert_int_equal(pthread_create(&thread, NULL, call_elsewhere, &e), 0);
        pthread_join(thread, NULL);
        assert_int_equal(e.query, mode == 0 ? cudaErrorStreamCaptureUnsupported : cudaSuccess);
        assert_int_equal(e.end, cudaErrorStreamCaptureWrongThread);
        if (mode == 0)
            expect_void(e.stream, memory);
        else
            OK(cudaGraphExecDestroy(rig_capture_end(e.stream)));
    }
}

/* ---- batches ---- */

static cudaError_t batch(uint32_t *to, const uint32_t *from, cudaStream_t stream)
{
    void *targets[WORDS / 4];
    const void *sources[WORDS / 4];
    size_t sizes[WORDS / 4], first = 0;
    struct cudaMemcpyAttributes attributes;
    memset(&attributes, 0, sizeof attributes);
    attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
    for (size_t i = 0; i < WORDS / 4; i++) {
        targets[i] = to + 4 * (WORDS / 4 - 1 - i);
        sources[i] = from + 4 * i;
        sizes[i] = 16;
    }
    return cudaMemcpyBatchAsync(targets, sources, sizes, WORDS / 4, &attributes, &first, 1, stream);
}

static int is_reversed(const uint32_t *seen, const uint32_t *from)
{
    for (size_t i = 0; i < WORDS; i++)
        if (seen[4 * (WORDS / 4 - 1 - i / 4) + i % 4] != from[i])
            return 0;
    return 1;
}

TEST(test_batch)
{
    set_delays(5);
    cudaStream_t stream = rig_stream();
    uint32_t *from = rig_pinned(WORDS), *to = rig_pinned(WORDS);
    for (uint32_t i = 0; i < WORDS; i++)
        from[i] = i + 1;
    OK(batch(to, from, stream));
    OK(cudaStreamSynchronize(stream));
    assert_true(is_reversed(to, from));
    assert_int_equal(rig_counts().copies, WORDS / 4);

    kvf_emu_config config = rig_config();
    for (int mode = 0; mode < 3; mode++) {
        config.batch_capture = (kvf_emu_batch_capture)mode;
        kvf_emu_set_config(&config);
        memset(to, 0, BYTES);
        rig_capture_begin(stream);
        if (mode == KVF_EMU_BATCH_REFUSED) {
            FAILS(cudaErrorStreamCaptureUnsupported, batch(to, from, stream));
            expect_void(stream, to);
            continue;
        }
        OK(batch(to, from, stream));
        cudaGraphExec_t exec = rig_capture_end(stream);
        OK(cudaGraphLaunch(exec, stream));
        OK(cudaStreamSynchronize(stream));
        assert_int_equal(is_reversed(to, from), mode == KVF_EMU_BATCH_ALLOWED);
        OK(cudaGraphExecDestroy(exec));
    }
    assert_int_equal(rig_counts().dropped_batches, 1);
    config.driver_version = 12060;
    kvf_emu_set_config(&config);
    FAILS(cudaErrorCallRequiresNewerDriver, batch(to, from, stream));
}

TEST(test_batch_arguments)
{
    cudaStream_t stream = rig_stream();
    uint32_t *memory = rig_memory(BYTES);
    void *to[2] = {memory, memory + 4};
    const void *from[2] = {memory + 8, memory + 12};
    size_t sizes[2] = {16, 16}, first[2] = {0, 0};
    struct cudaMemcpyAttributes order[2];
    memset(order, 0, sizeof order);
    order[0].srcAccessOrder = order[1].srcAccessOrder = cudaMemcpySrcAccessOrderStream;
    FAILS(cudaErrorInvalidValue, cudaMemcpyBatchAsync(to, from, sizes, 0, order, first, 1, stream));
    FAILS(cudaErrorInvalidValue, cudaMemcpyBatchAsync(to, from, sizes, 2, order, first, 1, NULL));
    FAILS(cudaErrorInvalidValue, cudaMemcpyBatchAsync(to, from, sizes, 2, order, first, 2, stream));
    FAILS(cudaErrorInvalidValue, cudaMemcpyBatchAsync(to, from, sizes, 2, order, first, 0, stream));
    sizes[1] = 0;
    FAILS(cudaErrorInvalidValue, cudaMemcpyBatchAsync(to, from, sizes, 2, order, first, 1, stream));
    sizes[1] = BYTES;
    FAILS(cudaErrorInvalidValue, cudaMemcpyBatchAsync(to, from, sizes, 2, order, first, 1, stream));
    sizes[1] = 16;
    order[0].srcAccessOrder = cudaMemcpySrcAccessOrderInvalid;
    FAILS(cudaErrorInvalidValue, cudaMemcpyBatchAsync(to, from, sizes, 2, order, first, 1, stream));
    order[0].srcAccessOrder = cudaMemcpySrcAccessOrderAny;
    first[1] = 1;
    OK(cudaMemcpyBatchAsync(to, from, sizes, 2, order, first, 2, stream));
    OK(cudaStreamSynchronize(stream));
}

/* The driver's form of 12.8 and that of 13.0, by version; neither before 12.8. */
TEST(test_driver_symbols)
{
    kvf_emu_config config;
    void *old = NULL, *new_form = NULL;
    enum cudaDriverEntryPointQueryResult result;
    const char *name = "cuMemcpyBatchAsync";
    OK(cudaGetDriverEntryPointByVersion(name, &old, 12080, cudaEnableDefault, &result));
    assert_int_equal(result, cudaDriverEntryPointSuccess);
    OK(cudaGetDriverEntryPointByVersion(name, &new_form, 13000, cudaEnableDefault, &result));
    assert_int_equal(result, cudaDriverEntryPointSuccess);
    assert_ptr_not_equal(old, new_form);
    kvf_emu_get_config(&config);
    config.driver_version = 12060;
    kvf_emu_set_config(&config);
    OK(cudaGetDriverEntryPointByVersion(name, &old, 12080, cudaEnableDefault, &result));
    assert_int_equal(result, cudaDriverEntryPointVersionNotSufficent);
    assert_null(old);
    OK(cudaGetDriverEntryPointByVersion("cuNone", &old, 12080, cudaEnableDefault, &result));
    assert_int_equal(result, cudaDriverEntryPointSymbolNotFound);
    FAILS(cudaErrorSymbolNotFound,
          cudaGetDriverEntryPointByVersion("cuNone", &old, 12080, cudaEnableDefault, NULL));
}

/* ---- matrix products ---- */

static uint16_t to_bf16(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return (uint16_t)(bits >> 16);
}

/* Small whole numbers: every format and every order of sums is exact. fp16 by hand: 0 .. 3. */
static void put(void *data, cudaDataType type, size_t at, int value)
{
    static const uint16_t halves[] = {0, 0x3c00, 0x4000, 0x4200};
    if (type == CUDA_R_32F)
        ((float *)data)[at] = (float)value;
    else
        ((uint16_t *)data)[at] = type == CUDA_R_16BF ? to_bf16((float)value) : halves[value];
}

static void check_product(cublasHandle_t handle, cudaStream_t stream, cudaDataType type, int m,
                          int n, int k, int is_ta, int is_tb, int is_captured)
{
    const int lda = (is_ta ? k : m) + 3, ldb = (is_tb ? n : k) + 1, ldc = m + 2;
    uint64_t random = (uint64_t)m * 31 + (uint64_t)n * 7 + (uint64_t)k;
    const size_t a_count = (size_t)lda * (size_t)(is_ta ? m : k);
    const size_t b_count = (size_t)ldb * (size_t)(is_tb ? k : n);
    void *a = rig_pinned(a_count), *b = rig_pinned(b_count);
    float *c = (float *)(void *)rig_pinned((size_t)ldc * (size_t)n), one = 1, half = 0.5f;
    int *a_int = malloc(a_count * sizeof *a_int), *b_int = malloc(b_count * sizeof *b_int);
    for (size_t i = 0; i < a_count; i++)
        put(a, type, i, a_int[i] = (int)(rig_random(&random) % 4));
    for (size_t i = 0; i < b_count; i++)
        put(b, type, i, b_int[i] = (int)(rig_random(&random) % 4));
    for (int i = 0; i < ldc * n; i++)
        c[i] = 8;
    if (is_captured)
        rig_capture_begin(stream);
    assert_int_equal(cublasGemmEx(handle, is_ta ? CUBLAS_OP_T : CUBLAS_OP_N,
                                  is_tb ? CUBLAS_OP_T : CUBLAS_OP_N, m, n, k, &one, a, type, lda, b,
                                  type, ldb, &half, c, CUDA_R_32F, ldc, CUBLAS_COMPUTE_32F,
                                  CUBLAS_GEMM_DEFAULT),
                     CUBLAS_STATUS_SUCCESS);
    if (is_captured) {
        cudaGraphExec_t exec = rig_capture_end(stream);
        OK(cudaGraphLaunch(exec, stream));
        OK(cudaGraphExecDestroy(exec));
    }
    OK(cudaStreamSynchronize(stream));
    for (int j = 0; j < n; j++) {
        for (int i = 0; i < m; i++) {
            int sum = 0;
            for (int l = 0; l < k; l++)
                sum += a_int[is_ta ? l + i * lda : i + l * lda] *
                       b_int[is_tb ? j + l * ldb : l + j * ldb];
            assert_true(c[i + j * ldc] == (float)sum + 4);
        }
        assert_true(c[m + j * ldc] == 8); /* between the columns */
    }
    free(a_int);
    free(b_int);
}

TEST(test_products)
{
    const cudaDataType types[] = {CUDA_R_16BF, CUDA_R_16F, CUDA_R_32F};
    cudaStream_t stream = rig_stream();
    cublasHandle_t handle;
    assert_int_equal(cublasCreate(&handle), CUBLAS_STATUS_SUCCESS);
    assert_int_equal(cublasSetStream(handle, stream), CUBLAS_STATUS_SUCCESS);
    for (int t = 0; t < 3; t++)
        for (int ops = 0; ops < 4; ops++) {
            check_product(handle, stream, types[t], 70, 35, 300, ops & 1, ops >> 1, 0);
            check_product(handle, stream, types[t], 5, 1, 17, ops & 1, ops >> 1, ops & 1);
        }
    float one = 1, host[4] = {0};
    assert_int_equal(cublasGemmEx(handle, CUBLAS_OP_N, CUBLAS_OP_N, 2, 2, 2, &one, host, CUDA_R_32F,
                                  2, host, CUDA_R_32F, 2, &one, host, CUDA_R_32F, 2,
                                  CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT),
                     CUBLAS_STATUS_INVALID_VALUE); /* not memory of the device */
    assert_int_equal(cublasDestroy(handle), CUBLAS_STATUS_SUCCESS);
}

/* ---- early starts ---- */

/* A kernel that starts early sees what comes before it once it has waited; what it reads before
 * that is old in one replay of two. */
TEST(test_early_start)
{
    cudaStream_t stream = rig_stream();
    uint32_t *x = rig_pinned(1), *y = rig_pinned(1), *right = rig_pinned(1), *wrong = rig_pinned(1);
    rig_capture_begin(stream);
    OK(rig_mix(stream, x, y, 1, 1));
    OK(rig_take(stream, right, x, 0));
    OK(rig_mix(stream, x, y, 2, 1));
    OK(rig_take(stream, wrong, x, 1));
    cudaGraphExec_t exec = rig_capture_end(stream);
    uint32_t now = 0, stale = 0;
    for (uint32_t n = 0; n < 4; n++) {
        OK(cudaGraphLaunch(exec, stream));
        OK(cudaStreamSynchronize(stream));
        rig_mix_now(&now, y, 1, 1);
        assert_int_equal(*right, now);
        stale += *wrong == now;
        rig_mix_now(&now, y, 2, 1);
        assert_int_equal(*x, now);
    }
    assert_int_equal(stale, 2);
    assert_int_equal(rig_counts().early_starts, 4 * 2);
    assert_int_equal(kvf_emu_launches_of("take*"), 4 * 2); /* replayed ones */
    assert_int_equal(kvf_emu_launches_of("mix*"), 4 * 2);
    assert_int_equal(kvf_emu_launches_of("tak"), 0);
    assert_in_range(rig_counts().carveout_changes, 0, 1); /* none between kernels */
    OK(cudaGraphExecDestroy(exec));
}

/* Behind a join a kernel does not start early, and a launch that would is refused. */
TEST(test_early_start_behind_a_join)
{
    cudaStream_t a = rig_stream(), b = rig_stream();
    cudaEvent_t fork = rig_event(), done = rig_event();
    uint32_t *x = rig_pinned(3), *y = rig_pinned(1);
    for (int is_refused = 0; is_refused < 2; is_refused++) {
        memset(x, 0, 3 * sizeof *x);
        rig_capture_begin(a);
        OK(rig_mix(a, x, y, 1, 1));
        rig_join(b, fork, a);
        OK(rig_mix(b, x + 1, y, 2, 1));
        OK(rig_mix(a, x, y, 3, 1));
        rig_join(a, done, b);
        if (is_refused) {
            cudaGraph_t graph;
            FAILS(cudaErrorNotSupported, (cudaError_t)rig_take_at_once(a, x + 2, x + 1));
            FAILS(cudaErrorStreamCaptureInvalidated, cudaStreamEndCapture(a, &graph));
            continue;
        }
        OK(rig_take(a, x + 2, x + 1, 0));
        OK(rig_take(a, y, x, 0));
        cudaGraphExec_t exec = rig_capture_end(a);
        uint32_t now = 0, aside = 0;
        for (uint32_t n = 0; n < 4; n++) {
            rig_mix_now(&now, y, 1, 1);
            rig_mix_now(&aside, y, 2, 1);
            rig_mix_now(&now, y, 3, 1);
            OK(cudaGraphLaunch(exec, a));
            OK(cudaStreamSynchronize(a));
            assert_int_equal(x[2], aside);
            assert_int_equal(*y, now);
        }
        OK(cudaGraphExecDestroy(exec));
    }
}

/* Nor does it after a copy, in a capture. */
TEST(test_early_start_after_a_copy)
{
    cudaStream_t stream = rig_stream();
    uint32_t *x = rig_pinned(2), *y = rig_pinned(1);
    cudaGraph_t graph;
    rig_capture_begin(stream);
    OK(cudaMemsetAsync(x, 7, sizeof *x, stream));
    FAILS(cudaErrorNotSupported, (cudaError_t)rig_take_at_once(stream, x + 1, x));
    FAILS(cudaErrorStreamCaptureInvalidated, cudaStreamEndCapture(stream, &graph));
    rig_capture_begin(stream);
    OK(rig_take(stream, y, x, 0)); /* the first node */
    OK(cudaMemsetAsync(x, 7, sizeof *x, stream));
    OK(rig_take(stream, x + 1, x, 0));
    OK(rig_take(stream, y, x + 1, 0)); /* early: after a kernel */
    cudaGraphExec_t exec = rig_capture_end(stream);
    const uint64_t before = rig_counts().early_starts;
    OK(cudaGraphLaunch(exec, stream));
    OK(cudaStreamSynchronize(stream));
    assert_int_equal(*y, 0x07070707);
    assert_int_equal(rig_counts().early_starts - before, 2);
    OK(cudaGraphExecDestroy(exec));
}

EACH_TEST_RUNS_BETWEEN(rig_begin, rig_end)
