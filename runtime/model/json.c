/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The JSON reader; see the header. Strings are decoded in place in a private copy of the text,
 * which works because an escape is never shorter than what it stands for.
 */

#include "json.h"

#include "utf8.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

struct json_document {
    kvf_allocator allocator;
    char *text;
    json_value *values;
    size_t count;
    size_t capacity;
};

typedef struct json_reader {
    json_document *document;
    const char *what;
    size_t at;
    size_t end;
    kvf_error *error;
} json_reader;

static kvf_status fail_at(json_reader *reader, size_t at, const char *problem)
{
    return model_fail(reader->error, KVF_CORRUPT, "%s: %s at byte %zu", reader->what, problem, at);
}

static void skip_space(json_reader *reader)
{
    const char *text = reader->document->text;
    while (reader->at < reader->end && (text[reader->at] == ' ' || text[reader->at] == '\t' ||
                                        text[reader->at] == '\n' || text[reader->at] == '\r'))
        reader->at++;
}

static char peek(const json_reader *reader)
{
    return reader->at < reader->end ? reader->document->text[reader->at] : '\0';
}

static kvf_status add_value(json_reader *reader, json_value value, size_t *index)
{
    json_document *document = reader->document;
    if (document->count == document->capacity) {
        size_t capacity = document->capacity != 0 ? document->capacity * 2 : 64;
        json_value *grown = NULL;
        if (capacity < UINT32_MAX)
            grown = model_alloc(&document->allocator, capacity * sizeof *grown);
        if (grown == NULL)
            return model_out_of_memory(reader->error, capacity * sizeof *grown, reader->what);
        if (document->count != 0)
            memcpy(grown, document->values, document->count * sizeof *grown);
        model_free(&document->allocator, document->values);
        document->values = grown;
        document->capacity = capacity;
    }
    value.skip = 1;
    *index = document->count;
    document->values[document->count++] = value;
    return KVF_OK;
}

/* ------------------------------------------------------------------- strings */

static bool read_hex4(const json_reader *reader, size_t at, uint32_t *code)
{
    if (reader->end - at < 4)
        return false;
    *code = 0;
    for (size_t i = 0; i < 4; i++) {
        char c = reader->document->text[at + i];
        uint32_t digit;
        if (c >= '0' && c <= '9')
            digit = (uint32_t)(c - '0');
        else if (c >= 'a' && c <= 'f')
            digit = (uint32_t)(c - 'a') + 10;
        else if (c >= 'A' && c <= 'F')
            digit = (uint32_t)(c - 'A') + 10;
        else
            return false;
        *code = *code << 4 | digit;
    }
    return true;
}

/* After "\u": one escape or a surrogate pair. Moves at past it. */
static bool read_unicode_escape(json_reader *reader, uint32_t *code)
{
    if (!read_hex4(reader, reader->at, code))
        return false;
    reader->at += 4;
    if (*code < 0xd800 || *code > 0xdfff)
        return true;
    const char *text = reader->document->text;
    uint32_t low;
    if (*code > 0xdbff || reader->end - reader->at < 6 || text[reader->at] != '\\' ||
        text[reader->at + 1] != 'u' || !read_hex4(reader, reader->at + 2, &low) || low < 0xdc00 ||
        low > 0xdfff)
        return false;
    reader->at += 6;
    *code = 0x10000 + ((*code - 0xd800) << 10) + (low - 0xdc00);
    return true;
}

static bool read_escape(json_reader *reader, uint32_t *code)
{
    static const char names[] = "\"\\/bfnrt";
    static const char values[] = "\"\\/\b\f\n\r\t";
    char c = peek(reader);
    if (c == '\0')
        return false;
    reader->at++;
    if (c == 'u')
        return read_unicode_escape(reader, code);
    const char *found = strchr(names, c);
    if (found == NULL)
        return false;
    *code = (uint32_t)values[found - names];
    return true;
}

