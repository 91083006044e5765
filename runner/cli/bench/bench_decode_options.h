/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_CLI_BENCH_DECODE_OPTIONS_H
#define KVF_CLI_BENCH_DECODE_OPTIONS_H

/* The command line of `kvferry bench decode`. Knows no results. */

#include "axes.h"
#include "table.h"

#define DECODE_BATCH_MAX 64u

typedef struct decode_options {
    kvf_runtime_config runtime;
    kvf_cache_config cache;
    uint32_t context, batch;
    uint32_t group, steps, dense_steps, warmup;
    uint32_t passage, topics;
    double hot_heads;
    double drift;
    uint64_t seed;
    bool record, eager, afresh, forks;
    cli_format format;
    const char *json;
} decode_options;

typedef struct decode_sweep {
    cli_command command;
    cli_axis axes[CLI_AXES_MAX];
    uint32_t axis_count;
} decode_sweep;

/** @return -1 to go on, else the exit status */
int decode_options_parse(int argc, char **argv, decode_sweep *sweep, decode_options *out);

#endif
