/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The library's descriptions of its own settings: every default is in its range and comes back from
 * its text, every text that is no value is refused and changes nothing, and names are those of the
 * lists.
 */

#include "harness.h"

#include <kvferry/disk.h>
#include <kvferry/prune.h>
#include <kvferry/setting.h>

typedef const kvf_setting *(*table)(uint32_t index);

typedef union any_config {
    kvf_runtime_config runtime;
    kvf_cache_config cache;
    kvf_link_case link;
    kvf_prune_config prune;
    kvf_disk_case disk;
} any_config;

static const table tables[] = {kvf_runtime_setting, kvf_cache_setting, kvf_link_setting,
                               kvf_prune_setting, kvf_disk_setting};
#define TABLES (sizeof tables / sizeof *tables)

static void init(size_t which, any_config *c)
{
    memset(c, 0, sizeof *c);
    if (which == 0)
        kvf_runtime_config_init(&c->runtime);
    else if (which == 1)
        kvf_cache_config_init(&c->cache);
    else if (which == 2)
        kvf_link_case_init(&c->link);
    else if (which == 4)
        kvf_disk_case_init(&c->disk);
    else
        kvf_prune_config_init(&c->prune, kvf_prune_policy_find("structkv"));
}

static const kvf_setting *find(table at, const char *name)
{
    const kvf_setting *s;
    for (uint32_t i = 0; (s = at(i)) != NULL; i++)
        if (strcmp(s->name, name) == 0)
            return s;
    fail_msg("there is no setting %s", name);
    return NULL;
}

static void every_default_comes_back_from_its_text(void **state)
{
    for (size_t t = 0; t < TABLES; t++) {
        const kvf_setting *s;
        for (uint32_t i = 0; (s = tables[t](i)) != NULL; i++) {
            any_config before, after;
            char text[64];
            assert_non_null(s->meaning);
            assert_ptr_equal(find(tables[t], s->name), s); /* names are unique */
            init(t, &before);
            if (t == 1 && !s->special && s->kind == KVF_SETTING_WHOLE && s->low > 0)
                continue; /* geometry and limits have no default */
            after = before;
            kvf_setting_show(s, &before, text, sizeof text);
            memset((char *)&after + s->offset, 0x5a, s->bytes);
            if (s->kind == KVF_SETTING_TEXT)
                continue;
            if (!kvf_setting_parse(s, text, &after))
                fail_msg("%s = %s is refused", s->name, text);
            assert_memory_equal(&before, &after, sizeof before);
        }
    }
}

static void what_is_no_value_changes_nothing(void **state)
{
    static const char *const words[] = {"",    " 1",           "1x",  "1KK",    "-",
                                        "nan", "inf",          "-9",  "1e99",   "hybird",
                                        "on ", "17179869184G", "1,2", "1,2,3,4"};
    for (size_t t = 0; t < TABLES; t++) {
        const kvf_setting *s;
        for (uint32_t i = 0; (s = tables[t](i)) != NULL; i++)
            for (size_t w = 0; w < sizeof words / sizeof *words; w++) {
                any_config before, after;
                init(t, &before);
                after = before;
                if (s->kind == KVF_SETTING_TEXT)
                    continue;
                if (kvf_setting_parse(s, words[w], &after))
                    fail_msg("%s takes '%s'", s->name, words[w]);
                assert_memory_equal(&before, &after, sizeof before);
            }
    }
}

static void expect(table at, const char *name, const char *text, int is_taken, const char *shown)
{
    any_config c;
    char got[128];
    const kvf_setting *s = find(at, name);
    init(at == kvf_runtime_setting ? 0
         : at == kvf_cache_setting ? 1
         : at == kvf_link_setting  ? 2
         : at == kvf_disk_setting  ? 4
                                   : 3,
         &c);
    if (kvf_setting_parse(s, text, &c) != is_taken)
        fail_msg("%s = %s: expected %s", name, text, is_taken ? "taken" : "refused");
    if (is_taken)
        assert_string_equal(kvf_setting_show(s, &c, got, sizeof got), shown);
    else
        assert_string_equal(kvf_setting_range(s, got, sizeof got), shown);
}

static void values_and_ranges(void **state)
{
    expect(kvf_cache_setting, "budget_tokens", "2K", 1, "2048");
    expect(kvf_cache_setting, "budget_tokens", "0", 0, "a whole number from 1 to 67108864");
    expect(kvf_cache_setting, "page_size", "64", 1, "64");
    expect(kvf_cache_setting, "page_size", "24", 0, "1, 2, 4, 8, 16, 32 or 64");
    expect(kvf_cache_setting, "page_size", "128", 0, "1, 2, 4, 8, 16, 32 or 64");
    expect(kvf_cache_setting, "sub_digests", "3", 0, "1, 2 or 4");
    expect(kvf_cache_setting, "select", "oracle", 1, "oracle");
    expect(kvf_cache_setting, "select", "custom", 0,
           "hybrid, full, static, dynamic, streaming, quest, arkvale or oracle");
    expect(kvf_cache_setting, "static_ratio", "auto", 1, "auto");
    expect(kvf_cache_setting, "static_ratio", "0.125", 1, "0.125");
    expect(kvf_cache_setting, "static_ratio", "1.5", 0, "a number from 0 to 1, or auto");
    expect(kvf_cache_setting, "host_bytes", "2GiB", 1, "2147483648");
    expect(kvf_cache_setting, "host_bytes", "2Gi", 0,
           "a whole number from 0 to 4611686018427387904");
    expect(kvf_cache_setting, "refresh_interval", "4294967295", 1, "4294967295");
    expect(kvf_cache_setting, "refresh_interval", "4294967296", 0,
           "a whole number from 1 to 4294967295");
    expect(kvf_runtime_setting, "numa_node", "-1", 1, "-1");
    expect(kvf_runtime_setting, "numa_node", "-2", 0, "a whole number from -1 to 2147483647");
    expect(kvf_runtime_setting, "device", "host", 1, "host");
    expect(kvf_link_setting, "method", "direct", 0, "gather, each, mapped or batch");
    expect(kvf_link_setting, "seed", "18446744073709551615", 1, "18446744073709551615");
    expect(kvf_link_setting, "seed", "99999999999999999999", 0,
           "a whole number from 0 to 18446744073709551615");
    expect(kvf_link_setting, "zipf", "9", 0, "a number from 0.1 to 4");
    expect(kvf_link_setting, "pool_bytes", "8G", 1, "8589934592");
    expect(kvf_disk_setting, "engine", "aio", 0, "io_uring or preadv");
    expect(kvf_disk_setting, "extent_bytes", "2M", 1, "2097152");
    expect(kvf_disk_setting, "depth", "512", 0, "a whole number from 1 to 256");
    expect(kvf_prune_setting, "keep", "1", 1, "1");
    expect(kvf_prune_setting, "keep", "0", 0, "a number above 0, at most 1");
    expect(kvf_prune_setting, "keep", "1e-60", 0, "a number above 0, at most 1");
    expect(kvf_prune_setting, "layer", "auto", 1, "auto");
    expect(kvf_prune_setting, "layer", "1024", 0, "a whole number from 0 to 1023, or auto");
    expect(kvf_prune_setting, "weights", "1,0,0.5", 1, "1,0,0.5");
    expect(kvf_prune_setting, "weights", "1,2", 0, "three numbers, each at least 0");
    expect(kvf_prune_setting, "pool", "avg", 1, "avg");
}

int main(void)
{
    return unit_run(every_default_comes_back_from_its_text, what_is_no_value_changes_nothing,
                    values_and_ranges);
}
