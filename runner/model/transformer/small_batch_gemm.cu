/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Products of a few rows (small_batch_gemm.h).
 *
 * Bound: W is read once, at 2 bytes an element. A block has 16 outputs, and its warps take turns of
 * 128 inputs; a lane has 8 loads of 16 bytes on their way, a warp 4 KiB, the 16 warps of a
 * multiprocessor 64 KiB, of which 3.35 TB/s need about 17 (132 multiprocessors, 0.7 us). x comes
 * from L1 or L2. Products are of tensor cores, 2 to 16 per 1 KiB of W; outputs are their rows and
 * rows of x their columns, so that up to 64 of them share one reading.
 *
 * Which input meets which place of a product is the same for W and x, and otherwise does not
 * matter: a lane's 16 bytes are its places of two products. Outputs come in pairs, `first` and
 * `second`, 8 rows of a product apart: gate and up, or the two halves of a head, meet in one
 * thread. Sums are formed by turns, then warps in their order: the same for any number of rows.
 *
 * A norm after a product is of its last block. The time that this adds to the end of the product,
 * beside a fence and an atomic per block: rows are read once more, 4 bytes an output from L2, which
 * at 4096 outputs is 16 KiB a row, 256 cycles of a multiprocessor that takes 64 bytes in one;
 * weights are in L2 by then. A launch of its own has a block per row, so it wins from some number
 * of rows on: KVF_SMALL_BATCH_NORM_ROWS are 2048 cycles, and 64 rows would be 16384. Norms of heads
 * have a last block each: 512 bytes a row at head_dim 128. Counted, not measured.
 */

#include "small_batch_gemm.h"

#include "row_ops.cuh"

#define WARPS_MAX    KVF_ROW_WARPS
#define PAIRS        8u  /* of outputs of a block */
#define STEP_INPUTS  32u /* of four lanes with 16 bytes each */
#define STEPS        4u  /* of a turn */
#define LANE_INPUTS  8u
#define LINE_INPUTS  64u
#define TILE_COLUMNS 8u
#define ROWS_MAX     64u /* of a launch */

/* SMALL_BATCH_HEADS: as SMALL_BATCH_ROTATE, with norms in between. */
enum small_batch_kind {
    SMALL_BATCH_STORE,
    SMALL_BATCH_ADD,
    SMALL_BATCH_SWIGLU,
    SMALL_BATCH_ROTATE,
    SMALL_BATCH_HEADS
};

typedef struct small_batch_args {
    small_batch_kind kind;
    kvf_small_batch_gemm product; /* its rows: of one launch */
    uint32_t row;                 /* the first of them */
    uint32_t pairs;
    kvf_row_rotate_args heads; /* SMALL_BATCH_ROTATE, SMALL_BATCH_HEADS */
    kvf_row_norm_args norm;    /* SMALL_BATCH_ADD: of the sums, where `arrived` is not NULL */
    uint32_t *arrived;         /* blocks that share what comes after the product */
    void *y;                   /* of other kinds than SMALL_BATCH_ROTATE */
} small_batch_args;

/* Where a row of W begins. */
static __device__ __forceinline__ const char *find_row(const kvf_small_batch_gemm &m,
                                                       uint32_t output)
{
    return (const char *)m.weight + (size_t)output * m.inputs * 2;
}

/* The outputs of a pair. The second one may be beyond the last output. */
typedef struct small_batch_pair {
    uint32_t first, second;
} small_batch_pair;

static __device__ __forceinline__ small_batch_pair find_pair(const small_batch_args &a,
                                                             uint32_t pair)
{
    if (a.kind == SMALL_BATCH_SWIGLU)
        return {pair, a.pairs + pair};
    if (a.kind == SMALL_BATCH_ROTATE || a.kind == SMALL_BATCH_HEADS) {
        const uint32_t pairs = a.heads.head_dim / 2;
        const uint32_t first = pair / pairs * 2 * pairs + pair % pairs;
        return {first, first + pairs};
    }
    const uint32_t first = pair / PAIRS * 2 * PAIRS + pair % PAIRS;
    return {first, first + PAIRS};
}

