/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Times of the kernels of a decode step and of a prompt on a GPU or on one core, on layers of
 * Llama-3.1-8B's shape at 128K tokens, default pages and budget: beside each the least that its
 * bytes could take.
 *
 * A graph has one launch per layer, each on data of its own that no cache holds: L2 is emptied
 * before the graph runs. A core has two layers, each larger than its caches, and a single run of
 * the reference to compare with. Rows of all layers lie one after the other, so that a batch is
 * several of them: the more sequences, the fewer layers. The floor is the larger of two times,
 * bytes of the device over the rate of a copy there and bytes of the host over that of the link,
 * both measured here; on a core there is the rate of a plain read. Data that a kernel keeps for
 * itself between its blocks is not counted. In the emulator all is small, and shows that it runs.
 */

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "check_bench.h"
#include "common/clock.h"
#include "common/percentile.h"
#include "score/codes.h"

#define HEADS      BENCH_HEADS
#define GROUP      BENCH_GROUP
#define HEAD_DIM   BENCH_HEAD_DIM
#define PAGE       BENCH_PAGE
#define BLOCK      BENCH_BLOCK
#define SINK_PAGES BENCH_SINK_PAGES
#define WINDOW     BENCH_WINDOW
#define BUDGET     1024u
#define CHOSEN     ((BUDGET - WINDOW) / PAGE - SINK_PAGES)        /* pages */
#define SPANS      (BUDGET / PAGE)                                /* of a list */
#define SPANS_MAX  (SINK_PAGES + (WINDOW + BLOCK) / PAGE + SPANS) /* as the cache reserves */
#define SLOTS      ((2 * CHOSEN + 31) / 32 * 32)                  /* likewise */
#define SPLIT      8u                                             /* spans: 32 tokens */
#define SPLITS     ((SPANS_MAX + SPLIT - 1) / SPLIT)
#define MISS_EVERY 8u
#define TIMES      21u
#define ROWS_MAX   BENCH_ROWS_MAX
#define SMALL_ROWS 5u /* in the emulator: a batch of four, and more */

static const kvf_shape shape = {KVF_BF16, HEAD_DIM, PAGE, KVF_PAGES_NATIVE, 0};

/* The data that kernels compute on. All of [rows] or [rows, lists] unless said otherwise. */
typedef struct layers {
    bench b;
    kvf_row *row;
    char *q, *k, *v, *out;
    int8_t *rotated;
    float *rotated_scale;
    char *all_codes;
    const void **codes;
    const uint32_t **block_of;
    const uint64_t **bits;
    uint32_t *order, *none_common, *all_common; /* of rows */
    uint32_t *page_count, *choose;
    uint16_t *mass;
    float *tile_max, *tile_sum, *scores;
    uint32_t *work, *arrived;
    int32_t *ids, *slot_of_id;
    uint32_t *id_count, *missed, *miss_count;
    kvf_miss *misses;
    kvf_span *spans, *hits, *some; /* chosen here, all resident, every eighth at home */
    uint32_t *span_count, *hit_count;
    float *partial_o, *partial_lse;
    kvf_layer_counters *counters;
    const void **chunk_blocks; /* of one row */
    char *chunk_q, *chunk_out;
    kvf_digest_job *jobs; /* of one chunk */
    char *all_slots, *home;
    uint32_t home_blocks;
    kvf_row *staged; /* of a chunk: a row whose pages are all in slots, one with none there */
    char *stage;
} layers;

/* ---- data ---- */

void *bench_zeros(check *c, size_t bytes)
{
    return memset(check_in(c, bytes), 0, bytes);
}

void *bench_numbers(check *c, size_t count)
{
    const size_t some = 65536;
    char *to = check_in(c, count * 2);
    check_fill(c, to, KVF_BF16, count < some ? count : some, DATA_NORMAL);
    for (size_t i = some; i < count; i += some)
        memcpy(to + i * 2, to, (count - i < some ? count - i : some) * 2);
    return to;
}

/* Codes of one list, of random keys; all the others are the same. */
static void fill_codes(layers *d)
{
    check *c = d->b.c;
    const uint32_t groups = d->b.tokens / KVF_CODE_TOKENS, lists = d->b.rows * HEADS;
    const size_t bytes = groups * kvf_code_bytes(HEAD_DIM);
    const kvf_shape run = kvf_run_shape(&d->b.paging);
    char *codes = d->all_codes = check_in(c, lists * bytes),
         *keys = bench_numbers(c, 64 * kvf_run_bytes(&d->b.paging) / 2);
    kvf_digest_job *jobs = check_in(c, groups * sizeof *jobs);
    uint64_t *bits = bench_zeros(c, (size_t)lists * d->b.blocks * sizeof *bits);
    const kvf_encode_args encode = {.shape = run, .job_count = groups, .jobs = jobs};
    for (uint32_t i = 0; i < groups; i++)
        jobs[i] = (kvf_digest_job){.page = keys + i % 64 * kvf_run_bytes(&d->b.paging),
                                   .digest = codes + i * kvf_code_bytes(HEAD_DIM),
                                   .count = KVF_CODE_TOKENS};
    CHECK_RUN(c, c->ref, encode, &encode, false);
    uint32_t *block_of = check_in(c, d->b.blocks * sizeof *block_of);
    for (uint32_t b = 0; b < d->b.blocks; b++)
        block_of[b] = b;
    d->codes = check_in(c, lists * sizeof *d->codes);
    d->block_of = check_in(c, lists * sizeof *d->block_of);
    d->bits = check_in(c, lists * sizeof *d->bits);
    for (uint32_t l = 0; l < lists; l++) {
        if (l)
            memcpy(codes + l * bytes, codes, bytes);
        d->codes[l] = codes + l * bytes;
        d->block_of[l] = block_of;
        d->bits[l] = bits + (size_t)l * d->b.blocks;
    }
}

