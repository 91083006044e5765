/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The table of a model's tensors: found by name, checked against each other, loaded.
 *
 * It knows no format. Tensors of all files are in one array sorted by name; a second array sorted
 * by address, used while opening only, finds overlaps. Invariant: as in the header.
 */

#include "weights_parts.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define THREADS_MAX 64u

/* ---- for the readers ---- */

kvf_status weights_reserve(kvf_weights *weights, size_t more, kvf_error *error)
{
    size_t needed = weights->count + more;
    if (needed <= weights->capacity)
        return KVF_OK;
    /* Not zeroed: a header that lies must not cost memory that is never used. */
    weight_entry *grown = NULL;
    if (needed <= SIZE_MAX / sizeof *grown)
        grown =
            model_grow(weights->entries, weights->count * sizeof *grown, needed * sizeof *grown);
    if (!grown)
        return model_out_of_memory(error, needed * sizeof *grown, "the tensor table");
    weights->entries = grown;
    weights->capacity = needed;
    return KVF_OK;
}

static int compare_names(const void *a, const void *b)
{
    return strcmp(((const weight_entry *)a)->tensor.name, ((const weight_entry *)b)->tensor.name);
}

static int compare_sources(const void *a, const void *b)
{
    const weight_entry *x = *(const weight_entry *const *)a;
    const weight_entry *y = *(const weight_entry *const *)b;
    if (x->source != y->source)
        return (uintptr_t)x->source < (uintptr_t)y->source ? -1 : 1;
    return (x->source_bytes > y->source_bytes) - (x->source_bytes < y->source_bytes);
}

static kvf_status check_overlaps(const kvf_weights *weights, kvf_error *error)
{
    const weight_entry **order = model_alloc_zero(weights->count, sizeof *order);
    if (!order)
        return model_out_of_memory(error, weights->count * sizeof *order, "the tensor table");
    for (size_t i = 0; i < weights->count; i++)
        order[i] = &weights->entries[i];
    if (weights->count != 0)
        qsort(order, weights->count, sizeof *order, compare_sources);
    kvf_status status = KVF_OK;
    for (size_t i = 1; i < weights->count && status == KVF_OK; i++) {
        const weight_entry *last = order[i - 1];
        if ((uintptr_t)order[i]->source - (uintptr_t)last->source < last->source_bytes)
            status = model_fail(error, KVF_CORRUPT, "tensors %.120s and %.120s overlap in the file",
                                last->tensor.name, order[i]->tensor.name);
    }
    model_free(order);
    return status;
}

static kvf_status sort(kvf_weights *weights, kvf_error *error)
{
    weights->bytes = 0;
    if (weights->count != 0)
        qsort(weights->entries, weights->count, sizeof *weights->entries, compare_names);
    for (size_t i = 0; i < weights->count; i++) {
        const char *name = weights->entries[i].tensor.name;
        weights->bytes += weights->entries[i].tensor.bytes;
        if (i > 0 && strcmp(weights->entries[i - 1].tensor.name, name) == 0)
            return model_fail(error, KVF_CORRUPT, "tensor %.120s is in more than one file", name);
    }
    return KVF_OK;
}

kvf_status weights_finish(kvf_weights *weights, kvf_error *error)
{
    KVF_TRY(sort(weights, error));
    return check_overlaps(weights, error);
}

/* ---- loading ---- */

typedef struct load_task {
    const weight_entry *entry;
    char *to;
    uint64_t first, last; /* rows of this task */
} load_task;

static void *load_rows(void *argument)
{
    const load_task *task = argument;
    task->entry->fill(task->entry, task->first, task->last, task->to);
    return NULL;
}

/* All rows, shared among threads; those that cannot be started are done here. */
static void load_all(const weight_entry *entry, uint64_t rows, char *to, uint32_t threads)
{
    pthread_t ids[THREADS_MAX];
    load_task tasks[THREADS_MAX];
    uint32_t started = 0, count = threads < THREADS_MAX ? threads : THREADS_MAX;
    if (count > rows)
        count = (uint32_t)rows;
    for (uint32_t i = 0; i < count; i++)
        tasks[i] = (load_task){entry, to, rows * i / count, rows * (i + 1) / count};
    while (started + 1 < count &&
           pthread_create(&ids[started], NULL, load_rows, &tasks[started]) == 0)
        started++;
    for (uint32_t i = started; i < count; i++)
        load_rows(&tasks[i]);
    for (uint32_t i = 0; i < started; i++)
        pthread_join(ids[i], NULL);
}

