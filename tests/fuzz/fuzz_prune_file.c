/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Any text as what `kvferry tune` wrote: refused with a message, or settings that are in range, and
 * that give the same settings when they are written and read again.
 */

#include "fuzz_heap.h"
#include "fuzz_input.h"
#include "prune_file.h"

#include <string.h>

static const cli_model_print model = {
    .family = "llama",
    .layers = 4,
    .query_heads = 4,
    .kv_heads = 2,
    .head_dim = 64,
    .hidden_size = 128,
    .vocab_size = 1024,
    .weights = "0123456789abcdef",
};

static void check_values(const cli_prune_values *values)
{
    kvf_prune_config config;
    kvf_prune_config_init(&config, NULL);
    cli_settings_apply(values, &config);
    fuzz_require((values->given & cli_setting_bit("layer")) != 0);
    fuzz_require(config.settings.layer < model.layers);
    fuzz_require(config.settings.keep > 0.0f && config.settings.keep <= 1.0f);
    fuzz_require(config.settings.propagate > 0.0f && config.settings.propagate <= 1.0f);
    const kvf_setting *s;
    for (uint32_t i = 0; (s = kvf_prune_setting(i)) != NULL; i++) {
        char text[64];
        cli_prune_values again = {0};
        if (values->given >> i & 1)
            fuzz_require(
                cli_setting_parse(s, kvf_setting_show(s, &config, text, sizeof text), &again));
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const char *const policies[] = {"fastkv", "structkv"};
    for (size_t i = 0; i < 2; i++) {
        cli_prune_values values = {.given = 1u << 31};
        kvf_error error = {.text = ""};
        const kvf_status status = cli_prune_file_parse((const char *)data, size, "file", &model,
                                                       policies[i], &values, &error);
        if (status == KVF_OK)
            check_values(&values);
        else
            fuzz_require(error.status == status && error.text[0] && values.given == 1u << 31);
    }
    return 0;
}