/* At the opening quote. Leaves at after the closing one. */
static kvf_status read_string(json_reader *reader, const char **string, uint32_t *size)
{
    char *text = reader->document->text;
    size_t start = ++reader->at;
    size_t out = start;
    while (reader->at < reader->end && text[reader->at] != '"') {
        unsigned char c = (unsigned char)text[reader->at];
        if (c < 0x20)
            return fail_at(reader, reader->at, "a control character in a string");
        if (c != '\\') {
            text[out++] = text[reader->at++];
            continue;
        }
        size_t escape = reader->at++;
        uint32_t code;
        if (!read_escape(reader, &code))
            return fail_at(reader, escape, "an escape that JSON does not have");
        out += utf8_encode(code, text + out);
    }
    if (reader->at >= reader->end)
        return fail_at(reader, start - 1, "a string that does not end");
    reader->at++;
    text[out] = '\0';
    *string = text + start;
    *size = (uint32_t)(out - start);
    return KVF_OK;
}

/* ------------------------------------------------------------------- numbers */

/* Decimal digits and exponent to double; long double carries the 19 digits that are kept. */
static double scaled(uint64_t digits, long exponent)
{
    if (digits == 0 || exponent < -400)
        return 0;
    if (exponent > 400)
        return HUGE_VAL;
    long double power = 1;
    long double base = 10;
    for (unsigned long e = exponent < 0 ? 0ul - (unsigned long)exponent : (unsigned long)exponent;
         e != 0; e >>= 1) {
        if (e & 1)
            power *= base;
        base *= base;
    }
    return (double)(exponent < 0 ? (long double)digits / power : (long double)digits * power);
}

typedef struct json_digits {
    uint64_t value;
    long dropped; /* digits that did not fit */
    size_t count;
} json_digits;

static void read_digits(json_reader *reader, json_digits *digits)
{
    for (char c = peek(reader); c >= '0' && c <= '9'; c = peek(reader)) {
        uint64_t digit = (uint64_t)(c - '0');
        if (digits->dropped != 0 || digits->value > (UINT64_MAX - digit) / 10)
            digits->dropped++;
        else
            digits->value = digits->value * 10 + digit;
        digits->count++;
        reader->at++;
    }
}

static bool read_exponent(json_reader *reader, long *exponent)
{
    reader->at++;
    bool negative = peek(reader) == '-';
    if (negative || peek(reader) == '+')
        reader->at++;
    json_digits digits = {0};
    read_digits(reader, &digits);
    long value = digits.dropped != 0 || digits.value > 100000 ? 100000 : (long)digits.value;
    *exponent = negative ? -value : value;
    return digits.count != 0;
}

static kvf_status read_number(json_reader *reader, json_value *value)
{
    size_t start = reader->at;
    bool negative = peek(reader) == '-';
    if (negative)
        reader->at++;
    bool zero = peek(reader) == '0';
    json_digits digits = {0};
    read_digits(reader, &digits);
    if (digits.count == 0 || (zero && digits.count > 1))
        return fail_at(reader, start, "a number that JSON does not have");
    bool whole = digits.dropped == 0 && !negative;
    long exponent = digits.dropped;
    if (peek(reader) == '.') {
        whole = false;
        reader->at++;
        size_t before = digits.count;
        read_digits(reader, &digits);
        if (digits.count == before)
            return fail_at(reader, start, "a number that JSON does not have");
        exponent = digits.dropped - (long)(digits.count - before);
    }
    if (peek(reader) == 'e' || peek(reader) == 'E') {
        whole = false;
        long power;
        if (!read_exponent(reader, &power))
            return fail_at(reader, start, "a number that JSON does not have");
        exponent += power;
    }
    if (whole) {
        value->kind = JSON_INTEGER;
        value->as.integer = digits.value;
        return KVF_OK;
    }
    value->kind = JSON_REAL;
    value->as.real = scaled(digits.value, exponent) * (negative ? -1 : 1);
    if (!isfinite(value->as.real))
        return fail_at(reader, start, "a number too large for a double");
    return KVF_OK;
}

/* ----------------------------------------------------------- arrays and objects */

