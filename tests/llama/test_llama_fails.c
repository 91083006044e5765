/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Failures: every call of the library, and every allocation, fails once. A pass then fails as that
 * of any backend does, or is left to llama.cpp; the next one is right.
 *
 * The linker sends those calls to functions of this file (--wrap).
 */

#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "llama_rig.h"

#define ROUNDING 0.01

/* The call that fails: the `at`-th of those that are counted; 0 = none. */
static int64_t counted, at;

static int fails(void)
{
    if (!__atomic_load_n(&rig_is_inside, __ATOMIC_RELAXED))
        return 0; /* the rig's own */
    const int64_t now = __atomic_add_fetch(&counted, 1, __ATOMIC_RELAXED);
    return now == __atomic_load_n(&at, __ATOMIC_RELAXED);
}

static enum { CALLS, ALLOCATIONS, READS } what; /* is counted */

#define WRAP(result, name, is_counted, failure, parameters, arguments)                             \
    result __real_##name parameters;                                                               \
    result __wrap_##name parameters;                                                               \
    result __wrap_##name parameters                                                                \
    {                                                                                              \
        return (is_counted) && fails() ? (failure) : __real_##name arguments;                      \
    }
#define CALL(name, parameters, arguments)                                                          \
    WRAP(kvf_status, name, what == CALLS, KVF_DEVICE_FAILED, parameters, arguments)
#define ALLOCATION(name, parameters, arguments)                                                    \
    WRAP(void *, name, what == ALLOCATIONS, NULL, parameters, arguments)
CALL(kvf_stream_create, (kvf_runtime * runtime, kvf_stream **out), (runtime, out))
CALL(kvf_memory_alloc, (kvf_runtime * runtime, size_t bytes, void **out), (runtime, bytes, out))
CALL(kvf_blocks_bind, (kvf_blocks * b, uint32_t layer, void *codes, size_t stride),
     (b, layer, codes, stride))
CALL(kvf_blocks_attention_params,
     (kvf_blocks * b, uint32_t layer, const kvf_attention_params *params), (b, layer, params))
CALL(kvf_blocks_put_sized,
     (kvf_blocks * b, const kvf_blocks_put_args *args, size_t size, kvf_stream *stream),
     (b, args, size, stream))
CALL(kvf_blocks_decode_sized,
     (kvf_blocks * b, const kvf_blocks_decode_args *args, size_t size, size_t rows,
      kvf_stream *stream),
     (b, args, size, rows, stream))
CALL(kvf_blocks_extend_sized,
     (kvf_blocks * b, const kvf_blocks_extend_args *args, size_t size, size_t rows,
      kvf_stream *stream),
     (b, args, size, rows, stream))
CALL(kvf_stream_wait, (kvf_stream * stream), (stream))
CALL(kvf_pinned_alloc, (kvf_runtime * runtime, size_t bytes, void **host, void **device),
     (runtime, bytes, host, device))
WRAP(kvf_status, kvf_blocks_get_sized, what != ALLOCATIONS, KVF_DEVICE_FAILED,
     (kvf_blocks * b, const kvf_blocks_get_args *args, size_t size, kvf_stream *stream),
     (b, args, size, stream))
WRAP(kvf_status, kvf_blocks_open, what == CALLS, KVF_OUT_OF_MEMORY,
     (kvf_runtime * runtime, const kvf_blocks_config *config, kvf_blocks **out, kvf_error *error),
     (runtime, config, out, error))
ALLOCATION(malloc, (size_t bytes), (bytes))
ALLOCATION(calloc, (size_t count, size_t bytes), (count, bytes))
ALLOCATION(realloc, (void *old, size_t bytes), (old, bytes))

static void arm(int64_t call)
{
    __atomic_store_n(&counted, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&at, call, __ATOMIC_RELAXED);
}

/* A step and a prompt under a failure, three steps without. Returns whether the failure happened.
 */
