/* SPDX-License-Identifier: Apache-2.0 */

/*
 * A new static store out of the old one and of pages.
 *
 * Knows nothing of scores and digests. The old store stays as it was, because other tasks of the
 * step may read it. After it: bit t of a page is set iff its token is in the new store, and entries
 * ascend.
 */

#include <string.h>

#include "variants.h"

/* One KV head of one launch. */
typedef struct packing {
    const kvf_pack_args *a;
    uint32_t head;
    uint32_t sink; /* entries that stay in front */
    uint32_t old_count;
    const uint32_t *old_index;
    uint32_t new_count;
    uint32_t *new_index;
    uint64_t bytes; /* read from host pages */
} packing;

static const char *old_entry(const packing *k, uint32_t entry)
{
    const kvf_paging *p = &k->a->paging;
    return kvf_static_token(p, k->a->row->static_kv, k->head, entry);
}

/* `from` is a key; its value follows. */
static void add_entry(packing *k, uint32_t token, const char *from)
{
    const kvf_paging *p = &k->a->paging;
    const uint32_t e = k->new_count++;
    KVF_ASSERT(e < kvf_static_room(p));
    memcpy(kvf_static_token(p, k->a->static_kv, k->head, e), from, kvf_token_bytes(&p->shape));
    k->new_index[e] = token;
}

/* The key of a position among the spans; NULL if there is no live token. */
static const char *key_at(const packing *k, int32_t position, uint32_t *token)
{
    const kvf_pack_args *a = k->a;
    const uint32_t tokens = kvf_cover_tokens(&a->paging, a->resident);
    const uint32_t t = (uint32_t)position % tokens;
    const size_t at = (size_t)k->head * a->spans_max + (uint32_t)position / tokens;
    if (!(kvf_live_bits(a->spans[at].count, a->spans[at].skip) >> t & 1))
        return NULL;
    *token = a->span_index[at] + t;
    return (const char *)a->spans[at].page + t * kvf_token_bytes(&a->paging.shape);
}

/* Merge two ascending runs: ids[0 .. split) of the old store and the others of pages. */
static void add_chosen(packing *k)
{
    const kvf_pack_args *a = k->a;
    const int32_t *ids = a->ids + (size_t)k->head * a->ids_max;
    const uint32_t count = a->id_count[k->head], page_size = a->paging.shape.page_size;
    const uint32_t static_end =
        a->resident ? kvf_div_ceil_u32(k->old_count, page_size) * page_size : 0;
    uint32_t split = 0;
    while (split < count && (uint32_t)ids[split] < static_end)
        split++;
    uint32_t i = 0, j = split;
    while (i < split || j < count) {
        uint32_t token = UINT32_MAX, unused;
        const char *page_key = j < count ? key_at(k, ids[j], &token) : NULL;
        if (j < count && !page_key) {
            j++;
        } else if (i < split && !key_at(k, ids[i], &unused)) {
            i++;
        } else if (i < split && (j == count || k->old_index[ids[i]] < token)) {
            add_entry(k, k->old_index[ids[i]], old_entry(k, (uint32_t)ids[i]));
            i++;
        } else {
            add_entry(k, token, page_key);
            k->bytes += a->resident ? 0 : kvf_token_bytes(&a->paging.shape);
            j++;
        }
    }
}

/* Old and new entries page by page. */
static void refresh_bits(const packing *k)
{
    const kvf_paging *p = &k->a->paging;
    const uint32_t page_size = p->shape.page_size;
    uint32_t i = k->sink, j = k->sink;
    while (i < k->old_count || j < k->new_count) {
        uint32_t page = UINT32_MAX;
        if (i < k->old_count)
            page = k->old_index[i] / page_size;
        if (j < k->new_count)
            page = kvf_min_u32(page, k->new_index[j] / page_size);
        const uint32_t shift = page % p->block_pages * page_size;
        uint64_t bits =
            kvf_sink_bits(p, page / p->block_pages) >> shift & kvf_live_bits(page_size, 0);
        while (i < k->old_count && k->old_index[i] / page_size == page)
            i++;
        for (; j < k->new_count && k->new_index[j] / page_size == page; j++)
            bits |= UINT64_C(1) << k->new_index[j] % page_size;
        const uint64_t old = kvf_row_skip(p, k->a->row, k->head, page);
        kvf_row_bits(p, k->a->row, k->head)[page / p->block_pages] ^= (old ^ bits) << shift;
    }
}

void kvf_pack_ref(const void *args, uint32_t task)
{
    const kvf_pack_args *a = args;
    const kvf_paging *p = &a->paging;
    const size_t stride = kvf_static_room(p);
    packing k = {.a = a,
                 .head = task,
                 .sink = kvf_min_u32(p->sink, a->row->sealed * p->block_size),
                 .old_count = a->row->static_count[task],
                 .old_index = a->row->static_ids + task * stride,
                 .new_index = a->static_ids + task * stride};
    KVF_ASSERT(k.sink <= k.old_count);
    for (uint32_t e = 0; e < k.sink; e++)
        add_entry(&k, k.old_index[e], old_entry(&k, e));
    add_chosen(&k);
    refresh_bits(&k);
    a->static_count[task] = k.new_count;
    if (!a->resident)
        k.bytes += a->row->sealed * p->block_size * kvf_key_bytes(&p->shape);
    __atomic_fetch_add(&a->counters->bytes_refresh, k.bytes, __ATOMIC_RELAXED);
}
