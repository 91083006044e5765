/* SPDX-License-Identifier: Apache-2.0 */

/* Bars of eighths of a character; see the header. */

#include "output.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/ioctl.h>
#include <unistd.h>

#define COLUMNS_NONE 80u
#define COLUMNS_MIN  40u
#define COLUMNS_MAX  120u
#define EIGHTHS      8u

bool cli_locale_is_ascii(void)
{
    static const char *const names[] = {"LC_ALL", "LC_CTYPE", "LANG"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const char *value = getenv(names[i]);
        if (!value || !*value)
            continue;
        const char *charset = strchr(value, '.');
        return !charset ||
               (strncasecmp(charset, ".utf-8", 6) != 0 && strncasecmp(charset, ".utf8", 5) != 0);
    }
    return true;
}

static unsigned columns_of(FILE *file)
{
    struct winsize size;
    const int descriptor = fileno(file);
    unsigned columns = COLUMNS_NONE;
    if (isatty(descriptor) && ioctl(descriptor, TIOCGWINSZ, &size) == 0 && size.ws_col > 0)
        columns = size.ws_col;
    return columns > COLUMNS_MAX ? COLUMNS_MAX : columns;
}

static void print_bar(unsigned eighths, unsigned width, bool is_ascii, FILE *file)
{
    static const char *const parts[EIGHTHS] = {"", "▏", "▎", "▍", "▌", "▋", "▊", "▉"};
    unsigned used = eighths / EIGHTHS;
    for (unsigned i = 0; i < used; i++)
        fputs(is_ascii ? "#" : "█", file);
    if (is_ascii && eighths % EIGHTHS >= EIGHTHS / 2) {
        fputs("#", file);
        used++;
    } else if (!is_ascii && eighths % EIGHTHS) {
        fputs(parts[eighths % EIGHTHS], file);
        used++;
    }
    fprintf(file, "%*s", (int)(width - used), "");
}

void cli_bars_print(const cli_bars *bars, FILE *file)
{
    unsigned columns = bars->columns ? bars->columns : columns_of(file);
    double most = 0.0;
    if (columns < COLUMNS_MIN)
        columns = COLUMNS_MIN;
    for (uint32_t i = 0; i < bars->count; i++)
        if (isfinite(bars->values[i]) && bars->values[i] > most)
            most = bars->values[i];
    /* number, bar, value, mark, apart by two spaces */
    const unsigned left = (unsigned)strlen(bars->head) + 2;
    const unsigned gap = 2;
    const unsigned right = 2 + 10 + 2 + (unsigned)strlen(bars->mark);
    const unsigned width = columns > left + gap + right + 8 ? columns - left - gap - right : 8;
    fprintf(file, "  %s\n", bars->head);
    for (uint32_t i = 0; i < bars->count; i++) {
        const double value = bars->values[i];
        const bool has_bar = isfinite(value) && value > 0.0 && most > 0.0;
        const unsigned eighths =
            has_bar ? (unsigned)lround(value / most * (double)(width * EIGHTHS)) : 0;
        fprintf(file, "%*u%*s", (int)left, bars->first + i, (int)gap, "");
        print_bar(eighths, width, bars->is_ascii, file);
        if (isfinite(value))
            fprintf(file, "  %10.4g", value);
        else
            fprintf(file, "  %10s", "-");
        fprintf(file, "%s%s\n", bars->first + i == bars->marked ? "  " : "",
                bars->first + i == bars->marked ? bars->mark : "");
    }
}
