/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_KERNELS_MOVE_QUANTIZED_RUN_H
#define KVF_KERNELS_MOVE_QUANTIZED_RUN_H

/*
 * The subject of tasks of quantize, dequantize, carry and read: a run, which is one KV head's part
 * of a block, in exact and in storage format. For every implementation on the host. Knows nothing
 * of numbers.
 */

#include <string.h>

#include "kernels.h"
#include "quantized.h"

typedef struct kvf_quantized_run {
    char *exact;   /* [block_size] tokens */
    char *home;    /* pages */
    uint64_t sink; /* bit t: token t is of the sink */
    uint32_t head;
    uint32_t block;
} kvf_quantized_run;

/* false: the task has none. The home is zero, and the row has its spare block. */
KVF_INLINE int kvf_quantize_begin(const kvf_quantize_args *a, uint32_t task, kvf_quantized_run *run)
{
    const kvf_paging *p = &a->paging;
    const kvf_row *row = &a->row[task / (a->count * p->kv_heads)];
    const uint32_t block =
        (a->scratch ? a->first : row->sealed_before) + task / p->kv_heads % a->count;
    if (block >= row->sealed)
        return 0;
    run->head = task % p->kv_heads;
    run->block = block;
    run->sink = kvf_sink_bits(p, block);
    const size_t at = run->head * kvf_run_bytes(p);
    run->exact =
        (a->scratch ? a->scratch + block * kvf_block_bytes(p) : kvf_row_ring_block(p, row, block)) +
        at;
    run->home = (char *)row->pool[block - row->sealed_before] + run->head * kvf_stored_run_bytes(p);
    if (p->spare_blocks && block + 1 == row->sealed)
        memcpy(kvf_row_spare(p, row) + at, run->exact, kvf_run_bytes(p));
    memset(run->home, 0, kvf_stored_run_bytes(p));
    return 1;
}

/* false: the task has none. Task 0 makes the view. */
KVF_INLINE int kvf_dequantize_begin(const kvf_dequantize_args *a, uint32_t task,
                                    kvf_quantized_run *run)
{
    const kvf_paging *p = &a->paging;
    const kvf_row *row = a->row;
    if (task > 0) {
        run->head = (task - 1) % p->kv_heads;
        run->block = a->first + (task - 1) / p->kv_heads;
        run->sink = kvf_sink_bits(p, run->block);
        run->home = (char *)(uintptr_t)(a->block ? a->block : row->blocks[run->block]) +
                    run->head * kvf_stored_run_bytes(p);
        run->exact = (a->scratch ? a->scratch + run->block * kvf_block_bytes(p)
                                 : kvf_row_ring_block(p, row, run->block)) +
                     run->head * kvf_run_bytes(p);
        return 1;
    }
    for (uint32_t b = 0; a->table && b < p->blocks_max; b++)
        a->table[b] =
            b < row->sealed ? a->scratch + b * kvf_block_bytes(p) : kvf_row_ring_block(p, row, b);
    if (a->view) {
        *a->view = *row;
        a->view->blocks = a->table;
        a->view->slots = NULL;
    }
    return 0;
}

/* Token t of a task of dequantize, which is of the sink, comes as it is. */
KVF_INLINE void kvf_dequantize_sink(const kvf_dequantize_args *a, const kvf_quantized_run *run,
                                    uint32_t t)
{
    const kvf_paging *p = &a->paging;
    const size_t token = kvf_token_bytes(&p->shape);
    memcpy(run->exact + t * token,
           kvf_static_token(p, a->row->static_kv, run->head, run->block * p->block_size + t),
           token);
}

/* Page `page` of a list, which a task of read puts to `to`: what is as it came, and zeros. Returns
 * whether the others are to be dequantized: all `count` tokens of the run but those of its sink. */
KVF_INLINE int kvf_read_page(const kvf_read_args *a, uint32_t list, uint32_t page, char *to,
                             kvf_quantized_run *run)
{
    const kvf_paging *p = &a->paging;
    const kvf_row *row = &a->row[list / p->kv_heads];
    const uint32_t head = list % p->kv_heads, count = kvf_row_tokens(p, row, page);
    const uint32_t sink = kvf_page_sink(p, page, count);
    const size_t token = kvf_token_bytes(&p->shape);
    if (!kvf_row_is_quantized(p, row, page)) {
        memcpy(to, kvf_row_page(p, row, page, head), count * token);
        memset(to + count * token, 0, (p->shape.page_size - count) * token);
        return 0;
    }
    if (sink)
        memcpy(to, kvf_static_page(p, row->static_kv, head, page), sink * token);
    *run = (kvf_quantized_run){
        .exact = to, .home = kvf_row_home(p, row, page, head), .sink = kvf_live_bits(sink, 0)};
    return sink < count;
}

/* Moves what was quantized, which are the first tokens of the run: returns how many. Padding of
 * pages is zero. */
KVF_INLINE uint32_t kvf_carry_moved(const kvf_carry_args *a, const kvf_quantized_run *run)
{
    const kvf_paging *p = &a->paging;
    const kvf_shape *s = &p->shape;
    const size_t home = kvf_stored_page_bytes(s);
    const uint32_t *ids = a->ids + (size_t)run->head * a->stride + run->block * p->block_size;
    uint32_t t = 0;
    for (; t < p->block_size && ids[t] / p->block_size < a->quantized; t++) {
        const uint32_t page = ids[t] % p->block_size / s->page_size;
        const void *from = kvf_offset(a->from[ids[t] / p->block_size],
                                      run->head * kvf_stored_run_bytes(p) + page * home);
        kvf_quantized_move(s, run->home + t / s->page_size * home, t % s->page_size, s, from,
                           ids[t] % s->page_size);
    }
    for (uint32_t i = 0; i < p->block_pages; i++) {
        char *end = (char *)kvf_quantized_value_scale(s, run->home + i * home, s->page_size);
        memset(end, 0, (size_t)(run->home + (i + 1) * home - end));
    }
    return t;
}

/* KV head `head` of block `block`. */
KVF_INLINE kvf_quantized_run kvf_carry_run(const kvf_carry_args *a, uint32_t head, uint32_t block)
{
    const kvf_paging *p = &a->paging;
    return (kvf_quantized_run){
        .exact = a->scratch + block * kvf_block_bytes(p) + head * kvf_run_bytes(p),
        .home =
            (char *)a->row->pool[block - a->row->sealed_before] + head * kvf_stored_run_bytes(p),
        .sink = kvf_sink_bits(p, block),
        .head = head,
        .block = block};
}

#endif
