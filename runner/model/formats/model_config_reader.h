/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_MODEL_CONFIG_READER_H
#define KVF_MODEL_CONFIG_READER_H

/*
 * Fields of config.json with their checks, shared by model_config.c and rope_config.c.
 * Invariant: the first failure sticks; after it, every call returns a value that is safe to go on
 * with (divisors are not zero) and leaves the error alone.
 */

#include "json.h"
#include "model_config.h"

typedef struct config_reader {
    json_t *root;
    const char *file; /* for messages */
    kvf_error *error;
    kvf_status status;
} config_reader;

typedef struct config_range {
    uint32_t min, max;
    uint32_t fallback; /* if absent or null, and optional */
    bool optional;
} config_range;

/** Not supported: field, value and fix. */
void config_refuse(config_reader *reader, const char *field, json_t *value, const char *fix);
/** Wrong type or range. */
void config_reject(config_reader *reader, const char *field, json_t *value, const char *expected);

uint32_t config_u32(config_reader *reader, json_t *object, const char *field, config_range range);
/** @param fallback  if absent or null; 0 = required */
double config_positive(config_reader *reader, json_t *object, const char *field, double fallback);
bool config_bool(config_reader *reader, json_t *object, const char *field, bool fallback);

/** The rotary part: rope_theta, rope_scaling, rope_parameters. Needs the geometry. */
void config_read_rope(config_reader *reader, kvf_model_config *config);

#endif
