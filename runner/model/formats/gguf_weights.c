/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Tensors of a GGUF file as weights: names, order of rows, element type.
 *
 * It knows which tensors a model of the table in model_config.c has, and refuses all others: they
 * would change what the model computes. Invariant: the numbers of a loaded tensor do not depend on
 * the number of threads.
 *
 * Where the format turns neighbouring channels of a head (2i, 2i + 1), rows of query and key
 * weights lie in that order; Hugging Face, and the runner, turn halves (i, i + head_dim / 2).
 */

#include "gguf_parts.h"
#include "weights_parts.h"

#include <stdio.h>
#include <string.h>

#define PIECE_NUMBERS (128u * GGUF_BLOCK_MAX) /* widened at once, on the stack */

/* ---- names ---- */

typedef enum layer_rule {
    ALWAYS,
    IF_BIAS,
    IF_NORM,
} layer_rule;

typedef struct name_row {
    const char *gguf, *hf;
    layer_rule rule;
} name_row;

static const name_row in_layer[] = {
    {"attn_norm.weight", "input_layernorm.weight", ALWAYS},
    {"attn_q.weight", "self_attn.q_proj.weight", ALWAYS},
    {"attn_k.weight", "self_attn.k_proj.weight", ALWAYS},
    {"attn_v.weight", "self_attn.v_proj.weight", ALWAYS},
    {"attn_output.weight", "self_attn.o_proj.weight", ALWAYS},
    {"attn_q.bias", "self_attn.q_proj.bias", IF_BIAS},
    {"attn_k.bias", "self_attn.k_proj.bias", IF_BIAS},
    {"attn_v.bias", "self_attn.v_proj.bias", IF_BIAS},
    {"attn_q_norm.weight", "self_attn.q_norm.weight", IF_NORM},
    {"attn_k_norm.weight", "self_attn.k_norm.weight", IF_NORM},
    {"ffn_norm.weight", "post_attention_layernorm.weight", ALWAYS},
    {"ffn_gate.weight", "mlp.gate_proj.weight", ALWAYS},
    {"ffn_up.weight", "mlp.up_proj.weight", ALWAYS},
    {"ffn_down.weight", "mlp.down_proj.weight", ALWAYS},
};

static const name_row outside[] = {
    {"token_embd.weight", "model.embed_tokens.weight", ALWAYS},
    {"output_norm.weight", "model.norm.weight", ALWAYS},
    {"output.weight", "lm_head.weight", ALWAYS},
};

static bool rule_holds(layer_rule rule, const kvf_architecture *architecture)
{
    return rule == IF_BIAS ? architecture->qkv_bias : rule != IF_NORM || architecture->qk_norm;
}

static const name_row *find_row(const name_row *rows, size_t count, gguf_string name,
                                const kvf_architecture *architecture)
{
    for (size_t i = 0; i < count; i++)
        if (rule_holds(rows[i].rule, architecture) && gguf_string_is(name, rows[i].gguf))
            return &rows[i];
    return NULL;
}

/* "blk.<layer>.<rest>"; the rest, or an empty string if the name is another. */
static gguf_string rest_of_layer(gguf_string name, uint32_t *layer)
{
    static const char front[] = "blk.";
    size_t at = sizeof front - 1;
    *layer = 0;
    if (name.size <= at || memcmp(name.bytes, front, at) != 0)
        return (gguf_string){name.bytes, 0};
    const size_t digits = at;
    for (; at < name.size && name.bytes[at] >= '0' && name.bytes[at] <= '9' && at < digits + 6;
         at++)
        *layer = *layer * 10 + (uint32_t)(name.bytes[at] - '0');
    const bool is_number = at > digits && (at == digits + 1 || name.bytes[digits] != '0');
    if (!is_number || at >= name.size || name.bytes[at] != '.')
        return (gguf_string){name.bytes, 0};
    return (gguf_string){name.bytes + at + 1, name.size - at - 1};
}

/* Writes the Hugging Face name; false if the model has no such tensor. */
static bool translate(const gguf_model *model, gguf_string name, char out[WEIGHT_NAME_BYTES])
{
    uint32_t layer;
    const gguf_string rest = rest_of_layer(name, &layer);
    const bool is_inside = rest.size != 0 && layer < model->layers;
    const name_row *row =
        is_inside
            ? find_row(in_layer, sizeof in_layer / sizeof *in_layer, rest, model->architecture)
            : find_row(outside, sizeof outside / sizeof *outside, name, model->architecture);
    if (!row)
        return false;
    if (is_inside)
        snprintf(out, WEIGHT_NAME_BYTES, "model.layers.%u.%s", layer, row->hf);
    else
        snprintf(out, WEIGHT_NAME_BYTES, "%s", row->hf);
    return true;
}

/* ---- loading ---- */

/* Where row @p row of the result is in the file. */
static uint64_t source_row(const weight_entry *entry, uint64_t row)
{
    if (entry->turned_heads == 0)
        return row;
    const uint64_t size = entry->tensor.shape[0] / entry->turned_heads, half = size / 2;
    const uint64_t head = row / size, i = row % size;
    return head * size + 2 * (i % half) + i / half;
}

