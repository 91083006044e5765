/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_MODEL_CHAT_SOURCE_H
#define KVF_MODEL_CHAT_SOURCE_H

/*
 * Where a model keeps its chat template, and how its special tokens are spelt.
 *
 * It knows names of files and fields, not what a template says. Invariant: a source that has no
 * template has an empty one.
 */

#include "chat_template.h"

/** Owned texts. Zero-initialise; free with kvf_chat_source_free. */
typedef struct kvf_chat_source {
    kvf_text source; /**< bytes NULL: the model has none */
    kvf_text bos, eos;
} kvf_chat_source;

/**
 * From a directory or a GGUF file: `chat_template.jinja`, else `chat_template` of
 * `tokenizer_config.json` (of several the one named "default"), and `bos_token` and `eos_token`
 * from there. A part that is not there says nothing.
 *
 * @return KVF_OK; KVF_CORRUPT, KVF_SYSTEM, KVF_OUT_OF_MEMORY, and @p out is free then
 */
KVF_CHECKED kvf_status kvf_chat_source_read(const char *model, const kvf_allocator *allocator,
                                            kvf_chat_source *out, kvf_error *error);
void kvf_chat_source_free(const kvf_allocator *allocator, kvf_chat_source *source);

/** The format that the model itself has; `source` is NULL if there is none. Borrows. */
kvf_chat_format kvf_chat_source_format(const kvf_chat_source *source);

#endif
