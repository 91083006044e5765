/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_CLI_BENCH_DECODE_OPTIONS_H
#define KVF_CLI_BENCH_DECODE_OPTIONS_H

/* The command line of `kvferry bench decode`. Knows no results. */

#include "axes.h"
#include "table.h"

enum decode_axis {
    DECODE_CONTEXT,
    DECODE_BUDGET,
    DECODE_BATCH,
    DECODE_SELECT,
    DECODE_METHOD,
    DECODE_SPECULATE,
    DECODE_AXIS_COUNT
};

typedef struct decode_options {
    cli_axis axes[DECODE_AXIS_COUNT];
    kvf_runtime_config runtime;
    kvf_cache_config cache; /* geometry and page size */
    uint32_t group, steps, dense_steps, warmup;
    uint64_t seed;
    bool record;
    cli_format format;
    const char *json;
} decode_options;

/** @return -1 to go on, else the exit status */
int decode_options_parse(int argc, char **argv, decode_options *out);

/** Names of settings. "" if there is none. */
const char *decode_select_name(kvf_select select);
const char *decode_method_name(kvf_transfer method);

#endif
