/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Host memory: tiers, arenas, binding, resident size, preflight with injected limits, cgroup trees.
 */

#include "host_memory.h"

#include <errno.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "common/text.h"
#include "offload_rig.h"
#include "resident.h"

#define MIB ((uint64_t)1 << 20)
#define GIB ((uint64_t)1 << 30)

static kvf_host_memory_config plain(uint64_t bytes, size_t granule)
{
    return (kvf_host_memory_config){.bytes = bytes,
                                    .granule = granule,
                                    .node = -1,
                                    .touch_threads = 2,
                                    .lower = "bytes_of_test"};
}

static int is_mapped(void *page)
{
    return msync(page, 4096, MS_ASYNC) == 0;
}

static void check_usable(const kvf_host_memory *memory)
{
    for (uint32_t i = 0; i < memory->arena_count; i++) {
        const kvf_arena *arena = &memory->arenas[i];
        assert_true(arena->mapped_bytes >= arena->bytes);
        assert_int_equal(arena->registered, 1);
        assert_non_null(arena->device);
        for (size_t at = 0; at < arena->bytes; at += 4096)
            assert_int_equal(arena->host[at], 0);
        arena->host[0] = 1;
        arena->host[arena->bytes - 1] = 1;
    }
}

RIG_TEST(test_tiers)
{
    const kvf_huge_pages wishes[] = {KVF_HUGE_PAGES_OFF, KVF_HUGE_PAGES_AUTO,
                                     KVF_HUGE_PAGES_REQUIRED};
    for (size_t i = 0; i < 3; i++) {
        kvf_host_memory_config config = plain(6 * MIB, 4096);
        config.huge_pages = wishes[i];
        kvf_host_memory memory;
        kvf_status status = kvf_host_memory_create(r->context, r->device, &config, &memory);
        if (wishes[i] == KVF_HUGE_PAGES_REQUIRED && status != KVF_OK) {
            assert_int_equal(status, KVF_OUT_OF_MEMORY);
            RIG_TELLS(r, "vm.nr_hugepages=3");
            assert_int_equal(memory.arena_count, 0);
            continue;
        }
        RIG_OK(status);
        assert_int_equal(memory.arena_count, 1);
        kvf_page_tier tier = kvf_arena_tier(&memory.arenas[0]);
        printf("wish %d gave %s\n", (int)wishes[i], kvf_page_tier_name(tier));
        if (wishes[i] == KVF_HUGE_PAGES_OFF)
            assert_int_equal(tier, KVF_TIER_4K);
        if (wishes[i] == KVF_HUGE_PAGES_REQUIRED)
            assert_int_equal(tier, KVF_TIER_HUGETLB);
        check_usable(&memory);
        char *page = memory.arenas[0].host;
        assert_true(is_mapped(page));
        kvf_host_memory_destroy(r->context, &memory);
        assert_false(is_mapped(page));
        kvf_host_memory_destroy(r->context, &memory); /* a second time does nothing */
    }
}

static void note_line(void *user, int level, const char *line)
{
    assert_int_equal(level, KVF_LOG_NOTE);
    snprintf(user, 512, "%s", line);
}

/* Huge pages that were wanted and not had are told, with the cause; nothing else is. */
RIG_TEST(test_degraded)
{
    char line[512];
    rig_fault fault = {.at = 1, .only = "hugetlb map"};
    r->context->log = note_line;
    r->context->log_user = line;
    r->context->fault = rig_refuse;
    r->context->fault_user = &fault;
    assert_int_equal(prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0), 0);
    for (uint32_t i = 0; i < 3; i++) { /* wanted, not wanted, too small for one */
        kvf_host_memory_config config = plain(i == 2 ? MIB : 4 * MIB, 4096);
        kvf_host_memory memory;
        config.huge_pages = i == 1 ? KVF_HUGE_PAGES_OFF : KVF_HUGE_PAGES_AUTO;
        fault.seen = 0;
        line[0] = '\0';
        RIG_OK(kvf_host_memory_create(r->context, r->device, &config, &memory));
        assert_int_equal(kvf_arena_tier(&memory.arenas[0]), KVF_TIER_4K);
        assert_int_equal(line[0] != '\0', i == 0);
        if (i == 0)
            assert_true(strstr(line, "4.00 MiB of host memory are on pages of 4 KiB") &&
                        strstr(line, "switched off") && strstr(line, "vm.nr_hugepages"));
        kvf_host_memory_destroy(r->context, &memory);
    }
    assert_int_equal(prctl(PR_SET_THP_DISABLE, 0, 0, 0, 0), 0);
    r->context->fault = NULL;
}

