/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_MODEL_UTF8_H
#define KVF_MODEL_UTF8_H

/*
 * UTF-8, one character at a time. It knows encodings and White_Space, no other property.
 * Invariant: what utf8_decode accepts is exactly what RFC 3629 calls well-formed.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/** Decode one character of bytes[0 … size-1], size > 0. @return its length, or 0 if ill-formed */
static inline size_t utf8_decode(const char *bytes, size_t size, uint32_t *code)
{
    const unsigned char *b = (const unsigned char *)bytes;
    if (b[0] < 0x80) {
        *code = b[0];
        return 1;
    }
    size_t length = b[0] >= 0xf0 ? 4 : b[0] >= 0xe0 ? 3 : 2;
    if (b[0] < 0xc2 || b[0] > 0xf4 || length > size)
        return 0;
    uint32_t value = b[0] & (0x7fu >> length);
    for (size_t i = 1; i < length; i++) {
        if ((b[i] & 0xc0) != 0x80)
            return 0;
        value = value << 6 | (b[i] & 0x3fu);
    }
    if ((length == 3 && value < 0x800) || (length == 4 && value < 0x10000) || value > 0x10ffff ||
        (value >= 0xd800 && value <= 0xdfff))
        return 0;
    *code = value;
    return length;
}

/** Encode a code point below 0x110000. @return the bytes written to out[4] */
static inline size_t utf8_encode(uint32_t code, char *out)
{
    if (code < 0x80) {
        out[0] = (char)code;
        return 1;
    }
    size_t length = code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
    for (size_t i = length - 1; i > 0; i--) {
        out[i] = (char)(0x80 | (code & 0x3f));
        code >>= 6;
    }
    out[0] = (char)((0xf00u >> length & 0xff) | code);
    return length;
}

/** Offset of the first ill-formed byte, or @p size. */
static inline size_t utf8_valid_prefix(const char *bytes, size_t size)
{
    size_t at = 0;
    while (at < size) {
        uint32_t code;
        size_t length = utf8_decode(bytes + at, size - at, &code);
        if (length == 0)
            break;
        at += length;
    }
    return at;
}

/** Unicode White_Space, stable since Unicode 6.3. */
static inline bool utf8_is_space(uint32_t code)
{
    if (code < 0x80)
        return code == ' ' || (code >= 9 && code <= 13);
    return code == 0x85 || code == 0xa0 || code == 0x1680 || (code >= 0x2000 && code <= 0x200a) ||
           code == 0x2028 || code == 0x2029 || code == 0x202f || code == 0x205f || code == 0x3000;
}

#endif
