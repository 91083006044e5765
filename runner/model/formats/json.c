/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The JSON reader; see the header. jansson parses, and refuses keys that appear twice; this file
 * lays its tree out in preorder and refuses deep nesting.
 *
 * jansson allocates with malloc: its hooks are one per process, and a library must not set them.
 * It refuses integers beyond 64 bits, which tokenizer_config.json has, so all numbers go through
 * it as doubles.
 */

#include "json.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "common/text.h"

struct json_document {
    json_t *tree; /* owns every string, unless a key has NUL */
    json_value *values;
    size_t count;
    size_t capacity;
    char *strings; /* if a key has NUL: first the text, then every string; else NULL */
    size_t strings_used;
};

typedef struct json_reader {
    json_document *document;
    const char *what;
    bool as_written; /* numbers */
    kvf_error *error;
} json_reader;

static kvf_status add_value(json_reader *reader, json_value value, size_t *index)
{
    json_document *document = reader->document;
    if (document->count == document->capacity) {
        size_t capacity = document->capacity != 0 ? document->capacity * 2 : 64;
        const size_t bytes = capacity < UINT32_MAX ? capacity * sizeof value : 0;
        json_value *grown = model_grow(document->values, document->count * sizeof value, bytes);
        if (!grown)
            return model_out_of_memory(reader->error, capacity * sizeof value, reader->what);
        document->values = grown;
        document->capacity = capacity;
    }
    value.skip = 1;
    *index = document->count;
    document->values[document->count++] = value;
    return KVF_OK;
}

/* ---- NUL in keys ---- */

/*
 * jansson refuses it, and vocabularies have such tokens. A text with such a key is parsed again
 * with U+FDEF, a noncharacter, in the place of NUL; its strings are copied with NUL back in place.
 */
#define NUL_STAND_IN "\xef\xb7\xaf"

/* An escape for it, whose digits are letters of either case; the text ends with NUL. */
static bool is_stand_in_escape(const char *at)
{
    static const char escape[] = "\\ufdef";
    size_t same = 0;
    while (escape[same] && kvf_lower(at[same]) == escape[same])
        same++;
    return !escape[same];
}

static kvf_status hide_nul(json_reader *reader, const char *text, size_t bytes)
{
    char *copy = model_alloc(bytes + 1);
    if (!copy)
        return model_out_of_memory(reader->error, bytes, reader->what);
    reader->document->strings = copy;
    memcpy(copy, text, bytes);
    copy[bytes] = '\0';
    for (size_t at = 0; at < bytes; at++) {
        if (strncmp(copy + at, NUL_STAND_IN, 3) == 0 || is_stand_in_escape(copy + at))
            return model_fail(reader->error, KVF_CORRUPT, "%s: U+FDEF beside \\u0000 at byte %zu",
                              reader->what, at);
        if (strncmp(copy + at, "\\u0000", 6) == 0)
            memcpy(copy + at, "\\ufdef", 6);
        at += copy[at] == '\\';
    }
    return KVF_OK;
}

/* A string of the tree as it was meant. Copies fit: each is shorter than it was with its quotes. */
static const char *show_nul(json_document *document, const char *string, uint32_t *size)
{
    if (!document->strings)
        return string;
    char *copy = document->strings + document->strings_used, *to = copy;
    for (uint32_t i = 0; i < *size; i++) {
        const bool is_nul = strncmp(string + i, NUL_STAND_IN, 3) == 0;
        *to++ = is_nul ? '\0' : string[i];
        i += is_nul ? 2 : 0;
    }
    *to = '\0';
    *size = (uint32_t)(to - copy);
    document->strings_used += *size + 1;
    return copy;
}

/* ---- the tree in preorder ---- */

/* A double carries every integer below 2^53; beyond it a file offset would be a guess. */
static void set_number(double number, json_value *value)
{
    if (number >= 0 && number < 0x1p53 && number == floor(number)) {
        value->kind = JSON_INTEGER;
        value->as.integer = (uint64_t)number;
    } else {
        value->kind = JSON_REAL;
        value->as.real = number;
    }
}

