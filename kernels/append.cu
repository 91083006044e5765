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

/* Whether a word holds an element with all exponent bits set. */
static __device__ __forceinline__ bool has_no_finite(uint32_t word, kvf_dtype dtype)
{
    if (dtype == KVF_FP32)
        return (word & 0x7f800000u) == 0x7f800000u;
    const uint32_t exponent = dtype == KVF_BF16 ? 0x7f80u : 0x7c00u;
    return (word & exponent) == exponent || (word >> 16 & exponent) == exponent;
}

/* The block copies `bytes`, a multiple of 4 in every type and head_dim. The caller's tensors are
 * aligned to an element at least; 16 bytes at a time where they are aligned to that. */
static __device__ bool copy_and_look(void *to, const void *from, size_t bytes, kvf_dtype dtype)
{
    bool bad = false;
    if ((size_t)from % 16 == 0) {
        for (size_t i = threadIdx.x; i < bytes / 16; i += blockDim.x) {
            const uint4 x = ((const uint4 *)from)[i];
            ((uint4 *)to)[i] = x;
            bad = bad || has_no_finite(x.x, dtype) || has_no_finite(x.y, dtype) ||
                  has_no_finite(x.z, dtype) || has_no_finite(x.w, dtype);
        }
        return bad;
    }
    const uint16_t *halves = (const uint16_t *)from;
    for (size_t i = threadIdx.x; i < bytes / 4; i += blockDim.x) {
        const uint32_t x = halves[2 * i] | (uint32_t)halves[2 * i + 1] << 16;
        ((uint32_t *)to)[i] = x;
        bad = bad || has_no_finite(x, dtype);
    }
    return bad;
}

static __global__ void append_kernel(const __grid_constant__ kvf_append_args a)
{
    const kvf_paging *p = &a.paging;
    const uint32_t head = blockIdx.x, task = blockIdx.y;
    const kvf_row *row = &a.row[task];
    const size_t bytes = kvf_row_bytes(&p->shape);
    if (head == 0)
        for (uint32_t i = threadIdx.x; i < a.choose_lists; i += blockDim.x)
            a.choose[(size_t)task * a.choose_lists + i] = kvf_row_choose(row);
    if (!a.k)
        return;
    const size_t at = (size_t)task * p->kv_heads + head, query_bytes = p->group * bytes;
    char *query = row->queries + ((size_t)row->query_slot * p->kv_heads + head) * query_bytes;
    copy_and_look(query, kvf_offset(a.q, at * query_bytes), query_bytes, p->shape.dtype);

    const uint32_t token = row->length - 1;
    const uint32_t page = token / p->shape.page_size, t = token % p->shape.page_size;
    /* Other blocks may not have seen the entry that head 0 writes. */
    char *block = t == 0 ? kvf_row_ring_block(p, row, page) : (char *)row->blocks[page];
    if (t == 0 && head == 0 && threadIdx.x == 0)
        row->blocks[page] = block;
    char *to = block + head * kvf_page_bytes(&p->shape) + t * bytes;
    const bool bad_key = copy_and_look(to, kvf_offset(a.k, at * bytes), bytes, p->shape.dtype);
    const bool bad_value = copy_and_look(to + kvf_half_page_bytes(&p->shape),
                                         kvf_offset(a.v, at * bytes), bytes, p->shape.dtype);
    if (bad_key || bad_value)
        kvf_row_fault(row, token);
}

int kvf_append_cuda(const void *args, uint32_t tasks, void *stream)
{
    const kvf_append_args *a = (const kvf_append_args *)args;
    if (tasks == 0)
        return cudaSuccess;
    return (int)kvf_cuda_launch(append_kernel, dim3(a->k ? a->paging.kv_heads : 1, tasks),
                                dim3(THREADS), 0, (cudaStream_t)stream, *a);
}
