/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Products of many rows in fp32, a strip of outputs at a time, built once per instruction set.
 *
 * Bound: arithmetic. The weights of a strip, up to KVF_STRIP_COLUMNS of each output, are widened
 * and transposed into scratch that stays in the second-level cache; then ROWS rows of x meet
 * VECTORS vectors of outputs at a time, so that all sums are in registers and a load serves several
 * products. It knows arrays only. Invariant: an output of a row is one chain of additions over the
 * inputs in order, so its bits depend neither on other rows nor on the strip it is in.
 */

#include "linear_vector.h"

/* ROWS * VECTORS sums, VECTORS weights and one number of x fill the registers. */
#if defined(__AVX512F__) || defined(__ARM_NEON)
#define ROWS    8u
#define VECTORS 3u
#else
#define ROWS    6u
#define VECTORS 2u
#endif
#define STRIP (VECTORS * VF_LANES)

_Static_assert(STRIP <= KVF_STRIP_OUTPUTS_MAX, "scratch");
_Static_assert(STRIP % VF_TRANSPOSE == 0, "scratch");

/* ---- the weights of a strip ---- */

/* VF_TRANSPOSE rows of weights as columns of the strip. */
KVF_ALWAYS_INLINE void transpose(float *to, const void *const *rows, const kvf_dtype dtype,
                                 size_t columns)
{
    size_t c = 0;
    for (; c + VF_TRANSPOSE <= columns; c += VF_TRANSPOSE)
        vf_transpose_keys(to + c * STRIP, STRIP, rows, dtype, c);
    for (; c < columns; c++)
        for (uint32_t i = 0; i < VF_TRANSPOSE; i++)
            to[c * STRIP + i] = kvf_element_get(rows[i], dtype, c);
}

/* Inputs first .. first + columns - 1 become [columns, STRIP]; the last output fills up a strip. */
static void pack(const kvf_strip *s, size_t first, size_t columns)
{
    const kvf_linear *linear = s->linear;
    const char *from = (const char *)linear->weight + first * kvf_dtype_bytes(linear->dtype);
    float *strip = s->scratch;
    for (size_t o = 0; o < STRIP; o += VF_TRANSPOSE) {
        const void *rows[VF_TRANSPOSE];
        for (size_t i = 0; i < VF_TRANSPOSE; i++) {
            const size_t output = o + i < s->outputs ? o + i : s->outputs - 1;
            rows[i] = from + kvf_linear_row_bytes(linear) * (s->first + output);
        }
        if (linear->dtype == KVF_FP32)
            transpose(strip + o, rows, KVF_FP32, columns);
        else if (linear->dtype == KVF_BF16)
            transpose(strip + o, rows, KVF_BF16, columns);
        else
            transpose(strip + o, rows, KVF_FP16, columns);
    }
}

/* ---- products ---- */

/* Sums stay in registers only where the loops over them are unrolled, at any level. */
KVF_ALWAYS_INLINE void multiply_tile(const float *strip, size_t columns, const float *const *x,
                                     float *const *y, const bool begins)
{
    vf sum[ROWS][VECTORS], weight[VECTORS];
#pragma GCC unroll 8
    for (uint32_t r = 0; r < ROWS; r++)
#pragma GCC unroll 3
        for (uint32_t v = 0; v < VECTORS; v++)
            sum[r][v] = begins ? vf_zero() : vf_load(y[r] + v * VF_LANES);
#pragma GCC unroll 8
    for (size_t c = 0; c < columns; c++, strip += STRIP) {
#pragma GCC unroll 3
        for (uint32_t v = 0; v < VECTORS; v++)
            weight[v] = vf_load(strip + v * VF_LANES);
#pragma GCC unroll 8
        for (uint32_t r = 0; r < ROWS; r++) {
            const vf number = vf_set(x[r][c]);
#pragma GCC unroll 3
            for (uint32_t v = 0; v < VECTORS; v++)
                sum[r][v] = vf_fma(number, weight[v], sum[r][v]);
        }
    }
#pragma GCC unroll 8
    for (uint32_t r = 0; r < ROWS; r++)
#pragma GCC unroll 3
        for (uint32_t v = 0; v < VECTORS; v++)
            vf_store(y[r] + v * VF_LANES, sum[r][v]);
}

/* ROWS rows from `row` on; the last one fills up. Rows that are not whole go through `own`. */
static void multiply_rows(const kvf_strip *s, uint32_t row, size_t first, size_t columns)
{
    const bool begins = first == 0 && !s->accumulate;
    const uint32_t rows = kvf_min_u32(ROWS, s->rows - row);
    const bool is_whole = rows == ROWS && s->outputs == STRIP;
    const size_t bytes = s->outputs * sizeof(float);
    float own[ROWS][STRIP] = {{0}}, *y[ROWS];
    const float *x[ROWS];
    for (uint32_t r = 0; r < ROWS; r++) {
        const uint32_t from = row + kvf_min_u32(r, rows - 1);
        x[r] = s->x + (size_t)from * s->linear->inputs + first;
        y[r] = is_whole ? s->y + (size_t)from * s->y_stride : own[r];
        if (!is_whole && !begins)
            memcpy(own[r], s->y + (size_t)from * s->y_stride, bytes);
    }
    if (begins)
        multiply_tile(s->scratch, columns, x, y, true);
    else
        multiply_tile(s->scratch, columns, x, y, false);
    for (uint32_t r = 0; !is_whole && r < rows; r++)
        memcpy(s->y + (size_t)(row + r) * s->y_stride, own[r], bytes);
}

static void multiply_strip(const kvf_strip *s)
{
    const size_t inputs = s->linear->inputs;
    for (size_t first = 0; first < inputs; first += KVF_STRIP_COLUMNS) {
        const size_t left = inputs - first;
        const size_t columns = left < KVF_STRIP_COLUMNS ? left : KVF_STRIP_COLUMNS;
        pack(s, first, columns);
        for (uint32_t row = 0; row < s->rows; row += ROWS)
            multiply_rows(s, row, first, columns);
    }
}

const kvf_strip_kernel KVF_LINEAR_SYMBOL(kvf_strip_kernel_) = {STRIP, multiply_strip};
