/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The CUDA device under the kernel checks; see check_cuda.h.
 */

#include "check_cuda.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if KVF_HAVE_CUDA

#include <cuda_runtime_api.h>

#include "cuda_kernels.h"

#define CHUNK_BYTES ((size_t)64 << 20)
#define CHUNKS_MAX  64u
/* What is written before a run, and what a copy has: more than the L2 of any GPU. */
#define FLUSH_BYTES ((size_t)(KVF_CHECK_EMULATED ? 1 : 256) << 20)

struct check_cuda {
    char name[96];
    bool is_timed;
    cudaStream_t stream;
    cudaEvent_t from, to;
    char *flush; /* [3, FLUSH_BYTES], if it is timed: a copy's two sides, and what fills L2 */
    void *home;
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
        (status = (cudaError_t)kvf_cuda_load_kernels()) != cudaSuccess ||
        (status = cudaStreamCreateWithFlags(&cuda->stream, cudaStreamNonBlocking)) != cudaSuccess ||
        (status = cudaEventCreateWithFlags(&cuda->from, cudaEventDefault)) != cudaSuccess ||
        (status = cudaEventCreateWithFlags(&cuda->to, cudaEventDefault)) != cudaSuccess ||
        (is_timed &&
         (status = cudaMalloc((void **)&cuda->flush, 3 * FLUSH_BYTES)) != cudaSuccess)) {
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
    if (cuda->home)
        cudaFreeHost(cuda->home);
    if (cuda->flush)
        cudaFree(cuda->flush);
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

void *check_cuda_take_home(check_cuda *cuda, size_t bytes)
{
    if (KVF_CHECK_EMULATED)
        return NULL;
    if (cuda->home || cudaHostAlloc(&cuda->home, bytes,
                                    cudaHostAllocMapped | cudaHostAllocPortable) != cudaSuccess)
        abort();
    return cuda->home;
}

static kvf_cuda_launch_fn launcher(check_launcher fn)
{
    return (kvf_cuda_launch_fn)(void (*)(void))fn;
}

const char *check_cuda_run(check_cuda *cuda, check_launcher fn, const void *args, uint32_t tasks)
{
    cudaError_t status = (cudaError_t)launcher(fn)(args, tasks, cuda->stream);
    if (status == cudaSuccess)
        status = cudaStreamSynchronize(cuda->stream);
    return status == cudaSuccess ? NULL : cudaGetErrorString(status);
}

static cudaError_t record(check_cuda *cuda, check_launcher fn, const void *const *args,
                          uint32_t tasks, uint32_t launches, cudaGraphExec_t *out)
{
    cudaGraph_t graph = NULL;
    cudaError_t status = cudaStreamBeginCapture(cuda->stream, cudaStreamCaptureModeThreadLocal);
    if (status != cudaSuccess)
        return status;
    for (uint32_t i = 0; i < launches && status == cudaSuccess; i++)
        status = (cudaError_t)launcher(fn)(args[i], tasks, cuda->stream);
    const cudaError_t ended = cudaStreamEndCapture(cuda->stream, &graph);
    status = status == cudaSuccess ? ended : status;
    if (status == cudaSuccess)
        status = cudaGraphInstantiate(out, graph, 0);
    if (graph)
        cudaGraphDestroy(graph);
    return status;
}

/* What is between the events: a graph, or else a copy into the front of `flush`. */
static cudaError_t timed_run(check_cuda *cuda, cudaGraphExec_t graph, const void *from, double *ns)
{
    float ms = 0.0f;
    cudaError_t status =
        cudaMemsetAsync(cuda->flush + 2 * FLUSH_BYTES, 0, FLUSH_BYTES, cuda->stream);
    if (status == cudaSuccess)
        status = cudaEventRecord(cuda->from, cuda->stream);
    if (status == cudaSuccess)
        status = graph ? cudaGraphLaunch(graph, cuda->stream)
                       : cudaMemcpyAsync(cuda->flush, from, FLUSH_BYTES, cudaMemcpyDefault,
                                         cuda->stream);
    if (status == cudaSuccess)
        status = cudaEventRecord(cuda->to, cuda->stream);
    if (status == cudaSuccess)
        status = cudaEventSynchronize(cuda->to);
    if (status == cudaSuccess)
        status = cudaEventElapsedTime(&ms, cuda->from, cuda->to);
    *ns = (double)ms * 1e6;
    return status;
}

const char *check_cuda_time(check_cuda *cuda, check_launcher fn, const void *const *args,
                            uint32_t tasks, uint32_t launches, uint32_t times, double *ns)
{
    double first = 0.0;
    cudaGraphExec_t graph = NULL;
    cudaError_t status = to_device(cuda);
    if (status == cudaSuccess)
        status = record(cuda, fn, args, tasks, launches, &graph);
    if (status == cudaSuccess)
        status = timed_run(cuda, graph, NULL, &first);
    for (uint32_t i = 0; i < times && status == cudaSuccess; i++) {
        status = timed_run(cuda, graph, NULL, &ns[i]);
        ns[i] /= launches;
    }
    if (graph)
        cudaGraphExecDestroy(graph);
    return status == cudaSuccess ? NULL : cudaGetErrorString(status);
}

/* The best of a few copies. */
static cudaError_t copy_rate(check_cuda *cuda, const void *from, double *rate)
{
    double ns, best = 0.0;
    cudaError_t status = cudaSuccess;
    for (uint32_t i = 0; i < 7 && status == cudaSuccess; i++) {
        status = timed_run(cuda, NULL, from, &ns);
        best = best > 0.0 && best < ns ? best : ns;
    }
    *rate = best > 0.0 ? (double)FLUSH_BYTES / best : 0.0;
    return status;
}

const char *check_cuda_rates(check_cuda *cuda, check_rates *out)
{
    void *host = NULL;
    cudaError_t status = copy_rate(cuda, cuda->flush + FLUSH_BYTES, &out->copy);
    out->copy *= 2.0;
    if (status == cudaSuccess)
        status = cudaHostAlloc(&host, FLUSH_BYTES, cudaHostAllocPortable);
    if (status == cudaSuccess) {
        memset(host, 1, FLUSH_BYTES);
        status = copy_rate(cuda, host, &out->link);
        cudaFreeHost(host);
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

void *check_cuda_take_home(check_cuda *cuda, size_t bytes)
{
    (void)cuda;
    (void)bytes;
    return NULL;
}

const char *check_cuda_run(check_cuda *cuda, check_launcher fn, const void *args, uint32_t tasks)
{
    (void)cuda;
    (void)fn;
    (void)args;
    (void)tasks;
    return "this build has no CUDA device";
}

const char *check_cuda_time(check_cuda *cuda, check_launcher fn, const void *const *args,
                            uint32_t tasks, uint32_t launches, uint32_t times, double *ns)
{
    (void)launches;
    memset(ns, 0, times * sizeof *ns);
    return check_cuda_run(cuda, fn, args, tasks);
}

const char *check_cuda_rates(check_cuda *cuda, check_rates *out)
{
    *out = (check_rates){0.0, 0.0};
    return check_cuda_run(cuda, NULL, NULL, 0);
}

#endif
