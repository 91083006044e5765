/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Asking and encoding; see the header. Text goes through: added tokens that match as it
 * is, normaliser, added tokens that match normalised text, pre-tokeniser steps, model.
 */

#include "tokenizer.h"

#include "model_memory.h"
#include "normalize.h"
#include "tokenizer_parts.h"
#include "utf8.h"

#include <string.h>

#define TEXT_BYTES_MAX (1u << 30) /* symbols of one word are counted in 32 bits */

void kvf_tokenizer_close(kvf_tokenizer *tokenizer)
{
    if (!tokenizer)
        return;
    for (size_t i = 0; i < tokenizer->steps_count; i++)
        pcre2_code_free(tokenizer->steps[i]);
    model_free(tokenizer->added_of_id);
    added_tokens_destroy(&tokenizer->added);
    bpe_destroy(&tokenizer->bpe);
    vocabulary_destroy(&tokenizer->vocabulary);
    model_free(tokenizer);
}

/* ---- asking ---- */

const char *kvf_tokenizer_note(const kvf_tokenizer *tokenizer)
{
    return tokenizer->note;
}

bool kvf_tokenizer_starts_twice(const kvf_tokenizer *tokenizer, const uint32_t *ids, size_t count)
{
    const size_t n = tokenizer->prefix_count;
    return n > 0 && count > n && memcmp(ids, tokenizer->prefix, n * sizeof *ids) == 0 &&
           ids[n] == tokenizer->prefix[n - 1];
}

uint32_t kvf_tokenizer_size(const kvf_tokenizer *tokenizer)
{
    return tokenizer->size;
}

const char *kvf_tokenizer_token(const kvf_tokenizer *tokenizer, uint32_t id)
{
    if (id >= tokenizer->size)
        return NULL;
    if (tokenizer->added_of_id[id] != VOCABULARY_NONE)
        return tokenizer->added.list[tokenizer->added_of_id[id]].text;
    return id < tokenizer->vocabulary.size ? tokenizer->vocabulary.tokens[id].text : NULL;
}

bool kvf_tokenizer_find(const kvf_tokenizer *tokenizer, const char *token, uint32_t *id)
{
    size_t size = strlen(token);
    *id = vocabulary_find(&tokenizer->vocabulary, token, size);
    for (size_t i = 0; i < tokenizer->added.count && *id == VOCABULARY_NONE; i++) {
        const added_token *added = &tokenizer->added.list[i];
        if (added->size == size && memcmp(added->text, token, size) == 0)
            *id = added->id;
    }
    return *id != VOCABULARY_NONE;
}

bool kvf_tokenizer_is_special(const kvf_tokenizer *tokenizer, uint32_t id)
{
    return id < tokenizer->size && tokenizer->added_of_id[id] != VOCABULARY_NONE &&
           tokenizer->added.list[tokenizer->added_of_id[id]].special;
}

/* ---- encoding ---- */

/* The memory of one call of encode. */
typedef struct encode_state {
    const kvf_tokenizer *tokenizer;
    regex_scan *scan;
    bpe_scratch scratch;
    kvf_token_ids *ids;
    kvf_error *error;
} encode_state;

typedef struct text_piece {
    const char *bytes;
    size_t size;
} text_piece;

static kvf_status encode_word(encode_state *state, text_piece word)
{
    const kvf_tokenizer *tokenizer = state->tokenizer;
    if (tokenizer->is_bpe)
        return bpe_encode(&tokenizer->bpe, &tokenizer->vocabulary, word.bytes, word.size,
                          &state->scratch, state->ids, state->error);
    uint32_t id = vocabulary_find(&tokenizer->vocabulary, word.bytes, word.size);
    if (id == VOCABULARY_NONE)
        id = tokenizer->unknown_id;
    if (id == VOCABULARY_NONE)
        return model_fail(state->error, KVF_INVALID,
                          "the word \"%.*s\" is not in the vocabulary, which has no unk_token",
                          (int)(word.size < 80 ? word.size : 80), word.bytes);
    return kvf_token_ids_push(state->ids, id, state->error);
}

static kvf_status split_piece(encode_state *state, size_t step, text_piece piece);

/* Matches and the text between them. */
static kvf_status split_by_pattern(encode_state *state, size_t index, text_piece piece)
{
    const pcre2_code *pattern = state->tokenizer->steps[index];
    for (size_t at = 0, start, end; at < piece.size; at = end) {
        KVF_TRY(regex_find(pattern, state->scan, piece.bytes, piece.size, at, &start, &end,
                           state->error));
        if (start > at)
            KVF_TRY(split_piece(state, index + 1, (text_piece){piece.bytes + at, start - at}));
        if (end > start)
            KVF_TRY(split_piece(state, index + 1, (text_piece){piece.bytes + start, end - start}));
    }
    return KVF_OK;
}

