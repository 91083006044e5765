/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_OFFLOAD_RESIDENCY_H
#define KVF_OFFLOAD_RESIDENCY_H

/*
 * Which pages sit in which slots, for `lists` independent lists of pages (one per sequence, layer,
 * KV head).
 *
 * All of it lives on the device and is changed there, by the resolve kernel; this file only
 * reserves, clears and copies the tables. Slots without bytes (`slot_bytes` 0, for `direct`) still
 * keep the tables, so that hits and misses mean the same with every transfer method.
 *
 * Invariant, per list: page_of_slot[s] == p >= 0  <=>  slot_of_page[p] == s.
 */

#include "common/carve.h"
#include "device.h"

typedef struct kvf_residency {
    kvf_device *device;
    uint32_t lists;
    uint32_t pages_max; /* per list */
    uint32_t slots;     /* per list */
    size_t slot_bytes;
    char *tables;
    int32_t *slot_of_page; /* device [lists, pages_max] */
    int32_t *page_of_slot; /* device [lists, slots] */
    char *slot_memory;     /* device [lists, slots, slot_bytes]; NULL if slot_bytes == 0 */
} kvf_residency;

KVF_CHECKED kvf_status kvf_residency_create(kvf_device *device, uint32_t lists, uint32_t pages_max,
                                            uint32_t slots, size_t slot_bytes, kvf_residency *out);
void kvf_residency_destroy(kvf_residency *residency);
/* Added to what it will take in device memory. */
void kvf_residency_needs(uint32_t lists, uint32_t pages_max, uint32_t slots, size_t slot_bytes,
                         kvf_carver *tables, kvf_carver *slot_memory);

/* Forget what lists first .. first+count-1 hold, in stream order. */
KVF_CHECKED kvf_status kvf_residency_clear(kvf_residency *residency, uint32_t first, uint32_t count,
                                           kvf_stream *stream);

int32_t *kvf_residency_slot_of_page(const kvf_residency *residency, uint32_t list);
int32_t *kvf_residency_page_of_slot(const kvf_residency *residency, uint32_t list);
void *kvf_residency_slot(const kvf_residency *residency, uint32_t list, int32_t slot);

/* Walks the tables of one list, copied to where the caller can read them: whether the invariant
 * holds.
 */
bool kvf_residency_is_valid(const kvf_residency *residency, const int32_t *slot_of_page,
                            const int32_t *page_of_slot);

#endif
