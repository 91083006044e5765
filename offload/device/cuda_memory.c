/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Memory of the CUDA device, and host memory that it sees.
 *
 * Every piece is one block in the device's list, so that leaks show in the context's counters and
 * whoever frees need not know how it was made. Host memory is registered in chunks of at most 1
 * GiB: one call for hundreds of gigabytes holds a lock of the driver for minutes, and fails on some
 * drivers from 512 GiB. Invariant: a block in the list is complete; what failed half-way was undone
 * in reverse order.
 */

#include <string.h>

#include "common/headroom.h"
#include "common/text.h"
#include "cuda_device.h"
#include "topology.h"

#define CHUNK_BYTES ((size_t)1 << 30)

typedef enum block_kind { BLOCK_DEVICE, BLOCK_REGISTERED, BLOCK_PINNED } block_kind;

struct kvf_cuda_block {
    block_kind kind;
    void *pointer; /* what the caller knows it by */
    size_t bytes;
    kvf_cuda_block *next;
};

static void keep(kvf_cuda_device *device, kvf_cuda_block *block)
{
    pthread_mutex_lock(&device->lock);
    block->next = device->blocks;
    device->blocks = block;
    pthread_mutex_unlock(&device->lock);
    kvf_context_count(device->base.context, block->bytes);
}

static kvf_cuda_block *take(kvf_cuda_device *device, const void *pointer, block_kind kind)
{
    pthread_mutex_lock(&device->lock);
    kvf_cuda_block **link = &device->blocks;
    while (*link && ((*link)->pointer != pointer || (*link)->kind != kind))
        link = &(*link)->next;
    kvf_cuda_block *block = *link;
    if (block)
        *link = block->next;
    pthread_mutex_unlock(&device->lock);
    if (block)
        kvf_context_uncount(device->base.context, block->bytes);
    return block;
}

/* A block that `fill` completes, and its entry in the list; or nothing at all. */
typedef kvf_status (*fill_fn)(kvf_cuda_device *device, kvf_cuda_block *made, void **alias);

static kvf_status make_block(kvf_device *base, kvf_cuda_block *made, fill_fn fill, void **alias)
{
    kvf_cuda_device *device = kvf_cuda_of(base);
    kvf_cuda_caller before;
    *alias = NULL;
    kvf_cuda_block *block = kvf_alloc(base->context, 1, sizeof *block);
    if (!block)
        KVF_FAIL(base->context, KVF_OUT_OF_MEMORY, "no memory for a block's entry");
    kvf_status status = kvf_cuda_enter_relaxed(device, &before);
    if (status == KVF_OK) {
        status = fill(device, made, alias);
        kvf_cuda_leave(device, before);
    }
    if (status != KVF_OK) {
        *alias = NULL;
        kvf_free(base->context, block);
        return status;
    }
    *block = *made;
    keep(device, block);
    return KVF_OK;
}

static void free_block(kvf_device *base, void *pointer, block_kind kind,
                       cudaError_t (*give_back)(void *), const char *failure)
{
    kvf_cuda_device *device = kvf_cuda_of(base);
    kvf_cuda_caller before;
    kvf_cuda_block *block = take(device, pointer, kind);
    KVF_ASSERT(block);
    kvf_cuda_enter_release(device, &before);
    (void)kvf_cuda_leave_after(device, before, give_back(block->pointer), failure);
    kvf_free(base->context, block);
}

/* ---- device memory ---- */

static kvf_status refuse_memory(kvf_cuda_device *device, cudaError_t error, size_t bytes)
{
    char need[32], have[32] = "unknown";
    size_t free_bytes = 0, total = 0;
    if (error != cudaErrorMemoryAllocation)
        return kvf_cuda_failed(device, error, "device memory could not be had");
    (void)cudaGetLastError();
    if (cudaMemGetInfo(&free_bytes, &total) == cudaSuccess)
        kvf_bytes_text(free_bytes, have);
    else
        (void)cudaGetLastError();
    return kvf_fail(
        device->base.context, KVF_OUT_OF_DEVICE_MEMORY, (int)error,
        "the CUDA device %d has no %s of memory (%s free); lower sequences_max, "
        "tokens_max, device_bytes or budget_tokens, or end other programs there (nvidia-smi)",
        device->ordinal, kvf_bytes_text(bytes, need), have);
}

