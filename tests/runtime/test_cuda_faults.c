/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Every CUDA call of the public entry points fails once, on the emulated device: a plain error, or
 * one that ends the device.
 *
 * A scene is a whole use of the library on one runtime. It is played again and again, and in turn N
 * the N-th CUDA call fails. Then some call of the library says so with a status and a text that
 * fit, or the outputs have the bits of an undisturbed play; nothing of the scene is left alive, on
 * the device or in the allocator; and the same runtime plays on. A play that takes longer than
 * PLAY_SECONDS ends the program with the number of the call.
 *
 * Knows nothing of what the calls are. Which of them fails first may differ from run to run, as a
 * thread of the transfer engine calls beside the caller's; every number is tried either way.
 */

#include "harness.h"

#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <driver_types.h>

#include "emu_control.h"
#include <kvferry/link.h>

#define PLAY_SECONDS 12
#define FIRST_ALL    200u /* calls of which every one fails; */
#define SAMPLES      40u  /* beyond them so many, at random */
#define LAYERS       2u
#define PROMPT       56u
#define STEPS        3u
#define TOKENS       (PROMPT + STEPS)
#define HEADS        4u
#define KV_HEADS     2u
#define DIM          64u
#define OUT_FLOATS   (HEADS * DIM)

#if TEST_SANITIZED
#define STRIDE 5u /* of the calls that fail */
#else
#define STRIDE 1u
#endif

/* ---- what counts ---- */

typedef struct heap {
    int64_t live;
} heap;

static void *heap_alloc(void *user, size_t bytes, size_t alignment)
{
    heap *h = user;
    void *p = NULL;
    if (posix_memalign(&p, alignment < sizeof(void *) ? sizeof(void *) : alignment, bytes))
        return NULL;
    __atomic_fetch_add(&h->live, 1, __ATOMIC_RELAXED);
    return p;
}

static void heap_free(void *user, void *p)
{
    heap *h = user;
    if (p)
        __atomic_fetch_sub(&h->live, 1, __ATOMIC_RELAXED);
    free(p);
}

/* What is alive, on the device and in the allocator. */
typedef struct census {
    uint64_t of[8];
    int64_t blocks;
} census;

static census census_now(const heap *h)
{
    kvf_emu_counts c;
    kvf_emu_get_counts(&c);
    return (census){{c.allocations, c.pinned_allocations, c.registrations, c.streams, c.events,
                     c.graphs, c.graph_execs, c.cublas_handles},
                    __atomic_load_n(&h->live, __ATOMIC_RELAXED)};
}

static void same_census(const census *before, const census *now, const char *what, uint64_t nth)
{
    static const char *const names[] = {
        "allocations", "pinned allocations", "registrations", "streams", "events",
        "graphs",      "graph execs",        "cuBLAS handles"};
    const char *failed = kvf_emu_failed_call();
    for (size_t i = 0; i < 8; i++)
        if (before->of[i] != now->of[i])
            fail_msg("%s, call %llu (%s): %s were %llu and are %llu", what, (unsigned long long)nth,
                     failed ? failed : "-", names[i], (unsigned long long)before->of[i],
                     (unsigned long long)now->of[i]);
    if (before->blocks != now->blocks)
        fail_msg("%s, call %llu (%s): %lld blocks of the allocator were alive, now %lld", what,
                 (unsigned long long)nth, failed ? failed : "-", (long long)before->blocks,
                 (long long)now->blocks);
}

/* ---- the watchdog ---- */

static char watched[256];

static void on_alarm(int number)
{
    (void)number;
    const ssize_t written = write(2, watched, strlen(watched));
    (void)written;
    abort();
}

static void watch(const char *what, uint64_t nth)
{
    snprintf(watched, sizeof watched, "# hangs: %s with call %llu failing\n", what,
             (unsigned long long)nth);
    alarm(PLAY_SECONDS);
}

/* ---- a runtime with the inputs of all scenes ---- */

typedef struct stage {
    heap heap;
    kvf_runtime *runtime;
    char *q, *k, *v, *out; /* device memory: [LAYERS, TOKENS, heads, DIM] floats, [OUT_FLOATS] */
} stage;

typedef struct scene scene;
typedef kvf_status (*play_fn)(stage *st, const scene *s, float *out);
struct scene {
    const char *name;
    play_fn play;
    void (*adjust)(kvf_cache_config *cc);
};

