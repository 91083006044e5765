/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_OFFLOAD_TOPOLOGY_H
#define KVF_OFFLOAD_TOPOLOGY_H

/*
 * NUMA nodes, cores, devices on PCI and the distances between them, through hwloc.
 *
 * Knows nothing of memory or threads; it only answers questions. Without hwloc, or where the
 * system gives no NUMA information, there is one node, id -1, that holds every usable core.
 */

#include "context.h"

#define KVF_NODES_MAX 64u
#define KVF_CPUS_MAX  1024u

typedef struct kvf_node {
    int32_t id;            /* of the operating system; -1 = unknown */
    uint64_t memory_bytes; /* total, 0 = unknown */
    uint64_t free_bytes;   /* at the time of asking, 0 = unknown */
    uint32_t cpu_count;
    uint32_t cpus_offset; /* into kvf_topology.cpus */
} kvf_node;

typedef struct kvf_topology {
    uint32_t node_count; /* >= 1 */
    kvf_node nodes[KVF_NODES_MAX];
    uint32_t cpu_count;          /* usable by this process (affinity respected) */
    uint32_t cpus[KVF_CPUS_MAX]; /* OS indices, grouped by node */
    uint32_t core_count;         /* physical cores among them */
    bool known;                  /* NUMA information was had */
} kvf_topology;

/* Where to read the machine from: all NULL = this machine. */
typedef struct kvf_topology_source {
    const char *synthetic;  /* hwloc synthetic description, for tests */
    const char *xml_path;   /* recorded topology, for tests */
    const char *sysfs_root; /* instead of "/sys": numa_node of PCI devices, free memory of nodes */
} kvf_topology_source;

KVF_CHECKED kvf_status kvf_topology_read(kvf_context *context, const kvf_topology_source *source,
                                         kvf_topology *out);

/*
 * Node nearest a PCI address "dddd:bb:dd.f", or -1 if nothing is known. A node id of -1 in sysfs,
 * or one that does not exist, gives -1: nobody guesses. `source` as above.
 */
int32_t kvf_topology_node_of_pci(kvf_context *context, const kvf_topology_source *source,
                                 const char *pci_address);

/* Index into nodes of the node with this id; -1 if there is none. */
int32_t kvf_topology_find(const kvf_topology *topology, int32_t node_id);

#endif
