/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Times of the kernels that only pages under block tables of the caller have, on the layers of
 * check_bench.c: tables that name blocks in no order, regions that have all but what is new.
 *
 * A *view* is the description of all rows from one on, so that each launch has rows of its own.
 * Blocks of the pool have scales and counts of writes of their own, and lie in host memory, where
 * many share a place.
 */

#include "check_bench.h"
#include "score/codes.h"

#define STRIDE 40503u /* odd: with it ids of a power of two are in no order */
#define SPLITS 4u     /* chunks of one graph */
#define BUDGET 1024u

struct bench_tables {
    bench_layers_data data;
    kvf_physical_blocks *views; /* [rows] */
    kvf_physical_codes codes;
    uint32_t blocks; /* of the pool */
    int32_t *table, *lengths, *regions;
    int64_t *slots;       /* [rows] of the newest token */
    int64_t *chunk_slots; /* [SPLITS, chunk] */
};

static const kvf_shape shape = {KVF_BF16, BENCH_HEAD_DIM, BENCH_PAGE, KVF_PAGES_NATIVE, 0};

/* ---- data ---- */

static void fill_pool(bench *b, bench_tables *t, kvf_physical_blocks *k)
{
    check *c = b->c;
    const size_t tokens = (size_t)t->blocks * BENCH_BLOCK;
    const uint32_t arenas = kvf_div_ceil_u32(t->blocks, t->data.home_blocks);
    char **arena = check_in(c, arenas * sizeof *arena);
    for (uint32_t i = 0; i < arenas; i++)
        arena[i] = t->data.home;
    k->arenas = arena;
    k->arena_blocks = t->data.home_blocks;
    k->scales = bench_numbers(c, tokens * BENCH_HEADS);
    for (size_t i = 0; i < tokens * BENCH_HEADS; i++)
        k->scales[i] &= 0x7fff; /* small numbers in fp16, too */
    k->writes = bench_zeros(c, tokens * sizeof *k->writes);
    k->nonfinite = bench_zeros(c, t->blocks * sizeof *k->nonfinite);
    t->codes =
        (kvf_physical_codes){.words = t->data.codes,
                             .scales = k->scales,
                             .stride = (size_t)BENCH_HEADS * BENCH_BLOCK * BENCH_HEAD_DIM / 4,
                             .id_blocks = 1,
                             .kv_heads = BENCH_HEADS};
}

static void fill_slots(bench *b, bench_tables *t, kvf_physical_blocks *k)
{
    check *c = b->c;
    kvf_paging *p = &k->paging;
    const size_t pages = (size_t)BENCH_HEADS * t->blocks * p->block_pages;
    /* Half of the pages of a graph: what a chunk brings takes slots of others. */
    const uint32_t wanted = SPLITS / 2 * b->chunk / BENCH_PAGE;
    p->slots = kvf_max_u32(KVF_SLOT_WAYS, wanted / KVF_SLOT_WAYS * KVF_SLOT_WAYS);
    p->slots = kvf_min_u32(p->slots, b->paging.slots);
    const size_t slots = (size_t)BENCH_HEADS * p->slots;
    k->slots = t->data.slots;
    k->slot_of_page = memset(check_in(c, pages * sizeof(int32_t)), 0xff, pages * sizeof(int32_t));
    k->slot_words = memset(check_in(c, slots * sizeof(uint64_t)), 0xff, slots * sizeof(uint64_t));
    k->slot_tags = bench_zeros(c, slots * sizeof *k->slot_tags);
    k->clock = check_in(c, sizeof *k->clock);
    *k->clock = 2;
}

