/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Filters, tests, methods and functions, one table each: what chat templates call, as Python and
 * Jinja define it. Letters change case in ASCII only; elsewhere that is refused.
 *
 * It knows no syntax. Invariant: whatever is not in the tables is an error with its name.
 */

#include "jinja_parts.h"
#include "utf8.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/text.h"

typedef const jinja_arguments *arguments;

/* ---- text ---- */

/* Characters that str.strip() removes: White_Space and 0x1c to 0x1f. */
static bool is_blank(uint32_t code)
{
    return utf8_is_space(code) || (code >= 0x1c && code <= 0x1f);
}

/* Whether strip removes the character at @p at, @p length bytes; @p set is undefined for blanks. */
static bool strips(jinja_value text, size_t at, size_t length, jinja_value set)
{
    uint32_t code = 0;
    if (set.kind != JINJA_TEXT)
        return utf8_decode(text.as.text + at, text.size - at, &code) && is_blank(code);
    for (size_t i = 0; i + length <= set.size; i++)
        if (memcmp(set.as.text + i, text.as.text + at, length) == 0)
            return true;
    return false;
}

static jinja_value strip(jinja_machine *m, jinja_value text, jinja_value set, bool left, bool right)
{
    const size_t size = text.size;
    while (left && text.size > 0) {
        const size_t length = jinja_character(text, 0);
        if (!strips(text, 0, length, set))
            break;
        text.as.text += length;
        text.size -= length;
    }
    while (right && text.size > 0) {
        size_t at = text.size - 1;
        while (at > 0 && ((unsigned char)text.as.text[at] & 0xc0) == 0x80)
            at--;
        if (!strips(text, at, text.size - at, set))
            break;
        text.size = at;
    }
    /* characters that went, and one at each end that did not */
    jinja_spend(m, (size - text.size + 2) * (set.kind == JINJA_TEXT ? 1 + set.size : 1));
    return text;
}

static const char *find(jinja_value text, size_t from, jinja_value what)
{
    return from + what.size <= text.size
               ? memmem(text.as.text + from, text.size - from, what.as.text, what.size)
               : NULL;
}

static bool need_text(jinja_machine *m, jinja_value value, const char *what)
{
    if (value.kind == JINJA_TEXT)
        return true;
    jinja_fail(m, KVF_INVALID, "%s of %s, which is no text", what, jinja_kind_name(value));
    return false;
}

static jinja_value split(jinja_machine *m, jinja_value text, jinja_value by, int64_t max)
{
    size_t count = 1;
    if (by.kind != JINJA_TEXT || by.size == 0) {
        jinja_fail(m, KVF_UNSUPPORTED, "split without a text to split at is not known here");
        return text;
    }
    jinja_spend(m, 2 * text.size);
    for (const char *at = find(text, 0, by); at && (max < 0 || (int64_t)count <= max);
         at = find(text, (size_t)(at - text.as.text) + by.size, by))
        count++;
    jinja_value list = jinja_list_new(m, count);
    size_t from = 0;
    for (size_t i = 0; i < list.size; i++) {
        const char *next = i + 1 < count ? find(text, from, by) : NULL;
        const size_t end = next ? (size_t)(next - text.as.text) : text.size;
        list.as.items[i] = jinja_text(text.as.text + from, end - from);
        from = end + by.size;
    }
    return list;
}

static jinja_value join(jinja_machine *m, jinja_value list, jinja_value between)
{
    jinja_value texts = jinja_list_new(m, list.size);
    for (size_t i = 0; i < texts.size; i++)
        texts.as.items[i] = jinja_string(m, list.as.items[i]);
    return jinja_join_all(m, texts, between);
}

static jinja_value replace(jinja_machine *m, jinja_value text, arguments a)
{
    if (a->count != 2 || a->values[0].size == 0) {
        jinja_fail(m, KVF_UNSUPPORTED, "such a replace is not known here");
        return text;
    }
    if (!need_text(m, a->values[0], "replace") || !need_text(m, a->values[1], "replace"))
        return text;
    return jinja_join_all(m, split(m, text, a->values[0], -1), a->values[1]);
}

