/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Safetensors files: eight bytes of header length, a JSON header, then the tensors.
 *
 * It knows one file, or the shards that an index names, not what a tensor is for. Invariant: an
 * entry is added only if its shape, its type and its place in the file agree.
 */

#include "weights_parts.h"

#include <inttypes.h>
#include <string.h>

#define HEADER_BYTES_MAX (100u << 20) /* the limit of the format's own specification */
#define INDEX_BYTES_MAX  (64u << 20)
#define FILES_MAX        4096u

/* ---- one tensor entry ---- */

typedef struct tensor_reader {
    const weight_file *file;
    uint64_t data_start;
    uint64_t data_bytes;
    uint32_t element; /* bytes of one of the tensor that is read */
    kvf_error *error;
} tensor_reader;

static kvf_status read_dtype(const tensor_reader *reader, const json_value *entry, kvf_dtype *out)
{
    char shown[96];
    const json_value *dtype = json_get(entry, "dtype");
    if (json_is_string(dtype, "BF16"))
        *out = KVF_BF16;
    else if (json_is_string(dtype, "F16"))
        *out = KVF_FP16;
    else if (json_is_string(dtype, "F32"))
        *out = KVF_FP32;
    else
        return model_fail(
            reader->error, dtype && dtype->kind == JSON_STRING ? KVF_UNSUPPORTED : KVF_CORRUPT,
            "%s: tensor %.120s has dtype %s; BF16, F16 and F32 are supported, convert "
            "the model to one of them",
            reader->file->name, entry->key, json_show(dtype, shown, sizeof shown));
    return KVF_OK;
}

/* Fills rank, shape and bytes. */
static kvf_status read_shape(const tensor_reader *reader, const json_value *entry,
                             kvf_tensor *tensor)
{
    const json_value *shape = json_get(entry, "shape");
    if (!shape || shape->kind != JSON_ARRAY || shape->size > KVF_TENSOR_RANK_MAX)
        return model_fail(reader->error, KVF_CORRUPT,
                          "%s: tensor %.120s: shape must be an array of at most %u sizes",
                          reader->file->name, entry->key, KVF_TENSOR_RANK_MAX);
    tensor->rank = shape->size;
    uint64_t bytes = reader->element;
    uint32_t axis = 0;
    for (const json_value *size = json_first(shape); size; size = json_next(shape, size)) {
        if (size->kind != JSON_INTEGER)
            return model_fail(reader->error, KVF_CORRUPT,
                              "%s: tensor %.120s: shape[%u] is not a whole number",
                              reader->file->name, entry->key, axis);
        if (__builtin_mul_overflow(bytes, size->as.integer, &bytes))
            return model_fail(reader->error, KVF_CORRUPT,
                              "%s: tensor %.120s: the product of its shape does not fit 64 bits",
                              reader->file->name, entry->key);
        tensor->shape[axis++] = size->as.integer;
    }
    tensor->bytes = bytes;
    return KVF_OK;
}

/* Fills data, after checking the offsets against the file and the shape. */
static kvf_status read_offsets(const tensor_reader *reader, const json_value *entry,
                               kvf_tensor *tensor)
{
    const json_value *offsets = json_get(entry, "data_offsets");
    if (!offsets || offsets->kind != JSON_ARRAY || offsets->size != 2 ||
        offsets[1].kind != JSON_INTEGER || offsets[2].kind != JSON_INTEGER)
        return model_fail(reader->error, KVF_CORRUPT,
                          "%s: tensor %.120s: data_offsets must be two whole numbers",
                          reader->file->name, entry->key);
    uint64_t begin = offsets[1].as.integer;
    uint64_t end = offsets[2].as.integer;
    if (begin > end || end > reader->data_bytes)
        return model_fail(reader->error, KVF_CORRUPT,
                          "%s: tensor %.120s: data_offsets [%" PRIu64 ", %" PRIu64
                          "] leave the file, which has %" PRIu64
                          " bytes of data; it may be truncated, download it again",
                          reader->file->name, entry->key, begin, end, reader->data_bytes);
    if (end - begin != tensor->bytes)
        return model_fail(reader->error, KVF_CORRUPT,
                          "%s: tensor %.120s: data_offsets span %" PRIu64
                          " bytes, but its shape and dtype need %" PRIu64,
                          reader->file->name, entry->key, end - begin, tensor->bytes);
    tensor->data = reader->file->bytes.bytes + reader->data_start + begin;
    if ((uintptr_t)tensor->data % reader->element != 0)
        return model_fail(reader->error, KVF_UNSUPPORTED,
                          "%s: tensor %.120s starts at byte %" PRIu64
                          ", which is not a multiple of its element size; save the file again with "
                          "the safetensors library, which aligns tensors",
                          reader->file->name, entry->key, reader->data_start + begin);
    return KVF_OK;
}

