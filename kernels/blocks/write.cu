/* SPDX-License-Identifier: Apache-2.0 */

/*
 * New tokens into their physical blocks on the GPU; see write_ref.c for the meaning.
 *
 * Knows nothing of rows. A block is one token. Exact pages: a warp copies key and value of a KV
 * head to mapped host memory, after two loads that wait for each other: the slot, then the arena
 * beside key and value; a slot that is left out costs one. Quantized pages: 4 warps. Half a warp
 * encodes a head, which it quantizes first where pages are quantized: in shared memory, as a page
 * of one token, whose parts then go to the physical block. Bound: a prompt's stores across the
 * link; in decoding the launch itself. Exact.
 */

#include "cuda_kernels.h"
#include "move/quantized.cuh"
#include "select/find_slot.cuh"
#include "tile.cuh"

#define WARPS_MAX 8u
#define BLOCKS    4u   /* of a multiprocessor, at least */
#define THREADS   128u /* quantized */
#define SHARED    (KVF_BLOCK_SCRATCH * sizeof(uint32_t))
#define HALVES    (THREADS / KVF_CODE_LANES)

/* Where the token of a block is. */
typedef struct token_place {
    uint32_t block, token;
    bool is_there; /* else it is left out */
} token_place;

/* The call is counted, too. */
static __device__ __forceinline__ token_place place_of(const kvf_write_args &a)
{
    const uint32_t size = a.pool.block_size, shift = (uint32_t)__ffs((int)size) - 1;
    const int64_t slot = a.slots[blockIdx.x];
    token_place at = {0, 0, false};
    if (blockIdx.x == 0 && threadIdx.x == 0)
        ++*a.blocks->clock;
    if (slot < 0)
        return at;
    if ((uint64_t)slot >= (uint64_t)a.pool.blocks << shift) {
        if (threadIdx.x == 0)
            kvf_counter_add(&a.blocks->counters[a.layer].bad_slots, 1);
        return at;
    }
    at.block = (uint32_t)(slot >> shift);
    at.token = (uint32_t)slot & (size - 1);
    at.is_there = true;
    return at;
}

/* Marks of a token once it is written. By one thread. */
static __device__ __forceinline__ void note(const kvf_write_args &a, const token_place &at,
                                            bool is_nonfinite)
{
    const kvf_physical_blocks *c = a.blocks;
    unsigned long long *nonfinite =
        (unsigned long long *)kvf_physical_nonfinite(c, a.layer, at.block);
    if (is_nonfinite)
        atomicOr(nonfinite, 1ull << at.token);
    else
        atomicAnd(nonfinite, ~(1ull << at.token));
    kvf_physical_writes(c, a.layer, at.block)[at.token] += c->ignores_writes != 1;
    if (c->paging.segments_max && !c->ignores_writes)
        atomicExch(kvf_physical_is_centroid(c, a.layer, at.block), 0u);
    kvf_counter_add(&c->counters[a.layer].tokens_put, 1);
}

/* The code of a key, of zeros if its token is nonfinite, by half a warp; is_there: it is wanted. */
static __device__ __forceinline__ void encode(const kvf_write_args &a, float x[KVF_CODE_WORDS],
                                              bool is_nonfinite, const token_place &at,
                                              uint32_t head, bool is_there)
{
    const uint32_t head_dim = a.shape.head_dim, words = head_dim / KVF_CODE_LANES;
    uint32_t *to = (uint32_t *)kvf_physical_words(&a.codes, head_dim, a.pool.block_size, at.block,
                                                  head, at.token) +
                   kvf_code_word(head_dim, at.token % KVF_CODE_TOKENS, 0);
    for (uint32_t i = 0; is_nonfinite && i < KVF_CODE_WORDS; i++)
        x[i] = 0.0f;
    kvf_code_rotate_lanes(x, words);
    const uint16_t scale = kvf_code_encode_lanes(is_there ? to : NULL, x, words, head_dim);
    if (is_there && threadIdx.x % KVF_CODE_LANES == 0)
        kvf_physical_scales(&a.codes, a.pool.block_size, at.block, head)[at.token] = scale;
}

