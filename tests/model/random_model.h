/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TESTS_RANDOM_MODEL_H
#define KVF_TESTS_RANDOM_MODEL_H

/*
 * Writes a model directory with made-up weights, so that tests and benchmarks need no large files.
 *
 * The numbers of a tensor follow from its name; make_logits_goldens.py makes the same ones. It
 * knows config.json and safetensors, not what a transformer computes. Invariant: the same
 * configuration gives the same bytes everywhere.
 */

#include "model_config.h"

/** The generator: splitmix64 seeded with FNV-1a of a name. */
typedef struct random_stream {
    uint64_t state;
} random_stream;

random_stream random_stream_of(const char *name);
uint64_t random_stream_next(random_stream *stream);
float random_stream_unit(random_stream *stream); /* from -1, below 1 */

/**
 * Write config.json and model.safetensors into a directory that exists.
 *
 * @param config_text  a config.json
 * @return whether it could be written; a message is on stderr if not
 */
bool random_model_write(const char *directory, const char *config_text);

#endif
