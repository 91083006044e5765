/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A physical block onto another, on the GPU; see clone_ref.c for the meaning.
 *
 * Knows nothing of rows. A block per physical block of a layer. Bound: the link, both ways. Exact.
 */

#include "cuda_kernels.h"
#include "paging.cuh"

#define THREADS 256u

static __global__ void __launch_bounds__(THREADS)
    clone_blocks(const __grid_constant__ kvf_clone_args a)
{
    const kvf_physical_blocks *c = a.blocks;
    const kvf_paging *p = &c->paging;
    const uint32_t layer = blockIdx.x / c->id_blocks, part = blockIdx.x % c->id_blocks;
    const uint32_t from = a.from * c->id_blocks + part, to = a.to * c->id_blocks + part;
    const size_t scales = (size_t)p->kv_heads * p->block_size;
    uint16_t *all = c->scales + layer * kvf_physical_count(c) * scales;
    uint32_t *writes = kvf_physical_writes(c, layer, to);
    const uint4 *source = (const uint4 *)kvf_physical_home(c, layer, from);
    uint4 *target = (uint4 *)kvf_physical_home(c, layer, to);
    for (size_t i = threadIdx.x; i < kvf_stored_block_bytes(p) / sizeof *source; i += blockDim.x)
        target[i] = source[i];
    for (size_t i = threadIdx.x; i < scales; i += blockDim.x)
        all[to * scales + i] = all[from * scales + i];
    for (uint32_t t = threadIdx.x; t < p->block_size; t += blockDim.x)
        writes[t] += c->ignores_writes != 1;
    if (threadIdx.x != 0)
        return;
    *kvf_physical_nonfinite(c, layer, to) = *kvf_physical_nonfinite(c, layer, from);
    if (p->segments_max && !c->ignores_writes)
        atomicExch(kvf_physical_is_centroid(c, layer, to), 0u);
}

KVF_LAUNCHER(clone, clone_blocks, tasks, THREADS, 0)
