/* SPDX-License-Identifier: Apache-2.0 */

/*
 * each: one device copy per page. The baseline, for comparison; it needs no staging.
 *
 * Knows nothing beyond a request. The copies stand in the copy stream's bounded queue, which makes
 * the engine's thread wait, not the caller.
 */

#include "transfer_method.h"

static kvf_status each_move(kvf_transfer_engine *engine, const kvf_transfer_list *list)
{
    const kvf_device_ops *ops = engine->device->ops;
    kvf_transfer_clock *clock;
    kvf_status status = kvf_transfer_clock_start(engine, engine->copy_stream, 1, &clock);
    for (uint32_t i = 0; i < list->count && status == KVF_OK; i++)
        status =
            ops->copy(engine->copy_stream, list->to[i], list->from[i], engine->config.page_bytes);
    kvf_status stopped = kvf_transfer_clock_stop(engine, engine->copy_stream, clock);
    if (status == KVF_OK)
        kvf_transfer_count(&engine->counters.copies, list->count);
    return status != KVF_OK ? status : stopped;
}

static void each_shape(const kvf_transfer_config *config, kvf_transfer_shape *out)
{
    (void)config;
    out->pages_per_copy = 1;
}

const kvf_transfer_ops kvf_transfer_each = {
    .move = each_move, .shape = each_shape, .copies_pages = true};
