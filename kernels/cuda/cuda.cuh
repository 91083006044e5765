/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_KERNELS_CUDA_CUDA_CUH
#define KVF_KERNELS_CUDA_CUDA_CUH

/*
 * The CUDA language as this project's kernels use it: launches, shared memory, and what only PTX
 * can say, each as a small inline function.
 *
 * Compiled by nvcc these are the instructions. Compiled by a C++ compiler with KVF_EMULATED they
 * come from tests/emu/emu.h, which runs a block's threads as fibers on the CPU; __syncthreads,
 * shuffles, votes and atomics have their CUDA names there. A kernel that includes this file and
 * nothing else of CUDA runs in both.
 *
 * Rules for kernels: shared memory comes from kvf_shared() (dynamic, the launch says how many
 * bytes); every launch goes through kvf_cuda_launch<kernel>() or its early form; no <<<>>>, no
 * textures, no device linking.
 */

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>
#include <stdint.h>

typedef __nv_bfloat16 kvf_bf16;
typedef __half kvf_half;

#define KVF_WARP_LANES 32u
#define KVF_FULL_WARP  0xffffffffu

/* ---- the kernels of a program or a library ---- */

#define KVF_CUDA_OWN __attribute__((visibility("hidden"))) /* of this binary alone */

/* One per kernel that some launch names, with what every device is told of it when it is loaded
 * there: all the shared memory that a block can get, and how a multiprocessor divides its memory
 * between L1 and shared memory. That is the same for all of them: a multiprocessor divides it anew
 * only when it is idle, so where two kernels differ the second starts late. */
struct KVF_CUDA_OWN kvf_cuda_entry {
    static const int carveout = cudaSharedmemCarveoutMaxShared;
    const void *kernel;
    const bool starts_early; /* launched by kvf_cuda_launch_early */
    const kvf_cuda_entry *next;
    kvf_cuda_entry(const void *function, bool is_early);
};

/* One list per binary. `head` is written before main() or at dlopen() only, by the constructors
 * below. `waiting` has a bit for every device that the list is loaded for with code that can wait
 * for an earlier kernel (a target of 9.0 or later), which is found by the first load; `shared` is
 * what a block can have of shared memory there; `refusals` counts who wants no early starts on a
 * device (kvf_cuda_refuse_early). */
struct KVF_CUDA_OWN kvf_cuda_list {
    static const int devices = 64; /* of one beyond nothing is kept, and nothing starts early */
    static inline const kvf_cuda_entry *head = nullptr;
    static inline uint64_t waiting = 0;
    static inline int shared[devices] = {};
    static inline int refusals[devices] = {};
};

inline kvf_cuda_entry::kvf_cuda_entry(const void *function, bool is_early)
    : kernel(function), starts_early(is_early), next(kvf_cuda_list::head)
{
    kvf_cuda_list::head = this;
}

template <auto function, bool is_early> struct KVF_CUDA_OWN kvf_cuda_listed {
    static inline const kvf_cuda_entry entry{(const void *)function, is_early};
};

/* The current device, or -1 where nothing is kept of it. */
static inline int kvf_cuda_kept_device(void)
{
    int device = 0;
    const cudaError_t status = cudaGetDevice(&device);
    if (status != cudaSuccess)
        (void)cudaGetLastError(); /* The next call will say it. */
    return status == cudaSuccess && device < kvf_cuda_list::devices ? device : -1;
}

/* Load one kernel on the current device, and let its blocks have all the shared memory there is:
 * never less than before, since other lists of the process may have the same kernel. */
static inline cudaError_t kvf_cuda_load(const kvf_cuda_entry *e, int shared_max, bool *can_wait)
{
    cudaFuncAttributes found;
    cudaError_t status = cudaFuncGetAttributes(&found, e->kernel);
    if (status != cudaSuccess)
        return status;
    *can_wait = *can_wait && (!e->starts_early || found.ptxVersion >= 90);
    const int dynamic = shared_max - (int)found.sharedSizeBytes;
    if (dynamic > found.maxDynamicSharedSizeBytes)
        status =
            cudaFuncSetAttribute(e->kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, dynamic);
    if (status == cudaSuccess)
        status = cudaFuncSetAttribute(e->kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                      kvf_cuda_entry::carveout);
    return status;
}

/* Load every kernel of the list on the current device. CUDA loads a kernel when it is first
 * launched, and may wait for the whole device then; after this it has nothing left to load. */
