/* SPDX-License-Identifier: Apache-2.0 */

/* Bars; see the header. */

#include "output.h"

#include <math.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "common/text.h"

#define COLUMNS_NONE 80u
#define COLUMNS_MIN  40u
#define COLUMNS_MAX  120u

static unsigned columns_of(FILE *file)
{
    struct winsize size;
    const int descriptor = fileno(file);
    unsigned columns = COLUMNS_NONE;
    if (isatty(descriptor) && ioctl(descriptor, TIOCGWINSZ, &size) == 0 && size.ws_col > 0)
        columns = size.ws_col;
    return columns > COLUMNS_MAX ? COLUMNS_MAX : columns;
}

void cli_bars_print(const cli_bars *bars, FILE *file)
{
    unsigned columns = columns_of(file);
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
        const long filled = has_bar ? lround(value / most * width) : 0;
        fprintf(file, "%*u%*s", (int)left, bars->first + i, (int)gap, "");
        for (long k = 0; k < (long)width; k++)
            fputc(k < filled ? '#' : ' ', file);
        if (isfinite(value))
            kvf_print(file, "  %10.4g", value);
        else
            fprintf(file, "  %10s", "-");
        fprintf(file, "%s%s\n", bars->first + i == bars->marked ? "  " : "",
                bars->first + i == bars->marked ? bars->mark : "");
    }
}
