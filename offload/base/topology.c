/* SPDX-License-Identifier: Apache-2.0 */

/*
 * NUMA nodes, and the way from a PCI device to its node, out of sysfs.
 *
 * Knows nothing of memory or threads. Whatever is not known is said to be unknown (node -1): a
 * wrong node costs more than none. Sets of CPUs have the size that the kernel asks for. Invariant:
 * the cpus of the nodes are disjoint, and together they are cpus[0 .. cpu_count-1].
 */

#include "topology.h"

#include <errno.h>
#include <limits.h>
#include <sched.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/headroom.h"
#include "common/text.h"

#define CPUS_FIRST 1024u
#define CPUS_MOST  (1u << 20)
#define PATH_BYTES 512

int32_t kvf_topology_find(const kvf_topology *topology, int32_t node_id)
{
    for (uint32_t i = 0; i < topology->node_count; i++)
        if (topology->nodes[i].id == node_id)
            return (int32_t)i;
    return -1;
}

/* ---- files of sysfs ---- */

static FILE *open_file(const char *root, const char *folder, uint32_t number, const char *name)
{
    char path[PATH_BYTES];
    const int length = snprintf(path, sizeof path, "%s/devices/system/%s%u/%s",
                                root ? root : "/sys", folder, number, name);
    return length > 0 && length < PATH_BYTES ? fopen(path, "re") : NULL;
}

/* The same without a number. */
static FILE *open_list(const char *root, const char *name)
{
    char path[PATH_BYTES];
    const int length =
        snprintf(path, sizeof path, "%s/devices/system/%s", root ? root : "/sys", name);
    return length > 0 && length < PATH_BYTES ? fopen(path, "re") : NULL;
}

/* The next range of "0-3,8,10-11". */
static bool next_range(FILE *file, uint32_t *first, uint32_t *last)
{
    if (fscanf(file, " %u", first) != 1)
        return false;
    *last = *first;
    int c = fgetc(file);
    if (c == '-' && fscanf(file, "%u", last) == 1)
        c = fgetc(file);
    return (c == ',' || c == '\n' || c == EOF) && *last >= *first && *last < CPUS_MOST;
}

/* MemTotal and MemFree of a node, 0 = unknown. */
static void read_memory(const char *root, kvf_node *node)
{
    char path[PATH_BYTES];
    const int length = snprintf(path, sizeof path, "%s/devices/system/node/node%d/meminfo",
                                root ? root : "/sys", node->id);
    if (length < 0 || length >= PATH_BYTES)
        return;
    node->memory_bytes = KVF_FILE_KEYS(path, "MemTotal") * 1024;
    node->free_bytes = KVF_FILE_KEYS(path, "MemFree") * 1024;
}

/* ---- sets of CPUs ---- */

typedef struct cpus {
    cpu_set_t *set;
    size_t bytes;
} cpus;

static bool has(const cpus *c, uint32_t cpu)
{
    return CPU_ISSET_S(cpu, c->bytes, c->set); /* false after its end */
}

static kvf_status reserve(kvf_context *context, uint32_t count, cpus *out)
{
    out->bytes = CPU_ALLOC_SIZE(count);
    out->set = kvf_alloc(context, 1, out->bytes);
    return out->set
               ? KVF_OK
               : kvf_fail(context, KVF_OUT_OF_MEMORY, 0, "no memory for a set of %u CPUs", count);
}

static void add_range(cpus *c, uint32_t first, uint32_t last)
{
    for (uint32_t cpu = first; cpu <= last; cpu++)
        CPU_SET_S(cpu, c->bytes, c->set);
}

/* Those that this process may run on. A kernel that knows more CPUs than fit refuses the set. */
static kvf_status read_affinity(kvf_context *context, cpus *out)
{
    int code = EINVAL;
    for (uint32_t count = CPUS_FIRST; code == EINVAL && count <= CPUS_MOST; count *= 2) {
        KVF_TRY(reserve(context, count, out));
        if (sched_getaffinity(0, out->bytes, out->set) == 0)
            return KVF_OK;
        code = errno;
        kvf_free(context, out->set);
    }
    const long online = sysconf(_SC_NPROCESSORS_ONLN);
    const uint32_t count = online > 0 && online < CPUS_MOST ? (uint32_t)online : 1;
    kvf_log(context, KVF_LOG_WARNING,
            "the CPUs that this process may use cannot be read (%s); it takes the first %u",
            kvf_errno_text(code), count);
    KVF_TRY(reserve(context, count, out));
    add_range(out, 0, count - 1);
    return KVF_OK;
}

