/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The JSON reader; see the header.
 *
 * jansson allocates with malloc: its hooks are one per process, and a library must not set them.
 */

#include "json.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "common/text.h"

/* ---- NUL in keys ---- */

/*
 * jansson's parser refuses it, and vocabularies have such tokens. A text with such a key is parsed
 * again with U+FDEF, a noncharacter, in the place of NUL, which is put back into the tree.
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

/* A copy of the text. */
static kvf_status hide_nul(const char *text, size_t bytes, const char *what, char **out,
                           kvf_error *error)
{
    char *copy = *out = model_alloc(bytes + 1);
    if (!copy)
        return model_out_of_memory(error, bytes, what);
    memcpy(copy, text, bytes);
    copy[bytes] = '\0';
    for (size_t at = 0; at < bytes; at++) {
        if (strncmp(copy + at, NUL_STAND_IN, 3) == 0 || is_stand_in_escape(copy + at))
            return model_fail(error, KVF_CORRUPT, "%s: U+FDEF beside \\u0000 at byte %zu", what,
                              at);
        if (strncmp(copy + at, "\\u0000", 6) == 0)
            memcpy(copy + at, "\\ufdef", 6);
        at += copy[at] == '\\';
    }
    return KVF_OK;
}

/* A string of the tree as it was meant. @return its bytes */
static size_t show_nul(const char *string, size_t size, char *to)
{
    const char *start = to;
    for (size_t i = 0; i < size; i++) {
        const bool is_nul = strncmp(string + i, NUL_STAND_IN, 3) == 0;
        *to++ = is_nul ? '\0' : string[i];
        i += is_nul ? 2 : 0;
    }
    return (size_t)(to - start);
}

/* @p room for any string. @return false if there is no memory */
static bool put_nul_back(json_t *json, char *room)
{
    const char *key;
    json_t *child;
    size_t i;
    if (json_is_string(json)) {
        i = show_nul(json_string_value(json), json_string_length(json), room);
        return json_string_setn_nocheck(json, room, i) == 0;
    }
    bool is_done = true;
    json_array_foreach (json, i, child)
        is_done = is_done && put_nul_back(child, room);
    if (!json_is_object(json))
        return is_done;
    json_t *renamed = json_object();
    json_object_foreach (json, key, child) {
        is_done = is_done && put_nul_back(child, room);
        i = show_nul(key, strlen(key), room);
        is_done = is_done && json_object_setn_nocheck(renamed, room, i, child) == 0;
    }
    is_done = is_done && json_object_clear(json) == 0;
    json_object_keylen_foreach (renamed, key, i, child)
        is_done = is_done && json_object_setn_nocheck(json, key, i, child) == 0;
    json_decref(renamed);
    return is_done;
}

/* ---- parsing ---- */

static kvf_status parse(const char *text, size_t bytes, const char *what, size_t flags,
                        json_t **out, kvf_error *error)
{
    json_error_t problem = {0};
    char *hidden = NULL;
    kvf_status status = KVF_OK;
    flags |= JSON_ALLOW_NUL | JSON_DECODE_ANY | JSON_REJECT_DUPLICATES;
    const locale_t before = kvf_c_locale_begin(); /* jansson reads numbers by strtod */
    *out = json_loadb(text, bytes, flags, &problem);
    if (!*out && json_error_code(&problem) == json_error_null_byte_in_key) {
        status = hide_nul(text, bytes, what, &hidden, error);
        *out = status == KVF_OK ? json_loadb(hidden, bytes, flags, &problem) : NULL;
        if (*out && !put_nul_back(*out, hidden)) {
            json_decref(*out);
            *out = NULL;
            problem.text[0] = '\0';
        }
    }
    kvf_c_locale_end(before);
    model_free(hidden);
    if (status != KVF_OK || *out)
        return status;
    if (json_error_code(&problem) == json_error_out_of_memory || problem.text[0] == '\0')
        return model_out_of_memory(error, bytes, what);
    return model_fail(error, KVF_CORRUPT, "%s: not valid JSON: %s at byte %d", what, problem.text,
                      problem.position);
}

