/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_COMMON_TEXT_H
#define KVF_COMMON_TEXT_H

/*
 * Numbers as text, text as numbers, and kinds of characters: the only place that calls functions of
 * the C library whose results depend on the locale (`tools/lint` refuses them elsewhere).
 *
 * Knows nothing of what is counted or said. Invariant: results are those of the C locale, whatever
 * the process and the thread have set, and the thread's locale is as it was.
 */

#include <locale.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base.h"

/* ---- the locale ---- */

/* From here on this thread has the C locale. @return the one that it had, for the end. The C
 * library has this locale ready: nothing is allocated, and nothing fails. */
static inline locale_t kvf_c_locale_begin(void)
{
    return uselocale(newlocale(LC_ALL_MASK, "C", (locale_t)0));
}

static inline void kvf_c_locale_end(locale_t before)
{
    (void)uselocale(before);
}

/* ---- numbers ---- */

/* vsnprintf, snprintf, fprintf, strtod. */
KVF_PRINTF(3, 0)
static inline int kvf_vformat(char *text, size_t capacity, const char *format, va_list list)
{
    const locale_t before = kvf_c_locale_begin();
    const int length = vsnprintf(text, capacity, format, list);
    kvf_c_locale_end(before);
    return length;
}

KVF_PRINTF(3, 4)
static inline int kvf_format(char *text, size_t capacity, const char *format, ...)
{
    va_list list;
    va_start(list, format);
    const int length = kvf_vformat(text, capacity, format, list);
    va_end(list);
    return length;
}

KVF_PRINTF(2, 3)
static inline int kvf_print(FILE *file, const char *format, ...)
{
    va_list list;
    va_start(list, format);
    const locale_t before = kvf_c_locale_begin();
    const int length = vfprintf(file, format, list);
    kvf_c_locale_end(before);
    va_end(list);
    return length;
}

static inline double kvf_real_of(const char *text, char **end)
{
    const locale_t before = kvf_c_locale_begin();
    const double value = strtod(text, end);
    kvf_c_locale_end(before);
    return value;
}

/* A size, e.g. "1.50 GiB"; UINT64_MAX is "unlimited". Returns text. */
static inline const char *kvf_bytes_text(uint64_t bytes, char text[32])
{
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
    if (bytes == UINT64_MAX) {
        snprintf(text, 32, "unlimited");
        return text;
    }
    double value = (double)bytes;
    unsigned unit = 0;
    while (value >= 1024.0 && unit < 6) {
        value /= 1024.0;
        unit++;
    }
    if (unit == 0)
        snprintf(text, 32, "%llu B", (unsigned long long)bytes);
    else
        kvf_format(text, 32, "%.2f %s", value, units[unit]);
    return text;
}

/* ---- characters: letters and digits are those of ASCII ---- */

static inline bool kvf_is_space(char c)
{
    return c == ' ' || (c >= '\t' && c <= '\r');
}

static inline bool kvf_is_digit(char c)
{
    return c >= '0' && c <= '9';
}

static inline char kvf_lower(char c)
{
    return c >= 'A' && c <= 'Z' ? (char)(c - 'A' + 'a') : c;
}

static inline char kvf_upper(char c)
{
    return c >= 'a' && c <= 'z' ? (char)(c - 'a' + 'A') : c;
}

static inline bool kvf_is_alnum(char c)
{
    return kvf_is_digit(c) || (kvf_lower(c) >= 'a' && kvf_lower(c) <= 'z');
}

/* ---- UTF-8 ---- */

/* U+FFFD, in the place of a byte that is not UTF-8. */
#define KVF_UTF8_REPLACEMENT "\xef\xbf\xbd"

/* Bytes of the character that a text of `size` bytes begins with; 0 = it is not UTF-8. */
static inline size_t kvf_utf8_size(const char *text, size_t size)
{
    static const unsigned least[] = {0, 0, 0x80, 0x800, 0x10000};
    const unsigned char first = size > 0 ? (unsigned char)*text : 0xff;
    const size_t bytes = first < 0x80             ? 1
                         : (first & 0xe0) == 0xc0 ? 2
                         : (first & 0xf0) == 0xe0 ? 3
                         : (first & 0xf8) == 0xf0 ? 4
                                                  : 0;
    if (bytes <= 1 || bytes > size)
        return bytes == 1;
    unsigned code = first & (0x7fu >> bytes);
    for (size_t i = 1; i < bytes; i++) {
        if (((unsigned char)text[i] & 0xc0) != 0x80)
            return 0;
        code = code << 6 | ((unsigned char)text[i] & 0x3f);
    }
    const bool is_surrogate = code >= 0xd800 && code < 0xe000;
    return code < least[bytes] || code > 0x10ffff || is_surrogate ? 0 : bytes;
}

/* ---- errors of the system ---- */

/* The English text of an errno. */
static inline const char *kvf_errno_text(int code)
{
    const locale_t c = newlocale(LC_ALL_MASK, "C", (locale_t)0);
    return c ? strerror_l(code, c) : "the operating system refused";
}

#endif
