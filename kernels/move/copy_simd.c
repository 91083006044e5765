/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Scattered equal blocks of bytes, past the cache. Bound: memory bandwidth.
 *
 * Knows nothing of pages. A block is cut in four quarters (of 4 KiB each for a page of 16 KiB) that
 * are walked together: four independent streams keep more lines in flight than one, and stores that
 * bypass the cache save the reading of what is about to be overwritten. Moves bits, nothing else.
 */

#include "common/simd.h"
#include "variants.h"

#if VF_STREAMS
#define STREAMS 4u
#define AHEAD   512u /* bytes prefetched in front of each stream */

static void copy_streams(uint8_t *to, const uint8_t *from, size_t bytes, const uint8_t *next)
{
    const size_t quarter = bytes / STREAMS;
    for (size_t i = 0; i < quarter; i += 64) {
        const int tail = i + AHEAD >= quarter;
        const uint8_t *ahead = tail ? next + (i + AHEAD - quarter) : from + i + AHEAD;
        for (size_t s = 0; s < STREAMS; s++) {
            __builtin_prefetch(ahead + s * quarter, 0, 0);
            vf_stream64(to + s * quarter + i, from + s * quarter + i);
        }
    }
}

/* The same four streams with plain stores, for a destination that is read again from the cache. */
static void copy_cached(uint8_t *to, const uint8_t *from, size_t bytes, const uint8_t *next)
{
    const size_t quarter = bytes / STREAMS;
    for (size_t i = 0; i < quarter; i += 64) {
        const int tail = i + AHEAD >= quarter;
        const uint8_t *ahead = tail ? next + (i + AHEAD - quarter) : from + i + AHEAD;
        for (size_t s = 0; s < STREAMS; s++) {
            __builtin_prefetch(ahead + s * quarter, 0, 0);
            memcpy(to + s * quarter + i, from + s * quarter + i, 64);
        }
    }
}
#endif

void KVF_SIMD_NAME(copy)(const void *args, uint32_t task)
{
    const kvf_copy_args *a = args;
    const uint32_t first = task * a->per_task;
    const uint32_t end = kvf_min_u32(a->count, first + a->per_task);
    for (uint32_t i = first; i < end; i++) {
#if VF_STREAMS
        if (a->stream && a->bytes % (STREAMS * 64) == 0 && (uintptr_t)a->to[i] % 64 == 0) {
            copy_streams(a->to[i], a->from[i], a->bytes, a->from[i + 1 < end ? i + 1 : i]);
            continue;
        }
        if (a->bytes % (STREAMS * 64) == 0 && a->bytes >= STREAMS * AHEAD) {
            copy_cached(a->to[i], a->from[i], a->bytes, a->from[i + 1 < end ? i + 1 : i]);
            continue;
        }
#endif
        memcpy(a->to[i], a->from[i], a->bytes);
    }
#if VF_STREAMS
    vf_stream_fence();
#endif
}
