/* SPDX-License-Identifier: Apache-2.0 */

/* See the header. The order of merges, stale heap entries included, is that of HF tokenizers. */

#include "bpe.h"

#include "utf8.h"

#include <stdlib.h>
#include <string.h>

#define BPE_END    UINT32_MAX
#define BPE_MERGED (UINT32_MAX - 1) /* as id: the symbol became part of the one before it */

static uint64_t hash_pair(uint64_t pair)
{
    pair *= 0x9e3779b97f4a7c15u;
    return pair ^ pair >> 32;
}

static bool find_merge(const bpe *self, uint32_t left, uint32_t right, bpe_merge *out)
{
    uint64_t pair = (uint64_t)left << 32 | right;
    size_t slot = hash_pair(pair) & (self->slots - 1);
    for (; self->merges[slot].pair != BPE_NO_PAIR; slot = (slot + 1) & (self->slots - 1))
        if (self->merges[slot].pair == pair) {
            *out = self->merges[slot];
            return true;
        }
    return false;
}

/* ---- reading ---- */

typedef struct merge_text {
    const char *left, *right;
    size_t left_size, right_size;
} merge_text;

/* "left right", or ["left", "right"]. */
static bool split_merge(json_t *merge, merge_text *out)
{
    if (json_is_array(merge)) {
        const json_t *left = json_array_get(merge, 0), *right = json_array_get(merge, 1);
        *out = (merge_text){json_string_value(left), json_string_value(right),
                            json_string_length(left), json_string_length(right)};
        return json_array_size(merge) == 2 && out->left && out->right;
    }
    if (!json_is_string(merge))
        return false;
    const char *left = json_string_value(merge);
    const size_t size = json_string_length(merge);
    const char *space = memchr(left, ' ', size);
    if (!space)
        return false;
    const size_t left_size = (size_t)(space - left);
    *out = (merge_text){left, space + 1, left_size, size - left_size - 1};
    return !memchr(out->right, ' ', out->right_size);
}

static void insert_merge(bpe *self, bpe_merge merge)
{
    size_t slot = hash_pair(merge.pair) & (self->slots - 1);
    while (self->merges[slot].pair != BPE_NO_PAIR && self->merges[slot].pair != merge.pair)
        slot = (slot + 1) & (self->slots - 1);
    self->merges[slot] = merge; /* of two equal merges the later one counts, as in HF */
}

static kvf_status read_merge(bpe *self, json_t *merge, uint32_t rank,
                             const token_vocabulary *vocabulary, kvf_text *joined, kvf_error *error)
{
    merge_text text;
    if (!split_merge(merge, &text))
        return model_fail(error, KVF_CORRUPT,
                          "tokenizer.json: model.merges[%u] is not a pair of tokens", rank);
    joined->size = 0;
    kvf_status status = kvf_text_append(joined, text.left, text.left_size, error);
    if (status == KVF_OK)
        status = kvf_text_append(joined, text.right, text.right_size, error);
    if (status != KVF_OK)
        return status;
    uint32_t left = vocabulary_find(vocabulary, text.left, text.left_size);
    uint32_t right = vocabulary_find(vocabulary, text.right, text.right_size);
    uint32_t id = vocabulary_find(vocabulary, joined->bytes, joined->size);
    if (left == VOCABULARY_NONE || right == VOCABULARY_NONE || id == VOCABULARY_NONE)
        return model_fail(
            error, KVF_CORRUPT,
            "tokenizer.json: model.merges[%u]: \"%.60s\", one of its parts or the whole, "
            "is not in model.vocab",
            rank, joined->bytes);
    insert_merge(self, (bpe_merge){.pair = (uint64_t)left << 32 | right, .rank = rank, .id = id});
    return KVF_OK;
}

static kvf_status read_merges(bpe *self, json_t *merges, const token_vocabulary *vocabulary,
                              kvf_error *error)
{
    if (!json_is_array(merges))
        return model_fail(error, KVF_CORRUPT, "tokenizer.json: model.merges is %s, not an array",
                          json_kind_name(merges));
    self->slots = 16;
    while (self->slots < json_array_size(merges) * 2)
        self->slots *= 2;
    self->merges = model_alloc(self->slots * sizeof *self->merges);
    if (!self->merges)
        return model_out_of_memory(error, self->slots * sizeof *self->merges, "the merges");
    memset(self->merges, 0xff, self->slots * sizeof *self->merges);
    kvf_text joined = {0};
    kvf_status status = KVF_OK;
    size_t rank;
    json_t *merge;
    json_array_foreach (merges, rank, merge) {
        status = read_merge(self, merge, (uint32_t)rank, vocabulary, &joined, error);
        if (status != KVF_OK)
            break;
    }
    kvf_text_free(&joined);
    return status;
}

