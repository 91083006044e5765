/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Errors of the CUDA device: every call of CUDA fails once, machines without a GPU, with
 * an old driver or little memory, drivers that refuse or lose batches, a device that is lost.
 *
 * Runs in emulated builds, whose CUDA does as it is told.
 */

#include <pthread.h>
#include <sys/mman.h>

#include <cuda_runtime_api.h>

#include "emu_control.h"
#include "host_memory.h"
#include "offload_rig.h"

#define BYTES 8192u

static const kvf_device_config plain = {.threads = 1, .isa_mask = KVF_ISA_ALL};

/* ---- every call once ---- */

typedef struct everything {
    kvf_context *context;
    kvf_device *device;
    kvf_stream *stream, *side;
    kvf_event *began, *ended;
    kvf_graph *graph;
    void *memory, *alias;
    void *host;
    int is_registered;
    int is_lost; /* its memory stays registered, so its address must not come again */
} everything;

static void nothing(const void *raw, uint32_t task)
{
}

static kvf_status use_streams(everything *e)
{
    const kvf_device_ops *ops = e->device->ops;
    uint64_t ns;
    void *to[2] = {e->memory, (char *)e->memory + 64};
    const void *from[2] = {(char *)e->memory + 128, (char *)e->memory + 192};
    const kvf_copy_args copy = {.bytes = 16, .count = 0, .per_task = 1};
    KVF_TRY(ops->event_record(e->began, e->stream));
    KVF_TRY(ops->copy(e->stream, e->memory, e->alias, 64));
    KVF_TRY(ops->copy_batch(e->stream, to, from, 64, 2));
    KVF_TRY(ops->fill(e->stream, e->memory, 1, 64));
    KVF_TRY(ops->launch(e->stream, e->device->kernels.copy, &copy, sizeof copy, 1));
    KVF_TRY(ops->host_call(e->stream, nothing, NULL, 0));
    KVF_TRY(ops->event_record(e->ended, e->stream));
    KVF_TRY(ops->stream_wait_event(e->side, e->ended));
    KVF_TRY(ops->stream_wait(e->side));
    KVF_TRY(ops->event_wait(e->ended));
    KVF_TRY(ops->event_elapsed(e->began, e->ended, &ns));
    KVF_TRY(ops->capture_begin(e->stream));
    kvf_status status = ops->fill(e->stream, e->memory, 2, 64);
    const kvf_status called = ops->host_call(e->stream, nothing, NULL, 0);
    const kvf_status ended = ops->capture_end(e->stream, &e->graph);
    status = status != KVF_OK ? status : called;
    KVF_TRY(status != KVF_OK ? status : ended);
    KVF_TRY(ops->graph_launch(e->graph, e->stream));
    return ops->stream_wait(e->stream);
}

static kvf_status do_everything(everything *e)
{
    KVF_TRY(kvf_context_create(NULL, NULL, NULL, &e->context));
    KVF_TRY(kvf_device_open(e->context, KVF_DEVICE_CUDA, &plain, &e->device));
    const kvf_device_ops *ops = e->device->ops;
    KVF_TRY(ops->memory_alloc(e->device, BYTES, &e->memory));
    e->host = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    KVF_TRY(ops->host_register(e->device, e->host, BYTES, &e->alias));
    e->is_registered = 1;
    KVF_TRY(ops->stream_create(e->device, KVF_PRIORITY_LOW, &e->stream));
    KVF_TRY(ops->stream_create(e->device, KVF_PRIORITY_HIGH, &e->side));
    KVF_TRY(ops->event_create(e->device, true, &e->began));
    KVF_TRY(ops->event_create(e->device, true, &e->ended));
    return use_streams(e);
}

static void undo_everything(everything *e)
{
    if (e->device != NULL) {
        const kvf_device_ops *ops = e->device->ops;
        ops->stream_destroy(e->side);
        ops->stream_destroy(e->stream);
        ops->graph_destroy(e->graph);
        ops->event_destroy(e->ended);
        ops->event_destroy(e->began);
        if (e->is_registered)
            ops->host_unregister(e->device, e->host, BYTES);
        ops->memory_free(e->device, e->memory);
        kvf_device_close(e->device);
    }
    if (e->host != NULL && !e->is_lost)
        munmap(e->host, BYTES);
    assert_int_equal(e->context->live_blocks, 0);
    assert_int_equal(e->context->live_bytes, 0);
    kvf_context_destroy(e->context);
}

