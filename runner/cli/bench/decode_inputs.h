/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_CLI_DECODE_INPUTS_H
#define KVF_CLI_DECODE_INPUTS_H

/*
 * Keys, values and queries of `kvferry bench decode`, where a model's own kernels would have left
 * them.
 *
 * Knows no caches. Keys and values are alike and random; with passages, keys of neighbouring tokens
 * share a theme as well. Queries drift slowly. With passages every query head looks at some
 * topics, which are passages; now and then it turns to another topic, and a topic becomes another
 * passage anywhere in the context. Invariant: what a seed and the options give is the same in every
 * case.
 */

#include "bench_decode_options.h"

#define DECODE_CHUNK 512u /* most tokens of keys at once */

typedef struct decode_vectors {
    uint16_t *host; /* pinned */
    void *alias;    /* of it */
    void *device;   /* memory of the device */
} decode_vectors;

typedef struct decode_inputs {
    kvf_runtime *runtime;
    kvf_stream *stream;
    decode_vectors kv;    /* [DECODE_CHUNK or batch, kv_heads, head_dim] bf16 */
    decode_vectors q;     /* [batch, query_heads, head_dim] */
    float *drift;         /* [DECODE_BATCH_MAX, query_heads, head_dim] */
    float *theme;         /* [kv_heads, head_dim] */
    uint32_t *passages;   /* [topics] the passage of each */
    uint32_t *looks;      /* [DECODE_BATCH_MAX, query_heads, 8] topics */
    uint32_t looks_count; /* that are used, per query head */
    uint64_t random;
} decode_inputs;

/** Closed by the caller, even after a failure. */
kvf_status decode_inputs_open(decode_inputs *in, kvf_runtime *runtime, kvf_stream *stream,
                              const decode_options *o);
void decode_inputs_close(decode_inputs *in);

/** A case begins: everything from the seed. */
void decode_inputs_begin(decode_inputs *in, const decode_options *o);
/** Keys of the tokens from `first` on. */
kvf_status decode_inputs_keys(decode_inputs *in, const decode_options *o, uint32_t first,
                              uint32_t count);
/** Queries of the next step, and the keys that it appends. */
kvf_status decode_inputs_step(decode_inputs *in, const decode_options *o, uint32_t batch);

#endif
