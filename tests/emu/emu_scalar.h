/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TESTS_EMU_EMU_SCALAR_H
#define KVF_TESTS_EMU_EMU_SCALAR_H

/*
 * Operations that one CUDA thread can do alone: bits, arithmetic, atomics. Included by emu.h.
 *
 * Only what kernels use is here. Atomics are sequentially consistent.
 */

/* ---- bits ---- */

static inline int __popc(unsigned x)
{
    return __builtin_popcount(x);
}

static inline int __popcll(unsigned long long x)
{
    return __builtin_popcountll(x);
}

static inline int __ffs(int x)
{
    return __builtin_ffs(x);
}

static inline int __ffsll(long long x)
{
    return __builtin_ffsll(x);
}

static inline int __clz(int x)
{
    return x == 0 ? 32 : __builtin_clz((unsigned)x);
}

static inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector)
{
    const uint64_t both = (uint64_t)y << 32 | x;
    unsigned r = 0;
    for (unsigned i = 0; i < 4; i++) {
        const unsigned s = selector >> 4 * i & 0xfu;
        unsigned byte = (unsigned)(both >> 8 * (s & 7u)) & 0xffu;
        if (s & 8u)
            byte = byte & 0x80u ? 0xffu : 0;
        r |= byte << 8 * i;
    }
    return r;
}

/* ---- arithmetic ---- */

static inline float __fdiv_rn(float x, float y)
{
    return x / y;
}

static inline float __fsqrt_rn(float x)
{
    return sqrtf(x);
}

static inline float __fadd_rn(float x, float y)
{
    return x + y;
}

static inline float __fsub_rn(float x, float y)
{
    return x - y;
}

static inline float __fmul_rn(float x, float y)
{
    return x * y;
}

/* min and max as CUDA has them in the global namespace. */
#define KVF_EMU_MIN_MAX(type)                                                                      \
    static inline type min(type a, type b)                                                         \
    {                                                                                              \
        return a < b ? a : b;                                                                      \
    }                                                                                              \
    static inline type max(type a, type b)                                                         \
    {                                                                                              \
        return a > b ? a : b;                                                                      \
    }
KVF_EMU_MIN_MAX(int)
KVF_EMU_MIN_MAX(unsigned)
KVF_EMU_MIN_MAX(long)
KVF_EMU_MIN_MAX(unsigned long)
KVF_EMU_MIN_MAX(long long)
KVF_EMU_MIN_MAX(unsigned long long)
#undef KVF_EMU_MIN_MAX

static inline float min(float a, float b)
{
    return fminf(a, b);
}

static inline float max(float a, float b)
{
    return fmaxf(a, b);
}

static inline double min(double a, double b)
{
    return fmin(a, b);
}

static inline double max(double a, double b)
{
    return fmax(a, b);
}

/* ---- atomics ---- */

#define KVF_EMU_ATOMIC(type, name, call)                                                           \
    static inline type name(type *address, type value)                                             \
    {                                                                                              \
        return call(address, value, __ATOMIC_SEQ_CST);                                             \
    }
#define KVF_EMU_ATOMICS(type)                                                                      \
    KVF_EMU_ATOMIC(type, atomicAdd, __atomic_fetch_add)                                            \
    KVF_EMU_ATOMIC(type, atomicAnd, __atomic_fetch_and)                                            \
    KVF_EMU_ATOMIC(type, atomicOr, __atomic_fetch_or)                                              \
    KVF_EMU_ATOMIC(type, atomicXor, __atomic_fetch_xor)                                            \
    KVF_EMU_ATOMIC(type, atomicExch, __atomic_exchange_n)
KVF_EMU_ATOMICS(int)
KVF_EMU_ATOMICS(unsigned)
KVF_EMU_ATOMICS(unsigned long long)
KVF_EMU_ATOMIC(int, atomicSub, __atomic_fetch_sub)
KVF_EMU_ATOMIC(unsigned, atomicSub, __atomic_fetch_sub)
#undef KVF_EMU_ATOMICS
#undef KVF_EMU_ATOMIC

/* A thread that loses lets the others run: it may be waiting for one of them. */
template <typename T> static inline T kvf_emu_compare_exchange(T *address, T expected, T value)
{
    if (!__atomic_compare_exchange_n(address, &expected, value, false, __ATOMIC_SEQ_CST,
                                     __ATOMIC_SEQ_CST))
        kvf_emu_yield();
    return expected;
}

static inline int atomicCAS(int *address, int expected, int value)
{
    return kvf_emu_compare_exchange(address, expected, value);
}

static inline unsigned atomicCAS(unsigned *address, unsigned expected, unsigned value)
{
    return kvf_emu_compare_exchange(address, expected, value);
}

static inline unsigned long long atomicCAS(unsigned long long *address, unsigned long long expected,
                                           unsigned long long value)
{
    return kvf_emu_compare_exchange(address, expected, value);
}

/* *address = change(*address), answering what was there. */
template <typename T, typename F> static inline T kvf_emu_atomic_update(T *address, F change)
{
    T old, next;
    __atomic_load(address, &old, __ATOMIC_RELAXED);
    do
        next = change(old);
    while (!__atomic_compare_exchange(address, &old, &next, false, __ATOMIC_SEQ_CST,
                                      __ATOMIC_SEQ_CST));
    return old;
}

#define KVF_EMU_ATOMIC_MIN_MAX(type)                                                               \
    static inline type atomicMin(type *address, type value)                                        \
    {                                                                                              \
        return kvf_emu_atomic_update(address, [value](type old) { return min(old, value); });      \
    }                                                                                              \
    static inline type atomicMax(type *address, type value)                                        \
    {                                                                                              \
        return kvf_emu_atomic_update(address, [value](type old) { return max(old, value); });      \
    }
KVF_EMU_ATOMIC_MIN_MAX(int)
KVF_EMU_ATOMIC_MIN_MAX(unsigned)
KVF_EMU_ATOMIC_MIN_MAX(long long)
KVF_EMU_ATOMIC_MIN_MAX(unsigned long long)
#undef KVF_EMU_ATOMIC_MIN_MAX

static inline float atomicAdd(float *address, float value)
{
    return kvf_emu_atomic_update(address, [value](float old) { return old + value; });
}

static inline float atomicExch(float *address, float value)
{
    float old;
    __atomic_exchange(address, &value, &old, __ATOMIC_SEQ_CST);
    return old;
}

#endif
