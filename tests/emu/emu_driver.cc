/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The driver calls that the library looks up at run time, in the emulator.
 *
 * A name is found if the driver is new enough, in the form that the version asked for has. Errors
 * of the driver have the numbers of the runtime's.
 */

#include <algorithm>
#include <cuda.h>
#include <string.h>

#include "emu_state.h"

namespace emu
{
namespace
{

/* One entry point by name, for functions whose own name is not the driver's. */
#define EMU_ENTER_DRIVER(function)                                                                 \
    do {                                                                                           \
        static EntryPoint entry_point(function);                                                   \
        cudaError_t refused = enter(entry_point, 0);                                               \
        if (refused != cudaSuccess)                                                                \
            return (CUresult)refused;                                                              \
    } while (0)

CUresult batch(CUdeviceptr *to, CUdeviceptr *from, size_t *bytes, size_t n,
               CUmemcpyAttributes *attributes, size_t *indices, size_t attribute_count,
               CUstream stream)
{
    if (attributes == nullptr || attribute_count > n)
        return CUDA_ERROR_INVALID_VALUE;
    std::vector<cudaMemcpyAttributes> same(attribute_count);
    for (size_t i = 0; i < attribute_count; i++) {
        same[i].srcAccessOrder = (cudaMemcpySrcAccessOrder)attributes[i].srcAccessOrder;
        same[i].flags = attributes[i].flags;
    }
    return (CUresult)copy_batch((void *const *)to, (const void *const *)from, bytes, n, same.data(),
                                indices, attribute_count, stream);
}

/* The form of 12.8 to 12.9. */
CUresult CUDAAPI batch_v1(CUdeviceptr *to, CUdeviceptr *from, size_t *bytes, size_t n,
                          CUmemcpyAttributes *attributes, size_t *indices, size_t attribute_count,
                          size_t *fail_index, CUstream stream)
{
    EMU_ENTER_DRIVER("cuMemcpyBatchAsync");
    CUresult result = batch(to, from, bytes, n, attributes, indices, attribute_count, stream);
    if (result != CUDA_SUCCESS && fail_index != nullptr)
        *fail_index = SIZE_MAX;
    return result;
}

CUresult CUDAAPI batch_v2(CUdeviceptr *to, CUdeviceptr *from, size_t *bytes, size_t n,
                          CUmemcpyAttributes *attributes, size_t *indices, size_t attribute_count,
                          CUstream stream)
{
    EMU_ENTER_DRIVER("cuMemcpyBatchAsync");
    return batch(to, from, bytes, n, attributes, indices, attribute_count, stream);
}

CUresult CUDAAPI device_get(CUdevice *device, int ordinal)
{
    EMU_ENTER_DRIVER("cuDeviceGet");
    if (device == nullptr)
        return CUDA_ERROR_INVALID_VALUE;
    if (ordinal < 0 || (uint32_t)ordinal >= config().devices)
        return CUDA_ERROR_INVALID_DEVICE;
    *device = ordinal;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI device_uuid(CUuuid *uuid, CUdevice device)
{
    EMU_ENTER_DRIVER("cuDeviceGetUuid");
    cudaDeviceProp properties;
    cudaError_t error = cudaGetDeviceProperties(&properties, device);
    if (error == cudaSuccess)
        memcpy(uuid, &properties.uuid, sizeof *uuid);
    return (CUresult)error;
}

CUresult CUDAAPI device_attribute(int *value, CUdevice_attribute attribute, CUdevice device)
{
    EMU_ENTER_DRIVER("cuDeviceGetAttribute");
    if (attribute == CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_WAIT_VALUE_NOR) {
        *value = 1;
        return CUDA_SUCCESS;
    }
    if (attribute == CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES) {
        *value = 0;
        return CUDA_SUCCESS;
    }
    return (CUresult)cudaDeviceGetAttribute(value, (cudaDeviceAttr)attribute, device);
}

/* ---- contexts: of each device the primary one alone ---- */

char primary[64];

CUresult CUDAAPI primary_retain(CUcontext *context, CUdevice device)
{
    EMU_ENTER_DRIVER("cuDevicePrimaryCtxRetain");
    if (device < 0 || (uint32_t)device >= std::min((uint32_t)sizeof primary, config().devices))
        return CUDA_ERROR_INVALID_DEVICE;
    count(counts.contexts);
    *context = (CUcontext)&primary[device];
    return CUDA_SUCCESS;
}

CUresult CUDAAPI primary_release(CUdevice device)
{
    (void)device;
    static EntryPoint entry_point("cuDevicePrimaryCtxRelease");
    const CUresult outcome = (CUresult)enter(entry_point, 0);
    uncount(counts.contexts);
    return outcome;
}

CUresult CUDAAPI context_get(CUcontext *context)
{
    EMU_ENTER_DRIVER("cuCtxGetCurrent");
    const int device = current_context();
    *context = device < 0 ? nullptr : (CUcontext)&primary[device];
    return CUDA_SUCCESS;
}

CUresult CUDAAPI context_set(CUcontext context)
{
    EMU_ENTER_DRIVER("cuCtxSetCurrent");
    set_context(context == nullptr ? -1 : (int)((char *)context - primary));
    return CUDA_SUCCESS;
}

CUresult CUDAAPI driver_version(int *version)
{
    return (CUresult)cudaDriverGetVersion(version);
}

struct Symbol {
    const char *name;
    unsigned since;
    void *function;
};

const Symbol SYMBOLS[] = {{"cuMemcpyBatchAsync", 12080, (void *)batch_v1},
                          {"cuMemcpyBatchAsync", 13000, (void *)batch_v2},
                          {"cuMemcpyBatchAsync_v2", 13000, (void *)batch_v2},
                          {"cuDeviceGet", 2000, (void *)device_get},
                          {"cuDeviceGetUuid", 9020, (void *)device_uuid},
                          {"cuDeviceGetUuid_v2", 11040, (void *)device_uuid},
                          {"cuDeviceGetAttribute", 2000, (void *)device_attribute},
                          {"cuDevicePrimaryCtxRetain", 7000, (void *)primary_retain},
                          {"cuDevicePrimaryCtxRelease", 11000, (void *)primary_release},
                          {"cuCtxGetCurrent", 4000, (void *)context_get},
                          {"cuCtxSetCurrent", 4000, (void *)context_set},
                          {"cuDriverGetVersion", 2000, (void *)driver_version}};

/* The newest form that both the version asked for and the driver have. */
cudaError_t look_up(const char *name, void **function, unsigned version,
                    cudaDriverEntryPointQueryResult *result)
{
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    *function = nullptr;
    for (const Symbol &s : SYMBOLS) {
        if (strcmp(s.name, name) != 0)
            continue;
        if (s.since <= version && s.since <= config().driver_version) {
            *function = s.function;
            found = cudaDriverEntryPointSuccess;
        } else if (*function == nullptr) {
            found = cudaDriverEntryPointVersionNotSufficent;
        }
    }
    if (result != nullptr)
        *result = found;
    return *function != nullptr || result != nullptr ? cudaSuccess : cudaErrorSymbolNotFound;
}

} // namespace
} // namespace emu

extern "C" {

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                             unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *result)
{
    EMU_ENTER(0);
    if (name == nullptr || function == nullptr || flags > cudaEnablePerThreadDefaultStream)
        return emu::fail(cudaErrorInvalidValue);
    cudaError_t error = emu::look_up(name, function, version, result);
    return error == cudaSuccess ? error : emu::fail(error);
}

} // extern "C"
