/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TESTS_HOSTILE_TEXT_H
#define KVF_TESTS_HOSTILE_TEXT_H

/*
 * The hostile strings of the tokenizer goldens: the same generator as in make_tokenizer_goldens.py,
 * over goldens/fragments.txt and goldens/assigned.txt.
 */

#include "json.h"

#define HOSTILE_SEED    20261121u
#define HOSTILE_STRINGS 10240u
#define HOSTILE_GROUP   16u

typedef struct hostile_range {
    uint32_t low, high;
} hostile_range;

typedef struct hostile_text {
    json_t **documents; /* [count] strings */
    size_t count;
    hostile_range *ranges;
    size_t ranges_count;
} hostile_text;

/** Fails the test if the goldens cannot be read. */
hostile_text hostile_text_open(void);
void hostile_text_close(hostile_text *self);

/** Replace @p out by string @p index, UTF-8. */
void hostile_text_make(const hostile_text *self, uint32_t index, kvf_text *out);

#endif
