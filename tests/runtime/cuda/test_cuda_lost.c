/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The device is lost at any moment of a scene, on the emulated device: by a call that says so, or
 * behind everybody's back. Some call of the library says so, or the outputs have the bits of an
 * undisturbed play; every later call that can fail does; and everything can still be closed.
 */

#include "cuda_scenes.h"

#include <pthread.h>
#include <unistd.h>

/* Every call that can fail says so, and everything can still be closed. */
static void expect_lost(stage *st)
{
    const kvf_cache_config cc = stage_small_config();
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
    scene_watch(s->name, nth);
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
    scene_watch(s->name, delay_us);
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
    const uint64_t calls = scene_count_calls(&st, s, wanted);
    stage_close(&st);
    for (uint32_t i = 0; i < losses; i++) {
        failed +=
            lose_at_call(s, 1 + test_random_below(&random, (uint32_t)calls), wanted) != KVF_OK;
        failed += lose_in_between(s, test_random_below(&random, 40000), wanted) != KVF_OK;
    }
    print_message("# %s: lost %u times, seed 23, %u calls said so\n", s->name, 2 * losses, failed);
    assert_true(failed > 0);
}

#define LOST(s) PLAYED(a_device_is_lost_at_any_moment, s)

int main(void)
{
    const struct CMUnitTest tests[] = {
        LOST(memory_scene),   LOST(gather_scene), LOST(mapped_scene),        LOST(batch_scene),
        LOST(verified_scene), LOST(record_scene), LOST(record_masked_scene), LOST(disk_scene),
        LOST(link_scene),     LOST(blocks_scene),
    };
    scene_watch_start();
    return cmocka_run_group_tests_name("runtime: a device that is lost", tests, NULL, NULL);
}
