/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVFERRY_SETTING_H
#define KVFERRY_SETTING_H

/**
 * @file
 * kvferry/setting: what the fields of the configurations may be, for programs that read settings
 * from text, show them, or bind them to another language.
 *
 *     const kvf_setting *s;
 *     for (uint32_t i = 0; (s = kvf_cache_setting(i)); i++)
 *         printf("%s: %s\n", s->name, s->meaning);
 *
 * Thread: any, for all functions.
 */

#include <kvferry/kvferry.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum kvf_setting_kind {
    KVF_SETTING_WHOLE,  /**< an integer, low to high */
    KVF_SETTING_POWER,  /**< a power of two, low to high */
    KVF_SETTING_SWITCH, /**< 1 = on, 0 = off */
    KVF_SETTING_NAME,   /**< an enum: names[value] */
    KVF_SETTING_REAL,   /**< float or double, low to high */
    KVF_SETTING_SHARE,  /**< float or double, above low, at most high */
    KVF_SETTING_TEXT,   /**< const char *, borrowed; NULL = none */
} kvf_setting_kind;

/** A field of a configuration: what it may be, and what it is for. */
typedef struct kvf_setting {
    const char *name; /**< of the field */
    kvf_setting_kind kind;
    uint32_t count; /**< elements; above 1 for an array */
    uint32_t bytes; /**< of the field, all elements of an array together */
    size_t offset;  /**< of the field in its struct */
    double low, high;
    const char *const *names; /**< NAME: texts by value, NULL after the last; "" = no text for this
                                 value, because a pointer belongs to it */
    const char *special;      /**< text of one value out of range, such as "auto"; NULL = none */
    double special_value;
    const char *meaning; /**< one line */
} kvf_setting;

/** The values of a setting, in words: "a whole number from 1 to 64". @return @p text */
KVF_API const char *kvf_setting_range(const kvf_setting *setting, char *text, size_t capacity);

/**
 * Set the field of @p config from text. A field beyond its `size` (offset + bytes) belongs to a
 * later library: leave it out. Whole numbers may end with K, M or G (1024s; KiB is K), switches
 * are on, off, 1 or 0, arrays are separated by commas; TEXT is borrowed. A number is written as in
 * the C locale, here and below, independent of setlocale.
 *
 * @return 1; 0 if the text is out of range or no such value: nothing is changed then
 */
KVF_API int kvf_setting_parse(const kvf_setting *setting, const char *text, void *config);

/** The field of @p config as kvf_setting_parse reads it. @return @p text */
KVF_API const char *kvf_setting_show(const kvf_setting *setting, const void *config, char *text,
                                     size_t capacity);

/** The settings of kvf_runtime_config, kvf_cache_config, kvf_prune_config (with its `settings`),
 * kvf_link_case and kvf_disk_case: 0, 1, ...; NULL after the last. */
KVF_API const kvf_setting *kvf_runtime_setting(uint32_t index);
KVF_API const kvf_setting *kvf_cache_setting(uint32_t index);
KVF_API const kvf_setting *kvf_prune_setting(uint32_t index);
KVF_API const kvf_setting *kvf_link_setting(uint32_t index);
KVF_API const kvf_setting *kvf_disk_setting(uint32_t index);

#ifdef __cplusplus
}
#endif
#endif
