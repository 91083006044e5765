/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Means of stretches, on the GPU; see means_ref.c for the meaning.
 *
 * Knows nothing of keys. A block is one stretch of one KV head, a thread one channel of it. Bound:
 * a launch, for the few stretches of a call. Exactness: the bits of means_ref.c.
 */

#include <float.h>

#include "cuda_kernels.h"
#include "paging.cuh"
#include "score/codes.h"
#include "score/score_args.h"

static __global__ void __launch_bounds__(KVF_HEAD_DIM_MAX)
    means_of(const __grid_constant__ kvf_means_args a)
{
    const kvf_paging *p = &a.paging;
    const uint32_t per_row = p->kv_heads * a.stretches, head_dim = p->shape.head_dim;
    const kvf_row *row = &a.row[blockIdx.x / per_row];
    const uint32_t rest = blockIdx.x % per_row, head = rest / a.stretches;
    const uint32_t i = kvf_stretches(p->block_size, row->sealed_before) + rest % a.stretches;
    const uint32_t c = threadIdx.x, shift = kvf_code_shift(c % KVF_CODE_LANES);
    float *const all = (float *)kvf_shared();
    if (i >= kvf_stretches(p->block_size, row->sealed))
        return;
    const char *codes = kvf_row_digest(p, row, 0, head) +
                        (size_t)i * (KVF_MEAN_TOKENS / KVF_CODE_TOKENS) * kvf_code_bytes(head_dim);
    float x = 0.0f, largest = 0.0f;
    for (uint32_t t = 0; t < KVF_MEAN_TOKENS; t++) {
        const char *group = codes + t / KVF_CODE_TOKENS * kvf_code_bytes(head_dim);
        const uint32_t word =
            ((const uint32_t *)(const void *)
                 group)[kvf_code_word(head_dim, t % KVF_CODE_TOKENS, c / KVF_CODE_LANES)];
        const uint16_t *scales =
            (const uint16_t *)(const void *)(group + kvf_code_scales(head_dim));
        const uint32_t code = word >> shift & 3;
        const float level = code == 0 ? -10.0f : code == 1 ? -3.0f : code == 2 ? 3.0f : 10.0f;
        x = __fadd_rn(x, __fmul_rn(kvf_fp16_to_float(scales[t % KVF_CODE_TOKENS]), level));
    }
    x = __fmul_rn(x, 1.0f / KVF_MEAN_TOKENS);
    all[c] = fabsf(x);
    __syncthreads();
    for (uint32_t k = 0; k < head_dim; k++)
        largest = fmaxf(largest, all[k]);
    const float unit = __fdiv_rn(127.0f, largest), scale = __fdiv_rn(largest, 127.0f);
    const bool is_flat = !(unit <= FLT_MAX);
    /* Adding 1.5 * 2^23 rounds to an integer, in the low bits. */
    const float y = __fadd_rn(__fmul_rn(x, unit), 0x1.8p23f);
    kvf_row_mean(p, row, head, i)[c] = is_flat ? 0 : (int8_t)kvf_float_bits(y);
    if (c == 0)
        *kvf_row_mean_scale(p, row, head, i) =
            is_flat ? 0 : kvf_fp16_from_float(scale < 65504.0f ? scale : 65504.0f);
}

int kvf_means_cuda(const void *args, uint32_t tasks, void *stream)
{
    const kvf_means_args *a = (const kvf_means_args *)args;
    const uint32_t head_dim = a->paging.shape.head_dim;
    if (tasks == 0)
        return cudaSuccess;
    return kvf_cuda_launch<means_of>(dim3(tasks), dim3(head_dim), head_dim * sizeof(float),
                                     (cudaStream_t)stream, *a);
}
