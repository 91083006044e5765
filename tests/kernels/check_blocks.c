/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Kernels on physical blocks against their references: write, rows, validate, average,
 * gather_window, scatter_heads, note, clone, fill_nan, dequantize_chunks. Bit for bit, one after
 * the other on one small store, exact or quantized, with rows that are bad among the others; what
 * they mean is also said here in a few lines.
 */

#include <math.h>
#include <string.h>

#include "check_support.h"
#include "common/convert.h"
#include "quantized.h"
#include "score/codes.h"

#define REGIONS 4u
#define LAYERS  2u
#define LAYER   1u

#define EXACT_CASES     21u
#define QUANTIZED_CASES 21u

typedef struct world {
    kvf_physical_blocks *c;
    kvf_physical_codes codes;
    char *exact; /* [64 tokens] of one KV head, for looks at physical blocks */
    uint32_t blocks, lists;
    size_t pool; /* physical blocks of all layers */
    int32_t *table, *lengths, *regions;
    uint32_t table_stride;
    kvf_ring ring; /* of tails of LAYER, where heads stream */
    uint64_t first;
} world;

static void *tracked(check *c, const char *name, size_t bytes)
{
    return memset(check_changed(c, name, bytes), 0, bytes);
}

static kvf_paging make_paging(check *c, uint32_t index)
{
    const kvf_pages quantized = index % 2 ? KVF_PAGES_K8V8 : KVF_PAGES_K8V4;
    kvf_paging p = {.shape = check_shape(c, index, index / 3, index),
                    .kv_heads = 1 + check_below(c, 3),
                    .group = 1};
    p.shape.pages = (kvf_pages)(index < EXACT_CASES ? KVF_PAGES_NATIVE : quantized);
    p.shape = check_values(c, &p.shape);
    p.lists = p.kv_heads;
    p.block_size = p.shape.page_size > 32 ? 64 : 32;
    p.block_pages = p.block_size / p.shape.page_size;
    p.sink = check_below(c, 40);
    p.static_pages = kvf_max_u32(1, kvf_div_ceil_u32(p.sink, p.shape.page_size));
    p.slots = KVF_SLOT_WAYS;
    p.ring_blocks = 2;
    return p;
}

static void make_store(check *c, world *w)
{
    kvf_physical_blocks *k = w->c;
    const kvf_paging *p = &k->paging;
    const size_t block = kvf_stored_block_bytes(p), tokens = w->pool * p->block_size;
    const uint32_t arenas = kvf_div_ceil_u32((uint32_t)w->pool, k->arena_blocks);
    char **arena = check_in(c, arenas * sizeof *arena);
    char *pool = tracked(c, "pool", arenas * k->arena_blocks * block);
    for (uint32_t i = 0; i < arenas; i++)
        arena[i] = pool + (arenas - 1 - i) * k->arena_blocks * block;
    k->arenas = arena;
    k->scales = tracked(c, "scales", tokens * p->kv_heads * sizeof *k->scales);
    k->writes = tracked(c, "writes", tokens * sizeof *k->writes);
    k->nonfinite = tracked(c, "nonfinite", w->pool * sizeof *k->nonfinite);
    w->codes = (kvf_physical_codes){
        .scales = k->scales + LAYER * tokens / LAYERS * p->kv_heads,
        .stride = k->id_blocks * (size_t)p->kv_heads * p->block_size * p->shape.head_dim / 4 + 32,
        .id_blocks = k->id_blocks,
        .kv_heads = p->kv_heads};
    w->codes.words = tracked(c, "words", k->ids * w->codes.stride);
    w->exact = check_out(c, kvf_run_bytes(p));
}

