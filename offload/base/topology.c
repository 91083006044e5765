/* SPDX-License-Identifier: Apache-2.0 */

/*
 * NUMA nodes and the way from a PCI device to its node, through hwloc.
 *
 * Knows nothing of memory or threads. Whatever is not known is said to be unknown (node -1): a
 * wrong node costs more than none. Invariant: the cpus of the nodes are disjoint, and together they
 * are cpus[0 .. cpu_count-1].
 */

#include "topology.h"

#include <sched.h>
#include <stdio.h>
#include <string.h>

#if KVF_HAVE_HWLOC
#include <hwloc.h>
#endif

/* One node, id -1, with every CPU that this process may run on. */
static void read_unknown(kvf_topology *out)
{
    memset(out, 0, sizeof *out);
    cpu_set_t set;
    CPU_ZERO(&set);
    if (sched_getaffinity(0, sizeof set, &set) != 0)
        CPU_SET(0, &set);
    for (uint32_t cpu = 0; cpu < CPU_SETSIZE && out->cpu_count < KVF_CPUS_MAX; cpu++)
        if (CPU_ISSET(cpu, &set))
            out->cpus[out->cpu_count++] = cpu;
    out->core_count = out->cpu_count;
    out->node_count = 1;
    out->nodes[0] = (kvf_node){.id = -1, .cpu_count = out->cpu_count};
}

int32_t kvf_topology_find(const kvf_topology *topology, int32_t node_id)
{
    for (uint32_t i = 0; i < topology->node_count; i++)
        if (topology->nodes[i].id == node_id)
            return (int32_t)i;
    return -1;
}

#if KVF_HAVE_HWLOC

static bool is_this_machine(const kvf_topology_source *source)
{
    return !source || (!source->synthetic && !source->xml_path);
}

static const char *sysfs_root(const kvf_topology_source *source)
{
    return source && source->sysfs_root ? source->sysfs_root : "/sys";
}

static kvf_status load(kvf_context *context, const kvf_topology_source *source,
                       hwloc_topology_t *out)
{
    hwloc_topology_t topology;
    if (hwloc_topology_init(&topology) != 0)
        KVF_FAIL(context, KVF_OUT_OF_MEMORY, "hwloc could not start");
    int code = 0;
    /* PCI of this machine is asked of sysfs, where hwloc would look too; only replays need objects.
     */
    if (!is_this_machine(source)) {
        code = hwloc_topology_set_io_types_filter(topology, HWLOC_TYPE_FILTER_KEEP_ALL);
        if (code == 0)
            code = hwloc_topology_set_flags(topology, HWLOC_TOPOLOGY_FLAG_IMPORT_SUPPORT);
        if (code == 0 && source->xml_path)
            code = hwloc_topology_set_xml(topology, source->xml_path);
        else if (code == 0)
            code = hwloc_topology_set_synthetic(topology, source->synthetic);
    }
    if (code == 0)
        code = hwloc_topology_load(topology);
    if (code != 0) {
        hwloc_topology_destroy(topology);
        if (is_this_machine(source))
            KVF_FAIL(context, KVF_SYSTEM, "hwloc could not read this machine");
        KVF_FAIL(context, KVF_INVALID, "hwloc could not read the topology '%s'",
                 source->xml_path ? source->xml_path : source->synthetic);
    }
    *out = topology;
    return KVF_OK;
}

static uint64_t node_free_bytes(const char *root, unsigned id)
{
    char path[512];
    snprintf(path, sizeof path, "%s/devices/system/node/node%u/meminfo", root, id);
    FILE *file = fopen(path, "r");
    if (!file)
        return 0;
    char line[256];
    uint64_t bytes = 0;
    while (fgets(line, sizeof line, file)) {
        const char *at = strstr(line, "MemFree:");
        unsigned long long kib;
        if (at && sscanf(at, "MemFree: %llu", &kib) == 1)
            bytes = (uint64_t)kib * 1024;
    }
    fclose(file);
    return bytes;
}

/* Add the usable CPUs of one node. */
static void add_node(kvf_topology *out, hwloc_obj_t object, hwloc_const_bitmap_t usable)
{
    kvf_node *node = &out->nodes[out->node_count++];
    node->id = (int32_t)object->os_index;
    node->memory_bytes = object->attr->numanode.local_memory;
    node->cpus_offset = out->cpu_count;
    int cpu;
    hwloc_bitmap_foreach_begin(cpu, object->cpuset)
    {
        bool is_taken = !hwloc_bitmap_isset(usable, (unsigned)cpu);
        for (uint32_t i = 0; i < out->cpu_count && !is_taken; i++)
            is_taken = out->cpus[i] == (uint32_t)cpu;
        if (!is_taken && out->cpu_count < KVF_CPUS_MAX) {
            out->cpus[out->cpu_count++] = (uint32_t)cpu;
            node->cpu_count++;
        }
    }
    hwloc_bitmap_foreach_end();
}

