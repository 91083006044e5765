/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_CLI_BENCH_MACHINE_H
#define KVF_CLI_BENCH_MACHINE_H

/*
 * What figures were measured on: processor, kernel, CPUs of this process.
 */

#include <stdbool.h>
#include <stdint.h>

typedef struct bench_machine {
    char processor[256]; /* as the system names it */
    char kernel[200];    /* name, release, architecture */
    uint32_t cpus;       /* that this process may use */
} bench_machine;

void bench_machine_read(bench_machine *machine);

/** From now on this process and its threads run on these CPUs alone, "0-3,8"; NULL = as it is.
    @return false after a message naming the option */
bool bench_machine_pin(const char *list);

#endif