static void make_regions(check *c, world *w)
{
    kvf_physical_blocks *k = w->c;
    const kvf_paging *p = &k->paging;
    const size_t n = REGIONS * LAYERS, lists = n * p->lists, page = kvf_page_bytes(&p->shape);
    if (check_below(c, 3) || p->shape.pages != KVF_PAGES_NATIVE)
        k->rings = tracked(c, "rings", n * p->ring_blocks * kvf_block_bytes(p));
    k->static_kv = tracked(c, "static_kv", lists * p->static_pages * page);
    k->clock = tracked(c, "clock", sizeof *k->clock);
    k->token_tags = tracked(c, "token_tags", lists * kvf_region_tokens(p) * sizeof *k->token_tags);
    k->row = tracked(c, "row", REGIONS * sizeof *k->row);
    k->blocks = tracked(c, "blocks", REGIONS * p->blocks_max * sizeof *k->blocks);
    k->physical = tracked(c, "physical", REGIONS * p->blocks_max * sizeof *k->physical);
    k->static_count = tracked(c, "static_count", w->lists * sizeof *k->static_count);
    k->bits = check_in(c, p->kv_heads * p->blocks_max * sizeof *k->bits);
    k->pages = tracked(c, "pages", w->lists * sizeof *k->pages);
    k->choose = tracked(c, "choose", w->lists * sizeof *k->choose);
    k->region = tracked(c, "region", REGIONS * sizeof *k->region);
    k->is_bad = tracked(c, "is_bad", REGIONS * sizeof *k->is_bad);
    k->counters = tracked(c, "counters", LAYERS * sizeof *k->counters);
}

/* Some heads of some worlds are coarse; a segment is whole in a block of the caller. */
static void make_coarse(check *c, world *w)
{
    kvf_physical_blocks *k = w->c;
    kvf_paging *p = &k->paging;
    const uint32_t heads = LAYERS * p->kv_heads, per = KVF_CENTROID_TOKENS / p->block_size;
    if (k->id_blocks % per || check_below(c, 3) == 0)
        return;
    uint32_t *coarse = check_in(c, heads * sizeof *coarse), count = 0;
    for (uint32_t i = 0; i < heads; i++)
        coarse[i] = check_below(c, 3) ? count++ : UINT32_MAX;
    p->segments_max = kvf_segments(p->block_size, p->blocks_max);
    k->coarse.segments = w->blocks / per;
    k->coarse.number = coarse;
    k->coarse_share = (float)check_below(c, 4) / 10;
    k->coarse.centroids =
        tracked(c, "centroids", (size_t)count * k->coarse.segments * p->shape.head_dim + 1);
    k->coarse.scales =
        tracked(c, "centroid_scales", (count * k->coarse.segments + 1) * sizeof(uint16_t));
    k->coarse.is_centroid =
        tracked(c, "is_centroid", LAYERS * k->coarse.segments * sizeof *k->coarse.is_centroid);
    k->coarse.count = tracked(c, "centroid_count", w->lists * sizeof *k->coarse.count);
    k->coarse.take = tracked(c, "centroid_take", w->lists * sizeof *k->coarse.take);
    k->coarse.blocks = tracked(c, "centroid_blocks", w->lists * sizeof *k->coarse.blocks);
    k->coarse.unfiltered = tracked(c, "unfiltered", w->lists * sizeof *k->coarse.unfiltered);
    k->list_bits = tracked(c, "list_bits", w->lists * sizeof *k->list_bits);
    k->coarse.filtered = check_in(c, w->lists * p->blocks_max * sizeof *k->coarse.filtered);
}

/* Heads of some worlds stream; none of these is coarse. */
static void make_streaming(check *c, world *w)
{
    kvf_physical_blocks *k = w->c;
    const kvf_paging *p = &k->paging;
    const uint32_t heads = LAYERS * p->kv_heads;
    if (check_below(c, 3) == 0)
        return;
    uint32_t *streaming = check_in(c, heads * sizeof *streaming);
    k->streaming.number = streaming;
    for (uint32_t l = 0; l < LAYERS; l++) { /* each layer's tails are of a length of its own */
        kvf_ring ring = {.shape = kvf_run_shape(p),
                         .heads = 1,
                         .sink = check_below(c, 80),
                         .recent = 1 + check_below(c, 100)};
        ring.sink_blocks = kvf_div_ceil_u32(ring.sink, p->block_size);
        ring.ring_blocks = kvf_div_ceil_u32(ring.recent - 1, p->block_size) + 1;
        if (l == LAYER) {
            w->ring = ring;
            w->first = k->streaming.blocks;
        }
        for (uint32_t i = l * p->kv_heads, n = 0; i < (l + 1) * p->kv_heads; i++) {
            const int is_free = !k->coarse.number || k->coarse.number[i] == UINT32_MAX;
            streaming[i] = check_below(c, 2) && is_free ? ++n : 0;
            k->streaming.blocks += streaming[i] ? kvf_ring_total(&ring) : 0;
        }
    }
    const size_t blocks = REGIONS * k->streaming.blocks;
    if (k->rings)
        k->streaming.tails = tracked(c, "tails", blocks * kvf_run_bytes(p) + 16);
    k->streaming.tags =
        tracked(c, "tail_tags", (blocks * p->block_size + 1) * sizeof *k->streaming.tags);
}

