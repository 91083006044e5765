/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Values as Python has them: truth, equality, order, members, slices, and how they are written.
 *
 * It knows no syntax. Invariant: a list and a text are never changed; a map only by those who made
 * it.
 */

#include "jinja_parts.h"
#include "utf8.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

const char *jinja_kind_name(jinja_value value)
{
    static const char *const names[] = {
        [JINJA_UNDEFINED] = "undefined", [JINJA_NONE] = "none",     [JINJA_BOOL] = "a boolean",
        [JINJA_INT] = "a number",        [JINJA_REAL] = "a number", [JINJA_TEXT] = "text",
        [JINJA_LIST] = "a list",         [JINJA_MAP] = "a mapping", [JINJA_MACRO] = "a macro"};
    return names[value.kind];
}

/* ---- numbers ---- */

static bool is_number(jinja_value v)
{
    return v.kind == JINJA_INT || v.kind == JINJA_BOOL || v.kind == JINJA_REAL;
}

static int64_t number(jinja_value v)
{
    return v.kind == JINJA_BOOL ? v.as.truth : v.as.integer;
}

/* -1, 0 or 1. Whole numbers beyond 2^53 are compared with others to rounding. */
static int order_of(jinja_value a, jinja_value b)
{
    if (a.kind != JINJA_REAL && b.kind != JINJA_REAL)
        return (number(a) > number(b)) - (number(a) < number(b));
    const double x = a.kind == JINJA_REAL ? a.as.real : (double)number(a);
    const double y = b.kind == JINJA_REAL ? b.as.real : (double)number(b);
    return (x > y) - (x < y);
}

/* ---- making ---- */

jinja_value jinja_bool(bool truth)
{
    return (jinja_value){.kind = JINJA_BOOL, .as.truth = truth};
}

jinja_value jinja_none(void)
{
    return (jinja_value){.kind = JINJA_NONE};
}

jinja_value jinja_int(int64_t integer)
{
    return (jinja_value){.kind = JINJA_INT, .as.integer = integer};
}

jinja_value jinja_real(double real)
{
    return (jinja_value){.kind = JINJA_REAL, .as.real = real};
}

jinja_value jinja_text(const char *bytes, size_t size)
{
    return (jinja_value){.kind = JINJA_TEXT, .size = size, .as.text = bytes};
}

jinja_value jinja_words(const char *text)
{
    return jinja_text(text, strlen(text));
}

jinja_value jinja_list_new(jinja_machine *m, size_t count)
{
    jinja_value *items =
        count < SIZE_MAX / sizeof *items ? jinja_take(m, count * sizeof *items) : NULL;
    if (!items)
        return (jinja_value){0};
    for (size_t i = 0; i < count; i++)
        items[i] = (jinja_value){0};
    return (jinja_value){.kind = JINJA_LIST, .size = count, .as.items = items};
}

jinja_value jinja_map_new(jinja_machine *m)
{
    jinja_map *map = jinja_take(m, sizeof *map);
    if (!map)
        return (jinja_value){0};
    *map = (jinja_map){0};
    return (jinja_value){.kind = JINJA_MAP, .as.map = map};
}

/* A whole number as a key begins with a byte that no text has. */
#define NUMBER_KEY '\xff'

jinja_value jinja_key(jinja_machine *m, jinja_value key)
{
    if (key.kind == JINJA_TEXT)
        return key;
    if (key.kind != JINJA_INT && key.kind != JINJA_BOOL)
        return (jinja_value){0};
    static const char mark[1] = {NUMBER_KEY}; /* it is the key where digits have no room */
    const jinja_value digits = jinja_string(m, jinja_int(number(key)));
    return jinja_join(m, jinja_text(mark, 1), digits);
}

/* Text that is no UTF-8 may begin with that byte as well: it stays text unless a number follows. */
jinja_value jinja_key_value(const jinja_entry *entry)
{
    const jinja_value text = jinja_text(entry->key, entry->key_size);
    int64_t value = 0;
    if (entry->key_size < 2 || entry->key[0] != NUMBER_KEY)
        return text;
    const bool is_below = entry->key[1] == '-';
    for (size_t i = 1 + is_below; i < entry->key_size; i++) {
        const int digit = entry->key[i] - '0';
        if (digit < 0 || digit > 9 || __builtin_mul_overflow(value, 10, &value) ||
            __builtin_add_overflow(value, is_below ? -digit : digit, &value))
            return text;
    }
    return jinja_int(value);
}

