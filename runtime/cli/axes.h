/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_CLI_AXES_H
#define KVF_CLI_AXES_H

/*
 * Axes of a sweep: short lists of numbers or names, from the command line or by default, and the
 * walk over all their combinations.
 *
 * It knows lists, not what is measured. Invariant: every axis has at least one value.
 */

#include <stdbool.h>
#include <stdint.h>

#define CLI_AXIS_VALUES_MAX 24u

typedef struct cli_axis {
    uint32_t count;
    int64_t values[CLI_AXIS_VALUES_MAX];
} cli_axis;

/* A name that a value may have on the command line. */
typedef struct cli_axis_name {
    const char *name;
    int64_t value;
} cli_axis_name;

/**
 * Read "4K,16K" or "uniform,zipf".
 *
 * @param option  for messages, e.g. "--page-bytes"
 * @param names   ends with a name NULL; NULL = numbers, with suffixes K, M and G (1024)
 * @return false after a message on stderr
 */
bool cli_axis_parse(const char *option, const char *text, const cli_axis_name *names, int64_t least,
                    int64_t most, cli_axis *out);

/** Name of a value; "" if it has none. */
const char *cli_axis_value_name(const cli_axis_name *names, int64_t value);

/** Combinations of @p count axes. */
uint64_t cli_axes_product(const cli_axis *axes, uint32_t count);

/** The values [count] of combination @p index; the last axis turns fastest. */
void cli_axes_at(const cli_axis *axes, uint32_t count, uint64_t index, int64_t *values);

#endif