/* Key and value of a head to their place, by a warp; whether this lane met what is not finite. The
 * caller's tensors are aligned to an element at least; 16 bytes at a time where to that. */
static __device__ __forceinline__ bool copy_head(char *to, const char *k, const char *v,
                                                 const kvf_shape *s)
{
    const uint32_t lane = threadIdx.x % KVF_WARP_LANES;
    const uint32_t key = (uint32_t)kvf_key_bytes(s), bytes = (uint32_t)kvf_token_bytes(s);
    bool bad = false;
    v -= key;
    if (((size_t)k | (size_t)v) % 16 == 0) {
        for (uint32_t i = lane * 16; i < bytes; i += KVF_WARP_LANES * 16) {
            const uint4 x = *(const uint4 *)((i < key ? k : v) + i);
            *(uint4 *)(to + i) = x;
            bad = bad || kvf_has_no_finite(x.x, s->dtype) || kvf_has_no_finite(x.y, s->dtype) ||
                  kvf_has_no_finite(x.z, s->dtype) || kvf_has_no_finite(x.w, s->dtype);
        }
        return bad;
    }
    for (uint32_t i = lane * 4; i < bytes; i += KVF_WARP_LANES * 4) {
        const uint16_t *halves = (const uint16_t *)((i < key ? k : v) + i);
        const uint32_t x = halves[0] | (uint32_t)halves[1] << 16;
        *(uint32_t *)(to + i) = x;
        bad = bad || kvf_has_no_finite(x, s->dtype);
    }
    return bad;
}

/* Four numbers in fp32, of which the caller's tensors are aligned to one. */
static __device__ __forceinline__ float4 load4(const float *from)
{
    return make_float4(from[0], from[1], from[2], from[3]);
}

static __device__ __forceinline__ bool rounds_to_finite(float x, kvf_dtype dtype)
{
    return fabsf(x) < kvf_rounds_below(dtype);
}

/* copy_head of tokens in fp32, which are rounded. */
static __device__ __forceinline__ bool round_head(char *to, const float *k, const float *v,
                                                  const kvf_shape *s)
{
    const uint32_t key = s->head_dim, count = key + kvf_value_dim(s);
    bool bad = false;
    for (uint32_t i = threadIdx.x % KVF_WARP_LANES * 4; i < count; i += KVF_WARP_LANES * 4) {
        const float4 x = load4(i < key ? k + i : v + (i - key));
        kvf_store4(to, s->dtype, i, x);
        bad = bad || !rounds_to_finite(x.x, s->dtype) || !rounds_to_finite(x.y, s->dtype) ||
              !rounds_to_finite(x.z, s->dtype) || !rounds_to_finite(x.w, s->dtype);
    }
    return bad;
}

/* By a warp. */
static __device__ __forceinline__ void clear_head(char *to, uint32_t bytes)
{
    for (uint32_t i = threadIdx.x % KVF_WARP_LANES * 4; i < bytes; i += KVF_WARP_LANES * 4)
        *(uint32_t *)(to + i) = 0;
}

/* As the element type has it. */
static __device__ __forceinline__ void round_to(kvf_dtype dtype, float x[KVF_CODE_WORDS])
{
#pragma unroll
    for (uint32_t k = 0; k < KVF_CODE_WORDS; k++)
        x[k] = kvf_element_round(dtype, kvf_quantized_within(dtype, x[k]));
}

