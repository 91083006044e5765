/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_CLI_BENCH_H
#define KVF_CLI_BENCH_H

/*
 * The commands of `kvferry bench`. @return exit status
 */

#include "options.h"
#include "output.h"

#include <kvferry/disk.h>
#include <kvferry/link.h>

#include <stdbool.h>
#include <stdint.h>

int cli_bench_link_main(int argc, char **argv);
int cli_bench_disk_main(int argc, char **argv);
int cli_bench_decode_main(int argc, char **argv);

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
    cli_format format;
    const char *samples;
    const char *json;
    const char *cpus; /* list; NULL = all that the process has */
    uint32_t gap_us;
    kvf_link_case base;
    kvf_runtime_config runtime;
} link_options;

/** The command line, with the lists that were given. */
typedef struct link_sweep {
    cli_command command;
    char usage[2048];
    char nodes[128]; /* NUMA nodes that can be asked for */
} link_sweep;

/** @return -1 to go on, else the exit status */
int link_options_parse(int argc, char **argv, link_sweep *sweep, link_options *out);

const char *link_suite_name(uint32_t suite);

/** Axes of a suite under the options. @p runtime NULL: NUMA nodes are not known. @return how many
 */
uint32_t link_suite_axes(uint32_t suite, link_sweep *sweep, const kvf_runtime *runtime,
                         cli_axis axes[CLI_AXES_MAX]);

/** The case of the same sweep that case @p n is measured against: gathering against memcpy, the
    whole against its copies, all else alike. UINT64_MAX = it has none. */
uint64_t link_baseline(const cli_axis *axes, uint32_t count, uint64_t n);

void link_print_list(link_sweep *sweep, const link_options *o);

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
    cli_format format;
    const char *json;
} disk_options;

/** The command line, with the axes that it or the defaults give. */
typedef struct disk_sweep {
    cli_command command;
    cli_axis axes[CLI_AXES_MAX];
    uint32_t axis_count;
} disk_sweep;

/** @return -1 to go on, else the exit status */
int disk_options_parse(int argc, char **argv, disk_sweep *sweep, disk_options *out);

/*
 * The machine of figures: processor, kernel, CPUs of this process.
 */

typedef struct bench_machine {
    char processor[256]; /* as the system names it */
    char kernel[200];    /* name, release, architecture */
    uint32_t cpus;       /* that this process may use */
} bench_machine;

void bench_machine_read(bench_machine *machine);

/** From now on this process and its threads run on these CPUs alone, "0-3,8"; NULL = as it is.
    @return false after a message naming the option */
bool bench_machine_pin(const char *list);

#endif
