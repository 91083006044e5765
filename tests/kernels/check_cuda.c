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
#define STAGE_BYTES ((size_t)4 << 20)
#define ARGS_MAX    1024u
/* Bytes that are written before a run, and that a copy has: more than the L2 of any GPU. */
#define FLUSH_BYTES ((size_t)(KVF_CHECK_EMULATED ? 1 : 256) << 20)

/* Memory of the host that buffers are cut from, and as much of the device. */
typedef struct check_chunk {
    char *host, *device;
    size_t bytes, used;
} check_chunk;

struct check_cuda {
    char name[96];
    bool is_timed;
    cudaStream_t stream;
    cudaEvent_t from, to;
    char *flush; /* [3, FLUSH_BYTES], if it is timed: a copy's two sides, and what fills L2 */
    void *home;
    char *stage; /* [STAGE_BYTES] pinned */
    uint32_t chunk_count;
    check_chunk chunks[CHUNKS_MAX];
};

/* Buffers are adopted one by one, so that AddressSanitizer sees their ends. */
#define IS_ADOPTED (KVF_CHECK_EMULATED && KVF_CHECK_SANITIZED)

/* ---- the host's memory and its twin on the device ---- */

static void chunk_free(check_chunk *chunk)
{
    cudaFree(chunk->device);
    free(chunk->host);
}

static bool chunk_alloc(check_chunk *chunk, size_t bytes)
{
    *chunk = (check_chunk){.bytes = bytes};
    void *host = NULL, *device = NULL;
    if (posix_memalign(&host, 64, bytes) != 0 || cudaMalloc(&device, bytes) != cudaSuccess) {
        free(host);
        return false;
    }
    chunk->host = host;
    chunk->device = device;
    return true;
}

/* Words that are addresses of one side become those of the other. A number that looks like one is
 * changed there and back, and what it is to the reference and to the kernel differs: of words at
 * random one in 2^30 or so. */
static void translate(const check_cuda *cuda, void *memory, size_t bytes, bool to_device)
{
    uint64_t *words = memory;
    for (size_t i = 0; i < bytes / sizeof *words; i++)
        for (uint32_t k = 0; k < cuda->chunk_count; k++) {
            const check_chunk *chunk = &cuda->chunks[k];
            const uint64_t host = (uintptr_t)chunk->host, device = (uintptr_t)chunk->device;
            const uint64_t at = words[i] - (to_device ? host : device);
            if (at < chunk->used) {
                words[i] = at + (to_device ? device : host);
                break;
            }
        }
}

/* All that buffers of the case have, by way of pinned memory. */
static cudaError_t copy_all(check_cuda *cuda, bool to_device)
{
    cudaError_t status = cudaSuccess;
    for (uint32_t i = 0; i < cuda->chunk_count; i++) {
        const check_chunk *chunk = &cuda->chunks[i];
        for (size_t at = 0; at < chunk->used && status == cudaSuccess; at += STAGE_BYTES) {
            const size_t left = chunk->used - at, bytes = left < STAGE_BYTES ? left : STAGE_BYTES;
            char *device = chunk->device + at;
            if (to_device) {
                memcpy(cuda->stage, chunk->host + at, bytes);
                translate(cuda, cuda->stage, bytes, true);
            }
            status =
                cudaMemcpyAsync(to_device ? device : cuda->stage, to_device ? cuda->stage : device,
                                bytes, cudaMemcpyDefault, cuda->stream);
            if (status == cudaSuccess)
                status = cudaStreamSynchronize(cuda->stream);
            if (status == cudaSuccess && !to_device) {
                translate(cuda, cuda->stage, bytes, false);
                memcpy(chunk->host + at, cuda->stage, bytes);
            }
        }
    }
    return status;
}

static const char *said(cudaError_t status)
{
    return status == cudaSuccess ? NULL : cudaGetErrorString(status);
}

const char *check_cuda_put(check_cuda *cuda)
{
    return said(copy_all(cuda, true));
}

const char *check_cuda_get(check_cuda *cuda)
{
    return said(copy_all(cuda, false));
}

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
        (status = cudaHostAlloc((void **)&cuda->stage, STAGE_BYTES, cudaHostAllocPortable)) !=
            cudaSuccess ||
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
        chunk_free(&cuda->chunks[i]);
    if (cuda->stage)
        cudaFreeHost(cuda->stage);
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
    return KVF_CHECK_EMULATED;
}

