/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Hybrid selection: a static set of single tokens, renewed now and then, and the best pages of each
 * step by the digest's upper bound. After PRKV, "Page Restricted KV Cache for High Accuracy and
 * Efficiency LLM Generation": static share S of the budget, pages of 32 tokens, a refresh every 128
 * steps.
 */

#include "select.h"

const kvf_select_policy kvf_select_hybrid = {.select = KVF_SELECT_HYBRID,
                                             .name = "hybrid",
                                             .static_use = KVF_STATIC_CONFIGURED,
                                             .scores_pages = 1,
                                             .choose = kvf_choose_top};
