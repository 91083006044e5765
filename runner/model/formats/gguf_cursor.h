/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_MODEL_GGUF_CURSOR_H
#define KVF_MODEL_GGUF_CURSOR_H

/*
 * A place in a GGUF file, and values read from there on.
 *
 * It knows values, not what a file is made of. Invariant: start <= at <= end; a value is handed out
 * only if the file holds all of it. Numbers are little endian, as every machine this runs on.
 */

#include "gguf.h"

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

#endif
