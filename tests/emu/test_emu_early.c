/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Kernels that start early in the graphs of the emulated runtime.
 *
 * The main property: what such a kernel does before it waits meets old data in every second replay;
 * what it does after the wait does not notice.
 */

#include "runtime_rig.h"

#include <string.h>

/* A kernel that starts early sees what comes before it once it has waited; what it reads before
 * that is old in one replay of two. */
static void test_early_start(void **state)
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
    kvf_emu_counts counts;
    kvf_emu_get_counts(&counts);
    assert_int_equal(counts.early_starts, 4 * 2);
    assert_in_range(counts.carveout_changes, 0, 1); /* none between kernels */
    OK(cudaGraphExecDestroy(exec));
    uint32_t *memory[] = {x, y, right, wrong};
    for (size_t i = 0; i < 4; i++)
        OK(cudaFreeHost(memory[i]));
    OK(cudaStreamDestroy(stream));
}

/* Behind a join a kernel does not start early, and a launch that would is refused. */
static void test_early_start_behind_a_join(void **state)
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
    OK(cudaFreeHost(x));
    OK(cudaFreeHost(y));
    OK(cudaEventDestroy(fork));
    OK(cudaEventDestroy(done));
    OK(cudaStreamDestroy(a));
    OK(cudaStreamDestroy(b));
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, rig_begin, rig_end)
    const struct CMUnitTest tests[] = {
        TEST(test_early_start),
        TEST(test_early_start_behind_a_join),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
