/* SPDX-License-Identifier: Apache-2.0 */

/* Settings of caches with a disk tier; see the header. */

#include "disk_rig.h"

#include <stdlib.h>
#include <string.h>

void disk_config(kvf_cache_config *config, uint32_t tokens, uint32_t bundle_bytes)
{
    kvf_runtime_config rc = test_runtime_config();
    kvf_runtime *runtime = NULL;
    kvf_error error = {0};
    config->disk_path = save_folder();
    config->disk_bundle_bytes = bundle_bytes;
    config->transfer = test_transfer(config->transfer);
    assert_int_equal(test_runtime_open(&rc, &runtime, NULL), KVF_OK);
    /* The least that is taken, as the refusal says. */
    config->host_bytes = 1;
    assert_int_equal(kvf_cache_plan_make(runtime, config, &(kvf_cache_plan){0}, &error),
                     KVF_INVALID);
    const char *least = strstr(error.text, "give at least ");
    if (!least)
        fail_msg("%s", error.text);
    const uint64_t bytes = strtoull(least + strlen("give at least "), NULL, 10);
    config->host_bytes = (uint64_t)tokens * config->layers * config->kv_heads * config->head_dim *
                         2 * test_dtype_bytes(config->dtype) / 4;
    if (config->host_bytes < bytes)
        config->host_bytes = bytes;
    kvf_runtime_close(runtime);
}
