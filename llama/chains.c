/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Chains: a row's set is compared with what they hold, and one is found, made longer, changed in
 * place, or made from the one that is most like it. See chains.h and docs/design/llama.md.
 */

#include "chains.h"

#include <stdlib.h>
#include <string.h>

#include "common/base.h"
#include "common/carve.h"

typedef struct block {
    uint32_t refs;
    uint32_t cells[KVL_BLOCK];
} block;

struct kvl_chains {
    kvl_chains_config c;
    uint32_t words; /* of a set */
    uint64_t call;
    uint32_t tokens; /* that came, in all */
    uint32_t *put;   /* [layers][blocks] bits of places */
    uint32_t *born;  /* [streams * cells] number of the token that came */
    block *blocks;
    int32_t *unused; /* [blocks] a stack */
    uint32_t unused_count;
    kvl_chain *chains;
    uint32_t top;    /* chains from it on were never used */
    uint64_t *fresh; /* [cells] number of a token << 32 | cell: what a chain gets */
};

/* All arrays after the struct, in memory or over NULL. @return bytes */
static size_t lay_out(kvl_chains *s, char *memory)
{
    const uint64_t layers = s->c.layers, cells = s->c.cells, blocks = s->c.blocks;
    kvf_carver carver = {.base = memory};
    kvl_chains *self;
    s->words = s->c.cells / 64;
    KVF_CARVE(&carver, self, 1);
    KVF_CARVE(&carver, s->put, layers, blocks);
    KVF_CARVE(&carver, s->born, s->c.streams, cells);
    KVF_CARVE(&carver, s->blocks, blocks);
    KVF_CARVE(&carver, s->unused, blocks);
    KVF_CARVE(&carver, s->fresh, cells);
    KVF_CARVE(&carver, s->chains, s->c.chains);
    for (uint32_t i = 0; i < s->c.chains; i++) {
        kvl_chain h = {0};
        KVF_CARVE(&carver, h.table, cells / KVL_BLOCK);
        KVF_CARVE(&carver, h.place, cells);
        KVF_CARVE(&carver, h.bits, s->words);
        if (memory)
            s->chains[i] = h;
    }
    return carver.bytes;
}

size_t kvl_chains_bytes(const kvl_chains_config *config)
{
    return lay_out(&(kvl_chains){.c = *config}, NULL);
}

kvl_chains *kvl_chains_open(const kvl_chains_config *config)
{
    kvl_chains *s = calloc(1, kvl_chains_bytes(config));
    if (!s)
        return NULL;
    s->c = *config;
    lay_out(s, (char *)s);
    for (uint32_t i = config->blocks; i-- > 0;)
        s->unused[s->unused_count++] = (int32_t)i;
    return s;
}

void kvl_chains_born(kvl_chains *s, size_t cell)
{
    if (cell < (size_t)s->c.streams * s->c.cells)
        s->born[cell] = ++s->tokens;
}

void kvl_chains_begin(kvl_chains *s)
{
    s->call++;
}

static int is_in(const uint64_t *set, uint32_t cell)
{
    return (int)(set[cell / 64] >> cell % 64 & 1);
}

static void flip(uint64_t *set, uint32_t cell)
{
    set[cell / 64] ^= UINT64_C(1) << cell % 64;
}

uint32_t kvl_chain_cell(const kvl_chains *s, const kvl_chain *h, uint32_t place)
{
    return s->blocks[h->table[place / KVL_BLOCK]].cells[place % KVL_BLOCK];
}

/* ---- blocks ---- */

static void give_back(kvl_chains *s, int32_t id)
{
    if (--s->blocks[id].refs == 0)
        s->unused[s->unused_count++] = id;
}