static inline cudaError_t kvf_cuda_load_list(void)
{
    int device = 0, shared_max = 0;
    bool can_wait = true;
    cudaError_t status = cudaGetDevice(&device);
    if (status == cudaSuccess)
        status =
            cudaDeviceGetAttribute(&shared_max, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    if (status == cudaSuccess && device < kvf_cuda_list::devices)
        __atomic_store_n(&kvf_cuda_list::shared[device], shared_max, __ATOMIC_RELAXED);
    for (const kvf_cuda_entry *e = kvf_cuda_list::head; e && status == cudaSuccess; e = e->next)
        status = kvf_cuda_load(e, shared_max, &can_wait);
    if (status != cudaSuccess)
        (void)cudaGetLastError();
    else if (can_wait && device < kvf_cuda_list::devices)
        __atomic_or_fetch(&kvf_cuda_list::waiting, UINT64_C(1) << device, __ATOMIC_RELAXED);
    return status;
}

/* Shared memory that a block can have on the current device; what every device has, where nothing
 * is kept of it. */
static inline size_t kvf_cuda_shared_max(void)
{
    const int device = kvf_cuda_kept_device();
    const int bytes =
        device < 0 ? 0 : __atomic_load_n(&kvf_cuda_list::shared[device], __ATOMIC_RELAXED);
    return bytes ? (size_t)bytes : 48u * 1024;
}

/* One more (1) or less (-1) that wants no kernel of this binary to start early on the current
 * device. While there is any, none does that is enqueued or recorded. */
static inline void kvf_cuda_refuse_early(int more)
{
    const int device = kvf_cuda_kept_device();
    if (device >= 0)
        __atomic_add_fetch(&kvf_cuda_list::refusals[device], more, __ATOMIC_RELAXED);
}

static inline bool kvf_cuda_takes_early(void)
{
    const int device = kvf_cuda_kept_device();
    return device >= 0 &&
           (__atomic_load_n(&kvf_cuda_list::waiting, __ATOMIC_RELAXED) >> device & 1) &&
           __atomic_load_n(&kvf_cuda_list::refusals[device], __ATOMIC_RELAXED) == 0;
}

static inline bool kvf_cuda_is_kernel(cudaGraphNode_t node)
{
    enum cudaGraphNodeType type = cudaGraphNodeTypeEmpty;
    if (cudaGraphNodeGetType(node, &type) != cudaSuccess)
        (void)cudaGetLastError(); /* The launch will say it. */
    return type == cudaGraphNodeTypeKernel;
}

/* May a kernel that comes next take its places before all is done that the stream has before it?
 * In a capture only after one kernel: CUDA documents edges of early starts between two kernels, and
 * nothing about one from a copy, nor about one beside ordinary edges of the same kernel. */
static inline bool kvf_cuda_may_start_early(cudaStream_t stream)
{
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    const cudaGraphNode_t *before = nullptr;
    const cudaGraphEdgeData *edges = nullptr;
    size_t count = 0;
    if (!kvf_cuda_takes_early())
        return false;
#if CUDART_VERSION >= 13000
    const cudaError_t status =
        cudaStreamGetCaptureInfo(stream, &capture, nullptr, nullptr, &before, &edges, &count);
#else
    const cudaError_t status =
        cudaStreamGetCaptureInfo_v3(stream, &capture, nullptr, nullptr, &before, &edges, &count);
#endif
    if (status != cudaSuccess)
        (void)cudaGetLastError(); /* The launch will say it. */
    return status == cudaSuccess && (capture == cudaStreamCaptureStatusNone || count == 0 ||
                                     (count == 1 && kvf_cuda_is_kernel(before[0])));
}

#if defined(KVF_EMULATED)

#include "emu.h"

#else

/* ---- launches ---- */

/* Static, so that kernel and arguments are checked against each other where the launch is. */
template <typename... P, typename... A>
static inline cudaError_t kvf_cuda_enqueue(const cudaLaunchConfig_t *config, void (*kernel)(P...),
                                           A... args)
{
    const cudaError_t status = cudaLaunchKernelEx(config, kernel, P(args)...);
    if (status != cudaSuccess)
        (void)cudaGetLastError();
    return status;
}

/* Enqueue kernel<<<grid, block, shared_bytes, stream>>>(args...). The device has loaded the kernel
 * (kvf_cuda_load_kernels), which allows it all the shared memory there is. Never leaves a sticky
 * error unread. */
template <auto kernel, typename... A>
static inline cudaError_t kvf_cuda_launch(dim3 grid, dim3 block, size_t shared_bytes,
                                          cudaStream_t stream, A... args)
{
    (void)&kvf_cuda_listed<kernel, false>::entry;
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    return kvf_cuda_enqueue(&config, kernel, args...);
}

/* The same for a kernel all of whose threads call kvf_wait_for_earlier, before they read or write
 * anything that a kernel writes: its blocks may take their places, and read what nobody writes,
 * while the kernel before it in the stream still runs. An ordinary launch where
 * kvf_cuda_may_start_early says no. */
template <auto kernel, typename... A>
static inline cudaError_t kvf_cuda_launch_early(dim3 grid, dim3 block, size_t shared_bytes,
                                                cudaStream_t stream, A... args)
{
    (void)&kvf_cuda_listed<kernel, true>::entry;
    cudaLaunchAttribute early = {};
    cudaLaunchConfig_t config = {};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    config.attrs = &early;
    config.numAttrs = kvf_cuda_may_start_early(stream);
    return kvf_cuda_enqueue(&config, kernel, args...);
}

/* Until all that the stream had before this kernel is done, and visible. Every thread calls it,
 * also one that has nothing to do: the wait is for the kernel before this one only, and stands for
 * all earlier ones because that kernel cannot have ended before its own wait did. */
static __device__ __forceinline__ void kvf_wait_for_earlier(void)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/* A kernel that may start early and comes next may take its places once every block was here, or
 * has ended. Before the wait or after it: who comes next waits for the end of this kernel. */
static __device__ __forceinline__ void kvf_let_next_start(void)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/* The block's dynamic shared memory, 128-byte aligned. */
static __device__ __forceinline__ char *kvf_shared(void)
{
    extern __shared__ __align__(128) char kvf_shared_memory[];
    return kvf_shared_memory;
}

static __device__ __forceinline__ uint32_t kvf_shared_address(const void *pointer)
{
    return (uint32_t)__cvta_generic_to_shared(pointer);
}

/* x, which the compiler does not know to be a constant: it keeps it in a register, where it would
 * otherwise move it to one before every use. */
static __device__ __forceinline__ uint32_t kvf_kept(uint32_t x)
{
    uint32_t lane;
    asm("mov.u32 %0, %%laneid;" : "=r"(lane));
    return x + lane / KVF_WARP_LANES;
}

/* ---- loads, stores, order ---- */

/* 16 bytes that nobody reads again soon: not kept in L1. Works on mapped host memory. */
static __device__ __forceinline__ uint4 kvf_load_once(const void *pointer)
{
    uint4 v;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(pointer)
                 : "memory");
    return v;
}