static kvf_status read_tensor(tensor_reader *reader, const json_value *entry, weight_entry *out)
{
    kvf_tensor *tensor = &out->tensor;
    if (entry->kind != JSON_OBJECT)
        return model_fail(reader->error, KVF_CORRUPT, "%s: tensor %.120s is %s, not an object",
                          reader->file->name, entry->key, json_kind_name(entry));
    if (strlen(entry->key) != entry->key_size)
        return model_fail(reader->error, KVF_CORRUPT,
                          "%s: tensor %.120s has a zero byte in its name", reader->file->name,
                          entry->key);
    *out = (weight_entry){.tensor.name = entry->key};
    KVF_TRY(read_dtype(reader, entry, &tensor->dtype));
    reader->element = (uint32_t)kvf_dtype_bytes(tensor->dtype);
    KVF_TRY(read_shape(reader, entry, tensor));
    KVF_TRY(read_offsets(reader, entry, tensor));
    out->source = tensor->data;
    out->source_bytes = tensor->bytes;
    return KVF_OK;
}

/* ---- one file ---- */

static uint64_t read_u64_le(const char *bytes)
{
    uint64_t value = 0;
    for (size_t i = 0; i < 8; i++)
        value |= (uint64_t)(unsigned char)bytes[i] << (8 * i);
    return value;
}

/* Append the tensors of a file whose bytes are in place. */
static kvf_status read_header(kvf_weights *weights, weight_file *file, kvf_error *error)
{
    if (file->bytes.size < 8)
        return model_fail(error, KVF_CORRUPT,
                          "%s has %zu bytes, too few for a safetensors header; download it again",
                          file->name, file->bytes.size);
    uint64_t header_bytes = read_u64_le(file->bytes.bytes);
    if (header_bytes > HEADER_BYTES_MAX || header_bytes > file->bytes.size - 8)
        return model_fail(error, KVF_CORRUPT,
                          "%s: a header of %" PRIu64
                          " bytes does not fit a file of %zu (limit %u); "
                          "this is not a safetensors file, or it is truncated",
                          file->name, header_bytes, file->bytes.size, HEADER_BYTES_MAX);
    KVF_TRY(
        json_parse(file->bytes.bytes + 8, (size_t)header_bytes, file->name, &file->header, error));
    const json_value *root = json_root(file->header);
    if (root->kind != JSON_OBJECT)
        return model_fail(error, KVF_CORRUPT, "%s: the header is %s, not an object", file->name,
                          json_kind_name(root));
    KVF_TRY(weights_reserve(weights, root->size, error));
    tensor_reader reader = {.file = file,
                            .data_start = 8 + header_bytes,
                            .data_bytes = file->bytes.size - 8 - header_bytes,
                            .error = error};
    for (const json_value *entry = json_first(root); entry; entry = json_next(root, entry)) {
        if (strcmp(entry->key, "__metadata__") == 0)
            continue;
        KVF_TRY(read_tensor(&reader, entry, &weights->entries[weights->count]));
        weights->count++;
    }
    return KVF_OK;
}

/* ---- all files ---- */

/* Room for so many files. */
static kvf_status reserve_files(kvf_weights *weights, size_t count, kvf_error *error)
{
    weights->files = model_alloc_zero(count, sizeof *weights->files);
    return weights->files
               ? KVF_OK
               : model_out_of_memory(error, count * sizeof *weights->files, "the weights");
}

static kvf_status add_file(kvf_weights *weights, const char *name, kvf_error *error)
{
    KVF_TRY(model_copy_text(name, strlen(name), "a name",
                            &weights->files[weights->files_count].name, error));
    weights->files_count++;
    return KVF_OK;
}

static kvf_status read_files(kvf_weights *weights, kvf_error *error)
{
    for (size_t i = 0; i < weights->files_count; i++)
        KVF_TRY(read_header(weights, &weights->files[i], error));
    return weights_finish(weights, error);
}

/* ---- shards ---- */

static kvf_status check_shard_name(const json_value *shard, const char *index_path,
                                   kvf_error *error)
{
    if (shard->kind != JSON_STRING || shard->size == 0 || strlen(shard->as.string) != shard->size)
        return model_fail(error, KVF_CORRUPT, "%s: weight_map: tensor %.120s has no file name",
                          index_path, shard->key);
    if (strchr(shard->as.string, '/') || strchr(shard->as.string, '\\') ||
        strcmp(shard->as.string, ".") == 0 || strcmp(shard->as.string, "..") == 0)
        return model_fail(
            error, KVF_CORRUPT,
            "%s: weight_map: tensor %.120s is in \"%.120s\", which leaves the model's "
            "directory; only plain file names are allowed",
            index_path, shard->key, shard->as.string);
    return KVF_OK;
}

static weight_file *find_shard(const kvf_weights *weights, const char *name)
{
    for (size_t i = 0; i < weights->files_count; i++)
        if (strcmp(model_base_name(weights->files[i].name), name) == 0)
            return &weights->files[i];
    return NULL;
}