/* Arenas hold whole granules, and together exactly what was asked. */
RIG_TEST(test_arenas)
{
    kvf_host_memory_config config = plain(7 * 3 * 64 * 1024 - 1000, 3 * 64 * 1024);
    config.arena_bytes_max = 512 * 1024; /* two granules and a bit */
    kvf_host_memory memory;
    RIG_OK(kvf_host_memory_create(r->context, r->device, &config, &memory));
    assert_int_equal(memory.bytes, 7 * 3 * 64 * 1024);
    assert_int_equal(memory.arena_count, 4);
    uint64_t sum = 0;
    for (uint32_t i = 0; i < memory.arena_count; i++) {
        assert_int_equal(memory.arenas[i].bytes % config.granule, 0);
        assert_true(memory.arenas[i].bytes <= config.arena_bytes_max);
        sum += memory.arenas[i].bytes;
    }
    assert_int_equal(sum, memory.bytes);
    check_usable(&memory);
    kvf_host_memory_destroy(r->context, &memory);

    config.granule = 0;
    assert_int_equal(kvf_host_memory_create(r->context, r->device, &config, &memory), KVF_INVALID);
    config.granule = KVF_ARENA_BYTES_MAX + 1;
    assert_int_equal(kvf_host_memory_create(r->context, r->device, &config, &memory), KVF_INVALID);
    config = plain(4096, 4096);
    config.node = 3;
    assert_int_equal(kvf_host_memory_create(r->context, r->device, &config, &memory), KVF_INVALID);
    RIG_TELLS(r, "numa_node is 3");
}

/* All of it is resident at once, and not more than was asked. */
RIG_TEST(test_resident_size)
{
    kvf_host_memory_config config = plain(48 * MIB + 4096, 4096);
    config.huge_pages = KVF_HUGE_PAGES_OFF;
    uint64_t before = resident_bytes();
    kvf_host_memory memory;
    RIG_OK(kvf_host_memory_create(r->context, r->device, &config, &memory));
    uint64_t grown = resident_bytes() - before;
    assert_true(grown + MIB >= config.bytes);
    assert_true(grown <= config.bytes + 4 * MIB);
    kvf_host_memory_destroy(r->context, &memory);
}

/* Memory of both kinds is zeros, and there once it is written; a GPU pins all of it at once. */
RIG_TEST(test_on_demand)
{
    enum { BYTES = 48 << 20, SLACK = 4 << 20 };
    kvf_host_memory_config config = plain(BYTES, 4096);
    config.on_demand = true;
    kvf_host_memory memory;
    void *device = NULL;
    if (!r->ops->memory_on_demand)
        return;
    const uint64_t before = resident_bytes();
    RIG_OK(kvf_host_memory_create(r->context, r->device, &config, &memory));
    RIG_OK(r->ops->memory_on_demand(r->device, BYTES, &device));
    assert_true(resident_bytes() < before + SLACK);
    check_usable(&memory);
    char *const both[] = {memory.arenas[0].host, device};
    for (int i = 0; i < 2; i++)
        for (size_t at = 1; at < BYTES; at += 4096) {
            assert_int_equal(both[i][at], 0);
            both[i][at] = 1;
        }
    assert_true(resident_bytes() + SLACK > before + (uint64_t)2 * BYTES);
    r->ops->memory_free(r->device, device);
    kvf_host_memory_destroy(r->context, &memory);
}

/* The kernel's own account says that the pages are bound to the node. */
RIG_TEST(test_bound)
{
    kvf_topology topology;
    RIG_OK(kvf_topology_read(r->context, NULL, &topology));
    kvf_host_memory_config config = plain(4 * MIB, 4096);
    config.topology = &topology;
    config.node = topology.nodes[0].id;
    config.huge_pages = KVF_HUGE_PAGES_OFF;
    kvf_host_memory memory;
    RIG_OK(kvf_host_memory_create(r->context, r->device, &config, &memory));
    FILE *file = fopen("/proc/self/numa_maps", "r");
    if (config.node < 0 || !memory.arenas[0].bound || file == NULL) {
        printf("not bound here (node %d, bound %u): the kernel's account is not checked\n",
               config.node, memory.arenas[0].bound);
    } else {
        char line[512], bind[32];
        int found = 0;
        snprintf(bind, sizeof bind, "bind:%d", config.node);
        while (fgets(line, sizeof line, file) != NULL) {
            unsigned long long at;
            if (sscanf(line, "%llx", &at) == 1 && at == (uintptr_t)memory.arenas[0].host)
                found = strstr(line, bind) != NULL;
        }
        assert_true(found);
    }
    if (file != NULL)
        fclose(file);
    kvf_host_memory_destroy(r->context, &memory);
    kvf_topology_close(r->context, &topology);
}

