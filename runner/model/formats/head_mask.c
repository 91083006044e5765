/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Head masks: lines of tab-separated values; see the header for what they mean.
 *
 * All checks come first: the number of lines, the number of values per line, every value. A last
 * line without a newline counts; carriage returns before a newline and empty lines at the end are
 * skipped. Numbers are digits, a point and an exponent in every locale.
 */

#include "head_mask.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common/text.h"

/* Values longer than this are not numbers; so a mask of any model is far below the limit. */
#define VALUE_BYTES_MAX 64u

typedef struct mask_reader {
    const char *path;
    uint32_t layers;
    uint32_t kv_heads;
    double sparsity;
    double *values; /* [layers, kv_heads] */
    kvf_error *error;
} mask_reader;

/* Where a value is, for messages; both count from 1 there. */
typedef struct mask_place {
    uint32_t line;
    uint32_t column;
} mask_place;

static kvf_status read_value(const mask_reader *r, const char *text, size_t size, mask_place place)
{
    char copy[VALUE_BYTES_MAX + 1];
    const int shown = (int)(size < 32 ? size : 32);
    while (size && *text == ' ') {
        text++;
        size--;
    }
    while (size && text[size - 1] == ' ')
        size--;
    if (size == 0)
        return model_fail(r->error, KVF_INVALID,
                          "%s, line %u, column %u: there is no value; write %s, or remove the tab",
                          r->path, place.line, place.column,
                          r->sparsity < 0.0 ? "0, 1 or 2" : "a number");
    memcpy(copy, text, size < sizeof copy ? size : 0);
    copy[size < sizeof copy ? size : 0] = '\0';
    /* Nan, inf and hexadecimal numbers have other letters. */
    char *end;
    const double value = kvf_real_of(copy, &end);
    if (strspn(copy, "0123456789.eE+-") != size || end != copy + size)
        return model_fail(r->error, KVF_INVALID,
                          "%s, line %u, column %u: \"%.*s\" is not a number; values are separated "
                          "by tabs, and may not be NaN or infinity",
                          r->path, place.line, place.column, shown, text);
    if (r->sparsity < 0.0 && value != 0.0 && value != 1.0 && value != 2.0)
        return model_fail(r->error, KVF_INVALID,
                          "%s, line %u, column %u: %.*s is neither 0, 1 nor 2; give the share of "
                          "streaming heads to make a mask of such values",
                          r->path, place.line, place.column, shown, text);
    const double clipped = value < 0.0 ? 0.0 : value > 1.0 ? 1.0 : value;
    r->values[(size_t)(place.line - 1) * r->kv_heads + place.column - 1] =
        r->sparsity < 0.0 ? value : clipped;
    return KVF_OK;
}

static kvf_status read_line(const mask_reader *r, const char *text, size_t size, uint32_t line)
{
    uint32_t columns = 1;
    if (line > r->layers)
        return model_fail(r->error, KVF_INVALID,
                          "%s, line %u: the model has %u layers, so the mask has %u lines; use the "
                          "mask of this model",
                          r->path, line, r->layers, r->layers);
    for (size_t i = 0; i < size; i++)
        columns += text[i] == '\t';
    if (columns != r->kv_heads)
        return model_fail(r->error, KVF_INVALID,
                          "%s, line %u: %u values; the model has %u KV heads, so each line has %u, "
                          "separated by tabs",
                          r->path, line, columns, r->kv_heads, r->kv_heads);
    for (uint32_t column = 1; column <= columns; column++) {
        const char *tab = memchr(text, '\t', size);
        const size_t bytes = tab ? (size_t)(tab - text) : size;
        KVF_TRY(read_value(r, text, bytes, (mask_place){line, column}));
        text += bytes + !!tab;
        size -= bytes + !!tab;
    }
    return KVF_OK;
}

static kvf_status read_lines(const mask_reader *r, const char *text, size_t size)
{
    uint32_t line = 0;
    while (size && (text[size - 1] == '\n' || text[size - 1] == '\r'))
        size--;
    while (size) {
        const char *newline = memchr(text, '\n', size);
        const size_t bytes = newline ? (size_t)(newline - text) : size;
        const size_t kept = bytes && text[bytes - 1] == '\r' ? bytes - 1 : bytes;
        KVF_TRY(read_line(r, text, kept, ++line));
        text += bytes + !!newline;
        size -= bytes + !!newline;
    }
    if (line == r->layers)
        return KVF_OK;
    return model_fail(r->error, KVF_INVALID,
                      "%s: %u lines; the model has %u layers, so the mask has %u lines; use the "
                      "mask of this model",
                      r->path, line, r->layers, r->layers);
}

