/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_OFFLOAD_RESIDENCY_H
#define KVF_OFFLOAD_RESIDENCY_H

/*
 * The device cache of pages of a pool: per KV head, which pages have a copy in which slots.
 *
 * All of it lives on the device and is changed there, by the kernels resolve and admit (slots.h
 * says how); this file only reserves and clears it. Slots without bytes (`slot_bytes` 0, for
 * `direct`) still keep the tables, so that hits and misses mean the same with every transfer
 * method.
 *
 * Invariant between calls, per head: words[s] is of page p  <=>  slot_of_page[p] == s.
 */

#include "common/carve.h"
#include "device.h"

typedef struct kvf_residency {
    kvf_device *device;
    uint32_t heads;
    uint32_t pages;     /* of the pool, per head */
    uint32_t slots;     /* per head, a multiple of KVF_SLOT_WAYS */
    uint32_t is_tagged; /* 1: tokens may be written again */
    size_t slot_bytes;
    uint32_t clock; /* number of the latest call */
    char *tables;
    int32_t *slot_of_page; /* device [heads, pages] */
    uint64_t *words;       /* device [heads, slots] */
    uint32_t *tags;        /* device [heads, slots]; NULL unless tagged */
    char *slot_memory;     /* device [heads, slots, slot_bytes]; NULL if slot_bytes == 0 */
} kvf_residency;

/* Reserves what `shape` says; its addresses are not looked at. */
KVF_CHECKED kvf_status kvf_residency_create(const kvf_residency *shape, kvf_residency *out);
void kvf_residency_destroy(kvf_residency *residency);
/* Added to what it will take in device memory. */
void kvf_residency_needs(const kvf_residency *shape, kvf_carver *tables, kvf_carver *slot_memory);

/* Forget everything, in stream order. */
KVF_CHECKED kvf_status kvf_residency_clear(const kvf_residency *residency, kvf_stream *stream);

/* Walks the tables of one head, copied to where the caller can read them: whether the invariant
 * holds. */
bool kvf_residency_is_valid(const kvf_residency *residency, const int32_t *slot_of_page,
                            const uint64_t *words);

#endif