static void make_world(check *c, world *w, uint32_t index)
{
    kvf_physical_blocks *k = w->c = check_in(c, sizeof *k);
    *k = (kvf_physical_blocks){.paging = make_paging(c, index),
                               .regions = REGIONS,
                               .layers = LAYERS,
                               .ids = 9,
                               .id_blocks = 1 + check_below(c, 2),
                               .arena_blocks = 5,
                               .budget_tokens = 100 + check_below(c, 100),
                               .budget_share = (float)check_below(c, 3) / 2,
                               .local_tokens = check_below(c, 33),
                               .dynamic_pages = 8};
    kvf_paging *p = &k->paging;
    p->blocks_max = p->block_size == 32 ? 6 * k->id_blocks : 8;
    p->pages_max = p->blocks_max * p->block_pages;
    k->tokens_max = p->blocks_max * p->block_size - check_below(c, 20);
    w->blocks = k->ids * k->id_blocks;
    w->pool = (size_t)w->blocks * LAYERS;
    w->lists = REGIONS * p->lists;
    make_store(c, w);
    make_regions(c, w);
    make_coarse(c, w);
    make_streaming(c, w);
    w->table_stride = kvf_div_ceil_u32(p->blocks_max, k->id_blocks);
    w->table = check_in(c, REGIONS * w->table_stride * sizeof *w->table);
    w->lengths = check_in(c, REGIONS * sizeof *w->lengths);
    w->regions = check_in(c, REGIONS * sizeof *w->regions);
}

/* A token of a physical block in full precision, by the words of quantized.h. */
static void take_exact(const world *w, uint32_t block, uint32_t head, uint32_t t, void *to)
{
    const kvf_shape *s = &w->c->paging.shape;
    const char *page = kvf_physical_page(w->c, LAYER, block, head, t);
    float x[KVF_HEAD_DIM_MAX];
    if (s->pages == KVF_PAGES_NATIVE)
        memcpy(to, kvf_page_key(s, page, t % s->page_size), kvf_token_bytes(s));
    else
        kvf_dequantize_token(s, page, t % s->page_size, to, x);
}

/* All that a physical block has of a KV head, into `to`. */
static const char *exact_run(const world *w, uint32_t block, uint32_t head, char *to)
{
    const kvf_paging *p = &w->c->paging;
    for (uint32_t t = 0; t < p->block_size; t++)
        take_exact(w, block, head, t, to + t * kvf_token_bytes(&p->shape));
    return to;
}

/* Token `index` of a call, which is written, is what its physical block has; quantized by the words
 * of quantized.h. */
static void look_at_token(check *c, const world *w, const kvf_write_args *a, uint32_t index)
{
    const kvf_paging *p = &w->c->paging;
    const kvf_shape *s = &p->shape;
    const size_t bytes = kvf_key_bytes(s);
    const kvf_dtype dtype = a->is_wide ? KVF_FP32 : s->dtype;
    const uint32_t block = (uint32_t)(a->slots[index] / p->block_size);
    const uint32_t t = (uint32_t)(a->slots[index] % p->block_size);
    _Alignas(64) char want[2 * KVF_HEAD_DIM_MAX * sizeof(float)], got[sizeof want];
    _Alignas(64) char page[KVF_PAGE_SIZE_MAX * 640];
    float x[KVF_HEAD_DIM_MAX];
    for (uint32_t h = 0; h < p->kv_heads; h++) {
        const size_t key = index * a->k_stride + h * s->head_dim;
        const size_t value = index * a->v_stride + h * kvf_value_dim(s);
        for (uint32_t d = 0; d < s->head_dim; d++)
            kvf_element_set(want, s->dtype, d, kvf_element_get(a->k, dtype, key + d));
        for (uint32_t d = 0; d < kvf_value_dim(s); d++)
            kvf_element_set(want + bytes, s->dtype, d, kvf_element_get(a->v, dtype, value + d));
        if (s->pages != KVF_PAGES_NATIVE) {
            kvf_quantize_token(s, page, t % s->page_size, want, x);
            kvf_dequantize_token(s, page, t % s->page_size, want, x);
        }
        take_exact(w, block, h, t, got);
        check_bits(c, "a token of a block", got, want, kvf_token_bytes(s));
    }
}

