/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Experts of gpt-oss, as a directory has them, as the tensors that a GGUF file has: one for each
 * role, rows of outputs.
 *
 * A directory joins gate and up, whose outputs take turns. Plain numbers are there by inputs:
 * gate_up_proj [experts, inputs, 2 outputs], down_proj [experts, inputs, outputs]. In MXFP4 they
 * are rows of outputs in two tensors of U8: blocks [experts, outputs, inputs / 32, 16], whose byte
 * i has numbers 2i and 2i + 1, and scales [experts, outputs, inputs / 32]. The tensors that are
 * made of them have memory of their own, in the order in which they are multiplied.
 *
 * It knows names and shapes, no configuration: a layer has such experts where it has a
 * gate_up_proj_bias. Invariant: numbers are those of the directory.
 */

#include "weights_parts.h"

#include <stdio.h>

#define BLOCK_BYTES 16u /* of nibbles */
#define TILE        16u /* rows at once, so that lines of the source are read once */

typedef enum joined_kind {
    TURNED, /* inputs by outputs */
    BLOCKS, /* beside scales, */
    SCALES, /* which are part of them */
    BIASES,
} joined_kind;

static const struct joined_role {
    const char *name;
    joined_kind kind;
    uint32_t count;
    const char *parts[2]; /* [count] */
} roles[] = {
    {"gate_up_proj", TURNED, 2, {"gate_proj.weight", "up_proj.weight"}},
    {"gate_up_proj_blocks", BLOCKS, 2, {"gate_proj.weight", "up_proj.weight"}},
    {"gate_up_proj_scales", SCALES, 0, {NULL}},
    {"gate_up_proj_bias", BIASES, 2, {"gate_proj.bias", "up_proj.bias"}},
    {"down_proj", TURNED, 1, {"down_proj.weight"}},
    {"down_proj_blocks", BLOCKS, 1, {"down_proj.weight"}},
    {"down_proj_scales", SCALES, 0, {NULL}},
    {"down_proj_bias", BIASES, 1, {"down_proj.bias"}},
};

/* ---- names ---- */

static const char *join(char out[WEIGHT_NAME_BYTES], const char *name, size_t front,
                        const char *rest)
{
    snprintf(out, WEIGHT_NAME_BYTES, "%.*s%s", (int)front, name, rest);
    return out;
}

/* @p front receives the bytes in front of the role. NULL = it is no part of joined experts. */
static const struct joined_role *find_role(const kvf_weights *weights, const char *name,
                                           size_t *front)
{
    static const char experts[] = ".mlp.experts.";
    char other[WEIGHT_NAME_BYTES];
    const char *at = strstr(name, experts);
    if (!at)
        return NULL;
    *front = (size_t)(at - name) + sizeof experts - 1;
    for (size_t i = 0; i < sizeof roles / sizeof *roles; i++)
        if (strcmp(name + *front, roles[i].name) == 0)
            return *front + sizeof "gate_up_proj_blocks" <= WEIGHT_NAME_BYTES &&
                           kvf_weights_get(weights, join(other, name, *front, "gate_up_proj_bias"))
                       ? &roles[i]
                       : NULL;
    return NULL;
}

/* ---- memory of their own ---- */

/* @p count rows of @p inputs numbers, which are columns @p step apart. */
#define DEFINE_TURN(element)                                                                       \
    static void turn_##element(const element *from, uint64_t stride, uint64_t step,                \
                               uint64_t inputs, uint64_t count, element *to)                       \
    {                                                                                              \
        for (uint64_t i = 0; i < inputs; i++, from += stride)                                      \
            for (uint64_t row = 0; row < count; row++)                                             \
                to[row * inputs + i] = from[row * step];                                           \
    }

DEFINE_TURN(uint16_t)
DEFINE_TURN(uint32_t)