/* Every call of CUDA, the first, the second, ..., with an error that passes. */
TEST(test_every_call_fails)
{
    uint64_t refused = 0, absorbed = 0;
    for (uint64_t nth = 1;; nth++) {
        everything e = {0};
        kvf_emu_reset();
        kvf_emu_fail_call(NULL, nth, cudaErrorInvalidValue, 0);
        const kvf_status status = do_everything(&e);
        const int fired = kvf_emu_failed_call() != NULL;
        char name[64];
        snprintf(name, sizeof name, "%s", fired ? kvf_emu_failed_call() : "");
        if (status != KVF_OK) {
            kvf_error error;
            kvf_context_error(e.context, &error);
            if (error.status == KVF_OK || strlen(error.text) < 10)
                fail_msg("call %llu, %s: %d and %d, %s", (unsigned long long)nth, name, (int)status,
                         (int)error.status, error.text);
        }
        undo_everything(&e);
        if (!kvf_emu_is_clean())
            fail_msg("call %llu, %s, left something behind", (unsigned long long)nth, name);
        if (cudaPeekAtLastError() != cudaSuccess)
            fail_msg("call %llu, %s, left its error behind", (unsigned long long)nth, name);
        if (!fired) {
            RIG_OK(status);
            break;
        }
        refused += status != KVF_OK;
        absorbed += status == KVF_OK;
    }
    printf("%llu calls failed the caller, %llu had another way\n", (unsigned long long)refused,
           (unsigned long long)absorbed);
    assert_true(refused > 30);
    kvf_emu_reset();
}

/* ---- machines ---- */

static kvf_emu_config machine(void)
{
    kvf_emu_config config;
    kvf_emu_reset();
    kvf_emu_get_config(&config);
    return config;
}

static void keep_line(void *user, int level, const char *line)
{
    snprintf(user, 512, "%s", line);
}

/* The answer of each kind on the machine that is set, and that AUTO runs on the host and says why.
 */
static void expect_absent(const char *why)
{
    char text[256], line[512] = "";
    kvf_context *context;
    kvf_device *device;
    kvf_error error;
    assert_non_null(strstr(kvf_device_cuda_absence(text), why));
    RIG_OK(kvf_context_create(NULL, keep_line, line, &context));
    assert_int_equal(kvf_device_open(context, KVF_DEVICE_CUDA, &plain, &device), KVF_UNSUPPORTED);
    kvf_context_error(context, &error);
    assert_non_null(strstr(error.text, why));
    assert_null(device);
    RIG_OK(kvf_device_open(context, KVF_DEVICE_AUTO, &plain, &device));
    assert_int_equal(device->ops->kind, KVF_DEVICE_HOST);
    assert_non_null(strstr(line, why));
    kvf_device_close(device);
    kvf_device_config second = plain;
    second.ordinal = 1;
    assert_int_equal(kvf_device_open(context, KVF_DEVICE_AUTO, &second, &device), KVF_INVALID);
    kvf_context_destroy(context);
    kvf_emu_reset();
}

TEST(test_absence)
{
    kvf_emu_config config = machine();
    char text[256];
    assert_string_equal(kvf_device_cuda_absence(text), "");
    config.devices = 0;
    kvf_emu_set_config(&config);
    expect_absent("no GPU");
    config = machine();
    config.device_error = cudaErrorInsufficientDriver;
    config.driver_version = 0;
    kvf_emu_set_config(&config);
    expect_absent("no NVIDIA driver");
    config.driver_version = 11080;
    kvf_emu_set_config(&config);
    expect_absent("supports CUDA 11.8");
}

