/* SPDX-License-Identifier: Apache-2.0 */

/* The table of kernels of the CUDA device. Knows names only. */

#include "cuda_kernels.h"

kvf_status kvf_kernels_init_cuda(kvf_kernels *table)
{
    *table = (kvf_kernels){
#define KVF_CUDA_ENTRY(family, op) .op = (kvf_task_fn)(void (*)(void))kvf_##op##_cuda,
        KVF_KERNEL_LIST(KVF_CUDA_ENTRY, KVF_CUDA_ENTRY)
#undef KVF_CUDA_ENTRY
    };
    return KVF_OK;
}
