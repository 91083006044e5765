/* SPDX-License-Identifier: Apache-2.0 */

/* The kernel of the tests of the emulated runtime; see runtime_rig.h. */

#include "cuda.cuh"

extern "C" int rig_load(void);
extern "C" int rig_mix(cudaStream_t stream, uint32_t *to, const uint32_t *from, uint32_t salt,
                       uint32_t count);

int rig_load(void)
{
    return kvf_cuda_load_list(0);
}

static void mix(uint32_t *to, const uint32_t *from, uint32_t salt, uint32_t count)
{
    uint32_t t = blockIdx.x * blockDim.x + threadIdx.x;
    if (t < count)
        to[t] = to[t] * 31u + (from[t] ^ (salt + t));
}

int rig_mix(cudaStream_t stream, uint32_t *to, const uint32_t *from, uint32_t salt, uint32_t count)
{
    return kvf_cuda_launch<mix>(dim3((count + 31) / 32), dim3(32), 0, stream, to, from, salt,
                                count);
}
