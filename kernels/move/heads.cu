/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Chosen heads of tokens, quantized or put back, on the GPU; see heads_ref.c for the meaning.
 *
 * Knows nothing of attention. Grid: (parts of KVF_HEADS_TOKENS tokens, jobs); the threads of a
 * block go over the words of its tokens, 16 bytes at a time where both sides are aligned to that,
 * else 2: log-sum-exps of single heads are 4 bytes, and the caller's tensors are aligned to an
 * element at least. Bound: every byte read and written once. Exact.
 */

#include "cuda_kernels.h"
#include "paging.cuh"

#define THREADS 256u

/* `words` words of every chosen head of tokens first .. end - 1. */
template <typename Word>
static __device__ __forceinline__ void move_words(const kvf_heads_job *job, uint32_t first,
                                                  uint32_t end)
{
    const uint32_t words = job->bytes / (uint32_t)sizeof(Word), token_words = words * job->count;
    for (uint32_t i = threadIdx.x; i < (end - first) * token_words; i += blockDim.x) {
        const size_t token = first + i / token_words;
        const uint32_t head = i % token_words / words, word = i % words;
        const size_t from =
            token * job->from_heads + (job->from_head ? job->from_head[head] : head);
        const size_t to = token * job->to_heads + (job->to_head ? job->to_head[head] : head);
        ((Word *)job->to)[to * words + word] = ((const Word *)job->from)[from * words + word];
    }
}

static __global__ void __launch_bounds__(THREADS)
    heads_kernel(const __grid_constant__ kvf_heads_args a)
{
    const kvf_heads_job *job = &a.jobs[blockIdx.y];
    const uint32_t first = blockIdx.x * KVF_HEADS_TOKENS;
    const uint32_t end = kvf_min_u32(a.tokens, first + KVF_HEADS_TOKENS);
    if (((size_t)job->from | (size_t)job->to | job->bytes) % 16 == 0)
        move_words<uint4>(job, first, end);
    else
        move_words<uint16_t>(job, first, end);
}

KVF_LAUNCHER(heads, heads_kernel, dim3(kvf_div_ceil_u32(a->tokens, KVF_HEADS_TOKENS), a->job_count),
             THREADS, 0)
