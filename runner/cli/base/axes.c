/* SPDX-License-Identifier: Apache-2.0 */

/* The walk over a sweep; see the header. */

#include "axes.h"

#include "common/base.h"

#include <string.h>

uint32_t cli_axis_count(const char *values)
{
    uint32_t count = 1;
    while ((values = strchr(values, ',')) != NULL) {
        values++;
        count++;
    }
    return count;
}

void cli_axis_at(const char *values, uint64_t index, char word[CLI_WORD_BYTES])
{
    for (; index > 0; index--)
        values = strchr(values, ',') + 1;
    snprintf(word, CLI_WORD_BYTES, "%.*s", (int)strcspn(values, ","), values);
}

uint64_t cli_axes_product(const cli_axis *axes, uint32_t count)
{
    uint64_t product = 1;
    for (uint32_t i = 0; i < count; i++)
        product *= cli_axis_count(axes[i].values);
    return product;
}

void cli_axes_set(const cli_axis *axes, uint32_t count, uint64_t index, void *options)
{
    for (uint32_t i = count; i-- > 0;) {
        const uint32_t values = cli_axis_count(axes[i].values);
        char word[CLI_WORD_BYTES];
        cli_axis_at(axes[i].values, index % values, word);
        const int is_set =
            kvf_setting_parse(&axes[i].option->is, word, (char *)options + axes[i].option->base);
        KVF_ASSERT(is_set);
        (void)is_set;
        index /= values;
    }
}