/* Some slots, each once; some left out, one that there is not. */
static void write_tokens(check *c, world *w, uint32_t with_nonfinite, check_data data)
{
    const kvf_paging *p = &w->c->paging;
    const uint32_t all = w->blocks * p->block_size, step = 1 + check_below(c, 3);
    const uint32_t tokens = all / step, row = p->kv_heads * p->shape.head_dim;
    const uint32_t values = p->kv_heads * kvf_value_dim(&p->shape);
    kvf_write_args a = {.blocks = w->c,
                        .pool = kvf_physical_pool_of(w->c),
                        .codes = w->codes,
                        .shape = p->shape,
                        .layer = LAYER,
                        .tokens = tokens,
                        .k_stride = row + 8 * check_below(c, 2),
                        .v_stride = values};
    void *k = check_in(c, tokens * a.k_stride * kvf_dtype_bytes(p->shape.dtype));
    void *v = check_in(c, tokens * a.v_stride * kvf_dtype_bytes(p->shape.dtype));
    int64_t *slots = check_in(c, tokens * sizeof *slots);
    check_fill(c, k, p->shape.dtype, tokens * a.k_stride, data);
    check_fill(c, v, p->shape.dtype, tokens * a.v_stride, data);
    for (uint32_t i = 0; i < tokens; i++)
        slots[i] = check_below(c, 20) ? (int64_t)((tokens - 1 - i) * step) : -1;
    slots[check_below(c, tokens)] = (int64_t)all + check_below(c, 3);
    const kvf_dtype dtype = p->shape.dtype;
    a.is_wide = dtype != KVF_FP32 && check_below(c, 2);
    if (a.is_wide) {
        k = check_widen(c, k, dtype, tokens * a.k_stride);
        v = check_widen(c, v, dtype, tokens * a.v_stride);
    }
    if (with_nonfinite) {
        /* Neither is a number any more, or with what it rounds to. */
        const float none[] = {NAN, -INFINITY, kvf_rounds_below(dtype)};
        const uint32_t of_value = check_below(c, 2);
        kvf_element_set(of_value ? v : k, a.is_wide ? KVF_FP32 : dtype,
                        check_below(c, of_value ? values : row),
                        none[check_below(c, a.is_wide ? 3 : 2)]);
    }
    a.k = k;
    a.v = v;
    a.slots = slots;
    CHECK_BOTH(c, write, &a);
    for (uint32_t i = tokens / 2; i < tokens && i < tokens / 2 + 8; i++)
        if (slots[i] >= 0 && slots[i] < (int64_t)all)
            look_at_token(c, w, &a, i); /* one that is nonfinite is among the first */
}

/* Codes of a physical block are those that `encode` gives for its keys. */
static void compare_codes(check *c, const world *w, uint32_t block)
{
    const kvf_paging *p = &w->c->paging;
    const uint32_t head_dim = p->shape.head_dim;
    kvf_digest_job *job = check_in(c, sizeof *job);
    char *digest = check_out(c, kvf_code_bytes(head_dim) * (p->block_size / KVF_CODE_TOKENS));
    for (uint32_t h = 0; h < p->kv_heads; h++) {
        *job = (kvf_digest_job){
            .page = exact_run(w, block, h, w->exact), .digest = digest, .count = p->block_size};
        const kvf_encode_args a = {.shape = p->shape, .job_count = 1, .jobs = job};
        CHECK_RUN(c, c->ref, encode, &a, 0);
        for (uint32_t t = 0; t < p->block_size; t++) {
            const char *want = digest + t / KVF_CODE_TOKENS * kvf_code_bytes(head_dim);
            const uint32_t in_group = t % KVF_CODE_TOKENS;
            const char *got = kvf_physical_words(&w->codes, head_dim, p->block_size, block, h, t);
            if (kvf_physical_writes(w->c, LAYER, block)[t] == 0)
                continue;
            for (uint32_t i = 0; i < head_dim / KVF_CODE_LANES; i++) {
                const size_t at = 4 * kvf_code_word(head_dim, in_group, i);
                check_bits(c, "a word", got + at, want + at, 4);
            }
            check_bits(c, "a scale", kvf_physical_scales(&w->codes, p->block_size, block, h) + t,
                       want + kvf_code_scales(head_dim) + in_group * sizeof(uint16_t),
                       sizeof(uint16_t));
        }
    }
}

