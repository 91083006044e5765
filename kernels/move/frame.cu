/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The next frame of a recorded step to its fixed place, on the GPU; see frame_ref.c.
 *
 * Knows nothing of what the frame says. A block per part (a layer), a thread per 16 bytes. Bound:
 * the link, about a kilobyte per part; all parts of a step are on their way at once, so a step pays
 * the latency of the link once. Exact.
 */

#include "cuda.cuh"
#include "cuda_kernels.h"

#define THREADS 128u

static __global__ void frame_kernel(const __grid_constant__ kvf_frame_args a)
{
    const size_t part = blockIdx.x;
    kvf_let_next_start();
    const uint32_t turn = a.turns[part];
    const char *from = a.from + (turn % a.frames * a.parts + part) * a.bytes;
    char *to = a.to + part * a.bytes;
    __syncthreads(); /* every thread has read the turn */
    if (threadIdx.x == 0)
        a.turns[part] = turn + 1;
    for (size_t i = (size_t)threadIdx.x * 16; i < a.bytes; i += (size_t)blockDim.x * 16)
        *(uint4 *)(to + i) = kvf_load_once(from + i);
}

KVF_LAUNCHER(frame, frame_kernel, tasks, THREADS, 0)