static void fill_rows(layers *d)
{
    check *c = d->b.c;
    const kvf_paging *p = &d->b.paging;
    const size_t slots = (size_t)HEADS * p->slots, ring = 3 * kvf_block_bytes(p);
    const size_t pages = (size_t)HEADS * p->pool_pages;
    const size_t queries = HEADS * GROUP * kvf_key_bytes(&shape);
    const size_t store = HEADS * SINK_PAGES * kvf_page_bytes(&shape);
    char *all_slots = d->all_slots = bench_numbers(c, slots * kvf_page_bytes(&shape) / 2),
         *rings = bench_numbers(c, d->b.rows * ring / 2);
    char *all_queries = check_in(c, d->b.rows * queries),
         *stores = bench_numbers(c, d->b.rows * store / 2);
    uint32_t *static_counts = bench_zeros(c, d->b.rows * HEADS * sizeof *static_counts);
    uint64_t *faults = bench_zeros(c, d->b.rows * sizeof *faults);
    int32_t *of_page = check_in(c, pages * sizeof *of_page);
    uint64_t *words = check_in(c, slots * sizeof *words);
    memset(of_page, 0xff, pages * sizeof *of_page);
    memset(words, 0xff, slots * sizeof *words);
    void **blocks = check_in(c, (size_t)d->b.rows * d->b.blocks * sizeof *blocks);
    d->row = bench_zeros(c, d->b.rows * sizeof *d->row);
    for (uint32_t r = 0; r < d->b.rows; r++) {
        kvf_row *row = &d->row[r];
        *row = (kvf_row){.blocks = blocks + (size_t)r * d->b.blocks,
                         .ring = rings + r * ring,
                         .bits = (uint64_t *)(uintptr_t)d->bits[(size_t)r * HEADS],
                         .static_kv = stores + r * store,
                         .static_count = static_counts + r * HEADS,
                         .queries = all_queries + r * queries,
                         .block_of = (uint32_t *)(uintptr_t)d->block_of[0],
                         .block_first = r * d->b.blocks,
                         .slot_of_page = of_page,
                         .slot_words = words,
                         .slots = all_slots,
                         .use = 1,
                         .fault = faults + r,
                         .chosen_pages = CHOSEN,
                         .length = d->b.tokens,
                         .sealed = d->b.blocks - WINDOW / BLOCK};
        for (uint32_t b = 0; b < d->b.blocks; b++)
            row->blocks[b] = kvf_row_ring_block(p, row, b);
        for (uint32_t h = 0; h < HEADS; h++)
            row->static_count[h] = SINK_PAGES * PAGE;
    }
}

static void fill_tables(layers *d)
{
    check *c = d->b.c;
    const size_t lists = (size_t)d->b.rows * HEADS, rows = lists * GROUP;
    const uint32_t tiles = kvf_tiles(d->b.pages, PAGE);
    d->q = bench_numbers(c, rows * HEAD_DIM);
    d->k = bench_numbers(c, lists * HEAD_DIM);
    d->v = bench_numbers(c, lists * HEAD_DIM);
    d->out = check_in(c, rows * kvf_key_bytes(&shape));
    d->rotated = check_in(c, rows * HEAD_DIM);
    d->rotated_scale = check_in(c, rows * sizeof(float));
    d->choose = check_in(c, lists * sizeof(uint32_t));
    d->page_count = check_in(c, lists * sizeof(uint32_t));
    d->mass = check_in(c, rows * d->b.pages * sizeof *d->mass);
    d->tile_max = check_in(c, rows * tiles * sizeof(float));
    d->tile_sum = check_in(c, rows * tiles * sizeof(float));
    d->scores = check_in(c, lists * d->b.pages * sizeof(float));
    d->work = check_in(c, lists * d->b.pages * sizeof *d->work);
    d->arrived = bench_zeros(c, lists * sizeof *d->arrived);
    d->ids = check_in(c, lists * SPANS * sizeof *d->ids);
    d->slot_of_id = check_in(c, lists * SPANS * sizeof *d->slot_of_id);
    d->missed = check_in(c, lists * SPANS * sizeof *d->missed);
    d->misses = check_in(c, lists * SPANS * sizeof *d->misses);
    d->id_count = check_in(c, lists * sizeof *d->id_count);
    d->miss_count = check_in(c, lists * sizeof *d->miss_count);
    d->spans = check_in(c, lists * SPANS_MAX * sizeof *d->spans);
    d->span_count = check_in(c, lists * sizeof *d->span_count);
    d->partial_o = check_in(c, rows * SPLITS * HEAD_DIM * sizeof(float));
    d->partial_lse = check_in(c, rows * SPLITS * sizeof(float));
    d->counters = bench_zeros(c, d->b.rows * sizeof *d->counters);
    for (size_t l = 0; l < lists; l++) {
        d->page_count[l] = d->row[l / HEADS].sealed * d->b.paging.block_pages;
        d->choose[l] = CHOSEN;
    }
}

