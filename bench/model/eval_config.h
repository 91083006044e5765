/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_BENCH_EVAL_CONFIG_H
#define KVF_BENCH_EVAL_CONFIG_H

/*
 * A configuration of the evaluation: settings of a cache as FIELD=VALUE, apart by spaces, and what
 * is besides them:
 *
 *     shuffle=1         pages are chosen by the scores of other pages
 *     rest=codes        what was not fetched is estimated; rest=keys: with exact masses;
 *                       from=LAYER: from this layer on
 *     adaptive=FLOOR    KV heads share the budget by mass; window=1: by their mass of everything
 *
 * It reads words and opens nothing. Invariant: what is not said is the library's default.
 */

#include "eval_ideas.h"
#include "eval_shuffle.h"

#define EVAL_CONFIG_BYTES 1024

/* What a configuration is besides a cache. */
typedef struct eval_extras {
    eval_shuffle shuffle;
    eval_adaptive adaptive;
    eval_rest rest;
    bool has_rest;
    char words[EVAL_CONFIG_BYTES]; /* what was asked for */
} eval_extras;

/* Into @p config, whose geometry is set, and @p extras; changes @p words. */
kvf_status eval_config_read(char *words, kvf_cache_config *config, eval_extras *extras,
                            kvf_error *error);

#endif