/* The line of `pointer` comes to L2; nobody waits for it. */
static __device__ __forceinline__ void kvf_prefetch(const void *pointer)
{
    asm volatile("prefetch.global.L2 [%0];" ::"l"(pointer));
}

static __device__ __forceinline__ void kvf_store_once(void *pointer, uint4 v)
{
    asm volatile("st.global.L1::no_allocate.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(pointer), "r"(v.x),
                 "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}

/* A word that other threads of the kernel change by atomics meanwhile. */
static __device__ __forceinline__ uint64_t kvf_load_relaxed(const uint64_t *word)
{
    uint64_t v;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(word) : "memory");
    return v;
}

static __device__ __forceinline__ uint32_t kvf_load_relaxed(const uint32_t *word)
{
    uint32_t v;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(word) : "memory");
    return v;
}

/* Adds to a word, returns what it was: who reads the sum of an addition sees what came before that
 * one, in this thread and, after a barrier, in its block. */
static __device__ __forceinline__ uint32_t kvf_add_in_order(uint32_t *word, uint32_t value)
{
    uint32_t before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;"
                 : "=r"(before)
                 : "l"(word), "r"(value)
                 : "memory");
    return before;
}

/* Words that host threads and other streams see. */
static __device__ __forceinline__ void kvf_store_release_system(uint32_t *word, uint32_t value)
{
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

/* Monotonic nanoseconds of the device. */
static __device__ __forceinline__ uint64_t kvf_device_ns(void)
{
    uint64_t ns;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
    return ns;
}

/* ---- asynchronous copies into shared memory, 16 bytes per thread, or 8 ---- */

/* `bytes` (0 .. 16) are read, the rest of the 16 become zero. */
static __device__ __forceinline__ void kvf_async_copy16(void *shared, const void *global,
                                                        uint32_t bytes = 16)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(kvf_shared_address(shared)),
                 "l"(global), "r"(bytes)
                 : "memory");
}

/* All 16 bytes, or nothing. */
static __device__ __forceinline__ void kvf_async_copy16_if(bool wanted, void *shared,
                                                           const void *global)
{
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.u32 p, %2, 0;\n"
        "@p cp.async.cg.shared.global [%0], [%1], 16;\n}" ::"r"(kvf_shared_address(shared)),
        "l"(global), "r"((uint32_t)wanted)
        : "memory");
}

