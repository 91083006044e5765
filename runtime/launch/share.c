/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Part of call.h. Which rows of a step have blocks in common; see the header.
 *
 * A block has one id while anybody holds it. Two rows get the same one only by a fork, which gives
 * the child all blocks of its parent, and part for good where one of them is cut or written anew,
 * which gives it ids that nobody else has from there on. So rows with a block in common have all
 * blocks before it in common too, and one look is enough to know.
 */

#include "call.h"

/* The first `blocks` blocks of both rows are the same. */
static bool is_common(const kvf_call *call, uint32_t a, uint32_t b, uint32_t blocks)
{
    const uint32_t last = blocks - 1;
    return call->states[a]->blocks[last].index == call->states[b]->blocks[last].index;
}

/* Sealed blocks that rows a and b have in common, if these are more than `least`; else 0. */
static uint32_t common_blocks(const kvf_call *call, uint32_t a, uint32_t b, uint32_t least)
{
    uint32_t low = least + 1;
    uint32_t high = kvf_min_u32(call->row_host[a].sealed, call->row_host[b].sealed);
    if (high < low || !is_common(call, a, b, low))
        return 0;
    while (low < high) {
        const uint32_t middle = high - (high - low) / 2;
        if (is_common(call, a, b, middle))
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

/* Tiles of lists that a processor of the device should find in a step, if it can be had. */
#define TILES_EACH_HOST (2 * KVF_SCORE_CODES_TILES) /* two tasks of a thread */
#define TILES_EACH_CUDA 2u                          /* two blocks of a multiprocessor */

uint32_t kvf_call_rows_at_once(const kvf_call *call, const kvf_device_properties *device)
{
    const uint32_t wanted = device->multiprocessors ? device->multiprocessors * TILES_EACH_CUDA
                                                    : device->compute_threads * TILES_EACH_HOST;
    uint64_t blocks = 0;
    for (uint32_t b = 0; call->row_host && b < call->rows; b++)
        blocks += call->row_host[b].sealed;
    const uint64_t tiles = blocks * call->kv_group->dims.paging.block_size /
                           KVF_SCORE_CODES_TOKENS * call->kv_group->dims.paging.lists;
    return kvf_max_u32(1, (uint32_t)(tiles / kvf_max_u32(1, wanted)));
}

/*
 * One row after the other goes after that with which it has most in common, and after all that
 * have more in common with that one. So the rows that have any block in common stay neighbours:
 * what row i has in common with an earlier one is the least of common[] between them.
 */
static void put_in_order(const kvf_call *call, uint32_t *order, uint32_t *common)
{
    for (uint32_t b = 0; b < call->rows; b++) {
        uint32_t best = 0, at = b;
        for (uint32_t i = 0; i < b; i++) {
            const uint32_t blocks = common_blocks(call, order[i], b, best);
            if (blocks) {
                best = blocks;
                at = i + 1;
            }
        }
        while (at < b && common[at] > best)
            at++;
        for (uint32_t i = b; i > at; i--) {
            order[i] = order[i - 1];
            common[i] = common[i - 1];
        }
        order[at] = b;
        common[at] = best;
    }
}

/* Every `most` rows that have something in common, one starts anew. */
static void part_rows(uint32_t *common, uint32_t rows, uint32_t most)
{
    for (uint32_t i = 0, n = 0; i < rows; i++, n++)
        if (common[i] == 0 || n == most)
            common[i] = n = 0;
}

void kvf_call_share(kvf_call *call, uint32_t most)
{
    const uint32_t per_tile = KVF_SCORE_CODES_TOKENS / call->kv_group->dims.paging.block_size;
    uint32_t *order, *common;
    KVF_TAKE(call, order, call->shared.order, call->rows);
    KVF_TAKE(call, common, call->shared.common, call->rows);
    if (!order || !common)
        return;
    put_in_order(call, order, common);
    bool any_tile = false;
    for (uint32_t i = 0; i < call->rows; i++) {
        call->shared.any |= common[i] != 0;
        common[i] /= per_tile;
        any_tile = any_tile || common[i];
    }
    part_rows(common, call->rows, most);
    /* A recording keeps its form: its rows get no more in common, but `most` grows with them. */
    call->shared.tiles = any_tile && (most > 1 || call->is_recorded);
}
