/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_OFFLOAD_LINK_CASES_H
#define KVF_OFFLOAD_LINK_CASES_H

/*
 * Inside the link bench: its pool, and cases that bring pages of it.
 *
 * The bench (link_measure.c) has checked a case before it comes here.
 */

#include "link_measure.h"

struct kvf_link {
    kvf_device *device;
    kvf_link_bench_config config;
    kvf_host_memory pool; /* arenas of whole MiB */
    uint64_t pool_bytes;  /* that the pool was made for; 0 = none */
    int32_t pool_node;
    kvf_huge_pages pool_huge_pages;
};

/* Makes the pool if the one that is there is another, runs the case, and sums it up. */
KVF_CHECKED kvf_status kvf_link_run(kvf_link *bench, const kvf_link_case *c, uint64_t *samples_ns,
                                    kvf_link_result *result);
void kvf_link_pool_drop(kvf_link *bench);

/* Choose ids[pages] by the case's pattern. */
void kvf_link_choose(const kvf_link_case *c, uint64_t pool_pages, uint64_t *random, uint32_t *ids);

#endif
