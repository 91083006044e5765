/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Memory, errors and small files for the readers; see the header. It knows no format.
 * Invariant: growth is checked for overflow before it is asked for, and failure changes nothing.
 */

#include "model_memory.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "common/files.h"
#include "common/text.h"

__attribute__((weak)) void *model_alloc(size_t bytes)
{
    return bytes <= PTRDIFF_MAX ? malloc(bytes ? bytes : 1) : NULL;
}

void *model_alloc_zero(size_t count, size_t bytes)
{
    if (bytes != 0 && count > PTRDIFF_MAX / bytes)
        return NULL;
    void *pointer = model_alloc(count * bytes);
    if (pointer)
        memset(pointer, 0, count * bytes);
    return pointer;
}

__attribute__((weak)) void model_free(void *pointer)
{
    free(pointer);
}

void *model_grow(void *pointer, size_t used, size_t bytes)
{
    void *grown = bytes ? model_alloc(bytes) : NULL;
    if (!grown)
        return NULL;
    if (used != 0)
        memcpy(grown, pointer, used);
    model_free(pointer);
    return grown;
}

void *model_room(void *list, uint32_t count, uint32_t *capacity, size_t element)
{
    const uint32_t more = *capacity ? 2 * *capacity : 64;
    if (count < *capacity)
        return list;
    void *grown = realloc(list, more * element);
    *capacity = grown ? more : *capacity;
    return grown;
}

uint64_t model_hash(const char *bytes, size_t size)
{
    uint64_t hash = 0xcbf29ce484222325u;
    for (size_t i = 0; i < size; i++)
        hash = (hash ^ (unsigned char)bytes[i]) * 0x100000001b3u;
    return hash ^ hash >> 32;
}

static void error_write(kvf_error *error, kvf_status status, int foreign, const char *format,
                        va_list list)
{
    if (!error)
        return;
    error->status = status;
    error->foreign = foreign;
    int length = kvf_vformat(error->text, sizeof error->text, format, list);
    if (length < 0)
        error->text[0] = '\0';
    for (char *c = error->text; *c != '\0'; c++) /* names from files may hold anything */
        if ((unsigned char)*c < 0x20 || *c == 0x7f)
            *c = '?';
}

kvf_status model_fail(kvf_error *error, kvf_status status, const char *format, ...)
{
    va_list list;
    va_start(list, format);
    error_write(error, status, 0, format, list);
    va_end(list);
    return status;
}

kvf_status model_fail_errno(kvf_error *error, int number, const char *format, ...)
{
    va_list list;
    va_start(list, format);
    error_write(error, KVF_SYSTEM, number, format, list);
    va_end(list);
    if (error) {
        size_t used = strlen(error->text);
        snprintf(error->text + used, sizeof error->text - used, ": %s%s", kvf_errno_text(number),
                 kvf_errno_fix(number));
    }
    return KVF_SYSTEM;
}

kvf_status model_fail_open(const char *path, int number, kvf_error *error)
{
    char target[256];
    const ssize_t size = number == ENOENT ? readlink(path, target, sizeof target - 1) : -1;
    if (size < 0)
        return model_fail_errno(error, number, "%s cannot be opened", path);
    target[size] = '\0';
    (void)model_fail(error, KVF_SYSTEM,
                     "%.240s is a link to %.160s, and nothing is there; download the file again",
                     path, target);
    if (error)
        error->foreign = number;
    return KVF_SYSTEM;
}

kvf_status model_out_of_memory(kvf_error *error, size_t bytes, const char *what)
{
    return model_fail(error, KVF_OUT_OF_MEMORY, "%zu bytes for %s could not be allocated", bytes,
                      what);
}

kvf_status model_copy_text(const char *text, size_t size, const char *what, char **out,
                           kvf_error *error)
{
    *out = model_alloc(size + 1);
    if (!*out)
        return model_out_of_memory(error, size + 1, what);
    memcpy(*out, text, size);
    (*out)[size] = '\0';
    return KVF_OK;
}

/* The capacity to grow to for @p needed elements of @p element bytes, or 0 if there is none. */
static size_t grown_capacity(size_t capacity, size_t needed, size_t element)
{
    size_t limit = (size_t)PTRDIFF_MAX / element;
    if (needed > limit)
        return 0;
    size_t grown = capacity > limit / 2 ? limit : capacity * 2;
    if (grown < needed)
        grown = needed;
    return grown < 64 ? 64 : grown;
}

bool kvf_ids_have(const uint32_t *ids, size_t count, uint32_t id)
{
    for (size_t i = 0; i < count; i++)
        if (ids[i] == id)
            return true;
    return false;
}

