/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_COMMON_CGROUP_H
#define KVF_COMMON_CGROUP_H

/*
 * Limits of the cgroups that this process is in, versions 1 and 2: the walk from its own up to the
 * mount, and the quota of CPU time. It reads small files and changes nothing. The smallest of
 * several limits counts.
 *
 * Inside a container the mount begins at the container's cgroup, which the path may name from
 * outside: folders that are not there have no limit, and the mount itself is always looked at.
 */

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#define KVF_PROC_CGROUP "/proc/self/cgroup"
#define KVF_SYS_CGROUP  "/sys/fs/cgroup"

/* The first line of a small file that begins with `start`; false if there is none. */
static inline bool kvf_file_find(const char *path, const char *start, char *line, int capacity)
{
    FILE *file = fopen(path, "re");
    bool is_read = file != NULL;
    do
        is_read = is_read && fgets(line, capacity, file);
    while (is_read && strncmp(line, start, strlen(start)) != 0);
    if (file)
        fclose(file);
    return is_read;
}

static inline bool kvf_file_line(const char *path, char *line, int capacity)
{
    return kvf_file_find(path, "", line, capacity);
}

/* A limit in the files of one folder; UINT64_MAX = none. */
typedef uint64_t (*kvf_cgroup_limit_fn)(const char *folder, int version);

/* The least over a folder and its parents, up to `base`. */
static inline uint64_t kvf_cgroup_tree(const char *base, const char *below, int version,
                                       kvf_cgroup_limit_fn limit)
{
    char path[1024];
    uint64_t least = UINT64_MAX;
    int length = snprintf(path, sizeof path, "%s%s", base, below);
    if (length < 0 || (size_t)length >= sizeof path)
        return UINT64_MAX;
    const size_t stop = strlen(base);
    for (;;) {
        const uint64_t here = limit(path, version);
        least = here < least ? here : least;
        char *slash = strrchr(path, '/');
        if (strlen(path) <= stop || !slash)
            return least;
        *slash = '\0';
    }
}

/* Whether a list such as "cpu,cpuacct" has a controller. */
static inline bool kvf_cgroup_names(const char *list, const char *controller)
{
    const size_t size = strlen(controller);
    for (; *list; list += strcspn(list, ",") + (list[strcspn(list, ",")] == ','))
        if (strncmp(list, controller, size) == 0 && (list[size] == ',' || !list[size]))
            return true;
    return false;
}

/* The least limit of a controller for this process; `version` receives which files have it. Tests
 * replace KVF_PROC_CGROUP and KVF_SYS_CGROUP. */
static inline uint64_t kvf_cgroup_least(const char *proc_self_cgroup, const char *sys_fs_cgroup,
                                        const char *controller, kvf_cgroup_limit_fn limit,
                                        int *version)
{
    *version = 2;
    FILE *file = fopen(proc_self_cgroup, "r");
    if (!file)
        return UINT64_MAX;
    char line[768], base[512];
    uint64_t least = UINT64_MAX;
    while (fgets(line, sizeof line, file)) {
        line[strcspn(line, "\n")] = '\0';
        char *list = strchr(line, ':');
        char *path = list ? strchr(list + 1, ':') : NULL;
        if (!path)
            continue;
        list++;
        *path++ = '\0';
        const int here = *list ? 1 : 2;
        if (here == 1 && !kvf_cgroup_names(list, controller))
            continue;
        /* A mount of version 1 has the name of its list, or of the controller. */
        const char *const mounts[] = {here == 2 ? "" : list, controller};
        for (int i = 0; i < here % 2 + 1; i++) {
            snprintf(base, sizeof base, "%s%s%s", sys_fs_cgroup, here == 1 ? "/" : "", mounts[i]);
            const uint64_t found = kvf_cgroup_tree(base, path, here, limit);
            *version = found < least ? here : *version;
            least = found < least ? found : least;
        }
    }
    fclose(file);
    return least;
}

/* ---- CPU time ---- */

/* In thousandths of a CPU. */
static inline uint64_t kvf_cgroup_cpu_limit(const char *folder, int version)
{
    static const char *const names[2][2] = {{"cpu.cfs_quota_us", "cpu.cfs_period_us"},
                                            {"cpu.max", NULL}};
    long long quota = -1, period = 0;
    for (int i = 0; i < 2 && names[version - 1][i]; i++) {
        char path[1400], line[64];
        snprintf(path, sizeof path, "%s/%s", folder, names[version - 1][i]);
        if (!kvf_file_line(path, line, sizeof line))
            return UINT64_MAX;
        if (version == 2)
            (void)sscanf(line, "%lld %lld", &quota, &period); /* "max 100000" has no number */
        else
            (void)sscanf(line, "%lld", i == 0 ? &quota : &period);
    }
    return quota > 0 && period > 0 ? (uint64_t)quota * 1000 / (uint64_t)period : UINT64_MAX;
}

/* Thousandths of a CPU that this process may use in the long run; UINT64_MAX = all. */
static inline uint64_t kvf_cgroup_cpus(const char *proc_self_cgroup, const char *sys_fs_cgroup)
{
    int version;
    return kvf_cgroup_least(proc_self_cgroup, sys_fs_cgroup, "cpu", kvf_cgroup_cpu_limit, &version);
}

#endif
