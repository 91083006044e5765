/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Token ids to text, one at a time or all at once; see tokenizer.h. Bytes of the byte alphabet are
 * collected until they are a character; an ill-formed sequence becomes one U+FFFD per maximal part,
 * which is what Unicode recommends and what HF does. An added token stands for itself: HF maps it
 * through the byte alphabet where it can, which turns an added "É" into U+FFFD.
 */

#include "bpe.h"
#include "tokenizer_parts.h"
#include "utf8.h"

#include <string.h>

static const char replacement[] = "\xef\xbf\xbd";

typedef struct stream_output {
    kvf_text *text;
    kvf_error *error;
} stream_output;

static kvf_status put(const stream_output *out, const void *bytes, size_t size)
{
    return kvf_text_append(out->text, bytes, size, out->error);
}

/* Bytes of a character that starts with @p lead; 0 if none does. */
static size_t character_length(uint8_t lead)
{
    if (lead < 0x80)
        return 1;
    if (lead < 0xc2 || lead > 0xf4)
        return 0;
    return lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;
}

static bool continues(const kvf_token_stream *stream, uint8_t byte)
{
    uint8_t low = 0x80;
    uint8_t high = 0xbf;
    if (stream->pending_count == 1) { /* overlong forms, surrogates and beyond U+10FFFF */
        uint8_t lead = stream->pending[0];
        low = lead == 0xe0 ? 0xa0 : lead == 0xf0 ? 0x90 : 0x80;
        high = lead == 0xed ? 0x9f : lead == 0xf4 ? 0x8f : 0xbf;
    }
    return byte >= low && byte <= high;
}

/* Bytes that are no character. */
static kvf_status put_pending(kvf_token_stream *stream, const stream_output *out)
{
    const bool has_some = stream->pending_count != 0;
    stream->pending_count = 0;
    return has_some ? put(out, replacement, 3) : KVF_OK;
}

static kvf_status put_byte(kvf_token_stream *stream, uint8_t byte, const stream_output *out)
{
    if (stream->pending_count != 0 && !continues(stream, byte))
        KVF_TRY(put_pending(stream, out));
    if (stream->pending_count == 0 && character_length(byte) == 0)
        return put(out, replacement, 3);
    stream->pending[stream->pending_count++] = byte;
    if (stream->pending_count < character_length(stream->pending[0]))
        return KVF_OK;
    size_t size = stream->pending_count;
    stream->pending_count = 0;
    return put(out, stream->pending, size);
}

/* Whether every character of a token is in the byte alphabet; other tokens stand for themselves. */
static bool is_byte_level(const char *text, size_t size)
{
    for (size_t at = 0; at < size;) {
        uint32_t code = 0;
        at += utf8_decode(text + at, size - at, &code);
        if (byte_alphabet_byte(code) < 0)
            return false;
    }
    return true;
}

static kvf_status put_token(kvf_token_stream *stream, const char *text, size_t size, bool added,
                            const stream_output *out)
{
    if (!stream->tokenizer->byte_level_decoder) {
        const bool is_first = !stream->started;
        stream->started = true;
        if (!is_first)
            KVF_TRY(put(out, " ", 1));
        return put(out, text, size);
    }
    bool mapped = !added && is_byte_level(text, size);
    for (size_t at = 0; at < size;) {
        uint32_t code = (unsigned char)text[at];
        at += mapped ? utf8_decode(text + at, size - at, &code) : 1;
        KVF_TRY(put_byte(stream, (uint8_t)(mapped ? byte_alphabet_byte(code) : (int)code), out));
    }
    return KVF_OK;
}

kvf_status kvf_token_stream_push(kvf_token_stream *stream, uint32_t id, kvf_text *text,
                                 kvf_error *error)
{
    const kvf_tokenizer *tokenizer = stream->tokenizer;
    if (id >= tokenizer->size || (stream->skip_special && kvf_tokenizer_is_special(tokenizer, id)))
        return KVF_OK;
    const stream_output out = {.text = text, .error = error};
    uint32_t added = tokenizer->added_of_id[id];
    if (added != VOCABULARY_NONE)
        return put_token(stream, tokenizer->added.list[added].text,
                         tokenizer->added.list[added].size, true, &out);
    if (id >= tokenizer->vocabulary.size || !tokenizer->vocabulary.tokens[id].text)
        return KVF_OK;
    return put_token(stream, tokenizer->vocabulary.tokens[id].text,
                     tokenizer->vocabulary.tokens[id].size, false, &out);
}

kvf_status kvf_token_stream_finish(kvf_token_stream *stream, kvf_text *text, kvf_error *error)
{
    const stream_output out = {.text = text, .error = error};
    stream->started = false;
    KVF_TRY(put_pending(stream, &out));
    return kvf_text_append(text, "", 0, error);
}

kvf_status kvf_tokenizer_decode(const kvf_tokenizer *tokenizer, const uint32_t *ids, size_t count,
                                bool skip_special, kvf_text *text, kvf_error *error)
{
    kvf_token_stream stream = {.tokenizer = tokenizer, .skip_special = skip_special};
    size_t size = text->size;
    kvf_status status = KVF_OK;
    for (size_t i = 0; i < count && status == KVF_OK; i++)
        status = kvf_token_stream_push(&stream, ids[i], text, error);
    if (status == KVF_OK)
        status = kvf_token_stream_finish(&stream, text, error);
    if (status != KVF_OK && text->capacity != 0) {
        text->size = size;
        text->bytes[size] = '\0';
    }
    return status;
}
