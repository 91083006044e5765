/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_KERNELS_SELECT_FIND_SLOT_CUH
#define KVF_KERNELS_SELECT_FIND_SLOT_CUH

/*
 * Slots for pages, while other blocks look for slots too; for resolve, admit and admit_written.
 *
 * Independent of bytes, and without locks: a thread takes a slot by compare-and-swap of its word,
 * which then holds the page that is coming and the call that uses it, and writes the slot to
 * slot_of_page. If two threads bring the same page, one is first there, and the other gives its
 * slot back. A slot that was found in slot_of_page counts only if its word names the page. A word
 * of this call stays until the next one, so such a slot stays valid.
 *
 * Exact: integers only. Which slots are taken depends on the order in which blocks come, where they
 * meet in a bucket.
 */

#include "cuda/cuda.cuh"
#include "cuda/select.cuh"
#include "slots.h"

struct kvf_slot_tables {
    uint32_t *slot_of_page; /* all bits: none */
    uint64_t *words;
    uint32_t *tags; /* or NULL */
};

static __device__ __forceinline__ kvf_slot_tables kvf_slot_tables_of(const kvf_paging *p,
                                                                     const kvf_row *row,
                                                                     uint32_t head)
{
    return {(uint32_t *)kvf_row_slot_of_page(p, row, head), kvf_row_slot_words(p, row, head),
            kvf_row_slot_tags(p, row, head)};
}

static __device__ __forceinline__ uint64_t kvf_slot_swap(uint64_t *word, uint64_t expected,
                                                         uint64_t value)
{
    return atomicCAS((unsigned long long *)word, (unsigned long long)expected,
                     (unsigned long long)value);
}

/* The slot of a page, or UINT32_MAX; and its value in `missed` of kvf_choices.
 * A copy that is not true any more (`tag`) is brought anew, to the same slot. */
struct kvf_slot_found {
    uint32_t slot;
    uint32_t missed;
    uint32_t is_voided;
};

static __device__ __forceinline__ kvf_slot_found kvf_slot_touch(const kvf_slot_tables &t,
                                                                uint32_t page, uint32_t now,
                                                                uint32_t tag)
{
    const uint32_t slot = kvf_load_relaxed(&t.slot_of_page[page]);
    if (slot == UINT32_MAX)
        return {UINT32_MAX, 1, 0};
    uint64_t word = kvf_load_relaxed(&t.words[slot]);
    while (kvf_slot_is_of(word, page)) {
        if (kvf_slot_age(word, now) == 0)
            return {slot, kvf_slot_is_coming(word) ? KVF_MISSED_LATE : 0u, 0};
        const uint32_t is_old = t.tags && kvf_load_relaxed(&t.tags[slot]) != tag;
        const uint64_t before =
            kvf_slot_swap(&t.words[slot], word, kvf_slot_word(page, now, is_old));
        if (before == word) {
            if (is_old)
                atomicExch(&t.tags[slot], tag);
            return {slot, is_old, is_old};
        }
        word = before;
    }
    return {UINT32_MAX, 1, 0};
}

/* By a warp: the word of a slot that this call does not use becomes `word`; the first bucket of
 * `buckets` that has one, in it the one that is free or was used longest ago, the lowest of those.
 * Returns the slot, in all lanes, or UINT32_MAX. */
static __device__ __forceinline__ uint32_t kvf_slot_take(const kvf_paging *p,
                                                         const kvf_slot_tables &t, uint64_t word,
                                                         uint32_t now, uint32_t buckets)
{
    const uint32_t lane = threadIdx.x % KVF_WARP_LANES;
    uint32_t bucket = kvf_slot_bucket(p, kvf_slot_page(word));
    while (buckets) {
        const uint64_t mine = kvf_load_relaxed(&t.words[bucket + lane]);
        const uint32_t age = kvf_slot_age(mine, now);
        const uint32_t oldest = __reduce_max_sync(KVF_FULL_WARP, age);
        if (oldest == 0) {
            bucket = kvf_slot_bucket_after(p, bucket);
            buckets--;
            continue;
        }
        const uint32_t best = (uint32_t)__ffs((int)__ballot_sync(KVF_FULL_WARP, age == oldest)) - 1;
        uint64_t before = 0;
        if (lane == best)
            before = kvf_slot_swap(&t.words[bucket + lane], mine, word);
        const bool is_taken = __shfl_sync(KVF_FULL_WARP, (int)(before == mine), (int)best);
        if (!is_taken)
            continue;
        if (lane == best && mine != KVF_SLOT_FREE)
            atomicCAS(&t.slot_of_page[kvf_slot_page(mine)], bucket + lane, UINT32_MAX);
        return bucket + best;
    }
    return UINT32_MAX;
}

/* By a warp, of a page that has no slot: it gets one, or another block was first. */
static __device__ __forceinline__ kvf_slot_found kvf_slot_give(const kvf_paging *p,
                                                               const kvf_slot_tables &t,
                                                               uint32_t page, uint32_t now,
                                                               uint32_t tag)
{
    for (;;) {
        const uint32_t hint = kvf_load_relaxed(&t.slot_of_page[page]);
        uint32_t slot = hint, missed = 0;
        if (hint != UINT32_MAX) {
            const uint64_t word = kvf_load_relaxed(&t.words[hint]);
            if (kvf_slot_is_of(word, page) && kvf_slot_age(word, now) == 0)
                missed = kvf_slot_is_coming(word) ? KVF_MISSED_LATE : 0u;
            else
                slot = UINT32_MAX;
        }
        slot = __shfl_sync(KVF_FULL_WARP, slot, 0);
        missed = __shfl_sync(KVF_FULL_WARP, missed, 0);
        if (slot != UINT32_MAX)
            return {slot, missed, 0};
        const uint32_t expected = __shfl_sync(KVF_FULL_WARP, hint, 0);
        slot = kvf_slot_take(p, t, kvf_slot_word(page, now, 1), now, UINT32_MAX);
        uint32_t before = 0;
        if (threadIdx.x % KVF_WARP_LANES == 0) {
            if (t.tags)
                atomicExch(&t.tags[slot], tag);
            __threadfence();
            before = atomicCAS(&t.slot_of_page[page], expected, slot);
            if (before != expected)
                atomicExch((unsigned long long *)&t.words[slot], KVF_SLOT_FREE);
        }
        before = __shfl_sync(KVF_FULL_WARP, before, 0);
        if (before == expected)
            return {slot, 1, 0};
    }
}

/* By a warp: the slot of a page whose bytes are at hand, its own or one of its bucket, in all
 * lanes; or UINT32_MAX. No other warp of the launch wants this page. */
static __device__ __forceinline__ uint32_t kvf_slot_admit(const kvf_paging *p,
                                                          const kvf_slot_tables &t, uint32_t page,
                                                          uint32_t now)
{
    const uint32_t lane = threadIdx.x % KVF_WARP_LANES;
    /* One lane looks: another page may take the slot between two looks. */
    uint32_t slot = lane == 0 ? kvf_slot_touch(t, page, now, 0).slot : 0;
    slot = __shfl_sync(KVF_FULL_WARP, slot, 0);
    if (slot == UINT32_MAX) {
        slot = kvf_slot_take(p, t, kvf_slot_word(page, now, 0), now, 1);
        if (lane == 0)
            atomicExch(&t.slot_of_page[page], slot);
    }
    return slot;
}

#endif
