/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_MODEL_WEIGHTS_PARTS_H
#define KVF_MODEL_WEIGHTS_PARTS_H

/*
 * The parts of weights, for the readers that fill them: safetensors.c and gguf_weights.c. Clients
 * see weights.h only.
 *
 * Invariant: once open, entries are sorted by name, names are distinct, and no two sources overlap.
 */

#include "gguf.h"
#include "json.h"
#include "weights.h"

#include <string.h>

#define WEIGHT_NAME_BYTES 80u /* of the longest name that is made here, and zero */

/* A file of a directory. */
typedef struct weight_file {
    model_mapping bytes;
    char *name;     /* of the shard's path or of the image, for messages */
    json_t *header; /* owns the names of its tensors */
} weight_file;

typedef struct weight_entry weight_entry;

/* A tensor and where its numbers come from. */
struct weight_entry {
    kvf_tensor tensor;     /* its data are the source, or, if it has its own, NULL until loaded */
    const char *source;    /* in its file */
    uint64_t source_bytes; /* = tensor.bytes unless it is widened */
    const gguf_type *type; /* of the source; NULL in a directory */
    uint32_t turned_heads; /* rows of so many heads change places; 0 = they stay */
    bool has_own;          /* its data are memory of its own: widened, or in another order */
    /* Fill rows `first` to `last` - 1 of memory of its own, [product of all sizes but the last]. */
    void (*fill)(const weight_entry *entry, uint64_t first, uint64_t last, char *to);
};

struct kvf_weights {
    weight_file *files;
    size_t files_count;
    gguf *gguf;  /* the files, if they are of that kind */
    char *names; /* WEIGHT_NAME_BYTES each, of tensors that have others in their file */
    weight_entry *entries;
    size_t count;
    size_t capacity;
    uint64_t bytes;
};

/** Whether a name is longer than @p end and ends with it. */
static inline bool weights_name_ends(const char *name, const char *end)
{
    const size_t size = strlen(name), tail = strlen(end);
    return size > tail && strcmp(name + size - tail, end) == 0;
}

/** Room for @p more entries after the others. */
KVF_CHECKED kvf_status weights_reserve(kvf_weights *weights, size_t more, kvf_error *error);

/** After the last entry: sort, and check what concerns more than one tensor. */
KVF_CHECKED kvf_status weights_finish(kvf_weights *weights, kvf_error *error);

/* Each fills empty weights; after a failure kvf_weights_close frees the rest. */
KVF_CHECKED kvf_status safetensors_open(kvf_weights *weights, const char *directory,
                                        kvf_error *error);
KVF_CHECKED kvf_status safetensors_open_memory(kvf_weights *weights, const void *bytes, size_t size,
                                               kvf_error *error);
/** From the tensors of weights->gguf. */
KVF_CHECKED kvf_status gguf_weights_open(kvf_weights *weights, kvf_error *error);

#endif