/* `In`: the caller's type, which is T or wider. */
template <typename T, typename In>
static __global__ void __launch_bounds__(WARPS_MAX *KVF_WARP_LANES, BLOCKS)
    write_tokens(const __grid_constant__ kvf_write_args a)
{
    const uint32_t warp = threadIdx.x / KVF_WARP_LANES, warps = blockDim.x / KVF_WARP_LANES;
    const uint32_t heads = a.codes.kv_heads, head_dim = a.shape.head_dim;
    const uint32_t bytes = (uint32_t)kvf_token_bytes(&a.shape);
    const size_t run = (size_t)a.pool.block_size * bytes;
    const token_place at = place_of(a);
    if (!at.is_there)
        return;
    const In *k = (const In *)a.k + blockIdx.x * a.k_stride;
    const In *v = (const In *)a.v + blockIdx.x * a.v_stride;
    constexpr bool is_wide = sizeof(In) > sizeof(T);
    char *const home = kvf_pool_home(&a.pool, a.layer, at.block) + at.token * bytes;
    bool bad = false;
    for (uint32_t h = warp; h < heads; h += warps) {
        const In *key = k + h * head_dim, *value = v + h * kvf_value_dim(&a.shape);
        bad |= is_wide
                   ? round_head(home + h * run, (const float *)key, (const float *)value, &a.shape)
                   : copy_head(home + h * run, (const char *)key, (const char *)value, &a.shape);
    }
    const bool is_nonfinite = __syncthreads_or(bad);
    for (uint32_t h = warp; is_nonfinite && h < heads; h += warps)
        clear_head(home + h * run, bytes);
    for (uint32_t first = 2 * warp; first < heads; first += 2 * warps) {
        const uint32_t h = first + threadIdx.x / KVF_CODE_LANES % 2;
        const bool is_there = h < heads;
        float x[KVF_CODE_WORDS];
        kvf_code_load(x, k + (is_there ? h : first) * head_dim, head_dim / KVF_CODE_LANES);
        if (is_wide)
            round_to(a.shape.dtype, x);
        encode(a, x, is_nonfinite, at, is_there ? h : first, is_there);
    }
    if (threadIdx.x == 0)
        note(a, at, is_nonfinite);
}

/* ---- quantized ---- */

/* The type that tokens come in. */
static __device__ __forceinline__ kvf_dtype dtype_in(const kvf_write_args &a)
{
    return a.is_wide ? KVF_FP32 : a.shape.dtype;
}

/* Whether a token of all heads has what is not finite, rounded; each thread its share. */
static __device__ __forceinline__ bool look(const kvf_write_args &a, const void *token,
                                            uint32_t count)
{
    bool bad = false;
    for (uint32_t i = threadIdx.x; i < count; i += blockDim.x)
        bad = bad || !rounds_to_finite(kvf_element_get(token, dtype_in(a), i), a.shape.dtype);
    return bad;
}

/* The vector of a head in fp32, as the element type has it; zeros if the token is nonfinite. */
static __device__ __forceinline__ void load(const kvf_write_args &a, float x[KVF_CODE_WORDS],
                                            const void *vector, bool is_nonfinite, uint32_t words)
{
    quantized_load(x, vector, dtype_in(a), words);
    if (a.is_wide)
        round_to(a.shape.dtype, x);
    for (uint32_t i = 0; is_nonfinite && i < KVF_CODE_WORDS; i++)
        x[i] = 0.0f;
}

/* Pages of one token. */
static __host__ __device__ __forceinline__ kvf_shape shape_of_one(const kvf_shape *s)
{
    kvf_shape one = *s;
    one.page_size = 1;
    return one;
}

