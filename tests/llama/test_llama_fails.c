/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Failures: every call of the library, and every allocation, fails once. A pass then fails as that
 * of any backend does, or is left to llama.cpp; the next one is right.
 *
 * The linker sends those calls to functions of this file (--wrap).
 */

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

static int allocations_count; /* else calls of the library do */

#define WRAP(name, parameters, arguments)                                                          \
    kvf_status __real_##name parameters;                                                           \
    kvf_status __wrap_##name parameters;                                                           \
    kvf_status __wrap_##name parameters                                                            \
    {                                                                                              \
        if (!allocations_count && fails())                                                         \
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

kvf_status __real_kvf_blocks_open(kvf_runtime *runtime, const kvf_blocks_config *config,
                                  kvf_blocks **out, kvf_error *error);
kvf_status __wrap_kvf_blocks_open(kvf_runtime *runtime, const kvf_blocks_config *config,
                                  kvf_blocks **out, kvf_error *error);
kvf_status __wrap_kvf_blocks_open(kvf_runtime *runtime, const kvf_blocks_config *config,
                                  kvf_blocks **out, kvf_error *error)
{
    if (!allocations_count && fails()) {
        *error = (kvf_error){.status = KVF_OUT_OF_MEMORY, .text = "no room"};
        return KVF_OUT_OF_MEMORY;
    }
    return __real_kvf_blocks_open(runtime, config, out, error);
}

void *__real_malloc(size_t bytes);
void *__wrap_malloc(size_t bytes);
void *__wrap_malloc(size_t bytes)
{
    return allocations_count && fails() ? NULL : __real_malloc(bytes);
}

void *__real_calloc(size_t count, size_t bytes);
void *__wrap_calloc(size_t count, size_t bytes);
void *__wrap_calloc(size_t count, size_t bytes)
{
    return allocations_count && fails() ? NULL : __real_calloc(count, bytes);
}

void *__real_realloc(void *old, size_t bytes);
void *__wrap_realloc(void *old, size_t bytes);
void *__wrap_realloc(void *old, size_t bytes)
{
    return allocations_count && fails() ? NULL : __real_realloc(old, bytes);
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
    rig *r = rig_open(&(rig_options){.setting = "budget=full rows=2 prompts=kvferry"});
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
    allocations_count = allocations;
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

static void calls_of_the_library_fail_once(void **state)
{
    (void)state;
    int64_t call = 1;
    while (attend_once(call, 0))
        call++;
    assert_true(call > 10);
}

static void allocations_fail_once(void **state)
{
    (void)state;
    int64_t call = 1;
    while (attend_once(call, 1))
        call++;
    assert_true(call > 1);
}

static void llamas_own_kernels_fail(void **state)
{
    (void)state;
    rig *r = rig_open(&(rig_options){0});
    const int64_t cell = 1;
    standin_fails = 1;
    assert_int_equal(rig_write(r, 0, &cell, 1), GG_FAILED);
    assert_int_equal(rig_write(r, 0, &cell, 1), GG_SUCCESS);
    rig_close(r);
    rig_unload();
}

int main(void)
{
    return unit_run(calls_of_the_library_fail_once, allocations_fail_once, llamas_own_kernels_fail);
}
