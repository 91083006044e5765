/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Machines replayed out of a folder like sysfs: two sockets, thousands of CPUs, no NUMA
 * information, devices on a node and on none. And this machine, under variables and filters that
 * lie.
 */

#include "topology.h"

#include <errno.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "offload_rig.h"

static kvf_context *context;
static rig_tree tree;

static int open_context(void **state)
{
    return kvf_context_create(NULL, NULL, NULL, &context) == KVF_OK ? 0 : -1;
}

static int close_context(void **state)
{
    assert_int_equal(context->live_blocks, 0);
    kvf_context_destroy(context);
    return 0;
}

static void open_tree(void)
{
    tree = (rig_tree){.root = "/tmp/kvf-sysfs-XXXXXX"};
    assert_non_null(mkdtemp(tree.root));
}

static void put(const char *text, const char *format, unsigned number)
{
    char path[128];
    snprintf(path, sizeof path, format, number);
    rig_tree_put(&tree, path, text);
}

/* cpus are disjoint, and those of the nodes are all of them. */
static void check_invariant(const kvf_topology *t)
{
    uint32_t sum = 0;
    assert_true(t->node_count >= 1 && t->cpu_count >= 1 && t->core_count >= 1);
    assert_true(t->core_count <= t->cpu_count);
    for (uint32_t n = 0; n < t->node_count; n++) {
        assert_int_equal(t->nodes[n].cpus_offset, sum);
        sum += t->nodes[n].cpu_count;
        assert_int_equal(kvf_topology_find(t, t->nodes[n].id), n);
    }
    assert_int_equal(sum, t->cpu_count);
    for (uint32_t i = 0; i < t->cpu_count; i++)
        for (uint32_t j = 0; j < i; j++)
            if (t->cpus[i] == t->cpus[j])
                fail_msg("CPU %u is there twice", t->cpus[i]);
}

static void read_tree(kvf_topology *t)
{
    RIG_OK(kvf_topology_read(context, tree.root, t));
    check_invariant(t);
}

/* ---- this machine ---- */

TEST(this_machine)
{
    kvf_topology t;
    RIG_OK(kvf_topology_read(context, NULL, &t));
    check_invariant(&t);
    assert_true(t.cpu_count <= (uint32_t)sysconf(_SC_NPROCESSORS_CONF));
    kvf_topology_close(context, &t);
    kvf_topology_close(context, &t); /* a second time does nothing */
    assert_int_equal(kvf_topology_node_of_pci(NULL, "ffff:ff:1f.7"), -1);
    assert_int_equal(kvf_topology_node_of_pci(NULL, "nonsense"), -1);
    assert_int_equal(kvf_topology_node_of_pci(NULL, ""), -1);
    assert_int_equal(kvf_topology_node_of_pci(NULL, NULL), -1);
}

static void count_warnings(void *user, int level, const char *line)
{
    *(uint32_t *)user += level == KVF_LOG_WARNING && strstr(line, "cannot be read") != NULL;
}

/* Sets of `most` bytes or less are refused on a machine of `cpus`. */
typedef struct refused_set {
    uint32_t most, cpus;
} refused_set;

static int read_refused(const void *user)
{
    const refused_set *set = user;
    kvf_topology t;
    uint32_t warnings = 0;
    context->log = count_warnings;
    context->log_user = &warnings;
    rig_deny(SYS_sched_getaffinity, set->most, EINVAL);
    if (kvf_topology_read(context, NULL, &t) != KVF_OK)
        return 1;
    const bool is_told = set->most == UINT32_MAX; /* then it is a guess */
    return warnings == is_told && (is_told || t.cpu_count == set->cpus) ? 0 : 2;
}

/* A kernel that may have more than 1,024 CPUs refuses smaller sets; or a sandbox refuses all. */
TEST(sets_that_are_refused)
{
    kvf_topology t;
    RIG_OK(kvf_topology_read(context, NULL, &t));
    const uint32_t count = t.cpu_count;
    kvf_topology_close(context, &t);
    static const uint32_t sizes[] = {128, 1024, UINT32_MAX};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        rig_in_child(read_refused, &(refused_set){sizes[i], count});
}

/* Variables that other libraries believe. */
TEST(variables_that_lie)
{
    kvf_topology t, other;
    RIG_OK(kvf_topology_read(context, NULL, &t));
    assert_int_equal(setenv("HWLOC_SYNTHETIC", "node:3 core:100 pu:2", 1), 0);
    assert_int_equal(setenv("HWLOC_XMLFILE", "/tmp/is_not_there.xml", 1), 0);
    RIG_OK(kvf_topology_read(context, NULL, &other));
    assert_true(other.cpu_count == t.cpu_count && other.node_count == t.node_count &&
                other.core_count == t.core_count);
    kvf_topology_close(context, &t);
    kvf_topology_close(context, &other);
    assert_true(unsetenv("HWLOC_SYNTHETIC") == 0 && unsetenv("HWLOC_XMLFILE") == 0);
}

