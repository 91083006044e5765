/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Values from JSON and to it: what messages and tools are made of, and the filter tojson, which
 * writes what Python's json.dumps does.
 *
 * It knows no chats. Invariant: a value that came from JSON is written as it was, but for white
 * space and escapes.
 */

#include "jinja_parts.h"
#include "utf8.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

#include "common/text.h"

/* ---- from JSON ---- */

jinja_value jinja_from_json(jinja_machine *m, const json_value *json)
{
    jinja_value value = {0};
    size_t i = 0;
    switch (json->kind) {
    case JSON_NULL:
        return jinja_none();
    case JSON_TRUE:
    case JSON_FALSE:
        return jinja_bool(json->kind == JSON_TRUE);
    case JSON_STRING:
        return jinja_text(json->as.string, json->size);
    case JSON_INTEGER:
        return jinja_int((int64_t)json->as.integer);
    case JSON_REAL:
        return json->size ? jinja_int((int64_t)json->as.real) : jinja_real(json->as.real);
    case JSON_ARRAY:
        value = jinja_list_new(m, json->size);
        for (const json_value *one = json_first(json); one && i < value.size;
             one = json_next(json, one))
            value.as.items[i++] = jinja_from_json(m, one);
        return value;
    case JSON_OBJECT:
        value = jinja_map_new(m);
        for (const json_value *one = json_first(json); one && value.kind == JINJA_MAP;
             one = json_next(json, one))
            jinja_map_set(m, value.as.map, one->key, one->key_size, jinja_from_json(m, one));
        return value;
    }
    return value;
}

size_t jinja_json_bytes(const json_value *json)
{
    size_t bytes = 0;
    for (const json_value *v = json; v < json + json->skip; v++)
        bytes += 16 + v->key_size + (v->kind == JSON_STRING ? v->size : 0);
    return bytes;
}

/* ---- numbers ---- */

/* The fewest digits that are read back as the same number; the exponent of the first one. */
static int shortest(double number, char digits[24], int *exponent)
{
    char text[40];
    int count = 0;
    for (int precision = 0; precision < 17; precision++) {
        kvf_format(text, sizeof text, "%.*e", precision, number);
        if (kvf_real_of(text, NULL) == number)
            break;
    }
    const char *at = text;
    for (; *at && *at != 'e'; at++)
        if (*at >= '0' && *at <= '9')
            digits[count++] = *at;
    while (count > 1 && digits[count - 1] == '0')
        count--;
    *exponent = *at ? (int)strtol(at + 1, NULL, 10) : 0;
    return count;
}

static char *put_digits(char *to, const char *digits, int from, int until, int count)
{
    for (int i = from; i < until; i++)
        *to++ = i >= 0 && i < count ? digits[i] : '0';
    return to;
}

jinja_value jinja_real_text(jinja_machine *m, double number)
{
    enum { TEXT_BYTES = 48 };
    char digits[24], *text = jinja_take(m, TEXT_BYTES), *to = text;
    int exponent = 0;
    if (!text)
        return jinja_words("");
    const int count = shortest(number, digits, &exponent);
    const bool is_long = exponent < -4 || exponent >= 16;
    const int point = is_long ? 1 : exponent + 1; /* digits in front of it */
    if (signbit(number))
        *to++ = '-';
    to = put_digits(to, digits, point < 1 ? -1 : 0, point < 1 ? 0 : point, count);
    if (!is_long || count > 1) {
        *to++ = '.';
        to = put_digits(to, digits, point, point < count ? count : point + 1, count);
    }
    if (is_long)
        to += snprintf(to, 8, "e%c%02d", exponent < 0 ? '-' : '+', abs(exponent));
    return jinja_text(text, (size_t)(to - text));
}

/* ---- to JSON ---- */

typedef struct json_form {
    jinja_machine *m;
    jinja_value between, behind_key; /* texts */
    jinja_value indent;              /* a text, or undefined for one line */
    bool ascii, sorts;
    bool python; /* as repr() writes it, not JSON */
    kvf_text out;
} json_form;

static void put(json_form *f, const char *bytes, size_t size)
{
    if (f->m->status != KVF_OK)
        return;
    if (f->out.size + size > f->m->arena_left)
        jinja_fail(f->m, KVF_FULL, "it takes too much memory");
    else if (kvf_text_append(&f->out, bytes, size, NULL) != KVF_OK)
        jinja_fail(f->m, KVF_OUT_OF_MEMORY, "%zu bytes could not be allocated", size);
}

static void put_escaped(json_form *f, uint32_t unit)
{
    char text[12];
    const char *form = !f->python || (unit >= 0x100 && unit < 0x10000) ? "\\u%04x"
                       : unit < 0x100                                  ? "\\x%02x"
                                                                       : "\\U%08x";
    put(f, text, (size_t)kvf_format(text, sizeof text, form, unit));
}