typedef enum letters {
    LETTERS_LOWER,
    LETTERS_UPPER,
    LETTERS_FIRST,
    LETTERS_EACH,  /* of words of letters, as str.title() */
    LETTERS_TITLE, /* of what blanks, brackets and hyphens part, as the filter */
} letters;

static jinja_value set_case(jinja_machine *m, jinja_value text, letters how)
{
    char *bytes = jinja_take(m, text.size);
    bool starts_word = true;
    for (size_t i = 0; bytes && i < text.size; i++) {
        const char c = text.as.text[i];
        const bool is_upper = c >= 'A' && c <= 'Z', is_lower = c >= 'a' && c <= 'z';
        const bool raises = how == LETTERS_UPPER || (how == LETTERS_FIRST && i == 0) ||
                            (how >= LETTERS_EACH && starts_word);
        bytes[i] = raises && is_lower ? (char)(c - 32) : !raises && is_upper ? (char)(c + 32) : c;
        starts_word = how == LETTERS_TITLE ? c && (is_blank((unsigned char)c) || strchr("-({[<", c))
                                           : !is_upper && !is_lower;
        if ((unsigned char)c >= 0x80) {
            jinja_fail(m, KVF_UNSUPPORTED, "the case of letters beyond ASCII is not known here");
            break;
        }
    }
    return bytes ? jinja_text(bytes, text.size) : text;
}

/* The argument that the field of a format names: by number, by name, or the next. */
static jinja_value argument_of(jinja_machine *m, jinja_value field, uint32_t *next, arguments a)
{
    uint32_t position = 0, which = field.size ? 0 : (*next)++;
    for (size_t i = 0; i < field.size && field.as.text[i] >= '0' && field.as.text[i] <= '9'; i++)
        which = which < 1000 ? which * 10 + (uint32_t)(field.as.text[i] - '0') : which;
    const bool is_number = field.size == 0 || strspn(field.as.text, "0123456789") >= field.size;
    for (uint32_t i = 0; i < a->count; i++) {
        const jinja_token *name = &a->names[i];
        const bool is_it = name->size ? !is_number && name->size == field.size &&
                                            memcmp(name->bytes, field.as.text, field.size) == 0
                                      : is_number && position == which;
        if (is_it)
            return a->values[i];
        position += name->size == 0;
    }
    jinja_fail(m, memchr(field.as.text, ':', field.size) ? KVF_UNSUPPORTED : KVF_INVALID,
               "a format has the field '{%.*s}', for which there is no argument",
               jinja_shown(field.size), field.as.text);
    return jinja_words("");
}

/* "{} of {name}".format(...), without conversions and specifications. */
static jinja_value format(jinja_machine *m, jinja_value text, arguments a)
{
    uint32_t next = 0;
    jinja_value out = jinja_words("");
    for (size_t at = 0; at < text.size && m->status == KVF_OK;) {
        const char *here = text.as.text + at;
        const size_t left = text.size - at;
        size_t plain = 0;
        while (plain < left && here[plain] != '{' && here[plain] != '}')
            plain++;
        out = jinja_join(m, out, jinja_text(here, plain));
        at += plain;
        if (plain == left)
            break;
        if (plain + 1 < left && here[plain + 1] == here[plain]) {
            out = jinja_join(m, out, jinja_text(here + plain, 1));
            at += 2;
            continue;
        }
        const char *end = here[plain] == '{' ? memchr(here + plain, '}', left - plain) : NULL;
        if (!end) {
            jinja_fail(m, KVF_INVALID, "a format has a single brace");
            break;
        }
        const jinja_value field = jinja_text(here + plain + 1, (size_t)(end - here) - plain - 1);
        out = jinja_join(m, out, jinja_string(m, argument_of(m, field, &next, a)));
        at = (size_t)(end - text.as.text) + 1;
    }
    return out;
}

/* ---- methods ---- */

static bool has_end(jinja_machine *m, jinja_value text, jinja_value part, bool at_start)
{
    if (!need_text(m, part, "startswith or endswith") || part.size > text.size)
        return false;
    jinja_spend(m, part.size);
    const char *at = at_start ? text.as.text : text.as.text + text.size - part.size;
    return part.size == 0 || memcmp(at, part.as.text, part.size) == 0;
}

