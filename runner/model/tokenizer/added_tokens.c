/* SPDX-License-Identifier: Apache-2.0 */

/* See the header. The sorted list is searched byte by byte as if it were a trie. */

#include "added_tokens.h"

#include "utf8.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- reading ---- */

/* HF ignores the ids of the file and counts on from the vocabulary: insist that both agree. */
static kvf_status check_id(const added_tokens *self, const added_token *token,
                           const token_vocabulary *vocabulary, kvf_error *error)
{
    uint32_t expected = vocabulary_find(vocabulary, token->text, token->size);
    if (expected == VOCABULARY_NONE) {
        expected = vocabulary->count;
        for (size_t i = 0; i < self->count; i++)
            if (self->list[i].id >= expected)
                expected = self->list[i].id + 1;
        if (expected < vocabulary->size && vocabulary->tokens[expected].text)
            return model_fail(error, KVF_CORRUPT,
                              "tokenizer.json: added_tokens: the id %u of \"%.80s\" belongs to "
                              "\"%.80s\" already",
                              expected, token->text, vocabulary->tokens[expected].text);
    }
    if (token->id != expected)
        return model_fail(
            error, KVF_CORRUPT,
            "tokenizer.json: added_tokens: \"%.80s\" has id %u, but the vocabulary makes "
            "it %u",
            token->text, token->id, expected);
    return KVF_OK;
}

static kvf_status read_token(added_tokens *self, json_t *entry, const token_vocabulary *vocabulary,
                             kvf_error *error)
{
    json_t *content = json_object_get(entry, "content");
    const size_t size = json_string_length(content);
    uint64_t id;
    if (size == 0 || !json_is_whole(json_object_get(entry, "id"), UINT32_MAX - 1, &id))
        return model_fail(
            error, KVF_CORRUPT,
            "tokenizer.json: added_tokens[%zu] needs a content that is not empty and an "
            "id",
            self->count);
    static const char *const known[] = {"id",          "content", "special", "normalized",
                                        "single_word", "lstrip",  "rstrip",  NULL};
    bool single_word;
    char what[48];
    snprintf(what, sizeof what, "tokenizer.json: added_tokens[%zu]", self->count);
    KVF_TRY(json_check_keys(entry, what, known, error));
    added_token *token = &self->list[self->count];
    *token = (added_token){.size = (uint32_t)size, .id = (uint32_t)id};
    KVF_TRY(
        model_copy_text(json_string_value(content), size, "an added token", &token->text, error));
    const kvf_status status = check_id(self, token, vocabulary, error);
    self->count++;
    KVF_TRY(status);
    KVF_TRY(json_read_flag(entry, what, "special", false, &token->special, error));
    KVF_TRY(json_read_flag(entry, what, "normalized", false, &token->normalized, error));
    KVF_TRY(json_read_flag(entry, what, "single_word", false, &single_word, error));
    if (single_word)
        return model_fail(error, KVF_UNSUPPORTED, "%s.single_word is true; only false is supported",
                          what);
    KVF_TRY(json_read_flag(entry, what, "lstrip", false, &token->lstrip, error));
    return json_read_flag(entry, what, "rstrip", false, &token->rstrip, error);
}

static int compare_patterns(const void *a, const void *b)
{
    const added_pattern *x = a;
    const added_pattern *y = b;
    int order = memcmp(x->text, y->text, x->size < y->size ? x->size : y->size);
    return order != 0 ? order : (x->size > y->size) - (x->size < y->size);
}

static kvf_status add_pattern(added_patterns *patterns, const added_token *token, uint32_t index,
                              bool nfc, kvf_error *error)
{
    kvf_text text = {0};
    kvf_status status = nfc ? nfc_append(token->text, token->size, &text, error)
                            : kvf_text_append(&text, token->text, token->size, error);
    if (status != KVF_OK) {
        kvf_text_free(&text);
        return status;
    }
    added_pattern *pattern = &patterns->list[patterns->count++];
    *pattern = (added_pattern){.text = text.bytes, .size = (uint32_t)text.size, .token = index};
    patterns->starts[(unsigned char)text.bytes[0]] = true;
    return KVF_OK;
}

static kvf_status make_patterns(added_tokens *self, bool normalized, bool nfc, kvf_error *error)
{
    added_patterns *patterns = normalized ? &self->normalized : &self->raw;
    patterns->list = model_alloc_zero(self->count, sizeof *patterns->list);
    if (!patterns->list)
        return model_out_of_memory(error, self->count * sizeof *patterns->list, "added tokens");
    for (uint32_t i = 0; i < self->count; i++) {
        if (self->list[i].normalized != normalized)
            continue;
        KVF_TRY(add_pattern(patterns, &self->list[i], i, normalized && nfc, error));
    }
    if (patterns->count != 0)
        qsort(patterns->list, patterns->count, sizeof *patterns->list, compare_patterns);
    for (size_t i = 1; i < patterns->count; i++)
        if (compare_patterns(&patterns->list[i - 1], &patterns->list[i]) == 0)
            return model_fail(error, KVF_CORRUPT,
                              "tokenizer.json: added_tokens: \"%.80s\" is there twice",
                              patterns->list[i].text);
    return KVF_OK;
}