/* Tables of distinct ids, and what is wrong with some of them. */
static void make_rows(check *c, world *w)
{
    const uint32_t ids = w->c->ids;
    for (uint32_t b = 0; b < REGIONS; b++) {
        for (uint32_t i = 0; i < w->table_stride; i++)
            w->table[b * w->table_stride + i] = (int32_t)((b + i * 2) % ids);
        w->lengths[b] = (int32_t)check_below(c, w->c->tokens_max + 1);
        w->regions[b] = (int32_t)(REGIONS - 1 - b);
    }
    const uint32_t b = check_below(c, REGIONS);
    switch (check_below(c, 8)) {
    case 0:
        w->table[b * w->table_stride] = check_below(c, 2) ? -1 : (int32_t)ids;
        break;
    case 1:
        w->lengths[b] = check_below(c, 2) ? -5 : (int32_t)w->c->tokens_max + 1;
        break;
    case 2:
        w->regions[b] = check_below(c, 2) ? -1 : (int32_t)REGIONS;
        break;
    case 3:
        w->regions[b] = w->regions[(b + 1) % REGIONS];
        break;
    case 4:
        w->lengths[b] = 0;
        w->regions[b] = 1000;
        break;
    default:
        break;
    }
}

/* A good row names the physical blocks of its table; a bad one nothing. */
static void look_at_rows(check *c, const world *w)
{
    const kvf_paging *p = &w->c->paging;
    for (uint32_t b = 0; b < REGIONS; b++) {
        const kvf_row *row = &w->c->row[b];
        if (row->length != (w->c->is_bad[b] ? 0 : (uint32_t)w->lengths[b]))
            check_fail(c, "row %u has length %u of %d", b, row->length, w->lengths[b]);
        for (uint32_t i = 0; i < row->sealed; i++) {
            const int32_t id = w->table[b * w->table_stride + i / w->c->id_blocks];
            const uint32_t block = (uint32_t)id * w->c->id_blocks + i % w->c->id_blocks;
            if (row->blocks[i] != kvf_physical_home(w->c, LAYER, block))
                check_fail(c, "row %u block %u is not id %d", b, i, id);
        }
        for (uint32_t h = 0; h < p->kv_heads; h++)
            if (w->c->choose[b * p->lists + h] > w->c->pages[b * p->lists + h] ||
                (kvf_row_is_idle(row, h) && w->c->pages[b * p->lists + h]))
                check_fail(c, "row %u chooses more pages than there are", b);
    }
}

/* Rings and stores hold what the physical blocks hold. */
static void look_at_regions(check *c, const world *w)
{
    const kvf_paging *p = &w->c->paging;
    const size_t token = kvf_token_bytes(&p->shape);
    for (uint32_t b = 0; b < REGIONS; b++)
        for (uint32_t h = 0; h < p->kv_heads; h++) {
            const kvf_row *row = &w->c->row[b];
            for (uint32_t t = 0; t < row->length && !kvf_row_is_idle(row, h); t++) {
                const uint32_t block = w->c->physical[b * p->blocks_max + t / p->block_size];
                take_exact(w, block, h, t % p->block_size, w->exact);
                if (t < row->static_count[h])
                    check_bits(c, "sink", kvf_static_token(p, row->static_kv, h, t), w->exact,
                               token);
                if (t >= row->sealed * p->block_size)
                    check_bits(c, "window",
                               kvf_row_run(p, row, t / p->block_size, h) +
                                   t % p->block_size * token,
                               w->exact, token);
            }
        }
}

/* Spans of a streaming head are its first and newest tokens, in order, as the physical blocks have
 * them. */
static void look_at_tail(check *c, const world *w, uint32_t list, const kvf_span *spans,
                         uint32_t count)
{
    const kvf_physical_blocks *k = w->c;
    const kvf_paging *p = &k->paging;
    const uint32_t b = list / p->lists, length = k->row[b].length, recent = w->ring.recent;
    const size_t token = kvf_token_bytes(&p->shape);
    uint32_t t = 0;
    for (uint32_t i = 0; i < count; i++)
        for (uint32_t j = 0; j < spans[i].count; j++, t++) {
            if (spans[i].skip >> j & 1)
                continue;
            while (t >= w->ring.sink && t + recent < length)
                t++;
            if (t % p->block_size != j || t >= length)
                check_fail(c, "list %u: span %u has token %u of its page, not %u", list, i, j, t);
            const uint32_t block = k->physical[b * p->blocks_max + t / p->block_size];
            take_exact(w, block, list % p->lists, j, w->exact);
            check_bits(c, "a token of a tail", (const char *)spans[i].page + j * token, w->exact,
                       token);
        }
    while (t >= w->ring.sink && t + recent < length)
        t++;
    if (t != length)
        check_fail(c, "list %u: spans end at token %u of %u", list, t, length);
}