static jinja_value pairs_of(jinja_machine *m, jinja_value map)
{
    jinja_value list = jinja_list_new(m, (size_t)jinja_length(m, map));
    const jinja_entry *e = map.kind == JINJA_MAP ? map.as.map->first : NULL;
    for (size_t i = 0; e && i < list.size; i++, e = e->next) {
        list.as.items[i] = jinja_list_new(m, 2);
        if (list.as.items[i].size != 2)
            break;
        list.as.items[i].form = LIST_TUPLE;
        list.as.items[i].as.items[0] = jinja_key_value(e);
        list.as.items[i].as.items[1] = e->value;
    }
    return list;
}

static jinja_value of_form(jinja_value list, jinja_form form)
{
    list.form = form;
    return list;
}

static jinja_value values_of(jinja_machine *m, jinja_value map)
{
    jinja_value list = jinja_list_new(m, map.as.map->count);
    const jinja_entry *e = map.as.map->first;
    for (size_t i = 0; e && i < list.size; i++, e = e->next)
        list.as.items[i] = e->value;
    return list;
}

static bool map_method(jinja_machine *m, jinja_value *value, const jinja_token *name, arguments a)
{
    if (jinja_is(name, "get") && a->count >= 1) {
        const jinja_value key = jinja_key(m, a->values[0]);
        const jinja_entry *e =
            key.kind == JINJA_TEXT ? jinja_entry_find(m, *value, key.as.text, key.size) : NULL;
        *value = e ? e->value : a->count > 1 ? a->values[1] : jinja_none();
    } else if (jinja_is(name, "items")) {
        *value = of_form(pairs_of(m, *value), LIST_VIEW);
    } else if (jinja_is(name, "keys")) {
        *value = of_form(jinja_list_of(m, *value), LIST_VIEW);
    } else if (jinja_is(name, "values")) {
        *value = of_form(values_of(m, *value), LIST_VIEW);
    } else {
        return false;
    }
    return true;
}

static bool text_method(jinja_machine *m, jinja_value *value, const jinja_token *name, arguments a)
{
    const jinja_value first = a->count > 0 ? a->values[0] : (jinja_value){0};
    if (jinja_is(name, "strip") || jinja_is(name, "lstrip") || jinja_is(name, "rstrip"))
        *value = strip(m, *value, first, !jinja_is(name, "rstrip"), !jinja_is(name, "lstrip"));
    else if (jinja_is(name, "split"))
        *value =
            split(m, *value, first,
                  a->count > 1 && a->values[1].kind == JINJA_INT ? a->values[1].as.integer : -1);
    else if (jinja_is(name, "startswith") || jinja_is(name, "endswith"))
        *value = jinja_bool(has_end(m, *value, first, jinja_is(name, "startswith")));
    else if (jinja_is(name, "replace"))
        *value = replace(m, *value, a);
    else if (jinja_is(name, "format"))
        *value = format(m, *value, a);
    else if (jinja_is(name, "lower") || jinja_is(name, "upper"))
        *value = set_case(m, *value, jinja_is(name, "upper") ? LETTERS_UPPER : LETTERS_LOWER);
    else if (jinja_is(name, "title") || jinja_is(name, "capitalize"))
        *value = set_case(m, *value, jinja_is(name, "title") ? LETTERS_EACH : LETTERS_FIRST);
    else
        return false;
    return true;
}

/* Whether there are no more arguments than @p max, and none by a name but @p name. */
static bool takes(jinja_machine *m, const jinja_token *of, arguments a, uint32_t max,
                  const char *name)
{
    bool fits = a->count <= max;
    for (uint32_t i = 0; fits && i < a->count; i++)
        fits = a->names[i].size == 0 || (name && jinja_is(&a->names[i], name));
    if (!fits)
        jinja_fail(m, KVF_UNSUPPORTED, "such arguments of '%.*s' are not known here",
                   jinja_shown(of->size), of->bytes);
    return fits;
}

