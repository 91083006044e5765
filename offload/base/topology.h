/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_OFFLOAD_TOPOLOGY_H
#define KVF_OFFLOAD_TOPOLOGY_H

/*
 * NUMA nodes, CPUs and cores, how much time of them the cgroup gives, which node a device on PCI is
 * at, and its link, out of sysfs; and how much memory the system has left for us.
 *
 * Knows nothing of who asks; it only answers questions, however many nodes and CPUs there
 * are. Where the system gives no NUMA information, there is one node, id -1, that holds every
 * usable CPU. `sysfs` is NULL for this machine, whose CPUs are those that this process may use;
 * tests name a folder instead, of which all CPUs that are online count, without a quota.
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
    uint64_t cpu_quota;  /* of the cgroups, in thousandths of a CPU; UINT64_MAX = none */
    bool known;          /* NUMA information was had */
} kvf_topology;

KVF_CHECKED kvf_status kvf_topology_read(kvf_context *context, const char *sysfs,
                                         kvf_topology *out);
void kvf_topology_close(kvf_context *context, kvf_topology *topology); /* zeroes is fine */

/* Threads that can run at once in the long run, at least 1: one per core, as far as the quota goes.
 * More would be stopped together once it is spent, for the rest of its period. */
uint32_t kvf_topology_threads(const kvf_topology *topology);

/*
 * Node nearest a PCI address "dddd:bb:dd.f", or -1 if nothing is known. A node id of -1 in sysfs,
 * or one that does not exist, gives -1: nobody guesses.
 */
int32_t kvf_topology_node_of_pci(const char *sysfs, const char *pci_address);

/* Index into nodes of the node with this id; -1 if there is none. */
int32_t kvf_topology_find(const kvf_topology *topology, int32_t node_id);

/*
 * Generation (1 to 7) and lanes of the link of "dddd:bb:dd.f": each the smallest of what the device
 * and the bridges above it can do. The present speed says less: it falls while a GPU idles.
 * 0 = unknown. `sysfs_root` replaces "/sys" if it is not NULL.
 */
void kvf_pci_link_read(const char *sysfs_root, const char *pci_address, uint32_t *generation,
                       uint32_t *width);

/*
 * How much memory the system will let us have: memlock, cgroup, node, huge pages.
 *
 * Knows nothing of who asks. A number that cannot be read is UINT64_MAX, so that only what is
 * known to fail is refused.
 */

/* Every number in bytes, UINT64_MAX = unlimited or unknown. */
typedef struct kvf_headroom {
    uint64_t memlock;        /* RLIMIT_MEMLOCK, or UINT64_MAX with CAP_IPC_LOCK */
    uint64_t pinned;         /* that drivers pin at most, of all processes, about */
    uint64_t cgroup;         /* limit - usage + file cache, v2 or v1, the least up the tree */
    const char *cgroup_file; /* where that limit is */
    uint64_t node_free;      /* on the node, or of the machine */
    uint64_t hugetlb_free;   /* reserved huge pages that are free */
    uint64_t may_come;       /* so much is worth a try although node_free is less; 0 on a node */
} kvf_headroom;

/* For a node that is not in `topology`, or is the only one, or -1: of the machine. `topology` may
 * be NULL. */
void kvf_headroom_read(const kvf_topology *topology, int32_t node, kvf_headroom *out);
typedef void (*kvf_headroom_read_fn)(const kvf_topology *topology, int32_t node, kvf_headroom *out);

#endif
