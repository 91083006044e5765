/* SPDX-License-Identifier: Apache-2.0 */

/* The kernels of the tests of the emulated runtime; see runtime_rig.h. */

#include "cuda.cuh"

extern "C" int rig_load(void);
extern "C" int rig_mix(cudaStream_t stream, uint32_t *to, const uint32_t *from, uint32_t salt,
                       uint32_t count);
extern "C" int rig_take(cudaStream_t stream, uint32_t *to, const uint32_t *from, int is_wrong);
extern "C" int rig_take_at_once(cudaStream_t stream, uint32_t *to, const uint32_t *from);
extern "C" int rig_fill_shared(cudaStream_t stream, uint32_t *to, size_t bytes);
extern "C" int rig_fill_shared_unlisted(cudaStream_t stream, uint32_t *to, size_t bytes);
extern "C" int rig_allow_shared(int bytes);
extern "C" int rig_wait_word(cudaStream_t stream, uint32_t *word, uint32_t value);
extern "C" int rig_write_word(cudaStream_t stream, uint32_t *word, uint32_t value);

int rig_load(void)
{
    return kvf_cuda_load_list();
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

static void take(uint32_t *to, const uint32_t *from, int is_wrong)
{
    const uint32_t early = is_wrong ? *from : 0;
    kvf_wait_for_earlier();
    *to = is_wrong ? early : *from;
}

int rig_take(cudaStream_t stream, uint32_t *to, const uint32_t *from, int is_wrong)
{
    return kvf_cuda_launch_early<take>(dim3(1), dim3(1), 0, stream, to, from, is_wrong);
}

int rig_take_at_once(cudaStream_t stream, uint32_t *to, const uint32_t *from)
{
    return kvf_emu_launch("take", true, take, dim3(1), dim3(1), 0, stream, to, from, 0);
}

static void fill_shared(uint32_t *to, size_t bytes)
{
    kvf_shared()[bytes - 1] = 7;
    *to = (uint32_t)kvf_shared()[bytes - 1];
}

int rig_fill_shared(cudaStream_t stream, uint32_t *to, size_t bytes)
{
    return kvf_cuda_launch<fill_shared>(dim3(1), dim3(1), bytes, stream, to, bytes);
}

/* The same kernel, but on no list of kernels to load. */
static void fill_shared_unlisted(uint32_t *to, size_t bytes)
{
    fill_shared(to, bytes);
}

int rig_fill_shared_unlisted(cudaStream_t stream, uint32_t *to, size_t bytes)
{
    return kvf_emu_launch("fill_shared_unlisted", false, fill_shared_unlisted, dim3(1), dim3(1),
                          bytes, stream, to, bytes);
}

int rig_allow_shared(int bytes)
{
    return cudaFuncSetAttribute((const void *)fill_shared_unlisted,
                                cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}

static void wait_word(const uint32_t *word, uint32_t value)
{
    while ((int32_t)(kvf_load_acquire_system(word) - value) < 0)
        __nanosleep(1000);
}

static void write_word(uint32_t *word, uint32_t value)
{
    kvf_store_release_system(word, value);
}

int rig_wait_word(cudaStream_t stream, uint32_t *word, uint32_t value)
{
    return kvf_cuda_launch<wait_word>(dim3(1), dim3(1), 0, stream, word, value);
}

int rig_write_word(cudaStream_t stream, uint32_t *word, uint32_t value)
{
    return kvf_cuda_launch<write_word>(dim3(1), dim3(1), 0, stream, word, value);
}
