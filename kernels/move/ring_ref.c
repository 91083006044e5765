/* SPDX-License-Identifier: Apache-2.0 */

/*
 * One token per row into the rings of its streaming heads, and what they attend to, the
 * specification.
 *
 * Knows nothing of other heads. A token that is not finite is moved all the same; the row's fault
 * word says so. Task = row * heads + head.
 */

#include <math.h>
#include <stdbool.h>
#include <string.h>

#include "common/convert.h"
#include "variants.h"

/* False if an element is not finite. */
static bool append(const kvf_ring_args *a, uint32_t row, uint32_t head)
{
    const kvf_shape *s = &a->ring.shape;
    const size_t bytes = kvf_key_bytes(s), value_bytes = kvf_value_bytes(s);
    const size_t at = (size_t)row * a->kv_heads + (a->head ? a->head[head] : head);
    const uint32_t token = a->row[row].length - 1;
    const void *k = kvf_offset(a->k, at * bytes), *v = kvf_offset(a->v, at * value_bytes);
    char *to = kvf_ring_page(&a->ring, a->row[row].ring, token / s->page_size, head) +
               token % s->page_size * kvf_token_bytes(s);
    bool is_finite = true;
    memcpy(to, k, bytes);
    memcpy(to + bytes, v, value_bytes);
    for (uint32_t d = 0; d < s->head_dim; d++)
        is_finite = is_finite && isfinite(kvf_element_get(k, s->dtype, d));
    for (uint32_t d = 0; d < kvf_value_dim(s); d++)
        is_finite = is_finite && isfinite(kvf_element_get(v, s->dtype, d));
    return is_finite;
}

void kvf_ring_ref(const void *args, uint32_t task)
{
    const kvf_ring_args *a = args;
    const uint32_t head = task % a->ring.heads;
    const kvf_row *row = &a->row[task / a->ring.heads];
    const uint32_t count = kvf_ring_spans(&a->ring, row->length);
    if (!append(a, task / a->ring.heads, head))
        kvf_row_fault(row, row->length - 1);
    for (uint32_t i = 0; i < count; i++)
        a->spans[(size_t)task * a->spans_max + i] =
            kvf_ring_span(&a->ring, row->ring, row->length, head, i);
    a->span_count[task] = count;
}