/* Pages in slots in no order; homes are in memory of the host. */
static void fill_spans(layers *d)
{
    check *c = d->b.c;
    const size_t lists = (size_t)d->b.rows * HEADS, page = kvf_page_bytes(&shape);
    const size_t homes = lists * SPANS / MISS_EVERY * page;
    char *home = c->cuda ? check_cuda_take_home(c->cuda, homes) : NULL;
    if (!home)
        home = check_in(c, homes);
    memset(home, 0, homes);
    d->home = home;
    d->home_blocks = (uint32_t)(homes / kvf_block_bytes(&d->b.paging));
    d->hits = bench_zeros(c, lists * SPANS_MAX * sizeof *d->hits);
    d->some = bench_zeros(c, lists * SPANS_MAX * sizeof *d->some);
    d->hit_count = check_in(c, lists * sizeof *d->hit_count);
    for (size_t l = 0; l < lists; l++) {
        d->hit_count[l] = SPANS;
        for (uint32_t i = 0; i < SPANS; i++) {
            kvf_span *span = &d->hits[l * SPANS_MAX + i];
            const uint32_t slot = (uint32_t)(l / HEADS * SLOTS) + i * 89 % SLOTS;
            span->page =
                kvf_row_slot(&d->b.paging, &d->row[l / HEADS], (uint32_t)(l % HEADS), slot);
            span->count = PAGE;
            d->some[l * SPANS_MAX + i] = *span;
            if (i % MISS_EVERY == 0)
                d->some[l * SPANS_MAX + i].home = home + (l * SPANS + i) / MISS_EVERY * page;
        }
    }
}

static void fill_chunk(layers *d)
{
    check *c = d->b.c;
    const kvf_paging *p = &d->b.paging;
    const uint32_t blocks = (d->b.prompt + d->b.chunk) / BLOCK, jobs = d->b.chunk / BLOCK * HEADS;
    char *pages = bench_numbers(c, blocks * kvf_block_bytes(p) / 2);
    char *codes = check_in(c, jobs * kvf_code_bytes(HEAD_DIM));
    d->chunk_q = bench_numbers(c, (size_t)d->b.chunk * HEADS * GROUP * HEAD_DIM);
    d->chunk_out = check_in(c, d->b.chunk * HEADS * GROUP * kvf_key_bytes(&shape));
    d->chunk_blocks = check_in(c, blocks * sizeof *d->chunk_blocks);
    d->jobs = check_in(c, jobs * sizeof *d->jobs);
    for (uint32_t b = 0; b < blocks; b++)
        d->chunk_blocks[b] = pages + b * kvf_block_bytes(p);
    for (uint32_t j = 0; j < jobs; j++)
        d->jobs[j] = (kvf_digest_job){.page = pages + j * kvf_run_bytes(p),
                                      .digest = codes + j * kvf_code_bytes(HEAD_DIM),
                                      .count = BLOCK};
}

/* Rows of a chunk that is staged: of its pages all are in slots, or none. */
static void fill_staged(layers *d)
{
    check *c = d->b.c;
    const kvf_paging *p = &d->b.paging;
    const uint32_t blocks = d->b.prompt / BLOCK, pages = blocks * p->block_pages;
    const uint32_t count = kvf_min_u32(pages, p->slots);
    const size_t all = (size_t)HEADS * p->pool_pages;
    uint64_t *words = check_in(c, (size_t)HEADS * p->slots * sizeof *words);
    void **table = check_in(c, blocks * sizeof *table);
    uint32_t *block_of = check_in(c, blocks * sizeof *block_of);
    d->staged = bench_zeros(c, 2 * sizeof *d->staged);
    d->stage = check_in(c, blocks * kvf_block_bytes(p));
    for (uint32_t b = 0; b < blocks; b++) {
        table[b] = d->home + b % d->home_blocks * kvf_block_bytes(p);
        block_of[b] = b;
    }
    for (uint32_t i = 0; i < 2; i++) {
        int32_t *of_page = check_in(c, all * sizeof *of_page);
        memset(of_page, 0xff, all * sizeof *of_page);
        for (uint32_t n = 0; i == 0 && n < HEADS * count; n++) {
            of_page[n / count * (size_t)p->pool_pages + n % count] = (int32_t)(n % count);
            words[n / count * (size_t)p->slots + n % count] = kvf_slot_word(n % count, 1, 0);
        }
        d->staged[i] = (kvf_row){.blocks = table,
                                 .block_of = block_of,
                                 .slot_of_page = of_page,
                                 .slot_words = words,
                                 .slots = d->all_slots,
                                 .length = d->b.prompt,
                                 .sealed = blocks};
    }
}

