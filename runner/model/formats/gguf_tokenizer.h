/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_MODEL_GGUF_TOKENIZER_H
#define KVF_MODEL_GGUF_TOKENIZER_H

/*
 * The tokenizer of a GGUF file as tokenizer.json, and its special tokens and chat template as
 * tokenizer_config.json.
 *
 * It knows which pipeline a name of the file stands for, not how one works. Invariant: a name that
 * it does not know is refused.
 */

#include "gguf_writer.h"

void gguf_write_tokenizer(gguf_writer *w);
void gguf_write_tokenizer_config(gguf_writer *w);

#endif
