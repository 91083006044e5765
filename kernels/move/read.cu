/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Listed pages in full precision, on the GPU; see read_ref.c for the meaning.
 *
 * Knows nothing of who reads them. Grid: (parts of a list, lists); a block of threads takes every
 * PARTS-th page of its list. A quantized one comes to shared memory 16 bytes per thread, because
 * the pool is across a link, and from there half a warp takes a token. Bound: the bytes of the pool
 * over that link. Bits are those of the reference.
 */

#include "cuda_kernels.h"
#include "quantized.cuh"

#define THREADS 256u
#define TOKENS  (THREADS / KVF_CODE_LANES)
#define PARTS   16u

static __device__ __forceinline__ void copy_bytes(void *to, const void *from, uint32_t bytes)
{
    for (uint32_t i = threadIdx.x; i < bytes / 16; i += blockDim.x)
        ((uint4 *)to)[i] = kvf_load_once((const uint4 *)from + i);
}

/* Tokens of a quantized page that are not of the sink. */
static __device__ void dequantize_page(const kvf_shape *s, const void *home, uint32_t sink,
                                       char *to)
{
    __syncthreads();
    quantized_fetch((const char *)home, kvf_stored_page_bytes(s));
    /* All half-warps go round alike, so that warps stay whole; what is too much is not written. */
    for (uint32_t first = 0; first < s->page_size; first += TOKENS) {
        const uint32_t t = first + threadIdx.x / KVF_CODE_LANES;
        const uint32_t at = kvf_min_u32(t, s->page_size - 1);
        quantized_token_back(s, kvf_shared(), at, to + at * kvf_token_bytes(s),
                             t < sink || t >= s->page_size);
    }
}

static __global__ void __launch_bounds__(THREADS)
    read_kernel(const __grid_constant__ kvf_read_args a)
{
    const kvf_paging *p = &a.paging;
    const uint32_t list = blockIdx.y, head = list % p->kv_heads;
    const kvf_row *row = &a.row[list / p->kv_heads];
    const uint32_t token = (uint32_t)kvf_token_bytes(&p->shape);
    const uint32_t bytes = (uint32_t)kvf_page_bytes(&p->shape);
    for (int32_t i = a.indptr[list] + (int32_t)blockIdx.x; i < a.indptr[list + 1];
         i += (int32_t)PARTS) {
        const uint32_t page = (uint32_t)a.indices[i], count = kvf_row_tokens(p, row, page);
        const uint32_t sink = kvf_page_sink(p, page, count);
        char *to = (char *)a.out + (size_t)i * bytes;
        if (kvf_row_is_quantized(p, row, page)) {
            copy_bytes(to, kvf_static_page(p, row->static_kv, head, page), sink * token);
            if (sink < count)
                dequantize_page(&p->shape, kvf_row_home(p, row, page, head), sink, to);
            continue;
        }
        copy_bytes(to, kvf_row_page(p, row, page, head), count * token);
        for (uint32_t at = count * token / 16 + threadIdx.x; at < bytes / 16; at += blockDim.x)
            ((uint4 *)to)[at] = make_uint4(0, 0, 0, 0);
    }
}

KVF_LAUNCHER(read, read_kernel, dim3(PARTS, tasks), THREADS,
             a->paging.shape.pages == KVF_PAGES_NATIVE ? 0
                                                       : kvf_stored_page_bytes(&a->paging.shape))
