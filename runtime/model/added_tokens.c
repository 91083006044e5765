/* SPDX-License-Identifier: Apache-2.0 */

/* See the header. The sorted list is searched byte by byte as if it were a trie. */

#include "added_tokens.h"

#include "normalize.h"
#include "utf8.h"

#include <stdlib.h>
#include <string.h>

/* \w of Unicode's recommendation for regular expressions, which is the one that HF uses here. */
#define WORD_CHARACTER "[\\p{Alphabetic}\\p{M}\\p{Nd}\\p{Pc}\\p{Join_Control}]"

/* ---- reading ---- */

static kvf_status read_flag(const json_value *entry, const char *field, bool *out, kvf_error *error)
{
    const json_value *value = json_get(entry, field);
    if (value != NULL && value->kind != JSON_TRUE && value->kind != JSON_FALSE)
        return model_fail(error, KVF_CORRUPT,
                          "tokenizer.json: added_tokens: %s is %s, not a boolean", field,
                          json_kind_name(value));
    *out = value != NULL && value->kind == JSON_TRUE;
    return KVF_OK;
}

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
        if (expected < vocabulary->size && vocabulary->tokens[expected].text != NULL)
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

static kvf_status copy_text(char **out, const char *text, size_t size,
                            const kvf_allocator *allocator, kvf_error *error)
{
    *out = model_alloc(allocator, size + 1);
    if (*out == NULL)
        return model_out_of_memory(error, size + 1, "an added token");
    memcpy(*out, text, size);
    (*out)[size] = '\0';
    return KVF_OK;
}

static kvf_status read_token(added_tokens *self, const json_value *entry,
                             const token_vocabulary *vocabulary, const kvf_allocator *allocator,
                             kvf_error *error)
{
    const json_value *content = json_get(entry, "content");
    const json_value *id = json_get(entry, "id");
    if (content == NULL || content->kind != JSON_STRING || content->size == 0 || id == NULL ||
        id->kind != JSON_INTEGER || id->as.integer >= UINT32_MAX)
        return model_fail(
            error, KVF_CORRUPT,
            "tokenizer.json: added_tokens[%zu] needs a content that is not empty and an "
            "id",
            self->count);
    static const char *const fields[] = {"id",          "content", "special", "normalized",
                                         "single_word", "lstrip",  "rstrip",  NULL};
    const json_value *unknown = json_unknown_key(entry, fields);
    if (unknown != NULL)
        return model_fail(error, KVF_UNSUPPORTED,
                          "tokenizer.json: added_tokens[%zu] has the unknown field \"%.80s\"",
                          self->count, unknown->key);
    added_token *token = &self->list[self->count];
    *token = (added_token){.size = content->size, .id = (uint32_t)id->as.integer};
    kvf_status status =
        copy_text(&token->text, content->as.string, content->size, allocator, error);
    if (status != KVF_OK)
        return status;
    status = check_id(self, token, vocabulary, error);
    self->count++;
    if (status == KVF_OK)
        status = read_flag(entry, "special", &token->special, error);
    if (status == KVF_OK)
        status = read_flag(entry, "normalized", &token->normalized, error);
    if (status == KVF_OK)
        status = read_flag(entry, "single_word", &token->single_word, error);
    if (status == KVF_OK)
        status = read_flag(entry, "lstrip", &token->lstrip, error);
    return status == KVF_OK ? read_flag(entry, "rstrip", &token->rstrip, error) : status;
}

static int compare_patterns(const void *a, const void *b)
{
    const added_pattern *x = a;
    const added_pattern *y = b;
    int order = memcmp(x->text, y->text, x->size < y->size ? x->size : y->size);
    return order != 0 ? order : (x->size > y->size) - (x->size < y->size);
}

static kvf_status add_pattern(added_patterns *patterns, const added_token *token, uint32_t index,
                              bool nfc, const kvf_allocator *allocator, kvf_error *error)
{
    kvf_text text = {0};
    kvf_status status = nfc ? nfc_append(token->text, token->size, allocator, &text, error)
                            : kvf_text_append(allocator, &text, token->text, token->size, error);
    if (status != KVF_OK) {
        kvf_text_free(allocator, &text);
        return status;
    }
    added_pattern *pattern = &patterns->list[patterns->count++];
    *pattern = (added_pattern){.text = text.bytes, .size = (uint32_t)text.size, .token = index};
    patterns->starts[(unsigned char)text.bytes[0]] = true;
    return KVF_OK;
}