static kvf_runtime_config stage_config(stage *st)
{
    kvf_runtime_config rc = test_runtime_config();
    rc.device = KVF_DEVICE_CUDA;
    rc.host_visible = 0;
    rc.allow_unpinned = 0;
    rc.allocator = (kvf_allocator){.alloc = heap_alloc, .free = heap_free, .user = &st->heap};
    return rc;
}

static void *upload(stage *st, kvf_stream *stream, const void *from, size_t bytes)
{
    void *p = NULL;
    test_expect(st->runtime, kvf_memory_alloc(st->runtime, bytes, &p), KVF_OK);
    if (from)
        test_expect(st->runtime, kvf_memory_copy(stream, p, from, bytes), KVF_OK);
    return p;
}

static kvf_cache_config small_config(void)
{
    kvf_cache_config cc = test_config_small();
    cc.layers = LAYERS;
    cc.tokens_max = 128;
    cc.prefill_chunk_max = 32;
    cc.budget_tokens = 48;
    cc.refresh_interval = 2;
    cc.sequences_max = 2;
    cc.transfer = KVF_TRANSFER_GATHER;
    return cc;
}

static void stage_open(stage *st)
{
    kvf_error error = {0};
    kvf_stream *stream = NULL;
    test_tokens t;
    const kvf_cache_config cc = small_config();
    *st = (stage){0};
    const kvf_runtime_config rc = stage_config(st);
    if (kvf_runtime_open(&rc, &st->runtime, &error) != KVF_OK)
        fail_msg("kvf_runtime_open: %s", error.text);
    test_tokens_make(
        &t, &cc, &(test_tokens_spec){.count = TOKENS, .seed = 5, .sharpness = 2.0f, .topics = 4});
    test_expect(st->runtime, kvf_stream_create(st->runtime, &stream), KVF_OK);
    const size_t row = (size_t)LAYERS * TOKENS * DIM * sizeof(float);
    st->q = upload(st, stream, t.q, row * HEADS);
    st->k = upload(st, stream, t.k, row * KV_HEADS);
    st->v = upload(st, stream, t.v, row * KV_HEADS);
    st->out = upload(st, stream, NULL, row * HEADS);
    test_expect(st->runtime, kvf_stream_wait(stream), KVF_OK);
    kvf_stream_destroy(stream);
    test_tokens_free(&t);
}

static void stage_close(stage *st)
{
    kvf_memory_free(st->runtime, st->q);
    kvf_memory_free(st->runtime, st->k);
    kvf_memory_free(st->runtime, st->v);
    kvf_memory_free(st->runtime, st->out);
    kvf_runtime_close(st->runtime);
    assert_int_equal(st->heap.live, 0);
}

/* ---- scenes: the first status that is not KVF_OK, everything given back ---- */

typedef struct actors {
    stage *st;
    kvf_stream *stream;
    kvf_cache *cache;
    kvf_sequence *s[2];
    kvf_recording *recording;
    int32_t *lists; /* device memory */
    kvf_error error;
} actors;

static float *token_of(char *base, uint32_t heads, uint32_t layer, uint32_t token)
{
    return (float *)(void *)base + ((size_t)layer * TOKENS + token) * heads * DIM;
}

static kvf_status prefill_all(actors *a)
{
    stage *st = a->st;
    for (uint32_t layer = 0; layer < LAYERS; layer++)
        for (uint32_t first = 0; first < PROMPT; first += 28) {
            const kvf_prefill_args p = {.sequence = a->s[0],
                                        .layer = layer,
                                        .tokens = 28,
                                        .q = token_of(st->q, HEADS, layer, first),
                                        .k = token_of(st->k, KV_HEADS, layer, first),
                                        .v = token_of(st->v, KV_HEADS, layer, first),
                                        .out = st->out};
            const kvf_status status = kvf_prefill(a->cache, &p, a->stream);
            if (status != KVF_OK)
                return status;
        }
    return KVF_OK;
}

static kvf_decode_args step_of(actors *a, uint32_t layer, uint32_t token)
{
    stage *st = a->st;
    return (kvf_decode_args){.layer = layer,
                             .batch = 1,
                             .sequences = a->s,
                             .q = token_of(st->q, HEADS, layer, token),
                             .k = token_of(st->k, KV_HEADS, layer, token),
                             .v = token_of(st->v, KV_HEADS, layer, token),
                             .out = st->out};
}