/* `raw` if it is not known. */
static void *current_context(void *raw)
{
    int (*get)(void **context) = NULL;
    void *found = NULL, *context = NULL;
    enum cudaDriverEntryPointQueryResult result;
    (void)cudaGetDriverEntryPointByVersion("cuCtxGetCurrent", &found, 4000, cudaEnableDefault,
                                           &result);
    memcpy(&get, &found, sizeof get);
    return get && get(&context) == 0 ? context : raw;
}

/* A thread that has never used a GPU, and then has set the first. */
typedef struct newcomer {
    kvf_device *device;
    kvf_status status;
    void *before[2], *after[2];
} newcomer;

static void *be_new(void *raw)
{
    newcomer *n = raw;
    for (uint32_t i = 0; i < 2 && n->status == KVF_OK; i++) {
        void *memory = NULL;
        n->before[i] = current_context(raw);
        n->status = n->device->ops->memory_alloc(n->device, 100, &memory);
        n->device->ops->memory_free(n->device, memory);
        n->after[i] = current_context(raw);
        (void)cudaSetDevice(0);
    }
    return NULL;
}

/* It has no context afterwards either: that of another device would take memory there. */
static void check_contexts(kvf_device *device)
{
    newcomer n = {.device = device};
    pthread_t thread;
    assert_int_equal(pthread_create(&thread, NULL, be_new, &n), 0);
    assert_int_equal(pthread_join(thread, NULL), 0);
    RIG_OK(n.status);
    assert_null(n.before[0]);
    assert_null(n.after[0]);
    assert_non_null(n.before[1]);
    assert_ptr_equal(n.after[1], n.before[1]);
}

TEST(test_ordinal)
{
    kvf_emu_config emu = machine();
    kvf_context *context;
    kvf_device *device;
    kvf_error error;
    kvf_device_config config = plain;
    emu.devices = 2;
    kvf_emu_set_config(&emu);
    RIG_OK(kvf_context_create(NULL, NULL, NULL, &context));
    config.ordinal = 2;
    assert_int_equal(kvf_device_open(context, KVF_DEVICE_CUDA, &config, &device), KVF_INVALID);
    kvf_context_error(context, &error);
    assert_non_null(strstr(error.text, "device_ordinal is 2, and this process sees 2"));
    config.ordinal = 1;
    int current = -1;
    assert_int_equal(cudaSetDevice(0), cudaSuccess);
    RIG_OK(kvf_device_open(context, KVF_DEVICE_CUDA, &config, &device));
    void *memory;
    RIG_OK(device->ops->memory_alloc(device, 100, &memory));
    assert_int_equal(cudaGetDevice(&current), cudaSuccess);
    assert_int_equal(current, 0); /* the caller's stays */
    device->ops->memory_free(device, memory);
    check_contexts(device);
    kvf_device_close(device);
    kvf_context_destroy(context);
    kvf_emu_reset();
}

TEST(test_out_of_memory)
{
    kvf_emu_config emu = machine();
    emu.memory_bytes = (uint64_t)64 << 20;
    kvf_emu_set_config(&emu);
    void *memory = &emu;
    rig r;
    rig_open(&r, NULL);
    assert_int_equal(r.ops->memory_alloc(r.device, (size_t)80 << 20, &memory),
                     KVF_OUT_OF_DEVICE_MEMORY);
    assert_null(memory);
    RIG_TELLS(&r, "80.00 MiB", "64.00 MiB free");
    assert_int_equal(cudaPeekAtLastError(), cudaSuccess);
    (void)rig_memory(&r, 1000);
    rig_close(&r);
    kvf_emu_reset();
}