template <typename T>
static __device__ __forceinline__ void store_heads(const small_batch_args &a, uint32_t row,
                                                   const small_batch_pair &p, float x, float y)
{
    const kvf_row_rotate_args &h = a.heads;
    const uint32_t pairs = h.head_dim / 2, head = p.first / h.head_dim, i = p.first % h.head_dim;
    const bool is_query = head < h.query_heads, is_value = head >= h.query_heads + h.kv_heads;
    const float c = is_value ? 1.0f : h.cosine[(size_t)row * pairs + i];
    const float s = is_value ? 0.0f : h.sine[(size_t)row * pairs + i];
    x += h.bias ? h.bias[p.first] : 0.0f;
    y += h.bias ? h.bias[p.second] : 0.0f;
    const size_t at = is_query ? (size_t)row * h.query_heads + head
                               : (size_t)row * h.kv_heads + (head - h.query_heads) % h.kv_heads;
    T *to = (T *)(is_query ? h.q : is_value ? h.v : h.k) + at * h.head_dim + i;
    to[0] = kvf_from_float<T>(x * c - y * s);
    to[pairs] = kvf_from_float<T>(y * c + x * s);
}

/* The sums of a pair for a row of x. */
template <typename T>
static __device__ __forceinline__ void finish(const small_batch_args &a, uint32_t row,
                                              const small_batch_pair &p, float x, float y)
{
    if (a.kind == SMALL_BATCH_SWIGLU) {
        ((T *)a.y)[(size_t)row * a.pairs + p.first] = kvf_from_float<T>(x / (1.0f + expf(-x)) * y);
    } else if (a.kind == SMALL_BATCH_ROTATE) {
        store_heads<T>(a, row, p, x, y);
    } else {
        float *to = (float *)a.y + (size_t)row * a.product.outputs;
        if (p.first < a.product.outputs)
            to[p.first] = a.kind == SMALL_BATCH_ADD ? to[p.first] + x : x;
        if (p.second < a.product.outputs)
            to[p.second] = a.kind == SMALL_BATCH_ADD ? to[p.second] + y : y;
    }
}

/* Eight weights of a row, or zeros. */
static __device__ __forceinline__ uint4 load_piece(const char *row, uint32_t input, uint32_t inputs,
                                                   bool is_there)
{
    return is_there && input < inputs ? kvf_load_once(row + (size_t)input * 2)
                                      : make_uint4(0, 0, 0, 0);
}

/* A line of a row's turn, to L2; four lanes take the four of a pair. */
static __device__ __forceinline__ void prefetch_line(const char *row, uint32_t input,
                                                     uint32_t inputs, bool is_there)
{
    if (is_there && input < inputs)
        kvf_prefetch(row + (size_t)input * 2);
}

static __device__ __forceinline__ uint4 load_x(const char *row, uint32_t input, uint32_t inputs,
                                               bool is_there)
{
    return is_there && input < inputs ? *(const uint4 *)(const void *)(row + (size_t)input * 2)
                                      : make_uint4(0, 0, 0, 0);
}

/* The two products of a step. */
template <typename T>
static __device__ __forceinline__ void multiply_step(float sum[4], const uint4 &w, const uint4 &v,
                                                     const uint4 &x)
{
    const uint32_t low[4] = {w.x, v.x, w.y, v.y}, high[4] = {w.z, v.z, w.w, v.w};
    const uint32_t x_low[2] = {x.x, x.y}, x_high[2] = {x.z, x.w};
    kvf_mma(sum, low, x_low, T());
    kvf_mma(sum, high, x_high, T());
}

/* The last block of the product, or of a head, has the norm. Its sums are read again: 4 bytes each,
 * from L2. */
template <typename T, uint32_t tiles>
static __device__ __forceinline__ void go_on(const small_batch_args &a)
{
    uint32_t *is_last = (uint32_t *)(void *)kvf_shared();
    float *partial = (float *)(void *)(is_last + 1);
    if (a.kind == SMALL_BATCH_HEADS) {
        const uint32_t blocks = a.heads.head_dim / (2 * PAIRS), head = blockIdx.x / blocks;
        if (kvf_arrives_last(is_last, &a.arrived[head], blocks))
            for (uint32_t row = threadIdx.x / 32; row < a.product.rows; row += blockDim.x / 32)
                kvf_rotate_head<T>(a.heads, a.row + row, head);
    } else if (tiles == 1 && kvf_arrives_last(is_last, a.arrived, gridDim.x)) {
        if (a.product.rows == 1)
            kvf_norm_rows<T, 1>(a.norm, 0, 1, partial);
        else
            kvf_norm_rows<T, KVF_SMALL_BATCH_NORM_ROWS>(a.norm, 0, a.product.rows, partial);
    }
}

