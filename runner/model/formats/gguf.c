/* SPDX-License-Identifier: Apache-2.0 */

/*
 * GGUF containers; see the header. A file is read from the front to the back; counts are held
 * against the bytes that are left before memory is asked for.
 */

#include "gguf_parts.h"

#include "utf8.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#define MAGIC             "GGUF"
#define KEY_BYTES_MAX     65535u /* by the specification, as the next one */
#define ALIGNMENT_DEFAULT 32u
#define ALIGNMENT_MAX     65536u
#define NAME_BYTES_MAX    127u /* of a tensor; the specification has 64 */
#define FIELD_BYTES_MIN   13u  /* key length, an empty key, type and a byte */
#define TENSOR_BYTES_MIN  33u  /* name length, a byte, rank, one size, type and offset */

struct gguf {
    model_mapping map;
    char *path;
    gguf_field *fields; /* [fields_count] by key */
    size_t fields_count;
    gguf_tensor *tensors; /* in the file's order */
    size_t tensors_count;
};

/* ---- fields ---- */

static int compare_strings(gguf_string a, gguf_string b)
{
    int order = memcmp(a.bytes, b.bytes, a.size < b.size ? a.size : b.size);
    return order != 0 ? order : (a.size > b.size) - (a.size < b.size);
}

static int compare_fields(const void *a, const void *b)
{
    return compare_strings(((const gguf_field *)a)->key, ((const gguf_field *)b)->key);
}

bool gguf_string_is(gguf_string string, const char *text)
{
    return compare_strings(string, (gguf_string){text, strlen(text)}) == 0;
}

/* @p fields has room for @p count. */
static kvf_status take_fields(gguf_cursor *c, gguf_field *fields, uint64_t count)
{
    for (uint64_t i = 0; i < count; i++) {
        gguf_string *key = &fields[i].key;
        KVF_TRY(gguf_take_string(c, "a key", key));
        if (key->size > KEY_BYTES_MAX || utf8_valid_prefix(key->bytes, key->size) != key->size)
            return model_fail(c->error, KVF_CORRUPT,
                              "%.120s: the key of field %" PRIu64 " has %zu bytes or is not UTF-8; "
                              "keys are text of at most %u bytes",
                              c->name, i, key->size, KEY_BYTES_MAX);
        KVF_TRY(gguf_take_value(c, *key, &fields[i].value));
    }
    if (count != 0)
        qsort(fields, count, sizeof *fields, compare_fields);
    for (uint64_t i = 1; i < count; i++)
        if (compare_fields(&fields[i - 1], &fields[i]) == 0)
            return model_fail(c->error, KVF_CORRUPT, "%.120s: the field %.*s is there twice",
                              c->name, (int)(fields[i].key.size < 80 ? fields[i].key.size : 80),
                              fields[i].key.bytes);
    return KVF_OK;
}

const gguf_value *gguf_find(const gguf *self, const char *key)
{
    const gguf_field wanted = {.key = {key, strlen(key)}};
    const gguf_field *found =
        self->fields_count
            ? bsearch(&wanted, self->fields, self->fields_count, sizeof wanted, compare_fields)
            : NULL;
    return found ? &found->value : NULL;
}

/* ---- tensors ---- */

static kvf_status take_shape(gguf_cursor *c, gguf_tensor *tensor)
{
    const int width = (int)tensor->name.size;
    KVF_TRY(gguf_take(c, "the rank of a tensor", &tensor->rank, sizeof tensor->rank));
    if (tensor->rank == 0 || tensor->rank > GGUF_RANK_MAX)
        return model_fail(c->error, KVF_CORRUPT,
                          "%.120s: tensor %.*s has %u dimensions, but must have 1 to %u", c->name,
                          width, tensor->name.bytes, tensor->rank, GGUF_RANK_MAX);
    uint64_t numbers = 1;
    for (uint32_t i = tensor->rank; i-- > 0;) {
        KVF_TRY(gguf_take(c, "the shape of a tensor", &tensor->shape[i], sizeof *tensor->shape));
        if (tensor->shape[i] == 0 || __builtin_mul_overflow(numbers, tensor->shape[i], &numbers) ||
            numbers > INT64_MAX / 4)
            return model_fail(c->error, KVF_CORRUPT,
                              "%.120s: tensor %.*s has a dimension of %" PRIu64
                              ", which is 0 or makes it too large",
                              c->name, width, tensor->name.bytes, tensor->shape[i]);
    }
    tensor->bytes = numbers;
    return KVF_OK;
}

