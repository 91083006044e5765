/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Streams and captures of others: whole uses of the library on the default stream, which
 * Transformers and eager engines have, and a caller's captures in the mode that allows least,
 * beside other uses whose threads ask for events and take memory meanwhile.
 *
 * Outputs are compared bit by bit with those of the same use on a stream of its own.
 */

#include "cuda_scenes.h"

#include <pthread.h>

#include <cuda_runtime_api.h>

static void open_watched(stage *st)
{
    kvf_emu_reset();
    stage_open(st);
}

static void close_clean(stage *st)
{
    stage_close(st);
    assert_true(kvf_emu_is_clean());
}

static void same_on_the_default_stream(void **state)
{
    const scene *const s = *state;
    float wanted[OUT_FLOATS] = {0}, out[OUT_FLOATS] = {0};
    kvf_emu_counts own, others;
    stage st;
    open_watched(&st);
    (void)scene_count_calls(&st, s, wanted);
    kvf_emu_get_counts(&own);
    st.on_default = 1;
    (void)scene_count_calls(&st, s, out);
    kvf_emu_get_counts(&others);
    assert_memory_equal(out, wanted, sizeof out);
    assert_int_equal(own.early_starts, others.early_starts);
    assert_true(s != &blocks_scene || others.early_starts > 0);
    close_clean(&st);
}

/* They say that they have no place there, and the runtime goes on. */
static void recordings_are_refused_on_the_default_stream(void **state)
{
    float out[OUT_FLOATS] = {0};
    stage st;
    open_watched(&st);
    st.on_default = 1;
    assert_int_equal(record_scene.play(&st, &record_scene, out), KVF_UNSUPPORTED);
    assert_string_equal(kvf_runtime_error(st.runtime)->text,
                        "the default stream cannot be recorded; use one of your own");
    (void)scene_count_calls(&st, &mapped_scene, out);
    close_clean(&st);
}

/* While a stream that is ordered with it is captured, nothing comes to the default stream. */
static void the_default_stream_beside_a_blocking_capture(void **state)
{
    float wanted[OUT_FLOATS] = {0}, out[OUT_FLOATS] = {0};
    cudaStream_t blocking;
    cudaGraph_t graph = NULL;
    stage st;
    open_watched(&st);
    (void)scene_count_calls(&st, &blocks_scene, wanted);
    st.on_default = 1;
    assert_int_equal(cudaStreamCreate(&blocking), cudaSuccess);
    assert_int_equal(cudaStreamBeginCapture(blocking, cudaStreamCaptureModeRelaxed), cudaSuccess);
    assert_int_equal(blocks_scene.play(&st, &blocks_scene, out), KVF_UNSUPPORTED);
    assert_non_null(strstr(kvf_runtime_error(st.runtime)->text, "cudaErrorStreamCaptureImplicit"));
    assert_non_null(strstr(kvf_runtime_error(st.runtime)->text, "cudaStreamNonBlocking"));
    assert_int_equal(cudaStreamEndCapture(blocking, &graph), cudaErrorStreamCaptureInvalidated);
    (void)cudaGetLastError();
    assert_int_equal(cudaStreamDestroy(blocking), cudaSuccess);
    (void)scene_count_calls(&st, &blocks_scene, out);
    assert_memory_equal(out, wanted, sizeof out);
    close_clean(&st);
}

/* ---- captures ---- */

typedef struct other_use {
    stage *st;
    const scene *s;
    kvf_status status;
    float out[OUT_FLOATS];
} other_use;

static void *play_other(void *raw)
{
    other_use *u = raw;
    u->status = u->s->play(u->st, u->s, u->out);
    return NULL;
}

/* A cache comes, steps and goes, on a thread of its own, in the midst of a capture. */
static void use_another_cache(stage *st)
{
    other_use u = {.st = st->beside, .s = st->meant};
    pthread_t thread;
    assert_int_equal(pthread_create(&thread, NULL, play_other, &u), 0);
    assert_int_equal(pthread_join(thread, NULL), 0);
    if (u.status != KVF_OK)
        fail_msg("%s beside a capture: %s", u.s->name, kvf_runtime_error(st->runtime)->text);
    assert_memory_equal(u.out, st->meant_out, sizeof u.out);
}

static void a_global_capture_beside_other_uses(void **state)
{
    const scene *const s = *state;
    float wanted[OUT_FLOATS] = {0}, of_other[OUT_FLOATS] = {0}, out[OUT_FLOATS] = {0};
    stage st;
    open_watched(&st);
    (void)scene_count_calls(&st, &blocks_scene, wanted);
    (void)scene_count_calls(&st, s, of_other);
    (void)scene_count_calls(&st, &captured_blocks_scene, out);
    assert_memory_equal(out, wanted, sizeof out);
    st.meant = s;
    st.meant_out = of_other;
    stage beside = st;
    void *memory = NULL;
    test_expect(st.runtime,
                kvf_memory_alloc(st.runtime, (size_t)LAYERS * TOKENS * OUT_FLOATS * 4, &memory),
                KVF_OK);
    beside.out = memory;
    st.beside = &beside;
    st.meanwhile = use_another_cache;
    (void)scene_count_calls(&st, &captured_blocks_scene, out);
    assert_memory_equal(out, wanted, sizeof out);
    kvf_memory_free(st.runtime, memory);
    close_clean(&st);
}

#define ON_DEFAULT(s) PLAYED(same_on_the_default_stream, s)
#define BESIDE(s)     PLAYED(a_global_capture_beside_other_uses, s)

int main(void)
{
    const struct CMUnitTest tests[] = {
        ON_DEFAULT(gather_scene),
        ON_DEFAULT(mapped_scene),
        ON_DEFAULT(batch_scene),
        ON_DEFAULT(each_scene),
        ON_DEFAULT(verified_scene), /* measures the link, too */
        ON_DEFAULT(refresh_scene),
        ON_DEFAULT(custom_scene),
        ON_DEFAULT(given_scene),
        ON_DEFAULT(pages_scene),
        ON_DEFAULT(prune_scene),
        ON_DEFAULT(chunks_scene),
        ON_DEFAULT(truncate_scene),
        ON_DEFAULT(disk_scene),
        ON_DEFAULT(stats_scene),
        ON_DEFAULT(blocks_scene),
        ON_DEFAULT(quantized_blocks_scene),
        cmocka_unit_test(recordings_are_refused_on_the_default_stream),
        cmocka_unit_test(the_default_stream_beside_a_blocking_capture),
        BESIDE(gather_scene),
        BESIDE(each_scene),
        BESIDE(verified_scene),
        BESIDE(disk_scene),
        BESIDE(mapped_scene),
    };
    scene_watch_start();
    return cmocka_run_group_tests_name("runtime: streams and captures of others", tests, NULL,
                                       NULL);
}
