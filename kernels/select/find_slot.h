/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_KERNELS_SELECT_FIND_SLOT_H
#define KVF_KERNELS_SELECT_FIND_SLOT_H

/*
 * A slot for a page, for the references of resolve, admit and admit_written: one thread has the
 * tables of a head.
 */

#include "slots.h"

typedef struct kvf_slot_tables {
    int32_t *slot_of_page;
    uint64_t *words;
    uint32_t *tags; /* or NULL */
} kvf_slot_tables;

static inline kvf_slot_tables kvf_slot_tables_of(const kvf_paging *p, const kvf_row *row,
                                                 uint32_t head)
{
    return (kvf_slot_tables){.slot_of_page = kvf_row_slot_of_page(p, row, head),
                             .words = kvf_row_slot_words(p, row, head),
                             .tags = kvf_row_slot_tags(p, row, head)};
}

/* The slot that a page should get: of the first of `buckets` buckets, from its own on, that has
 * one which this call does not use, the one that is free or was used longest ago (ties: the lowest
 * one); or -1. */
static inline int32_t kvf_find_slot(const kvf_paging *p, const kvf_slot_tables *t, uint32_t page,
                                    uint32_t now, uint32_t buckets)
{
    uint32_t bucket = kvf_slot_bucket(p, page);
    buckets = kvf_min_u32(buckets, p->slots / KVF_SLOT_WAYS);
    for (uint32_t b = 0; b < buckets; b++, bucket = kvf_slot_bucket_after(p, bucket)) {
        uint32_t best = 0, oldest = 0;
        for (uint32_t i = 0; i < KVF_SLOT_WAYS; i++) {
            const uint32_t age = kvf_slot_age(t->words[bucket + i], now);
            if (age > oldest) {
                oldest = age;
                best = bucket + i;
            }
        }
        if (oldest)
            return (int32_t)best;
    }
    return -1;
}

/* A slot changes hands. */
static inline void kvf_give_slot(const kvf_slot_tables *t, uint32_t slot, uint64_t word)
{
    if (t->words[slot] != KVF_SLOT_FREE)
        t->slot_of_page[kvf_slot_page(t->words[slot])] = -1;
    t->words[slot] = word;
    t->slot_of_page[kvf_slot_page(word)] = (int32_t)slot;
}

/* The slot of a page whose bytes are at hand: its own, or one of its bucket; or -1. */
static inline int32_t kvf_admit_slot(const kvf_paging *p, const kvf_slot_tables *t, uint32_t page,
                                     uint32_t now)
{
    int32_t slot = t->slot_of_page[page];
    if (slot < 0)
        slot = kvf_find_slot(p, t, page, now, 1);
    if (slot >= 0)
        kvf_give_slot(t, (uint32_t)slot, kvf_slot_word(page, now, 0));
    return slot;
}

#endif
