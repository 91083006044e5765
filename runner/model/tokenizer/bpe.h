/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_MODEL_BPE_H
#define KVF_MODEL_BPE_H

/*
 * Byte-level byte pair encoding of one word. It knows bytes, ids and merge ranks, not where words
 * come from.
 *
 * Merges are applied lowest rank first, leftmost first, from a heap: n log n in the length of the
 * word, so a megabyte without a space costs no more than a megabyte of prose.
 */

#include "vocabulary.h"

typedef struct bpe_merge {
    uint64_t pair; /* left id << 32 | right id; BPE_NO_PAIR = free slot */
    uint32_t rank; /* position in the list of merges */
    uint32_t id;   /* what the pair becomes */
} bpe_merge;

#define BPE_NO_PAIR UINT64_MAX

typedef struct bpe {
    uint32_t byte_id[256]; /* VOCABULARY_NONE = the byte has no token and is dropped, as in HF */
    bool of_characters;    /* words are characters, and bytes where one is no token; else bytes */
    bpe_merge *merges;     /* [slots], open addressing */
    size_t slots;          /* a power of two, > merges */
    uint32_t *ranks;       /* by id, or NULL: then any two that are a token together merge, as in
                              SentencePiece, those of the highest score first */
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

/** From the "model" object of tokenizer.json, whose vocabulary is read already. Beside what HF
 * knows, "scores" in place of merges: what a GGUF file has of a SentencePiece model, by id. */
KVF_CHECKED kvf_status bpe_create(bpe *self, const json_value *model,
                                  const token_vocabulary *vocabulary, bool of_characters,
                                  const kvf_allocator *allocator, kvf_error *error);
void bpe_destroy(bpe *self, const kvf_allocator *allocator);

/** Append the ids of one word of raw bytes. size < 2^30. */
KVF_CHECKED kvf_status bpe_encode(const bpe *self, const token_vocabulary *vocabulary,
                                  const char *word, size_t size, bpe_scratch *scratch,
                                  const kvf_allocator *allocator, kvf_token_ids *ids,
                                  kvf_error *error);
void bpe_scratch_free(bpe_scratch *scratch, const kvf_allocator *allocator);

#endif
