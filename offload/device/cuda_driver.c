/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Calls of the NVIDIA driver that the oldest supported toolkit lacks, those for contexts, which the
 * runtime does not have, and what only a trial tells.
 *
 * A call is looked up by name and by the version of its signature: a driver keeps old signatures,
 * so what runs here does not depend on the toolkit that built it. Invariant: a capability that the
 * probe reports was seen to work on this device with this driver, bytes compared.
 */

#include "cuda_device.h"

#include <dlfcn.h>
#include <string.h>

#define SOURCE_IN_STREAM_ORDER 1
#define COPIES_AT_ONCE         256u /* addresses of one batch that lie on the stack */
#define PROBE_BYTES            ((size_t)64)
#define PROBE_COPIES           3u

/* ---- finding calls ---- */

#if CUDART_VERSION >= 12050
static void *find(const char *name, unsigned version)
{
    void *call = NULL;
    enum cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
    if (cudaGetDriverEntryPointByVersion(name, &call, version, cudaEnableDefault, &result) !=
        cudaSuccess)
        (void)cudaGetLastError();
    return result == cudaDriverEntryPointSuccess ? call : NULL;
}
#else
/* The runtime of this toolkit asks for signatures of its own version only. */
static void *find(const char *name, unsigned version)
{
    typedef int (*proc_address_fn)(const char *, void **, int, unsigned long long, int *);
    void *call = NULL, *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    int result = 1;
    if (!library)
        return NULL;
    proc_address_fn proc_address = NULL;
    void *symbol = dlsym(library, "cuGetProcAddress_v2");
    memcpy(&proc_address, &symbol, sizeof proc_address);
    if (!proc_address || proc_address(name, &call, (int)version, 0, &result) != 0)
        result = 1;
    dlclose(library); /* the runtime holds it open */
    return result == 0 ? call : NULL;
}
#endif

#define FIND(call, name, version)                                                                  \
    do {                                                                                           \
        void *found_ = find(name, version);                                                        \
        memcpy(&(call), &found_, sizeof(call));                                                    \
    } while (0)

/* Codes of the driver have the runtime's numbers. */
static cudaError_t of_driver(int code)
{
    return (cudaError_t)code;
}

kvf_status kvf_cuda_driver_open(kvf_cuda_device *device)
{
    kvf_cuda_driver *d = &device->driver;
    FIND(d->batch, "cuMemcpyBatchAsync", 13000);
    if (!d->batch)
        FIND(d->batch_12, "cuMemcpyBatchAsync", 12080);
    FIND(d->context_get, "cuCtxGetCurrent", 4000);
    FIND(d->context_set, "cuCtxSetCurrent", 4000);
    FIND(d->primary_retain, "cuDevicePrimaryCtxRetain", 7000);
    FIND(d->primary_release, "cuDevicePrimaryCtxRelease", 11000);
    if (!d->context_get || !d->context_set || !d->primary_retain || !d->primary_release)
        return kvf_cuda_failed(device, cudaErrorNotSupported, "the driver's calls for contexts");
    return kvf_cuda_failed(device, of_driver(d->primary_retain(&device->context, device->ordinal)),
                           "the device could not be opened");
}

void kvf_cuda_driver_close(kvf_cuda_device *device)
{
    if (device->context)
        (void)device->driver.primary_release(device->ordinal); /* keeps nothing, whatever it says */
    device->context = NULL;
}

/* ---- calling them ---- */

static cudaError_t batch_part(const kvf_cuda_driver *driver, void *const *to,
                              const void *const *from, size_t bytes, uint32_t count,
                              cudaStream_t stream)
{
    unsigned long long targets[COPIES_AT_ONCE], sources[COPIES_AT_ONCE];
    size_t sizes[COPIES_AT_ONCE], first = 0, failed = 0;
    kvf_cuda_copy_attributes attributes = {.source_order = SOURCE_IN_STREAM_ORDER};
    for (uint32_t i = 0; i < count; i++) {
        targets[i] = (uintptr_t)to[i];
        sources[i] = (uintptr_t)from[i];
        sizes[i] = bytes;
    }
    return of_driver(driver->batch ? driver->batch(targets, sources, sizes, count, &attributes,
                                                   &first, 1, stream)
                                   : driver->batch_12(targets, sources, sizes, count, &attributes,
                                                      &first, 1, &failed, stream));
}

cudaError_t kvf_cuda_driver_batch(const kvf_cuda_driver *driver, void *const *to,
                                  const void *const *from, size_t bytes, uint32_t count,
                                  cudaStream_t stream)
{
    cudaError_t error = cudaSuccess;
    for (uint32_t i = 0; i < count && error == cudaSuccess; i += COPIES_AT_ONCE)
        error = batch_part(driver, to + i, from + i, bytes, kvf_min_u32(count - i, COPIES_AT_ONCE),
                           stream);
    return error;
}

/* ---- trying ---- */

/* The memory that a kernel takes its bytes and its lists from. */
typedef struct probe_host {
    _Alignas(PROBE_BYTES) char bytes[PROBE_COPIES][PROBE_BYTES];
    const void *from[PROBE_COPIES];
    void *to[PROBE_COPIES];
    uint32_t count;
} probe_host;

typedef struct probe {
    kvf_cuda_device *device;
    probe_host *host; /* pinned */
    char *memory;     /* PROBE_COPIES pieces to copy from, as many to copy to */
    char seen[2 * PROBE_COPIES * PROBE_BYTES];
} probe;

