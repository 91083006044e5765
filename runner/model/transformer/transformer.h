/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_MODEL_TRANSFORMER_H
#define KVF_MODEL_TRANSFORMER_H

/*
 * The forward pass of all families, as a client of the library: attention goes through
 * kvf_prefill and kvf_decode, its own operations through kvf_stream_launch on the host device, and
 * through kernels of its own and cuBLAS on a GPU.
 *
 * It knows weights and layers, not prompts, sampling or settings of the cache. Invariant: a call
 * only enqueues; everything it needs was reserved at open, and decoding allocates nothing.
 *
 * Hidden states are fp32; queries, keys and values are rounded to the model's own type.
 */

#include <kvferry/prune.h>

#include "linear.h"
#include "model_config.h"
#include "sampling.h"
#include "weights.h"

/** @p status of the library as a message: what it said last.
 * @return @p status; KVF_OK leaves the error as it is */
KVF_CHECKED kvf_status kvf_library_told(const kvf_runtime *runtime, kvf_status status,
                                        kvf_error *error);

typedef struct kvf_transformer kvf_transformer;

typedef struct kvf_transformer_options {
    kvf_runtime *runtime;
    const kvf_model_config *model; /**< borrowed while open */
    kvf_weights *weights;          /**< borrowed while open; what is not loaded open loads */
    uint32_t chunk_max;            /**< tokens of one operation, at least 1 */
    uint32_t prompt_max;           /**< tokens of one prefill call; 0 = chunk_max */
    uint32_t batch_max;            /**< rows of one decode call, at least 1: sequences, or tokens
                                        of one */
    const char *cublas;            /**< where cuBLAS lies; NULL = looked for */
    uint32_t device_ordinal;       /**< of the runtime's GPU, which becomes the caller's current */
    bool
        starts_late; /**< the runtime's early_starts is 0: kernels here do not start early either */
    kvf_linear_bf16 bf16;
} kvf_transformer_options;

/** Bytes reserved at open, weights not included. The runtime matters by its device alone;
 * weights are not. */
uint64_t kvf_transformer_bytes(const kvf_transformer_options *options, uint32_t threads);

/** Set the geometry of a cache for this model: layers, heads, head_dim, dtype, chunk. Where layers
 * have windows, all their heads are streaming heads of the newest tokens alone; the mask is the
 * model's. */
void kvf_transformer_geometry(const kvf_transformer_options *options, kvf_cache_config *cache);

/** Open a cache of this geometry, whose layers attend as this model does.
 * @return as kvf_cache_open */
KVF_CHECKED kvf_status kvf_transformer_cache_open(const kvf_transformer *transformer,
                                                  const kvf_cache_config *config, kvf_cache **out,
                                                  kvf_error *error);

/**
 * Find every weight, check its shape, reserve the buffers.
 *
 * @return KVF_OK; KVF_CORRUPT naming a tensor that is missing or has the wrong shape;
 *         KVF_OUT_OF_MEMORY
 */
KVF_CHECKED kvf_status kvf_transformer_open(const kvf_transformer_options *options,
                                            kvf_transformer **out, kvf_error *error);
/** Wait for its stream first. */
void kvf_transformer_close(kvf_transformer *transformer);

/** Forget what was recorded for a cache: call it before that cache or a sequence of it is closed
 * and after its stream was waited for. Does nothing on the host device. */
void kvf_transformer_forget(kvf_transformer *transformer);

/** Tokens of one prefill call. */
uint32_t kvf_transformer_prompt_max(const kvf_transformer *transformer);

/**
 * Append @p count tokens to a sequence in all layers. No logits: what is to be continued is fed to
 * kvf_transformer_decode, so that the cache's selection already applies to it.
 *
 * More than chunk_max tokens go layer by layer, each layer in chunks.
 *
 * @param ids   [count] < vocab_size, copied; 1 … kvf_transformer_prompt_max
 * @return as kvf_prefill; KVF_INVALID for an id out of range
 *
 * Stream: enqueues. The caller waits for the stream before the next call on this transformer.
 */
KVF_CHECKED kvf_status kvf_transformer_prefill(kvf_transformer *transformer, kvf_cache *cache,
                                               kvf_sequence *sequence, const uint32_t *ids,
                                               uint32_t count, kvf_stream *stream);

/** Asked while a prompt is prefilled: how many of its tokens' way was gone. @return whether to go
 * on */
typedef bool (*kvf_prefill_progress_fn)(void *user, uint32_t done, uint32_t total);

/**
 * Ask @p progress in front of every operation of a prefill but the first, of at most chunk_max rows
 * of a layer. Where it says no, the prefill ends with KVF_OK, kvf_transformer_stopped tells, and
 * its sequences can only be destroyed. NULL = nobody asks.
 *
 * Stream: each question waits for what was enqueued.
 */
void kvf_transformer_watch(kvf_transformer *transformer, kvf_prefill_progress_fn progress,
                           void *user);
/** Whether the last prefill was ended like that. */
bool kvf_transformer_stopped(const kvf_transformer *transformer);

/** A prompt for an empty sequence, at most kvf_transformer_prompt_max tokens. */
typedef struct kvf_prompt {
    kvf_sequence *sequence;
    const uint32_t *ids; /**< [count] < vocab_size, borrowed until the call returns */
    uint32_t count;      /**< at least 1 */
} kvf_prompt;

