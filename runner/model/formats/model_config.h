/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_MODEL_CONFIG_H
#define KVF_MODEL_CONFIG_H

/*
 * A model's description in `config.json` and `generation_config.json`, or in the fields of a GGUF
 * file, reduced to what the runner needs, and the rotary frequencies that follow from it.
 *
 * It knows Hugging Face's field names and nothing of weights. Invariant: a configuration that was
 * read is complete, in range and supported; whatever the runner could not compute exactly was
 * refused here with field, value and fix.
 */

#include "model_memory.h"

#define KVF_EOS_MAX              8u
#define KVF_WINDOW_HEADS_MAX     4096u
#define KVF_ROPE_FREQUENCIES_MAX 128u /* head_dim 256 / 2 */

/** The features of an architecture: one row of a table in model_config.c. */
typedef struct kvf_architecture {
    const char *name;   /**< in config.json */
    const char *gguf;   /**< general.architecture of GGUF files; NULL = another row has it */
    const char *family; /**< "llama", "mistral", "qwen2" or "qwen3" */
    bool qkv_bias;      /**< q_proj, k_proj and v_proj have biases */
    bool qk_norm;       /**< q_norm and k_norm [head_dim], an RMS norm on each head before RoPE */
    bool has_windows;   /**< sliding_window counts */
    bool gguf_turns_neighbours; /**< RoPE in GGUF files turns channels 2i and 2i + 1 of a head */
    /* Defaults of Transformers where config.json says nothing: */
    bool has_one_kv_head_each; /**< as many KV heads as query heads; else the field is required */
    uint32_t head_dim;         /**< 0 = hidden_size / query heads */
    uint32_t window;           /**< sliding_window; 0 = none, or the field is required */
} kvf_architecture;

/** By the name in GGUF files, [size], NULL if it is not supported; and "supported are …" with all
 * of those names. */
const kvf_architecture *kvf_architecture_find_gguf(const char *name, size_t size);
const char *kvf_architecture_gguf_names(char *buffer, size_t size);

typedef enum kvf_rope_kind {
    KVF_ROPE_DEFAULT,
    KVF_ROPE_LINEAR,
    KVF_ROPE_LLAMA3,
    KVF_ROPE_YARN,
    KVF_ROPE_FACTORS, /**< of GGUF files: a divisor for every frequency */
} kvf_rope_kind;

typedef struct kvf_rope_config {
    kvf_rope_kind kind;
    double theta;
    double factor;                           /**< linear, llama3, yarn */
    double low_freq_factor;                  /**< llama3 */
    double high_freq_factor;                 /**< llama3 */
    double original_positions;               /**< llama3, yarn */
    double beta_fast, beta_slow;             /**< yarn */
    double attention_factor;                 /**< yarn, resolved; 1 otherwise */
    bool truncate;                           /**< yarn: correction range rounded outwards */
    float factors[KVF_ROPE_FREQUENCIES_MAX]; /**< factors: [head_dim / 2] */
} kvf_rope_config;

typedef struct kvf_model_config {
    const kvf_architecture *architecture;
    uint32_t vocab_size;
    uint32_t hidden_size;
    uint32_t intermediate_size;
    uint32_t layers;
    uint32_t query_heads;
    uint32_t kv_heads;        /**< divides query_heads; group 1 … 128 */
    uint32_t head_dim;        /**< a multiple of 16, at most 256 */
    uint32_t positions_max;   /**< that it was made for; a hint, not enforced here */
    const char *positions_by; /**< what says so, for messages */
    uint32_t window;          /**< newest tokens, with its own, that a token attends to in layers
                                   with windows; 0 = there are none */
    uint8_t window_mask[KVF_WINDOW_HEADS_MAX]; /**< [layers, kv_heads] where there are: as
                                   kvf_cache_config.head_mask, 0 in layers with windows */
    double norm_eps;
    kvf_dtype dtype;      /**< torch_dtype or dtype; BF16 when nothing is said */
    bool dtype_known;     /**< whether a file says it */
    bool tied_embeddings; /**< lm_head is embed_tokens */
    kvf_rope_config rope;
    bool bos_known;
    uint32_t bos_id;
    uint32_t eos_count; /**< ids of both files, without duplicates; 0 = none known */
    uint32_t eos_ids[KVF_EOS_MAX];
    char note[512]; /**< for the user, or empty */
} kvf_model_config;

typedef struct kvf_weights kvf_weights;

/**
 * Read `config.json` and, where present, `generation_config.json` of a directory, or what a GGUF
 * file says instead.
 *
 * @return KVF_OK; KVF_SYSTEM if config.json cannot be read; KVF_CORRUPT if a file is not JSON or a
 *         field has the wrong type or range; KVF_UNSUPPORTED names field, value and fix;
 *         KVF_OUT_OF_MEMORY
 */
KVF_CHECKED kvf_status kvf_model_config_read(const char *model, kvf_model_config *out,
                                             kvf_error *error);

/** The same from text. @p generation may be NULL. */
KVF_CHECKED kvf_status kvf_model_config_parse(const char *config, size_t config_bytes,
                                              const char *generation, size_t generation_bytes,
                                              kvf_model_config *out, kvf_error *error);

/** Settings that follow from the weights, as in Transformers: their type where config.json says
 * none, and whether the embedding is the head where both are there. Before the sizes of anything
 * follow from the configuration. A difference to config.json is in the note.
 */
void kvf_model_config_fit(kvf_model_config *config, const kvf_weights *weights);

typedef struct kvf_rope_table {
    uint32_t count;                           /**< head_dim / 2 */
    float inv_freq[KVF_ROPE_FREQUENCIES_MAX]; /**< [count] radians per position */
    float attention_scaling;                  /**< multiplies both cos and sin */
} kvf_rope_table;

/**
 * Rotary frequencies as HF Transformers computes them, to 1e-6 relative.
 *
 * Channel i of a head is rotated with channel i + count by angle position x inv_freq[i] (the
 * "half" layout of all families).
 */
void kvf_rope_table_make(const kvf_model_config *config, kvf_rope_table *out);

#endif
