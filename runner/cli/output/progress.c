/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Draws bars.
 *
 * It knows terminals that understand carriage return and "erase line". Invariant: at most ten draws
 * a second.
 */

#include "progress.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/text.h"

#define BAR_WIDTH 30u
#define DRAW_MS   100.0

static bool is_due(const cli_progress *progress, double now)
{
    return progress->shown && (progress->last_ms == 0.0 || now - progress->last_ms >= DRAW_MS);
}

void cli_progress_begin(cli_progress *progress, const char *title, uint64_t total, const char *unit)
{
    *progress = (cli_progress){.title = title,
                               .total = total ? total : 1,
                               .unit = unit,
                               .shown = isatty(STDERR_FILENO) == 1};
    cli_progress_at(progress, 0);
}

void cli_progress_at(cli_progress *progress, uint64_t done)
{
    double now = kvf_now_ms();
    if (!is_due(progress, now) && !(progress->shown && done >= progress->total))
        return;
    progress->last_ms = now;
    if (done > progress->total)
        done = progress->total;
    char bar[BAR_WIDTH + 1];
    uint64_t filled = done * BAR_WIDTH / progress->total;
    for (uint64_t i = 0; i < BAR_WIDTH; i++)
        bar[i] = i < filled ? '#' : '.';
    bar[BAR_WIDTH] = '\0';
    fprintf(stderr, "\r\033[K%-18s [%s] %3u%%", progress->title, bar,
            (unsigned)(done * 100 / progress->total));
    if (progress->unit[0])
        fprintf(stderr, "  %llu/%llu %s", (unsigned long long)done,
                (unsigned long long)progress->total, progress->unit);
    if (progress->note[0])
        fprintf(stderr, "  %s", progress->note);
    fflush(stderr);
}

void cli_progress_pace(cli_progress *progress, uint64_t tokens, double start_ms)
{
    const double now = kvf_now_ms();
    char count[32] = "";
    if (!is_due(progress, now) || now <= start_ms)
        return;
    if (strcmp(progress->unit, "tokens") != 0) /* the bar does not count them */
        snprintf(count, sizeof count, "%llu tokens, ", (unsigned long long)tokens);
    kvf_format(progress->note, sizeof progress->note, "%s%.1f tokens/s", count,
               (double)tokens / (now - start_ms) * 1e3);
}

void cli_progress_clear(cli_progress *progress)
{
    if (progress->shown)
        fputs("\r\033[K", stderr);
    progress->last_ms = 0.0;
}

void cli_progress_end(cli_progress *progress)
{
    cli_progress_clear(progress);
    progress->shown = false;
}
