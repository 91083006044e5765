/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The emulated runtime: memory, registration, devices, errors, counts, faults.
 *
 * That every call can fail, once or for good, and leaves nothing alive of a caller that gives back
 * what it has, is shown by the sweeps of test_cuda_errors.c.
 */

#include <sys/mman.h>
#include <unistd.h>

#include "runtime_rig.h"

/* ---- memory ---- */

TEST(test_bounds)
{
    cudaStream_t stream = rig_stream();
    char *memory = rig_memory(1000), host[1000], *end = memory + 1000;
    uint32_t poison;
    memset(host, 0, sizeof host);
    OK(cudaMemcpy(&poison, memory + 996, 4, cudaMemcpyDeviceToHost));
    assert_int_equal(poison, 0x7fe17fe1u);
    FAILS(cudaErrorInvalidValue,
          cudaMemcpyAsync(memory + 1, host, 1000, cudaMemcpyHostToDevice, stream));
    FAILS(cudaErrorInvalidValue,
          cudaMemcpyAsync(host, end - 10, 11, cudaMemcpyDeviceToHost, stream));
    FAILS(cudaErrorInvalidValue, cudaMemcpy(memory - 1, host, 10, cudaMemcpyHostToDevice));
    FAILS(cudaErrorInvalidValue, cudaMemsetAsync(memory, 0, 1001, stream));
    FAILS(cudaErrorInvalidValue, cudaMemsetAsync(host, 0, 10, stream));
    FAILS(cudaErrorInvalidValue, cudaMemcpyAsync(NULL, memory, 4, cudaMemcpyDefault, stream));
    FAILS(cudaErrorInvalidValue,
          cudaMemcpyAsync(memory, host, 4, cudaMemcpyDeviceToDevice, stream));
    OK(cudaMemcpyAsync(end, host, 0, cudaMemcpyHostToDevice, stream));
    assert_int_equal(rig_counts().pageable_copies, 0);
    OK(cudaMemcpyAsync(memory, host, 1000, cudaMemcpyHostToDevice, stream));
    assert_int_equal(rig_counts().pageable_copies, 1);
    host[0] = 1; /* the copy is over */
    OK(cudaMemsetAsync(memory, 9, 1000, stream));
    OK(cudaMemcpyAsync(host, memory, 1000, cudaMemcpyDeviceToHost, stream));
    assert_int_equal(host[0], 9);
    assert_int_equal(host[999], 9);
    FAILS(cudaErrorInvalidValue, cudaFree(host));
    FAILS(cudaErrorInvalidValue, cudaFree(memory + 8));
    OK(cudaFree(NULL));
}

TEST(test_limits)
{
    kvf_emu_config config = rig_config();
    config.memory_bytes = 10000;
    config.pinned_bytes = 8192;
    kvf_emu_set_config(&config);
    void *a, *b = NULL;
    size_t free_bytes, total;
    OK(cudaMalloc(&a, 6000));
    OK(cudaMemGetInfo(&free_bytes, &total));
    assert_int_equal(total, 10000);
    assert_int_equal(free_bytes, 4000);
    FAILS(cudaErrorMemoryAllocation, cudaMalloc(&b, 4001));
    assert_null(b);
    OK(cudaMalloc(&b, 0));
    assert_null(b);
    OK(cudaMalloc(&b, 4000));
    OK(cudaFree(b));
    OK(cudaFree(a));
    FAILS(cudaErrorMemoryAllocation, cudaMallocHost(&a, 8193));
    OK(cudaMallocHost(&a, 4096));
    char *host = malloc(8192);
    FAILS(cudaErrorMemoryAllocation, cudaHostRegister(host, 4097, cudaHostRegisterMapped));
    OK(cudaHostRegister(host, 4096, cudaHostRegisterMapped));
    OK(cudaHostUnregister(host));
    OK(cudaFreeHost(a));
    free(host);
}

