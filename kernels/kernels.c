/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The table of kernels of the host device: what this CPU has, and which variant serves each entry.
 *
 * Knows names only, no arithmetic. Later variants override earlier ones, so an entry always holds
 * the best one that the CPU and the mask allow, and the reference where there is none.
 */

#include "kernels.h"

#include "variants.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

/* What this build may use at most; -Disa=reference runs every test without vector code. */
#ifndef KVF_ISA_LIMIT
#define KVF_ISA_LIMIT KVF_ISA_ALL
#endif

uint32_t kvf_digest_tasks(const kvf_digest_args *a)
{
    return a->job_count;
}

uint32_t kvf_score_tasks(const kvf_score_args *a)
{
    return a->lists * kvf_div_ceil_u32(a->pages_max, KVF_SCORE_PAGES);
}

uint32_t kvf_reduce_tasks(const kvf_reduce_args *a)
{
    return a->outputs;
}

uint32_t kvf_topk_tasks(const kvf_topk_args *a)
{
    return a->lists;
}

uint32_t kvf_attend_tasks(const kvf_attend_args *a)
{
    return a->lists * kvf_div_ceil_u32(a->spans_max, a->split);
}

uint32_t kvf_merge_tasks(const kvf_merge_args *a)
{
    return a->lists;
}

uint32_t kvf_prefill_tasks(const kvf_prefill_kernel_args *a)
{
    return a->kv_heads * kvf_div_ceil_u32(a->tokens, KVF_PREFILL_ROWS);
}

uint32_t kvf_repack_tasks(const kvf_repack_args *a)
{
    return a->tokens ? kvf_div_ceil_u32(a->first + a->tokens, a->shape.page_size) * a->kv_heads : 0;
}

uint32_t kvf_observe_tasks(const kvf_observe_args *a)
{
    return a->kv_heads * kvf_div_ceil_u32(a->spans_max, KVF_OBSERVE_SPANS);
}

uint32_t kvf_pool_tasks(const kvf_pool_args *a)
{
    return a->rows;
}

uint32_t kvf_take_tasks(const kvf_take_args *a)
{
    return a->kv_heads * kvf_div_ceil_u32(a->count, KVF_TAKE_TOKENS);
}

uint32_t kvf_profile_tasks(const kvf_profile_args *a)
{
    return a->rows;
}

uint32_t kvf_copy_tasks(const kvf_copy_args *a)
{
    return kvf_div_ceil_u32(a->count, a->per_task);
}

uint32_t kvf_move_tasks(const kvf_move_args *a)
{
    return a->blocks;
}

uint32_t kvf_resolve_tasks(const kvf_resolve_args *a)
{
    return kvf_div_ceil_u32(a->lists, KVF_RESOLVE_LISTS);
}

#if defined(__x86_64__)
static uint32_t cpu_isa(void)
{
    uint32_t isa = KVF_ISA_BASELINE;
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    __builtin_cpu_init();
    /* The builtin asks the operating system about the registers too; f16c is missing from some. */
    if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx) || !(ecx & bit_F16C))
        return isa;
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma"))
        return isa;
    isa |= KVF_ISA_AVX2;
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl"))
        return isa;
    isa |= KVF_ISA_AVX512;
    if (__get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax & 1u << 5))
        isa |= KVF_ISA_AVX512_BF16;
    return isa;
}
#elif defined(__aarch64__)
static uint32_t cpu_isa(void)
{
    return KVF_ISA_NEON;
}
#else
static uint32_t cpu_isa(void)
{
    return KVF_ISA_REFERENCE;
}
#endif

uint32_t kvf_cpu_isa(void)
{
    return cpu_isa() & KVF_ISA_LIMIT;
}

typedef struct variant {
    uint32_t isa;
    kvf_kernels table;
} variant;

/* In ascending order of preference. A variant may leave entries empty. */
static const variant variants[] = {
#define KVF_REF_ENTRY(op) .op = kvf_##op##_ref,
    {KVF_ISA_REFERENCE, {KVF_KERNEL_LIST(KVF_REF_ENTRY)}},
#undef KVF_REF_ENTRY
#ifdef KVF_HAVE_BASELINE
#define KVF_ENTRY(op) .op = kvf_##op##_baseline,
    {KVF_ISA_BASELINE, {KVF_SIMD_KERNEL_LIST(KVF_ENTRY)}},
#undef KVF_ENTRY
#endif
#ifdef KVF_HAVE_AVX2
#define KVF_ENTRY(op) .op = kvf_##op##_avx2,
    {KVF_ISA_AVX2, {KVF_SIMD_KERNEL_LIST(KVF_ENTRY)}},
#undef KVF_ENTRY
#endif
#ifdef KVF_HAVE_AVX512
#define KVF_ENTRY(op) .op = kvf_##op##_avx512,
    {KVF_ISA_AVX512, {KVF_SIMD_KERNEL_LIST(KVF_ENTRY)}},
#undef KVF_ENTRY
#endif
#ifdef KVF_HAVE_AVX512_BF16
#define KVF_ENTRY(op) .op = kvf_##op##_avx512_bf16,
    {KVF_ISA_AVX512_BF16, {KVF_SIMD_KERNEL_LIST(KVF_ENTRY)}},
#undef KVF_ENTRY
#endif
#ifdef KVF_HAVE_NEON
#define KVF_ENTRY(op) .op = kvf_##op##_neon,
    {KVF_ISA_NEON, {KVF_SIMD_KERNEL_LIST(KVF_ENTRY)}},
#undef KVF_ENTRY
#endif
};

kvf_status kvf_kernels_init(kvf_kernels *table, uint32_t isa_mask)
{
    const uint32_t usable = kvf_cpu_isa() & isa_mask;
    *table = (kvf_kernels){.isa = KVF_ISA_REFERENCE};
    for (size_t i = 0; i < sizeof variants / sizeof *variants; i++) {
        const variant *v = &variants[i];
        if ((v->isa & usable) != v->isa)
            continue;
#define KVF_TAKE(op)                                                                               \
    if (v->table.op) {                                                                             \
        table->op = v->table.op;                                                                   \
        table->isa |= v->isa;                                                                      \
    }
        KVF_KERNEL_LIST(KVF_TAKE)
#undef KVF_TAKE
    }
#define KVF_HOLE(op)                                                                               \
    if (!table->op)                                                                                \
        return KVF_UNSUPPORTED;
    KVF_KERNEL_LIST(KVF_HOLE)
#undef KVF_HOLE
    return KVF_OK;
}
