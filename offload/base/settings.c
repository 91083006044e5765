/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Settings as text, from text, and against their ranges; what the rows say, and nothing else.
 *
 * Knows no struct of settings. A field is only written when the whole text is right.
 */

#include "settings.h"

#include <errno.h>
#include <float.h>
#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/text.h"

#define TEXT_MAX 64u
#define WORD_MAX 48u

static uint32_t elements(const kvf_setting *s)
{
    return s->count > 1 ? s->count : 1;
}

static bool is_real(const kvf_setting *s)
{
    return s->kind == KVF_SETTING_REAL || s->kind == KVF_SETTING_SHARE;
}

static uint32_t element_bytes(const kvf_setting *s)
{
    return s->bytes / elements(s);
}

/* ---- fields of a struct ---- */

typedef union value {
    uint64_t whole; /* signed where low is negative */
    double real;
} value;

static value get(const kvf_setting *s, const void *config, uint32_t index)
{
    const uint32_t bytes = element_bytes(s);
    const char *at = (const char *)config + s->offset + index * bytes;
    uint32_t word = 0;
    uint8_t byte = 0;
    float real = 0;
    value v = {0};
    if (bytes == 8) {
        memcpy(&v, at, sizeof v);
    } else if (is_real(s)) {
        memcpy(&real, at, sizeof real);
        v.real = (double)real;
    } else if (bytes == 4) {
        memcpy(&word, at, sizeof word);
        v.whole = s->low < 0 ? (uint64_t)(int32_t)word : word;
    } else {
        memcpy(&byte, at, sizeof byte);
        v.whole = byte;
    }
    return v;
}

static void put(const kvf_setting *s, void *config, uint32_t index, value v)
{
    const uint32_t bytes = element_bytes(s), word = (uint32_t)v.whole;
    const uint8_t byte = (uint8_t)v.whole;
    char *at = (char *)config + s->offset + index * bytes;
    if (bytes == 8) {
        memcpy(at, &v, sizeof v);
    } else if (is_real(s)) {
        const float real = (float)v.real;
        memcpy(at, &real, sizeof real);
    } else if (bytes == 4) {
        memcpy(at, &word, sizeof word);
    } else {
        memcpy(at, &byte, sizeof byte);
    }
}

static double number(const kvf_setting *s, value v)
{
    if (is_real(s))
        return v.real;
    return s->low < 0 ? (double)(int64_t)v.whole : (double)v.whole;
}

/* ---- ranges ---- */

static bool is_special(const kvf_setting *s, value v)
{
    return s->special && number(s, v) == s->special_value;
}

/* Comparisons with NaN are false. A share that is 0 as the field holds it is none. */
static bool is_in_range(const kvf_setting *s, value v)
{
    const double x = number(s, v);
    if (s->kind == KVF_SETTING_POWER && (v.whole & (v.whole - 1)))
        return false;
    if (s->kind == KVF_SETTING_SHARE)
        return (element_bytes(s) == 4 ? (double)(float)x : x) > s->low && x <= s->high;
    if (s->kind == KVF_SETTING_SWITCH)
        return v.whole <= 1;
    return x >= s->low && x <= s->high;
}

/* "a, b or c" of the names, or of the powers of two. */
static void list(const kvf_setting *s, char *text, size_t capacity)
{
    const char *words[TEXT_MAX];
    char numbers[TEXT_MAX][12];
    size_t count = 0, used = 0;
    for (; s->names && s->names[count] && count < TEXT_MAX; count++)
        words[count] = s->names[count];
    for (uint32_t x = (uint32_t)s->low; !s->names && x <= s->high && count < TEXT_MAX; x *= 2) {
        snprintf(numbers[count], sizeof numbers[count], "%u", x);
        words[count] = numbers[count];
        count++;
    }
    while (count > 0 && !words[count - 1][0])
        count--;
    text[0] = '\0';
    for (size_t i = 0; i < count && used < capacity; i++)
        if (words[i][0])
            used += (size_t)snprintf(text + used, capacity - used, "%s%s",
                                     used == 0        ? ""
                                     : i + 1 == count ? " or "
                                                      : ", ",
                                     words[i]);
}

/* Whether there is a setting to write of, and room for a text, which begins empty. */
static bool has_room(const kvf_setting *s, char *text, size_t capacity)
{
    if (text && capacity)
        text[0] = '\0';
    return s && text && capacity;
}

const char *kvf_setting_range(const kvf_setting *s, char *text, size_t capacity)
{
    if (!has_room(s, text, capacity))
        return "";
    const char *what = s->count == 3 ? "three numbers, each" : "a number";
    switch (s->kind) {
    case KVF_SETTING_WHOLE:
        if (s->high >= 0x1p64) /* which no number of 64 bits is */
            kvf_format(text, capacity, "a whole number from %.0f to %" PRIu64, s->low, UINT64_MAX);
        else
            kvf_format(text, capacity, "a whole number from %.0f to %.0f", s->low, s->high);
        break;
    case KVF_SETTING_REAL:
        if (s->high >= (double)FLT_MAX)
            kvf_format(text, capacity, "%s at least %g", what, s->low);
        else
            kvf_format(text, capacity, "%s from %g to %g", what, s->low, s->high);
        break;
    case KVF_SETTING_SHARE:
        kvf_format(text, capacity, "%s above %g, at most %g", what, s->low, s->high);
        break;
    case KVF_SETTING_SWITCH:
        snprintf(text, capacity, "on or off");
        break;
    case KVF_SETTING_TEXT:
        snprintf(text, capacity, "a text");
        break;
    case KVF_SETTING_POWER:
    case KVF_SETTING_NAME:
        list(s, text, capacity);
        break;
    }
    if (s->special && s->kind != KVF_SETTING_TEXT) {
        const size_t used = strlen(text);
        snprintf(text + used, capacity - used, ", or %s", s->special);
    }
    return text;
}

