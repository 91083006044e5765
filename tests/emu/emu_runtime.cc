/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The emulated CUDA runtime: devices, versions, properties, functions, errors, launches.
 *
 * What it says of the machine follows from the configuration of emu_control.h. The limits of a
 * compute capability are those of NVIDIA's tables, so that launch decisions are made as on a GPU.
 */

#include <algorithm>
#include <fnmatch.h>
#include <map>
#include <stdio.h>
#include <string.h>

#include "emu_launch.h"
#include "emu_state.h"

namespace emu
{
namespace
{

thread_local int device_of_thread = 0; /* that it has set */
constexpr int NO_CONTEXT = -1;
thread_local int context_of_thread = NO_CONTEXT; /* the device whose context is current */

struct Limits {
    uint32_t compute; /* 10 * major + minor */
    int shared_optin, shared_multiprocessor, threads_multiprocessor, blocks_multiprocessor;
};

/* KiB of shared memory per block with opt-in and per multiprocessor; threads; blocks. */
const Limits LIMITS[] = {{70, 96, 96, 2048, 32},    {75, 64, 64, 1024, 16},
                         {80, 163, 164, 2048, 32},  {86, 99, 100, 1536, 16},
                         {89, 99, 100, 1536, 24},   {90, 227, 228, 2048, 32},
                         {100, 227, 228, 2048, 32}, {120, 99, 100, 1536, 24}};

Limits limits()
{
    kvf_emu_config machine = config();
    Limits found = LIMITS[0];
    for (const Limits &l : LIMITS)
        if (l.compute <= 10 * machine.compute_major + machine.compute_minor)
            found = l;
    return found;
}

bool is_device(int device)
{
    return device >= 0 && (uint32_t)device < config().devices;
}

/* "dddd:bb:dd.f" of device 0; later ones count up the bus. */
void pci_address(int device, unsigned *domain, unsigned *bus, unsigned *slot)
{
    *domain = *bus = *slot = 0;
    (void)sscanf(config().pci_address, "%x:%x:%x", domain, bus, slot);
    *bus += (unsigned)device;
}

void fill_properties(cudaDeviceProp *p, int device)
{
    kvf_emu_config machine = config();
    Limits l = limits();
    unsigned domain, bus, slot;
    pci_address(device, &domain, &bus, &slot);
    *p = {};
    snprintf(p->name, sizeof p->name, "%s", machine.name);
    const char id[] = "kvf-emulated-gp";
    memcpy(p->uuid.bytes, id, sizeof p->uuid.bytes - 1);
    p->uuid.bytes[15] = (char)device;
    p->totalGlobalMem = machine.memory_bytes;
    p->sharedMemPerBlock = 48 * 1024;
    p->sharedMemPerBlockOptin = (size_t)l.shared_optin * 1024;
    p->sharedMemPerMultiprocessor = (size_t)l.shared_multiprocessor * 1024;
    p->reservedSharedMemPerBlock = 1024;
    p->regsPerBlock = p->regsPerMultiprocessor = 65536;
    p->warpSize = 32;
    p->maxThreadsPerBlock = 1024;
    p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
    p->maxThreadsDim[2] = 64;
    p->maxGridSize[0] = INT32_MAX;
    p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    p->totalConstMem = 65536;
    p->major = (int)machine.compute_major;
    p->minor = (int)machine.compute_minor;
    p->multiProcessorCount = (int)machine.multiprocessors;
    p->maxThreadsPerMultiProcessor = l.threads_multiprocessor;
    p->maxBlocksPerMultiProcessor = l.blocks_multiprocessor;
    p->canMapHostMemory = p->unifiedAddressing = p->concurrentKernels = 1;
    p->integrated = machine.is_integrated;
    p->pageableMemoryAccess = p->pageableMemoryAccessUsesHostPageTables = machine.reads_pageable;
    p->hostRegisterSupported = p->canUseHostPointerForRegisteredMem = !machine.refuses_registering;
    p->hostRegisterReadOnlySupported = 1;
    p->streamPrioritiesSupported = p->computePreemptionSupported = 1;
    p->pciDomainID = (int)domain;
    p->pciBusID = (int)bus;
    p->pciDeviceID = (int)slot;
    p->asyncEngineCount = 2;
    p->memoryBusWidth = 256;
    p->l2CacheSize = 32 << 20;
    p->hostNumaId = p->deviceNumaId = -1;
}

bool attribute_of(const cudaDeviceProp &p, cudaDeviceAttr attribute, int *value)
{
    const struct {
        cudaDeviceAttr attribute;
        long long value;
    } table[] = {
        {cudaDevAttrMaxThreadsPerBlock, p.maxThreadsPerBlock},
        {cudaDevAttrMaxBlockDimX, p.maxThreadsDim[0]},
        {cudaDevAttrMaxGridDimX, p.maxGridSize[0]},
        {cudaDevAttrMaxGridDimY, p.maxGridSize[1]},
        {cudaDevAttrMaxGridDimZ, p.maxGridSize[2]},
        {cudaDevAttrMaxSharedMemoryPerBlock, (long long)p.sharedMemPerBlock},
        {cudaDevAttrMaxSharedMemoryPerBlockOptin, (long long)p.sharedMemPerBlockOptin},
        {cudaDevAttrMaxSharedMemoryPerMultiprocessor, (long long)p.sharedMemPerMultiprocessor},
        {cudaDevAttrReservedSharedMemoryPerBlock, (long long)p.reservedSharedMemPerBlock},
        {cudaDevAttrWarpSize, p.warpSize},
        {cudaDevAttrMaxRegistersPerBlock, p.regsPerBlock},
        {cudaDevAttrClockRate, 1000000},
        {cudaDevAttrMemoryClockRate, 1000000},
        {cudaDevAttrGlobalMemoryBusWidth, p.memoryBusWidth},
        {cudaDevAttrL2CacheSize, p.l2CacheSize},
        {cudaDevAttrMultiProcessorCount, p.multiProcessorCount},
        {cudaDevAttrMaxThreadsPerMultiProcessor, p.maxThreadsPerMultiProcessor},
        {cudaDevAttrMaxBlocksPerMultiprocessor, p.maxBlocksPerMultiProcessor},
        {cudaDevAttrIntegrated, p.integrated},
        {cudaDevAttrCanMapHostMemory, p.canMapHostMemory},
        {cudaDevAttrUnifiedAddressing, p.unifiedAddressing},
        {cudaDevAttrConcurrentKernels, p.concurrentKernels},
        {cudaDevAttrAsyncEngineCount, p.asyncEngineCount},
        {cudaDevAttrStreamPrioritiesSupported, p.streamPrioritiesSupported},
        {cudaDevAttrComputeCapabilityMajor, p.major},
        {cudaDevAttrComputeCapabilityMinor, p.minor},
        {cudaDevAttrPciBusId, p.pciBusID},
        {cudaDevAttrPciDeviceId, p.pciDeviceID},
        {cudaDevAttrPciDomainId, p.pciDomainID},
        {cudaDevAttrHostRegisterSupported, p.hostRegisterSupported},
        {cudaDevAttrHostRegisterReadOnlySupported, p.hostRegisterReadOnlySupported},
        {cudaDevAttrCanUseHostPointerForRegisteredMem, p.canUseHostPointerForRegisteredMem},
        {cudaDevAttrComputePreemptionSupported, p.computePreemptionSupported},
        {cudaDevAttrHostNumaId, p.hostNumaId},
        {cudaDevAttrPageableMemoryAccess, p.pageableMemoryAccess},
        {cudaDevAttrPageableMemoryAccessUsesHostPageTables,
         p.pageableMemoryAccessUsesHostPageTables},
        {cudaDevAttrManagedMemory, 0},
        {cudaDevAttrMemoryPoolsSupported, 0},
        {cudaDevAttrComputeMode, 0},
        {cudaDevAttrCooperativeLaunch, 0},
        {cudaDevAttrClusterLaunch, 0}};
    for (const auto &row : table) {
        if (row.attribute == attribute) {
            *value = (int)row.value;
            return true;
        }
    }
    return false;
}

} // namespace

/* A thread without a context gets that of the device it has set, when it needs one. */
int current_device()
{
    if (context_of_thread == NO_CONTEXT)
        context_of_thread = device_of_thread;
    return context_of_thread;
}

int current_context()
{
    return context_of_thread;
}

void set_context(int device)
{
    context_of_thread = device;
}

/* ---- kernels that the current device has loaded ---- */

static std::shared_mutex loaded_lock;
constexpr int SHARED_WITHOUT_OPTIN = 48 * 1024;
struct Loaded {
    int shared = SHARED_WITHOUT_OPTIN; /* dynamic, that a launch may ask for */
    int carveout = cudaSharedmemCarveoutDefault;
};
static std::map<std::pair<int, const void *>, Loaded> loaded; /* by device and function */
static std::atomic<int> carveout_of_last{cudaSharedmemCarveoutDefault};

static std::pair<int, const void *> here(const void *function)
{
    return {current_device(), function};
}

/* True if it was not loaded yet. */
static bool load(const void *function)
{
    {
        std::shared_lock<std::shared_mutex> hold(loaded_lock);
        if (loaded.count(here(function)) != 0)
            return false;
    }
    std::unique_lock<std::shared_mutex> hold(loaded_lock);
    return loaded.emplace(here(function), Loaded()).second;
}

/* Of a function that is loaded. */
static Loaded found(const void *function)
{
    std::shared_lock<std::shared_mutex> hold(loaded_lock);
    return loaded.at(here(function));
}

/* False if it would be lowered: CUDA takes that, and the next launch fails far away. */
static bool allow_shared(const void *function, int bytes)
{
    (void)load(function);
    std::unique_lock<std::shared_mutex> hold(loaded_lock);
    int &allowed = loaded.at(here(function)).shared;
    if (bytes < allowed)
        return false;
    allowed = bytes;
    return true;
}

static void prefer_carveout(const void *function, int percent)
{
    (void)load(function);
    std::unique_lock<std::shared_mutex> hold(loaded_lock);
    loaded.at(here(function)).carveout = percent;
}

/* ---- how often each kernel was launched ---- */

struct Launched {
    const char *name;
    std::atomic<uint64_t> count{0};
};
static std::mutex launched_lock;
static auto &launched = *new std::map<const void *, Launched>;

static Launched *launched_of(const kvf_emu_kernel &kernel)
{
    std::lock_guard<std::mutex> hold(launched_lock);
    Launched *found = &launched[kernel.function];
    found->name = kernel.name;
    return found;
}

void forget_launches()
{
    std::lock_guard<std::mutex> hold(launched_lock);
    for (auto &one : launched)
        one.second.count.store(0, std::memory_order_relaxed);
}

} // namespace emu

