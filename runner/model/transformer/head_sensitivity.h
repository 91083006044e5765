/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_MODEL_HEAD_SENSITIVITY_H
#define KVF_MODEL_HEAD_SENSITIVITY_H

/*
 * How far each KV head's output is off when it attends to first and newest tokens instead of those
 * that it chooses: its sensitivity.
 *
 * In every decode step that is observed, a head with output o under the cache's selection attends
 * once more, to the sink and as many newest pages as fill the budget; with o' from these its
 * sensitivity is |(o - o') W|^2 / |x|^2, where W are its rows of the output projection and x is
 * what the layer got. It knows heads and pages, not prompts. Invariant: nothing is fed on, so the
 * steps are those that there would be without it.
 */

#include "transformer.h"

typedef struct kvf_head_sensitivity kvf_head_sensitivity;

/**
 * @param cache  of @p model, on the host device, with a selection that kvf_attend_pages goes with;
 *               borrowed, as are model and stream
 */
KVF_CHECKED kvf_status kvf_head_sensitivity_open(kvf_runtime *runtime,
                                                 const kvf_model_config *model, kvf_cache *cache,
                                                 kvf_stream *stream, kvf_head_sensitivity **out,
                                                 kvf_error *error);
/** NULL is fine. */
void kvf_head_sensitivity_close(kvf_head_sensitivity *sensitivity);

/** A kvf_attention_fn; @p sensitivity is a kvf_head_sensitivity. Steps have one sequence. */
KVF_CHECKED kvf_status kvf_head_sensitivity_see(void *sensitivity, const kvf_attention_view *view);

/** Add the mean of the steps since the last call to @p sums [layers, kv_heads]. */
void kvf_head_sensitivity_take(kvf_head_sensitivity *sensitivity, double *sums);

#endif
