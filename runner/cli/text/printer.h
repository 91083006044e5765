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

#include "chat_channels.h"
#include "stop_text.h"
#include "tokenizer.h"

typedef struct cli_printer {
    const kvf_tokenizer *tokenizer; /* NULL: ids */
    const uint32_t *ends;           /* [end_count] tokens that end an answer: not printed */
    uint32_t end_count;
    bool one_line;  /* line breaks inside an answer become spaces */
    bool silent;    /* to `copy` alone */
    kvf_text *copy; /* what was printed, freed with NULL as allocator; NULL = nobody asks */

    kvf_token_stream stream;
    kvf_channels channels;
    cli_stop_filter filter;
    bool started;
    bool failed; /* standard output did not take it, or memory was short; told on stderr */
} cli_printer;

/** Begin an answer; the fields above the blank line are set. */
void cli_printer_begin(cli_printer *printer, const cli_stop_texts *stop);
/** @return whether to go on: no stop came and nothing failed */
bool cli_printer_token(cli_printer *printer, uint32_t id);
/** What is left, and a line break. */
void cli_printer_end(cli_printer *printer);

#endif
