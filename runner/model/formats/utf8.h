/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_MODEL_UTF8_H
#define KVF_MODEL_UTF8_H

/*
 * UTF-8, one character at a time, by utf8proc. It knows encodings and White_Space, no other
 * property. Invariant: what utf8_decode accepts is exactly what RFC 3629 calls well-formed.
 */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <utf8proc.h>

/** Decode one character of bytes[0 … size-1], size > 0. @return its length, or 0 if ill-formed */
static inline size_t utf8_decode(const char *bytes, size_t size, uint32_t *code)
{
    utf8proc_int32_t point;
    const utf8proc_ssize_t length =
        utf8proc_iterate((const utf8proc_uint8_t *)bytes, (utf8proc_ssize_t)size, &point);
    if (length <= 0)
        return 0;
    *code = (uint32_t)point;
    return (size_t)length;
}

/** Encode a code point below 0x110000. @return the bytes written to out[4] */
static inline size_t utf8_encode(uint32_t code, char *out)
{
    return (size_t)utf8proc_encode_char((utf8proc_int32_t)code, (utf8proc_uint8_t *)out);
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