TEST(test_registration)
{
    cudaStream_t stream = rig_stream();
    char *host = malloc(16384), *memory = rig_memory(16384);
    void *alias = NULL;
    const unsigned flags = cudaHostRegisterPortable | cudaHostRegisterMapped;
    FAILS(cudaErrorInvalidValue, cudaHostGetDevicePointer(&alias, host, 0));
    FAILS(cudaErrorInvalidValue, cudaHostRegister(host, 0, flags));
    FAILS(cudaErrorInvalidValue, cudaHostRegister(host, 4096, 64));
    OK(cudaHostRegister(host + 4096, 4096, flags));
    FAILS(cudaErrorHostMemoryAlreadyRegistered, cudaHostRegister(host + 4096, 4096, flags));
    FAILS(cudaErrorHostMemoryAlreadyRegistered, cudaHostRegister(host, 16384, flags));
    FAILS(cudaErrorHostMemoryAlreadyRegistered, cudaHostRegister(host + 8000, 4096, flags));
    FAILS(cudaErrorHostMemoryAlreadyRegistered, cudaHostRegister(host, 4097, flags));
    OK(cudaHostRegister(host + 8192, 4096, flags));
    assert_int_equal(rig_counts().registrations, 2);
    OK(cudaHostGetDevicePointer(&alias, host + 5000, 0));
    assert_non_null(alias);
    /* Registrations side by side are not one. */
    FAILS(cudaErrorInvalidValue,
          cudaMemcpyAsync(memory, host + 4096, 8192, cudaMemcpyDefault, stream));
    OK(cudaMemsetAsync(memory, 3, 4096, stream));
    OK(cudaMemcpyAsync(host + 8192, memory, 4096, cudaMemcpyDeviceToHost, stream));
    assert_int_equal(rig_counts().pageable_copies, 0);
    OK(cudaStreamSynchronize(stream));
    assert_int_equal(host[8192 + 4095], 3);
    FAILS(cudaErrorHostMemoryNotRegistered, cudaHostUnregister(host));
    FAILS(cudaErrorHostMemoryNotRegistered, cudaHostUnregister(host + 4097));
    FAILS(cudaErrorHostMemoryNotRegistered, cudaHostUnregister(memory));
    OK(cudaHostUnregister(host + 8192));
    OK(cudaHostUnregister(host + 4096));
    FAILS(cudaErrorHostMemoryNotRegistered, cudaHostUnregister(host + 4096));
    free(host);
}

