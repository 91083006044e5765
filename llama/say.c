/* SPDX-License-Identifier: Apache-2.0 */

/* Lines on standard error, each by one call, so that those of other threads do not come between. */

#include <stdarg.h>
#include <stdio.h>

#include "common/clock.h"
#include "common/text.h"
#include "plugin.h"

enum { LINE = 1024 };

void kvl_say(const char *format, ...)
{
    char line[LINE];
    va_list arguments;
    va_start(arguments, format);
    kvf_vformat(line, sizeof line, format, arguments);
    va_end(arguments);
    fprintf(stderr, "kvferry: %s\n", line);
}

#define ROW(name, key, text) {key, text},
static const struct {
    const char *key, *text;
} reasons[] = {KVL_REASONS(ROW)};
#undef ROW

void kvl_leave(kvl_plugin *p, kvl_layer *layer, kvl_reason reason, uint64_t rows,
               const char *detail)
{
    uint32_t *said = layer->cache ? &layer->cache->said : &p->said;
    p->counts.left[reason] += (double)rows;
    if (!(*said >> reason & 1))
        kvl_say("left to llama.cpp: %s: %s%s%s", layer->k->name, reasons[reason].text,
                detail ? ": " : "", detail ? detail : "");
    *said |= 1u << reason;
}

void kvl_summary(kvl_plugin *p)
{
    kvl_count_all(p);
    kvl_counts c = p->counts;
    for (int r = 0; r < KVL_REASONS_COUNT; r++)
        c.stock += c.left[r];
    const double all = c.served + c.stock;
    p->told_at = kvf_now_seconds();
    if (all + c.prompt + c.prompt_served == 0)
        return;
    char text[LINE];
    int at = kvf_format(
        text, LINE,
        "attended served=%.0f stock=%.0f share=%.4f prompt=%.0f prompt_served=%.0f tokens=%.0f "
        "held=%.0f hits=%.0f misses=%.0f bytes=%.0f put=%.0f verify=%.0f wrong=%.0f worst=%.4f",
        c.served, c.stock, all > 0 ? c.served / all : 1, c.prompt, c.prompt_served, c.tokens,
        c.held, c.hits, c.misses, c.bytes, c.put, c.verify, c.wrong, c.worst);
    if (p->card.type)
        at += kvf_format(text + at, (size_t)(LINE - at), " copied=%.0f",
                         (double)__atomic_load_n(&p->card.copied, __ATOMIC_RELAXED));
    for (int r = 0; r < KVL_REASONS_COUNT && at < LINE - 40; r++)
        if (c.left[r] > 0)
            at += kvf_format(text + at, (size_t)(LINE - at), " stock.%s=%.0f", reasons[r].key,
                             c.left[r]);
    kvl_say("%s", text);
}
