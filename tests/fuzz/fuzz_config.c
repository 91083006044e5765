/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Any text as config.json, and what follows a zero byte as generation_config.json: refused with a
 * message, or a configuration that is in range and has finite rotary frequencies.
 */

#include "fuzz_heap.h"
#include "fuzz_input.h"
#include "model_config.h"
#include "watched_heap.h"

#include <math.h>
#include <string.h>

static void check_config(const kvf_model_config *config)
{
    fuzz_require(config->kv_heads > 0 && config->query_heads % config->kv_heads == 0);
    fuzz_require(config->query_heads / config->kv_heads <= 128);
    fuzz_require(config->head_dim % 2 == 0 && config->head_dim / 2 <= KVF_ROPE_FREQUENCIES_MAX);
    fuzz_require(config->eos_count <= KVF_EOS_MAX && config->vocab_size > 0 && config->layers > 0);
    fuzz_require(config->window <= 1u << 20);
    fuzz_require(config->window == 0 || config->layers * config->kv_heads <= KVF_WINDOW_HEADS_MAX);
    for (uint32_t i = 0; config->window && i < config->layers * config->kv_heads; i++)
        fuzz_require(config->window_mask[i] <= 1);
    kvf_rope_table table;
    kvf_rope_table_make(config, &table);
    fuzz_require(table.count == config->head_dim / 2);
    for (uint32_t i = 0; i < table.count; i++)
        fuzz_require(isfinite(table.inv_freq[i]) && table.inv_freq[i] >= 0);
    fuzz_require(isfinite(table.attention_scaling));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const char *text = (const char *)data;
    const char *zero = size != 0 ? memchr(text, '\0', size) : NULL;
    size_t config_bytes = zero != NULL ? (size_t)(zero - text) : size;
    const char *generation = zero != NULL ? zero + 1 : NULL;
    size_t generation_bytes = zero != NULL ? size - config_bytes - 1 : 0;
    heap h = {.fail_at = fuzz_heap_choose(data, size)};
    heap_watch(&h);
    kvf_model_config config;
    kvf_error error = {.text = ""};
    kvf_status status =
        kvf_model_config_parse(text, config_bytes, generation, generation_bytes, &config, &error);
    fuzz_heap_told(&h, status);
    if (status == KVF_OK)
        check_config(&config);
    else
        fuzz_require(error.status == status && error.text[0] != '\0');
    fuzz_require(heap_left() == 0);
    return 0;
}
