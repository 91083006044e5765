/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Writes a table of results in five formats; see the header. Columns that are empty in every row
 * are left out of what people read.
 */

#include "output.h"

#include "common/percentile.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common/text.h"

const char *const cli_format_names[] = {
    [CLI_FORMAT_TABLE] = "table", [CLI_FORMAT_CSV] = "csv",     [CLI_FORMAT_JSON] = "json",
    [CLI_FORMAT_JSONL] = "jsonl", [CLI_FORMAT_MARKDOWN] = "md", NULL};

/* ---- cells ---- */

cli_cell *cli_table_row(cli_table *table)
{
    cli_cell *cells = model_room(table->cells, table->row_count, &table->row_capacity,
                                 table->column_count * sizeof *cells);
    if (!cells)
        return NULL;
    table->cells = cells;
    cli_cell *row = table->cells + (size_t)table->row_count++ * table->column_count;
    memset(row, 0, table->column_count * sizeof *row);
    return row;
}

void cli_table_free(cli_table *table)
{
    free(table->cells);
    table->cells = NULL;
    table->row_count = table->row_capacity = 0;
}

void cli_cell_text(cli_cell *cell, const char *text)
{
    cell->is_set = true;
    snprintf(cell->text, sizeof cell->text, "%s", text);
}

void cli_cell_integer(cli_cell *cell, uint64_t value)
{
    cell->is_set = true;
    cell->integer = value;
}

void cli_cell_real(cli_cell *cell, double value)
{
    cell->is_set = isfinite(value);
    cell->real = value;
}

void cli_cells_spread(cli_cell cells[3], double *values, size_t count)
{
    static const unsigned percents[3] = {50, 10, 90};
    kvf_sort(values, count);
    for (int i = 0; i < 3; i++)
        cli_cell_real(&cells[i], kvf_percentile(values, count, percents[i]));
}

cli_cell *cli_table_at(const cli_table *table, uint32_t row, uint32_t column)
{
    return table->cells + (size_t)row * table->column_count + column;
}

/* ---- for people ---- */

#define CELL_BYTES 48u

static const char *shown(const cli_column *column, const cli_cell *cell, char text[CELL_BYTES])
{
    text[0] = '\0';
    if (!cell->is_set)
        return text;
    if (column->kind == CLI_CELL_TEXT)
        snprintf(text, CELL_BYTES, "%s", cell->text);
    else if (column->kind == CLI_CELL_INTEGER)
        snprintf(text, CELL_BYTES, "%llu", (unsigned long long)cell->integer);
    else
        kvf_format(text, CELL_BYTES, "%.*f", column->decimals, cell->real);
    return text;
}

/* 0: the column is not shown. */
static int column_width(const cli_table *t, uint32_t column)
{
    size_t width = 0;
    char text[CELL_BYTES];
    if (!t->columns[column].head)
        return 0;
    for (uint32_t row = 0; row < t->row_count; row++) {
        const size_t n = strlen(shown(&t->columns[column], cli_table_at(t, row, column), text));
        width = n > width ? n : width;
    }
    const size_t head = strlen(t->columns[column].head);
    return width == 0 ? 0 : (int)(head > width ? head : width);
}

static void write_line(const cli_table *t, uint32_t row, bool is_head, const char *left,
                       const char *between, const char *right, FILE *file)
{
    char text[CELL_BYTES];
    bool first = true;
    fputs(left, file);
    for (uint32_t c = 0; c < t->column_count; c++) {
        const int width = column_width(t, c);
        if (width == 0)
            continue;
        const char *cell =
            is_head ? t->columns[c].head : shown(&t->columns[c], cli_table_at(t, row, c), text);
        const bool to_left = t->columns[c].kind == CLI_CELL_TEXT;
        fprintf(file, to_left ? "%s%-*s" : "%s%*s", first ? "" : between, width, cell);
        first = false;
    }
    fprintf(file, "%s\n", right);
}

static void write_rule(const cli_table *t, FILE *file)
{
    fputs("|", file);
    for (uint32_t c = 0; c < t->column_count; c++)
        if (column_width(t, c) != 0)
            fputs(t->columns[c].kind == CLI_CELL_TEXT ? "---|" : "---:|", file);
    fputs("\n", file);
}