static void widen_row(const weight_entry *entry, const char *from, char *to)
{
    const gguf_type *type = entry->type;
    const uint64_t columns = entry->tensor.shape[entry->tensor.rank - 1];
    float piece[PIECE_NUMBERS];
    for (uint64_t done = 0; done < columns; done += PIECE_NUMBERS) {
        const uint64_t rest = columns - done;
        const size_t count = (size_t)(rest < PIECE_NUMBERS ? rest : PIECE_NUMBERS);
        type->widen(from + done / type->numbers * type->bytes, count / type->numbers, piece);
        for (size_t i = 0; i < count; i++)
            kvf_element_set(to, entry->tensor.dtype, done + i, piece[i]);
    }
}

static void fill(const weight_entry *entry, uint64_t first, uint64_t last, char *to)
{
    const kvf_tensor *tensor = &entry->tensor;
    uint64_t rows = 1;
    for (uint32_t i = 0; i + 1 < tensor->rank; i++)
        rows *= tensor->shape[i];
    const uint64_t from_bytes = entry->source_bytes / rows, to_bytes = tensor->bytes / rows;
    for (uint64_t row = first; row < last; row++) {
        const char *from = entry->source + source_row(entry, row) * from_bytes;
        widen_row(entry, from, to + row * to_bytes);
    }
}

/* ---- opening ---- */

/* Heads whose rows change places; 0 = none. */
static uint32_t turned_heads(const gguf_model *model, const char *name)
{
    if (!model->architecture->gguf_turns_neighbours)
        return 0;
    return weights_name_ends(name, ".q_proj.weight")   ? model->query_heads
           : weights_name_ends(name, ".k_proj.weight") ? model->kv_heads
                                                       : 0;
}

/* The type of a vector or of a matrix once it is loaded. */
static kvf_dtype loaded_dtype(const gguf_model *model, const gguf_tensor *from)
{
    const bool is_plain = from->type->numbers == 1;
    return gguf_keeps_type(from) && is_plain ? gguf_model_dtype(from->type) : model->dtype;
}

static kvf_status make_entry(const kvf_weights *weights, const gguf_model *model,
                             const gguf_tensor *from, const char *name, weight_entry *entry,
                             kvf_error *error)
{
    kvf_tensor *tensor = &entry->tensor;
    *entry = (weight_entry){.source = from->data, .source_bytes = from->bytes, .fill = fill};
    tensor->name = name;
    tensor->dtype = loaded_dtype(model, from);
    tensor->rank = from->rank;
    tensor->bytes = kvf_dtype_bytes(tensor->dtype);
    for (uint32_t i = 0; i < from->rank; i++) {
        tensor->shape[i] = from->shape[i];
        if (__builtin_mul_overflow(tensor->bytes, from->shape[i], &tensor->bytes))
            return model_fail(error, KVF_CORRUPT, "%.120s: tensor %s is too large",
                              gguf_name(weights->gguf), name);
    }
    entry->turned_heads = turned_heads(model, name);
    if (entry->turned_heads != 0 &&
        (from->rank != 2 || from->shape[0] % (2 * (uint64_t)entry->turned_heads) != 0))
        return model_fail(
            error, KVF_CORRUPT, "%.120s: %.*s has not as many rows as %u heads of an even size",
            gguf_name(weights->gguf), (int)from->name.size, from->name.bytes, entry->turned_heads);
    const bool is_there = from->type->numbers == 1 && gguf_model_dtype(from->type) == tensor->dtype;
    entry->type = from->type;
    entry->has_own = !is_there || entry->turned_heads != 0;
    if (!entry->has_own)
        tensor->data = from->data;
    return KVF_OK;
}

static kvf_status add_tensors(kvf_weights *weights, const gguf_model *model, kvf_error *error)
{
    for (size_t i = 0; i < gguf_tensor_count(weights->gguf); i++) {
        const gguf_tensor *from = gguf_tensor_at(weights->gguf, i);
        char *name = weights->names + weights->count * WEIGHT_NAME_BYTES;
        if (gguf_string_is(from->name, GGUF_ROPE_FACTORS))
            continue; /* part of the configuration */
        if (!translate(model, from->name, name))
            return model_fail(error, KVF_UNSUPPORTED,
                              "%.120s: tensor %.*s has no place in a %s model of %u layers; use "
                              "another model",
                              gguf_name(weights->gguf), (int)from->name.size, from->name.bytes,
                              model->architecture->gguf, model->layers);
        KVF_TRY(make_entry(weights, model, from, name, &weights->entries[weights->count], error));
        weights->count++;
    }
    return weights_finish(weights, error);
}

kvf_status gguf_weights_open(kvf_weights *weights, kvf_error *error)
{
    gguf_model model;
    const size_t count = gguf_tensor_count(weights->gguf);
    KVF_TRY(gguf_model_read(weights->gguf, &model, error));
    KVF_TRY(weights_reserve(weights, count, error));
    weights->names = model_alloc_zero(count, WEIGHT_NAME_BYTES);
    if (!weights->names)
        return model_out_of_memory(error, count * WEIGHT_NAME_BYTES, "names of tensors");
    return add_tensors(weights, &model, error);
}