static uint64_t hash_key(const json_value *value)
{
    uint64_t hash = 0xcbf29ce484222325u;
    for (uint32_t i = 0; i < value->key_size; i++)
        hash = (hash ^ (unsigned char)value->key[i]) * 0x100000001b3u;
    return hash ^ hash >> 29;
}

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
        for (const json_value *a = json_first(object); a != NULL; a = json_next(object, a))
            for (const json_value *b = json_next(object, a); b != NULL; b = json_next(object, b))
                if (same_key(a, b))
                    return fail_duplicate(reader, a);
        return KVF_OK;
    }
    size_t slots = 32;
    while (slots < (size_t)object->size * 2)
        slots *= 2;
    const kvf_allocator *allocator = &reader->document->allocator;
    const json_value **table = model_alloc_zero(allocator, slots, sizeof *table);
    if (table == NULL)
        return model_out_of_memory(reader->error, slots * sizeof *table, reader->what);
    kvf_status status = KVF_OK;
    for (const json_value *child = json_first(object); child != NULL;
         child = json_next(object, child)) {
        size_t slot = hash_key(child) & (slots - 1);
        while (table[slot] != NULL && !same_key(table[slot], child))
            slot = (slot + 1) & (slots - 1);
        if (table[slot] != NULL) {
            status = fail_duplicate(reader, child);
            break;
        }
        table[slot] = child;
    }
    model_free(allocator, table);
    return status;
}

static kvf_status read_value(json_reader *reader, json_value value, uint32_t depth);

static kvf_status read_member(json_reader *reader, bool keyed, uint32_t depth)
{
    json_value child = {0};
    skip_space(reader);
    if (keyed) {
        if (peek(reader) != '"')
            return fail_at(reader, reader->at, "a key is missing");
        kvf_status status = read_string(reader, &child.key, &child.key_size);
        if (status != KVF_OK)
            return status;
        skip_space(reader);
        if (peek(reader) != ':')
            return fail_at(reader, reader->at, "a colon is missing");
        reader->at++;
    }
    return read_value(reader, child, depth);
}

static kvf_status read_members(json_reader *reader, json_value value, uint32_t depth)
{
    bool keyed = peek(reader) == '{';
    char close = keyed ? '}' : ']';
    if (depth >= JSON_DEPTH_MAX)
        return fail_at(reader, reader->at, "values nested too deeply");
    reader->at++;
    value.kind = keyed ? JSON_OBJECT : JSON_ARRAY;
    size_t index;
    kvf_status status = add_value(reader, value, &index);
    if (status != KVF_OK)
        return status;
    uint32_t members = 0;
    for (skip_space(reader); peek(reader) != close; skip_space(reader)) {
        if (members != 0) {
            if (peek(reader) != ',')
                return fail_at(reader, reader->at, "a comma or closing bracket is missing");
            reader->at++;
        }
        status = read_member(reader, keyed, depth + 1);
        if (status != KVF_OK)
            return status;
        members++;
    }
    reader->at++;
    json_value *self = &reader->document->values[index];
    self->size = members;
    self->skip = (uint32_t)(reader->document->count - index);
    return keyed ? check_duplicates(reader, self) : KVF_OK;
}

static bool read_word(json_reader *reader, const char *word)
{
    size_t length = strlen(word);
    if (reader->end - reader->at < length ||
        memcmp(reader->document->text + reader->at, word, length) != 0)
        return false;
    reader->at += length;
    return true;
}

static kvf_status read_value(json_reader *reader, json_value value, uint32_t depth)
{
    skip_space(reader);
    kvf_status status = KVF_OK;
    size_t index;
    char c = peek(reader);
    if (c == '{' || c == '[')
        return read_members(reader, value, depth);
    if (c == '"') {
        value.kind = JSON_STRING;
        status = read_string(reader, &value.as.string, &value.size);
    } else if (c == '-' || (c >= '0' && c <= '9')) {
        status = read_number(reader, &value);
    } else if (read_word(reader, "null")) {
        value.kind = JSON_NULL;
    } else if (read_word(reader, "true")) {
        value.kind = JSON_TRUE;
    } else if (read_word(reader, "false")) {
        value.kind = JSON_FALSE;
    } else {
        status = fail_at(reader, reader->at, "a value is missing");
    }
    return status == KVF_OK ? add_value(reader, value, &index) : status;
}

