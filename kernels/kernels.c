/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The table of kernels of the host device: what this CPU has, and which variant serves each entry.
 *
 * Knows names only, no arithmetic. Later variants override earlier ones, so an entry always holds
 * the best one that the CPU and the mask allow, and the reference where there is none.
 */

#include "kernels.h"

#include "common/cpu_isa.h"
#include "variants.h"

/* The most that this build may use; -Disa=reference runs every test without vector code. */
#ifndef KVF_ISA_LIMIT
#define KVF_ISA_LIMIT KVF_ISA_ALL
#endif

uint32_t kvf_cpu_isa(void)
{
    return kvf_cpu_has() & KVF_ISA_LIMIT;
}

typedef struct variant {
    uint32_t isa;
    kvf_kernels table;
} variant;

/* In ascending order of preference. A variant may leave entries empty. */
static const variant variants[] = {
#define KVF_ENTRY(family, op) .op = kvf_##op##_ref,
    {KVF_ISA_REFERENCE, {KVF_KERNEL_LIST(KVF_ENTRY, KVF_ENTRY)}},
#undef KVF_ENTRY
#ifdef KVF_HAVE_BASELINE
#define KVF_ENTRY(family, op) .op = kvf_##op##_baseline,
    {KVF_ISA_BASELINE, {KVF_KERNEL_LIST(KVF_KERNEL_NONE, KVF_ENTRY)}},
#undef KVF_ENTRY
#endif
#ifdef KVF_HAVE_AVX2
#define KVF_ENTRY(family, op) .op = kvf_##op##_avx2,
    {KVF_ISA_AVX2, {KVF_KERNEL_LIST(KVF_KERNEL_NONE, KVF_ENTRY)}},
#undef KVF_ENTRY
#endif
#ifdef KVF_HAVE_AVX_VNNI
#define KVF_ENTRY(family, op) .op = kvf_##op##_avx_vnni,
    {KVF_ISA_AVX_VNNI, {KVF_DOT_LIST(KVF_ENTRY)}},
#undef KVF_ENTRY
#endif
#ifdef KVF_HAVE_AVX512
#define KVF_ENTRY(family, op) .op = kvf_##op##_avx512,
    {KVF_ISA_AVX512, {KVF_KERNEL_LIST(KVF_KERNEL_NONE, KVF_ENTRY)}},
#undef KVF_ENTRY
#endif
#ifdef KVF_HAVE_AVX512_BF16
#define KVF_ENTRY(family, op) .op = kvf_##op##_avx512_bf16,
    {KVF_ISA_AVX512_BF16, {KVF_PAIR_LIST(KVF_ENTRY, KVF_ENTRY)}},
#undef KVF_ENTRY
#endif
#ifdef KVF_HAVE_AVX512_VNNI
#define KVF_ENTRY(family, op) .op = kvf_##op##_avx512_vnni,
    {KVF_ISA_AVX512_VNNI, {KVF_DOT_LIST(KVF_ENTRY)}},
#undef KVF_ENTRY
#endif
#ifdef KVF_HAVE_NEON
#define KVF_ENTRY(family, op) .op = kvf_##op##_neon,
    {KVF_ISA_NEON, {KVF_KERNEL_LIST(KVF_KERNEL_NONE, KVF_ENTRY)}},
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
#define KVF_TAKE(family, op)                                                                       \
    if (v->table.op) {                                                                             \
        table->op = v->table.op;                                                                   \
        table->isa |= v->isa;                                                                      \
    }
        KVF_KERNEL_LIST(KVF_TAKE, KVF_TAKE)
#undef KVF_TAKE
    }
#define KVF_HOLE(family, op)                                                                       \
    if (!table->op)                                                                                \
        return KVF_UNSUPPORTED;
    KVF_KERNEL_LIST(KVF_HOLE, KVF_HOLE)
#undef KVF_HOLE
    return KVF_OK;
}
