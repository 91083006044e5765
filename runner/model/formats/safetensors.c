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
    const char *name; /* of the tensor that is read */
    uint64_t data_start;
    uint64_t data_bytes;
    uint32_t element; /* bytes of one */
    kvf_error *error;
} tensor_reader;

static kvf_status read_dtype(const tensor_reader *reader, json_t *entry, kvf_dtype *out)
{
    char shown[96];
    json_t *dtype = json_object_get(entry, "dtype");
    if (json_is_text(dtype, "BF16"))
        *out = KVF_BF16;
    else if (json_is_text(dtype, "F16"))
        *out = KVF_FP16;
    else if (json_is_text(dtype, "F32"))
        *out = KVF_FP32;
    else
        return model_fail(
            reader->error, json_is_string(dtype) ? KVF_UNSUPPORTED : KVF_CORRUPT,
            "%s: tensor %.120s has dtype %s; BF16, F16 and F32 are supported, convert "
            "the model to one of them",
            reader->file->name, reader->name, json_show(dtype, shown, sizeof shown));
    return KVF_OK;
}

/* Fills rank, shape and bytes. */
static kvf_status read_shape(const tensor_reader *reader, json_t *entry, kvf_tensor *tensor)
{
    json_t *shape = json_object_get(entry, "shape");
    size_t axis;
    if (!json_is_array(shape) || json_array_size(shape) > KVF_TENSOR_RANK_MAX)
        return model_fail(reader->error, KVF_CORRUPT,
                          "%s: tensor %.120s: shape must be an array of at most %u sizes",
                          reader->file->name, reader->name, KVF_TENSOR_RANK_MAX);
    tensor->rank = (uint32_t)json_array_size(shape);
    uint64_t bytes = reader->element;
    json_t *size;
    json_array_foreach (shape, axis, size) {
        if (!json_is_whole(size, JSON_WHOLE_MAX, &tensor->shape[axis]))
            return model_fail(reader->error, KVF_CORRUPT,
                              "%s: tensor %.120s: shape[%zu] is not a whole number",
                              reader->file->name, reader->name, axis);
        if (__builtin_mul_overflow(bytes, tensor->shape[axis], &bytes))
            return model_fail(reader->error, KVF_CORRUPT,
                              "%s: tensor %.120s: the product of its shape does not fit 64 bits",
                              reader->file->name, reader->name);
    }
    tensor->bytes = bytes;
    return KVF_OK;
}

/* Fills data, after checking the offsets against the file and the shape. */
static kvf_status read_offsets(const tensor_reader *reader, json_t *entry, kvf_tensor *tensor)
{
    json_t *offsets = json_object_get(entry, "data_offsets");
    uint64_t begin, end;
    if (json_array_size(offsets) != 2 ||
        !json_is_whole(json_array_get(offsets, 0), JSON_WHOLE_MAX, &begin) ||
        !json_is_whole(json_array_get(offsets, 1), JSON_WHOLE_MAX, &end))
        return model_fail(reader->error, KVF_CORRUPT,
                          "%s: tensor %.120s: data_offsets must be two whole numbers",
                          reader->file->name, reader->name);
    if (begin > end || end > reader->data_bytes)
        return model_fail(reader->error, KVF_CORRUPT,
                          "%s: tensor %.120s: data_offsets [%" PRIu64 ", %" PRIu64
                          "] leave the file, which has %" PRIu64
                          " bytes of data; it may be truncated, download it again",
                          reader->file->name, reader->name, begin, end, reader->data_bytes);
    if (end - begin != tensor->bytes)
        return model_fail(reader->error, KVF_CORRUPT,
                          "%s: tensor %.120s: data_offsets span %" PRIu64
                          " bytes, but its shape and dtype need %" PRIu64,
                          reader->file->name, reader->name, end - begin, tensor->bytes);
    tensor->data = reader->file->bytes.bytes + reader->data_start + begin;
    if ((uintptr_t)tensor->data % reader->element != 0)
        return model_fail(reader->error, KVF_UNSUPPORTED,
                          "%s: tensor %.120s starts at byte %" PRIu64
                          ", which is not a multiple of its element size; save the file again with "
                          "the safetensors library, which aligns tensors",
                          reader->file->name, reader->name, reader->data_start + begin);
    return KVF_OK;
}