static void fill_orders(layers *d)
{
    const size_t bytes = d->b.rows * sizeof *d->order;
    d->order = check_in(d->b.c, bytes);
    d->none_common = bench_zeros(d->b.c, bytes);
    d->all_common = bench_zeros(d->b.c, bytes);
    for (uint32_t r = 0; r < d->b.rows; r++) {
        d->order[r] = r;
        d->all_common[r] = r ? kvf_tiles(d->b.pages, PAGE) : 0;
    }
}

static void fill(layers *d)
{
    const bool is_core = !d->b.c->cuda, is_small = !is_core && check_cuda_is_emulated(d->b.c->cuda);
    d->b.is_small = is_small;
    d->b.rows = is_small ? SMALL_ROWS : is_core ? 2 : ROWS_MAX;
    d->b.tokens = is_small ? 1024 : 131072;
    d->b.prompt = is_small ? BLOCK : is_core ? 1024 : 8192;
    d->b.chunk = is_small ? BLOCK : is_core ? 64 : 2048;
    d->b.times = is_small ? 1 : TIMES;
    d->b.pages = d->b.tokens / PAGE;
    d->b.blocks = d->b.tokens / BLOCK;
    d->b.paging = (kvf_paging){.shape = shape,
                               .kv_heads = HEADS,
                               .group = GROUP,
                               .lists = HEADS,
                               .block_size = BLOCK,
                               .block_pages = BLOCK / PAGE,
                               .block_jobs = 1,
                               .digest_bytes = (uint32_t)kvf_code_bytes(HEAD_DIM),
                               .blocks_max = d->b.blocks,
                               .pages_max = d->b.pages,
                               .static_pages = SINK_PAGES,
                               .slots = d->b.rows * SLOTS,
                               .pool_pages = d->b.rows * d->b.pages,
                               .sink = SINK_PAGES * PAGE,
                               .ring_blocks = 3,
                               .query_window = 1};
    fill_codes(d);
    fill_rows(d);
    fill_tables(d);
    fill_spans(d);
    fill_chunk(d);
    fill_staged(d);
    fill_orders(d);
}

/* ---- one launch: rows `first` and so many more ---- */

static kvf_append_args append_args(const layers *d, uint32_t first, uint32_t rows)
{
    const size_t list = (size_t)first * HEADS, bytes = kvf_key_bytes(&shape);
    return (kvf_append_args){.paging = d->b.paging,
                             .rows = rows,
                             .row = d->row + first,
                             .q = d->q + list * GROUP * bytes,
                             .k = d->k + list * bytes,
                             .v = d->v + list * bytes,
                             .choose = d->choose + list,
                             .choose_lists = HEADS};
}

static kvf_rotate_args rotate_args(const layers *d, uint32_t first, uint32_t rows)
{
    const size_t row = (size_t)first * HEADS * GROUP;
    return (kvf_rotate_args){.dtype = KVF_BF16,
                             .head_dim = HEAD_DIM,
                             .queries = rows * HEADS * GROUP,
                             .scale = 0.09f,
                             .q = d->q + row * kvf_key_bytes(&shape),
                             .y = d->rotated + row * HEAD_DIM,
                             .y_scale = d->rotated_scale + row};
}

/* Both in one launch, as fused steps have them. */
static kvf_append_args append_rotate_args(const layers *d, uint32_t first, uint32_t rows)
{
    const kvf_rotate_args rotate = rotate_args(d, first, rows);
    kvf_append_args a = append_args(d, first, rows);
    a.rotated = rotate.y;
    a.rotated_scale = rotate.y_scale;
    a.scale = rotate.scale;
    return a;
}

static kvf_score_codes_args score_codes_args(const layers *d, uint32_t first, uint32_t rows)
{
    const size_t list = (size_t)first * HEADS, row = list * GROUP;
    const uint32_t tiles = kvf_tiles(d->b.pages, PAGE);
    return (kvf_score_codes_args){.head_dim = HEAD_DIM,
                                  .page_size = PAGE,
                                  .block_size = BLOCK,
                                  .lists = rows * HEADS,
                                  .group = GROUP,
                                  .pages_max = d->b.pages,
                                  .tiles_max = tiles,
                                  .q = d->rotated + row * HEAD_DIM,
                                  .q_scale = d->rotated_scale + row,
                                  .codes = d->codes + list,
                                  .block_of = d->block_of + list,
                                  .bits = d->bits + list,
                                  .pages = d->page_count + list,
                                  .mass = d->mass + row * d->b.pages,
                                  .tile_max = d->tile_max + row * tiles,
                                  .tile_sum = d->tile_sum + row * tiles};
}

/* The form for rows that have codes in common, which these have not. */
static kvf_score_codes_args ordered_args(const layers *d, uint32_t first, uint32_t rows)
{
    kvf_score_codes_args a = score_codes_args(d, first, rows);
    a.row_lists = HEADS;
    a.order = d->order;
    a.common = d->none_common;
    return a;
}

