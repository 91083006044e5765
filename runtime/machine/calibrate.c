/* SPDX-License-Identifier: Apache-2.0 */

/*
 * When the link is measured: once per runtime, when the first cache wants to choose by size, or
 * when the caller asks.
 *
 * Knows nothing of how it is measured (offload/transfer_calibrate.h). Invariant: `calibration` is
 * written once, under the lock, before anybody reads it.
 */

#include "calibrate.h"

#include <string.h>

kvf_status kvf_calibration_open(kvf_runtime *rt, const char *path)
{
    if (pthread_mutex_init(&rt->calibration_lock, NULL) != 0)
        KVF_FAIL(rt->context, KVF_SYSTEM, "a lock for the calibration could not be made");
    rt->has_calibration_lock = 1;
    if (!path)
        return KVF_OK;
    rt->calibration_path = kvf_alloc(rt->context, strlen(path) + 1, 1);
    if (!rt->calibration_path)
        KVF_FAIL(rt->context, KVF_OUT_OF_MEMORY, "no memory for calibration_path");
    memcpy(rt->calibration_path, path, strlen(path) + 1);
    return KVF_OK;
}

void kvf_calibration_close(kvf_runtime *rt)
{
    kvf_free(rt->context, rt->calibration_path);
    if (rt->has_calibration_lock)
        pthread_mutex_destroy(&rt->calibration_lock);
}

static kvf_status calibrate(kvf_runtime *rt)
{
    if (rt->is_calibrated || !rt->config.calibrate || rt->properties.shares_host_memory)
        return KVF_OK;
    const kvf_calibration_config config = {.path = rt->calibration_path,
                                           .gather_threads = rt->config.gather_threads,
                                           .memory = kvf_runtime_memory(rt)};
    KVF_TRY(kvf_calibrate(rt->device, &config, &rt->calibration));
    rt->is_calibrated = 1;
    return KVF_OK;
}

kvf_status kvf_runtime_calibrate(kvf_runtime *runtime)
{
    pthread_mutex_lock(&runtime->calibration_lock);
    const kvf_status status = calibrate(runtime);
    pthread_mutex_unlock(&runtime->calibration_lock);
    return status;
}

const kvf_transfer_choice *kvf_runtime_choose(kvf_runtime *runtime, size_t page_bytes,
                                              kvf_transfer_choice *choice)
{
    if (!runtime->is_calibrated || !runtime->calibration.is_measured)
        return NULL;
    kvf_calibration_choose(&runtime->calibration, page_bytes, choice);
    return choice;
}
