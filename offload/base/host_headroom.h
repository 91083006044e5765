/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_OFFLOAD_HOST_HEADROOM_H
#define KVF_OFFLOAD_HOST_HEADROOM_H

/*
 * How much memory the system will let us have: memlock, cgroup, node, huge pages.
 *
 * Knows nothing of who asks. A number that cannot be read is UINT64_MAX, so that only what is
 * known to fail is refused.
 */

#include "topology.h"

/* Every number in bytes, UINT64_MAX = unlimited or unknown. */
typedef struct kvf_headroom {
    uint64_t memlock;        /* RLIMIT_MEMLOCK, or UINT64_MAX with CAP_IPC_LOCK */
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
