/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_CLI_MEMORY_PLAN_H
#define KVF_CLI_MEMORY_PLAN_H

/*
 * Memory that a run will take, against what the machine and its cgroup have left.
 *
 * It knows sums and /proc, not how the sums came about. Invariant: nothing is reserved here.
 */

#include <kvferry/kvferry.h>
#include <stdbool.h>
#include <stdio.h>

typedef struct cli_memory_plan {
    uint64_t weight_bytes;
    uint64_t own_bytes;    /* of these, in memory of their own; the others are mapped from files */
    uint64_t runner_bytes; /* hidden states and scratch */
    uint32_t tokens;       /* that the cache has room for */
    uint32_t page_size;    /* of the cache */
    char digest[32];       /* name */
    kvf_cache_plan cache;
    uint64_t prune_device_bytes, prune_host_bytes; /* of a pruner; 0 = there is none */
    uint64_t hidden_disk_bytes; /* of hidden states that wait in a file; 0 = there is none */
    uint64_t available_bytes;   /* UINT64_MAX = not known */
    const char *available_by;   /* who sets that limit */
    uint64_t may_come_bytes;    /* more than is available may be tried up to here; 0 = never */
    bool on_gpu;                /* weights, runner and device parts are not in host memory */
} cli_memory_plan;

/** Fill in what this process may still take, and who says so. */
void cli_memory_available(cli_memory_plan *plan);

/** Bytes of host memory. */
uint64_t cli_memory_plan_total(const cli_memory_plan *plan);
void cli_memory_plan_print(const cli_memory_plan *plan, FILE *file);

/** @return whether it fits, or may in time: then a note is on stderr; if not, a message with the
 * fix */
bool cli_memory_plan_check(const cli_memory_plan *plan);

#endif