/* ---- choosing ---- */

typedef struct ranked_head {
    double value;
    uint32_t index; /* of layers x kv_heads */
} ranked_head;

static int compare_heads(const void *a, const void *b)
{
    const ranked_head *x = a, *y = b;
    if (x->value != y->value)
        return x->value < y->value ? -1 : 1;
    return x->index < y->index ? -1 : 1;
}

/* The `count` lowest of `heads` values, or with sign -1 the highest, get `kind` in the mask. */
static kvf_status mark_first(const double *values, size_t heads, double sign, size_t count,
                             uint8_t kind, uint8_t *mask, kvf_error *error)
{
    ranked_head *order = model_alloc(heads * sizeof *order);
    if (!order)
        return model_out_of_memory(error, heads * sizeof *order, "a head mask");
    for (size_t i = 0; i < heads; i++)
        order[i] = (ranked_head){sign * values[i], (uint32_t)i};
    qsort(order, heads, sizeof *order, compare_heads);
    for (size_t i = 0; i < count && i < heads; i++)
        mask[order[i].index] = kind;
    model_free(order);
    return KVF_OK;
}

static size_t share_of(double share, size_t heads)
{
    return (size_t)floor(share * (double)heads + 0.5);
}

static kvf_status choose(const mask_reader *r, uint8_t *mask)
{
    const size_t heads = (size_t)r->layers * r->kv_heads;
    for (size_t i = 0; i < heads; i++)
        mask[i] = r->sparsity >= 0.0 ? 1 : (uint8_t)r->values[i];
    if (r->sparsity < 0.0)
        return KVF_OK;
    return mark_first(r->values, heads, 1.0, share_of(r->sparsity, heads), 0, mask, r->error);
}

kvf_status kvf_head_mask_most_sensitive(const double *sensitivity, uint32_t layers,
                                        uint32_t kv_heads, double share, uint8_t *mask,
                                        kvf_error *error)
{
    const size_t heads = (size_t)layers * kv_heads;
    const size_t hot = share_of(share, heads);
    memset(mask, 2, heads);
    return mark_first(sensitivity, heads, -1.0, hot ? hot : 1, 1, mask, error);
}

kvf_status kvf_head_mask_write(const uint8_t *mask, uint32_t layers, uint32_t kv_heads,
                               kvf_text *text, kvf_error *error)
{
    const size_t heads = (size_t)layers * kv_heads;
    for (size_t i = 0; i < heads; i++) {
        const char cell[2] = {(char)('0' + mask[i]), (i + 1) % kv_heads ? '\t' : '\n'};
        KVF_TRY(kvf_text_append(text, cell, sizeof cell, error));
    }
    return KVF_OK;
}

kvf_status kvf_head_mask_read(const char *path, uint32_t layers, uint32_t kv_heads, double sparsity,
                              uint8_t *mask, kvf_error *error)
{
    const size_t heads = (size_t)layers * kv_heads;
    mask_reader r = {
        .path = path, .layers = layers, .kv_heads = kv_heads, .sparsity = sparsity, .error = error};
    kvf_text text;
    if (isnan(sparsity) || sparsity >= 1.0)
        return model_fail(error, KVF_INVALID,
                          "head mask sparsity = %g: must be 0 to below 1, the share of streaming "
                          "heads",
                          sparsity);
    if (layers == 0 || kv_heads == 0 || heads > UINT32_MAX / (VALUE_BYTES_MAX + 2))
        return model_fail(error, KVF_INVALID, "%u layers of %u KV heads have no mask", layers,
                          kv_heads);
    kvf_status status = model_read_file(path, heads * (VALUE_BYTES_MAX + 2) + 4096, &text, error);
    if (status != KVF_OK)
        return status == KVF_CORRUPT ? model_fail(error, KVF_INVALID,
                                                  "%s is larger than any mask of %u layers of %u "
                                                  "KV heads; is it the right file?",
                                                  path, layers, kv_heads)
                                     : status;
    r.values = model_alloc(heads * sizeof *r.values);
    status = r.values ? read_lines(&r, text.bytes, text.size)
                      : model_out_of_memory(error, heads * sizeof *r.values, "a head mask");
    if (status == KVF_OK)
        status = choose(&r, mask);
    model_free(r.values);
    kvf_text_free(&text);
    return status;
}
