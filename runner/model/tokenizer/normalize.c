/* SPDX-License-Identifier: Apache-2.0 */

/* See the header. Decompose, order, compose: the data of the first and last step are utf8proc's. */

#include "normalize.h"

#include "utf8.h"

#include <string.h>
#include <utf8proc.h>

/* No canonical decomposition of one character is longer. */
#define DECOMPOSED_MAX 4
/* Text is normalised in pieces of at least so many bytes: memory goes with them, not with it. */
#define PIECE_BYTES    4096

bool nfc_is_trivial(const char *text, size_t size)
{
    for (size_t i = 0; i < size; i++)
        if ((unsigned char)text[i] >= 0xcc) /* the lead byte of U+0300 */
            return false;
    return true;
}

typedef struct code_points {
    utf8proc_int32_t *list;
    size_t count;
} code_points;

static kvf_status decompose(const char *text, size_t size, code_points *out, kvf_error *error)
{
    int boundary = 0;
    for (size_t at = 0; at < size;) {
        uint32_t code = 0;
        at += utf8_decode(text + at, size - at, &code);
        utf8proc_ssize_t got =
            utf8proc_decompose_char((utf8proc_int32_t)code, out->list + out->count, DECOMPOSED_MAX,
                                    UTF8PROC_STABLE | UTF8PROC_DECOMPOSE, &boundary);
        if (got < 0 || got > DECOMPOSED_MAX)
            return model_fail(error, KVF_UNSUPPORTED, "U+%04X cannot be decomposed", code);
        out->count += (size_t)got;
    }
    return KVF_OK;
}

static uint8_t combining_class(utf8proc_int32_t code)
{
    return code < 0x300 ? 0 : (uint8_t)utf8proc_get_property(code)->combining_class;
}

/* Stable sort of a run of marks by class; @p spare has room for the run. */
static void sort_run(utf8proc_int32_t *run, size_t count, utf8proc_int32_t *spare)
{
    size_t starts[257] = {0};
    for (size_t i = 0; i < count; i++)
        starts[combining_class(run[i]) + 1]++;
    for (size_t c = 0; c < 256; c++)
        starts[c + 1] += starts[c];
    for (size_t i = 0; i < count; i++)
        spare[starts[combining_class(run[i])]++] = run[i];
    memcpy(run, spare, count * sizeof *run);
}

static void order(code_points *points, utf8proc_int32_t *spare)
{
    for (size_t i = 0; i < points->count;) {
        if (combining_class(points->list[i]) == 0) {
            i++;
            continue;
        }
        size_t start = i;
        bool sorted = true;
        for (i++; i < points->count && combining_class(points->list[i]) != 0; i++)
            sorted =
                sorted && combining_class(points->list[i - 1]) <= combining_class(points->list[i]);
        if (!sorted)
            sort_run(points->list + start, i - start, spare);
    }
}

static kvf_status append_encoded(const code_points *points, kvf_text *out, kvf_error *error)
{
    char block[1024];
    size_t used = 0;
    for (size_t i = 0; i < points->count; i++) {
        used += utf8_encode((uint32_t)points->list[i], block + used);
        if (used > sizeof block - 4 || i + 1 == points->count) {
            KVF_TRY(kvf_text_append(out, block, used, error));
            used = 0;
        }
    }
    return KVF_OK;
}

/* @p size is not 0. */
static kvf_status append_piece(const char *text, size_t size, kvf_text *out, kvf_error *error)
{
    const size_t room =
        size * 2; /* a byte has one point, or is one of two or more of DECOMPOSED_MAX */
    utf8proc_int32_t *list = model_alloc(2 * room * sizeof *list);
    if (!list)
        return model_out_of_memory(error, 2 * room * sizeof *list, "normalisation");
    code_points points = {.list = list};
    kvf_status status = decompose(text, size, &points, error);
    if (status == KVF_OK) {
        order(&points, list + room);
        points.count = (size_t)utf8proc_normalize_utf32(list, (utf8proc_ssize_t)points.count,
                                                        UTF8PROC_STABLE | UTF8PROC_COMPOSE);
        status = append_encoded(&points, out, error);
    }
    model_free(list);
    return status;
}

kvf_status nfc_append(const char *text, size_t size, kvf_text *out, kvf_error *error)
{
    for (size_t at = 0, end; at < size; at = end) {
        /* An ASCII character does not combine with what is before it. */
        end = size - at > PIECE_BYTES ? at + PIECE_BYTES : size;
        while (end < size && (unsigned char)text[end] >= 0x80)
            end++;
        const bool trivial = nfc_is_trivial(text + at, end - at);
        KVF_TRY(trivial ? kvf_text_append(out, text + at, end - at, error)
                        : append_piece(text + at, end - at, out, error));
    }
    return KVF_OK;
}