static kvf_status make_patterns(added_tokens *self, bool normalized, bool nfc,
                                const kvf_allocator *allocator, kvf_error *error)
{
    added_patterns *patterns = normalized ? &self->normalized : &self->raw;
    patterns->list = model_alloc_zero(allocator, self->count, sizeof *patterns->list);
    if (patterns->list == NULL)
        return model_out_of_memory(error, self->count * sizeof *patterns->list, "added tokens");
    for (uint32_t i = 0; i < self->count; i++) {
        if (self->list[i].normalized != normalized)
            continue;
        kvf_status status =
            add_pattern(patterns, &self->list[i], i, normalized && nfc, allocator, error);
        if (status != KVF_OK)
            return status;
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

static kvf_status read_all(added_tokens *self, const json_value *array,
                           const token_vocabulary *vocabulary, bool nfc,
                           const kvf_allocator *allocator, kvf_error *error)
{
    for (const json_value *entry = json_first(array); entry != NULL;
         entry = json_next(array, entry)) {
        kvf_status status = read_token(self, entry, vocabulary, allocator, error);
        if (status != KVF_OK)
            return status;
    }
    kvf_status status = make_patterns(self, false, nfc, allocator, error);
    if (status == KVF_OK)
        status = make_patterns(self, true, nfc, allocator, error);
    for (size_t i = 0; i < self->count && status == KVF_OK; i++)
        if (self->list[i].single_word && self->word == NULL)
            status = regex_create_native(WORD_CHARACTER, allocator, &self->word, error);
    return status;
}

kvf_status added_tokens_create(added_tokens *self, const json_value *array,
                               const token_vocabulary *vocabulary, bool nfc,
                               const kvf_allocator *allocator, kvf_error *error)
{
    *self = (added_tokens){0};
    if (array == NULL || array->kind == JSON_NULL)
        return KVF_OK;
    if (array->kind != JSON_ARRAY)
        return model_fail(error, KVF_CORRUPT, "tokenizer.json: added_tokens is %s, not an array",
                          json_kind_name(array));
    self->list = model_alloc_zero(allocator, array->size, sizeof *self->list);
    if (self->list == NULL)
        return model_out_of_memory(error, array->size * sizeof *self->list, "added tokens");
    kvf_status status = read_all(self, array, vocabulary, nfc, allocator, error);
    if (status != KVF_OK)
        added_tokens_destroy(self, allocator);
    return status;
}

static void destroy_patterns(added_patterns *patterns, const kvf_allocator *allocator)
{
    for (size_t i = 0; i < patterns->count; i++)
        model_free(allocator, patterns->list[i].text);
    model_free(allocator, patterns->list);
}

void added_tokens_destroy(added_tokens *self, const kvf_allocator *allocator)
{
    regex_destroy(self->word);
    destroy_patterns(&self->raw, allocator);
    destroy_patterns(&self->normalized, allocator);
    for (size_t i = 0; i < self->count; i++)
        model_free(allocator, self->list[i].text);
    model_free(allocator, self->list);
    *self = (added_tokens){0};
}

/* ---- matching ---- */

/* The range [*low, *high) of patterns that have @p byte at @p depth, among those that share what is
   before it. */
static void narrow(const added_patterns *patterns, size_t depth, unsigned char byte, size_t *low,
                   size_t *high)
{
    size_t a = *low;
    size_t b = *high;
    while (a < b) { /* the first pattern that is long enough and not below byte */
        size_t middle = a + (b - a) / 2;
        const added_pattern *pattern = &patterns->list[middle];
        if (pattern->size <= depth || (unsigned char)pattern->text[depth] < byte)
            a = middle + 1;
        else
            b = middle;
    }
    *low = a;
    b = *high;
    while (a < b) { /* the first pattern above byte */
        size_t middle = a + (b - a) / 2;
        if ((unsigned char)patterns->list[middle].text[depth] <= byte)
            a = middle + 1;
        else
            b = middle;
    }
    *high = a;
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
        narrow(patterns, depth, (unsigned char)search->text[at + depth], &low, &high);
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

static kvf_status is_word(const added_search *search, size_t at, bool *out, kvf_error *error)
{
    size_t start;
    size_t end;
    uint32_t code = 0;
    size_t length = utf8_decode(search->text + at, search->size - at, &code);
    kvf_status status = regex_find(search->tokens->word, search->word_scan, search->text + at,
                                   length, 0, &start, &end, error);
    *out = start < length;
    return status;
}

/* A single word has no word character on either side. */
static kvf_status stands_alone(const added_search *search, size_t start, size_t end, bool *alone,
                               kvf_error *error)
{
    bool before = false;
    bool after = false;
    kvf_status status = KVF_OK;
    if (start > 0)
        status = is_word(search, previous_character(search->text, start), &before, error);
    if (status == KVF_OK && end < search->size)
        status = is_word(search, end, &after, error);
    *alone = !before && !after;
    return status;
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

kvf_status added_tokens_next(const added_search *search, size_t from, size_t taken,
                             added_match *match, bool *found, kvf_error *error)
{
    *found = false;
    for (size_t at = from; search->patterns->count != 0 && at < search->size;) {
        const added_pattern *pattern = longest_at(search, at);
        if (pattern == NULL) {
            at++;
            continue;
        }
        const added_token *token = &search->tokens->list[pattern->token];
        size_t end = at + pattern->size;
        bool alone = true;
        if (token->single_word) {
            kvf_status status = stands_alone(search, at, end, &alone, error);
            if (status != KVF_OK)
                return status;
        }
        if (!alone) {
            at = end;
            continue;
        }
        *match = (added_match){.start = at, .end = end, .resume = end, .id = token->id};
        if (token->lstrip)
            match->start = at > taken ? skip_space_left(search, at, taken) : taken;
        if (token->rstrip)
            match->end = skip_space_right(search, end);
        *found = true;
        return KVF_OK;
    }
    return KVF_OK;
}
