/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Arenas: the verdict on a request before anything is mapped; then map on the best tier, bind,
 * touch in parallel, register; undo in reverse order.
 *
 * Knows nothing of what lies in the memory. Every arena is complete before the next one is begun,
 * so a failure leaves whole arenas and one partial one, and the same destroy undoes both.
 * Invariant: an arena with host != NULL is mapped and counted in the context, or allocated by the
 * device; registered says whether the device knows a mapped one.
 */

#include "host_memory.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <time.h>

#include "common/cgroup.h"
#include "common/text.h"
#include "host_team.h"
#include "populate.h"

#if KVF_HAVE_NUMA
#include <numaif.h>
#endif

#ifndef MAP_HUGE_SHIFT
#define MAP_HUGE_SHIFT 26
#endif

#define SMALL_BYTES ((size_t)4096)
#define HUGE_BYTES  ((size_t)2 << 20)
#define NODE_IDS    4096u /* Linux has up to 1024 */
#define TOUCH_BYTES                                                                                \
    ((size_t)16 << 20) /* one task: long against the claim, short against an arena */
#define PIECE_BYTES   ((size_t)256 << 20) /* between two looks at what is left */
#define RESERVE_BYTES PIECE_BYTES /* kept of a machine that more is tried of than it shows */
#define WAIT_MS       100         /* such a machine may need a moment to get more */
#define WAITS_MAX     20

const char *kvf_page_tier_name(kvf_page_tier tier)
{
    static const char *const names[KVF_TIER_COUNT] = {
        [KVF_TIER_HUGETLB] = "hugetlb", [KVF_TIER_THP] = "thp", [KVF_TIER_4K] = "4k"};
    KVF_ASSERT((unsigned)tier < KVF_TIER_COUNT);
    return names[tier];
}

/* ---- mapping ---- */

static bool map_hugetlb(kvf_context *context, kvf_arena *arena)
{
    size_t bytes = kvf_round_up(arena->bytes, HUGE_BYTES);
    if (kvf_context_refuses(context, "hugetlb map"))
        return false;
    void *map = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_HUGETLB | (21 << MAP_HUGE_SHIFT), -1, 0);
    if (map == MAP_FAILED)
        return false;
    arena->host = map;
    arena->mapped_bytes = bytes;
    arena->hugetlb = true;
    kvf_context_count(context, bytes);
    return true;
}

