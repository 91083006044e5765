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

typedef struct regex_pattern regex_pattern;
typedef struct regex_scan regex_scan;

/**
 * @param allocator  must stay where it is until the pattern is destroyed
 * @return KVF_OK; KVF_UNSUPPORTED naming the construct; KVF_CORRUPT if it is not an expression
 */
KVF_CHECKED kvf_status regex_create(const char *pattern, size_t size,
                                    const kvf_allocator *allocator, regex_pattern **out,
                                    kvf_error *error);

/** A pattern that is known to be PCRE2's, taken as it is. */
KVF_CHECKED kvf_status regex_create_native(const char *pattern, const kvf_allocator *allocator,
                                           regex_pattern **out, kvf_error *error);
void regex_destroy(regex_pattern *pattern);

/** Match data for one thread. */
KVF_CHECKED kvf_status regex_scan_create(const regex_pattern *pattern, regex_scan **out,
                                         kvf_error *error);
void regex_scan_destroy(regex_scan *scan);

/**
 * Find the first match at or after @p from; empty matches do not count.
 *
 * @param text   [size] valid UTF-8; @p from is a character boundary
 * @param start  set to size when there is no match, then end too
 */
KVF_CHECKED kvf_status regex_find(const regex_pattern *pattern, regex_scan *scan, const char *text,
                                  size_t size, size_t from, size_t *start, size_t *end,
                                  kvf_error *error);

#endif
