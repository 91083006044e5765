/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Memory that runs out at every single allocation, sinks that cannot be brought to the device, two
 * threads in one cache, and how much memory a cache takes.
 *
 * The allocator of the test counts what is alive, so a leak of one block fails the test.
 */

#include "harness.h"
#include "heap.h"
#include "resident.h"

#include <pthread.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#ifndef TEST_HAS_EMULATOR
#define TEST_HAS_EMULATOR 0
#endif
#if TEST_HAS_EMULATOR
#include "emu_control.h"
#endif

/* ---- failing allocator ---- */

/* 0-based; negative = never */
static void heap_arm(heap *h, int64_t fail_at)
{
    h->asked = h->failed = 0;
    h->fail_at = fail_at + 1;
}

static kvf_runtime_config heap_config(heap *h)
{
    kvf_runtime_config rc = test_runtime_config();
    rc.allocator = heap_allocator(h);
    return rc;
}

static int is_memory_status(kvf_status s)
{
    return s == KVF_OUT_OF_MEMORY || s == KVF_OUT_OF_DEVICE_MEMORY;
}

static void runtime_open_survives_every_failure(void **state)
{
    heap h = {0};
    const kvf_runtime_config rc = heap_config(&h);
    const uint32_t step = sweep_step();
    int64_t n = 0;
    for (;; n += step) {
        kvf_runtime *runtime = (kvf_runtime *)&h;
        kvf_error error = {0};
        heap_arm(&h, n);
        const kvf_status status = test_runtime_open(&rc, &runtime, &error);
        if (!h.failed) {
            assert_int_equal(status, KVF_OK);
            kvf_runtime_close(runtime);
            break;
        }
        if (!is_memory_status(status) || runtime || error.status != status || !error.text[0])
            fail_msg("allocation %lld: %s, \"%s\"", (long long)n, kvf_status_name(status),
                     error.text);
        assert_int_equal(h.live, 0);
    }
    assert_int_equal(h.live, 0);
    assert_true(n > 0);
    print_message("# %lld allocations\n", (long long)n);
    sweep_tell_step((uint64_t)n, step);
}

/* Uses the cache a little, so that a half-made one would show. */
static void use_cache(kvf_cache *cache, kvf_stream *stream, const test_tokens *t)
{
    kvf_sequence *s = NULL;
    float *out = test_scratch(256 * sizeof *out);
    assert_int_equal(kvf_sequence_create(cache, &s), KVF_OK);
    for (uint32_t i = 0; i < 130; i++) {
        kvf_decode_args a = test_step_args(&s, t, 0, i, out);
        assert_int_equal(kvf_decode(cache, &a, stream), KVF_OK);
    }
    assert_int_equal(kvf_stream_wait(stream), KVF_OK);
    kvf_sequence_destroy(s);
}

static kvf_status open_another(void *user, kvf_error *error)
{
    const test_world *w = user;
    kvf_cache *cache = NULL;
    const kvf_status status = kvf_cache_open(w->runtime, &w->config, &cache, error);
    assert_true((status == KVF_OK) == (cache != NULL));
    assert_true(status == KVF_OK || is_memory_status(status) || status == KVF_PIN_FAILED ||
                status == KVF_SYSTEM);
    kvf_cache_close(cache);
    return status;
}

/* Allocations, maps, registrations, device memory, streams, events, threads: each is refused once,
 * at its turn. */
static void cache_open_survives_every_failure(void **state)
{
    static const char *const settings[] = {
        "transfer=direct verify_interval=8", "transfer=gather verify_interval=8", "transfer=each",
        "transfer=gather verify_interval=8 layers=2 head_mask=0111"};
    for (uint32_t m = 0; m < sizeof settings / sizeof *settings; m++) {
        kvf_cache_config cc = test_config_small();
        kvf_runtime_config rc = test_runtime_config();
        test_world w;
        test_tokens t;
        test_set(&cc, settings[m]);
        cc.transfer = test_transfer(cc.transfer);
        rc.allow_unpinned = 0;
        rc.allocator = test_asking_allocator();
        test_tokens_make(&t, &cc, &(test_tokens_spec){.count = 130, .seed = 3, .sharpness = 1.0f});
        test_world_open(&w, &rc, &cc);
        kvf_cache_close(w.cache);
        assert_true(test_refuse_each(w.runtime, open_another, &w) > 5);
        test_ok(&w, kvf_cache_open(w.runtime, &cc, &w.cache, NULL));
        use_cache(w.cache, w.stream, &t);
        test_close(&w, &t);
    }
}

static kvf_status make_stream(void *user, kvf_error *error)
{
    const test_world *w = user;
    kvf_stream *stream = NULL;
    const kvf_status status = kvf_stream_create(w->runtime, &stream);
    *error = *kvf_runtime_error(w->runtime);
    assert_true((status == KVF_OK) == (stream != NULL));
    kvf_stream_destroy(stream);
    return status;
}

