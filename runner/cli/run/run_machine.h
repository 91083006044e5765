/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_CLI_RUN_MACHINE_H
#define KVF_CLI_RUN_MACHINE_H

/*
 * The machine of a run: settings of the cache as they are in force, the memory that all of it
 * takes, and everything that is open.
 *
 * It is written by run_machine.c, run_plan.c and the parts of pruning that open something; a run
 * uses it and changes none of it. Invariant: a machine that is zero or half open can be closed.
 */

#include "completion.h"
#include "generate.h"
#include "memory_plan.h"
#include "run_input.h"

/* Heads that stream. */
typedef struct cli_head_mask {
    uint8_t *of; /* [layers, kv_heads] of --head-mask, or NULL */
    uint32_t streaming;
} cli_head_mask;

typedef struct cli_machine {
    kvf_cache_config config; /* of the cache */
    cli_memory_plan plan;
    uint32_t rows;      /* answers at once; 0 = no batch */
    uint32_t step_rows; /* tokens in a step, at most: of answers, and of what drafts guess */
    uint32_t piece;     /* of prompts, tokens that are read between two steps, at most */
    kvf_runtime *runtime;
    kvf_transformer *transformer;
    kvf_cache *cache;
    kvf_stream *stream;
    kvf_sampler *sampler;
    kvf_draft *draft; /* NULL = a token per step, or a batch, which has its own */
    kvf_session session;
    cli_head_mask head_mask;
    kvf_prune *prune; /* NULL = prompts are not pruned */
    kvf_prune_config prune_config;
    kvf_completion *completion; /* NULL = pruned prompts stay pruned */
} cli_machine;

/** The plan, run_plan.c: the cache's settings, and the memory of everything. Needs the runtime. */
KVF_CHECKED kvf_status cli_machine_plan(const cli_input *in, cli_machine *m, kvf_error *error);

/** How the model is opened. */
kvf_transformer_options cli_machine_transformer(const cli_input *in, const cli_machine *m);

/** Everything that the plan has. @return KVF_OK also if it was interrupted: then less is open */
KVF_CHECKED kvf_status cli_machine_open(const cli_input *in, cli_machine *m, kvf_error *error);
/** After the sequences. */
void cli_machine_close(cli_machine *m);

/* What `run` and `tune` have in common. */

/** A runtime's log, to stderr. */
void cli_log_line(void *user, int level, const char *line);

/** Sets chunk_max, which follows from the device and the prompt, and batch_max. */
void cli_transformer_fit(kvf_transformer_options *options, uint32_t tokens);

/** Behind a plan: a line if tensors of a file are widened. */
void cli_note_widening(const kvf_weights *weights);

/** Memory that weights, runner and cache will take, and what there is. */
KVF_CHECKED kvf_status cli_plan_make(const kvf_transformer_options *options,
                                     const kvf_cache_config *cache, cli_memory_plan *plan,
                                     kvf_error *error);

/** Tensors that a file holds in another type or order than is needed. @return KVF_OK also if
 * interrupted */
KVF_CHECKED kvf_status cli_weights_convert(kvf_weights *weights, const kvf_runtime *runtime,
                                           kvf_error *error);

/* Pruning and head masks, run_prune.c. */

/** Settings, checked against model and prompt, into the cache's. */
KVF_CHECKED kvf_status cli_run_prune_prepare(const cli_input *in, cli_machine *m, kvf_error *error);
/** Chunks of a prefill. */
void cli_run_prune_options(const cli_input *in, const cli_machine *m,
                           kvf_transformer_options *options);
/** Tokens that go through all layers at once; 0 = layer by layer, or as the device likes it. */
uint32_t cli_run_prune_chunk(const cli_input *in);
/** Its part of the memory plan. Needs the cache's settings. */
KVF_CHECKED kvf_status cli_run_prune_plan(const cli_input *in, cli_machine *m, kvf_error *error);
/** The pruner, if there is one. Needs the cache and the transformer. */
KVF_CHECKED kvf_status cli_run_prune_open(const cli_input *in, cli_machine *m, kvf_error *error);

/* Completing a pruned prompt, run_complete.c. */

bool cli_run_completes(const cli_input *in, const cli_machine *m);
/** Room for the completed sequence beside the pruned one. */
void cli_run_complete_reserve(const cli_input *in, cli_machine *m);
/** Hidden states, in the memory plan. */
void cli_run_complete_plan(const cli_input *in, cli_machine *m);
/** Needs the transformer. */
KVF_CHECKED kvf_status cli_run_complete_open(const cli_input *in, cli_machine *m, kvf_error *error);

/*
 * `--save` and `--load`: a prompt that was prefilled once.
 *
 * A file's note is the ids of its prompt, and its model is the fingerprint of the one that runs. It
 * knows files and ids, not how a prompt is prefilled. Invariant: what is loaded is the beginning of
 * the prompt.
 */

/** With --load: sets in->loaded. Needs model and weights; opens the runtime.
 * @return KVF_OK; KVF_INVALID; as kvf_runtime_open and kvf_saved_read */
KVF_CHECKED kvf_status cli_saved_read(cli_input *in, cli_machine *m, kvf_error *error);

/** The prompt begins with what is loaded, or is what was saved if none was given.
 * @return KVF_OK; KVF_INVALID says which token differs */
KVF_CHECKED kvf_status cli_saved_match(cli_input *in, kvf_error *error);

/** With --save: the file can be written, as far as can be said. Needs the runtime.
 * @return KVF_OK, KVF_UNSUPPORTED, KVF_SYSTEM */
KVF_CHECKED kvf_status cli_saved_check(const cli_input *in, const cli_machine *m, kvf_error *error);

/** With --load: host tokens that its sequence takes, window included; else 0. */
uint64_t cli_saved_room(const cli_input *in, const cli_machine *m);

#endif