static kvf_status decode_token(actors *a, uint32_t token)
{
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        const kvf_decode_args d = step_of(a, layer, token);
        const kvf_status status = kvf_decode(a->cache, &d, a->stream);
        if (status != KVF_OK)
            return status;
    }
    return KVF_OK;
}

static kvf_status open_actors(actors *a, stage *st, const scene *s)
{
    kvf_cache_config cc = small_config();
    *a = (actors){.st = st};
    if (s->adjust)
        s->adjust(&cc);
    kvf_status status = kvf_stream_create(st->runtime, &a->stream);
    if (status == KVF_OK) {
        status = kvf_cache_open(st->runtime, &cc, &a->cache, &a->error);
        if (status != KVF_OK && (a->error.status != status || !a->error.text[0]))
            fail_msg("%s: kvf_cache_open: %s, and its error is %s \"%s\"", s->name,
                     kvf_status_name(status), kvf_status_name(a->error.status), a->error.text);
    }
    if (status == KVF_OK)
        status = kvf_sequence_create(a->cache, &a->s[0]);
    return status;
}

/* Outputs to the host, and everything back. */
static kvf_status close_actors(actors *a, kvf_status status, float *out)
{
    if (status == KVF_OK)
        status = kvf_memory_copy(a->stream, out, a->st->out, OUT_FLOATS * sizeof *out);
    if (a->stream) {
        const kvf_status waited = kvf_stream_wait(a->stream);
        if (status == KVF_OK)
            status = waited;
    }
    kvf_stream_destroy(a->stream); /* waits again where the wait was refused */
    kvf_recording_destroy(a->recording);
    kvf_memory_free(a->st->runtime, a->lists);
    kvf_sequence_destroy(a->s[1]);
    kvf_sequence_destroy(a->s[0]);
    kvf_cache_close(a->cache);
    return status;
}

static kvf_status play_decode(stage *st, const scene *s, float *out)
{
    actors a;
    kvf_status status = open_actors(&a, st, s);
    if (status == KVF_OK)
        status = prefill_all(&a);
    if (status == KVF_OK)
        status = decode_token(&a, PROMPT);
    if (status == KVF_OK)
        status = kvf_sequence_fork(a.cache, a.s[0], a.stream, &a.s[1]);
    for (uint32_t i = 1; i < STEPS && status == KVF_OK; i++)
        status = decode_token(&a, PROMPT + i);
    status = close_actors(&a, status, out);
    return status;
}

/* Statistics are read while everything is alive; they have no status, so only the rest counts. */
static kvf_status play_stats(stage *st, const scene *s, float *out)
{
    actors a;
    kvf_stats stats;
    kvf_status status = open_actors(&a, st, s);
    if (status == KVF_OK)
        status = decode_token(&a, 0);
    if (status == KVF_OK)
        status = kvf_stream_wait(a.stream);
    if (status == KVF_OK) {
        kvf_cache_stats(a.cache, &stats);
        kvf_cache_layer_stats(a.cache, 1, &stats);
        kvf_cache_stats_reset(a.cache);
    }
    return close_actors(&a, status, out);
}

static kvf_status play_pages(stage *st, const scene *s, float *out)
{
    actors a;
    kvf_status status = open_actors(&a, st, s);
    const uint32_t lists = KV_HEADS;
    if (status == KVF_OK)
        status = prefill_all(&a);
    const uint32_t most = a.cache ? kvf_select_pages_max(a.cache) : 1;
    void *memory = NULL;
    if (status == KVF_OK)
        status = kvf_memory_alloc(st->runtime, (lists + 1 + lists * most + lists) * sizeof(int32_t),
                                  &memory);
    a.lists = memory;
    if (status == KVF_OK) {
        const kvf_page_lists pl = {.indptr = a.lists,
                                   .indices = a.lists + lists + 1,
                                   .capacity = lists * most,
                                   .last_page_len = a.lists + lists + 1 + lists * most};
        const kvf_decode_args d = step_of(&a, 0, PROMPT);
        status = kvf_select_pages(a.cache, &d, &pl, a.stream);
        if (status == KVF_OK)
            status = kvf_attend_pages(a.cache, &d, &pl, a.stream);
    }
    return close_actors(&a, status, out);
}

