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

/** Whether the text is in NFC for the plain reason that every character is below U+0300. */
bool nfc_is_trivial(const char *text, size_t size);

/** Append the NFC of valid UTF-8 to @p out, which holds a part of it, to be freed, on failure. */
KVF_CHECKED kvf_status nfc_append(const char *text, size_t size, kvf_text *out, kvf_error *error);

#endif
