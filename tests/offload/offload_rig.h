/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TESTS_OFFLOAD_RIG_H
#define KVF_TESTS_OFFLOAD_RIG_H

/*
 * Helpers of the tests of offload: a context with a device of the kind that is asked for, seeded
 * numbers, refusal of the N-th request.
 *
 * Knows nothing of any one test. Closing the rig gives back what it made itself, and asserts that
 * nothing is left alive in the context.
 */

#include "device.h"
#include "unit.h"

#define RIG_MADE_MAX 64u

typedef struct rig {
    kvf_context *context;
    kvf_device *device;
    const kvf_device_ops *ops;
    kvf_device_kind kind;
    uint32_t made_count;
    struct { /* of the pointers one, the others NULL */
        kvf_stream *stream;
        kvf_event *event;
        void *memory, *shared;
        size_t bytes; /* of what is shared */
    } made[RIG_MADE_MAX];
} rig;

typedef struct rig_config {
    uint32_t threads;    /* 0 = 2 */
    uint32_t delay_seed; /* 0 = no delays */
} rig_config;

/* The device that the environment asks for: KVF_TEST_DEVICE=cuda, else the host. */
kvf_device_kind rig_kind(void);
void rig_open(rig *r, const rig_config *config);
void rig_close(rig *r);

/* A test on a rig of its own, `r`, which is opened before it and closed after it. */
#define RIG_TEST(name)                                                                             \
    static void name##_on(rig *r);                                                                 \
    TEST(name)                                                                                     \
    {                                                                                              \
        rig r;                                                                                     \
        rig_open(&r, NULL);                                                                        \
        name##_on(&r);                                                                             \
        rig_close(&r);                                                                             \
    }                                                                                              \
    static void name##_on(rig *r)

kvf_stream *rig_stream(rig *r);
kvf_event *rig_event(rig *r);

/* A launch of a function of the host, whatever the device: on CUDA one host call runs its tasks. */
#define RIG_ARGS_MAX 64u
kvf_status rig_launch(rig *r, kvf_stream *stream, kvf_task_fn fn, const void *args,
                      size_t args_bytes, uint32_t tasks);

/* Enqueues what makes the stream fail with KVF_CORRUPT. */
kvf_status rig_fail(rig *r, kvf_stream *stream);

/* Device memory, zeroed. A test looks into it with rig_put and never directly. */
void *rig_memory(rig *r, size_t bytes);
/* Copy or fill, and wait; either side may be device memory. */
void rig_put(rig *r, void *to, const void *from, size_t bytes);
void rig_set(rig *r, void *to, int byte, size_t bytes);

/* Registered host memory, zeroed: kernels, copies, host functions and the test itself may use it
 * under one address. */
void *rig_shared(rig *r, size_t bytes);

/* Repeatable numbers. */
typedef struct rig_random {
    uint64_t state;
} rig_random;

/* Prints the seed, so that a failure names it. */
rig_random rig_seed(const char *test, uint64_t seed);
uint64_t rig_next(rig_random *r);
uint32_t rig_below(rig_random *r, uint32_t limit); /* limit >= 1 */

/* Refuses request number `at` (from 1) and no other; counts all. 0 = refuse none. */
typedef struct rig_fault {
    uint64_t at;
    uint64_t seen;
    const char *only; /* count requests of this name only; NULL = all */
    char refused[32]; /* what was refused; "" = nothing */
} rig_fault;

int rig_refuse(void *user, const char *what);
void *rig_alloc(void *user, size_t bytes, size_t alignment); /* user: rig_fault, may be NULL */
void rig_free(void *user, void *pointer);

/* A folder of small files, as sysfs and proc are; root ends in XXXXXX for mkdtemp. */
typedef struct rig_tree {
    char root[64];
} rig_tree;

void rig_tree_put(const rig_tree *t, const char *path, const char *text);
void rig_tree_remove(const rig_tree *t);

/* From now on a system call whose second argument is `most` or less fails with `code` in this
 * process, which a test forks for it. Ends it with 0 where the machine has no such sandbox. */
void rig_deny(uint32_t call, uint32_t most, int code);

/* Text of the context's last error. */
const char *rig_error(rig *r, kvf_error *error);
/* Fails unless all of these words are in it. */
#define RIG_TELLS(r, ...) rig_tells((r), (const char *const[]){__VA_ARGS__, NULL})
void rig_tells(rig *r, const char *const *words);

/* In a process of its own, which ends after half a minute. Fails unless `run` returns 0. */
void rig_in_child(int (*run)(const void *user), const void *user);

#define RIG_OK(call) assert_int_equal((call), KVF_OK)

#endif