/* The distinct shards, in the order of the index. */
static kvf_status list_shards(kvf_weights *weights, const char *directory, const json_value *map,
                              const char *index_path, kvf_error *error)
{
    char path[MODEL_PATH_BYTES];
    KVF_TRY(reserve_files(weights, map->size < FILES_MAX ? map->size : FILES_MAX, error));
    for (const json_value *shard = json_first(map); shard; shard = json_next(map, shard)) {
        KVF_TRY(check_shard_name(shard, index_path, error));
        if (find_shard(weights, shard->as.string))
            continue;
        if (weights->files_count == FILES_MAX)
            return model_fail(error, KVF_UNSUPPORTED, "%s names more than %u files", index_path,
                              FILES_MAX);
        KVF_TRY(add_file(weights, model_path(path, directory, shard->as.string), error));
    }
    return KVF_OK;
}

/* Every tensor of the map must be in the shard that the map says; shards may not hold others. */
static kvf_status check_map(const kvf_weights *weights, const json_value *map,
                            const char *index_path, kvf_error *error)
{
    for (const json_value *shard = json_first(map); shard; shard = json_next(map, shard)) {
        const weight_file *file = find_shard(weights, shard->as.string);
        const kvf_tensor *tensor =
            strlen(shard->key) == shard->key_size ? kvf_weights_get(weights, shard->key) : NULL;
        if (!tensor || (uintptr_t)tensor->data - (uintptr_t)file->bytes.bytes > file->bytes.size)
            return model_fail(error, KVF_CORRUPT,
                              "%s: tensor %.120s is not in %.120s, where weight_map says it is",
                              index_path, shard->key, shard->as.string);
    }
    if (weights->count != map->size)
        return model_fail(error, KVF_CORRUPT,
                          "%s: weight_map lists %u tensors, but the files hold %zu", index_path,
                          map->size, weights->count);
    return KVF_OK;
}

static kvf_status map_shard(weight_file *file, const char *index_path, kvf_error *error)
{
    const kvf_status status = model_map(file->name, &file->bytes, error);
    if (status != KVF_SYSTEM || !error)
        return status;
    const kvf_error cause = *error;
    model_fail(error, KVF_SYSTEM, "shard %.120s, named by %.120s: %.200s",
               model_base_name(file->name), index_path, cause.text);
    error->foreign = cause.foreign;
    return KVF_SYSTEM;
}

static kvf_status open_shards(kvf_weights *weights, const char *directory, const json_value *map,
                              const char *index_path, kvf_error *error)
{
    if (!map || map->kind != JSON_OBJECT || map->size == 0)
        return model_fail(error, KVF_CORRUPT, "%s: weight_map is %s, not an object with tensors",
                          index_path, json_kind_name(map));
    KVF_TRY(list_shards(weights, directory, map, index_path, error));
    for (size_t i = 0; i < weights->files_count; i++)
        KVF_TRY(map_shard(&weights->files[i], index_path, error));
    KVF_TRY(read_files(weights, error));
    return check_map(weights, map, index_path, error);
}

static kvf_status open_index(kvf_weights *weights, const char *directory, const char *path,
                             kvf_error *error)
{
    kvf_text text;
    json_document *index = NULL;
    KVF_TRY(model_read_file(path, INDEX_BYTES_MAX, &text, error));
    kvf_status status = json_parse(text.bytes, text.size, path, &index, error);
    kvf_text_free(&text);
    if (status == KVF_OK)
        status =
            open_shards(weights, directory, json_get(json_root(index), "weight_map"), path, error);
    json_free(index);
    return status;
}

static kvf_status open_single(kvf_weights *weights, const char *path, kvf_error *error)
{
    KVF_TRY(reserve_files(weights, 1, error));
    KVF_TRY(add_file(weights, path, error));
    KVF_TRY(model_map(path, &weights->files[0].bytes, error));
    return read_files(weights, error);
}

kvf_status safetensors_open(kvf_weights *weights, const char *directory, kvf_error *error)
{
    char path[MODEL_PATH_BYTES];
    if (model_has_file(model_path(path, directory, "model.safetensors")))
        return open_single(weights, path, error);
    if (model_has_file(model_path(path, directory, "model.safetensors.index.json")))
        return open_index(weights, directory, path, error);
    return model_fail(error, KVF_SYSTEM,
                      "%.300s holds neither model.safetensors nor model.safetensors.index.json; "
                      "convert the model to safetensors",
                      directory);
}

kvf_status safetensors_open_memory(kvf_weights *weights, const void *bytes, size_t size,
                                   kvf_error *error)
{
    KVF_TRY(reserve_files(weights, 1, error));
    KVF_TRY(add_file(weights, "safetensors in memory", error));
    weights->files[0].bytes = (model_mapping){.bytes = bytes, .size = size};
    return read_files(weights, error);
}