/* A handler of faults that gives a page back is not asked by a driver. */
TEST(test_pages_that_are_away)
{
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    char *memory = rig_memory(2 * page);
    char *host = mmap(NULL, 3 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_true(host != MAP_FAILED);
    memset(host, 5, 3 * page);
    for (int i = 0; i < 3; i++) {
        const int protections[] = {PROT_NONE, PROT_READ, PROT_READ | PROT_WRITE};
        const cudaError_t no = cudaErrorInvalidValue;
        assert_int_equal(mprotect(host + page, page, protections[i]), 0);
        assert_int_equal(cudaMemcpy(memory, host + page - 4, 8, cudaMemcpyHostToDevice),
                         i ? cudaSuccess : no);
        assert_int_equal(
            cudaMemcpyAsync(memory, host + 2 * page - 4, 8, cudaMemcpyHostToDevice, rig_stream()),
            i ? cudaSuccess : no);
        assert_int_equal(cudaMemcpy(host + page - 4, memory, 8, cudaMemcpyDeviceToHost),
                         i > 1 ? cudaSuccess : no);
        OK(cudaMemcpy(memory, host, page, cudaMemcpyHostToDevice));
        OK(cudaMemcpy(host + 2 * page, memory, page, cudaMemcpyDeviceToHost));
    }
    munmap(host, 3 * page);
}

/* ---- devices and errors ---- */

TEST(test_devices)
{
    kvf_emu_config config;
    struct cudaDeviceProp properties;
    int value = -1;
    char address[16];
    kvf_emu_get_config(&config);
    config.devices = 2;
    config.compute_major = 8;
    config.compute_minor = 6;
    kvf_emu_set_config(&config);
    OK(cudaGetDeviceCount(&value));
    assert_int_equal(value, 2);
    OK(cudaGetDeviceProperties(&properties, 1));
    assert_string_equal(properties.name, "emulated GPU");
    assert_int_equal(properties.major, 8);
    assert_int_equal(properties.sharedMemPerBlockOptin, 99 * 1024);
    OK(cudaDeviceGetAttribute(&value, cudaDevAttrComputeCapabilityMinor, 0));
    assert_int_equal(value, 6);
    FAILS(cudaErrorInvalidDevice, cudaDeviceGetAttribute(&value, cudaDevAttrWarpSize, 2));
    OK(cudaDeviceGetPCIBusId(address, sizeof address, 1));
    assert_string_equal(address, "0000:66:00.0");
    FAILS(cudaErrorInvalidDevice, cudaSetDevice(2));
    OK(cudaSetDevice(1));
    cudaStream_t stream = rig_stream();
    cudaEvent_t event = rig_event();
    OK(cudaSetDevice(0));
    cudaEvent_t other = rig_event();
    OK(cudaEventRecord(event, stream));
    FAILS(cudaErrorInvalidResourceHandle, cudaEventRecord(other, stream));
    FAILS(cudaErrorInvalidResourceHandle, rig_mix(stream, NULL, NULL, 0, 1));
    rig_drop(NULL);
    config.devices = 0;
    kvf_emu_set_config(&config);
    FAILS(cudaErrorNoDevice, cudaGetDeviceCount(&value));
    assert_int_equal(value, 0);
    config.devices = 1;
    config.device_error = cudaErrorInsufficientDriver;
    config.driver_version = 11040;
    kvf_emu_set_config(&config);
    FAILS(cudaErrorInsufficientDriver, cudaGetDeviceCount(&value));
    OK(cudaDriverGetVersion(&value));
    assert_int_equal(value, 11040);
    OK(cudaRuntimeGetVersion(&value));
    assert_int_equal(value, CUDART_VERSION);
}

TEST(test_handles)
{
    cudaStream_t stream = rig_stream(), gone = rig_stream();
    cudaEvent_t event = rig_event();
    rig_drop(gone);
    FAILS(cudaErrorInvalidResourceHandle, cudaStreamSynchronize(gone));
    FAILS(cudaErrorInvalidResourceHandle, cudaStreamDestroy(gone));
    rig_drop(event);
    FAILS(cudaErrorInvalidResourceHandle, cudaEventRecord(event, stream));
    FAILS(cudaErrorInvalidResourceHandle, cudaEventDestroy(event));
    FAILS(cudaErrorInvalidValue, cudaGraphLaunch(NULL, stream));
    FAILS(cudaErrorInvalidValue, cudaGraphDestroy(NULL));
    assert_string_equal(cudaGetErrorName(cudaErrorMemoryAllocation), "cudaErrorMemoryAllocation");
    assert_string_equal(cudaGetErrorString(cudaErrorMemoryAllocation), "out of memory");
}

static void CUDART_CB set_flag(void *flag)
{
    __atomic_store_n((int *)flag, 1, __ATOMIC_RELEASE);
}

/* All later calls fail, waits end, host functions after the loss are dropped, and what is given
 * back is given back. */
TEST(test_lost_device)
{
    cudaStream_t stream = rig_stream();
    cudaEvent_t event = rig_event();
    uint32_t *word = rig_pinned(1);
    void *memory = rig_memory(64);
    int flag = 0;
    OK(rig_wait_word(stream, word, 1));
    OK(cudaLaunchHostFunc(stream, set_flag, &flag));
    OK(cudaEventRecord(event, stream));
    kvf_emu_lose_device(cudaErrorIllegalAddress);
    rig_set_word(word, 1); /* a kernel that runs goes on to its end */
    assert_int_equal(cudaStreamSynchronize(stream), cudaErrorIllegalAddress);
    assert_int_equal(cudaEventSynchronize(event), cudaErrorIllegalAddress);
    assert_int_equal(cudaMalloc(&memory, 4), cudaErrorIllegalAddress);
    assert_int_equal(cudaGetLastError(), cudaErrorIllegalAddress);
    assert_int_equal(cudaGetLastError(), cudaErrorIllegalAddress);
    assert_int_equal(cudaStreamDestroy(stream), cudaErrorIllegalAddress);
    assert_int_equal(cudaEventDestroy(event), cudaErrorIllegalAddress);
    assert_int_equal(cudaFree(memory), cudaErrorIllegalAddress);
    assert_int_equal(cudaFreeHost(word), cudaErrorIllegalAddress);
    assert_int_equal(__atomic_load_n(&flag, __ATOMIC_ACQUIRE), 0);
    assert_true(kvf_emu_is_clean());
    rig_count = 0;
    OK(cudaDeviceReset());
}

TEST(test_counts)
{
    const char *names[32];
    uint64_t calls[32];
    cudaStream_t stream = rig_stream();
    kvf_emu_reset();
    void *memory = rig_memory(64);
    OK(cudaMemsetAsync(memory, 0, 64, stream));
    OK(cudaMemsetAsync(memory, 1, 64, stream));
    assert_int_equal(rig_counts().waits, 0);
    OK(cudaStreamSynchronize(stream));
    assert_int_equal(rig_counts().waits, 1);
    assert_int_equal(rig_counts().calls, 4);
    assert_int_equal(kvf_emu_calls_of("cudaMemsetAsync"), 2);
    assert_int_equal(kvf_emu_called(names, calls, 32), 3);
}

/* ---- faults ---- */

TEST(test_fault_by_name)
{
    void *memory;
    kvf_emu_fail_call("cudaMalloc", 2, cudaErrorMemoryAllocation, 0);
    OK(cudaGetDevice(&(int){0}));
    OK(cudaMalloc(&memory, 4));
    FAILS(cudaErrorMemoryAllocation, cudaMalloc(&memory, 4));
    assert_string_equal(kvf_emu_failed_call(), "cudaMalloc");
    kvf_emu_fail_call("cudaFree", 1, cudaErrorUnknown, 0);
    FAILS(cudaErrorUnknown, cudaFree(memory));
}

EACH_TEST_RUNS_BETWEEN(rig_begin, rig_end)
