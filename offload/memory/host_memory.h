/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_OFFLOAD_HOST_MEMORY_H
#define KVF_OFFLOAD_HOST_MEMORY_H

/*
 * Large host memory: mapped in arenas of at most 1 GiB, on the best page size to be had, bound to a
 * NUMA node, touched in parallel by threads on that node, then registered with the device. Where
 * the device takes no memory of others, it allocates the arenas: pinned, on small pages and on a
 * node of its choice, which a note of the log says.
 *
 * Before each piece of 256 MiB is touched, what is left is looked at: where it is too little the
 * request is refused, while the kernel would end the process. So what the machine shows too little
 * of at first may be tried (preflight says when).
 *
 * The tier that an arena obtained is found when somebody asks. Nothing here assumes that a host
 * address equals its device alias. Failure leaves nothing mapped, bound or registered.
 */

#include "device.h"
#include "topology.h"

#define KVF_ARENA_BYTES_MAX ((size_t)1 << 30)

typedef enum kvf_page_tier {
    KVF_TIER_HUGETLB,
    KVF_TIER_THP,
    KVF_TIER_4K,
    KVF_TIER_COUNT
} kvf_page_tier;

typedef struct kvf_arena {
    char *host;   /* as the CPU sees it */
    char *device; /* as the device sees it */
    size_t bytes;
    size_t mapped_bytes; /* >= bytes, a multiple of the pages it was mapped in */
    bool hugetlb;        /* mapped in huge pages that were reserved */
    bool registered;     /* pinned and visible to the device */
    bool allocated;      /* ... because it is the device's own (host_alloc); not mapped here */
    bool bound;          /* mbind succeeded */
} kvf_arena;

typedef struct kvf_host_memory {
    kvf_device *device;
    kvf_arena *arenas; /* [arena_count] */
    uint32_t arena_count;
    uint64_t bytes;
} kvf_host_memory;

typedef struct kvf_host_memory_config {
    uint64_t bytes; /* wanted in all */
    size_t granule; /* an arena holds a whole number of granules, <= KVF_ARENA_BYTES_MAX */
    int32_t node;   /* -1 = do not bind */
    kvf_huge_pages huge_pages;
    bool allow_unpinned;
    bool on_demand; /* resident as it is written; huge pages are those that the kernel finds then */
    uint32_t touch_threads; /* >= 1 */
    const kvf_topology *topology;
    size_t arena_bytes_max; /* 0 = KVF_ARENA_BYTES_MAX; tests want several small arenas */
    /* NULL = kvf_headroom_read; tests have limits of their own */
    kvf_headroom_read_fn read_headroom;
    const char *lower; /* the settings of the caller that make `bytes` less, for texts */
} kvf_host_memory_config;

/* The most bytes of one arena under a configuration, a whole number of granules. */
static inline size_t kvf_arena_bytes(const kvf_host_memory_config *config)
{
    size_t most = config->arena_bytes_max > 0 ? config->arena_bytes_max : KVF_ARENA_BYTES_MAX;
    return (most > config->granule ? most / config->granule : 1) * config->granule;
}

/* Where nothing is tried, set may_come to 0 before. Registering counts nothing against
 * RLIMIT_MEMLOCK (device_host.c, device_cuda.c), so that is no reason to refuse.
 * @return KVF_OK, or KVF_OUT_OF_MEMORY whose text names limit, value, need and fix. */
KVF_CHECKED kvf_status kvf_host_memory_preflight(kvf_context *context, const kvf_headroom *headroom,
                                                 const kvf_host_memory_config *config);

/* Runs preflight first. `config->topology` may be NULL if node is -1. */
KVF_CHECKED kvf_status kvf_host_memory_create(kvf_context *context, kvf_device *device,
                                              const kvf_host_memory_config *config,
                                              kvf_host_memory *out);
void kvf_host_memory_destroy(kvf_context *context, kvf_host_memory *memory);

/* The memory that the kernel really gave. It reads the kernel's list of every map of the process,
 * so it is for reports: with many maps that takes milliseconds. */
kvf_page_tier kvf_arena_tier(const kvf_arena *arena);
const char *kvf_page_tier_name(kvf_page_tier tier);

#endif
