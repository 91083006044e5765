/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_RUNTIME_WIDE_H
#define KVF_RUNTIME_WIDE_H

/*
 * Quantized pages in full precision, for what looks at a row's tokens otherwise than a step's
 * attention.
 *
 * A part that quantizes pages has room for one row in full precision, `tables.wide`. Whoever needs
 * it fills it, in stream order, and it holds until the next one does: nothing of it is remembered.
 * A *view* is a row whose table names that room for sealed blocks, and which has no slots.
 */

#include "step.h"

/* Blocks first .. first + count - 1 of a row on the device, whose table names the pool. *view gets
 * the view of the row. */
KVF_CHECKED kvf_status kvf_wide_row(const kvf_step *step, const kvf_part *part, const kvf_row *row,
                                    uint32_t first, uint32_t count, const kvf_row **view);
/* Row `index` of the step with all its sealed blocks; the row itself where pages are exact. */
KVF_CHECKED kvf_status kvf_wide_view(kvf_step *step, uint32_t index, const kvf_row **view);

/* What kvf_wide_view gave. */
static inline const kvf_row *kvf_wide_last(const kvf_step *step, uint32_t index)
{
    return kvf_quantizes_pages(step->part) ? step->part->tables.wide_view : step->row + index;
}

#endif
