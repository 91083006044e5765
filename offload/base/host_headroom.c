/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Reads small files of proc and sysfs and changes nothing.
 */

#include "topology.h"

#include <stdio.h>
#include <string.h>
#include <sys/resource.h>

#include "common/headroom.h"

#define CAP_IPC_LOCK_BIT 14

static uint64_t memlock_headroom(void)
{
    char line[256];
    unsigned long long capabilities;
    struct rlimit limit;
    if (kvf_file_find("/proc/self/status", "CapEff:", line, sizeof line) &&
        sscanf(line, "CapEff: %llx", &capabilities) == 1 && (capabilities >> CAP_IPC_LOCK_BIT & 1))
        return UINT64_MAX;
    if (getrlimit(RLIMIT_MEMLOCK, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY)
        return UINT64_MAX;
    return limit.rlim_cur;
}

/* MemFree and the file cache of a node; what the machine has for node -1. */
static uint64_t free_memory(int32_t node, uint64_t cgroup)
{
    if (node < 0)
        return kvf_machine_headroom("/proc/meminfo", cgroup);
    char path[128];
    snprintf(path, sizeof path, "/sys/devices/system/node/node%d/meminfo", node);
    const uint64_t kib = KVF_FILE_KEYS(path, "MemFree", "Active(file)", "Inactive(file)");
    return kib > 0 ? kib * 1024 : UINT64_MAX;
}

static uint64_t free_huge_pages(int32_t node)
{
    char path[160];
    uint64_t pages;
    if (node >= 0)
        snprintf(path, sizeof path,
                 "/sys/devices/system/node/node%d/hugepages/hugepages-2048kB/free_hugepages", node);
    else
        snprintf(path, sizeof path, "/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages");
    return kvf_file_number(path, &pages) ? pages << 21 : 0;
}

void kvf_headroom_read(const kvf_topology *topology, int32_t node, kvf_headroom *out)
{
    int32_t known = node;
    if (topology != NULL && (topology->node_count == 1 || kvf_topology_find(topology, node) < 0))
        known = -1;
    out->memlock = memlock_headroom();
    out->pinned = kvf_machine_pin_budget("/proc/sys/kernel/osrelease", "/proc/meminfo");
    out->cgroup = kvf_cgroup_headroom(KVF_PROC_CGROUP, KVF_SYS_CGROUP, &out->cgroup_file);
    out->node_free = free_memory(known, out->cgroup);
    out->hugetlb_free = free_huge_pages(known);
    out->may_come = known < 0 ? kvf_machine_growth("/proc/meminfo", kvf_machine_is_virtual()) : 0;
}
