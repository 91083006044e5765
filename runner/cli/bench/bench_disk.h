/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_CLI_BENCH_DISK_H
#define KVF_CLI_BENCH_DISK_H

/*
 * `kvferry bench disk`: its options.
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

/** @return -1 to go on, else the exit status */
int disk_options_parse(int argc, char **argv, disk_sweep *sweep, disk_options *out);

#endif