kvf_status kvf_token_ids_append(kvf_token_ids *ids, const uint32_t *from, size_t count,
                                kvf_error *error)
{
    if (count == 0)
        return KVF_OK;
    if (count > ids->capacity - ids->count) {
        size_t capacity = grown_capacity(ids->capacity, ids->count + count, sizeof *ids->ids);
        const size_t bytes = capacity * sizeof *ids->ids;
        uint32_t *grown = model_grow(ids->ids, ids->count * sizeof *ids->ids, bytes);
        if (!grown)
            return model_out_of_memory(error, bytes, "token ids");
        ids->ids = grown;
        ids->capacity = capacity;
    }
    memcpy(ids->ids + ids->count, from, count * sizeof *from);
    ids->count += count;
    return KVF_OK;
}

kvf_status kvf_token_ids_push(kvf_token_ids *ids, uint32_t id, kvf_error *error)
{
    return kvf_token_ids_append(ids, &id, 1, error);
}

void kvf_token_ids_free(kvf_token_ids *ids)
{
    model_free(ids->ids);
    *ids = (kvf_token_ids){0};
}

kvf_status kvf_text_append(kvf_text *text, const void *bytes, size_t size, kvf_error *error)
{
    if (size >= PTRDIFF_MAX - text->size)
        return model_out_of_memory(error, size, "text");
    if (text->size + size >= text->capacity) {
        size_t capacity = grown_capacity(text->capacity, text->size + size + 1, 1);
        char *grown = model_grow(text->bytes, text->size, capacity);
        if (!grown)
            return model_out_of_memory(error, capacity, "text");
        text->bytes = grown;
        text->capacity = capacity;
    }
    if (size != 0)
        memcpy(text->bytes + text->size, bytes, size);
    text->size += size;
    text->bytes[text->size] = '\0';
    return KVF_OK;
}

void kvf_text_free(kvf_text *text)
{
    model_free(text->bytes);
    *text = (kvf_text){0};
}

static kvf_status read_stream(FILE *file, const char *path, size_t bytes_max, kvf_text *out,
                              kvf_error *error)
{
    char block[16384];
    size_t got;
    while ((got = fread(block, 1, sizeof block, file)) != 0) {
        if (got > bytes_max - out->size)
            return model_fail(error, KVF_CORRUPT, "%s is larger than the %zu bytes allowed", path,
                              bytes_max);
        KVF_TRY(kvf_text_append(out, block, got, error));
    }
    if (ferror(file))
        return model_fail_errno(error, errno, "%s cannot be read", path);
    return kvf_text_append(out, "", 0, error);
}

void model_skip_mark(kvf_text *text)
{
    static const char mark[] = "\xef\xbb\xbf";
    if (text->size < 3 || memcmp(text->bytes, mark, 3) != 0)
        return;
    text->size -= 3;
    memmove(text->bytes, text->bytes + 3, text->size + 1);
}

kvf_status model_read_file(const char *path, size_t bytes_max, kvf_text *out, kvf_error *error)
{
    *out = (kvf_text){0};
    FILE *file = fopen(path, "rbe");
    if (!file)
        return model_fail_open(path, errno, error);
    kvf_status status = read_stream(file, path, bytes_max, out, error);
    fclose(file);
    if (status == KVF_OK)
        model_skip_mark(out);
    else
        kvf_text_free(out);
    return status;
}

const char *model_path(char path[MODEL_PATH_BYTES], const char *directory, const char *name)
{
    snprintf(path, MODEL_PATH_BYTES, "%s/%s", directory, name);
    return path;
}

const char *model_base_name(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

kvf_status model_check_pointer(const char *path, const char *bytes, size_t size, kvf_error *error)
{
    static const char start[] = "version https://git-lfs.github.com/spec/";
    if (size < sizeof start - 1 || memcmp(bytes, start, sizeof start - 1) != 0)
        return KVF_OK;
    return model_fail(
        error, KVF_CORRUPT,
        "%.300s is a pointer of Git LFS, not the file itself; run git lfs pull in its "
        "folder, or download the file",
        path);
}

kvf_status model_map(const char *path, model_mapping *out, kvf_error *error)
{
    *out = (model_mapping){0};
    struct stat info = {0};
    const int fd = kvf_open_regular(path, &info);
    if (fd == -1)
        return model_fail_open(path, errno, error);
    kvf_status status = KVF_OK;
    const size_t size = fd < 0 ? 0 : (size_t)info.st_size;
    void *bytes = size ? mmap(NULL, size, PROT_READ, MAP_PRIVATE, fd, 0) : NULL;
    if (size == 0)
        status = model_fail(error, KVF_CORRUPT, "%s is not a regular file with contents", path);
    else if (bytes == MAP_FAILED)
        status = model_fail_errno(error, errno, "%s (%zu bytes) cannot be mapped", path, size);
    else
        *out = (model_mapping){.bytes = bytes, .size = size, .mapped = true};
    if (fd >= 0)
        close(fd);
    if (status == KVF_OK)
        status = model_check_pointer(path, out->bytes, out->size, error);
    if (status != KVF_OK)
        model_unmap(out);
    return status;
}

void model_unmap(model_mapping *mapping)
{
    if (mapping->mapped)
        munmap((void *)(uintptr_t)mapping->bytes, mapping->size);
    *mapping = (model_mapping){0};
}
