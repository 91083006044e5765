/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_CLI_LINE_INPUT_H
#define KVF_CLI_LINE_INPUT_H

/*
 * Lines that somebody types: edited with libedit on a terminal, read as they are elsewhere.
 *
 * It knows terminals, not what is said. Invariant: a prompt is shown only where input is a
 * terminal.
 */

#include "model_memory.h"

typedef enum cli_line_end {
    CLI_LINE_READ,
    CLI_LINE_INTERRUPTED, /* Ctrl-C: what was typed is gone */
    CLI_LINE_END,         /* Ctrl-D, or the input ended */
} cli_line_end;

typedef struct cli_line_input cli_line_input;

/** NULL if there is no memory. */
cli_line_input *cli_line_open(void);
void cli_line_close(cli_line_input *input);

/** While a terminal says nothing, @p work is called, which does a little and says whether there is
 * more; a file waits until there is none. */
void cli_line_idle(cli_line_input *input, bool (*work)(void *user), void *user);

/** The next line, appended to @p line without its line break. @p prompt must live until the next
 * call. */
cli_line_end cli_line_read(cli_line_input *input, const char *prompt, kvf_text *line);

/** The editor of lines in this build, in words. */
const char *cli_line_editing(void);

#endif
