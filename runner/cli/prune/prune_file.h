/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_CLI_PRUNE_FILE_H
#define KVF_CLI_PRUNE_FILE_H

/*
 * What `kvferry tune` found for a model, in a file that `run --prune-config` reads.
 *
 * One JSON object: a version, the model's fingerprint, what was measured on, and one section per
 * method with its layer, its settings, and either its figures per layer or how many answers it
 * keeps at what cost. It knows the format, not how a layer is found. Invariant: a file is used only
 * if every member that is read has its type and its range, and the fingerprint is that of the model
 * that is about to run.
 */

#include "model_config.h"
#include "prune_settings.h"
#include "weights.h"

#define CLI_PRUNE_FILE_VERSION 1u

/** Tells models apart: their shape, and a hash of what their weights are. */
typedef struct cli_model_print {
    const char *family;
    uint32_t layers, query_heads, kv_heads, head_dim, hidden_size, vocab_size;
    char weights[17]; /* hexadecimal FNV-1a over names, types, shapes and some bytes of tensors */
    char settings[9]; /* likewise over numbers of config.json that change keys and values */
} cli_model_print;

void cli_model_print_make(const kvf_model_config *model, const kvf_weights *weights,
                          cli_model_print *out);

/** The methods of kvferry tune, policies of these names. */
enum { CLI_FASTKV, CLI_STRUCTKV, CLI_ASL, CLI_METHODS };
extern const char *const cli_method_names[CLI_METHODS];

/** Settings that the command found by one method. */
typedef struct cli_tuned {
    uint32_t layer; /* the one to use */
    kvf_prune_settings settings;
    uint32_t first, count; /* the figures are of layers first ... first + count - 1 */
    const double *scores;  /* [count]; NULL = not found by figures */
    const double *entropy, *sparsity, *variance; /* [count] each; NULL = not of this method */
    uint32_t layers;                             /* of the model, where there is: */
    const double *recovery; /* [layers] attention mass on what a layer gets; NULL = not measured */
    bool is_answered;       /* found by answers instead: */
    bool keeps;             /* enough of them; else it is not for a file */
    uint32_t full, kept;
    double computed;    /* share of a full prefill's tokens */
    double first_share; /* time to the first token, as a share of full attention's */
} cli_tuned;

/** Where questions were asked: at the end of prompts, or of what was pruned without them. */
typedef enum cli_asked { CLI_ASKED_END, CLI_ASKED_AFTER } cli_asked;

/** By cli_asked; NULL after the last. */
extern const char *const cli_asked_names[];

typedef struct cli_tuning {
    cli_model_print model;
    uint32_t samples, tokens;  /* so many pieces of text, of so many tokens each */
    uint32_t asked;            /* cli_asked */
    cli_tuned of[CLI_METHODS]; /* asl: layer is the mean prompt's, and not set */
} cli_tuning;

/** As JSON, into @p json. */
void cli_prune_file_write(cli_json *json, const cli_tuning *tuning);

/**
 * Read a file for one policy.
 *
 * @param out  receives layer and settings
 * @return KVF_OK; KVF_SYSTEM if it cannot be read; KVF_CORRUPT naming the member that is missing,
 *         of a wrong type or out of range; KVF_INVALID if it is of another model or has
 *         nothing for the policy; KVF_OUT_OF_MEMORY
 */
KVF_CHECKED kvf_status cli_prune_file_read(const char *path, const kvf_model_config *model,
                                           const kvf_weights *weights, const char *policy,
                                           cli_prune_values *out, kvf_error *error);

/** The same from text. @p what is the file's name, for messages. */
KVF_CHECKED kvf_status cli_prune_file_parse(const char *text, size_t bytes, const char *what,
                                            const cli_model_print *model, const char *policy,
                                            cli_prune_values *out, kvf_error *error);

#endif
