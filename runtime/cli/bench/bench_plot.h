/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_CLI_BENCH_PLOT_H
#define KVF_CLI_BENCH_PLOT_H

/*
 * Pictures of a link bench, drawn by gnuplot, each as SVG and PNG.
 *
 * It knows the columns of bench_link.h. A picture whose rows are not in the table is not drawn.
 */

#include "table.h"

/**
 * Write bandwidth, heat map and latency pictures to a folder, which is made if it is not there.
 *
 * @return false after a message: no gnuplot, no folder, or nothing in the table to draw
 */
bool cli_bench_plot(const cli_table *table, const char *folder);

#endif
