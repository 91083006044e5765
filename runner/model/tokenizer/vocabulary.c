/* SPDX-License-Identifier: Apache-2.0 */

/* See the header. Spellings lie in one blob, zero-terminated, in the order of the file. */

#include "bpe.h"

#include <string.h>

uint32_t vocabulary_find(const token_vocabulary *self, const char *text, size_t size)
{
    if (self->slots == 0 || size > self->longest)
        return VOCABULARY_NONE;
    size_t slot = model_hash(text, size) & (self->slots - 1);
    for (; self->table[slot] != VOCABULARY_NONE; slot = (slot + 1) & (self->slots - 1)) {
        const vocabulary_token *token = &self->tokens[self->table[slot]];
        if (token->size == size && memcmp(token->text, text, size) == 0)
            return self->table[slot];
    }
    return VOCABULARY_NONE;
}

/* Check the ids; count tokens, bytes and the largest id. */
static kvf_status measure(token_vocabulary *self, json_t *object, size_t *blob_bytes,
                          kvf_error *error)
{
    const size_t limit = json_object_size(object) + VOCABULARY_GAP_MAX;
    const char *key;
    size_t size;
    json_t *entry;
    uint64_t id;
    *blob_bytes = 0;
    json_object_keylen_foreach (object, key, size, entry) {
        if (!json_is_whole(entry, limit - 1, &id))
            return model_fail(error, KVF_CORRUPT,
                              "tokenizer.json: model.vocab: token \"%.80s\" needs an id below %zu",
                              key, limit);
        if (id >= self->size)
            self->size = (uint32_t)id + 1;
        if (size > self->longest)
            self->longest = (uint32_t)size;
        *blob_bytes += size + 1;
    }
    self->count = (uint32_t)json_object_size(object);
    return KVF_OK;
}

static kvf_status fill(token_vocabulary *self, json_t *object, kvf_error *error)
{
    char *out = self->blob;
    const char *key;
    size_t size;
    json_t *entry;
    memset(self->table, 0xff, self->slots * sizeof *self->table);
    json_object_keylen_foreach (object, key, size, entry) {
        const uint32_t id = (uint32_t)json_number_value(entry);
        vocabulary_token *token = &self->tokens[id];
        if (token->text)
            return model_fail(
                error, KVF_CORRUPT,
                "tokenizer.json: model.vocab: \"%.80s\" and \"%.80s\" both have id %u", token->text,
                key, id);
        memcpy(out, key, size + 1);
        *token = (vocabulary_token){.text = out, .size = (uint32_t)size};
        out += size + 1;
        size_t slot = model_hash(token->text, token->size) & (self->slots - 1);
        while (self->table[slot] != VOCABULARY_NONE)
            slot = (slot + 1) & (self->slots - 1);
        self->table[slot] = id;
    }
    return KVF_OK;
}

kvf_status vocabulary_create(token_vocabulary *self, json_t *object, kvf_error *error)
{
    *self = (token_vocabulary){0};
    if (!json_is_object(object))
        return model_fail(error, KVF_CORRUPT, "tokenizer.json: model.vocab is %s, not an object",
                          json_kind_name(object));
    size_t blob_bytes;
    KVF_TRY(measure(self, object, &blob_bytes, error));
    self->slots = 16;
    while (self->slots < (size_t)self->count * 2)
        self->slots *= 2;
    self->blob = model_alloc(blob_bytes);
    self->tokens = model_alloc_zero(self->size, sizeof *self->tokens);
    self->table = model_alloc(self->slots * sizeof *self->table);
    kvf_status status = KVF_OK;
    if (!self->blob || !self->tokens || !self->table)
        status = model_out_of_memory(error, blob_bytes, "the vocabulary");
    else
        status = fill(self, object, error);
    if (status != KVF_OK)
        vocabulary_destroy(self);
    return status;
}

void vocabulary_destroy(token_vocabulary *self)
{
    model_free(self->table);
    model_free(self->tokens);
    model_free(self->blob);
    *self = (token_vocabulary){0};
}