static jinja_value unknown(jinja_machine *m, const char *what, const jinja_token *name)
{
    jinja_fail(m, KVF_UNSUPPORTED, "the %s '%.*s' is not known here", what, jinja_shown(name->size),
               name->bytes);
    return (jinja_value){0};
}

jinja_value jinja_method(jinja_machine *m, jinja_value value, const jinja_token *name, arguments a)
{
    const bool formats = value.kind == JINJA_TEXT && jinja_is(name, "format");
    if (!formats &&
        !takes(m, name, a,
               jinja_is(name, "get") || jinja_is(name, "split") || jinja_is(name, "replace") ? 2
                                                                                             : 1,
               NULL))
        return value;
    if (value.kind == JINJA_MAP && map_method(m, &value, name, a))
        return value;
    if (value.kind == JINJA_TEXT && text_method(m, &value, name, a))
        return value;
    if (value.kind != JINJA_TEXT && value.kind != JINJA_MAP) {
        jinja_fail(m, KVF_INVALID, "'%.*s' is asked of %s", jinja_shown(name->size), name->bytes,
                   jinja_kind_name(value));
        return (jinja_value){0};
    }
    return unknown(m, "method", name);
}

/* ---- tests ---- */

bool jinja_test(jinja_machine *m, const jinja_token *name, jinja_value v, arguments a)
{
    static const struct {
        const char *name;
        uint32_t kinds; /* a bit each */
    } by_kind[] = {
        {"undefined", 1u << JINJA_UNDEFINED},
        {"none", 1u << JINJA_NONE},
        {"boolean", 1u << JINJA_BOOL},
        {"integer", 1u << JINJA_INT},
        {"float", 1u << JINJA_REAL},
        {"number", 1u << JINJA_INT | 1u << JINJA_BOOL | 1u << JINJA_REAL},
        {"string", 1u << JINJA_TEXT},
        {"mapping", 1u << JINJA_MAP},
        {"sequence", 1u << JINJA_TEXT | 1u << JINJA_LIST | 1u << JINJA_MAP},
        {"iterable", 1u << JINJA_TEXT | 1u << JINJA_LIST | 1u << JINJA_MAP | 1u << JINJA_UNDEFINED},
        {"callable", 1u << JINJA_MACRO | 1u << JINJA_UNDEFINED},
    };
    for (size_t i = 0; i < sizeof by_kind / sizeof *by_kind; i++)
        if (jinja_is(name, by_kind[i].name))
            return by_kind[i].kinds >> v.kind & 1u;
    if (jinja_is(name, "defined"))
        return v.kind != JINJA_UNDEFINED;
    if (jinja_is(name, "true") || jinja_is(name, "false"))
        return v.kind == JINJA_BOOL && v.as.truth == jinja_is(name, "true");
    if ((jinja_is(name, "odd") || jinja_is(name, "even")) && v.kind == JINJA_INT)
        return (v.as.integer % 2 != 0) == jinja_is(name, "odd");
    if (a->count == 1) {
        if (jinja_is(name, "equalto") || jinja_is(name, "eq"))
            return jinja_equal(m, v, a->values[0]);
        if (jinja_is(name, "ne"))
            return !jinja_equal(m, v, a->values[0]);
        if (jinja_is(name, "in"))
            return jinja_contains(m, v, a->values[0]);
    }
    unknown(m, "test", name);
    return false;
}

/* ---- filters ---- */

/* selectattr("role", "equalto", "user"), or without a test: whether the member is true. */
static jinja_value select_members(jinja_machine *m, jinja_value value, arguments a, bool wanted)
{
    const jinja_value list = jinja_list_of(m, value);
    jinja_value kept = jinja_list_new(m, list.size);
    if (kept.kind != JINJA_LIST || a->count < 1 || !need_text(m, a->values[0], "selectattr"))
        return kept;
    jinja_arguments rest = {.count = a->count > 2 ? 1 : 0};
    rest.values[0] = a->values[2];
    jinja_token test = {.kind = TOKEN_NAME};
    if (a->count > 1 && need_text(m, a->values[1], "a test")) {
        test.bytes = a->values[1].as.text;
        test.size = a->values[1].size;
    }
    kept.size = 0;
    for (size_t i = 0; i < list.size && m->status == KVF_OK; i++) {
        const jinja_value member =
            jinja_member(m, list.as.items[i], a->values[0].as.text, a->values[0].size);
        const bool holds = test.size ? jinja_test(m, &test, member, &rest) : jinja_truth(member);
        if (holds == wanted)
            kept.as.items[kept.size++] = list.as.items[i];
    }
    return kept;
}

