/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The context: accounted allocation, the last error, the log.
 *
 * Knows nothing of devices or pages. Every block carries its size in a 64-byte head, so that
 * live_bytes and live_blocks are exact and a leak shows as a number.
 */

#include "context.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#define BLOCK_HEAD_BYTES ((size_t)64)

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
    kvf_context *context = own.alloc(own.user, sizeof *context, 64);
    if (!context)
        return KVF_OUT_OF_MEMORY;
    memset(context, 0, sizeof *context);
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
    kvf_error error = {.status = status, .foreign = foreign};
    va_list list;
    va_start(list, format);
    vsnprintf(error.text, sizeof error.text, format, list);
    va_end(list);
    pthread_mutex_lock(&context->lock);
    context->error = error;
    pthread_mutex_unlock(&context->lock);
    return status;
}

void kvf_context_error(kvf_context *context, kvf_error *error)
{
    pthread_mutex_lock(&context->lock);
    *error = context->error;
    pthread_mutex_unlock(&context->lock);
}

void kvf_log(kvf_context *context, int level, const char *format, ...)
{
    if (!context->log)
        return;
    char line[512];
    va_list list;
    va_start(list, format);
    vsnprintf(line, sizeof line, format, list);
    va_end(list);
    context->log(context->log_user, level, line);
}
