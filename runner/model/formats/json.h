/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_MODEL_JSON_H
#define KVF_MODEL_JSON_H

/*
 * JSON from files that are not trusted, read by jansson, and what is asked of its values.
 *
 * Refused: duplicate keys, nesting beyond jansson's limit, numbers beyond a double, text that is
 * not UTF-8. Strings and keys may hold zero bytes. It does not write JSON.
 */

#include "model_memory.h"

#include <jansson.h>

/**
 * All numbers are JSON_REAL: jansson refuses integers beyond 64 bits, which tokenizer_config.json
 * has.
 *
 * @param what  the file's name, for messages
 * @return KVF_OK; KVF_CORRUPT with line and byte; KVF_OUT_OF_MEMORY
 */
KVF_CHECKED kvf_status json_parse(const char *text, size_t bytes, const char *what, json_t **out,
                                  kvf_error *error);
/** As json_parse; what is written as a whole number is JSON_INTEGER, exactly, and 1.0 is none: for
 * what is handed on. */
KVF_CHECKED kvf_status json_parse_as_written(const char *text, size_t bytes, const char *what,
                                             json_t **out, kvf_error *error);

/** Member of an object, with null counting as absent; NULL if @p object is NULL or no object. */
json_t *json_get_set(const json_t *object, const char *key);

/** The first key of an object that is not in the NULL-terminated list @p known, or NULL. */
const char *json_unknown_key(json_t *object, const char *const *known);

/** Members of an object that must be one: KVF_CORRUPT if @p what is none, KVF_UNSUPPORTED if it has
 * a key that is not in the NULL-terminated list @p known. */
KVF_CHECKED kvf_status json_check_keys(json_t *object, const char *what, const char *const *known,
                                       kvf_error *error);

/** A member that is true or false; @p fallback if absent or null. KVF_CORRUPT for anything else. */
KVF_CHECKED kvf_status json_read_flag(const json_t *object, const char *what, const char *field,
                                      bool fallback, bool *out, kvf_error *error);

/** A string without zero bytes; else NULL. */
const char *json_plain_text(const json_t *value);
bool json_is_text(const json_t *value, const char *text);

/** Whether the value is a whole number from 0 to @p most, at most 2^53, in @p out: a double
 * carries each of them, and beyond it a file offset would be a guess. */
bool json_is_whole(const json_t *value, uint64_t most, uint64_t *out);
/** As json_is_whole, and written so, in a document that was parsed as written. */
bool json_is_written_whole(const json_t *value, uint64_t most, uint64_t *out);
#define JSON_WHOLE_MAX (UINT64_C(1) << 53)

const char *json_kind_name(const json_t *value);

/** The value, shortened, as it would be written in a message. @return @p buffer */
const char *json_show(const json_t *value, char *buffer, size_t size);

#endif
