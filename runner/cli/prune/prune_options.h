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
#include "weights.h"

typedef struct cli_prune_options {
    const kvf_prune_policy *policy; /* NULL = no pruning */
    const char *config_file;        /* of kvferry tune; NULL = none */
    const char *mask_file;          /* NULL = every head retrieves */
    double mask_sparsity;           /* negative = the file has 0 and 1 */
    uint32_t chunk_tokens;          /* 0 = not said */
    bool wants_list;                /* --prune help */
    cli_prune_values values;
} cli_prune_options;

/** The options of pruning; @p base is where cli_prune_options is. */
void cli_prune_add(cli_command *command, size_t base);
/** Of these, the settings which a layer is found with. */
void cli_prune_add_found_with(cli_command *command, size_t base);
/** The options of head masks; @p cache is where kvf_cache_config is. */
void cli_prune_add_mask(cli_command *command, size_t base, size_t cache);

void cli_prune_options_init(cli_prune_options *options);

/** What can be said without a model. @return false after a message on stderr */
bool cli_prune_check(const cli_prune_options *options, const cli_command *command);

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