/* A device that cannot register: an error by default, pageable memory only where it was allowed. */
RIG_TEST(test_unpinned)
{
    kvf_host_memory_config config = plain(MIB, 4096);
    kvf_host_memory memory;
    kvf_error error;
    rig_fault fault = {.at = 1, .only = "register"};
    kvf_device_set_fault(r->device, rig_refuse, &fault);
    assert_int_equal(kvf_host_memory_create(r->context, r->device, &config, &memory),
                     KVF_PIN_FAILED);
    assert_non_null(strstr(rig_error(r, &error), "1.00 MiB"));
    /* A limit of memlock is a cause, and advice, only where there is one. */
    kvf_headroom headroom;
    kvf_headroom_read(NULL, -1, &headroom);
    if (r->kind == KVF_DEVICE_HOST || headroom.memlock < MIB)
        assert_non_null(strstr(error.text, "ulimit -l unlimited"));
    else
        assert_null(strstr(error.text, "ulimit"));
    assert_int_equal(strstr(error.text, "allow_unpinned") != NULL, r->kind == KVF_DEVICE_HOST);
    assert_null(memory.arenas);
    fault = (rig_fault){.at = 1, .only = "register"};
    config.allow_unpinned = 1;
    if (r->kind == KVF_DEVICE_CUDA) { /* it could not reach such memory */
        assert_int_equal(kvf_host_memory_create(r->context, r->device, &config, &memory),
                         KVF_PIN_FAILED);
        assert_null(memory.arenas);
    } else {
        RIG_OK(kvf_host_memory_create(r->context, r->device, &config, &memory));
        assert_int_equal(memory.arenas[0].registered, 0);
        assert_ptr_equal(memory.arenas[0].device, memory.arenas[0].host);
        kvf_host_memory_destroy(r->context, &memory);
    }
    assert_string_equal(fault.refused, "register");
}

/* ---- preflight ---- */

static const kvf_headroom plenty = {.pinned = UINT64_MAX,
                                    .cgroup = UINT64_MAX,
                                    .cgroup_file = "memory.max",
                                    .node_free = UINT64_MAX,
                                    .hugetlb_free = UINT64_MAX};

static void expect_refusal(rig *r, const kvf_headroom *headroom,
                           const kvf_host_memory_config *config)
{
    kvf_error error;
    assert_int_equal(kvf_host_memory_preflight(r->context, headroom, config), KVF_OUT_OF_MEMORY);
    assert_null(strchr(rig_error(r, &error), '\n'));
    assert_int_equal(error.status, KVF_OUT_OF_MEMORY);
}

RIG_TEST(test_preflight)
{
    kvf_host_memory_config config = plain(16 * GIB, 4096);
    RIG_OK(kvf_host_memory_preflight(r->context, &plenty, &config));

    kvf_headroom h = plenty;
    h.hugetlb_free = 0;
    h.cgroup = 3 * GIB;
    expect_refusal(r, &h, &config);
    RIG_TELLS(r, "memory.max", "3.00 GiB", "16.00 GiB", "lower bytes_of_test");
    h.cgroup = 16 * GIB;
    RIG_OK(kvf_host_memory_preflight(r->context, &h, &config));

    h.node_free = 5 * GIB;
    expect_refusal(r, &h, &config);
    RIG_TELLS(r, "machine", "5.00 GiB", "16.00 GiB", "lower bytes_of_test");
    h.may_come = 16 * GIB;
    RIG_OK(kvf_host_memory_preflight(r->context, &h, &config));
    h.may_come--;
    assert_int_equal(kvf_host_memory_preflight(r->context, &h, &config), KVF_OUT_OF_MEMORY);
    config.node = 1;
    expect_refusal(r, &h, &config);
    RIG_TELLS(r, "NUMA node 1", "5.00 GiB", "16.00 GiB", "numa_node");

    /* Reserved huge pages are not part of what is free, so they lift both limits, unless unwanted.
     */
    h.hugetlb_free = 16 * GIB;
    RIG_OK(kvf_host_memory_preflight(r->context, &h, &config));
    config.huge_pages = KVF_HUGE_PAGES_OFF;
    assert_int_equal(kvf_host_memory_preflight(r->context, &h, &config), KVF_OUT_OF_MEMORY);

    config.huge_pages = KVF_HUGE_PAGES_REQUIRED;
    h = plenty;
    h.hugetlb_free = 2 * GIB;
    expect_refusal(r, &h, &config);
    RIG_TELLS(r, "huge pages", "2.00 GiB", "16.00 GiB", "vm.nr_hugepages=8192",
              "huge_pages to auto");
}