/* Those of a replayed machine. */
static kvf_status read_online(kvf_context *context, const char *root, cpus *out)
{
    uint32_t first, last;
    FILE *file = open_list(root, "cpu/online");
    kvf_status status = reserve(context, CPUS_MOST, out);
    while (status == KVF_OK && file && next_range(file, &first, &last))
        add_range(out, first, last);
    if (file)
        fclose(file);
    return status;
}

/* ---- the machine ---- */

static kvf_status reserve_lists(kvf_context *context, const char *root, uint32_t cpu_count,
                                kvf_topology *out)
{
    uint32_t first, last, nodes = 0;
    FILE *file = open_list(root, "node/online");
    while (file && next_range(file, &first, &last))
        nodes += last - first + 1;
    if (file)
        fclose(file);
    out->nodes = kvf_alloc(context, nodes + 1, sizeof *out->nodes);
    out->cpus = kvf_alloc(context, cpu_count + 1, sizeof *out->cpus);
    return out->nodes && out->cpus
               ? KVF_OK
               : kvf_fail(context, KVF_OUT_OF_MEMORY, 0, "no memory for %u nodes and %u CPUs",
                          nodes, cpu_count);
}

/* A node with the usable CPUs that no earlier one has. */
static void add_node(const char *root, uint32_t id, cpus *left, kvf_topology *out)
{
    uint32_t first, last;
    kvf_node *node = &out->nodes[out->node_count++];
    *node = (kvf_node){.id = (int32_t)id, .cpus_offset = out->cpu_count};
    read_memory(root, node);
    FILE *file = open_file(root, "node/node", id, "cpulist");
    while (file && next_range(file, &first, &last))
        for (uint32_t cpu = first; cpu <= last; cpu++)
            if (has(left, cpu)) {
                CPU_CLR_S(cpu, left->bytes, left->set);
                out->cpus[out->cpu_count++] = cpu;
                node->cpu_count++;
            }
    if (file)
        fclose(file);
}

/* As many as there are CPUs that are the first usable one of their core. */
static uint32_t count_cores(const char *root, const cpus *usable, const kvf_topology *t)
{
    uint32_t cores = 0;
    for (uint32_t i = 0; i < t->cpu_count; i++) {
        uint32_t first, last, lowest = t->cpus[i];
        FILE *file = open_file(root, "cpu/cpu", t->cpus[i], "topology/thread_siblings_list");
        while (file && next_range(file, &first, &last))
            for (uint32_t cpu = first; cpu <= last && cpu < lowest; cpu++)
                if (has(usable, cpu))
                    lowest = cpu;
        if (file)
            fclose(file);
        cores += lowest == t->cpus[i];
    }
    return cores;
}

/* One node, id -1, with every usable CPU. */
static void read_unknown(const cpus *usable, kvf_topology *out)
{
    out->cpu_count = 0;
    for (uint32_t cpu = 0; cpu < usable->bytes * 8; cpu++)
        if (has(usable, cpu))
            out->cpus[out->cpu_count++] = cpu;
    out->node_count = 1;
    out->nodes[0] = (kvf_node){.id = -1, .cpu_count = out->cpu_count};
}

static kvf_status read_nodes(kvf_context *context, const char *root, const cpus *usable,
                             kvf_topology *out)
{
    cpus left = {0};
    const uint32_t count = (uint32_t)CPU_COUNT_S(usable->bytes, usable->set);
    KVF_TRY(reserve_lists(context, root, count, out));
    KVF_TRY(reserve(context, (uint32_t)(usable->bytes * 8), &left));
    memcpy(left.set, usable->set, usable->bytes);
    uint32_t first, last;
    FILE *file = open_list(root, "node/online");
    while (file && next_range(file, &first, &last))
        for (uint32_t id = first; id <= last; id++)
            add_node(root, id, &left, out);
    if (file)
        fclose(file);
    out->known = out->node_count > 0 && out->cpu_count == count;
    if (!out->known)
        read_unknown(usable, out);
    kvf_free(context, left.set);
    return KVF_OK;
}