static void fill_regions(bench *b, kvf_physical_blocks *k)
{
    check *c = b->c;
    const kvf_paging *p = &k->paging;
    const size_t rows = b->rows, lists = rows * BENCH_HEADS;
    k->rings = check_in(c, rows * p->ring_blocks * kvf_block_bytes(p));
    k->static_kv = check_in(c, lists * p->static_pages * kvf_page_bytes(&shape));
    k->token_tags = bench_zeros(c, lists * kvf_region_tokens(p) * sizeof *k->token_tags);
    k->row = bench_zeros(c, rows * sizeof *k->row);
    k->blocks = bench_zeros(c, rows * p->blocks_max * sizeof *k->blocks);
    k->physical = bench_zeros(c, rows * p->blocks_max * sizeof *k->physical);
    k->static_count = bench_zeros(c, lists * sizeof *k->static_count);
    k->bits = bench_zeros(c, BENCH_HEADS * p->blocks_max * sizeof *k->bits);
    k->pages = bench_zeros(c, lists * sizeof *k->pages);
    k->choose = bench_zeros(c, lists * sizeof *k->choose);
    k->region = bench_zeros(c, rows * sizeof *k->region);
    k->is_bad = bench_zeros(c, rows * sizeof *k->is_bad);
    k->counters = bench_zeros(c, sizeof *k->counters);
}

/* The same for rows `first` and after; regions are those of all. */
static kvf_physical_blocks view_of(const kvf_physical_blocks *all, uint32_t first)
{
    const kvf_paging *p = &all->paging;
    const size_t lists = (size_t)first * BENCH_HEADS, blocks = (size_t)first * p->blocks_max;
    kvf_physical_blocks k = *all;
    k.row += first;
    k.blocks += blocks;
    k.physical += blocks;
    k.static_count += lists;
    k.pages += lists;
    k.choose += lists;
    k.region += first;
    k.is_bad += first;
    return k;
}

static void fill_tables(bench *b, bench_tables *t)
{
    check *c = b->c;
    t->table = check_in(c, (size_t)b->rows * b->blocks * sizeof *t->table);
    t->lengths = check_in(c, b->rows * sizeof *t->lengths);
    t->regions = check_in(c, b->rows * sizeof *t->regions);
    t->slots = check_in(c, b->rows * sizeof *t->slots);
    t->chunk_slots = check_in(c, (size_t)SPLITS * b->chunk * sizeof *t->chunk_slots);
    for (uint32_t i = 0; i < b->rows * b->blocks; i++)
        t->table[i] = (int32_t)((uint64_t)i * STRIDE % t->blocks);
    for (uint32_t r = 0; r < b->rows; r++) { /* the newest token is alone in its block */
        t->lengths[r] = (int32_t)(b->tokens - BENCH_BLOCK + 1);
        t->regions[r] = (int32_t)r;
        t->slots[r] = (int64_t)t->table[(r + 1) * b->blocks - 1] * BENCH_BLOCK;
    }
    for (uint32_t i = 0; i < SPLITS * b->chunk; i++)
        t->chunk_slots[i] = (int64_t)t->table[i / BENCH_BLOCK] * BENCH_BLOCK + i % BENCH_BLOCK;
}

/* ---- one launch ---- */

static kvf_write_args write_args(const bench_tables *t, uint32_t first, uint32_t rows)
{
    const size_t row = (size_t)BENCH_HEADS * BENCH_HEAD_DIM;
    return (kvf_write_args){.blocks = t->views + first,
                            .pool = kvf_physical_pool_of(t->views + first),
                            .codes = t->codes,
                            .shape = shape,
                            .tokens = rows,
                            .k = t->data.k + first * row * 2,
                            .v = t->data.v + first * row * 2,
                            .k_stride = row,
                            .v_stride = row,
                            .slots = t->slots + first};
}

static kvf_write_args chunk_args(const bench *b, const bench_tables *t, uint32_t number)
{
    kvf_write_args a = write_args(t, 0, b->chunk);
    a.k = a.v = t->data.chunk_kv;
    a.slots = t->chunk_slots + (size_t)number * b->chunk;
    return a;
}

static kvf_rows_args rows_args(const bench *b, const bench_tables *t, uint32_t first, uint32_t rows)
{
    return (kvf_rows_args){.blocks = t->views + first,
                           .rows = rows,
                           .table_stride = b->blocks,
                           .table = t->table + (size_t)first * b->blocks,
                           .lengths = t->lengths + first,
                           .regions = t->regions + first};
}

