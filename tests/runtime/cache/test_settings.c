/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The library's descriptions of its own settings: every default is in its range and comes back from
 * its text, every text that is no value is refused and changes nothing, and names are those of the
 * lists.
 */

#include "harness.h"
#include "refusals.h"

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

TEST(every_default_comes_back_from_its_text)
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

TEST(what_is_no_value_changes_nothing)
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

static kvf_status value_row(void *user, char *change, size_t size, kvf_error *error)
{
    static const char *const names[TABLES] = {"runtime", "cache", "link", "prune", "disk"};
    char *name = refusals_value(change), *text = refusals_value(name);
    size_t at = 0;
    any_config c;
    while (strcmp(names[at], change) != 0)
        assert_true(++at < TABLES);
    const kvf_setting *s = find(tables[at], name);
    init(at, &c);
    const int is_taken = kvf_setting_parse(s, text, &c);
    if (is_taken)
        kvf_setting_show(s, &c, error->text, sizeof error->text);
    else
        kvf_setting_range(s, error->text, sizeof error->text);
    return error->status = is_taken ? KVF_OK : KVF_INVALID;
}

TEST(values_and_ranges)
{
    refusals_check(&(refusals){.path = "tests/runtime/cache/settings.refusals", .call = value_row});
}
