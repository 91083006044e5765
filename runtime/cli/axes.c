/* SPDX-License-Identifier: Apache-2.0 */

/* Lists of a sweep; see the header. */

#include "axes.h"

#include <ctype.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define WORD_BYTES 32u

static bool read_number(const char *word, int64_t *out)
{
    char *end = NULL;
    errno = 0;
    const bool starts = isdigit((unsigned char)word[0]) || word[0] == '-';
    long long value = starts ? strtoll(word, &end, 10) : 0;
    if (!end || end == word || errno)
        return false;
    int shift = 0;
    if (*end) {
        const char *units = "KMG", *unit = strchr(units, toupper((unsigned char)*end));
        if (!unit || end[1])
            return false;
        shift = 10 * (int)(unit - units + 1);
    }
    if (value < 0 ? shift != 0 : value > INT64_MAX >> shift)
        return false;
    *out = (int64_t)value * ((int64_t)1 << shift);
    return true;
}

static bool read_name(const char *word, const cli_axis_name *names, int64_t *out)
{
    for (; names->name; names++)
        if (strcmp(names->name, word) == 0) {
            *out = names->value;
            return true;
        }
    return false;
}

static void complain(const char *option, const char *word, const cli_axis_name *names,
                     int64_t least, int64_t most)
{
    fprintf(stderr, "kvferry: %s has '%s'; give ", option, word);
    if (!names) {
        fprintf(stderr, "numbers from %lld to %lld, apart by commas (K, M, G = 1024s)\n",
                (long long)least, (long long)most);
        return;
    }
    for (; names->name; names++)
        fprintf(stderr, "%s%s", names->name, names[1].name ? ", " : "\n");
}

bool cli_axis_parse(const char *option, const char *text, const cli_axis_name *names, int64_t least,
                    int64_t most, cli_axis *out)
{
    *out = (cli_axis){0};
    for (;;) {
        const size_t length = strcspn(text, ",");
        char word[WORD_BYTES];
        int64_t value = 0;
        snprintf(word, sizeof word, "%.*s", (int)(length < WORD_BYTES ? length : WORD_BYTES), text);
        const bool is_read = names ? read_name(word, names, &value) : read_number(word, &value);
        if (length >= WORD_BYTES || !is_read || (!names && (value < least || value > most))) {
            complain(option, word, names, least, most);
            return false;
        }
        if (out->count == CLI_AXIS_VALUES_MAX) {
            fprintf(stderr, "kvferry: %s has more than %u values\n", option, CLI_AXIS_VALUES_MAX);
            return false;
        }
        out->values[out->count++] = value;
        if (text[length] == '\0')
            return true;
        text += length + 1;
    }
}

const char *cli_axis_value_name(const cli_axis_name *names, int64_t value)
{
    for (; names->name; names++)
        if (names->value == value)
            return names->name;
    return "";
}

uint64_t cli_axes_product(const cli_axis *axes, uint32_t count)
{
    uint64_t product = 1;
    for (uint32_t i = 0; i < count; i++)
        product *= axes[i].count;
    return product;
}

void cli_axes_at(const cli_axis *axes, uint32_t count, uint64_t index, int64_t *values)
{
    for (uint32_t i = count; i-- > 0;) {
        values[i] = axes[i].values[index % axes[i].count];
        index /= axes[i].count;
    }
}
