/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Products of the rows of a step, up to KVF_SMALL_BATCH_ROWS_MAX at a time, built once per
 * instruction set: each row gets the bits that dot_rows gives it alone.
 *
 * Bound: memory at few rows, arithmetic at many. Tiles of ROWS rows meet OUTPUTS outputs. A result
 * is several sums over columns that are a vector apart, as in dot_rows; a tile takes one of them
 * after the other, so that those of all its results are in registers and a load serves several
 * products. Weights in bf16 are widened in registers, by each tile anew: 8 operations beside 24
 * products with AVX-512, 6 beside 12 with AVX2. While a group of outputs is multiplied the next one
 * is asked for, at an even pace, so that neither waits for the other. Weights in fp16 are widened
 * into memory, once for all rows, a piece of their columns at a time. It knows arrays only.
 * Invariant: the order of additions follows from the columns, the type and the variant, neither
 * from the rows nor from the outputs beside.
 */

#include "linear_vector.h"

#include <string.h>

/* OUTPUTS * ROWS sums, OUTPUTS weights and one vector of x fill the registers. */
#if defined(__AVX512F__) || defined(__ARM_NEON)
#define OUTPUTS 4u
#define ROWS    6u
#else
#define OUTPUTS 3u
#define ROWS    4u
#endif
#define GROUP KVF_SMALL_BATCH_OUTPUTS

#define TILES        (GROUP / OUTPUTS)
#define ROW_TILES    ((KVF_SMALL_BATCH_ROWS_MAX + ROWS - 1) / ROWS)
/* Columns at a time; and of weights where they are. */
#define PIECE        768u
#define DIRECT_PIECE 1536u

_Static_assert(GROUP % OUTPUTS == 0, "whole tiles");
_Static_assert(PIECE % (KVF_SUMS * VF_LANES) == 0, "whole steps");
_Static_assert(DIRECT_PIECE % (KVF_SUMS * VF_LANES) == 0, "whole steps");

/* Tiles are in registers only where loops over them are gone early, for which Clang wants other
 * words. */
#ifdef __clang__
#define UNROLLED   _Pragma("clang loop unroll(full)")
#define ONE_BY_ONE _Pragma("clang loop unroll(disable)")
#else
#define UNROLLED   _Pragma("GCC unroll 6")
#define ONE_BY_ONE _Pragma("GCC unroll 1")
#endif

/* Results of a row of a tile, with what fills a line. */
#define LINE ((OUTPUTS + 3) / 4 * 4)

/* One sum of each result of a tile. */
typedef vf tile_sum[OUTPUTS][ROWS];

/* A piece of the columns of some rows and of OUTPUTS outputs. */
typedef struct tile {
    const void *w;  /* [OUTPUTS, w_stride], fp32 or bf16 */
    const float *x; /* [rows, x_stride] */
    size_t w_stride, x_stride;
    size_t columns;
    uint32_t sums;
    bool begins;   /* the sums are nothing yet */
    tile_sum *of;  /* [sums] between pieces */
    float *result; /* [ROWS, LINE] after the last piece; else NULL */
    uintptr_t ask; /* for weights from here on, so many bytes at a step of a vector */
    size_t ask_bytes;
} tile;

/* ---- tiles ---- */

/* In the order of vf_sum. */
KVF_ALWAYS_INLINE void add_lanes(vf own[OUTPUTS][ROWS], const uint32_t rows, float *result)
{
    const uint32_t last = OUTPUTS - 1;
    UNROLLED
    for (uint32_t r = 0; r < rows; r++) {
        UNROLLED
        for (uint32_t o = 0; o < OUTPUTS; o += 4)
            vf_sum4(result + r * LINE + o, own[o][r], own[o + 1 < last ? o + 1 : last][r],
                    own[o + 2 < last ? o + 2 : last][r], own[o + 3 < last ? o + 3 : last][r]);
    }
}

