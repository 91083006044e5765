/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVL_LLAMA_SETTINGS_H
#define KVL_LLAMA_SETTINGS_H

/*
 * Settings of the plug-in, from the text of KVFERRY_LLAMA: `name=value` separated by blanks, with
 * names, ranges and messages of the library, or `off` alone. Knows nothing of ggml.
 */

#include <kvferry/blocks.h>
#include <kvferry/setting.h>

enum { KVL_SETTING_TEXT = 640 };

/** Who computes prompts. */
typedef enum kvl_prompts { KVL_PROMPTS_AUTO, KVL_PROMPTS_LLAMA, KVL_PROMPTS_KVFERRY } kvl_prompts;

/** Where tokens are: in the library's pages, or in llama.cpp's memory as well. AUTO and ONE differ
 * in quantized pages, from which llama.cpp gets other numbers back than it wrote. */
typedef enum kvl_tokens_kept { KVL_COPIES_AUTO, KVL_COPIES_ONE, KVL_COPIES_TWO } kvl_tokens_kept;

typedef struct kvl_settings {
    int off;
    kvf_runtime_config runtime; /* threads 0: those of llama.cpp */
    kvf_cache_config cache;     /* policy and memory; geometry is the model's */
    uint64_t host_memory;       /* most bytes of pages; 0 = what there is */
    uint32_t rows;              /* most tokens of a pass that are a step */
    kvl_prompts prompts;
    kvl_tokens_kept copies;
    double log_seconds; /* between summaries; 0 = at the end only */
    uint32_t verify;    /* every N-th step of a layer is compared with llama.cpp's; 0 = none */
} kvl_settings;

/** @param text   NULL or empty: defaults
 *  @param error  what is wrong, KVL_SETTING_TEXT bytes
 *  @return 1; 0 = the error says why */
int kvl_settings_read(const char *text, kvl_settings *settings, char *error);

#endif