/* Rows that have all codes in common. */
static kvf_score_codes_args forks_args(const layers *d, uint32_t first, uint32_t rows)
{
    kvf_score_codes_args a = ordered_args(d, first, rows);
    a.common = d->all_common;
    return a;
}

static kvf_reduce_mass_args reduce_mass_args(const layers *d, uint32_t first, uint32_t rows)
{
    const kvf_score_codes_args score_codes = score_codes_args(d, first, rows);
    return (kvf_reduce_mass_args){.kind = KVF_GROUP_MEAN_SOFTMAX,
                                  .page_size = PAGE,
                                  .block_size = BLOCK,
                                  .lists = score_codes.lists,
                                  .group = GROUP,
                                  .pages_max = d->b.pages,
                                  .tiles_max = score_codes.tiles_max,
                                  .mass = score_codes.mass,
                                  .tile_max = score_codes.tile_max,
                                  .tile_sum = score_codes.tile_sum,
                                  .bits = score_codes.bits,
                                  .pages = score_codes.pages,
                                  .out = d->scores + (size_t)first * HEADS * d->b.pages};
}

static kvf_select_args select_args(const layers *d, uint32_t first, uint32_t rows)
{
    const size_t list = (size_t)first * HEADS;
    return (kvf_select_args){.assemble = {.choices = {.paging = d->b.paging,
                                                      .rows = rows,
                                                      .ids_max = SPANS,
                                                      .row = d->row + first,
                                                      .ids = d->ids + list * SPANS,
                                                      .id_count = d->id_count + list,
                                                      .slot_of_id = d->slot_of_id + list * SPANS,
                                                      .missed = d->missed + list * SPANS,
                                                      .misses = d->misses + list * SPANS,
                                                      .miss_count = d->miss_count + list,
                                                      .counters = d->counters + first},
                                          .spans_max = SPANS_MAX,
                                          .arrival = KVF_ARRIVES_BY_ATTEND,
                                          .spans = d->spans + list * SPANS_MAX,
                                          .span_count = d->span_count + list},
                             .stride = d->b.pages,
                             .work_stride = d->b.pages,
                             .scores = d->scores + list * d->b.pages,
                             .count = d->page_count + list,
                             .k = d->choose + list,
                             .work = d->work + list * d->b.pages,
                             .arrived = d->arrived + list};
}

/* With reduce_mass in the same launch. */
static kvf_select_args masses_args(const layers *d, uint32_t first, uint32_t rows)
{
    kvf_select_args a = select_args(d, first, rows);
    a.masses = reduce_mass_args(d, first, rows);
    return a;
}

static kvf_attend_step_args hits_args(const layers *d, uint32_t first, uint32_t rows)
{
    const size_t list = (size_t)first * HEADS, row = list * GROUP;
    return (kvf_attend_step_args){.attend = {.shape = shape,
                                             .lists = rows * HEADS,
                                             .group = GROUP,
                                             .spans_max = SPANS_MAX,
                                             .split = SPLIT,
                                             .scale = 0.09f,
                                             .q = d->q + row * kvf_key_bytes(&shape),
                                             .spans = d->hits + list * SPANS_MAX,
                                             .span_count = d->hit_count + list,
                                             .partial_o = d->partial_o + row * SPLITS * HEAD_DIM,
                                             .partial_lse = d->partial_lse + row * SPLITS},
                                  .out = d->out + row * kvf_key_bytes(&shape),
                                  .arrived = d->arrived + list,
                                  .out_dtype = shape.dtype};
}

/* Launches of a step on the host instead: groups, then what merges them. */
static kvf_attend_args attend_args(const layers *d, uint32_t first, uint32_t rows)
{
    return hits_args(d, first, rows).attend;
}

static kvf_merge_args merge_args(const layers *d, uint32_t first, uint32_t rows)
{
    const kvf_attend_step_args a = hits_args(d, first, rows);
    return (kvf_merge_args){.shape = shape,
                            .lists = a.attend.lists,
                            .group = GROUP,
                            .splits_max = SPLITS,
                            .split = SPLIT,
                            .span_count = a.attend.span_count,
                            .partial_o = a.attend.partial_o,
                            .partial_lse = a.attend.partial_lse,
                            .out = a.out};
}

static kvf_attend_step_args some_args(const layers *d, uint32_t first, uint32_t rows)
{
    kvf_attend_step_args a = hits_args(d, first, rows);
    a.attend.spans = d->some + (size_t)first * HEADS * SPANS_MAX;
    return a;
}

/* A chunk is one layer's; there is one of them. */
static kvf_prefill_kernel_args prefill_args(const layers *d, uint32_t first, uint32_t rows)
{
    return (kvf_prefill_kernel_args){.shape = kvf_run_shape(&d->b.paging),
                                     .kv_heads = HEADS,
                                     .group = GROUP,
                                     .tokens = d->b.chunk,
                                     .base = d->b.prompt,
                                     .scale = 0.09f,
                                     .q_dtype = shape.dtype,
                                     .out_dtype = shape.dtype,
                                     .q = d->chunk_q,
                                     .blocks = d->chunk_blocks,
                                     .out = d->chunk_out};
}

