/* SPDX-License-Identifier: Apache-2.0 */

/*
 * direct: nothing moves, kernels read pages where they live.
 *
 * Only for a device that shares host memory.
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

const kvf_transfer_ops kvf_transfer_direct = {.open = direct_open};
