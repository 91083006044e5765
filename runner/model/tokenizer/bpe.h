/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_MODEL_BPE_H
#define KVF_MODEL_BPE_H

/*
 * The tokens of a model, by spelling and by id. It knows strings and ids only.
 * Invariant: spellings are distinct, ids are distinct; ids may have gaps.
 */

#include "json.h"

#include <stdbool.h>
#include <stdint.h>

#define VOCABULARY_NONE    UINT32_MAX
#define VOCABULARY_GAP_MAX 65536u /* ids beyond the number of tokens; bounds memory by the file */

typedef struct vocabulary_token {
    const char *text; /* NULL = this id has no token; zero-terminated, may hold zero bytes */
    uint32_t size;
} vocabulary_token;

typedef struct token_vocabulary {
    char *blob;
    vocabulary_token *tokens; /* [size] by id */
    uint32_t size;            /* largest id + 1 */
    uint32_t count;           /* tokens that exist */
    uint32_t longest;         /* bytes of the longest spelling */
    uint32_t *table;          /* [slots] ids, VOCABULARY_NONE = free; open addressing */
    size_t slots;             /* a power of two, > count */
} token_vocabulary;

/** From an object {spelling: id, …}. On failure nothing stays allocated. */
KVF_CHECKED kvf_status vocabulary_create(token_vocabulary *self, json_t *object, kvf_error *error);
void vocabulary_destroy(token_vocabulary *self);

/** @return the id, or VOCABULARY_NONE */
uint32_t vocabulary_find(const token_vocabulary *self, const char *text, size_t size);

/*
 * The byte-level alphabet of GPT-2: every byte has a printable character. Printable bytes of
 * Latin-1 stand for themselves; the 68 others, in order, are U+0100, U+0101, … It knows nothing of
 * tokens. Invariant: byte_of(char_of(b)) == b, and byte_of is -1 for every other character.
 */

static inline bool byte_alphabet_is_itself(uint32_t byte)
{
    return (byte >= 0x21 && byte <= 0x7e) || (byte >= 0xa1 && byte <= 0xac) || byte >= 0xae;
}

/** The character of a byte, below U+0144. */
static inline uint32_t byte_alphabet_char(uint8_t byte)
{
    if (byte_alphabet_is_itself(byte))
        return byte;
    if (byte <= 0x20)
        return 0x100u + byte;
    if (byte <= 0xa0)
        return 0x100u + 0x21 + (byte - 0x7fu);
    return 0x100u + 0x21 + 0x22;
}

/** The byte of a character, or -1. */
static inline int byte_alphabet_byte(uint32_t code)
{
    if (code < 0x100)
        return byte_alphabet_is_itself(code) ? (int)code : -1;
    uint32_t index = code - 0x100;
    if (index < 0x21)
        return (int)index;
    if (index < 0x21 + 0x22)
        return (int)(0x7f + index - 0x21);
    return index == 0x21 + 0x22 ? 0xad : -1;
}

/*
 * Byte-level byte pair encoding of one word. It knows bytes, ids and merge ranks, not where words
 * come from.
 *
 * Merges are applied lowest rank first, leftmost first, from a heap: n log n in the length of the
 * word, so a megabyte without a space costs no more than a megabyte of prose.
 */

typedef struct bpe_merge {
    uint64_t pair; /* left id << 32 | right id; BPE_NO_PAIR = free slot */
    uint32_t rank; /* position in the list of merges */
    uint32_t id;   /* what the pair becomes */
} bpe_merge;

#define BPE_NO_PAIR UINT64_MAX

typedef struct bpe {
    uint32_t byte_id[256]; /* VOCABULARY_NONE = the byte has no token and is dropped, as in HF */
    bpe_merge *merges;     /* [slots], open addressing */
    size_t slots;          /* a power of two, > merges */
    bool ignore_merges;    /* a word that is a token stays whole */
} bpe;

/** Room that words share within one call of encode. Zero-initialise. */
typedef struct bpe_symbol {
    uint32_t id;
    uint32_t previous, next; /* BPE_END = none */
} bpe_symbol;

typedef struct bpe_candidate {
    uint32_t rank;
    uint32_t position;
    uint32_t id;
} bpe_candidate;

typedef struct bpe_scratch {
    bpe_symbol *symbols;
    bpe_candidate *heap; /* 3 per symbol: one per pair at first, two more per merge */
    size_t capacity;     /* symbols */
    kvf_text spelled;
} bpe_scratch;

/** From the "model" object of tokenizer.json, whose vocabulary is read already. */
KVF_CHECKED kvf_status bpe_create(bpe *self, json_t *model, const token_vocabulary *vocabulary,
                                  kvf_error *error);
void bpe_destroy(bpe *self);

/** Append the ids of one word of raw bytes. size < 2^30. */
KVF_CHECKED kvf_status bpe_encode(const bpe *self, const token_vocabulary *vocabulary,
                                  const char *word, size_t size, bpe_scratch *scratch,
                                  kvf_token_ids *ids, kvf_error *error);
void bpe_scratch_free(bpe_scratch *scratch);

#endif
