/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The context: accounted allocation, last errors, the log; what fork() leaves of a handle.
 *
 * Knows nothing of devices or pages. Every block carries its size in a 64-byte head, so that
 * live_bytes and live_blocks are exact and a leak shows as a number. The only state beside contexts
 * is a thread's last error, which goes with the thread, and the number of forks.
 */

#include "context.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "common/clock.h"
#include "common/text.h"

#define BLOCK_HEAD_BYTES ((size_t)64)

/* The last error of a thread, and which context it was of: at one address there may be several, one
 * after the other. */
static _Thread_local struct {
    const kvf_context *context;
    uint64_t born_ns;
    kvf_error error;
} last;

/* Forks between this process and the one that loaded the library; changed only by a child while it
 * has one thread. */
static atomic_uint forks;
static pthread_once_t watch = PTHREAD_ONCE_INIT;
static int watch_code; /* why they cannot be counted; written once */

static void count_fork(void)
{
    atomic_fetch_add_explicit(&forks, 1, memory_order_relaxed);
}

/* The C library forgets the handler when this library is unloaded. */
static void watch_forks(void)
{
    watch_code = pthread_atfork(NULL, NULL, count_fork);
}

typedef struct block_head {
    uint64_t bytes;
} block_head;

static void *default_alloc(void *user, size_t bytes, size_t alignment)
{
    (void)user;
    return aligned_alloc(alignment, kvf_round_up(bytes, alignment));
}

static void default_free(void *user, void *pointer)
{
    (void)user;
    free(pointer);
}

kvf_status kvf_context_create(const kvf_allocator *allocator, kvf_log_fn log, void *log_user,
                              kvf_context **out)
{
    *out = NULL;
    kvf_allocator own = {.alloc = default_alloc, .free = default_free, .user = NULL};
    if (allocator && (allocator->alloc || allocator->free)) {
        if (!allocator->alloc || !allocator->free)
            return KVF_INVALID;
        own = *allocator;
    }
    if (pthread_once(&watch, watch_forks) != 0 || watch_code != 0)
        return KVF_OUT_OF_MEMORY;
    kvf_context *context = own.alloc(own.user, sizeof *context, 64);
    if (!context)
        return KVF_OUT_OF_MEMORY;
    memset(context, 0, sizeof *context);
    context->born_ns = kvf_now_ns();
    context->forks = atomic_load_explicit(&forks, memory_order_relaxed);
    atomic_init(&context->users, 1);
    context->allocator = own;
    context->log = log;
    context->log_user = log_user;
    if (pthread_mutex_init(&context->lock, NULL) != 0) {
        own.free(own.user, context);
        return KVF_SYSTEM;
    }
    *out = context;
    return KVF_OK;
}

void kvf_context_destroy(kvf_context *context)
{
    if (!context)
        return;
    kvf_allocator allocator = context->allocator;
    pthread_mutex_destroy(&context->lock);
    allocator.free(allocator.user, context);
}

void kvf_context_count(kvf_context *context, uint64_t bytes)
{
    pthread_mutex_lock(&context->lock);
    context->live_bytes += bytes;
    context->live_blocks++;
    pthread_mutex_unlock(&context->lock);
}

void kvf_context_uncount(kvf_context *context, uint64_t bytes)
{
    pthread_mutex_lock(&context->lock);
    KVF_ASSERT(context->live_bytes >= bytes && context->live_blocks > 0);
    context->live_bytes -= bytes;
    context->live_blocks--;
    pthread_mutex_unlock(&context->lock);
}

bool kvf_context_refuses(kvf_context *context, const char *what)
{
    return context->fault && context->fault(context->fault_user, what) != 0;
}

void *kvf_alloc(kvf_context *context, size_t count, size_t size)
{
    size_t bytes;
    if (size != 0 && count > (SIZE_MAX - 2 * BLOCK_HEAD_BYTES) / size)
        return NULL;
    bytes = count * size;
    char *base = context->allocator.alloc(context->allocator.user, bytes + BLOCK_HEAD_BYTES, 64);
    if (!base)
        return NULL;
    KVF_ASSERT(((uintptr_t)base & 63) == 0);
    memset(base, 0, bytes + BLOCK_HEAD_BYTES);
    ((block_head *)(void *)base)->bytes = bytes;
    kvf_context_count(context, bytes);
    return base + BLOCK_HEAD_BYTES;
}

