/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_MODEL_NORMALIZE_H
#define KVF_MODEL_NORMALIZE_H

/*
 * Unicode normalisation form C. It knows text, not tokens.
 *
 * Canonical order is restored with a counting sort per run of combining marks, so that a hostile
 * run of marks costs linear time; the library's own ordering is quadratic in it.
 */

#include "model_memory.h"

#define NORMAL_STEPS_MAX 4u
#define NORMAL_TEXT_MAX  16u

typedef enum normal_kind { NORMAL_NFC, NORMAL_PREPEND, NORMAL_REPLACE } normal_kind;

typedef struct normal_text {
    char bytes[NORMAL_TEXT_MAX];
    size_t size;
} normal_text;

typedef struct normal_step {
    normal_kind kind;
    normal_text from; /* NORMAL_REPLACE; not empty */
    normal_text to;   /* NORMAL_PREPEND, NORMAL_REPLACE */
} normal_step;

/** The steps that a text goes through. Zero is none. */
typedef struct text_normalizer {
    normal_step steps[NORMAL_STEPS_MAX];
    size_t count;
} text_normalizer;

/** Whether the text stays as it is, for a plain reason.
 * @param goes_on  the text follows another one, so nothing is put in front of it */
bool normalizer_is_trivial(const text_normalizer *normalizer, bool goes_on, const char *text,
                           size_t size);

/** Append valid UTF-8, normalised, to @p out, which holds a part of it, to be freed, on failure. */
KVF_CHECKED kvf_status normalizer_append(const text_normalizer *normalizer, bool goes_on,
                                         const char *text, size_t size, kvf_text *out,
                                         kvf_error *error);

/** Whether the text is in NFC for the plain reason that every character is below U+0300. */
bool nfc_is_trivial(const char *text, size_t size);

/** Append the NFC of valid UTF-8 to @p out, which holds a part of it, to be freed, on failure. */
KVF_CHECKED kvf_status nfc_append(const char *text, size_t size, kvf_text *out, kvf_error *error);

#endif