kvf_status json_parse(const char *text, size_t bytes, const char *what, json_t **out,
                      kvf_error *error)
{
    return parse(text, bytes, what, JSON_DECODE_INT_AS_REAL, out, error);
}

kvf_status json_parse_as_written(const char *text, size_t bytes, const char *what, json_t **out,
                                 kvf_error *error)
{
    return parse(text, bytes, what, 0, out, error);
}

/* ---- asking ---- */

json_t *json_get_set(const json_t *object, const char *key)
{
    json_t *value = json_object_get(object, key);
    return json_is_null(value) ? NULL : value;
}

const char *json_unknown_key(json_t *object, const char *const *known)
{
    const char *key;
    size_t size;
    json_t *value;
    json_object_keylen_foreach (object, key, size, value) {
        const char *const *name = known;
        while (*name && (strlen(*name) != size || memcmp(*name, key, size) != 0))
            name++;
        if (!*name)
            return key;
    }
    return NULL;
}

kvf_status json_check_keys(json_t *object, const char *what, const char *const *known,
                           kvf_error *error)
{
    if (!json_is_object(object))
        return model_fail(error, KVF_CORRUPT, "%s is %s, not an object", what,
                          json_kind_name(object));
    const char *unknown = json_unknown_key(object, known);
    if (!unknown)
        return KVF_OK;
    return model_fail(error, KVF_UNSUPPORTED, "%s has the unknown field \"%.80s\"", what, unknown);
}

kvf_status json_read_flag(const json_t *object, const char *what, const char *field, bool fallback,
                          bool *out, kvf_error *error)
{
    char shown[96];
    const json_t *value = json_get_set(object, field);
    *out = value ? json_is_true(value) : fallback;
    if (!value || json_is_boolean(value))
        return KVF_OK;
    return model_fail(error, KVF_CORRUPT, "%s.%s is %s, not a boolean", what, field,
                      json_show(value, shown, sizeof shown));
}

const char *json_plain_text(const json_t *value)
{
    const char *text = json_string_value(value);
    return text && strlen(text) == json_string_length(value) ? text : NULL;
}

bool json_is_text(const json_t *value, const char *text)
{
    const char *plain = json_plain_text(value);
    return plain && strcmp(plain, text) == 0;
}

bool json_is_whole(const json_t *value, uint64_t most, uint64_t *out)
{
    const double real = json_real_value(value);
    if (!json_is_real(value))
        return json_is_written_whole(value, most, out);
    if (!(real >= 0 && real < (double)JSON_WHOLE_MAX && real == floor(real)) ||
        (uint64_t)real > most)
        return false;
    *out = (uint64_t)real;
    return true;
}

bool json_is_written_whole(const json_t *value, uint64_t most, uint64_t *out)
{
    const uint64_t whole = (uint64_t)json_integer_value(value);
    if (!json_is_integer(value) || whole > most || whole > JSON_WHOLE_MAX)
        return false;
    *out = whole;
    return true;
}

const char *json_kind_name(const json_t *value)
{
    static const char *const names[] = {
        [JSON_NULL] = "null",        [JSON_FALSE] = "false",      [JSON_TRUE] = "true",
        [JSON_INTEGER] = "a number", [JSON_REAL] = "a number",    [JSON_STRING] = "a string",
        [JSON_ARRAY] = "an array",   [JSON_OBJECT] = "an object",
    };
    return value ? names[json_typeof(value)] : "absent";
}

const char *json_show(const json_t *value, char *buffer, size_t size)
{
    uint64_t whole;
    if (json_is_string(value))
        snprintf(buffer, size, "\"%.80s\"", json_string_value(value));
    else if (json_is_whole(value, JSON_WHOLE_MAX, &whole))
        snprintf(buffer, size, "%llu", (unsigned long long)whole);
    else if (json_is_integer(value))
        snprintf(buffer, size, "%lld", (long long)json_integer_value(value));
    else if (json_is_real(value))
        kvf_format(buffer, size, "%.9g", json_real_value(value));
    else
        snprintf(buffer, size, "%s", json_kind_name(value));
    return buffer;
}