/* One block per PAIRS pairs. Shared: [warps, 2 x PAIRS, columns] fp32. */
template <typename T, uint32_t tiles>
static __global__ void __launch_bounds__(WARPS_MAX * 32u, 1)
    small_batch_kernel(const __grid_constant__ small_batch_args a)
{
    constexpr uint32_t columns = tiles * TILE_COLUMNS;
    const kvf_small_batch_gemm &m = a.product;
    kvf_let_next_start();
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    const uint32_t group = lane / 4, place = lane % 4;
    float(*partial)[2 * PAIRS][columns] = (float(*)[2 * PAIRS][columns])(void *)kvf_shared();
    const uint32_t pair = blockIdx.x * PAIRS + group;
    const small_batch_pair p = find_pair(a, pair);
    const bool has_first = pair < a.pairs && p.first < a.product.outputs;
    const bool has_second = pair < a.pairs && p.second < a.product.outputs;
    const char *first = find_row(m, p.first), *second = find_row(m, p.second);
    float sum[tiles][4] = {};
    /* Nobody writes weights: they come while the kernel before this one ends. */
    prefetch_line(place < 2 ? first : second, warp * STEPS * STEP_INPUTS + place % 2 * LINE_INPUTS,
                  m.inputs, place < 2 ? has_first : has_second);
    if (a.norm.weight && threadIdx.x == 0 && blockIdx.x * 2 * PAIRS < a.product.outputs)
        kvf_prefetch(a.norm.weight + blockIdx.x * 2 * PAIRS);
    kvf_wait_for_earlier();
    for (uint32_t turn = warp; turn * STEPS * STEP_INPUTS < m.inputs; turn += warps) {
        const uint32_t input = turn * STEPS * STEP_INPUTS + place * LANE_INPUTS;
        uint4 w[STEPS], v[STEPS];
#pragma unroll
        for (uint32_t s = 0; s < STEPS; s++) {
            const uint32_t at = input + s * STEP_INPUTS;
            w[s] = load_piece(first, at, m.inputs, has_first);
            v[s] = load_piece(second, at, m.inputs, has_second);
        }
#pragma unroll
        for (uint32_t s = 0; s < STEPS; s++)
#pragma unroll
            for (uint32_t t = 0; t < tiles; t++) {
                const uint32_t row = t * TILE_COLUMNS + group;
                const char *x = (const char *)m.x + (size_t)(a.row + row) * m.inputs * 2;
                multiply_step<T>(sum[t], w[s], v[s],
                                 load_x(x, input + s * STEP_INPUTS, m.inputs, row < m.rows));
            }
    }
#pragma unroll
    for (uint32_t t = 0; t < tiles; t++)
#pragma unroll
        for (uint32_t i = 0; i < 4; i++)
            partial[warp][group + i / 2 * PAIRS][t * TILE_COLUMNS + 2 * place + i % 2] = sum[t][i];
    __syncthreads();
    for (uint32_t item = threadIdx.x; item < PAIRS * m.rows; item += blockDim.x) {
        const uint32_t i = item % PAIRS, row = item / PAIRS;
        float x = 0.0f, y = 0.0f;
        for (uint32_t from = 0; from < warps; from++) {
            x += partial[from][i][row];
            y += partial[from][i + PAIRS][row];
        }
        if (blockIdx.x * PAIRS + i < a.pairs)
            finish<T>(a, a.row + row, find_pair(a, blockIdx.x * PAIRS + i), x, y);
    }
    if (a.arrived)
        go_on<T, tiles>(a);
}

