/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_BENCH_REPORT_H
#define KVF_BENCH_REPORT_H

/*
 * Helpers of all benchmarks: options, percentiles, and the head of a JSON file.
 *
 * Knows nothing of what is measured. A mistake on the command line, or a file that cannot be
 * written, ends the program.
 */

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

/* An option and its value: a number in a range, or a text. */
typedef struct bench_option {
    const char *name; /* "--rounds"; NULL ends a table */
    uint32_t *number; /* NULL: a text */
    uint32_t least, most;
    const char **text;
} bench_option;

typedef struct bench_args {
    int argc;
    char **argv;
    const char *json; /* --json FILE, which every program has; NULL = not given */
} bench_args;

bench_args bench_args_read(int argc, char **argv, const bench_option *options);

/* 10th percentile, median, 90th percentile. Sorts `values`. */
void bench_percentiles(double *values, size_t count, double out[3]);

/* The file of --json, with "machine" and "command" in an open object, a comma after; NULL if it
 * was not given. */
FILE *bench_json_open(const bench_args *args);
/* "name": what bench_percentiles found. */
void bench_json_three(FILE *json, const char *name, const double values[3], const char *end);
/* Ends the object; NULL is fine. */
void bench_json_close(FILE *json);

#endif
