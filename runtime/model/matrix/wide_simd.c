/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Products of the rows of a step, up to KVF_WIDE_ROWS_MAX at a time, built once per instruction
 * set: each row gets the bits that dot_rows gives it alone.
 *
 * Bound: memory at few rows, arithmetic at many. Weights of GROUP outputs are widened to fp32 once,
 * a piece of their columns at a time; then tiles of ROWS rows meet OUTPUTS outputs. A result is
 * several sums over columns that are a vector apart, as in dot_rows; a tile takes one of them after
 * the other, so that those of all its results are in registers and a load serves several products.
 * It knows arrays only. Invariant: the order of additions follows from the columns, the type and
 * the variant, neither from the rows nor from the outputs beside.
 */

#include "linear_vector.h"

#include <string.h>

/* OUTPUTS * ROWS sums, OUTPUTS weights and one vector of x fill the registers. */
#if defined(__AVX512F__) || defined(__ARM_NEON)
#define OUTPUTS 6u
#else
#define OUTPUTS 3u
#endif
#define ROWS  4u
#define GROUP KVF_WIDE_OUTPUTS

#define TILES     (GROUP / OUTPUTS)
#define ROW_TILES (KVF_WIDE_ROWS_MAX / ROWS)
/* Columns at a time; whole blocks of every type. */
#define PIECE     768u
#define SUMS_MAX  4u

_Static_assert(GROUP % OUTPUTS == 0 && KVF_WIDE_ROWS_MAX % ROWS == 0, "whole tiles");
_Static_assert(PIECE % GGUF_BLOCK_MAX == 0 && PIECE % (SUMS_MAX * VF_LANES) == 0, "whole blocks");

/* Of each result of a tile the sums, of which the first few are used. */
typedef vf tile_sums[OUTPUTS][ROWS][SUMS_MAX];

/* A piece of the columns of some rows and of OUTPUTS outputs. */
typedef struct tile {
    const float *w; /* [OUTPUTS, w_stride] */
    const float *x; /* [rows, x_stride] */
    size_t w_stride, x_stride;
    size_t columns;
    bool begins;  /* the sums are nothing yet */
    float *lanes; /* [sums, OUTPUTS, ROWS] each sum's lanes added up, behind the last piece; else
                     NULL, and the sums go to */
    vf (*of)[ROWS][SUMS_MAX];
} tile;

/* ---- tiles ---- */

/* Sums of a result that are added up together: enough products that do not wait for each other. */
KVF_ALWAYS_INLINE uint32_t together(uint32_t rows, uint32_t sums)
{
    const uint32_t wanted = OUTPUTS * rows >= 8 ? 1 : OUTPUTS * rows >= 4 ? 2 : 4;
    return wanted < sums ? wanted : sums;
}

/* In the order of sum_of4. A row that is missing is the last one again. */
KVF_ALWAYS_INLINE void add_lanes(vf own[OUTPUTS][ROWS][SUMS_MAX], const uint32_t rows,
                                 const uint32_t count, float *lanes)
{
    const uint32_t last = rows - 1;
#pragma GCC unroll 4
    for (uint32_t s = 0; s < count; s++)
#pragma GCC unroll 6
        for (uint32_t o = 0; o < OUTPUTS; o++)
            vf_sum4(lanes + (size_t)(s * OUTPUTS + o) * ROWS, own[o][0][s],
                    own[o][last < 1 ? last : 1][s], own[o][last < 2 ? last : 2][s],
                    own[o][last][s]);
}

