/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Safetensors files: eight bytes of header length, a JSON header, then the tensors. See the header
 * for what is checked. Tensors of all files go into one array sorted by name; a second array sorted
 * by address, used while opening only, finds overlaps.
 */

#include "safetensors.h"

#include "json.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define HEADER_BYTES_MAX (100u << 20) /* the limit of the format's own specification */
#define INDEX_BYTES_MAX  (64u << 20)
#define FILES_MAX        4096u

typedef struct weight_file {
    const char *bytes;
    size_t size;
    bool mapped; /* else the caller's memory */
    char *name;  /* of the shard's path or of the image, for messages */
    json_document *header;
} weight_file;

struct kvf_weights {
    kvf_allocator allocator;
    weight_file *files;
    size_t files_count;
    kvf_tensor *tensors; /* sorted by name, names distinct */
    size_t count;
    size_t capacity;
    uint64_t bytes;
};

const char *kvf_weights_dtype_name(kvf_dtype dtype)
{
    return dtype == KVF_FP32 ? "F32" : dtype == KVF_FP16 ? "F16" : "BF16";
}

/* ---- one tensor entry ---- */

typedef struct tensor_reader {
    const weight_file *file;
    uint64_t data_start;
    uint64_t data_bytes;
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
    uint64_t bytes = kvf_dtype_bytes(tensor->dtype);
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
    tensor->data = reader->file->bytes + reader->data_start + begin;
    if ((uintptr_t)tensor->data % kvf_dtype_bytes(tensor->dtype) != 0)
        return model_fail(reader->error, KVF_UNSUPPORTED,
                          "%s: tensor %.120s starts at byte %" PRIu64
                          ", which is not a multiple of its element size; save the file again with "
                          "the safetensors library, which aligns tensors",
                          reader->file->name, entry->key, reader->data_start + begin);
    return KVF_OK;
}

static kvf_status read_tensor(const tensor_reader *reader, const json_value *entry,
                              kvf_tensor *tensor)
{
    if (entry->kind != JSON_OBJECT)
        return model_fail(reader->error, KVF_CORRUPT, "%s: tensor %.120s is %s, not an object",
                          reader->file->name, entry->key, json_kind_name(entry));
    if (strlen(entry->key) != entry->key_size)
        return model_fail(reader->error, KVF_CORRUPT,
                          "%s: tensor %.120s has a zero byte in its name", reader->file->name,
                          entry->key);
    *tensor = (kvf_tensor){.name = entry->key};
    KVF_TRY(read_dtype(reader, entry, &tensor->dtype));
    KVF_TRY(read_shape(reader, entry, tensor));
    return read_offsets(reader, entry, tensor);
}

/* ---- one file ---- */

static kvf_status grow_tensors(kvf_weights *weights, size_t more, kvf_error *error)
{
    size_t needed = weights->count + more;
    if (needed <= weights->capacity)
        return KVF_OK;
    /* Not zeroed: a header that lies must not cost memory that is never used. */
    kvf_tensor *grown = NULL;
    if (needed <= SIZE_MAX / sizeof *grown)
        grown = model_grow(&weights->allocator, weights->tensors, weights->count * sizeof *grown,
                           needed * sizeof *grown);
    if (!grown)
        return model_out_of_memory(error, needed * sizeof *grown, "the tensor table");
    weights->tensors = grown;
    weights->capacity = needed;
    return KVF_OK;
}

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
    if (file->size < 8)
        return model_fail(error, KVF_CORRUPT,
                          "%s has %zu bytes, too few for a safetensors header; download it again",
                          file->name, file->size);
    uint64_t header_bytes = read_u64_le(file->bytes);
    if (header_bytes > HEADER_BYTES_MAX || header_bytes > file->size - 8)
        return model_fail(error, KVF_CORRUPT,
                          "%s: a header of %" PRIu64
                          " bytes does not fit a file of %zu (limit %u); "
                          "this is not a safetensors file, or it is truncated",
                          file->name, header_bytes, file->size, HEADER_BYTES_MAX);
    KVF_TRY(json_parse(file->bytes + 8, (size_t)header_bytes, file->name, &weights->allocator,
                       &file->header, error));
    const json_value *root = json_root(file->header);
    if (root->kind != JSON_OBJECT)
        return model_fail(error, KVF_CORRUPT, "%s: the header is %s, not an object", file->name,
                          json_kind_name(root));
    KVF_TRY(grow_tensors(weights, root->size, error));
    tensor_reader reader = {.file = file,
                            .data_start = 8 + header_bytes,
                            .data_bytes = file->size - 8 - header_bytes,
                            .error = error};
    for (const json_value *entry = json_first(root); entry; entry = json_next(root, entry)) {
        if (strcmp(entry->key, "__metadata__") == 0)
            continue;
        KVF_TRY(read_tensor(&reader, entry, &weights->tensors[weights->count]));
        weights->bytes += weights->tensors[weights->count++].bytes;
    }
    return KVF_OK;
}

