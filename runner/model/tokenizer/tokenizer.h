/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_MODEL_TOKENIZER_H
#define KVF_MODEL_TOKENIZER_H

/*
 * Text to token ids and back, as `tokenizer.json` describes it: byte-level BPE or WordLevel.
 *
 * It follows the pipeline of that file (added tokens, normaliser, pre-tokeniser, model,
 * post-processor, decoder) and refuses by name every part that it does not know, so what it returns
 * is what HF `tokenizers` returns. It knows nothing of models or chats.
 * Invariant: a tokenizer is immutable once open; every id it returns is < kvf_tokenizer_size.
 */

#include "model_memory.h"

typedef struct kvf_tokenizer kvf_tokenizer;

/**
 * Read `tokenizer.json` of a directory, or what a GGUF file says instead. `add_bos_token` and
 * `add_eos_token` of `tokenizer_config.json` have the last word on what begins and ends a text, as
 * they have where a folder is converted to a GGUF file.
 *
 * @return KVF_OK; KVF_SYSTEM if the file cannot be read; KVF_CORRUPT if it contradicts itself;
 *         KVF_UNSUPPORTED names the part that is not known; KVF_OUT_OF_MEMORY
 */
KVF_CHECKED kvf_status kvf_tokenizer_open(const char *model, kvf_tokenizer **out, kvf_error *error);

/** The same from the text of a tokenizer.json, which is not kept. */
KVF_CHECKED kvf_status kvf_tokenizer_parse(const char *json, size_t bytes, kvf_tokenizer **out,
                                           kvf_error *error);

void kvf_tokenizer_close(kvf_tokenizer *tokenizer);

/** Where tokenizer_config.json changed what tokenizer.json says: one sentence; else empty. */
const char *kvf_tokenizer_note(const kvf_tokenizer *tokenizer);

/** Whether ids, encoded with @p add_special, go on with what was put in front of them: a text that
 * spells its own BOS has two. */
bool kvf_tokenizer_starts_twice(const kvf_tokenizer *tokenizer, const uint32_t *ids, size_t count);

/** One more than the largest id. */
uint32_t kvf_tokenizer_size(const kvf_tokenizer *tokenizer);

/** The token's own spelling (byte-level tokens in the byte alphabet), or NULL if the id has none.
 */
const char *kvf_tokenizer_token(const kvf_tokenizer *tokenizer, uint32_t id);

/** @return whether a token is spelt exactly like this; its id in @p id */
bool kvf_tokenizer_find(const kvf_tokenizer *tokenizer, const char *token, uint32_t *id);

/** Whether the id is an added token marked special. */
bool kvf_tokenizer_is_special(const kvf_tokenizer *tokenizer, uint32_t id);

/**
 * Encode UTF-8 text, appending to @p ids (freed with kvf_token_ids_free).
 *
 * @param text         [bytes]; may hold zero bytes
 * @param add_special  whether the post-processor may add its tokens (BOS); false for text that
 *                     goes on from another, or that a chat format wrote
 * @return KVF_OK; KVF_INVALID naming the byte offset where the text is not UTF-8;
 *         KVF_OUT_OF_MEMORY; on failure ids->count is as before
 *
 * Thread: any number at once on one tokenizer.
 */
KVF_CHECKED kvf_status kvf_tokenizer_encode(const kvf_tokenizer *tokenizer, const char *text,
                                            size_t bytes, bool add_special, kvf_token_ids *ids,
                                            kvf_error *error);

/**
 * Decode, appending to @p text. Bytes that are not UTF-8 become U+FFFD; ids without a token (models
 * pad their vocabulary) become nothing.
 *
 * @return KVF_OK; KVF_OUT_OF_MEMORY, text->size is as before then
 */
KVF_CHECKED kvf_status kvf_tokenizer_decode(const kvf_tokenizer *tokenizer, const uint32_t *ids,
                                            size_t count, bool skip_special, kvf_text *text,
                                            kvf_error *error);

/* ---- streaming ---- */

/**
 * Decodes one id at a time; the pieces, joined, are what kvf_tokenizer_decode gives for all ids.
 * Zero-initialise, set tokenizer and skip_special; it owns no memory.
 */
typedef struct kvf_token_stream {
    const kvf_tokenizer *tokenizer;
    bool skip_special;
    bool started;          /* a token was shown: WordLevel puts a space before the next */
    uint8_t pending_count; /* < 4: bytes of a character that is not complete */
    uint8_t pending[4];
} kvf_token_stream;

/** Append what @p id completes; possibly nothing, never part of a character. */
KVF_CHECKED kvf_status kvf_token_stream_push(kvf_token_stream *stream, uint32_t id, kvf_text *text,
                                             kvf_error *error);

/** At the end: an incomplete character becomes U+FFFD. */
KVF_CHECKED kvf_status kvf_token_stream_finish(kvf_token_stream *stream, kvf_text *text,
                                               kvf_error *error);

#endif