/* Where weights are as the file has them. */
KVF_ALWAYS_INLINE void ask_for(uintptr_t at)
{
    UNROLLED
    for (size_t i = 0; i < OUTPUTS * VF_LANES * sizeof(uint16_t); i += LINE_BYTES)
        __builtin_prefetch((const void *)(at + i), 0, 2);
}

KVF_ALWAYS_INLINE vf load_weights(const char *w, const bool bf16)
{
    return bf16 ? vf_load_bf16((const void *)w) : vf_load((const void *)w);
}

/* Its products, after what the pieces before made of it. */
KVF_ALWAYS_INLINE void add_sum(const tile *t, uint32_t sum, uintptr_t *ask, const uint32_t rows,
                               const bool bf16, vf own[OUTPUTS][ROWS])
{
    const size_t element = bf16 ? sizeof(uint16_t) : sizeof(float), step = t->sums * VF_LANES;
    const size_t w_stride = t->w_stride * element, x_stride = t->x_stride;
    const char *w = (const char *)t->w + sum * VF_LANES * element;
    const char *const end = (const char *)t->w + t->columns * element;
    const float *x = t->x + (size_t)sum * VF_LANES;
    uintptr_t at = *ask;
    UNROLLED
    for (uint32_t o = 0; o < OUTPUTS; o++) {
        UNROLLED
        for (uint32_t r = 0; r < rows; r++)
            own[o][r] = t->begins ? vf_zero() : t->of[sum][o][r];
    }
    for (; w < end; w += step * element, x += step) {
        vf weight[OUTPUTS];
        if (bf16)
            ask_for(at);
        at += t->ask_bytes;
        UNROLLED
        for (uint32_t o = 0; o < OUTPUTS; o++)
            weight[o] = load_weights(w + o * w_stride, bf16);
        UNROLLED
        for (uint32_t r = 0; r < rows; r++) {
            const vf number = vf_load(x + r * x_stride);
            UNROLLED
            for (uint32_t o = 0; o < OUTPUTS; o++)
                own[o][r] = vf_fma(weight[o], number, own[o][r]);
        }
    }
    *ask = at;
}

/* All sums together, in the order of finish_sums: the last one is @p own. */
KVF_ALWAYS_INLINE void finish_tile(const tile *t, const uint32_t rows, vf own[OUTPUTS][ROWS])
{
    UNROLLED
    for (uint32_t o = 0; o < OUTPUTS; o++) {
        UNROLLED
        for (uint32_t r = 0; r < rows; r++) {
            vf all = t->of[0][o][r];
            UNROLLED
            for (uint32_t sum = 1; sum + 1 < KVF_SUMS; sum++)
                if (sum + 1 < t->sums)
                    all = vf_add(all, t->of[sum][o][r]);
            own[o][r] = vf_add(all, own[o][r]);
        }
    }
    add_lanes(own, rows, t->result);
}

KVF_ALWAYS_INLINE void keep_sum(vf own[OUTPUTS][ROWS], const uint32_t rows, vf (*of)[ROWS])
{
    UNROLLED
    for (uint32_t o = 0; o < OUTPUTS; o++) {
        UNROLLED
        for (uint32_t r = 0; r < rows; r++)
            of[o][r] = own[o][r];
    }
}

KVF_ALWAYS_INLINE void add_tile_of(const tile *t, const uint32_t rows, const bool bf16)
{
    uintptr_t ask = t->ask;
    ONE_BY_ONE
    for (uint32_t sum = 0; sum < t->sums; sum++) {
        vf own[OUTPUTS][ROWS];
        add_sum(t, sum, &ask, rows, bf16, own);
        if (t->result && sum + 1 == t->sums)
            finish_tile(t, rows, own);
        else
            keep_sum(own, rows, t->of[sum]);
    }
}

/* Alone, so that what it walks along is in registers, too. */
#define DEFINE_TILE(rows)                                                                          \
    static __attribute__((noinline)) void add_tile_##rows(const tile *t)                           \
    {                                                                                              \
        add_tile_of(t, rows, false);                                                               \
    }                                                                                              \
    static __attribute__((noinline)) void add_bf16_tile_##rows(const tile *t)                      \
    {                                                                                              \
        add_tile_of(t, rows, true);                                                                \
    }