static kvf_status map_file(weight_file *file, kvf_error *error)
{
    const char *path = file->name;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return model_fail_errno(error, errno, "%s cannot be opened", path);
    struct stat info;
    kvf_status status = KVF_OK;
    if (fstat(fd, &info) != 0)
        status = model_fail_errno(error, errno, "%s cannot be examined", path);
    else if (!S_ISREG(info.st_mode) || info.st_size <= 0)
        status = model_fail(error, KVF_CORRUPT, "%s is not a regular file with contents", path);
    if (status == KVF_OK) {
        file->size = (size_t)info.st_size;
        void *bytes = mmap(NULL, file->size, PROT_READ, MAP_PRIVATE, fd, 0);
        if (bytes == MAP_FAILED) {
            status =
                model_fail_errno(error, errno, "%s (%zu bytes) cannot be mapped", path, file->size);
        } else {
            file->bytes = bytes;
            file->mapped = true;
        }
    }
    close(fd);
    return status;
}

/* ---- all files ---- */

static int compare_names(const void *a, const void *b)
{
    return strcmp(((const kvf_tensor *)a)->name, ((const kvf_tensor *)b)->name);
}

static int compare_addresses(const void *a, const void *b)
{
    const kvf_tensor *x = *(const kvf_tensor *const *)a;
    const kvf_tensor *y = *(const kvf_tensor *const *)b;
    if (x->data != y->data)
        return (uintptr_t)x->data < (uintptr_t)y->data ? -1 : 1;
    return (x->bytes > y->bytes) - (x->bytes < y->bytes);
}

static kvf_status check_overlaps(const kvf_weights *weights, kvf_error *error)
{
    const kvf_tensor **order = model_alloc_zero(&weights->allocator, weights->count, sizeof *order);
    if (!order)
        return model_out_of_memory(error, weights->count * sizeof *order, "the tensor table");
    for (size_t i = 0; i < weights->count; i++)
        order[i] = &weights->tensors[i];
    if (weights->count != 0)
        qsort(order, weights->count, sizeof *order, compare_addresses);
    kvf_status status = KVF_OK;
    for (size_t i = 1; i < weights->count && status == KVF_OK; i++) {
        const kvf_tensor *last = order[i - 1];
        if ((uintptr_t)order[i]->data - (uintptr_t)last->data < last->bytes)
            status = model_fail(error, KVF_CORRUPT, "tensors %.120s and %.120s overlap in the file",
                                last->name, order[i]->name);
    }
    model_free(&weights->allocator, order);
    return status;
}

/* Sort, and check what concerns more than one tensor. */
static kvf_status finish(kvf_weights *weights, kvf_error *error)
{
    if (weights->count != 0)
        qsort(weights->tensors, weights->count, sizeof *weights->tensors, compare_names);
    for (size_t i = 1; i < weights->count; i++)
        if (strcmp(weights->tensors[i - 1].name, weights->tensors[i].name) == 0)
            return model_fail(error, KVF_CORRUPT, "tensor %.120s is in more than one file",
                              weights->tensors[i].name);
    return check_overlaps(weights, error);
}

/* Room for so many files. */
static kvf_status reserve_files(kvf_weights *weights, size_t count, kvf_error *error)
{
    weights->files = model_alloc_zero(&weights->allocator, count, sizeof *weights->files);
    return weights->files
               ? KVF_OK
               : model_out_of_memory(error, count * sizeof *weights->files, "the weights");
}

static kvf_status add_file(kvf_weights *weights, const char *name, kvf_error *error)
{
    const size_t bytes = strlen(name) + 1;
    weight_file *file = &weights->files[weights->files_count];
    file->name = model_alloc(&weights->allocator, bytes);
    if (!file->name)
        return model_out_of_memory(error, bytes, "a name");
    memcpy(file->name, name, bytes);
    weights->files_count++;
    return KVF_OK;
}

