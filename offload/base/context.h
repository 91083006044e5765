/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_OFFLOAD_CONTEXT_H
#define KVF_OFFLOAD_CONTEXT_H

/*
 * Shared by every object of a runtime: allocator, logger, last errors, and how long it lives.
 *
 * A context is created first and freed last; it owns nothing else. The last error is the thread's:
 * nobody reads that of another. A failure on a thread of the library for a thread of the caller
 * travels beside its status, and is said again there (kvf_fail_again).
 */

#include <pthread.h>
#include <stdatomic.h>
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
    uint64_t live_bytes;  /* guarded by lock: bytes handed out and not yet freed */
    uint64_t live_blocks; /* guarded by lock */
    kvf_fault_fn fault;   /* set while nothing else runs */
    void *fault_user;
    uint64_t born_ns;    /* tells it from one that was at the same address before */
    uint32_t forks;      /* of this process, when it was created */
    atomic_uint users;   /* its owner, and handles of the caller that are open */
    void (*end)(void *); /* closes the owner, when the last of them is gone; NULL = nothing does */
    void *owner;
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

/* The last error of the calling thread, if it was of this context; else KVF_OK and no text.
 * `context` NULL: of whichever. The pointer is the thread's, until it fails again. */
const kvf_error *kvf_context_last(const kvf_context *context);
void kvf_context_error(const kvf_context *context, kvf_error *error);

/* `status` with the text that the calling thread has for it, to be carried to another thread. */
kvf_error kvf_context_told(const kvf_context *context, kvf_status status);

/* A failure elsewhere with `status` is one here too, with the text from there, if `error` is of
 * that status. @return status; KVF_OK does nothing. */
kvf_status kvf_fail_again(kvf_context *context, kvf_status status, const kvf_error *error);

/* ---- handles of the caller ---- */

/* First in every function of the caller's that returns a status: refuses a handle that is NULL
 * (`context` is, then), or that this process has from the one that it was forked from: threads,
 * locks and devices behind it are not here. */
KVF_CHECKED kvf_status kvf_handle_check(kvf_context *context, const char *name);
#define KVF_CHECK_HANDLE(handle, of)                                                               \
    KVF_TRY(kvf_handle_check((handle) ? (of)->context : NULL, #handle))
/* The same for those that return none, without a text. */
bool kvf_handle_is_alive(const kvf_context *context);
#define KVF_IS_ALIVE(handle) ((handle) && kvf_handle_is_alive((handle)->context))

/* Refuses an argument of the caller's that is NULL. */
KVF_CHECKED kvf_status kvf_pointer_check(kvf_context *context, const char *name,
                                         const void *pointer);
#define KVF_CHECK_POINTER(context, pointer)                                                        \
    KVF_TRY(kvf_pointer_check((context), #pointer, (pointer)))

/* First in every function that opens: *out is NULL whatever follows, and `out` itself is not. */
#define KVF_CHECK_OPENS(handle, of, out)                                                           \
    do {                                                                                           \
        if (out)                                                                                   \
            *(out) = NULL;                                                                         \
        KVF_CHECK_HANDLE(handle, of);                                                              \
        KVF_CHECK_POINTER((of)->context, out);                                                     \
    } while (0)

/* A handle was opened; it is closed. The owner ends with the last of them: whoever closes it
 * earlier closes it as far as he is concerned. */
void kvf_context_hold(kvf_context *context);
void kvf_context_release(kvf_context *context);
/* `status`, after holding the context if it is KVF_OK: of a handle that was just made. */
kvf_status kvf_context_held(kvf_context *context, kvf_status status);

KVF_PRINTF(3, 4) void kvf_log(kvf_context *context, int level, const char *format, ...);

#define KVF_FAIL(context, status, ...) return kvf_fail((context), (status), 0, __VA_ARGS__)

#endif
