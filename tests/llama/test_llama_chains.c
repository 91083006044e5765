/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Chains: random sets of cells, written and read as rows of llama.cpp are, against a pool that
 * remembers which token every place of a block got last. Nothing of the library runs.
 */

#include "chains.h"
#include "common/random.h"
#include "unit.h"

enum {
    CELLS = 512,
    STREAMS = 2,
    LAYERS = 3,
    BLOCKS = STREAMS * CELLS / KVL_BLOCK + 64,
    CHAINS = 24
};

/* A token as the pool has it: the cell and its true number of writes. */
typedef struct token {
    size_t cell;
    uint32_t writes;
} token;

typedef struct rig {
    kvl_chains *chains;
    uint32_t writes[LAYERS][STREAMS * CELLS];
    token pool[LAYERS][BLOCKS * KVL_BLOCK];
    uint8_t away[LAYERS][STREAMS * CELLS]; /* tokens that the pool alone has */
    int no_writes;                         /* chains are told of none */
    int is_deaf;                           /* to what they ask for before it goes */
    uint64_t random;
    uint64_t wrong, put;
    uint32_t blocks; /* that rows of the latest call name */
} rig;

static void bring(void *user, uint32_t layer, size_t cell)
{
    rig *r = user;
    for (uint32_t l = 0; l < LAYERS && !r->is_deaf; l++)
        if (layer == l || layer == KVL_ALL_LAYERS)
            r->away[l][cell] = 0;
}

/* Tokens that are away have a home with what was written last; now all go that have one. */
static void put_away(rig *r)
{
    static int64_t homes[STREAMS * CELLS];
    for (uint32_t l = 0; l < LAYERS; l++) {
        kvl_chains_homes(r->chains, l, 0, STREAMS * CELLS, homes);
        for (size_t cell = 0; cell < STREAMS * CELLS; cell++) {
            const token *t = homes[cell] < 0 ? NULL : &r->pool[l][homes[cell]];
            const int is_home = t && t->cell == cell && t->writes == r->writes[l][cell];
            r->wrong += r->away[l][cell] && !is_home;
            r->away[l][cell] = homes[cell] >= 0;
        }
    }
}

static rig *open_rig(uint32_t budget, int no_writes, uint64_t seed)
{
    rig *r = calloc(1, sizeof *r);
    const kvl_chains_config config = {.layers = LAYERS,
                                      .cells = CELLS,
                                      .streams = STREAMS,
                                      .blocks = BLOCKS,
                                      .chains = CHAINS,
                                      .budget = budget,
                                      .before = bring,
                                      .user = r};
    r->no_writes = no_writes;
    r->chains = kvl_chains_open(&config);
    r->random = seed;
    for (uint32_t l = 0; l < LAYERS; l++)
        for (size_t cell = 0; cell < STREAMS * CELLS; cell++)
            r->writes[l][cell] = 1;
    return r;
}

static void close_rig(rig *r)
{
    free(r->chains);
    free(r);
}

static uint32_t below(rig *r, uint32_t n)
{
    return kvf_random_below(&r->random, n);
}

static void write_cells(rig *r, size_t first, size_t end)
{
    for (uint32_t l = 0; l < LAYERS; l++) {
        if (!r->no_writes)
            kvl_chains_wrote(r->chains, l, first, end);
        for (size_t cell = first; cell < end && cell < STREAMS * CELLS; cell++) {
            r->writes[l][cell]++;
            r->away[l][cell] = 0; /* by whoever writes */
        }
    }
}

static void write_cell(rig *r, size_t cell)
{
    write_cells(r, cell, cell + 1);
    kvl_chains_born(r->chains, cell);
}

static uint32_t cells_of(const uint64_t *set)
{
    uint32_t n = 0;
    for (uint32_t w = 0; w < CELLS / 64; w++)
        n += (uint32_t)__builtin_popcountll(set[w]);
    return n;
}

static int is_in(const uint64_t *set, uint32_t cell)
{
    return (int)(set[cell / 64] >> cell % 64 & 1);
}

static void add(uint64_t *set, uint32_t cell)
{
    set[cell / 64] |= UINT64_C(1) << cell % 64;
}

static void take(uint64_t *set, uint32_t cell)
{
    set[cell / 64] &= ~(UINT64_C(1) << cell % 64);
}

/* A row as the library would see it: every token of the set once, as it is now. */
static void check_row(rig *r, uint32_t stream, const uint64_t *set, const int32_t *table,
                      uint32_t count, uint32_t layer)
{
    uint64_t seen[CELLS / 64] = {0};
    for (uint32_t i = 0; i < count; i++) {
        const token t = r->pool[layer][table[i / KVL_BLOCK] * KVL_BLOCK + (int32_t)(i % KVL_BLOCK)];
        const uint32_t cell = (uint32_t)(t.cell - (size_t)stream * CELLS);
        assert_true(t.cell / CELLS == stream);
        r->wrong += !is_in(set, cell) || is_in(seen, cell) || t.writes != r->writes[layer][t.cell];
        add(seen, cell);
    }
    assert_int_equal(cells_of(set), count);
}