/* ---- where madvise is refused ---- */

#define DEVICE_BYTES ((size_t)6 << 20)

static int populate_refused(const void *user)
{
    const int code = *(const int *)user;
    rig r;
    kvf_host_memory memory;
    kvf_error error;
    void *device = NULL;
    char line[512] = "";
    const kvf_host_memory_config config = plain(6 * MIB, 4096);
    rig_deny(SYS_madvise, UINT32_MAX, code);
    rig_open(&r, NULL);
    rig_fault fault = {.at = 1, .only = "hugetlb map"};
    r.context->log = note_line;
    r.context->log_user = line;
    r.context->fault = rig_refuse;
    r.context->fault_user = &fault;
    const uint64_t before = resident_bytes();
    const kvf_status status = kvf_host_memory_create(r.context, r.device, &config, &memory);
    if (code == ENOMEM)
        return !(status == KVF_OUT_OF_MEMORY &&
                 strstr(rig_error(&r, &error), "Cannot allocate memory; free memory, or lower "
                                               "bytes_of_test") &&
                 r.device->ops->memory_alloc(r.device, DEVICE_BYTES, &device) ==
                     KVF_OUT_OF_DEVICE_MEMORY);
    if (status != KVF_OK || !strstr(line, "madvise"))
        return 2;
    if (r.device->ops->memory_alloc(r.device, DEVICE_BYTES, &device) != KVF_OK)
        return 3;
    if (resident_bytes() < before + 6 * MIB + DEVICE_BYTES)
        return 4;
    r.device->ops->memory_free(r.device, device);
    kvf_host_memory_destroy(r.context, &memory);
    rig_close(&r);
    return 0;
}

/* By a filter, or by a kernel without it: memory is there all the same. Where there is none, that
 * is the cause. */
TEST(test_madvise_refused)
{
    static const int codes[] = {EPERM, ENOSYS, EINVAL, EACCES, ENOMEM};
    if (rig_kind() != KVF_DEVICE_HOST)
        return; /* nothing of it is the device's, and a GPU is not there after fork() */
    for (size_t i = 0; i < sizeof codes / sizeof *codes; i++)
        rig_in_child(populate_refused, &codes[i]);
}

/* ---- looks while it is populated ---- */

/* The answer of the reader below: first at every look, then from look `from` on. */
static struct {
    kvf_headroom first, then;
    uint32_t from, looks;
} script;

static void read_script(const kvf_topology *topology, int32_t node, kvf_headroom *out)
{
    *out = script.looks++ < script.from ? script.first : script.then;
}

/* Four arenas; look 0 is preflight's. */
static kvf_host_memory_config scripted(void)
{
    kvf_host_memory_config config = plain(4 * MIB, 4096);
    config.arena_bytes_max = MIB;
    config.huge_pages = KVF_HUGE_PAGES_OFF;
    config.read_headroom = read_script;
    script.first = script.then = plenty;
    script.first.hugetlb_free = script.then.hugetlb_free = 0;
    script.from = script.looks = 0;
    return config;
}

/* On a machine that pins so much at most a line says what the pool has of it; nobody refuses before
 * the driver does. */
