/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The CUDA device: opening and closing it, what it is, and its table of operations.
 *
 * The other files of the device are cuda_error.c (what CUDA says), cuda_memory.c, cuda_stream.c,
 * cuda_work.c, cuda_graph.c and cuda_driver.c (what older toolkits lack). The caller's current
 * context is the same after every call as before it. Invariant: a half-open device is closed by the
 * same function as an open one.
 *
 * Host memory that is registered counts nothing against RLIMIT_MEMLOCK: NVIDIA's driver pins pages
 * by itself. So the limit is no reason to refuse before trying; the driver's refusal is.
 */

#include "cuda_device.h"

#include <stdio.h>

#include "common/text.h"
#include "topology.h"

static void cuda_properties(const kvf_device *device, kvf_device_properties *out)
{
    *out = kvf_cuda_of(device)->properties;
}

static void cuda_close(kvf_device *base)
{
    kvf_cuda_device *device = kvf_cuda_of(base);
    kvf_cuda_caller before;
    for (uint32_t i = 0; i < KVF_CUDA_STREAMS_MAX; i++)
        KVF_ASSERT(!device->streams[i]);
    KVF_ASSERT(!device->blocks && !device->events && !device->recording);
    if (device->own) {
        kvf_cuda_enter_release(device, &before);
        const cudaError_t error = cudaStreamDestroy(device->own);
        if (atomic_load(&device->lost) == 0)
            (void)kvf_cuda_failed(device, error, "a stream");
        else /* why it was lost is said, and that stays */
            (void)cudaGetLastError();
        if (device->starts_late)
            kvf_cuda_refuse_early_starts(-1);
        kvf_cuda_leave(device, before);
    }
    kvf_cuda_driver_close(device);
    pthread_mutex_destroy(&device->lock);
    kvf_free(base->context, device);
}

static const kvf_device_ops cuda_ops = {
    .kind = KVF_DEVICE_CUDA,
    .name = "cuda",
    .close = cuda_close,
    .properties = cuda_properties,
    .memory_alloc = kvf_cuda_memory_alloc,
    .memory_left = kvf_cuda_memory_left,
    .memory_free = kvf_cuda_memory_free,
    .host_register = kvf_cuda_host_register,
    .host_unregister = kvf_cuda_host_unregister,
    .host_alloc = kvf_cuda_host_alloc,
    .host_free = kvf_cuda_host_free,
    .stream_create = kvf_cuda_stream_create,
    .stream_destroy = kvf_cuda_stream_destroy,
    .stream_wait = kvf_cuda_stream_wait,
    .event_create = kvf_cuda_event_create,
    .event_destroy = kvf_cuda_event_destroy,
    .event_record = kvf_cuda_event_record,
    .stream_wait_event = kvf_cuda_stream_wait_event,
    .event_wait = kvf_cuda_event_wait,
    .event_is_done = kvf_cuda_event_is_done,
    .event_elapsed = kvf_cuda_event_elapsed,
    .copy = kvf_cuda_copy,
    .copy_through = kvf_cuda_copy, /* copies pass the caches of the CPU and the GPU as it is */
    .copy_batch = kvf_cuda_copy_batch,
    .fill = kvf_cuda_fill,
    .launch = kvf_cuda_launch_tasks,
    .host_call = kvf_cuda_host_call,
    .stream_fail = kvf_cuda_stream_fail,
    .stream_wrap = kvf_cuda_stream_wrap,
    .stream_native = kvf_cuda_stream_native,
    .capture_begin = kvf_cuda_capture_begin,
    .capture_end = kvf_cuda_capture_end,
    .is_capturing = kvf_cuda_is_capturing,
    .graph_nodes = kvf_cuda_graph_nodes,
    .graph_launch = kvf_cuda_graph_launch,
    .graph_destroy = kvf_cuda_graph_destroy,
};

/* ---- what the device is ---- */

static void write_uuid(char out[48], const cudaUUID_t *uuid)
{
    size_t used = (size_t)snprintf(out, 48, "GPU-");
    for (size_t i = 0; i < sizeof uuid->bytes; i++)
        used += (size_t)snprintf(out + used, 48 - used, "%s%02x",
                                 i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "",
                                 (unsigned)(unsigned char)uuid->bytes[i]);
}

static cudaError_t read_versions(kvf_device_properties *p)
{
    int driver = 0, runtime = 0;
    cudaError_t error = cudaDriverGetVersion(&driver);
    if (error == cudaSuccess)
        error = cudaRuntimeGetVersion(&runtime);
    p->driver_version = (uint32_t)driver;
    p->runtime_version = (uint32_t)runtime;
    return error;
}