/* Turns tensor->bytes from numbers to bytes. */
static kvf_status take_type(gguf_cursor *c, gguf_tensor *tensor)
{
    const int width = (int)tensor->name.size;
    uint32_t id;
    KVF_TRY(gguf_take(c, "the type of a tensor", &id, sizeof id));
    tensor->type = gguf_type_find(id);
    if (!tensor->type)
        return model_fail(c->error, KVF_UNSUPPORTED,
                          "%.120s: tensor %.*s has type %u (%s); supported are " GGUF_TYPE_NAMES
                          ": quantise the model to one of them (llama-quantize --allow-requantize "
                          "FILE OUT Q8_0), or "
                          "use llama.cpp with kvferry-llama",
                          c->name, width, tensor->name.bytes, id, gguf_type_name(id));
    const uint64_t columns = tensor->shape[tensor->rank - 1];
    if (columns % tensor->type->numbers != 0)
        return model_fail(c->error, KVF_CORRUPT,
                          "%.120s: tensor %.*s has rows of %" PRIu64
                          " numbers, but its type %s comes in blocks of %u",
                          c->name, width, tensor->name.bytes, columns, tensor->type->name,
                          tensor->type->numbers);
    tensor->bytes = tensor->bytes / tensor->type->numbers * tensor->type->bytes;
    return KVF_OK;
}

/* Leaves the offset in @p offset, for the place of the data is not known yet. */
static kvf_status take_tensor(gguf_cursor *c, gguf_tensor *tensor, uint64_t *offset)
{
    *tensor = (gguf_tensor){0};
    KVF_TRY(gguf_take_string(c, "the name of a tensor", &tensor->name));
    const char *name = tensor->name.bytes;
    const size_t size = tensor->name.size;
    bool is_name = size != 0 && size <= NAME_BYTES_MAX;
    for (size_t i = 0; is_name && i < size; i++)
        is_name = name[i] > ' ' && name[i] < 0x7f;
    if (!is_name)
        return model_fail(
            c->error, KVF_CORRUPT,
            "%.120s: the name of a tensor at byte %td has %zu bytes or strange ones; names "
            "have 1 to %u visible characters of ASCII",
            c->name, name - c->start, size, NAME_BYTES_MAX);
    KVF_TRY(take_shape(c, tensor));
    KVF_TRY(take_type(c, tensor));
    return gguf_take(c, "the offset of a tensor", offset, sizeof *offset);
}

static kvf_status place_tensor(const gguf_cursor *c, uint64_t first, uint64_t alignment,
                               uint64_t offset, gguf_tensor *tensor)
{
    const int width = (int)tensor->name.size;
    const uint64_t size = (uint64_t)(c->end - c->start);
    const uint64_t bytes = size > first ? size - first : 0;
    if (offset % alignment != 0)
        return model_fail(c->error, KVF_CORRUPT,
                          "%.120s: tensor %.*s is at offset %" PRIu64
                          ", which is no multiple of general.alignment, %" PRIu64,
                          c->name, width, tensor->name.bytes, offset, alignment);
    if (offset > bytes || tensor->bytes > bytes - offset)
        return model_fail(c->error, KVF_CORRUPT,
                          "%.120s: tensor %.*s has %" PRIu64 " bytes at offset %" PRIu64
                          ", but the file has %" PRIu64
                          " bytes of data; it may be truncated, download it again",
                          c->name, width, tensor->name.bytes, tensor->bytes, offset, bytes);
    tensor->data = c->start + first + offset;
    return KVF_OK;
}

static kvf_status read_alignment(const gguf *self, const gguf_cursor *c, uint64_t *out)
{
    const gguf_value *value = gguf_find(self, "general.alignment");
    *out = ALIGNMENT_DEFAULT;
    if (!value)
        return KVF_OK;
    const bool is_natural = gguf_natural(value, out);
    if (!is_natural || *out % 8 != 0 || *out == 0 || *out > ALIGNMENT_MAX)
        return model_fail(c->error, KVF_CORRUPT,
                          "%.120s: general.alignment is %" PRIu64
                          ", but must be a multiple of 8, at most %u",
                          c->name, is_natural ? *out : 0, ALIGNMENT_MAX);
    return KVF_OK;
}

/* Tensors after the fields: first all entries, then the data. */
static kvf_status take_tensors(gguf *self, gguf_cursor *c, uint64_t count, uint64_t alignment)
{
    uint64_t *offsets = model_alloc(count * sizeof *offsets);
    self->tensors = model_alloc(count * sizeof *self->tensors);
    kvf_status status = KVF_OK;
    if (!offsets || !self->tensors)
        status = model_out_of_memory(c->error, count * sizeof *self->tensors, "the tensor table");
    for (uint64_t i = 0; i < count && status == KVF_OK; i++)
        status = take_tensor(c, &self->tensors[i], &offsets[i]);
    const uint64_t front = (uint64_t)(c->at - c->start);
    const uint64_t first = (front + alignment - 1) / alignment * alignment;
    for (uint64_t i = 0; i < count && status == KVF_OK; i++)
        status = place_tensor(c, first, alignment, offsets[i], &self->tensors[i]);
    model_free(offsets);
    if (status == KVF_OK)
        self->tensors_count = count;
    return status;
}