static kvf_status play_recording(stage *st, const scene *s, float *out)
{
    actors a;
    kvf_status status = open_actors(&a, st, s);
    if (status == KVF_OK)
        status = prefill_all(&a);
    if (status == KVF_OK)
        status = decode_token(&a, PROMPT);
    if (status == KVF_OK)
        status = kvf_record_begin(a.cache, a.s, 1, a.stream);
    if (status == KVF_OK) {
        status = decode_token(&a, PROMPT + 1);
        const kvf_status ended = kvf_record_end(a.cache, &a.recording);
        if (status == KVF_OK)
            status = ended;
        else if (ended == KVF_OK)
            fail_msg("%s: a call failed while recording, and the recording came out", s->name);
    }
    if (status == KVF_OK && !kvf_replay_is_possible(a.recording))
        fail_msg("%s: the recording cannot be replayed", s->name);
    if (status == KVF_OK)
        status = kvf_replay(a.recording, a.stream);
    return close_actors(&a, status, out);
}

static kvf_status play_memory(stage *st, const scene *s, float *out)
{
    kvf_stream *stream = NULL, *wrapped = NULL;
    void *device = NULL, *host = NULL, *alias = NULL;
    (void)s;
    kvf_status status = kvf_stream_create(st->runtime, &stream);
    if (status == KVF_OK)
        status = kvf_stream_wrap(st->runtime, kvf_stream_native(stream), &wrapped);
    if (status == KVF_OK)
        status = kvf_memory_alloc(st->runtime, 4096, &device);
    if (status == KVF_OK)
        status = kvf_pinned_alloc(st->runtime, 4096, &host, &alias);
    if (status == KVF_OK) {
        memset(host, 5, 4096);
        status = kvf_memory_copy(wrapped, device, alias, 4096);
    }
    if (status == KVF_OK)
        status = kvf_memory_copy(wrapped, out, device, OUT_FLOATS * sizeof *out);
    if (status == KVF_OK)
        status = kvf_stream_wait(wrapped);
    kvf_stream_destroy(wrapped);
    kvf_stream_destroy(stream);
    kvf_pinned_free(st->runtime, host);
    kvf_memory_free(st->runtime, device);
    return status;
}

static kvf_status play_link(stage *st, const scene *s, float *out)
{
    static const kvf_transfer methods[] = {KVF_TRANSFER_GATHER, KVF_TRANSFER_MAPPED,
                                           KVF_TRANSFER_BATCH, KVF_TRANSFER_EACH};
    kvf_link *link = NULL;
    (void)s;
    memset(out, 0, OUT_FLOATS * sizeof *out);
    kvf_status status = kvf_link_open(st->runtime, &link);
    for (size_t i = 0; i < 4 && status == KVF_OK; i++) {
        kvf_link_case c;
        kvf_link_result r;
        kvf_link_case_init(&c);
        c.method = methods[i];
        c.page_bytes = 1024;
        c.pages = 4;
        c.pool_bytes = 65536;
        c.huge_pages = KVF_HUGE_PAGES_OFF;
        c.repetitions = 1;
        c.warmup = 0;
        status = kvf_link_measure(link, &c, NULL, &r);
    }
    kvf_link_close(link);
    return status;
}

/* ---- playing them ---- */

static int fits(int error, kvf_status status)
{
    switch (error) {
    case cudaErrorMemoryAllocation:
        return status == KVF_OUT_OF_DEVICE_MEMORY || status == KVF_PIN_FAILED ||
               status == KVF_DEVICE_FAILED;
    case cudaErrorInvalidValue:
        return status == KVF_INVALID || status == KVF_PIN_FAILED || status == KVF_DEVICE_FAILED;
    default:
        return status == KVF_DEVICE_FAILED || status == KVF_PIN_FAILED;
    }
}

