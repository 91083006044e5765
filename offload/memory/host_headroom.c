/* SPDX-License-Identifier: Apache-2.0 */

/*
 * What the system will let us have: memlock, cgroup, node, huge pages; and the verdict on a
 * request.
 *
 * Reads small files of proc and sysfs and changes nothing. A number that cannot be read is
 * UINT64_MAX: preflight refuses only what is known to fail.
 */

#include <stdio.h>
#include <string.h>
#include <sys/resource.h>

#include "common/headroom.h"
#include "common/text.h"
#include "host_memory.h"

#define CAP_IPC_LOCK_BIT 14

static uint64_t memlock_headroom(void)
{
    FILE *file = fopen("/proc/self/status", "r");
    if (file != NULL) {
        char line[256];
        unsigned long long capabilities = 0;
        while (fgets(line, sizeof line, file) != NULL)
            if (sscanf(line, "CapEff: %llx", &capabilities) == 1)
                break;
        fclose(file);
        if (capabilities >> CAP_IPC_LOCK_BIT & 1)
            return UINT64_MAX;
    }
    struct rlimit limit;
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
    FILE *file = fopen(path, "r");
    if (file == NULL)
        return UINT64_MAX;
    char line[256];
    uint64_t sum = 0;
    while (fgets(line, sizeof line, file) != NULL) {
        char key[64];
        unsigned long long kib;
        if (sscanf(line, "Node %*d %63[^:]: %llu", key, &kib) == 2 &&
            (strcmp(key, "MemFree") == 0 || strcmp(key, "Active(file)") == 0 ||
             strcmp(key, "Inactive(file)") == 0))
            sum += kib * 1024;
    }
    fclose(file);
    return sum > 0 ? sum : UINT64_MAX;
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
    int32_t known = topology != NULL && kvf_topology_find(topology, node) < 0 ? -1 : node;
    out->memlock = memlock_headroom();
    out->cgroup = kvf_cgroup_headroom("/proc/self/cgroup", "/sys/fs/cgroup");
    out->node_free = free_memory(known, out->cgroup);
    out->hugetlb_free = free_huge_pages(known);
}

kvf_status kvf_host_memory_preflight(kvf_context *context, const kvf_headroom *headroom,
                                     const kvf_host_memory_config *config)
{
    char need[32], have[32];
    kvf_bytes_text(config->bytes, need);
    if (headroom->memlock < config->bytes && !config->allow_unpinned)
        return kvf_fail(context, KVF_PIN_FAILED, 0,
                        "RLIMIT_MEMLOCK is %s, pinned host memory needs %s; raise it with "
                        "`ulimit -l unlimited` (LimitMEMLOCK=infinity for a service), or set "
                        "allow_unpinned",
                        kvf_bytes_text(headroom->memlock, have), need);
    if (config->huge_pages == KVF_HUGE_PAGES_REQUIRED && headroom->hugetlb_free < config->bytes)
        return kvf_fail(context, KVF_OUT_OF_MEMORY, 0,
                        "free huge pages hold %s, host memory needs %s on huge pages; reserve them "
                        "with `sysctl vm.nr_hugepages=%llu`, or set huge_pages to auto",
                        kvf_bytes_text(headroom->hugetlb_free, have), need,
                        (unsigned long long)((config->bytes + (2u << 20) - 1) >> 21));
    /* Pages that hugetlb has reserved are not taken from what is free. */
    uint64_t reserved = config->huge_pages == KVF_HUGE_PAGES_OFF ? 0 : headroom->hugetlb_free;
    uint64_t from_free = reserved >= config->bytes ? 0 : config->bytes;
    if (headroom->cgroup < from_free)
        return kvf_fail(context, KVF_OUT_OF_MEMORY, 0,
                        "the cgroup's memory limit (memory.max) leaves %s, host memory needs %s; "
                        "raise memory.max, or lower tokens_max or host_tokens_max",
                        kvf_bytes_text(headroom->cgroup, have), need);
    if (headroom->node_free < from_free && config->node >= 0)
        return kvf_fail(context, KVF_OUT_OF_MEMORY, 0,
                        "NUMA node %d has %s free, host memory needs %s; free memory there, set "
                        "numa_node to another node, or lower tokens_max or host_tokens_max",
                        config->node, kvf_bytes_text(headroom->node_free, have), need);
    if (headroom->node_free < from_free)
        return kvf_fail(context, KVF_OUT_OF_MEMORY, 0,
                        "the machine has %s of memory available, host memory needs %s; free "
                        "memory, or lower tokens_max or host_tokens_max",
                        kvf_bytes_text(headroom->node_free, have), need);
    return KVF_OK;
}