using emu::fail;

extern "C" {

/* ---- devices ---- */

cudaError_t cudaGetDeviceCount(int *count)
{
    if (count != nullptr)
        *count = 0;
    EMU_ENTER(0);
    if (count == nullptr)
        return fail(cudaErrorInvalidValue);
    *count = (int)emu::config().devices;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device)
{
    EMU_ENTER(0);
    if (!emu::is_device(device))
        return fail(cudaErrorInvalidDevice);
    emu::device_of_thread = emu::context_of_thread = device;
    return cudaSuccess;
}

cudaError_t cudaGetDevice(int *device)
{
    EMU_ENTER(0);
    if (device == nullptr)
        return fail(cudaErrorInvalidValue);
    const int context = emu::context_of_thread;
    *device = context == emu::NO_CONTEXT ? emu::device_of_thread : context;
    return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device)
{
    EMU_ENTER(0);
    if (properties == nullptr || !emu::is_device(device))
        return fail(properties == nullptr ? cudaErrorInvalidValue : cudaErrorInvalidDevice);
    emu::fill_properties(properties, device);
    return cudaSuccess;
}

/* An attribute that is not in the table is refused rather than guessed. */
cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device)
{
    EMU_ENTER(0);
    if (value == nullptr || !emu::is_device(device))
        return fail(value == nullptr ? cudaErrorInvalidValue : cudaErrorInvalidDevice);
    cudaDeviceProp properties;
    emu::fill_properties(&properties, device);
    return emu::attribute_of(properties, attribute, value) ? cudaSuccess
                                                           : fail(cudaErrorInvalidValue);
}