/* 8 bytes. */
static __device__ __forceinline__ void kvf_async_copy8(void *shared, const void *global)
{
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(kvf_shared_address(shared)),
                 "l"(global)
                 : "memory");
}

static __device__ __forceinline__ void kvf_async_commit(void)
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/* Until at most N groups of this thread are on their way. */
template <int N> static __device__ __forceinline__ void kvf_async_wait(void)
{
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

/* ---- warp matrix products: D[16,8] += A[16,16] B[16,8] ----
 * Fragments as in PTX "mma.m16n8k16": lane = 4 * group + in_group. */

/* Four 8x8 tiles of 16-bit elements; lane i gives the address of line i % 8 of tile i / 8. */
static __device__ __forceinline__ void kvf_load_tiles4(uint32_t r[4], const void *line)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(kvf_shared_address(line))
                 : "memory");
}

/* The same, each tile transposed. */
static __device__ __forceinline__ void kvf_load_tiles4_transposed(uint32_t r[4], const void *line)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(kvf_shared_address(line))
                 : "memory");
}

static __device__ __forceinline__ void kvf_mma(float d[4], const uint32_t a[4], const uint32_t b[2],
                                               kvf_bf16)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

static __device__ __forceinline__ void kvf_mma(float d[4], const uint32_t a[4], const uint32_t b[2],
                                               kvf_half)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

/* D[16,8] += A[16,32] B[32,8] of signed bytes: fragments as in PTX "mma.m16n8k32", four bytes of
 * consecutive k per register. Exact. */
static __device__ __forceinline__ void kvf_mma_s8(int32_t d[4], const uint32_t a[4],
                                                  const uint32_t b[2])
{
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

#endif /* KVF_EMULATED */

/* ---- launchers ---- */

/* `args` as what the kernel takes. */
template <typename A> static inline const A *kvf_cuda_args(void (*)(A), const void *args)
{
    return (const A *)args;
}

/* kvf_<op>_cuda: one launch of `kernel`, which takes the arguments of the operation and no others.
 * Grid, threads and shared memory follow from these, `a`, and from `tasks`. */
#define KVF_LAUNCHER(op, kernel, grid, threads, shared_bytes)                                      \
    KVF_LAUNCHER_BY(kvf_cuda_launch<kernel>, op, kernel, grid, threads, shared_bytes)
#define KVF_LAUNCHER_EARLY(op, kernel, grid, threads, shared_bytes)                                \
    KVF_LAUNCHER_BY(kvf_cuda_launch_early<kernel>, op, kernel, grid, threads, shared_bytes)
#define KVF_LAUNCHER_BY(launch, op, kernel, grid, threads, shared_bytes)                           \
    extern "C" int kvf_##op##_cuda(const void *args, uint32_t tasks, void *stream)                 \
    {                                                                                              \
        const auto *a = kvf_cuda_args(kernel, args);                                               \
        (void)tasks;                                                                               \
        return launch(grid, dim3(threads), shared_bytes, (cudaStream_t)stream, *a);                \
    }

/* ---- small things in both ---- */

template <typename T> static __device__ __forceinline__ float kvf_to_float(T x);
template <> __device__ __forceinline__ float kvf_to_float<float>(float x)
{
    return x;
}
template <> __device__ __forceinline__ float kvf_to_float<kvf_bf16>(kvf_bf16 x)
{
    return __bfloat162float(x);
}
template <> __device__ __forceinline__ float kvf_to_float<kvf_half>(kvf_half x)
{
    return __half2float(x);
}

template <typename T> static __device__ __forceinline__ T kvf_from_float(float x);
template <> __device__ __forceinline__ float kvf_from_float<float>(float x)
{
    return x;
}
template <> __device__ __forceinline__ kvf_bf16 kvf_from_float<kvf_bf16>(float x)
{
    return __float2bfloat16_rn(x);
}
template <> __device__ __forceinline__ kvf_half kvf_from_float<kvf_half>(float x)
{
    return __float2half_rn(x);
}

/* ---- order between blocks ---- */

/* True in the block that comes last of `blocks`, which then sees what all of them wrote; it leaves
 * `arrived` at zero. `is_last` is shared memory. */
static __device__ __forceinline__ bool kvf_arrives_last(uint32_t *is_last, uint32_t *arrived,
                                                        uint32_t blocks)
{
    __syncthreads();
    if (threadIdx.x == 0) {
        *is_last = kvf_add_in_order(arrived, 1u) + 1 == blocks;
        if (*is_last)
            *arrived = 0;
    }
    __syncthreads();
    return *is_last != 0;
}

#endif