void kvf_free(kvf_context *context, void *pointer)
{
    if (!pointer)
        return;
    char *base = (char *)pointer - BLOCK_HEAD_BYTES;
    kvf_context_uncount(context, ((block_head *)(void *)base)->bytes);
    context->allocator.free(context->allocator.user, base);
}

kvf_status kvf_fail(kvf_context *context, kvf_status status, int foreign, const char *format, ...)
{
    kvf_error error = {.status = status, .foreign = foreign}; /* the text may be in `last` */
    va_list list;
    va_start(list, format);
    kvf_vformat(error.text, sizeof error.text, format, list);
    va_end(list);
    last.context = context;
    last.born_ns = context ? context->born_ns : 0;
    last.error = error;
    return status;
}

const kvf_error *kvf_context_last(const kvf_context *context)
{
    static const kvf_error none = {.status = KVF_OK};
    if (!context || (last.context == context && last.born_ns == context->born_ns))
        return &last.error;
    return &none;
}

void kvf_context_error(const kvf_context *context, kvf_error *error)
{
    *error = *kvf_context_last(context);
}

kvf_error kvf_context_told(const kvf_context *context, kvf_status status)
{
    const kvf_error *error = kvf_context_last(context);
    kvf_error told = {.status = status};
    if (error->status == status)
        return *error;
    snprintf(told.text, sizeof told.text, "%s", kvf_status_text(status));
    return told;
}

kvf_status kvf_fail_again(kvf_context *context, kvf_status status, const kvf_error *error)
{
    if (status == KVF_OK)
        return KVF_OK;
    const bool is_told = error->status == status;
    return kvf_fail(context, status, is_told ? error->foreign : 0, "%s",
                    is_told ? error->text : kvf_status_text(status));
}

/* ---- handles of the caller ---- */

static bool is_forked(const kvf_context *context)
{
    return context->forks != atomic_load_explicit(&forks, memory_order_relaxed);
}

bool kvf_handle_is_alive(const kvf_context *context)
{
    return context && !is_forked(context);
}

kvf_status kvf_handle_check(kvf_context *context, const char *name)
{
    if (!context)
        KVF_FAIL(NULL, KVF_INVALID, "%s is NULL; pass an open one", name);
    if (is_forked(context))
        KVF_FAIL(context, KVF_INVALID,
                 "%s was opened before fork() by the parent process, which owns its threads and "
                 "devices; open a runtime in the child, or start it by exec (spawn)",
                 name);
    return KVF_OK;
}

kvf_status kvf_pointer_check(kvf_context *context, const char *name, const void *pointer)
{
    if (!pointer)
        KVF_FAIL(context, KVF_INVALID, "%s is NULL; pass the address of what it is for", name);
    return KVF_OK;
}

void kvf_context_hold(kvf_context *context)
{
    atomic_fetch_add_explicit(&context->users, 1, memory_order_relaxed);
}

void kvf_context_release(kvf_context *context)
{
    if (atomic_fetch_sub_explicit(&context->users, 1, memory_order_acq_rel) == 1 && context->end)
        context->end(context->owner);
}

kvf_status kvf_context_held(kvf_context *context, kvf_status status)
{
    if (status == KVF_OK)
        kvf_context_hold(context);
    return status;
}

void kvf_log(kvf_context *context, int level, const char *format, ...)
{
    if (!context->log)
        return;
    char line[512];
    va_list list;
    va_start(list, format);
    kvf_vformat(line, sizeof line, format, list);
    va_end(list);
    context->log(context->log_user, level, line);
}

/* ---- statuses ---- */

#define TEXT_OF(x)                        #x
#define VERSION_TEXT(major, minor, patch) TEXT_OF(major) "." TEXT_OF(minor) "." TEXT_OF(patch)

const char *kvf_status_name(kvf_status status)
{
    switch (status) {
#define STATUS_NAME(name, value, text)                                                             \
    case name:                                                                                     \
        return #name;
        KVF_STATUS_LIST(STATUS_NAME)
#undef STATUS_NAME
    }
    return "unknown";
}

const char *kvf_status_text(kvf_status status)
{
    switch (status) {
#define STATUS_TEXT(name, value, text)                                                             \
    case name:                                                                                     \
        return text;
        KVF_STATUS_LIST(STATUS_TEXT)
#undef STATUS_TEXT
    }
    return "not a status of this library";
}

const char *kvf_version(void)
{
    return VERSION_TEXT(KVF_VERSION_MAJOR, KVF_VERSION_MINOR, KVF_VERSION_PATCH);
}