static kvf_status take_head(gguf_cursor *c, uint64_t *tensors, uint64_t *fields)
{
    char magic[4];
    uint32_t version;
    KVF_TRY(gguf_take(c, "the header", magic, sizeof magic));
    if (memcmp(magic, MAGIC, sizeof magic) != 0)
        return model_fail(c->error, KVF_CORRUPT,
                          "%.120s is no GGUF file: its first bytes are not \"GGUF\"; give a GGUF "
                          "file or a directory with config.json",
                          c->name);
    KVF_TRY(gguf_take(c, "the version", &version, sizeof version));
    if (version != 2 && version != 3)
        return model_fail(c->error, KVF_UNSUPPORTED,
                          "%.120s: the version is %u%s; 2 and 3 are supported, convert the model "
                          "again",
                          c->name, version,
                          version % 65536 == 0 && version != 0 ? " (a big-endian file)" : "");
    KVF_TRY(gguf_take(c, "the number of tensors", tensors, sizeof *tensors));
    KVF_TRY(gguf_take(c, "the number of fields", fields, sizeof *fields));
    const bool many_fields = *fields > gguf_left(c) / FIELD_BYTES_MIN;
    if (many_fields || *tensors > gguf_left(c) / TENSOR_BYTES_MIN)
        return model_fail(c->error, KVF_CORRUPT,
                          "%.120s: the header promises %" PRIu64
                          " %s, but the file has only %" PRIu64
                          " bytes more; it may be truncated, download it again",
                          c->name, many_fields ? *fields : *tensors,
                          many_fields ? "fields" : "tensors", gguf_left(c));
    return KVF_OK;
}

static kvf_status check_split(const gguf *self, const gguf_cursor *c)
{
    const gguf_value *value = gguf_find(self, "split.count");
    uint64_t count;
    if (!value || (gguf_natural(value, &count) && count <= 1))
        return KVF_OK;
    return model_fail(c->error, KVF_UNSUPPORTED,
                      "%.120s is one of several files of a model (split.count); join them with "
                      "llama-gguf-split --merge",
                      c->name);
}

static kvf_status read_file(gguf *self, kvf_error *error)
{
    gguf_cursor c = {.start = self->map.bytes,
                     .at = self->map.bytes,
                     .end = self->map.bytes + self->map.size,
                     .name = model_base_name(self->path),
                     .error = error};
    uint64_t tensors, count, alignment = 0;
    KVF_TRY(take_head(&c, &tensors, &count));
    self->fields = model_alloc(count * sizeof *self->fields);
    if (!self->fields)
        return model_out_of_memory(error, count * sizeof *self->fields,
                                   "the fields of a GGUF file");
    KVF_TRY(take_fields(&c, self->fields, count));
    self->fields_count = count;
    KVF_TRY(check_split(self, &c));
    KVF_TRY(read_alignment(self, &c, &alignment));
    return take_tensors(self, &c, tensors, alignment);
}

/* ---- files ---- */

bool gguf_is_file(const char *model)
{
    static const char ending[] = ".gguf";
    struct stat info;
    const size_t size = strlen(model);
    if (stat(model, &info) == 0)
        return S_ISREG(info.st_mode);
    return size >= sizeof ending && strcmp(model + size - (sizeof ending - 1), ending) == 0;
}

bool gguf_is_image(const void *bytes, size_t size)
{
    return size >= strlen(MAGIC) && memcmp(bytes, MAGIC, strlen(MAGIC)) == 0;
}

/* Takes the mapping. */
static kvf_status open_mapping(model_mapping map, const char *path, gguf **out, kvf_error *error)
{
    gguf *self = *out = model_alloc_zero(1, sizeof *self);
    if (!self) {
        model_unmap(&map);
        return model_out_of_memory(error, sizeof *self, "a GGUF file");
    }
    self->map = map;
    kvf_status status = model_copy_text(path, strlen(path), "a name", &self->path, error);
    if (status == KVF_OK)
        status = read_file(self, error);
    if (status != KVF_OK) {
        gguf_close(self);
        *out = NULL;
    }
    return status;
}

kvf_status gguf_open(const char *path, gguf **out, kvf_error *error)
{
    model_mapping map;
    *out = NULL;
    KVF_TRY(model_map(path, &map, error));
    return open_mapping(map, path, out, error);
}

kvf_status gguf_open_memory(const void *bytes, size_t size, gguf **out, kvf_error *error)
{
    const model_mapping map = {.bytes = bytes, .size = size};
    return open_mapping(map, "GGUF in memory", out, error);
}

void gguf_close(gguf *self)
{
    if (!self)
        return;
    model_unmap(&self->map);
    model_free(self->path);
    model_free(self->fields);
    model_free(self->tensors);
    model_free(self);
}

/* ---- asking ---- */

const char *gguf_name(const gguf *self)
{
    return model_base_name(self->path);
}

size_t gguf_tensor_count(const gguf *self)
{
    return self->tensors_count;
}

const gguf_tensor *gguf_tensor_at(const gguf *self, size_t index)
{
    return &self->tensors[index];
}

const gguf_tensor *gguf_tensor_find(const gguf *self, const char *name)
{
    for (size_t i = 0; i < self->tensors_count; i++)
        if (gguf_string_is(self->tensors[i].name, name))
            return &self->tensors[i];
    return NULL;
}
