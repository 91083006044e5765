/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_CLI_PRUNE_SETTINGS_H
#define KVF_CLI_PRUNE_SETTINGS_H

/*
 * The settings of pruning by name: as text on the command line, as members of JSON.
 *
 * It knows names, types and ranges, and which policy looks at which setting; what a value means is
 * the policy's. Invariant: every setting has one row, and a row's bit says whether it was set.
 */

#include "json.h"
#include "json_writer.h"
#include "option_values.h"

#include <kvferry/prune.h>
#include <stdio.h>

typedef enum cli_setting {
    SETTING_KEEP,
    SETTING_KEEP_TOKENS,
    SETTING_PROPAGATE,
    SETTING_PROPAGATE_TOKENS,
    SETTING_LAYER,
    SETTING_WINDOW,
    SETTING_POOL,
    SETTING_POOL_WIDTH,
    SETTING_GROUP_REDUCE,
    SETTING_WINDOW_MEAN,
    SETTING_SINK_TOKENS,
    SETTING_RECENT_SHARE,
    SETTING_BETA,
    SETTING_DECAY,
    SETTING_WEIGHTS,
    SETTING_MASS_SHARE,
    SETTING_PIVOT,
    SETTING_BLOCK_TOKENS,
    SETTING_LAYER_MIN,
    SETTING_LAYER_MAX,
    SETTING_LAYERS_OBSERVED,
    SETTING_THRESHOLD,
    SETTING_TWO_PASS,
    SETTING_COUNT
} cli_setting;

#define SETTING_BIT(setting) (1u << (setting))

/** Settings of which some are set. Zero-initialise. */
typedef struct cli_prune_values {
    kvf_prune_settings settings; /* fields whose bit is clear are not read */
    uint32_t given;              /* SETTING_BIT of each field that is set */
} cli_prune_values;

/** Name of a setting, as in kvf_prune_settings. Never NULL. */
const char *cli_setting_name(cli_setting setting);

/** What a value of it is, for messages: "a whole number from 1 to 1048576". text [96]; returned */
const char *cli_setting_range(cli_setting setting, char text[96]);

/** From text. @return false if it is out of range or no such value; nothing is printed */
bool cli_setting_parse(cli_setting setting, const char *text, cli_prune_values *out);

/** From "name=value". @p option is for messages. @return false after a message on stderr */
bool cli_setting_assign(const cli_option *option, const char *text, cli_prune_values *out);

/** As text. text [64]; returned */
const char *cli_setting_show(cli_setting setting, const kvf_prune_settings *settings,
                             char text[64]);

/** Bits of the settings that a policy of the library looks at. */
uint32_t cli_settings_of(const char *policy);

/** Copy what is given over @p to. */
void cli_settings_apply(const cli_prune_values *values, kvf_prune_settings *to);

/** An object @p key of the settings in @p mask. */
void cli_settings_write(cli_json *json, const char *key, const kvf_prune_settings *settings,
                        uint32_t mask);

/**
 * Read such an object.
 *
 * @param what   the file and the object, for messages
 * @return KVF_OK; KVF_CORRUPT naming a member that is not known, has the wrong type or is out of
 *         range
 */
KVF_CHECKED kvf_status cli_settings_read(const json_value *object, const char *what,
                                         cli_prune_values *out, kvf_error *error);

/** The policies, their papers and their defaults, for people. */
void cli_policies_print(FILE *file);

/** The library's policy of this name, or NULL after a message with a suggestion on stderr. */
const kvf_prune_policy *cli_policy_find(const cli_option *option, const char *name);

const char *cli_retention_name(kvf_retention value);
const char *cli_eviction_name(kvf_eviction value);
const char *cli_pool_name(kvf_pool_kind value);

/** For options; each ends with a NULL name. */
extern const cli_named cli_retention_names[];
extern const cli_named cli_eviction_names[];

#endif
