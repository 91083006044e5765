/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Pinned host memory for the caller: one piece that CPU and device both see.
 *
 * Knows nothing of caches. Invariant: in front of what the caller gets lies the host memory that it
 * is part of, so that freeing needs the address alone.
 */

#include "runtime.h"

#define HEAD_BYTES ((size_t)4096) /* what the caller gets is aligned to a memory page */

_Static_assert(sizeof(kvf_host_memory) <= HEAD_BYTES, "the head has room for its owner");

kvf_status kvf_pinned_alloc(kvf_runtime *runtime, size_t bytes, void **host, void **device)
{
    *host = *device = NULL;
    KVF_CHECK_HANDLE(runtime, runtime);
    if (bytes == 0 || bytes > KVF_ARENA_BYTES_MAX - HEAD_BYTES)
        KVF_FAIL(runtime->context, KVF_INVALID, "bytes = %zu: 1 to %zu in one piece", bytes,
                 KVF_ARENA_BYTES_MAX - HEAD_BYTES);
    kvf_host_memory_config config = kvf_runtime_memory(runtime);
    config.granule = kvf_round_up(bytes, 64) + HEAD_BYTES;
    config.bytes = config.granule;
    config.lower = "bytes";
    kvf_host_memory memory;
    KVF_TRY(kvf_host_memory_create(runtime->context, runtime->device, &config, &memory));
    *(kvf_host_memory *)(void *)memory.arenas[0].host = memory;
    *host = memory.arenas[0].host + HEAD_BYTES;
    *device = memory.arenas[0].device + HEAD_BYTES;
    kvf_context_hold(runtime->context);
    return KVF_OK;
}

void kvf_pinned_free(kvf_runtime *runtime, void *host)
{
    if (!host || !kvf_handle_is_alive(runtime->context))
        return;
    kvf_host_memory memory = *(kvf_host_memory *)(void *)((char *)host - HEAD_BYTES);
    kvf_host_memory_destroy(runtime->context, &memory);
    kvf_context_release(runtime->context);
}
