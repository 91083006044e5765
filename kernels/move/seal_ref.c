/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Blocks that left the window: static bits, sink tokens into the static store, jobs for their
 * digests.
 *
 * Knows nothing of the pool. Blocks of the sink are sealed before all others, so the sink is always
 * the front of the static store. Task = row * kv_heads + KV head.
 */

#include <string.h>

#include "variants.h"

static void move_sink(const kvf_paging *p, const kvf_row *row, uint32_t block, uint32_t head)
{
    const uint32_t first = block * p->block_size;
    const uint32_t end = kvf_min_u32(first + p->block_size, p->sink);
    /* entry i is token i here */
    memcpy(kvf_static_token(p, row->static_kv, head, first), kvf_row_run(p, row, block, head),
           (end - first) * kvf_token_bytes(&p->shape));
    for (uint32_t i = first; i < end; i++)
        row->static_ids[head * kvf_static_room(p) + i] = i;
    row->static_count[head] = end;
}

/* Digests of one run. */
static void put_jobs(const kvf_seal_args *a, const kvf_row *row, uint32_t block, uint32_t head,
                     uint64_t skip)
{
    const kvf_paging *p = &a->paging;
    const uint32_t tokens = p->block_size / p->block_jobs;
    const size_t first = (size_t)(row->job_first + block - row->sealed_before) * p->block_jobs;
    for (uint32_t j = 0; j < p->block_jobs; j++)
        a->jobs[(first + j) * p->kv_heads + head] = (kvf_digest_job){
            .page = kvf_row_run(p, row, block, head) + j * tokens * kvf_token_bytes(&p->shape),
            .digest = kvf_row_job_digest(p, row, block, j, head),
            .skip = skip >> j * tokens & kvf_live_bits(tokens, 0),
            .count = tokens};
}

void kvf_seal_ref(const void *args, uint32_t task)
{
    const kvf_seal_args *a = args;
    const kvf_paging *p = &a->paging;
    const kvf_row *row = &a->row[task / p->kv_heads];
    const uint32_t head = task % p->kv_heads;
    if (a->chunk_fault && task == 0 && *a->chunk_fault != UINT32_MAX)
        kvf_row_fault(row, a->chunk_first + *a->chunk_fault);
    for (uint32_t block = row->sealed_before; block < row->sealed; block++) {
        const uint64_t sink = kvf_sink_bits(p, block);
        kvf_row_bits(p, row, head)[block] = sink;
        if (head == 0 && row->new_block_of)
            row->block_of[block] = kvf_row_sealing(row, block);
        if (row->chosen_at)
            memset(row->chosen_at + (size_t)head * p->pages_max + block * p->block_pages, 0,
                   p->block_pages * sizeof *row->chosen_at);
        if (sink)
            move_sink(p, row, block, head);
        put_jobs(a, row, block, head, sink);
    }
}
