/* SPDX-License-Identifier: Apache-2.0 */

/* Single values of options; see the header. */

#include "option_values.h"

#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const char *cli_name_of(const cli_named *names, int value)
{
    for (; names->name; names++)
        if (names->value == value)
            return names->name;
    return "unknown";
}

bool cli_option_name(const cli_option *row, const char *text, const cli_named *names, int *out)
{
    const char *candidates[16];
    size_t count = 0;
    for (const cli_named *n = names; n->name; n++) {
        if (strcmp(n->name, text) == 0) {
            *out = n->value;
            return true;
        }
        candidates[count++] = n->name;
    }
    candidates[count] = NULL;
    const char *near = cli_suggest(text, candidates);
    fprintf(stderr, "kvferry: --%s is '%s'; give %s", row->name, text, row->help);
    fprintf(stderr, near ? " (did you mean '%s'?)\n" : "\n", near);
    return false;
}

bool cli_option_u64(const cli_option *row, const char *text, uint64_t least, uint64_t most,
                    uint64_t *out)
{
    char *end = NULL;
    errno = 0;
    unsigned long long value = isdigit((unsigned char)text[0]) ? strtoull(text, &end, 10) : 0;
    if (end && *end == '\0' && errno == 0 && value >= least && value <= most) {
        *out = value;
        return true;
    }
    fprintf(stderr, "kvferry: --%s is '%s'; give a whole number from %llu to %llu\n", row->name,
            text, (unsigned long long)least, (unsigned long long)most);
    return false;
}

bool cli_option_u32(const cli_option *row, const char *text, uint32_t least, uint32_t most,
                    uint32_t *out)
{
    uint64_t value;
    if (!cli_option_u64(row, text, least, most, &value))
        return false;
    *out = (uint32_t)value;
    return true;
}

bool cli_option_real(const cli_option *row, const char *text, double least, double most,
                     double *out)
{
    char *end = NULL;
    errno = 0;
    double value = isspace((unsigned char)text[0]) ? NAN : strtod(text, &end);
    if (end && end != text && *end == '\0' && errno == 0 && value >= least && value <= most) {
        *out = value;
        return true;
    }
    fprintf(stderr, "kvferry: --%s is '%s'; give a number from %g to %g\n", row->name, text, least,
            most);
    return false;
}
