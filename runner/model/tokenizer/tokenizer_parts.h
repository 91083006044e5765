/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_MODEL_TOKENIZER_PARTS_H
#define KVF_MODEL_TOKENIZER_PARTS_H

/*
 * The parts of a tokenizer, shared by tokenizer_read.c (builds it), tokenizer.c (encodes) and
 * token_stream.c (decodes). Clients see tokenizer.h only.
 */

#include "added_tokens.h"
#include "bpe.h"
#include "regex_split.h"
#include "tokenizer.h"

#define TOKENIZER_STEPS_MAX 8u
#define TOKENIZER_FRAME_MAX 8u

struct kvf_tokenizer {
    token_vocabulary vocabulary;
    bool is_bpe; /* else WordLevel */
    bpe bpe;
    uint32_t unknown_id; /* WordLevel; VOCABULARY_NONE = words must be known */
    added_tokens added;
    uint32_t *added_of_id; /* [size] index into added, VOCABULARY_NONE = none */
    uint32_t size;         /* largest id + 1, added tokens included */
    bool nfc;              /* texts are normalised */
    /* Each cuts what the one before left: matches and what is between them; NULL = white space. */
    pcre2_code *steps[TOKENIZER_STEPS_MAX];
    size_t steps_count;
    bool byte_level_split;   /* the last step hands bytes to BPE */
    bool byte_level_decoder; /* else tokens are joined with spaces */
    uint32_t prefix[TOKENIZER_FRAME_MAX], suffix[TOKENIZER_FRAME_MAX]; /* ids, with add_special */
    size_t prefix_count, suffix_count;
    char note[256];
};

/** Fill a zeroed tokenizer. The caller closes it on failure. */
KVF_CHECKED kvf_status tokenizer_read(kvf_tokenizer *tokenizer, json_t *root, kvf_error *error);

/** The flags of tokenizer_config.json, over what was read. */
KVF_CHECKED kvf_status tokenizer_read_flags(kvf_tokenizer *tokenizer, json_t *root,
                                            kvf_error *error);

#endif
