/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The host device: "device memory" is host memory, streams are workers, launches run on a team.
 *
 * Host memory is registered without mlock. Nothing here moves by DMA, so a page that the kernel
 * swaps out costs time and never correctness, and the default RLIMIT_MEMLOCK of 8 MiB does not
 * stand in the way of an unprivileged user. Registration is counted, and properties say
 * pins_host_memory = 0.
 *
 * Knows nothing of pages, pools or kernels beyond their table. Invariant: every byte it hands out
 * is counted in the context, every registration in registered_bytes.
 */

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "common/cgroup.h"
#include "common/text.h"
#include "host_stream.h"
#include "populate.h"
#include "topology.h"

#define SMALL_BYTES ((size_t)4096)
#define HUGE_BYTES  ((size_t)2 << 20)

static kvf_host_device *of_device(kvf_device *device)
{
    return (kvf_host_device *)(void *)device;
}

/* ---- memory ---- */

/* In front of every block; says how to give it back. */
typedef struct memory_head {
    void *map; /* NULL: came from kvf_alloc */
    size_t map_bytes;
} memory_head;

#define MEMORY_HEAD_BYTES ((size_t)64)

/* Large blocks: a map of their own, populated now on huge pages so that no step pays for it; or on
 * demand, by pages so small that what is not written is not there. */