/* Three chunks, the last one too much: the first two are given back. */
TEST(test_registration_in_chunks)
{
    const size_t gib = (size_t)1 << 30, bytes = 2 * gib + 4096;
    kvf_emu_config emu = machine();
    kvf_emu_counts counts;
    rig r;
    emu.pinned_bytes = 2 * gib + 2048;
    kvf_emu_set_config(&emu);
    rig_open(&r, NULL);
    void *alias, *host = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    assert_true(host != MAP_FAILED);
    assert_int_equal(r.ops->host_register(r.device, host, bytes, &alias), KVF_PIN_FAILED);
    assert_null(alias);
    RIG_TELLS(&r, "which has 0 B already");
    kvf_emu_get_counts(&counts);
    assert_int_equal(counts.registrations, 0);
    emu.pinned_bytes = 4 * gib;
    kvf_emu_set_config(&emu);
    RIG_OK(r.ops->host_register(r.device, host, bytes, &alias));
    assert_non_null(alias);
    kvf_emu_get_counts(&counts);
    assert_int_equal(counts.registrations, 3);
    r.ops->host_unregister(r.device, host, bytes);
    kvf_emu_get_counts(&counts);
    assert_int_equal(counts.registrations, 0);
    munmap(host, bytes);
    rig_close(&r);
    kvf_emu_reset();
}

static uint32_t notes;

static void count_notes(void *user, int level, const char *text)
{
    notes += level == KVF_LOG_NOTE && strstr(text, "allocated by CUDA") != NULL;
}

/* A device that registers nothing allocates the arenas, zeroed and visible; it says so once. Where
 * it can pin no more either, nothing stays. */
TEST(test_memory_of_the_device)
{
    kvf_emu_config emu = machine();
    kvf_emu_counts counts;
    rig r;
    const kvf_host_memory_config config = {.bytes = 40 * BYTES,
                                           .granule = BYTES,
                                           .node = -1,
                                           .touch_threads = 1,
                                           .arena_bytes_max = 16 * BYTES,
                                           .lower = "bytes_of_test"};
    kvf_host_memory memory;
    notes = 0;
    emu.refuses_registering = true;
    kvf_emu_set_config(&emu);
    rig_open(&r, NULL);
    r.context->log = count_notes;
    RIG_OK(kvf_host_memory_create(r.context, r.device, &config, &memory));
    assert_int_equal(memory.arena_count, 3);
    assert_int_equal(notes, 1);
    kvf_emu_get_counts(&counts);
    assert_int_equal(counts.registrations, 0);
    assert_true(counts.pinned_bytes >= config.bytes);
    for (uint32_t i = 0; i < memory.arena_count; i++) {
        const kvf_arena *arena = &memory.arenas[i];
        assert_true(arena->allocated && !arena->registered && arena->device);
        for (size_t at = 0; at < arena->bytes; at++)
            assert_int_equal(arena->host[at], 0);
    }
    kvf_host_memory_destroy(r.context, &memory);
    const uint64_t before = (kvf_emu_get_counts(&counts), counts.pinned_bytes);
    emu.pinned_bytes = before + 20 * BYTES;
    kvf_emu_set_config(&emu);
    assert_int_equal(kvf_host_memory_create(r.context, r.device, &config, &memory), KVF_PIN_FAILED);
    RIG_TELLS(&r, "which has 128.00 KiB already");
    assert_null(memory.arenas);
    kvf_emu_get_counts(&counts);
    assert_int_equal(counts.pinned_bytes, before);
    rig_close(&r);
    kvf_emu_reset();
}

/* ---- drivers ---- */

/* A batch in a capture: recorded and delivered, or refused; never lost. */
TEST(test_batch_in_capture)
{
    static const struct {
        kvf_emu_batch_capture capture;
        uint32_t driver;
        int works;
    } cases[] = {{KVF_EMU_BATCH_ALLOWED, 13010, 1},
                 {KVF_EMU_BATCH_REFUSED, 13010, 0},
                 {KVF_EMU_BATCH_DROPPED, 13010, 0},
                 {KVF_EMU_BATCH_DROPPED, 13000, 0},
                 {KVF_EMU_BATCH_ALLOWED, 13000, 0}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        kvf_emu_config emu = machine();
        emu.batch_capture = cases[i].capture;
        emu.driver_version = cases[i].driver;
        kvf_emu_set_config(&emu);
        rig r;
        kvf_graph *graph;
        rig_open(&r, NULL);
        kvf_stream *stream = rig_stream(&r);
        char *bytes = rig_memory(&r, 128);
        void *to[1] = {bytes + 64};
        const void *from[1] = {bytes};
        RIG_OK(r.ops->capture_begin(stream));
        assert_int_equal(r.ops->copy_batch(stream, to, from, 64, 1),
                         cases[i].works ? KVF_OK : KVF_UNSUPPORTED);
        RIG_OK(r.ops->capture_end(stream, &graph)); /* a refusal leaves the recording whole */
        RIG_OK(r.ops->fill(stream, bytes, 'x', 64));
        RIG_OK(r.ops->graph_launch(graph, stream));
        RIG_OK(r.ops->stream_wait(stream));
        char seen;
        rig_put(&r, &seen, bytes + 64, 1);
        assert_int_equal(seen, cases[i].works ? 'x' : 0);
        r.ops->graph_destroy(graph);
        rig_close(&r);
    }
    kvf_emu_reset();
}

