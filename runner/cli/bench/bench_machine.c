/* SPDX-License-Identifier: Apache-2.0 */

/* Reads small files; see the header. */

#include "bench.h"

#include <sched.h>
#include <stdio.h>
#include <sys/utsname.h>

#define CPUS_MOST (1u << 16)

static void read_processor(char *name, size_t bytes)
{
    FILE *file = fopen("/proc/cpuinfo", "re");
    char line[256], found[256];
    snprintf(name, bytes, "unknown");
    while (file && fgets(line, sizeof line, file))
        if (sscanf(line, "model name%*[ \t:]%255[^\n]", found) == 1) {
            snprintf(name, bytes, "%s", found);
            break;
        }
    if (file)
        fclose(file);
}

void bench_machine_read(bench_machine *machine)
{
    struct utsname system;
    cpu_set_t *set = CPU_ALLOC(CPUS_MOST);
    const size_t bytes = CPU_ALLOC_SIZE(CPUS_MOST);
    *machine = (bench_machine){.kernel = "unknown"};
    read_processor(machine->processor, sizeof machine->processor);
    if (uname(&system) == 0)
        snprintf(machine->kernel, sizeof machine->kernel, "%s %s %s", system.sysname,
                 system.release, system.machine);
    if (set && sched_getaffinity(0, bytes, set) == 0)
        machine->cpus = (uint32_t)CPU_COUNT_S(bytes, set);
    CPU_FREE(set);
}