/* One play with call `nth` failing. 1 if the fault fired. */
static int play_once(stage *st, const scene *s, uint64_t nth, int error, const float *wanted)
{
    float out[OUT_FLOATS] = {0};
    const census before = census_now(&st->heap);
    watch(s->name, nth);
    kvf_emu_reset();
    kvf_emu_fail_call(NULL, nth, error, 0);
    const kvf_status status = s->play(st, s, out);
    const int fired = kvf_emu_failed_call() != NULL;
    const char *call = fired ? kvf_emu_failed_call() : "-";
    kvf_emu_fail_call(NULL, 0, 0, 0);
    if (!fired && status != KVF_OK)
        fail_msg("%s without a fault: %s, \"%s\"", s->name, kvf_status_name(status),
                 kvf_runtime_error(st->runtime)->text);
    if (status == KVF_OK && memcmp(out, wanted, sizeof out) != 0)
        fail_msg("%s, call %llu (%s) failed, nobody said so, and the output differs", s->name,
                 (unsigned long long)nth, call);
    if (status != KVF_OK) {
        const kvf_error *e = kvf_runtime_error(st->runtime);
        if (!fits(error, status) || e->status == KVF_OK || strlen(e->text) < 10)
            fail_msg("%s, call %llu (%s) failed with %d: %s, \"%s\"", s->name,
                     (unsigned long long)nth, call, error, kvf_status_name(status), e->text);
    }
    const census after = census_now(&st->heap);
    same_census(&before, &after, s->name, nth);
    kvf_emu_counts counts;
    kvf_emu_get_counts(&counts);
    assert_int_equal(counts.forbidden_calls, 0);
    alarm(0);
    return fired;
}

static uint64_t count_calls(stage *st, const scene *s, float *wanted)
{
    kvf_emu_counts counts;
    watch(s->name, 0);
    kvf_emu_reset();
    const kvf_status status = s->play(st, s, wanted);
    if (status != KVF_OK)
        fail_msg("%s: %s, \"%s\"", s->name, kvf_status_name(status),
                 kvf_runtime_error(st->runtime)->text);
    kvf_emu_get_counts(&counts);
    alarm(0);
    return counts.calls;
}

static void play_all(const scene *s)
{
    static const int errors[] = {cudaErrorMemoryAllocation, cudaErrorInvalidValue,
                                 cudaErrorLaunchOutOfResources};
    stage st;
    float wanted[OUT_FLOATS] = {0};
    test_random random = {17};
    uint64_t fired = 0, tried = 0;
    kvf_emu_reset();
    stage_open(&st);
    const uint64_t calls = count_calls(&st, s, wanted);
    for (uint64_t n = 1; n <= calls && n <= FIRST_ALL; n += STRIDE, tried++)
        fired += (uint64_t)play_once(&st, s, n, errors[tried % 3], wanted);
    for (uint32_t i = 0; calls > FIRST_ALL && i < SAMPLES / STRIDE; i++, tried++)
        fired += (uint64_t)play_once(
            &st, s, FIRST_ALL + 1 + test_random_below(&random, (uint32_t)(calls - FIRST_ALL)),
            errors[tried % 3], wanted);
    assert_false(play_once(&st, s, 1u << 30, cudaErrorUnknown, wanted));
    /* A thread that polls makes the number of calls vary, so the last ones may not be reached. */
    assert_true(fired * 2 >= tried);
    stage_close(&st);
    assert_true(kvf_emu_is_clean());
    print_message("# %s: %llu calls, %llu of them failed in turn, seed 17\n", s->name,
                  (unsigned long long)calls, (unsigned long long)fired);
}

/* ---- the device is lost ---- */

/* Every call that can fail says so, and everything can still be closed. */
static void expect_lost(stage *st)
{
    const kvf_cache_config cc = small_config();
    kvf_stream *stream = NULL;
    kvf_cache *cache = NULL;
    kvf_error error = {0};
    void *p = NULL, *alias = NULL;
    test_expect(st->runtime, kvf_stream_create(st->runtime, &stream), KVF_DEVICE_FAILED);
    test_expect(st->runtime, kvf_memory_alloc(st->runtime, 64, &p), KVF_DEVICE_FAILED);
    test_expect(st->runtime, kvf_pinned_alloc(st->runtime, 64, &p, &alias), KVF_DEVICE_FAILED);
    test_expect(st->runtime, kvf_cache_open(st->runtime, &cc, &cache, &error), KVF_DEVICE_FAILED);
    assert_null(cache);
    if (!strstr(error.text, "lost") || !strstr(error.text, "start the process again"))
        fail_msg("of a lost device: \"%s\"", error.text);
}