/**
 * Prefill a prompt chunk by chunk: a chunk goes through all layers before the next one, so that
 * hidden states hold no more than a chunk, and with chunked eviction a layer no more than a chunk
 * beyond what it keeps. With a pruner that does not evict from chunks the prompt goes whole, layer
 * by layer, whatever the chunk.
 *
 * @param prune  the sequence is empty; NULL = nothing is pruned, as kvf_transformer_prefill
 * @param ids    [count] < vocab_size, borrowed until the call returns
 * @param want_logits  true: also the logits of the last token, from its own hidden state, as row 0
 *               of a step
 * @param count  any number where there is no pruner, or one that evicts
 * @param chunk  tokens, 1 ... kvf_transformer_prompt_max, with PATCHED the patch included
 * @return as kvf_prefill, kvf_prune_layer and kvf_prune_chunk; after an error the sequence can only
 *         be destroyed. KVF_INVALID with the sequence untouched where kvf_transformer_chunk_check
 * says so, or for an id out of range
 *
 * Without eviction, chunks that are a multiple of chunk_max give the bits of a plain prefill.
 * Stream: enqueues, and waits between chunks and where a policy looks at numbers. The caller waits
 * for the stream before the next call on this transformer.
 */
KVF_CHECKED kvf_status kvf_transformer_prefill_chunked(kvf_transformer *transformer,
                                                       kvf_cache *cache, kvf_prune *prune,
                                                       kvf_sequence *sequence, const uint32_t *ids,
                                                       uint32_t count, uint32_t chunk,
                                                       bool want_logits, kvf_stream *stream);

/** Whether a prompt of @p count tokens can go in such chunks. @return KVF_OK; KVF_INVALID names
 * field, value and fix */
KVF_CHECKED kvf_status kvf_transformer_chunk_check(const kvf_transformer *transformer,
                                                   const kvf_prune *prune, uint32_t count,
                                                   uint32_t chunk, kvf_error *error);

/**
 * The hidden state of a prompt's last token after the last layer, before the final norm: what
 * FastKV's equation 3 compares. The prompt is appended to its sequence as by
 * kvf_transformer_prefill_chunked.
 *
 * @param prune   NULL = no pruning
 * @param hidden  [hidden_size] on the host
 * @return as kvf_transformer_prefill_chunked
 *
 * Stream: waits for it.
 */
KVF_CHECKED kvf_status kvf_transformer_hidden(kvf_transformer *transformer, kvf_cache *cache,
                                              kvf_prune *prune, const kvf_prompt *prompt,
                                              float *hidden, kvf_stream *stream);

/**
 * One step of a batch: append ids[i] to sequences[i] and compute its logits, which have
 * the bits that they have alone.
 *
 * @param ids     [batch], copied
 * @param want_logits  false skips the LM head: the token is only appended
 * @return as kvf_decode; KVF_INVALID for an id out of range
 *
 * Stream: as kvf_transformer_prefill. Memory: allocates nothing.
 */
KVF_CHECKED kvf_status kvf_transformer_decode(kvf_transformer *transformer, kvf_cache *cache,
                                              kvf_sequence *const *sequences, const uint32_t *ids,
                                              uint32_t batch, bool want_logits, kvf_stream *stream);

/** The tokens that a step appends. All borrowed. */
typedef struct kvf_several {
    kvf_sequence *const *sequences; /**< [batch], each once */
    const uint32_t *tokens; /**< [batch] of each: 1 … the cache's tokens_per_step_max; batch_max of
                               the transformer in all; NULL = one */
    const uint32_t *ids;    /**< those of a sequence one after the other */
    uint32_t batch;
} kvf_several;

/**
 * One step with several tokens of its sequences: append them and compute the logits after each of
 * them, row i after ids[i]. The bits of as many single steps; kvf_sequence_truncate takes tokens
 * back that are not wanted. A step with more than one of each is never recorded.
 *
 * @return as kvf_transformer_decode
 */
KVF_CHECKED kvf_status kvf_transformer_decode_several(kvf_transformer *transformer,
                                                      kvf_cache *cache, const kvf_several *several,
                                                      bool want_logits, kvf_stream *stream);

/** Attention of a layer in a decode step. Everything is host memory, valid in the call. */
typedef struct kvf_attention_view {
    uint32_t layer;
    uint32_t batch;
    kvf_sequence *const *sequences; /**< [batch]; the step's tokens are in them */
    const void *q;                  /**< [batch, query_heads, head_dim] of the model's type */
    const void *attended;           /**< likewise: what kvf_decode gave */
    const float *hidden;            /**< [batch, hidden_size] that the layer got */
    const kvf_linear *output;       /**< what `attended` is multiplied with */
} kvf_attention_view;

typedef kvf_status (*kvf_attention_fn)(void *user, const kvf_attention_view *view);

/**
 * From here on show every layer's attention of a decode step, once the stream has come there. What
 * @p see enqueues on the stream of the step it waits for. NULL = nobody looks. It changes no bit.
 *
 * @return KVF_OK; KVF_UNSUPPORTED on a GPU
 */
KVF_CHECKED kvf_status kvf_transformer_observe(kvf_transformer *transformer, kvf_attention_fn see,
                                               void *user);

/** Logits [vocab_size] of row @p row of the last decode, or row 0 of a prefill that wanted them,
 * after the stream was waited for. */
const float *kvf_transformer_logits(const kvf_transformer *transformer, uint32_t row);

/** KVF_OUT_OF_MEMORY if a matrix product found none since open, else KVF_OK. */
KVF_CHECKED kvf_status kvf_transformer_check(const kvf_transformer *transformer, kvf_error *error);

/** Bytes of weights that a decode step of one row reads, the LM head included. */
uint64_t kvf_transformer_weight_bytes(const kvf_transformer *transformer);

#endif
