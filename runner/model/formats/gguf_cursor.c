/* SPDX-License-Identifier: Apache-2.0 */

/* Reading values of GGUF files; see the header. */

#include "gguf_parts.h"

#include <inttypes.h>
#include <string.h>

static kvf_status fail_short(const gguf_cursor *c, const char *what, uint64_t bytes)
{
    return model_fail(c->error, KVF_CORRUPT,
                      "%.120s: %s at byte %td needs %" PRIu64 " bytes and the file has %" PRIu64
                      " more; it may be truncated, download it again",
                      c->name, what, c->at - c->start, bytes, gguf_left(c));
}

kvf_status gguf_take(gguf_cursor *c, const char *what, void *out, size_t bytes)
{
    if (gguf_left(c) < bytes)
        return fail_short(c, what, bytes);
    memcpy(out, c->at, bytes);
    c->at += bytes;
    return KVF_OK;
}

kvf_status gguf_take_string(gguf_cursor *c, const char *what, gguf_string *out)
{
    uint64_t size;
    KVF_TRY(gguf_take(c, what, &size, sizeof size));
    if (gguf_left(c) < size)
        return fail_short(c, what, size);
    *out = (gguf_string){c->at, (size_t)size};
    c->at += size;
    return KVF_OK;
}

/* ---- values ---- */

/* Bytes of a value of a fixed size; 0 for strings, arrays and unknown types. */
static size_t kind_bytes(gguf_kind kind)
{
    static const uint8_t bytes[] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};
    return (size_t)kind < sizeof bytes ? bytes[kind] : 0;
}

/* A value of a fixed size. */
static gguf_value read_scalar(gguf_kind kind, const char *from)
{
    const size_t bytes = kind_bytes(kind);
    gguf_value value = {.kind = kind};
    uint64_t bits = 0;
    float single;
    memcpy(&bits, from, bytes);
    switch (kind) {
    case GGUF_F32:
        memcpy(&single, from, sizeof single);
        value.as.real = (double)single;
        break;
    case GGUF_F64:
        memcpy(&value.as.real, from, sizeof value.as.real);
        break;
    case GGUF_BOOL:
        value.as.flag = bits != 0;
        break;
    case GGUF_I8:
    case GGUF_I16:
    case GGUF_I32:
    case GGUF_I64: /* the sign is the highest bit of so many bytes */
        value.as.integer = (int64_t)(bits << (64 - 8 * bytes)) >> (64 - 8 * bytes);
        break;
    default:
        value.as.natural = bits;
    }
    return value;
}

gguf_value gguf_element(const gguf_value *array, const char **at)
{
    if (array->inner != GGUF_STRING) {
        const char *from = *at;
        *at += kind_bytes(array->inner);
        return read_scalar(array->inner, from);
    }
    uint64_t size;
    memcpy(&size, *at, sizeof size);
    const gguf_value value = {.kind = GGUF_STRING, .as.string = {*at + sizeof size, (size_t)size}};
    *at += sizeof size + size;
    return value;
}

static kvf_status check_flags(const gguf_cursor *c, const char *from, uint64_t count)
{
    for (uint64_t i = 0; i < count; i++)
        if ((uint8_t)from[i] > 1)
            return model_fail(c->error, KVF_CORRUPT,
                              "%.120s: the truth value at byte %td is %u, but must be 0 or 1",
                              c->name, from + i - c->start, (uint8_t)from[i]);
    return KVF_OK;
}

static kvf_status take_kind(gguf_cursor *c, gguf_string key, gguf_kind *out)
{
    uint32_t kind;
    KVF_TRY(gguf_take(c, "the type of a value", &kind, sizeof kind));
    if (kind > GGUF_F64)
        return model_fail(c->error, KVF_CORRUPT,
                          "%.120s: %.*s has a value of type %u, but types are 0 to 12; download "
                          "the file again",
                          c->name, (int)(key.size < 80 ? key.size : 80), key.bytes, kind);
    *out = (gguf_kind)kind;
    return KVF_OK;
}

static kvf_status take_array(gguf_cursor *c, gguf_string key, gguf_value *out)
{
    KVF_TRY(take_kind(c, key, &out->inner));
    KVF_TRY(gguf_take(c, "the count of an array", &out->count, sizeof out->count));
    if (out->inner == GGUF_ARRAY)
        return model_fail(c->error, KVF_UNSUPPORTED,
                          "%.120s: %.*s is an array of arrays, which no field of a model is",
                          c->name, (int)(key.size < 80 ? key.size : 80), key.bytes);
    const size_t bytes = kind_bytes(out->inner);
    if (out->count > gguf_left(c) / (bytes ? bytes : sizeof(uint64_t)))
        return model_fail(c->error, KVF_CORRUPT,
                          "%.120s: %.*s has %" PRIu64 " elements, but the file has only %" PRIu64
                          " bytes more; it may be truncated, download it again",
                          c->name, (int)(key.size < 80 ? key.size : 80), key.bytes, out->count,
                          gguf_left(c));
    out->as.elements = c->at;
    if (out->inner == GGUF_BOOL)
        KVF_TRY(check_flags(c, c->at, out->count));
    c->at += bytes * out->count;
    gguf_string element;
    for (uint64_t i = 0; bytes == 0 && i < out->count; i++)
        KVF_TRY(gguf_take_string(c, "a string of an array", &element));
    return KVF_OK;
}

kvf_status gguf_take_value(gguf_cursor *c, gguf_string key, gguf_value *out)
{
    *out = (gguf_value){0};
    KVF_TRY(take_kind(c, key, &out->kind));
    if (out->kind == GGUF_ARRAY)
        return take_array(c, key, out);
    if (out->kind == GGUF_STRING)
        return gguf_take_string(c, "a string", &out->as.string);
    char bytes[8];
    const char *from = c->at;
    KVF_TRY(gguf_take(c, "a value", bytes, kind_bytes(out->kind)));
    if (out->kind == GGUF_BOOL)
        KVF_TRY(check_flags(c, from, 1));
    *out = read_scalar(out->kind, bytes);
    return KVF_OK;
}

bool gguf_natural(const gguf_value *value, uint64_t *out)
{
    *out = value->as.natural; /* of an integer that is not negative, the same bits */
    switch (value->kind) {
    case GGUF_U8:
    case GGUF_U16:
    case GGUF_U32:
    case GGUF_U64:
        return true;
    case GGUF_I8:
    case GGUF_I16:
    case GGUF_I32:
    case GGUF_I64:
        return value->as.integer >= 0;
    default:
        return false;
    }
}
