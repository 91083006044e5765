/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_TESTS_MODEL_PRUNE_RUN_RIG_H
#define KVF_TESTS_MODEL_PRUNE_RUN_RIG_H

/*
 * Helpers of the tests of pruned prefill: a small random model, a run of a prompt by it, and
 * everything that comes out of a run: lengths and positions of every layer, and the logits of the
 * steps after the prompt, decoded with a budget that makes selection matter.
 */

#include "generate.h"
#include "model_fixture.h"
#include "model_rig.h"
#include "unit.h"

#define LAYERS  4u
#define HEADS   2u
#define VOCAB   200u
#define HIDDEN  128u
#define PROMPT  150u
#define STEPS   5u
#define CHUNK   17u
#define BATCH   3u
#define WINDOW  8u
#define PAGE    8u
#define PROMPTS (2 * PROMPT + 20u) /* rows of a batch */

typedef model_rig rig;

typedef struct rig_shape {
    kvf_select select;
    uint32_t budget, batch, sequences, tokens;
    bool on_disk; /* with a disk tier in the rig's folder, and few pages in memory */
} rig_shape;

void rig_open_as(rig *r, const rig_shape *shape);
/* Room for as many prompts and their steps. */
void rig_open(rig *r, kvf_select select, uint32_t budget);

/* ---- a run and what comes out of it ---- */

typedef struct outcome {
    uint32_t lengths[LAYERS];
    uint32_t positions[LAYERS][PROMPT];
    float logits[STEPS][VOCAB];
} outcome;

typedef struct rig_prompt {
    uint32_t count;
    uint32_t ids[PROMPT];
} rig_prompt;

/* Ids of a prompt; of what the steps of rig_decode append, @p sequence 9. */
uint32_t rig_id(uint32_t sequence, uint32_t index);
rig_prompt one_prompt(uint32_t sequence, uint32_t length);
void rig_note_layers(const kvf_sequence *s, outcome *o);
void rig_decode(rig *r, kvf_sequence *s, outcome *o);
kvf_prune *rig_open_prune(rig *r, const kvf_prune_config *config);
kvf_session rig_session(const rig *r, kvf_prune *prune);
kvf_prune_config rig_config_of(const char *name);

/* All of a prompt at once, until it is pruned. */
void rig_prefill_pruned(rig *r, kvf_prune *prune, kvf_sequence *s, const uint32_t *ids,
                        uint32_t count);
void rig_run_one(rig *r, const kvf_prune_config *config, outcome *out, kvf_prune_stats *stats);

/* The same prompt without a pruner. */
void rig_run_plain(rig *r, const uint32_t *ids, uint32_t count, outcome *out);

void outcome_expect_same(const outcome *a, const outcome *b, const char *what);
bool outcome_is_same_logits(const outcome *a, const outcome *b);

/* ---- policies of the tests' own ---- */

/* The answer of a wrapped policy at the last restart or propagation, as indexes of its layer. */
typedef struct spy {
    const kvf_prune_policy *inner;
    uint32_t ids[PROMPT];
    uint32_t count;
    uint32_t restarts;
} spy;

kvf_prune_policy spy_policy(spy *s, const char *name);

/* Tokens i % stride == 0, and the window. */
uint32_t pick_strided(const kvf_prune_view *view, uint32_t stride, uint32_t *ids);

kvf_prune_policy own_policy(void (*decide)(const kvf_prune_view *, kvf_prune_answer *), void *user);

#endif
