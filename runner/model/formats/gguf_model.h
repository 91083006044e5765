/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_MODEL_GGUF_MODEL_H
#define KVF_MODEL_GGUF_MODEL_H

/*
 * What a GGUF file says about its model, in the words of Hugging Face's files, so that one reader
 * serves both.
 *
 * It knows names of fields, not how weights are stored. Invariant: what is written differs from
 * what a converter of the model would write only where the runner does not look, or it is refused.
 */

#include "gguf.h"
#include "model_config.h"

/** A tensor that divides the frequencies of RoPE. */
#define GGUF_ROPE_FACTORS "rope_freqs.weight"

typedef struct gguf_model {
    const kvf_architecture *architecture;
    uint32_t layers, query_heads, kv_heads;
    kvf_dtype dtype; /* the type of all matrices if it is a plain one, else BF16 */
} gguf_model;

/** @return KVF_OK; KVF_CORRUPT or KVF_UNSUPPORTED naming file, field, value and fix */
KVF_CHECKED kvf_status gguf_model_read(const gguf *file, gguf_model *out, kvf_error *error);

/** Of F32, F16 and BF16. */
kvf_dtype gguf_model_dtype(const gguf_type *type);

/** Whether it can be written: "config.json", "tokenizer.json" and "tokenizer_config.json" can. */
bool gguf_has_part(const char *part);

/**
 * Append what the file says as @p part.
 * @return KVF_OK; KVF_CORRUPT or KVF_UNSUPPORTED naming file, field, value and fix; KVF_SYSTEM if
 *         there is no such part; KVF_OUT_OF_MEMORY
 */
KVF_CHECKED kvf_status gguf_write_part(const gguf *file, const char *part,
                                       const kvf_allocator *allocator, kvf_text *out,
                                       kvf_error *error);

/** What config.json cannot say: factors of RoPE. Goes behind its reading. */
KVF_CHECKED kvf_status gguf_model_finish(const gguf *file, kvf_model_config *config,
                                         kvf_error *error);

#endif
