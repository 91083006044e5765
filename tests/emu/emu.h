/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TESTS_EMU_EMU_H
#define KVF_TESTS_EMU_EMU_H

/*
 * The CUDA language for a C++ compiler: what nvcc provides by itself, and the functions of
 * kernels/cuda/cuda.cuh that are PTX there. Included by cuda.cuh under KVF_EMULATED, by nobody
 * else.
 *
 * Only the forms that kernels use: no textures, clusters, cooperative groups, no warpgroup
 * instructions. See README.md for what is modelled and what is not.
 */

#include <cuda_runtime_api.h>
#include <math.h>
#include <stdint.h>
#include <string.h>
#include <tuple>
#include <type_traits>
#include <typeinfo>
#include <vector_functions.h>

#include "common/clock.h"
#include "emu_block.h"
#include "emu_fiber.h"
#include "emu_launch.h"

#if defined(__clang__)
#pragma clang diagnostic ignored "-Wpass-failed" /* #pragma unroll is meant for nvcc */
#endif

/* ---- words of the language ---- */

#define __launch_bounds__(...)

/* One copy per OS thread, and so per block; kernels/cuda/cuda.cuh asks for kvf_shared() instead,
 * which is poisoned for every block and has its exact size. */
#undef __shared__
#define __shared__ static thread_local

#define threadIdx (kvf_emu_here.thread_index)
#define blockIdx  (kvf_emu_here.block_index)
#define blockDim  (kvf_emu_here.block_dim)
#define gridDim   (kvf_emu_here.grid_dim)
#define warpSize  32

/* ---- launches ---- */

/* Its words may be addresses. Bytes between fields hold whatever was there before: they must go
 * first, which not every compiler can do. */
template <typename T> static inline void kvf_emu_check_bytes(const kvf_emu_kernel *kernel, T arg)
{
#if defined(__has_builtin)
#if __has_builtin(__builtin_clear_padding)
    __builtin_clear_padding(&arg);
    kvf_emu_check_arg(kernel, &arg, sizeof arg);
#endif
#endif
    (void)kernel, (void)arg;
}

template <typename... P, typename... A>
static inline cudaError_t kvf_emu_launch(const char *text, bool starts_early, void (*kernel)(P...),
                                         dim3 grid, dim3 block, size_t shared_bytes,
                                         cudaStream_t stream, A... args)
{
    const cudaError_t status = kvf_emu_check_launch(grid, block, shared_bytes);
    if (status != cudaSuccess)
        return status;
    const kvf_emu_kernel what = {text, (const void *)kernel, starts_early};
    (kvf_emu_check_bytes<P>(&what, P(args)), ...);
    const auto packed = std::tuple<P...>(P(args)...);
    return (cudaError_t)kvf_emu_enqueue(
        stream, grid, block, shared_bytes, [kernel, packed] { std::apply(kernel, packed); }, &what);
}

/* Its name as a type says it: __PRETTY_FUNCTION__ of Clang leaves out the arguments of templates.
 */
template <auto kernel> struct kvf_emu_tag {
};
template <auto kernel> static inline const char *kvf_emu_name(void)
{
    static const char *const name = kvf_emu_name_of(typeid(kvf_emu_tag<kernel>));
    return name;
}

template <auto kernel, typename... A>
static inline cudaError_t kvf_cuda_launch(dim3 grid, dim3 block, size_t shared_bytes,
                                          cudaStream_t stream, A... args)
{
    (void)&kvf_cuda_listed<kernel, false>::entry;
    return kvf_emu_launch(kvf_emu_name<kernel>(), false, +kernel, grid, block, shared_bytes, stream,
                          args...);
}

template <auto kernel, typename... A>
static inline cudaError_t kvf_cuda_launch_early(dim3 grid, dim3 block, size_t shared_bytes,
                                                cudaStream_t stream, A... args)
{
    (void)&kvf_cuda_listed<kernel, true>::entry;
    return kvf_emu_launch(kvf_emu_name<kernel>(), kvf_cuda_may_start_early(stream), +kernel, grid,
                          block, shared_bytes, stream, args...);
}

static inline void kvf_wait_for_earlier(void)
{
    kvf_emu_wait_for_earlier();
}

