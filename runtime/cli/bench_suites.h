/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_CLI_BENCH_SUITES_H
#define KVF_CLI_BENCH_SUITES_H

/*
 * The suites of `kvferry bench link` and its command line.
 *
 * A suite is a sweep over a few axes of kvf_link_case; options replace an axis in every suite that
 * has it. Knows no results.
 */

#include "axes.h"
#include "table.h"

#include <kvferry/link.h>

#define LINK_SUITE_COUNT 13u
#define LINK_AXIS_COUNT  13u

typedef struct link_options {
    bool chosen[LINK_SUITE_COUNT];
    cli_axis axes[LINK_AXIS_COUNT]; /* count 0 = not given */
    cli_format format;
    const char *plot;
    const char *samples;
    const char *json;
    bool list;
    kvf_link_case base;
    kvf_runtime_config runtime;
} link_options;

/** @return -1 to go on, else the exit status */
int link_options_parse(int argc, char **argv, link_options *out);

const char *link_suite_name(uint32_t suite);

/** Axes of a suite under the options. @p runtime NULL: NUMA nodes are not known. */
void link_suite_axes(uint32_t suite, const link_options *o, const kvf_runtime *runtime,
                     cli_axis axes[LINK_AXIS_COUNT]);
/** The case of one combination of values. */
kvf_link_case link_case_of(const link_options *o, const int64_t *values);
/** The case of the same sweep that case @p n is measured against: gathering against memcpy, the
    whole against its copies, all else alike. UINT64_MAX = it has none. */
uint64_t link_baseline(const cli_axis axes[LINK_AXIS_COUNT], uint64_t n);

/** Names of settings. "" if there is none. */
const char *link_what_name(kvf_link_what what);
const char *link_method_name(kvf_transfer method);
const char *link_pattern_name(kvf_link_pattern pattern);

void link_print_list(const link_options *o);

#endif
