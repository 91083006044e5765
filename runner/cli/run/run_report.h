/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_CLI_RUN_REPORT_H
#define KVF_CLI_RUN_REPORT_H

/*
 * The report of a run: a few lines for people, one JSON object for programs.
 *
 * It knows figures, not how they came about. Invariant: every figure was measured in this run, and
 * what was not measured is left out.
 */

#include "run.h"

typedef struct cli_report {
    const cli_run *run;
    cli_output stats; /* the file of --stats */
    double load_ms;
} cli_report;

/** A few lines on stderr. */
void cli_report_summary(const cli_report *report);
/** The statistics where the user asked for them. @return false after a message */
bool cli_report_write(cli_report *report);
/** The result of `score`, to standard output. @return false after a message */
bool cli_report_print_score(const cli_run *run);

/* 0 where there is nothing to divide by. */
static inline double ratio(double a, double b)
{
    return b > 0.0 ? a / b : 0.0;
}

/* Parts of it, from the files that know them. */

void cli_rescore_write_all(cli_json *json, const cli_run *run);
void cli_rescore_summary(const cli_run *run);
void cli_run_prune_summary(const cli_run *run);
/** Members of the statistics: prune, head_mask, footprint. */
void cli_run_prune_write(cli_json *json, const cli_run *run);
void cli_run_complete_write(cli_json *json, const cli_run *run);

#endif