static inline void kvf_let_next_start(void)
{
}

static inline char *kvf_shared(void)
{
    return kvf_emu_here.shared;
}

static inline uint32_t kvf_shared_address(const void *pointer)
{
    return (uint32_t)((const char *)pointer - kvf_emu_here.shared);
}

/* ---- barriers ---- */

static inline void __syncthreads(void)
{
    kvf_emu_barrier(KVF_EMU_BARRIER_PLAIN, 0);
}

static inline int __syncthreads_or(int predicate)
{
    return kvf_emu_barrier(KVF_EMU_BARRIER_OR, predicate);
}

static inline void __syncwarp(unsigned mask = 0xffffffffu)
{
    kvf_emu_warp_meet(&kvf_emu_syncwarp_op, mask, NULL);
}

/* TSan knows no fences: there, every fence orders after the one before. */
static inline void kvf_emu_fence(void)
{
#if KVF_TSAN
    __atomic_fetch_add(&kvf_emu_fence_word, 1, __ATOMIC_SEQ_CST);
#else
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
#endif
}

static inline void __threadfence(void)
{
    kvf_emu_fence();
}

static inline void __threadfence_system(void)
{
    kvf_emu_fence();
}

static inline void __nanosleep(unsigned)
{
    kvf_emu_yield();
}

[[noreturn]] static inline void __trap(void)
{
    kvf_emu_fail("__trap");
}

/* ---- warps ---- */

template <typename T>
static inline T kvf_emu_shuffle_from(const kvf_emu_warp_op *op, unsigned mask, T value,
                                     uint32_t source)
{
    static_assert(sizeof(T) <= 8 && std::is_trivially_copyable<T>::value, "a register or two");
    kvf_emu_shuffle s = {0, source};
    memcpy(&s.value, (const void *)&value, sizeof(T));
    kvf_emu_warp_meet(op, mask, &s);
    memcpy((void *)&value, &s.value, sizeof(T));
    return value;
}

static inline void kvf_emu_check_width(int width)
{
    if (width <= 0 || width > 32 || (width & (width - 1)) != 0)
        kvf_emu_fail("a shuffle of width %d", width);
}

template <typename T>
static inline T __shfl_sync(unsigned mask, T value, int source, int width = 32)
{
    kvf_emu_check_width(width);
    const uint32_t lane = kvf_emu_lane(), w = (uint32_t)width;
    return kvf_emu_shuffle_from(&kvf_emu_shuffle_op, mask, value,
                                (lane & ~(w - 1)) | ((uint32_t)source & (w - 1)));
}

template <typename T>
static inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32)
{
    kvf_emu_check_width(width);
    const uint32_t lane = kvf_emu_lane(), place = lane & ((uint32_t)width - 1);
    return kvf_emu_shuffle_from(&kvf_emu_shuffle_up_op, mask, value,
                                delta <= place ? lane - delta : lane);
}

/* A partner in an earlier segment is allowed, in a later one it is not. */
template <typename T>
static inline T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32)
{
    kvf_emu_check_width(width);
    const uint32_t lane = kvf_emu_lane(), source = lane ^ ((uint32_t)lanes & 31u);
    return kvf_emu_shuffle_from(&kvf_emu_shuffle_xor_op, mask, value,
                                source <= (lane | ((uint32_t)width - 1)) ? source : lane);
}

static inline unsigned kvf_emu_vote_on(const kvf_emu_warp_op *op, unsigned mask, uint64_t value)
{
    kvf_emu_vote v = {value, 0};
    kvf_emu_warp_meet(op, mask, &v);
    return v.answer;
}

static inline unsigned __ballot_sync(unsigned mask, int predicate)
{
    return kvf_emu_vote_on(&kvf_emu_ballot_op, mask, predicate != 0);
}

static inline int __any_sync(unsigned mask, int predicate)
{
    return __ballot_sync(mask, predicate) != 0;
}

static inline unsigned __reduce_add_sync(unsigned mask, unsigned value)
{
    return kvf_emu_vote_on(&kvf_emu_reduce_add_op, mask, value);
}

static inline unsigned __reduce_min_sync(unsigned mask, unsigned value)
{
    return kvf_emu_vote_on(&kvf_emu_reduce_min_op, mask, value);
}

