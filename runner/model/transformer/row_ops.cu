/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The row operations of row_ops.h as CUDA kernels; layer_ops.c is their specification.
 *
 * All are bound by memory: start reads one row of the embedding and writes one of fp32; norm reads
 * 4 and writes 2 bytes per channel (the row is read twice, the second time from L1); rotate reads
 * 4 and writes 2; activate reads 8 and writes 2; gather reads and writes 4, the
 * same bits. Within the tolerance of tests/model/test_row_ops.c they agree with the host: sums are
 * fp32, by thread and then by a tree over the block, the same for the same width.
 */

#include "row_ops.cuh"

#define THREADS KVF_ROW_THREADS
#define WARPS   KVF_ROW_WARPS

/* One block per row. */
template <typename T>
static __global__ void start_kernel(const __grid_constant__ kvf_row_start_args a)
{
    const size_t row = blockIdx.x;
    const T *from = (const T *)a.embedding + (size_t)a.ids[row] * a.width;
    float *to = a.hidden + row * a.width;
    for (uint32_t i = threadIdx.x; i < a.width; i += THREADS)
        to[i] = kvf_to_float<T>(from[i]);
    for (uint32_t i = threadIdx.x; i < a.half; i += THREADS) {
        /* The product is rounded before cosine and sine, as on the host. */
        const float angle = (float)a.position[row] * a.inv_freq[i];
        a.cosine[row * a.half + i] = a.scaling * cosf(angle);
        a.sine[row * a.half + i] = a.scaling * sinf(angle);
    }
}

/* One block per row. Shared: [WARPS] fp32. */
template <typename T>
static __global__ void norm_kernel(const __grid_constant__ kvf_row_norm_args a)
{
    kvf_let_next_start();
    kvf_wait_for_earlier();
    kvf_norm_rows<T, 1>(a, blockIdx.x, 1, (float *)(void *)kvf_shared());
}

/* One warp per (row, head). */
template <typename T>
static __global__ void rotate_kernel(const __grid_constant__ kvf_row_rotate_args a)
{
    const uint32_t heads = a.query_heads + 2 * a.kv_heads;
    const uint32_t warp = blockIdx.x * WARPS + threadIdx.x / KVF_WARP_LANES;
    kvf_let_next_start();
    kvf_wait_for_earlier();
    if (warp < a.rows * heads)
        kvf_rotate_head<T>(a, warp / heads, warp % heads);
}

/* A thread per channel. */
template <typename T>
static __global__ void activate_kernel(const __grid_constant__ kvf_row_activate_args a)
{
    const size_t i = (size_t)blockIdx.x * THREADS + threadIdx.x;
    if (i >= (size_t)a.rows * a.width)
        return;
    const size_t row = i / a.width, column = i % a.width;
    const float gate = a.gate_up[2 * row * a.width + column];
    const float up = a.gate_up[(2 * row + 1) * a.width + column];
    ((T *)a.y)[i] = kvf_from_float<T>(gate / (1.0f + expf(-gate)) * up);
}

/* One block per row. */
static __global__ void gather_kernel(const __grid_constant__ kvf_row_gather_args a)
{
    const float *from = a.from + (size_t)a.index[blockIdx.x] * a.width;
    float *to = a.to + (size_t)blockIdx.x * a.width;
    for (uint32_t i = threadIdx.x; i < a.width; i += THREADS)
        to[i] = from[i];
}

/* Calls KERNEL for the element type of `a->dtype`, by kvf_cuda_launch or its early form. */
#define LAUNCH_BY_TYPE(launch, kernel, blocks, shared, a)                                          \
    switch ((a)->dtype) {                                                                          \
    case KVF_BF16:                                                                                 \
        return (int)launch<kernel<kvf_bf16>>(dim3(blocks), dim3(THREADS), shared,                  \
                                             (cudaStream_t)stream, *(a));                          \
    case KVF_FP16:                                                                                 \
        return (int)launch<kernel<kvf_half>>(dim3(blocks), dim3(THREADS), shared,                  \
                                             (cudaStream_t)stream, *(a));                          \
    case KVF_FP32:                                                                                 \
        return (int)launch<kernel<float>>(dim3(blocks), dim3(THREADS), shared,                     \
                                          (cudaStream_t)stream, *(a));                             \
    }                                                                                              \
    return (int)cudaErrorInvalidValue

extern "C" int kvf_row_use_device(uint32_t ordinal)
{
    return (int)cudaSetDevice((int)ordinal);
}

extern "C" int kvf_row_load_kernels(void)
{
    return (int)kvf_cuda_load_list();
}

extern "C" void kvf_row_refuse_early_starts(int more)
{
    kvf_cuda_refuse_early(more);
}

extern "C" int kvf_row_start_cuda(const kvf_row_start_args *args, void *stream)
{
    LAUNCH_BY_TYPE(kvf_cuda_launch, start_kernel, args->rows, 0, args);
}

extern "C" int kvf_row_norm_cuda(const kvf_row_norm_args *args, void *stream)
{
    LAUNCH_BY_TYPE(kvf_cuda_launch_early, norm_kernel, args->rows, WARPS * sizeof(float), args);
}

extern "C" int kvf_row_rotate_cuda(const kvf_row_rotate_args *args, void *stream)
{
    const uint32_t warps = args->rows * (args->query_heads + 2 * args->kv_heads);
    LAUNCH_BY_TYPE(kvf_cuda_launch_early, rotate_kernel, (warps + WARPS - 1) / WARPS, 0, args);
}

extern "C" int kvf_row_activate_cuda(const kvf_row_activate_args *args, void *stream)
{
    const size_t channels = (size_t)args->rows * args->width;
    LAUNCH_BY_TYPE(kvf_cuda_launch, activate_kernel, (unsigned)((channels + THREADS - 1) / THREADS),
                   0, args);
}

extern "C" int kvf_row_gather_cuda(const kvf_row_gather_args *args, void *stream)
{
    return (int)kvf_cuda_launch<gather_kernel>(dim3(args->rows), dim3(THREADS), 0,
                                               (cudaStream_t)stream, *args);
}
