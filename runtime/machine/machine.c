/* SPDX-License-Identifier: Apache-2.0 */

/* What a runtime knows of its machine, in single answers; describe.c tells all of it at once. */

#include "runtime.h"

const char *kvf_runtime_device_name(const kvf_runtime *runtime)
{
    return runtime->properties.name;
}

uint32_t kvf_runtime_numa_nodes(const kvf_runtime *runtime, int32_t *ids, uint32_t capacity)
{
    const kvf_topology *t = runtime->topology;
    if (!t->known)
        return 0;
    for (uint32_t i = 0; i < kvf_min_u32(capacity, t->node_count); i++)
        ids[i] = t->nodes[i].id;
    return t->node_count;
}
