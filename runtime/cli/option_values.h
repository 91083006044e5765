/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_CLI_OPTION_VALUES_H
#define KVF_CLI_OPTION_VALUES_H

/*
 * One option and its value: a row of a table of options, and the text behind it as a name or a
 * number.
 *
 * It knows text and ranges, not what an option is for. Invariant: a function that returns false has
 * told on stderr which option, what was given, and what to give instead.
 */

#include <stdbool.h>
#include <stdint.h>

typedef struct cli_option {
    const char *name;
    int id;
    const char *argument; /* NULL = none */
    const char *help;
} cli_option;

/* A name that a value has on the command line; lists end with a NULL name. */
typedef struct cli_named {
    const char *name;
    int value;
} cli_named;

/** "unknown" if the value has no name. Never NULL. */
const char *cli_name_of(const cli_named *names, int value);

/** The help of the option says what to give. At most 15 names. */
bool cli_option_name(const cli_option *row, const char *text, const cli_named *names, int *out);
bool cli_option_u64(const cli_option *row, const char *text, uint64_t least, uint64_t most,
                    uint64_t *out);
bool cli_option_u32(const cli_option *row, const char *text, uint32_t least, uint32_t most,
                    uint32_t *out);
bool cli_option_real(const cli_option *row, const char *text, double least, double most,
                     double *out);

/** The candidate nearest to a misspelt word, or NULL if none is near. names ends with NULL. */
const char *cli_suggest(const char *word, const char *const *names);

#endif