/* Small pages, at an address where huge ones can grow. */
static bool map_normal(kvf_context *context, kvf_arena *arena, bool wants_huge)
{
    size_t bytes = kvf_round_up(arena->bytes, SMALL_BYTES);
    size_t slack = wants_huge && bytes >= HUGE_BYTES ? HUGE_BYTES : 0;
    if (kvf_context_refuses(context, "map"))
        return false;
    char *map =
        mmap(NULL, bytes + slack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (map == MAP_FAILED)
        return false;
    size_t before = slack > 0 ? (HUGE_BYTES - (uintptr_t)map % HUGE_BYTES) % HUGE_BYTES : 0;
    if (before > 0)
        munmap(map, before);
    if (slack > before)
        munmap(map + before + bytes, slack - before);
    arena->host = map + before;
    arena->mapped_bytes = bytes;
    arena->hugetlb = false;
    (void)madvise(arena->host, bytes, wants_huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
    kvf_context_count(context, bytes);
    return true;
}

static void unmap(kvf_context *context, kvf_arena *arena)
{
    if (!arena->host)
        return;
    munmap(arena->host, arena->mapped_bytes);
    kvf_context_uncount(context, arena->mapped_bytes);
    arena->host = NULL;
    arena->bound = false;
}

static void bind_to_node(kvf_context *context, kvf_arena *arena, int32_t node)
{
    if (node < 0)
        return;
#if KVF_HAVE_NUMA
    unsigned long mask[NODE_IDS / (8 * sizeof(unsigned long))] = {0};
    const size_t bits = 8 * sizeof(unsigned long);
    errno = EINVAL;
    if ((uint32_t)node < NODE_IDS) {
        mask[(size_t)node / bits] = 1ul << ((size_t)node % bits);
        arena->bound =
            mbind(arena->host, arena->mapped_bytes, MPOL_BIND, mask, NODE_IDS + 1, 0) == 0;
    }
    if (!arena->bound)
        kvf_log(context, KVF_LOG_WARNING, "host memory could not be bound to NUMA node %d: %s",
                node, kvf_errno_text(errno));
#else
    (void)arena;
    kvf_log(context, KVF_LOG_WARNING,
            "this build has no libnuma; host memory is not bound to node %d", node);
#endif
}

/* ---- first touch ---- */

typedef struct touch_args {
    char *base;
    size_t bytes;
    bool hugetlb;
    atomic_int *error; /* first errno */
} touch_args;

static void touch_task(const void *raw, uint32_t task)
{
    const touch_args *args = raw;
    size_t first = (size_t)task * TOUCH_BYTES;
    size_t bytes = args->bytes - first < TOUCH_BYTES ? args->bytes - first : TOUCH_BYTES;
    const int code = kvf_populate(args->base + first, bytes,
                                  args->hugetlb ? HUGE_BYTES : SMALL_BYTES, args->hugetlb);
    int none = 0;
    if (code != 0)
        atomic_compare_exchange_strong(args->error, &none, code);
}

static int touch(kvf_context *context, kvf_team *team, const kvf_arena *arena, size_t from,
                 size_t bytes)
{
    if (kvf_context_refuses(context, "touch"))
        return ENOMEM;
    kvf_team_job job;
    if (kvf_team_job_init(&job, 0) != KVF_OK)
        return EAGAIN;
    atomic_int error;
    atomic_init(&error, 0);
    touch_args args = {
        .base = arena->host + from, .bytes = bytes, .hugetlb = arena->hugetlb, .error = &error};
    kvf_team_run(team, &job, touch_task, &args,
                 (uint32_t)((bytes + TOUCH_BYTES - 1) / TOUCH_BYTES));
    kvf_team_job_fini(&job);
    return atomic_load(&error);
}

/* Whether at least half of the arena's maps are on huge pages; from smaps, or `unknown`. */
static bool has_huge_pages(const kvf_arena *arena, bool unknown)
{
    FILE *file = fopen("/proc/self/smaps", "r");
    if (!file)
        return unknown;
    char line[512];
    uint64_t size = 0, huge = 0;
    bool is_inside = false;
    const uintptr_t begin = (uintptr_t)arena->host, end = begin + arena->mapped_bytes;
    while (fgets(line, sizeof line, file)) {
        unsigned long long first, last, kib;
        const bool is_field = line[0] >= 'A' && line[0] <= 'Z';
        if (!is_field && sscanf(line, "%llx-%llx ", &first, &last) == 2) {
            if (first >= end)
                break; /* maps are in order */
            is_inside = last > begin;
            size += is_inside ? last - first : 0;
        } else if (is_inside && sscanf(line, "AnonHugePages: %llu", &kib) == 1) {
            huge += kib * 1024;
        }
    }
    fclose(file);
    return size > 0 && huge >= size / 2;
}

kvf_page_tier kvf_arena_tier(const kvf_arena *arena)
{
    if (arena->hugetlb)
        return KVF_TIER_HUGETLB;
    return has_huge_pages(arena, false) ? KVF_TIER_THP : KVF_TIER_4K;
}

/* Huge pages were wanted, and this memory has none: why, and what to do. */
static void note_small_pages(kvf_context *context, const kvf_host_memory *memory)
{
    static const char setting[] = "/sys/kernel/mm/transparent_hugepage/enabled";
    char how[64], text[32];
    const bool is_off = kvf_file_line(setting, how, sizeof how) && strstr(how, "[never]");
    const kvf_arena *last = &memory->arenas[memory->arena_count - 1];
    const bool is_refused = madvise(last->host, last->bytes, MADV_HUGEPAGE) != 0;
    const char *why = is_off ? "transparent huge pages are switched off"
                      : prctl(PR_GET_THP_DISABLE, 0, 0, 0, 0) == 1
                          ? "transparent huge pages are switched off for this process"
                      : is_refused ? "the system refuses madvise (a filter of system calls?)"
                                   : "the kernel found no huge pages";
    kvf_log(context, KVF_LOG_NOTE,
            "%s of host memory are on pages of 4 KiB, not on huge ones: %s; reserve some with "
            "`sysctl vm.nr_hugepages=N`%s%s",
            kvf_bytes_text(memory->bytes, text), why, is_off ? ", or write madvise to " : "",
            is_off ? setting : "");
}

/* ---- arenas ---- */

/* A request on its way. */
typedef struct request {
    kvf_context *context;
    const kvf_host_memory_config *config;
    kvf_team *team;
    bool is_tried;        /* the machine shows less than is needed */
    bool by_device;       /* the device registers no arena, and allocates them */
    uint64_t done;        /* bytes of whole arenas */
    uint64_t pinned_most; /* that the machine pins, UINT64_MAX = not known */
} request;

static void read_headroom(const kvf_host_memory_config *config, kvf_headroom *out)
{
    const kvf_headroom_read_fn read =
        config->read_headroom ? config->read_headroom : kvf_headroom_read;
    read(config->topology, config->node, out);
}

/* Memory of the cgroup, the node or the machine is less than what is `asked`. */
static kvf_status refuse(kvf_context *context, const kvf_host_memory_config *config,
                         const kvf_headroom *h, bool is_cgroup, const char *asked)
{
    char have[32];
    kvf_bytes_text(is_cgroup ? h->cgroup : h->node_free, have);
    if (is_cgroup)
        KVF_FAIL(context, KVF_OUT_OF_MEMORY,
                 "the cgroup's memory limit (%s) leaves %s%s; raise %s, or lower %s",
                 h->cgroup_file, have, asked, h->cgroup_file, config->lower);
    if (config->node >= 0)
        KVF_FAIL(context, KVF_OUT_OF_MEMORY,
                 "NUMA node %d has %s free%s; free memory there, set numa_node to another node, or "
                 "lower %s",
                 config->node, have, asked, config->lower);
    KVF_FAIL(context, KVF_OUT_OF_MEMORY,
             "the machine has %s of memory available%s; free memory, or lower %s", have, asked,
             config->lower);
}

/* `done` bytes are there, and what is left does not hold the next piece. */
static kvf_status refuse_next(const request *r, const kvf_headroom *h, uint64_t done, size_t bytes)
{
    char need[32], had[32], asked[96];
    snprintf(asked, sizeof asked, " after %s of %s of host memory", kvf_bytes_text(done, had),
             kvf_bytes_text(r->config->bytes, need));
    return refuse(r->context, r->config, h, h->cgroup < bytes, asked);
}

/* Before a piece is touched, after `done` bytes: afterwards it may be too late. */
static kvf_status look(const request *r, uint64_t done, size_t bytes)
{
    const struct timespec pause = {.tv_nsec = WAIT_MS * 1000000l};
    const uint64_t needed = bytes + (r->is_tried ? RESERVE_BYTES : 0);
    kvf_headroom h;
    for (int waits = 0;; waits++) {
        read_headroom(r->config, &h);
        if (h.cgroup >= bytes && h.node_free >= needed)
            return KVF_OK;
        if (!r->is_tried || h.cgroup < bytes || waits == WAITS_MAX)
            return refuse_next(r, &h, done, bytes);
        nanosleep(&pause, NULL);
    }
}

static kvf_status populate(const request *r, const kvf_arena *arena)
{
    for (size_t from = 0; from < arena->mapped_bytes; from += PIECE_BYTES) {
        const size_t left = arena->mapped_bytes - from;
        const size_t bytes = left < PIECE_BYTES ? left : PIECE_BYTES;
        KVF_TRY(look(r, r->done + from, bytes));
        const int error = touch(r->context, r->team, arena, from, bytes);
        char text[32];
        if (error != 0)
            return kvf_fail(
                r->context, KVF_OUT_OF_MEMORY, error,
                "%s of host memory could not be populated: %s; free memory, or lower %s",
                kvf_bytes_text(arena->bytes, text), kvf_errno_text(error), r->config->lower);
    }
    return KVF_OK;
}

static kvf_status obtain(const request *r, kvf_arena *arena)
{
    kvf_context *context = r->context;
    const kvf_host_memory_config *config = r->config;
    bool wants_huge = config->huge_pages != KVF_HUGE_PAGES_OFF && arena->bytes >= HUGE_BYTES;
    bool is_required = config->huge_pages == KVF_HUGE_PAGES_REQUIRED;
    const bool is_later = config->on_demand && !is_required;
    char text[32];
    kvf_bytes_text(arena->bytes, text);
    if ((wants_huge || is_required) && !is_later && map_hugetlb(context, arena)) {
        bind_to_node(context, arena, config->node);
        if (touch(context, r->team, arena, 0, arena->mapped_bytes) == 0) /* these are reserved */
            return KVF_OK;
        unmap(context, arena);
    }
    if (is_required)
        return kvf_fail(context, KVF_OUT_OF_MEMORY, ENOMEM,
                        "%s on huge pages could not be had; reserve them with `sysctl "
                        "vm.nr_hugepages=N`, or set huge_pages to auto",
                        text);
    if (!map_normal(context, arena, wants_huge))
        return kvf_fail(context, KVF_OUT_OF_MEMORY, errno,
                        "%s of host memory could not be mapped: %s; see `ulimit -v`, or lower %s",
                        text, kvf_errno_text(errno), config->lower);
    bind_to_node(context, arena, config->node);
    return is_later ? KVF_OK : populate(r, arena);
}

static kvf_status let_device_allocate(const request *r, kvf_device *device, kvf_arena *arena)
{
    void *host = NULL, *alias = NULL;
    KVF_TRY(look(r, r->done, arena->bytes));
    KVF_TRY(device->ops->host_alloc(device, arena->bytes, &host, &alias));
    arena->host = host;
    arena->device = alias;
    arena->mapped_bytes = arena->bytes;
    arena->allocated = true;
    return KVF_OK;
}

static kvf_status publish(request *r, kvf_device *device, kvf_arena *arena)
{
    kvf_context *context = r->context;
    void *alias = NULL;
    kvf_status status = device->ops->host_register(device, arena->host, arena->bytes, &alias);
    if (status == KVF_OK) {
        arena->registered = true;
        arena->device = alias;
        return KVF_OK;
    }
    if (status == KVF_UNSUPPORTED && r->config->huge_pages != KVF_HUGE_PAGES_REQUIRED) {
        unmap(context, arena);
        KVF_TRY(let_device_allocate(r, device, arena));
        r->by_device = true;
        kvf_log(context, KVF_LOG_NOTE,
                "host memory is allocated by CUDA, which registers none of others on this machine "
                "(Confidential Computing?); it is pinned, but on small pages, and bound to no NUMA "
                "node");
        return KVF_OK;
    }
    kvf_device_properties properties;
    device->ops->properties(device, &properties);
    /* A device with memory of its own reaches none that is not registered. */
    if (status != KVF_PIN_FAILED || !r->config->allow_unpinned || !properties.shares_host_memory)
        return status;
    char text[32];
    kvf_log(context, KVF_LOG_WARNING, "%s of host memory stay unpinned, as allow_unpinned asks",
            kvf_bytes_text(arena->bytes, text));
    arena->device = arena->host;
    return KVF_OK;
}

static void note_pinned(const request *r)
{
    char pinned[32], most[32];
    kvf_log(
        r->context, KVF_LOG_NOTE,
        "%s of host memory are pinned, of about %s that this machine pins for all its processes "
        "(WSL2: half of its memory)",
        kvf_bytes_text(r->done, pinned), kvf_bytes_text(r->pinned_most, most));
}

static kvf_status create_touch_team(kvf_context *context, const kvf_host_memory_config *config,
                                    kvf_team **out)
{
    uint32_t threads = kvf_max_u32(config->touch_threads, 1);
    const uint32_t *cpus = NULL;
    int32_t index = config->topology && config->node >= 0
                        ? kvf_topology_find(config->topology, config->node)
                        : -1;
    if (index >= 0 && config->topology->nodes[index].cpu_count > 0) {
        const kvf_node *node = &config->topology->nodes[index];
        threads = kvf_min_u32(threads, node->cpu_count);
        cpus = config->topology->cpus + node->cpus_offset;
    }
    uint64_t pieces = (config->bytes + TOUCH_BYTES - 1) / TOUCH_BYTES;
    if (pieces < threads)
        threads = (uint32_t)pieces;
    kvf_team_config team = {.threads = kvf_max_u32(threads, 1), .cpus = cpus, .name = "kvf-touch"};
    return kvf_team_create(context, &team, out);
}

static kvf_status check(kvf_context *context, kvf_device *device,
                        const kvf_host_memory_config *config, request *r)
{
    if (config->bytes == 0 || config->granule == 0 || config->granule > KVF_ARENA_BYTES_MAX ||
        config->arena_bytes_max > KVF_ARENA_BYTES_MAX || config->bytes > (uint64_t)1 << 62)
        KVF_FAIL(context, KVF_INVALID,
                 "host memory of %llu bytes in pieces of %zu: a piece must be 1 byte to 1 GiB",
                 (unsigned long long)config->bytes, config->granule);
    if (config->node >= 0 &&
        (!config->topology || kvf_topology_find(config->topology, config->node) < 0))
        KVF_FAIL(context, KVF_INVALID,
                 "numa_node is %d, and this machine has no such node; set it to -1", config->node);
    kvf_headroom headroom;
    read_headroom(config, &headroom);
    kvf_device_properties properties;
    device->ops->properties(device, &properties);
    /* GPUs are lent in machines that get memory as they use it; other machines show what they have.
     */
    if (properties.shares_host_memory)
        headroom.may_come = 0;
    r->is_tried = headroom.node_free < config->bytes;
    r->pinned_most = properties.pins_host_memory ? headroom.pinned : UINT64_MAX;
    return kvf_host_memory_preflight(context, &headroom, config);
}

kvf_status kvf_host_memory_create(kvf_context *context, kvf_device *device,
                                  const kvf_host_memory_config *config, kvf_host_memory *out)
{
    memset(out, 0, sizeof *out);
    request r = {.context = context, .config = config};
    KVF_TRY(check(context, device, config, &r));
    kvf_host_memory memory = {.device = device};
    memory.bytes = (config->bytes + config->granule - 1) / config->granule * config->granule;
    uint64_t per_arena = kvf_arena_bytes(config);
    uint64_t wanted = (memory.bytes + per_arena - 1) / per_arena;
    memory.arenas = kvf_alloc(context, wanted, sizeof *memory.arenas);
    if (!memory.arenas)
        KVF_FAIL(context, KVF_OUT_OF_MEMORY, "no memory for the list of %llu arenas",
                 (unsigned long long)wanted);
    kvf_status status = create_touch_team(context, config, &r.team);
    while (status == KVF_OK && r.done < memory.bytes) {
        const uint64_t left = memory.bytes - r.done;
        kvf_arena *arena = &memory.arenas[memory.arena_count++];
        arena->bytes = (size_t)(left < per_arena ? left : per_arena);
        if (r.by_device) {
            status = let_device_allocate(&r, device, arena);
        } else if ((status = obtain(&r, arena)) == KVF_OK) {
            status = publish(&r, device, arena);
        }
        r.done += arena->bytes;
    }
    kvf_team_destroy(r.team);
    if (status != KVF_OK) {
        kvf_host_memory_destroy(context, &memory);
        return status;
    }
    if (r.pinned_most != UINT64_MAX)
        note_pinned(&r);
    /* The last arena was made when least was left. */
    const kvf_arena *last = &memory.arenas[memory.arena_count - 1];
    if (config->huge_pages == KVF_HUGE_PAGES_AUTO && !config->on_demand &&
        last->bytes >= HUGE_BYTES && !last->hugetlb && !last->allocated &&
        !has_huge_pages(last, true))
        note_small_pages(context, &memory);
    *out = memory;
    return KVF_OK;
}

void kvf_host_memory_destroy(kvf_context *context, kvf_host_memory *memory)
{
    if (!memory || !memory->arenas)
        return;
    for (uint32_t i = memory->arena_count; i-- > 0;) {
        kvf_arena *arena = &memory->arenas[i];
        if (arena->allocated) {
            memory->device->ops->host_free(memory->device, arena->host);
            continue;
        }
        if (arena->registered)
            memory->device->ops->host_unregister(memory->device, arena->host, arena->bytes);
        unmap(context, arena);
    }
    kvf_free(context, memory->arenas);
    memset(memory, 0, sizeof *memory);
}

/* ---- the verdict on a request ----
 *
 * It refuses only what is known to fail, and its text names limit, value, need and fix. Memory that
 * it lets pass may still not be there: memory is looked at again while it is taken. */

kvf_status kvf_host_memory_preflight(kvf_context *context, const kvf_headroom *headroom,
                                     const kvf_host_memory_config *config)
{
    char need[32], have[32], asked[64];
    kvf_bytes_text(config->bytes, need);
    snprintf(asked, sizeof asked, ", host memory needs %s", need);
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
        return refuse(context, config, headroom, true, asked);
    if (headroom->node_free < from_free && from_free <= headroom->may_come) {
        kvf_log(context, KVF_LOG_WARNING,
                "the machine has %s of memory available, host memory needs %s; it is tried piece "
                "by piece, because a virtual machine may get more as it uses it",
                kvf_bytes_text(headroom->node_free, have), need);
        return KVF_OK;
    }
    if (headroom->node_free < from_free)
        return refuse(context, config, headroom, false, asked);
    return KVF_OK;
}
