/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVL_CELL_NUMBERS_H
#define KVL_CELL_NUMBERS_H

/*
 * Numbers of ggml to those of the library: rows of a cache in F16, BF16 or Q8_0 to F16, masks to
 * sets of cells. A number that F16 cannot hold is told, never rounded to infinity.
 */

#include <stddef.h>
#include <stdint.h>

/** F32 to F16, ties to even. @return 0 if a finite value overflows */
int kvl_to_f16(const float *from, uint16_t *to, size_t count);

/** Whether no finite value would overflow in F16. */
int kvl_fits_f16(const float *x, size_t count);

/** Bytes of a row of @p count elements of a ggml type; 0 = a type, or a length, that is not served.
 */
size_t kvl_row_bytes(int type, size_t count);

/** A row of a cache to F16. @return 0 if a value overflows */
int kvl_row_to_f16(int type, const void *from, uint16_t *to, size_t count);

/** A row of a cache to F32. */
void kvl_row_to_f32(int type, const void *from, float *to, size_t count);

/**
 * Cells that a row of a mask (F16: 0 = seen, -infinity = not) leaves open, as bits.
 *
 * @param count  elements, a multiple of 64
 * @param set    in: a set; out: that of the mask
 * @param same   whether both are the same
 * @return how many cells are open; -1 = there is another value: the set is not to be used
 */
int64_t kvl_open_cells(const uint16_t *mask, size_t count, uint64_t *set, int *same);

#endif