static uint32_t count_cores(hwloc_topology_t topology, hwloc_const_bitmap_t usable, uint32_t cpus)
{
    uint32_t cores = 0;
    for (hwloc_obj_t core = hwloc_get_next_obj_by_type(topology, HWLOC_OBJ_CORE, NULL); core;
         core = hwloc_get_next_obj_by_type(topology, HWLOC_OBJ_CORE, core))
        if (hwloc_bitmap_intersects(core->cpuset, usable))
            cores++;
    return cores > 0 ? cores : cpus;
}

kvf_status kvf_topology_read(kvf_context *context, const kvf_topology_source *source,
                             kvf_topology *out)
{
    memset(out, 0, sizeof *out);
    hwloc_topology_t topology;
    KVF_TRY(load(context, source, &topology));
    hwloc_bitmap_t usable = hwloc_bitmap_dup(hwloc_topology_get_allowed_cpuset(topology));
    if (!usable) {
        hwloc_topology_destroy(topology);
        KVF_FAIL(context, KVF_OUT_OF_MEMORY, "hwloc has no memory");
    }
    if (is_this_machine(source)) {
        kvf_topology affinity;
        read_unknown(&affinity);
        hwloc_bitmap_zero(usable);
        for (uint32_t i = 0; i < affinity.cpu_count; i++)
            hwloc_bitmap_set(usable, affinity.cpus[i]);
    }
    out->known = hwloc_topology_get_support(topology)->discovery->numa != 0;
    for (hwloc_obj_t node = hwloc_get_next_obj_by_type(topology, HWLOC_OBJ_NUMANODE, NULL);
         node && out->node_count < KVF_NODES_MAX;
         node = hwloc_get_next_obj_by_type(topology, HWLOC_OBJ_NUMANODE, node)) {
        add_node(out, node, usable);
        kvf_node *last = &out->nodes[out->node_count - 1];
        if (is_this_machine(source) || source->sysfs_root)
            last->free_bytes = node_free_bytes(sysfs_root(source), node->os_index);
    }
    if (out->node_count == 0 || out->cpu_count == 0) {
        read_unknown(out);
    } else if (!out->known) {
        /* hwloc invents a node where the system names none. */
        out->node_count = 1;
        out->nodes[0].id = -1;
        out->nodes[0].cpu_count = out->cpu_count;
        out->nodes[0].cpus_offset = 0;
    }
    out->core_count = count_cores(topology, usable, out->cpu_count);
    hwloc_bitmap_free(usable);
    hwloc_topology_destroy(topology);
    return KVF_OK;
}

/* numa_node of sysfs: -1 if it says so or says nothing; *is_told tells the two apart. */
static int32_t sysfs_node(const char *root, const char *pci_address, bool *is_told)
{
    char path[512];
    snprintf(path, sizeof path, "%s/bus/pci/devices/%s/numa_node", root, pci_address);
    int node = -1;
    *is_told = false;
    FILE *file = fopen(path, "r");
    if (file) {
        *is_told = fscanf(file, "%d", &node) == 1;
        fclose(file);
    }
    return node;
}

int32_t kvf_topology_node_of_pci(kvf_context *context, const kvf_topology_source *source,
                                 const char *pci_address)
{
    unsigned domain, bus, device, function;
    if (!pci_address || sscanf(pci_address, "%x:%x:%x.%x", &domain, &bus, &device, &function) != 4)
        return -1;
    hwloc_topology_t topology;
    if (load(context, source, &topology) != KVF_OK)
        return -1;
    int32_t node = -1;
    bool is_told = false;
    if (is_this_machine(source) || source->sysfs_root)
        node = sysfs_node(sysfs_root(source), pci_address, &is_told);
    if (!is_told) {
        hwloc_obj_t object = hwloc_get_pcidev_by_busid(topology, domain, bus, device, function);
        hwloc_obj_t holder = object ? hwloc_get_non_io_ancestor_obj(topology, object) : NULL;
        if (holder && holder->nodeset && hwloc_bitmap_weight(holder->nodeset) == 1)
            node = hwloc_bitmap_first(holder->nodeset);
    }
    /* Only a node that exists, and only if nodes are known at all. */
    if (node >= 0 && (!hwloc_topology_get_support(topology)->discovery->numa ||
                      !hwloc_get_numanode_obj_by_os_index(topology, (unsigned)node)))
        node = -1;
    hwloc_topology_destroy(topology);
    return node;
}

#else

kvf_status kvf_topology_read(kvf_context *context, const kvf_topology_source *source,
                             kvf_topology *out)
{
    if (source && (source->synthetic || source->xml_path))
        KVF_FAIL(context, KVF_UNSUPPORTED,
                 "this build has no hwloc and cannot replay a topology; install "
                 "libhwloc-dev and build again");
    read_unknown(out);
    return KVF_OK;
}

int32_t kvf_topology_node_of_pci(kvf_context *context, const kvf_topology_source *source,
                                 const char *pci_address)
{
    (void)context;
    (void)source;
    (void)pci_address;
    return -1;
}

#endif
