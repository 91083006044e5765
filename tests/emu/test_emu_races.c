/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A thread sanitizer's view of the emulated runtime: an order that CUDA does not promise is a
 * race, whatever the timing, and one that it promises is none.
 *
 * Each case runs in a process of its own. Skipped without -Db_sanitize=thread.
 */

#include "runtime_rig.h"
#include "sanitizers.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define WORDS 16u
#define BYTES (WORDS * 4)

static void pause_ms(long ms)
{
    const struct timespec time = {.tv_nsec = ms * 1000000};
    nanosleep(&time, NULL);
}

/* Stream b reads what stream a wrote long ago, after later work and calls on a. */
static void two_streams(int is_ordered)
{
    cudaStream_t a = rig_stream(), b = rig_stream();
    cudaEvent_t event = rig_event();
    uint32_t *cell = rig_memory(BYTES), *to = rig_memory(BYTES), *other = rig_memory(BYTES);
    OK(cudaMemsetAsync(cell, 1, BYTES, a));
    if (is_ordered)
        rig_join(b, event, a);
    pause_ms(20);
    OK(cudaMemsetAsync(other, 1, BYTES, a));
    pause_ms(20);
    rig_copy(b, to, cell, BYTES);
    OK(cudaStreamSynchronize(b));
}

/* The host reads what a stream wrote, with or without waiting; asking for something else before. */
static void host_reads(int is_ordered)
{
    cudaStream_t a = rig_stream(), b = rig_stream();
    uint32_t *cell = rig_pinned(WORDS), *other = rig_memory(BYTES);
    OK(cudaMemsetAsync(cell, 1, BYTES, a));
    OK(cudaMemsetAsync(other, 1, BYTES, b));
    pause_ms(20);
    OK(cudaStreamSynchronize(is_ordered ? a : b));
    assert_int_equal(cell[3], 0x01010101);
}

/* The host reuses the source of a copy that nobody waited for. */
static void source_reused(int is_ordered)
{
    cudaStream_t a = rig_stream();
    cudaEvent_t event = rig_event();
    uint32_t *source = rig_pinned(WORDS), *cell = rig_memory(BYTES);
    rig_copy(a, cell, source, BYTES);
    OK(cudaEventRecord(event, a));
    pause_ms(20);
    if (is_ordered)
        OK(cudaEventSynchronize(event));
    source[3] = 1;
    OK(cudaStreamSynchronize(a));
}

/* A wait for an older record does not cover what came between. */
static void old_record(int is_ordered)
{
    cudaStream_t a = rig_stream(), b = rig_stream();
    cudaEvent_t event = rig_event();
    uint32_t *cell = rig_memory(BYTES), *to = rig_memory(BYTES), *first = rig_memory(BYTES);
    OK(cudaMemsetAsync(first, 1, BYTES, a));
    OK(cudaEventRecord(event, a));
    OK(cudaMemsetAsync(cell, 1, BYTES, a));
    if (is_ordered)
        OK(cudaEventRecord(event, a));
    pause_ms(20);
    OK(cudaStreamWaitEvent(b, event, 0));
    rig_copy(b, to, cell, BYTES);
    OK(cudaStreamSynchronize(b));
}

/* Two branches of a graph that use one cell. */
static void branches(int is_ordered)
{
    cudaStream_t a = rig_stream(), b = rig_stream();
    cudaEvent_t event = rig_event();
    uint32_t *cell = rig_memory(BYTES), *to = rig_memory(BYTES);
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    OK(cudaStreamBeginCapture(a, cudaStreamCaptureModeRelaxed));
    rig_join(b, event, a);
    OK(cudaMemsetAsync(cell, 1, BYTES, a));
    if (is_ordered)
        rig_join(b, event, a);
    rig_copy(b, to, cell, BYTES);
    rig_join(a, event, b);
    OK(cudaStreamEndCapture(a, &graph));
    OK(cudaGraphInstantiate(&exec, graph, 0));
    OK(cudaGraphLaunch(exec, a));
    OK(cudaStreamSynchronize(a));
}

/* The host writes, then sets a word that the stream waits for; or it sets the word first. */
static void word_orders(int is_ordered)
{
    cudaStream_t a = rig_stream();
    uint32_t *source = rig_pinned(WORDS), *word = rig_pinned(1), *cell = rig_memory(BYTES);
    OK(rig_wait_word(a, word, 1));
    rig_copy(a, cell, source, BYTES);
    if (!is_ordered)
        rig_set_word(word, 1);
    source[3] = 1;
    if (is_ordered)
        rig_set_word(word, 1);
    OK(cudaStreamSynchronize(a));
}

static const struct {
    const char *name;
    void (*run)(int is_ordered);
} CASES[] = {{"two streams", two_streams},     {"host reads", host_reads},
             {"source reused", source_reused}, {"old record", old_record},
             {"branches", branches},           {"word orders", word_orders}};
#define CASE_COUNT (sizeof CASES / sizeof *CASES)

/* The exit status of a case in a process of its own; 66 is the sanitizer's. */
static int run_case(const char *program, size_t number, int is_ordered)
{
    char arguments[2][4];
    int status;
    snprintf(arguments[0], sizeof arguments[0], "%u", (unsigned)number % 100);
    snprintf(arguments[1], sizeof arguments[1], "%u", is_ordered != 0);
    const pid_t child = fork();
    if (child == 0) {
        const int silence = open("/dev/null", O_WRONLY);
        if (!is_ordered)
            dup2(silence, 2);
        setenv("TSAN_OPTIONS",
               "exitcode=66:halt_on_error=0:report_thread_leaks=0:atexit_sleep_ms=0", 1);
        execl(program, program, arguments[0], arguments[1], (char *)NULL);
        _exit(1);
    }
    if (child < 0 || waitpid(child, &status, 0) != child || !WIFEXITED(status))
        return -1;
    return WEXITSTATUS(status);
}

int main(int argc, char **argv)
{
    if (!KVF_TSAN) {
        puts("skipped: built without -Db_sanitize=thread");
        return 77;
    }
    OK(rig_load());
    if (argc == 3) {
        CASES[(size_t)atoi(argv[1]) % CASE_COUNT].run(atoi(argv[2]));
        return 0;
    }
    int failures = 0;
    for (size_t i = 0; i < CASE_COUNT; i++)
        for (int is_ordered = 0; is_ordered <= 1; is_ordered++) {
            const int expected = is_ordered ? 0 : 66;
            const int status = run_case("/proc/self/exe", i, is_ordered);
            if (status != expected) {
                fprintf(stderr, "%s, %s: exit status %d, not %d\n", CASES[i].name,
                        is_ordered ? "ordered" : "not ordered", status, expected);
                failures++;
            }
        }
    printf("%zu cases, %d failures\n", CASE_COUNT, failures);
    return failures != 0;
}