static void check_lost(stage *st, const scene *s, kvf_status status, const float *out,
                       const float *wanted)
{
    const kvf_error *e = kvf_runtime_error(st->runtime);
    if (status != KVF_DEVICE_FAILED && status != KVF_OK)
        fail_msg("%s on a lost device: %s, \"%s\"", s->name, kvf_status_name(status), e->text);
    if (status == KVF_OK && memcmp(out, wanted, sizeof(float) * OUT_FLOATS) != 0)
        fail_msg("%s on a lost device: nobody said so, and the output differs", s->name);
    expect_lost(st);
    stage_close(st);
    kvf_emu_reset();
    assert_true(kvf_emu_is_clean());
}

/* With call `nth`, which says what ended the device. */
static kvf_status lose_at_call(const scene *s, uint64_t nth, const float *wanted)
{
    static const int errors[] = {cudaErrorIllegalAddress, cudaErrorUnknown, cudaErrorLaunchFailure,
                                 cudaErrorECCUncorrectable};
    float out[OUT_FLOATS] = {0};
    stage st;
    kvf_emu_reset();
    stage_open(&st);
    watch(s->name, nth);
    kvf_emu_fail_call(NULL, nth, errors[nth % 4], 1);
    const kvf_status status = s->play(&st, s, out);
    if (!kvf_emu_failed_call()) { /* this play had fewer calls */
        kvf_emu_fail_call(NULL, 0, 0, 0);
        kvf_emu_lose_device(cudaErrorIllegalAddress);
        void *p = NULL;
        test_expect(st.runtime, kvf_memory_alloc(st.runtime, 64, &p), KVF_DEVICE_FAILED);
    }
    check_lost(&st, s, status, out, wanted);
    alarm(0);
    return status;
}

typedef struct fate {
    uint32_t delay_us;
} fate;

static void *lose_later(void *user)
{
    const fate *f = user;
    usleep(f->delay_us);
    kvf_emu_lose_device(cudaErrorLaunchFailure);
    return NULL;
}

/* Behind everybody's back, as a kernel does it. */
static kvf_status lose_in_between(const scene *s, uint32_t delay_us, const float *wanted)
{
    float out[OUT_FLOATS] = {0};
    fate f = {delay_us};
    pthread_t thread;
    stage st;
    kvf_emu_reset();
    stage_open(&st);
    watch(s->name, delay_us);
    assert_int_equal(pthread_create(&thread, NULL, lose_later, &f), 0);
    const kvf_status status = s->play(&st, s, out);
    pthread_join(thread, NULL);
    check_lost(&st, s, status, out, wanted);
    alarm(0);
    return status;
}

static void a_device_is_lost_at_any_moment(void **state)
{
    static const uint32_t losses = TEST_SANITIZED ? 4 : 10;
    const scene *s = *state;
    test_random random = {23};
    float wanted[OUT_FLOATS] = {0};
    uint32_t failed = 0;
    stage st;
    kvf_emu_reset();
    stage_open(&st);
    const uint64_t calls = count_calls(&st, s, wanted);
    stage_close(&st);
    for (uint32_t i = 0; i < losses; i++) {
        failed +=
            lose_at_call(s, 1 + test_random_below(&random, (uint32_t)calls), wanted) != KVF_OK;
        failed += lose_in_between(s, test_random_below(&random, 40000), wanted) != KVF_OK;
    }
    print_message("# %s: lost %u times, seed 23, %u calls said so\n", s->name, 2 * losses, failed);
    assert_true(failed > 0);
}

/* ---- the scenes ---- */

static void by_mapped(kvf_cache_config *cc)
{
    cc->transfer = KVF_TRANSFER_MAPPED;
}

static void by_batch(kvf_cache_config *cc)
{
    cc->transfer = KVF_TRANSFER_BATCH;
}

static void by_each(kvf_cache_config *cc)
{
    cc->transfer = KVF_TRANSFER_EACH;
}

static void speculating(kvf_cache_config *cc)
{
    cc->transfer = KVF_TRANSFER_AUTO;
    cc->speculate = 1;
    cc->verify_interval = 2;
}

static void physical(kvf_cache_config *cc)
{
    cc->restructure = KVF_RESTRUCTURE_PHYSICAL;
    cc->refresh = KVF_REFRESH_EXACT;
}

static void without_static(kvf_cache_config *cc)
{
    cc->select = KVF_SELECT_DYNAMIC;
    cc->static_ratio = 0.0f;
}

