/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_KERNELS_SLOTS_H
#define KVF_KERNELS_SLOTS_H

/*
 * The device cache of pages: which pages of a pool have a copy in device memory.
 *
 * A page is known by its KV head and its number in the pool: block of the pool times block_pages,
 * and the page of the block. So whoever has a block finds its pages in the same slots: forks,
 * tokens of one call, rows of block tables. A KV head has `slots` slots, shared by all rows and
 * layers of a KV group. slot_of_page[page] is a slot or -1, words[slot] a page and the call that
 * used it last; a page has the slot iff both say so.
 *
 * Slots lie in buckets of KVF_SLOT_WAYS. A page that needs a slot takes a free one of its bucket,
 * or the one that was used longest ago, never one that the same call uses; if all of a bucket are
 * in use, one of the next bucket. So rows that need slots at once meet in few places, and where
 * all pages of a pool have room each bucket has room for its own.
 *
 * Where tokens may be written again (block tables of the caller), tags[slot] is the sum of the
 * page's write counts when it was brought; the copy counts while the sum is what it was.
 */

#include "paging.h"

#define KVF_SLOT_WAYS      32u
#define KVF_SLOT_FREE      UINT64_MAX
/* Bit of a word: the call that used it last brings the page. */
#define KVF_SLOT_COMING    0x80000000u
#define KVF_SLOT_PAGES_MAX 0x7fffffffu

KVF_INLINE uint64_t kvf_slot_word(uint32_t page, uint32_t use, uint32_t coming)
{
    return (uint64_t)use << 32 | page | (coming ? KVF_SLOT_COMING : 0);
}

KVF_INLINE uint32_t kvf_slot_page(uint64_t word)
{
    return (uint32_t)word & ~KVF_SLOT_COMING;
}

/* Calls since it was used: 0 in this one, the most if it is free. Counts of calls go around. */
KVF_INLINE uint32_t kvf_slot_age(uint64_t word, uint32_t now)
{
    return word == KVF_SLOT_FREE ? UINT32_MAX : now - (uint32_t)(word >> 32);
}

KVF_INLINE uint32_t kvf_slot_is_coming(uint64_t word)
{
    return ((uint32_t)word & KVF_SLOT_COMING) != 0;
}

KVF_INLINE uint32_t kvf_slot_is_of(uint64_t word, uint32_t page)
{
    return word != KVF_SLOT_FREE && kvf_slot_page(word) == page;
}

/* First slot of a page's bucket, and of the bucket after one. */
KVF_INLINE uint32_t kvf_slot_bucket(const kvf_paging *p, uint32_t page)
{
    return page % (p->slots / KVF_SLOT_WAYS) * KVF_SLOT_WAYS;
}

KVF_INLINE uint32_t kvf_slot_bucket_after(const kvf_paging *p, uint32_t bucket)
{
    return bucket + KVF_SLOT_WAYS == p->slots ? 0 : bucket + KVF_SLOT_WAYS;
}

/* Number in the pool of a page of a sealed block. */
KVF_INLINE uint32_t kvf_row_pool_page(const kvf_paging *p, const kvf_row *row, uint32_t page)
{
    const uint32_t block = row->block_first + row->block_of[page / p->block_pages];
    return block * p->block_pages + page % p->block_pages;
}

/* Tables of a KV head. */
KVF_INLINE int32_t *kvf_row_slot_of_page(const kvf_paging *p, const kvf_row *row, uint32_t head)
{
    return row->slot_of_page + (size_t)head * p->pool_pages;
}

KVF_INLINE uint64_t *kvf_row_slot_words(const kvf_paging *p, const kvf_row *row, uint32_t head)
{
    return row->slot_words + (size_t)head * p->slots;
}

/* NULL: tokens of sealed pages are not written again. */
KVF_INLINE uint32_t *kvf_row_slot_tags(const kvf_paging *p, const kvf_row *row, uint32_t head)
{
    return row->writes ? row->slot_tags + (size_t)head * p->slots : NULL;
}

KVF_INLINE char *kvf_row_slot(const kvf_paging *p, const kvf_row *row, uint32_t head, uint32_t slot)
{
    return row->slots + ((size_t)head * p->slots + slot) * kvf_stored_page_bytes(&p->shape);
}

/* The tag that a page has today. */
KVF_INLINE uint32_t kvf_row_page_tag(const kvf_paging *p, const kvf_row *row, uint32_t pool_page)
{
    const size_t first = (size_t)pool_page * p->shape.page_size;
    uint32_t sum = 0;
    for (uint32_t t = 0; row->writes && t < p->shape.page_size; t++)
        sum += row->writes[first + t];
    return sum;
}

/* The slot of a page between calls, or -1: it has none, or was written since. */
KVF_INLINE int32_t kvf_row_slot_of(const kvf_paging *p, const kvf_row *row, uint32_t head,
                                   uint32_t page)
{
    const uint32_t of_pool = kvf_row_pool_page(p, row, page);
    const uint32_t *tags = kvf_row_slot_tags(p, row, head);
    const int32_t slot = kvf_row_slot_of_page(p, row, head)[of_pool];
    if (slot < 0 || !kvf_slot_is_of(kvf_row_slot_words(p, row, head)[slot], of_pool))
        return -1;
    return tags && tags[slot] != kvf_row_page_tag(p, row, of_pool) ? -1 : slot;
}

/* A page in its slot, or where the table names it if `slot` is -1 or slots have no bytes. */
KVF_INLINE const char *kvf_row_page_in(const kvf_paging *p, const kvf_row *row, uint32_t head,
                                       uint32_t page, int32_t slot)
{
    return slot >= 0 && row->slots ? kvf_row_slot(p, row, head, (uint32_t)slot)
                                   : kvf_row_page(p, row, page, head);
}

/* Where an exact page of a pool block can be read between calls: in its slot, or where it lives. */
KVF_INLINE const char *kvf_row_nearest(const kvf_paging *p, const kvf_row *row, uint32_t head,
                                       uint32_t page)
{
    return kvf_row_page_in(p, row, head, page,
                           row->slots ? kvf_row_slot_of(p, row, head, page) : -1);
}

#endif
