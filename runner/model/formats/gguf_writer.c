/* SPDX-License-Identifier: Apache-2.0 */

/* See the header. */

#include "gguf_parts.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "common/text.h"

const char *gguf_family_key(const gguf_writer *w, const char *rest, char key[GGUF_KEY_BYTES])
{
    snprintf(key, GGUF_KEY_BYTES, "%s.%s", w->family, rest);
    return key;
}

/* A value shortened for a message; "absent" if it is NULL. */
static const char *show_value(const gguf_value *value, char *buffer, size_t size)
{
    uint64_t natural;
    if (!value)
        snprintf(buffer, size, "absent");
    else if (gguf_natural(value, &natural))
        snprintf(buffer, size, "%" PRIu64, natural);
    else if (value->kind == GGUF_F32 || value->kind == GGUF_F64)
        kvf_format(buffer, size, "%g", value->as.real);
    else if (value->kind == GGUF_BOOL)
        snprintf(buffer, size, "%s", value->as.flag ? "true" : "false");
    else if (value->kind == GGUF_STRING)
        snprintf(buffer, size, "\"%.*s\"",
                 (int)(value->as.string.size < 60 ? value->as.string.size : 60),
                 value->as.string.bytes);
    else if (value->kind == GGUF_ARRAY)
        snprintf(buffer, size, "an array of %" PRIu64, value->count);
    else
        snprintf(buffer, size, "%" PRId64, value->as.integer);
    return buffer;
}

void gguf_reject(gguf_writer *w, const char *key, const char *expected)
{
    char shown[96];
    if (w->status == KVF_OK)
        w->status = model_fail(w->error, KVF_CORRUPT, "%.120s: %s is %s, but must be %s",
                               gguf_name(w->file), key,
                               show_value(gguf_find(w->file, key), shown, sizeof shown), expected);
}

void gguf_refuse(gguf_writer *w, const char *key, const char *fix)
{
    char shown[96];
    if (w->status == KVF_OK)
        w->status =
            model_fail(w->error, KVF_UNSUPPORTED, "%.120s: %s is %s; %s", gguf_name(w->file), key,
                       show_value(gguf_find(w->file, key), shown, sizeof shown), fix);
}

/* ---- fields ---- */

uint32_t gguf_count(gguf_writer *w, const char *key, uint32_t fallback)
{
    const gguf_value *value = gguf_find(w->file, key);
    uint64_t natural;
    if (!value && fallback != 0)
        return fallback;
    if (!value || !gguf_natural(value, &natural) || natural == 0 || natural > INT32_MAX) {
        gguf_reject(w, key, "a whole number above 0, one for the whole model");
        return 1;
    }
    return (uint32_t)natural;
}

double gguf_real(gguf_writer *w, const char *key, double fallback)
{
    const gguf_value *value = gguf_find(w->file, key);
    uint64_t natural;
    if (!value && !isnan(fallback))
        return fallback;
    if (value && gguf_natural(value, &natural))
        return (double)natural;
    if (!value || (value->kind != GGUF_F32 && value->kind != GGUF_F64) ||
        !isfinite(value->as.real)) {
        gguf_reject(w, key, "a finite number");
        return 1;
    }
    return value->as.real;
}

bool gguf_flag(gguf_writer *w, const char *key, bool fallback)
{
    const gguf_value *value = gguf_find(w->file, key);
    if (value && value->kind != GGUF_BOOL)
        gguf_reject(w, key, "true or false");
    return value && value->kind == GGUF_BOOL ? value->as.flag : fallback;
}

const gguf_string *gguf_text(gguf_writer *w, const char *key)
{
    const gguf_value *value = gguf_find(w->file, key);
    if (value && value->kind != GGUF_STRING)
        gguf_reject(w, key, "text");
    return value && value->kind == GGUF_STRING ? &value->as.string : NULL;
}

const gguf_value *gguf_array(gguf_writer *w, const char *key, gguf_kind inner)
{
    const gguf_value *value = gguf_find(w->file, key);
    if (value && value->kind == GGUF_ARRAY && value->inner == inner)
        return value;
    gguf_reject(w, key, inner == GGUF_STRING ? "an array of texts" : "an array of I32");
    return NULL;
}

/* ---- JSON ---- */

static void append(gguf_writer *w, const void *bytes, size_t size)
{
    if (w->status == KVF_OK)
        w->status = kvf_text_append(w->text, bytes, size, w->error);
}

void gguf_put(gguf_writer *w, const char *format, ...)
{
    char piece[512]; /* of a fixed format with names of this program and numbers */
    va_list list;
    va_start(list, format);
    kvf_vformat(piece, sizeof piece, format, list);
    va_end(list);
    append(w, piece, strlen(piece));
}

void gguf_put_string(gguf_writer *w, gguf_string string)
{
    append(w, "\"", 1);
    for (size_t i = 0, plain; i < string.size; i += plain + 1) {
        plain = 0;
        while (i + plain < string.size && (uint8_t)string.bytes[i + plain] >= 0x20 &&
               string.bytes[i + plain] != '"' && string.bytes[i + plain] != '\\')
            plain++;
        append(w, string.bytes + i, plain);
        if (i + plain < string.size)
            gguf_put(w, "\\u%04x", (unsigned)(uint8_t)string.bytes[i + plain]);
    }
    append(w, "\"", 1);
}
