/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_BENCH_MODEL_H
#define KVF_BENCH_MODEL_H

/*
 * A model and a cache for it on the host device, for benchmarks of the runner.
 *
 * Knows nothing of what is measured. A model of random weights lies in a folder for temporary files
 * until it is closed.
 */

#include "transformer.h"

typedef struct bench_model {
    char directory[512]; /* of a random model; empty = the model was there */
    kvf_model_config config;
    kvf_runtime *runtime;
    kvf_stream *stream;
    kvf_weights *weights;
    kvf_transformer *transformer;
    kvf_cache *cache;
} bench_model;

/*
 * Everything, or a message and false; close it in either case.
 *
 * @param path     of a model; NULL: one of random weights for `random_config`, a config.json
 * @param chunk    tokens of an operation of a prefill
 * @param prompt   tokens of a prompt that goes layer by layer; 0 = none does
 * @param cache    its geometry is filled in
 */
bool bench_model_open(bench_model *m, const char *path, const char *random_config, uint32_t chunk,
                      uint32_t prompt, kvf_cache_config *cache);
void bench_model_close(bench_model *m);

/* Wait for the stream, whatever came before. @return the first failure */
kvf_status bench_model_wait(bench_model *m, kvf_status status);

#endif
