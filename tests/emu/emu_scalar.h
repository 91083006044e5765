/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TESTS_EMU_EMU_SCALAR_H
#define KVF_TESTS_EMU_EMU_SCALAR_H

/*
 * Operations that one CUDA thread can do alone: bits, arithmetic, atomics. Included by emu.h.
 *
 * Fast approximations of the device (__expf, rsqrtf, ...) are the exact functions of the C library
 * here, so results agree with a device within their error, not bit by bit. Atomics are sequentially
 * consistent.
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

static inline int __clzll(long long x)
{
    return x == 0 ? 64 : __builtin_clzll((unsigned long long)x);
}

static inline unsigned long long __brevll(unsigned long long x)
{
    unsigned long long r = 0;
    for (int i = 0; i < 64; i++)
        r |= (x >> i & 1) << (63 - i);
    return r;
}

static inline unsigned __brev(unsigned x)
{
    return (unsigned)(__brevll(x) >> 32);
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

static inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift)
{
    return (unsigned)((((uint64_t)high << 32 | low) << (shift & 31u)) >> 32);
}

static inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift)
{
    return (unsigned)(((uint64_t)high << 32 | low) >> (shift & 31u));
}

static inline unsigned __umulhi(unsigned x, unsigned y)
{
    return (unsigned)((uint64_t)x * y >> 32);
}

static inline unsigned long long __umul64hi(unsigned long long x, unsigned long long y)
{
    __extension__ typedef unsigned __int128 wide;
    return (unsigned long long)((wide)x * y >> 64);
}

template <typename To, typename From> static inline To kvf_emu_bits(From x)
{
    static_assert(sizeof(To) == sizeof(From), "the same bits");
    To y;
    memcpy(&y, &x, sizeof(y));
    return y;
}

static inline unsigned __float_as_uint(float x)
{
    return kvf_emu_bits<unsigned>(x);
}

static inline int __float_as_int(float x)
{
    return kvf_emu_bits<int>(x);
}

static inline float __uint_as_float(unsigned x)
{
    return kvf_emu_bits<float>(x);
}

static inline float __int_as_float(int x)
{
    return kvf_emu_bits<float>(x);
}

static inline long long __double_as_longlong(double x)
{
    return kvf_emu_bits<long long>(x);
}

static inline double __longlong_as_double(long long x)
{
    return kvf_emu_bits<double>(x);
}

/* ---- arithmetic ---- */

/* Macros, because the C library has functions of these names that it does not export. */
#define __expf(x)    expf(x)
#define __exp10f(x)  powf(10.0f, x)
#define __logf(x)    logf(x)
#define __log2f(x)   log2f(x)
#define __log10f(x)  log10f(x)
#define __sinf(x)    sinf(x)
#define __cosf(x)    cosf(x)
#define __powf(x, y) powf(x, y)

static inline float rsqrtf(float x)
{
    return 1.0f / sqrtf(x);
}

static inline float __frsqrt_rn(float x)
{
    return 1.0f / sqrtf(x);
}

static inline float __fdividef(float x, float y)
{
    return x / y;
}

static inline float __fdiv_rn(float x, float y)
{
    return x / y;
}

static inline float __frcp_rn(float x)
{
    return 1.0f / x;
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

static inline float __fmaf_rn(float x, float y, float z)
{
    return fmaf(x, y, z);
}

static inline float __saturatef(float x)
{
    return x > 0.0f ? x < 1.0f ? x : 1.0f : 0.0f;
}

static inline double __dadd_rn(double x, double y)
{
    return x + y;
}

static inline double __dmul_rn(double x, double y)
{
    return x * y;
}

static inline double __fma_rn(double x, double y, double z)
{
    return fma(x, y, z);
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

template <typename T> static inline T __ldg(const T *pointer)
{
    return *pointer;
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

static inline unsigned atomicInc(unsigned *address, unsigned limit)
{
    return kvf_emu_atomic_update(address,
                                 [limit](unsigned old) { return old >= limit ? 0 : old + 1; });
}

static inline unsigned atomicDec(unsigned *address, unsigned limit)
{
    return kvf_emu_atomic_update(
        address, [limit](unsigned old) { return old == 0 || old > limit ? limit : old - 1; });
}

static inline float atomicExch(float *address, float value)
{
    float old;
    __atomic_exchange(address, &value, &old, __ATOMIC_SEQ_CST);
    return old;
}

#endif
