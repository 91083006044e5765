/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_COMMON_BASE_H
#define KVF_COMMON_BASE_H

/*
 * The floor that all folders stand on, clients included: assertions by level, small arithmetic,
 * compiler attributes, KVF_TRY. C, and C++ for CUDA sources, where the same small functions run on
 * the device. It is not installed; examples and the public headers do without it.
 *
 * A failed assertion is a programmer's error and stops the process; it is never used for bad input.
 * Level 0 is cheap and always on; level 1 is on in debug builds; level 2 walks whole structures
 * and is on with -Dassert_level=2. Assertions never turn into optimiser hints.
 */

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <kvferry/kvferry.h>

#ifndef KVF_ASSERT_LEVEL
#define KVF_ASSERT_LEVEL 0
#endif

#if defined(__CUDACC__)
#define KVF_INLINE static __host__ __device__ __forceinline__
#else
#define KVF_INLINE static inline
#endif

#if defined(__CUDA_ARCH__)
#define KVF_ASSERT(condition) ((condition) ? (void)0 : __trap())
#else
#define KVF_ASSERT(condition) ((condition) ? (void)0 : abort())
#endif
#define KVF_ASSERT_OFF(condition) ((void)sizeof((condition) ? 1 : 0))
#if KVF_ASSERT_LEVEL >= 1
#define KVF_ASSERT_DEBUG(condition) KVF_ASSERT(condition)
#else
#define KVF_ASSERT_DEBUG(condition) KVF_ASSERT_OFF(condition)
#endif
#if KVF_ASSERT_LEVEL >= 2
#define KVF_ASSERT_WALK(condition) KVF_ASSERT(condition)
#else
#define KVF_ASSERT_WALK(condition) KVF_ASSERT_OFF(condition)
#endif

#if defined(__GNUC__)
#define KVF_PRINTF(text, first) __attribute__((format(printf, text, first)))
#else
#define KVF_PRINTF(text, first)
#endif

/* Leave the function with the status of a call that failed. */
#define KVF_TRY(call)                                                                              \
    do {                                                                                           \
        kvf_status kvf_try_status_ = (call);                                                       \
        if (kvf_try_status_ != KVF_OK)                                                             \
            return kvf_try_status_;                                                                \
    } while (0)

KVF_INLINE uint32_t kvf_min_u32(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

KVF_INLINE uint32_t kvf_max_u32(uint32_t a, uint32_t b)
{
    return a > b ? a : b;
}

KVF_INLINE uint32_t kvf_div_ceil_u32(uint32_t a, uint32_t b)
{
    return a / b + (a % b != 0);
}

KVF_INLINE size_t kvf_round_up(size_t value, size_t step)
{
    return (value + step - 1) / step * step;
}

#endif
