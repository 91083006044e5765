/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_OFFLOAD_CONTEXT_H
#define KVF_OFFLOAD_CONTEXT_H

/*
 * What every object of a runtime shares: allocator, logger, last error.
 *
 * A context is created first and freed last; it owns nothing else. The last error is written by
 * kvf_fail from any thread (a mutex guards it) and read through a copy.
 */

#include <pthread.h>
#include <stdbool.h>

#include <kvferry/kvferry.h>

#include "common/base.h"

/* Test hook: whatever can be refused (memory, maps, registration, streams, events, threads) asks it
 * first, by name; non-zero = be refused. A ring takes more from it (io_uring_engine.c). NULL = off.
 */
typedef int (*kvf_fault_fn)(void *user, const char *what);

#define KVF_LOG_NOTE    0
#define KVF_LOG_WARNING 1

typedef struct kvf_context {
    kvf_allocator allocator;
    kvf_log_fn log;
    void *log_user;
    pthread_mutex_t lock;
    kvf_error error;      /* guarded by lock */
    kvf_error error_copy; /* what kvf_runtime_error lends out */
    uint64_t live_bytes;  /* guarded by lock: bytes handed out and not yet freed */
    uint64_t live_blocks; /* guarded by lock */
    kvf_fault_fn fault;   /* set while nothing else runs */
    void *fault_user;
} kvf_context;

/* All fields of `allocator` NULL means aligned_alloc and free. */
KVF_CHECKED kvf_status kvf_context_create(const kvf_allocator *allocator, kvf_log_fn log,
                                          void *log_user, kvf_context **out);
void kvf_context_destroy(kvf_context *context);

/* Zeroed memory, 64-byte aligned; NULL when there is none or count x size overflows. */
void *kvf_alloc(kvf_context *context, size_t count, size_t size);
void kvf_free(kvf_context *context, void *pointer);

/* Count memory that did not come from kvf_alloc (maps), so that leaks of it show too. */
void kvf_context_count(kvf_context *context, uint64_t bytes);
void kvf_context_uncount(kvf_context *context, uint64_t bytes);

/* Whether the test hook refuses `what`. */
bool kvf_context_refuses(kvf_context *context, const char *what);

/* Record an error and return its status. `foreign` is errno or a device's code, 0 if none. */
KVF_PRINTF(4, 5)
kvf_status kvf_fail(kvf_context *context, kvf_status status, int foreign, const char *format, ...);

/* The last error, copied under the lock. */
void kvf_context_error(kvf_context *context, kvf_error *error);

KVF_PRINTF(3, 4) void kvf_log(kvf_context *context, int level, const char *format, ...);

#define KVF_FAIL(context, status, ...) return kvf_fail((context), (status), 0, __VA_ARGS__)

#endif
