/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Methods without staging. `direct`: nothing moves, kernels read pages where they live; only for a
 * device that shares host memory. `each`: one device copy per page, the baseline. `batch`: one
 * submission of all copies of a request, where the driver has such a call.
 *
 * They know nothing beyond a request. Copies stand in the copy stream's bounded queue, which makes
 * the engine's thread wait, not the caller. A device that lacks what a method needs refuses it at
 * open. Invariant: the arrays of a submission are the host's and are read before it returns, so
 * that the lists may be written again at once.
 */

#include "transfer_method.h"

/* ---- each ---- */

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

/* ---- batch ---- */

static kvf_status batch_open(kvf_transfer_engine *engine)
{
    kvf_device_properties properties;
    engine->device->ops->properties(engine->device, &properties);
    if (!properties.can_copy_batch && !properties.shares_host_memory)
        KVF_FAIL(engine->device->context, KVF_UNSUPPORTED,
                 "transfer 'batch' needs a driver for CUDA 12.8 or later, "
                 "and that of %s is "
                 "for %u.%u; use auto, gather or mapped",
                 properties.name, properties.driver_version / 1000,
                 properties.driver_version % 1000 / 10);
    return KVF_OK;
}

static kvf_status batch_move(kvf_transfer_engine *engine, const kvf_transfer_list *list)
{
    const kvf_device_ops *ops = engine->device->ops;
    kvf_transfer_clock *clock;
    kvf_status status = kvf_transfer_clock_start(engine, engine->copy_stream, 1, &clock);
    if (status == KVF_OK)
        status = ops->copy_batch(engine->copy_stream, list->to, list->from,
                                 engine->config.page_bytes, list->count);
    kvf_status stopped = kvf_transfer_clock_stop(engine, engine->copy_stream, clock);
    if (status == KVF_OK)
        kvf_transfer_count(&engine->counters.copies, 1);
    return status != KVF_OK ? status : stopped;
}

const kvf_transfer_ops kvf_transfer_batch = {
    .open = batch_open, .move = batch_move, .copies_pages = true};

/* ---- direct ---- */

static kvf_status direct_open(kvf_transfer_engine *engine)
{
    kvf_device_properties properties;
    engine->device->ops->properties(engine->device, &properties);
    if (!properties.shares_host_memory)
        KVF_FAIL(engine->device->context, KVF_UNSUPPORTED,
                 "transfer 'direct' needs a device that shares host memory, and %s does "
                 "not; use auto or gather",
                 properties.name);
    return KVF_OK;
}

const kvf_transfer_ops kvf_transfer_direct = {.open = direct_open};