jinja_entry *jinja_entry_find(jinja_machine *m, jinja_value map, const char *key, size_t size)
{
    if (map.kind != JINJA_MAP)
        return NULL;
    size_t looked_at = 0;
    jinja_entry *e = map.as.map->first;
    for (; e; e = e->next) {
        looked_at += e->key_size == size ? 1 + size : 1;
        if (e->key_size == size && memcmp(e->key, key, size) == 0)
            break;
    }
    jinja_spend(m, looked_at);
    return e;
}

void jinja_map_set(jinja_machine *m, jinja_map *map, const char *key, size_t size,
                   jinja_value value)
{
    jinja_entry *entry =
        jinja_entry_find(m, (jinja_value){.kind = JINJA_MAP, .as.map = map}, key, size);
    if (entry) {
        entry->value = value;
        return;
    }
    map->count++;
    entry = jinja_take(m, sizeof *entry);
    if (!entry)
        return;
    *entry = (jinja_entry){.key = key, .key_size = size, .value = value};
    if (map->last)
        map->last->next = entry;
    else
        map->first = entry;
    map->last = entry;
}

void jinja_map_put(jinja_machine *m, jinja_value map, const char *key, jinja_value value)
{
    if (map.kind == JINJA_MAP)
        jinja_map_set(m, map.as.map, key, strlen(key), value);
}

/* ---- asking ---- */

bool jinja_truth(jinja_value v)
{
    switch (v.kind) {
    case JINJA_BOOL:
        return v.as.truth;
    case JINJA_INT:
        return v.as.integer != 0;
    case JINJA_REAL:
        return v.as.real != 0;
    case JINJA_TEXT:
    case JINJA_LIST:
        return v.size != 0 || v.form == LIST_GENERATOR;
    case JINJA_MAP:
        return v.as.map->first || v.as.map->is_namespace;
    case JINJA_MACRO:
        return true;
    default:
        return false;
    }
}

static bool equal_maps(jinja_machine *m, jinja_value a, jinja_value b)
{
    if (a.as.map == b.as.map || a.as.map->is_namespace || b.as.map->is_namespace)
        return a.as.map == b.as.map;
    if (a.as.map->count != b.as.map->count)
        return false;
    for (const jinja_entry *e = a.as.map->first; e && m->status == KVF_OK; e = e->next) {
        const jinja_entry *other = jinja_entry_find(m, b, e->key, e->key_size);
        if (!other || !jinja_equal(m, e->value, other->value))
            return false;
    }
    return true;
}

bool jinja_equal(jinja_machine *m, jinja_value a, jinja_value b)
{
    jinja_spend(m, a.kind == JINJA_TEXT && b.kind == JINJA_TEXT ? a.size : 0);
    if (is_number(a) && is_number(b))
        return order_of(a, b) == 0;
    if (a.kind != b.kind)
        return false;
    if (a.kind == JINJA_TEXT)
        return a.size == b.size && (a.size == 0 || memcmp(a.as.text, b.as.text, a.size) == 0);
    if (a.kind == JINJA_MACRO)
        return a.as.macro == b.as.macro;
    if (a.kind != JINJA_LIST && a.kind != JINJA_MAP)
        return true;
    if (!jinja_enter(m))
        return false;
    bool same = a.kind == JINJA_MAP ? equal_maps(m, a, b) : a.size == b.size && a.form == b.form;
    for (size_t i = 0; a.kind == JINJA_LIST && same && i < a.size; i++)
        same = jinja_equal(m, a.as.items[i], b.as.items[i]);
    jinja_leave(m);
    return same;
}

int jinja_compare(jinja_machine *m, jinja_value a, jinja_value b)
{
    if (is_number(a) && is_number(b))
        return order_of(a, b);
    if (a.kind == JINJA_TEXT && b.kind == JINJA_TEXT) {
        const size_t size = a.size < b.size ? a.size : b.size;
        jinja_spend(m, size);
        const int order = size ? memcmp(a.as.text, b.as.text, size) : 0;
        return order ? order : (a.size > b.size) - (a.size < b.size);
    }
    jinja_fail(m, KVF_INVALID, "%s and %s have no order", jinja_kind_name(a), jinja_kind_name(b));
    return 0;
}

