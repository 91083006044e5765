/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_OFFLOAD_SETTINGS_H
#define KVF_OFFLOAD_SETTINGS_H

/*
 * Tables of settings: the rows are written with these, and a whole struct is checked against them.
 */

#include <stdbool.h>

#include <kvferry/setting.h>

#define KVF_FIELD(type, field)                                                                     \
    .name = #field, .offset = offsetof(type, field), .bytes = sizeof(((type *)0)->field)

/* Texts of a list of names, by value; NULL after the last. */
#define KVF_NAME_TEXT(name, value, text, meaning) [value] = (text),
#define KVF_NAMES(LIST)                                                                            \
    (const char *const[])                                                                          \
    {                                                                                              \
        LIST(KVF_NAME_TEXT) NULL                                                                   \
    }
#define KVF_NAME_COUNT(name, value, text, meaning) +1
#define KVF_NAMES_HIGH(LIST)                       (LIST(KVF_NAME_COUNT) - 1)

/* A row whose values are the names of a list. */
#define KVF_NAMED(LIST)                                                                            \
    .kind = KVF_SETTING_NAME, .high = KVF_NAMES_HIGH(LIST), .names = KVF_NAMES(LIST)

/* Which field of @p config is out of its range: "field = value: must be ... (meaning)", in @p text.
 * @return whether there is one */
bool kvf_settings_wrong(const kvf_setting *rows, size_t count, const void *config, char *text,
                        size_t capacity);

#endif