/* ---- replayed ---- */

/* Two sockets of three cores with two threads each; CPU 4, of a core that goes on with CPU 10, is
 * offline. */
TEST(two_sockets)
{
    kvf_topology t;
    open_tree();
    put("0-3,5-11\n", "devices/system/cpu/online", 0);
    put("0-1\n", "devices/system/node/online", 0);
    put("0-2,6-8\n", "devices/system/node/node0/cpulist", 0);
    put("3-5,9-11\n", "devices/system/node/node1/cpulist", 0);
    put("Node 0 MemTotal:       33554432 kB\nNode 0 MemFree:  1024 kB\n",
        "devices/system/node/node0/meminfo", 0);
    for (uint32_t cpu = 0; cpu < 12; cpu++) {
        char siblings[16];
        snprintf(siblings, sizeof siblings, "%u,%u\n", cpu % 6, cpu % 6 + 6);
        put(siblings, "devices/system/cpu/cpu%u/topology/thread_siblings_list", cpu);
    }
    read_tree(&t);
    assert_true(t.known && t.node_count == 2 && t.cpu_count == 11 && t.core_count == 6);
    assert_true(t.nodes[1].id == 1 && t.nodes[1].cpu_count == 5);
    assert_int_equal(t.cpus[t.nodes[1].cpus_offset + 1], 5);
    assert_true(t.nodes[0].memory_bytes == (uint64_t)32 << 30 && t.nodes[0].free_bytes == 1 << 20);
    assert_int_equal(t.nodes[1].memory_bytes, 0); /* nobody can know */
    assert_int_equal(kvf_topology_find(&t, 7), -1);
    kvf_topology_close(context, &t);
    rig_tree_remove(&tree);
}

/* More than 1,024 CPUs and 64 nodes, with numbers that leave some out; the last has memory alone.
 */
TEST(a_large_machine)
{
    enum { NODES = 300, EACH = 7 };
    kvf_topology t;
    char list[64];
    open_tree();
    put("0-2099\n", "devices/system/cpu/online", 0);
    put("0-149,200-349,1000\n", "devices/system/node/online", 0);
    for (uint32_t i = 0; i < NODES; i++) {
        snprintf(list, sizeof list, "%u-%u\n", i * EACH, i * EACH + EACH - 1);
        put(list, "devices/system/node/node%u/cpulist", i < 150 ? i : i + 50);
    }
    put("\n", "devices/system/node/node1000/cpulist", 0);
    read_tree(&t);
    assert_true(t.known && t.node_count == NODES + 1 && t.cpu_count == NODES * EACH);
    assert_int_equal(t.core_count, NODES * EACH); /* nothing says otherwise */
    assert_int_equal(kvf_topology_find(&t, 349), NODES - 1);
    assert_int_equal(t.nodes[NODES].cpu_count, 0);
    assert_int_equal(t.cpus[t.nodes[NODES - 1].cpus_offset], 2093);
    kvf_topology_close(context, &t);
    rig_tree_remove(&tree);
}

/* No nodes, or nodes that leave CPUs out, or nonsense: one node of which nothing is known. */
TEST(no_numa_information)
{
    static const char *const lists[] = {NULL, "0\n", "1-0\n", "0-99999999\n", "none\n", ""};
    for (size_t i = 0; i < sizeof lists / sizeof *lists; i++) {
        kvf_topology t;
        open_tree();
        put("0-1\n", "devices/system/cpu/online", 0);
        if (lists[i]) {
            put("0\n", "devices/system/node/online", 0);
            put(lists[i], "devices/system/node/node0/cpulist", 0);
        }
        read_tree(&t);
        assert_true(!t.known && t.node_count == 1 && t.nodes[0].id == -1 && t.cpu_count == 2);
        kvf_topology_close(context, &t);
        rig_tree_remove(&tree);
    }
}

/* -1 means unknown, and so does a node that does not exist. */
TEST(node_of_a_device)
{
    static const char *const texts[] = {"-1\n", "9\n", "0\n", "1\n", "x\n"};
    static const int32_t expected[] = {-1, -1, 0, 1, -1};
    open_tree();
    put("0-2\n", "devices/system/node/node0/cpulist", 0);
    put("3-5\n", "devices/system/node/node1/cpulist", 0);
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        put(texts[i], "bus/pci/devices/0000:81:00.0/numa_node", 0);
        assert_int_equal(kvf_topology_node_of_pci(tree.root, "0000:81:00.0"), expected[i]);
    }
    assert_int_equal(kvf_topology_node_of_pci(tree.root, "0000:82:00.0"), -1);
    rig_tree_remove(&tree);
}

TESTS_RUN_BETWEEN(open_context, close_context)