static kvf_status add_tree(json_reader *reader, const char *key, json_t *item, uint32_t depth)
{
    json_document *document = reader->document;
    if (depth > JSON_DEPTH_MAX)
        return model_fail(reader->error, KVF_CORRUPT, "%s: values nested too deeply, more than %u",
                          reader->what, JSON_DEPTH_MAX);
    json_value value = {.kind = json_typeof(item)};
    if (key) {
        value.key_size = (uint32_t)strlen(key);
        value.key = show_nul(document, key, &value.key_size);
    }
    if (value.kind == JSON_INTEGER && llabs(json_integer_value(item)) > 1ll << 53)
        return model_fail(reader->error, KVF_CORRUPT, "%s: %lld is beyond 2^53", reader->what,
                          (long long)json_integer_value(item));
    if (value.kind == JSON_INTEGER) {
        set_number((double)json_integer_value(item), &value);
        value.size = value.kind == JSON_REAL;
    } else if (value.kind == JSON_REAL && reader->as_written)
        value.as.real = json_real_value(item);
    else if (value.kind == JSON_REAL)
        set_number(json_real_value(item), &value);
    else if (value.kind == JSON_STRING) {
        value.size = (uint32_t)json_string_length(item);
        value.as.string = show_nul(document, json_string_value(item), &value.size);
    } else
        value.size = (uint32_t)(json_object_size(item) + json_array_size(item));
    size_t index = 0, i;
    KVF_TRY(add_value(reader, value, &index));
    json_t *child;
    json_array_foreach(item, i, child) KVF_TRY(add_tree(reader, NULL, child, depth + 1));
    json_object_foreach(item, key, child) KVF_TRY(add_tree(reader, key, child, depth + 1));
    document->values[index].skip = (uint32_t)(document->count - index);
    return KVF_OK;
}

static kvf_status parse_tree(json_reader *reader, const char *text, size_t bytes)
{
    const size_t flags = JSON_ALLOW_NUL | JSON_DECODE_ANY | JSON_REJECT_DUPLICATES |
                         (reader->as_written ? 0 : JSON_DECODE_INT_AS_REAL);
    json_document *document = reader->document;
    json_error_t problem = {0};
    const locale_t before = kvf_c_locale_begin(); /* jansson reads numbers by strtod */
    document->tree = json_loadb(text, bytes, flags, &problem);
    kvf_c_locale_end(before);
    if (document->tree)
        return add_tree(reader, NULL, document->tree, 0);
    if (json_error_code(&problem) == json_error_null_byte_in_key && !document->strings) {
        KVF_TRY(hide_nul(reader, text, bytes));
        return parse_tree(reader, document->strings, bytes);
    }
    if (json_error_code(&problem) == json_error_out_of_memory || problem.text[0] == '\0')
        return model_out_of_memory(reader->error, bytes, reader->what);
    return model_fail(reader->error, KVF_CORRUPT, "%s: not valid JSON: %s at byte %d", reader->what,
                      problem.text, problem.position);
}

static kvf_status parse(const char *text, size_t bytes, const char *what, bool as_written,
                        json_document **out, kvf_error *error)
{
    if (bytes >= UINT32_MAX)
        return model_fail(error, KVF_CORRUPT, "%s: %zu bytes of JSON are too many", what, bytes);
    json_document *document = model_alloc_zero(1, sizeof *document);
    if (!document)
        return model_out_of_memory(error, sizeof *document, what);
    json_reader reader = {
        .document = document, .what = what, .as_written = as_written, .error = error};
    kvf_status status = parse_tree(&reader, text, bytes);
    if (status != KVF_OK) {
        json_free(document);
        return status;
    }
    *out = document;
    return KVF_OK;
}

kvf_status json_parse(const char *text, size_t bytes, const char *what, json_document **out,
                      kvf_error *error)
{
    return parse(text, bytes, what, false, out, error);
}