static kvf_validate_args validate_args(const bench_tables *t, uint32_t first, uint32_t rows)
{
    return (kvf_validate_args){.blocks = t->views + first,
                               .row = t->views[first].row,
                               .region = t->views[first].region,
                               .static_count = t->views[first].static_count,
                               .rows = rows,
                               .kv_heads = BENCH_HEADS};
}

static kvf_fill_nan_args fill_nan_args(const bench_tables *t, uint32_t first, uint32_t rows)
{
    const uint32_t heads = BENCH_HEADS * BENCH_GROUP;
    return (kvf_fill_nan_args){.is_bad = t->views[first].is_bad,
                               .rows = rows,
                               .heads = heads,
                               .value_dim = BENCH_HEAD_DIM,
                               .dtype = KVF_BF16,
                               .out = t->data.out + (size_t)first * heads * BENCH_HEAD_DIM * 2};
}

static kvf_score_codes_args score_args(const bench *b, const bench_tables *t, uint32_t first,
                                       uint32_t rows)
{
    const size_t list = (size_t)first * BENCH_HEADS, row = list * BENCH_GROUP;
    kvf_score_codes_args a = t->data.score_codes;
    a.lists = rows * BENCH_HEADS;
    a.q += row * BENCH_HEAD_DIM;
    a.q_scale += row;
    a.codes = NULL;
    a.block_of = NULL;
    a.physical = t->views[first].physical;
    a.physical_stride = b->blocks;
    a.physical_codes = t->codes;
    a.bits += list;
    a.pages += list;
    a.mass += row * b->pages;
    a.tile_max += row * a.tiles_max;
    a.tile_sum += row * a.tiles_max;
    return a;
}

bench_tables *bench_tables_make(bench *b, const bench_layers_data *data)
{
    check *c = b->c;
    bench_tables *t = bench_zeros(c, sizeof *t);
    kvf_physical_blocks all = {.paging = b->paging,
                               .regions = b->rows,
                               .layers = 1,
                               .ids = b->rows * b->blocks,
                               .id_blocks = 1,
                               .tokens_max = b->tokens,
                               .budget_tokens = BUDGET,
                               .local_tokens = BENCH_WINDOW,
                               .dynamic_pages = BUDGET / BENCH_PAGE};
    t->data = *data;
    t->blocks = all.ids;
    fill_pool(b, t, &all);
    fill_slots(b, t, &all);
    fill_regions(b, &all);
    fill_tables(b, t);
    t->views = check_in(c, b->rows * sizeof *t->views);
    for (uint32_t r = 0; r < b->rows; r++)
        t->views[r] = view_of(&all, r);
    const kvf_rows_args rows = rows_args(b, t, 0, b->rows);
    CHECK_RUN(c, c->ref, rows, &rows, false); /* what single kernels need of it */
    return t;
}

/* ---- figures ---- */

/* `kernels` of each group of `batch` rows, those of a bit: write, rows, validate, fill_nan, scores.
 */
enum { WRITE = 1, ROWS = 2, VALIDATE = 4, FILL_NAN = 8, SCORES = 16, KERNELS = 5 };

static void time_kernels(bench *b, bench_tables *t, const char *title, uint32_t kernels,
                         uint32_t batch, const bench_cost *k)
{
    struct {
        kvf_write_args write;
        kvf_rows_args rows;
        kvf_validate_args validate;
        kvf_fill_nan_args fill_nan;
        kvf_score_codes_args scores;
    } args[BENCH_ROWS_MAX];
    check_launch list[BENCH_ROWS_MAX * KERNELS];
    const uint32_t parts = b->rows / batch;
    uint32_t count = 0;
    for (uint32_t i = 0; i < parts; i++) {
        const uint32_t first = i * batch;
        args[i].write = write_args(t, first, batch);
        args[i].rows = rows_args(b, t, first, batch);
        args[i].validate = validate_args(t, first, batch);
        args[i].fill_nan = fill_nan_args(t, first, batch);
        args[i].scores = score_args(b, t, first, batch);
        if (kernels & WRITE)
            list[count++] = CHECK_LAUNCH(b->c, write, &args[i].write);
        if (kernels & ROWS)
            list[count++] = CHECK_LAUNCH(b->c, rows, &args[i].rows);
        if (kernels & VALIDATE)
            list[count++] = CHECK_LAUNCH(b->c, validate, &args[i].validate);
        if (kernels & SCORES)
            list[count++] = CHECK_LAUNCH(b->c, score_codes, &args[i].scores);
        if (kernels & FILL_NAN)
            list[count++] = CHECK_LAUNCH(b->c, fill_nan, &args[i].fill_nan);
    }
    bench_time_graph(b, title, list, count, parts, batch, k);
}

