/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Errors of CUDA in the words of this library: the one place where a cudaError_t becomes a
 * kvf_status and a text with the fix.
 *
 * Knows nothing of what was tried beyond the words that the caller gives. Invariant: after
 * kvf_cuda_failed the calling thread has no last error, unless the device is lost, which is then
 * written in device->lost and comes out of every later call.
 */

#include "cuda_device.h"

#include <stdio.h>

bool kvf_cuda_is_fatal(cudaError_t error)
{
    switch (error) {
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchTimeout:
    case cudaErrorAssert:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorLaunchFailure:
    case cudaErrorECCUncorrectable:
    case cudaErrorNvlinkUncorrectable:
    case cudaErrorContextIsDestroyed:
    case cudaErrorDeviceUninitialized:
    case cudaErrorUnknown:
        return true;
    default:
        return false;
    }
}

static kvf_status status_of(cudaError_t error)
{
    switch (error) {
    case cudaErrorMemoryAllocation:
        return KVF_OUT_OF_DEVICE_MEMORY;
    case cudaErrorHostMemoryAlreadyRegistered:
    case cudaErrorHostMemoryNotRegistered:
        return KVF_PIN_FAILED;
    case cudaErrorInvalidDevice:
    case cudaErrorInvalidValue:
    case cudaErrorInvalidResourceHandle:
        return KVF_INVALID;
    case cudaErrorNotSupported:
    case cudaErrorNoDevice:
    case cudaErrorInsufficientDriver:
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorUnsupportedPtxVersion:
    case cudaErrorStreamCaptureUnsupported:
    case cudaErrorStreamCaptureInvalidated:
    case cudaErrorStreamCaptureUnjoined:
    case cudaErrorStreamCaptureUnmatched:
    case cudaErrorStreamCaptureMerge:
    case cudaErrorStreamCaptureIsolation:
    case cudaErrorStreamCaptureImplicit:
    case cudaErrorStreamCaptureWrongThread:
    case cudaErrorCapturedEvent:
        return KVF_UNSUPPORTED;
    default:
        return KVF_DEVICE_FAILED;
    }
}

static const char *fix_of(cudaError_t error)
{
    switch (error) {
    case cudaErrorMemoryAllocation:
        return "; lower sequences_max, tokens_max, slots or budget_tokens, or free memory of the "
               "GPU "
               "(nvidia-smi shows who holds it)";
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorUnsupportedPtxVersion:
        return "; this build has no code for this GPU: build with -Dgpu_targets naming its compute "
               "capability, or update the driver";
    case cudaErrorInsufficientDriver:
        return "; update the NVIDIA driver, or build with an older CUDA toolkit";
    case cudaErrorDevicesUnavailable:
        return "; another process holds the GPU exclusively (nvidia-smi -q -d COMPUTE)";
    case cudaErrorStreamCaptureImplicit:
        return "; a stream that the default stream waits for is being recorded: record one that "
               "was made with cudaStreamNonBlocking";
    case cudaErrorStreamCaptureUnsupported:
    case cudaErrorStreamCaptureInvalidated:
    case cudaErrorStreamCaptureUnjoined:
    case cudaErrorStreamCaptureIsolation:
    case cudaErrorCapturedEvent:
        return "; work was enqueued that cannot be recorded, nothing was";
    case cudaErrorECCUncorrectable:
    case cudaErrorNvlinkUncorrectable:
        return "; the hardware reported it, see nvidia-smi and dmesg";
    default:
        return "";
    }
}

static kvf_status say_lost(kvf_cuda_device *device)
{
    const cudaError_t error = (cudaError_t)atomic_load(&device->lost);
    return kvf_fail(device->base.context, KVF_DEVICE_FAILED, (int)error,
                    "the CUDA device %d is lost since %s (%s); its memory is gone: close "
                    "everything and start the process again, compute-sanitizer finds the kernel",
                    device->ordinal, cudaGetErrorName(error), cudaGetErrorString(error));
}