static inline unsigned __reduce_max_sync(unsigned mask, unsigned value)
{
    return kvf_emu_vote_on(&kvf_emu_reduce_max_op, mask, value);
}

#include "emu_scalar.h"

/* ---- loads, stores, order ---- */

static inline uint32_t kvf_kept(uint32_t x)
{
    return x;
}

static inline uint4 kvf_load_once(const void *pointer)
{
    kvf_emu_check_aligned("kvf_load_once", pointer, 16);
    kvf_emu_check_global("kvf_load_once", pointer);
    uint4 v;
    memcpy(&v, pointer, sizeof(v));
    return v;
}

static inline void kvf_prefetch(const void *pointer)
{
    kvf_emu_check_global("kvf_prefetch", pointer);
}

static inline void kvf_store_once(void *pointer, uint4 v)
{
    kvf_emu_check_aligned("kvf_store_once", pointer, 16);
    kvf_emu_check_global("kvf_store_once", pointer);
    memcpy(pointer, &v, sizeof(v));
}

static inline uint64_t kvf_load_relaxed(const uint64_t *word)
{
    return __atomic_load_n(word, __ATOMIC_RELAXED);
}

static inline uint32_t kvf_load_relaxed(const uint32_t *word)
{
    return __atomic_load_n(word, __ATOMIC_RELAXED);
}

static inline uint32_t kvf_add_in_order(uint32_t *word, uint32_t value)
{
    return __atomic_fetch_add(word, value, __ATOMIC_ACQ_REL);
}

/* A thread that polls lets the others run. */
static inline uint32_t kvf_load_acquire_system(const uint32_t *word)
{
    kvf_emu_yield();
    return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}

static inline void kvf_store_release_system(uint32_t *word, uint32_t value)
{
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
}

static inline uint64_t kvf_device_ns(void)
{
    return kvf_now_ns();
}

/* ---- asynchronous copies ---- */

static inline void kvf_async_copy16(void *shared, const void *global, uint32_t bytes = 16)
{
    kvf_emu_async_copy(shared, global, bytes, 16);
}

static inline void kvf_async_copy16_if(bool wanted, void *shared, const void *global)
{
    if (wanted)
        kvf_emu_async_copy(shared, global, 16, 16);
}

static inline void kvf_async_copy8(void *shared, const void *global)
{
    kvf_emu_async_copy(shared, global, 8, 8);
}

static inline void kvf_async_commit(void)
{
    kvf_emu_async_commit();
}

template <int N> static inline void kvf_async_wait(void)
{
    kvf_emu_async_wait((uint32_t)N);
}

/* ---- warp matrix products ---- */

static inline void kvf_emu_load_tiles(const kvf_emu_warp_op *op, uint32_t r[4], const void *row)
{
    kvf_emu_tiles tiles;
    kvf_emu_check_shared(op->name, row, 16, 16);
    tiles.registers = r;
    memcpy(tiles.row, row, sizeof(tiles.row));
    kvf_emu_warp_meet(op, 0xffffffffu, &tiles);
}

static inline void kvf_load_tiles4(uint32_t r[4], const void *row)
{
    kvf_emu_load_tiles(&kvf_emu_tiles_op, r, row);
}

static inline void kvf_load_tiles4_transposed(uint32_t r[4], const void *row)
{
    kvf_emu_load_tiles(&kvf_emu_tiles_transposed_op, r, row);
}

static inline void kvf_mma(float d[4], const uint32_t a[4], const uint32_t b[2], kvf_bf16)
{
    kvf_emu_product product = {d, a, b};
    kvf_emu_warp_meet(&kvf_emu_mma_bf16_op, 0xffffffffu, &product);
}

static inline void kvf_mma(float d[4], const uint32_t a[4], const uint32_t b[2], kvf_half)
{
    kvf_emu_product product = {d, a, b};
    kvf_emu_warp_meet(&kvf_emu_mma_half_op, 0xffffffffu, &product);
}

static inline void kvf_mma_s8(int32_t d[4], const uint32_t a[4], const uint32_t b[2])
{
    kvf_emu_byte_product product = {d, a, b};
    kvf_emu_warp_meet(&kvf_emu_mma_s8_op, 0xffffffffu, &product);
}

#endif
