/* SPDX-License-Identifier: Apache-2.0 */

/* Reads small files, and changes which CPUs this process may use; see the header. */

#include "bench.h"

#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/utsname.h>

#include "common/text.h"

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

/* "0-3,8" into the set. */
static bool take_list(const char *list, cpu_set_t *set, size_t bytes)
{
    char *end;
    for (const char *at = list;; at = end + 1) {
        if (*at < '0' || *at > '9')
            return false;
        const unsigned long first = strtoul(at, &end, 10);
        unsigned long last = first;
        if (*end == '-' && end[1] >= '0' && end[1] <= '9')
            last = strtoul(end + 1, &end, 10);
        if (last < first || last >= CPUS_MOST)
            return false;
        for (unsigned long cpu = first; cpu <= last; cpu++)
            CPU_SET_S(cpu, bytes, set);
        if (*end != ',')
            return *end == '\0';
    }
}

bool bench_machine_pin(const char *list)
{
    cpu_set_t *set = list ? CPU_ALLOC(CPUS_MOST) : NULL;
    const size_t bytes = CPU_ALLOC_SIZE(CPUS_MOST);
    if (!list)
        return true;
    if (set)
        CPU_ZERO_S(bytes, set);
    const bool is_list = set && take_list(list, set, bytes);
    const bool is_done = is_list && sched_setaffinity(0, bytes, set) == 0;
    if (!is_list)
        fprintf(stderr, "kvferry: --cpus is '%s'; give a list of CPUs such as 0-3,8\n", list);
    else if (!is_done)
        fprintf(stderr, "kvferry: --cpus %s: %s; give CPUs that this process may use\n", list,
                kvf_errno_text(errno));
    CPU_FREE(set);
    return is_done;
}
