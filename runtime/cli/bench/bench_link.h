/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_CLI_BENCH_LINK_H
#define KVF_CLI_BENCH_LINK_H

/*
 * `kvferry bench link`: its columns, which the pictures read too.
 */

#include "axes.h"
#include "table.h"

#include <kvferry/link.h>

enum link_column {
    LINK_SUITE,
    LINK_WHAT,
    LINK_METHOD,
    LINK_PATTERN,
    LINK_SLOTS,
    LINK_PAGE_BYTES,
    LINK_PAGES,
    LINK_BYTES,
    LINK_NODE,
    LINK_TIER,
    LINK_CHUNK,
    LINK_DEPTH,
    LINK_WORKERS,
    LINK_BLOCKS,
    LINK_WRITEBACK,
    LINK_MEDIAN,
    LINK_P95,
    LINK_P99,
    LINK_MIN,
    LINK_MAX,
    LINK_FLOOR,
    LINK_RATE,
    LINK_STREAM_RATE,
    LINK_OF_PEAK,
    LINK_TIMES_BASE,
    LINK_GATHER_US,
    LINK_COPIES,
    LINK_FETCH_P50,
    LINK_FETCH_P95,
    LINK_FETCH_P99,
    LINK_SLOWDOWN,
    LINK_TOUCH,
    LINK_REGISTER,
    LINK_UNREGISTER,
    LINK_PREDICTED,
    LINK_INTERCEPT,
    LINK_SLOPE_RATE,
    LINK_R2,
    LINK_VERIFIED,
    LINK_STATUS,
    LINK_COLUMN_COUNT
};

/** `kvferry bench link`. @return exit status */
int cli_bench_link_main(int argc, char **argv);

/** `kvferry bench decode`. @return exit status */
int cli_bench_decode_main(int argc, char **argv);

#endif