static kvf_status read_all(added_tokens *self, json_t *array, const token_vocabulary *vocabulary,
                           bool nfc, kvf_error *error)
{
    json_t *entry;
    size_t i;
    json_array_foreach (array, i, entry)
        KVF_TRY(read_token(self, entry, vocabulary, error));
    KVF_TRY(make_patterns(self, false, nfc, error));
    return make_patterns(self, true, nfc, error);
}

kvf_status added_tokens_create(added_tokens *self, json_t *array,
                               const token_vocabulary *vocabulary, bool nfc, kvf_error *error)
{
    *self = (added_tokens){0};
    if (!array || json_is_null(array))
        return KVF_OK;
    if (!json_is_array(array))
        return model_fail(error, KVF_CORRUPT, "tokenizer.json: added_tokens is %s, not an array",
                          json_kind_name(array));
    self->list = model_alloc_zero(json_array_size(array), sizeof *self->list);
    if (!self->list)
        return model_out_of_memory(error, json_array_size(array) * sizeof *self->list,
                                   "added tokens");
    kvf_status status = read_all(self, array, vocabulary, nfc, error);
    if (status != KVF_OK)
        added_tokens_destroy(self);
    return status;
}

static void destroy_patterns(added_patterns *patterns)
{
    for (size_t i = 0; i < patterns->count; i++)
        model_free(patterns->list[i].text);
    model_free(patterns->list);
}

void added_tokens_destroy(added_tokens *self)
{
    destroy_patterns(&self->raw);
    destroy_patterns(&self->normalized);
    for (size_t i = 0; i < self->count; i++)
        model_free(self->list[i].text);
    model_free(self->list);
    *self = (added_tokens){0};
}

/* ---- matching ---- */

/* The first of the patterns from @p low to @p high, which share what is before @p depth, that is
 * longer and has no byte below @p byte there. */
static size_t bound(const added_patterns *patterns, size_t depth, unsigned byte, size_t low,
                    size_t high)
{
    while (low < high) {
        const size_t middle = low + (high - low) / 2;
        const added_pattern *pattern = &patterns->list[middle];
        if (pattern->size <= depth || (unsigned char)pattern->text[depth] < byte)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* The longest pattern at @p at, or NULL. */
static const added_pattern *longest_at(const added_search *search, size_t at)
{
    const added_patterns *patterns = search->patterns;
    if (!patterns->starts[(unsigned char)search->text[at]])
        return NULL;
    const added_pattern *best = NULL;
    size_t low = 0;
    size_t high = patterns->count;
    for (size_t depth = 0; at + depth < search->size && low < high; depth++) {
        const unsigned byte = (unsigned char)search->text[at + depth];
        low = bound(patterns, depth, byte, low, high);
        high = bound(patterns, depth, byte + 1, low, high);
        if (low < high && patterns->list[low].size == depth + 1)
            best = &patterns->list[low]; /* the shortest of a range sorts first */
    }
    return best;
}

static size_t previous_character(const char *text, size_t at)
{
    do
        at--;
    while (((unsigned char)text[at] & 0xc0) == 0x80);
    return at;
}

static size_t skip_space_left(const added_search *search, size_t at, size_t limit)
{
    while (at > limit) {
        size_t previous = previous_character(search->text, at);
        uint32_t code = 0;
        (void)utf8_decode(search->text + previous, at - previous, &code);
        if (!utf8_is_space(code))
            break;
        at = previous;
    }
    return at;
}

static size_t skip_space_right(const added_search *search, size_t at)
{
    while (at < search->size) {
        uint32_t code = 0;
        size_t length = utf8_decode(search->text + at, search->size - at, &code);
        if (!utf8_is_space(code))
            break;
        at += length;
    }
    return at;
}

bool added_tokens_next(const added_search *search, size_t from, size_t taken, added_match *match)
{
    if (search->patterns->count == 0)
        return false;
    for (size_t at = from; at < search->size; at++) {
        const added_pattern *pattern = longest_at(search, at);
        if (!pattern)
            continue;
        const added_token *token = &search->tokens->list[pattern->token];
        const size_t end = at + pattern->size;
        *match = (added_match){.start = at, .end = end, .resume = end, .id = token->id};
        if (token->lstrip)
            match->start = at > taken ? skip_space_left(search, at, taken) : taken;
        if (token->rstrip)
            match->end = skip_space_right(search, end);
        return true;
    }
    return false;
}