static int attend_once(int64_t call, int allocations)
{
    rig *r =
        rig_open(&(rig_options){.setting = "budget=full rows=2 prompts=kvferry", .away_at = 1});
    rig_set set[1] = {{0}}, prompt[3];
    int64_t cells[100];
    for (int64_t cell = 0; cell < 100; cell++) {
        rig_add(set[0], (uint32_t)cell);
        cells[cell] = cell;
        if (cell >= 97)
            memcpy(prompt[cell - 97], set[0], sizeof prompt[0]);
    }
    for (int layer = 0; layer < RIG_LAYERS; layer++)
        assert_int_equal(rig_write(r, layer, cells, 100), GG_SUCCESS);
    what = allocations ? ALLOCATIONS : CALLS;
    arm(call);
    int failed = 0;
    for (int layer = 0; layer < RIG_LAYERS; layer++) {
        failed |= rig_attend(r, layer, 1, 0, 1, set) != GG_SUCCESS;
        failed |= rig_attend(r, layer, 3, 0, 1, prompt) != GG_SUCCESS;
    }
    const int happened = counted >= call;
    arm(0);
    for (int64_t cell = 100; cell < 103; cell++)
        assert_int_equal(rig_begin(r, cell, cell + 1, set[0]), GG_SUCCESS);
    /* A pass that failed is begun anew, and then all is as it was. */
    if (failed)
        assert_true(r->by_kvferry);
    assert_true(r->worst < ROUNDING);
    rig_end(r);
    return happened;
}

/* 200 tokens of a rig whose pages are away, as far as they can be. */
static rig *away(rig_set set)
{
    rig *r = rig_open(&(rig_options){.away_at = 1});
    r->attentions = 1; /* nobody looks at the outputs */
    assert_int_equal(rig_begin(r, 0, 200, set), GG_SUCCESS);
    assert_true(rig_away() > 10);
    what = READS;
    return r;
}

/* A reader that gets no page gets none of zeros: the process ends, as at any other fault.
 * It comes first: ThreadSanitizer ends a process that forks when it has threads. */
TEST(a_reader_never_sees_what_is_not_there)
{
    for (int is_fault = 0; is_fault < 2; is_fault++) {
        rig_set set[1] = {{0}};
        const pid_t child = fork();
        if (!child) {
            const struct rlimit none = {0, 0};
            setrlimit(RLIMIT_CORE, &none);
            signal(SIGSEGV, SIG_DFL);
            rig *r = away(set[0]);
            volatile const char *byte = (const char *)r->k[0]->data + r->k[0]->nb[2] / 2;
            arm(is_fault);
            rig_is_inside = 1;
            (void)*byte;
            _exit(0);
        }
        int how = 0;
        assert_int_equal(waitpid(child, &how, 0), child);
        assert_true(is_fault ? WIFSIGNALED(how) && WTERMSIG(how) == SIGSEGV
                             : WIFEXITED(how) && WEXITSTATUS(how) == 0);
    }
}

TEST(calls_of_the_library_fail_once)
{
    int64_t call = 1;
    while (attend_once(call, 0))
        call++;
    assert_true(call > 10);
}

TEST(allocations_fail_once)
{
    int64_t call = 1;
    while (attend_once(call, 1))
        call++;
    assert_true(call > 1);
}

/* Tokens that llama.cpp has no more, and the library gives no more: no pass, until all is cleared.
 */
TEST(what_is_lost_is_never_used)
{
    rig_set set[1] = {{0}};
    rig *r = away(set[0]);
    const int64_t cell = 200;
    assert_int_equal(rig_write(r, 0, &cell, 1), GG_SUCCESS);
    rig_take(set[0], 100);
    rig_add(set[0], 200); /* takes the place of 100, which has to come back before */
    arm(1);
    assert_int_equal(rig_attend(r, 0, 1, 0, 1, set), GG_FAILED);
    arm(0);
    assert_int_equal(rig_attend(r, 1, 1, 0, 1, set), GG_FAILED);
    assert_int_equal(rig_write(r, 1, &cell, 1), GG_FAILED);
    standin_clear(r->buffer, 0);
    r->o.away_at = 0;
    assert_int_equal(rig_pass(r, &cell, 1, 1, 0, 1, set), GG_SUCCESS);
    assert_true(r->by_kvferry && r->worst < ROUNDING);
    assert_non_null(strstr(rig_end(r), "cannot be read back"));
}

TEST(llamas_own_kernels_fail)
{
    rig *r = rig_open(&(rig_options){0});
    const int64_t cell = 1;
    standin_fails = 1;
    assert_int_equal(rig_write(r, 0, &cell, 1), GG_FAILED);
    assert_int_equal(rig_write(r, 0, &cell, 1), GG_SUCCESS);
    rig_end(r);
}