static void fill_turned(const weight_entry *entry, uint64_t first, uint64_t last, char *to)
{
    const uint64_t outputs = entry->tensor.shape[1], inputs = entry->tensor.shape[2];
    const uint64_t step = entry->parts, stride = step * outputs;
    const size_t element = kvf_dtype_bytes(entry->tensor.dtype);
    for (uint64_t row = first, count; row < last; row += count) {
        const uint64_t output = row % outputs;
        const void *from = entry->source +
                           ((row - output) * step * inputs + output * step + entry->part) * element;
        void *rows = to + row * inputs * element;
        count = last - row < TILE ? last - row : TILE;
        if (count > outputs - output)
            count = outputs - output;
        if (element == sizeof(uint16_t))
            turn_uint16_t(from, stride, step, inputs, count, rows);
        else
            turn_uint32_t(from, stride, step, inputs, count, rows);
    }
}

static void fill_biases(const weight_entry *entry, uint64_t first, uint64_t last, char *to)
{
    const size_t element = kvf_dtype_bytes(entry->tensor.dtype);
    const uint64_t outputs = entry->tensor.shape[1];
    for (uint64_t i = first * outputs; i < last * outputs; i++)
        memcpy(to + i * element, entry->source + (i * entry->parts + entry->part) * element,
               element);
}

/* Nibbles of a GGUF file's block: numbers 0 to 15 in the low halves, 16 to 31 in the high ones. */
static void fill_block(const char *from, char scale, char *to)
{
    *to++ = scale;
    for (uint32_t i = 0; i < BLOCK_BYTES / 2; i++) {
        const unsigned a = (unsigned char)from[i], b = (unsigned char)from[i + BLOCK_BYTES / 2];
        *to++ = (char)((a & 15u) | (b & 15u) << 4);
        *to++ = (char)(a >> 4 | (b & 0xf0u));
    }
}

static void fill_blocks(const weight_entry *entry, uint64_t first, uint64_t last, char *to)
{
    const gguf_type *type = entry->type;
    const uint64_t outputs = entry->tensor.shape[1];
    const uint64_t blocks = entry->tensor.shape[2] / type->numbers;
    for (uint64_t row = first; row < last; row++) {
        const uint64_t from =
            ((row - row % outputs) * entry->parts + row % outputs * entry->parts + entry->part) *
            blocks;
        for (uint64_t i = 0; i < blocks; i++)
            fill_block(entry->source + (from + i) * BLOCK_BYTES, entry->scales[from + i],
                       to + (row * blocks + i) * type->bytes);
    }
}

/* ---- entries ---- */

static bool has_shape(const kvf_tensor *tensor, const struct joined_role *role)
{
    static const uint32_t ranks[] = {[TURNED] = 3, [BLOCKS] = 4, [SCALES] = 3, [BIASES] = 2};
    if (tensor->rank != ranks[role->kind])
        return false;
    for (uint32_t i = 0; i < tensor->rank; i++)
        if (tensor->shape[i] == 0)
            return false;
    const uint32_t outputs = role->kind == TURNED ? 2 : 1;
    return role->count == 0 || tensor->shape[outputs] % role->count == 0;
}

/* The scales of blocks; NULL if they do not go together. */
static const char *scales_of(const kvf_weights *weights, const weight_entry *from, size_t front,
                             const struct joined_role *role)
{
    char name[WEIGHT_NAME_BYTES];
    const kvf_tensor *blocks = &from->tensor;
    const kvf_tensor *scales = kvf_weights_get(
        weights, join(name, blocks->name, front,
                      role->count == 2 ? "gate_up_proj_scales" : "down_proj_scales"));
    return from->is_bytes && scales && ((const weight_entry *)(const void *)scales)->is_bytes &&
                   blocks->shape[3] == BLOCK_BYTES && scales->rank == 3 &&
                   memcmp(blocks->shape, scales->shape, 3 * sizeof *scales->shape) == 0
               ? scales->data
               : NULL;
}

