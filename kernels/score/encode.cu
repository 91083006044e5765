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

#include "cuda_kernels.h"

#include "score/codes.cuh"

#define THREADS 256u
#define TOKENS  (THREADS / KVF_CODE_LANES)

template <typename T>
/* Four blocks at once: without the bound Blackwell's compiler takes registers for three. */
static __global__ void __launch_bounds__(THREADS, 4)
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
        const uint16_t scale = kvf_code_encode_lanes(
            (uint32_t *)group + kvf_code_word(head_dim, in_group, 0), x, words, head_dim);
        if (threadIdx.x % KVF_CODE_LANES == 0)
            ((uint16_t *)(group + kvf_code_scales(head_dim)))[in_group] = scale;
    }
}

extern "C" int kvf_encode_cuda(const void *args, uint32_t, void *stream)
{
    const kvf_encode_args *a = (const kvf_encode_args *)args;
    const dim3 grid(a->job_count), block(THREADS);
    switch (a->shape.dtype) {
    case KVF_BF16:
        return kvf_cuda_launch<encode_keys<kvf_bf16>>(grid, block, 0, (cudaStream_t)stream, *a);
    case KVF_FP16:
        return kvf_cuda_launch<encode_keys<kvf_half>>(grid, block, 0, (cudaStream_t)stream, *a);
    default:
        return kvf_cuda_launch<encode_keys<float>>(grid, block, 0, (cudaStream_t)stream, *a);
    }
}
