/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The matrix-vector kernels, and the row operations that count beside many rows of products, built
 * once per instruction set (KVF_LINEAR_VARIANT names the build).
 *
 * Bound: memory, so weights are asked for ahead (ask_ahead). As long as x stays in the first-level
 * cache, rows are read one after the other, strictly in order, which prefetchers like best; a
 * longer x would be fetched from the second level for each row, so four rows share it then.
 * Measured on Zen 4 with AVX2 (GB/s, a plain read has 16): 2048 inputs 20 in order, 14 by fours;
 * 4096: 16 and 15; 8192: 10 and 16. It knows arrays only. Invariant: the order of additions depends
 * on `columns` and the variant, not on `rows`, so a row's result does not depend on the panel it is
 * in.
 */

#include "linear_vector.h"

#include <string.h>

#define vf_load_fp32 vf_load

static inline float widen_fp32(float x)
{
    return x;
}

/* Sums of a row: KVF_LONG_SUMS where four rows run side by side, KVF_SUMS where one does. */
#define DEFINE_KERNELS(format, type, widen_one)                                                    \
    static inline float finish_##format(const vf *sums, uint32_t count, const type *w,             \
                                        const float *x, size_t c, size_t columns)                  \
    {                                                                                              \
        const float sum = finish_sums(sums, count);                                                \
        float tail = 0.0f;                                                                         \
        if (c == columns)                                                                          \
            return sum;                                                                            \
        for (; c < columns; c++)                                                                   \
            tail += widen_one(w[c]) * x[c];                                                        \
        return tail + sum;                                                                         \
    }                                                                                              \
                                                                                                   \
    static inline float dot_one_##format(const type *w, size_t columns, const float *x,            \
                                         const uint32_t count)                                     \
    {                                                                                              \
        vf sum[4] = {vf_zero(), vf_zero(), vf_zero(), vf_zero()};                                  \
        size_t c = 0;                                                                              \
        for (; c + (size_t)count * VF_LANES <= columns; c += (size_t)count * VF_LANES) {           \
            ask_ahead(w + c, count * VF_LANES * sizeof *w);                                        \
            _Pragma("GCC unroll 4") for (uint32_t s = 0; s < count; s++) sum[s] = vf_fma(          \
                vf_load_##format(w + c + s * VF_LANES), vf_load(x + c + s * VF_LANES), sum[s]);    \
        }                                                                                          \
        return finish_##format(sum, count, w, x, c, columns);                                      \
    }                                                                                              \
                                                                                                   \
    static void dot_rows_##format(const void *weight, size_t rows, size_t columns, const float *x, \
                                  float *y)                                                        \
    {                                                                                              \
        const type *w = weight;                                                                    \
        if (columns <= KVF_IN_ORDER_COLUMNS_MAX) {                                                 \
            for (size_t i = 0; i < rows; i++)                                                      \
                y[i] = dot_one_##format(w + i * columns, columns, x, KVF_SUMS);                    \
            return;                                                                                \
        }                                                                                          \
        size_t r = 0;                                                                              \
        for (; r + 4 <= rows; r += 4, w += 4 * columns) {                                          \
            vf sum[4][KVF_LONG_SUMS];                                                              \
            size_t c = 0;                                                                          \
            _Pragma("GCC unroll 4") for (uint32_t i = 0; i < 4; i++) sum[i][0] = sum[i][1] =       \
                vf_zero();                                                                         \
            for (; c + 2u * VF_LANES <= columns; c += 2u * VF_LANES) {                             \
                const vf p = vf_load(x + c), q = vf_load(x + c + VF_LANES);                        \
                _Pragma("GCC unroll 4") for (uint32_t i = 0; i < 4; i++)                           \
                {                                                                                  \
                    const type *own = w + i * columns + c;                                         \
                    ask_ahead(own, 2u * VF_LANES * sizeof *own);                                   \
                    sum[i][0] = vf_fma(vf_load_##format(own), p, sum[i][0]);                       \
                    sum[i][1] = vf_fma(vf_load_##format(own + VF_LANES), q, sum[i][1]);            \
                }                                                                                  \
            }                                                                                      \
            _Pragma("GCC unroll 4") for (uint32_t i = 0; i < 4; i++) y[r + i] =                    \
                finish_##format(sum[i], KVF_LONG_SUMS, w + i * columns, x, c, columns);            \
        }                                                                                          \
        for (; r < rows; r++, w += columns)                                                        \
            y[r] = dot_one_##format(w, columns, x, KVF_LONG_SUMS);                                 \
    }                                                                                              \
                                                                                                   \
    static void widen_all_##format(const void *from, size_t count, float *to)                      \
    {                                                                                              \
        const type *w = from;                                                                      \
        size_t i = 0;                                                                              \
        for (; i + VF_LANES <= count; i += VF_LANES)                                               \
            vf_store(to + i, vf_load_##format(w + i));                                             \
        for (; i < count; i++)                                                                     \
            to[i] = widen_one(w[i]);                                                               \
    }

DEFINE_KERNELS(bf16, uint16_t, kvf_bf16_to_float)
DEFINE_KERNELS(fp16, uint16_t, kvf_fp16_to_float)
DEFINE_KERNELS(fp32, float, widen_fp32)

static void round_row(const float *from, size_t count, uint16_t *to)
{
    size_t i = 0;
    for (; i + VF_LANES <= count; i += VF_LANES)
        vf_store_bf16(to + i, vf_load(from + i));
    for (; i < count; i++)
        to[i] = kvf_bf16_from_float(from[i]);
}

/* Below -87 the result is nothing beside what it is added to. NaN passes in this order. */
static inline void swiglu_some(const float *gate, const float *up, float *y)
{
    const vf x = vf_max(vf_set(-87.0f), vf_load(gate));
    const vf power = vf_exp2(vf_mul(x, vf_set(-KVF_LOG2E)));
    vf_store(y, vf_mul(x / vf_add(vf_set(1.0f), power), vf_load(up)));
}

static void swiglu(const float *gate, const float *up, size_t count, float *y)
{
    size_t i = 0;
    for (; i + VF_LANES <= count; i += VF_LANES)
        swiglu_some(gate + i, up + i, y + i);
    if (i == count)
        return;
    float rest[3][VF_LANES] = {0};
    memcpy(rest[0], gate + i, (count - i) * sizeof *gate);
    memcpy(rest[1], up + i, (count - i) * sizeof *up);
    swiglu_some(rest[0], rest[1], rest[2]);
    memcpy(y + i, rest[2], (count - i) * sizeof *y);
}

const kvf_linear_kernels KVF_LINEAR_SYMBOL(kvf_linear_kernels_) = {
    .name = KVF_LINEAR_NAME,
    .dot_rows =
        {[KVF_BF16] = dot_rows_bf16, [KVF_FP16] = dot_rows_fp16, [KVF_FP32] = dot_rows_fp32},
    .widen =
        {[KVF_BF16] = widen_all_bf16, [KVF_FP16] = widen_all_fp16, [KVF_FP32] = widen_all_fp32},
    .round = round_row,
    .swiglu = swiglu,
    .strip = &KVF_LINEAR_SYMBOL(kvf_strip_kernel_),
    .wide = &KVF_LINEAR_SYMBOL(kvf_small_batch_kernel_),
};