static void write_for_people(const cli_table *t, bool is_markdown, FILE *file)
{
    const char *left = is_markdown ? "| " : "", *between = is_markdown ? " | " : "  ";
    const char *right = is_markdown ? " |" : "";
    write_line(t, 0, true, left, between, right, file);
    if (is_markdown)
        write_rule(t, file);
    for (uint32_t row = 0; row < t->row_count; row++)
        write_line(t, row, false, left, between, right, file);
}

/* ---- for programs ---- */

static void write_csv(const cli_table *t, FILE *file)
{
    for (uint32_t c = 0; c < t->column_count; c++)
        fprintf(file, "%s%s", c ? "," : "", t->columns[c].name);
    fputs("\n", file);
    for (uint32_t row = 0; row < t->row_count; row++) {
        for (uint32_t c = 0; c < t->column_count; c++) {
            const cli_cell *cell = cli_table_at(t, row, c);
            fputs(c ? "," : "", file);
            if (!cell->is_set)
                continue;
            if (t->columns[c].kind == CLI_CELL_INTEGER)
                fprintf(file, "%llu", (unsigned long long)cell->integer);
            else if (t->columns[c].kind == CLI_CELL_REAL)
                kvf_print(file, "%.9g", cell->real);
            else if (strpbrk(cell->text, ",\""))
                fprintf(file, "\"%s\"", cell->text); /* names of ours have no quotes */
            else
                fputs(cell->text, file);
        }
        fputs("\n", file);
    }
}

static void json_row(const cli_table *t, uint32_t row, cli_json *j)
{
    cli_json_object(j, NULL);
    for (uint32_t c = 0; c < t->column_count; c++) {
        const cli_cell *cell = cli_table_at(t, row, c);
        const char *name = t->columns[c].name;
        if (!cell->is_set)
            continue;
        if (t->columns[c].kind == CLI_CELL_INTEGER)
            cli_json_integer(j, name, cell->integer);
        else if (t->columns[c].kind == CLI_CELL_REAL)
            cli_json_real(j, name, cell->real);
        else
            cli_json_text(j, name, cell->text);
    }
    cli_json_end(j, '}');
}

static bool write_json(const cli_table *t, const cli_fact *facts, FILE *file)
{
    cli_json j = {0};
    cli_json_object(&j, NULL);
    for (; facts->name; facts++)
        if (facts->text)
            cli_json_text(&j, facts->name, facts->text);
        else
            cli_json_real(&j, facts->name, facts->number);
    cli_json_array(&j, "results");
    for (uint32_t row = 0; row < t->row_count; row++)
        json_row(t, row, &j);
    cli_json_end(&j, ']');
    cli_json_end(&j, '}');
    const bool is_whole = !j.failed;
    if (is_whole)
        fprintf(file, "%s\n", j.text.bytes);
    cli_json_free(&j);
    return is_whole;
}

static bool write_jsonl(const cli_table *t, FILE *file)
{
    for (uint32_t row = 0; row < t->row_count; row++) {
        cli_json j = {0};
        json_row(t, row, &j);
        const bool is_whole = !j.failed;
        if (is_whole)
            fprintf(file, "%s\n", j.text.bytes);
        cli_json_free(&j);
        if (!is_whole)
            return false;
    }
    return true;
}

bool cli_table_write(const cli_table *table, cli_format format, const cli_fact *facts, FILE *file)
{
    bool is_whole = true;
    errno = 0;
    if (format == CLI_FORMAT_CSV)
        write_csv(table, file);
    else if (format == CLI_FORMAT_JSON)
        is_whole = write_json(table, facts, file);
    else if (format == CLI_FORMAT_JSONL)
        is_whole = write_jsonl(table, file);
    else
        write_for_people(table, format == CLI_FORMAT_MARKDOWN, file);
    if (fflush(file) == 0 && !ferror(file) && is_whole)
        return true;
    fprintf(stderr, "kvferry: the results could not be written: %s\n",
            is_whole && errno ? kvf_errno_text(errno) : "there is no memory for them");
    return false;
}

bool cli_table_save(const cli_table *table, const cli_fact *facts, cli_output *output)
{
    return !output->file || (cli_table_write(table, CLI_FORMAT_JSON, facts, output->file) &&
                             cli_output_commit(output));
}