bool jinja_contains(jinja_machine *m, jinja_value inner, jinja_value outer)
{
    jinja_spend(m, outer.kind == JINJA_TEXT ? outer.size : 0);
    if (outer.kind == JINJA_TEXT && inner.kind == JINJA_TEXT)
        return inner.size == 0 ||
               (outer.size && memmem(outer.as.text, outer.size, inner.as.text, inner.size));
    if (outer.kind == JINJA_MAP) {
        const jinja_value key = jinja_key(m, inner);
        return key.kind == JINJA_TEXT && jinja_entry_find(m, outer, key.as.text, key.size);
    }
    if (outer.kind == JINJA_LIST) {
        for (size_t i = 0; i < outer.size; i++)
            if (jinja_equal(m, inner, outer.as.items[i]))
                return true;
        return false;
    }
    if (outer.kind != JINJA_UNDEFINED)
        jinja_fail(m, KVF_INVALID, "'in' looks for %s in %s", jinja_kind_name(inner),
                   jinja_kind_name(outer));
    return false;
}

/* ---- text ---- */

jinja_value jinja_string(jinja_machine *m, jinja_value v)
{
    if (v.kind == JINJA_TEXT)
        return v;
    if (v.kind == JINJA_UNDEFINED)
        return jinja_words("");
    if (v.kind == JINJA_NONE)
        return jinja_words("None");
    if (v.kind == JINJA_BOOL)
        return jinja_words(v.as.truth ? "True" : "False");
    if (v.kind == JINJA_REAL)
        return jinja_real_text(m, v.as.real);
    if (v.kind == JINJA_LIST || (v.kind == JINJA_MAP && !v.as.map->is_namespace))
        return jinja_repr(m, v);
    if (v.kind != JINJA_INT) {
        jinja_fail(m, KVF_UNSUPPORTED, "%s is written out, which is not known here",
                   jinja_kind_name(v));
        return jinja_words("");
    }
    char *digits = jinja_take(m, 24);
    return digits ? jinja_text(digits, (size_t)snprintf(digits, 24, "%" PRId64, v.as.integer))
                  : jinja_words("");
}

jinja_value jinja_join(jinja_machine *m, jinja_value a, jinja_value b)
{
    if (a.size == 0 || b.size == 0)
        return a.size == 0 ? b : a;
    char *bytes = jinja_take(m, a.size + b.size);
    if (!bytes)
        return jinja_words("");
    memcpy(bytes, a.as.text, a.size);
    memcpy(bytes + a.size, b.as.text, b.size);
    return jinja_text(bytes, a.size + b.size);
}

jinja_value jinja_join_all(jinja_machine *m, jinja_value texts, jinja_value between)
{
    const size_t gap = between.kind == JINJA_TEXT ? between.size : 0;
    size_t size = 0;
    for (size_t i = 0; i < texts.size; i++)
        if (__builtin_add_overflow(size, texts.as.items[i].size + (i > 0 ? gap : 0), &size))
            size = SIZE_MAX; /* more than there may be */
    char *bytes = jinja_take(m, size), *to = bytes;
    for (size_t i = 0; bytes && i < texts.size; i++) {
        const jinja_value text = texts.as.items[i];
        if (i > 0 && gap > 0)
            to = (char *)memcpy(to, between.as.text, gap) + gap;
        if (text.size > 0)
            to = (char *)memcpy(to, text.as.text, text.size) + text.size;
    }
    return bytes ? jinja_text(bytes, size) : jinja_words("");
}

jinja_value jinja_join_texts(jinja_machine *m, jinja_value texts, const char *between)
{
    return jinja_join_all(m, texts, jinja_words(between));
}

size_t jinja_character(jinja_value text, size_t at)
{
    uint32_t code;
    const size_t length = utf8_decode(text.as.text + at, text.size - at, &code);
    return length ? length : 1;
}

int64_t jinja_length(jinja_machine *m, jinja_value v)
{
    int64_t count = 0;
    if (v.kind == JINJA_LIST && v.form == LIST_GENERATOR)
        jinja_fail(m, KVF_INVALID, "what a filter chooses has no length");
    if (v.kind == JINJA_LIST)
        return (int64_t)v.size;
    jinja_spend(m, v.kind == JINJA_TEXT ? v.size : 0);
    if (v.kind == JINJA_TEXT) {
        for (size_t at = 0; at < v.size; at += jinja_character(v, at))
            count++;
    } else if (v.kind == JINJA_MAP) {
        count = (int64_t)v.as.map->count;
    } else if (v.kind != JINJA_UNDEFINED) {
        jinja_fail(m, KVF_INVALID, "%s has no length", jinja_kind_name(v));
    }
    return count;
}

/* ---- members ---- */

