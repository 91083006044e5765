/* SPDX-License-Identifier: Apache-2.0 */

/*
 * direct: nothing moves, kernels read pages where they live.
 *
 * Only for a device that shares host memory. Its table has no `move`, which
 * tells the engine to take no stream, no event and no staging.
 */

#include "transfer_method.h"

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

static void direct_close(kvf_transfer_engine *engine)
{
    (void)engine;
}

const kvf_transfer_ops kvf_transfer_direct_ops = {
    .method = KVF_TRANSFER_DIRECT,
    .name = "direct",
    .open = direct_open,
    .close = direct_close,
    .move = NULL,
    .needs = NULL,
};