/* Between pieces: take sums up again, or put them down. */
KVF_ALWAYS_INLINE void carry_sums(vf own[OUTPUTS][ROWS][SUMS_MAX], const uint32_t rows,
                                  const uint32_t count, vf (*of)[ROWS][SUMS_MAX], uint32_t sum,
                                  const bool up)
{
#pragma GCC unroll 6
    for (uint32_t o = 0; o < OUTPUTS; o++)
#pragma GCC unroll 4
        for (uint32_t r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (uint32_t s = 0; s < count; s++)
                if (up)
                    own[o][r][s] = of[o][r][sum + s];
                else
                    of[o][r][sum + s] = own[o][r][s];
}

/* Sums `sum` to `sum` + count - 1. */
KVF_ALWAYS_INLINE void add_sums(const tile *t, const uint32_t sum, const uint32_t rows,
                                const uint32_t count, const uint32_t sums)
{
    const size_t w_stride = t->w_stride, x_stride = t->x_stride;
    const float *w = t->w + (size_t)sum * VF_LANES, *x = t->x + (size_t)sum * VF_LANES;
    const float *const end = w + t->columns;
    vf own[OUTPUTS][ROWS][SUMS_MAX];
#pragma GCC unroll 6
    for (uint32_t o = 0; o < OUTPUTS; o++)
#pragma GCC unroll 4
        for (uint32_t r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (uint32_t s = 0; s < count; s++)
                own[o][r][s] = vf_zero();
    if (!t->begins)
        carry_sums(own, rows, count, t->of, sum, true);
    for (; w < end; w += sums * VF_LANES, x += sums * VF_LANES)
#pragma GCC unroll 4
        for (uint32_t s = 0; s < count; s++) {
            vf weight[OUTPUTS];
#pragma GCC unroll 6
            for (uint32_t o = 0; o < OUTPUTS; o++)
                weight[o] = vf_load(w + o * w_stride + (size_t)s * VF_LANES);
#pragma GCC unroll 4
            for (uint32_t r = 0; r < rows; r++) {
                const vf number = vf_load(x + r * x_stride + (size_t)s * VF_LANES);
#pragma GCC unroll 6
                for (uint32_t o = 0; o < OUTPUTS; o++)
                    own[o][r][s] = vf_fma(weight[o], number, own[o][r][s]);
            }
        }
    if (t->lanes)
        add_lanes(own, rows, count, t->lanes + (size_t)sum * OUTPUTS * ROWS);
    else
        carry_sums(own, rows, count, t->of, sum, false);
}

/* Alone, so that what it walks along is in registers, too. */
#define DEFINE_TILE(rows, sums)                                                                    \
    static __attribute__((noinline)) void add_tile_##rows##_##sums(const tile *t)                  \
    {                                                                                              \
        _Pragma("GCC unroll 1") for (uint32_t s = 0; s < (sums); s += together(rows, sums))        \
            add_sums(t, s, rows, together(rows, sums), sums);                                      \
    }

DEFINE_TILE(1, 2)
DEFINE_TILE(2, 2)
DEFINE_TILE(3, 2)
DEFINE_TILE(4, 2)
DEFINE_TILE(1, 4)
DEFINE_TILE(2, 4)
DEFINE_TILE(3, 4)
DEFINE_TILE(4, 4)

static void (*const add_tile[2][ROWS])(const tile *t) = {
    {add_tile_1_2, add_tile_2_2, add_tile_3_2, add_tile_4_2},
    {add_tile_1_4, add_tile_2_4, add_tile_3_4, add_tile_4_4},
};

/* ---- results ---- */

/* Some results of a tile. */
typedef struct results {
    const kvf_wide_product *p;
    uint32_t output, outputs; /* the first of them, and how many */
    uint32_t row, rows;
    size_t whole; /* columns that are in the sums */
} results;

/* What is behind the last whole step of the sums, as dot_rows adds it. */
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
            sum[o * ROWS + i] = tail + sum[o * ROWS + i];
        }
    }
}

/* A result's sums, in the order of dot_rows. */
KVF_ALWAYS_INLINE void finish_tile(const results *r, const float (*lanes)[OUTPUTS * ROWS])
{
    const kvf_wide_product *p = r->p;
    float *y = p->y + r->row * p->y_stride + r->output;
    float sum[OUTPUTS * ROWS];
#pragma GCC unroll 24
    for (uint32_t i = 0; i < OUTPUTS * ROWS; i++)
        sum[i] = (lanes[0][i] + lanes[1][i]) + (lanes[2][i] + lanes[3][i]);
    if (!p->linear->blocks && r->whole < p->linear->inputs)
        add_tails(r, sum);
    else if (!p->linear->blocks)
#pragma GCC unroll 24
        for (uint32_t i = 0; i < OUTPUTS * ROWS; i++)
            sum[i] = 0.0f + sum[i];
    if (r->outputs == OUTPUTS)
        for (uint32_t i = 0; i < r->rows; i++, y += p->y_stride)
#pragma GCC unroll 6
            for (uint32_t o = 0; o < OUTPUTS; o++)
                y[o] = sum[o * ROWS + i];
    else
        for (uint32_t i = 0; i < r->rows; i++, y += p->y_stride)
            for (uint32_t o = 0; o < r->outputs; o++)
                y[o] = sum[o * ROWS + i];
}

/* ---- a group of outputs ---- */

/* A piece of the columns of a group. */
typedef struct piece {
    const kvf_wide_product *p;
    uint32_t output, outputs; /* of the group: the first, and 1 ... GROUP */
    uint32_t sums;
    size_t first, columns, whole;
    const float *w; /* [GROUP, w_stride] */
    size_t w_stride;
    tile_sums *of; /* [TILES * ROW_TILES] between pieces */
} piece;

