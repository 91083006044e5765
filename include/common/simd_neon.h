/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_COMMON_SIMD_NEON_H
#define KVF_COMMON_SIMD_NEON_H

/* Four lanes: NEON of AArch64. Included by simd.h only; see there for what the names promise. */

#include <arm_neon.h>

#define VF_LANES 4u

typedef float32x4_t vf;

KVF_ALWAYS_INLINE vf vf_fma(vf a, vf b, vf c)
{
    return vfmaq_f32(c, a, b);
}

/* By comparison, because the instructions of that name treat NaN in another way. */
KVF_ALWAYS_INLINE vf vf_max(vf a, vf b)
{
    return vbslq_f32(vcgtq_f32(a, b), a, b);
}

KVF_ALWAYS_INLINE vf vf_min(vf a, vf b)
{
    return vbslq_f32(vcltq_f32(a, b), a, b);
}

KVF_ALWAYS_INLINE vf vf_sqrt(vf a)
{
    return vsqrtq_f32(a);
}

KVF_ALWAYS_INLINE uint32_t vf_bits_ge(vf a, vf b)
{
    static const uint32_t weights[4] = {1, 2, 4, 8};
    return vaddvq_u32(vandq_u32(vcgeq_f32(a, b), vld1q_u32(weights)));
}

KVF_ALWAYS_INLINE vf vf_load_bf16(const uint16_t *p)
{
    return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16));
}

KVF_ALWAYS_INLINE vf vf_load_i8(const int8_t *p)
{
    uint32_t bits;
    memcpy(&bits, p, sizeof bits);
    const int16x8_t x = vmovl_s8(vreinterpret_s8_u32(vdup_n_u32(bits)));
    return vcvtq_f32_s32(vmovl_s16(vget_low_s16(x)));
}

/* Bytes, as integers. */
KVF_ALWAYS_INLINE uint32x4_t vf_bytes(const uint8_t *p)
{
    uint32_t bits;
    memcpy(&bits, p, sizeof bits);
    return vmovl_u16(vget_low_u16(vmovl_u8(vreinterpret_u8_u32(vdup_n_u32(bits)))));
}

KVF_ALWAYS_INLINE vf vf_load_fp16(const uint16_t *p)
{
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
}

/* The low halves of the lanes. */
KVF_ALWAYS_INLINE void vf_store_low(uint16_t *p, vf x)
{
    vst1_u16(p, vmovn_u32(vreinterpretq_u32_f32(x)));
}

KVF_ALWAYS_INLINE void vf_store_fp16(uint16_t *p, vf x)
{
    vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(x)));
}

KVF_ALWAYS_INLINE void vf_store_zip(float *to, vf even, vf odd)
{
    vst1q_f32(to, vzip1q_f32(even, odd));
    vst1q_f32(to + 4, vzip2q_f32(even, odd));
}

KVF_ALWAYS_INLINE void vf_sum4(float *to, vf x0, vf x1, vf x2, vf x3)
{
    vst1q_f32(to, vpaddq_f32(vpaddq_f32(x0, x1), vpaddq_f32(x2, x3)));
}

/* Sums of neighbours: those of a, then those of b. */
KVF_ALWAYS_INLINE vf vf_add_pairs(vf a, vf b)
{
    return vpaddq_f32(a, b);
}

#define VF_TRANSPOSE 4u

KVF_ALWAYS_INLINE void vf_transpose(float *to, size_t stride, vf row[4])
{
    const float32x4x2_t a = vtrnq_f32(row[0], row[1]), b = vtrnq_f32(row[2], row[3]);
    for (int k = 0; k < 2; k++) {
        size_t column = (size_t)k;
        vst1q_f32(to + column * stride,
                  vcombine_f32(vget_low_f32(a.val[k]), vget_low_f32(b.val[k])));
        vst1q_f32(to + (column + 2) * stride,
                  vcombine_f32(vget_high_f32(a.val[k]), vget_high_f32(b.val[k])));
    }
}

#define VF_STREAMS 0

#endif
