/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Pages that left the window: static bits, sink tokens into the store, jobs for their digests.
 *
 * Knows nothing of the pool. Sink pages are sealed before all others, so the sink is always the
 * front of the store. Task = row * kv_heads + KV head.
 */

#include <string.h>

#include "variants.h"

static void move_sink(const kvf_paging *p, const kvf_row *row, uint32_t page, uint32_t head)
{
    const uint32_t first = page * p->shape.page_size;
    const uint32_t end = kvf_min_u32(first + p->shape.page_size, p->sink);
    const char *from = kvf_row_page(p, row, page, head);
    char *to = kvf_store_page(p, row->store, head, page); /* entry i is token i here */
    memcpy(to, from, (end - first) * kvf_token_bytes(&p->shape));
    for (uint32_t i = first; i < end; i++)
        row->store_index[head * kvf_store_tokens(p) + i] = i;
    row->store_count[head] = end;
}

void kvf_seal_ref(const void *args, uint32_t task)
{
    const kvf_seal_args *a = args;
    const kvf_paging *p = &a->paging;
    const kvf_row *row = &a->row[task / p->kv_heads];
    const uint32_t head = task % p->kv_heads;
    if (a->chunk_fault && task == 0 && *a->chunk_fault != UINT32_MAX)
        kvf_row_fault(row, a->chunk_first + *a->chunk_fault);
    for (uint32_t page = row->sealed_before; page < row->sealed; page++) {
        const uint64_t sink = kvf_sink_bits(p, page);
        kvf_row_bits(p, row, head)[page] = sink;
        if (sink)
            move_sink(p, row, page, head);
        const size_t job = (size_t)(row->job_first + page - row->sealed_before) * p->kv_heads;
        a->jobs[job + head] = (kvf_digest_job){.page = kvf_row_page(p, row, page, head),
                                               .digest = kvf_row_digest(p, row, page, head),
                                               .skip = sink,
                                               .count = p->shape.page_size};
    }
}
