/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_MODEL_TEXT_PART_H
#define KVF_MODEL_TEXT_PART_H

/*
 * The text model in a directory of a model that reads pictures too: its tensors are called as those
 * of a text model, and those for pictures are left out.
 *
 * It knows names only. Invariant: a directory of a text model stays as it is.
 */

#include "weights_parts.h"

/** "language_model.model.X" and "model.language_model.X" are "model.X", "language_model.lm_head.X"
 * is "lm_head.X". @return a part of @p name */
const char *text_part_name(const char *name);

/** Leave out what is for pictures. */
void text_part_keep(kvf_weights *weights);

#endif
