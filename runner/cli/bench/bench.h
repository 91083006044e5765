/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_CLI_BENCH_H
#define KVF_CLI_BENCH_H

/*
 * The commands of `kvferry bench`. @return exit status
 */

#include "options.h"
#include "output.h"
#include "progress.h"

#include <kvferry/disk.h>
#include <kvferry/link.h>

#include <stdbool.h>
#include <stdint.h>

int cli_bench_link_main(int argc, char **argv);
int cli_bench_disk_main(int argc, char **argv);
int cli_bench_decode_main(int argc, char **argv);

/*
 * A sweep: cases by the values of options, and a table of what they gave.
 *
 * It knows options, progress and output, not what a case is. Invariant: a sweep that is zero or
 * half open can be closed.
 */

/** Options of the results. */
typedef struct bench_results {
    cli_format format;
    const char *json; /* a file, or NULL */
} bench_results;

/** Zero-initialise all but columns and column_count of the table. */
typedef struct bench_sweep {
    cli_command command;
    bench_results results;
    kvf_runtime *runtime;
    cli_table table;
    cli_output json;
    cli_progress progress;
    char device[280];
    uint64_t done;     /* cases */
    uint32_t measured; /* of them, those that gave figures */
    bool goes_on, failed;
} bench_sweep;

/** --format and --json; @p at = offset of a bench_results in the options. */
void bench_add_results(cli_command *command, size_t at);

/** Values that an option has where the command line gives none; NULL = it is not swept. */
typedef const char *(*bench_values_fn)(void *user, const char *option);

/** Lists of the command line, or else of @p swept, which may be NULL. @return how many */
uint32_t bench_axes(const cli_command *command, bench_values_fn swept, void *user,
                    cli_axis axes[CLI_AXES_MAX]);

/** From now on Ctrl-C is heard; the JSON file and the runtime are open.
 * @return false after a message */
bool bench_open(bench_sweep *sweep, const bench_results *results, const kvf_runtime_config *config);
/** Whether a call of the library went well. @return false after a message with @p option in front
 */
bool bench_opened(bench_sweep *sweep, kvf_status status, const char *option);

/** @return whether to go on */
typedef bool (*bench_case_fn)(void *user, uint64_t n);

/** Cases 0 to @p count - 1, until one ends it or Ctrl-C does; several times, between a begin, which
 * shows a bar, and an end. */
void bench_begin(bench_sweep *sweep, uint64_t total, const char *unit);
void bench_walk(bench_sweep *sweep, uint64_t count, bench_case_fn run, void *user);
void bench_end(bench_sweep *sweep);

/** A row of empty cells. @return NULL after a message */
cli_cell *bench_row(bench_sweep *sweep);

#define BENCH_ALIKE_MAX 5u

/* Lines through rows that are alike, by numbers of columns. */
typedef struct bench_lines {
    uint32_t x, y;                   /* what grows, and its time */
    uint32_t predicted;              /* the line's value there; then its intercept, rate and R2 */
    uint32_t alike[BENCH_ALIKE_MAX]; /* equal in all rows of a line */
} bench_lines;

/** From the row @p first on, of rows that have a time; of those with this text in the column of
 * alike[0], or all if NULL. */
void bench_fit(cli_table *table, const bench_lines *lines, uint32_t first, const char *only);

/** "NAME (cuda)", as long as the sweep. */
const char *bench_device(bench_sweep *sweep);

/** The table and the JSON file, below facts of the machine and @p own, which end with a name NULL.
 * @return false after a message */
bool bench_write(bench_sweep *sweep, const cli_fact *own);

/** @param is_done  cases have run. @return the exit status */
int bench_close(bench_sweep *sweep, bool is_done);

/*
 * The suites of `kvferry bench link` and its command line.
 *
 * A suite is a sweep over a few axes of kvf_link_case; options replace an axis in every suite that
 * has it. Knows no results.
 */

#define LINK_SUITE_COUNT 14u

typedef struct link_options {
    bool chosen[LINK_SUITE_COUNT];
    bool all, list;
    bench_results results;
    const char *samples;
    uint32_t gap_us;
    kvf_link_case base;
    kvf_runtime_config runtime;
} link_options;

/** @return -1 to go on, else the exit status */
int link_options_parse(int argc, char **argv, cli_command *command, link_options *out);

const char *link_suite_name(uint32_t suite);

#define LINK_NODES_BYTES 128u

/** Axes of a suite under the options. @p runtime NULL: NUMA nodes are not known, else @p nodes
 * receives the list of them. @return how many */
uint32_t link_suite_axes(uint32_t suite, const cli_command *command, const kvf_runtime *runtime,
                         char nodes[LINK_NODES_BYTES], cli_axis axes[CLI_AXES_MAX]);

/** The case of the same sweep that case @p n is measured against: gathering against memcpy, the
    whole against its copies, all else alike. UINT64_MAX = it has none. */
uint64_t link_baseline(const cli_axis *axes, uint32_t count, uint64_t n);

void link_print_list(const cli_command *command, const link_options *o);

/*
 * `kvferry bench disk`: its options.
 */

#define DISK_ROUNDS_MAX 101u

typedef struct disk_options {
    kvf_disk_case base;
    kvf_runtime_config runtime;
    const char *folder;
    uint64_t file_bytes, pass_bytes;
    uint32_t rounds, rest_ms;
    bench_results results;
} disk_options;

/** @return -1 to go on, else the exit status */
int disk_options_parse(int argc, char **argv, cli_command *command, disk_options *out);

/** Values of an option where the command line gives none. */
const char *disk_swept(void *user, const char *option);

/*
 * The machine of figures: processor, kernel, CPUs of this process.
 */

typedef struct bench_machine {
    char processor[256]; /* as the system names it */
    char kernel[200];    /* name, release, architecture */
    uint32_t cpus;       /* that this process may use */
} bench_machine;

void bench_machine_read(bench_machine *machine);

#endif
