/* SPDX-License-Identifier: Apache-2.0 */

/*
 * One page list per layer, shared by all heads; digest = centre of the box and mean distance from
 * it. After ArkVale, "Efficient Generative LLM Inference with Recallable Key-Value Eviction".
 */

#include "select.h"

const kvf_select_policy kvf_select_arkvale = {.select = KVF_SELECT_ARKVALE,
                                              .name = "arkvale",
                                              .static_use = KVF_STATIC_NONE,
                                              .per_layer = 1,
                                              .scores_pages = 1,
                                              .choose = kvf_choose_top};
