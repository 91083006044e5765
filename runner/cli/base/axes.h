/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_CLI_AXES_H
#define KVF_CLI_AXES_H

/*
 * Axes of a sweep: options with several values, as text separated by commas, and the walk over all
 * their combinations.
 *
 * It knows lists, not what is measured. Invariant: every value of a list is one of its option.
 */

#include "options.h"

#define CLI_AXES_MAX 16u

typedef struct cli_axis {
    const cli_option *option;
    const char *values;
} cli_axis;

/** How many values a list has. */
uint32_t cli_axis_count(const char *values);

#define CLI_WORD_BYTES 64u
/** One value of a list. */
void cli_axis_at(const char *values, uint64_t index, char word[CLI_WORD_BYTES]);

/** Combinations of @p count axes. */
uint64_t cli_axes_product(const cli_axis *axes, uint32_t count);

/** Set the fields of @p options to combination @p index; the last axis turns fastest. */
void cli_axes_set(const cli_axis *axes, uint32_t count, uint64_t index, void *options);

#endif
