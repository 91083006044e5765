/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Opening and closing a part: its pool, slots, transfer engine and write-back.
 *
 * Knows nothing of steps. A half-open part is closed by the same function as an open one.
 */

#include "part.h"

#include "calibrate.h"
#include "plain_file.h"

/* Of a disk tier: whatever earlier calls enqueued is done. */
static kvf_status settle(void *user)
{
    const kvf_part *part = user;
    if (part->order->last_done)
        KVF_TRY(part->device->ops->event_wait(part->order->last_done));
    return part->device->ops->event_wait(part->written);
}

static kvf_status take_pool(kvf_part *part)
{
    const kvf_dims *d = &part->dims;
    kvf_host_memory_config memory = kvf_runtime_memory(part->runtime);
    const size_t block = kvf_home_block_bytes(&d->paging);
    memory.lower = d->by_block ? "block_count" : memory.lower;
    if (!d->berths && part->config.disk_path)
        KVF_TRY(kvf_disk_folder_check(part->context, part->config.disk_path));
    if (!d->berths)
        return kvf_page_pool_create(part->context, part->device, &memory, block, d->block_count,
                                    &part->pool);
    const kvf_page_pool_disk disk = {.folder = part->config.disk_path,
                                     .engine = part->runtime->seams.io_engine,
                                     .bundle_blocks = d->bundle_blocks,
                                     .berths = d->berths,
                                     .groups = part->config.layers + 1,
                                     .settle = settle,
                                     .user = part};
    KVF_TRY(part->device->ops->event_create(part->device, &part->chosen));
    KVF_TRY(part->device->ops->event_create(part->device, &part->placed));
    return kvf_page_pool_create_on_disk(part->context, part->device, &memory, &disk, block,
                                        d->block_count, &part->pool);
}

static kvf_status take_pages(kvf_part *part)
{
    const kvf_cache_config *c = &part->config;
    KVF_TRY(take_pool(part));
    const kvf_residency shape = kvf_part_residency(part);
    KVF_TRY(kvf_residency_create(&shape, &part->residency));
    kvf_transfer_config transfer = kvf_part_transfer_config(part);
    kvf_transfer_choice choice;
    transfer.pool = &part->pool.memory;
    if (c->transfer == KVF_TRANSFER_AUTO)
        KVF_TRY(kvf_runtime_choose(part->runtime, transfer.page_bytes, &choice, &transfer.choice));
    return kvf_transfer_open(part->device, &transfer, &part->transfer);
}

kvf_status kvf_part_open(kvf_part *part)
{
    const kvf_device_ops *ops = part->device->ops;
    KVF_TRY(take_pages(part));
    KVF_TRY(ops->stream_create(part->device, KVF_PRIORITY_LOW, &part->writeback));
    KVF_TRY(ops->event_create(part->device, &part->sealed));
    return ops->event_create(part->device, &part->written);
}

void kvf_part_close(kvf_part *part)
{
    const kvf_device_ops *ops = part->device->ops;
    ops->stream_destroy(part->writeback);
    kvf_transfer_close(part->transfer);
    ops->event_destroy(part->placed);
    ops->event_destroy(part->chosen);
    ops->event_destroy(part->written);
    ops->event_destroy(part->sealed);
    kvf_residency_destroy(&part->residency);
    kvf_page_pool_destroy(&part->pool);
}