/* map(attribute="content") */
static jinja_value map_members(jinja_machine *m, jinja_value value, arguments a)
{
    const jinja_value list = jinja_list_of(m, value);
    jinja_value out = jinja_list_new(m, list.size);
    if (a->count != 1 || !jinja_is(&a->names[0], "attribute") || a->values[0].kind != JINJA_TEXT) {
        jinja_fail(m, KVF_UNSUPPORTED, "map without attribute=... is not known here");
        return out;
    }
    for (size_t i = 0; i < out.size; i++)
        out.as.items[i] =
            jinja_member(m, list.as.items[i], a->values[0].as.text, a->values[0].size);
    return out;
}

/* items of something undefined are none. */
static jinja_value no_pairs(jinja_machine *m, jinja_value value)
{
    if (value.kind != JINJA_UNDEFINED)
        jinja_fail(m, KVF_INVALID, "items of %s", jinja_kind_name(value));
    return jinja_list_new(m, 0);
}

/* dictsort: pairs by key, whatever the case of its letters. */
static jinja_value sort_pairs(jinja_machine *m, jinja_value map)
{
    const jinja_value pairs = pairs_of(m, map);
    const jinja_value keys = jinja_list_new(m, pairs.size);
    if (map.kind != JINJA_MAP || keys.size != pairs.size)
        return pairs;
    jinja_spend(m, pairs.size * pairs.size);
    for (size_t i = 0; i < pairs.size && m->status == KVF_OK; i++) {
        const jinja_value pair = pairs.as.items[i], key = pair.as.items[0];
        const jinja_value folded = key.kind == JINJA_TEXT ? set_case(m, key, LETTERS_LOWER) : key;
        size_t at = i;
        for (; at > 0 && jinja_compare(m, folded, keys.as.items[at - 1]) < 0; at--) {
            keys.as.items[at] = keys.as.items[at - 1];
            pairs.as.items[at] = pairs.as.items[at - 1];
        }
        keys.as.items[at] = folded;
        pairs.as.items[at] = pair;
    }
    return pairs;
}

static jinja_value of_list(jinja_machine *m, const jinja_token *name, jinja_value value,
                           arguments a)
{
    static const char *const chosen[] = {"selectattr", "rejectattr", "map", NULL};
    if (jinja_is_any(name, chosen) && !jinja_truth(value))
        value = jinja_list_new(m, 0); /* none, too, as Jinja has it */
    if (jinja_is(name, "dictsort"))
        return sort_pairs(m, value);
    if (jinja_is(name, "selectattr") || jinja_is(name, "rejectattr"))
        return of_form(select_members(m, value, a, jinja_is(name, "selectattr")), LIST_GENERATOR);
    if (jinja_is(name, "map"))
        return of_form(map_members(m, value, a), LIST_GENERATOR);
    if (jinja_is(name, "list"))
        return of_form(jinja_list_of(m, value), LIST_PLAIN);
    if (jinja_is(name, "items"))
        return of_form(value.kind == JINJA_MAP ? pairs_of(m, value) : no_pairs(m, value),
                       LIST_GENERATOR);
    if (jinja_is(name, "join"))
        return join(m, jinja_list_of(m, value), a->count > 0 ? a->values[0] : (jinja_value){0});
    const jinja_value list = jinja_list_of(m, value);
    if (list.size == 0)
        return (jinja_value){0};
    return list.as.items[jinja_is(name, "last") ? list.size - 1 : 0];
}

/*
 * The part of a text that int(value) and int(float(value)) take: digits with a sign, a point, an
 * exponent.
 */
