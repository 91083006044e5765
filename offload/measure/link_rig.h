/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVF_OFFLOAD_LINK_RIG_H
#define KVF_OFFLOAD_LINK_RIG_H

/*
 * What the files of the link bench share: the pool with its pattern, and the rig of one case.
 *
 * Only link_*.c include this. Invariant: slot i of the rig belongs to entry i of the list that was
 * written last; where it lies is `slot_of[i]`, fixed for a case.
 */

#include "link_measure.h"
#include "transfer.h"

struct kvf_link {
    kvf_device *device;
    kvf_link_bench_config config;
    kvf_host_memory pool; /* arenas of whole MiB */
    uint64_t pool_bytes;  /* that the pool was made for; 0 = none */
    int32_t pool_node;
    kvf_huge_pages pool_huge_pages;
};

/* Compute of a known length: dense attention of a few tokens, once or often. */
typedef struct kvf_link_compute {
    kvf_prefill_kernel_args args;
    void *q, *pages, *out, *blocks; /* device */
    uint32_t launches;              /* that take about the length asked for */
} kvf_link_compute;

typedef struct kvf_link_rig {
    kvf_link *bench;
    const kvf_link_case *c;
    kvf_device *device;
    const kvf_device_ops *ops;
    kvf_stream *stream;      /* of the caller */
    kvf_stream *back_stream; /* of write-back, low priority */
    kvf_event *begin, *end;
    kvf_transfer_engine *engine; /* NULL where the case needs none */
    uint64_t random;
    uint32_t lists; /* requests that are prepared at once: layers, or 1 */
    uint64_t pool_pages;
    uint32_t *ids;           /* [lists, pages] */
    uint32_t *slot_of;       /* [pages] */
    char *slots;             /* device [pages, page_bytes] */
    const void **from;       /* device [lists, pages] */
    void **to;               /* device [pages] */
    uint32_t *count;         /* device [1] */
    kvf_host_memory control; /* what is copied to from, to and count; then room to compare in */
    char *back_from;         /* device, of write-back; NULL without */
    kvf_host_memory back_to;
    uint64_t back_bytes;                                /* per repetition */
    uint64_t *total, *copying, *gather, *fetch, *alone; /* [repetitions], fetch [x layers] */
    kvf_link_compute compute;
} kvf_link_rig;

/* ---- link_pages.c ---- */

KVF_CHECKED kvf_status kvf_link_pool_make(kvf_link *bench, const kvf_link_case *c);
void kvf_link_pool_drop(kvf_link *bench);
uint64_t kvf_link_pool_pages(const kvf_link *bench, size_t page_bytes);
/* Where page `id` lies, on which side, and its offset for kvf_link_word. */
char *kvf_link_page_host(const kvf_link *bench, size_t page_bytes, uint32_t id);
char *kvf_link_page_device(const kvf_link *bench, size_t page_bytes, uint32_t id);
uint64_t kvf_link_page_offset(const kvf_link *bench, size_t page_bytes, uint32_t id);

/* Choose ids[pages] by the case's pattern. */
void kvf_link_choose(const kvf_link_case *c, uint64_t pool_pages, uint64_t *random, uint32_t *ids);

/* ---- link_rig.c ---- */

KVF_CHECKED kvf_status kvf_link_rig_open(kvf_link_rig *rig);
void kvf_link_rig_close(kvf_link_rig *rig);
/* Choose pages for all lists and bring the lists to the device; waits. */
KVF_CHECKED kvf_status kvf_link_rig_prepare(kvf_link_rig *rig);
/* Submit list `l` and join it, on the rig's stream or another. */
KVF_CHECKED kvf_status kvf_link_rig_fetch(kvf_link_rig *rig, uint32_t l, kvf_stream *stream);
/* Enqueue the write-back of one repetition. */
KVF_CHECKED kvf_status kvf_link_rig_write_back(kvf_link_rig *rig);
/* Make every slot wrong, so that what is right afterwards was brought. */
KVF_CHECKED kvf_status kvf_link_rig_spoil(kvf_link_rig *rig);
/* Compare all slots with the pages of list `l`; KVF_CORRUPT names the first wrong one. */
KVF_CHECKED kvf_status kvf_link_rig_verify(kvf_link_rig *rig, uint32_t l, uint64_t *bytes);

KVF_CHECKED kvf_status kvf_link_compute_open(kvf_link_rig *rig, uint64_t length_ns);
KVF_CHECKED kvf_status kvf_link_compute_enqueue(kvf_link_rig *rig, kvf_stream *stream);

/* ---- link_cases.c ---- */

KVF_CHECKED kvf_status kvf_link_run(kvf_link_rig *rig, kvf_link_result *result);

#endif
