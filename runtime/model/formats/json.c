/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The JSON reader; see the header. cJSON parses; this file lays its tree out in preorder and
 * refuses what cJSON lets pass: keys that appear twice, deep nesting, \u0000, numbers that
 * overflow, invalid UTF-8.
 *
 * cJSON allocates with malloc: its hooks are one per process, and a library must not set them. It
 * also keeps one error position per process, so parsing is serialised by a lock.
 */

#include "json.h"

#include "utf8.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

struct json_document {
    kvf_allocator allocator;
    cJSON *tree; /* owns every string */
    json_value *values;
    size_t count;
    size_t capacity;
};

typedef struct json_reader {
    json_document *document;
    const char *what;
    kvf_error *error;
    bool has_nul; /* NUL_STAND_IN stands for NUL */
} json_reader;

#define NUL_STAND_IN "\xef\xb7\xaf" /* U+FDEF, never a character */

/* Guards cJSON's error position; nothing of ours. */
static pthread_mutex_t parse_lock = PTHREAD_MUTEX_INITIALIZER;

static kvf_status fail_at(json_reader *reader, size_t at, const char *problem)
{
    return model_fail(reader->error, KVF_CORRUPT, "%s: %s at byte %zu", reader->what, problem, at);
}

static kvf_status add_value(json_reader *reader, json_value value, size_t *index)
{
    json_document *document = reader->document;
    if (document->count == document->capacity) {
        size_t capacity = document->capacity != 0 ? document->capacity * 2 : 64;
        const size_t bytes = capacity < UINT32_MAX ? capacity * sizeof value : 0;
        json_value *grown = model_grow(&document->allocator, document->values,
                                       document->count * sizeof value, bytes);
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

/* ---- what cJSON lets pass ---- */

static bool same_key(const json_value *a, const json_value *b)
{
    return a->key_size == b->key_size && memcmp(a->key, b->key, a->key_size) == 0;
}

static kvf_status fail_duplicate(json_reader *reader, const json_value *value)
{
    return model_fail(reader->error, KVF_CORRUPT, "%s: key \"%.200s\" appears twice in one object",
                      reader->what, value->key);
}

/* Refuse an object that has a key twice: readers disagree about which one counts. */
static kvf_status check_duplicates(json_reader *reader, const json_value *object)
{
    if (object->size <= 8) {
        for (const json_value *a = json_first(object); a; a = json_next(object, a))
            for (const json_value *b = json_next(object, a); b; b = json_next(object, b))
                if (same_key(a, b))
                    return fail_duplicate(reader, a);
        return KVF_OK;
    }
    size_t slots = 32;
    while (slots < (size_t)object->size * 2)
        slots *= 2;
    const kvf_allocator *allocator = &reader->document->allocator;
    const json_value **table = model_alloc_zero(allocator, slots, sizeof *table);
    if (!table)
        return model_out_of_memory(reader->error, slots * sizeof *table, reader->what);
    kvf_status status = KVF_OK;
    for (const json_value *child = json_first(object); child && status == KVF_OK;
         child = json_next(object, child)) {
        size_t slot = model_hash(child->key, child->key_size) & (slots - 1);
        while (table[slot] && !same_key(table[slot], child))
            slot = (slot + 1) & (slots - 1);
        if (table[slot])
            status = fail_duplicate(reader, child);
        table[slot] = child;
    }
    model_free(allocator, table);
    return status;
}

/* ---- the tree in preorder ---- */

/* A double carries every integer below 2^53; beyond it a file offset would be a guess. */
static kvf_status set_number(json_reader *reader, const cJSON *item, json_value *value)
{
    const double number = item->valuedouble;
    if (!isfinite(number))
        return model_fail(reader->error, KVF_CORRUPT, "%s: a number too large for a double",
                          reader->what);
    if (number >= 0 && number < 0x1p53 && number == floor(number)) {
        value->kind = JSON_INTEGER;
        value->as.integer = (uint64_t)number;
    } else {
        value->kind = JSON_REAL;
        value->as.real = number;
    }
    return KVF_OK;
}

/* Bytes of the string, once every stand-in is NUL again. */
static uint32_t finish_string(const json_reader *reader, char *string)
{
    size_t size = strlen(string);
    for (char *at = string; reader->has_nul && (at = strstr(at, NUL_STAND_IN)); at++) {
        size_t tail = size - (size_t)(at - string) - 3;
        memmove(at + 1, at + 3, tail + 1);
        *at = '\0';
        size -= 2;
    }
    return (uint32_t)size;
}

static kvf_status set_value(json_reader *reader, const cJSON *item, json_value *value)
{
    if (item->string) {
        value->key = item->string;
        value->key_size = finish_string(reader, item->string);
    }
    if (cJSON_IsNumber(item))
        return set_number(reader, item, value);
    if (cJSON_IsString(item)) {
        value->kind = JSON_STRING;
        value->as.string = item->valuestring;
        value->size = finish_string(reader, item->valuestring);
    } else if (cJSON_IsObject(item)) {
        value->kind = JSON_OBJECT;
    } else if (cJSON_IsArray(item)) {
        value->kind = JSON_ARRAY;
    } else if (cJSON_IsBool(item)) {
        value->kind = cJSON_IsTrue(item) ? JSON_TRUE : JSON_FALSE;
    }
    return KVF_OK;
}

static kvf_status add_tree(json_reader *reader, const cJSON *item, uint32_t depth)
{
    if (depth > JSON_DEPTH_MAX)
        return model_fail(reader->error, KVF_CORRUPT, "%s: values nested too deeply, more than %u",
                          reader->what, JSON_DEPTH_MAX);
    json_value value = {.kind = JSON_NULL};
    size_t index = 0;
    KVF_TRY(set_value(reader, item, &value));
    KVF_TRY(add_value(reader, value, &index));
    uint32_t members = 0;
    for (const cJSON *child = item->child; child; child = child->next, members++)
        KVF_TRY(add_tree(reader, child, depth + 1));
    if (value.kind != JSON_OBJECT && value.kind != JSON_ARRAY)
        return KVF_OK;
    json_value *self = &reader->document->values[index];
    self->size = members;
    self->skip = (uint32_t)(reader->document->count - index);
    return value.kind == JSON_OBJECT ? check_duplicates(reader, self) : KVF_OK;
}

/* Offset of the next escape that stands for NUL, at or after `from`; `bytes` if none. */
static size_t find_escaped_nul(const char *text, size_t bytes, size_t from)
{
    for (size_t i = from; i + 1 < bytes; i++) {
        if (text[i] != '\\')
            continue;
        if (bytes - i >= 6 && memcmp(text + i + 1, "u0000", 5) == 0)
            return i;
        i++;
    }
    return bytes;
}

static kvf_status parse_tree(json_reader *reader, const char *text, size_t bytes)
{
    const char *end = text;
    pthread_mutex_lock(&parse_lock);
    errno = 0;
    reader->document->tree = cJSON_ParseWithLengthOpts(text, bytes, &end, false);
    const int number = errno;
    pthread_mutex_unlock(&parse_lock);
    if (!reader->document->tree)
        return number == ENOMEM ? model_out_of_memory(reader->error, bytes, reader->what)
                                : fail_at(reader, (size_t)(end - text), "text that is not JSON");
    for (size_t at = (size_t)(end - text); at < bytes; at++)
        if (!strchr(" \t\r\n", text[at]) || text[at] == '\0')
            return fail_at(reader, at, "text after the JSON value");
    return add_tree(reader, reader->document->tree, 0);
}

/* cJSON ends a string at NUL, so NUL goes through it as a noncharacter that the text does not have.
 */
static kvf_status parse_with_nul(json_reader *reader, const char *text, size_t bytes, size_t nul)
{
    char *copy = model_alloc(&reader->document->allocator, bytes);
    if (!copy)
        return model_out_of_memory(reader->error, bytes, reader->what);
    memcpy(copy, text, bytes);
    kvf_status status = KVF_OK;
    for (size_t at = 0; at + 3 <= bytes && status == KVF_OK; at++)
        if (memcmp(text + at, NUL_STAND_IN, 3) == 0 ||
            (bytes - at >= 6 && strncasecmp(text + at, "\\ufdef", 6) == 0))
            status = fail_at(reader, at, "U+FDEF beside \\u0000");
    for (; nul < bytes; nul = find_escaped_nul(text, bytes, nul + 6))
        memcpy(copy + nul + 2, "fdef", 4);
    reader->has_nul = true;
    if (status == KVF_OK)
        status = parse_tree(reader, copy, bytes);
    model_free(&reader->document->allocator, copy);
    return status;
}

static kvf_status read_document(json_reader *reader, const char *text, size_t bytes)
{
    const size_t valid = utf8_valid_prefix(text, bytes);
    if (valid != bytes)
        return fail_at(reader, valid, "text that is not UTF-8");
    const size_t nul = find_escaped_nul(text, bytes, 0);
    return nul == bytes ? parse_tree(reader, text, bytes)
                        : parse_with_nul(reader, text, bytes, nul);
}

kvf_status json_parse(const char *text, size_t bytes, const char *what,
                      const kvf_allocator *allocator, json_document **out, kvf_error *error)
{
    if (bytes >= UINT32_MAX)
        return model_fail(error, KVF_CORRUPT, "%s: %zu bytes of JSON are too many", what, bytes);
    json_document *document = model_alloc_zero(allocator, 1, sizeof *document);
    if (!document)
        return model_out_of_memory(error, sizeof *document, what);
    if (allocator)
        document->allocator = *allocator;
    json_reader reader = {.document = document, .what = what, .error = error};
    kvf_status status = read_document(&reader, text, bytes);
    if (status != KVF_OK) {
        json_free(document);
        return status;
    }
    *out = document;
    return KVF_OK;
}

void json_free(json_document *document)
{
    if (!document)
        return;
    kvf_allocator allocator = document->allocator;
    cJSON_Delete(document->tree);
    model_free(&allocator, document->values);
    model_free(&allocator, document);
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
        snprintf(buffer, size, "%.9g", value->as.real);
    else
        snprintf(buffer, size, "%s", json_kind_name(value));
    return buffer;
}