static kvf_status load(weight_entry *entry, uint32_t threads, kvf_error *error)
{
    kvf_tensor *tensor = &entry->tensor;
    uint64_t rows = 1;
    for (uint32_t i = 0; i + 1 < tensor->rank; i++)
        rows *= tensor->shape[i];
    char *to = model_alloc((size_t)tensor->bytes);
    if (!to)
        return model_out_of_memory(error, (size_t)tensor->bytes, tensor->name);
    load_all(entry, rows, to, threads > 0 ? threads : 1);
    tensor->data = to;
    return KVF_OK;
}

/* ---- public ---- */

static kvf_status create(kvf_weights **out, kvf_error *error)
{
    *out = model_alloc_zero(1, sizeof **out);
    if (!*out)
        return model_out_of_memory(error, sizeof **out, "the weights");
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

static kvf_status open_files(kvf_weights *weights, const char *model, kvf_error *error)
{
    if (!gguf_is_file(model))
        return safetensors_open(weights, model, error);
    KVF_TRY(gguf_open(model, &weights->gguf, error));
    return gguf_weights_open(weights, error);
}

static kvf_status open_image(kvf_weights *weights, const void *bytes, size_t size, kvf_error *error)
{
    if (!gguf_is_image(bytes, size))
        return safetensors_open_memory(weights, bytes, size, error);
    KVF_TRY(gguf_open_memory(bytes, size, &weights->gguf, error));
    return gguf_weights_open(weights, error);
}

kvf_status kvf_weights_open(const char *model, kvf_weights **out, kvf_error *error)
{
    KVF_TRY(create(out, error));
    return conclude(open_files(*out, model, error), out);
}

kvf_status kvf_weights_open_memory(const void *bytes, size_t size, kvf_weights **out,
                                   kvf_error *error)
{
    KVF_TRY(create(out, error));
    return conclude(open_image(*out, bytes, size, error), out);
}

/* Every tensor that is handed out is the first member of an entry. */
static weight_entry *entry_of(const kvf_tensor *tensor)
{
    return (weight_entry *)(uintptr_t)tensor;
}

kvf_status kvf_weights_load(const kvf_tensor *tensor, uint32_t threads, kvf_error *error)
{
    return tensor->data ? KVF_OK : load(entry_of(tensor), threads, error);
}

const void *kvf_weights_source(const kvf_tensor *tensor, uint64_t *bytes)
{
    *bytes = entry_of(tensor)->source_bytes;
    return entry_of(tensor)->source;
}

void kvf_weights_close(kvf_weights *weights)
{
    if (!weights)
        return;
    for (size_t i = 0; i < weights->count; i++)
        if (weights->entries[i].has_own)
            model_free((void *)(uintptr_t)weights->entries[i].tensor.data);
    for (size_t i = 0; i < weights->files_count; i++) {
        json_decref(weights->files[i].header);
        model_unmap(&weights->files[i].bytes);
        model_free(weights->files[i].name);
    }
    gguf_close(weights->gguf);
    model_free(weights->names);
    model_free(weights->entries);
    model_free(weights->files);
    model_free(weights);
}

size_t kvf_weights_count(const kvf_weights *weights)
{
    return weights->count;
}

uint64_t kvf_weights_bytes(const kvf_weights *weights)
{
    return weights->bytes;
}

uint64_t kvf_weights_own_bytes(const kvf_weights *weights)
{
    uint64_t bytes = 0;
    for (size_t i = 0; i < weights->count; i++)
        if (weights->entries[i].has_own)
            bytes += weights->entries[i].tensor.bytes;
    return bytes;
}

const kvf_tensor *kvf_weights_at(const kvf_weights *weights, size_t index)
{
    return &weights->entries[index].tensor;
}

const kvf_tensor *kvf_weights_get(const kvf_weights *weights, const char *name)
{
    if (weights->count == 0)
        return NULL;
    const weight_entry key = {.tensor = {.name = name}};
    const weight_entry *found =
        bsearch(&key, weights->entries, weights->count, sizeof key, compare_names);
    return found ? &found->tensor : NULL;
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
