/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_BENCH_RUNTIME_REPORT_H
#define KVF_BENCH_RUNTIME_REPORT_H

/*
 * Clocks, percentiles and the machine's name, for the benchmarks of the runtime.
 *
 * Knows nothing of what is measured.
 */

#include <stddef.h>
#include <stdio.h>

double bench_seconds(void);

/* 10th percentile, median, 90th percentile. Sorts `values`. */
void bench_percentiles(double *values, size_t count, double out[3]);

/* "machine" and "command", each with a comma behind it, as members of an open JSON object. */
void bench_json_machine(FILE *f, int argc, char **argv);

#endif