/* Returns how many bytes have no token. */
static uint32_t read_bytes(bpe *self, const token_vocabulary *vocabulary)
{
    uint32_t missing = 0;
    for (uint32_t byte = 0; byte < 256; byte++) {
        char spelled[4];
        const size_t size = utf8_encode(byte_alphabet_char((uint8_t)byte), spelled);
        self->byte_id[byte] = vocabulary_find(vocabulary, spelled, size);
        missing += self->byte_id[byte] == VOCABULARY_NONE;
    }
    return missing;
}

/* Options that would change the ids; those that concern unknown bytes only count if there are any.
 */
static kvf_status check_options(json_t *model, uint32_t bytes_missing, kvf_error *error)
{
    static const char *const of_unknown[] = {"unk_token", "byte_fallback"};
    static const char *const of_words[] = {"continuing_subword_prefix", "end_of_word_suffix"};
    char shown[96];
    for (size_t i = 0; i < 2 && bytes_missing != 0; i++) {
        json_t *value = json_get_set(model, of_unknown[i]);
        if (value && !json_is_false(value))
            return model_fail(error, KVF_UNSUPPORTED,
                              "tokenizer.json: model.%s is %s while %u bytes have no token; only "
                              "byte-level vocabularies are supported",
                              of_unknown[i], json_show(value, shown, sizeof shown), bytes_missing);
    }
    for (size_t i = 0; i < 2; i++) {
        json_t *value = json_get_set(model, of_words[i]);
        if (value && !json_is_text(value, ""))
            return model_fail(error, KVF_UNSUPPORTED,
                              "tokenizer.json: model.%s is %s; only null is supported", of_words[i],
                              json_show(value, shown, sizeof shown));
    }
    json_t *dropout = json_get_set(model, "dropout");
    if (dropout && !(json_is_number(dropout) && json_number_value(dropout) == 0))
        return model_fail(error, KVF_UNSUPPORTED,
                          "tokenizer.json: model.dropout is %s; set it to null, encoding at random "
                          "is for training",
                          json_show(dropout, shown, sizeof shown));
    return KVF_OK;
}

kvf_status bpe_create(bpe *self, json_t *model, const token_vocabulary *vocabulary,
                      kvf_error *error)
{
    *self = (bpe){0};
    KVF_TRY(check_options(model, read_bytes(self, vocabulary), error));
    KVF_TRY(json_read_flag(model, "tokenizer.json: model", "ignore_merges", false,
                           &self->ignore_merges, error));
    const kvf_status status =
        read_merges(self, json_object_get(model, "merges"), vocabulary, error);
    if (status != KVF_OK)
        bpe_destroy(self);
    return status;
}

void bpe_destroy(bpe *self)
{
    model_free(self->merges);
    *self = (bpe){0};
}

/* ---- encoding ---- */

void bpe_scratch_free(bpe_scratch *scratch)
{
    model_free(scratch->symbols);
    model_free(scratch->heap);
    kvf_text_free(&scratch->spelled);
    *scratch = (bpe_scratch){0};
}

static kvf_status reserve(bpe_scratch *scratch, size_t symbols, kvf_error *error)
{
    if (symbols <= scratch->capacity)
        return KVF_OK;
    size_t capacity = symbols < 128 ? 128 : symbols;
    model_free(scratch->symbols);
    model_free(scratch->heap);
    scratch->capacity = 0;
    scratch->symbols = model_alloc(capacity * sizeof *scratch->symbols);
    scratch->heap = model_alloc(3 * capacity * sizeof *scratch->heap);
    if (!scratch->symbols || !scratch->heap)
        return model_out_of_memory(error, 3 * capacity * sizeof *scratch->heap, "a long word");
    scratch->capacity = capacity;
    return KVF_OK;
}

static bool comes_before(const bpe_candidate *a, const bpe_candidate *b)
{
    return a->rank != b->rank ? a->rank < b->rank : a->position < b->position;
}