kvf_status kvf_topology_read(kvf_context *context, const char *sysfs, kvf_topology *out)
{
    cpus usable = {0};
    *out = (kvf_topology){0};
    KVF_TRY(sysfs ? read_online(context, sysfs, &usable) : read_affinity(context, &usable));
    out->cpu_quota = sysfs ? UINT64_MAX : kvf_cgroup_cpus(KVF_PROC_CGROUP, KVF_SYS_CGROUP);
    const kvf_status status = read_nodes(context, sysfs, &usable, out);
    if (status == KVF_OK)
        out->core_count = count_cores(sysfs, &usable, out);
    else
        kvf_topology_close(context, out);
    kvf_free(context, usable.set);
    return status;
}

uint32_t kvf_topology_threads(const kvf_topology *topology)
{
    const uint64_t quota = topology->cpu_quota / 1000;
    return kvf_max_u32(1, quota < topology->core_count ? (uint32_t)quota : topology->core_count);
}

void kvf_topology_close(kvf_context *context, kvf_topology *topology)
{
    kvf_free(context, topology->nodes);
    kvf_free(context, topology->cpus);
    *topology = (kvf_topology){0};
}

int32_t kvf_topology_node_of_pci(const char *sysfs, const char *pci_address)
{
    unsigned domain, bus, device, function;
    char path[PATH_BYTES], line[64];
    int node = -1;
    if (!pci_address || sscanf(pci_address, "%x:%x:%x.%x", &domain, &bus, &device, &function) != 4)
        return -1;
    snprintf(path, sizeof path, "%s/bus/pci/devices/%04x:%02x:%02x.%x/numa_node",
             sysfs ? sysfs : "/sys", domain, bus, device, function);
    if (!kvf_file_line(path, line, sizeof line) || sscanf(line, "%d", &node) != 1)
        node = -1;
    /* Only a node that exists. */
    FILE *list = node < 0 ? NULL : open_file(sysfs, "node/node", (uint32_t)node, "cpulist");
    if (!list)
        return -1;
    fclose(list);
    return node;
}

/* ---- the PCIe link of a device ---- */

static bool read_line(const char *folder, const char *name, char line[64])
{
    char path[PATH_MAX + 64];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return kvf_file_line(path, line, 64);
}

/* The most that one device or bridge can do; 0 = it does not say. */
static void read_link(const char *folder, uint32_t *generation, uint32_t *width)
{
    static const double speeds[] = {2.5, 5.0, 8.0, 16.0, 32.0, 64.0, 128.0}; /* GT/s */
    char line[64];
    unsigned lanes = 0;
    *generation = *width = 0;
    const double speed = read_line(folder, "max_link_speed", line) ? kvf_real_of(line, NULL) : 0.0;
    for (uint32_t i = 0; i < sizeof speeds / sizeof *speeds; i++)
        if (speed >= speeds[i])
            *generation = i + 1;
    if (read_line(folder, "max_link_width", line) && sscanf(line, "%u", &lanes) == 1 && lanes <= 32)
        *width = lanes;
}

static void take_smaller(uint32_t *least, uint32_t value)
{
    if (value != 0 && (*least == 0 || value < *least))
        *least = value;
}

/* The folder of a device is in that of the bridge above it, up to the root, which has no address.
 */
void kvf_pci_link_read(const char *sysfs_root, const char *pci_address, uint32_t *generation,
                       uint32_t *width)
{
    char link[PATH_BYTES], folder[PATH_MAX];
    unsigned part;
    *generation = *width = 0;
    const int length = snprintf(link, sizeof link, "%s/bus/pci/devices/%s",
                                sysfs_root ? sysfs_root : "/sys", pci_address);
    if (length < 0 || length >= PATH_BYTES || !realpath(link, folder))
        return;
    for (char *slash; (slash = strrchr(folder, '/')) != NULL; *slash = '\0') {
        uint32_t here, lanes;
        if (sscanf(slash, "/%x:%x:%x.%x", &part, &part, &part, &part) != 4)
            return;
        read_link(folder, &here, &lanes);
        take_smaller(generation, here);
        take_smaller(width, lanes);
    }
}