/* Blocks of rows, each once. */
static uint32_t blocks_of(uint32_t rows, uint64_t (*sets)[CELLS / 64],
                          int32_t (*tables)[CELLS / KVL_BLOCK])
{
    uint8_t seen[BLOCKS] = {0};
    uint32_t blocks = 0;
    for (uint32_t i = 0; i < rows; i++)
        for (uint32_t b = 0; b < (cells_of(sets[i]) + KVL_BLOCK - 1) / KVL_BLOCK; b++) {
            blocks += !seen[tables[i][b]];
            seen[tables[i][b]] = 1;
        }
    return blocks;
}

/* A call with some rows; returns whether all had room. */
static int call(rig *r, uint32_t rows, const uint32_t *streams, uint64_t (*sets)[CELLS / 64])
{
    int32_t tables[8][CELLS / KVL_BLOCK];
    kvl_chain *chains[8];
    kvl_chains_begin(r->chains);
    for (uint32_t i = 0; i < rows; i++) {
        chains[i] = kvl_chains_find(r->chains, streams[i], sets[i], cells_of(sets[i]));
        if (!chains[i])
            return 0;
    }
    for (uint32_t i = 0; i < rows; i++)
        memcpy(tables[i], chains[i]->table, sizeof tables[i]);
    r->blocks = blocks_of(rows, sets, tables);
    for (uint32_t l = 0; l < LAYERS; l++) {
        for (uint32_t i = 0; i < rows; i++) {
            uint32_t n;
            do { /* in parts of seven */
                size_t cells[7];
                int64_t slots[7];
                n = kvl_chain_stale(r->chains, chains[i], l, cells_of(sets[i]), cells, slots, 7);
                r->put += n;
                for (uint32_t j = 0; j < n; j++)
                    r->pool[l][slots[j]] = (token){cells[j], r->writes[l][cells[j]]};
            } while (n == 7);
        }
        for (uint32_t i = 0; i < rows; i++)
            check_row(r, streams[i], sets[i], tables[i], cells_of(sets[i]), l);
    }
    return 1;
}

/* Sequences that grow, are cut, lose cells, are copied and written over, several to a call. */
static uint64_t wander(uint32_t budget, int no_writes, int is_deaf, uint64_t seed)
{
    rig *r = open_rig(budget, no_writes, seed);
    r->is_deaf = is_deaf;
    uint64_t sets[8][CELLS / 64] = {{0}};
    uint32_t streams[8];
    for (uint32_t i = 0; i < 8; i++)
        streams[i] = i % STREAMS;
    for (int action = 0; action < 400; action++) {
        const uint32_t who = below(r, 8), what = below(r, 10);
        uint64_t *set = sets[who];
        if (what == 0) /* another sequence of the stream begins like this one */
            memcpy(sets[(who + STREAMS) % 8], set, sizeof sets[who]);
        else if (what == 1) /* cells go */
            for (uint32_t n = below(r, 20); n; n--)
                take(set, below(r, CELLS));
        else if (what == 2)
            memset(set, 0, sizeof sets[who]);
        else if (what == 3 && below(r, 4)) /* cells are written again, */
            for (uint32_t n = below(r, 40); n; n--)
                write_cell(r, streams[who] * CELLS + below(r, CELLS));
        else if (what == 3) { /* or many side by side, of both streams, beyond the last */
            const size_t first = below(r, STREAMS * CELLS);
            write_cells(r, first, first + below(r, CELLS));
        } else
            for (uint32_t n = 1 + below(r, what == 4 ? 60 : 3), cell = below(r, CELLS); n; n--) {
                cell = (cell + 1) % CELLS;
                write_cell(r, streams[who] * CELLS + cell);
                add(set, cell);
            }
        uint32_t rows = 0, row_streams[8];
        uint64_t row_sets[8][CELLS / 64];
        for (uint32_t i = 0; i < 8; i++)
            if (cells_of(sets[i]) && below(r, 3)) {
                memcpy(row_sets[rows], sets[i], sizeof sets[i]);
                row_streams[rows++] = streams[i];
            }
        call(r, rows, row_streams, row_sets);
        if (!no_writes && !below(r, 3))
            put_away(r);
    }
    const uint64_t wrong = r->wrong;
    close_rig(r);
    return wrong;
}

TEST(no_set_is_ever_another)
{
    for (uint64_t seed = 1; seed <= 6; seed++) {
        assert_int_equal(wander(64, 0, 0, seed), 0);
        assert_int_equal(wander(CELLS, 0, 0, seed), 0);
    }
}

TEST(without_writes_sets_are_wrong)
{
    assert_true(wander(64, 1, 0, 1) > 0);
    assert_true(wander(CELLS, 1, 0, 1) > 0);
}