/* As str.isprintable. */
static bool is_printable(uint32_t code)
{
    const utf8proc_category_t category = utf8proc_category((utf8proc_int32_t)code);
    return code == ' ' || (category >= UTF8PROC_CATEGORY_LU && category <= UTF8PROC_CATEGORY_SO);
}

/* 'text', or "it's". */
static void put_repr(json_form *f, jinja_value text)
{
    static const char shorts[] = "\t\n\r\\", letters[] = "tnr\\";
    const bool has_single = text.size && memchr(text.as.text, '\'', text.size);
    const bool has_double = text.size && memchr(text.as.text, '"', text.size);
    const char quote = has_single && !has_double ? '"' : '\'';
    put(f, &quote, 1);
    for (size_t at = 0, length; at < text.size && f->m->status == KVF_OK; at += length) {
        uint32_t code = 0xfffd;
        const char *here = text.as.text + at, *found = NULL;
        length = utf8_decode(here, text.size - at, &code);
        length = length ? length : 1;
        if (code > 0 && code < 0x80)
            found = strchr(shorts, (int)code);
        if (found || code == (uint32_t)quote) {
            const char pair[2] = {'\\', found ? letters[found - shorts] : quote};
            put(f, pair, 2);
        } else if (is_printable(code)) {
            put(f, here, length);
        } else {
            put_escaped(f, code);
        }
    }
    put(f, &quote, 1);
}

static void put_text(json_form *f, jinja_value text)
{
    if (f->python) {
        put_repr(f, text);
        return;
    }
    static const char shorts[] = "\b\t\n\f\r\"\\", letters[] = "btnfr\"\\";
    put(f, "\"", 1);
    for (size_t at = 0, length; at < text.size && f->m->status == KVF_OK; at += length) {
        uint32_t code = 0;
        const char *here = text.as.text + at, *found;
        length = utf8_decode(here, text.size - at, &code);
        if (length == 0) { /* ill-formed */
            length = 1;
            code = 0xfffd;
        }
        if (code > 0 && code < 0x80 && (found = strchr(shorts, (int)code)) != NULL) {
            const char pair[2] = {'\\', letters[found - shorts]};
            put(f, pair, 2);
        } else if (code < 0x20 || (f->ascii && code >= 0x7f && code < 0x10000)) {
            put_escaped(f, code);
        } else if (f->ascii && code >= 0x10000) {
            put_escaped(f, 0xd800 + ((code - 0x10000) >> 10));
            put_escaped(f, 0xdc00 + ((code - 0x10000) & 0x3ff));
        } else {
            put(f, here, length);
        }
    }
    put(f, "\"", 1);
}

static void put_line(json_form *f, uint32_t depth)
{
    if (f->indent.kind != JINJA_TEXT)
        return;
    put(f, "\n", 1);
    for (uint32_t i = 0; i < depth; i++)
        put(f, f->indent.as.text, f->indent.size);
}

static void put_value(json_form *f, jinja_value v, uint32_t depth);

static void put_pair(json_form *f, const jinja_entry *entry, bool first, uint32_t depth)
{
    if (!first)
        put(f, f->between.as.text, f->between.size);
    put_line(f, depth);
    const jinja_value key = jinja_key_value(entry);
    if (f->python)
        put_value(f, key, depth);
    else
        put_text(f, jinja_string(f->m, key));
    put(f, f->behind_key.as.text, f->behind_key.size);
    put_value(f, entry->value, depth);
}

static int compare_keys(const void *a, const void *b)
{
    const jinja_entry *x = *(const jinja_entry *const *)a, *y = *(const jinja_entry *const *)b;
    const size_t size = x->key_size < y->key_size ? x->key_size : y->key_size;
    const int order = memcmp(x->key, y->key, size);
    return order ? order : (x->key_size > y->key_size) - (x->key_size < y->key_size);
}

static void put_map(json_form *f, const jinja_map *map, uint32_t depth)
{
    size_t count = 0;
    const jinja_entry **entries = jinja_take(f->m, map->count * sizeof *entries);
    if (!entries)
        return;
    for (const jinja_entry *e = map->first; e; e = e->next)
        entries[count++] = e;
    if (f->sorts)
        qsort(entries, count, sizeof *entries, compare_keys);
    put(f, "{", 1);
    for (size_t i = 0; i < count; i++)
        put_pair(f, entries[i], i == 0, depth + 1);
    if (count > 0)
        put_line(f, depth);
    put(f, "}", 1);
}

