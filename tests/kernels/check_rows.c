/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Rows for the checks of the paging kernels; see check_rows.h.
 */

#include "check_rows.h"

#include <string.h>

uint32_t check_subset(check *c, uint32_t n, uint32_t most, int32_t *to)
{
    const uint32_t wanted = check_below(c, kvf_min_u32(n, most) + 1);
    uint32_t taken = 0;
    for (uint32_t i = 0; i < n && taken < wanted; i++)
        if (check_below(c, n - i) < wanted - taken)
            to[taken++] = (int32_t)i;
    return taken;
}

#define USE 1000u /* number of the call */

static void make_shape(check *c, check_rows *w, const check_rows_config *config)
{
    kvf_paging *p = &w->p;
    const bool large = config->blocks_max > 100;
    *p = (kvf_paging){0};
    p->shape.dtype = (kvf_dtype)check_below(c, 3);
    p->shape.head_dim = large ? 64 : check_head_dims[check_below(c, check_dims(c))];
    p->block_size = large ? 8 : 8u << check_below(c, 4);
    p->block_pages = check_below(c, 2) ? 1 : kvf_min_u32(p->block_size, 1u << check_below(c, 7));
    if (config->by_token)
        p->block_pages = p->block_size;
    p->block_jobs = p->block_pages;
    p->shape.page_size = p->block_size / p->block_pages;
    p->shape.pages = config->pages;
    p->shape = check_values(c, &p->shape);
    p->spare_blocks = config->pages != KVF_PAGES_NATIVE;
    p->kv_heads = 1 + check_below(c, 3);
    p->group = 1 + check_below(c, 4);
    p->lists = p->kv_heads * (config->by_kv_head || check_below(c, 2) ? 1 : p->group);
    p->blocks_max = config->blocks_max;
    p->pages_max = p->blocks_max * p->block_pages;
    p->slots = KVF_SLOT_WAYS * (1 + check_below(c, 3));
    p->subs = kvf_min_u32(p->shape.page_size, 1u << check_below(c, 3));
    p->digest_bytes = p->block_pages * (uint32_t)kvf_digest_bytes(p->shape.head_dim, p->subs);
    p->sink = check_below(c, 3) ? check_below(c, 3 * p->block_size) : 0;
    p->ring_blocks = 1 + check_below(c, 4);
    p->query_window = 1 + check_below(c, 6);
    w->statics_max =
        config->statics_max ? config->statics_max : 1 + check_below(c, large ? 2000 : 150);
    p->static_pages = kvf_div_ceil_u32(p->sink + w->statics_max, p->shape.page_size);
}

/* How long the row is, and where its blocks are. */
static void make_blocks(check *c, const kvf_paging *p, kvf_row *row,
                        const check_rows_config *config)
{
    const uint32_t tokens = p->blocks_max * p->block_size;
    const uint32_t most = kvf_min_u32(config->pool_blocks, p->blocks_max);
    const size_t block = kvf_stored_block_bytes(p);
    row->length =
        check_below(c, 3) ? tokens - check_below(c, p->block_size) : 1 + check_below(c, tokens);
    const uint32_t blocks = kvf_row_blocks(p, row);
    const uint32_t least = blocks > p->ring_blocks ? blocks - p->ring_blocks : 0;
    row->sealed = least + check_below(c, row->length / p->block_size - least + 1);
    row->sealed_before = check_below(c, row->sealed + 1);
    row->ring = check_noise_out(c, kvf_ring_size(p));
    row->blocks = check_out(c, p->blocks_max * sizeof *row->blocks);
    char *pool = check_noise_in(c, most * block);
    const uint32_t step = 1 + check_below(c, most);
    row->block_of = check_out(c, p->blocks_max * sizeof *row->block_of);
    for (uint32_t i = 0; i < blocks; i++) {
        row->block_of[i] = (i + step) % most;
        row->blocks[i] =
            i < row->sealed ? pool + (i + step) % most * block : kvf_row_ring_block(p, row, i);
    }
    row->pool = check_put(c, row->blocks + row->sealed_before,
                          (row->sealed - row->sealed_before) * sizeof *row->blocks);
    row->digest_stride = (size_t)most * p->digest_bytes;
    row->digests = check_noise_out(c, p->kv_heads * row->digest_stride);
}

/* Copy token `position` of a page to entry `entry` of the store. */
static void store_row(const kvf_paging *p, const kvf_row *row, uint32_t head, uint32_t entry,
                      uint32_t position)
{
    const char *run = kvf_row_run(p, row, position / p->block_size, head);
    memcpy(kvf_static_token(p, row->static_kv, head, entry),
           kvf_page_key(&p->shape, run, position % p->block_size), kvf_token_bytes(&p->shape));
}

/* Sink and static set of one KV head; `chosen` is scratch for the tokens of the set. */
static void make_static(check *c, const check_rows *w, kvf_row *row, uint32_t head, int32_t *chosen)
{
    const kvf_paging *p = &w->p;
    const uint32_t tokens = row->sealed * p->block_size;
    const uint32_t sink = kvf_min_u32(p->sink, tokens);
    const uint32_t count = sink + check_subset(c, tokens - sink, w->statics_max, chosen);
    uint32_t *index = row->static_ids + head * kvf_static_room(p);
    uint64_t *bits = kvf_row_bits(p, row, head);
    memset(bits, 0, p->blocks_max * sizeof *bits);
    for (uint32_t i = 0; i < count; i++) {
        const uint32_t token = i < sink ? i : sink + (uint32_t)chosen[i - sink];
        index[i] = token;
        bits[token / p->block_size] |= UINT64_C(1) << token % p->block_size;
        if (p->shape.pages == KVF_PAGES_NATIVE)
            store_row(p, row, head, i, token);
    }
    row->static_count[head] = count;
}