static __global__ void __launch_bounds__(THREADS, 4)
    write_quantized(const __grid_constant__ kvf_write_args a)
{
    const kvf_physical_blocks *c = a.blocks;
    const kvf_paging *p = &c->paging;
    const kvf_shape *s = &p->shape, one = shape_of_one(s);
    const uint32_t words = s->head_dim / KVF_CODE_LANES;
    const uint32_t value_words = kvf_value_dim(s) / KVF_CODE_LANES;
    const uint32_t part = threadIdx.x / KVF_CODE_LANES;
    const size_t element = kvf_dtype_bytes(dtype_in(a));
    const token_place at = place_of(a);
    if (!at.is_there)
        return;
    const char *k = (const char *)a.k + blockIdx.x * a.k_stride * element;
    const char *v = (const char *)a.v + blockIdx.x * a.v_stride * element;
    const bool bad_key = look(a, k, p->kv_heads * s->head_dim);
    const bool bad_value = look(a, v, p->kv_heads * kvf_value_dim(s));
    const bool is_nonfinite = kvf_block_sum(bad_key || bad_value, kvf_shared()) != 0;
    __syncthreads(); /* the room of the sum becomes that of pages */
    char *page = kvf_shared() + part * kvf_stored_page_bytes(&one);
    for (uint32_t first = 0; first < p->kv_heads; first += HALVES) {
        const bool is_there = first + part < p->kv_heads;
        const uint32_t head = is_there ? first + part : 0;
        float x[KVF_CODE_WORDS];
        load(a, x, v + head * kvf_value_dim(s) * element, is_nonfinite, value_words);
        quantized_value(&one, page, 0, x, value_words);
        load(a, x, k + head * s->head_dim * element, is_nonfinite, words);
        kvf_code_rotate_lanes(x, words);
        quantized_int8(kvf_quantized_key(&one, page, 0), kvf_quantized_key_scale(&one, page, 0), x,
                       words);
        quantized_rotate_back(x, words);
        round_to(s->dtype, x);
        encode(a, x, false, at, head, is_there);
        __syncwarp();
        if (is_there)
            quantized_move(s, kvf_physical_page(c, a.layer, at.block, head, at.token),
                           at.token % s->page_size, &one, page, 0);
        __syncwarp();
    }
    if (threadIdx.x == 0)
        note(a, at, is_nonfinite);
}

template <typename T>
static cudaError_t launch_exact(const kvf_write_args *a, dim3 grid, dim3 block, cudaStream_t stream)
{
    return a->is_wide ? kvf_cuda_launch<write_tokens<T, float>>(grid, block, 0, stream, *a)
                      : kvf_cuda_launch<write_tokens<T, T>>(grid, block, 0, stream, *a);
}

extern "C" int kvf_write_cuda(const void *args, uint32_t, void *stream)
{
    const kvf_write_args *a = (const kvf_write_args *)args;
    const dim3 grid(a->tokens);
    const dim3 block(kvf_min_u32(WARPS_MAX, a->codes.kv_heads) * KVF_WARP_LANES);
    const kvf_shape one = shape_of_one(&a->shape);
    const size_t pages = HALVES * kvf_stored_page_bytes(&one);
    if (a->shape.pages != KVF_PAGES_NATIVE)
        return kvf_cuda_launch<write_quantized>(
            grid, dim3(THREADS), pages > SHARED ? pages : SHARED, (cudaStream_t)stream, *a);
    switch (a->shape.dtype) {
    case KVF_BF16:
        return launch_exact<kvf_bf16>(a, grid, block, (cudaStream_t)stream);
    case KVF_FP16:
        return launch_exact<kvf_half>(a, grid, block, (cudaStream_t)stream);
    default:
        return kvf_cuda_launch<write_tokens<float, float>>(grid, block, 0, (cudaStream_t)stream,
                                                           *a);
    }
}

/* ---- admit_written: pages of new tokens into slots ----
 * A block of threads per token, of which those go on with which a page begins: a warp per KV head.
 * Pages of a launch differ, so no two warps want the same one. Bound: bytes, from device memory to
 * device memory. */

#define ADMIT_THREADS 256u
#define ADMIT_BLOCKS  4u /* per multiprocessor: without it the compiler spills to have six */