/* A row of its own for each: not many, as a launch is long. */
static kvf_stage_args stage_args(const layers *d, uint32_t staged)
{
    return (kvf_stage_args){.paging = d->b.paging,
                            .rows = 1,
                            .count = d->b.prompt / BLOCK,
                            .row = d->staged + staged,
                            .to = d->stage,
                            .counters = d->counters};
}

static kvf_stage_args slots_args(const layers *d, uint32_t first, uint32_t rows)
{
    return stage_args(d, 0);
}

static kvf_stage_args homes_args(const layers *d, uint32_t first, uint32_t rows)
{
    return stage_args(d, 1);
}

static kvf_encode_args encode_args(const layers *d, uint32_t first, uint32_t rows)
{
    return (kvf_encode_args){.shape = kvf_run_shape(&d->b.paging),
                             .job_count = d->b.chunk / BLOCK * HEADS,
                             .jobs = d->jobs};
}

/* ---- figures ---- */

static void tell(bench *b, const char *title, uint32_t batch, uint32_t launches,
                 const bench_cost *k, double *ns)
{
    kvf_sort(ns, b->times);
    const double median = kvf_percentile(ns, b->times, 50);
    const double low = kvf_percentile(ns, b->times, 10), high = kvf_percentile(ns, b->times, 90);
    const double floor = fmax(k->bytes / b->rates.copy, k->link_bytes / b->rates.link);
    printf("%-16s %-26s batch %2u %9.2f us (%.2f to %.2f)  floor %8.2f us  %6.2f x floor  %9.3f MB"
           "  %8.1f Gop/s",
           b->c->isa, title, batch, median * 1e-3, low * 1e-3, high * 1e-3, floor * 1e-3,
           median / floor, (k->bytes + k->link_bytes) * 1e-6, k->operations / median);
    if (b->reference_ns > 0.0)
        printf("  %8.1fx reference", b->reference_ns / median);
    printf("\n");
    if (!b->json)
        return;
    fprintf(
        b->json,
        "%s\n  {\"op\": \"%s\", \"batch\": %u, \"launches\": %u, \"us\": %.4f, \"p10_us\": %.4f, "
        "\"p90_us\": %.4f, \"bytes\": %.0f, \"link_bytes\": %.0f, \"operations\": %.0f, "
        "\"floor_us\": %.4f, \"times_floor\": %.4f}",
        b->written++ ? "," : "", title, batch, launches, median * 1e-3, low * 1e-3, high * 1e-3,
        k->bytes, k->link_bytes, k->operations, floor * 1e-3, median / floor);
}

void bench_time_graph(bench *b, const char *title, const check_launch *launches, uint32_t count,
                      uint32_t parts, uint32_t batch, const bench_cost *k)
{
    double ns[TIMES];
    const char *error = check_cuda_time(b->c->cuda, launches, count, b->times, ns);
    if (error) {
        check_fail(b->c, "%s: %s", title, error);
        return;
    }
    for (uint32_t i = 0; i < b->times; i++)
        ns[i] /= parts;
    tell(b, title, batch, parts, k, ns);
}

static double core_time(check *c, const kvf_kernels *table, kvf_task_fn fn,
                        const check_launch *launches, uint32_t count)
{
    const double start = kvf_now_seconds();
    for (uint32_t i = 0; i < count; i++)
        check_run(c, table, fn, launches[i].args, launches[i].tasks, false);
    return (kvf_now_seconds() - start) / count * 1e9;
}

/* Launches of one kernel; `ref` is its reference. */
static void time_launches(bench *b, const char *title, kvf_task_fn ref,
                          const check_launch *launches, uint32_t count, uint32_t batch,
                          const bench_cost *k)
{
    double ns[TIMES];
    const bool is_ref = launches[0].fn == ref;
    if (b->c->cuda) {
        bench_time_graph(b, title, launches, count, count, batch, k);
        return;
    }
    if (is_ref && b->c->var->isa != KVF_ISA_REFERENCE)
        return;
    b->reference_ns = core_time(b->c, b->c->ref, ref, launches, 1);
    for (uint32_t i = 0; i < b->times; i++)
        ns[i] =
            is_ref ? b->reference_ns : core_time(b->c, b->c->var, launches[0].fn, launches, count);
    tell(b, title, batch, count, k, ns);
}

#define TIMED(name, title, op, type, launches_of)                                                  \
    static void time_##name(layers *d, uint32_t batch, const bench_cost *k)                        \
    {                                                                                              \
        type args[ROWS_MAX];                                                                       \
        check_launch list[ROWS_MAX];                                                               \
        const uint32_t launches = (launches_of);                                                   \
        for (uint32_t i = 0; i < launches; i++) {                                                  \
            args[i] = name##_args(d, i * batch, batch);                                            \
            list[i] = CHECK_LAUNCH(d->b.c, op, &args[i]);                                          \
        }                                                                                          \
        time_launches(&d->b, title, d->b.c->ref->op, list, launches, batch, k);                    \
    }