/* A place of the chain goes: its cell is asked for, unless another chain goes on with the place. */
static void ask(const kvl_chains *s, const kvl_chain *h, uint32_t place)
{
    const int32_t id = h->table[place / KVL_BLOCK];
    int stays = !s->c.before;
    for (const kvl_chain *o = s->chains; s->blocks[id].refs > 1 && o < s->chains + s->top; o++)
        stays |= o != h && o->length > place && o->table[place / KVL_BLOCK] == id;
    if (!stays)
        s->c.before(s->c.user, KVL_ALL_LAYERS,
                    (size_t)h->stream * s->c.cells + kvl_chain_cell(s, h, place));
}

static void shorten(kvl_chains *s, kvl_chain *h, uint32_t length)
{
    for (uint32_t i = length; i < h->length; i++) {
        ask(s, h, i);
        flip(h->bits, kvl_chain_cell(s, h, i));
    }
    const uint32_t keep = (length + KVL_BLOCK - 1) / KVL_BLOCK;
    for (uint32_t b = (h->length + KVL_BLOCK - 1) / KVL_BLOCK; b > keep; b--)
        give_back(s, h->table[b - 1]);
    h->length = length;
}

/* The chain that was used the longest ago, and not in this call: of those with blocks, or any. */
static kvl_chain *oldest(const kvl_chains *s, const kvl_chain *but, int has_blocks)
{
    kvl_chain *best = NULL;
    for (kvl_chain *h = s->chains; h < s->chains + s->c.chains; h++)
        if (h != but && h->used != s->call && (h->length || !has_blocks) &&
            (!best || h->used < best->used))
            best = h;
    return best;
}

static void drop(kvl_chains *s, kvl_chain *h)
{
    shorten(s, h, 0);
    h->used = 0;
}

static uint32_t *put_of(const kvl_chains *s, uint32_t layer, int32_t id)
{
    return &s->put[(size_t)layer * s->c.blocks + (size_t)id];
}

/* A block without references; old chains make room. -1 = every chain is in use. */
static int32_t take(kvl_chains *s, const kvl_chain *for_whom)
{
    while (!s->unused_count) {
        kvl_chain *old = oldest(s, for_whom, 1);
        if (!old)
            return -1;
        drop(s, old);
    }
    const int32_t id = s->unused[--s->unused_count];
    s->blocks[id].refs = 1;
    for (uint32_t l = 0; l < s->c.layers; l++)
        *put_of(s, l, id) = 0;
    return id;
}

/* A cell at a place of the chain, or after its last one. The block becomes the chain's alone: if it
 * was shared, its cells are put anew. */
static int lay(kvl_chains *s, kvl_chain *h, uint32_t place, uint32_t cell)
{
    int32_t *id = &h->table[place / KVL_BLOCK];
    const int is_new = place == h->length && place % KVL_BLOCK == 0;
    if (is_new || s->blocks[*id].refs > 1) {
        const int32_t own = take(s, h);
        if (own < 0)
            return 0;
        if (!is_new) {
            for (uint32_t i = place - place % KVL_BLOCK, n = 0; n < KVL_BLOCK && i < h->length; n++)
                ask(s, h, i++);
            memcpy(s->blocks[own].cells, s->blocks[*id].cells, sizeof s->blocks[own].cells);
            give_back(s, *id);
        }
        *id = own;
    }
    if (place == h->length) {
        h->length++;
    } else {
        ask(s, h, place);
        flip(h->bits, kvl_chain_cell(s, h, place));
    }
    s->blocks[*id].cells[place % KVL_BLOCK] = cell;
    for (uint32_t l = 0; l < s->c.layers; l++)
        *put_of(s, l, *id) &= ~(1u << place % KVL_BLOCK);
    h->place[cell] = place;
    flip(h->bits, cell);
    return 1;
}

/* ---- finding ---- */

