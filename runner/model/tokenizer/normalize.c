/* SPDX-License-Identifier: Apache-2.0 */

/* See the header. Decompose, order, compose: the data of the first and last step are utf8proc's. */

#include "normalize.h"

#include "utf8.h"

#include <string.h>
#include <utf8proc.h>

/* No canonical decomposition of one character is longer. */
#define DECOMPOSED_MAX 4

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

/* ---- segments ---- */

/*
 * Characters that neither combine with what is before them nor change when they stand alone: all
 * below U+0300, kana, the common ideographs, Hangul syllables. Each starts a segment; segments are
 * normalised one by one, so room is needed for the longest only.
 */
static bool starts_segment(uint32_t code)
{
    return code < 0x300 || (code >= 0x3041 && code <= 0x3096) ||
           (code >= 0x30a1 && code <= 0x30fa) || (code >= 0x3400 && code <= 0x9fff) ||
           (code >= 0xac00 && code <= 0xd7a3);
}

typedef struct segment_room {
    utf8proc_int32_t *list; /* the points, then as much to sort in */
    size_t points;
} segment_room;

static kvf_status append_segment(const char *text, size_t size, size_t characters,
                                 segment_room *room, kvf_text *out, kvf_error *error)
{
    size_t needed = characters * DECOMPOSED_MAX;
    if (needed > room->points) {
        size_t points = needed < 256 ? 256 : needed;
        model_free(room->list);
        *room = (segment_room){0};
        room->list = model_alloc(2 * points * sizeof *room->list);
        if (!room->list)
            return model_out_of_memory(error, 2 * points * sizeof *room->list, "normalisation");
        room->points = points;
    }
    code_points points = {.list = room->list};
    KVF_TRY(decompose(text, size, &points, error));
    order(&points, room->list + room->points);
    utf8proc_ssize_t composed = utf8proc_normalize_utf32(
        points.list, (utf8proc_ssize_t)points.count, UTF8PROC_STABLE | UTF8PROC_COMPOSE);
    points.count = (size_t)composed;
    return append_encoded(&points, out, error);
}

static kvf_status append_segments(const char *text, size_t size, segment_room *room, kvf_text *out,
                                  kvf_error *error)
{
    size_t copied = 0; /* everything before is in out */
    size_t start = 0;  /* of the current segment */
    size_t characters = 0;
    for (size_t at = 0, length; at <= size; at += length, characters++) {
        uint32_t code = 0;
        length = at < size ? utf8_decode(text + at, size - at, &code) : 1;
        if (at == size || starts_segment(code)) {
            uint32_t first = 0;
            bool plain = at == start ||
                         (characters == 1 && utf8_decode(text + start, at - start, &first) != 0 &&
                          starts_segment(first));
            if (!plain) {
                KVF_TRY(kvf_text_append(out, text + copied, start - copied, error));
                KVF_TRY(append_segment(text + start, at - start, characters, room, out, error));
                copied = at;
            }
            start = at;
            characters = 0;
        }
    }
    return kvf_text_append(out, text + copied, size - copied, error);
}

kvf_status nfc_append(const char *text, size_t size, kvf_text *out, kvf_error *error)
{
    if (nfc_is_trivial(text, size))
        return kvf_text_append(out, text, size, error);
    segment_room room = {0};
    kvf_status status = append_segments(text, size, &room, out, error);
    model_free(room.list);
    return status;
}
