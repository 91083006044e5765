/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_KERNELS_VARIANTS_H
#define KVF_KERNELS_VARIANTS_H

/*
 * Names of every implementation of every kernel: kvf_<op>_<variant>. Which of them are linked is
 * the build's business (KVF_HAVE_<VARIANT>), which of them are called is that of kernels.c.
 */

#include "kernels.h"

#define KVF_KERNEL_NONE(family, op)

#define KVF_VARIANT_REF(family, op) void kvf_##op##_ref(const void *args, uint32_t task);
KVF_KERNEL_LIST(KVF_VARIANT_REF, KVF_VARIANT_REF)
#undef KVF_VARIANT_REF

#define KVF_VARIANT_SIMD(family, op)                                                               \
    void kvf_##op##_baseline(const void *args, uint32_t task);                                     \
    void kvf_##op##_avx2(const void *args, uint32_t task);                                         \
    void kvf_##op##_avx512(const void *args, uint32_t task);                                       \
    void kvf_##op##_neon(const void *args, uint32_t task);
KVF_KERNEL_LIST(KVF_KERNEL_NONE, KVF_VARIANT_SIMD)
#undef KVF_VARIANT_SIMD

#define KVF_VARIANT_DOT(family, op)                                                                \
    void kvf_##op##_avx_vnni(const void *args, uint32_t task);                                     \
    void kvf_##op##_avx512_vnni(const void *args, uint32_t task);
KVF_DOT_LIST(KVF_VARIANT_DOT)
#undef KVF_VARIANT_DOT

#define KVF_VARIANT_PAIR(family, op) void kvf_##op##_avx512_bf16(const void *args, uint32_t task);
KVF_PAIR_LIST(KVF_VARIANT_PAIR, KVF_VARIANT_PAIR)
#undef KVF_VARIANT_PAIR

#endif
