/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_CLI_TABLE_H
#define KVF_CLI_TABLE_H

/*
 * A table of results, printed for people (table, md) or for programs (csv, json, jsonl).
 *
 * It knows columns and cells, not what was measured. Invariant: every row has a cell for every
 * column, and a cell that was not set is empty, null or left out.
 */

#include "model_memory.h"
#include "output_file.h"

#include <stdio.h>

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

/* Of a list of columns, X(NUMBER, name, head, KIND, decimals): their numbers, and their rows. */
#define CLI_COLUMN_NUMBER(number, ...)                     number,
#define CLI_COLUMN_ROW(number, name, head, kind, decimals) {name, head, CLI_CELL_##kind, decimals},

#define CLI_CELL_TEXT_BYTES 40u

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

const cli_cell *cli_table_at(const cli_table *table, uint32_t row, uint32_t column);

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

#endif
