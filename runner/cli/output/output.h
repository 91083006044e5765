/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_CLI_OUTPUT_H
#define KVF_CLI_OUTPUT_H

/*
 * How a command tells results: a file, JSON, bars, and a table. It knows none of them by meaning.
 */

#include "model_memory.h"

#include <kvferry/setting.h>
#include <limits.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

/*
 * A result file that is either complete or not there.
 *
 * It knows bytes, not what they mean. Invariant: until cli_output_commit has succeeded the path
 * holds what it held before; after a failure nothing partial is left. A file that is replaced keeps
 * owner, mode and the symbolic link to it. (A path that is no regular file, such as a pipe, is
 * written directly, and so is the file that standard output or error goes to.)
 */

/** Zero-initialise; a zero one accepts writes and commits, and does nothing. */
typedef struct cli_output {
    const char *path;
    FILE *file;
    char place[PATH_MAX];        /* after symbolic links */
    char partial[PATH_MAX + 16]; /* empty = path is written directly */
    bool failed;                 /* a message was printed */
} cli_output;

/** @return false after a message naming the path */
bool cli_output_open(cli_output *output, const char *path);

/** Append. After the first failure, which is reported, nothing more is written. */
void cli_output_write(cli_output *output, const void *bytes, size_t size);

/** Put the file in its place. @return false if this or an earlier call failed */
bool cli_output_commit(cli_output *output);

/** Forget an output that was not committed. */
void cli_output_discard(cli_output *output);

/*
 * A table of results, printed for people (table, md) or for programs (csv, json, jsonl).
 *
 * It knows columns and cells, not what was measured. Invariant: every row has a cell for every
 * column, and a cell that was not set is empty, null or left out.
 */

typedef enum cli_format {
    CLI_FORMAT_TABLE,
    CLI_FORMAT_CSV,
    CLI_FORMAT_JSON,
    CLI_FORMAT_JSONL,
    CLI_FORMAT_MARKDOWN,
} cli_format;

typedef enum cli_cell_kind { CLI_CELL_TEXT, CLI_CELL_INTEGER, CLI_CELL_REAL } cli_cell_kind;

typedef struct cli_column {
    const char *name; /* of csv and json: lower case, with its unit */
    const char *head; /* of table and md; NULL = the column is for programs only */
    cli_cell_kind kind;
    int decimals; /* of table and md */
} cli_column;

/* Numbers and rows of a list of columns, X(NUMBER, name, head, KIND, decimals). */
#define CLI_COLUMN_NUMBER(number, ...)                     number,
#define CLI_COLUMN_ROW(number, name, head, kind, decimals) {name, head, CLI_CELL_##kind, decimals},

#define CLI_CELL_TEXT_BYTES 48u

typedef struct cli_cell {
    bool is_set;
    uint64_t integer;
    double real;
    char text[CLI_CELL_TEXT_BYTES];
} cli_cell;

typedef struct cli_table {
    const cli_column *columns; /* [column_count] */
    uint32_t column_count;
    cli_cell *cells; /* [row_capacity, column_count] */
    uint32_t row_count;
    uint32_t row_capacity;
} cli_table;

/** A new row of empty cells, valid until the next one. @return NULL if there is no memory */
cli_cell *cli_table_row(cli_table *table);
void cli_table_free(cli_table *table);

void cli_cell_text(cli_cell *cell, const char *text);
void cli_cell_integer(cli_cell *cell, uint64_t value);
void cli_cell_real(cli_cell *cell, double value); /* not set if not finite */
/* The median of @p values, which are sorted then, and the 10th and 90th percentile. */
void cli_cells_spread(cli_cell cells[3], double *values, size_t count);

cli_cell *cli_table_at(const cli_table *table, uint32_t row, uint32_t column);

/** Names and values of the head of JSON output, in order; ends with NULL. */
typedef struct cli_fact {
    const char *name;
    const char *text; /* NULL = number */
    double number;
} cli_fact;

/** @param facts  ends with a name NULL. @return false after a message */
bool cli_table_write(const cli_table *table, cli_format format, const cli_fact *facts, FILE *file);

/** As JSON to an output that is open or, if nobody asked for it, zero; commits it. */
bool cli_table_save(const cli_table *table, const cli_fact *facts, cli_output *output);

/** Names of the formats; ends with NULL. */
extern const char *const cli_format_names[];

/*
 * Writes JSON into memory.
 *
 * It knows commas and escapes. Invariant: what was written so far is the beginning of one valid
 * object, whatever the strings hold; running out of memory is remembered until the end.
 */

/** Zero-initialise. */
typedef struct cli_json {
    kvf_text text;
    bool comma;  /* the next member needs one */
    bool failed; /* out of memory */
} cli_json;

/** key NULL inside arrays and at the top. */
void cli_json_object(cli_json *json, const char *key);
void cli_json_array(cli_json *json, const char *key);
void cli_json_end(cli_json *json, char end); /* '}' or ']'; a newline, after the object */
void cli_json_text(cli_json *json, const char *key, const char *value);
/** Zero bytes are escaped. */
void cli_json_bytes(cli_json *json, const char *key, const char *bytes, size_t size);
void cli_json_integer(cli_json *json, const char *key, uint64_t value);
void cli_json_real(cli_json *json, const char *key, double value); /* null if not finite */
void cli_json_bool(cli_json *json, const char *key, bool value);
void cli_json_null(cli_json *json, const char *key);
/** A field of a config of the library, under @p key. */
void cli_json_setting(cli_json *json, const char *key, const kvf_setting *setting,
                      const void *config);
/** Writes it to @p output if that is open, which is committed, else to @p file. @return
 * false after a message */
bool cli_json_write(cli_json *json, cli_output *output, FILE *file);
/** The object as a line on standard output. @return false after a message */
bool cli_json_print(cli_json *json);
void cli_json_free(cli_json *json);

/*
 * A plot for terminals: one line and one bar per value, as wide as the terminal.
 *
 * It knows widths and characters, not what the values are. Invariant: no line is wider than the
 * terminal, or than 80 columns where there is none.
 */

typedef struct cli_bars {
    const char *head;     /* above the numbers at the left */
    uint32_t first;       /* number of the first line */
    uint32_t count;       /* at least 1 */
    const double *values; /* [count]; what is below 0 or no number has no bar */
    uint32_t marked;      /* number of the line that is marked */
    const char *mark;     /* after its value */
} cli_bars;

void cli_bars_print(const cli_bars *bars, FILE *file);

#endif
