/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The CUDA device under the kernel checks; see check_cuda.h.
 */

#include "check_cuda.h"

#include <stdio.h>
#include <stdlib.h>

#if KVF_HAVE_CUDA

#include <cuda_runtime_api.h>

#include "cuda_kernels.h"

#define CHUNK_BYTES ((size_t)64 << 20)
#define CHUNKS_MAX  64u

struct check_cuda {
    char name[96];
    bool is_timed;
    cudaStream_t stream;
    cudaEvent_t from, to;
    uint32_t chunk_count;
    uint32_t chunk; /* that the next buffer is cut from */
    size_t used;    /* bytes of it */
    struct {
        char *base;
        size_t bytes;
    } chunks[CHUNKS_MAX];
};

#if KVF_CHECK_EMULATED

static cudaError_t chunk_alloc(const check_cuda *cuda, void **out, size_t bytes)
{
    (void)cuda;
    (void)out;
    (void)bytes;
    return cudaErrorNotSupported;
}

static void chunk_free(const check_cuda *cuda, void *base)
{
    (void)cuda;
    (void)base;
}

/* Nothing to move. */
static cudaError_t to_device(check_cuda *cuda)
{
    (void)cuda;
    return cudaSuccess;
}

#else

static cudaError_t chunk_alloc(const check_cuda *cuda, void **out, size_t bytes)
{
    return cuda->is_timed ? cudaMallocManaged(out, bytes, cudaMemAttachGlobal)
                          : cudaHostAlloc(out, bytes, cudaHostAllocMapped | cudaHostAllocPortable);
}

static void chunk_free(const check_cuda *cuda, void *base)
{
    if (cuda->is_timed)
        cudaFree(base);
    else
        cudaFreeHost(base);
}

static cudaError_t to_device(check_cuda *cuda)
{
    cudaError_t status = cudaSuccess;
    for (uint32_t i = 0; i < cuda->chunk_count && status == cudaSuccess; i++) {
#if CUDART_VERSION >= 13000
        const struct cudaMemLocation gpu = {.type = cudaMemLocationTypeDevice, .id = 0};
        status =
            cudaMemPrefetchAsync(cuda->chunks[i].base, cuda->chunks[i].bytes, gpu, 0, cuda->stream);
#else
        status = cudaMemPrefetchAsync(cuda->chunks[i].base, cuda->chunks[i].bytes, 0, cuda->stream);
#endif
    }
    return status;
}

#endif

check_cuda *check_cuda_open(bool is_timed, char why[256])
{
    int count = 0;
    struct cudaDeviceProp properties;
    cudaError_t status = cudaGetDeviceCount(&count);
    if (status != cudaSuccess || count == 0) {
        snprintf(why, 256, "no CUDA device: %s",
                 status == cudaSuccess ? "the driver sees no GPU" : cudaGetErrorString(status));
        return NULL;
    }
    check_cuda *cuda = calloc(1, sizeof *cuda);
    if (!cuda)
        abort();
    cuda->is_timed = is_timed;
    if ((status = cudaGetDeviceProperties(&properties, 0)) != cudaSuccess ||
        (status = (cudaError_t)kvf_cuda_load_kernels((int)properties.sharedMemPerBlockOptin)) !=
            cudaSuccess ||
        (status = cudaStreamCreateWithFlags(&cuda->stream, cudaStreamNonBlocking)) != cudaSuccess ||
        (status = cudaEventCreateWithFlags(&cuda->from, cudaEventDefault)) != cudaSuccess ||
        (status = cudaEventCreateWithFlags(&cuda->to, cudaEventDefault)) != cudaSuccess) {
        snprintf(why, 256, "the CUDA device cannot be used: %s", cudaGetErrorString(status));
        check_cuda_close(cuda);
        return NULL;
    }
    if (KVF_CHECK_EMULATED)
        snprintf(cuda->name, sizeof cuda->name, "cuda (emulated)");
    else
        snprintf(cuda->name, sizeof cuda->name, "cuda %.80s", properties.name);
    return cuda;
}

void check_cuda_close(check_cuda *cuda)
{
    if (!cuda)
        return;
    for (uint32_t i = 0; i < cuda->chunk_count; i++)
        chunk_free(cuda, cuda->chunks[i].base);
    if (cuda->to)
        cudaEventDestroy(cuda->to);
    if (cuda->from)
        cudaEventDestroy(cuda->from);
    if (cuda->stream)
        cudaStreamDestroy(cuda->stream);
    free(cuda);
}

const char *check_cuda_name(const check_cuda *cuda)
{
    return cuda->name;
}

bool check_cuda_is_emulated(const check_cuda *cuda)
{
    (void)cuda;
    return KVF_CHECK_EMULATED;
}

