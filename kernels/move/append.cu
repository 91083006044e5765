/* SPDX-License-Identifier: Apache-2.0 */

/*
 * One token per row into the window, on the GPU; see append_ref.c for the meaning.
 *
 * Knows nothing of policies. Grid: (KV heads, rows); a block copies the key, the value and the
 * queries of its head and looks at every element on the way. Bound: the launch itself, then the
 * bytes of q, k and v read and written once. Exact; the fault word is an atomic minimum.
 */

#include "cuda_kernels.h"
#include "paging.cuh"

#define THREADS 128u

static __global__ void append_kernel(const __grid_constant__ kvf_append_args a)
{
    const kvf_paging *p = &a.paging;
    const uint32_t head = blockIdx.x, task = blockIdx.y;
    const kvf_row *row = &a.row[task];
    const size_t bytes = kvf_row_bytes(&p->shape), value_bytes = kvf_value_bytes(&p->shape);
    kvf_wait_for_earlier();
    kvf_let_next_start();
    if (head == 0)
        for (uint32_t i = threadIdx.x; i < a.choose_lists; i += blockDim.x)
            a.choose[(size_t)task * a.choose_lists + i] = kvf_row_choose(p, row);
    if (!a.k)
        return;
    const size_t at = (size_t)task * p->kv_heads + head, query_bytes = p->group * bytes;
    if (row->queries) {
        char *query = row->queries + ((size_t)row->query_slot * p->kv_heads + head) * query_bytes;
        kvf_copy_and_look(query, kvf_offset(a.q, at * query_bytes), query_bytes, p->shape.dtype);
    }

    const uint32_t token = row->length - 1;
    const uint32_t index = token / p->block_size, t = token % p->block_size;
    /* Not by the table: other blocks may not have seen the entry that head 0 of the row writes that
     * begins the block. */
    char *block = kvf_row_ring_block(p, row, index);
    if (t == 0 && head == 0 && threadIdx.x == 0)
        row->blocks[index] = block;
    char *to = block + head * kvf_run_bytes(p) + t * (bytes + value_bytes);
    const bool bad_key = kvf_copy_and_look(to, kvf_offset(a.k, at * bytes), bytes, p->shape.dtype);
    const bool bad_value = kvf_copy_and_look(to + bytes, kvf_offset(a.v, at * value_bytes),
                                             value_bytes, p->shape.dtype);
    if (bad_key || bad_value)
        kvf_row_fault(row, token);
}

extern "C" int kvf_append_cuda(const void *args, uint32_t tasks, void *stream)
{
    const kvf_append_args *a = (const kvf_append_args *)args;
    if (tasks == 0)
        return cudaSuccess;
    return kvf_cuda_launch_early<append_kernel>(dim3(a->k ? a->paging.kv_heads : 1, tasks),
                                                dim3(THREADS), 0, (cudaStream_t)stream, *a);
}
