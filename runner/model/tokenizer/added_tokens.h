/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_MODEL_ADDED_TOKENS_H
#define KVF_MODEL_ADDED_TOKENS_H

/*
 * Added tokens: strings that are found in the text before it is split into words. It knows how they
 * are found, not what becomes of the text between them.
 * Invariant: at each place the longest of them matches, places being tried from left to right.
 */

#include "bpe.h"
#include "json.h"
#include "normalize.h"

typedef struct added_token {
    char *text; /* as in the file; zero-terminated */
    uint32_t size;
    uint32_t id;
    bool special, normalized, lstrip, rstrip;
} added_token;

typedef struct added_pattern {
    char *text; /* what is searched for: normalised if the token says so */
    uint32_t size;
    uint32_t token; /* index */
} added_pattern;

/** One set to search for at once. */
typedef struct added_patterns {
    added_pattern *list; /* [count], sorted by text */
    size_t count;
    bool starts[256]; /* first bytes */
} added_patterns;

typedef struct added_tokens {
    added_token *list; /* [count] in the order of the file */
    size_t count;
    added_patterns raw;        /* searched in the text as it is */
    added_patterns normalized; /* searched after normalisation */
} added_tokens;

/** From the "added_tokens" array. @p nfc: patterns of normalized tokens are in it. */
KVF_CHECKED kvf_status added_tokens_create(added_tokens *self, json_t *array,
                                           const token_vocabulary *vocabulary, bool nfc,
                                           kvf_error *error);
void added_tokens_destroy(added_tokens *self);

typedef struct added_match {
    size_t start, end; /* with the white space that the token strips */
    size_t resume;     /* where the search goes on */
    uint32_t id;
} added_match;

typedef struct added_search {
    const added_tokens *tokens;
    const added_patterns *patterns;
    const char *text;
    size_t size;
} added_search;

/** The next match from @p from on; text before @p taken belongs to an earlier match already.
 * @return whether there is one */
bool added_tokens_next(const added_search *search, size_t from, size_t taken, added_match *match);

#endif
