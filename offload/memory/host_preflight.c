/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The verdict on a request for host memory, before anything is mapped.
 *
 * Invariant: it refuses only what is known to fail, and its text names limit, value, need and fix.
 * What it lets pass may still not be there: memory is looked at again while it is taken.
 */

#include "host_memory.h"

#include "common/text.h"

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
                        "the cgroup's memory limit (%s) leaves %s, host memory needs %s; raise %s, "
                        "or lower %s",
                        headroom->cgroup_file, kvf_bytes_text(headroom->cgroup, have), need,
                        headroom->cgroup_file, config->lower);
    if (headroom->node_free < from_free && from_free <= headroom->may_come) {
        kvf_log(context, KVF_LOG_WARNING,
                "the machine has %s of memory available, host memory needs %s; it is tried piece "
                "by piece, because a virtual machine may get more as it uses it",
                kvf_bytes_text(headroom->node_free, have), need);
        return KVF_OK;
    }
    if (headroom->node_free < from_free && config->node >= 0)
        return kvf_fail(context, KVF_OUT_OF_MEMORY, 0,
                        "NUMA node %d has %s free, host memory needs %s; free memory there, set "
                        "numa_node to another node, or lower %s",
                        config->node, kvf_bytes_text(headroom->node_free, have), need,
                        config->lower);
    if (headroom->node_free < from_free)
        return kvf_fail(context, KVF_OUT_OF_MEMORY, 0,
                        "the machine has %s of memory available, host memory needs %s; free "
                        "memory, or lower %s",
                        kvf_bytes_text(headroom->node_free, have), need, config->lower);
    return KVF_OK;
}