static kvf_status read_files(kvf_weights *weights, kvf_error *error)
{
    for (size_t i = 0; i < weights->files_count; i++)
        KVF_TRY(read_header(weights, &weights->files[i], error));
    return finish(weights, error);
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

static const char *shard_name(const weight_file *file)
{
    return strrchr(file->name, '/') + 1;
}

static weight_file *find_shard(const kvf_weights *weights, const char *name)
{
    for (size_t i = 0; i < weights->files_count; i++)
        if (strcmp(shard_name(&weights->files[i]), name) == 0)
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
        if (!tensor || (uintptr_t)tensor->data - (uintptr_t)file->bytes > file->size)
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
    const kvf_status status = map_file(file, error);
    if (status != KVF_SYSTEM || !error)
        return status;
    const kvf_error cause = *error;
    model_fail(error, KVF_SYSTEM, "shard %.120s, named by %.120s: %.200s", shard_name(file),
               index_path, cause.text);
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
    const kvf_allocator *allocator = &weights->allocator;
    kvf_text text;
    json_document *index = NULL;
    KVF_TRY(model_read_file(allocator, path, INDEX_BYTES_MAX, &text, error));
    kvf_status status = json_parse(text.bytes, text.size, path, allocator, &index, error);
    kvf_text_free(allocator, &text);
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
    KVF_TRY(map_file(&weights->files[0], error));
    return read_files(weights, error);
}

static kvf_status open_directory(kvf_weights *weights, const char *directory, kvf_error *error)
{
    char path[MODEL_PATH_BYTES];
    if (access(model_path(path, directory, "model.safetensors"), F_OK) == 0)
        return open_single(weights, path, error);
    if (access(model_path(path, directory, "model.safetensors.index.json"), F_OK) == 0)
        return open_index(weights, directory, path, error);
    return model_fail(error, KVF_SYSTEM,
                      "%.300s holds neither model.safetensors nor model.safetensors.index.json; "
                      "convert the model to safetensors",
                      directory);
}

static kvf_status open_memory(kvf_weights *weights, const void *bytes, size_t size,
                              kvf_error *error)
{
    KVF_TRY(reserve_files(weights, 1, error));
    KVF_TRY(add_file(weights, "safetensors in memory", error));
    weights->files[0].bytes = bytes;
    weights->files[0].size = size;
    return read_files(weights, error);
}

/* ---- public ---- */

static kvf_status create(const kvf_allocator *allocator, kvf_weights **out, kvf_error *error)
{
    *out = model_alloc_zero(allocator, 1, sizeof **out);
    if (!*out)
        return model_out_of_memory(error, sizeof **out, "the weights");
    if (allocator)
        (*out)->allocator = *allocator;
    return KVF_OK;
}

/* Hands the weights out if all went well, else closes them. */
static kvf_status conclude(kvf_status status, kvf_weights **out)
{
    if (status != KVF_OK) {
        kvf_weights_close(*out);
        *out = NULL;
    }
    return status;
}

kvf_status kvf_weights_open(const char *directory, const kvf_allocator *allocator,
                            kvf_weights **out, kvf_error *error)
{
    KVF_TRY(create(allocator, out, error));
    return conclude(open_directory(*out, directory, error), out);
}

kvf_status kvf_weights_open_memory(const void *bytes, size_t size, const kvf_allocator *allocator,
                                   kvf_weights **out, kvf_error *error)
{
    KVF_TRY(create(allocator, out, error));
    return conclude(open_memory(*out, bytes, size, error), out);
}

void kvf_weights_close(kvf_weights *weights)
{
    if (!weights)
        return;
    kvf_allocator allocator = weights->allocator;
    for (size_t i = 0; i < weights->files_count; i++) {
        weight_file *file = &weights->files[i];
        json_free(file->header);
        if (file->mapped)
            munmap((void *)(uintptr_t)file->bytes, file->size);
        model_free(&allocator, file->name);
    }
    model_free(&allocator, weights->tensors);
    model_free(&allocator, weights->files);
    model_free(&allocator, weights);
}

size_t kvf_weights_count(const kvf_weights *weights)
{
    return weights->count;
}

uint64_t kvf_weights_bytes(const kvf_weights *weights)
{
    return weights->bytes;
}

const kvf_tensor *kvf_weights_at(const kvf_weights *weights, size_t index)
{
    return &weights->tensors[index];
}

const kvf_tensor *kvf_weights_get(const kvf_weights *weights, const char *name)
{
    if (weights->count == 0)
        return NULL;
    kvf_tensor key = {.name = name};
    return bsearch(&key, weights->tensors, weights->count, sizeof key, compare_names);
}

static void show_shape(uint32_t rank, const uint64_t *shape, char *buffer, size_t size)
{
    size_t used = 0;
    buffer[0] = '\0';
    for (uint32_t i = 0; i < rank && used < size; i++)
        used += (size_t)snprintf(buffer + used, size - used, "%s%" PRIu64, i != 0 ? ", " : "",
                                 shape[i]);
}

kvf_status kvf_weights_find(const kvf_weights *weights, const char *name, uint32_t rank,
                            const uint64_t *shape, const kvf_tensor **out, kvf_error *error)
{
    const kvf_tensor *tensor = kvf_weights_get(weights, name);
    if (!tensor)
        return model_fail(error, KVF_CORRUPT,
                          "tensor %.120s is missing; the weights do not belong to this config.json",
                          name);
    if (tensor->rank != rank || memcmp(tensor->shape, shape, rank * sizeof *shape) != 0) {
        char has[128];
        char needs[128];
        show_shape(tensor->rank, tensor->shape, has, sizeof has);
        show_shape(rank, shape, needs, sizeof needs);
        return model_fail(error, KVF_CORRUPT,
                          "tensor %.120s has shape [%s], but config.json needs [%s]", name, has,
                          needs);
    }
    *out = tensor;
    return KVF_OK;
}
