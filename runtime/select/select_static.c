/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The static set takes the whole budget: tokens that the last refresh found important, as SnapKV
 * ("SnapKV: LLM Knows What You are Looking for Before Generation") keeps them, but renewed.
 */

#include "select.h"

const kvf_select_policy kvf_select_static = {.select = KVF_SELECT_STATIC,
                                             .name = "static",
                                             .static_use = KVF_STATIC_WHOLE,
                                             .choose = kvf_choose_newest};