static char *map_memory(kvf_context *context, size_t bytes, bool on_demand)
{
    size_t map_bytes = kvf_round_up(bytes, SMALL_BYTES) + HUGE_BYTES;
    char *map = mmap(NULL, map_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (map == MAP_FAILED)
        return NULL;
    uintptr_t first = kvf_round_up((uintptr_t)map + MEMORY_HEAD_BYTES, HUGE_BYTES);
    char *block = map + (first - (uintptr_t)map);
    (void)madvise(block, bytes, on_demand ? MADV_NOHUGEPAGE : MADV_HUGEPAGE);
    if (!on_demand &&
        kvf_populate(block, kvf_round_up(bytes, SMALL_BYTES), SMALL_BYTES, false) != 0) {
        munmap(map, map_bytes);
        return NULL;
    }
    memory_head *head = (memory_head *)(void *)(block - MEMORY_HEAD_BYTES);
    head->map = map;
    head->map_bytes = map_bytes;
    kvf_context_count(context, map_bytes);
    return block;
}

static uint64_t available_bytes(void)
{
    kvf_headroom headroom;
    kvf_headroom_read(NULL, -1, &headroom);
    return headroom.cgroup < headroom.node_free ? headroom.cgroup : headroom.node_free;
}

/* The host's own pages are there, too. */
static uint64_t host_memory_left(kvf_device *device)
{
    const uint64_t bytes = available_bytes();
    (void)device;
    return bytes == UINT64_MAX ? 0 : bytes / 2;
}

static kvf_status alloc_memory(kvf_device *device, size_t bytes, bool on_demand, void **out)
{
    kvf_context *context = device->context;
    char *block = NULL;
    /* Populating more than there is would end in the kernel's out-of-memory killer. */
    uint64_t room = bytes >= HUGE_BYTES ? available_bytes() : UINT64_MAX;
    *out = NULL;
    if (!kvf_context_refuses(context, "device memory") && bytes <= room &&
        bytes <= SIZE_MAX - 2 * HUGE_BYTES) {
        if (bytes >= HUGE_BYTES) {
            block = map_memory(context, bytes, on_demand);
        } else {
            block = kvf_alloc(context, 1, bytes + MEMORY_HEAD_BYTES);
            block = block ? block + MEMORY_HEAD_BYTES : NULL;
        }
    }
    if (!block) {
        char need[32], have[32];
        KVF_FAIL(context, KVF_OUT_OF_DEVICE_MEMORY,
                 "the host device has no %s of memory (%s available); lower sequences_max, "
                 "tokens_max, device_bytes or budget_tokens",
                 kvf_bytes_text(bytes, need), kvf_bytes_text(available_bytes(), have));
    }
    *out = block;
    return KVF_OK;
}

static kvf_status host_memory_alloc(kvf_device *device, size_t bytes, void **out)
{
    return alloc_memory(device, bytes, false, out);
}

static kvf_status host_memory_on_demand(kvf_device *device, size_t bytes, void **out)
{
    return alloc_memory(device, bytes, true, out);
}

static void host_memory_free(kvf_device *device, void *pointer)
{
    if (!pointer)
        return;
    memory_head head = *(memory_head *)(void *)((char *)pointer - MEMORY_HEAD_BYTES);
    if (!head.map) {
        kvf_free(device->context, (char *)pointer - MEMORY_HEAD_BYTES);
        return;
    }
    munmap(head.map, head.map_bytes);
    kvf_context_uncount(device->context, head.map_bytes);
}

static kvf_status host_register(kvf_device *base, void *host, size_t bytes, void **alias)
{
    kvf_host_device *device = of_device(base);
    *alias = NULL;
    if (kvf_context_refuses(base->context, "register")) {
        char text[32];
        return kvf_fail(base->context, KVF_PIN_FAILED, ENOMEM,
                        "%s of host memory could not be registered with the device; raise the "
                        "limit with `ulimit -l unlimited`, or set allow_unpinned",
                        kvf_bytes_text(bytes, text));
    }
    pthread_mutex_lock(&device->lock);
    device->registered_bytes += bytes;
    device->registered_regions++;
    pthread_mutex_unlock(&device->lock);
    *alias = host;
    return KVF_OK;
}

static void host_unregister(kvf_device *base, void *host, size_t bytes)
{
    kvf_host_device *device = of_device(base);
    (void)host;
    pthread_mutex_lock(&device->lock);
    KVF_ASSERT(device->registered_regions > 0 && device->registered_bytes >= bytes);
    device->registered_bytes -= bytes;
    device->registered_regions--;
    pthread_mutex_unlock(&device->lock);
}

/* ---- the device ---- */

static void read_name(char name[64])
{
    snprintf(name, 64, "host CPU");
    char line[256];
    const bool is_read = kvf_file_find("/proc/cpuinfo", "model name", line, sizeof line);
    const char *text = is_read ? strchr(line, ':') : NULL;
    if (!text)
        return;
    text += strspn(text, ": \t");
    snprintf(name, 64, "%.*s", (int)kvf_min_u32((uint32_t)strcspn(text, "\n"), 63), text);
}

static void host_properties(const kvf_device *base, kvf_device_properties *out)
{
    const kvf_host_device *device = (const kvf_host_device *)(const void *)base;
    memset(out, 0, sizeof *out);
    memcpy(out->name, device->name, sizeof out->name);
    out->numa_node = -1;
    long pages = sysconf(_SC_PHYS_PAGES);
    long page_bytes = sysconf(_SC_PAGESIZE);
    if (pages > 0 && page_bytes > 0)
        out->memory_bytes = (uint64_t)pages * (uint64_t)page_bytes;
    out->shares_host_memory = true;
    out->compute_threads = kvf_team_threads(device->team);
    out->pins_host_memory = false;
}

/* Work is never recorded here. */
static int host_is_capturing(kvf_stream *stream)
{
    (void)stream;
    return 0;
}

/* ---- opening and closing ---- */

static void host_close(kvf_device *base)
{
    kvf_host_device *device = of_device(base);
    KVF_ASSERT(device->stream_count == 0);
    KVF_ASSERT(device->registered_regions == 0);
    kvf_team_destroy(device->team);
    pthread_mutex_destroy(&device->lock);
    kvf_free(base->context, device);
}

static const kvf_device_ops host_ops = {
    .kind = KVF_DEVICE_HOST,
    .name = "host",
    .close = host_close,
    .properties = host_properties,
    .memory_alloc = host_memory_alloc,
    .memory_on_demand = host_memory_on_demand,
    .memory_left = host_memory_left,
    .memory_free = host_memory_free,
    .host_register = host_register,
    .host_unregister = host_unregister,
    .stream_create = kvf_host_stream_create,
    .stream_destroy = kvf_host_stream_destroy,
    .stream_wait = kvf_host_stream_wait,
    .event_create = kvf_host_event_create,
    .event_destroy = kvf_host_event_destroy,
    .event_record = kvf_host_event_record,
    .stream_wait_event = kvf_host_stream_wait_event,
    .event_wait = kvf_host_event_wait,
    .event_is_done = kvf_host_event_is_done,
    .event_elapsed = kvf_host_event_elapsed,
    .copy = kvf_host_copy,
    .copy_through = kvf_host_copy_through,
    .copy_batch = kvf_host_copy_batch,
    .fill = kvf_host_fill,
    .launch = kvf_host_launch,
    .host_call = kvf_host_host_call,
    .stream_fail = kvf_host_stream_fail,
    .is_capturing = host_is_capturing,
};

kvf_status kvf_device_host_open(kvf_context *context, const kvf_device_config *config,
                                kvf_device **out)
{
    *out = NULL;
    KVF_ASSERT(config->threads > 0);
    kvf_host_device *device = kvf_alloc(context, 1, sizeof *device);
    if (!device)
        KVF_FAIL(context, KVF_OUT_OF_MEMORY, "no memory for the host device");
    device->base.ops = &host_ops;
    device->base.context = context;
    device->config = *config;
    device->config.cpus = NULL; /* borrowed for the call only */
    read_name(device->name);
    kvf_status status = kvf_kernels_init(&device->base.kernels, config->isa_mask);
    if (status != KVF_OK) {
        status = kvf_fail(context, status, 0, "no kernel for every operation with isa_mask %#x",
                          config->isa_mask);
        goto fail;
    }
    if (pthread_mutex_init(&device->lock, NULL) != 0) {
        status = kvf_fail(context, KVF_SYSTEM, 0, "a lock for the device could not be made");
        goto fail;
    }
    kvf_team_config team = {
        .threads = config->threads, .cpus = config->cpus, .name = "kvf-compute"};
    status = kvf_team_create(context, &team, &device->team);
    if (status != KVF_OK) {
        pthread_mutex_destroy(&device->lock);
        goto fail;
    }
    *out = &device->base;
    return KVF_OK;

fail:
    kvf_free(context, device);
    return status;
}
