/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_CLI_STOP_TEXT_H
#define KVF_CLI_STOP_TEXT_H

/*
 * Texts that end an answer, wherever tokens are cut.
 *
 * It knows bytes, not tokens. Invariant: what was let through and what is held back are, one after
 * the other, what came in up to the first stop; only what may begin a stop is held back.
 */

#include "model_memory.h"

#define CLI_STOP_MAX 16u

/** Borrowed texts, none of them empty. */
typedef struct cli_stop_texts {
    const char *texts[CLI_STOP_MAX];
    uint32_t count;
} cli_stop_texts;

/** Zero-initialise all but `stop`. */
typedef struct cli_stop_filter {
    const cli_stop_texts *stop;
    kvf_text held;
    bool found; /* a stop came; nothing goes through any more */
} cli_stop_filter;

/** Append to @p out what can be shown. */
KVF_CHECKED kvf_status cli_stop_push(cli_stop_filter *filter, const char *bytes, size_t size,
                                     kvf_text *out, kvf_error *error);
/** At the end: append what was held back for nothing. */
KVF_CHECKED kvf_status cli_stop_finish(cli_stop_filter *filter, kvf_text *out, kvf_error *error);
void cli_stop_free(cli_stop_filter *filter);

#endif