/* A key or a value, or zeros, by a warp. */
static __device__ __forceinline__ void copy_vector(char *to, const char *from, uint32_t bytes,
                                                   bool is_nonfinite)
{
    const uint32_t lane = threadIdx.x % KVF_WARP_LANES;
    if ((size_t)from % 16 == 0)
        for (uint32_t at = lane * 16; at < bytes; at += KVF_WARP_LANES * 16)
            *(uint4 *)(to + at) =
                is_nonfinite ? make_uint4(0, 0, 0, 0) : *(const uint4 *)(from + at);
    else
        for (uint32_t at = lane * 2; at < bytes; at += KVF_WARP_LANES * 2)
            *(uint16_t *)(to + at) = is_nonfinite ? (uint16_t)0 : *(const uint16_t *)(from + at);
}

/* The same of `count` numbers in fp32, rounded. */
static __device__ __forceinline__ void round_vector(char *to, const float *from, uint32_t count,
                                                    bool is_nonfinite, kvf_dtype dtype)
{
    for (uint32_t i = threadIdx.x % KVF_WARP_LANES * 4; i < count; i += KVF_WARP_LANES * 4)
        kvf_store4(to, dtype, i, is_nonfinite ? make_float4(0, 0, 0, 0) : load4(from + i));
}

static __device__ __forceinline__ void
admit_written_page(const kvf_write_args &a, const kvf_row *row, uint32_t head, uint32_t page)
{
    const kvf_paging *p = &a.blocks->paging;
    const kvf_slot_tables t = kvf_slot_tables_of(p, row, head);
    const uint32_t first = blockIdx.x, bytes = (uint32_t)kvf_key_bytes(&p->shape);
    const uint32_t value_bytes = (uint32_t)kvf_value_bytes(&p->shape);
    const size_t element = kvf_dtype_bytes(p->shape.dtype);
    const uint32_t slot = kvf_slot_admit(p, t, page, row->use - 1);
    if (slot == UINT32_MAX)
        return;
    if (threadIdx.x % KVF_WARP_LANES == 0)
        t.tags[slot] = kvf_row_page_tag(p, row, page);
    for (uint32_t i = first; row->slots && i < first + p->shape.page_size; i++) {
        char *to = kvf_row_slot(p, row, head, slot) + (i - first) * kvf_token_bytes(&p->shape);
        const bool is_nonfinite = kvf_admit_written_is_nonfinite(&a, i);
        if (a.is_wide) {
            const uint32_t dim = p->shape.head_dim, value_dim = kvf_value_dim(&p->shape);
            const float *k = (const float *)a.k + i * a.k_stride + head * dim;
            const float *v = (const float *)a.v + i * a.v_stride + head * value_dim;
            round_vector(to, k, dim, is_nonfinite, p->shape.dtype);
            round_vector(to + bytes, v, value_dim, is_nonfinite, p->shape.dtype);
            continue;
        }
        copy_vector(to, (const char *)a.k + i * a.k_stride * element + head * bytes, bytes,
                    is_nonfinite);
        copy_vector(to + bytes, (const char *)a.v + i * a.v_stride * element + head * value_bytes,
                    value_bytes, is_nonfinite);
    }
}

static __global__ void __launch_bounds__(ADMIT_THREADS, ADMIT_BLOCKS)
    admit_written_pages(const __grid_constant__ kvf_write_args a)
{
    const kvf_physical_blocks *c = a.blocks;
    const uint32_t page = kvf_admit_written_page(&a, blockIdx.x);
    if (page == UINT32_MAX)
        return;
    const kvf_row row = kvf_physical_slots(c);
    for (uint32_t h = threadIdx.x / KVF_WARP_LANES; h < c->paging.kv_heads;
         h += ADMIT_THREADS / KVF_WARP_LANES)
        if (!c->streaming.number || !c->streaming.number[a.layer * c->paging.kv_heads + h])
            admit_written_page(a, &row, h, page);
}

extern "C" int kvf_admit_written_cuda(const void *args, uint32_t, void *stream)
{
    const kvf_write_args *a = (const kvf_write_args *)args;
    if (a->tokens == 0)
        return cudaSuccess;
    return kvf_cuda_launch<admit_written_pages>(dim3(a->tokens), dim3(ADMIT_THREADS), 0,
                                                (cudaStream_t)stream, *a);
}
