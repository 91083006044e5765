/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_CLI_PRUNE_OPTIONS_H
#define KVF_CLI_PRUNE_OPTIONS_H

/*
 * The options of pruning and of head masks, and the pruning that follows from them.
 *
 * It knows text and which options contradict each other; ranges that depend on the model or the
 * prompt are the library's. Invariant: later wins: defaults of the policy, the file of
 * --prune-config, the command line.
 */

#include "model_config.h"
#include "prune_settings.h"
#include "safetensors.h"

typedef struct cli_prune_options {
    const kvf_prune_policy *policy; /* NULL = no pruning */
    const char *config_file;        /* of kvferry tune; NULL = none */
    const char *mask_file;          /* NULL = every head retrieves */
    double mask_sparsity;           /* negative = the file has 0 and 1 */
    uint32_t streaming_sink, streaming_recent;
    uint32_t chunk_tokens;  /* 0 = not said */
    uint32_t chunk_queries; /* 0 = not said */
    kvf_retention retention;
    kvf_eviction eviction;
    bool is_retention_given, is_streaming_given;
    bool wants_list; /* --prune help */
    cli_prune_values values;
} cli_prune_options;

/** Rows for the table of options; ids from CLI_PRUNE_FIRST up. */
#define CLI_PRUNE_FIRST 512
const cli_option *cli_prune_rows(size_t *count);

void cli_prune_options_init(cli_prune_options *options);

/** @return false after a message on stderr */
bool cli_prune_take(const cli_option *row, const char *text, cli_prune_options *out);

/** What can be said without a model. @return false after a message on stderr */
bool cli_prune_check(const cli_prune_options *options);

/**
 * The pruning that was asked for. Options must have a policy.
 *
 * @return KVF_OK; what is wrong with the file of --prune-config. The ranges are checked by
 *         kvf_prune_config_check
 */
KVF_CHECKED kvf_status cli_prune_make(const cli_prune_options *options,
                                      const kvf_model_config *model, const kvf_weights *weights,
                                      kvf_prune_config *out, kvf_error *error);

#endif
