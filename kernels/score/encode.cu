/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Codes of keys on the GPU.
 *
 * Knows nothing of where code groups live. A block is 8 warps and one job, half a warp one token.
 * The two bits of a channel meet the others of their word by four shuffles.
 *
 * Bound: instructions, about 240 per two tokens of 128 channels and warp, beside 256 bytes read (in
 * bf16) and 34 written per token: some percent of one product of a model's layer. Exactness: the
 * bits of encode_ref.c.
 */

#include <float.h>

#include "cuda_kernels.h"

#include "score/codes.cuh"

#define THREADS 256u
#define TOKENS  (THREADS / KVF_CODE_LANES)

/* The words of this lane's token; returns its scale. */
template <uint32_t N>
static __device__ __forceinline__ uint16_t encode_row(uint32_t *words, float x[N], uint32_t count,
                                                      uint32_t head_dim)
{
    const uint32_t lane = threadIdx.x % KVF_CODE_LANES;
    float part = 0.0f;
#pragma unroll
    for (uint32_t k = 0; k < N; k++)
        if (k < count)
            part = __fadd_rn(part, __fmul_rn(x[k], x[k]));
    const float n2 = kvf_code_sum(part);
    const bool is_flat = !(n2 > 0.0f && n2 <= FLT_MAX);
    const float edge = __fmul_rn(KVF_CODE_EDGE, __fsqrt_rn(__fdiv_rn(n2, (float)head_dim)));
    part = 0.0f;
#pragma unroll
    for (uint32_t k = 0; k < N; k++) {
        if (k >= count)
            break;
        const bool is_near = fabsf(x[k]) < edge, is_below = x[k] < 0.0f;
        uint32_t word = (is_near == is_below) | (is_below ? 0u : 2u);
        part = __fadd_rn(part, __fmul_rn(is_near ? 3.0f : 10.0f, fabsf(x[k])));
        word <<= kvf_code_shift(lane);
#pragma unroll
        for (int step = 1; step < (int)KVF_CODE_LANES; step *= 2)
            word |= __shfl_xor_sync(KVF_FULL_WARP, word, step);
        if (lane == k)
            words[k * KVF_CODE_LANES] = is_flat ? KVF_CODE_FLAT : word;
    }
    const float scale = __fdiv_rn(n2, kvf_code_sum(part));
    return is_flat ? 0 : kvf_fp16_from_float(scale < 65504.0f ? scale : 65504.0f);
}

template <typename T>
static __global__ void __launch_bounds__(THREADS)
    encode_keys(const __grid_constant__ kvf_encode_args a)
{
    const kvf_digest_job job = a.jobs[blockIdx.x];
    const uint32_t head_dim = a.shape.head_dim, words = head_dim / KVF_CODE_LANES;
    if (!job.page)
        return;
    for (uint32_t t = threadIdx.x / KVF_CODE_LANES; t < job.count; t += TOKENS) {
        char *group = (char *)job.digest + t / KVF_CODE_TOKENS * kvf_code_bytes(head_dim);
        const uint32_t in_group = t % KVF_CODE_TOKENS;
        float x[KVF_CODE_WORDS];
        kvf_code_load(x, (const T *)kvf_page_key(&a.shape, job.page, t), words);
        kvf_code_rotate_lanes(x, words);
        const uint16_t scale = encode_row<KVF_CODE_WORDS>(
            (uint32_t *)group + kvf_code_word(head_dim, in_group, 0), x, words, head_dim);
        if (threadIdx.x % KVF_CODE_LANES == 0)
            ((uint16_t *)(group + kvf_code_scales(head_dim)))[in_group] = scale;
    }
}

extern "C" int kvf_encode_cuda(const void *args, uint32_t tasks, void *stream)
{
    const kvf_encode_args *a = (const kvf_encode_args *)args;
    const dim3 grid(a->job_count), block(THREADS);
    (void)tasks;
    if (a->job_count == 0)
        return cudaSuccess;
    switch (a->shape.dtype) {
    case KVF_BF16:
        return kvf_cuda_launch<encode_keys<kvf_bf16>>(grid, block, 0, (cudaStream_t)stream, *a);
    case KVF_FP16:
        return kvf_cuda_launch<encode_keys<kvf_half>>(grid, block, 0, (cudaStream_t)stream, *a);
    default:
        return kvf_cuda_launch<encode_keys<float>>(grid, block, 0, (cudaStream_t)stream, *a);
    }
}
