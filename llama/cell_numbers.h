/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVL_CELL_NUMBERS_H
#define KVL_CELL_NUMBERS_H

/*
 * Numbers of ggml to those of the library: rows of a cache in F16, BF16 or Q8_0, and masks as sets
 * of cells. The library stores F16; a number that F16 cannot hold is told, never made infinite.
 */

#include <stddef.h>
#include <stdint.h>

/** Whether no finite value would overflow in F16. */
int kvl_fits_f16(const float *x, size_t count);

/** Bytes of a row of @p count elements of a ggml type; 0 = a type, or a length, that is not served.
 */
size_t kvl_row_bytes(int type, size_t count);

/** A row of a cache to F32. */
void kvl_row_to_f32(int type, const void *from, float *to, size_t count);

/** A row of a cache as the library gets it: F16 as it is, or @p is_wide, any type in F32.
 * @return 0 if a value overflows in F16 */
int kvl_row_read(int type, const void *from, void *to, uint32_t is_wide, size_t count);

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