static bool parse_number(jinja_value text, double *out)
{
    char copy[64], *end;
    while (text.size > 0 && is_blank((unsigned char)text.as.text[0]))
        text = jinja_text(text.as.text + 1, text.size - 1);
    while (text.size > 0 && is_blank((unsigned char)text.as.text[text.size - 1]))
        text.size--;
    if (text.size == 0 || text.size >= sizeof copy)
        return false;
    memcpy(copy, text.as.text, text.size);
    copy[text.size] = '\0';
    if (strspn(copy, "0123456789+-.eE") != text.size)
        return false;
    *out = kvf_real_of(copy, &end);
    return *end == '\0';
}

/* int, or int(default): whatever is no number becomes the default. */
static jinja_value to_int(jinja_machine *m, jinja_value v, arguments a)
{
    const jinja_value other = a->count > 0 ? a->values[0] : jinja_int(0);
    double number = 0;
    if (v.kind == JINJA_INT || v.kind == JINJA_BOOL)
        return jinja_int(v.kind == JINJA_INT ? v.as.integer : v.as.truth);
    if (v.kind == JINJA_UNDEFINED) {
        jinja_fail(m, KVF_INVALID, "int of something undefined");
        return other;
    }
    if (v.kind == JINJA_REAL)
        number = v.as.real;
    else if (v.kind != JINJA_TEXT || !parse_number(v, &number))
        return other;
    if (number > -0x1p53 && number < 0x1p53)
        return jinja_int((int64_t)number);
    jinja_fail(m, KVF_UNSUPPORTED, "a whole number beyond 2^53 is not known here");
    return other;
}

jinja_value jinja_filter(jinja_machine *m, const jinja_token *name, jinja_value v, arguments a)
{
    static const char *const lists[] = {"selectattr", "rejectattr", "list", "items",    "join",
                                        "first",      "last",       "map",  "dictsort", NULL};
    static const char *const methods[] = {"upper", "lower", "capitalize", "replace", NULL};
    const bool selects = jinja_is(name, "selectattr") || jinja_is(name, "rejectattr");
    const bool two = jinja_is(name, "replace") || jinja_is(name, "default") || jinja_is(name, "d");
    if (jinja_is(name, "tojson"))
        return jinja_to_json(m, v, a);
    const bool alone = jinja_is(name, "dictsort");
    if (!takes(m, name, a,
               selects ? 3
               : two   ? 2
               : alone ? 0
                       : 1,
               jinja_is(name, "map") ? "attribute" : NULL))
        return v;
    if (jinja_is_any(name, lists))
        return of_list(m, name, v, a);
    if (jinja_is_any(name, methods)) {
        v = jinja_string(m, v);
        return text_method(m, &v, name, a) ? v : unknown(m, "filter", name);
    }
    if (jinja_is(name, "trim"))
        return strip(m, jinja_string(m, v), a->count > 0 ? a->values[0] : (jinja_value){0}, true,
                     true);
    if (jinja_is(name, "title"))
        return set_case(m, jinja_string(m, v), LETTERS_TITLE);
    if (jinja_is(name, "string") || jinja_is(name, "safe"))
        return jinja_string(m, v);
    if (jinja_is(name, "int"))
        return to_int(m, v, a);
    if (jinja_is(name, "length") || jinja_is(name, "count"))
        return jinja_int(jinja_length(m, v));
    if (jinja_is(name, "default") || jinja_is(name, "d")) {
        const bool also_false = a->count > 1 && jinja_truth(a->values[1]);
        const bool absent = v.kind == JINJA_UNDEFINED || (also_false && !jinja_truth(v));
        return !absent ? v : a->count > 0 ? a->values[0] : jinja_words("");
    }
    return unknown(m, "filter", name);
}

/* ---- functions ---- */

static const char *const months[] = {"January",   "February", "March",    "April",
                                     "May",       "June",     "July",     "August",
                                     "September", "October",  "November", "December"};