/* The device cache of all rows, which have blocks `number * pool_blocks` ... of the pool. */
static void make_cache(check *c, check_rows *w, const check_rows_config *config)
{
    kvf_paging *p = &w->p;
    const size_t bytes = kvf_stored_page_bytes(&p->shape);
    p->pool_pages = config->rows * config->pool_blocks * p->block_pages;
    if (config->all_fit)
        p->slots = (uint32_t)kvf_round_up(p->pool_pages, KVF_SLOT_WAYS);
    const size_t pages = (size_t)p->kv_heads * p->pool_pages,
                 slots = (size_t)p->kv_heads * p->slots;
    w->slot_of_page = check_out(c, pages * sizeof *w->slot_of_page);
    w->slot_words = check_out(c, slots * sizeof *w->slot_words);
    w->slots = config->without_slots ? NULL : check_noise_out(c, slots * bytes);
    memset(w->slot_of_page, 0xff, pages * sizeof *w->slot_of_page);
    memset(w->slot_words, 0xff, slots * sizeof *w->slot_words);
}

/* Some pages of a row into slots that are free. */
static void fill_slots(check *c, const check_rows *w, kvf_row *row, uint32_t number,
                       uint32_t pool_blocks)
{
    const kvf_paging *p = &w->p;
    row->block_first = number * pool_blocks;
    row->slot_of_page = w->slot_of_page;
    row->slot_words = w->slot_words;
    row->slots = w->slots;
    row->use = USE;
    for (uint32_t h = 0; h < p->kv_heads; h++)
        for (uint32_t i = 0; i < kvf_row_sealed_pages(p, row); i++) {
            const uint32_t page = kvf_row_pool_page(p, row, i);
            const uint32_t slot = kvf_slot_bucket(p, page) + check_below(c, KVF_SLOT_WAYS);
            uint64_t *word = kvf_row_slot_words(p, row, h) + slot;
            int32_t *of_page = kvf_row_slot_of_page(p, row, h) + page;
            if (check_below(c, 2) || *word != KVF_SLOT_FREE || *of_page >= 0)
                continue;
            *of_page = (int32_t)slot;
            *word = kvf_slot_word(page, USE - 1 - check_below(c, 50), 0);
            if (row->slots)
                memcpy(kvf_row_slot(p, row, h, slot), kvf_row_home(p, row, i, h),
                       kvf_stored_page_bytes(&p->shape));
        }
    row->step = 40;
    row->chosen_at = check_out(c, (size_t)p->kv_heads * p->pages_max * sizeof *row->chosen_at);
    for (size_t i = 0; i < (size_t)p->kv_heads * p->pages_max; i++)
        row->chosen_at[i] = check_below(c, 2) ? 0 : 20 + check_below(c, 21);
}

void check_rows_make(check *c, check_rows *w, const check_rows_config *config)
{
    make_shape(c, w, config);
    make_cache(c, w, config);
    const kvf_paging *p = &w->p;
    int32_t *chosen = malloc(w->statics_max * sizeof *chosen);
    uint32_t job = 0;
    KVF_ASSERT(chosen);
    w->rows = config->rows;
    w->row = check_in(c, w->rows * sizeof *w->row);
    for (uint32_t b = 0; b < w->rows; b++) {
        kvf_row *row = &w->row[b];
        *row = (kvf_row){.fault_key = check_below(c, 1000), .job_first = job};
        make_blocks(c, p, row, config);
        job += row->sealed - row->sealed_before;
        row->bits = check_out(c, p->kv_heads * p->blocks_max * sizeof *row->bits);
        row->static_kv =
            check_noise_out(c, p->kv_heads * p->static_pages * kvf_page_bytes(&p->shape));
        row->static_ids = check_out(c, p->kv_heads * kvf_static_room(p) * sizeof(uint32_t));
        row->static_count = check_out(c, p->kv_heads * sizeof *row->static_count);
        for (uint32_t h = 0; h < p->kv_heads; h++)
            make_static(c, w, row, h, chosen);
        fill_slots(c, w, row, b, config->pool_blocks);
        row->queries =
            check_noise_out(c, p->query_window * p->kv_heads * p->group * kvf_key_bytes(&p->shape));
        row->query_count = 1 + check_below(c, p->query_window);
        row->query_slot = check_below(c, row->query_count);
        row->fault = check_put_out(c, &(uint64_t){UINT64_MAX}, sizeof(uint64_t));
        row->static_tokens = check_below(c, w->statics_max + 1);
        row->chosen_pages = check_below(c, p->pages_max + 3);
        row->attend_all = check_below(c, 5) == 0;
        if (check_below(c, 2)) {
            row->share = check_out(c, 2 * sizeof *row->share);
            row->share[0] = check_below(c, w->statics_max + 1);
            row->share[1] = check_below(c, p->pages_max + 3);
        }
    }
    w->counters = check_out(c, sizeof *w->counters);
    *w->counters = (kvf_layer_counters){.tokens_attended = check_below(c, 1000),
                                        .misses = check_below(c, 1000),
                                        .bytes_refresh = UINT32_MAX,
                                        .static_min = check_below(c, 200),
                                        .static_max = check_below(c, 200)};
    free(chosen);
}

void check_rows_describe(check *c, const check_rows *w, const char *what)
{
    const kvf_paging *p = &w->p;
    check_describe(c, "%s, %s d=%u P=%u x %u heads=%u G=%u lists=%u rows=%u blocks=%u sink=%u%s",
                   what, check_dtype_name(p->shape.dtype), p->shape.head_dim, p->shape.page_size,
                   p->block_pages, p->kv_heads, p->group, p->lists, w->rows, p->blocks_max, p->sink,
                   w->row->slots ? "" : " without slots");
}
