/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TESTS_MODEL_MODEL_RIG_H
#define KVF_TESTS_MODEL_MODEL_RIG_H

/*
 * A model that runs: a runtime, a stream, weights, a transformer and a cache, opened step by step
 * and closed at once. The model is a small one with made-up weights, or one that lies somewhere.
 *
 * Knows nothing of what a test wants to prove. Every failure fails the test, with the library's
 * text.
 */

#include "transformer.h"

/** 0 and NULL: what stands in brackets. */
typedef struct model_shape {
    const char *family; /**< [Qwen3], which has every kind of tensor but biases */
    uint32_t layers;
    uint32_t hidden;       /**< [128] */
    uint32_t intermediate; /**< [192] */
    uint32_t heads;        /**< [4] of queries */
    uint32_t kv_heads;     /**< [2] */
    uint32_t head_dim;     /**< [64] */
    uint32_t vocab;        /**< [200] */
    bool is_untied;        /**< with a head of its own */
    uint32_t window;       /**< Mistral: of all layers */
} model_shape;

#define MODEL_TEXT_BYTES 1024u

/** Its config.json. */
void model_shape_text(const model_shape *shape, char text[MODEL_TEXT_BYTES]);

typedef struct model_rig {
    char *directory; /**< made by model_rig_make, or NULL */
    kvf_runtime *runtime;
    kvf_stream *stream;
    kvf_weights *weights;
    kvf_model_config model;
    kvf_transformer *transformer; /**< NULL = not opened yet, and so is the cache */
    kvf_cache *cache;
} model_rig;

/** A model of this shape, with the device that tests run on. */
void model_rig_make(model_rig *r, const model_shape *shape, uint32_t threads);
/** Likewise, of a folder or a file that is there. */
void model_rig_read(model_rig *r, const char *from, uint32_t threads);

/** Options that belong to the rig; limits are the caller's. */
kvf_transformer_options model_rig_options(const model_rig *r);
/** The transformer, and a configuration of its cache. */
void model_rig_transformer(model_rig *r, const kvf_transformer_options *options,
                           kvf_cache_config *config);
void model_rig_cache(model_rig *r, const kvf_cache_config *config);

/** Sequences end with the cache, recordings before it. */
void model_rig_close(model_rig *r);

/** An empty one. */
kvf_sequence *model_rig_sequence(const model_rig *r);
void model_rig_wait(const model_rig *r);
/** Tokens of a prompt, until all of them are there. */
void model_rig_prefill(const model_rig *r, kvf_sequence *sequence, const uint32_t *ids,
                       uint32_t count);
/** A token of each sequence. @param logits [batch, vocab] get those that follow, or NULL */
void model_rig_decode(const model_rig *r, kvf_sequence *const *sequences, const uint32_t *ids,
                      uint32_t batch, float *logits);
/** The norm of the difference of logits, relative to the norm of those that are wanted. */
double model_rig_distance(const float *got, const float *want, uint32_t count);

/** A status that must be KVF_OK. */
void model_rig_must(const model_rig *r, kvf_status status, const char *what);

#endif