static void recordable(kvf_cache_config *cc)
{
    cc->transfer = KVF_TRANSFER_MAPPED;
    cc->refresh_interval = 128;
}

static uint32_t choose_first(void *user, const kvf_select_view *view, int32_t *ids)
{
    uint32_t n = 0;
    (void)user;
    while (n < view->pages_max && n < view->pages) {
        ids[n] = (int32_t)n;
        n++;
    }
    return n;
}

static void custom(kvf_cache_config *cc)
{
    cc->select = KVF_SELECT_CUSTOM;
    cc->select_fn = choose_first;
}

static const scene memory_scene = {"memory and streams", play_memory, NULL};
static const scene gather_scene = {"decode by gather", play_decode, NULL};
static const scene mapped_scene = {"decode by mapped", play_decode, by_mapped};
static const scene batch_scene = {"decode by batch", play_decode, by_batch};
static const scene each_scene = {"decode by each", play_decode, by_each};
static const scene speculate_scene = {"speculation", play_decode, speculating};
static const scene physical_scene = {"physical refresh", play_decode, physical};
static const scene custom_scene = {"custom policy", play_decode, custom};
static const scene pages_scene = {"page lists", play_pages, without_static};
static const scene record_scene = {"recorded decode", play_recording, recordable};
static const scene stats_scene = {"statistics", play_stats, NULL};
static const scene link_scene = {"link", play_link, NULL};

static void every_call_of_a_scene_fails(void **state)
{
    play_all(*state);
}

/* Opening a runtime: an error, or a device that can less; and the next one opens. */
static void every_call_of_open_fails(void **state)
{
    (void)state;
    uint64_t failures = 0;
    for (uint64_t n = 1;; n++) {
        stage st = {0};
        kvf_error error = {0};
        const kvf_runtime_config rc = stage_config(&st);
        watch("open", n);
        kvf_emu_reset();
        kvf_emu_fail_call(NULL, n,
                          n % 2 ? cudaErrorLaunchOutOfResources : cudaErrorMemoryAllocation, 0);
        const kvf_status status = kvf_runtime_open(&rc, &st.runtime, &error);
        const int fired = kvf_emu_failed_call() != NULL;
        if (status != KVF_OK) {
            if (!fired || st.runtime || error.status != status || strlen(error.text) < 10)
                fail_msg("call %llu: %s, \"%s\"", (unsigned long long)n, kvf_status_name(status),
                         error.text);
            failures++;
        }
        kvf_runtime_close(st.runtime);
        const int in_close = !fired && kvf_emu_failed_call() != NULL;
        kvf_emu_fail_call(NULL, 0, 0, 0);
        if (!kvf_emu_is_clean() || st.heap.live != 0)
            fail_msg("call %llu (%s): something is left of the runtime", (unsigned long long)n,
                     kvf_emu_failed_call() ? kvf_emu_failed_call() : "-");
        alarm(0);
        if (!fired && !in_close)
            break;
    }
    assert_true(failures >= 5);
}

int main(void)
{
    signal(SIGALRM, on_alarm);
#define SCENE(s)                                                                                   \
    {                                                                                              \
        .name = #s, .test_func = every_call_of_a_scene_fails,                                      \
        .initial_state = (void *)(uintptr_t)&s                                                     \
    }
#define LOST(s)                                                                                    \
    {                                                                                              \
        .name = #s " lost", .test_func = a_device_is_lost_at_any_moment,                           \
        .initial_state = (void *)(uintptr_t)&s                                                     \
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_call_of_open_fails),
        SCENE(memory_scene),
        SCENE(gather_scene),
        SCENE(mapped_scene),
        SCENE(batch_scene),
        SCENE(each_scene),
        SCENE(speculate_scene),
        SCENE(physical_scene),
        SCENE(custom_scene),
        SCENE(pages_scene),
        SCENE(record_scene),
        SCENE(stats_scene),
        SCENE(link_scene),
        LOST(memory_scene),
        LOST(gather_scene),
        LOST(mapped_scene),
        LOST(batch_scene),
        LOST(speculate_scene),
        LOST(record_scene),
        LOST(link_scene),
    };
    return cmocka_run_group_tests_name("runtime: CUDA calls that fail", tests, NULL, NULL);
}
