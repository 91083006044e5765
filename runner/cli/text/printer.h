/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_CLI_PRINTER_H
#define KVF_CLI_PRINTER_H

/*
 * An answer on its way to standard output: tokens in, text out as it becomes whole characters, up
 * to a text that ends it. Without a tokenizer, ids as numbers.
 *
 * It knows nothing of models. Invariant: what was printed is what the answer is, whatever comes
 * after it.
 */

#include "model_memory.h"
#include "tokenizer.h"

/*
 * Texts that end an answer, wherever tokens are cut.
 *
 * It knows bytes, not tokens. Invariant: what was let through and what is held back are, one after
 * the other, what came in up to the first stop; only what may begin a stop is held back.
 */

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

typedef struct cli_printer {
    const kvf_tokenizer *tokenizer; /* NULL: ids */
    const uint32_t *ends;           /* [end_count] tokens that end an answer: not printed */
    uint32_t end_count;
    bool one_line;  /* line breaks inside an answer become spaces */
    bool silent;    /* to `copy` alone */
    kvf_text *copy; /* what was printed, the caller's; NULL = nobody asks */

    kvf_token_stream stream;
    cli_stop_filter filter;
    bool started;
    bool failed; /* standard output did not take it, or memory was short; told on stderr */
} cli_printer;

/** Begin an answer; the fields above the blank line are set. */
void cli_printer_begin(cli_printer *printer, const cli_stop_texts *stop);
/** @return whether to go on: no stop came and nothing failed */
bool cli_printer_token(cli_printer *printer, uint32_t id);
/** The rest, and a line break. */
void cli_printer_end(cli_printer *printer);

#endif
