/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_OFFLOAD_SETTINGS_H
#define KVF_OFFLOAD_SETTINGS_H

/*
 * Structs of the public headers, as they come in: tables of settings, whose rows are written with
 * these and against which a whole struct is checked; and structs that can grow.
 */

#include <stdbool.h>

#include <kvferry/setting.h>

#include "context.h"

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

/*
 * Structs of the public headers that begin with their size, or come with it, so that they can grow
 * under one soname: the caller's may be shorter than the library's, or longer. Nothing below the
 * public functions sees the caller's; it sees the library's, whole.
 */

/* A size that no struct of the caller's has: garbage where the size should be. */
#define KVF_SIZED_MAX ((size_t)4096)

/* Copies the caller's struct to `known`, which holds defaults: what his lacks keeps them, and what
 * only his has must be 0. Its size becomes that of the library's. `name` is that of the struct,
 * `argument` that of the parameter. */
KVF_CHECKED kvf_status kvf_sized_read(kvf_context *context, const char *name, const char *argument,
                                      const void *given, void *known, size_t known_bytes);
#define KVF_SIZED_READ(context, type, given, known)                                                \
    kvf_sized_read((context), #type, #given, (given), (known), sizeof(type))

/* A struct with another that grows as its last member, at `offset`: the sizes must agree. */
KVF_CHECKED kvf_status kvf_sized_last(kvf_context *context, const char *member, const void *given,
                                      size_t offset);
/* Room for members to come is 0. */
KVF_CHECKED kvf_status kvf_sized_reserved(kvf_context *context, const uint32_t *words,
                                          size_t count);
#define KVF_SIZED_RESERVED(context, array)                                                         \
    kvf_sized_reserved((context), (array), sizeof(array) / sizeof *(array))

/* Copies a struct that came with its size to `known`: what the caller's lacks is 0, and what only
 * his has must be. */
KVF_CHECKED kvf_status kvf_sized_take(kvf_context *context, const char *name, const char *argument,
                                      const void *given, size_t size, void *known,
                                      size_t known_bytes);
#define KVF_SIZED_TAKE(context, type, given, size, known)                                          \
    kvf_sized_take((context), #type, #given, (given), (size), (known), sizeof(type))

/* The caller's struct gets `known`: no byte beyond `size` is written, and what the library does not
 * know is 0. */
void kvf_sized_give(void *given, size_t size, const void *known, size_t known_bytes);
#define KVF_SIZED_GIVE(given, size, known) kvf_sized_give((given), (size), (known), sizeof *(known))

/* Likewise with defaults, of a struct that begins with its size. */
void kvf_sized_init(void *given, size_t size, const void *known, size_t known_bytes);

#endif
