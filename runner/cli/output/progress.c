/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Draws bars.
 *
 * It knows terminals that understand carriage return and "erase line". Invariant: at most ten draws
 * a second.
 */

#include "progress.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/text.h"

#define BAR_WIDTH 30u
#define DRAW_MS   100.0
#define WATCH_NS  100000000L

uint64_t cli_resident_bytes(void)
{
    char line[128] = "", *second = line;
    FILE *file = fopen("/proc/self/statm", "r");
    if (!file)
        return 0;
    if (!fgets(line, sizeof line, file))
        line[0] = '\0';
    fclose(file);
    strtoull(line, &second, 10); /* the first number is the address space */
    return strtoull(second, NULL, 10) * (uint64_t)sysconf(_SC_PAGESIZE);
}

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
    char bytes[32], count[32] = "";
    if (!is_due(progress, now) || now <= start_ms)
        return;
    if (strcmp(progress->unit, "tokens") != 0) /* the bar does not count them */
        snprintf(count, sizeof count, "%llu tokens, ", (unsigned long long)tokens);
    snprintf(progress->note, sizeof progress->note, "%s%.1f tokens/s, %s", count,
             (double)tokens / (now - start_ms) * 1e3, kvf_bytes_text(cli_resident_bytes(), bytes));
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

static void *watch_run(void *raw)
{
    cli_memory_watch *watch = raw;
    pthread_mutex_lock(&watch->mutex);
    while (!watch->stop) {
        uint64_t now = cli_resident_bytes();
        cli_progress_at(&watch->progress, now > watch->start_bytes ? now - watch->start_bytes : 0);
        struct timespec until;
        clock_gettime(CLOCK_REALTIME, &until);
        until.tv_nsec += WATCH_NS;
        until.tv_sec += until.tv_nsec / 1000000000L;
        until.tv_nsec %= 1000000000L;
        pthread_cond_timedwait(&watch->wake, &watch->mutex, &until);
    }
    pthread_mutex_unlock(&watch->mutex);
    return NULL;
}

void cli_memory_watch_begin(cli_memory_watch *watch, const char *title, uint64_t bytes)
{
    watch->stop = false;
    watch->start_bytes = cli_resident_bytes();
    cli_progress_begin(&watch->progress, title, bytes, "");
    pthread_mutex_init(&watch->mutex, NULL);
    pthread_cond_init(&watch->wake, NULL);
    watch->running =
        watch->progress.shown && pthread_create(&watch->thread, NULL, watch_run, watch) == 0;
}

void cli_memory_watch_end(cli_memory_watch *watch)
{
    if (watch->running) {
        pthread_mutex_lock(&watch->mutex);
        watch->stop = true;
        pthread_cond_signal(&watch->wake);
        pthread_mutex_unlock(&watch->mutex);
        pthread_join(watch->thread, NULL);
    }
    pthread_cond_destroy(&watch->wake);
    pthread_mutex_destroy(&watch->mutex);
    cli_progress_end(&watch->progress);
}