static void put_list(json_form *f, jinja_value list, uint32_t depth)
{
    const bool is_tuple = f->python && list.form == LIST_TUPLE;
    if (list.form > LIST_TUPLE)
        jinja_fail(f->m, f->python ? KVF_UNSUPPORTED : KVF_INVALID,
                   "what is no list in Python is written out");
    put(f, is_tuple ? "(" : "[", 1);
    for (size_t i = 0; i < list.size; i++) {
        if (i > 0)
            put(f, f->between.as.text, f->between.size);
        put_line(f, depth + 1);
        put_value(f, list.as.items[i], depth + 1);
    }
    if (list.size > 0)
        put_line(f, depth);
    put(f, ",)", is_tuple && list.size == 1);
    put(f, is_tuple ? ")" : "]", 1);
}

static void put_value(json_form *f, jinja_value v, uint32_t depth)
{
    if (!jinja_enter(f->m))
        return;
    if (v.kind == JINJA_TEXT)
        put_text(f, v);
    else if (v.kind == JINJA_MAP && !v.as.map->is_namespace)
        put_map(f, v.as.map, depth);
    else if (v.kind == JINJA_LIST)
        put_list(f, v, depth);
    else if (v.kind == JINJA_NONE && !f->python)
        put(f, "null", 4);
    else if (v.kind == JINJA_BOOL && !f->python)
        put(f, v.as.truth ? "true" : "false", v.as.truth ? 4 : 5);
    else if (v.kind == JINJA_INT || v.kind == JINJA_REAL || v.kind == JINJA_BOOL ||
             v.kind == JINJA_NONE) {
        const jinja_value text = jinja_string(f->m, v);
        put(f, text.as.text, text.size);
    } else
        jinja_fail(f->m, f->python ? KVF_UNSUPPORTED : KVF_INVALID, "%s is written out",
                   jinja_kind_name(v));
    jinja_leave(f->m);
}

/* indent=4, or a text. */
static void set_indent(json_form *f, jinja_value indent)
{
    enum { INDENT_MAX = 64 };
    if (indent.kind == JINJA_TEXT)
        f->indent = indent;
    if (indent.kind != JINJA_INT)
        return;
    char *blanks = jinja_take(f->m, INDENT_MAX);
    if (indent.as.integer > INDENT_MAX)
        jinja_fail(f->m, KVF_UNSUPPORTED, "tojson with such an indent is not known here");
    if (!blanks || f->m->status != KVF_OK)
        return;
    memset(blanks, ' ', INDENT_MAX);
    f->indent = jinja_text(blanks, indent.as.integer < 0 ? 0 : (size_t)indent.as.integer);
}

static void set_separators(json_form *f, jinja_value pair)
{
    if (pair.kind == JINJA_NONE)
        return;
    if (pair.kind != JINJA_LIST || pair.size != 2 || pair.as.items[0].kind != JINJA_TEXT ||
        pair.as.items[1].kind != JINJA_TEXT) {
        jinja_fail(f->m, KVF_UNSUPPORTED, "tojson with such separators is not known here");
        return;
    }
    f->between = pair.as.items[0];
    f->behind_key = pair.as.items[1];
}

static jinja_value write_out(json_form *f, jinja_value v)
{
    put_value(f, v, 0);
    char *kept = jinja_take(f->m, f->out.size);
    if (kept && f->out.size > 0)
        memcpy(kept, f->out.bytes, f->out.size);
    const jinja_value text = kept ? jinja_text(kept, f->out.size) : jinja_words("");
    kvf_text_free(&f->out);
    return text;
}

jinja_value jinja_repr(jinja_machine *m, jinja_value v)
{
    json_form f = {
        .m = m, .python = true, .between = jinja_words(", "), .behind_key = jinja_words(": ")};
    return write_out(&f, v);
}

jinja_value jinja_to_json(jinja_machine *m, jinja_value v, const jinja_arguments *a)
{
    static const char *const names[] = {"ensure_ascii", "indent", "separators", "sort_keys"};
    enum { ASCII, INDENT, SEPARATORS, SORT, NAMES };
    jinja_value given[NAMES] = {{0}};
    for (uint32_t i = 0; i < a->count; i++) {
        uint32_t which = i;
        for (uint32_t n = 0; n < NAMES && a->names[i].size; n++)
            which = jinja_is(&a->names[i], names[n]) ? n : n == 0 ? (uint32_t)NAMES : which;
        if (which >= NAMES) {
            jinja_fail(m, KVF_UNSUPPORTED, "such arguments of 'tojson' are not known here");
            return v;
        }
        given[which] = a->values[i];
    }
    json_form f = {.m = m, .behind_key = jinja_words(": ")};
    f.ascii = jinja_truth(given[ASCII]);
    f.sorts = jinja_truth(given[SORT]);
    set_indent(&f, given[INDENT]);
    f.between = jinja_words(f.indent.kind == JINJA_TEXT ? "," : ", ");
    if (given[SEPARATORS].kind != JINJA_UNDEFINED)
        set_separators(&f, given[SEPARATORS]);
    return write_out(&f, v);
}