/* Tails, and outputs as `scatter_heads` puts them. */
static void stream(check *c, const world *w)
{
    const kvf_physical_blocks *k = w->c;
    const kvf_paging *p = &k->paging;
    const uint32_t rows = REGIONS, group = 2, heads = rows * p->kv_heads;
    kvf_gather_window_args gather_window = {.blocks = k,
                                            .pages = p->shape.pages,
                                            .layer = LAYER,
                                            .rows = rows,
                                            .kv_heads = p->kv_heads,
                                            .ring = w->ring,
                                            .first = w->first,
                                            .spans_max = kvf_ring_total(&w->ring)};
    kvf_span *spans = gather_window.spans =
        tracked(c, "spans", heads * gather_window.spans_max * sizeof *spans);
    uint32_t *count = gather_window.span_count = tracked(c, "span_count", heads * sizeof *count);
    CHECK_BOTH(c, gather_window, &gather_window);
    for (uint32_t l = 0; l < heads; l++)
        if (kvf_row_is_idle(&k->row[l / p->lists], l % p->lists))
            look_at_tail(c, w, l, spans + (size_t)l * gather_window.spans_max, count[l]);
        else if (count[l])
            check_fail(c, "list %u is not idle and has %u spans", l, count[l]);
    float *from = check_in(c, (size_t)heads * group * sizeof *from);
    float *out = tracked(c, "woven", (size_t)heads * group * sizeof *out);
    for (uint32_t i = 0; i < heads * group; i++) {
        from[i] = (float)i;
        out[i] = -1.0f;
    }
    const kvf_scatter_heads_args scatter_heads = {.streaming =
                                                      k->streaming.number + LAYER * p->kv_heads,
                                                  .rows = rows,
                                                  .kv_heads = p->kv_heads,
                                                  .group = group,
                                                  .value_bytes = sizeof(float),
                                                  .from = from,
                                                  .from_lse = from,
                                                  .out = out,
                                                  .lse = check_below(c, 2) ? out : NULL};
    CHECK_BOTH(c, scatter_heads, &scatter_heads);
    for (uint32_t i = 0; i < heads * group; i++)
        if (out[i] != (scatter_heads.streaming[i / group % p->kv_heads] ? (float)i : -1.0f))
            check_fail(c, "output %u is %g", i, (double)out[i]);
}

/* Centroids of what rows rank are those that `centroids` makes of the same keys. */
static void compare_centroids(check *c, const world *w)
{
    const kvf_physical_blocks *k = w->c;
    const kvf_paging *p = &k->paging;
    const uint32_t head_dim = p->shape.head_dim, per = KVF_CENTROID_TOKENS / p->block_size;
    kvf_digest_job *job = check_in(c, per * sizeof *job);
    char *runs = check_out(c, per * kvf_run_bytes(p));
    kvf_row *row = check_in(c, sizeof *row);
    uint32_t *block_of = check_in(c, per * sizeof *block_of);
    for (uint32_t j = 0; j < per; j++)
        block_of[j] = j;
    *row = (kvf_row){.digests = check_out(c, KVF_CENTROID_GROUPS * kvf_code_bytes(head_dim)),
                     .block_of = block_of,
                     .centroids = check_out(c, head_dim),
                     .centroid_scales = check_out(c, sizeof(uint16_t)),
                     .sealed = per};
    kvf_centroids_args centroids = {.paging = *p, .rows = 1, .segments = 1, .row = row};
    centroids.paging.kv_heads = centroids.paging.segments_max = centroids.paging.block_jobs = 1;
    centroids.paging.digest_bytes =
        p->block_size / KVF_CODE_TOKENS * (uint32_t)kvf_code_bytes(head_dim);
    for (uint32_t n = 0; n < REGIONS * p->lists * p->segments_max; n++) {
        const uint32_t list = n / p->segments_max, i = n % p->segments_max + 1;
        const uint32_t b = list / p->lists, head = list % p->lists;
        const uint32_t *physical = k->physical + b * p->blocks_max + (size_t)i * per;
        const uint32_t number = k->coarse.number[LAYER * p->kv_heads + head];
        if (i > k->coarse.count[list])
            continue;
        for (uint32_t j = 0; j < per; j++)
            job[j] = (kvf_digest_job){
                .page = exact_run(w, physical[j], head, runs + j * kvf_run_bytes(p)),
                .digest = row->digests + j * kvf_code_bytes(head_dim),
                .count = p->block_size};
        const kvf_encode_args encode = {.shape = p->shape, .job_count = per, .jobs = job};
        CHECK_RUN(c, c->ref, encode, &encode, 0);
        CHECK_RUN(c, c->ref, centroids, &centroids, 0);
        const size_t at = (size_t)number * k->coarse.segments + physical[0] / per;
        check_bits(c, "a mean", k->coarse.centroids + at * head_dim, row->centroids, head_dim);
        check_bits(c, "its scale", k->coarse.scales + at, row->centroid_scales, sizeof(uint16_t));
    }
}

