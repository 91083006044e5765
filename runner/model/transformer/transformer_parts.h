/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_MODEL_TRANSFORMER_PARTS_H
#define KVF_MODEL_TRANSFORMER_PARTS_H

/*
 * The parts that transformer_open.c builds and transformer.c runs: weights bound by role, buffers
 * by shape.
 *
 * Only the files of the transformer include it. Invariant: every buffer is one slice of the single
 * reservation of the device.
 */

#include "transformer.h"

typedef struct transformer_layer {
    const float *attention_norm; /* [hidden] */
    const float *mlp_norm;       /* [hidden] */
    const float *query_norm;     /* [head_dim], or NULL */
    const float *key_norm;       /* [head_dim], or NULL */
    kvf_linear query, key, value, output;
    kvf_linear gate, up, down;
} transformer_layer;

/* R = rows of one operation, H = rows of hidden states >= R, q = query_heads x head_dim, kv =
 * kv_heads x head_dim. `own` is fp32 on the host device and the model's dtype on a GPU. */
typedef struct transformer_buffers {
    uint32_t *ids;       /* [H] */
    uint32_t *positions; /* [H] */
    float *cosine;       /* [H, head_dim / 2] */
    float *sine;         /* [H, head_dim / 2] */
    float *hidden;       /* [H, hidden] */
    void *normed;        /* [R, hidden] own */
    float *qkv;          /* [R, q + 2 kv] */
    void *q;             /* [R, q] of the model's dtype, as the next three */
    void *k;             /* [R, kv] */
    void *v;             /* [R, kv] */
    void *attended;      /* [R, q] */
    float *gate_up;      /* [R, 2 intermediate], at least one row of hidden states and angles */
    void *activated;     /* [R, intermediate] own */
    float *logits;       /* [batch_max, vocab] */
} transformer_buffers;

typedef struct transformer_ops transformer_ops;

/* The prompt of a prefill: its rows of hidden states, and how far it has come. */
typedef struct transformer_prompt {
    uint32_t count; /* rows that the next layer gets */
    uint32_t patch; /* of these, the last ones that score a chunk and are dropped again */
    uint32_t layer; /* the next one */
} transformer_prompt;

/* The decode step that is recorded: what it was recorded for. */
typedef struct transformer_recording {
    kvf_recording *recording; /* NULL = none */
    kvf_cache *cache;
    kvf_sequence **sequences; /* [batch_max] */
    kvf_stream *stream;
    uint32_t batch;
    uint32_t seen; /* eager steps in a row with these */
    bool wants_logits;
    bool is_refused; /* the library said no; not asked again */
} transformer_recording;

/* Who is asked whether a prefill goes on. */
typedef struct transformer_watch {
    kvf_prefill_progress_fn progress; /* NULL = nobody */
    void *user;
    bool stopped; /* it said no */
} transformer_watch;

/* Who looks at attention. */
typedef struct transformer_observer {
    kvf_attention_fn see; /* NULL = nobody */
    void *user;
} transformer_observer;

struct kvf_transformer {
    kvf_transformer_options options;
    kvf_model_config model;
    kvf_rope_table rope;
    const transformer_ops *ops;
    void *device;              /* of the ops */
    char *memory;              /* what layers ... index and recording.sequences are part of */
    transformer_layer *layers; /* [model.layers] */
    float *vectors;            /* norms and biases, widened */
    kvf_linear embedding;      /* weight and dtype only */
    uint32_t *positions;       /* host [rows of hidden states] */
    uint32_t *index;           /* likewise: rows to gather, ids to start over with */
    transformer_prompt prompt; /* of a prefill */
    const float *final_norm;
    kvf_linear head;
    transformer_buffers buffers;
    transformer_recording recording;
    transformer_watch watch;
    transformer_observer observer;
    struct kvf_completion *completion; /* where rows of pruned prompts are kept, or NULL */
    uint64_t weight_bytes;
};

#endif