/* The piece's weights in fp32: those of the file, or widened. An output that a group lacks is the
 * last one again. */
static void find_weights(piece *g, float (*wide)[PIECE])
{
    const kvf_linear *linear = g->p->linear;
    const gguf_type *blocks = linear->blocks;
    const size_t row_bytes = kvf_linear_row_bytes(linear);
    const size_t unit = blocks ? blocks->numbers : 1;
    const size_t unit_bytes = blocks ? blocks->bytes : kvf_dtype_bytes(linear->dtype);
    const char *from = (const char *)g->p->weight + g->output * row_bytes;
    const kvf_widen_fn widen = blocks ? KVF_LINEAR_SYMBOL(kvf_packed_kernels_).widen[blocks->index]
                                      : KVF_LINEAR_SYMBOL(kvf_linear_kernels_).widen[linear->dtype];
    from += g->first / unit * unit_bytes;
    if (!blocks && linear->dtype == KVF_FP32 && g->outputs == GROUP) {
        g->w = (const float *)(const void *)from;
        g->w_stride = linear->inputs;
        return;
    }
    for (uint32_t o = 0; o < GROUP; o++) {
        ask_ahead(from, g->columns / unit * unit_bytes);
        widen(from, g->columns, wide[o]);
        from += o + 1 < g->outputs ? row_bytes : 0;
    }
    g->w = wide[0];
    g->w_stride = PIECE;
}

/* Some rows with OUTPUTS outputs, the o-th of the group and on. */
static void add_rows(const piece *g, uint32_t o, uint32_t row, uint32_t rows, uint32_t row_tile)
{
    const kvf_wide_product *p = g->p;
    float lanes[SUMS_MAX][OUTPUTS * ROWS];
    const bool ends = g->first + g->columns >= g->whole;
    const tile t = {.w = g->w + o * g->w_stride,
                    .x = p->x + row * (size_t)p->linear->inputs + g->first,
                    .w_stride = g->w_stride,
                    .x_stride = p->linear->inputs,
                    .columns = g->columns,
                    .begins = g->first == 0,
                    .lanes = ends ? lanes[0] : NULL,
                    .of = g->of[o / OUTPUTS * ROW_TILES + row_tile]};
    if (g->sums < SUMS_MAX)
        memset(lanes, 0, sizeof lanes);
    add_tile[g->sums == 4][rows - 1](&t);
    const results done = {.p = p,
                          .output = g->output + o,
                          .outputs = kvf_min_u32(OUTPUTS, g->outputs - o),
                          .row = row,
                          .rows = rows,
                          .whole = g->whole};
    if (ends)
        finish_tile(&done, (const float(*)[OUTPUTS * ROWS]) lanes);
}

/* A piece of ROWS rows stays in the first-level cache, beside weights that go by. Tiles are as full
 * as each other. */
static void add_piece(const piece *g)
{
    uint32_t tiles = (g->p->rows + ROWS - 1) / ROWS;
    for (uint32_t row = 0, rows, i = 0; tiles > 0; row += rows, i++, tiles--) {
        rows = (g->p->rows - row + tiles - 1) / tiles;
        for (uint32_t o = 0; o < g->outputs; o += OUTPUTS)
            add_rows(g, o, row, rows, i);
    }
}

static uint32_t sums_of(const kvf_linear *linear)
{
    if (linear->blocks)
        return KVF_BLOCK_SUMS;
    return linear->inputs <= KVF_IN_ORDER_COLUMNS_MAX ? 4 : 2;
}

static void multiply_group(const kvf_wide_product *p, uint32_t output)
{
    _Alignas(64) float wide[GROUP][PIECE];
    tile_sums of[TILES * ROW_TILES];
    piece g = {.p = p,
               .output = output,
               .outputs = kvf_min_u32(GROUP, p->outputs - output),
               .sums = sums_of(p->linear),
               .of = of};
    g.whole = p->linear->inputs - p->linear->inputs % (g.sums * VF_LANES);
    do {
        g.columns = g.whole - g.first < PIECE ? g.whole - g.first : PIECE;
        find_weights(&g, wide);
        add_piece(&g);
        g.first += g.columns;
    } while (g.first < g.whole);
}

static void multiply(const kvf_wide_product *p)
{
    for (uint32_t output = 0; output < p->outputs; output += GROUP)
        multiply_group(p, output);
}

const kvf_wide_kernel KVF_LINEAR_SYMBOL(kvf_wide_kernel_) = {multiply};