/* Known bytes where copies come from, zeros elsewhere. */
static cudaError_t prepare(probe *p)
{
    memset(p->seen, 0, sizeof p->seen);
    for (size_t i = 0; i < PROBE_COPIES * PROBE_BYTES; i++)
        p->seen[i] = (char)(i * 37 + 11);
    cudaError_t error =
        cudaMemcpyAsync(p->memory, p->seen, sizeof p->seen, cudaMemcpyDefault, p->device->own);
    return error == cudaSuccess ? cudaStreamSynchronize(p->device->own) : error;
}

static char *target_of(const probe *p, uint32_t i)
{
    return p->memory + (2 * PROBE_COPIES - 1 - i) * PROBE_BYTES;
}

/* From registered host memory to that of the device, as `mapped` does it. */
static cudaError_t enqueue_move(const probe *p)
{
    probe_host *host = p->host;
    for (uint32_t i = 0; i < PROBE_COPIES; i++) {
        memcpy(host->bytes[i], p->seen + i * PROBE_BYTES, PROBE_BYTES);
        host->from[i] = host->bytes[i];
        host->to[i] = target_of(p, i);
    }
    host->count = PROBE_COPIES;
    const kvf_move_args move = {.bytes = PROBE_BYTES,
                                .from = host->from,
                                .to = host->to,
                                .count = &host->count,
                                .high = PROBE_COPIES + 1,
                                .blocks = 1};
    return (cudaError_t)kvf_move_cuda(&move, 1, p->device->own);
}

static cudaError_t enqueue_batch(const probe *p)
{
    void *to[PROBE_COPIES];
    const void *from[PROBE_COPIES];
    for (uint32_t i = 0; i < PROBE_COPIES; i++) {
        from[i] = p->memory + i * PROBE_BYTES;
        to[i] = target_of(p, i);
    }
    return kvf_cuda_driver_batch(&p->device->driver, to, from, PROBE_BYTES, PROBE_COPIES,
                                 p->device->own);
}

static bool copies_arrived(const probe *p)
{
    for (uint32_t i = 0; i < PROBE_COPIES; i++)
        if (memcmp(p->seen + i * PROBE_BYTES, p->seen + (2 * PROBE_COPIES - 1 - i) * PROBE_BYTES,
                   PROBE_BYTES) != 0)
            return false;
    return true;
}

static cudaError_t run_recorded(const probe *p, cudaGraph_t graph)
{
    cudaGraphExec_t runnable = NULL;
    cudaError_t error = cudaGraphInstantiate(&runnable, graph, 0);
    if (error == cudaSuccess)
        error = cudaGraphLaunch(runnable, p->device->own);
    if (error == cudaSuccess)
        error = cudaStreamSynchronize(p->device->own);
    if (runnable)
        (void)cudaGraphExecDestroy(runnable);
    return error;
}

/* Run `enqueue` on the device's stream, or record and run it. Are the bytes there after? */
static bool works(probe *p, cudaError_t (*enqueue)(const probe *), bool is_recorded)
{
    cudaGraph_t graph = NULL;
    cudaStream_t stream = p->device->own;
    cudaError_t error = prepare(p);
    if (error == cudaSuccess && is_recorded)
        error = cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed);
    if (error == cudaSuccess) {
        error = enqueue(p);
        if (is_recorded) {
            const cudaError_t ended = cudaStreamEndCapture(stream, &graph);
            error = error != cudaSuccess ? error : ended;
        }
    }
    if (error == cudaSuccess)
        error = is_recorded ? run_recorded(p, graph) : cudaStreamSynchronize(stream);
    if (graph)
        (void)cudaGraphDestroy(graph);
    memset(p->seen, 0x55, sizeof p->seen);
    if (error == cudaSuccess)
        error = cudaMemcpyAsync(p->seen, p->memory, sizeof p->seen, cudaMemcpyDefault, stream);
    if (error == cudaSuccess)
        error = cudaStreamSynchronize(stream);
    /* A refusal is an answer; it must not be the caller's last error. */
    (void)cudaGetLastError();
    return error == cudaSuccess && copies_arrived(p);
}

static void run_probes(probe *p)
{
    kvf_cuda_device *device = p->device;
    kvf_device_properties *out = &device->properties;
    const bool has_batch = device->driver.batch || device->driver.batch_12;
    out->can_copy_batch = has_batch && works(p, enqueue_batch, 0);
    /* Before 13.1 a recorded batch is dropped without a word, or refused. */
    out->can_capture_batch =
        out->can_copy_batch && out->driver_version >= 13010 && works(p, enqueue_batch, 1);
    out->can_capture = works(p, enqueue_move, 1);
}

kvf_status kvf_cuda_driver_probe(kvf_cuda_device *device)
{
    probe p = {.device = device};
    void *memory = NULL, *host = NULL;
    static const char lacks[] = "memory to try the driver with could not be had";
    static const char stays[] = "memory of a trial could not be freed";
    KVF_TRY(kvf_cuda_failed(device, cudaMalloc(&memory, sizeof p.seen), lacks));
    p.memory = memory;
    kvf_status status = kvf_cuda_failed(
        device, cudaHostAlloc(&host, sizeof *p.host, cudaHostAllocMapped | cudaHostAllocPortable),
        lacks);
    if (status == KVF_OK) {
        p.host = host;
        run_probes(&p);
        status = kvf_cuda_failed(device, cudaFreeHost(host), stays);
    }
    const cudaError_t error = cudaFree(memory);
    return status == KVF_OK ? kvf_cuda_failed(device, error, stays) : status;
}