void bench_tables_time(bench *b, bench_tables *t, const char *op, uint32_t batch)
{
    const double lists = (double)batch * BENCH_HEADS, rows = lists * BENCH_GROUP;
    const double kv = lists * BENCH_HEAD_DIM * 4, scored = rows * b->pages * 2;
    const double codes = lists * b->blocks * ((double)kvf_code_bytes(BENCH_HEAD_DIM) + 12);
    const double tiles = rows * kvf_tiles(b->pages, BENCH_PAGE) * 8;
    const double table = (double)batch * b->blocks * 24; /* an id, a word, two stores */
    const double tags = lists * kvf_region_tokens(&t->views->paging) * 12;
    const struct {
        const char *op, *title;
        uint32_t kernels;
        bench_cost cost;
    } all[] = {
        {"score_codes",
         "score_codes, block tables",
         SCORES,
         {codes + scored + tiles, 0, rows * BENCH_HEAD_DIM * 2 * b->tokens}},
        {"write", "write", WRITE, {kv, kv, 0}},
        {"rows", "rows", ROWS, {table, 0, 0}},
        {"validate", "validate, all here", VALIDATE, {tags, 0, 0}},
        {"validate",
         "write, rows, validate",
         WRITE | ROWS | VALIDATE,
         {2 * kv + table + tags, 2 * kv, 0}},
        {"fill_nan", "fill_nan", FILL_NAN, {batch * 4.0, 0, 0}},
    };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (!op || strcmp(op, all[i].op) == 0)
            time_kernels(b, t, all[i].title, all[i].kernels, batch, &all[i].cost);
}

void bench_tables_time_chunk(bench *b, bench_tables *t, const char *op)
{
    const double kv = (double)b->chunk * BENCH_HEADS * BENCH_HEAD_DIM * 4;
    const bench_cost write = {kv, kv, 0}, both = {3 * kv, kv, 0};
    kvf_write_args args[SPLITS];
    check_launch list[2 * SPLITS];
    for (uint32_t i = 0; i < SPLITS; i++) {
        args[i] = chunk_args(b, t, i);
        list[i] = CHECK_LAUNCH(b->c, write, &args[i]);
    }
    if (!op || strcmp(op, "write") == 0)
        bench_time_graph(b, "write, a chunk", list, SPLITS, SPLITS, 1, &write);
    for (uint32_t i = 0; i < SPLITS; i++) {
        list[2 * i] = CHECK_LAUNCH(b->c, write, &args[i]);
        list[2 * i + 1] = CHECK_LAUNCH(b->c, admit_written, &args[i]);
    }
    if (!op || strcmp(op, "admit_written") == 0)
        bench_time_graph(b, "write and admit_written, a chunk", list, 2 * SPLITS, SPLITS, 1, &both);
}

void bench_tables_look(bench *b, const bench_tables *t)
{
    const kvf_physical_blocks *k = t->views;
    const kvf_layer_counters *n = k->counters;
    for (uint32_t r = 0; r < b->rows; r++)
        if (k->is_bad[r] || k->row[r].length != (uint32_t)t->lengths[r])
            check_fail(b->c, "row %u is bad", r);
    /* A region has nothing at first; then one token of each row is new in every run. */
    const uint64_t least = (uint64_t)b->rows * BENCH_HEADS * (BENCH_WINDOW + b->times);
    if (n->bad_rows || n->bad_slots || n->tokens_brought < least)
        check_fail(b->c, "%llu bad rows, %llu bad slots, %llu tokens brought, not %llu",
                   (unsigned long long)n->bad_rows, (unsigned long long)n->bad_slots,
                   (unsigned long long)n->tokens_brought, (unsigned long long)least);
}
