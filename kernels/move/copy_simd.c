/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Scattered equal blocks of bytes, past the cache. Bound: memory bandwidth.
 *
 * Knows nothing of pages. The blocks of a task are one stream of lines: while a line is copied, the
 * one AHEAD bytes further on is prefetched, in whatever block that is, so blocks of 256 bytes keep
 * as many lines in flight as pages of 16 KiB. One line of a block still further on is touched,
 * which finds its translation early. Stores that bypass the cache save the reading of what is about
 * to be overwritten. Moves bits, nothing else.
 *
 * Prefetching goes to the second-level cache: lines that wait for memory then hold no buffer of the
 * first level, and loads go on. Median of 1 MiB from 2 GiB (Xeon of the fourth generation, virtual,
 * one core; memcpy of one contiguous MiB takes 160 us): blocks of 512 B 125 us, of 256 B 147 us,
 * pages of 16 KiB 95 us; prefetched to the first level 512 B and past the cache 512 B 150 to 200
 * us.
 */

#include "common/simd.h"
#include "variants.h"

#define LINE  ((size_t)64)
#define AHEAD ((size_t)4096)
#define FAR   4u /* times as far on: a line of a block that is touched */

/* `bytes`, a multiple of LINE; meanwhile as many from `ahead` on are prefetched, if that is given.
 */
KVF_ALWAYS_INLINE void copy_lines(uint8_t *to, const uint8_t *from, size_t bytes,
                                  const uint8_t *ahead, int streams)
{
    for (size_t i = 0; i < bytes; i += LINE) {
        if (ahead)
            __builtin_prefetch(ahead + i, 0, 2);
#if VF_STREAMS
        if (streams) {
            vf_stream64(to + i, from + i);
            continue;
        }
#endif
        (void)streams;
        memcpy(to + i, from + i, LINE);
    }
}

/* Blocks first .. end - 1. Bytes bytes - rest .. bytes of a block see the block `ahead_blocks` + 1
 * further on, those before them the one `ahead_blocks` further on. */
KVF_ALWAYS_INLINE void copy_blocks(const kvf_copy_args *a, uint32_t first, uint32_t end,
                                   int streams)
{
    const size_t ahead_blocks = AHEAD / a->bytes, rest = AHEAD % a->bytes, cut = a->bytes - rest;
    const size_t far = FAR * (ahead_blocks ? ahead_blocks : 1);
    for (uint32_t i = first; i < end; i++) {
        uint8_t *to = a->to[i];
        const uint8_t *from = a->from[i];
        const uint8_t *near =
            i + ahead_blocks < end ? kvf_offset(a->from[i + ahead_blocks], rest) : NULL;
        const uint8_t *next = i + ahead_blocks + 1 < end ? a->from[i + ahead_blocks + 1] : NULL;
        if (i + far < end)
            __builtin_prefetch(a->from[i + far], 0, 2);
        copy_lines(to, from, cut, near, streams);
        copy_lines(to + cut, from + cut, rest, next, streams);
    }
}

/* 1: every line of every block is a whole one of the destination. */
static int has_whole_lines(const kvf_copy_args *a, uint32_t first, uint32_t end)
{
    uintptr_t all = 0;
    for (uint32_t i = first; i < end; i++)
        all |= (uintptr_t)a->to[i];
    return all % LINE == 0;
}

void KVF_SIMD_NAME(copy)(const void *args, uint32_t task)
{
    const kvf_copy_args *a = args;
    const uint32_t first = task * a->per_task;
    const uint32_t end = kvf_min_u32(a->count, first + a->per_task);
    if (a->bytes == 0)
        return;
    if (a->bytes % LINE != 0) {
        for (uint32_t i = first; i < end; i++)
            memcpy(a->to[i], a->from[i], a->bytes);
        return;
    }
    if (!a->stream || !has_whole_lines(a, first, end)) {
        copy_blocks(a, first, end, 0);
        return;
    }
    copy_blocks(a, first, end, 1);
#if VF_STREAMS
    _mm_sfence();
#endif
}
