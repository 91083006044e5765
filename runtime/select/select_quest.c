/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Pages per query head by the digest's upper bound, min and max per channel. After Quest,
 * "Query-Aware Sparsity for Efficient Long-Context LLM Inference". Lists, slots and attention are
 * per query head, so pages that several heads of a group choose are fetched for each.
 */

#include "select.h"

const kvf_select_policy kvf_select_quest = {.select = KVF_SELECT_QUEST,
                                            .name = "quest",
                                            .static_use = KVF_STATIC_NONE,
                                            .per_query_head = 1,
                                            .scores_pages = 1,
                                            .choose = kvf_choose_top};