RIG_TEST(test_pin_budget)
{
    static const uint64_t budgets[] = {UINT64_MAX, 16 * MIB, 2 * MIB};
    char line[512];
    r->context->log = note_line;
    r->context->log_user = line;
    for (uint32_t i = 0; i < 3; i++) {
        kvf_host_memory_config config = scripted();
        kvf_host_memory memory;
        script.first.pinned = script.then.pinned = budgets[i];
        line[0] = '\0';
        RIG_OK(kvf_host_memory_create(r->context, r->device, &config, &memory));
        if (r->kind == KVF_DEVICE_HOST || i == 0) /* which pins nothing, or has no such limit */
            assert_string_equal(line, "");
        else
            assert_non_null(
                strstr(line, i == 1 ? "4.00 MiB of host memory are pinned, of about 16.00 MiB"
                                    : "4.00 MiB of host memory are pinned, of about 2.00 MiB"));
        kvf_host_memory_destroy(r->context, &memory);
    }
}

static void write_text(const char *path, const char *text)
{
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    assert_true(fputs(text, file) >= 0);
    assert_int_equal(fclose(file), 0);
}

TEST(test_pin_budget_of_a_machine)
{
    char folder[] = "/tmp/kvf-pin-XXXXXX", release[64], memory[64];
    assert_non_null(mkdtemp(folder));
    snprintf(release, sizeof release, "%s/osrelease", folder);
    snprintf(memory, sizeof memory, "%s/meminfo", folder);
    write_text(memory, "MemTotal:       16777216 kB\nMemFree:        1 kB\n");
    write_text(release, "6.1.0-13-amd64\n");
    assert_true(kvf_machine_pin_budget(release, memory) == UINT64_MAX);
    write_text(release, "5.15.146.1-microsoft-standard-WSL2\n");
    assert_true(kvf_machine_pin_budget(release, memory) == 8 * GIB);
    assert_int_equal(remove(release) | remove(memory) | rmdir(folder), 0);
}

/* Refused after `looks`, and nothing stays. */
static void expect_end(rig *r, const kvf_host_memory_config *config, uint32_t looks)
{
    const uint64_t bytes = r->context->live_bytes, blocks = r->context->live_blocks;
    kvf_host_memory memory;
    kvf_error error;
    assert_int_equal(kvf_host_memory_create(r->context, r->device, config, &memory),
                     KVF_OUT_OF_MEMORY);
    rig_error(r, &error);
    assert_int_equal(error.status, KVF_OUT_OF_MEMORY);
    assert_null(memory.arenas);
    assert_int_equal(script.looks, looks);
    assert_true(r->context->live_bytes == bytes && r->context->live_blocks == blocks);
}

/* There was enough at first, and others took it. */
RIG_TEST(test_others_take_memory)
{
    kvf_host_memory_config config = scripted();
    script.then.cgroup = MIB - 1;
    script.from = 3;
    expect_end(r, &config, 4);
    RIG_TELLS(r, "memory.max", "1024.00 KiB", "2.00 MiB of 4.00 MiB", "raise memory.max",
              "lower bytes_of_test");
    config = scripted();
    script.then.node_free = 0;
    script.from = 4;
    expect_end(r, &config, 5);
    RIG_TELLS(r, "the machine has 0 B", "3.00 MiB of 4.00 MiB", "free memory",
              "lower bytes_of_test");
    /* Just enough to the end is enough. */
    config = scripted();
    script.first.node_free = 4 * MIB;
    script.then.node_free = script.then.cgroup = MIB;
    script.from = 1;
    kvf_host_memory memory;
    RIG_OK(kvf_host_memory_create(r->context, r->device, &config, &memory));
    assert_int_equal(script.looks, 5);
    check_usable(&memory);
    kvf_host_memory_destroy(r->context, &memory);
}

/* A machine that shows too little may get more: that is tried for a device with its own memory. */
RIG_TEST(test_memory_that_comes)
{
    kvf_host_memory_config config = scripted();
    kvf_host_memory memory;
    script.first.node_free = script.then.node_free = 3 * MIB;
    script.first.may_come = 4 * MIB;
    script.from = 1;
    if (r->kind == KVF_DEVICE_HOST) {
        expect_end(r, &config, 1);
        RIG_TELLS(r, "3.00 MiB of memory available");
        return;
    }
    /* It never comes: after a while that is said. */
    expect_end(r, &config, 1 + 21);
    RIG_TELLS(r, "the machine has 3.00 MiB", "0 B of 4.00 MiB");
    /* It comes at the third look. */
    script.looks = 0;
    script.from = 3;
    script.then.node_free = 257 * MIB;
    RIG_OK(kvf_host_memory_create(r->context, r->device, &config, &memory));
    assert_int_equal(script.looks, 1 + 2 + 4);
    check_usable(&memory);
    kvf_host_memory_destroy(r->context, &memory);
    /* Where more cannot come at all, one look is enough. */
    script.looks = 0;
    script.first.may_come--;
    expect_end(r, &config, 1);
    RIG_TELLS(r, "3.00 MiB of memory available");
}

