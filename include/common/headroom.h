/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_COMMON_HEADROOM_H
#define KVF_COMMON_HEADROOM_H

/*
 * Memory that Linux says is left: /proc/meminfo, and the memory controller of cgroups, versions
 * 1 and 2; and this process's part of it. It reads small files and changes nothing. The
 * smallest of several limits counts; a number that cannot be read is UINT64_MAX.
 */

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "common/cgroup.h"

/* Version 1 writes a huge number for "no limit". */
#define KVF_CGROUP_UNLIMITED ((uint64_t)1 << 60)

/* The number that a file begins with; 0 if there is none. */
static inline int kvf_file_number(const char *path, uint64_t *out)
{
    char line[64];
    unsigned long long value;
    const bool is_read =
        kvf_file_line(path, line, sizeof line) && sscanf(line, "%llu", &value) == 1;
    if (is_read)
        *out = value;
    return is_read;
}

/* The sum of the values of some keys, one or more, in a file of "key value" lines (a colon, "kB",
 * and the "Node N" of sysfs in front are fine). */
#define KVF_FILE_KEYS(path, ...) kvf_file_keys(path, (const char *const[]){__VA_ARGS__, NULL})

static inline uint64_t kvf_file_keys(const char *path, const char *const *keys)
{
    FILE *file = fopen(path, "r");
    if (!file)
        return 0;
    char line[256];
    uint64_t sum = 0;
    while (fgets(line, sizeof line, file)) {
        char key[64];
        unsigned long long value;
        int at = 0;
        (void)sscanf(line, "Node %*d %n", &at);
        if (sscanf(line + at, "%63[^: ]%*[: ]%llu", key, &value) != 2)
            continue;
        for (size_t i = 0; keys[i]; i++)
            sum += strcmp(key, keys[i]) == 0 ? value : 0;
    }
    fclose(file);
    return sum;
}

/* MemAvailable of the machine, out of "/proc/meminfo". Some virtual machines get memory as they use
 * it, and what they show at first is no limit: where the cgroup leaves more than all the memory
 * that there is now, that is what there will be. */
static inline uint64_t kvf_machine_headroom(const char *proc_meminfo, uint64_t cgroup)
{
    const uint64_t available = KVF_FILE_KEYS(proc_meminfo, "MemAvailable") * 1024;
    const uint64_t total = KVF_FILE_KEYS(proc_meminfo, "MemTotal") * 1024;
    if (available == 0)
        return UINT64_MAX;
    return cgroup != UINT64_MAX && total > 0 && cgroup > total ? cgroup : available;
}

/* How many times MemTotal a virtual machine may get: a bound on what is tried in vain. */
#define KVF_MACHINE_GROWTH_MAX 16u

/* As the processor says; where it tells nothing, a machine is not virtual. */
static inline bool kvf_machine_is_virtual(void)
{
#if defined(__x86_64__)
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c >> 31 & 1);
#else
    return false;
#endif
}

/* WSL2, whose drivers pin about half of the memory that they are shown. */
static inline bool kvf_machine_is_wsl(const char *osrelease)
{
    char text[128];
    return kvf_file_line(osrelease, text, sizeof text) &&
           (strstr(text, "microsoft") || strstr(text, "Microsoft"));
}

/* Bytes that drivers of a machine pin at most, about: half of the memory of WSL2. UINT64_MAX: no
 * such limit is known before the driver refuses. */
static inline uint64_t kvf_machine_pin_budget(const char *osrelease, const char *proc_meminfo)
{
    return kvf_machine_is_wsl(osrelease) ? KVF_FILE_KEYS(proc_meminfo, "MemTotal") * 1024 / 2
                                         : UINT64_MAX;
}

/* Bytes for which a machine that shows less is worth a try, because it may get memory as it uses it
 * (a balloon, memory that is plugged in); 0 = never, what it shows is all. */
static inline uint64_t kvf_machine_growth(const char *proc_meminfo, bool is_virtual)
{
    return is_virtual ? KVF_FILE_KEYS(proc_meminfo, "MemTotal") * 1024 * KVF_MACHINE_GROWTH_MAX : 0;
}

/* Room under one directory; file cache counts as room, because the kernel gives it up first. */
static inline uint64_t kvf_cgroup_room(const char *directory, int version)
{
    static const struct {
        const char *limit, *usage, *inactive, *active;
    } names[] = {{"memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file",
                  "total_active_file"},
                 {"memory.max", "memory.current", "inactive_file", "active_file"}};
    const int v = version - 1;
    char path[1400];
    uint64_t limit, usage;
    snprintf(path, sizeof path, "%s/%s", directory, names[v].limit);
    if (!kvf_file_number(path, &limit) || limit >= KVF_CGROUP_UNLIMITED)
        return UINT64_MAX;
    snprintf(path, sizeof path, "%s/%s", directory, names[v].usage);
    if (!kvf_file_number(path, &usage))
        return UINT64_MAX;
    snprintf(path, sizeof path, "%s/memory.stat", directory);
    const uint64_t cache = KVF_FILE_KEYS(path, names[v].inactive, names[v].active);
    usage = cache < usage ? usage - cache : 0;
    return usage < limit ? limit - usage : 0;
}

/* Room below the limits of this process, and the name of the file with the least; of
 * KVF_PROC_CGROUP and KVF_SYS_CGROUP, which tests replace. */
static inline uint64_t kvf_cgroup_headroom(const char *proc_self_cgroup, const char *sys_fs_cgroup,
                                           const char **limit)
{
    int version;
    const uint64_t least =
        kvf_cgroup_least(proc_self_cgroup, sys_fs_cgroup, "memory", kvf_cgroup_room, &version);
    *limit = version == 2 ? "memory.max" : "memory.limit_in_bytes";
    return least;
}

#endif
