/* SPDX-License-Identifier: Apache-2.0 */

/* Quantized pages in full precision; see the header. Knows nothing of who reads them. */

#include "wide.h"

kvf_status kvf_wide_row(const kvf_step *step, const kvf_part *part, const kvf_row *row,
                        uint32_t first, uint32_t count, const kvf_row **view)
{
    const kvf_tables *t = &part->tables;
    const kvf_dequantize_args args = {.paging = part->dims.paging,
                                      .first = first,
                                      .count = count,
                                      .wide = t->wide,
                                      .table = t->wide_table,
                                      .view = t->wide_view,
                                      .row = row};
    *view = t->wide_view;
    return KVF_LAUNCH(step, dequantize, args);
}

kvf_status kvf_wide_view(kvf_step *step, uint32_t index, const kvf_row **view)
{
    *view = step->row + index;
    return kvf_quantizes_pages(step->part)
               ? kvf_wide_row(step, step->part, *view, 0, step->row_host[index].sealed, view)
               : KVF_OK;
}