cudaError_t cudaDeviceGetPCIBusId(char *text, int bytes, int device)
{
    EMU_ENTER(0);
    if (text == nullptr || bytes <= 0 || !emu::is_device(device))
        return fail(text == nullptr || bytes <= 0 ? cudaErrorInvalidValue : cudaErrorInvalidDevice);
    unsigned domain, bus, slot;
    emu::pci_address(device, &domain, &bus, &slot);
    int n = snprintf(text, (size_t)bytes, "%04X:%02X:%02X.0", domain, bus, slot);
    return n < bytes ? cudaSuccess : fail(cudaErrorInvalidValue);
}

cudaError_t cudaDriverGetVersion(int *version)
{
    EMU_ENTER(emu::ENTRY_NO_DEVICE);
    if (version == nullptr)
        return fail(cudaErrorInvalidValue);
    *version = (int)emu::config().driver_version;
    return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *version)
{
    EMU_ENTER(emu::ENTRY_NO_DEVICE);
    if (version == nullptr)
        return fail(cudaErrorInvalidValue);
    *version = CUDART_VERSION;
    return cudaSuccess;
}

/* ---- functions ---- */

cudaError_t cudaFuncSetAttribute(const void *function, enum cudaFuncAttribute attribute, int value)
{
    EMU_ENTER(0);
    if (function == nullptr)
        return fail(cudaErrorInvalidDeviceFunction);
    bool is_known = attribute == cudaFuncAttributeMaxDynamicSharedMemorySize ||
                    attribute == cudaFuncAttributePreferredSharedMemoryCarveout;
    if (!is_known || value < -1)
        return fail(cudaErrorInvalidValue);
    if (attribute == cudaFuncAttributeMaxDynamicSharedMemorySize &&
        (value > emu::limits().shared_optin * 1024 || !emu::allow_shared(function, value)))
        return fail(cudaErrorInvalidValue);
    if (attribute == cudaFuncAttributePreferredSharedMemoryCarveout)
        emu::prefer_carveout(function, value);
    return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *out, const void *function)
{
    EMU_ENTER(0);
    if (out == nullptr || function == nullptr)
        return fail(out == nullptr ? cudaErrorInvalidValue : cudaErrorInvalidDeviceFunction);
    (void)emu::load(function);
    *out = {};
    out->maxThreadsPerBlock = 1024;
    out->maxDynamicSharedSizeBytes = emu::found(function).shared;
    out->preferredShmemCarveout = emu::found(function).carveout;
    out->numRegs = 64;
    out->binaryVersion = out->ptxVersion = (int)emu::config().compute_major * 10;
    return cudaSuccess;
}

