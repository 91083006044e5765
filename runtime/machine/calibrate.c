/* SPDX-License-Identifier: Apache-2.0 */

/*
 * When the link is measured: once per runtime and page size, when the first cache with such pages
 * wants to choose by their number, or when the caller asks.
 *
 * Knows nothing of how it is measured (measure/transfer_calibrate.h). Invariant: an entry of
 * `calibration` is written once, under the lock, before anybody reads it.
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

/* Bytes of the pages that are measured: what a page costs beside its bytes counts for small ones.
 */
static const size_t sizes[KVF_LINK_SIZES] = {512, 16384};

/* The one that stands for a page size: the nearer, by their ratio. */
static uint32_t nearest(size_t page_bytes)
{
    return page_bytes * page_bytes > sizes[0] * sizes[1];
}

static kvf_status calibrate(kvf_runtime *rt, uint32_t size)
{
    if ((rt->is_calibrated >> size & 1) || !rt->config.calibrate ||
        rt->properties.shares_host_memory)
        return KVF_OK;
    const kvf_calibration_config config = {.path = rt->calibration_path,
                                           .page_bytes = sizes[size],
                                           .gather_threads = rt->config.gather_threads,
                                           .memory = kvf_runtime_memory(rt)};
    KVF_TRY(kvf_calibrate(rt->device, &config, &rt->calibration[size]));
    rt->is_calibrated |= 1u << size;
    return KVF_OK;
}

static kvf_status calibrate_one(kvf_runtime *rt, uint32_t size)
{
    pthread_mutex_lock(&rt->calibration_lock);
    const kvf_status status = calibrate(rt, size);
    pthread_mutex_unlock(&rt->calibration_lock);
    return status;
}

kvf_status kvf_runtime_calibrate(kvf_runtime *runtime)
{
    KVF_CHECK_HANDLE(runtime, runtime);
    for (uint32_t i = 0; i < KVF_LINK_SIZES; i++)
        KVF_TRY(calibrate_one(runtime, i));
    return KVF_OK;
}

kvf_status kvf_runtime_choose(kvf_runtime *rt, size_t page_bytes, kvf_transfer_choice *choice,
                              const kvf_transfer_choice **out)
{
    const uint32_t size = nearest(page_bytes);
    *out = NULL;
    KVF_TRY(calibrate_one(rt, size));
    if (!(rt->is_calibrated >> size & 1) || !rt->calibration[size].is_measured)
        return KVF_OK;
    kvf_calibration_choose(&rt->calibration[size], page_bytes, choice);
    *out = choice;
    return KVF_OK;
}