/* strftime for a day, in English whatever the locale. */
static jinja_value format_day(jinja_machine *m, jinja_value format)
{
    char text[256];
    size_t used = 0;
    const jinja_day *d = &m->day;
    for (size_t i = 0; i < format.size && used + 24 < sizeof text; i++) {
        const char c = format.as.text[i];
        if (c != '%' || i + 1 == format.size) {
            text[used++] = c;
            continue;
        }
        const char what = format.as.text[++i];
        const char *month = months[(d->month + 11) % 12];
        int size = 0;
        if (what == 'd' || what == 'm')
            size = snprintf(text + used, 8, "%02u", (what == 'd' ? d->day : d->month) % 100);
        else if (what == 'Y')
            size = snprintf(text + used, 12, "%04u", d->year);
        else if (what == 'y')
            size = snprintf(text + used, 8, "%02u", d->year % 100);
        else if (what == 'B' || what == 'b')
            size = snprintf(text + used, 16, "%.*s", what == 'b' ? 3 : 9, month);
        else
            jinja_fail(m, KVF_UNSUPPORTED, "strftime_now with %%%c is not known here", what);
        used += (size_t)size;
    }
    char *kept = jinja_take(m, used);
    if (!kept)
        return jinja_words("");
    memcpy(kept, text, used);
    return jinja_text(kept, used);
}

static jinja_value new_namespace(jinja_machine *m, arguments a)
{
    jinja_value map = jinja_map_new(m);
    for (uint32_t i = 0; map.kind == JINJA_MAP && i < a->count; i++)
        if (a->names[i].size == 0)
            jinja_fail(m, KVF_UNSUPPORTED, "a namespace of a mapping is not known here");
        else
            jinja_map_set(m, map.as.map, a->names[i].bytes, a->names[i].size, a->values[i]);
    if (map.kind == JINJA_MAP)
        map.as.map->is_namespace = true;
    return map;
}

/* range(end), range(start, end), range(start, end, step) */
static jinja_value range(jinja_machine *m, arguments a)
{
    enum { RANGE_MAX = 100000 };
    int64_t numbers[3] = {0, 0, 1};
    bool fits = a->count >= 1 && a->count <= 3;
    for (uint32_t i = 0; fits && i < a->count; i++) {
        numbers[a->count == 1 ? 1 : i] = a->values[i].as.integer;
        fits = a->values[i].kind == JINJA_INT && a->values[i].as.integer >= -RANGE_MAX &&
               a->values[i].as.integer <= RANGE_MAX;
    }
    const int64_t from = numbers[0], to = numbers[1], step = numbers[2];
    if (!fits || step == 0) {
        jinja_fail(m, KVF_UNSUPPORTED, "such a range is not known here");
        return (jinja_value){0};
    }
    size_t count = 0;
    for (int64_t i = from; step > 0 ? i < to : i > to; i += step)
        count++;
    jinja_value list = jinja_list_new(m, count);
    for (size_t i = 0; i < list.size; i++)
        list.as.items[i] = jinja_int(from + (int64_t)i * step);
    return of_form(list, LIST_VIEW);
}

jinja_value jinja_function_value(const jinja_machine *m, const jinja_token *name)
{
    static const char *const names[] = {"raise_exception", "namespace", "range", NULL};
    if (!jinja_is_any(name, names) && !(jinja_is(name, "strftime_now") && m->has_day))
        return (jinja_value){0};
    return (jinja_value){.kind = JINJA_MACRO, .as.macro = JINJA_BUILT_IN};
}

jinja_value jinja_function(jinja_machine *m, const jinja_token *name, arguments a)
{
    const jinja_value first = a->count > 0 ? a->values[0] : (jinja_value){0};
    if (jinja_is(name, "raise_exception")) {
        const jinja_value text = jinja_string(m, first);
        jinja_fail(m, KVF_INVALID, "it refuses these messages: %.*s",
                   (int)(text.size < 150 ? text.size : 150), text.as.text);
        return (jinja_value){0};
    }
    if (jinja_is(name, "strftime_now") && m->has_day && need_text(m, first, "strftime_now"))
        return format_day(m, first);
    if (jinja_is(name, "namespace"))
        return new_namespace(m, a);
    if (jinja_is(name, "range"))
        return range(m, a);
    return unknown(m, "function", name);
}
