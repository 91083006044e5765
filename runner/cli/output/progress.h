/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_CLI_PROGRESS_H
#define KVF_CLI_PROGRESS_H

/*
 * A bar on standard error while something takes long; nothing when that is no terminal.
 *
 * It knows shares of a whole, not what the whole is. Invariant: after cli_progress_end the line is
 * clean again.
 */

#include <stdbool.h>
#include <stdint.h>

typedef struct cli_progress {
    const char *title;
    uint64_t total;
    const char *unit; /* after the numbers; "" = per cent only */
    bool shown;
    double last_ms;
    char note[96]; /* after the numbers */
} cli_progress;

void cli_progress_begin(cli_progress *progress, const char *title, uint64_t total,
                        const char *unit);
void cli_progress_at(cli_progress *progress, uint64_t done);
/** Text that the next drawing has besides: tokens since @p start_ms. */
void cli_progress_pace(cli_progress *progress, uint64_t tokens, double start_ms);
/** Room for a line of others; the bar comes back with the next cli_progress_at. */
void cli_progress_clear(cli_progress *progress);
void cli_progress_end(cli_progress *progress);

#endif
