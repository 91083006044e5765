/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_MODEL_VOCABULARY_H
#define KVF_MODEL_VOCABULARY_H

/*
 * The tokens of a model, by spelling and by id. It knows strings and ids only.
 * Invariant: spellings are distinct, ids are distinct; ids may have gaps.
 */

#include "json.h"

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
KVF_CHECKED kvf_status vocabulary_create(token_vocabulary *self, const json_value *object,
                                         const kvf_allocator *allocator, kvf_error *error);
void vocabulary_destroy(token_vocabulary *self, const kvf_allocator *allocator);

/** @return the id, or VOCABULARY_NONE */
uint32_t vocabulary_find(const token_vocabulary *self, const char *text, size_t size);

#endif