TEST(test_headroom_of_this_machine)
{
    kvf_headroom h;
    kvf_headroom_read(NULL, -1, &h);
    char text[32];
    printf("memlock %s\n", kvf_bytes_text(h.memlock, text));
    printf("cgroup %s\n", kvf_bytes_text(h.cgroup, text));
    printf("free %s\n", kvf_bytes_text(h.node_free, text));
    assert_true(h.node_free > 0);
    assert_true(h.memlock > 0);
}

/* ---- cgroups ---- */

/* A file of the tree, and what is read then; SKIP: another file comes first. */
typedef struct tree_step {
    const char *path, *text;
    uint64_t want;
    const char *file; /* where the limit is; NULL: any */
} tree_step;

#define SKIP (UINT64_MAX - 1)

#define WALK_TREE(read, steps) walk_tree((read), (steps), sizeof(steps) / sizeof *(steps))

static void walk_tree(uint64_t (*read)(const char *proc, const char *sys, const char **file),
                      const tree_step *steps, size_t count)
{
    const char *file = "";
    char proc[128], sys[128];
    rig_tree t = {.root = "/tmp/kvf-cgroup-XXXXXX"};
    assert_non_null(mkdtemp(t.root));
    snprintf(proc, sizeof proc, "%s/self", t.root);
    snprintf(sys, sizeof sys, "%s/fs", t.root);
    assert_true(read(proc, sys, &file) == UINT64_MAX); /* no file at all */
    for (size_t i = 0; i < count; i++) {
        rig_tree_put(&t, steps[i].path, steps[i].text);
        const uint64_t found = read(proc, sys, &file);
        if (steps[i].want != SKIP && found != steps[i].want)
            fail_msg("%s: %llu", steps[i].path, (unsigned long long)found);
        if (steps[i].file)
            assert_string_equal(file, steps[i].file);
    }
    rig_tree_remove(&t);
}

TEST(test_cgroup_v2)
{
    static const tree_step steps[] = {
        {"self", "0::/a/b\n", SKIP, NULL},
        {"fs/a/b/memory.max", "max\n", SKIP, NULL},
        {"fs/a/b/memory.current", "1000\n", UINT64_MAX, NULL},
        /* The parent has the limit; its file cache is room. */
        {"fs/a/memory.max", "10000\n", SKIP, NULL},
        {"fs/a/memory.current", "7000\n", 3000, NULL},
        {"fs/a/memory.stat", "anon 4000\ninactive_file 500\nactive_file 250\nother 9\n", 3750,
         NULL},
        /* The nearer limit is tighter. */
        {"fs/a/b/memory.max", "1200\n", 200, NULL},
        {"fs/a/b/memory.current", "5000\n", 0, NULL},
    };
    WALK_TREE(kvf_cgroup_headroom, steps);
}

/* A virtual machine that shows 8 GiB, of which 6 are free, and gets more as it uses them. */
RIG_TEST(test_memory_that_grows)
{
    char proc[128];
    rig_tree t = {.root = "/tmp/kvf-meminfo-XXXXXX"};
    kvf_host_memory_config config = plain(16 * GIB, 4096);
    assert_non_null(mkdtemp(t.root));
    snprintf(proc, sizeof proc, "%s/meminfo", t.root);
    assert_true(kvf_machine_headroom(proc, 64 * GIB) == UINT64_MAX); /* no file */
    rig_tree_put(&t, "meminfo", "MemTotal: 8388608 kB\nMemFree: 99 kB\nMemAvailable: 6291456 kB\n");
    kvf_headroom h = plenty;
    h.hugetlb_free = 0;
    /* Its limit is above what it shows: memory comes until there. */
    h.cgroup = 20 * GIB;
    h.node_free = kvf_machine_headroom(proc, h.cgroup);
    RIG_OK(kvf_host_memory_preflight(r->context, &h, &config));
    h.cgroup = 12 * GIB;
    h.node_free = kvf_machine_headroom(proc, h.cgroup);
    expect_refusal(r, &h, &config);
    RIG_TELLS(r, "memory.max", "12.00 GiB");
    /* No limit, or one below what there is, says nothing of growth. */
    assert_true(kvf_machine_headroom(proc, UINT64_MAX) == 6 * GIB);
    assert_true(kvf_machine_headroom(proc, 7 * GIB) == 6 * GIB);
    assert_true(kvf_machine_growth(proc, true) == KVF_MACHINE_GROWTH_MAX * 8 * GIB);
    assert_true(kvf_machine_growth(proc, false) == 0);
    rig_tree_remove(&t);
}

