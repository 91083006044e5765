/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Every CUDA call of the public entry points fails once, on the emulated device, with a plain
 * error.
 *
 * A scene is played again and again, and in turn N the N-th CUDA call fails. Then some call of the
 * library says so with a status and a text that fit, or the outputs have the bits of an undisturbed
 * play; nothing of the scene is left alive, on the device or in the allocator; and the same runtime
 * plays on.
 *
 * Knows nothing of what the calls are. Which of them fails first may differ from run to run, as a
 * thread of the transfer engine calls beside the caller's; every number is tried either way.
 */

#include "cuda_scenes.h"

#include <unistd.h>

#define FIRST_ALL 200u /* calls of which every one fails; */
#define SAMPLES   40u  /* beyond them so many, at random */
#define SEEDS     8u   /* of delays, for waits that are refused */

/* From one call that fails to the next. */
static uint32_t call_step(void)
{
    const uint32_t step = sweep_step();
    return TEST_SANITIZED && step < 5 ? 5 : step;
}

/* ---- what counts ---- */

/* Live objects on the device and in the allocator. */
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

typedef struct fault {
    const char *name; /* NULL: of any call */
    uint64_t nth;
    int error;
    uint32_t delay_seed; /* 0: as the environment says */
} fault;

static void prepare(const fault *f)
{
    kvf_emu_config config;
    kvf_emu_reset();
    kvf_emu_get_config(&config);
    if (f->delay_seed)
        config.delay_seed = f->delay_seed;
    kvf_emu_set_config(&config);
    kvf_emu_fail_call(f->name, f->nth, f->error, 0);
}

/* One play with a call failing. 1 if the fault fired. */
static int play_once(stage *st, const scene *s, const fault *f, const float *wanted)
{
    const uint64_t nth = f->nth;
    float out[OUT_FLOATS] = {0};
    const census before = census_now(&st->heap);
    scene_watch(s->name, nth);
    prepare(f);
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
        if (!fits(f->error, status) || e->status == KVF_OK || strlen(e->text) < 10)
            fail_msg("%s, call %llu (%s) failed with %d: %s, \"%s\"", s->name,
                     (unsigned long long)nth, call, f->error, kvf_status_name(status), e->text);
    }
    const census after = census_now(&st->heap);
    same_census(&before, &after, s->name, nth);
    kvf_emu_counts counts;
    kvf_emu_get_counts(&counts);
    assert_int_equal(counts.forbidden_calls, 0);
    alarm(0);
    return fired;
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
    const uint64_t calls = scene_count_calls(&st, s, wanted);
    const uint32_t step = call_step();
    for (uint64_t n = 1; n <= calls && n <= FIRST_ALL; n += step, tried++)
        fired += (uint64_t)play_once(&st, s, &(fault){NULL, n, errors[tried % 3], 0}, wanted);
    for (uint32_t i = 0; calls > FIRST_ALL && i < SAMPLES / step; i++, tried++) {
        const uint64_t n =
            FIRST_ALL + 1 + test_random_below(&random, (uint32_t)(calls - FIRST_ALL));
        fired += (uint64_t)play_once(&st, s, &(fault){NULL, n, errors[tried % 3], 0}, wanted);
    }
    assert_false(play_once(&st, s, &(fault){NULL, 1u << 30, cudaErrorUnknown, 0}, wanted));
    /* A thread that polls makes the number of calls vary, so the last ones may not be reached. */
    assert_true(fired * 2 >= tried);
    stage_close(&st);
    assert_true(kvf_emu_is_clean());
    print_message("# %s: %llu calls, %llu of them failed in turn, seed 17\n", s->name,
                  (unsigned long long)calls, (unsigned long long)fired);
    sweep_tell(tried, calls);
}

static void every_call_of_a_scene_fails(void **state)
{
    play_all(*state);
}

/* Whoever is refused a wait neither reads nor frees what work still uses: all work is late here. */
static void every_wait_is_refused(void **state)
{
    const scene *const s = *state;
    stage st;
    float wanted[OUT_FLOATS] = {0};
    uint64_t tried = 0;
    kvf_emu_reset();
    stage_open(&st);
    (void)scene_count_calls(&st, s, wanted);
    const uint64_t waits = kvf_emu_calls_of("cudaStreamSynchronize");
    for (uint32_t seed = 1; seed <= SEEDS; seed++)
        for (uint64_t n = 1; n <= waits; n++, tried++) {
            const fault f = {"cudaStreamSynchronize", n, cudaErrorInvalidValue, seed};
            assert_true(play_once(&st, s, &f, wanted));
        }
    stage_close(&st);
    print_message("# %s: %llu waits, delays of %u seeds\n", s->name, (unsigned long long)waits,
                  SEEDS);
    assert_true(tried > 0);
}

/* Opening a runtime: an error, or a device that can less; and the next one opens. */
static void every_call_of_open_fails(void **state)
{
    const uint32_t step = sweep_step();
    uint64_t failures = 0;
    for (uint64_t n = 1;; n += step) {
        stage st = {0};
        kvf_error error = {0};
        const kvf_runtime_config rc = stage_config(&st);
        scene_watch("open", n);
        kvf_emu_reset();
        kvf_emu_fail_call(
            NULL, n, n / step % 2 ? cudaErrorLaunchOutOfResources : cudaErrorMemoryAllocation, 0);
        const kvf_status status = test_runtime_open(&rc, &st.runtime, &error);
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
        if (!fired && !in_close) {
            sweep_tell_step(n - 1, step);
            break;
        }
    }
    assert_true(failures * step >= 5);
}

#define SCENE(s) PLAYED(every_call_of_a_scene_fails, s)
#define WAITS(s) PLAYED(every_wait_is_refused, s)

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_call_of_open_fails),
        SCENE(memory_scene),
        SCENE(gather_scene),
        SCENE(mapped_scene),
        SCENE(batch_scene),
        SCENE(each_scene),
        SCENE(verified_scene),
        SCENE(refresh_scene),
        SCENE(custom_scene),
        SCENE(given_scene),
        SCENE(pages_scene),
        SCENE(record_scene),
        SCENE(record_masked_scene),
        SCENE(prune_scene),
        SCENE(chunks_scene),
        SCENE(truncate_scene),
        SCENE(disk_scene),
        SCENE(stats_scene),
        SCENE(link_scene),
        SCENE(blocks_scene),
        SCENE(quantized_blocks_scene),
        WAITS(blocks_scene),
        WAITS(stats_scene),
    };
    scene_watch_start();
    return cmocka_run_group_tests_name("runtime: CUDA calls that fail", tests, NULL, NULL);
}