jinja_value jinja_member(jinja_machine *m, jinja_value v, const char *key, size_t size)
{
    const jinja_entry *entry = jinja_entry_find(m, v, key, size);
    if (v.kind == JINJA_UNDEFINED)
        jinja_fail(m, KVF_INVALID, "'%.*s' is asked of something undefined", jinja_shown(size),
                   key);
    return entry ? entry->value : (jinja_value){0};
}

jinja_value jinja_list_of(jinja_machine *m, jinja_value v)
{
    if (v.kind == JINJA_LIST)
        return v;
    if (v.kind == JINJA_UNDEFINED)
        return jinja_list_new(m, 0);
    if (v.kind != JINJA_TEXT && v.kind != JINJA_MAP) {
        jinja_fail(m, KVF_INVALID, "a loop over %s", jinja_kind_name(v));
        return (jinja_value){0};
    }
    jinja_value list = jinja_list_new(m, (size_t)jinja_length(m, v));
    if (list.kind != JINJA_LIST)
        return list;
    size_t i = 0;
    if (v.kind == JINJA_MAP) {
        for (const jinja_entry *e = v.as.map->first; e; e = e->next)
            list.as.items[i++] = jinja_key_value(e);
        return list;
    }
    for (size_t at = 0; at < v.size; i++) {
        const size_t length = jinja_character(v, at);
        list.as.items[i] = jinja_text(v.as.text + at, length);
        at += length;
    }
    return list;
}

jinja_value jinja_item(jinja_machine *m, jinja_value v, jinja_value index)
{
    if (index.kind == JINJA_TEXT || v.kind == JINJA_UNDEFINED)
        return jinja_member(m, v, index.kind == JINJA_TEXT ? index.as.text : "",
                            index.kind == JINJA_TEXT ? index.size : 0);
    if (v.kind == JINJA_MAP) {
        const jinja_value key = jinja_key(m, index);
        return jinja_member(m, v, key.as.text, key.size);
    }
    if (index.kind != JINJA_INT || (v.kind != JINJA_LIST && v.kind != JINJA_TEXT))
        return (jinja_value){0};
    const jinja_value list = jinja_list_of(m, v);
    const int64_t size = (int64_t)list.size;
    int64_t at = index.as.integer;
    if (at < 0)
        at += size;
    return at >= 0 && at < size ? list.as.items[at] : (jinja_value){0};
}

/* A bound of a slice, as Python clips it. */
static int64_t clip(jinja_value bound, int64_t absent, int64_t size, int64_t step)
{
    if (bound.kind != JINJA_INT)
        return absent;
    int64_t at = bound.as.integer;
    const int64_t low = step < 0 ? -1 : 0, high = step < 0 ? size - 1 : size;
    if (at < 0)
        at = at < -size ? low : at + size;
    return at < low ? low : at > high ? high : at;
}

jinja_value jinja_slice(jinja_machine *m, jinja_value v, const jinja_value bounds[3])
{
    if (v.kind == JINJA_UNDEFINED) {
        jinja_fail(m, KVF_INVALID, "a slice of something undefined");
        return v;
    }
    const jinja_value list = jinja_list_of(m, v);
    const int64_t step = bounds[2].kind == JINJA_INT ? bounds[2].as.integer : 1;
    const int64_t size = (int64_t)list.size;
    if (step == 0 || step > size + 1 || step < -size - 1 || v.kind == JINJA_MAP) {
        jinja_fail(m, KVF_UNSUPPORTED, "such a slice of %s is not known here", jinja_kind_name(v));
        return (jinja_value){0};
    }
    const int64_t from = clip(bounds[0], step < 0 ? size - 1 : 0, size, step);
    const int64_t to = clip(bounds[1], step < 0 ? -1 : size, size, step);
    size_t count = 0;
    for (int64_t i = from; step < 0 ? i > to : i < to; i += step)
        count++;
    jinja_value out = jinja_list_new(m, count);
    if (out.kind != JINJA_LIST)
        return out;
    out.form = v.kind == JINJA_LIST ? v.form : LIST_PLAIN;
    for (size_t i = 0; i < count; i++)
        out.as.items[i] = list.as.items[from + (int64_t)i * step];
    if (v.kind != JINJA_TEXT)
        return out;
    if (count == 0)
        return jinja_words("");
    if (step == 1) /* neighbours in the text */
        return jinja_text(out.as.items[0].as.text,
                          (size_t)(out.as.items[count - 1].as.text - out.as.items[0].as.text) +
                              out.as.items[count - 1].size);
    return jinja_join_all(m, out, (jinja_value){0});
}
