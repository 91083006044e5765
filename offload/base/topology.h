/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_OFFLOAD_TOPOLOGY_H
#define KVF_OFFLOAD_TOPOLOGY_H

/*
 * NUMA nodes, CPUs and cores, which node a device on PCI is at, and its link, out of sysfs.
 *
 * Knows nothing of memory or threads; it only answers questions, however many nodes and CPUs there
 * are. Where the system gives no NUMA information, there is one node, id -1, that holds every
 * usable CPU. `sysfs` is NULL for this machine, whose CPUs are those that this process may use;
 * tests name a folder instead, of which all CPUs that are online count.
 */

#include "context.h"

#include <stdint.h>

typedef struct kvf_node {
    int32_t id;            /* of the operating system; -1 = unknown */
    uint64_t memory_bytes; /* total, 0 = unknown */
    uint64_t free_bytes;   /* at the time of asking, 0 = unknown */
    uint32_t cpu_count;
    uint32_t cpus_offset; /* into kvf_topology.cpus */
} kvf_node;

typedef struct kvf_topology {
    uint32_t node_count; /* >= 1 */
    kvf_node *nodes;
    uint32_t cpu_count;
    uint32_t *cpus;      /* numbers of the system, grouped by node */
    uint32_t core_count; /* physical cores among them */
    bool known;          /* NUMA information was had */
} kvf_topology;

KVF_CHECKED kvf_status kvf_topology_read(kvf_context *context, const char *sysfs,
                                         kvf_topology *out);
void kvf_topology_close(kvf_context *context, kvf_topology *topology); /* zeroes is fine */

/*
 * Node nearest a PCI address "dddd:bb:dd.f", or -1 if nothing is known. A node id of -1 in sysfs,
 * or one that does not exist, gives -1: nobody guesses.
 */
int32_t kvf_topology_node_of_pci(const char *sysfs, const char *pci_address);

/* Index into nodes of the node with this id; -1 if there is none. */
int32_t kvf_topology_find(const kvf_topology *topology, int32_t node_id);

/*
 * Generation (1 to 7) and lanes of the link at "dddd:bb:dd.f", the most that the device can do: the
 * current speed falls when a GPU idles. 0 = unknown. `sysfs_root` replaces "/sys" if it is not
 * NULL.
 */
void kvf_pci_link_read(const char *sysfs_root, const char *pci_address, uint32_t *generation,
                       uint32_t *width);

#endif