/* Without the driver's calls: no batches. */
TEST(test_old_driver)
{
    kvf_emu_config emu = machine();
    emu.driver_version = 12040;
    kvf_emu_set_config(&emu);
    rig r;
    kvf_device_properties properties;
    rig_open(&r, NULL);
    r.ops->properties(r.device, &properties);
    assert_int_equal(properties.driver_version, 12040);
    assert_int_equal(properties.can_copy_batch, 0);
    kvf_stream *stream = rig_stream(&r);
    uint32_t *words = rig_memory(&r, 128);
    void *to[1] = {words + 1};
    const void *from[1] = {words};
    assert_int_equal(r.ops->copy_batch(stream, to, from, 4, 1), KVF_UNSUPPORTED);
    rig_close(&r);
    kvf_emu_reset();
}

/* ---- a lost device ---- */

TEST(test_lost_device)
{
    machine();
    rig r;
    kvf_error error;
    void *memory;
    rig_open(&r, NULL);
    kvf_stream *stream = rig_stream(&r);
    kvf_event *event = rig_event(&r);
    void *bytes = rig_memory(&r, 64);
    RIG_OK(r.ops->event_record(event, stream));
    kvf_emu_lose_device(cudaErrorIllegalAddress);
    assert_int_equal(r.ops->stream_wait(stream), KVF_DEVICE_FAILED);
    assert_non_null(strstr(rig_error(&r, &error), "cudaErrorIllegalAddress"));
    assert_int_equal(error.foreign, cudaErrorIllegalAddress);
    /* Every later call says so, and waits for nothing. */
    assert_int_equal(r.ops->copy(stream, bytes, bytes, 1), KVF_DEVICE_FAILED);
    assert_int_equal(r.ops->event_wait(event), KVF_DEVICE_FAILED);
    assert_int_equal(r.ops->event_is_done(event), -1);
    assert_int_equal(r.ops->memory_alloc(r.device, 64, &memory), KVF_DEVICE_FAILED);
    assert_int_equal(r.ops->host_call(stream, nothing, NULL, 0), KVF_DEVICE_FAILED);
    assert_int_equal(r.ops->capture_begin(stream), KVF_DEVICE_FAILED);
    RIG_TELLS(&r, "lost since");
    rig_close(&r); /* nothing of the library's own is left */
    kvf_emu_reset();
}

/* Every call of CUDA loses the device: a named error, no wait without end, nothing of ours left.
 * The memory that the device held stays, so this comes last. */
TEST(test_every_call_loses)
{
    for (uint64_t nth = 1;; nth++) {
        everything e = {0};
        kvf_emu_reset();
        kvf_emu_fail_call(NULL, nth, cudaErrorIllegalAddress, 1);
        const kvf_status status = do_everything(&e);
        const int fired = kvf_emu_failed_call() != NULL;
        if (fired && e.device != NULL)
            if (status != KVF_DEVICE_FAILED)
                fail_msg("call %llu, %s: %d", (unsigned long long)nth, kvf_emu_failed_call(),
                         (int)status);
        e.is_lost = fired;
        if (fired && e.stream != NULL)
            assert_int_equal(e.device->ops->stream_wait(e.stream), KVF_DEVICE_FAILED);
        undo_everything(&e);
        if (!fired) {
            RIG_OK(status);
            break;
        }
    }
    kvf_emu_reset();
}
