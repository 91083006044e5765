/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_CLI_PRUNE_SETTINGS_H
#define KVF_CLI_PRUNE_SETTINGS_H

/*
 * The settings of pruning that somebody gave: from the command line, from JSON, to a configuration;
 * and the options of pruning and of head masks.
 *
 * It knows the library's rows (kvf_prune_setting) and which of them were given; what a value means
 * is the policy's. Invariant: fields whose bit is clear are not used.
 */

#include "json.h"
#include "model_config.h"
#include "options.h"
#include "output.h"
#include "weights.h"

#include <kvferry/prune.h>

typedef struct cli_prune_values {
    kvf_prune_config config; /* the first member: options point into it */
    uint32_t given;          /* bits of the rows that are set */
} cli_prune_values;

/** Bit of a row, 1u << its index, which must exist. */
uint32_t cli_setting_bit(const char *field);

/** From text. @return false if it is out of range or no such value; nothing is printed */
bool cli_setting_parse(const kvf_setting *setting, const char *text, cli_prune_values *out);

/** From "name=value". @return false after a message on stderr */
bool cli_setting_assign(const cli_option *option, const char *text, void *values);

/** Bits of the settings that a policy of the library looks at. */
uint32_t cli_settings_of(const char *policy);

/** The first setting of policies that is given and not in @p known; NULL if there is none. */
const kvf_setting *cli_settings_stray(const cli_prune_values *values, uint32_t known);

/** Copy what is given over @p to. */
void cli_settings_apply(const cli_prune_values *values, kvf_prune_config *to);

/** An object @p key of the settings in @p mask. */
void cli_settings_write(cli_json *json, const char *key, const kvf_prune_config *config,
                        uint32_t mask);

/**
 * Read such an object.
 *
 * @param what   the file and the object, for messages
 * @return KVF_OK; KVF_CORRUPT naming a member that is not known, has the wrong type or is out of
 *         range
 */
KVF_CHECKED kvf_status cli_settings_read(json_t *object, const char *what, cli_prune_values *out,
                                         kvf_error *error);

/** The policies, their papers and their defaults, for people. */
void cli_policies_print(FILE *file);

/** The library's policy of this name, or NULL after a message with a suggestion on stderr. */
const kvf_prune_policy *cli_policy_find(const cli_option *option, const char *name);

/*
 * The options of pruning and of head masks, and the pruning that follows from them.
 *
 * It knows text and which options contradict each other; ranges that depend on the model or the
 * prompt are the library's. Invariant: later wins: defaults of the policy, the file of
 * --prune-config, the command line.
 */

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
/** Those of them which a layer is found with. */
void cli_prune_add_found_with(cli_command *command, size_t base);
/** The options of head masks; @p cache is where kvf_cache_config is. */
void cli_prune_add_mask(cli_command *command, size_t base, size_t cache);

void cli_prune_options_init(cli_prune_options *options);

/** The checks that need no model. @return false after a message on stderr */
bool cli_prune_check(const cli_prune_options *options, const cli_command *command);

/** Prompts of so many tokens as policies see them. */
kvf_prune_shape cli_prune_shape(const kvf_model_config *model, uint32_t tokens);

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