kvf_status kvf_cuda_failed(kvf_cuda_device *device, cudaError_t error, const char *what)
{
    if (error == cudaSuccess)
        return KVF_OK;
    (void)cudaGetLastError();
    if (kvf_cuda_is_fatal(error)) {
        int none = 0;
        atomic_compare_exchange_strong(&device->lost, &none, (int)error);
    }
    if (atomic_load(&device->lost) != 0)
        return say_lost(device);
    return kvf_fail(device->base.context, status_of(error), (int)error, "%s: %s (%s)%s", what,
                    cudaGetErrorString(error), cudaGetErrorName(error), fix_of(error));
}

static cudaError_t make_current(const kvf_cuda_device *device, kvf_cuda_caller *before)
{
    void *context = device->context;
    *before = (kvf_cuda_caller){.context = context};
    int error = device->driver.context_get(&context);
    if (error == 0 && context != device->context)
        error = device->driver.context_set(device->context);
    if (error == 0)
        before->context = context;
    return (cudaError_t)error; /* the driver's codes are the runtime's numbers */
}

kvf_status kvf_cuda_enter(kvf_cuda_device *device, kvf_cuda_caller *before)
{
    if (atomic_load_explicit(&device->lost, memory_order_relaxed) != 0)
        return say_lost(device);
    return kvf_cuda_failed(device, make_current(device, before),
                           "the device could not be made current");
}

static cudaError_t relax(kvf_cuda_caller *before)
{
    before->mode = cudaStreamCaptureModeRelaxed;
    const cudaError_t error = cudaThreadExchangeStreamCaptureMode(&before->mode);
    before->is_relaxed = error == cudaSuccess;
    return error;
}

kvf_status kvf_cuda_enter_relaxed(kvf_cuda_device *device, kvf_cuda_caller *before)
{
    KVF_TRY(kvf_cuda_enter(device, before));
    const kvf_status status =
        kvf_cuda_failed(device, relax(before), "the mode of captures could not be set");
    if (status != KVF_OK)
        kvf_cuda_leave(device, *before);
    return status;
}

void kvf_cuda_enter_release(kvf_cuda_device *device, kvf_cuda_caller *before)
{
    if (make_current(device, before) != cudaSuccess)
        (void)cudaGetLastError();
    if (relax(before) != cudaSuccess)
        (void)cudaGetLastError();
}

void kvf_cuda_leave(const kvf_cuda_device *device, kvf_cuda_caller before)
{
    if (before.is_relaxed && cudaThreadExchangeStreamCaptureMode(&before.mode) != cudaSuccess)
        (void)cudaGetLastError();
    if (before.context != device->context && device->driver.context_set(before.context) != 0)
        (void)cudaGetLastError();
}

kvf_status kvf_cuda_leave_after(kvf_cuda_device *device, kvf_cuda_caller before, cudaError_t error,
                                const char *what)
{
    const kvf_status status = kvf_cuda_failed(device, error, what);
    kvf_cuda_leave(device, before);
    return status;
}

int kvf_cuda_count(char text[256])
{
    int count = 0, driver = 0;
    const cudaError_t error = cudaGetDeviceCount(&count);
    text[0] = '\0';
    if (error == cudaSuccess && count > 0)
        return count;
    (void)cudaGetLastError();
    if (cudaDriverGetVersion(&driver) != cudaSuccess) {
        (void)cudaGetLastError();
        driver = 0;
    }
    if (error == cudaErrorInsufficientDriver && driver == 0)
        snprintf(text, 256,
                 "there is no NVIDIA driver (libcuda.so.1); install one, or in a container "
                 "pass the GPU through (docker run --gpus all)");
    else if (error == cudaErrorInsufficientDriver)
        snprintf(text, 256,
                 "the NVIDIA driver supports CUDA %d.%d and this build uses %d.%d; update the "
                 "driver, or build with an older toolkit",
                 driver / 1000, driver % 1000 / 10, CUDART_VERSION / 1000,
                 CUDART_VERSION % 1000 / 10);
    else if (error == cudaErrorNoDevice || error == cudaSuccess)
        snprintf(text, 256,
                 "the NVIDIA driver shows this process no GPU; see nvidia-smi and "
                 "CUDA_VISIBLE_DEVICES");
    else
        snprintf(text, 256, "CUDA cannot start: %s (%s); see nvidia-smi", cudaGetErrorString(error),
                 cudaGetErrorName(error));
    return 0;
}
