/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_CLI_BENCH_DISK_H
#define KVF_CLI_BENCH_DISK_H

/*
 * `kvferry bench disk`: its options, and its columns, which the pictures read too.
 */

#include "axes.h"
#include "table.h"

#include <kvferry/disk.h>

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

enum disk_column {
    DISK_WHAT,
    DISK_ENGINE,
    DISK_MODE,
    DISK_EXTENT_BYTES,
    DISK_DEPTH,
    DISK_EXTENTS,
    DISK_RATE,
    DISK_RATE_P10,
    DISK_RATE_P90,
    DISK_OF_PEAK,
    DISK_OF_PEAK_P10,
    DISK_OF_PEAK_P90,
    DISK_TIMES_PLAIN,
    DISK_TIMES_PLAIN_P10,
    DISK_TIMES_PLAIN_P90,
    DISK_US,
    DISK_REQUEST_P50,
    DISK_REQUEST_P95,
    DISK_REQUEST_P99,
    DISK_PREDICTED,
    DISK_INTERCEPT,
    DISK_SLOPE_RATE,
    DISK_R2,
    DISK_KEPT,
    DISK_VERIFIED,
    DISK_STATUS,
    DISK_COLUMN_COUNT
};

/** @return -1 to go on, else the exit status */
int disk_options_parse(int argc, char **argv, disk_sweep *sweep, disk_options *out);

/** `kvferry bench disk`. @return exit status */
int cli_bench_disk_main(int argc, char **argv);

#endif