static cudaError_t read_properties(kvf_cuda_device *device)
{
    kvf_device_properties *p = &device->properties;
    struct cudaDeviceProp found;
    cudaError_t error = cudaGetDeviceProperties(&found, device->ordinal);
    if (error == cudaSuccess)
        error = cudaDeviceGetPCIBusId(p->pci_address, sizeof p->pci_address, device->ordinal);
    if (error == cudaSuccess)
        error = read_versions(p);
    if (error == cudaSuccess)
        error = cudaDeviceGetStreamPriorityRange(&device->priority_low, &device->priority_high);
    if (error != cudaSuccess)
        return error;
    for (char *c = p->pci_address; *c != '\0'; c++)
        *c = kvf_lower(*c);
    snprintf(p->name, sizeof p->name, "%.*s", (int)sizeof p->name - 1, found.name);
    write_uuid(p->uuid, &found.uuid);
    p->memory_bytes = found.totalGlobalMem;
    p->multiprocessors = (uint32_t)found.multiProcessorCount;
    p->compute_major = (uint32_t)found.major;
    p->compute_minor = (uint32_t)found.minor;
    p->shared_memory_max = found.sharedMemPerBlockOptin;
    p->pins_host_memory = true;
    int is_integrated = 0, is_coherent = 0;
    error = cudaDeviceGetAttribute(&is_integrated, cudaDevAttrIntegrated, device->ordinal);
    if (error == cudaSuccess)
        error = cudaDeviceGetAttribute(
            &is_coherent, cudaDevAttrPageableMemoryAccessUsesHostPageTables, device->ordinal);
    p->is_coherent = is_coherent > 0;
    /* Tables that lie in ordinary memory of the host go to kernels then, which must reach them. */
    p->shares_host_memory = is_integrated > 0 && is_coherent > 0;
    return error;
}

static void read_place(kvf_cuda_device *device)
{
    kvf_device_properties *p = &device->properties;
    p->numa_node = kvf_topology_node_of_pci(NULL, p->pci_address);
    kvf_pci_link_read(NULL, p->pci_address, &p->link_generation, &p->link_width);
}

/* ---- opening ---- */

static kvf_status load_kernels(kvf_cuda_device *device)
{
    const kvf_device_properties *p = &device->properties;
    const cudaError_t error = (cudaError_t)kvf_cuda_load_kernels();
    if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction)
        return kvf_fail(
            device->base.context, KVF_UNSUPPORTED, (int)error,
            "this build has no kernels for %s, compute capability %u.%u; configure with "
            "-Dgpu_targets=%u%u, or with all",
            p->name, p->compute_major, p->compute_minor, p->compute_major, p->compute_minor);
    return kvf_cuda_failed(device, error, "the kernels could not be loaded");
}

static kvf_status start(kvf_cuda_device *device, const kvf_device_config *config)
{
    kvf_cuda_caller before;
    KVF_TRY(kvf_cuda_driver_open(device));
    KVF_TRY(kvf_cuda_enter_relaxed(device, &before));
    kvf_status status = kvf_cuda_failed(device, read_properties(device), "the device's properties");
    if (status == KVF_OK)
        status =
            kvf_cuda_failed(device, cudaStreamCreateWithFlags(&device->own, cudaStreamNonBlocking),
                            "the device's stream could not be created");
    if (status == KVF_OK)
        status = load_kernels(device);
    if (status == KVF_OK && config->starts_late) {
        kvf_cuda_refuse_early_starts(1);
        device->starts_late = true;
    }
    if (status == KVF_OK)
        status = kvf_cuda_driver_probe(device);
    kvf_cuda_leave(device, before);
    return status;
}

kvf_status kvf_device_cuda_open(kvf_context *context, const kvf_device_config *config,
                                kvf_device **out)
{
    char text[256];
    *out = NULL;
    const int count = kvf_cuda_count(text);
    if (count == 0)
        KVF_FAIL(context, KVF_UNSUPPORTED, "%s", text);
    if (config->ordinal >= (uint32_t)count)
        return kvf_fail(
            context, KVF_INVALID, (int)cudaErrorInvalidDevice,
            "device_ordinal is %u, and this process sees %d CUDA device%s: use 0 to %d, "
            "or see CUDA_VISIBLE_DEVICES",
            config->ordinal, count, count == 1 ? "" : "s", count - 1);
    kvf_cuda_device *device = kvf_alloc(context, 1, sizeof *device);
    if (!device)
        KVF_FAIL(context, KVF_OUT_OF_MEMORY, "no memory for the CUDA device");
    device->base.ops = &cuda_ops;
    device->base.context = context;
    device->ordinal = (int)config->ordinal;
    device->delay_seed = config->delay_seed;
    if (pthread_mutex_init(&device->lock, NULL) != 0) {
        kvf_free(context, device);
        KVF_FAIL(context, KVF_SYSTEM, "a lock for the device could not be made");
    }
    kvf_status status = kvf_kernels_init_cuda(&device->base.kernels);
    if (status == KVF_OK)
        status = start(device, config);
    if (status != KVF_OK) {
        cuda_close(&device->base);
        return status;
    }
    read_place(device);
    *out = &device->base;
    return KVF_OK;
}
