/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Reserves, clears and addresses the tables of residency; the resolve kernel changes them.
 *
 * Knows nothing of heads or sequences: a list is a number. Clearing is one fill per table, because
 * both are -1 bytes throughout.
 */

#include "residency.h"

#include <string.h>

static void carve(kvf_residency *r, kvf_carver *tables, kvf_carver *slots)
{
    KVF_CARVE(tables, r->slot_of_page, r->lists, r->pages_max);
    KVF_CARVE(tables, r->page_of_slot, r->lists, r->slots);
    KVF_CARVE(slots, r->slot_memory, r->lists, r->slots, r->slot_bytes);
}

void kvf_residency_needs(uint32_t lists, uint32_t pages_max, uint32_t slots, size_t slot_bytes,
                         kvf_carver *tables, kvf_carver *slot_memory)
{
    kvf_residency r = {
        .lists = lists, .pages_max = pages_max, .slots = slots, .slot_bytes = slot_bytes};
    carve(&r, tables, slot_memory);
}

static kvf_status take(kvf_residency *r)
{
    const kvf_device_ops *ops = r->device->ops;
    kvf_carver tables = {0}, slots = {0};
    void *base = NULL;
    carve(r, &tables, &slots);
    KVF_TRY(ops->memory_alloc(r->device, tables.bytes, &base));
    r->tables = base;
    if (slots.bytes) {
        KVF_TRY(ops->memory_alloc(r->device, slots.bytes, &base));
        r->slot_memory = base;
    }
    carve(r, &(kvf_carver){.base = r->tables}, &(kvf_carver){.base = r->slot_memory});
    return KVF_OK;
}

kvf_status kvf_residency_create(kvf_device *device, uint32_t lists, uint32_t pages_max,
                                uint32_t slots, size_t slot_bytes, kvf_residency *out)
{
    memset(out, 0, sizeof *out);
    if (lists == 0 || pages_max == 0 || slots == 0 || pages_max > INT32_MAX || slots > INT32_MAX)
        KVF_FAIL(device->context, KVF_INVALID,
                 "residency of %u lists, %u pages, %u slots: each must be 1 to %d", lists,
                 pages_max, slots, INT32_MAX);
    kvf_residency r = {.device = device,
                       .lists = lists,
                       .pages_max = pages_max,
                       .slots = slots,
                       .slot_bytes = slot_bytes};
    kvf_stream *stream = NULL;
    kvf_status status = take(&r);
    if (status == KVF_OK)
        status = device->ops->stream_create(device, KVF_PRIORITY_NORMAL, &stream);
    if (status == KVF_OK)
        status = kvf_residency_clear(&r, 0, lists, stream);
    if (status == KVF_OK)
        status = device->ops->stream_wait(stream);
    device->ops->stream_destroy(stream);
    if (status != KVF_OK) {
        kvf_residency_destroy(&r);
        return status;
    }
    *out = r;
    return KVF_OK;
}

void kvf_residency_destroy(kvf_residency *residency)
{
    if (!residency || !residency->device)
        return;
    kvf_device *device = residency->device;
    device->ops->memory_free(device, residency->slot_memory);
    device->ops->memory_free(device, residency->tables);
    memset(residency, 0, sizeof *residency);
}

kvf_status kvf_residency_clear(kvf_residency *residency, uint32_t first, uint32_t count,
                               kvf_stream *stream)
{
    KVF_ASSERT(first <= residency->lists && count <= residency->lists - first);
    const kvf_device_ops *ops = residency->device->ops;
    KVF_TRY(ops->fill(stream, residency->slot_of_page + (size_t)first * residency->pages_max, 0xff,
                      (size_t)count * residency->pages_max * sizeof(int32_t)));
    return ops->fill(stream, residency->page_of_slot + (size_t)first * residency->slots, 0xff,
                     (size_t)count * residency->slots * sizeof(int32_t));
}

int32_t *kvf_residency_slot_of_page(const kvf_residency *residency, uint32_t list)
{
    KVF_ASSERT_DEBUG(list < residency->lists);
    return residency->slot_of_page + (size_t)list * residency->pages_max;
}

int32_t *kvf_residency_page_of_slot(const kvf_residency *residency, uint32_t list)
{
    KVF_ASSERT_DEBUG(list < residency->lists);
    return residency->page_of_slot + (size_t)list * residency->slots;
}

void *kvf_residency_slot(const kvf_residency *residency, uint32_t list, int32_t slot)
{
    KVF_ASSERT_DEBUG(list < residency->lists && slot >= 0 && (uint32_t)slot < residency->slots);
    if (!residency->slot_memory)
        return NULL;
    return residency->slot_memory +
           ((size_t)list * residency->slots + (size_t)slot) * residency->slot_bytes;
}

bool kvf_residency_is_valid(const kvf_residency *residency, const int32_t *slot_of_page,
                            const int32_t *page_of_slot)
{
    for (uint32_t s = 0; s < residency->slots; s++) {
        int32_t page = page_of_slot[s];
        if (page >= 0 &&
            ((uint32_t)page >= residency->pages_max || slot_of_page[page] != (int32_t)s))
            return false;
    }
    for (uint32_t p = 0; p < residency->pages_max; p++) {
        int32_t slot = slot_of_page[p];
        if (slot >= 0 && ((uint32_t)slot >= residency->slots || page_of_slot[slot] != (int32_t)p))
            return false;
    }
    return true;
}
