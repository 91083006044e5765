/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_MODEL_GGUF_WRITER_H
#define KVF_MODEL_GGUF_WRITER_H

/*
 * Fields of a GGUF file, checked one by one, and JSON that is made of them.
 *
 * It knows no field by name. Invariant: the first failure sticks; after it, every call returns a
 * value that is safe to go on with and leaves text and error alone.
 */

#include "gguf.h"

typedef struct gguf_writer {
    const gguf *file;
    const char *family; /* in front of the keys of a model, as in "llama.block_count" */
    const kvf_allocator *allocator;
    kvf_text *text;
    kvf_error *error;
    kvf_status status;
} gguf_writer;

#define GGUF_KEY_BYTES 128u

/** "family.rest". @return @p key */
const char *gguf_family_key(const gguf_writer *w, const char *rest, char key[GGUF_KEY_BYTES]);

/** The value of @p key is not what it must be: KVF_CORRUPT. */
void gguf_reject(gguf_writer *w, const char *key, const char *expected);
/** It is fine, but not supported: KVF_UNSUPPORTED. */
void gguf_refuse(gguf_writer *w, const char *key, const char *fix);

/** A whole number from 1 to 2^31 - 1. @p fallback: if it is absent; 0 = it must be there */
uint32_t gguf_count(gguf_writer *w, const char *key, uint32_t fallback);
/** A finite number. @p fallback: if it is absent; NaN = it must be there */
double gguf_real(gguf_writer *w, const char *key, double fallback);
bool gguf_flag(gguf_writer *w, const char *key, bool fallback);
/** NULL if it is absent, or no text. */
const gguf_string *gguf_text(gguf_writer *w, const char *key);
/** An array of @p inner; NULL with a failure if it is absent or another. */
const gguf_value *gguf_array(gguf_writer *w, const char *key, gguf_kind inner);

void gguf_put(gguf_writer *w, const char *format, ...) __attribute__((format(printf, 2, 3)));
/** A JSON string. */
void gguf_put_string(gguf_writer *w, gguf_string string);

#endif
