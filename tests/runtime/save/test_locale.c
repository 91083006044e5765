/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The process may have any locale: settings, messages and saved files are those of the C locale.
 * `LOCPATH` has locales with other points in numbers, of one byte and of two, and one whose letters
 * are not UTF-8. Many tests of others run in one of them, too (`<name>_locale`).
 */

#include "save_rig.h"

#include <locale.h>

#include <kvferry/disk.h>
#include <kvferry/link.h>
#include <kvferry/prune.h>
#include <kvferry/setting.h>

static const char *const locales[] = {"C", "de_DE", "ps_AF", "tr_TR"};
#define LOCALES (sizeof locales / sizeof *locales)

static void take_locale(size_t i)
{
    if (!setlocale(LC_ALL, locales[i]))
        fail_msg("there is no locale %s in LOCPATH=%s", locales[i], getenv("LOCPATH"));
    assert_int_equal(strcmp(localeconv()->decimal_point, ".") == 0, i == 0);
}

static int leave_locale(void **state)
{
    (void)setlocale(LC_ALL, "C");
    return 0;
}

typedef const kvf_setting *(*settings_fn)(uint32_t index);

static bool is_real(const kvf_setting *s)
{
    return s->kind == KVF_SETTING_REAL || s->kind == KVF_SETTING_SHARE;
}

/* Ranges, and values from text and as text, of every row. */
static void describe_settings(settings_fn at, char *text, size_t capacity)
{
    const kvf_setting *s;
    size_t used = strlen(text);
    for (uint32_t i = 0; (s = at(i)); i++) {
        char range[256], shown[64] = "none", half[64], config[4096] = {0};
        snprintf(half, sizeof half, s->count == 3 ? "0.5,0.25,0.125" : "0.5");
        const int is_taken = kvf_setting_parse(s, half, config);
        assert_int_equal(is_taken, is_real(s) || s->kind == KVF_SETTING_TEXT);
        if (is_taken) {
            assert_string_equal(kvf_setting_show(s, config, shown, sizeof shown), half);
            assert_int_equal(kvf_setting_parse(s, shown, config), 1);
        }
        if (is_real(s) && s->count <= 1)
            assert_int_equal(kvf_setting_parse(s, "0,5", config), 0);
        used += (size_t)snprintf(text + used, capacity - used, "%s %s %s\n", s->name, shown,
                                 kvf_setting_range(s, range, sizeof range));
    }
    assert_in_range(used, 1, capacity - 1);
}

TEST(settings_are_those_of_the_c_locale)
{
    static const settings_fn all[] = {kvf_runtime_setting, kvf_cache_setting, kvf_prune_setting,
                                      kvf_link_setting, kvf_disk_setting};
    static char wanted[1 << 16], got[1 << 16];
    for (size_t l = 0; l < LOCALES; l++) {
        take_locale(l);
        got[0] = '\0';
        for (size_t i = 0; i < sizeof all / sizeof *all; i++)
            describe_settings(all[i], got, sizeof got);
        if (l == 0)
            memcpy(wanted, got, sizeof got);
        assert_string_equal(got, wanted);
    }
}

/* A number out of its range, and a text of the system. */
TEST(messages_are_those_of_the_c_locale)
{
    test_world w;
    kvf_cache_config c = test_config_small();
    test_world_open(&w, NULL, &c);
    c.static_ratio = 1.5f;
    for (size_t l = 0; l < LOCALES; l++) {
        kvf_cache *cache = NULL;
        kvf_error error;
        kvf_saved saved;
        take_locale(l);
        test_refused(w.runtime, kvf_cache_open(w.runtime, &c, &cache, NULL), KVF_INVALID,
                     "static_ratio = 1.5: must be a number from 0 to 1, or auto (share of the "
                     "static set in the budget that sink and window leave)");
        test_expect(w.runtime,
                    kvf_saved_read(w.runtime, "/nowhere/at-all", 0, &saved, NULL, 0, &error),
                    KVF_SYSTEM);
        assert_non_null(strstr(error.text, "No such file or directory"));
    }
    test_world_close(&w);
}

static void set_scale(test_world *w, float scale)
{
    kvf_attention_params params;
    kvf_attention_params_init(&params);
    params.scale = scale;
    params.soft_cap = 12.5f;
    for (uint32_t layer = 0; layer < w->config.layers; layer++)
        test_ok(w, kvf_cache_attention_params(w->cache, layer, &params));
}

/* Saved in one locale, restored in every other, with settings and attention parameters that are no
 * whole numbers.
 */
TEST(saved_files_come_back_in_any_locale)
{
    const save_case one = {"locale",
                           "static_ratio=0.25 select=hybrid budget_share=0 softmax_scale=0.3"};
    const kvf_cache_config c = save_config(&one);
    char *wanted = NULL;
    size_t bytes = 0;
    test_tokens t;
    test_tokens_make(&t, &c, &(test_tokens_spec){.count = SAVE_PROMPT, .seed = 3, .sharpness = 2});
    for (size_t l = 0; l < LOCALES; l++) {
        test_world w;
        take_locale(l);
        test_world_open(&w, NULL, &c);
        set_scale(&w, 0.375f);
        kvf_sequence *s = test_sequence(&w);
        test_fill(&w, s, &t, 0, SAVE_PROMPT);
        test_ok(&w, save_now(&w, s, save_path(locales[l]), NULL));
        test_world_close(&w);
        size_t size;
        char *file = save_read(save_path(locales[l]), &size);
        if (l == 0) {
            wanted = file;
            bytes = size;
            continue;
        }
        assert_int_equal(size, bytes);
        assert_memory_equal(file, wanted, bytes);
        free(file);
    }
    free(wanted);
    for (size_t from = 0; from < LOCALES; from++)
        for (size_t to = 0; to < LOCALES; to++) {
            test_world w;
            take_locale(to);
            test_world_open(&w, NULL, &c);
            set_scale(&w, 0.375f);
            kvf_sequence_destroy(save_restore(&w, save_path(locales[from]), 1));
            test_world_close(&w);
        }
    test_tokens_free(&t);
}

/* The locale of a thread counts as well, and stays. */
TEST(locale_of_a_thread_stays)
{
    char text[64];
    kvf_cache_config c;
    kvf_cache_config_init(&c);
    c.static_ratio = 0.25f;
    const kvf_setting *s;
    uint32_t i = 0;
    while ((s = kvf_cache_setting(i)) && strcmp(s->name, "static_ratio") != 0)
        i++;
    take_locale(1); /* newlocale of glibc leaks the paths of LOCPATH */
    const locale_t own = duplocale(LC_GLOBAL_LOCALE);
    assert_non_null(own);
    (void)leave_locale(state);
    const locale_t before = uselocale(own);
    assert_string_equal(kvf_setting_show(s, &c, text, sizeof text), "0.25");
    assert_ptr_equal(uselocale((locale_t)0), own);
    assert_string_equal(localeconv()->decimal_point, ",");
    (void)uselocale(before);
    freelocale(own);
}

TESTS_RUN_BETWEEN(NULL, save_remove_folder)
EACH_TEST_RUNS_BETWEEN(NULL, leave_locale)
