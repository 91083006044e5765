/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The spans that each list attends, on the GPU; see assemble_ref.c for the meaning.
 *
 * Knows nothing of policies. A block per list. Bound: 32 bytes written and some 40 read per span;
 * four atomic additions per list.
 */

#include "assemble.cuh"
#include "cuda_kernels.h"

#define THREADS 128u

static __global__ void assemble_kernel(const __grid_constant__ kvf_assemble_args a)
{
    kvf_wait_for_earlier();
    kvf_let_next_start();
    const kvf_choices &c = a.choices;
    const kvf_chosen chosen = kvf_chosen_of(c, blockIdx.x, c.id_count[blockIdx.x]);
    kvf_assemble_list(a, &c.row[blockIdx.x / c.paging.lists], blockIdx.x, chosen, NULL,
                      kvf_shared());
}

KVF_LAUNCHER_EARLY(assemble, assemble_kernel, a->choices.rows * a->choices.paging.lists, THREADS,
                   KVF_BLOCK_SCRATCH * sizeof(uint32_t))
