/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_MODEL_BYTE_ALPHABET_H
#define KVF_MODEL_BYTE_ALPHABET_H

/*
 * The byte-level alphabet of GPT-2: every byte has a printable character. Printable bytes of
 * Latin-1 stand for themselves; the 68 others, in order, are U+0100, U+0101, … It knows nothing of
 * tokens. Invariant: byte_of(char_of(b)) == b, and byte_of is -1 for every other character.
 */

#include <stdbool.h>
#include <stdint.h>

static inline bool byte_alphabet_is_itself(uint32_t byte)
{
    return (byte >= 0x21 && byte <= 0x7e) || (byte >= 0xa1 && byte <= 0xac) || byte >= 0xae;
}

/** The character of a byte, below U+0144. */
static inline uint32_t byte_alphabet_char(uint8_t byte)
{
    if (byte_alphabet_is_itself(byte))
        return byte;
    if (byte <= 0x20)
        return 0x100u + byte;
    if (byte <= 0xa0)
        return 0x100u + 0x21 + (byte - 0x7fu);
    return 0x100u + 0x21 + 0x22;
}

/** The byte of a character, or -1. */
static inline int byte_alphabet_byte(uint32_t code)
{
    if (code < 0x100)
        return byte_alphabet_is_itself(code) ? (int)code : -1;
    uint32_t index = code - 0x100;
    if (index < 0x21)
        return (int)index;
    if (index < 0x21 + 0x22)
        return (int)(0x7f + index - 0x21);
    return index == 0x21 + 0x22 ? 0xad : -1;
}

#endif