static kvf_status read_tensor(tensor_reader *reader, json_t *entry, weight_entry *out)
{
    kvf_tensor *tensor = &out->tensor;
    if (!json_is_object(entry))
        return model_fail(reader->error, KVF_CORRUPT, "%s: tensor %.120s is %s, not an object",
                          reader->file->name, reader->name, json_kind_name(entry));
    *out = (weight_entry){.tensor.name = reader->name};
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
    json_t *root = file->header;
    if (!json_is_object(root))
        return model_fail(error, KVF_CORRUPT, "%s: the header is %s, not an object", file->name,
                          json_kind_name(root));
    KVF_TRY(weights_reserve(weights, json_object_size(root), error));
    tensor_reader reader = {.file = file,
                            .data_start = 8 + header_bytes,
                            .data_bytes = file->bytes.size - 8 - header_bytes,
                            .error = error};
    json_t *entry;
    size_t size;
    json_object_keylen_foreach (root, reader.name, size, entry) {
        if (strcmp(reader.name, "__metadata__") == 0)
            continue;
        if (strlen(reader.name) != size)
            return model_fail(error, KVF_CORRUPT, "%s: tensor %.120s has a zero byte in its name",
                              file->name, reader.name);
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

static kvf_status check_shard_name(const char *tensor, const char *shard, const char *index_path,
                                   kvf_error *error)
{
    if (!shard || !shard[0])
        return model_fail(error, KVF_CORRUPT, "%s: weight_map: tensor %.120s has no file name",
                          index_path, tensor);
    if (strchr(shard, '/') || strchr(shard, '\\') || strcmp(shard, ".") == 0 ||
        strcmp(shard, "..") == 0)
        return model_fail(
            error, KVF_CORRUPT,
            "%s: weight_map: tensor %.120s is in \"%.120s\", which leaves the model's "
            "directory; only plain file names are allowed",
            index_path, tensor, shard);
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
static kvf_status list_shards(kvf_weights *weights, const char *directory, json_t *map,
                              const char *index_path, kvf_error *error)
{
    char path[MODEL_PATH_BYTES];
    const size_t tensors = json_object_size(map);
    const char *tensor;
    json_t *file;
    KVF_TRY(reserve_files(weights, tensors < FILES_MAX ? tensors : FILES_MAX, error));
    json_object_foreach (map, tensor, file) {
        const char *shard = json_plain_text(file);
        KVF_TRY(check_shard_name(tensor, shard, index_path, error));
        if (find_shard(weights, shard))
            continue;
        if (weights->files_count == FILES_MAX)
            return model_fail(error, KVF_UNSUPPORTED, "%s names more than %u files", index_path,
                              FILES_MAX);
        KVF_TRY(add_file(weights, model_path(path, directory, shard), error));
    }
    return KVF_OK;
}

/* Every tensor of the map must be in the shard that the map says; shards may not hold others. */
static kvf_status check_map(const kvf_weights *weights, json_t *map, const char *index_path,
                            kvf_error *error)
{
    const char *name;
    size_t size;
    json_t *shard;
    json_object_keylen_foreach (map, name, size, shard) {
        const weight_file *file = find_shard(weights, json_string_value(shard));
        const kvf_tensor *tensor = strlen(name) == size ? kvf_weights_get(weights, name) : NULL;
        if (!tensor || (uintptr_t)tensor->data - (uintptr_t)file->bytes.bytes > file->bytes.size)
            return model_fail(error, KVF_CORRUPT,
                              "%s: tensor %.120s is not in %.120s, where weight_map places it",
                              index_path, name, json_string_value(shard));
    }
    if (weights->count != json_object_size(map))
        return model_fail(error, KVF_CORRUPT,
                          "%s: weight_map lists %zu tensors, but the files hold %zu", index_path,
                          json_object_size(map), weights->count);
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

static kvf_status open_shards(kvf_weights *weights, const char *directory, json_t *map,
                              const char *index_path, kvf_error *error)
{
    if (json_object_size(map) == 0)
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
    json_t *index = NULL;
    KVF_TRY(model_read_file(path, INDEX_BYTES_MAX, &text, error));
    kvf_status status = json_parse(text.bytes, text.size, path, &index, error);
    kvf_text_free(&text);
    if (status == KVF_OK)
        status = open_shards(weights, directory, json_object_get(index, "weight_map"), path, error);
    json_decref(index);
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