/* ---- errors; these are not counted and never fail ---- */

cudaError_t cudaGetLastError(void)
{
    return emu::pending_error(true);
}

cudaError_t cudaPeekAtLastError(void)
{
    return emu::pending_error(false);
}

static const struct {
    cudaError_t error;
    const char *name, *text;
} ERRORS[] = {
#define EMU_ERROR(error, text)                                                                     \
    {                                                                                              \
        error, #error, text                                                                        \
    }
    EMU_ERROR(cudaSuccess, "no error"),
    EMU_ERROR(cudaErrorInvalidValue, "invalid argument"),
    EMU_ERROR(cudaErrorMemoryAllocation, "out of memory"),
    EMU_ERROR(cudaErrorInitializationError, "initialization error"),
    EMU_ERROR(cudaErrorInvalidConfiguration, "invalid configuration argument"),
    EMU_ERROR(cudaErrorInvalidMemcpyDirection, "invalid copy direction for memcpy"),
    EMU_ERROR(cudaErrorInsufficientDriver,
              "CUDA driver version is insufficient for CUDA runtime version"),
    EMU_ERROR(cudaErrorCallRequiresNewerDriver, "API call is not supported in the installed "
                                                "CUDA driver"),
    EMU_ERROR(cudaErrorDevicesUnavailable, "CUDA-capable device(s) is/are busy or unavailable"),
    EMU_ERROR(cudaErrorInvalidDeviceFunction, "invalid device function"),
    EMU_ERROR(cudaErrorNoDevice, "no CUDA-capable device is detected"),
    EMU_ERROR(cudaErrorInvalidDevice, "invalid device ordinal"),
    EMU_ERROR(cudaErrorNoKernelImageForDevice,
              "no kernel image is available for execution on the device"),
    EMU_ERROR(cudaErrorECCUncorrectable, "uncorrectable ECC error encountered"),
    EMU_ERROR(cudaErrorInvalidResourceHandle, "invalid resource handle"),
    EMU_ERROR(cudaErrorIllegalState, "the operation cannot be performed in the present state"),
    EMU_ERROR(cudaErrorSymbolNotFound, "named symbol not found"),
    EMU_ERROR(cudaErrorNotReady, "device not ready"),
    EMU_ERROR(cudaErrorIllegalAddress, "an illegal memory access was encountered"),
    EMU_ERROR(cudaErrorLaunchOutOfResources, "too many resources requested for launch"),
    EMU_ERROR(cudaErrorLaunchFailure, "unspecified launch failure"),
    EMU_ERROR(cudaErrorHostMemoryAlreadyRegistered,
              "part or all of the requested memory range is already mapped"),
    EMU_ERROR(cudaErrorHostMemoryNotRegistered,
              "pointer does not correspond to a registered memory region"),
    EMU_ERROR(cudaErrorNotPermitted, "operation not permitted"),
    EMU_ERROR(cudaErrorNotSupported, "operation not supported"),
    EMU_ERROR(cudaErrorSystemDriverMismatch,
              "system has unsupported display driver / cuda driver combination"),
    EMU_ERROR(cudaErrorStreamCaptureUnsupported,
              "operation not permitted when stream is capturing"),
    EMU_ERROR(cudaErrorStreamCaptureInvalidated,
              "operation failed due to a previous error during capture"),
    EMU_ERROR(cudaErrorStreamCaptureMerge,
              "operation would result in a merge of separate capture sequences"),
    EMU_ERROR(cudaErrorStreamCaptureUnmatched, "capture was not ended in the same stream as it "
                                               "began"),
    EMU_ERROR(cudaErrorStreamCaptureUnjoined, "capturing stream has unjoined work"),
    EMU_ERROR(cudaErrorStreamCaptureIsolation,
              "dependency created on uncaptured work in another stream"),
    EMU_ERROR(cudaErrorStreamCaptureImplicit,
              "operation would make the legacy stream depend on a capturing blocking stream"),
    EMU_ERROR(cudaErrorCapturedEvent,
              "operation not permitted on an event last recorded in a capturing stream"),
    EMU_ERROR(cudaErrorStreamCaptureWrongThread,
              "attempt to terminate a thread-local capture sequence from another thread"),
    EMU_ERROR(cudaErrorUnknown, "unknown error"),
#undef EMU_ERROR
};

