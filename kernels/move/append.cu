/* SPDX-License-Identifier: Apache-2.0 */

/*
 * One token per row into the window, on the GPU; see append_ref.c for the meaning.
 *
 * Knows nothing of policies. Grid: (KV heads and shares of queries to rotate, rows). A block copies
 * the key, the value and the queries of its head, rounds them where they are wide, and looks at
 * every element on the way; or it rotates 8 queries, half a warp each, and needs nothing of the
 * others. Bound: the launch itself, then the bytes of q, k and v read and written once. Exact, but
 * for the bits of a NaN that is rounded; the fault word is an atomic minimum.
 */

#include "cuda_kernels.h"
#include "paging.cuh"
#include "score/rotate.cuh"
#include "tile.cuh"

#define THREADS 128u
#define AT_ONCE (THREADS / KVF_CODE_LANES) /* queries that a block rotates */

/* The block rounds `count` numbers, a multiple of 4, to `to`, and to `also` unless that is NULL.
 * Returns whether this thread met one that is not finite in that type. */
template <typename T>
static __device__ bool round_and_look(void *to, void *also, const float *from, uint32_t count,
                                      kvf_dtype dtype)
{
    const bool is_aligned = (size_t)from % 16 == 0;
    bool bad = false;
    for (uint32_t i = threadIdx.x * 4; i < count; i += blockDim.x * 4) {
        const float4 x = is_aligned ? *(const float4 *)(from + i)
                                    : make_float4(from[i], from[i + 1], from[i + 2], from[i + 3]);
        const uint2 words = make_uint2(kvf_pair<T>(x.x, x.y), kvf_pair<T>(x.z, x.w));
        ((uint2 *)to)[i / 4] = words;
        if (also)
            ((uint2 *)also)[i / 4] = words;
        bad = bad || kvf_has_no_finite(words.x, dtype) || kvf_has_no_finite(words.y, dtype);
    }
    return bad;
}

/* The block puts `count` numbers of the caller, from number `first` on, to `to`. */
template <typename T, bool WIDE>
static __device__ bool put_and_look(void *to, const void *from, size_t first, uint32_t count,
                                    kvf_dtype dtype)
{
    if constexpr (WIDE)
        return round_and_look<T>(to, nullptr, (const float *)from + first, count, dtype);
    else
        return kvf_copy_and_look(to, (const T *)from + first, count * sizeof(T), dtype);
}

template <typename T, bool WIDE>
static __device__ void put_queries(const kvf_append_args &a, uint32_t head, uint32_t task)
{
    const kvf_paging *p = &a.paging;
    const kvf_row *row = &a.row[task];
    const uint32_t count = p->group * p->shape.head_dim;
    const size_t first = ((size_t)task * p->kv_heads + head) * count;
    T *kept = a.k && row->queries
                  ? (T *)row->queries + ((size_t)row->query_slot * p->kv_heads + head) * count
                  : nullptr;
    if constexpr (WIDE)
        round_and_look<T>((T *)a.rounded + first, kept, (const float *)a.q + first, count,
                          p->shape.dtype);
    else if (kept)
        put_and_look<T, WIDE>(kept, a.q, first, count, p->shape.dtype);
}

template <typename T, bool WIDE>
static __device__ void put_token(const kvf_append_args &a, uint32_t head, uint32_t task)
{
    const kvf_paging *p = &a.paging;
    const kvf_row *row = &a.row[task];
    const uint32_t keys = p->shape.head_dim, values = kvf_value_dim(&p->shape);
    const size_t at = (size_t)task * p->kv_heads + head;
    const uint32_t token = row->length - 1;
    const uint32_t index = token / p->block_size, t = token % p->block_size;
    /* Not by the table: other blocks may not have seen the entry that head 0 of the row writes that
     * begins the block. */
    char *block = kvf_row_ring_block(p, row, index);
    if (t == 0 && head == 0 && threadIdx.x == 0)
        row->blocks[index] = block;
    T *to = (T *)(block + head * kvf_run_bytes(p)) + (size_t)t * (keys + values);
    const bool bad_key = put_and_look<T, WIDE>(to, a.k, at * keys, keys, p->shape.dtype);
    const bool bad_value =
        put_and_look<T, WIDE>(to + keys, a.v, at * values, values, p->shape.dtype);
    if (bad_key || bad_value)
        kvf_row_fault(row, token);
}

template <typename T, bool WIDE>
static __device__ void rotate_queries(const kvf_append_args &a, uint32_t share, uint32_t task)
{
    const kvf_rotate_args r = kvf_append_rotate(&a, task);
    const uint32_t words = r.head_dim / KVF_CODE_LANES;
    const uint32_t mine = share * AT_ONCE + threadIdx.x / KVF_CODE_LANES;
    const size_t first = (size_t)kvf_min_u32(mine, r.queries - 1) * r.head_dim;
    float x[KVF_CODE_WORDS];
    if constexpr (WIDE) { /* from where another block rounds them */
        kvf_code_load(x, (const float *)a.q + (size_t)task * r.queries * r.head_dim + first, words);
#pragma unroll
        for (uint32_t k = 0; k < KVF_CODE_WORDS; k++)
            x[k] = kvf_to_float(kvf_from_float<T>(x[k]));
    } else {
        kvf_code_load(x, (const T *)r.q + first, words);
    }
    kvf_rotate_query(r, x, mine);
}

/* Numbers of the caller that are fp32, and the element type is not. */
enum wide { NONE, QUERIES, ALL };

/* `heads` blocks of a row copy, the others rotate. */
template <typename T, wide WIDE>
static __global__ void __launch_bounds__(THREADS)
    append_kernel(const __grid_constant__ kvf_append_args a, uint32_t heads)
{
    const uint32_t head = blockIdx.x, task = blockIdx.y;
    kvf_wait_for_earlier();
    kvf_let_next_start();
    if (head >= heads) {
        rotate_queries<T, WIDE != NONE>(a, head - heads, task);
        return;
    }
    if (head == 0)
        for (uint32_t i = threadIdx.x; i < a.choose_lists; i += blockDim.x)
            a.choose[(size_t)task * a.choose_lists + i] = kvf_row_choose(&a.paging, &a.row[task]);
    put_queries<T, WIDE != NONE>(a, head, task);
    if (a.k)
        put_token<T, WIDE == ALL>(a, head, task);
}

template <typename T, wide WIDE> static int launch(const kvf_append_args *a, void *stream)
{
    const kvf_paging *p = &a->paging;
    const uint32_t heads = a->k || WIDE != NONE ? p->kv_heads : 1;
    const uint32_t shares = a->rotated ? kvf_div_ceil_u32(p->kv_heads * p->group, AT_ONCE) : 0;
    return kvf_cuda_launch_early<append_kernel<T, WIDE>>(
        dim3(heads + shares, a->rows), dim3(THREADS), 0, (cudaStream_t)stream, *a, heads);
}

template <typename T> static int launch_wide(const kvf_append_args *a, void *stream)
{
    if (a->wide_keys)
        return launch<T, ALL>(a, stream);
    return a->wide_queries ? launch<T, QUERIES>(a, stream) : launch<T, NONE>(a, stream);
}

extern "C" int kvf_append_cuda(const void *args, uint32_t, void *stream)
{
    const kvf_append_args *a = (const kvf_append_args *)args;
    switch (a->paging.shape.dtype) {
    case KVF_BF16:
        return launch_wide<kvf_bf16>(a, stream);
    case KVF_FP16:
        return launch_wide<kvf_half>(a, stream);
    default:
        return launch<float, NONE>(a, stream);
    }
}