static void step(check *c, world *w)
{
    const kvf_rows_args rows = {.blocks = w->c,
                                .layer = LAYER,
                                .rows = REGIONS,
                                .table_stride = w->table_stride,
                                .table = w->table,
                                .lengths = w->lengths,
                                .regions = check_below(c, 3) ? w->regions : NULL};
    const kvf_validate_args validate = {.blocks = w->c,
                                        .row = w->c->row,
                                        .region = w->c->region,
                                        .static_count = w->c->static_count,
                                        .pages = w->c->paging.shape.pages,
                                        .layer = LAYER,
                                        .rows = REGIONS,
                                        .kv_heads = w->c->paging.kv_heads};
    const kvf_average_args average = {.blocks = w->c,
                                      .codes = w->codes,
                                      .layer = LAYER,
                                      .rows = REGIONS,
                                      .segments_max = w->c->paging.segments_max,
                                      .head_dim = w->c->paging.shape.head_dim};
    const uint32_t calls = *w->c->clock;
    make_rows(c, w);
    CHECK_BOTH(c, rows, &rows);
    look_at_rows(c, w);
    CHECK_BOTH(c, validate, &validate);
    look_at_regions(c, w);
    CHECK_BOTH(c, average, &average);
    if (average.segments_max)
        compare_centroids(c, w);
    if (w->c->streaming.number)
        stream(c, w);
    if (*w->c->clock != calls + 1)
        check_fail(c, "call %u is not counted", calls);
}

/* Rows of chunks have their tokens in full precision, up to their ends. */
static void dequantize_chunks(check *c, const world *w, const kvf_query_chunks *chunks)
{
    const kvf_physical_blocks *k = w->c;
    const kvf_paging *p = &k->paging;
    const size_t token = kvf_token_bytes(&p->shape), blocks = chunks->count * p->blocks_max;
    const kvf_dequantize_chunks_args a = {
        .paging = *p,
        .chunks = *chunks,
        .blocks_each = p->blocks_max,
        .blocks = k->blocks,
        .scratch = check_changed(c, "scratch", blocks * kvf_block_bytes(p))};
    CHECK_BOTH(c, dequantize_chunks, &a);
    for (uint32_t t = 0; t < chunks->at[0].base + chunks->at[0].tokens; t++)
        for (uint32_t h = 0; h < p->kv_heads; h++) {
            take_exact(w, k->physical[t / p->block_size], h, t % p->block_size, w->exact);
            check_bits(c, "a token in full precision",
                       a.scratch + t / p->block_size * kvf_block_bytes(p) + h * kvf_run_bytes(p) +
                           t % p->block_size * token,
                       w->exact, token);
        }
}

/* A row of known length: a token that is not finite poisons what sees it. The next one has another
 * length. */