DEFINE_TILE(1)
DEFINE_TILE(2)
DEFINE_TILE(3)
DEFINE_TILE(4)
#if ROWS > 4u
DEFINE_TILE(5)
DEFINE_TILE(6)
#endif

static void (*const add_tile[2][ROWS])(const tile *t) = {
#if ROWS > 4u
    {add_tile_1, add_tile_2, add_tile_3, add_tile_4, add_tile_5, add_tile_6},
    {add_bf16_tile_1, add_bf16_tile_2, add_bf16_tile_3, add_bf16_tile_4, add_bf16_tile_5,
     add_bf16_tile_6},
#else
    {add_tile_1, add_tile_2, add_tile_3, add_tile_4},
    {add_bf16_tile_1, add_bf16_tile_2, add_bf16_tile_3, add_bf16_tile_4},
#endif
};

/* ---- results ---- */

/* Some results of a tile. */
typedef struct results {
    const kvf_small_batch_product *p;
    uint32_t output, outputs; /* the first of them, and how many */
    uint32_t row, rows;
    size_t whole; /* columns that are in the sums */
} results;

/* The products after the last whole step of the sums, as dot_rows adds them. */
static __attribute__((noinline)) void add_tails(const results *r, float *sum)
{
    const kvf_linear *linear = r->p->linear;
    const char *weight = (const char *)r->p->weight + r->output * kvf_linear_row_bytes(linear);
    for (uint32_t o = 0; o < r->outputs; o++, weight += kvf_linear_row_bytes(linear)) {
        const float *x = r->p->x + r->row * (size_t)linear->inputs;
        for (uint32_t i = 0; i < r->rows; i++, x += linear->inputs) {
            float tail = 0.0f;
            for (size_t c = r->whole; c < linear->inputs; c++)
                tail += kvf_element_get(weight, linear->dtype, c) * x[c];
            sum[i * LINE + o] = tail + sum[i * LINE + o];
        }
    }
}

/* Their sums, with what dot_rows adds to them. */
KVF_ALWAYS_INLINE void store_results(const results *r, float *sum)
{
    const kvf_small_batch_product *p = r->p;
    float *y = p->y + r->row * p->y_stride + r->output;
    if (r->whole < p->linear->inputs)
        add_tails(r, sum);
    for (uint32_t i = 0; i < r->rows; i++, y += p->y_stride, sum += LINE) {
        if (r->outputs == OUTPUTS)
            memcpy(y, sum, OUTPUTS * sizeof *y);
        else
            memcpy(y, sum, r->outputs * sizeof *y);
    }
}

/* ---- a group of outputs ---- */

/* A piece of the columns of a group. */
typedef struct piece {
    const kvf_small_batch_product *p;
    uint32_t output, outputs; /* of the group: the first, and how many */
    uint32_t sums, row_tiles;
    size_t first, columns, whole;
    size_t ask_bytes; /* of the group after it, by each tile at a step */
    bool direct;      /* the weights are bf16, as the file has them */
    const void *w;    /* [outputs of tiles, w_stride] */
    size_t w_stride;
    tile_sum (*of)[KVF_SUMS]; /* [TILES * ROW_TILES] between pieces */
} piece;

static const char *weights_of(const piece *g)
{
    return (const char *)g->p->weight + g->output * kvf_linear_row_bytes(g->p->linear);
}

/* The piece's weights: those of the file, or in fp32. An output that a group lacks is the last one
 * again. */
static void find_weights(piece *g, float (*wide)[PIECE])
{
    const kvf_linear *linear = g->p->linear;
    const size_t row_bytes = kvf_linear_row_bytes(linear), element = kvf_dtype_bytes(linear->dtype);
    const char *from = weights_of(g) + g->first * element;
    const kvf_widen_fn widen = KVF_LINEAR_SYMBOL(kvf_linear_kernels_).widen[linear->dtype];
    if (g->direct || (linear->dtype == KVF_FP32 && g->outputs == GROUP)) {
        g->w = from;
        g->w_stride = linear->inputs;
        return;
    }
    for (uint32_t o = 0; o < GROUP; o++) {
        ask_ahead(from, g->columns * element);
        widen(from, g->columns, wide[o]);
        from += o + 1 < g->outputs ? row_bytes : 0;
    }
    g->w = wide[0];
    g->w_stride = PIECE;
}