uint64_t kvf_cuda_memory_left(kvf_device *base)
{
    kvf_cuda_device *device = kvf_cuda_of(base);
    size_t left = 0, total = 0;
    kvf_cuda_caller before;
    if (kvf_cuda_enter(device, &before) != KVF_OK)
        return 0;
    if (cudaMemGetInfo(&left, &total) != cudaSuccess) {
        (void)cudaGetLastError();
        left = 0;
    }
    kvf_cuda_leave(device, before);
    return left;
}

static kvf_status alloc_device(kvf_cuda_device *device, kvf_cuda_block *block, void **alias)
{
    void *pointer = NULL;
    cudaError_t error = cudaErrorMemoryAllocation;
    if (!kvf_context_refuses(device->base.context, "device memory"))
        error = cudaMalloc(&pointer, block->bytes);
    if (error != cudaSuccess)
        return refuse_memory(device, error, block->bytes);
    *alias = block->pointer = pointer;
    error = cudaMemsetAsync(pointer, 0, block->bytes, device->own);
    if (error == cudaSuccess)
        error = cudaStreamSynchronize(device->own);
    if (error == cudaSuccess)
        return KVF_OK;
    kvf_status status = kvf_cuda_failed(device, error, "device memory could not be zeroed");
    (void)cudaFree(pointer);
    (void)cudaGetLastError();
    return status;
}

kvf_status kvf_cuda_memory_alloc(kvf_device *base, size_t bytes, void **out)
{
    kvf_cuda_block made = {.kind = BLOCK_DEVICE, .bytes = bytes};
    return make_block(base, &made, alloc_device, out);
}

void kvf_cuda_memory_free(kvf_device *base, void *pointer)
{
    if (pointer)
        free_block(base, pointer, BLOCK_DEVICE, cudaFree, "device memory could not be freed");
}

/* ---- pinned host memory ---- */

static uint64_t pinned_bytes(kvf_cuda_device *device)
{
    uint64_t bytes = 0;
    pthread_mutex_lock(&device->lock);
    for (const kvf_cuda_block *b = device->blocks; b; b = b->next)
        bytes += b->kind == BLOCK_DEVICE ? 0 : b->bytes;
    pthread_mutex_unlock(&device->lock);
    return bytes;
}

/* Advice by the causes that are known here. */
static const char *pin_advice(cudaError_t error, size_t bytes)
{
    kvf_headroom headroom;
    if (error == cudaErrorNotSupported)
        return "this device pins no memory but its own (Confidential Computing, or a virtual GPU)";
    kvf_headroom_read(NULL, -1, &headroom);
    if (headroom.pinned != UINT64_MAX)
        return "WSL2 pins about half of the machine's memory at most; give WSL2 more (memory= in "
               ".wslconfig), or ask for less";
    if (headroom.memlock < bytes)
        return "raise the limit with `ulimit -l unlimited`, in a container with --ulimit "
               "memlock=-1";
    return "ask for less, free memory of the host, or give its container more --memory";
}

static kvf_status refuse_pinned(kvf_cuda_device *device, cudaError_t error, size_t bytes)
{
    char need[32], have[32];
    const kvf_status status = kvf_cuda_failed(device, error, "host memory could not be registered");
    if (atomic_load(&device->lost) != 0)
        return status;
    return kvf_fail(device->base.context,
                    error == cudaErrorNotSupported ? KVF_UNSUPPORTED : KVF_PIN_FAILED, (int)error,
                    "%s of host memory could not be registered with the device, which has %s "
                    "already: %s (%s); %s",
                    kvf_bytes_text(bytes, need), kvf_bytes_text(pinned_bytes(device), have),
                    cudaGetErrorString(error), cudaGetErrorName(error), pin_advice(error, bytes));
}