const char *cudaGetErrorName(cudaError_t error)
{
    for (const auto &e : ERRORS)
        if (e.error == error)
            return e.name;
    return "unrecognized error code";
}

const char *cudaGetErrorString(cudaError_t error)
{
    for (const auto &e : ERRORS)
        if (e.error == error)
            return e.text;
    return "unrecognized error code";
}

} // extern "C"

/* ---- kernels ---- */

/* Entered under the name of the call that a launcher makes on a GPU. */
static cudaError_t launch(cudaStream_t stream, dim3 grid, dim3 block, size_t shared_bytes,
                          std::function<void()> body, const kvf_emu_kernel *kernel)
{
    static emu::EntryPoint entry_point("cudaLaunchKernelExC");
    cudaError_t error = emu::enter(entry_point, 0);
    if (error != cudaSuccess)
        return error;
    error = emu::check_stream(stream);
    if (error == cudaSuccess && stream->device != emu::current_device())
        error = cudaErrorInvalidResourceHandle;
    if (error != cudaSuccess)
        return fail(error);
    /* CUDA may wait for all work when it loads a kernel: also for what waits for this launch. */
    if (emu::load(kernel->function)) {
        emu::count(emu::counts.late_loads);
        if (!emu::is_captured(stream))
            emu::drain_all(stream->device);
    }
    const emu::Loaded found = emu::found(kernel->function);
    if (shared_bytes > (size_t)found.shared)
        return cudaErrorInvalidValue; /* as kvf_emu_check_launch */
    const kvf_emu_kernel what = *kernel;
    emu::Launched *launched = emu::launched_of(what);
    auto run = [=] {
        emu::count(emu::counts.launches);
        emu::count(launched->count);
        if (what.starts_early)
            emu::count(emu::counts.early_starts);
        if (emu::carveout_of_last.exchange(found.carveout) != found.carveout ||
            found.carveout == cudaSharedmemCarveoutDefault)
            emu::count(emu::counts.carveout_changes);
        kvf_emu_run_grid(grid, block, shared_bytes, body, what, emu::take_earlier());
    };
    error = emu::submit(stream, run, what.name, &what);
    return error == cudaSuccess ? error : fail(error);
}

uint64_t kvf_emu_launches_of(const char *pattern)
{
    uint64_t launches = 0;
    std::lock_guard<std::mutex> hold(emu::launched_lock);
    for (const auto &one : emu::launched)
        if (fnmatch(pattern, one.second.name, 0) == 0)
            launches += one.second.count.load(std::memory_order_relaxed);
    return launches;
}

int kvf_emu_enqueue(cudaStream_t stream, dim3 grid, dim3 block, size_t shared_bytes,
                    std::function<void()> body, const kvf_emu_kernel *kernel)
{
    return (int)launch(stream, grid, block, shared_bytes, std::move(body), kernel);
}