TIMED(append, "append", append, kvf_append_args, d->b.rows / batch)
TIMED(rotate, "rotate", rotate, kvf_rotate_args, d->b.rows / batch)
TIMED(append_rotate, "append, rotate", append, kvf_append_args, d->b.rows / batch)
TIMED(score_codes, "score_codes", score_codes, kvf_score_codes_args, d->b.rows / batch)
TIMED(ordered, "score_codes, in order", score_codes, kvf_score_codes_args, d->b.rows / batch)
TIMED(forks, "score_codes, forks", score_codes, kvf_score_codes_args, d->b.rows / batch)
TIMED(reduce_mass, "reduce_mass", reduce_mass, kvf_reduce_mass_args, d->b.rows / batch)
TIMED(select, "select", select, kvf_select_args, d->b.rows / batch)
TIMED(masses, "select, of masses", select, kvf_select_args, d->b.rows / batch)
TIMED(hits, "attend, all here", attend_step, kvf_attend_step_args, d->b.rows / batch)
TIMED(some, "attend, 1/8 missed", attend_step, kvf_attend_step_args, d->b.rows / batch)
TIMED(attend, "attend, all here", attend, kvf_attend_args, d->b.rows / batch)
TIMED(merge, "merge", merge, kvf_merge_args, d->b.rows / batch)
TIMED(slots, "stage, all here", stage, kvf_stage_args, 1)
TIMED(homes, "stage, none here", stage, kvf_stage_args, 1)
TIMED(encode, "encode", encode, kvf_encode_args, 1)
TIMED(prefill, "prefill", prefill, kvf_prefill_kernel_args, 1)

/* In the order of a step, so that each finds what the ones before it left. */
static void time_step(layers *d, const char *op, uint32_t batch)
{
    const double lists = (double)batch * HEADS, rows = lists * GROUP, q = rows * HEAD_DIM * 2;
    const double kv = lists * HEAD_DIM * 4, scored = lists * d->b.pages, bf16 = 2, fp32 = 4;
    const double tiles = rows * kvf_tiles(d->b.pages, PAGE) * 2 * fp32;
    const double codes = lists * d->b.tokens / BLOCK * ((double)kvf_code_bytes(HEAD_DIM) + 8);
    const double attended = lists * SPANS * (double)kvf_page_bytes(&shape);
    const double dots = rows * HEAD_DIM * 2;
    const struct {
        const char *op;
        void (*run)(layers *, uint32_t, const bench_cost *);
        bench_cost cost;
    } all[] = {
        {"append", time_append, {2 * (q + kv), 0, 0}},
        {"rotate", time_rotate, {q + q / 2 + rows * fp32, 0, rows * HEAD_DIM * 7}},
        {"append",
         time_append_rotate,
         {2 * (q + kv) + q + q / 2 + rows * fp32, 0, rows * HEAD_DIM * 7}},
        {"score_codes",
         time_score_codes,
         {codes + GROUP * scored * bf16 + tiles, 0, dots * d->b.tokens}},
        {"score_codes",
         time_ordered,
         {codes + GROUP * scored * bf16 + tiles, 0, dots * d->b.tokens}},
        {"score_codes",
         time_forks,
         {codes / batch + GROUP * scored * bf16 + tiles, 0, dots * d->b.tokens}},
        {"reduce_mass",
         time_reduce_mass,
         {GROUP * scored * bf16 + tiles + scored * fp32, 0, GROUP * scored}},
        {"select", time_select, {scored * fp32 + lists * SPANS * sizeof(kvf_span), 0, scored}},
        {"select",
         time_masses,
         {GROUP * scored * bf16 + tiles + lists * SPANS * sizeof(kvf_span), 0, GROUP * scored}},
        {"attend", time_hits, {attended + 2 * q, 0, 2 * dots * BUDGET}},
        {"attend", time_some, {attended + 2 * q, attended / MISS_EVERY, 2 * dots * BUDGET}},
    };
    const bench_cost attend = {attended + q, 0, 2 * dots * BUDGET},
                     merge = {2 * rows * SPLITS * HEAD_DIM, 0, 0};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        const bool is_fused = all[i].run == time_append_rotate || all[i].run == time_masses;
        if ((!op || strcmp(op, all[i].op) == 0) && (batch > 1 || all[i].run != time_forks) &&
            (d->b.c->cuda || !is_fused))
            all[i].run(d, batch, &all[i].cost);
    }
    if (!d->b.c->cuda && (!op || strcmp(op, "attend") == 0)) {
        time_attend(d, batch, &attend);
        time_merge(d, batch, &merge);
    }
}

