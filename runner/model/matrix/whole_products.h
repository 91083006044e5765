/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_MODEL_WHOLE_PRODUCTS_H
#define KVF_MODEL_WHOLE_PRODUCTS_H

/*
 * The common part of products in whole numbers, whatever their vectors are: the way through a
 * matrix, strip by strip of OUTPUTS outputs, and in it block by block for a group of rows.
 *
 * Who includes it defines OUTPUTS before, and after it `columns`, a block's columns of all outputs
 * of a strip; unpack_<type>, which makes them; add_rows, which multiplies; and store_sums.
 */

#include "linear.h"

#include <string.h>

#define ROWS       4u  /* that meet a block together: two chains of sums each */
#define GROUP_ROWS 16u /* whose results are in the first-level cache */

#define WHOLE_INLINE static inline __attribute__((always_inline))

/* Results of a strip, until its last block. */
typedef struct strip {
    const kvf_whole_block *x; /* of the first row, and the block of columns */
    size_t x_stride;
    float (*sum)[OUTPUTS]; /* [rows] */
} strip;

/* Four bytes of x in all lanes are one number there. */
WHOLE_INLINE int32_t word_at(const void *x)
{
    int32_t word;
    memcpy(&word, x, sizeof word);
    return word;
}

/* The memory after a strip, a piece at a time: strips are read once, one after the other. */
WHOLE_INLINE void ask_ahead(const char *first, size_t strip_bytes, size_t done, const size_t bytes)
{
    const uintptr_t at = (uintptr_t)first + strip_bytes + OUTPUTS * done;
#pragma GCC unroll 9
    for (size_t i = 0; i < OUTPUTS * bytes; i += 64)
        __builtin_prefetch((const void *)(at + i), 0, 2);
}

/* One block of columns for up to GROUP_ROWS rows, by add_rows. */
#define DEFINE_ADD_BLOCK                                                                           \
    WHOLE_INLINE void add_block(const columns *c, const strip *s, uint32_t rows)                   \
    {                                                                                              \
        uint32_t row = 0;                                                                          \
        for (; row + ROWS <= rows; row += ROWS)                                                    \
            add_rows(c, s, row, ROWS);                                                             \
        switch (rows - row) {                                                                      \
        case 3:                                                                                    \
            add_rows(c, s, row, 3);                                                                \
            break;                                                                                 \
        case 2:                                                                                    \
            add_rows(c, s, row, 2);                                                                \
            break;                                                                                 \
        case 1:                                                                                    \
            add_rows(c, s, row, 1);                                                                \
            break;                                                                                 \
        default:                                                                                   \
            break;                                                                                 \
        }                                                                                          \
    }

/* An output that a strip lacks is the last one again. */
#define DEFINE_PRODUCT(type, bytes)                                                                \
    static void multiply_##type(const kvf_whole_product *p)                                        \
    {                                                                                              \
        const size_t blocks = p->linear->inputs / KVF_WHOLE_COLUMNS, line = blocks * (bytes);      \
        for (uint32_t output = 0; output < p->outputs; output += OUTPUTS) {                        \
            const char *weight = (const char *)p->weight + output * line;                          \
            size_t offset[OUTPUTS];                                                                \
            for (uint32_t o = 0; o < OUTPUTS; o++)                                                 \
                offset[o] = kvf_min_u32(o, p->outputs - output - 1) * line;                        \
            for (uint32_t row = 0; row < p->rows; row += GROUP_ROWS) {                             \
                const uint32_t rows = kvf_min_u32(GROUP_ROWS, p->rows - row);                      \
                _Alignas(64) float sum[GROUP_ROWS][OUTPUTS] = {{0}};                               \
                strip s = {p->x + row * blocks, blocks, sum};                                      \
                for (size_t b = 0; b < blocks; b++, s.x++) {                                       \
                    columns c;                                                                     \
                    ask_ahead(weight, OUTPUTS *line, b *(bytes), bytes);                           \
                    unpack_##type(weight + b * (bytes), offset, &c);                               \
                    add_block(&c, &s, rows);                                                       \
                }                                                                                  \
                store_sums(p, output, row, rows, (const float(*)[OUTPUTS])sum);                    \
            }                                                                                      \
        }                                                                                          \
    }

#endif
