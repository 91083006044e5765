/* SPDX-License-Identifier: Apache-2.0 */

/*
 * One token per row into the rings of its streaming heads, and what they attend to, on the GPU; see
 * ring_ref.c for the meaning.
 *
 * Knows nothing of other heads. Grid: (heads, rows); a block copies the key and the value of its
 * head and looks at every element on the way, and its threads write a span each. Bound: the launch
 * itself. Exact; the fault word is an atomic minimum.
 */

#include "cuda_kernels.h"
#include "paging.cuh"

#define THREADS 64u

static __global__ void __launch_bounds__(THREADS)
    ring_kernel(const __grid_constant__ kvf_ring_args a)
{
    const kvf_shape *s = &a.ring.shape;
    const uint32_t head = blockIdx.x, list = blockIdx.y * a.ring.heads + head;
    const kvf_row *row = &a.row[blockIdx.y];
    char *blocks = row->ring;
    const uint32_t length = row->length, token = length - 1;
    const size_t bytes = kvf_key_bytes(s), value_bytes = kvf_value_bytes(s);
    const size_t at = (size_t)blockIdx.y * a.kv_heads + (a.head ? a.head[head] : head);
    char *to = kvf_ring_page(&a.ring, blocks, token / s->page_size, head) +
               token % s->page_size * (bytes + value_bytes);
    const bool bad_key = kvf_copy_and_look(to, kvf_offset(a.k, at * bytes), bytes, s->dtype);
    const bool bad_value =
        kvf_copy_and_look(to + bytes, kvf_offset(a.v, at * value_bytes), value_bytes, s->dtype);
    if (bad_key || bad_value)
        kvf_row_fault(row, token);
    const uint32_t count = kvf_ring_spans(&a.ring, length);
    for (uint32_t i = threadIdx.x; i < count; i += blockDim.x)
        a.spans[(size_t)list * a.spans_max + i] = kvf_ring_span(&a.ring, blocks, length, head, i);
    if (threadIdx.x == 0)
        a.span_count[list] = count;
}

KVF_LAUNCHER(ring, ring_kernel, dim3(a->ring.heads, a->rows), THREADS, 0)