/* Streams fail or are made; sequences, forks, a prompt and steps ask for nothing at all. */
static void small_objects_survive_every_failure(void **state)
{
    test_world w;
    test_tokens t;
    kvf_runtime_config rc = test_runtime_config();
    kvf_cache_config cc = test_config_small();
    kvf_sequence *child = NULL;
    float *out = test_scratch(256 * sizeof *out);
    cc.sequences_max = 2;
    rc.allocator = test_asking_allocator();
    test_tokens_make(&t, &cc, &(test_tokens_spec){.count = 300, .seed = 3, .sharpness = 1.0f});
    test_world_open(&w, &rc, &cc);
    assert_true(test_refuse_each(w.runtime, make_stream, &w) > 0);
    atomic_store(&test_refuse_in, 1);
    kvf_sequence *s = test_sequence(&w);
    test_prefill(&w, s, &t, &(test_range){.count = 200, .chunk = 128}, NULL);
    test_ok(&w, kvf_sequence_fork(w.cache, s, w.stream, &child));
    for (uint32_t i = 200; i < 290; i++) {
        test_decode(&w, s, &t, 0, i, out, NULL);
        test_decode(&w, child, &t, 0, i + 1, out, NULL);
    }
    kvf_sequence_destroy(child);
    test_wait(&w);
    assert_int_equal(atomic_exchange(&test_refuse_in, 0), 1);
    test_close(&w, &t);
}

/* ---- attention parameters ---- */

#define UNDER_PARAMS 40u /* tokens under one set of parameters, then steps of as many */

/* A layer that takes one of two sets of attention parameters, and what steps give under each. */
typedef struct with_params {
    test_world w;
    test_tokens t;
    void *wanted[2];
} with_params;

static kvf_status give(const with_params *f, uint32_t number)
{
    const float sinks[2][4] = {{1.5f, -2.0f, 4.0f, 0.0f}, {-1.0f, 3.0f, 0.5f, 2.0f}};
    kvf_attention_params params;
    kvf_attention_params_init(&params);
    params.sinks = sinks[number];
    params.scale = number ? 0.3f : 0.2f;
    params.soft_cap = number ? 0.0f : 20.0f;
    return kvf_cache_attention_params(f->w.cache, 0, &params);
}

/* A sequence in which the layer has these parameters. */
static void *steps_under(with_params *f, uint32_t number)
{
    kvf_sequence *s = test_sequence(&f->w);
    test_fill(&f->w, s, &f->t, 0, UNDER_PARAMS);
    test_ok(&f->w, give(f, number)); /* with tokens it takes the one alone that it has */
    void *out = test_steps(&f->w, s, &f->t, UNDER_PARAMS, UNDER_PARAMS);
    kvf_sequence_destroy(s);
    return out;
}

static void is_under(with_params *f, uint32_t number)
{
    void *out = steps_under(f, number);
    assert_memory_equal(out, f->wanted[number], test_steps_bytes(&f->t, UNDER_PARAMS));
    free(out);
}

/* From the first parameters to the second, with whatever fails here. */
static kvf_status change_params(void *user, kvf_error *error)
{
    with_params *f = user;
    const int turn = atomic_exchange(&test_refuse_in, 0);
    test_ok(&f->w, give(f, 0));
    atomic_store(&test_refuse_in, turn);
    const kvf_status status = give(f, 1);
    *error = *kvf_runtime_error(f->w.runtime);
    const int left = atomic_exchange(&test_refuse_in, 0);
    is_under(f, status == KVF_OK);
    atomic_store(&test_refuse_in, left);
    return status;
}

#if TEST_HAS_EMULATOR
enum { INVALID_VALUE = 1 }; /* of cudaError_t */

/* The same for every CUDA call of the change. */
static void refuse_cuda_calls(with_params *f)
{
    bool fired = true;
    for (uint64_t n = 1; fired; n++) {
        test_ok(&f->w, give(f, 0));
        kvf_emu_fail_call(NULL, n, INVALID_VALUE, 0);
        const kvf_status status = give(f, 1);
        fired = kvf_emu_failed_call() != NULL;
        kvf_emu_reset();
        assert_true(fired || status == KVF_OK);
        is_under(f, status == KVF_OK);
    }
}
#endif

static void attention_params_that_fail_change_nothing(void **state)
{
    with_params f = {0};
    const kvf_cache_config cc = test_config_small();
    kvf_runtime_config rc = test_runtime_config();
    rc.allocator = test_asking_allocator();
    test_tokens_make(&f.t, &cc,
                     &(test_tokens_spec){.count = 2 * UNDER_PARAMS, .seed = 5, .sharpness = 2.0f});
    test_world_open(&f.w, &rc, &cc);
    for (uint32_t i = 0; i < 2; i++) {
        test_ok(&f.w, give(&f, i));
        f.wanted[i] = steps_under(&f, i);
    }
    assert_memory_not_equal(f.wanted[0], f.wanted[1], test_steps_bytes(&f.t, UNDER_PARAMS));
    assert_true(test_refuse_each(f.w.runtime, change_params, &f) > 0);
#if TEST_HAS_EMULATOR
    if (test_on_cuda())
        refuse_cuda_calls(&f);
#endif
    for (uint32_t i = 0; i < 2; i++)
        free(f.wanted[i]);
    test_close(&f.w, &f.t);
}

