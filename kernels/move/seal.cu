/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Pages that left the window, on the GPU; see seal_ref.c for the meaning.
 *
 * Knows nothing of the pool. Grid: (KV heads, rows); a block does the pages of its head, a thread
 * per page or token, the whole block for the bytes of the sink. In a decode step that is one page
 * and the launch is the cost. Exact.
 */

#include "cuda_kernels.h"
#include "paging.cuh"

#define THREADS 128u

/* Tokens of the sink in sealed blocks first .. end-1 to their places at the front of the static
 * store. */
static __device__ void move_sink(const kvf_paging *p, const kvf_row *row, uint32_t head,
                                 uint32_t first, uint32_t end)
{
    const uint32_t vectors = (uint32_t)kvf_token_bytes(&p->shape) / 16;
    const uint32_t from = first * p->block_size, to = kvf_min_u32(end * p->block_size, p->sink);
    uint32_t *index = row->static_ids + head * kvf_static_room(p);
    if (from >= to)
        return;
    for (uint32_t i = threadIdx.x; i < (to - from) * vectors; i += blockDim.x) {
        const uint32_t token = from + i / vectors;
        const char *run = kvf_row_run(p, row, token / p->block_size, head);
        ((uint4 *)(void *)kvf_static_token(p, row->static_kv, head, token))[i % vectors] =
            ((const uint4 *)(const void *)run)[token % p->block_size * vectors + i % vectors];
    }
    for (uint32_t i = from + threadIdx.x; i < to; i += blockDim.x)
        index[i] = i;
    if (threadIdx.x == 0)
        row->static_count[head] = to;
}

static __global__ void seal_kernel(const __grid_constant__ kvf_seal_args a)
{
    const kvf_paging *p = &a.paging;
    const uint32_t head = blockIdx.x, tokens = p->block_size / p->block_jobs;
    const kvf_row *row = &a.row[blockIdx.y];
    const uint32_t first = row->sealed_before, end = row->sealed;
    if (a.chunk_fault && blockIdx.y == 0 && head == 0 && threadIdx.x == 0 &&
        *a.chunk_fault != UINT32_MAX)
        kvf_row_fault(row, a.chunk_first + *a.chunk_fault);
    move_sink(p, row, head, first, end);
    for (uint32_t i = first * p->block_pages + threadIdx.x;
         row->chosen_at && i < end * p->block_pages; i += blockDim.x)
        row->chosen_at[(size_t)head * p->pages_max + i] = 0;
    for (uint32_t i = threadIdx.x; i < (end - first) * p->block_jobs; i += blockDim.x) {
        const uint32_t block = first + i / p->block_jobs, j = i % p->block_jobs;
        const uint64_t sink = kvf_sink_bits(p, block);
        const size_t job = ((size_t)row->job_first * p->block_jobs + i) * p->kv_heads;
        if (j == 0)
            kvf_row_bits(p, row, head)[block] = sink;
        if (j == 0 && head == 0 && row->new_block_of)
            row->block_of[block] = kvf_row_sealing(row, block);
        kvf_job_set(&a.jobs[job + head],
                    kvf_row_run(p, row, block, head) + j * tokens * kvf_token_bytes(&p->shape),
                    kvf_row_job_digest(p, row, block, j, head),
                    sink >> j * tokens & kvf_live_bits(tokens, 0), tokens);
    }
}

KVF_LAUNCHER(seal, seal_kernel, dim3(a->paging.kv_heads, a->rows), THREADS, 0)
