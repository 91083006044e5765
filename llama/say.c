/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Lines on standard error, and the one line for a launcher. Every line is written by one call, so
 * that those of other threads do not come between.
 */

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "common/text.h"
#include "plugin.h"

enum { LINE = 1024 };

double kvl_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

void kvl_say(const char *format, ...)
{
    char line[LINE];
    va_list arguments;
    va_start(arguments, format);
    kvf_vformat(line, sizeof line, format, arguments);
    va_end(arguments);
    fprintf(stderr, "kvferry: %s\n", line);
}

void kvl_report(const char *format, ...)
{
    const char *number = getenv("KVFERRY_LLAMA_REPORT");
    char line[LINE], *end;
    if (!number || !*number)
        return;
    const long fd = strtol(number, &end, 10);
    if (*end || fd < 3 || fd > 65535)
        return;
    unsetenv("KVFERRY_LLAMA_REPORT");
    va_list arguments;
    va_start(arguments, format);
    int length = kvf_vformat(line, sizeof line - 1, format, arguments);
    va_end(arguments);
    if (length > (int)sizeof line - 2)
        length = (int)sizeof line - 2;
    line[length++] = '\n';
    ssize_t written;
    do
        written = write((int)fd, line, (size_t)length);
    while (written < 0 && errno == EINTR);
    close((int)fd);
}

static const struct {
    const char *key, *text;
} reasons[] = {
#define ROW(name, key, text) {key, text},
    KVL_REASONS(ROW)
#undef ROW
};

void kvl_leave(kvl_plugin *p, kvl_cache *cache, kvl_reason reason, const gg_tensor *k,
               uint64_t rows, const char *detail)
{
    p->counts.stock[reason] += rows;
    if (cache && cache->said >> reason & 1)
        return;
    if (cache)
        cache->said |= 1u << reason;
    kvl_say("left to llama.cpp: %s: %s%s%s", k->name, reasons[reason].text, detail ? ": " : "",
            detail ? detail : "");
}

void kvl_summary(kvl_plugin *p, int end)
{
    kvl_counts c = p->counts;
    kvl_counts_add(p, &c);
    uint64_t stock = 0;
    for (int r = 0; r < KVL_REASONS_COUNT; r++)
        stock += c.stock[r];
    p->said_at = kvl_now();
    const uint64_t all = c.served + stock;
    if (all + c.prompt + c.prompt_served == 0 ||
        (end && c.served == p->said_served && stock == p->said_stock))
        return;
    p->said_served = c.served;
    p->said_stock = stock;
    char text[LINE];
    int at = kvf_format(
        text, sizeof text,
        "attended served=%llu stock=%llu share=%.4f prompt=%llu prompt_served=%llu tokens=%.0f "
        "held=%.0f hits=%llu misses=%llu bytes=%llu put=%llu forks=%llu dropped=%llu "
        "verify=%llu wrong=%llu worst=%.3g",
        (unsigned long long)c.served, (unsigned long long)stock,
        all ? (double)c.served / (double)all : 1.0, (unsigned long long)c.prompt,
        (unsigned long long)c.prompt_served, c.attended, c.held, (unsigned long long)c.hits,
        (unsigned long long)c.misses, (unsigned long long)c.bytes, (unsigned long long)c.put,
        (unsigned long long)c.forks, (unsigned long long)c.dropped, (unsigned long long)c.verified,
        (unsigned long long)c.wrong, c.worst);
    uint32_t chains = 0, blocks = 0, most = 0;
    for (uint32_t i = 0; i < p->caches_count; i++)
        if (p->caches[i]->chains) {
            const kvl_chains_stats *s = kvl_chains_stats_get(p->caches[i]->chains);
            chains += s->chains;
            blocks += s->blocks;
            most += s->blocks_max;
        }
    at += snprintf(text + at, sizeof text - (size_t)at, " chains=%u blocks=%u blocks_max=%u",
                   chains, blocks, most);
    for (int r = 0; r < KVL_REASONS_COUNT && at < LINE - 40; r++)
        if (c.stock[r])
            at += snprintf(text + at, sizeof text - (size_t)at, " stock.%s=%llu", reasons[r].key,
                           (unsigned long long)c.stock[r]);
    kvl_say("%s", text);
}