bool kvf_settings_wrong(const kvf_setting *rows, size_t count, const void *config, char *text,
                        size_t capacity)
{
    char shown[TEXT_MAX], range[256], index[16];
    for (size_t i = 0; i < count; i++) {
        const kvf_setting *s = &rows[i];
        for (uint32_t k = 0; s->kind != KVF_SETTING_TEXT && k < elements(s); k++) {
            const value v = get(s, config, k);
            if (is_special(s, v) || is_in_range(s, v))
                continue;
            snprintf(index, sizeof index, "[%u]", k);
            kvf_format(shown, sizeof shown, is_real(s) ? "%g" : "%.0f", number(s, v));
            snprintf(text, capacity, "%s%s = %s: must be %s (%s)", s->name,
                     s->count > 1 ? index : "", shown, kvf_setting_range(s, range, sizeof range),
                     s->meaning);
            return true;
        }
    }
    return false;
}

/* ---- text ---- */

static bool parse_whole(const kvf_setting *s, const char *word, value *out)
{
    static const char units[] = "KMG";
    const int is_negative = s->low < 0 && word[0] == '-';
    char *end = NULL;
    errno = 0;
    word += is_negative;
    if (!kvf_is_digit(word[0]))
        return false;
    unsigned long long x = strtoull(word, &end, 10);
    const char *unit = *end ? strchr(units, kvf_upper(*end)) : NULL;
    const int shift = unit ? 10 * (int)(unit - units + 1) : 0;
    end += unit ? (strcmp(end + 1, "iB") == 0 ? 3 : 1) : 0;
    if (errno || end[0] || x > UINT64_MAX >> shift)
        return false;
    x <<= shift;
    out->whole = is_negative ? (uint64_t)0 - x : x;
    return !is_negative || x <= INT32_MAX;
}

static bool parse_real(const char *word, value *out)
{
    char *end = NULL;
    errno = 0;
    if (kvf_is_space(word[0]))
        return false;
    out->real = kvf_real_of(word, &end);
    return end != word && !*end && !errno;
}

static bool parse_name(const kvf_setting *s, const char *word, value *out)
{
    for (out->whole = 0; word[0] && s->names[out->whole]; out->whole++)
        if (strcmp(s->names[out->whole], word) == 0)
            return true;
    return false;
}

static bool parse_word(const kvf_setting *s, const char *word, value *out)
{
    *out = (value){0};
    if (s->special && strcmp(word, s->special) == 0) {
        if (is_real(s))
            out->real = s->special_value;
        else
            out->whole = (uint64_t)s->special_value;
        return true;
    }
    if (s->kind == KVF_SETTING_NAME)
        return parse_name(s, word, out);
    const bool is_switch = s->kind == KVF_SETTING_SWITCH;
    out->whole = is_switch && strcmp(word, "on") == 0;
    if (out->whole || (is_switch && strcmp(word, "off") == 0))
        return true;
    return (is_real(s) ? parse_real(word, out) : parse_whole(s, word, out)) && is_in_range(s, *out);
}

int kvf_setting_parse(const kvf_setting *s, const char *text, void *config)
{
    value values[8];
    char word[WORD_MAX];
    if (!s || !text || !config)
        return 0;
    if (s->kind == KVF_SETTING_TEXT) {
        memcpy((char *)config + s->offset, &text, sizeof text);
        return 1;
    }
    for (uint32_t i = 0; i < elements(s) && i < 8; i++) {
        const size_t size = s->count > 1 ? strcspn(text, ",") : strlen(text);
        const bool is_last = i + 1 == elements(s);
        if (size >= sizeof word || (text[size] == '\0') != is_last)
            return 0;
        memcpy(word, text, size);
        word[size] = '\0';
        if (!parse_word(s, word, &values[i]))
            return 0;
        text += size + 1;
    }
    for (uint32_t i = 0; i < elements(s) && i < 8; i++)
        put(s, config, i, values[i]);
    return 1;
}

static void show_word(const kvf_setting *s, value v, char *text, size_t capacity)
{
    const bool is_named = s->kind == KVF_SETTING_NAME && v.whole <= (uint64_t)s->high;
    if (is_special(s, v))
        snprintf(text, capacity, "%s", s->special);
    else if (is_named)
        snprintf(text, capacity, "%s", s->names[v.whole]);
    else if (s->kind == KVF_SETTING_SWITCH && v.whole <= 1)
        snprintf(text, capacity, "%s", v.whole ? "on" : "off");
    else if (is_real(s))
        kvf_format(text, capacity, "%.*g", element_bytes(s) == 4 ? 7 : 15, v.real);
    else if (s->low < 0)
        snprintf(text, capacity, "%lld", (long long)v.whole);
    else
        snprintf(text, capacity, "%llu", (unsigned long long)v.whole);
}

const char *kvf_setting_show(const kvf_setting *s, const void *config, char *text, size_t capacity)
{
    if (!has_room(config ? s : NULL, text, capacity))
        return "";
    if (s->kind == KVF_SETTING_TEXT) {
        const char *words = NULL;
        memcpy(&words, (const char *)config + s->offset, sizeof words);
        snprintf(text, capacity, "%s", words ? words : "");
        return text;
    }
    size_t used = 0;
    for (uint32_t i = 0; i < elements(s) && used + 1 < capacity; i++) {
        if (i > 0)
            used += (size_t)snprintf(text + used, capacity - used, ",");
        show_word(s, get(s, config, i), text + used, capacity - used);
        used = strlen(text);
    }
    return text;
}
