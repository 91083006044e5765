/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_OFFLOAD_LINK_MEASURE_H
#define KVF_OFFLOAD_LINK_MEASURE_H

/*
 * Measures one case of scattered transfers: <kvferry/link.h> on a device; a runtime only opens it.
 *
 * A bench keeps a pool whose every 8 bytes say where in the pool they lie, so what arrives can be
 * compared whatever the page size, and a case costs no refill. Invariant: nothing but the pool
 * outlives a case.
 */

#include <kvferry/disk.h>
#include <kvferry/link.h>

#include "host_memory.h"

typedef struct kvf_link_bench_config {
    kvf_host_memory_config memory; /* policy; node and huge_pages are those of a case that asks */
    uint32_t gather_threads;       /* of a case that leaves `workers` 0; >= 1 */
    /* Cases may ask for AUTO, and get this; outlives the bench. NULL: they may not. */
    const struct kvf_transfer_choice *choice;
} kvf_link_bench_config;

KVF_CHECKED kvf_status kvf_link_bench_open(kvf_device *device, const kvf_link_bench_config *config,
                                           kvf_link **out);

/* The 8 bytes at `offset` of the pool, or of a file, a multiple of 8. */
static inline uint64_t kvf_link_word(uint64_t offset)
{
    return (offset / 8 + 1) * UINT64_C(0x9e3779b97f4a7c15);
}

/* Whether all bytes are those from `offset` on. */
bool kvf_link_is_right(const char *bytes, uint64_t offset, size_t count);

/* Sorts ns[count] and sums it up; percentiles are values that occurred. count 0: all 0. */
void kvf_link_times_sum_up(uint64_t *ns, uint32_t count, kvf_link_times *out);

/*
 * Inside the link bench: its pool, and cases that bring pages of it.
 *
 * The bench (link_measure.c) has checked a case before it comes here.
 */

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

/*
 * Measures passes over extents of a file: <kvferry/disk.h> on a context; a runtime only opens it.
 *
 * Invariant: every 8 bytes of the file say where in it they lie (kvf_link_word), whatever passes
 * have run, so what arrives can be compared.
 */

KVF_CHECKED kvf_status kvf_disk_bench_open(kvf_context *context, const char *folder, uint64_t bytes,
                                           kvf_disk **out);

#endif