kvf_status json_parse_as_written(const char *text, size_t bytes, const char *what,
                                 json_document **out, kvf_error *error)
{
    return parse(text, bytes, what, true, out, error);
}

void json_free(json_document *document)
{
    if (!document)
        return;
    json_decref(document->tree);
    model_free(document->strings);
    model_free(document->values);
    model_free(document);
}

/* ---- asking ---- */

const json_value *json_root(const json_document *document)
{
    return document->values;
}

const json_value *json_get(const json_value *object, const char *key)
{
    if (!object || object->kind != JSON_OBJECT)
        return NULL;
    size_t length = strlen(key);
    for (const json_value *child = json_first(object); child; child = json_next(object, child))
        if (child->key_size == length && memcmp(child->key, key, length) == 0)
            return child;
    return NULL;
}

const json_value *json_get_set(const json_value *object, const char *key)
{
    const json_value *value = json_get(object, key);
    return value && value->kind != JSON_NULL ? value : NULL;
}

const json_value *json_unknown_key(const json_value *object, const char *const *known)
{
    for (const json_value *child = json_first(object); child; child = json_next(object, child)) {
        const char *const *key = known;
        while (*key &&
               (strlen(*key) != child->key_size || memcmp(*key, child->key, child->key_size) != 0))
            key++;
        if (!*key)
            return child;
    }
    return NULL;
}

kvf_status json_check_keys(const json_value *object, const char *what, const char *const *known,
                           kvf_error *error)
{
    if (!object || object->kind != JSON_OBJECT)
        return model_fail(error, KVF_CORRUPT, "%s is %s, not an object", what,
                          json_kind_name(object));
    const json_value *unknown = json_unknown_key(object, known);
    if (!unknown)
        return KVF_OK;
    return model_fail(error, KVF_UNSUPPORTED, "%s has the unknown field \"%.80s\"", what,
                      unknown->key);
}

kvf_status json_read_flag(const json_value *object, const char *what, const char *field,
                          bool fallback, bool *out, kvf_error *error)
{
    char shown[96];
    const json_value *value = json_get_set(object, field);
    *out = value ? value->kind == JSON_TRUE : fallback;
    if (!value || value->kind == JSON_TRUE || value->kind == JSON_FALSE)
        return KVF_OK;
    return model_fail(error, KVF_CORRUPT, "%s.%s is %s, not a boolean", what, field,
                      json_show(value, shown, sizeof shown));
}

bool json_is_string(const json_value *value, const char *text)
{
    return value && value->kind == JSON_STRING && value->size == strlen(text) &&
           memcmp(value->as.string, text, value->size) == 0;
}

bool json_is_number(const json_value *value)
{
    return value && (value->kind == JSON_INTEGER || value->kind == JSON_REAL);
}

double json_number(const json_value *value)
{
    return value->kind == JSON_INTEGER ? (double)value->as.integer : value->as.real;
}

const char *json_kind_name(const json_value *value)
{
    static const char *const names[] = {
        [JSON_NULL] = "null",        [JSON_FALSE] = "false",      [JSON_TRUE] = "true",
        [JSON_INTEGER] = "a number", [JSON_REAL] = "a number",    [JSON_STRING] = "a string",
        [JSON_ARRAY] = "an array",   [JSON_OBJECT] = "an object",
    };
    return value ? names[value->kind] : "absent";
}

const char *json_show(const json_value *value, char *buffer, size_t size)
{
    if (value && value->kind == JSON_STRING)
        snprintf(buffer, size, "\"%.80s\"", value->as.string);
    else if (value && value->kind == JSON_INTEGER)
        snprintf(buffer, size, "%llu", (unsigned long long)value->as.integer);
    else if (value && value->kind == JSON_REAL)
        kvf_format(buffer, size, "%.9g", value->as.real);
    else
        snprintf(buffer, size, "%s", json_kind_name(value));
    return buffer;
}
