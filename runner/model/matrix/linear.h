/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_MODEL_LINEAR_H
#define KVF_MODEL_LINEAR_H

/*
 * Matrix products y = x W^T (+ bias), with W as the file has it: [outputs, inputs] in bf16, fp16 or
 * fp32, never copied as a whole.
 *
 * A row of x goes through a matrix-vector kernel of the runner, which reads W once at memory speed;
 * a few rows, or the rows of a step, through one that gives each of them the same bits. Many rows
 * go through a kernel for strips of outputs in fp32, or panel by panel through oneDNN in bf16 where
 * that is faster, which rounds by their number. It knows streams and shapes, not layers.
 * Invariant: every bit of a product follows from the shapes alone, never from the number of
 * threads.
 */

#include "model_memory.h"

/** One matrix. Borrowed data; lives as long as anything enqueued with it. */
typedef struct kvf_linear {
    const void *weight; /**< [outputs, inputs] row-major, of `dtype` */
    kvf_dtype dtype;
    uint32_t outputs;
    uint32_t inputs;
    const float *bias; /**< [outputs], or NULL */
} kvf_linear;

/** Bytes of one of its rows. */
static inline size_t kvf_linear_row_bytes(const kvf_linear *linear)
{
    return linear->inputs * kvf_dtype_bytes(linear->dtype);
}

#define KVF_LINEAR_PARTS_MAX 3u

/** Up to three matrices that share x; their outputs lie side by side in y. */
typedef struct kvf_linear_call {
    const kvf_linear
        *parts[KVF_LINEAR_PARTS_MAX]; /**< equal inputs; the first part_count are used */
    uint32_t part_count;
    uint32_t rows;   /**< of x and y: 1 … rows_max of the engine */
    const float *x;  /**< [rows, inputs] */
    float *y;        /**< [rows, sum of outputs] */
    bool accumulate; /**< y += instead of y = */
    bool separate;   /**< a row gets the bits that it gets alone, however many there are */
} kvf_linear_call;

/** One instruction set's kernels: y[r] = sum over c of weight[r][c] x[c], for consecutive rows. */
typedef void (*kvf_dot_rows_fn)(const void *weight, size_t rows, size_t columns, const float *x,
                                float *y);
typedef void (*kvf_widen_fn)(const void *from, size_t count, float *to);

#define KVF_SMALL_BATCH_ROWS_MAX 16u
#define KVF_SMALL_BATCH_OUTPUTS  12u /* what is fastest comes in multiples of it */

/** Neighbouring outputs of a matrix for the rows of a step: y[r][o] = sum over c of weight[o][c]
 * x[r][c], with the bits of dot_rows for each row alone. */
typedef struct kvf_small_batch_product {
    const kvf_linear *linear;
    const void *weight; /**< of the first output */
    uint32_t outputs;
    uint32_t rows;  /**< of x and y: 1 … KVF_SMALL_BATCH_ROWS_MAX */
    const float *x; /**< [rows, inputs] */
    float *y;       /**< [rows, y_stride], from the first output on */
    size_t y_stride;
} kvf_small_batch_product;

typedef struct kvf_small_batch_kernel {
    void (*multiply)(const kvf_small_batch_product *product);
} kvf_small_batch_kernel;

#define KVF_STRIP_COLUMNS     1024u /* inputs at a time */
#define KVF_STRIP_OUTPUTS_MAX 48u
#define KVF_STRIP_FLOATS      (KVF_STRIP_COLUMNS * KVF_STRIP_OUTPUTS_MAX)

/** Neighbouring outputs of a matrix for all rows of x. */
typedef struct kvf_strip {
    const kvf_linear *linear;
    uint32_t first;   /**< output */
    uint32_t outputs; /**< 1 … those of the kernel */
    uint32_t rows;    /**< of x and y */
    const float *x;   /**< [rows, inputs] */
    float *y;         /**< [rows, y_stride], from the first output on */
    size_t y_stride;
    bool accumulate;
    float *scratch; /**< [KVF_STRIP_FLOATS] */
} kvf_strip;

/** Sums in fp32, over the inputs in order. */
typedef struct kvf_strip_kernel {
    uint32_t outputs; /**< of a strip */
    void (*multiply)(const kvf_strip *strip);
} kvf_strip_kernel;

typedef struct kvf_linear_kernels {
    const char *name;
    kvf_dot_rows_fn dot_rows[3]; /**< by kvf_dtype */
    kvf_widen_fn widen[3];       /**< by kvf_dtype; fp32 is a copy */
    void (*round)(const float *from, size_t count, uint16_t *to); /**< to bf16 */
    void (*swiglu)(const float *gate, const float *up, size_t count, float *y);
    const kvf_strip_kernel *strip;
    const kvf_small_batch_kernel *wide;
} kvf_linear_kernels;

/** The best set that the CPU has and @p isa_mask (kvf_isa) allows. Never NULL. */
const kvf_linear_kernels *kvf_linear_kernels_choose(uint32_t isa_mask);

typedef struct kvf_linear_engine kvf_linear_engine;

/** Whether x may be rounded to bf16 where weights are bf16 and rows many. Otherwise all is widened
 * to fp32. */
typedef enum kvf_linear_bf16 {
    KVF_LINEAR_BF16_AUTO, /**< where it is faster */
    KVF_LINEAR_BF16_OFF,
} kvf_linear_bf16;

typedef struct kvf_linear_limits {
    uint32_t rows_max;
    uint32_t inputs_max;
    uint32_t isa_mask; /**< of kvf_isa */
    kvf_linear_bf16 bf16;
} kvf_linear_limits;

/** Bytes that an engine reserves on a runtime with @p threads compute threads. */
uint64_t kvf_linear_engine_bytes(const kvf_linear_limits *limits, uint32_t threads);

KVF_CHECKED kvf_status kvf_linear_engine_open(kvf_runtime *runtime, const kvf_linear_limits *limits,
                                              kvf_linear_engine **out, kvf_error *error);
/** Wait for the streams first. */
void kvf_linear_engine_close(kvf_linear_engine *engine);

/** Whether a product failed because memory ran out. Ask after kvf_stream_wait. */
bool kvf_linear_engine_failed(const kvf_linear_engine *engine);

/**
 * Enqueue a product.
 *
 * @return KVF_OK; KVF_INVALID for a shape outside the engine's limits; what kvf_stream_launch says
 *
 * Stream: enqueues; does not wait. Products of one engine must be on one stream: they share
 * scratch. Memory: allocates nothing itself; oneDNN may where rows > KVF_LINEAR_VECTOR_ROWS_MAX.
 */
KVF_CHECKED kvf_status kvf_linear_enqueue(kvf_linear_engine *engine, const kvf_linear_call *call,
                                          kvf_stream *stream);

/**
 * Up to this many rows the matrix-vector kernel is used: where it is clearly faster than strips on
 * bf16 weights. On a Xeon with AVX-512: 2.8 times at 1 row, 2.2 at 2, 1.7 at 3, 1.5 at 4, 0.9 at 8
 * (bench/results/bench_linear.txt).
 */
#define KVF_LINEAR_VECTOR_ROWS_MAX 3u

#endif
