/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Machines replayed: two sockets, a GPU on node 1, no NUMA information, node id -1.
 *
 * The XML files are hwloc exports cut to what matters; the GPU in them was added by hand.
 */

#include "topology.h"

#include <sys/stat.h>
#include <unistd.h>

#include "offload_rig.h"

#define DATA KVF_TEST_DATA "/topologies/"

static kvf_context *context;

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

/* cpus are disjoint, and those of the nodes are all of them. */
static void check_invariant(const kvf_topology *t)
{
    uint32_t sum = 0;
    assert_true(t->node_count >= 1 && t->cpu_count >= 1 && t->core_count >= 1);
    for (uint32_t n = 0; n < t->node_count; n++) {
        assert_int_equal(t->nodes[n].cpus_offset, sum);
        sum += t->nodes[n].cpu_count;
        assert_int_equal(kvf_topology_find(t, t->nodes[n].id), n);
    }
    assert_int_equal(sum, t->cpu_count);
    for (uint32_t i = 0; i < t->cpu_count; i++)
        for (uint32_t j = 0; j < i; j++)
            assert_int_not_equal(t->cpus[i], t->cpus[j]);
}

static void test_this_machine(void **state)
{
    static kvf_topology t;
    RIG_OK(kvf_topology_read(context, NULL, &t));
    check_invariant(&t);
    assert_true(t.core_count <= t.cpu_count);
    long online = sysconf(_SC_NPROCESSORS_ONLN);
    assert_true(t.cpu_count <= (uint32_t)online || t.cpu_count == KVF_CPUS_MAX);
    assert_int_equal(kvf_topology_node_of_pci(context, NULL, "ffff:ff:1f.7"), -1);
    assert_int_equal(kvf_topology_node_of_pci(context, NULL, "nonsense"), -1);
    assert_int_equal(kvf_topology_node_of_pci(context, NULL, ""), -1);
    assert_int_equal(kvf_topology_node_of_pci(context, NULL, NULL), -1);
}

#if KVF_HAVE_HWLOC

static void test_synthetic(void **state)
{
    static kvf_topology t;
    kvf_topology_source source = {.synthetic = "pack:2 [numa(memory=34359738368)] core:3 pu:2"};
    RIG_OK(kvf_topology_read(context, &source, &t));
    check_invariant(&t);
    assert_int_equal(t.known, 1);
    assert_int_equal(t.node_count, 2);
    assert_int_equal(t.cpu_count, 12);
    assert_int_equal(t.core_count, 6);
    assert_int_equal(t.nodes[1].id, 1);
    assert_int_equal(t.nodes[1].cpu_count, 6);
    assert_int_equal(t.cpus[t.nodes[1].cpus_offset], 6);
    assert_true(t.nodes[0].memory_bytes == (uint64_t)32 << 30);
    assert_int_equal(t.nodes[0].free_bytes, 0); /* nobody can know */
    assert_int_equal(kvf_topology_find(&t, 7), -1);
    assert_int_equal(kvf_topology_node_of_pci(context, &source, "0000:81:00.0"), -1);
}

static void test_bad_source(void **state)
{
    static kvf_topology t;
    kvf_error error;
    kvf_topology_source source = {.xml_path = DATA "is_not_there.xml"};
    assert_int_equal(kvf_topology_read(context, &source, &t), KVF_INVALID);
    kvf_context_error(context, &error);
    assert_non_null(strstr(error.text, "is_not_there.xml"));
}

static void test_gpu_on_node1(void **state)
{
    static kvf_topology t;
    kvf_topology_source source = {.xml_path = DATA "two_sockets_gpu_on_node1.xml"};
    RIG_OK(kvf_topology_read(context, &source, &t));
    check_invariant(&t);
    assert_int_equal(t.node_count, 2);
    assert_int_equal(t.known, 1);
    assert_int_equal(kvf_topology_node_of_pci(context, &source, "0000:81:00.0"), 1);
    assert_int_equal(kvf_topology_node_of_pci(context, &source, "0000:82:00.0"), -1);
}

/* On two nodes, a device that hangs off the whole machine has no nearest node. */
static void test_gpu_on_no_node(void **state)
{
    kvf_topology_source source = {.xml_path = DATA "two_sockets_gpu_on_no_node.xml"};
    assert_int_equal(kvf_topology_node_of_pci(context, &source, "0000:81:00.0"), -1);
}

static void test_no_numa_information(void **state)
{
    static kvf_topology t;
    kvf_topology_source source = {.xml_path = DATA "no_numa_information.xml"};
    RIG_OK(kvf_topology_read(context, &source, &t));
    check_invariant(&t);
    assert_int_equal(t.known, 0);
    assert_int_equal(t.node_count, 1);
    assert_int_equal(t.nodes[0].id, -1);
    assert_int_equal(t.cpu_count, 2);
    assert_int_equal(kvf_topology_node_of_pci(context, &source, "0000:00:05.0"), -1);
}

static void write_file(const char *path, const char *text)
{
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    fputs(text, file);
    assert_int_equal(fclose(file), 0);
}

/* sysfs is believed before hwloc: -1 means unknown, a node that does not exist means unknown. */
static void test_node_in_sysfs(void **state)
{
    char root[] = "/tmp/kvf-sysfs-XXXXXX";
    assert_non_null(mkdtemp(root));
    char path[256];
    const char *const folders[] = {"/bus", "/bus/pci", "/bus/pci/devices",
                                   "/bus/pci/devices/0000:81:00.0"};
    for (size_t i = 0; i < 4; i++) {
        snprintf(path, sizeof path, "%s%s", root, folders[i]);
        assert_int_equal(mkdir(path, 0700), 0);
    }
    snprintf(path, sizeof path, "%s%s/numa_node", root, folders[3]);
    const char *const texts[] = {"-1\n", "9\n", "0\n", "1\n"};
    const int32_t expected[] = {-1, -1, 0, 1};
    kvf_topology_source source = {.xml_path = DATA "two_sockets_gpu_on_node1.xml",
                                  .sysfs_root = root};
    for (size_t i = 0; i < 4; i++) {
        write_file(path, texts[i]);
        assert_int_equal(kvf_topology_node_of_pci(context, &source, "0000:81:00.0"), expected[i]);
    }
    assert_int_equal(unlink(path), 0);
    for (size_t i = 4; i-- > 0;) {
        snprintf(path, sizeof path, "%s%s", root, folders[i]);
        assert_int_equal(rmdir(path), 0);
    }
    assert_int_equal(rmdir(root), 0);
}

#else

static void test_without_hwloc(void **state)
{
    static kvf_topology t;
    kvf_topology_source source = {.synthetic = "pack:2 core:2 pu:1"};
    assert_int_equal(kvf_topology_read(context, &source, &t), KVF_UNSUPPORTED);
    RIG_OK(kvf_topology_read(context, NULL, &t));
    assert_int_equal(t.nodes[0].id, -1);
    assert_int_equal(t.known, 0);
}

#endif

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_this_machine),
#if KVF_HAVE_HWLOC
        cmocka_unit_test(test_synthetic),
        cmocka_unit_test(test_bad_source),
        cmocka_unit_test(test_gpu_on_node1),
        cmocka_unit_test(test_gpu_on_no_node),
        cmocka_unit_test(test_no_numa_information),
        cmocka_unit_test(test_node_in_sysfs),
#else
        cmocka_unit_test(test_without_hwloc),
#endif
    };
    return cmocka_run_group_tests_name("topology", tests, open_context, close_context);
}