static kvf_status split_by_space(encode_state *state, size_t index, text_piece piece)
{
    size_t start = 0;
    for (size_t at = 0, length; at <= piece.size; at += length) {
        uint32_t code = ' ';
        length = at < piece.size ? utf8_decode(piece.bytes + at, piece.size - at, &code) : 1;
        if (!utf8_is_space(code))
            continue;
        if (at > start)
            KVF_TRY(split_piece(state, index + 1, (text_piece){piece.bytes + start, at - start}));
        start = at + length;
    }
    return KVF_OK;
}

/* Recursion is as deep as there are steps. */
static kvf_status split_piece(encode_state *state, size_t step, text_piece piece)
{
    if (step == state->tokenizer->steps_count)
        return encode_word(state, piece);
    return state->tokenizer->steps[step] ? split_by_pattern(state, step, piece)
                                         : split_by_space(state, step, piece);
}

typedef kvf_status (*encode_fn)(encode_state *state, text_piece piece);

/* Take the added tokens of one set out of the text; the rest goes on to @p next. */
static kvf_status encode_around(encode_state *state, const added_patterns *patterns,
                                text_piece piece, encode_fn next)
{
    added_search search = {.tokens = &state->tokenizer->added,
                           .patterns = patterns,
                           .text = piece.bytes,
                           .size = piece.size};
    added_match match = {0};
    for (;;) {
        const size_t taken = match.end;
        const bool found = added_tokens_next(&search, match.resume, taken, &match);
        const size_t until = found ? match.start : piece.size;
        if (until > taken)
            KVF_TRY(next(state, (text_piece){piece.bytes + taken, until - taken}));
        if (!found)
            return KVF_OK;
        KVF_TRY(kvf_token_ids_push(state->ids, match.id, state->error));
    }
}

static kvf_status encode_plain(encode_state *state, text_piece piece)
{
    return split_piece(state, 0, piece);
}

static kvf_status encode_normalized(encode_state *state, text_piece piece)
{
    const kvf_tokenizer *tokenizer = state->tokenizer;
    if (!tokenizer->nfc || nfc_is_trivial(piece.bytes, piece.size))
        return encode_around(state, &tokenizer->added.normalized, piece, encode_plain);
    kvf_text normalized = {0};
    kvf_status status = nfc_append(piece.bytes, piece.size, &normalized, state->error);
    if (status == KVF_OK)
        status = encode_around(state, &tokenizer->added.normalized,
                               (text_piece){normalized.bytes, normalized.size}, encode_plain);
    kvf_text_free(&normalized);
    return status;
}

static kvf_status push_all(encode_state *state, const uint32_t *ids, size_t count)
{
    return kvf_token_ids_append(state->ids, ids, count, state->error);
}

static kvf_status encode_text(encode_state *state, text_piece text, bool add_special)
{
    const kvf_tokenizer *tokenizer = state->tokenizer;
    kvf_status status = regex_scan_create(&state->scan, state->error);
    if (status == KVF_OK && add_special)
        status = push_all(state, tokenizer->prefix, tokenizer->prefix_count);
    if (status == KVF_OK)
        status = encode_around(state, &tokenizer->added.raw, text, encode_normalized);
    if (status == KVF_OK && add_special)
        status = push_all(state, tokenizer->suffix, tokenizer->suffix_count);
    regex_scan_destroy(state->scan);
    bpe_scratch_free(&state->scratch);
    return status;
}

kvf_status kvf_tokenizer_encode(const kvf_tokenizer *tokenizer, const char *text, size_t bytes,
                                bool add_special, kvf_token_ids *ids, kvf_error *error)
{
    encode_state state = {.tokenizer = tokenizer, .ids = ids, .error = error};
    if (bytes > TEXT_BYTES_MAX)
        return model_fail(error, KVF_INVALID,
                          "the text has %zu bytes; at most %u are encoded at once", bytes,
                          TEXT_BYTES_MAX);
    size_t valid = utf8_valid_prefix(text, bytes);
    if (valid != bytes)
        return model_fail(
            error, KVF_INVALID,
            "the text is not UTF-8: byte %zu (0x%02x) does not belong there; convert it "
            "to UTF-8",
            valid, (unsigned)(unsigned char)text[valid]);
    const size_t count = ids->count;
    const kvf_status status = encode_text(&state, (text_piece){text, bytes}, add_special);
    if (status != KVF_OK)
        ids->count = count;
    return status;
}
