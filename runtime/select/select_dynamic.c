/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Pages take the whole budget: the best of each step by the digest's upper bound, chosen per KV
 * head over its query group. Hybrid with a static share of 0.
 */

#include "select.h"

const kvf_select_policy kvf_select_dynamic = {.select = KVF_SELECT_DYNAMIC,
                                              .name = "dynamic",
                                              .static_use = KVF_STATIC_NONE,
                                              .scores_pages = 1,
                                              .choose = kvf_choose_top};
