/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_CLI_BENCH_DECODE_H
#define KVF_CLI_BENCH_DECODE_H

/*
 * `kvferry bench decode`: its columns, which the picture reads too.
 */

#include "bench_decode_options.h"

#include <kvferry/link.h>

enum decode_column {
    DECODE_CONTEXT,
    DECODE_BUDGET,
    DECODE_BATCH,
    DECODE_SELECT,
    DECODE_METHOD,
    DECODE_SPECULATE,
    DECODE_RECORDED,
    DECODE_NODES,
    DECODE_MEDIAN,
    DECODE_P10,
    DECODE_P95,
    DECODE_P99,
    DECODE_MEAN,
    DECODE_HOST,
    DECODE_FLOOR,
    DECODE_OF_FLOOR,
    DECODE_TOKENS,
    DECODE_READ,
    DECODE_MOVED,
    DECODE_HITS,
    DECODE_VS_DENSE,
    DECODE_OVERHEAD,
    DECODE_REFRESH,
    DECODE_FORESEEN,
    DECODE_PAGES_THERE, /* with a disk tier */
    DECODE_BUNDLES_THERE,
    DECODE_BUNDLES,
    DECODE_FROM_DISK,
    DECODE_DISK_WAIT,
    DECODE_VS_MEMORY,
    DECODE_VS_MEMORY_P10,
    DECODE_VS_MEMORY_P90,
    DECODE_APPEND_US, /* phases: in the order of kvf_stats */
    DECODE_SCORE_US,
    DECODE_SELECT_US,
    DECODE_GATHER_US,
    DECODE_COPY_US,
    DECODE_ATTEND_US,
    DECODE_REFRESH_US,
    DECODE_DEVICE_BYTES,
    DECODE_HOST_BYTES,
    DECODE_STATUS,
    DECODE_COLUMN_COUNT
};

extern const cli_column decode_columns[DECODE_COLUMN_COUNT];

#endif
