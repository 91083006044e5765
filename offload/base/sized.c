/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Structs of callers, with their sizes; see the header. Knows no struct. Invariant: of the caller's
 * struct no byte after its size is read or written.
 */

#include "settings.h"

#include <string.h>

static size_t size_of(const void *given)
{
    size_t size;
    memcpy(&size, given, sizeof size);
    return size;
}

static kvf_status check(kvf_context *context, const char *name, const char *argument,
                        const void *given)
{
    if (!given)
        KVF_FAIL(context, KVF_INVALID, "%s is NULL; pass a %s", argument, name);
    const size_t size = size_of(given);
    if (size <= sizeof size || size % sizeof(uint64_t) || size > KVF_SIZED_MAX)
        KVF_FAIL(context, KVF_INVALID,
                 "%s: size = %zu is not the size of a %s; set it to sizeof(%s), or call its _init",
                 argument, size, name, name);
    return KVF_OK;
}

/* Copies what both know; what only the caller's struct has must be 0. */
static kvf_status copy_in(kvf_context *context, const char *name, const char *argument,
                          const void *given, size_t size, void *known, size_t known_bytes)
{
    const unsigned char *bytes = given;
    for (size_t i = known_bytes; i < size; i++)
        if (bytes[i])
            KVF_FAIL(
                context, KVF_INVALID,
                "%s: a %s ends at byte %zu in kvferry %s, and byte %zu is not 0: the program "
                "was built for a later version and uses a field that is not here; leave it 0, or "
                "update the library",
                argument, name, known_bytes, kvf_version(), i);
    memcpy(known, given, size < known_bytes ? size : known_bytes);
    return KVF_OK;
}

kvf_status kvf_sized_read(kvf_context *context, const char *name, const char *argument,
                          const void *given, void *known, size_t known_bytes)
{
    KVF_TRY(check(context, name, argument, given));
    KVF_TRY(copy_in(context, name, argument, given, size_of(given), known, known_bytes));
    memcpy(known, &known_bytes, sizeof known_bytes);
    return KVF_OK;
}

kvf_status kvf_sized_take(kvf_context *context, const char *name, const char *argument,
                          const void *given, size_t size, void *known, size_t known_bytes)
{
    if (!given)
        KVF_FAIL(context, KVF_INVALID, "%s is NULL; pass a %s", argument, name);
    if (size == 0 || size % sizeof(uint32_t) || size > KVF_SIZED_MAX)
        KVF_FAIL(context, KVF_INVALID, "%s: size = %zu is not the size of a %s; pass sizeof(%s)",
                 argument, size, name, name);
    memset(known, 0, known_bytes);
    return copy_in(context, name, argument, given, size, known, known_bytes);
}

kvf_status kvf_sized_last(kvf_context *context, const char *member, const void *given,
                          size_t offset)
{
    const size_t size = size_of(given);
    const size_t member_size =
        size > offset + sizeof size ? size_of((const char *)given + offset) : 0;
    if (member_size == 0 || member_size != size - offset)
        KVF_FAIL(context, KVF_INVALID,
                 "%s.size = %zu: it is the last member, at byte %zu, of a struct whose size = %zu; "
                 "leave both as _init sets them",
                 member, member_size, offset, size);
    return KVF_OK;
}

kvf_status kvf_sized_reserved(kvf_context *context, const uint32_t *words, size_t count)
{
    for (size_t i = 0; i < count; i++)
        if (words[i])
            KVF_FAIL(context, KVF_INVALID,
                     "reserved[%zu] = %u: kvferry %s does not use it; leave it 0, or update the "
                     "library",
                     i, words[i], kvf_version());
    return KVF_OK;
}

void kvf_sized_give(void *given, size_t size, const void *known, size_t known_bytes)
{
    if (!given)
        return;
    const size_t both = size < known_bytes ? size : known_bytes;
    memcpy(given, known, both);
    memset((char *)given + both, 0, size - both);
}

void kvf_sized_init(void *given, size_t size, const void *known, size_t known_bytes)
{
    kvf_sized_give(given, size, known, known_bytes);
    if (given)
        memcpy(given, &size, sizeof size);
}