static void chunk(check *c, world *w)
{
    const kvf_paging *p = &w->c->paging;
    const uint32_t token = check_below(c, w->c->tokens_max), b = token / p->block_size;
    uint64_t *nonfinite = w->c->nonfinite + LAYER * w->blocks;
    for (uint32_t i = 0; i < 2 * w->table_stride; i++)
        w->table[i] = (int32_t)((1 + 2 * i) % w->c->ids);
    w->lengths[0] = w->lengths[1] = (int32_t)w->c->tokens_max;
    const kvf_rows_args rows = {
        .blocks = w->c,
        .layer = LAYER,
        .rows = 2,
        .table_stride = w->table_stride,
        .table = w->table,
        .lengths = w->lengths,
        .chunks = {2, {{0, 3, w->c->tokens_max - 3}, {3, 1, w->c->tokens_max - 2}}}};
    memset(nonfinite, 0, w->blocks * sizeof *nonfinite);
    CHECK_BOTH(c, rows, &rows);
    if (w->c->is_bad[0] || w->c->row[0].length != w->c->tokens_max)
        check_fail(c, "a good chunk is bad");
    if (w->c->is_bad[1] != 1 || w->c->row[1].length != 0)
        check_fail(c, "a chunk of another length is good");
    if (p->shape.pages != KVF_PAGES_NATIVE)
        dequantize_chunks(c, w, &rows.chunks);
    const uint32_t block = w->c->physical[b];
    nonfinite[block] = ~UINT64_C(0) << token % p->block_size;
    CHECK_BOTH(c, rows, &rows);
    if (w->c->is_bad[0] != token + 1)
        check_fail(c, "token %u is nonfinite, not %u", token, w->c->is_bad[0] - 1);
    if (token && w->c->row[0].blocks[b] != kvf_physical_home(w->c, LAYER, block))
        check_fail(c, "a chunk with an nonfinite token has lost its blocks");
    nonfinite[block] = 0;
    w->table[0] = -1;
    CHECK_BOTH(c, rows, &rows);
    if (w->c->is_bad[0] != 1)
        check_fail(c, "a chunk without its first block is good");
}

static void fill_nan(check *c, const world *w)
{
    kvf_fill_nan_args a = {.is_bad = w->c->is_bad,
                           .rows = REGIONS,
                           .heads = 1 + check_below(c, 3),
                           .value_dim = 16,
                           .dtype = w->c->paging.shape.dtype};
    uint32_t from[4 * REGIONS] = {0}, tokens = 0; /* of every output: 1 + its first bad token */
    const uint32_t are_chunks = check_below(c, 2);
    for (uint32_t i = 0; i < REGIONS; i++) {
        const kvf_query_chunk one = {tokens, are_chunks ? 1 + check_below(c, 4) : 1,
                                     check_below(c, 2 * REGIONS)};
        w->c->is_bad[i] = check_below(c, 2) ? 1 + check_below(c, 3 * REGIONS) : 0;
        for (uint32_t t = 0; t < one.tokens; t++)
            from[tokens++] =
                !are_chunks || one.base + t + 1 >= w->c->is_bad[i] ? w->c->is_bad[i] : 0;
        a.chunks.at[i] = one;
    }
    a.chunks.count = are_chunks ? REGIONS : 0;
    a.out = tracked(c, "out", (size_t)tokens * a.heads * a.value_dim * kvf_dtype_bytes(a.dtype));
    a.lse = tracked(c, "lse", (size_t)tokens * a.heads * sizeof *a.lse);
    CHECK_BOTH(c, fill_nan, &a);
    for (uint32_t i = 0; i < tokens * a.heads; i++)
        if (isnan(a.lse[i]) != (from[i / a.heads] != 0))
            check_fail(c, "lse[%u] is %g", i, (double)a.lse[i]);
}

static void blocks_case(check *c, uint32_t index)
{
    world w = {0};
    if (!check_begin(c))
        return;
    make_world(c, &w, index);
    const kvf_paging *p = &w.c->paging;
    check_describe(c, "%s heads=%u sink=%u id_blocks=%u ring=%d segments=%u",
                   check_shape_text(&p->shape), p->kv_heads, p->sink, w.c->id_blocks,
                   w.c->rings != NULL, p->segments_max);
    write_tokens(c, &w, 0, index % 3 ? DATA_NORMAL : (check_data)(index / 3 % DATA_COUNT));
    compare_codes(c, &w, check_below(c, w.blocks));
    step(c, &w);
    step(c, &w); /* other rows, over what the first ones left */
    write_tokens(c, &w, index % 4 == 0, DATA_NORMAL);
    const kvf_clone_args clone = {
        .blocks = w.c, .from = 1, .to = 4, .tasks = LAYERS * w.c->id_blocks};
    CHECK_BOTH(c, clone, &clone);
    memcpy((char *)w.codes.words + clone.to * w.codes.stride,
           w.codes.words + clone.from * w.codes.stride, w.codes.stride); /* as the caller does */
    step(c, &w);
    fill_nan(c, &w);
    chunk(c, &w);
}

void check_blocks(check *c)
{
    for (uint32_t i = 0; i < EXACT_CASES + QUANTIZED_CASES; i++)
        blocks_case(c, i);
}