static void heap_push(bpe_candidate *heap, size_t *count, bpe_candidate candidate)
{
    size_t at = (*count)++;
    while (at > 0 && comes_before(&candidate, &heap[(at - 1) / 2])) {
        heap[at] = heap[(at - 1) / 2];
        at = (at - 1) / 2;
    }
    heap[at] = candidate;
}

static bpe_candidate heap_pop(bpe_candidate *heap, size_t *count)
{
    bpe_candidate top = heap[0];
    bpe_candidate last = heap[--*count];
    size_t at = 0;
    for (size_t child = 1; child < *count; child = 2 * at + 1) {
        if (child + 1 < *count && comes_before(&heap[child + 1], &heap[child]))
            child++;
        if (!comes_before(&heap[child], &last))
            break;
        heap[at] = heap[child];
        at = child;
    }
    heap[at] = last;
    return top;
}

static void consider(const bpe *self, bpe_scratch *scratch, uint32_t position, size_t *count)
{
    bpe_merge merge;
    const bpe_symbol *left = &scratch->symbols[position];
    if (left->next == BPE_END)
        return;
    if (find_merge(self, left->id, scratch->symbols[left->next].id, &merge))
        heap_push(scratch->heap, count,
                  (bpe_candidate){.rank = merge.rank, .position = position, .id = merge.id});
}

/* Apply all merges to the first @p count symbols, which form one list. */
static void merge_all(const bpe *self, bpe_scratch *scratch, uint32_t count)
{
    bpe_merge merge;
    bpe_symbol *symbols = scratch->symbols;
    size_t candidates = 0;
    for (uint32_t i = 0; i < count; i++)
        consider(self, scratch, i, &candidates);
    while (candidates > 0) {
        bpe_candidate top = heap_pop(scratch->heap, &candidates);
        bpe_symbol *left = &symbols[top.position];
        if (left->id == BPE_MERGED || left->next == BPE_END)
            continue;
        bpe_symbol *right = &symbols[left->next];
        if (!find_merge(self, left->id, right->id, &merge) || merge.id != top.id)
            continue; /* the symbols changed since the candidate was found */
        left->id = top.id;
        left->next = right->next;
        right->id = BPE_MERGED;
        if (left->next != BPE_END)
            symbols[left->next].previous = top.position;
        if (left->previous != BPE_END)
            consider(self, scratch, left->previous, &candidates);
        consider(self, scratch, top.position, &candidates);
    }
}

static kvf_status find_whole(const token_vocabulary *vocabulary, const char *word, size_t size,
                             bpe_scratch *scratch, uint32_t *id, kvf_error *error)
{
    *id = VOCABULARY_NONE;
    if (size > vocabulary->longest)
        return KVF_OK;
    scratch->spelled.size = 0;
    for (size_t i = 0; i < size; i++) {
        char spelled[4];
        size_t length = utf8_encode(byte_alphabet_char((uint8_t)word[i]), spelled);
        KVF_TRY(kvf_text_append(&scratch->spelled, spelled, length, error));
    }
    *id = vocabulary_find(vocabulary, scratch->spelled.bytes, scratch->spelled.size);
    return KVF_OK;
}

static void add_symbol(bpe_scratch *scratch, uint32_t *count, uint32_t id)
{
    const uint32_t at = *count;
    if (id == VOCABULARY_NONE)
        return;
    scratch->symbols[at] =
        (bpe_symbol){.id = id, .previous = at == 0 ? BPE_END : at - 1, .next = at + 1};
    *count = at + 1;
}

kvf_status bpe_encode(const bpe *self, const token_vocabulary *vocabulary, const char *word,
                      size_t size, bpe_scratch *scratch, kvf_token_ids *ids, kvf_error *error)
{
    if (self->ignore_merges) {
        uint32_t id;
        KVF_TRY(find_whole(vocabulary, word, size, scratch, &id, error));
        if (id != VOCABULARY_NONE)
            return kvf_token_ids_push(ids, id, error);
    }
    KVF_TRY(reserve(scratch, size, error));
    uint32_t count = 0;
    for (size_t i = 0; i < size; i++)
        add_symbol(scratch, &count, self->byte_id[(unsigned char)word[i]]);
    if (count == 0)
        return KVF_OK;
    scratch->symbols[count - 1].next = BPE_END;
    merge_all(self, scratch, count);
    for (uint32_t i = 0; i != BPE_END; i = scratch->symbols[i].next)
        KVF_TRY(kvf_token_ids_push(ids, scratch->symbols[i].id, error));
    return KVF_OK;
}
