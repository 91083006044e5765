/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Sink and the newest tokens, without looking at keys. After StreamingLLM, "Efficient Streaming
 * Language Models with Attention Sinks".
 */

#include "select.h"

const kvf_select_policy kvf_select_streaming = {.select = KVF_SELECT_STREAMING,
                                                .name = "streaming",
                                                .static_use = KVF_STATIC_NONE,
                                                .choose = kvf_choose_newest};