static kvf_status read_document(json_reader *reader)
{
    size_t valid = utf8_valid_prefix(reader->document->text, reader->end);
    if (valid != reader->end)
        return fail_at(reader, valid, "text that is not UTF-8");
    kvf_status status = read_value(reader, (json_value){0}, 0);
    if (status != KVF_OK)
        return status;
    skip_space(reader);
    return reader->at == reader->end ? KVF_OK
                                     : fail_at(reader, reader->at, "text after the JSON value");
}

kvf_status json_parse(const char *text, size_t bytes, const char *what,
                      const kvf_allocator *allocator, json_document **out, kvf_error *error)
{
    if (bytes >= UINT32_MAX)
        return model_fail(error, KVF_CORRUPT, "%s: %zu bytes of JSON are too many", what, bytes);
    json_document *document = model_alloc_zero(allocator, 1, sizeof *document);
    if (document == NULL)
        return model_out_of_memory(error, sizeof *document, what);
    if (allocator != NULL)
        document->allocator = *allocator;
    document->text = model_alloc(allocator, bytes + 1);
    if (document->text == NULL) {
        json_free(document);
        return model_out_of_memory(error, bytes + 1, what);
    }
    if (bytes != 0)
        memcpy(document->text, text, bytes);
    document->text[bytes] = '\0';
    json_reader reader = {.document = document, .what = what, .end = bytes, .error = error};
    kvf_status status = read_document(&reader);
    if (status != KVF_OK) {
        json_free(document);
        return status;
    }
    *out = document;
    return KVF_OK;
}

void json_free(json_document *document)
{
    if (document == NULL)
        return;
    kvf_allocator allocator = document->allocator;
    model_free(&allocator, document->values);
    model_free(&allocator, document->text);
    model_free(&allocator, document);
}

/* -------------------------------------------------------------------- asking */

const json_value *json_root(const json_document *document)
{
    return document->values;
}

const json_value *json_get(const json_value *object, const char *key)
{
    if (object == NULL || object->kind != JSON_OBJECT)
        return NULL;
    size_t length = strlen(key);
    for (const json_value *child = json_first(object); child != NULL;
         child = json_next(object, child))
        if (child->key_size == length && memcmp(child->key, key, length) == 0)
            return child;
    return NULL;
}

const json_value *json_get_set(const json_value *object, const char *key)
{
    const json_value *value = json_get(object, key);
    return value != NULL && value->kind != JSON_NULL ? value : NULL;
}

const json_value *json_unknown_key(const json_value *object, const char *const *known)
{
    for (const json_value *child = json_first(object); child != NULL;
         child = json_next(object, child)) {
        const char *const *key = known;
        while (*key != NULL &&
               (strlen(*key) != child->key_size || memcmp(*key, child->key, child->key_size) != 0))
            key++;
        if (*key == NULL)
            return child;
    }
    return NULL;
}

bool json_is_string(const json_value *value, const char *text)
{
    return value != NULL && value->kind == JSON_STRING && value->size == strlen(text) &&
           memcmp(value->as.string, text, value->size) == 0;
}

bool json_is_number(const json_value *value)
{
    return value != NULL && (value->kind == JSON_INTEGER || value->kind == JSON_REAL);
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
    return value == NULL ? "absent" : names[value->kind];
}

const char *json_show(const json_value *value, char *buffer, size_t size)
{
    if (value != NULL && value->kind == JSON_STRING)
        snprintf(buffer, size, "\"%.80s\"", value->as.string);
    else if (value != NULL && value->kind == JSON_INTEGER)
        snprintf(buffer, size, "%llu", (unsigned long long)value->as.integer);
    else if (value != NULL && value->kind == JSON_REAL)
        snprintf(buffer, size, "%.9g", value->as.real);
    else
        snprintf(buffer, size, "%s", json_kind_name(value));
    return buffer;
}