void *check_cuda_take(check_cuda *cuda, size_t bytes)
{
    void *base = NULL;
    if (KVF_CHECK_EMULATED)
        return NULL;
    bytes = (bytes + 63) / 64 * 64;
    for (; cuda->chunk < cuda->chunk_count; cuda->chunk++, cuda->used = 0)
        if (cuda->chunks[cuda->chunk].bytes - cuda->used >= bytes)
            break;
    if (cuda->chunk == cuda->chunk_count) {
        const size_t size = bytes > CHUNK_BYTES ? bytes : CHUNK_BYTES;
        if (cuda->chunk_count == CHUNKS_MAX || chunk_alloc(cuda, &base, size) != cudaSuccess) {
            fprintf(stderr, "check_kernels: out of memory for buffers of the GPU\n");
            abort();
        }
        cuda->chunks[cuda->chunk_count].base = base;
        cuda->chunks[cuda->chunk_count++].bytes = size;
    }
    cuda->used += bytes;
    return cuda->chunks[cuda->chunk].base + cuda->used - bytes;
}

void check_cuda_adopt(check_cuda *cuda, void *memory, size_t bytes)
{
    (void)cuda;
    if (cudaHostRegister(memory, bytes, cudaHostRegisterMapped) != cudaSuccess)
        abort();
}

void check_cuda_abandon(check_cuda *cuda, void *memory)
{
    (void)cuda;
    if (cudaHostUnregister(memory) != cudaSuccess)
        abort();
}

void check_cuda_release(check_cuda *cuda)
{
    cuda->chunk = 0;
    cuda->used = 0;
}

static kvf_cuda_launch_fn launcher(void (*fn)(const void *args, uint32_t task))
{
    return (kvf_cuda_launch_fn)(void (*)(void))fn;
}

const char *check_cuda_run(check_cuda *cuda, void (*fn)(const void *args, uint32_t task),
                           const void *args, uint32_t tasks)
{
    cudaError_t status = (cudaError_t)launcher(fn)(args, tasks, cuda->stream);
    if (status == cudaSuccess)
        status = cudaStreamSynchronize(cuda->stream);
    return status == cudaSuccess ? NULL : cudaGetErrorString(status);
}

const char *check_cuda_time(check_cuda *cuda, void (*fn)(const void *args, uint32_t task),
                            const void *args, uint32_t tasks, uint32_t times, double *best_ns)
{
    cudaError_t status = to_device(cuda);
    *best_ns = 0.0;
    for (uint32_t i = 0; i < times + 1 && status == cudaSuccess; i++) {
        float ms = 0.0f;
        if ((status = cudaEventRecord(cuda->from, cuda->stream)) != cudaSuccess ||
            (status = (cudaError_t)launcher(fn)(args, tasks, cuda->stream)) != cudaSuccess ||
            (status = cudaEventRecord(cuda->to, cuda->stream)) != cudaSuccess ||
            (status = cudaEventSynchronize(cuda->to)) != cudaSuccess ||
            (status = cudaEventElapsedTime(&ms, cuda->from, cuda->to)) != cudaSuccess)
            break;
        const double ns = (double)ms * 1e6;
        if (i == 1 || (i > 1 && ns < *best_ns)) /* the first one warms up */
            *best_ns = ns;
    }
    return status == cudaSuccess ? NULL : cudaGetErrorString(status);
}

#else

check_cuda *check_cuda_open(bool is_timed, char why[256])
{
    (void)is_timed;
    snprintf(why, 256, "this build has no CUDA device");
    return NULL;
}

void check_cuda_close(check_cuda *cuda)
{
    (void)cuda;
}

const char *check_cuda_name(const check_cuda *cuda)
{
    (void)cuda;
    return "cuda";
}

bool check_cuda_is_emulated(const check_cuda *cuda)
{
    (void)cuda;
    return false;
}

void *check_cuda_take(check_cuda *cuda, size_t bytes)
{
    (void)cuda;
    (void)bytes;
    return NULL;
}

void check_cuda_adopt(check_cuda *cuda, void *memory, size_t bytes)
{
    (void)cuda;
    (void)memory;
    (void)bytes;
}

void check_cuda_abandon(check_cuda *cuda, void *memory)
{
    (void)cuda;
    (void)memory;
}

void check_cuda_release(check_cuda *cuda)
{
    (void)cuda;
}

const char *check_cuda_run(check_cuda *cuda, void (*fn)(const void *args, uint32_t task),
                           const void *args, uint32_t tasks)
{
    (void)cuda;
    (void)fn;
    (void)args;
    (void)tasks;
    return "this build has no CUDA device";
}

const char *check_cuda_time(check_cuda *cuda, void (*fn)(const void *args, uint32_t task),
                            const void *args, uint32_t tasks, uint32_t times, double *best_ns)
{
    (void)times;
    *best_ns = 0.0;
    return check_cuda_run(cuda, fn, args, tasks);
}

#endif
