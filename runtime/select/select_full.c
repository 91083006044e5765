/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Every page: dense attention through the same pages, slots and splits as the others. It has no
 * budget; it is what the others are compared with.
 */

#include "select.h"

const kvf_select_policy kvf_select_full = {.select = KVF_SELECT_FULL,
                                           .name = "full",
                                           .static_use = KVF_STATIC_NONE,
                                           .all_pages = 1,
                                           .choose = kvf_choose_newest};