/* Part @p part of a tensor whose shape is right. */
static weight_entry part_of(const weight_entry *from, const struct joined_role *role, uint32_t part)
{
    const uint64_t *shape = from->tensor.shape;
    weight_entry to = *from;
    to.parts = role->count;
    to.part = part;
    to.has_own = true;
    to.tensor.data = NULL;
    to.tensor.bytes = from->tensor.bytes / role->count;
    if (role->kind == TURNED) {
        to.fill = fill_turned;
        to.tensor.shape[1] = shape[2] / role->count;
        to.tensor.shape[2] = shape[1];
    } else if (role->kind == BLOCKS) {
        to.fill = fill_blocks;
        to.is_bytes = false;
        to.type = to.tensor.blocks = gguf_type_find(GGUF_MXFP4_ID);
        to.tensor.rank = 3;
        to.tensor.dtype = KVF_BF16;
        to.tensor.shape[1] = shape[1] / role->count;
        to.tensor.shape[2] = shape[2] * to.type->numbers;
        to.tensor.bytes = to.tensor.bytes / BLOCK_BYTES * to.type->bytes;
    } else {
        to.fill = fill_biases;
        to.tensor.shape[1] = shape[1] / role->count;
    }
    to.source_bytes = to.tensor.bytes;
    return to;
}

static kvf_status add_parts(kvf_weights *to, const kvf_weights *weights, const weight_entry *from,
                            const struct joined_role *role, size_t front, kvf_error *error)
{
    const char *scales = NULL;
    bool fits = has_shape(&from->tensor, role);
    if (fits && role->kind == BLOCKS)
        fits = (scales = scales_of(weights, from, front, role)) != NULL;
    if (!fits)
        return model_fail(error, KVF_CORRUPT,
                          "tensor %.120s has a type or shape that experts of gpt-oss do not have, "
                          "or no scales of "
                          "its shape; it may be damaged, download it again",
                          from->tensor.name);
    for (uint32_t i = 0; i < role->count; i++) {
        char *name = to->names + to->count * WEIGHT_NAME_BYTES;
        weight_entry *entry = &to->entries[to->count++];
        *entry = part_of(from, role, i);
        entry->scales = scales;
        entry->tensor.name = join(name, from->tensor.name, front, role->parts[i]);
    }
    return KVF_OK;
}

/* All tensors to @p to, which has room for them; those of experts in their parts. */
static kvf_status split(kvf_weights *to, const kvf_weights *weights, kvf_error *error)
{
    for (size_t i = 0; i < weights->count; i++) {
        const weight_entry *from = &weights->entries[i];
        size_t front;
        const struct joined_role *role = find_role(weights, from->tensor.name, &front);
        if (role)
            KVF_TRY(add_parts(to, weights, from, role, front, error));
        else if (from->is_bytes)
            return model_fail(error, KVF_UNSUPPORTED,
                              "tensor %.120s has dtype \"U8\", which is supported in experts of "
                              "gpt-oss only; take the model in BF16, F16 or F32",
                              from->tensor.name);
        else
            to->entries[to->count++] = *from;
    }
    return KVF_OK;
}

kvf_status joined_experts_split(kvf_weights *weights, kvf_error *error)
{
    size_t found = 0, front;
    for (size_t i = 0; i < weights->count; i++)
        found += weights->entries[i].is_bytes ||
                 find_role(weights, weights->entries[i].tensor.name, &front);
    if (found == 0)
        return KVF_OK;
    const size_t room = weights->count + found;
    kvf_weights to = *weights;
    to.count = 0;
    to.names = model_alloc_zero(room, WEIGHT_NAME_BYTES);
    to.entries = model_alloc_zero(room, sizeof *to.entries);
    kvf_status status =
        to.names && to.entries
            ? split(&to, weights, error)
            : model_out_of_memory(error, room * sizeof *to.entries, "the tensor table");
    model_free(status == KVF_OK ? weights->entries : to.entries);
    if (status != KVF_OK) {
        model_free(to.names);
        return status;
    }
    to.capacity = room;
    *weights = to;
    return weights_sort(weights, error);
}