/* Some rows with OUTPUTS outputs, the o-th of the group and on. */
static void add_rows(const piece *g, uint32_t o, uint32_t row, uint32_t rows, uint32_t row_tile)
{
    const kvf_small_batch_product *p = g->p;
    const size_t row_bytes = kvf_linear_row_bytes(p->linear), element = g->direct ? 2 : 4;
    float result[ROWS * LINE];
    const bool ends = g->first + g->columns >= g->whole;
    const tile t = {
        .w = (const char *)g->w + o * g->w_stride * element,
        .x = p->x + row * (size_t)p->linear->inputs + g->first,
        .w_stride = g->w_stride,
        .x_stride = p->linear->inputs,
        .columns = g->columns,
        .sums = g->sums,
        .begins = g->first == 0,
        .of = g->of[o / OUTPUTS * ROW_TILES + row_tile],
        .result = ends ? result : NULL,
        .ask = (uintptr_t)weights_of(g) + OUTPUTS * (row_bytes + g->first * sizeof(uint16_t)) +
               g->columns / VF_LANES * g->ask_bytes * row_tile,
        .ask_bytes = g->ask_bytes,
    };
    add_tile[g->direct][rows - 1](&t);
    const results done = {.p = p,
                          .output = g->output + o,
                          .outputs = kvf_min_u32(OUTPUTS, g->outputs - o),
                          .row = row,
                          .rows = rows,
                          .whole = g->whole};
    if (ends)
        store_results(&done, result);
}

/* A piece of ROWS rows stays in the first-level cache, beside weights that go by. Tiles are as full
 * as each other. */
static void add_piece(const piece *g)
{
    for (uint32_t row = 0, rows, i = 0; i < g->row_tiles; row += rows, i++) {
        const uint32_t left = g->row_tiles - i;
        rows = (g->p->rows - row + left - 1) / left;
        for (uint32_t o = 0; o < g->outputs; o += OUTPUTS)
            add_rows(g, o, row, rows, i);
    }
}

static uint32_t sums_of(const kvf_linear *linear)
{
    return linear->inputs <= KVF_IN_ORDER_COLUMNS_MAX ? KVF_SUMS : KVF_LONG_SUMS;
}

/* @return how many outputs it has */
static uint32_t multiply_group(const kvf_small_batch_product *p, uint32_t output)
{
    _Alignas(64) float wide[GROUP][PIECE];
    tile_sum of[TILES * ROW_TILES][KVF_SUMS];
    piece g = {.p = p, .output = output, .sums = sums_of(p->linear), .of = of};
    g.row_tiles = (p->rows + ROWS - 1) / ROWS;
    g.ask_bytes = OUTPUTS * VF_LANES * sizeof(uint16_t) / g.row_tiles;
    g.direct = p->linear->dtype == KVF_BF16 && p->outputs - output >= OUTPUTS;
    g.outputs = kvf_min_u32(g.direct ? OUTPUTS : GROUP, p->outputs - output);
    g.whole = p->linear->inputs - p->linear->inputs % (g.sums * VF_LANES);
    const size_t columns = g.direct ? DIRECT_PIECE : PIECE;
    do {
        g.columns = g.whole - g.first < columns ? g.whole - g.first : columns;
        find_weights(&g, wide);
        add_piece(&g);
        g.first += g.columns;
    } while (g.first < g.whole);
    return g.outputs;
}

static void multiply(const kvf_small_batch_product *p)
{
    for (uint32_t output = 0; output < p->outputs;)
        output += multiply_group(p, output);
}

const kvf_small_batch_kernel KVF_LINEAR_SYMBOL(kvf_small_batch_kernel_) = {multiply};