void *check_cuda_take(check_cuda *cuda, size_t bytes)
{
    uint32_t i = 0;
    if (IS_ADOPTED)
        return NULL;
    bytes = (bytes + 63) / 64 * 64;
    while (i < cuda->chunk_count && cuda->chunks[i].bytes - cuda->chunks[i].used < bytes)
        i++;
    if (i == cuda->chunk_count) {
        if (i == CHUNKS_MAX ||
            !chunk_alloc(&cuda->chunks[i], bytes > CHUNK_BYTES ? bytes : CHUNK_BYTES)) {
            fprintf(stderr, "check_kernels: out of memory for buffers of the GPU\n");
            abort();
        }
        cuda->chunk_count++;
    }
    cuda->chunks[i].used += bytes;
    return cuda->chunks[i].host + cuda->chunks[i].used - bytes;
}

void check_cuda_adopt(check_cuda *cuda, void *memory, size_t bytes)
{
    if (cudaHostRegister(memory, bytes, cudaHostRegisterMapped) != cudaSuccess)
        abort();
}

void check_cuda_abandon(check_cuda *cuda, void *memory)
{
    if (cudaHostUnregister(memory) != cudaSuccess)
        abort();
}

void check_cuda_release(check_cuda *cuda)
{
    for (uint32_t i = 0; i < cuda->chunk_count; i++)
        cuda->chunks[i].used = 0;
}

void *check_cuda_take_home(check_cuda *cuda, size_t bytes)
{
    if (IS_ADOPTED)
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

/* A launch reads its arguments before it returns. */
static cudaError_t launch(check_cuda *cuda, check_launcher fn, check_args args, uint32_t tasks)
{
    _Alignas(64) char copy[ARGS_MAX];
    if (tasks == 0)
        return cudaSuccess;
    if (IS_ADOPTED)
        return (cudaError_t)launcher(fn)(args.at, tasks, cuda->stream);
    if (args.bytes > ARGS_MAX)
        return cudaErrorInvalidValue;
    memcpy(copy, args.at, args.bytes);
    translate(cuda, copy, args.bytes, true);
    return (cudaError_t)launcher(fn)(copy, tasks, cuda->stream);
}

const char *check_cuda_run(check_cuda *cuda, check_launcher fn, check_args args, uint32_t tasks)
{
    cudaError_t status = launch(cuda, fn, args, tasks);
    if (status == cudaSuccess)
        status = cudaStreamSynchronize(cuda->stream);
    return said(status);
}

static cudaError_t record(check_cuda *cuda, const check_launch *launches, uint32_t count,
                          cudaGraphExec_t *out)
{
    cudaGraph_t graph = NULL;
    cudaError_t status = cudaStreamBeginCapture(cuda->stream, cudaStreamCaptureModeThreadLocal);
    if (status != cudaSuccess)
        return status;
    for (uint32_t i = 0; i < count && status == cudaSuccess; i++)
        status = launch(cuda, launches[i].fn, launches[i].args, launches[i].tasks);
    const cudaError_t ended = cudaStreamEndCapture(cuda->stream, &graph);
    status = status == cudaSuccess ? ended : status;
    if (status == cudaSuccess)
        status = cudaGraphInstantiate(out, graph, 0);
    if (graph)
        cudaGraphDestroy(graph);
    return status;
}

/* The work between the events: a graph, or else a copy into the front of `flush`. */
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

const char *check_cuda_time(check_cuda *cuda, const check_launch *launches, uint32_t count,
                            uint32_t times, double *ns)
{
    double first = 0.0;
    cudaGraphExec_t graph = NULL;
    cudaError_t status = record(cuda, launches, count, &graph);
    if (status == cudaSuccess)
        status = timed_run(cuda, graph, NULL, &first);
    for (uint32_t i = 0; i < times && status == cudaSuccess; i++)
        status = timed_run(cuda, graph, NULL, &ns[i]);
    if (graph)
        cudaGraphExecDestroy(graph);
    return said(status);
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
    return said(status);
}

#endif
