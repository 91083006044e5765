/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The time in stream order, on the GPU's clock; see stamp_ref.c.
 *
 * Knows nothing of what is timed. One thread; the launch is the cost. The clock ticks in steps of
 * up to a microsecond on some GPUs, and never runs backwards.
 */

#include "cuda.cuh"
#include "cuda_kernels.h"

static __global__ void stamp_kernel(const __grid_constant__ kvf_stamp_args a)
{
    const uint64_t now = kvf_device_ns();
    if (a.sum)
        *a.sum += now - *a.last;
    *a.last = now;
}

KVF_LAUNCHER(stamp, stamp_kernel, 1, 1, 0)