TEST(test_cgroup_v1)
{
    static const tree_step steps[] = {
        {"self", "9:name=systemd:/\n4:memory:/box/x\n3:cpuset:/\n0::/\n", SKIP, NULL},
        {"fs/memory/memory.limit_in_bytes", "9223372036854771712\n", SKIP, NULL},
        {"fs/memory/memory.usage_in_bytes", "77\n", UINT64_MAX, NULL},
        {"fs/memory/box/memory.limit_in_bytes", "5000\n", SKIP, NULL},
        {"fs/memory/box/memory.usage_in_bytes", "1500\n", SKIP, NULL},
        {"fs/memory/box/memory.stat", "cache 1\ninactive_file 9\ntotal_inactive_file 100\n", 3600,
         "memory.limit_in_bytes"},
        {"fs/memory.max", "4000\n", SKIP, NULL}, /* both: the smaller room */
        {"fs/memory.current", "1000\n", 3000, "memory.max"},
    };
    WALK_TREE(kvf_cgroup_headroom, steps);
}

/* ---- time of CPUs ---- */

static uint64_t read_cpus(const char *proc, const char *sys, const char **file)
{
    return kvf_cgroup_cpus(proc, sys);
}

TEST(test_cpu_quota_v2)
{
    static const tree_step steps[] = {
        {"self", "0::/box/pod\n", SKIP, NULL},
        {"fs/box/pod/cpu.max", "max 100000\n", UINT64_MAX, NULL},
        {"fs/box/cpu.max", "350000 100000\n", 3500, NULL},
        {"fs/box/pod/cpu.max", "20000 10000\n", 2000, NULL},
        /* In a container whose mount begins at its own cgroup. */
        {"self", "0::/of/the/host\n", SKIP, NULL},
        {"fs/cpu.max", "150000 100000\n", 1500, NULL},
        {"fs/cpu.max", "", UINT64_MAX, NULL},
    };
    WALK_TREE(read_cpus, steps);
}

TEST(test_cpu_quota_v1)
{
    static const tree_step steps[] = {
        {"self", "9:name=systemd:/\n4:cpuset:/x\n3:cpu,cpuacct:/box/x\n0::/\n", SKIP, NULL},
        {"fs/cpuset/x/cpu.cfs_quota_us", "1000\n", SKIP, NULL}, /* of another controller */
        {"fs/cpuset/x/cpu.cfs_period_us", "1000\n", SKIP, NULL},
        {"fs/cpu,cpuacct/box/x/cpu.cfs_quota_us", "-1\n", SKIP, NULL},
        {"fs/cpu,cpuacct/box/x/cpu.cfs_period_us", "100000\n", UINT64_MAX, NULL},
        {"fs/cpu,cpuacct/box/cpu.cfs_quota_us", "600000\n", SKIP, NULL},
        {"fs/cpu,cpuacct/box/cpu.cfs_period_us", "100000\n", 6000, NULL},
        {"fs/cpu/cpu.cfs_quota_us", "50000\n", SKIP, NULL}, /* a mount of the controller's name */
        {"fs/cpu/cpu.cfs_period_us", "100000\n", 500, NULL},
    };
    WALK_TREE(read_cpus, steps);
}

/* One per core, as far as the quota goes; at least one. */
TEST(test_threads_under_a_quota)
{
    static const struct {
        uint64_t quota;
        uint32_t cores, threads;
    } cases[] = {{UINT64_MAX, 8, 8}, {3500, 8, 3}, {8000, 8, 8}, {900000, 8, 8},
                 {400, 8, 1},        {0, 8, 1},    {2000, 0, 1}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const kvf_topology t = {.core_count = cases[i].cores, .cpu_quota = cases[i].quota};
        assert_int_equal(kvf_topology_threads(&t), cases[i].threads);
    }
}
