/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_MODEL_CHAT_CHANNELS_H
#define KVF_MODEL_CHAT_CHANNELS_H

/*
 * Channels of an answer, as gpt-oss writes them: <|channel|>analysis<|message|> thoughts <|end|>
 * <|start|>assistant<|channel|>final<|message|> the answer. Thoughts become <think> ... </think>,
 * which is how everything else here knows them; the head of a call comes in front of it as a line.
 *
 * It knows tokens of one answer, no templates. Invariant: text outside of heads is passed on as it
 * is.
 */

#include "tokenizer.h"

#define KVF_CHANNELS_HEAD_BYTES 128u

/** Zero-initialise; it owns no memory. */
typedef struct kvf_channels {
    bool known;                            /**< the tokenizer has all of the next */
    uint32_t start, channel, message, end; /**< special tokens */
    uint32_t call;                         /**< that ends a call */
    bool in_head, thinks;                  /**< where an answer is */
    uint32_t name, size;                   /**< of the head: where the channel's name begins */
    char head[KVF_CHANNELS_HEAD_BYTES];    /**< [size] */
} kvf_channels;

/** The tokens of a tokenizer, and an answer from its start. */
kvf_channels kvf_channels_of(const kvf_tokenizer *tokenizer);

/** @p text is what token @p id completes, without special tokens, and becomes what is shown.
 * @return KVF_OK; KVF_OUT_OF_MEMORY */
KVF_CHECKED kvf_status kvf_channels_push(kvf_channels *channels, uint32_t id, kvf_text *text);

#endif
