/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Loads all kernels of the library on the current device, when the device is opened. Knows no
 * kernel by name: each is on the list because some launch names it.
 */

#include "cuda.cuh"

extern "C" int kvf_cuda_load_kernels(void)
{
    return (int)kvf_cuda_load_list();
}

extern "C" void kvf_cuda_refuse_early_starts(int more)
{
    kvf_cuda_refuse_early(more);
}