static void time_chunk(layers *d, const char *op)
{
    const double tokens = d->b.chunk, seen = d->b.prompt + d->b.chunk, heads = HEADS;
    const double row = HEAD_DIM * 2, q = tokens * heads * GROUP * row;
    const bench_cost encode = {tokens * heads * (row + HEAD_DIM / 4.0 + 2), 0,
                               tokens * heads * HEAD_DIM * 7};
    const bench_cost prefill = {2 * q + seen * heads * 2 * row, 0,
                                2 * q * (d->b.prompt + (tokens + 1) / 2)};
    const double staged = d->b.prompt * heads * 2 * row;
    const double here = fmin(d->b.prompt / PAGE, d->b.paging.slots) * heads * 2 * row * PAGE;
    const bench_cost slots = {2 * staged, staged - here, 0}, homes = {staged, staged, 0};
    if (!op || strcmp(op, "stage") == 0) {
        time_slots(d, 1, &slots);
        time_homes(d, 1, &homes);
    }
    if (!op || strcmp(op, "encode") == 0)
        time_encode(d, 1, &encode);
    if (!op || strcmp(op, "prefill") == 0)
        time_prefill(d, 1, &prefill);
}

/* The timed launches are a step: its scores were numbers, and it found every page that it had
 * brought.
 */
static void look_at_step(const layers *d)
{
    for (uint32_t l = 0; l < d->b.rows * HEADS; l++)
        if (d->span_count[l] != SPANS || d->id_count[l] != CHOSEN || d->miss_count[l] != 0)
            check_fail(d->b.c, "list %u: %u spans, %u chosen, %u missed", l, d->span_count[l],
                       d->id_count[l], d->miss_count[l]);
}

/* Bytes per ns of a plain read of the codes, in the order of the kernels, by one core. */
static double read_rate(const layers *d)
{
    typedef uint64_t line __attribute__((vector_size(64)));
    const size_t bytes = d->b.tokens / KVF_CODE_TOKENS * kvf_code_bytes(HEAD_DIM);
    const uint32_t lists = d->b.rows * HEADS;
    line sum[2] = {{0}};
    double best = INFINITY;
    for (uint32_t i = 0; i < 5; i++) {
        const double t = kvf_now_seconds();
        for (uint32_t l = 0; l < lists; l++)
            for (size_t at = 0; at < bytes; at += sizeof sum) {
                line x[2];
                memcpy(x, (const char *)d->codes[l] + at, sizeof x);
                __builtin_prefetch((const char *)d->codes[l] + at + 4096);
                __builtin_prefetch((const char *)d->codes[l] + at + 4160);
                sum[0] ^= x[0];
                sum[1] ^= x[1];
            }
        best = fmin(best, kvf_now_seconds() - t);
    }
    volatile line sink = sum[0] ^ sum[1];
    (void)sink;
    return lists * (double)bytes / best * 1e-9;
}

static bench_tables *make_tables(layers *d)
{
    const bench_layers_data data = {.codes = d->all_codes,
                                    .home = d->home,
                                    .home_blocks = d->home_blocks,
                                    .q = d->q,
                                    .k = d->k,
                                    .v = d->v,
                                    .chunk_kv = d->chunk_q,
                                    .slots = d->all_slots,
                                    .out = d->out,
                                    .score_codes = score_codes_args(d, 0, d->b.rows)};
    return bench_tables_make(&d->b, &data);
}

void bench_layers(check *c, const char *op, FILE *json)
{
    layers d = {.b = {.c = c, .json = json}};
    const char *error = c->cuda ? check_cuda_rates(c->cuda, &d.b.rates) : NULL;
    if (error) {
        check_fail(c, "the rate of copies: %s", error);
        return;
    }
    if (!check_begin(c))
        return;
    fill(&d);
    bench_tables *tables = c->cuda ? make_tables(&d) : NULL;
    if (!c->cuda)
        d.b.rates.copy = d.b.rates.link = read_rate(&d);
    else if ((error = check_cuda_put(c->cuda)) != NULL)
        check_fail(c, "the layers: %s", error);
    printf("%-16s %.1f GB/s on the device, %.1f GB/s from the host; %u tokens, pages of %u, "
           "budget %u, %u KV heads\n",
           c->isa, d.b.rates.copy, d.b.rates.link, d.b.tokens, PAGE, BUDGET, HEADS);
    if (json)
        fprintf(json,
                "{\"device\": \"%s\", \"emulated\": %s, \"copy_gb_per_s\": %.3f, "
                "\"link_gb_per_s\": %.3f, \"tokens\": %u, \"page\": %u, \"budget\": %u, "
                "\"kv_heads\": %u, \"group\": %u, \"head_dim\": %u, \"kernels\": [",
                c->isa, check_cuda_is_emulated(c->cuda) ? "true" : "false", d.b.rates.copy,
                d.b.rates.link, d.b.tokens, PAGE, BUDGET, HEADS, GROUP, HEAD_DIM);
    for (uint32_t batch = 1; batch < d.b.rows; batch *= 4)
        time_step(&d, op, batch);
    time_chunk(&d, op);
    for (uint32_t batch = 1; tables && batch < d.b.rows; batch *= 4)
        bench_tables_time(&d.b, tables, op, batch);
    if (tables)
        bench_tables_time_chunk(&d.b, tables, op);
    if (c->cuda && (error = check_cuda_get(c->cuda)) != NULL)
        check_fail(c, "the layers: %s", error);
    else if (!op && c->cuda) {
        look_at_step(&d);
        bench_tables_look(&d.b, tables);
    }
    if (json)
        fputs("\n]}\n", json);
    check_end(c);
}