/* ---- misuse ---- */

typedef struct hammer {
    kvf_cache *cache;
    pthread_barrier_t *start;
} hammer;

static void *hammer_run(void *user)
{
    hammer *h = user;
    pthread_barrier_wait(h->start);
    for (uint32_t i = 0; i < 2000000; i++) {
        kvf_sequence *s = NULL;
        if (kvf_sequence_create(h->cache, &s) == KVF_OK)
            kvf_sequence_destroy(s);
    }
    return NULL;
}

/* In a child: two threads use one cache at the same time. The debug assertion must stop it. */
static void misuse_child(void)
{
    const struct rlimit none = {0, 0};
    setrlimit(RLIMIT_CORE, &none);
    alarm(20);
    const kvf_runtime_config rc = test_runtime_config();
    kvf_cache_config cc = test_config_small();
    cc.sequences_max = 4;
    kvf_runtime *runtime = NULL;
    hammer h = {0};
    pthread_barrier_t start;
    pthread_t threads[2];
    pthread_barrier_init(&start, NULL, 2);
    if (test_runtime_open(&rc, &runtime, NULL) != KVF_OK ||
        kvf_cache_open(runtime, &cc, &h.cache, NULL) != KVF_OK)
        _exit(2);
    h.start = &start;
    for (int i = 0; i < 2; i++)
        if (pthread_create(&threads[i], NULL, hammer_run, &h) != 0)
            _exit(3);
    for (int i = 0; i < 2; i++)
        pthread_join(threads[i], NULL);
    _exit(0);
}

static void two_threads_in_one_cache_are_caught(void **state)
{
    if (TEST_SANITIZED || KVF_ASSERT_LEVEL < 1) {
        print_message("# skipped: needs debug assertions and no sanitizer\n");
        skip();
    }
    fflush(NULL);
    const pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0)
        misuse_child();
    int status = 0;
    assert_int_equal(waitpid(child, &status, 0), child);
    if (!WIFSIGNALED(status) || WTERMSIG(status) != SIGABRT)
        fail_msg("the child ended with status 0x%x, not with an assertion", status);
}

/* ---- memory ---- */

static void a_cache_takes_what_its_plan_says(void **state)
{
    if (TEST_SANITIZED) {
        print_message("# skipped: sanitizers take memory of their own\n");
        skip();
    }
    if (test_on_cuda()) {
        print_message("# skipped: device memory is not memory of this process\n");
        skip();
    }
    static const kvf_transfer methods[] = {KVF_TRANSFER_DIRECT, KVF_TRANSFER_GATHER};
    kvf_cache_config cc = test_config_small();
    cc.layers = 2;
    cc.kv_heads = 4;
    cc.query_heads = 8;
    cc.head_dim = 128;
    cc.dtype = KVF_BF16;
    cc.page_size = 32;
    cc.budget_tokens = 512;
    cc.local_tokens = 64;
    cc.tokens_max = 16384;
    for (uint32_t m = 0; m < 2; m++) {
        cc.transfer = test_transfer(methods[m]);
        kvf_runtime *runtime = test_runtime();
        kvf_cache *cache = NULL;
        kvf_cache_plan p;
        const uint64_t before = resident_bytes();
        assert_int_equal(kvf_cache_plan_make(runtime, &cc, &p, NULL), KVF_OK);
        assert_true(resident_bytes() < before + (1u << 20)); /* a plan reserves nothing */
        assert_int_equal(kvf_cache_open(runtime, &cc, &cache, NULL), KVF_OK);
        const uint64_t grown = resident_bytes() - before;
        const uint64_t planned = p.host_kv_bytes + p.host_staging_bytes + p.device_kv_bytes +
                                 p.device_digest_bytes + p.device_table_bytes + p.host_table_bytes;
        print_message("# plan %.1f MiB, grown by %.1f MiB\n", (double)planned / 1048576.0,
                      (double)grown / 1048576.0);
        assert_true(grown <= planned + planned / 10 + (64u << 20));
        assert_true(grown + (8u << 20) >=
                    p.host_kv_bytes + p.host_staging_bytes); /* touched at open */
        kvf_cache_close(cache);
        kvf_runtime_close(runtime);
        assert_true(resident_bytes() <= before + planned / 10 + (8u << 20));
    }
}

int main(void)
{
    /* The first one forks. */
    return unit_run(two_threads_in_one_cache_are_caught, a_cache_takes_what_its_plan_says,
                    runtime_open_survives_every_failure, cache_open_survives_every_failure,
                    small_objects_survive_every_failure, attention_params_that_fail_change_nothing);
}