/* First cells of a chain that are in the set. */
static uint32_t kept(const kvl_chains *s, const kvl_chain *h, const uint64_t *set)
{
    uint64_t strange = 0;
    for (uint32_t w = 0; w < s->words; w++)
        strange |= h->bits[w] & ~set[w];
    uint32_t n = strange ? 0 : h->length;
    while (n < h->length && is_in(set, kvl_chain_cell(s, h, n)))
        n++;
    return n;
}

static uint32_t common(const kvl_chains *s, const kvl_chain *h, const uint64_t *set)
{
    uint32_t n = 0;
    for (uint32_t w = 0; w < s->words; w++)
        n += (uint32_t)__builtin_popcountll(h->bits[w] & set[w]);
    return n;
}

static int by_number(const void *a, const void *b)
{
    const uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

/* The cells of a stream by when their tokens came. */
static const uint32_t *born_of(const kvl_chains *s, const kvl_chain *h)
{
    return s->born + (size_t)h->stream * s->c.cells;
}

/* Cells of the set that the chain lacks, in the order in which their tokens came. */
static uint32_t fresh_cells(kvl_chains *s, const kvl_chain *h, const uint64_t *set)
{
    const uint32_t *born = born_of(s, h);
    uint32_t n = 0;
    for (uint32_t w = 0; w < s->words; w++)
        for (uint64_t bits = set[w] & ~h->bits[w]; bits; bits &= bits - 1) {
            const uint32_t cell = w * 64 + (uint32_t)__builtin_ctzll(bits);
            s->fresh[n++] = (uint64_t)born[cell] << 32 | cell;
        }
    qsort(s->fresh, n, sizeof *s->fresh, by_number);
    return n;
}

/* Make the set of a chain that no row of the call sees beyond what it keeps. Where the order is
 * free, cells that come take the places of those that went; else they come after those that stay.
 */
static int change(kvl_chains *s, kvl_chain *h, const uint64_t *set, uint32_t count)
{
    const uint32_t keep = kept(s, h, set);
    const int is_free = count <= s->c.budget;
    shorten(s, h, !is_free ? keep : h->length < count ? h->length : count);
    const uint32_t n = fresh_cells(s, h, set);
    uint32_t next = 0;
    for (uint32_t place = keep; place < count; place++)
        if ((place >= h->length || !is_in(set, kvl_chain_cell(s, h, place))) &&
            !lay(s, h, place, (uint32_t)s->fresh[next++]))
            return 0;
    /* A fresh cell may be one of the chain that got another place. */
    if (n && (!is_in(set, h->newest) || s->fresh[n - 1] >> 32 > born_of(s, h)[h->newest]))
        h->newest = (uint32_t)s->fresh[n - 1];
    return 1;
}

/* A chain without cells. */
static kvl_chain *empty(kvl_chains *s, uint32_t stream, const kvl_chain *but)
{
    kvl_chain *h = oldest(s, but, 0);
    if (h) {
        drop(s, h);
        h->stream = stream;
        s->top = kvf_max_u32(s->top, (uint32_t)(h - s->chains) + 1);
    }
    return h;
}

/* A chain with the first `length` cells of another one, and its blocks. */
static kvl_chain *fork_chain(kvl_chains *s, const kvl_chain *of, uint32_t length)
{
    kvl_chain *h = empty(s, of->stream, of);
    if (!h)
        return NULL;
    h->length = length;
    h->newest = length ? kvl_chain_cell(s, of, length - 1) : 0;
    for (uint32_t b = 0; b < (length + KVL_BLOCK - 1) / KVL_BLOCK; b++) {
        h->table[b] = of->table[b];
        s->blocks[h->table[b]].refs++;
    }
    for (uint32_t i = 0; i < length; i++) {
        const uint32_t cell = kvl_chain_cell(s, of, i);
        h->place[cell] = i;
        flip(h->bits, cell);
    }
    return h;
}

static void claim(const kvl_chains *s, kvl_chain *h, uint32_t count)
{
    if (h->used != s->call || h->claimed < count)
        h->claimed = count;
    h->used = s->call;
}

kvl_chain *kvl_chains_find(kvl_chains *s, uint32_t stream, const uint64_t *set, uint32_t count)
{
    kvl_chain *best = NULL;
    uint32_t best_keep = 0, best_common = 0;
    for (kvl_chain *h = s->chains; h < s->chains + s->top; h++) {
        if (h->stream != stream)
            continue;
        const uint32_t keep = kept(s, h, set);
        if (keep >= count) { /* its first `count` cells are in a set of as many */
            claim(s, h, count);
            return h;
        }
        const uint32_t alike = keep == h->length ? keep : common(s, h, set);
        const int is_better = count <= s->c.budget ? alike > best_common : keep > best_keep;
        if (is_better)
            best = h, best_keep = keep, best_common = alike;
    }
    kvl_chain *h = best;
    if (!h)
        h = empty(s, stream, NULL);
    else if (best_keep < h->length && (h->used == s->call || !is_in(set, h->newest))) {
        /* Not the same sequence a step later, or rows of this call see what it has. */
        const int is_whole = count <= s->c.budget && best_common > best_keep + KVL_BLOCK;
        h = fork_chain(s, h, is_whole ? h->length : best_keep);
    }
    if (!h)
        return NULL;
    claim(s, h, 0);
    if (!change(s, h, set, count)) {
        if (h->claimed) /* other rows of this call go on with what they see */
            shorten(s, h, h->claimed < h->length ? h->claimed : h->length);
        else
            drop(s, h);
        return NULL;
    }
    claim(s, h, count);
    return h;
}

/* ---- stale places ---- */

/* Put places of cells in a layer: they are stale from now on, or told. */
static void visit(const kvl_chains *s, uint32_t layer, size_t first, size_t end, int64_t *slots)
{
    for (const kvl_chain *h = s->chains; h < s->chains + s->top; h++) {
        const size_t base = (size_t)h->stream * s->c.cells;
        size_t at = first > base ? first : base;
        for (; h->length && at < end && at < base + s->c.cells; at++) {
            const uint32_t cell = (uint32_t)(at - base);
            if (!is_in(h->bits, cell))
                continue;
            const int32_t id = h->table[h->place[cell] / KVL_BLOCK];
            const uint32_t offset = h->place[cell] % KVL_BLOCK;
            uint32_t *put = put_of(s, layer, id);
            if (!slots)
                *put &= ~(1u << offset);
            else if (*put >> offset & 1)
                slots[at - first] = (int64_t)id * KVL_BLOCK + offset;
        }
    }
}

void kvl_chains_wrote(kvl_chains *s, uint32_t layer, size_t first, size_t end)
{
    visit(s, layer, first, end, NULL);
}

void kvl_chains_homes(const kvl_chains *s, uint32_t layer, size_t first, uint32_t count,
                      int64_t *slots)
{
    for (uint32_t i = 0; i < count; i++)
        slots[i] = -1;
    visit(s, layer, first, first + count, slots);
}

uint32_t kvl_chain_stale(kvl_chains *s, const kvl_chain *h, uint32_t layer, uint32_t length,
                         size_t *cells, int64_t *slots, uint32_t room)
{
    const size_t base = (size_t)h->stream * s->c.cells;
    uint32_t n = 0;
    for (uint32_t first = 0; first < length && n < room; first += KVL_BLOCK) {
        const int32_t id = h->table[first / KVL_BLOCK];
        uint32_t *put = put_of(s, layer, id);
        for (uint32_t at = 0; ~*put && at < KVL_BLOCK && first + at < length && n < room; at++) {
            if (*put >> at & 1)
                continue;
            cells[n] = base + s->blocks[id].cells[at];
            if (s->c.before)
                s->c.before(s->c.user, layer, cells[n]);
            *put |= 1u << at;
            slots[n++] = (int64_t)id * KVL_BLOCK + at;
        }
    }
    return n;
}
