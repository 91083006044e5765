/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_MODEL_GGUF_PARTS_H
#define KVF_MODEL_GGUF_PARTS_H

/*
 * A place in a GGUF file, and values read from there on.
 *
 * It knows values, not what a file is made of. Invariant: start <= at <= end; a value is handed out
 * only if the file holds all of it. Numbers are little endian, as every machine this runs on.
 */

#include "gguf.h"
#include "model_config.h"

typedef struct gguf_cursor {
    const char *start, *at, *end;
    const char *name; /* of the file, for messages */
    kvf_error *error;
} gguf_cursor;

static inline uint64_t gguf_left(const gguf_cursor *c)
{
    return (uint64_t)(c->end - c->at);
}

/* @p what names what is read, for messages. */
KVF_CHECKED kvf_status gguf_take(gguf_cursor *c, const char *what, void *out, size_t bytes);
KVF_CHECKED kvf_status gguf_take_string(gguf_cursor *c, const char *what, gguf_string *out);

/** The type and the value of field @p key. */
KVF_CHECKED kvf_status gguf_take_value(gguf_cursor *c, gguf_string key, gguf_value *out);

/*
 * A GGUF file's description of its model, in the words of Hugging Face's files, so that one reader
 * serves both.
 *
 * It knows names of fields, not how weights are stored. Invariant: what is written differs from
 * what a converter of the model would write only where the runner does not look, or it is refused.
 */

/** Whether a tensor keeps its type, whatever that of the model is: a vector. */
bool gguf_keeps_type(const gguf_tensor *tensor);

/** A tensor that divides the frequencies of RoPE. */
#define GGUF_ROPE_FACTORS "rope_freqs.weight"

typedef struct gguf_model {
    const kvf_architecture *architecture;
    uint32_t layers, query_heads, kv_heads;
    kvf_dtype dtype; /* the type of all matrices if it is a plain one, else BF16 */
} gguf_model;

/** @return KVF_OK; KVF_CORRUPT or KVF_UNSUPPORTED naming file, field, value and fix */
KVF_CHECKED kvf_status gguf_model_read(const gguf *file, gguf_model *out, kvf_error *error);

/** The dtype of F32, F16 and BF16. */
kvf_dtype gguf_model_dtype(const gguf_type *type);

/** Whether it can be written: "config.json", "tokenizer.json" and "tokenizer_config.json" can. */
bool gguf_has_part(const char *part);

/**
 * Append what the file says as @p part.
 * @return KVF_OK; KVF_CORRUPT or KVF_UNSUPPORTED naming file, field, value and fix; KVF_SYSTEM if
 *         there is no such part; KVF_OUT_OF_MEMORY
 */
KVF_CHECKED kvf_status gguf_write_part(const gguf *file, const char *part, kvf_text *out,
                                       kvf_error *error);

/** Factors of RoPE, which config.json cannot have. Goes after its reading. */
KVF_CHECKED kvf_status gguf_model_finish(const gguf *file, kvf_model_config *config,
                                         kvf_error *error);

/*
 * Fields of a GGUF file, checked one by one, and JSON that is made of them.
 *
 * It knows no field by name. Invariant: the first failure sticks; after it, every call returns a
 * value that is safe to go on with and leaves text and error alone.
 */

typedef struct gguf_writer {
    const gguf *file;
    const char *family; /* in front of the keys of a model, as in "llama.block_count" */
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

/*
 * The tokenizer of a GGUF file as tokenizer.json, and its special tokens and chat template as
 * tokenizer_config.json.
 *
 * It knows which pipeline a name of the file stands for, not how one works. Invariant: a name that
 * it does not know is refused.
 */

void gguf_write_tokenizer(gguf_writer *w);
void gguf_write_tokenizer_config(gguf_writer *w);

#endif