static kvf_status alloc_pinned(kvf_cuda_device *device, kvf_cuda_block *block, void **alias)
{
    cudaError_t error = cudaErrorMemoryAllocation;
    if (!kvf_context_refuses(device->base.context, "pinned memory"))
        error = cudaHostAlloc(&block->pointer, block->bytes,
                              cudaHostAllocMapped | cudaHostAllocPortable);
    if (error != cudaSuccess)
        return refuse_pinned(device, error, block->bytes);
    error = cudaHostGetDevicePointer(alias, block->pointer, 0);
    if (error == cudaSuccess) {
        memset(block->pointer, 0, block->bytes);
        return KVF_OK;
    }
    (void)cudaFreeHost(block->pointer);
    return refuse_pinned(device, error, block->bytes);
}

kvf_status kvf_cuda_host_alloc(kvf_device *base, size_t bytes, void **host, void **alias)
{
    kvf_cuda_block made = {.kind = BLOCK_PINNED, .bytes = bytes};
    *host = NULL;
    KVF_TRY(make_block(base, &made, alloc_pinned, alias));
    *host = made.pointer;
    return KVF_OK;
}

void kvf_cuda_host_free(kvf_device *base, void *host)
{
    free_block(base, host, BLOCK_PINNED, cudaFreeHost, "pinned memory could not be freed");
}

/* ---- registration ---- */

/* The first `count` chunks of a region, last one first. */
static void unregister_chunks(kvf_cuda_device *device, char *host, size_t count)
{
    while (count-- > 0)
        (void)kvf_cuda_failed(device, cudaHostUnregister(host + count * CHUNK_BYTES),
                              "host memory could not be unregistered");
}

static size_t chunks_of(size_t bytes)
{
    return (bytes + CHUNK_BYTES - 1) / CHUNK_BYTES;
}

/* One chunk; its alias must continue the one before. */
static cudaError_t register_chunk(kvf_cuda_device *device, char *host, size_t bytes,
                                  const char *expected, void **alias)
{
    if (kvf_context_refuses(device->base.context, "register"))
        return cudaErrorMemoryAllocation;
    cudaError_t error =
        cudaHostRegister(host, bytes, cudaHostRegisterMapped | cudaHostRegisterPortable);
    if (error != cudaSuccess)
        return error;
    error = cudaHostGetDevicePointer(alias, host, 0);
    if (error == cudaSuccess && expected && *alias != expected)
        error = cudaErrorNotSupported;
    if (error != cudaSuccess) {
        (void)cudaHostUnregister(host);
        (void)cudaGetLastError();
    }
    return error;
}

static kvf_status register_chunks(kvf_cuda_device *device, kvf_cuda_block *block, void **alias)
{
    char *host = block->pointer;
    const size_t bytes = block->bytes;
    const size_t count = chunks_of(bytes);
    for (size_t i = 0; i < count; i++) {
        void *piece = NULL;
        const size_t offset = i * CHUNK_BYTES;
        const size_t left = bytes - offset;
        const cudaError_t error =
            register_chunk(device, host + offset, left < CHUNK_BYTES ? left : CHUNK_BYTES,
                           i > 0 ? (char *)*alias + offset : NULL, &piece);
        if (error != cudaSuccess) {
            unregister_chunks(device, host, i);
            return refuse_pinned(device, error, bytes);
        }
        if (i == 0)
            *alias = piece;
    }
    return KVF_OK;
}

kvf_status kvf_cuda_host_register(kvf_device *base, void *host, size_t bytes, void **alias)
{
    kvf_cuda_block made = {.kind = BLOCK_REGISTERED, .pointer = host, .bytes = bytes};
    return make_block(base, &made, register_chunks, alias);
}

void kvf_cuda_host_unregister(kvf_device *base, void *host, size_t bytes)
{
    kvf_cuda_device *device = kvf_cuda_of(base);
    kvf_cuda_caller before;
    kvf_cuda_block *block = take(device, host, BLOCK_REGISTERED);
    KVF_ASSERT(block && block->bytes == bytes);
    kvf_cuda_enter_release(device, &before);
    unregister_chunks(device, host, chunks_of(bytes));
    kvf_cuda_leave(device, before);
    kvf_free(base->context, block);
}