template <typename T, uint32_t tiles>
static cudaError_t launch(const small_batch_args &a, void *stream)
{
    const uint32_t turn_inputs = STEPS * STEP_INPUTS;
    const uint32_t turns = (a.product.inputs + turn_inputs - 1) / turn_inputs;
    const uint32_t warps = turns < WARPS_MAX && !a.norm.y ? turns : WARPS_MAX;
    const size_t shared = (size_t)warps * 2 * PAIRS * tiles * TILE_COLUMNS * sizeof(float);
    return kvf_cuda_launch_early<small_batch_kernel<T, tiles>>(
        dim3((a.pairs + PAIRS - 1) / PAIRS), dim3(warps * 32u), shared, (cudaStream_t)stream, a);
}

template <typename T> static cudaError_t launch_rows(const small_batch_args &a, void *stream)
{
    if (a.product.rows <= TILE_COLUMNS)
        return launch<T, 1>(a, stream);
    if (a.product.rows <= 2 * TILE_COLUMNS)
        return launch<T, 2>(a, stream);
    return launch<T, ROWS_MAX / TILE_COLUMNS>(a, stream);
}

static int launch_all(small_batch_args a, void *stream)
{
    const kvf_small_batch_gemm all = a.product;
    cudaError_t status = cudaSuccess;
    if (all.rows == 0 || all.inputs == 0 || all.inputs % LANE_INPUTS != 0 || all.dtype == KVF_FP32)
        return (int)cudaErrorInvalidValue;
    for (a.row = 0; a.row < all.rows && status == cudaSuccess; a.row += ROWS_MAX) {
        a.product.rows = all.rows - a.row < ROWS_MAX ? all.rows - a.row : ROWS_MAX;
        status = all.dtype == KVF_BF16 ? launch_rows<kvf_bf16>(a, stream)
                                       : launch_rows<kvf_half>(a, stream);
    }
    return (int)status;
}

static small_batch_args sums_of(const kvf_small_batch_gemm *product, float *y,
                                small_batch_kind kind)
{
    small_batch_args a = {};
    a.product = *product;
    a.pairs = (a.product.outputs + 2 * PAIRS - 1) / (2 * PAIRS) * PAIRS;
    a.y = y;
    a.kind = kind;
    return a;
}

extern "C" int kvf_small_batch_gemm_cuda(const kvf_small_batch_gemm *product, float *y,
                                         uint32_t accumulate, void *stream)
{
    return launch_all(sums_of(product, y, accumulate ? SMALL_BATCH_ADD : SMALL_BATCH_STORE),
                      stream);
}

extern "C" int kvf_small_batch_add_norm_cuda(const kvf_small_batch_gemm *product, float *y,
                                             const kvf_row_norm_args *norm, uint32_t *arrived,
                                             void *stream)
{
    small_batch_args a = sums_of(product, y, SMALL_BATCH_ADD);
    a.norm = *norm;
    a.arrived = arrived;
    if (product->rows > KVF_SMALL_BATCH_NORM_ROWS || norm->rows != product->rows || norm->x != y ||
        norm->width != a.product.outputs || norm->dtype != product->dtype)
        return (int)cudaErrorInvalidValue;
    return launch_all(a, stream);
}

extern "C" int kvf_small_batch_swiglu_cuda(const kvf_small_batch_gemm *product, void *y,
                                           void *stream)
{
    small_batch_args a = {};
    a.product = *product;
    a.pairs = a.product.outputs / 2;
    a.y = y;
    a.kind = SMALL_BATCH_SWIGLU;
    return launch_all(a, stream);
}

extern "C" int kvf_small_batch_rotate_cuda(const kvf_small_batch_gemm *product,
                                           const kvf_row_rotate_args *heads, uint32_t *arrived,
                                           void *stream)
{
    small_batch_args a = {};
    a.product = *product;
    a.heads = *heads;
    a.pairs = a.product.outputs / 2;
    a.kind = SMALL_BATCH_ROTATE;
    if (heads->query_norm || heads->key_norm) {
        if (!kvf_small_batch_norms_heads(heads->head_dim))
            return (int)cudaErrorInvalidValue;
        a.kind = SMALL_BATCH_HEADS;
        a.arrived = arrived;
        a.y = (float *)(uintptr_t)heads->qkv;
    }
    return launch_all(a, stream);
}
