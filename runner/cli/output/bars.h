/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_CLI_BARS_H
#define KVF_CLI_BARS_H

/*
 * A plot for terminals: one line and one bar per value, as wide as the terminal.
 *
 * It knows widths and characters, not what the values are. Invariant: no line is wider than the
 * terminal, or than 80 columns where there is none.
 */

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

typedef struct cli_bars {
    const char *head;     /* above the numbers at the left */
    uint32_t first;       /* number of the first line */
    uint32_t count;       /* at least 1 */
    const double *values; /* [count]; what is below 0 or no number has no bar */
    uint32_t marked;      /* number of the line that is marked */
    const char *mark;     /* after its value */
    unsigned columns;     /* 0 = as wide as the terminal of the file */
    bool is_ascii;        /* bars of '#', else of block characters in UTF-8 */
} cli_bars;

void cli_bars_print(const cli_bars *bars, FILE *file);

/** Whether text for people may not have other characters than ASCII, by the locale. */
bool cli_locale_is_ascii(void);

#endif
