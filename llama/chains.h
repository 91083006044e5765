/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVL_CHAINS_H
#define KVL_CHAINS_H

/*
 * Sets of cells as chains of blocks: block tables for rows that llama.cpp describes by a mask.
 *
 * A *cell* is a place of llama.cpp's cache. A *chain* is an ordered list of cells with a block of
 * the library for every 32 of them; a row of a step is the first `length` cells of a chain. Chains
 * that begin alike share blocks; a shared block is copied before one of its places changes.
 *
 * A place of a block is *put* in a layer from when the library got its cell's token until the cell
 * is written again; otherwise it is *stale* and is put anew. So no call announces that a sequence
 * ends, is cut, shifted or copied.
 *
 * Knows neither ggml nor the library. One thread at a time.
 * Invariants: a chain's first n cells are distinct; a block has as many references as chains name
 * it; of a block that a chain names, a place is put only if no write to its cell came since.
 */

#include <stddef.h>
#include <stdint.h>

enum { KVL_BLOCK = 32 };

typedef struct kvl_chains kvl_chains;
typedef struct kvl_chain {
    uint32_t stream;
    uint32_t length;  /* 0 = it is free */
    uint32_t newest;  /* cell whose token came last */
    uint32_t claimed; /* cells that rows of call `used` see */
    uint64_t used;    /* latest call; 0 = none */
    int32_t *table;   /* [blocks of `cells`] ids of the blocks that hold its cells */
    uint32_t *place;  /* [cells] of cells in `bits` */
    uint64_t *bits;   /* [words] cells of the chain */
} kvl_chain;

enum { KVL_ALL_LAYERS = 0xffffffff };

typedef struct kvl_chains_config {
    uint32_t layers;
    uint32_t cells;   /* of a stream, a multiple of 64 */
    uint32_t streams; /* of separate sets of cells */
    uint32_t blocks;  /* of the library */
    uint32_t chains;  /* kept at once, at least as many as rows of a call */
    uint32_t budget;  /* sets of at most so many cells are attended whole: their order is free */
    /* Called before a place of a cell (stream * cells + cell) goes, or another place gets the cell:
     * its token may be in no place of the layer afterwards. NULL = nobody asks. */
    void (*before)(void *user, uint32_t layer, size_t cell);
    void *user;
} kvl_chains_config;

/** Bytes that they take; those of a chain are touched when it is used. */
size_t kvl_chains_bytes(const kvl_chains_config *config);
/** One piece of memory: free it. NULL without. */
kvl_chains *kvl_chains_open(const kvl_chains_config *config);

/** Cells (stream * cells + cell) from @p first on of a layer were written. */
void kvl_chains_wrote(kvl_chains *chains, uint32_t layer, size_t first, size_t end);
/** A cell got a new token: in new chains it comes after those that came before. */
void kvl_chains_born(kvl_chains *chains, size_t cell);

/** A call begins: chains found before it may change, those found from now on keep their cells. */
void kvl_chains_begin(kvl_chains *chains);

/** The chain whose first @p count cells are the set; NULL = there is no room for it.
 * @param set  [cells / 64] bits, zeros after the mask's end */
kvl_chain *kvl_chains_find(kvl_chains *chains, uint32_t stream, const uint64_t *set,
                           uint32_t count);

/** The cell at a place of the chain. */
uint32_t kvl_chain_cell(const kvl_chains *chains, const kvl_chain *chain, uint32_t place);

/** Stale places of a chain's first @p length cells, which count as put from now on.
 * @param cells  [room] receives them: stream * cells + cell
 * @param slots  [room] where they are put: block * 32 + offset
 * @return how many; where it is @p room there may be more */
uint32_t kvl_chain_stale(kvl_chains *chains, const kvl_chain *chain, uint32_t layer,
                         uint32_t length, size_t *cells, int64_t *slots, uint32_t room);

/** Where cells (stream * cells + cell) from @p first on are put in a layer.
 * @param slots  [count] receives block * 32 + offset; -1 = nowhere */
void kvl_chains_homes(const kvl_chains *chains, uint32_t layer, size_t first, uint32_t count,
                      int64_t *slots);

#endif
