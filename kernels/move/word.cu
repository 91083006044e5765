/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Words between streams and host threads, where the driver has no call for them or cannot record
 * it.
 *
 * One block of one thread. write: everything that the stream did before is visible to whoever sees
 * the value. wait: until (int32_t)(*word - value) >= 0, polling over the link every microsecond; it
 * holds a slot of one multiprocessor meanwhile. Exact.
 */

#include "cuda_kernels.h"

#include "cuda/cuda.cuh"

static __global__ void write_word(const __grid_constant__ kvf_word_args a)
{
    kvf_store_release_system(a.word, a.value);
}

static __global__ void wait_word(const __grid_constant__ kvf_word_args a)
{
    while ((int32_t)(kvf_load_acquire_system(a.word) - a.value) < 0)
        __nanosleep(1000);
}

extern "C" int kvf_write_word_cuda(const void *args, uint32_t tasks, void *stream)
{
    (void)tasks;
    return kvf_cuda_launch<write_word>(dim3(1), dim3(1), 0, (cudaStream_t)stream,
                                       *(const kvf_word_args *)args);
}

extern "C" int kvf_wait_word_cuda(const void *args, uint32_t tasks, void *stream)
{
    (void)tasks;
    return kvf_cuda_launch<wait_word>(dim3(1), dim3(1), 0, (cudaStream_t)stream,
                                      *(const kvf_word_args *)args);
}
