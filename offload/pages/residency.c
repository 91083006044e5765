/* SPDX-License-Identifier: Apache-2.0 */

/*
 * Reserves and clears the device cache of pages.
 *
 * Knows nothing of layers or sequences: a page is a number. Clearing is one fill, because no page
 * and no slot are all ones throughout.
 */

#include "page_pool.h"

#include <string.h>

#include "slots.h"

static void carve(kvf_residency *r, kvf_carver *tables, kvf_carver *slots)
{
    KVF_CARVE(tables, r->slot_of_page, r->heads, r->pages);
    KVF_CARVE(tables, r->words, r->heads, r->slots);
    KVF_CARVE(tables, r->tags, r->is_tagged ? r->heads : 0, r->slots);
    KVF_CARVE(slots, r->slot_memory, r->heads, r->slots, r->slot_bytes);
}

void kvf_residency_needs(const kvf_residency *shape, kvf_carver *tables, kvf_carver *slot_memory)
{
    kvf_residency r = *shape;
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

kvf_status kvf_residency_create(const kvf_residency *shape, kvf_residency *out)
{
    kvf_device *device = shape->device;
    kvf_residency r = *shape;
    kvf_stream *stream = NULL;
    memset(out, 0, sizeof *out);
    KVF_ASSERT(r.heads > 0 && r.pages > 0 && r.pages <= KVF_SLOT_PAGES_MAX);
    KVF_ASSERT(r.slots > 0 && r.slots <= KVF_SLOT_PAGES_MAX && r.slots % KVF_SLOT_WAYS == 0);
    kvf_status status = take(&r);
    if (status == KVF_OK)
        status = device->ops->stream_create(device, KVF_PRIORITY_NORMAL, &stream);
    if (status == KVF_OK)
        status = kvf_residency_clear(&r, stream);
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

kvf_status kvf_residency_clear(const kvf_residency *residency, kvf_stream *stream)
{
    kvf_carver tables = {0}, slots = {0};
    kvf_residency_needs(residency, &tables, &slots);
    return residency->device->ops->fill(stream, residency->tables, 0xff, tables.bytes);
}

bool kvf_residency_is_valid(const kvf_residency *residency, const int32_t *slot_of_page,
                            const uint64_t *words)
{
    for (uint32_t s = 0; s < residency->slots; s++)
        if (words[s] != KVF_SLOT_FREE && (kvf_slot_page(words[s]) >= residency->pages ||
                                          slot_of_page[kvf_slot_page(words[s])] != (int32_t)s))
            return false;
    for (uint32_t p = 0; p < residency->pages; p++) {
        const int32_t slot = slot_of_page[p];
        if (slot != -1 &&
            (slot < 0 || (uint32_t)slot >= residency->slots || !kvf_slot_is_of(words[slot], p)))
            return false;
    }
    return true;
}
