/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The common half of the sweeps of `kvferry bench`: axes, a walk through the cases, a table of
 * results, a line through some of its rows, and the exit status. See the header.
 */

#include "bench.h"

#include "common/text.h"
#include "interrupt.h"

#include <string.h>

/* ---- options ---- */

static const cli_option rows[] = {
    {.is = {"format", KVF_SETTING_NAME, CLI_FIELD(bench_results, format), .names = cli_format_names,
            .high = 4,
            .meaning = "format of the results; share/kvferry has a gnuplot script that draws csv"},
     .letter = 'o'},
    {.is = {"json", KVF_SETTING_TEXT, CLI_FIELD(bench_results, json),
            .meaning = "write every figure there as well"}},
};

void bench_add_results(cli_command *command, size_t at)
{
    cli_add(command, rows, sizeof rows / sizeof *rows, at);
}

uint32_t bench_axes(const cli_command *command, bench_values_fn swept, void *user,
                    cli_axis axes[CLI_AXES_MAX])
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < command->count; i++) {
        const cli_option *option = &command->options[i];
        const char *values = option->given;
        if (option->is_list && !values && swept)
            values = swept(user, option->is.name);
        if (option->is_list && values)
            axes[count++] = (cli_axis){option, values};
    }
    return count;
}

/* ---- the walk ---- */

bool bench_open(bench_sweep *s, const bench_results *results, const kvf_runtime_config *config)
{
    kvf_error error = {0};
    s->results = *results;
    cli_interrupt_watch();
    if (s->results.json && !cli_output_open(&s->json, s->results.json))
        return false;
    if (kvf_runtime_open(config, &s->runtime, &error) == KVF_OK)
        return true;
    cli_complain(&s->command, error.text);
    return false;
}

bool bench_opened(bench_sweep *s, kvf_status status, const char *option)
{
    if (status != KVF_OK)
        fprintf(stderr, "kvferry: %s%s\n", option, kvf_runtime_error(s->runtime)->text);
    return status == KVF_OK;
}

void bench_begin(bench_sweep *s, uint64_t total, const char *unit)
{
    cli_progress_begin(&s->progress, "measuring", total, unit);
    s->goes_on = true;
}

void bench_walk(bench_sweep *s, uint64_t count, bench_case_fn run, void *user)
{
    for (uint64_t n = 0; n < count && s->goes_on; n++) {
        s->goes_on = run(user, n) && !cli_interrupted();
        cli_progress_at(&s->progress, ++s->done);
    }
}

void bench_end(bench_sweep *s)
{
    cli_progress_end(&s->progress);
}

cli_cell *bench_row(bench_sweep *s)
{
    cli_cell *row = cli_table_row(&s->table);
    if (!row) {
        fputs("kvferry: no memory for the results\n", stderr);
        s->failed = true;
    }
    return row;
}

/* ---- the line ---- */

#define FIT_MAX 24u

static bool is_on_line(const cli_table *t, const bench_lines *lines, uint32_t row, uint32_t first)
{
    bool is_alike = cli_table_at(t, row, lines->y)->is_set;
    for (uint32_t i = 0; i < BENCH_ALIKE_MAX; i++) {
        const cli_cell *a = cli_table_at(t, row, lines->alike[i]);
        const cli_cell *b = cli_table_at(t, first, lines->alike[i]);
        is_alike = is_alike && a->integer == b->integer && strcmp(a->text, b->text) == 0;
    }
    return is_alike;
}

static void fit_line(cli_table *t, const bench_lines *lines, uint32_t first)
{
    uint32_t of[FIT_MAX], count = 0;
    double x[FIT_MAX] = {0}, y[FIT_MAX] = {0};
    kvf_link_line line;
    for (uint32_t i = first; i < t->row_count && count < FIT_MAX; i++)
        if (is_on_line(t, lines, i, first)) {
            x[count] = (double)cli_table_at(t, i, lines->x)->integer;
            y[count] = cli_table_at(t, i, lines->y)->real;
            of[count++] = i;
        }
    if (kvf_link_fit(x, y, count, 1, &line) != KVF_OK)
        return;
    for (uint32_t i = 0; i < count; i++) {
        cli_cell *row = cli_table_at(t, of[i], lines->predicted);
        cli_cell_real(&row[0], line.intercept + line.slope * x[i]);
        cli_cell_real(&row[1], line.intercept);
        cli_cell_real(&row[2], 1e-3 / line.slope);
        cli_cell_real(&row[3], line.r_squared);
    }
}

void bench_fit(cli_table *t, const bench_lines *lines, uint32_t first, const char *only)
{
    for (; first < t->row_count; first++)
        if (!cli_table_at(t, first, lines->predicted + 3)->is_set &&
            (!only || strcmp(cli_table_at(t, first, lines->alike[0])->text, only) == 0))
            fit_line(t, lines, first);
}

/* ---- the end ---- */

#define FACTS_MAX 24u

static const char *device_kind(const bench_sweep *s)
{
    return kvf_runtime_device(s->runtime) == KVF_DEVICE_CUDA ? "cuda" : "host";
}

const char *bench_device(bench_sweep *s)
{
    snprintf(s->device, sizeof s->device, "%s (%s)", kvf_runtime_device_name(s->runtime),
             device_kind(s));
    return s->device;
}

bool bench_write(bench_sweep *s, const cli_fact *own)
{
    bench_machine machine;
    bench_machine_read(&machine);
    cli_fact facts[FACTS_MAX] = {{"kvferry", kvf_version(), 0.0},
                                 {"bench", strchr(s->command.name, ' ') + 1, 0.0},
                                 {"machine", machine.processor, 0.0},
                                 {"kernel", machine.kernel, 0.0},
                                 {"cpus", NULL, machine.cpus},
                                 {"device", device_kind(s), 0.0},
                                 {"device_name", kvf_runtime_device_name(s->runtime), 0.0}};
    uint32_t count = 7;
    for (uint32_t i = 0; own[i].name && count < FACTS_MAX - 1; i++)
        facts[count++] = own[i];
    return cli_table_write(&s->table, s->results.format, facts, stdout) &&
           cli_table_save(&s->table, facts, &s->json);
}

int bench_close(bench_sweep *s, bool is_done)
{
    if (is_done && s->measured == 0 && !cli_interrupted()) {
        fputs("kvferry: nothing was measured: see the status of each case\n", stderr);
        s->failed = true;
    }
    cli_output_discard(&s->json);
    cli_table_free(&s->table);
    kvf_runtime_close(s->runtime);
    return is_done && cli_interrupted() ? cli_interrupt_status() : s->failed || !is_done;
}
