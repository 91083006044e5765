/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_MODEL_REGEX_SPLIT_H
#define KVF_MODEL_REGEX_SPLIT_H

/*
 * Splitting text with the regular expressions of tokenizer.json, through PCRE2.
 *
 * The files are written for Oniguruma. Syntax that means the same in both engines is passed on;
 * what does not is rewritten (white space: PCRE2 counts U+180E, Unicode and Oniguruma do not) or
 * refused by name. Invariant: a compiled expression is immutable and may be shared by threads; the
 * match data of a scan belong to one thread.
 */

#include "model_memory.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

typedef struct regex_scan regex_scan;

/** @return KVF_OK; KVF_UNSUPPORTED naming the construct; KVF_CORRUPT if it is not an expression */
KVF_CHECKED kvf_status regex_create(const char *pattern, size_t size, pcre2_code **out,
                                    kvf_error *error);

/** Match data of one thread, for any patterns. */
KVF_CHECKED kvf_status regex_scan_create(regex_scan **out, kvf_error *error);
void regex_scan_destroy(regex_scan *scan);

/**
 * Find the first match at or after @p from; empty matches do not count.
 *
 * @param text   [size] valid UTF-8; @p from is a character boundary
 * @param start  set to size when there is no match, then end too
 */
KVF_CHECKED kvf_status regex_find(const pcre2_code *pattern, regex_scan *scan, const char *text,
                                  size_t size, size_t from, size_t *start, size_t *end,
                                  kvf_error *error);

#endif
