/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_MODEL_JSON_H
#define KVF_MODEL_JSON_H

/*
 * JSON from files that are not trusted, read by jansson and checked.
 *
 * Refused: duplicate keys, nesting beyond JSON_DEPTH_MAX, numbers beyond a double, text that is not
 * UTF-8. It does not write JSON. Clients see nothing of jansson but the kinds of values.
 *
 * Invariant: values lie in preorder in one array: the first child of v is v + 1, the value after
 * v's subtree is v + v->skip; every string is valid UTF-8 and zero-terminated.
 */

#include "model_memory.h"

#include <jansson.h>

/* Below are functions of these names. */
#undef json_is_string
#undef json_is_number

#define JSON_DEPTH_MAX 64u

/* JSON_INTEGER is not negative and below 2^53; any other number is JSON_REAL. So is 1.0, in a
 * document that was parsed as written. */
typedef json_type json_kind;

typedef struct json_value {
    json_kind kind;
    uint32_t skip;     /* values in this subtree, itself included */
    uint32_t size;     /* bytes of a string, members of an array or object; of a JSON_REAL, 1 if it
                          was written as a whole number */
    uint32_t key_size; /* bytes of the key; 0 outside objects */
    const char *key;   /* NULL outside objects */
    union {
        const char *string;
        uint64_t integer;
        double real;
    } as;
} json_value;

typedef struct json_document json_document;

/**
 * @param what  the file's name, for messages
 * @return KVF_OK; KVF_CORRUPT with line and byte; KVF_OUT_OF_MEMORY
 */
KVF_CHECKED kvf_status json_parse(const char *text, size_t bytes, const char *what,
                                  json_document **out, kvf_error *error);
/** As json_parse; whole numbers and others are told apart by how they are written, and whole ones
 * beyond 2^53 are refused: for what is handed on. */
KVF_CHECKED kvf_status json_parse_as_written(const char *text, size_t bytes, const char *what,
                                             json_document **out, kvf_error *error);
void json_free(json_document *document);
const json_value *json_root(const json_document *document);

/** Member of an object; NULL if absent or if @p object is NULL or no object. Linear. */
const json_value *json_get(const json_value *object, const char *key);

/** As json_get, with null counting as absent. */
const json_value *json_get_set(const json_value *object, const char *key);

/** The first member of an object whose key is not in the NULL-terminated list @p known, or NULL. */
const json_value *json_unknown_key(const json_value *object, const char *const *known);

/** Members of an object that must be one: KVF_CORRUPT if @p what is none, KVF_UNSUPPORTED if it has
 * a key that is not in the NULL-terminated list @p known. */
KVF_CHECKED kvf_status json_check_keys(const json_value *object, const char *what,
                                       const char *const *known, kvf_error *error);

/** A member that is true or false; @p fallback if absent or null. KVF_CORRUPT for anything else. */
KVF_CHECKED kvf_status json_read_flag(const json_value *object, const char *what, const char *field,
                                      bool fallback, bool *out, kvf_error *error);

bool json_is_string(const json_value *value, const char *text);
const char *json_kind_name(const json_value *value);

/** The value of any number. */
double json_number(const json_value *value);
bool json_is_number(const json_value *value);

/** The value, shortened, as it would be written in a message. @return @p buffer */
const char *json_show(const json_value *value, char *buffer, size_t size);

/** First child of an array or object; NULL if it has none. */
static inline const json_value *json_first(const json_value *parent)
{
    return parent->skip > 1 ? parent + 1 : NULL;
}

/** The child after @p child; NULL after the last. */
static inline const json_value *json_next(const json_value *parent, const json_value *child)
{
    const json_value *next = child + child->skip;
    return next < parent + parent->skip ? next : NULL;
}

#endif
