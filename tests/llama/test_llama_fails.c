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

#define WRAP(name, parameters, arguments)                                                          \
    kvf_status __real_##name parameters;                                                           \
    kvf_status __wrap_##name parameters;                                                           \
    kvf_status __wrap_##name parameters                                                            \
    {                                                                                              \
        if (what == CALLS && fails())                                                              \
            return KVF_DEVICE_FAILED;                                                              \
        return __real_##name arguments;                                                            \
    }
WRAP(kvf_stream_create, (kvf_runtime * runtime, kvf_stream **out), (runtime, out))
WRAP(kvf_memory_alloc, (kvf_runtime * runtime, size_t bytes, void **out), (runtime, bytes, out))
WRAP(kvf_blocks_bind, (kvf_blocks * b, uint32_t layer, void *codes, size_t stride),
     (b, layer, codes, stride))
WRAP(kvf_blocks_attention_params,
     (kvf_blocks * b, uint32_t layer, const kvf_attention_params *params), (b, layer, params))
WRAP(kvf_blocks_put_sized,
     (kvf_blocks * b, const kvf_blocks_put_args *args, size_t size, kvf_stream *stream),
     (b, args, size, stream))
WRAP(kvf_blocks_decode_sized,
     (kvf_blocks * b, const kvf_blocks_decode_args *args, size_t size, size_t rows,
      kvf_stream *stream),
     (b, args, size, rows, stream))
WRAP(kvf_blocks_extend_sized,
     (kvf_blocks * b, const kvf_blocks_extend_args *args, size_t size, size_t rows,
      kvf_stream *stream),
     (b, args, size, rows, stream))
WRAP(kvf_stream_wait, (kvf_stream * stream), (stream))
WRAP(kvf_pinned_alloc, (kvf_runtime * runtime, size_t bytes, void **host, void **device),
     (runtime, bytes, host, device))

kvf_status __real_kvf_blocks_get_sized(kvf_blocks *b, const kvf_blocks_get_args *args, size_t size,
                                       kvf_stream *stream);
kvf_status __wrap_kvf_blocks_get_sized(kvf_blocks *b, const kvf_blocks_get_args *args, size_t size,
                                       kvf_stream *stream);
kvf_status __wrap_kvf_blocks_get_sized(kvf_blocks *b, const kvf_blocks_get_args *args, size_t size,
                                       kvf_stream *stream)
{
    return what != ALLOCATIONS && fails() ? KVF_DEVICE_FAILED
                                          : __real_kvf_blocks_get_sized(b, args, size, stream);
}

kvf_status __real_kvf_blocks_open(kvf_runtime *runtime, const kvf_blocks_config *config,
                                  kvf_blocks **out, kvf_error *error);
kvf_status __wrap_kvf_blocks_open(kvf_runtime *runtime, const kvf_blocks_config *config,
                                  kvf_blocks **out, kvf_error *error);
kvf_status __wrap_kvf_blocks_open(kvf_runtime *runtime, const kvf_blocks_config *config,
                                  kvf_blocks **out, kvf_error *error)
{
    if (what == CALLS && fails())
        return KVF_OUT_OF_MEMORY;
    return __real_kvf_blocks_open(runtime, config, out, error);
}

void *__real_malloc(size_t bytes);
void *__wrap_malloc(size_t bytes);
void *__wrap_malloc(size_t bytes)
{
    return what == ALLOCATIONS && fails() ? NULL : __real_malloc(bytes);
}

void *__real_calloc(size_t count, size_t bytes);
void *__wrap_calloc(size_t count, size_t bytes);
void *__wrap_calloc(size_t count, size_t bytes)
{
    return what == ALLOCATIONS && fails() ? NULL : __real_calloc(count, bytes);
}

void *__real_realloc(void *old, size_t bytes);
void *__wrap_realloc(void *old, size_t bytes);
void *__wrap_realloc(void *old, size_t bytes)
{
    return what == ALLOCATIONS && fails() ? NULL : __real_realloc(old, bytes);
}

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
    rig_listen();
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
    for (int turn = 0; turn < 3; turn++) {
        const int64_t cell = 100 + turn;
        rig_add(set[0], (uint32_t)cell);
        assert_int_equal(rig_pass(r, &cell, 1, 1, 0, 1, set), GG_SUCCESS);
    }
    /* A pass that failed is begun anew, and then all is as it was. */
    if (failed)
        assert_true(r->by_kvferry);
    assert_true(r->worst < ROUNDING);
    rig_close(r);
    rig_said();
    rig_unload();
    return happened;
}

/* 200 tokens of a rig whose pages are away, as far as they can be. */
static rig *away(rig_set set)
{
    rig *r = rig_open(&(rig_options){.away_at = 1});
    int64_t cells[200];
    for (int64_t cell = 0; cell < 200; cell++) {
        rig_add(set, (uint32_t)cell);
        cells[cell] = cell;
    }
    r->attentions = 1; /* nobody looks at the outputs */
    assert_int_equal(rig_pass(r, cells, 200, 1, 0, 1, (rig_set *)set), GG_SUCCESS);
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
            rig_listen();
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
    rig_listen();
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
    rig_close(r);
    assert_non_null(strstr(rig_said(), "cannot be read back"));
    rig_unload();
}

TEST(llamas_own_kernels_fail)
{
    rig *r = rig_open(&(rig_options){0});
    const int64_t cell = 1;
    standin_fails = 1;
    assert_int_equal(rig_write(r, 0, &cell, 1), GG_FAILED);
    assert_int_equal(rig_write(r, 0, &cell, 1), GG_SUCCESS);
    rig_close(r);
    rig_unload();
}