TEST(a_cell_is_asked_for_before_its_place_goes)
{
    assert_true(wander(64, 0, 1, 1) > 0);
    assert_true(wander(CELLS, 0, 1, 1) > 0);
}

/* Four sequences over a prefix take its blocks once, whatever their order. */
TEST(a_prefix_is_shared)
{
    enum { PREFIX = 330, OWN = 40 };
    for (uint32_t budget = 64; budget <= CELLS; budget += CELLS - 64) {
        rig *r = open_rig(budget, 0, 1);
        uint64_t sets[4][CELLS / 64] = {{0}};
        for (uint32_t cell = 0; cell < PREFIX; cell++)
            for (uint32_t i = 0; i < 4; i++)
                add(sets[i], cell);
        const uint32_t streams[4] = {0};
        assert_true(call(r, 1, streams, sets));
        const uint32_t blocks = r->blocks;
        assert_int_equal(blocks, (PREFIX + KVL_BLOCK - 1) / KVL_BLOCK);
        for (uint32_t n = 0; n < OWN; n++) {
            for (uint32_t i = 0; i < 4; i++) {
                write_cell(r, PREFIX + n * 4 + i);
                add(sets[i], PREFIX + n * 4 + i);
            }
            /* In one call, and one by one. */
            if (n % 2)
                assert_true(call(r, 4, streams, sets));
            else
                for (uint32_t i = 0; i < 4; i++)
                    assert_true(call(r, 1, streams, &sets[i]));
        }
        assert_true(call(r, 4, streams, sets));
        assert_true(r->blocks - blocks <= 4 * ((OWN + KVL_BLOCK - 1) / KVL_BLOCK + 2));
        /* Each token once, and a block to which another chain had to be copied. */
        assert_true(r->put <= (PREFIX + 4 * (OWN + KVL_BLOCK)) * LAYERS);
        assert_int_equal(r->wrong, 0);
        close_rig(r);
    }
}

/* A window that slides puts a token or two per step, not the window. */
TEST(a_window_slides)
{
    rig *r = open_rig(128, 0, 1);
    uint64_t set[1][CELLS / 64] = {{0}};
    const uint32_t streams[1] = {1};
    for (uint32_t step = 0; step < 3 * CELLS; step++) {
        write_cell(r, CELLS + step % CELLS);
        add(set[0], step % CELLS);
        if (step >= 100)
            take(set[0], (step - 100) % CELLS);
        assert_true(call(r, 1, streams, set));
    }
    assert_int_equal(r->wrong, 0);
    assert_true(r->put <= (uint64_t)3 * CELLS * LAYERS * 2);
    assert_int_equal(r->blocks, (100 + KVL_BLOCK - 1) / KVL_BLOCK);
    close_rig(r);
}

/* Drafts: rows of one sequence are one chain, and cells that are written over are put once more. */
TEST(drafts_are_rows_of_a_chain)
{
    rig *r = open_rig(64, 0, 1);
    uint64_t sets[4][CELLS / 64] = {{0}};
    const uint32_t streams[4] = {0};
    for (uint32_t cell = 0; cell < 200; cell++)
        add(sets[0], cell);
    assert_true(call(r, 1, streams, sets));
    for (uint32_t length = 200; length < 300; length++) { /* one of four is taken */
        for (uint32_t i = 0; i < 4; i++) {
            if (i)
                memcpy(sets[i], sets[i - 1], sizeof sets[i]);
            write_cell(r, length + i);
            add(sets[i], length + i);
        }
        assert_true(call(r, 4, streams, sets));
    }
    assert_int_equal(r->blocks, (303 + KVL_BLOCK - 1) / KVL_BLOCK);
    assert_int_equal(r->wrong, 0);
    assert_true(r->put <= (200 + 4 * 100 + 8) * LAYERS);
    close_rig(r);
}

/* Sets without anything in common fill all blocks: old ones make room, those of the call do not. */
TEST(old_chains_make_room)
{
    const kvl_chains_config config = {.layers = LAYERS,
                                      .cells = CELLS,
                                      .streams = STREAMS,
                                      .blocks = 8,
                                      .chains = 8,
                                      .budget = 64};
    rig *r = open_rig(64, 0, 1);
    free(r->chains);
    r->chains = kvl_chains_open(&config);
    uint64_t sets[3][CELLS / 64] = {{0}};
    const uint32_t streams[3] = {0};
    for (uint32_t i = 0; i < 3; i++)
        for (uint32_t cell = 0; cell < 128; cell++)
            add(sets[i], i * 128 + cell);
    assert_true(call(r, 2, streams, sets));
    assert_true(call(r, 1, streams, &sets[2]));
    assert_false(call(r, 3, streams, sets));
    assert_true(call(r, 2, streams, &sets[1]));
    assert_int_equal(r->wrong, 0);
    close_rig(r);
}
