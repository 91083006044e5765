/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_COMMON_CPU_ISA_H
#define KVF_COMMON_CPU_ISA_H

/*
 * Which instruction sets this CPU has. Callers limit them to what their build may use (-Disa).
 */

#include <stdint.h>

#include <kvferry/kvferry.h>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

/* OR of kvf_isa. */
static inline uint32_t kvf_cpu_has(void)
{
#if defined(__x86_64__)
    uint32_t isa = KVF_ISA_BASELINE;
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    __builtin_cpu_init();
    /* The builtin asks the operating system about the registers too; f16c is missing from some. */
    if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx) || !(ecx & bit_F16C))
        return isa;
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma"))
        return isa;
    isa |= KVF_ISA_AVX2;
    const int has_more = __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx);
    if (has_more && (eax & 1u << 4))
        isa |= KVF_ISA_AVX_VNNI;
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl"))
        return isa;
    isa |= KVF_ISA_AVX512;
    if (!__builtin_cpu_supports("avx512vnni"))
        return isa;
    if (__builtin_cpu_supports("avx512vbmi"))
        isa |= KVF_ISA_AVX512_VNNI;
    /* Every CPU that has it has VNNI too, and that variant is built with both. */
    if (has_more && (eax & 1u << 5))
        isa |= KVF_ISA_AVX512_BF16;
    return isa;
#elif defined(__aarch64__)
    return KVF_ISA_NEON;
#else
    return KVF_ISA_REFERENCE;
#endif
}

#endif
